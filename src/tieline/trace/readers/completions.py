"""Routes in answers of servers (vLLM, TensorRT-LLM, Megatron, SGLang) and samples of slime, miles.

    vLLM            choices[].routed_experts, base64 of an .npy (tokens - 1, layers, k), uint8 or
                    uint16, from `routed_experts_prompt_start` on; or outputs[].routed_experts of
                    the objects of the library
    vLLM 0.21       prompt_routed_experts beside choices[].routed_experts, which has the answer only
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
be passed, unless `routed_experts_shape` stands beside the routes, as our own writer puts it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tieline.core.errors import TraceError, require
from tieline.core.setting_fields import TraceSettingError
from tieline.core.untrusted_input import NPY_MAGIC
from tieline.trace.readers.array_files import array_in, base64_bytes, npy_array, raw_array
from tieline.trace.readers.routes import Request, Routes, assembled_routes, unpacked_weights


class Fields(NamedTuple):
    """Names of the fields of a producer; the first that is there counts.

    Attributes:
        routes: routes of prompt and answer, or of the answer alone beside `prompt`.
        prompt: routes of the prompt.
        answer: routes of the answer alone.
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


ROUTED = Fields(("routed_experts",), ("prompt_routed_experts",), ("completion_routed_experts",))
MEGATRON = Fields(
    ("moe_topk_indices",),
    ("prompt_moe_topk_indices",),
    ("generation_moe_topk_indices",),
    answer_ids=("generation_token_ids", "token_ids"),
)
FIELDS = {"vllm": ROUTED, "tensorrt-llm": ROUTED, "megatron": MEGATRON}


def completion_routes(
    answers: list[tuple[str, Any]], producer: str, name: str, start: int | None = None
) -> Routes:
    """Return the routes of answers of a server, or of objects of its library.

    Args:
        answers: (place, JSON value or object) of each answer.
        producer: "vllm", "tensorrt-llm" or "megatron".
        name: what to call the routes in errors.
        start: position of the first row, where the answers do not say it.
    """
    fields = FIELDS[producer]
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
    return assembled_routes(requests, producer, name)


def json_field(thing: Any, *names: str) -> Any:
    """Return the first of these fields of a JSON object, or attributes of an object, or None."""
    for name in names:
        value = thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
        if value is not None:
            return value
    return None


def _completion_requests(
    answer: Any, fields: Fields, origin: str, start: int | None
) -> Iterator[Request]:
    """The requests of one answer, one for each choice."""
    choices = json_field(answer, "choices", "outputs")
    choices = [answer] if choices is None else choices
    require(isinstance(choices, list | tuple), f"{origin}: choices must be a list", TraceError)
    for number, choice in enumerate(choices):
        where = origin if choice is answer else f"{origin}: choices[{number}]"
        rows = _completion_rows(answer, choice, fields, where)
        if rows is not None:
            first = _completion_start(answer, choice, fields, where) if start is None else start
            ids, weights = unpacked_weights(rows)
            tokens = _completion_tokens(answer, choice, fields, where)
            prompt = None if tokens is None else len(_prompt_ids(answer, choice, fields))
            yield Request(ids, tokens, first, weights, prompt=prompt)


def _completion_rows(answer: Any, choice: Any, fields: Fields, where: str) -> np.ndarray | None:
    """The rows of one choice: all of them, or those of the prompt and of the answer joined."""
    routes = _route_array_field(choice, fields.routes, where)
    prompt = _route_array_field(choice, fields.prompt, where)
    if prompt is None:
        prompt = _route_array_field(answer, fields.prompt, where)
    answer_rows = _route_array_field(choice, fields.answer, where)
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
        f"{where}: routes of prompt and answer have shapes {[x.shape for x in rows]}",
        TraceError,
    )
    return np.concatenate(rows)


def _begins_with_prompt(rows: np.ndarray, prompt: np.ndarray) -> bool:
    """Whether the first rows are those of the prompt already, as Megatron writes them."""
    return len(rows) >= len(prompt) and np.array_equal(rows[: len(prompt)], prompt)


def _route_array_field(thing: Any, names: tuple[str, ...], where: str) -> np.ndarray | None:
    """The array (tokens, layers, k) in a field of an answer, if it is there."""
    value = json_field(thing, *names)
    if value is None:
        return None
    label = f"{where}.{next(name for name in names if json_field(thing, name) is not None)}"
    array = array_in(value, label)
    require(
        array.ndim == 3 and array.dtype.kind in "iu",
        f"{label}: needs integers of shape (tokens, layers, k), got {array.dtype} of {array.shape}",
        TraceError,
    )
    return array


def _prompt_ids(answer: Any, choice: Any, fields: Fields) -> Any:
    """Token ids of the prompt as they were written, if they are there."""
    ids = json_field(choice, *fields.prompt_ids)
    return json_field(answer, *fields.prompt_ids) if ids is None else ids


def _completion_tokens(answer: Any, choice: Any, fields: Fields, where: str) -> np.ndarray | None:
    """Token ids of prompt and answer, if both are there."""
    prompt = _prompt_ids(answer, choice, fields)
    return _joined_token_ids(prompt, json_field(choice, *fields.answer_ids), where)


def _joined_token_ids(prompt: Any, answer: Any, where: str) -> np.ndarray | None:
    """Token ids of prompt and answer, one after the other; None unless both are there."""
    if prompt is None or answer is None:
        return None
    token_lists = [
        array_in(list(ids), f"{where}: token ids") for ids in (prompt, answer) if len(ids)
    ]
    fits = all(ids.ndim == 1 and ids.dtype.kind in "iu" for ids in token_lists)
    require(fits and bool(token_lists), f"{where}: token ids must be lists of integers", TraceError)
    return np.concatenate(token_lists).astype(np.int64)


def _completion_start(answer: Any, choice: Any, fields: Fields, where: str) -> int:
    """Position of the first row of a choice."""
    value = json_field(choice, *fields.start)
    value = json_field(answer, *fields.start) if value is None else value
    valid = value is None or (type(value) is int and value >= 0)
    require(
        valid, f"{where}.{fields.start[0]}: needs a whole number, got {value!r:.40}", TraceError
    )
    return int(value or 0)


ROUTES = "rollout_routed_experts"


def rollout_routes(samples: list[tuple[str, Any]], name: str) -> Routes:
    """Return the routes of samples; `samples` holds (label, JSON value or object) pairs."""
    requests = [request for label, value in samples for request in _rollout_requests(value, label)]
    require(bool(requests), f"{name}: no field {ROUTES} in any sample", TraceError)
    padded = any(bool((request.experts == -1).any()) for request in requests)
    return assembled_routes(requests, "miles" if padded else "slime", name)


def _rollout_requests(value: Any, label: str) -> Iterator[Request]:
    """The requests of one sample, or of a batch of samples."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _rollout_requests(item, f"{label}: [{number}]")
        return
    routes, tokens = json_field(value, ROUTES), json_field(value, "tokens")
    if routes is None:
        return
    if _is_rollout_batch(routes, tokens):
        for number, item in enumerate(routes):
            sample = {ROUTES: item, "tokens": None if tokens is None else tokens[number]}
            yield from _rollout_requests(sample, f"{label}: sample {number}")
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
    rows, ids = _without_rollout_padding(array, ids)
    experts, weights = unpacked_weights(rows)
    yield Request(experts, ids, weights=weights)


def _is_rollout_batch(routes: Any, tokens: Any) -> bool:
    """Whether there is one entry per sample: entries are arrays of three axes themselves."""
    if isinstance(routes, str | Mapping) or not len(routes):
        return False
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        return len(tokens) == len(routes)
    first = routes[0]
    return isinstance(first, str) or np.ndim(first) == 3


def _without_rollout_padding(
    rows: np.ndarray, tokens: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Leave out rows of -1 at the end, which are padding beyond the tokens."""
    if tokens is None or len(rows) <= len(tokens):
        return rows, tokens
    extra = rows[len(tokens) :]
    return (rows[: len(tokens)], tokens) if bool((extra == -1).all()) else (rows, tokens)


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
    return assembled_routes(requests, "sglang", name)


def _sglang_objects(answer: Any, label: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the label, the answer and the object in it that holds the routes."""
    if isinstance(answer, list):
        for number, item in enumerate(answer):
            yield from _sglang_objects(item, f"{label}: [{number}]")
        return
    if isinstance(answer, str) or json_field(answer, "routed_experts") is not None:
        yield label, answer, answer
        return
    for box in BOXES:
        inner = json_field(answer, box)
        if inner is not None and json_field(inner, "routed_experts") is not None:
            yield f"{label}: {box}", answer, inner
            return
    for number, choice in enumerate(json_field(answer, "choices") or ()):
        yield from _sglang_objects(choice, f"{label}: choices[{number}]")


def _sglang_request(
    box: Any, answer: Any, label: str, shape: tuple[int | None, int | None], start: int | None
) -> Request:
    """The rows of one object with routes."""
    value = box if isinstance(box, str) else json_field(box, "routed_experts")
    where = f"{label}.routed_experts"
    tokens = None if isinstance(answer, str) else _sglang_tokens(answer, where)
    first = _sglang_start(box) if start is None else start
    if not isinstance(value, str):
        return Request(array_in(value, where), tokens, first)
    data = base64_bytes(value, where)
    if data[:6] == NPY_MAGIC:
        return Request(npy_array(data, where), tokens, first)
    stated = None if isinstance(box, str) else json_field(box, "routed_experts_shape")
    if stated is not None:
        fits = isinstance(stated, list) and all(type(n) is int and n > 0 for n in stated)
        require(fits and len(stated) == 3, f"{where}_shape: needs three whole numbers", TraceError)
        return Request(raw_array(data, "int32", tuple(stated), where), tokens, first)
    rows = _sglang_row_count(box, answer, tokens)
    return Request(_sglang_ids(data, rows and rows - first, shape, where), tokens, first)


def _sglang_start(box: Any) -> int:
    """Position of the first row that an object states, else 0."""
    value = None if isinstance(box, str) else json_field(box, "routed_experts_start_len")
    return value if type(value) is int and value >= 0 else 0


def _sglang_tokens(answer: Any, where: str) -> np.ndarray | None:
    """Token ids of prompt and answer, if the answer has both."""
    prompt = json_field(answer, "prompt_token_ids", "input_ids", "prompt_ids")
    answer_ids = json_field(answer, "output_ids", "token_ids", "completion_token_ids")
    return _joined_token_ids(prompt, answer_ids, where)


def _sglang_row_count(box: Any, answer: Any, tokens: np.ndarray | None) -> int | None:
    """Rows of the whole request: one less than its tokens."""
    if tokens is not None:
        return len(tokens) - 1
    for thing in (box, answer, None if isinstance(answer, str) else json_field(answer, "usage")):
        if thing is not None and not isinstance(thing, str):
            counts = [json_field(thing, key) for key in ("prompt_tokens", "completion_tokens")]
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
