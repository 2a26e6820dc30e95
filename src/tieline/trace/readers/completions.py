"""Routes in answers of servers (vLLM, TensorRT-LLM, Megatron, SGLang) and samples of slime, miles.

    vLLM            choices[].routed_experts, base64 of an .npy (tokens - 1, layers, k), uint8 or
                    uint16, from `routed_experts_prompt_start` on; or outputs[].routed_experts of
                    the objects of the library
    vLLM 0.21       prompt_routed_experts, and choices[].routed_experts of the answer only
    TensorRT-LLM    outputs[].routed_experts (tokens - 1, routed layers, k)
    Megatron        choices[].moe_topk_indices (tokens - 1, routed layers, k); NeMo Gym splits it
                    into prompt_moe_topk_indices and generation_moe_topk_indices

Tokens are `prompt_token_ids` and `token_ids` (`generation_token_ids` in Megatron). Objects of the
libraries are read by the same fields as JSON.

A sample of slime or miles is an object with `tokens` and `rollout_routed_experts` (tokens - 1,
layers, k), as nested lists or base64 of an .npy; miles pads with -1. A batch is an object of lists
with the same names.

SGLang sends base64 of raw int32, without a shape:

    meta_info.routed_experts       of /generate, also inside choices[]
    sglext.routed_experts          of the OpenAI-compatible server (also `sgl_ext`)
    meta_info.routed_experts_start_len    position of the first row

The rows are those of positions [start, tokens - 1). Their number follows from `prompt_tokens` and
`completion_tokens`, or from the token ids; then k gives the number of layers. Otherwise both must
be passed, unless the answer has `routed_experts_shape`, as those of our own writer have.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tieline.core.errors import TraceError, require
from tieline.core.setting_fields import TraceSettingError
from tieline.core.untrusted_input import NPY_MAGIC
from tieline.trace.readers.array_files import decode_base64, json_array, npy_array, raw_array
from tieline.trace.readers.routes import Request, Routes, routes_of_requests, split_packed_weights


class FieldNames(NamedTuple):
    """Names of the fields of a producer's answers; the first that exists is read.

    Attributes:
        routes: routes of prompt and answer, or of the answer only if `prompt` exists.
        prompt: routes of the prompt.
        answer: routes of the answer only.
        prompt_ids: token ids of the prompt.
        answer_ids: token ids of the answer.
        start: position of the first row.
    """

    routes: tuple[str, ...]
    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    prompt_ids: tuple[str, ...] = ("prompt_token_ids",)
    answer_ids: tuple[str, ...] = ("token_ids", "output_token_ids", "completion_token_ids")
    start: tuple[str, ...] = ("routed_experts_prompt_start", "routed_experts_start_len")


VLLM_FIELDS = FieldNames(
    ("routed_experts",), ("prompt_routed_experts",), ("completion_routed_experts",)
)
MEGATRON_FIELDS = FieldNames(
    ("moe_topk_indices",),
    ("prompt_moe_topk_indices",),
    ("generation_moe_topk_indices",),
    answer_ids=("generation_token_ids", "token_ids"),
)
FIELDS_BY_PRODUCER = {"vllm": VLLM_FIELDS, "tensorrt-llm": VLLM_FIELDS, "megatron": MEGATRON_FIELDS}


def completion_routes(
    answers: list[tuple[str, Any]], producer: str, name: str, start: int | None = None
) -> Routes:
    """Return the routes of answers of a server, or of objects of its library.

    Args:
        answers: (label, JSON value or object) of each answer.
        producer: "vllm", "tensorrt-llm" or "megatron".
        name: name of the routes in errors.
        start: position of the first row, if the answers do not state it.
    """
    fields = FIELDS_BY_PRODUCER[producer]
    requests = [
        request
        for origin, answer in answers
        for request in _completion_requests(answer, fields, origin, start)
    ]
    require(
        bool(requests),
        f"{name}: no field {' or '.join(fields.routes + fields.prompt)} in any answer: were routes "
        "asked for (vLLM: enable_return_routed_experts)?",
        TraceError,
    )
    return routes_of_requests(requests, producer, name)


def json_field(source: Any, *names: str) -> Any:
    """Return the first of these fields or attributes of an object that is not None, else None."""
    for name in names:
        value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
        if value is not None:
            return value
    return None


def _completion_requests(
    answer: Any, fields: FieldNames, origin: str, start: int | None
) -> Iterator[Request]:
    """Yield the request of each choice of an answer that has routes."""
    choices = json_field(answer, "choices", "outputs")
    choices = [answer] if choices is None else choices
    require(isinstance(choices, list | tuple), f"{origin}: choices must be a list", TraceError)
    for number, choice in enumerate(choices):
        label = origin if choice is answer else f"{origin}: choices[{number}]"
        rows = _completion_rows(answer, choice, fields, label)
        if rows is not None:
            first = _completion_start(answer, choice, fields, label) if start is None else start
            ids, weights = split_packed_weights(rows)
            tokens = _completion_tokens(answer, choice, fields, label)
            prompt = None if tokens is None else len(_prompt_ids(answer, choice, fields))
            yield Request(ids, tokens, first, weights, prompt=prompt)


def _completion_rows(answer: Any, choice: Any, fields: FieldNames, label: str) -> np.ndarray | None:
    """Return the rows of a choice, those of prompt and answer joined; None without routes."""
    routes = _route_array_field(choice, fields.routes, label)
    prompt = _route_array_field(choice, fields.prompt, label)
    if prompt is None:
        prompt = _route_array_field(answer, fields.prompt, label)
    answer_rows = _route_array_field(choice, fields.answer, label)
    if routes is not None and (prompt is None or _begins_with_prompt(routes, prompt)):
        return routes
    rows = [
        x
        for x in (prompt, routes if answer_rows is None else answer_rows)
        if x is not None and len(x)
    ]
    if not rows:
        return routes
    shapes = {x.shape[1:] for x in rows}
    require(
        len(shapes) == 1 and all(x.ndim == 3 for x in rows),
        f"{label}: routes of prompt and answer have shapes {[x.shape for x in rows]}",
        TraceError,
    )
    return np.concatenate(rows)


def _begins_with_prompt(rows: np.ndarray, prompt: np.ndarray) -> bool:
    """Return whether the first rows are those of the prompt, as Megatron writes them."""
    return len(rows) >= len(prompt) and np.array_equal(rows[: len(prompt)], prompt)


def _route_array_field(source: Any, names: tuple[str, ...], parent: str) -> np.ndarray | None:
    """Return the array (tokens, layers, k) in the first of these fields; None without one."""
    value = json_field(source, *names)
    if value is None:
        return None
    label = f"{parent}.{next(name for name in names if json_field(source, name) is not None)}"
    array = json_array(value, label)
    require(
        array.ndim == 3 and array.dtype.kind in "iu",
        f"{label}: needs integers of shape (tokens, layers, k), got {array.dtype} of {array.shape}",
        TraceError,
    )
    return array


def _prompt_ids(answer: Any, choice: Any, fields: FieldNames) -> Any:
    """Return the token ids of the prompt, unvalidated; None if they are missing."""
    ids = json_field(choice, *fields.prompt_ids)
    return json_field(answer, *fields.prompt_ids) if ids is None else ids


def _completion_tokens(
    answer: Any, choice: Any, fields: FieldNames, label: str
) -> np.ndarray | None:
    """Return the token ids of prompt and answer; None unless both exist."""
    prompt = _prompt_ids(answer, choice, fields)
    return _joined_token_ids(prompt, json_field(choice, *fields.answer_ids), label)


def _joined_token_ids(prompt: Any, answer: Any, label: str) -> np.ndarray | None:
    """Concatenate the token ids of prompt and answer; None unless both exist."""
    if prompt is None or answer is None:
        return None
    are_lists = all(isinstance(ids, Collection) for ids in (prompt, answer))
    require(are_lists, f"{label}: token ids must be lists of integers", TraceError)
    token_lists = [
        json_array(list(ids), f"{label}: token ids") for ids in (prompt, answer) if len(ids)
    ]
    fits = all(ids.ndim == 1 and ids.dtype.kind in "iu" for ids in token_lists)
    require(fits and bool(token_lists), f"{label}: token ids must be lists of integers", TraceError)
    return np.concatenate(token_lists).astype(np.int64)


def _completion_start(answer: Any, choice: Any, fields: FieldNames, label: str) -> int:
    """Return the position of the first row of a choice, 0 unless stated."""
    value = json_field(choice, *fields.start)
    value = json_field(answer, *fields.start) if value is None else value
    valid = value is None or (type(value) is int and value >= 0)
    require(
        valid, f"{label}.{fields.start[0]}: needs a whole number, got {value!r:.40}", TraceError
    )
    return int(value or 0)


ROLLOUT_FIELD = "rollout_routed_experts"


def rollout_routes(samples: list[tuple[str, Any]], name: str) -> Routes:
    """Return the routes of samples of slime or miles, given as (label, JSON value or object)."""
    requests = [request for label, value in samples for request in _rollout_requests(value, label)]
    require(bool(requests), f"{name}: no field {ROLLOUT_FIELD} in any sample", TraceError)
    padded = any(bool((request.experts == -1).any()) for request in requests)
    return routes_of_requests(requests, "miles" if padded else "slime", name)


def _rollout_requests(value: Any, label: str) -> Iterator[Request]:
    """Yield the requests of a sample, or of a batch of samples."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _rollout_requests(item, f"{label}: [{number}]")
        return
    routes, tokens = json_field(value, ROLLOUT_FIELD), json_field(value, "tokens")
    if routes is None:
        return
    if _is_rollout_batch(routes, tokens):
        for number, item in enumerate(routes):
            sample = {ROLLOUT_FIELD: item, "tokens": None if tokens is None else tokens[number]}
            yield from _rollout_requests(sample, f"{label}: sample {number}")
        return
    array = json_array(routes, f"{label}: {ROLLOUT_FIELD}")
    require(
        array.ndim == 3 and array.dtype.kind in "iu",
        f"{label}: {ROLLOUT_FIELD} needs integers (tokens, layers, k), got {array.dtype} of "
        f"{array.shape}",
        TraceError,
    )
    ids = None if tokens is None else json_array(list(tokens), f"{label}: tokens").astype(np.int64)
    fits = ids is None or ids.ndim == 1
    require(fits, f"{label}: tokens must be a list of integers", TraceError)
    rows, ids = _without_rollout_padding(array, ids)
    experts, weights = split_packed_weights(rows)
    yield Request(experts, ids, weights=weights)


def _is_rollout_batch(routes: Any, tokens: Any) -> bool:
    """Return whether routes hold one entry per sample, each an array of three axes."""
    if isinstance(routes, str | Mapping) or not len(routes):
        return False
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        return len(tokens) == len(routes)
    first = routes[0]
    return isinstance(first, str) or np.ndim(first) == 3


def _without_rollout_padding(
    rows: np.ndarray, tokens: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Remove rows of -1 beyond the tokens, which are padding."""
    if tokens is None or len(rows) <= len(tokens):
        return rows, tokens
    extra = rows[len(tokens) :]
    return (rows[: len(tokens)], tokens) if bool((extra == -1).all()) else (rows, tokens)


SGLANG_BOXES = ("meta_info", "sglext", "sgl_ext")


def sglang_routes(
    answers: list[tuple[str, Any]],
    name: str,
    layers: int | None = None,
    k: int | None = None,
    start: int | None = None,
) -> Routes:
    """Return the routes of answers of an SGLang server.

    Args:
        answers: (label, JSON value) of each answer; a value may be a list of answers.
        name: name of the routes in errors.
        layers: number of layers L of the array.
        k: experts chosen per token.
        start: position of the first row, if the answers do not state it.
    """
    requests = [
        _sglang_request(box, answer, label, (layers, k), start)
        for outer, answer in answers
        for label, answer, box in _objects_with_routes(answer, outer)
    ]
    require(
        bool(requests),
        f"{name}: no meta_info.routed_experts in any answer: was return_routed_experts set, and "
        "the server started with --enable-return-routed-experts?",
        TraceError,
    )
    return routes_of_requests(requests, "sglang", name)


def _objects_with_routes(answer: Any, label: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the label, the answer and the object in it that holds the routes."""
    if isinstance(answer, list):
        for number, item in enumerate(answer):
            yield from _objects_with_routes(item, f"{label}: [{number}]")
        return
    if isinstance(answer, str) or json_field(answer, "routed_experts") is not None:
        yield label, answer, answer
        return
    for box in SGLANG_BOXES:
        inner = json_field(answer, box)
        if inner is not None and json_field(inner, "routed_experts") is not None:
            yield f"{label}: {box}", answer, inner
            return
    for number, choice in enumerate(json_field(answer, "choices") or ()):
        yield from _objects_with_routes(choice, f"{label}: choices[{number}]")


def _sglang_request(
    box: Any, answer: Any, label: str, shape: tuple[int | None, int | None], start: int | None
) -> Request:
    """Return the request of one object with routes.

    Args:
        box: the object with `routed_experts`, or their base64 text itself.
        answer: the answer that holds it, with tokens and their counts.
        label: name of the object in errors.
        shape: number of layers and k, None where unknown.
        start: position of the first row; None for the stated one.
    """
    value = box if isinstance(box, str) else json_field(box, "routed_experts")
    field = f"{label}.routed_experts"
    tokens = None if isinstance(answer, str) else _sglang_tokens(answer, field)
    first = _sglang_start(box) if start is None else start
    if not isinstance(value, str):
        return Request(json_array(value, field), tokens, first)
    data = decode_base64(value, field)
    if data[:6] == NPY_MAGIC:
        return Request(npy_array(data, field), tokens, first)
    stated = None if isinstance(box, str) else json_field(box, "routed_experts_shape")
    if stated is not None:
        fits = isinstance(stated, list) and all(type(n) is int and n > 0 for n in stated)
        require(fits and len(stated) == 3, f"{field}_shape: needs three whole numbers", TraceError)
        return Request(raw_array(data, "int32", tuple(stated), field), tokens, first)
    rows = _sglang_row_count(box, answer, tokens)
    return Request(_sglang_ids(data, rows and rows - first, shape, field), tokens, first)


def _sglang_start(box: Any) -> int:
    """Return the position of the first row that an object states, else 0."""
    value = None if isinstance(box, str) else json_field(box, "routed_experts_start_len")
    return value if type(value) is int and value >= 0 else 0


def _sglang_tokens(answer: Any, label: str) -> np.ndarray | None:
    """Return the token ids of prompt and answer; None unless the answer has both."""
    prompt = json_field(answer, "prompt_token_ids", "input_ids", "prompt_ids")
    answer_ids = json_field(answer, "output_ids", "token_ids", "completion_token_ids")
    return _joined_token_ids(prompt, answer_ids, label)


def _sglang_row_count(box: Any, answer: Any, tokens: np.ndarray | None) -> int | None:
    """Return the number of rows of the whole request, one less than its tokens; None if unknown."""
    if tokens is not None:
        return len(tokens) - 1
    for source in (box, answer, None if isinstance(answer, str) else json_field(answer, "usage")):
        if source is not None and not isinstance(source, str):
            counts = [json_field(source, key) for key in ("prompt_tokens", "completion_tokens")]
            if all(type(count) is int for count in counts):
                return sum(counts) - 1
    return None


def _sglang_ids(
    data: bytes, rows: int | None, shape: tuple[int | None, int | None], label: str
) -> np.ndarray:
    """Return int32 ids as (rows, layers, k); a missing number of layers follows from the rows."""
    require(len(data) % 4 == 0, f"{label}: {len(data)} bytes are no int32 numbers", TraceError)
    ids, (layers, k) = np.frombuffer(data, "<i4"), shape
    if layers is None and k is not None and rows and len(ids) % (rows * k) == 0:
        layers = len(ids) // (rows * k)
    if layers is None or k is None:
        row_count = f", of {rows} rows" if rows else ""
        raise TraceSettingError(
            "{where}: {ids} without a shape{rows}: give {layers}, {k}; SGLang counts all layers of "
            "the model, dense ones too",
            where=label,
            ids=f"{len(ids)} ids",
            rows=row_count,
        )
    require(
        layers > 0 and k > 0 and len(ids) % (layers * k) == 0,
        f"{label}: {len(ids)} ids do not divide into rows of {layers} layers × {k} experts",
        TraceError,
    )
    return ids.reshape(-1, layers, k)
