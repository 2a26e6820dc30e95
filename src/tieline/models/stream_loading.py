"""Open a model to be streamed: from a folder, or from the hub file by file.

Whether a model is streamed unasked is decided by its size in the precision that it computes in,
against the memory that is free: that of the machine, or of the control group of this process.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from tieline.core.errors import StreamingWarning, UnsupportedModelError, require
from tieline.models.expert_groups import plan_groups
from tieline.models.shards import (
    INDEX,
    FetchedShards,
    Shards,
    open_shards,
    parse_header,
    shard_names,
)
from tieline.models.stream_weights import skeleton
from tieline.models.streaming import ModelStream

NOT_WEIGHTS = ["*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack"]
"""Files that are not fetched with the configuration."""

USABLE = 0.9
"""Part of the free memory that weights may take: the rest is for what they compute."""

FLOATS = ("F64", "F32", "F16", "BF16")

GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
GROUP_USED = Path("/sys/fs/cgroup/memory.current")


def free_memory() -> int:
    """Bytes that can be allocated here; a very large number where nothing tells."""
    limits = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) << 10)
    limit, used = _lines(GROUP_LIMIT), _lines(GROUP_USED)
    if limit and used and limit[0].isdigit():
        limits.append(int(limit[0]) - int(used[0]))
    return min(limits, default=1 << 62)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def resident_memory() -> int:
    """Bytes of memory that this process takes; 0 where nothing tells."""
    for line in _lines(Path("/proc/self/status")):
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
        require(
            keep, "only files that are fetched from the hub can be dropped: leave out --no-keep"
        )
        files = lambda names: open_shards(source, [Path(name).name for name in names])  # noqa: E731
        model, weights = skeleton(lambda: read(source, local_files_only=True), files)
    else:
        folder = Path(
            huggingface_hub.snapshot_download(
                source, revision=revision, ignore_patterns=NOT_WEIGHTS, **_place()
            )
        )
        shards = hub_shards(source, folder, revision, keep)
        model, weights = skeleton(lambda: read(folder, local_files_only=True), lambda names: shards)
    taken = resident_memory()
    budget = taken + free_memory() if memory is None else memory
    return ModelStream(model, weights, plan_groups(model, weights, budget, taken, copies))


def hub_shards(name: str, folder: Path, revision: str | None = None, keep: bool = True) -> Shards:
    """The files of a hub id, of which only headers are fetched now.

    Args:
        name: the hub id.
        folder: with its configuration and index.
        revision: branch, tag or commit.
        keep: whether a file stays once it was used.
    """
    require(
        (folder / INDEX).is_file(),
        f"{name!r} has no {INDEX}: a model in one file is loaded, not streamed",
        UnsupportedModelError,
    )
    client, headers = huggingface_hub.HfApi(endpoint=_place()["endpoint"]), {}
    for file in shard_names(folder):
        metadata = client.parse_safetensors_file_metadata(name, file, revision=revision)
        facts = {
            key: {"dtype": t.dtype, "shape": t.shape, "data_offsets": t.data_offsets}
            for key, t in metadata.tensors.items()
        }
        headers[file] = parse_header(file, facts, 0)  # places are known once the file is here

    def fetch(file: str) -> Path:
        return Path(huggingface_hub.hf_hub_download(name, file, revision=revision, **_place()))

    return FetchedShards(folder, headers, fetch, _remove, keep)


def _place() -> dict[str, Any]:
    """Where the hub and its cache are, as the environment says now."""
    return {"endpoint": os.environ.get("HF_ENDPOINT"), "cache_dir": os.environ.get("HF_HUB_CACHE")}


def _remove(path: Path) -> None:
    """Remove a file from the cache of the hub: the link to it and its content."""
    content = path.resolve()
    path.unlink(missing_ok=True)
    content.unlink(missing_ok=True)
