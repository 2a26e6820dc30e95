"""Records of many ranks made one, on every rank.

    merge_traces      tokens of all ranks, in order of rank
    merge_layers      layers of all ranks, in order of rank, of the same tokens

Records travel as their own files: safetensors and JSON, no pickle.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from tieline.core.errors import TraceError, require
from tieline.core.processes import gathered
from tieline.trace.record import RoutingTrace, concatenate
from tieline.trace.store import load_trace, save_trace


def merge_traces(trace: RoutingTrace | None) -> RoutingTrace:
    """Merge the tokens of all ranks, in order of rank; a rank without tokens passes None."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "own"
        if trace is not None:
            save_trace(trace, local)
        merged = concatenate([load_trace(path) for path in _rank_folders(local, Path(folder))])
        return replace(merged, layers=tuple(merged.layers))  # read while the files are there


def merge_layers(trace: RoutingTrace) -> RoutingTrace:
    """Put the layers of all ranks, which saw the same tokens, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "own"
        save_trace(trace, local)
        traces = [load_trace(path) for path in _rank_folders(local, Path(folder))]
        return replace(traces[0], layers=tuple(layer for shard in traces for layer in shard.layers))


def _rank_folders(local: Path, folder: Path) -> list[Path]:
    """Return folders with the files of each rank that has any, in order of rank."""
    if not dist.is_initialized():
        return [local]
    folders = []
    for rank, data in enumerate(gathered(_packed(local))):
        if data:
            folders.append(folder / f"rank-{rank}")
            _unpack(data, folders[-1])
    require(bool(folders), "no rank has captured a token", TraceError)
    return folders


def _packed(folder: Path) -> bytes:
    """Pack the files of a folder: one line of JSON with their sizes, then their bytes."""
    if not folder.is_dir():
        return b""
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    sizes = json.dumps({name: len(data) for name, data in contents.items()})
    return b"\n".join([sizes.encode(), b"".join(contents.values())])


def _unpack(data: bytes, folder: Path) -> None:
    line, _, rest = data.partition(b"\n")
    folder.mkdir()
    for name, size in json.loads(line).items():
        (folder / Path(name).name).write_bytes(rest[:size])
        rest = rest[size:]
