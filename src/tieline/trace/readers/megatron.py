"""Read the traces of Megatron-Core: `router_trace_rank*.jsonl` and `logits_rank*.bin`.

Each line holds one layer in one step of one rank:

    step, rank, layer, num_tokens, topk, top_indices (num_tokens, topk)
    block ("decoder", "mtp"), mtp_idx
    logit_offset, logit_bytes, logit_shape (num_tokens, E)     bfloat16 in logits_rank{rank}.bin

Tokens are not recorded: each step of each rank is a document of its own. Heads that predict
further tokens (`block` "mtp") have other rows and are left out. Logits become scores if they
explain the choice; with a correction bias or groups they do not, and are left out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tieline.core.errors import TraceError, naming_unparsable_file, require
from tieline.core.untrusted_input import require_readable
from tieline.trace.readers.array_files import MOST_JSON, json_array, read_json_lines
from tieline.trace.readers.routes import Request, Routes, routes_of_requests

TRACE_FILES = "router_trace_rank*.jsonl"
_INTEGER_FIELDS = ("step", "rank", "layer", "num_tokens", "topk")


class _LayerStep(NamedTuple):
    """Ids (tokens, k) of a layer in one step, and its logits (tokens, E) if they were recorded."""

    ids: np.ndarray
    logits: np.ndarray | None


def megatron_routes(path: str | Path) -> Routes:
    """Read the traces of all ranks in a folder, or of one rank in a file."""
    source = Path(path)
    files = sorted(source.glob(TRACE_FILES), key=_rank_of_file) if source.is_dir() else [source]
    require(bool(files), f"{source}: has no {TRACE_FILES}", TraceError)
    steps: dict[tuple[int, int], dict[int, _LayerStep]] = {}
    skipped = 0
    for file in files:
        skipped += _read_rank_trace(file, steps)
    require(bool(steps), f"{source}: has no records of a decoder", TraceError)
    layers = sorted({layer for step in steps.values() for layer in step})
    requests = [_step_request(step, layers, key, source) for key, step in sorted(steps.items())]
    notes = [
        f"{len(requests)} steps of {len(files)} ranks, each a document; tokens are not recorded"
    ]
    if skipped:
        notes.append(f"{skipped} records of heads that predict further tokens are left out")
    routes = routes_of_requests(requests, "megatron-trace", str(source), notes)
    return replace(
        routes,
        tokens=None,
        layer_names=tuple(f"layers.{layer}" for layer in layers),
        n_experts=None if routes.scores is None else routes.scores.shape[2],
    )


def _rank_of_file(file: Path) -> tuple[int, str]:
    """Return the sort key of a file: the rank in its name, and the name."""
    digits = re.search(r"rank(\d{1,9})", file.name)
    return (int(digits[1]) if digits else -1), file.name


def _read_rank_trace(file: Path, steps: dict[tuple[int, int], dict[int, _LayerStep]]) -> int:
    """Add the records of one rank to the steps; returns the number of skipped records."""
    skipped = 0
    require_readable(file)
    with naming_unparsable_file(file):
        for label, record in read_json_lines(file, MOST_JSON):
            has_choice = "top_indices" in record
            require(has_choice, f"{label}: needs an object with top_indices", TraceError)
            if record.get("block", "decoder") != "decoder":
                skipped += 1
                continue
            _add_record(steps, record, label, file.parent)
    return skipped


def _add_record(
    steps: dict[tuple[int, int], dict[int, _LayerStep]],
    record: Mapping[str, Any],
    label: str,
    folder: Path,
) -> None:
    """Add one record, the choice of a layer in a step, to the steps."""
    step, rank, layer, count, k = (
        _integer_field(record.get(name), name, label) for name in _INTEGER_FIELDS
    )
    ids = json_array(record["top_indices"], f"{label}: top_indices")
    fits = ids.shape == (count, k) and ids.dtype.kind in "iu"
    require(fits, f"{label}: top_indices must be ({count}, {k}), got {ids.shape}", TraceError)
    layers = steps.setdefault((rank, step), {})
    require(layer not in layers, f"{label}: layer {layer} of step {step} came already", TraceError)
    layers[layer] = _LayerStep(ids, _record_logits(record, count, rank, label, folder))


def _integer_field(value: object, name: str, label: str) -> int:
    """Return a value of a record if it is an integer >= 0, else raise."""
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise TraceError(f"{label}: {name} must be a whole number, got {value!r:.40}")
    return value


def _record_logits(
    record: Mapping[str, Any], count: int, rank: int, label: str, folder: Path
) -> np.ndarray | None:
    """Read the logits of a record as float32; None if they were not recorded."""
    if "logit_offset" not in record:
        return None
    offset, size = (
        _integer_field(record.get(f"logit_{x}"), f"logit_{x}", label) for x in ("offset", "bytes")
    )
    shape: Any = record.get("logit_shape")
    valid = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int for n in shape)
    if not valid or shape[0] != count or shape[1] < 1 or shape[0] * shape[1] * 2 != size:
        raise TraceError(
            f"{label}: logit_shape {shape!r:.60} does not fit {size} bytes of bfloat16"
        )
    file = folder / f"logits_rank{rank}.bin"
    require(file.is_file(), f"{label}: {file.name} is missing beside it", TraceError)
    with file.open("rb") as stream:
        stream.seek(offset)
        data = stream.read(size)
    require(len(data) == size, f"{label}: {file.name} ends before byte {offset + size}", TraceError)
    halves = np.frombuffer(data, "<u2").astype(np.uint32) << 16
    return halves.view(np.float32).reshape(shape)


def _step_request(
    step: Mapping[int, _LayerStep], layers: Sequence[int], key: tuple[int, int], source: Path
) -> Request:
    """Return the request of one step of one rank, with the rows of all layers."""
    label = f"{source}: step {key[1]} of rank {key[0]}"
    missing = [layer for layer in layers if layer not in step]
    require(not missing, f"{label}: layers {missing[:5]} are missing", TraceError)
    shapes = {step[layer].ids.shape for layer in layers}
    require(len(shapes) == 1, f"{label}: layers of {sorted(shapes)[:4]} tokens and k", TraceError)
    logits = [step[layer].logits for layer in layers]
    recorded = [array for array in logits if array is not None]
    complete = len(recorded) == len(layers) and len({array.shape for array in recorded}) == 1
    scores = np.stack(recorded, 1) if complete else None
    return Request(np.stack([step[layer].ids for layer in layers], 1), scores=scores)
