"""Exponents of rates, and the sample size that an error asks for.

    log(mean loss at n) = a + b log n          the papers' fit: b is the empirical rate
    n(δ) = exp((log δ - a)/b)

Intervals come from resampling repetitions within each sample size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tieline.errors import require

__all__ = ["Rate", "SampleSize", "fit_rate", "sample_size"]

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Rate:
    """A fitted power law with 95 % intervals.

    Attributes:
        slope: b.
        low: lower limit of b.
        high: upper limit of b.
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
    """Samples that bring the mean error to δ.

    Attributes:
        error: δ.
        n: the answer; infinite if the error does not fall.
        low: lower limit of the 95 % interval.
        high: upper limit.
        seen: whether n lies between the sample sizes that were tried.
    """

    error: float
    n: float
    low: float
    high: float
    seen: bool

    def __str__(self) -> str:
        how = "" if self.seen else " (beyond the sample sizes tried: extrapolated)"
        numbers = f"{_count(self.n)} samples, interval {_count(self.low)} to {_count(self.high)}"
        return f"for error {self.error:g} you need about {numbers}{how}"


def fit_rate(sizes: Sequence[int], losses: Sequence[Tensor], seed: int = 0) -> Rate:
    """The power law of mean losses.

    Args:
        sizes: n_1 < n_2 < ..., two at least.
        losses: for each n the losses of its repetitions, (R_n,).
        seed: of the resampling.
    """
    whole, draws = _lines(sizes, losses, seed)
    low, high = np.quantile(draws[:, 1], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Rate(float(whole[1]), float(low), float(high), float(whole[0]))


def sample_size(
    sizes: Sequence[int], losses: Sequence[Tensor], error: float, seed: int = 0
) -> SampleSize:
    """N that brings the mean loss to `error`, with a 95 % interval; arguments as in `fit_rate`."""
    require(error > 0, f"an error to reach is positive, got {error}")
    whole, draws = _lines(sizes, losses, seed)
    n = _crossing(whole[None], error)[0]
    found = _crossing(draws, error)
    low, high = (
        np.quantile(found, q, method="nearest") for q in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    )
    seen = bool(min(sizes) <= n <= max(sizes))
    return SampleSize(error, float(n), float(low), float(high), seen)


def _lines(
    sizes: Sequence[int], losses: Sequence[Tensor], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(a, b) of the data and of every resample."""
    require(
        len(sizes) == len(losses) >= 2 and len(set(sizes)) == len(sizes),
        f"a slope needs losses at two sample sizes or more, got {list(sizes)}",
    )
    values = [np.asarray(torch.as_tensor(part).double()) for part in losses]
    good = all(len(v) > 0 and np.isfinite(v).all() and v.mean() > 0 for v in values)
    require(good, "a slope needs finite losses with a positive mean at every sample size")
    random = np.random.default_rng(seed)
    means = np.stack([_means(v, random) for v in values], axis=1)
    log_n = np.log(np.asarray(sizes, dtype=float))
    design = np.linalg.pinv(np.stack([np.ones_like(log_n), log_n], axis=1))
    with np.errstate(divide="ignore"):
        lines = np.log(np.maximum(means, 1e-300)) @ design.T
    return lines[0], lines[1:]


def _means(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The mean, then the means of resamples."""
    drawn = values[random.integers(len(values), size=(RESAMPLES, len(values)))].mean(1)
    return np.concatenate([[values.mean()], drawn])


def _crossing(lines: np.ndarray, error: float) -> np.ndarray:
    """N where the line reaches the error, infinite where it does not fall."""
    a, b = lines[:, 0], lines[:, 1]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        found = np.exp((math.log(error) - a) / b)
    return np.where(b < 0, found, np.inf)


def _count(n: float) -> str:
    return f"{n:.3g}" if n >= 1e6 or not math.isfinite(n) else f"{n:,.0f}"
