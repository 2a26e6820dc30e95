"""Models whose weights are read when they are needed: open one, and save one that was changed.

    stream = open_stream(folder, read)           the skeleton, and where its weights are
    StreamedModel(stream).save_pretrained(new)   its files without a copy of the weights

Whether a model is streamed unasked is decided by its size in the precision that it computes in,
against the memory that is free: that of the machine, or of the control group of this process.
`run.streamed_passes` brings passes through a streamed model.

A layer larger than its memory has its experts read in groups (`ExpertGroups`). The eager experts of
transformers take the weights of the chosen experts one by one, in ascending order, by index. Here
they are read when they are indexed: a pass that comes to an expert outside the group in memory
waits for its group, and every batch makes its own products and sums, in their own order.
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
from torch import Tensor, nn
from transformers import PreTrainedModel

from tieline.core.errors import ParameterError, StreamingWarning, require
from tieline.core.memory import free_memory, resident_memory
from tieline.core.setting_fields import require_setting
from tieline.core.untrusted_input import INDEX
from tieline.models.experts import FLAG
from tieline.models.hub import FetchedShards, _hub_location, hub_shards
from tieline.models.number_formats import stored_precision
from tieline.models.saved_models import VARIANT
from tieline.models.shards import open_shards
from tieline.models.stream_weights import ExpertStack, Weights, open_skeleton

USED = 0.75
"""Part of a memory budget for weights: the rest is for what is computed with them."""

Change = Callable[[nn.Module, Tensor], Tensor]
"""Makes other weights (experts, rows, columns) of those of a module."""


class LazyExperts:
    """Stands for a parameter (experts, rows, columns) that is indexed by one expert."""

    def __init__(self, groups: "ExpertGroups", meta: Tensor, number: int) -> None:
        """Stand for the parameter `meta`, stack `number` of `groups`."""
        self._groups, self._meta, self._number = groups, meta, number

    def __getitem__(self, expert: Tensor | int) -> Tensor:
        """The weights of one expert, once they are there."""
        return self._groups.weights_of(int(expert), self._number)

    def __getattr__(self, name: str) -> object:
        """Shape, type and so on are those of the parameter."""
        return getattr(self._meta, name)

    def __len__(self) -> int:
        """Number of experts."""
        return len(self._meta)


class ExpertGroups:
    """The experts of one unit, some of which are in memory.

    Attributes:
        unit: name of the unit.
        count: experts that are in memory at once.
        stacks: parameters that are read in groups.
        obtain: brings a group into memory for whoever indexes an expert of it; by default reads it.
            `run.streamed_passes` lets passes wait for the group instead.
    """

    def __init__(self, weights: Weights, unit: str, count: int) -> None:
        """Read `count` experts of `unit` at a time."""
        self._weights, self.unit, self.count = weights, unit, count
        self.stacks = [s for s in weights.plans[unit].stacks if can_group_experts(weights, s)]
        self._rooms: list[Tensor] = []
        self._changed: list[Tensor] = []
        self._group: int | None = None
        self.obtain: Callable[[int], None] = self.read_group

    @property
    def targets(self) -> frozenset[str]:
        """Names of the parameters that are read in groups."""
        return frozenset(stack.target for stack in self.stacks)

    @property
    def left_out(self) -> int:
        """Bytes of experts that are not in memory at the same time."""
        experts = len(self._weights.meta[self.stacks[0].target])
        total = sum(_stack_bytes(self._weights, stack) for stack in self.stacks)
        return total - total * min(self.count, experts) // experts

    def install(self) -> None:
        """Replace the parameters by stand-ins."""
        for number, stack in enumerate(self.stacks):
            module, leaf = self._module(stack)
            module.__dict__[leaf] = LazyExperts(self, self._weights.meta[stack.target], number)

    def remove(self) -> None:
        """Remove the stand-ins and free their memory."""
        for stack in self.stacks:
            module, leaf = self._module(stack)
            module.__dict__.pop(leaf, None)
        self._rooms, self._group = [], None

    def _module(self, stack: ExpertStack) -> tuple[nn.Module, str]:
        path, _, leaf = stack.target.rpartition(".")
        return self._weights.model.get_submodule(path), leaf

    def weights_of(self, expert: int, stack: int) -> Tensor:
        """Return an expert's weights in one stack, once its group is in memory."""
        group = expert // self.count
        while group != self._group:
            self.obtain(group)
        return (self._changed or self._rooms)[stack][expert - group * self.count]

    @contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        """Inside the block, the experts in memory are what `change` makes of them."""
        self._changed = [
            change(self._module(stack)[0], room)
            for stack, room in zip(self.stacks, self._rooms, strict=False)
        ]
        try:
            yield
        finally:
            self._changed = []

    def read_group(self, group: int) -> None:
        """Read a group into the memory of the one before."""
        first, total = group * self.count, len(self._weights.meta[self.stacks[0].target])
        if not self._rooms:
            self._rooms = [self._room(stack) for stack in self.stacks]
        for stack, room in zip(self.stacks, self._rooms, strict=True):
            self._weights.fill(stack, room[: min(self.count, total - first)], first)
        self._group = group
        following = range(first + self.count, min(first + 2 * self.count, total))
        keys = [
            key
            for stack in self.stacks
            for part in stack.parts
            for expert in following
            for key in (part.keys[expert], *part.scales[expert : expert + 1])
        ]
        self._weights.shards.prefetch(keys)

    def _room(self, stack: ExpertStack) -> Tensor:
        meta = self._weights.meta[stack.target]
        shape = (min(self.count, len(meta)), *meta.shape[1:])
        return torch.empty(shape, dtype=self._weights.dtype(stack.target), device="cpu")


def can_group_experts(weights: Weights, stack: ExpertStack) -> bool:
    """Whether the experts of a stack are taken one by one, as those with the flag are."""
    module = weights.model.get_submodule(stack.target.rpartition(".")[0])
    return hasattr(module, FLAG)


def plan_groups(
    model: PreTrainedModel, weights: Weights, memory: int, taken: int, copies: int = 1
) -> dict[str, ExpertGroups]:
    """The units whose experts are read in groups, so that all fit into the memory.

    Args:
        model: the model, whose experts become the eager ones if any are grouped.
        weights: where its weights are.
        memory: bytes that the process may take.
        taken: bytes that it takes already.
        copies: how often the weights in memory are there at once.
    """
    room, grouped, least = (USED * memory - taken) / copies, {}, [("", 0)]
    for unit in weights.units:
        stacks = [s for s in weights.plans[unit].stacks if can_group_experts(weights, s)]
        total, in_stacks = weights.size(unit), sum(_stack_bytes(weights, s) for s in stacks)
        experts = len(weights.meta[stacks[0].target]) if stacks else 1
        rest, each = total - in_stacks, in_stacks // experts
        least.append((unit, rest + each))
        if total > room and stacks:
            count = int((room - rest) // max(1, each))
            grouped[unit] = ExpertGroups(weights, unit, max(1, min(count, experts)))
    unit, size = max(least, key=lambda pair: pair[1])
    needed = (copies * size + taken) / USED
    require(
        needed <= memory,
        f"memory of {memory / 1e9:.1f} GB is too small: {unit!r} is read as one and takes "
        f"{copies * size / 1e9:.2f} GB, beside {taken / 1e9:.2f} GB of the process and what is "
        f"computed; give at least {needed / 1e9 + 0.05:.1f}G",
        ParameterError,
    )
    if grouped:
        model.set_experts_implementation("eager")
    return grouped


def _stack_bytes(weights: Weights, stack: ExpertStack) -> int:
    """Bytes of a stack of experts in memory."""
    return weights.meta[stack.target].numel() * weights.dtype(stack.target).itemsize


NOT_WEIGHTS = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack"]
"""Files that are not fetched with the configuration."""

USABLE = 0.9
"""Part of the free memory that weights may take: the rest is for what they compute."""

FLOATS = ("F64", "F32", "F16", "BF16")


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

    @property
    def largest(self) -> int:
        """Bytes of memory that the largest unit takes."""
        return max(map(self.resident, self.weights.units))

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


def exceeds_free_memory(source: str | Path, dtype: str | torch.dtype) -> bool:
    """Return whether the weights in a folder exceed the free memory; if so, warns of streaming.

    Args:
        source: a folder; anything else, such as a hub id, returns False.
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
        has_files = not isinstance(shards, FetchedShards) or shards.keep
        require_setting(
            has_files, "the files of the model were not kept ({keep_downloads}): it cannot be saved"
        )
        config: Any = copy.deepcopy(model.config)
        config.dtype = stored_precision(model) or config.dtype
        config.architectures = config.architectures or [type(model).__name__]
        config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        files = sorted({stored.file for stored in shards.tensors.values()})
        names = {files[0]: f"model.{VARIANT}.safetensors"}
        if len(files) > 1:
            name = f"model.{VARIANT}-{{:05d}}-of-{len(files):05d}.safetensors"
            names = {file: name.format(number) for number, file in enumerate(files, 1)}
        for file, name in names.items():
            path, target = shards.path(file).resolve(), Path(folder) / name
            try:
                os.link(path, target)
            except OSError:  # another disk, or one without links
                shutil.copyfile(path, target)
        if len(files) > 1:
            weight_map = {tensor: names[stored.file] for tensor, stored in shards.tensors.items()}
            index = {"metadata": {"total_size": shards.size}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (Path(folder) / f"model.safetensors.index.{VARIANT}.json").write_text(text)
