"""Shares of tokens with intervals that know that tokens of one document are alike.

For n tokens in G documents, of which f_g of n_g flip in document g, r = Σf_g / n:

    clustered variance   v = G/(G-1) Σ (f_g - r n_g)² / n²
    design effect        d = max(1, v / (r(1-r)/n))
    effective size       m = n/d · (t_{n-1}/t_{G-1})²       t the two-sided 95 % Student quantiles
    interval             Clopper-Pearson of r m out of m    (Korn and Graubard 1998)

The plain normal interval has no width where nothing flips, and bounds below zero where little does.
With one document, or where nothing or everything flips, v says nothing and tokens count as
independent.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from scipy import special
from torch import Tensor

from tieline.audit.diff.records import Rate

__all__ = ["clustered_error", "clustered_rate"]

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
