"""Sums of scores without any rounding, so that adding them up in another order changes nothing.

A float32 is z = ±m u with a 24-bit integer m and the unit u = 2^(max(e, 1) - 150) of its exponent
field e. Scores of rank r with exponent field e are added as integers:

    first[r, e]                        Σ ±m              the sum of z, in units of u
    high[r, e] 2^24 + low[r, e]        Σ m²              the sum of z², in units of u²

with 0 <= low < 2^24. Floating-point addition is exact here, since every partial sum is a multiple
of the unit below 2^53 of it. Mean and variance are computed from the integers in rational
arithmetic and rounded once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import TraceError

__all__ = ["EXPONENTS", "LOW_BITS", "ExactMoments"]

EXPONENTS = 256
LOW_BITS = 24
_EXACT_TOKENS = 1 << 16
_FINE = 150 - np.maximum(np.arange(EXPONENTS), 1)
_SCALES = tuple(np.ldexp(1.0, power) for power in (_FINE, 2 * _FINE - LOW_BITS, 2 * _FINE))
_LEADING = np.uint32(0xFFFFF000)


@dataclass(frozen=True, eq=False)
class ExactMoments:
    """Exact sums of the scores of each rank and of their squares, by exponent of the score.

    Attributes:
        count: how many scores of each rank were finite.
        first: sum, in units of each exponent.
        high: upper part of the sum of squares.
        low: lower 24 bits of the sum of squares.
    """

    count: Int[Tensor, " ranks"]
    first: Int[Tensor, "ranks exponents"]
    high: Int[Tensor, "ranks exponents"]
    low: Int[Tensor, "ranks exponents"]

    @classmethod
    def of(cls, scores: Float[Tensor, "tokens ranks"]) -> "ExactMoments":
        """Moments of each column, in float32; infinite scores are left out."""
        first, *rest = (_moments(part) for part in scores.float().split(_EXACT_TOKENS))
        return sum(rest, start=first)

    def __add__(self, other: "ExactMoments") -> "ExactMoments":
        ranks = self.first.shape[0], other.first.shape[0]
        if ranks[0] != ranks[1]:
            raise TraceError(f"scores of {ranks[0]} and of {ranks[1]} ranks cannot be added")
        squares = _carried(self.high + other.high, self.low + other.low)
        return ExactMoments(self.count + other.count, self.first + other.first, *squares)

    def mean(self) -> Float[Tensor, " ranks"]:
        """Mean score of each rank, rounded once; NaN for a rank without scores."""
        return self._rounded(lambda count, first, _: first / count)

    def variance(self) -> Float[Tensor, " ranks"]:
        """Variance (1/n) Σ z² - mean² of each rank, rounded once; NaN for a rank without scores."""
        return self._rounded(lambda count, first, second: second / count - (first / count) ** 2)

    def _rounded(self, statistic: Callable[[int, Fraction, Fraction], Fraction]) -> Tensor:
        rows = zip(*(part.tolist() for part in (self.first, self.high, self.low)), strict=True)
        values = []
        for count, (first, high, low) in zip(self.count.tolist(), rows, strict=True):
            squares = [(a << LOW_BITS) + b for a, b in zip(high, low, strict=True)]
            value = statistic(count, _total(first, 1), _total(squares, 2)) if count else torch.nan
            values.append(float(value))
        return torch.tensor(values, dtype=torch.float64)


def _moments(scores: Float[Tensor, "tokens ranks"]) -> ExactMoments:
    """Moments of few enough tokens that float64 sums are exact.

    z² has 48 bits, too many for a sum. The square of its leading 12 bits has 24, and what remains
    of z² has 37, which leaves 16 bits for the number of tokens.
    """
    z = np.ascontiguousarray(scores.numpy())
    finite, ranks = np.isfinite(z), z.shape[1]
    count = np.full(ranks, len(z))
    if not finite.all():
        z, count = np.where(finite, z, np.float32(0)), finite.sum(0)
    bits = z.view(np.uint32)
    exponent = ((bits >> np.uint32(23)) & np.uint32(0xFF)).astype(np.intp)
    cell = (exponent + np.arange(ranks) * EXPONENTS).ravel()
    value = z.astype(np.float64).ravel()
    leading = np.square((bits & _LEADING).view(np.float32).astype(np.float64)).ravel()
    parts = (value, leading, np.square(value) - leading)
    sums = [np.bincount(cell, part, ranks * EXPONENTS).reshape(ranks, -1) for part in parts]
    first, high, low = (
        torch.from_numpy((total * scale).astype(np.int64))
        for total, scale in zip(sums, _SCALES, strict=True)
    )
    return ExactMoments(torch.from_numpy(count), first, *_carried(high, low))


def _carried(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """The same number with 0 <= low < 2^24, a form that is unique."""
    return high + (low >> LOW_BITS), low & ((1 << LOW_BITS) - 1)


def _total(parts: list[int], power: int) -> Fraction:
    """Σ_e part_e u_e^power."""
    total = sum(part << (power * (max(e, 1) - 1)) for e, part in enumerate(parts) if part)
    return Fraction(total, 1 << (power * 149))
