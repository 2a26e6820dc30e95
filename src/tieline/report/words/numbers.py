"""How quantities are written, in tables and in sentences: one function per quantity.

Missing numbers and numbers that are not finite are written as a dash.
"""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # sentences of results without tensors are written without torch
    from tieline.core.statistics import Estimate, Share

DASH = "–"

MINUTE, HOUR = 60, 3600

MAX_LISTED = 6
"""Entries of a list that a sentence names one by one."""

LEAST_PERCENT, LEAST_PERCENT_IN_SENTENCES = 1e-6, 1e-3
"""Percentages below which only that limit is stated, in tables and in sentences."""


def finite(number: float | None) -> float | None:
    """Return the number, or None if it is missing, infinite or NaN."""
    return number if number is not None and math.isfinite(number) else None


def percent(
    share: float | None, digits: int = 2, *, trim: bool = False, least: float | None = None
) -> str:
    """Return a share as a percentage, without an exponent.

    Args:
        share: the share; 1 is 100 %.
        digits: significant digits.
        trim: drop trailing zeros, as sentences do; columns of tables keep them.
        least: percentage below which "< least" is written; by default 1e-6 in tables and 0.001
            in sentences. With 0, tiny percentages have an exponent.
    """
    if finite(share) is None:
        return DASH
    assert share is not None
    value = 100 * share
    size = abs(value)
    limit = (LEAST_PERCENT_IN_SENTENCES if trim else LEAST_PERCENT) if least is None else least
    if value == 0:
        return "0 %"
    if size < limit:
        return ("< " if value > 0 else "> -") + f"{limit:.6f}".rstrip("0") + " %"
    if trim:
        return f"{value:.0f} %" if size >= 10**digits - 0.5 else f"{value:.{digits}g} %"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:.{decimals}f} %"


def with_interval(share: "Share") -> str:
    """Return a share with its interval: "1.7 % (95 % interval 1.5 % to 1.9 %)"."""
    low, high = share.low or 0.0, 1.0 if share.high is None else share.high
    interval = f"{percent(low, trim=True)} to {percent(high, trim=True)}"
    return f"{percent(share.value or 0.0, trim=True)} (95 % interval {interval})"


def significant(number: float | None, digits: int = 3) -> str:
    """Return a number with that many significant digits: 0.0426, 4.26e18, 2.30e-9."""
    if finite(number) is None:
        return DASH
    assert number is not None
    if number == 0:
        return "0"
    if 1e-3 <= abs(number) < 10**6:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(number))))
        return f"{number:,.{decimals}f}"
    return short_exponent(f"{number:.{digits - 1}e}")


def decimal(number: float, digits: int = 2) -> str:
    """Return a number with that many significant digits and without an exponent."""
    if number == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(number))))
    return f"{number:.{min(decimals, 12)}f}"


def short_exponent(text: str) -> str:
    """Return "4.26e18" for "4.26e+18", and "2.3e-9" for "2.3e-09"."""
    return re.sub(r"e\+?(-?)0*(?=\d)", r"e\1", text)


def with_error(estimate: "Estimate", digits: int = 3) -> str:
    """Return an estimate with that many digits, and ± its standard error where it is known."""
    value, error = significant(estimate.value, digits), finite(estimate.standard_error)
    return value if error is None else f"{value} ± {significant(error, 2)}"


def signed(estimate: "Estimate", form: str = ".2g", error_form: str = ".1g") -> str:
    """Return a change with its sign, and ± its standard error where it is known.

    Args:
        estimate: the change.
        form: format of the value.
        error_form: format of the error.
    """
    if finite(estimate.value) is None:
        return DASH
    error = finite(estimate.standard_error)
    value = f"{estimate.value:+{form}}"
    return value if error is None else f"{value} ± {error:{error_form}}"


def duration(seconds: float, digits: int = 3) -> str:
    """Return seconds in the unit that suits them, with that many significant digits."""
    if seconds < 2 * MINUTE:
        return f"{significant(seconds, digits)} s"
    if seconds < 2 * HOUR:
        return f"{significant(seconds / MINUTE, digits)} min"
    return f"{significant(seconds / HOUR, digits)} h"


def tokens_needed(count: float | None) -> str:
    """Return a number of tokens with three digits, rounded upwards."""
    number = finite(count)
    if number is None:
        return DASH
    scale = 10 ** max(0, math.floor(math.log10(max(1.0, number))) - 2)
    return f"{math.ceil(number / scale - 1e-9) * scale:,}"


def list_with_and(entries: Sequence[str]) -> str:
    """Return a list with "and" before the last; entries beyond `MAX_LISTED` are counted."""
    if len(entries) > MAX_LISTED:
        return list_with_commas(entries)
    return " and ".join(filter(None, (", ".join(entries[:-1]), entries[-1])))


def list_with_commas(entries: Sequence[str]) -> str:
    """Return a list with commas; entries beyond `MAX_LISTED` are counted."""
    names = ", ".join(entries[:MAX_LISTED])
    unnamed = len(entries) - MAX_LISTED
    return names if unnamed <= 0 else f"{names} and {unnamed} more"


def less_or_more_text(reduction: float) -> str:
    """Return a reduction as "54 % less", or "12 % more" if it is negative."""
    return (
        f"{percent(abs(reduction), 3, trim=True, least=0.0)} {'less' if reduction >= 0 else 'more'}"
    )
