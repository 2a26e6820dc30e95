"""Reading what the user typed.

with_new_names     options by their old names become those of today
with_json_target   a bare --json means --json -
layer_choice       "0,2,5-7" or names of routers
numbers            1,2,4
share              0.01 or 1%
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from tieline.core.errors import ParameterError, require

RENAMED = {
    "inspect": {"--out": "--html"},
    "diff": {
        "--out": "--html",
        "--experts-a": "--experts-impl-a",
        "--experts-b": "--experts-impl-b",
    },
    "audit": {"--out": "--html"},
    "smooth": {"--experts": "--experts-impl"},
    "upcycle": {"--experts": "--n-experts"},
    "design": {"--out": "--html", "--experts": "--n-experts"},
    "rates": {
        "--engine": "--executor",
        "--experts": "--n-experts",
        "--out": "--figure",
        "--width": "--dim",
    },
    "reproduce": {"--engine": "--executor", "--out": "--html"},
}
"""Old names of options by command; they keep working and are not shown in the help."""

MOST_LAYERS = 100_000
"""Longest range of layers, so that a typing error costs no memory."""

Number = TypeVar("Number", int, float)
_PLACES = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


def with_new_names(words: Sequence[str]) -> list[str]:
    """Replace old names of options, `--out x` and `--out=x`, by those of today."""
    names = RENAMED.get(words[0], {}) if words else {}
    split = [word.partition("=") for word in words]
    return [names.get(head, head) + equals + rest for head, equals, rest in split]


def with_json_target(words: Sequence[str]) -> list[str]:
    """Insert "-" (stdout) after each --json that names no file.

    Only "-" and names that end in .json are taken as its value, so a model or an option may follow
    a bare --json.
    """
    done: list[str] = []
    for place, word in enumerate(words):
        done.append(word)
        following = words[place + 1] if place + 1 < len(words) else ""
        if word == "--json" and following != "-" and not following.endswith(".json"):
            done.append("-")
    return done


def layer_choice(words: str | None) -> list[str | int] | None:
    """Places and names of layers from "0,2,5-7" or "model.layers.3.mlp.gate"; None for all."""
    if words is None:
        return None
    chosen: list[str | int] = []
    for part in (part.strip() for part in words.split(",")):
        require(bool(part), f"--layers: a layer is missing between the commas of {words!r}")
        chosen += _places(part)
    return chosen


def numbers(
    option: str, words: str | None, kind: Callable[[float], Number]
) -> tuple[Number, ...] | None:
    """Finite numbers from "1,2,4"; None for no words."""
    if words is None:
        return None
    try:
        values = [float(part) for part in words.split(",")]
    except ValueError as problem:
        raise ParameterError(f"{option} takes numbers such as 1,2,4, got {words!r}") from problem
    require(all(map(math.isfinite, values)), f"{option} takes finite numbers, got {words!r}")
    found = tuple(kind(value) for value in values)
    require(list(found) == values, f"{option} takes whole numbers, got {words!r}")
    return found


def share(option: str, words: str | None) -> float | None:
    """A share between 0 and 1 from "0.01" or "1%"; None for no words."""
    if words is None:
        return None
    try:
        number = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        raise ParameterError(f"{option}: write a share such as 0.01 or 1%, got {words!r}") from None
    require(0 <= number <= 1, f"{option}: a share lies between 0 and 1, got {words!r}")
    return number


def _places(part: str) -> list[str | int]:
    match = _PLACES.fullmatch(part)
    if match is None:
        return [part]
    first, last = int(match[1]), int(match[2] or match[1])
    require(
        first <= last < MOST_LAYERS,
        f"--layers: a range goes from a lower layer to a higher one, got {part!r}",
    )
    return list(range(first, last + 1))
