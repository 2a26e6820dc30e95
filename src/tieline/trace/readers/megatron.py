"""Routes in the traces of Megatron-Core: `router_trace_rank*.jsonl` and `logits_rank*.bin`.

A line is one layer in one step of one rank:

    step, rank, layer, num_tokens, topk, top_indices (num_tokens, topk)
    block ("decoder", "mtp"), mtp_idx
    logit_offset, logit_bytes, logit_shape (num_tokens, E)     bfloat16 in logits_rank{rank}.bin

Tokens are not recorded: each step of each rank is a document of its own. Heads that predict
further tokens (`block` "mtp") see other rows and are left out. Logits give gaps where they explain
the choice; with a correction bias or groups they do not, and are left out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tieline.core.errors import TraceError, parsing_file, require
from tieline.core.untrusted_input import require_readable
from tieline.trace.readers.array_files import MOST_JSON, array_in, json_lines
from tieline.trace.readers.routes import Request, Routes, assembled_routes

FILES = "router_trace_rank*.jsonl"
_NUMBERS = ("step", "rank", "layer", "num_tokens", "topk")


class _LayerStep(NamedTuple):
    """A layer in one step: ids, and logits where they were kept."""

    ids: np.ndarray
    logits: np.ndarray | None


def megatron_routes(path: str | Path) -> Routes:
    """Read the traces of all ranks in a folder, or of one rank in a file."""
    source = Path(path)
    files = sorted(source.glob(FILES), key=_rank_of_file) if source.is_dir() else [source]
    require(bool(files), f"{source}: has no {FILES}", TraceError)
    steps: dict[tuple[int, int], dict[int, _LayerStep]] = {}
    others = 0
    for file in files:
        others += _read_rank_trace(file, steps)
    require(bool(steps), f"{source}: has no records of a decoder", TraceError)
    layers = sorted({layer for step in steps.values() for layer in step})
    requests = [
        _megatron_step_request(step, layers, key, source) for key, step in sorted(steps.items())
    ]
    notes = [
        f"{len(requests)} steps of {len(files)} ranks, each a document; tokens are not recorded"
    ]
    if others:
        notes.append(f"{others} records of heads that predict further tokens are left out")
    routes = assembled_routes(requests, "megatron-trace", str(source), notes)
    return replace(
        routes,
        tokens=None,
        layer_names=tuple(f"layers.{layer}" for layer in layers),
        n_experts=None if routes.scores is None else routes.scores.shape[2],
    )


def _rank_of_file(file: Path) -> tuple[int, str]:
    """Sort key of a file: the rank in its name."""
    digits = re.search(r"rank(\d{1,9})", file.name)
    return (int(digits[1]) if digits else -1), file.name


def _read_rank_trace(file: Path, steps: dict[tuple[int, int], dict[int, _LayerStep]]) -> int:
    """Add the records of one rank; returns how many were left out."""
    others = 0
    require_readable(file)
    with parsing_file(file):
        for where, record in json_lines(file, MOST_JSON):
            has_choice = "top_indices" in record
            require(has_choice, f"{where}: needs an object with top_indices", TraceError)
            if record.get("block", "decoder") != "decoder":
                others += 1
                continue
            _add_megatron_record(steps, record, where, file.parent)
    return others


def _add_megatron_record(
    steps: dict[tuple[int, int], dict[int, _LayerStep]],
    record: Mapping[str, Any],
    where: str,
    folder: Path,
) -> None:
    """Add one line, the choice of a layer in a step, to the steps."""
    step, rank, layer, count, k = (
        _megatron_number(record.get(name), name, where) for name in _NUMBERS
    )
    ids = array_in(record["top_indices"], f"{where}: top_indices")
    fits = ids.shape == (count, k) and ids.dtype.kind in "iu"
    require(fits, f"{where}: top_indices must be ({count}, {k}), got {ids.shape}", TraceError)
    layers = steps.setdefault((rank, step), {})
    require(layer not in layers, f"{where}: layer {layer} of step {step} came already", TraceError)
    layers[layer] = _LayerStep(ids, _record_logits(record, count, rank, where, folder))


def _megatron_number(value: object, name: str, where: str) -> int:
    """A whole number >= 0 of a record."""
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise TraceError(f"{where}: {name} must be a whole number, got {value!r:.40}")
    return value


def _record_logits(
    record: Mapping[str, Any], count: int, rank: int, where: str, folder: Path
) -> np.ndarray | None:
    """The logits of a record as float32; None if none were kept."""
    if "logit_offset" not in record:
        return None
    offset, size = (
        _megatron_number(record.get(f"logit_{x}"), f"logit_{x}", where) for x in ("offset", "bytes")
    )
    shape: Any = record.get("logit_shape")
    valid = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int for n in shape)
    if not valid or shape[0] != count or shape[1] < 1 or shape[0] * shape[1] * 2 != size:
        raise TraceError(
            f"{where}: logit_shape {shape!r:.60} does not fit {size} bytes of bfloat16"
        )
    file = folder / f"logits_rank{rank}.bin"
    require(file.is_file(), f"{where}: {file.name} is missing beside it", TraceError)
    with file.open("rb") as stream:
        stream.seek(offset)
        data = stream.read(size)
    require(len(data) == size, f"{where}: {file.name} ends before byte {offset + size}", TraceError)
    halves = np.frombuffer(data, "<u2").astype(np.uint32) << 16
    return halves.view(np.float32).reshape(shape)


def _megatron_step_request(
    step: Mapping[int, _LayerStep], layers: Sequence[int], key: tuple[int, int], source: Path
) -> Request:
    """The rows of one step of one rank in all layers."""
    where = f"{source}: step {key[1]} of rank {key[0]}"
    missing = [layer for layer in layers if layer not in step]
    require(not missing, f"{where}: layers {missing[:5]} are missing", TraceError)
    shapes = {step[layer].ids.shape for layer in layers}
    require(len(shapes) == 1, f"{where}: layers of {sorted(shapes)[:4]} tokens and k", TraceError)
    logits = [step[layer].logits for layer in layers]
    recorded = [array for array in logits if array is not None]
    complete = len(recorded) == len(layers) and len({array.shape for array in recorded}) == 1
    scores = np.stack(recorded, 1) if complete else None
    return Request(np.stack([step[layer].ids for layer in layers], 1), scores=scores)
