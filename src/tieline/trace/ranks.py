"""Records of many ranks made one, on every rank.

    merge_traces      tokens of all ranks, in order of rank
    merge_layers      layers of all ranks, in order of rank, of the same tokens
    merge_summaries   summaries of all ranks

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
from tieline.trace.store import load_summary, load_trace, save_summary, save_trace
from tieline.trace.summary import RoutingSummary, merge


def merge_traces(part: RoutingTrace | None) -> RoutingTrace:
    """Merge the tokens of all ranks, in order of rank; a rank without tokens passes None."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own"
        if part is not None:
            save_trace(part, own)
        found = concatenate([load_trace(path) for path in _everywhere(own, Path(folder))])
        return replace(found, layers=tuple(found.layers))  # read while the files are there


def merge_layers(part: RoutingTrace) -> RoutingTrace:
    """Put the layers of all ranks, which saw the same tokens, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own"
        save_trace(part, own)
        parts = [load_trace(path) for path in _everywhere(own, Path(folder))]
        return replace(parts[0], layers=tuple(layer for one in parts for layer in one.layers))


def merge_summaries(part: RoutingSummary | None) -> RoutingSummary:
    """Merge the summaries of all ranks; a rank without tokens passes None."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own"
        if part is not None:
            save_summary(part, own)
        return merge([load_summary(path) for path in _everywhere(own, Path(folder))])


def _everywhere(own: Path, folder: Path) -> list[Path]:
    """Return folders with the files of each rank that has any, in order of rank."""
    if not dist.is_initialized():
        return [own]
    found = []
    for rank, data in enumerate(gathered(_packed(own))):
        if data:
            found.append(folder / f"rank-{rank}")
            _unpack(data, found[-1])
    require(bool(found), "no rank has captured a token", TraceError)
    return found


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
