"""Routes in the answers of inference servers and engines: vLLM, TensorRT-LLM and Megatron.

    vLLM            choices[].routed_experts, base64 of an .npy (tokens - 1, layers, k), uint8 or
                    uint16, from `routed_experts_prompt_start` on; or outputs[].routed_experts of
                    the objects of the library
    vLLM 0.21       prompt_routed_experts beside choices[].routed_experts, which has the answer only
    TensorRT-LLM    outputs[].routed_experts (tokens - 1, routed layers, k)
    Megatron        choices[].moe_topk_indices (tokens - 1, routed layers, k); NeMo Gym splits it
                    into prompt_moe_topk_indices and generation_moe_topk_indices

Tokens are `prompt_token_ids` and `token_ids` (`generation_token_ids` in Megatron). Objects of the
libraries are read by the same fields as JSON.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tieline.core.errors import TraceError, require
from tieline.trace.readers.containers import array_in
from tieline.trace.readers.routes import Request, Routes, assemble


class Fields(NamedTuple):
    """Names of the fields of a producer; the first that is there counts.

    Attributes:
        whole: routes of prompt and answer, or of the answer alone beside `prompt`.
        prompt: routes of the prompt.
        answer: routes of the answer alone.
        prompt_ids: token ids of the prompt.
        answer_ids: token ids of the answer.
        start: position of the first row.
    """

    whole: tuple[str, ...]
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
        request for place, answer in answers for request in _requests(answer, fields, place, start)
    ]
    require(
        bool(requests),
        f"{name}: no field {' or '.join(fields.whole + fields.prompt)} in any answer: were routes "
        "asked for (vLLM: enable_return_routed_experts)?",
        TraceError,
    )
    return assemble(requests, producer, name)


def field(thing: Any, *names: str) -> Any:
    """Return the first of these fields of a JSON object, or attributes of an object, or None."""
    for name in names:
        value = thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
        if value is not None:
            return value
    return None


def _requests(answer: Any, fields: Fields, place: str, start: int | None) -> Iterator[Request]:
    parts = field(answer, "choices", "outputs")
    parts = [answer] if parts is None else parts
    require(isinstance(parts, list | tuple), f"{place}: choices must be a list", TraceError)
    for number, part in enumerate(parts):
        where = place if part is answer else f"{place}: choices[{number}]"
        found = _rows(answer, part, fields, where)
        if found is not None:
            first = _start(answer, part, fields, where) if start is None else start
            yield Request(found, _tokens(answer, part, fields, where), first)


def _rows(answer: Any, part: Any, fields: Fields, where: str) -> np.ndarray | None:
    """The rows of one choice: all of them, or those of the prompt and of the answer joined."""
    whole = _array(part, fields.whole, where)
    prompt = _array(part, fields.prompt, where)
    if prompt is None:
        prompt = _array(answer, fields.prompt, where)
    own = _array(part, fields.answer, where)
    if whole is not None and (prompt is None or _holds(whole, prompt)):
        return whole
    rows = [x for x in (prompt, whole if own is None else own) if x is not None and len(x)]
    if not rows:
        return whole
    shapes = {x.shape[1:] for x in rows}
    require(
        len(shapes) == 1 and all(x.ndim == 3 for x in rows),
        f"{where}: routes of prompt and answer have shapes {[x.shape for x in rows]}",
        TraceError,
    )
    return np.concatenate(rows)


def _holds(whole: np.ndarray, prompt: np.ndarray) -> bool:
    """Whether the rows of the prompt are the first of the whole already, as Megatron has them."""
    return len(whole) >= len(prompt) and np.array_equal(whole[: len(prompt)], prompt)


def _array(thing: Any, names: tuple[str, ...], where: str) -> np.ndarray | None:
    value = field(thing, *names)
    if value is None:
        return None
    place = f"{where}.{next(name for name in names if field(thing, name) is not None)}"
    found = array_in(value, place)
    require(
        found.ndim == 3 and found.dtype.kind in "iu",
        f"{place}: needs integers of shape (tokens, layers, k), got {found.dtype} of {found.shape}",
        TraceError,
    )
    return found


def _tokens(answer: Any, part: Any, fields: Fields, where: str) -> np.ndarray | None:
    prompt = field(part, *fields.prompt_ids)
    prompt = field(answer, *fields.prompt_ids) if prompt is None else prompt
    own = field(part, *fields.answer_ids)
    if prompt is None or own is None:
        return None
    both = [array_in(list(ids), f"{where}: token ids") for ids in (prompt, own) if len(ids)]
    fits = bool(both) and all(ids.ndim == 1 and ids.dtype.kind in "iu" for ids in both)
    require(fits, f"{where}: token ids must be lists of integers", TraceError)
    return np.concatenate(both).astype(np.int64)


def _start(answer: Any, part: Any, fields: Fields, where: str) -> int:
    value = field(part, *fields.start)
    value = field(answer, *fields.start) if value is None else value
    whole = value is None or (type(value) is int and value >= 0)
    require(
        whole, f"{where}.{fields.start[0]}: needs a whole number, got {value!r:.40}", TraceError
    )
    return int(value or 0)
