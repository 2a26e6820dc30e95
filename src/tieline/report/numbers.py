"""How numbers and names are written for readers.

    finite         a number, or None if it is missing, infinite or NaN
    percent        a share as a percentage
    significant    a number with three significant digits
    duration       seconds in the unit that suits them
    with_error     an estimate with its standard error
    compact        a JSON value with its numbers cut to a few digits, to keep the page small
    short_names    names of layers without the parts that all share
    visible        text with a sign for every control character
    flat           nested provenance as pairs of dotted names and values
    told           one entry of a provenance, which anybody may have written

A number that is missing or not finite is written as a dash.
"""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from tieline.core.statistics import Estimate

DASH = "–"
MINUTE, HOUR = 60, 3600
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def finite(number: float | None) -> float | None:
    """The number, or None if it is missing, infinite or NaN."""
    return number if number is not None and math.isfinite(number) else None


def percent(share: float | None) -> str:
    """Percentage with two significant digits; shares below 0.01 % keep their power of ten."""
    if finite(share) is None:
        return DASH
    assert share is not None
    if share == 0:
        return "0 %"
    if abs(share) < 1e-4:
        return f"{100 * share:.0e} %".replace("e-0", "e-")
    digits = max(0, 1 - math.floor(math.log10(abs(100 * share))))
    return f"{100 * share:.{digits}f} %"


def significant(number: float | None, digits: int = 3) -> str:
    """The number with that many significant digits."""
    if finite(number) is None:
        return DASH
    assert number is not None
    if number == 0:
        return "0"
    if 1e-3 <= abs(number) < 10**6:
        places = max(0, digits - 1 - math.floor(math.log10(abs(number))))
        return f"{number:,.{places}f}"
    return f"{number:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e")


def duration(seconds: float, digits: int = 3) -> str:
    """Seconds in the unit that suits them, with that many significant digits."""
    if seconds < 2 * MINUTE:
        return f"{significant(seconds, digits)} s"
    if seconds < 2 * HOUR:
        return f"{significant(seconds / MINUTE, digits)} min"
    return f"{significant(seconds / HOUR, digits)} h"


def with_error(estimate: Estimate, digits: int = 3) -> str:
    """The estimate with that many digits, and ± its standard error where that is known."""
    value, error = significant(estimate.value, digits), finite(estimate.standard_error)
    return value if error is None else f"{value} ± {significant(error, 2)}"


def compact(value: Any, digits: int = 4) -> Any:
    """The JSON value with floating-point numbers of `digits` digits; None for those not finite."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: compact(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [compact(item, digits) for item in value]
    return value


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the dotted parts that all share in front and behind.

    `model.layers.3.mlp.gate` becomes `3` beside its likes; a single name stays as it is.
    """
    parts = [name.split(".") for name in names]
    shortest = min((len(part) for part in parts), default=0)
    front = _shared(parts, range(shortest))
    back = _shared(parts, range(-1, -shortest - 1, -1))
    if len(set(names)) < 2 or front + back >= shortest:
        return list(names)
    return [".".join(part[front : len(part) - back]) for part in parts]


def visible(text: str) -> str:
    """The text with a sign for every control character; line ends get a sign before them.

    Marks that turn the direction of writing would rearrange the text around them, so they are
    shown by number; halves of surrogate pairs cannot be written to a file at all.
    """
    return "".join(map(_shown, text))


def flat(value: Mapping[str, Any], above: str = "") -> list[tuple[str, object]]:
    """Nested mappings as pairs of dotted names and values; None and empty values are left out."""
    rows: list[tuple[str, object]] = []
    for key, item in value.items():
        name = f"{above}{key}"
        if isinstance(item, Mapping):
            rows += flat(item, f"{name}.")
        elif item not in (None, "", [], ()):
            rows.append((name, item))
    return rows


def told(provenance: object, *names: str) -> str:
    """The first of these entries that a provenance has, as text; empty if it has none."""
    known = provenance if isinstance(provenance, Mapping) else {}
    return next((str(known[name]) for name in names if known.get(name)), "")


def timing_rows(timings: Mapping[str, float]) -> list[tuple[str, str]]:
    """Seconds per stage, then rates."""
    rates = {name: value for name, value in timings.items() if name.endswith("per_second")}
    stages = [(f"time.{n}", f"{significant(v)} s") for n, v in timings.items() if n not in rates]
    return stages + [(name.replace("_", " "), significant(v)) for name, v in rates.items()]


def _shared(parts: list[list[str]], places: range) -> int:
    count = 0
    for place in places:
        if len({part[place] for part in parts}) > 1:
            break
        count += 1
    return count


def _shown(sign: str) -> str:
    if sign == "\n":
        return "↵\n"
    if sign == "\t":
        return "⇥\t"
    if ord(sign) < 0x20:
        return chr(0x2400 + ord(sign))
    if sign in _DIRECTIONS or unicodedata.category(sign) in ("Cc", "Zl", "Zp"):
        return f"⟨{ord(sign):04X}⟩"
    return "\ufffd" if unicodedata.category(sign) == "Cs" else sign
