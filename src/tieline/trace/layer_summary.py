"""What a streaming summary knows of one layer: integers that add up, whatever the order.

load             tokens that chose each expert
gaps             counts of the gap on the grid of `tieline.trace.grid`
near             counts of K(ε) = #{i : z_i > z_[k] - ε} for each ε
orders           counts of the order of tie: 0 if z_[k] - z_[k+1] >= ε,
                 else #{i : |z_i - z_[k]| < ε} - 1
moments          exact sums of z_[r] and z_[r]²
coalitions       sketch of the different sets of chosen experts
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.trace.distinct import DistinctSketch
from tieline.trace.grid import GridCdf, LogHistogram
from tieline.trace.moments import ExactMoments
from tieline.trace.record import LayerFacts

__all__ = ["MOST_TOKENS", "LayerSummary", "SharedBias", "TokenKey", "merge_layers"]

_BYTE = torch.uint8
MOST_TOKENS = 1 << 38
"""Largest number of tokens of which no count and no exact sum overflows."""


class TokenKey(NamedTuple):
    """Where a token is."""

    document: int
    position: int


@dataclass(frozen=True, eq=False)
class SharedBias:
    """The correction bias of all tokens, if they had one in common.

    Attributes:
        value: the bias (E,); None where the router has none, or where it changed.
        changed: whether two batches had different biases (during training).
    """

    value: Float[Tensor, " experts"] | None = None
    changed: bool = False

    def __add__(self, other: "SharedBias") -> "SharedBias":
        same = _equal(self.value, other.value) and not (self.changed or other.changed)
        return self if same else SharedBias(None, changed=True)


@dataclass(frozen=True, eq=False)
class LayerSummary:
    """Statistics of one layer over all tokens of a run.

    Tokens whose scores are not finite count in `tokens`, `nonfinite`, `load` and `coalitions` only.
    What the source did not record is None.

    Attributes:
        name: qualified name of the router module.
        facts: how the router chooses.
        tokens: number of tokens.
        load: tokens that chose each expert; sums to k times `tokens`.
        coalitions: sketch of the different sets of chosen experts.
        bias: correction bias that the selection scores contain.
        nonfinite: number of tokens with a score that is not finite among the first k.
        first_nonfinite: the first of them by document and position.
        gaps: counts of `LayerTrace.gap`; exact ties are its zeros.
        group_gaps: counts of the gap between chosen and other groups.
        group_decides: tokens whose gap is that between groups, smaller than that between experts.
        distances: counts of the Euclidean distance to the nearest tie.
        near: counts of K(ε) = 0, ..., E, per ε.
        orders: counts of the orders 0, ..., E - 1 of tie, per ε.
        moments: exact moments of the score of each kept rank.
    """

    name: str
    facts: LayerFacts
    tokens: int
    load: Int[Tensor, " experts"]
    coalitions: DistinctSketch
    bias: SharedBias = SharedBias()
    nonfinite: int = 0
    first_nonfinite: TokenKey | None = None
    gaps: LogHistogram | None = None
    group_gaps: LogHistogram | None = None
    group_decides: int = 0
    distances: LogHistogram | None = None
    near: Int[Tensor, "epsilons counts"] | None = None
    orders: Int[Tensor, "epsilons orders"] | None = None
    moments: ExactMoments | None = None

    @property
    def measured(self) -> int:
        """Number of tokens with finite scores: the total of every histogram."""
        return self.tokens - self.nonfinite

    @property
    def exact_ties(self) -> int:
        """Number of tokens whose gap is exactly zero."""
        return self.known_gaps().zeros

    def known_gaps(self) -> LogHistogram:
        """The gap histogram, or the reason why there is none."""
        if self.gaps is None:
            raise TraceError(f"layer {self.name!r} has ids only: no gaps can be computed from it")
        return self.gaps

    def gap_cdf(self) -> GridCdf:
        """#{gap < w} and #{gap <= w} at every point w of the grid; exact."""
        return self.known_gaps().cdf()

    def gap_quantiles(self, probabilities: Sequence[float]) -> tuple[tuple[float, float], ...]:
        """For each probability the ends of the bin that holds the quantile of the gap."""
        return tuple(self.known_gaps().quantile(probability) for probability in probabilities)

    def mean_near(self) -> Float[Tensor, " epsilons"]:
        """Mean of K(ε) per ε, in float64."""
        if self.near is None:
            raise TraceError(f"layer {self.name!r} was summarised without counts K(ε)")
        counts = torch.arange(self.near.shape[1], dtype=torch.float64)
        return (self.near.double() @ counts) / self.measured


_SUMS = ("tokens", "load", "coalitions", "bias", "nonfinite", "group_decides")
_OPTIONAL_SUMS = ("gaps", "group_gaps", "distances", "near", "orders", "moments")


def merge_layers(first: LayerSummary, second: LayerSummary) -> LayerSummary:
    """The summary of the tokens of both; exact, commutative and associative."""
    _require_alike(first, second)
    merged = {name: getattr(first, name) + getattr(second, name) for name in _SUMS}
    for name in _OPTIONAL_SUMS:
        one, other = getattr(first, name), getattr(second, name)
        merged[name] = None if one is None else one + other
    keys = [s.first_nonfinite for s in (first, second) if s.first_nonfinite is not None]
    require(
        merged["tokens"] <= MOST_TOKENS,
        f"a summary holds at most 2^38 tokens, got {merged['tokens']}",
        TraceError,
    )
    return LayerSummary(
        name=first.name, facts=first.facts, first_nonfinite=min(keys, default=None), **merged
    )


def _require_alike(first: LayerSummary, second: LayerSummary) -> None:
    same = first.name == second.name and first.facts == second.facts
    require(
        same,
        f"layers must be the same router: {first.name!r} {first.facts} is not "
        f"{second.name!r} {second.facts}",
        TraceError,
    )
    for name in _OPTIONAL_SUMS:
        one, other = getattr(first, name), getattr(second, name)
        require(
            (one is None) == (other is None) and _shape(one) == _shape(other),
            f"layer {first.name!r}: {name} was recorded in one part and not, or otherwise, "
            "in another",
            TraceError,
        )


def _shape(value: object) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    first, second = first.contiguous(), second.contiguous()  # NaNs are compared bit by bit
    return first.dtype == second.dtype and torch.equal(first.view(_BYTE), second.view(_BYTE))
