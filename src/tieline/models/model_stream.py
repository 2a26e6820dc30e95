"""Models whose weights are read when they are needed: open one, and save one that was changed.

    stream = open_stream(folder, read)           the skeleton, and where its weights are
    StreamedModel(stream).save_pretrained(new)   its files without a copy of the weights

Whether a model is streamed unasked is decided by its size in the precision that it computes in,
against the memory that is free: that of the machine, or of the control group of this process.
`run.lockstep` brings passes through a streamed model.
"""

import copy
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from transformers import PreTrainedModel

from tieline.core.errors import StreamingWarning
from tieline.core.setting_fields import require_setting
from tieline.models.expert_groups import Change, ExpertGroups, plan_groups
from tieline.models.hub import FetchedShards, _hub_location, hub_shards
from tieline.models.precision import stored_in
from tieline.models.saved_models import VARIANT
from tieline.models.shards import INDEX, open_shards
from tieline.models.stream_weights import Weights, open_skeleton

NOT_WEIGHTS = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack"]
"""Files that are not fetched with the configuration."""

USABLE = 0.9
"""Part of the free memory that weights may take: the rest is for what they compute."""

FLOATS = ("F64", "F32", "F16", "BF16")

GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
GROUP_USED = Path("/sys/fs/cgroup/memory.current")


class ModelStream:
    """A model whose weights are read when they are needed.

    Attributes:
        model: the model, its weights on the meta device between runs.
        weights: where they come from.
        groups: experts that are read in groups, by unit.
        first: name of the unit of the embeddings; None without one.
        head: name of the unit of the output head; None without one.
    """

    def __init__(
        self, model: PreTrainedModel, weights: Weights, groups: dict[str, ExpertGroups]
    ) -> None:
        """Stream `model` from `weights`, the experts of some units in groups."""
        self.model, self.weights, self.groups = model, weights, groups
        self.first = self._unit_named(model.get_input_embeddings())
        self.head = self._unit_named(model.get_output_embeddings())

    def _unit_named(self, module: Any) -> str | None:
        """Name of the unit that is this module; None if it is none."""
        return next((n for n, unit in self.weights.units.items() if unit is module), None)

    @property
    def size(self) -> int:
        """Bytes on disk that a run without the head reads, as far as can be told before."""
        names = [name for name in self.weights.units if name != self.head]
        return sum(self.weights.stored(name) for name in names)

    def resident(self, unit: str) -> int:
        """Bytes of memory that the weights of a unit take while they are there."""
        groups = self.groups.get(unit)
        size = self.weights.size(unit)
        return size if groups is None else size - groups.left_out

    @contextmanager
    def changed_experts(self, change: Change) -> Iterator[None]:
        """Inside the block, experts that are read in groups are what `change` makes of them."""
        with ExitStack() as stack:
            for groups in self.groups.values():
                stack.enter_context(groups.changed(change))
            yield


def free_memory() -> int:
    """Bytes that can be allocated here; a very large number where nothing tells."""
    limits = []
    for line in _file_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) << 10)
    limit, used = _file_lines(GROUP_LIMIT), _file_lines(GROUP_USED)
    if limit and used and limit[0].isdigit():
        limits.append(int(limit[0]) - int(used[0]))
    return min(limits, default=1 << 62)


def _file_lines(path: Path) -> list[str]:
    """Lines of a file of the system; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def resident_memory() -> int:
    """Bytes of memory that this process takes; 0 where nothing tells."""
    for line in _file_lines(Path("/proc/self/status")):
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def too_large(source: str | Path, dtype: str | torch.dtype) -> bool:
    """Whether the weights in a folder exceed the free memory; says so if they do.

    Args:
        source: a folder; of a hub id nothing is known before its files are here.
        dtype: precision that they are loaded in; "auto" for that of the files.
    """
    if not isinstance(source, Path) or not (source / INDEX).is_file():
        return False
    shards = open_shards(source)
    width = dtype.itemsize if isinstance(dtype, torch.dtype) else 0
    needed = sum(
        stored.size
        if not width or stored.kind not in FLOATS
        else stored.size // stored.dtype.itemsize * width
        for stored in shards.tensors.values()
    )
    free = free_memory()
    if needed <= USABLE * free:
        return False
    warnings.warn(
        f"streaming: the weights need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are "
        "free; they are read layer by layer",
        StreamingWarning,
        stacklevel=4,
    )
    return True


def open_stream(
    source: str | Path,
    read: Callable[..., Any],
    *,
    revision: str | None = None,
    memory: int | None = None,
    keep: bool = True,
    copies: int = 1,
) -> ModelStream:
    """Open a model to be streamed.

    Args:
        source: folder or hub id.
        read: loads the model of a folder by `from_pretrained`.
        revision: branch, tag or commit on the hub.
        memory: bytes that may be taken, by default what is free.
        keep: whether files that are fetched stay.
        copies: how often the weights of a layer are in memory at once.
    """
    if isinstance(source, Path):
        require_setting(
            keep,
            "only files that are fetched from the hub can be dropped: leave {keep_downloads} on",
        )
        files = lambda names: open_shards(source, [Path(name).name for name in names])  # noqa: E731
        model, weights = open_skeleton(lambda: read(source, local_files_only=True), files)
    else:
        folder = Path(
            huggingface_hub.snapshot_download(
                source, revision=revision, ignore_patterns=NOT_WEIGHTS, **_hub_location()
            )
        )
        shards = hub_shards(source, folder, revision, keep)
        model, weights = open_skeleton(
            lambda: read(folder, local_files_only=True), lambda names: shards
        )
    taken = resident_memory()
    budget = taken + free_memory() if memory is None else memory
    return ModelStream(model, weights, plan_groups(model, weights, budget, taken, copies))


class StreamedModel:
    """A streamed model that was changed in its configuration alone, to be saved.

    Its files are linked where the new folder is on the same disk, and copied elsewhere, in the
    precision that they are stored in.
    """

    def __init__(self, stream: ModelStream) -> None:
        """Save the model of this stream."""
        self._stream = stream

    def save_pretrained(self, folder: str | Path) -> None:
        """Write configuration, index and weights into a folder that is there."""
        model, shards = self._stream.model, self._stream.weights.shards
        kept = not isinstance(shards, FetchedShards) or shards.keep
        require_setting(
            kept, "the files of the model were not kept ({keep_downloads}): it cannot be saved"
        )
        config: Any = copy.deepcopy(model.config)
        config.dtype = stored_in(model) or config.dtype
        config.architectures = config.architectures or [type(model).__name__]
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        files = sorted({stored.file for stored in shards.tensors.values()})
        names = {file: _shard_name(number, len(files)) for number, file in enumerate(files, 1)}
        for file, name in names.items():
            _link_or_copy(shards.path(file).resolve(), Path(folder) / name)
        if len(files) > 1:
            weight_map = {tensor: names[stored.file] for tensor, stored in shards.tensors.items()}
            index = {"metadata": {"total_size": shards.size}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (Path(folder) / f"model.safetensors.index.{VARIANT}.json").write_text(text)


def _shard_name(number: int, count: int) -> str:
    """Name of a file of weights of a changed model."""
    if count == 1:
        return f"model.{VARIANT}.safetensors"
    return f"model.{VARIANT}-{number:05d}-of-{count:05d}.safetensors"


def _link_or_copy(source: Path, target: Path) -> None:
    """Link a file, or copy it where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
