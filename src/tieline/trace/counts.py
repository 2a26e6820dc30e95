"""Exact counts and sums that are mergeable in any order: histograms, moments, distinct sets.

`LogHistogram` counts non-negative numbers on one logarithmic grid, the same on every machine. The
grid points are e_j = 2^(-30 + j // 32) (1 + (j mod 32) / 32), j = 0, ..., 1408: 32 to an octave
from 9.3e-10 to 16384, each a float64 without rounding.

    bin 0          exactly zero: the exact ties
    bin 1          (0, e_0)
    bin 2j + 2     exactly e_j
    bin 2j + 3     (e_j, e_{j+1}); for the last j everything above, infinity included

At every grid point w both P(gap < w) and P(gap <= w) are exact counts. They differ for gaps of
low-precision scores, which lie on the grid. With w, 2w is a grid point too. A quantile is known up
to one bin, at most 1/32 of its value.

`ExactMoments` sums scores without rounding. A float32 is z = ±m u with a 24-bit integer m and the
unit u = 2^(max(e, 1) - 150) of its exponent field e. Scores of rank r are added as integers per e:

    first[r, e]                        Σ ±m              the sum of z, in units of u
    high[r, e] 2^24 + low[r, e]        Σ m²              the sum of z², in units of u²

with 0 <= low < 2^24. Every partial sum is a multiple of the unit below 2^53 of it, so that adding
floats is exact. Mean and variance are computed in rational arithmetic and rounded once.

`DistinctSketch` keeps the n = 4096 smallest different hashes. With fewer than n hashes, the count
is exact; else (n - 1) / h_n, with h_n the n-th smallest on [0, 1), estimates it with a relative
standard error of about 1 / sqrt(n - 2), 1.6 %. Sketches merge exactly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from tieline.core.errors import ParameterError, TraceError, require

_OCTAVE_BITS = 5
_LOWEST, _HIGHEST = -30, 14
_SHIFT = 52 - _OCTAVE_BITS
_FIRST_CELL = (1023 + _LOWEST) << _OCTAVE_BITS
_N_POINTS = ((_HIGHEST - _LOWEST) << _OCTAVE_BITS) + 1
N_BINS = 2 * _N_POINTS + 2


class GridCdf(NamedTuple):
    """Counts at every grid point; divide by `total` for probabilities.

    Attributes:
        points: the grid points w.
        below: number of values < w.
        at_most: number of values <= w.
        total: number of all values.
    """

    points: Float[Tensor, " points"]
    below: Int[Tensor, " points"]
    at_most: Int[Tensor, " points"]
    total: int


def grid_points() -> Float[Tensor, " points"]:
    """Return the grid points e_0 < e_1 < ... in float64."""
    cells = torch.arange(_FIRST_CELL, _FIRST_CELL + _N_POINTS, dtype=torch.int64, device="cpu")
    return (cells << _SHIFT).view(torch.float64)


@dataclass(frozen=True, eq=False)
class LogHistogram:
    """Counts of numbers per bin of the grid; sums of histograms are exact.

    Attributes:
        counts: numbers per bin, int64.
    """

    counts: Int[Tensor, " bins"]

    @classmethod
    def from_values(cls, values: Float[Tensor, " count"]) -> "LogHistogram":
        """Return the histogram of numbers >= 0, infinity included.

        The cell of a positive float64 is its exponent and its first five mantissa bits.
        """
        numbers = values.double().numpy() + 0.0  # makes minus zero a zero
        require(bool((numbers >= 0).all()), _GAP_RULE, TraceError)
        bits = numbers.view(np.int64)
        between = (bits & ((1 << _SHIFT) - 1)) != 0
        bins = 2 * ((bits >> _SHIFT) - _FIRST_CELL) + 2 + between
        bins = np.clip(bins, 1, N_BINS - 1) * (bits != 0)
        return cls(torch.from_numpy(np.bincount(bins, minlength=N_BINS)))

    def __add__(self, other: "LogHistogram") -> "LogHistogram":
        return LogHistogram(self.counts + other.counts)

    @property
    def total(self) -> int:
        """Number of values."""
        return int(self.counts.sum())

    @property
    def zeros(self) -> int:
        """Number of values that are exactly zero."""
        return int(self.counts[0])

    def at_most(self) -> Int[Tensor, " points"]:
        """Return the number of values <= e_j for each grid point; exact."""
        return self.counts.cumsum(0)[2:-1:2]

    def below(self) -> Int[Tensor, " points"]:
        """Return the number of values < e_j for each grid point; exact."""
        return self.counts.cumsum(0)[1:-2:2]

    def cdf(self) -> GridCdf:
        """Return the counts at all grid points."""
        return GridCdf(grid_points(), self.below(), self.at_most(), self.total)

    def quantile(self, probability: float) -> tuple[float, float]:
        """Return both ends of the bin with inf{w : F(w) >= probability}; equal if exact."""
        require(
            0 < probability <= 1 and self.total > 0,
            f"need a count and 0 < probability <= 1, got {self.total} and {probability}",
            ParameterError,
        )
        # n p in floating point may exceed the integer it stands for, and ceil would go one too far
        rank = max(1, math.ceil(probability * self.total - 1e-9))
        index = int(torch.searchsorted(self.counts.cumsum(0), rank))
        points = torch.cat((torch.zeros(1, dtype=torch.float64, device="cpu"), grid_points()))
        ends = points.repeat_interleave(2)
        upper = torch.cat((ends[:1], ends[2:], ends.new_tensor([math.inf])))
        return ends[index].item(), upper[index].item()


_GAP_RULE = (
    "gaps and distances must be numbers >= 0, got a negative one or one that is not a number"
)


EXPONENTS = 256
LOW_BITS = 24
_MOST_EXACT_TOKENS = 1 << 16
_UNIT_EXPONENTS = 150 - np.maximum(np.arange(EXPONENTS), 1)
_SCALES = tuple(
    np.ldexp(1.0, power)
    for power in (_UNIT_EXPONENTS, 2 * _UNIT_EXPONENTS - LOW_BITS, 2 * _UNIT_EXPONENTS)
)
_LEADING_BITS = np.uint32(0xFFFFF000)


@dataclass(frozen=True, eq=False)
class ExactMoments:
    """Exact sums of each rank's scores and of their squares, by exponent field of the score.

    Attributes:
        count: number of finite scores of each rank.
        first: sums of the scores, in units of each exponent.
        high: sums of the squares without their lower 24 bits.
        low: lower 24 bits of the sums of squares.
    """

    count: Int[Tensor, " ranks"]
    first: Int[Tensor, "ranks exponents"]
    high: Int[Tensor, "ranks exponents"]
    low: Int[Tensor, "ranks exponents"]

    @classmethod
    def from_scores(cls, scores: Float[Tensor, "tokens ranks"]) -> "ExactMoments":
        """Compute the moments of each column in float32; infinite scores are left out."""
        first, *rest = (_chunk_moments(chunk) for chunk in scores.float().split(_MOST_EXACT_TOKENS))
        return sum(rest, start=first)

    def __add__(self, other: "ExactMoments") -> "ExactMoments":
        ranks = self.first.shape[0], other.first.shape[0]
        if ranks[0] != ranks[1]:
            raise TraceError(f"scores of {ranks[0]} and of {ranks[1]} ranks cannot be added")
        squares = _carried_squares(self.high + other.high, self.low + other.low)
        return ExactMoments(self.count + other.count, self.first + other.first, *squares)

    def mean(self) -> Float[Tensor, " ranks"]:
        """Return the mean score of each rank, rounded once; NaN without scores."""
        return self._correctly_rounded(lambda count, first, _: first / count)

    def variance(self) -> Float[Tensor, " ranks"]:
        """Return the variance (1/n) Σ z² - mean² of each rank, rounded once; NaN without scores."""
        return self._correctly_rounded(
            lambda count, first, second: second / count - (first / count) ** 2
        )

    def _correctly_rounded(
        self, statistic: Callable[[int, Fraction, Fraction], Fraction]
    ) -> Tensor:
        """Return a statistic of (n, Σ z, Σ z²) of each rank, computed exactly and rounded once."""
        rows = zip(*(sums.tolist() for sums in (self.first, self.high, self.low)), strict=True)
        values = []
        for count, (first, high, low) in zip(self.count.tolist(), rows, strict=True):
            squares = [(a << LOW_BITS) + b for a, b in zip(high, low, strict=True)]
            value = (
                statistic(count, _total_over_exponents(first, 1), _total_over_exponents(squares, 2))
                if count
                else torch.nan
            )
            values.append(float(value))
        return torch.tensor(values, dtype=torch.float64, device="cpu")


def _chunk_moments(scores: Float[Tensor, "tokens ranks"]) -> ExactMoments:
    """Return the moments of at most 2^16 tokens, for which float64 sums are exact.

    z² has 48 bits, too many for a sum. The square of the leading 12 bits of z has 24 bits, and z²
    minus that square has 37, which leaves 16 bits for the number of tokens.
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
    leading = np.square((bits & _LEADING_BITS).view(np.float32).astype(np.float64)).ravel()
    terms = (value, leading, np.square(value) - leading)
    sums = [np.bincount(cell, term, ranks * EXPONENTS).reshape(ranks, -1) for term in terms]
    first, high, low = (
        torch.from_numpy((total * scale).astype(np.int64))
        for total, scale in zip(sums, _SCALES, strict=True)
    )
    return ExactMoments(torch.from_numpy(count), first, *_carried_squares(high, low))


def _carried_squares(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Carry from `low` to `high`, so that 0 <= low < 2^24; this form is unique."""
    return high + (low >> LOW_BITS), low & ((1 << LOW_BITS) - 1)


def _total_over_exponents(sums: list[int], power: int) -> Fraction:
    """Return Σ_e sums_e u_e^power exactly, with u_e the unit of exponent field e."""
    total = sum(count << (power * (max(e, 1) - 1)) for e, count in enumerate(sums) if count)
    return Fraction(total, 1 << (power * 149))


HASH_SPAN = 1 << 63


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def token_hash(
    documents: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"]
) -> Int64[np.ndarray, " tokens"]:
    """Return the hash of (document, position), in [0, 2^63)."""
    document = _mix_bits(documents.long().cpu().numpy().view(np.uint64))
    return _signed_hash(_mix_bits(document ^ positions.long().cpu().numpy().view(np.uint64)))


def coalition_hash(chosen: Int[np.ndarray, "k tokens"]) -> Int64[np.ndarray, " tokens"]:
    """Return the hash of the set of chosen experts, in [0, 2^63)."""
    hashes = _mix_bits(np.arange(1, int(chosen.max(initial=0)) + 2, dtype=np.uint64))
    return _signed_hash(_mix_bits(hashes.take(chosen).sum(0)))


def _signed_hash(hashes: np.ndarray) -> np.ndarray:
    """Return the upper 63 bits of the hashes, as int64."""
    return (hashes >> np.uint64(1)).view(np.int64)


def _mix_bits(bits: np.ndarray) -> np.ndarray:
    """Mix 64-bit numbers by the finaliser of splitmix64."""
    bits = bits + _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST_MULTIPLIER
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND_MULTIPLIER
    return bits ^ (bits >> np.uint64(31))


SKETCH_CAPACITY = 4096


class DistinctCount(NamedTuple):
    """Number of distinct elements: exact, or an estimate with a certain lower bound.

    Attributes:
        value: the count, or its estimate.
        at_least: certain lower limit (two elements with the same 63-bit hash would count as one).
        standard_error: 0 where the count is exact.
    """

    value: float
    at_least: int
    standard_error: float


@dataclass(frozen=True, eq=False)
class DistinctSketch:
    """A mergeable estimate of the number of distinct elements: their smallest different hashes.

    Attributes:
        hashes: at most `SKETCH_CAPACITY` hashes, ascending.
    """

    hashes: Int[Tensor, " kept"]

    @classmethod
    def empty(cls) -> "DistinctSketch":
        """Return a sketch without hashes."""
        return cls(torch.zeros(0, dtype=torch.int64, device="cpu"))

    def with_hashes(self, hashes: Int64[np.ndarray, " count"]) -> "DistinctSketch":
        """Return the sketch of its own hashes and these."""
        known_hashes, hashes = self.hashes.numpy(), hashes[hashes < self.ceiling]
        if len(hashes) == 0:
            return self
        ordered = np.sort(np.concatenate((known_hashes, hashes)))
        first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        return DistinctSketch(torch.from_numpy(ordered[first][:SKETCH_CAPACITY].copy()))

    def __add__(self, other: "DistinctSketch") -> "DistinctSketch":
        return self.with_hashes(other.hashes.numpy())

    @property
    def full(self) -> bool:
        """Whether `SKETCH_CAPACITY` hashes are kept, so that larger ones may have been dropped."""
        return len(self.hashes) >= SKETCH_CAPACITY

    @property
    def ceiling(self) -> int:
        """Smallest hash that can no longer change the sketch."""
        return int(self.hashes[-1]) if self.full else HASH_SPAN

    def count(self) -> DistinctCount:
        """Return the number of different hashes that were added, exact or estimated."""
        return distinct_count(self.hashes.numpy(), SKETCH_CAPACITY)


def distinct_count(hashes: Int64[np.ndarray, " kept"], capacity: int) -> DistinctCount:
    """Estimate the number of distinct elements from their `capacity` smallest hashes."""
    count = len(hashes)
    if count < capacity:
        return DistinctCount(count, count, 0.0)
    estimate = max(count, (count - 1) * HASH_SPAN / (int(hashes.max()) + 1))
    return DistinctCount(estimate, count, estimate / math.sqrt(max(count - 2, 1)))
