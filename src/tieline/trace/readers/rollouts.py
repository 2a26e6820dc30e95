"""Routes in samples of slime and miles, as JSON or JSON lines.

A sample is an object with `tokens` and `rollout_routed_experts` (tokens - 1, layers, k), as nested
lists or base64 of an .npy; miles pads with -1. A batch is an object of lists with the same names.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tieline.core.errors import TraceError, require
from tieline.trace.readers.completions import field
from tieline.trace.readers.containers import array_in
from tieline.trace.readers.routes import Request, Routes, assemble

ROUTES = "rollout_routed_experts"


def rollout_routes(samples: list[tuple[str, Any]], name: str) -> Routes:
    """Return the routes of samples; `samples` holds (label, JSON value or object) pairs."""
    requests = [request for label, value in samples for request in _requests(value, label)]
    require(bool(requests), f"{name}: no field {ROUTES} in any sample", TraceError)
    padded = any(bool((request.experts == -1).any()) for request in requests)
    return assemble(requests, "miles" if padded else "slime", name)


def _requests(value: Any, label: str) -> Iterator[Request]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _requests(item, f"{label}: [{number}]")
        return
    routes, tokens = field(value, ROUTES), field(value, "tokens")
    if routes is None:
        return
    if _is_batch(routes, tokens):
        for number, item in enumerate(routes):
            sample = {ROUTES: item, "tokens": None if tokens is None else tokens[number]}
            yield from _requests(sample, f"{label}: sample {number}")
        return
    array = array_in(routes, f"{label}: {ROUTES}")
    require(
        array.ndim == 3 and array.dtype.kind in "iu",
        f"{label}: {ROUTES} needs integers (tokens, layers, k), got {array.dtype} of {array.shape}",
        TraceError,
    )
    ids = None if tokens is None else array_in(list(tokens), f"{label}: tokens").astype(np.int64)
    fits = ids is None or ids.ndim == 1
    require(fits, f"{label}: tokens must be a list of integers", TraceError)
    yield Request(*_cut(array, ids))


def _is_batch(routes: Any, tokens: Any) -> bool:
    """Whether there is one entry per sample: entries are arrays of three axes themselves."""
    if isinstance(routes, str | Mapping) or not len(routes):
        return False
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        return len(tokens) == len(routes)
    first = routes[0]
    return isinstance(first, str) or np.ndim(first) == 3


def _cut(rows: np.ndarray, tokens: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Leave out rows of -1 at the end, which are padding beyond the tokens."""
    if tokens is None or len(rows) <= len(tokens):
        return rows, tokens
    extra = rows[len(tokens) :]
    return (rows[: len(tokens)], tokens) if bool((extra == -1).all()) else (rows, tokens)
