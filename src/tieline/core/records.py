"""JSON as written by strangers: bounded in size and depth, free of what JSON does not define.

Refused are texts above 16 MiB, more than 32 levels, repeated keys, NaN and infinities, integers
beyond 64 bits and strings that are not Unicode text. Every refusal is a `TraceError`.
"""

import json
import math
from typing import NoReturn

from tieline.core.errors import TraceError, require

__all__ = ["DEEPEST", "LONGEST", "canonical", "parse_json"]

LONGEST = 16 << 20
DEEPEST = 32


def canonical(value: object) -> str:
    """The one text of a JSON value: keys in order, no spaces; equal values have equal texts."""
    _check(value, "provenance")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_json(data: bytes, name: str) -> object:
    """The value that a text from a file stands for.

    Args:
        data: the bytes of the file.
        name: what to call the file in an error.
    """
    require(
        len(data) <= LONGEST,
        f"{name}: {len(data)} bytes of JSON, at most {LONGEST} are read",
        TraceError,
    )
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise TraceError(f"{name}: not valid JSON: {error}") from error
    _check(value, name)
    return value


def _check(value: object, name: str) -> None:
    """Walk through all values without recursion, so that depth cannot exhaust the stack."""
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        require(depth <= DEEPEST, f"{name}: JSON deeper than {DEEPEST} levels", TraceError)
        if isinstance(item, dict):
            texts = all(isinstance(key, str) for key in item)
            require(texts, f"{name}: keys must be strings, got {list(item)[:5]}", TraceError)
            pending += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            pending += [(part, depth + 1) for part in item]
        else:
            require(_plain(item), f"{name}: no JSON value: {item!r:.80}", TraceError)


def _plain(item: object) -> bool:
    if isinstance(item, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in item)
    if isinstance(item, float):
        return math.isfinite(item)
    if isinstance(item, bool) or item is None:
        return True
    return isinstance(item, int) and -(1 << 63) <= item < 1 << 63


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is repeated")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
