"""Routes in the answers of SGLang: base64 of raw int32, without a shape.

    meta_info.routed_experts       of /generate, also inside choices[]
    sglext.routed_experts          of the OpenAI-compatible server (also `sgl_ext`)
    meta_info.routed_experts_start_len    position of the first row

The rows are those of positions [start, tokens - 1). Their number follows from `prompt_tokens` and
`completion_tokens`, or from the token ids; then k gives the number of layers. Otherwise both must
be passed, unless `routed_experts_shape` stands beside the routes, as our own writer puts it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tieline.core.errors import TraceError, require
from tieline.core.settings import TraceSettingError
from tieline.trace.readers.completions import field
from tieline.trace.readers.decoding import NPY_MAGIC, array_in, decoded, npy_array, raw_array
from tieline.trace.readers.routes import Request, Routes, assemble

BOXES = ("meta_info", "sglext", "sgl_ext")


def sglang_routes(
    answers: list[tuple[str, Any]],
    name: str,
    layers: int | None = None,
    k: int | None = None,
    start: int | None = None,
) -> Routes:
    """Return the routes of answers of an SGLang server.

    Args:
        answers: (place, JSON value) of each answer; a value may be a list of answers.
        name: what to call the routes in errors.
        layers: number of layers L of the array.
        k: experts chosen per token.
        start: position of the first row, where the answers do not say it.
    """
    requests = [
        _sglang_request(box, answer, label, (layers, k), start)
        for outer, answer in answers
        for label, answer, box in _sglang_objects(answer, outer)
    ]
    require(
        bool(requests),
        f"{name}: no meta_info.routed_experts in any answer: was return_routed_experts set, and "
        "the server started with --enable-return-routed-experts?",
        TraceError,
    )
    return assemble(requests, "sglang", name)


def _sglang_objects(answer: Any, label: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the label, the answer and the object in it that holds the routes."""
    if isinstance(answer, list):
        for number, item in enumerate(answer):
            yield from _sglang_objects(item, f"{label}: [{number}]")
        return
    if isinstance(answer, str) or field(answer, "routed_experts") is not None:
        yield label, answer, answer
        return
    for box in BOXES:
        inner = field(answer, box)
        if inner is not None and field(inner, "routed_experts") is not None:
            yield f"{label}: {box}", answer, inner
            return
    for number, choice in enumerate(field(answer, "choices") or ()):
        yield from _sglang_objects(choice, f"{label}: choices[{number}]")


def _sglang_request(
    box: Any, answer: Any, label: str, shape: tuple[int | None, int | None], start: int | None
) -> Request:
    """The rows of one object with routes."""
    value = box if isinstance(box, str) else field(box, "routed_experts")
    where = f"{label}.routed_experts"
    tokens = None if isinstance(answer, str) else _sglang_tokens(answer, where)
    first = _sglang_start(box) if start is None else start
    if not isinstance(value, str):
        return Request(array_in(value, where), tokens, first)
    data = decoded(value, where)
    if data[:6] == NPY_MAGIC:
        return Request(npy_array(data, where), tokens, first)
    stated = None if isinstance(box, str) else field(box, "routed_experts_shape")
    if stated is not None:
        fits = isinstance(stated, list) and all(type(n) is int and n > 0 for n in stated)
        require(fits and len(stated) == 3, f"{where}_shape: needs three whole numbers", TraceError)
        return Request(raw_array(data, "int32", tuple(stated), where), tokens, first)
    rows = _sglang_row_count(box, answer, tokens)
    return Request(_sglang_ids(data, rows and rows - first, shape, where), tokens, first)


def _sglang_start(box: Any) -> int:
    """Position of the first row that an object states, else 0."""
    value = None if isinstance(box, str) else field(box, "routed_experts_start_len")
    return value if type(value) is int and value >= 0 else 0


def _sglang_tokens(answer: Any, where: str) -> np.ndarray | None:
    """Token ids of prompt and answer, if the answer has both."""
    prompt = field(answer, "prompt_token_ids", "input_ids", "prompt_ids")
    answer_ids = field(answer, "output_ids", "token_ids", "completion_token_ids")
    if prompt is None or answer_ids is None:
        return None
    both = [array_in(list(ids), f"{where}: token ids") for ids in (prompt, answer_ids) if len(ids)]
    return np.concatenate(both).astype(np.int64) if both else None


def _sglang_row_count(box: Any, answer: Any, tokens: np.ndarray | None) -> int | None:
    """Rows of the whole request: one less than its tokens."""
    if tokens is not None:
        return len(tokens) - 1
    for thing in (box, answer, None if isinstance(answer, str) else field(answer, "usage")):
        if thing is not None and not isinstance(thing, str):
            counts = [field(thing, key) for key in ("prompt_tokens", "completion_tokens")]
            if all(type(count) is int for count in counts):
                return sum(counts) - 1
    return None


def _sglang_ids(
    data: bytes, rows: int | None, shape: tuple[int | None, int | None], where: str
) -> np.ndarray:
    """The int32 numbers as (rows, layers, k); what is not passed is inferred from the rows."""
    require(len(data) % 4 == 0, f"{where}: {len(data)} bytes are no int32 numbers", TraceError)
    ids, (layers, k) = np.frombuffer(data, "<i4"), shape
    if layers is None and k is not None and rows and len(ids) % (rows * k) == 0:
        layers = len(ids) // (rows * k)
    if layers is None or k is None:
        row_count = f", of {rows} rows" if rows else ""
        raise TraceSettingError(
            "{where}: {ids} without a shape{rows}: give {layers}, {k}; SGLang counts all layers of "
            "the model, dense ones too",
            where=where,
            ids=f"{len(ids)} ids",
            rows=row_count,
        )
    require(
        layers > 0 and k > 0 and len(ids) % (layers * k) == 0,
        f"{where}: {len(ids)} ids do not divide into rows of {layers} layers × {k} experts",
        TraceError,
    )
    return ids.reshape(-1, layers, k)
