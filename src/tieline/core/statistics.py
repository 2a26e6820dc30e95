"""Shares of tokens with intervals that know that tokens of one document are alike.

For n tokens in G documents, of which f_g of n_g flip in document g, r = Σf_g / n:

    clustered variance   v = G/(G-1) Σ (f_g - r n_g)² / n²
    design effect        d = max(1, v / (r(1-r)/n))
    effective size       m = n/d · (t_{n-1}/t_{G-1})²       t the two-sided 95 % Student quantiles
    interval             Clopper-Pearson of r m out of m    (Korn and Graubard 1998)

The plain normal interval has no width where nothing flips, and bounds below zero where little does.
With one document, or where nothing or everything flips, v says nothing and tokens count as
independent.

Means over tokens whose standard errors know that tokens of a sequence belong together.

    m = Σ_s y_s / Σ_s n_s,    se² = S/(S-1) · Σ_s (y_s - m n_s)² / (Σ_s n_s)²

for sequences s = 1, ..., S with sums y_s over n_s tokens: the ratio estimator whose clusters are
the sequences. A single sequence tells no spread.

Exponents of rates, and the sample size that an error asks for.

    log(mean loss at n) = a + b log n          the papers' fit: b is the empirical rate
    n(δ) = exp((log δ - a)/b)

Intervals come from resampling repetitions within each sample size.

Exponents of power laws, by which rates are tested.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import special
from torch import Tensor

from tieline.analysis.diff_records import Rate
from tieline.core.errors import ShapeError, require
from tieline.core.numerics import Estimate
from tieline.papers.claim import Real

__all__ = [
    "Rate",
    "SampleSize",
    "SequenceSums",
    "clustered_error",
    "clustered_mean",
    "clustered_rate",
    "exponent",
    "fit_rate",
    "sample_size",
]

TAIL = 0.025
ONE_DOCUMENT = "one document only: the interval assumes independent tokens"


def clustered_rate(hits: Bool[Tensor, " tokens"], documents: Int[Tensor, " tokens"]) -> Rate:
    """Share of tokens with a hit and its interval.

    Args:
        hits: which tokens did.
        documents: document of each, any numbers.
    """
    total, count = len(hits), int(hits.sum())
    if total == 0:
        return Rate(None, None, None, 0, 0, status="no tokens")
    share, groups = count / total, len(documents.unique())
    effect, size = 1.0, float(total)
    if groups > 1 and 0 < count < total:
        error = clustered_error(hits.double(), documents) or 0.0
        effect = max(1.0, error**2 / (share * (1 - share) / total))
        size = total / effect * (_student(total - 1) / _student(groups - 1)) ** 2
    low, high = _clopper_pearson(share * size, size)
    status = "ok" if groups > 1 else ONE_DOCUMENT
    return Rate(share, low, high, count, total, effect, status)


def clustered_error(
    values: Float[Tensor, " tokens"], documents: Int[Tensor, " tokens"]
) -> float | None:
    """Standard error of the mean of `values`, documents being independent; None for one of them."""
    places = documents.unique(return_inverse=True)[1]
    groups = int(places.max()) + 1 if len(places) else 0
    if groups < 2:
        return None
    centred = values.double() - values.double().mean()
    sums = torch.zeros(groups, dtype=torch.float64).index_add_(0, places, centred)
    return math.sqrt(groups / (groups - 1) * sums.square().sum().item()) / len(values)


def _student(freedom: int) -> float:
    return float(special.stdtrit(freedom, 1 - TAIL))


def _clopper_pearson(count: float, size: float) -> tuple[float, float]:
    """The interval for numbers that need not be whole."""
    rest = max(size - count, 0.0)
    low = float(special.betaincinv(count, rest + 1, TAIL)) if count > 0 else 0.0
    high = float(special.betaincinv(count + 1, rest, 1 - TAIL)) if rest > 0 else 1.0
    return low, high


NOT_MEASURED = Estimate(None, None, "not measured")


def clustered_mean(
    sums: Float[Tensor, " sequences"], counts: Float[Tensor, " sequences"]
) -> Estimate:
    """Mean per token with the standard error clustered by sequence.

    Args:
        sums: sum of the quantity over the tokens of each sequence.
        counts: number of these tokens, positive in all.
    """
    require(len(sums) == len(counts) > 0, f"{len(sums)} sums, {len(counts)} counts", ShapeError)
    y, n = sums.double(), counts.double()
    mean = (y.sum() / n.sum()).item()
    groups = len(y)
    if groups == 1:
        return Estimate(mean, None)
    spread = (y - mean * n).square().sum().item() * groups / (groups - 1)
    return Estimate(mean, math.sqrt(spread) / n.sum().item())


@dataclass
class SequenceSums:
    """Sums per sequence of one quantity, batch after batch."""

    sums: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def add(self, values: Float[Tensor, "rows length"]) -> None:
        """Take the values of the tokens of some more sequences."""
        self.sums.append(values.double().sum(dim=1).cpu())
        self.counts.append(torch.full((len(values),), float(values.shape[1])))

    def mean(self) -> Estimate:
        """Mean per token so far."""
        if not self.sums:
            return NOT_MEASURED
        return clustered_mean(torch.cat(self.sums), torch.cat(self.counts))

    def joined(self, *others: "SequenceSums") -> "SequenceSums":
        """The same sequences with all quantities as further tokens: the mean over layers."""
        every = [whole for whole in (self, *others) if whole.sums]
        parts = [torch.cat(whole.sums) for whole in every]
        counts = [torch.cat(whole.counts) for whole in every]
        if not parts:
            return SequenceSums()
        return SequenceSums([torch.stack(parts).sum(dim=0)], [torch.stack(counts).sum(dim=0)])


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


def exponent(x: Sequence[Real], y: Sequence[Real]) -> float:
    """P of |y| ~ x^p by least squares of logarithms."""
    require(len(x) == len(y) > 1, f"a slope needs two points or more, got {len(x)} and {len(y)}")
    a, b = (torch.tensor([math.log(abs(v)) for v in values]).double() for values in (x, y))
    a = a - a.mean()
    return ((a * b).sum() / a.square().sum()).item()
