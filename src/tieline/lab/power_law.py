"""Power laws of losses with resampled intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tieline.core.errors import require

CONFIDENCE = 0.95

RESAMPLES = 2000


Middle = Literal["mean", "median"] | float
"""Statistic of the repetitions of one sample size; a number is the level of a quantile."""


@dataclass(frozen=True)
class PowerLaw:
    """A fitted power law log y = a + b log n, with the 95 % interval of b.

    Attributes:
        slope: b.
        low: lower limit of the 95 % interval of b.
        high: upper limit of the 95 % interval of b.
        intercept: a.
    """

    slope: float
    low: float
    high: float
    intercept: float

    def __str__(self) -> str:
        return f"{self.slope:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class SampleSize:
    """Number of samples at which the mean error reaches δ.

    Attributes:
        error: δ.
        n: number of samples; infinite if the error does not fall.
        low: lower limit of the 95 % interval.
        high: upper limit.
        seen: whether n lies within the range of sample sizes tried.
    """

    error: float
    n: float
    low: float
    high: float
    seen: bool

    def __str__(self) -> str:
        note = "" if self.seen else " (beyond the sample sizes tried: extrapolated)"
        size, low, high = (_size_text(n) for n in (self.n, self.low, self.high))
        interval = f"interval {low} to {high}{note}"
        return f"for error {self.error:g} you need about {size} samples, {interval}"


def fit_rate(
    sizes: Sequence[int], losses: Sequence[Tensor], seed: int = 0, middle: Middle = "mean"
) -> PowerLaw:
    """Fit a power law to the mean or median of the losses, with a bootstrap interval of b.

    Args:
        sizes: n_1 < n_2 < ..., at least two.
        losses: losses (R_n,) of the repetitions at each n.
        seed: of the resampling.
        middle: statistic of the repetitions: "mean"; or "median" or the level of a quantile, for a
            law in probability that outliers do not change.
    """
    fitted, draws = _fitted_lines(sizes, losses, seed, middle)
    low, high = np.quantile(draws[:, 1], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return PowerLaw(float(fitted[1]), float(low), float(high), float(fitted[0]))


def sample_size(
    sizes: Sequence[int], losses: Sequence[Tensor], error: float, seed: int = 0
) -> SampleSize:
    """Return the sample size at which the mean loss reaches `error`; arguments as in `fit_rate`."""
    require(error > 0, f"an error to reach is positive, got {error}")
    fitted, draws = _fitted_lines(sizes, losses, seed)
    n = _crossing_size(fitted[None], error)[0]
    crossings = _crossing_size(draws, error)
    low, high = (
        np.quantile(crossings, q, method="nearest")
        for q in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    )
    observed = bool(min(sizes) <= n <= max(sizes))
    return SampleSize(error, float(n), float(low), float(high), observed)


def _fitted_lines(
    sizes: Sequence[int], losses: Sequence[Tensor], seed: int, middle: Middle = "mean"
) -> tuple[np.ndarray, np.ndarray]:
    """Return (a, b) of the data and of every resample (RESAMPLES, 2)."""
    require(
        len(sizes) == len(losses) >= 2 and len(set(sizes)) == len(sizes),
        f"a slope needs losses at two sample sizes or more, got {list(sizes)}",
    )
    values = [np.asarray(torch.as_tensor(loss).double()) for loss in losses]
    good = all(len(v) > 0 and np.isfinite(v).all() and v.mean() > 0 for v in values)
    require(good, "a slope needs finite losses with a positive mean at every sample size")
    random = np.random.default_rng(seed)
    middles = np.stack([_resampled_middles(v, random, middle) for v in values])
    with np.errstate(divide="ignore"):
        b, a = np.polyfit(
            np.log(np.asarray(sizes, dtype=float)), np.log(np.maximum(middles, 1e-300)), 1
        )
    lines = np.stack([a, b], axis=1)
    return lines[0], lines[1:]


def _resampled_middles(
    values: np.ndarray, random: np.random.Generator, middle: Middle
) -> np.ndarray:
    """Return mean or quantile of the values, then of every resample."""
    resampled = values[random.integers(len(values), size=(RESAMPLES, len(values)))]
    if middle == "mean":
        return np.concatenate([[values.mean()], resampled.mean(axis=1)])
    level = 0.5 if middle == "median" else float(middle)
    return np.concatenate([[np.quantile(values, level)], np.quantile(resampled, level, axis=1)])


def _crossing_size(lines: np.ndarray, error: float) -> np.ndarray:
    """Return the sample size at which each line reaches the error, infinite if it does not fall."""
    a, b = lines[:, 0], lines[:, 1]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        sizes = np.exp((math.log(error) - a) / b)
    return np.where(b < 0, sizes, np.inf)


def _size_text(n: float) -> str:
    """Return a sample size with separators, or with three digits from a million on."""
    return f"{n:.3g}" if n >= 1e6 or not math.isfinite(n) else f"{n:,.0f}"


def exponent(x: Sequence[float | int], y: Sequence[float | int]) -> float:
    """Return the exponent p of |y| ~ x^p, by least squares of logarithms."""
    require(len(x) == len(y) > 1, f"a slope needs two points or more, got {len(x)} and {len(y)}")
    log_x, log_y = ([math.log(abs(value)) for value in values] for values in (x, y))
    return float(np.polyfit(log_x, log_y, 1)[0])
