"""Soft and hard population risks of any mixture, from its scores, outputs and target on a sample.

    h_τ(x) = Σ_k softmax(a(x)/τ)_k f_k(x)      soft prediction, eq. 2.3
    h_0(x) = f_{k*}(x), k* = argmax a(x)       hard prediction, lower index first on a tie
    L_τ = E[(Y - h_τ)²],  L_0 = E[(Y - h_0)²]  eq. 4.1 and 4.2

Every number is an `Estimate` with `.value` and `.stderr`; differences are paired on the sample, so
that their error is that of the boundary layer and not that of the risk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.numerics import Estimate, mean_estimate
from tieline.ranking import gap, ranked_scores, stable_topk

__all__ = [
    "MoESample",
    "RiskCurve",
    "evaluate",
    "hard_predictions",
    "hard_risk",
    "risk_curve",
    "risk_gap",
    "soft_predictions",
    "soft_risk",
    "winner_odds",
]


@dataclass(frozen=True, eq=False)
class MoESample:
    """A mixture of scalar experts seen at n inputs; two experts at least, all finite.

    Attributes:
        scores: (n, E) router scores a_k(x).
        outputs: (n, E) expert values f_k(x).
        target: (n,) the target Y, or μ(x) for risks without noise.
    """

    scores: Float[Tensor, "n experts"]
    outputs: Float[Tensor, "n experts"]
    target: Float[Tensor, " n"]

    def __post_init__(self) -> None:
        n, experts = self.scores.shape
        require(
            n > 1 and experts > 1,
            f"need 2 inputs and 2 experts or more, got {n} and {experts}",
            ShapeError,
        )
        for name in ("scores", "outputs", "target"):
            bad = int((~torch.isfinite(getattr(self, name))).sum())
            require(bad == 0, f"{name} must be finite, got {bad} values that are not")

    @property
    def margin(self) -> Float[Tensor, " n"]:
        """Δ = a_(1) - a_(2) in float64."""
        return gap(self.scores, 1)

    @property
    def winner(self) -> Int[Tensor, " n"]:
        """k*(x)."""
        return stable_topk(self.scores, 1).indices.squeeze(1)


@dataclass(frozen=True)
class RiskCurve:
    """L_τ against τ beside L_0.

    Attributes:
        taus: temperatures.
        soft: L_τ at each.
        gaps: L_τ - L_0, paired.
        hard: L_0.
    """

    taus: tuple[float, ...]
    soft: tuple[Estimate, ...]
    gaps: tuple[Estimate, ...]
    hard: Estimate


def evaluate(
    router: Callable[[Tensor], Tensor],
    experts: Callable[[Tensor], Tensor],
    target: Callable[[Tensor], Tensor],
    inputs: Float[Tensor, "n width"],
) -> MoESample:
    """`MoESample` of any router, experts and target at given inputs, in float64.

    Args:
        router: inputs (n, D) to scores (n, E).
        experts: inputs to the values (n, E) of all experts.
        target: inputs to (n,).
        inputs: a sample of the population.
    """
    with torch.no_grad():
        values = (function(inputs).double() for function in (router, experts, target))
        return MoESample(*values)


def soft_predictions(sample: MoESample, tau: float) -> Float[Tensor, " n"]:
    """h_τ."""
    check_temperature(tau)
    weights = (sample.scores.double() / tau).softmax(dim=1)
    return (weights * sample.outputs).sum(dim=1)


def hard_predictions(sample: MoESample) -> Float[Tensor, " n"]:
    """h_0."""
    return sample.outputs.double().gather(1, sample.winner[:, None]).squeeze(1)


def soft_risk(sample: MoESample, tau: float) -> Estimate:
    """L_τ = E[(Y - h_τ)²]."""
    return mean_estimate((sample.target - soft_predictions(sample, tau)).square())


def hard_risk(sample: MoESample) -> Estimate:
    """L_0 = E[(Y - h_0)²]."""
    return mean_estimate((sample.target - hard_predictions(sample)).square())


def risk_gap(sample: MoESample, tau: float) -> Estimate:
    """L_τ - L_0 with the standard error of the paired differences."""
    soft, hard = soft_predictions(sample, tau), hard_predictions(sample)
    return mean_estimate((hard - soft) * (2 * sample.target - soft - hard))


def risk_curve(sample: MoESample, taus: Sequence[float]) -> RiskCurve:
    """L_τ, L_τ - L_0 and L_0 at each temperature."""
    soft = tuple(soft_risk(sample, tau) for tau in taus)
    gaps = tuple(risk_gap(sample, tau) for tau in taus)
    return RiskCurve(tuple(taus), soft, gaps, hard_risk(sample))


def winner_odds(sample: MoESample, tau: float) -> Float[Tensor, " n"]:
    """log((1 - p)/p) of the winner's weight p, exact where 1 - p is below the spacing of floats."""
    check_temperature(tau)
    ranked = ranked_scores(sample.scores, sample.scores.shape[1])
    return ((ranked[:, 1:] - ranked[:, :1]) / tau).logsumexp(dim=1)


def check_temperature(tau: float) -> None:
    """Refuse a temperature at which softmax is not defined."""
    require(tau > 0, f"need a temperature tau > 0, got {tau=}")
