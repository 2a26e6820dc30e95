"""Numerical tools that several rooms share; each says where it holds.

    Estimate         a number with its standard error, or the reason why there is none
    empirical_cdf    F(w) = #{x <= w} / n; "middle" counts half of the samples equal to w
    quantile_bands   order statistics with the interval that the binomial law gives them
    binomial_band    Clopper-Pearson interval of a probability
    log_grid         points at equal ratios
    float_step       distance between the neighbours of a number in a floating-point format
    round_to_step    nearest multiple of a step, halves to even
    one_thread       torch on one thread, for loops of small operations

Standard errors and bands assume independent samples. Tokens of one text are correlated, so for
token statistics they are lower limits of the true spread.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from scipy import special
from torch import Tensor

from tieline.core.errors import ShapeError, require

__all__ = [
    "Band",
    "Estimate",
    "QuantileBand",
    "binomial_band",
    "empirical_cdf",
    "float_step",
    "log_grid",
    "mean_estimate",
    "normal_quantile",
    "one_thread",
    "quantile_bands",
    "round_to_step",
]


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error; `status` is "ok" or says what is wrong with it.

    Attributes:
        value: the estimate; None where the data cannot give one.
        standard_error: its standard error under independent samples; None where unknown.
        status: "ok", or the reason in words.
    """

    value: float | None
    standard_error: float | None = None
    status: str = "ok"

    @property
    def stderr(self) -> float | None:
        """`standard_error` by its short name."""
        return self.standard_error

    def times(self, factor: float) -> "Estimate":
        """The estimate of `factor` times the quantity."""
        if self.value is None:
            return self
        error = None if self.standard_error is None else abs(factor) * self.standard_error
        return Estimate(factor * self.value, error, self.status)

    def plus(self, other: "Estimate") -> "Estimate":
        """The estimate of a sum, as if the two errors were independent."""
        if self.value is None or other.value is None:
            return self if self.value is None else other
        error = math.hypot(self.standard_error or 0.0, other.standard_error or 0.0)
        return Estimate(
            self.value + other.value, error, self.status if other.status == "ok" else other.status
        )


class Band(NamedTuple):
    """Lower and upper limits of an interval."""

    low: Float[Tensor, "*shape"]
    high: Float[Tensor, "*shape"]


class QuantileBand(NamedTuple):
    """Quantiles with the limits of their intervals."""

    value: Float[Tensor, " probabilities"]
    low: Float[Tensor, " probabilities"]
    high: Float[Tensor, " probabilities"]


def mean_estimate(samples: Float[Tensor, " n"]) -> Estimate:
    """Mean of the samples, with the standard error s / sqrt(n) of independent ones."""
    n = samples.numel()
    require(n > 0, "a mean needs at least one sample, got none", ShapeError)
    values = samples.double()
    error = values.std().item() / math.sqrt(n) if n > 1 else None
    return Estimate(values.mean().item(), error)


def empirical_cdf(
    samples: Float[Tensor, " n"],
    at: Float[Tensor, "*grid"],
    side: Literal["right", "middle"] = "right",
) -> Float[Tensor, "*grid"]:
    """F(w) = #{x <= w} / n, in float64.

    "middle" gives (#{x < w} + #{x <= w}) / 2n instead: the same for continuous samples, and free
    of the shift by half a step that samples on a grid (gaps of bfloat16 scores) put into F.
    """
    require(samples.numel() > 0, "a cdf needs at least one sample, got none", ShapeError)
    ordered, points = samples.double().sort().values, at.to(torch.float64)
    count = torch.searchsorted(ordered, points, right=True).double()
    if side == "middle":
        count = (count + torch.searchsorted(ordered, points, right=False)) / 2
    return count / samples.numel()


def quantile_bands(
    samples: Float[Tensor, " n"], probabilities: Sequence[float], confidence: float = 0.95
) -> QuantileBand:
    """Quantiles F^-1(p) = inf{x : F(x) >= p} and their normal-approximation rank intervals.

    The number of samples below the true quantile is binomial (n, p), so that the order statistics
    n p -+ z sqrt(n p (1 - p)) hold it between them. No interpolation: infinities stay infinities.
    """
    n = samples.numel()
    require(n > 0, "quantiles need at least one sample, got none", ShapeError)
    p = torch.tensor(probabilities, dtype=torch.float64)
    require(bool(((p >= 0) & (p <= 1)).all()), f"need 0 <= p <= 1, got {list(probabilities)}")
    ordered = samples.double().sort().values
    # n p in floating point may exceed the integer it stands for, and ceil would go one too far
    rank = (n * p - 1e-9).ceil()
    half = normal_quantile(confidence) * (n * p * (1 - p)).sqrt()
    take = [
        ordered[(r.round().long() - 1).clamp(0, n - 1)]
        for r in (rank, (rank - half).floor(), (rank + half).ceil())
    ]
    return QuantileBand(*take)


def normal_quantile(confidence: float) -> float:
    """Half-width, in standard errors, of the central normal interval of that confidence."""
    require(0 < confidence < 1, f"need 0 < confidence < 1, got {confidence}")
    return float(special.ndtri((1 + confidence) / 2))


def binomial_band(count: Int[Tensor, "*shape"], n: int, confidence: float = 0.95) -> Band:
    """Clopper-Pearson interval of a probability of which `count` out of `n` were seen.

    Its coverage is at least `confidence` for every probability and every n, at counts 0 and n too,
    where the normal interval has no width.
    """
    require(n > 0, f"a binomial band needs n > 0, got {n=}")
    require(0 < confidence < 1, f"need 0 < confidence < 1, got {confidence}")
    seen, tail = count.cpu().numpy().astype(float), (1 - confidence) / 2
    low = special.betaincinv(seen.clip(min=0.5), n - seen + 1, tail)
    high = special.betaincinv(seen + 1, (n - seen).clip(min=0.5), 1 - tail)
    low, high = low * (seen > 0), high * (seen < n) + (seen == n)
    return Band(torch.as_tensor(low).double(), torch.as_tensor(high).double())


def log_grid(low: float, high: float, per_decade: int) -> Float[Tensor, " points"]:
    """Points from `low` to `high` at equal ratios, both ends exact, in float64."""
    require(0 < low < high and per_decade > 0, f"need 0 < low < high, got {low=}, {high=}")
    n = max(1, round(per_decade * math.log10(high / low)))
    grid = torch.logspace(math.log10(low), math.log10(high), n + 1, dtype=torch.float64)
    grid[0], grid[-1] = low, high
    return grid


def float_step(
    values: Float[Tensor, "*shape"], mantissa_bits: int, min_exponent: int
) -> Float[Tensor, "*shape"]:
    """Step 2^(max(floor(log2|x|), e_min) - b) of a format with b stored bits, in float64.

    Exact: the exponent is read from the number, not from a logarithm. Below 2^e_min the format is
    subnormal and its step constant.
    """
    exponent = torch.frexp(values.double()).exponent - 1
    exponent = exponent.masked_fill(values == 0, min_exponent).clamp(min=min_exponent)
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - mantissa_bits)


def round_to_step(
    values: Float[Tensor, "*shape"], step: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Multiple of `step` nearest to each value, halves to the even multiple, in float64."""
    return (values.double() / step).round() * step


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside the block.

    Loops of small operations lose more by the meeting of threads after each than they gain: on a
    busy machine of two cores the quadrature of `geometry.flips` was ten times slower with two.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
