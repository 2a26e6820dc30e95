"""Estimates with their errors: intervals, and clusters of correlated tokens.

    Estimate, mean_estimate    a number with its standard error, or the reason why there is none
    mean_interval              interval of the mean of a few values, by Student's t
    share_estimate             share of hits with its standard error
    empirical_cdf              F(w) = #{x <= w} / n; "middle" counts half of the samples equal to w
    quantile_bands, quantiles  order statistics with intervals from the binomial law
    binomial_band              Clopper-Pearson interval of a probability
    clustered_ratio            ratio of sums, mean over tokens; standard error by sequence
    clustered_error            standard error of a mean, clustered by document
    clustered_share            share of tokens, interval clustered by document
    mean_limits                interval of a clustered mean

`mean_estimate` and the bands assume independent samples. Tokens of one text are correlated, so for
tokens these are lower limits of the true spread. The clustered estimates allow for it: with sums
y_g over n_g tokens of cluster g = 1, ..., G,

    m = Σ y_g / Σ n_g,      se² = G/(G-1) Σ (y_g - m n_g)² / (Σ n_g)²

and a single cluster has no standard error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from scipy import special
from torch import Tensor

from tieline.core.errors import ShapeError, require

TAIL = 0.025


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


@dataclass(frozen=True)
class Quantiles:
    """Quantiles with their intervals of order statistics (Def. 2.4)."""

    probabilities: tuple[float, ...]
    value: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def mean_estimate(samples: Float[Tensor, " n"]) -> Estimate:
    """Mean of the samples, with the standard error s / sqrt(n) of independent ones."""
    n = samples.numel()
    require(n > 0, "a mean needs at least one sample, got none", ShapeError)
    values = samples.double()
    error = values.std().item() / math.sqrt(n) if n > 1 else None
    return Estimate(values.mean().item(), error)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a mean by Student's t, for a few values such as paired runs."""
    n = len(values)
    require(n >= 2, f"an interval needs two values, got {n}", ShapeError)
    half = float(special.stdtrit(n - 1, (1 + confidence) / 2)) * stdev(values) / math.sqrt(n)
    return fmean(values) - half, fmean(values) + half


def share_estimate(hits: Bool[Tensor, " n"]) -> Estimate:
    """Share p of hits, with the standard error sqrt(p (1 - p) / n) of independent samples."""
    n, share = hits.numel(), hits.double().mean().item()
    return Estimate(share, math.sqrt(share * (1 - share) / n))


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
    p = torch.tensor(probabilities, dtype=torch.float64, device=samples.device)
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


def quantile_record(
    samples: Float[Tensor, " n"], probabilities: tuple[float, ...], confidence: float = 0.95
) -> Quantiles:
    """`quantile_bands` as a record of plain numbers."""
    bands = quantile_bands(samples, probabilities, confidence)
    return Quantiles(probabilities, *(tuple(column.tolist()) for column in bands))


def normal_quantile(confidence: float) -> float:
    """Half-width, in standard errors, of the central normal interval of that confidence."""
    require(0 < confidence < 1, f"need 0 < confidence < 1, got {confidence}")
    return float(special.ndtri((1 + confidence) / 2))


def binomial_band(count: Int[Tensor, "*shape"], n: int, confidence: float = 0.95) -> Band:
    """Clopper-Pearson interval of a probability from `count` hits out of `n`.

    Its coverage is at least `confidence` for every probability and every n, at counts 0 and n too,
    where the normal interval has no width.
    """
    require(n > 0, f"a binomial band needs n > 0, got {n=}")
    require(0 < confidence < 1, f"need 0 < confidence < 1, got {confidence}")
    counts, tail = count.cpu().numpy().astype(float), (1 - confidence) / 2
    low = special.betaincinv(counts.clip(min=0.5), n - counts + 1, tail)
    high = special.betaincinv(counts + 1, (n - counts).clip(min=0.5), 1 - tail)
    low, high = low * (counts > 0), high * (counts < n) + (counts == n)
    ends = (torch.as_tensor(end, dtype=torch.float64, device="cpu") for end in (low, high))
    return Band(*ends)


NOT_MEASURED = Estimate(None, None, "not measured")

FEW_DOCUMENTS = "fewer than 4 documents: the interval is clustered by stretches of text"

LEAST_DOCUMENTS, STRETCHES, SHORTEST = 4, 8, 32
"""Documents from which on they are the clusters; else into how many stretches the text is cut, and
how many tokens a stretch has at least."""


@dataclass(frozen=True)
class Share:
    """A share of tokens with a 95 % interval clustered by document.

    Attributes:
        value: count / total; None where the total is zero.
        low: lower limit of the interval.
        high: upper limit.
        count: tokens with the property; the rounded sum of chances.
        total: all tokens.
        design_effect: variance between documents over that of independent tokens, at least 1.
        status: "ok", or what is wrong with the interval.
    """

    value: float | None
    low: float | None
    high: float | None
    count: int
    total: int
    design_effect: float = 1.0
    status: str = "ok"


def clustered_share(
    hits: Bool[Tensor, " tokens"] | Float[Tensor, " tokens"], documents: Int[Tensor, " tokens"]
) -> Share:
    """Share of tokens with a hit, with the interval of Korn and Graubard (1998).

    With r the share, v its clustered variance, n tokens and G documents: design effect
    d = max(1, v / (r(1-r)/n)), effective size m = n/d · (t_{n-1}/t_{G-1})² with two-sided 95 %
    Student quantiles t, and the Clopper-Pearson interval of r m out of m. Where nothing or
    everything is hit v is unknown, and d = 1. An effective count below one carries no limit on its
    side: that limit is 0, or 1.

    Three documents or fewer are cut into stretches, eight in all, which then are the clusters: the
    Student quantile of one degree of freedom, 12.7, would make every interval useless. Differences
    between documents are then not in the interval.

    Args:
        hits: which tokens have the property, or the chance of each to have it.
        documents: document of each token, any numbers; the tokens of one stand in their order.
    """
    total = len(hits)
    if total == 0:
        return Share(None, None, None, 0, 0, status="no tokens")
    share = hits.double().mean().item()
    clusters, status = _document_clusters(documents)
    groups, effect, size = int(clusters.max()) + 1, 1.0, float(total)
    if groups > 1:
        error = clustered_error(hits.double(), clusters) or 0.0
        if 0 < share < 1:
            effect = max(1.0, error**2 / (share * (1 - share) / total))
        size = total / effect * (_student_quantile(total - 1) / _student_quantile(groups - 1)) ** 2
    low, high = _clopper_pearson(share * size, size)
    return Share(share, low, high, round(share * total), total, effect, status)


def _document_clusters(documents: Int[Tensor, " tokens"]) -> tuple[Int[Tensor, " tokens"], str]:
    """The cluster of each token, counted from 0, and a status: documents, or stretches of them."""
    documents = _numbered_clusters(documents)
    if int(documents.max()) + 1 >= LEAST_DOCUMENTS:
        return documents, "ok"
    length = max(SHORTEST, -(-len(documents) // STRETCHES))
    stretches = torch.zeros_like(documents)
    for document in range(int(documents.max()) + 1):
        here = documents == document
        stretches[here] = torch.arange(int(here.sum()), device=here.device) // length
    pairs = torch.stack((documents, stretches), dim=1)
    return pairs.unique(dim=0, return_inverse=True)[1], FEW_DOCUMENTS


def _numbered_clusters(documents: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
    """Numbers of documents counted from 0, in order; without a sort where they ascend."""
    steps = documents.diff()
    if bool((steps < 0).any()):
        return documents.unique(return_inverse=True)[1]
    return torch.nn.functional.pad((steps > 0).long().cumsum(dim=0), (1, 0))[: len(documents)]


def _student_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t."""
    return float(special.stdtrit(freedom, 1 - TAIL))


def _clopper_pearson(count: float, size: float) -> tuple[float, float]:
    """Interval for counts that need not be whole; without a limit beside less than one."""
    rest = max(size - count, 0.0)
    low = float(special.betaincinv(count, rest + 1, TAIL)) if count >= 1 else 0.0
    high = float(special.betaincinv(count + 1, rest, 1 - TAIL)) if rest >= 1 else 1.0
    return low, high


def mean_limits(mean: Estimate, clusters: int, positive: bool = False) -> tuple[float, float]:
    """95 % interval of a mean with a clustered standard error, by Student's quantile.

    Args:
        mean: the mean.
        clusters: how many clusters its standard error is from.
        positive: take the interval on the scale of the logarithm, as for a heavy-tailed KL, whose
            lower limit would be below zero otherwise.
    """
    value, error = mean.value, mean.standard_error
    if value is None or error is None or clusters < 2:
        return (0.0 if positive else -math.inf), math.inf
    half = _student_quantile(clusters - 1) * error
    if not positive:
        return value - half, value + half
    # beyond e^700 the factor overflows, and an interval that wide says nothing
    factor = math.exp(min(half / value, 700.0)) if value > 0 else 1.0
    return value / factor, value * factor


def clustered_error(
    values: Float[Tensor, " tokens"], documents: Int[Tensor, " tokens"]
) -> float | None:
    """Standard error of the mean of `values`, clustered by document; None with one document."""
    clusters = _numbered_clusters(documents)
    groups = int(clusters.max()) + 1 if len(clusters) else 0
    if groups < 2:
        return None
    centred = values.double() - values.double().mean()
    sums = centred.new_zeros(groups).index_add_(0, clusters, centred)
    return math.sqrt(groups / (groups - 1) * sums.square().sum().item()) / len(values)


def clustered_ratio(
    numerators: Float[Tensor, " sequences"], denominators: Float[Tensor, " sequences"]
) -> Estimate:
    """Ratio of two sums over sequences, with the standard error of independent sequences.

    The error is that of the residuals y - R x over |Σ x|, so what both have in common cancels. With
    numbers of tokens as x it is the mean per token, with its error clustered by sequence.

    Args:
        numerators: y, by sequence.
        denominators: x, by sequence, of either sign.
    """
    require(
        len(numerators) == len(denominators) > 0,
        f"{len(numerators)} sums, {len(denominators)} counts",
        ShapeError,
    )
    y, x = numerators.double(), denominators.double()
    total = x.sum().item()
    if total == 0:
        return Estimate(None, None, "undefined: divided by a sum of zero")
    ratio = y.sum().item() / total
    groups = len(y)
    if groups == 1:
        return Estimate(ratio, None)
    spread = (y - ratio * x).square().sum().item() * groups / (groups - 1)
    return Estimate(ratio, math.sqrt(spread) / abs(total))


@dataclass
class SequenceSums:
    """Sums per sequence of one quantity, batch after batch."""

    sums: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def add(self, values: Float[Tensor, "rows length"]) -> None:
        """Take the values of the tokens of some more sequences."""
        self.sums.append(values.double().sum(dim=1).cpu())
        self.counts.append(torch.full((len(values),), float(values.shape[1]), device="cpu"))

    def mean(self) -> Estimate:
        """Mean per token so far."""
        if not self.sums:
            return NOT_MEASURED
        return clustered_ratio(torch.cat(self.sums), torch.cat(self.counts))

    def joined(self, *others: "SequenceSums") -> "SequenceSums":
        """The same sequences with all quantities as further tokens: the mean over layers."""
        every = [quantity for quantity in (self, *others) if quantity.sums]
        sums = [torch.cat(quantity.sums) for quantity in every]
        counts = [torch.cat(quantity.counts) for quantity in every]
        if not sums:
            return SequenceSums()
        return SequenceSums([torch.stack(sums).sum(dim=0)], [torch.stack(counts).sum(dim=0)])
