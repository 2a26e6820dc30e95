"""Soft and hard risks of any mixture, from its scores, outputs and target on a sample.

    h_τ(x) = Σ_k softmax(a(x)/τ)_k f_k(x)      soft prediction, eq. 2.3
    h_0(x) = f_{k*}(x), k* = argmax a(x)       hard prediction, lower index first on a tie
    L_τ = E[(Y - h_τ)²],  L_0 = E[(Y - h_0)²]  eq. 4.1 and 4.2

    soft_to_hard_constant   C_sh = 4 B_f (B_Y + B_f)(E - 1) C Γ(α + 1)           Theorem 4.5
    coarea_constant         C_co = 4 B_f (B_Y + B_f)(E - 1)(C_margin + 1)        Corollary 4.4
    boundary_constant       (B + B_stu)² beside the paper's 2B² + 2B_stu²        Lemma 5.5
    risk_decomposition      L̃ = L̃_int + L̃_bdry,  L̃_bdry <= (B + B_stu)² P(U_ε)   Lemma 5.5
    cell_control            E[(μ - h)² 1_A] >= ½ E[(f_k - f*_k)² 1_A] - 4 B_stu² ε² P(A)  Prop. 5.8

with U_ε(τ) = {max_k p_k <= 1 - ε} the ambiguous layer (eq. 5.3), G_ε its complement, and
A = Ω*_k ∩ {p_k >= 1 - ε}. Ambiguity is decided on log-odds, since 1 - ε rounds to 1 for small ε.
The constants are upper bounds; `tieline.lab.limits.temperature_limit` gives the exact first order.

Every number is an `Estimate`; differences are paired on the sample, so their error is that of the
boundary layer and not that of the risk.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import gap, ranked_scores, stable_topk
from tieline.core.statistics import Estimate, mean_estimate

__all__ = [
    "BoundaryConstant",
    "CellControl",
    "MoESample",
    "RiskCurve",
    "RiskDecomposition",
    "ambiguous",
    "boundary_constant",
    "cell_control",
    "coarea_constant",
    "confident_expert",
    "evaluate",
    "hard_predictions",
    "hard_risk",
    "risk_curve",
    "risk_decomposition",
    "risk_gap",
    "soft_predictions",
    "soft_risk",
    "soft_to_hard_constant",
    "winner_odds",
]


@dataclass(frozen=True, eq=False)
class MoESample:
    """A mixture of two or more scalar experts, evaluated at n inputs."""

    scores: Float[Tensor, "n experts"]  # (n, E) router scores a_k(x)
    outputs: Float[Tensor, "n experts"]  # (n, E) expert values f_k(x)
    target: Float[Tensor, " n"]  # (n,) the target Y, or μ(x) for risks without noise

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
        """k*(x), the expert with the largest score."""
        return stable_topk(self.scores, 1).indices.squeeze(1)


@dataclass(frozen=True)
class RiskCurve:
    """L_τ against τ beside L_0."""

    taus: tuple[float, ...]  # temperatures
    soft: tuple[Estimate, ...]  # L_τ at each
    gaps: tuple[Estimate, ...]  # L_τ - L_0, paired
    hard: Estimate  # L_0


@dataclass(frozen=True)
class BoundaryConstant:
    """Bound of (μ - h)²: the paper's 2B² + 2B_stu², and the sharp (B + B_stu)²."""

    paper: float
    sharp: float


@dataclass(frozen=True)
class RiskDecomposition:
    """The two parts of L̃_τ and bounds of the second."""

    total: Estimate  # L̃_τ
    interior: Estimate  # L̃_int = E[(μ - h)² 1_G]
    boundary: Estimate  # L̃_bdry = E[(μ - h)² 1_U]
    mass: Estimate  # BM(τ; ε) = P(U)
    constant: BoundaryConstant  # bounds of (μ - h)², the paper's and the sharp one
    paper_bound: Estimate  # (2B² + 2B_stu²) P(U)
    sharp_bound: Estimate  # (B + B_stu)² P(U)


@dataclass(frozen=True)
class CellControl:
    """Both sides of Proposition 5.8 for one cell."""

    cell: int  # k
    mass: Estimate  # P(A_{k,ε})
    left: Estimate  # E[(μ - h)² 1_A]
    right: Estimate  # ½ E[(f_k - f*_k)² 1_A] - 4 B_stu² ε² P(A)
    slack: Estimate  # left - right, paired; never negative


def evaluate(
    router: Callable[[Tensor], Tensor],
    experts: Callable[[Tensor], Tensor],
    target: Callable[[Tensor], Tensor],
    inputs: Float[Tensor, "n dim"],
) -> MoESample:
    """`MoESample` of any router, experts and target at given inputs, in float64.

    Router and experts map inputs (n, D) to scores and values (n, E), the target to (n,).
    """
    with torch.no_grad():
        values = (function(inputs).double() for function in (router, experts, target))
        return MoESample(*values)


def soft_predictions(sample: MoESample, tau: float) -> Float[Tensor, " n"]:
    """Soft predictions h_τ(x) = Σ_k softmax(a(x)/τ)_k f_k(x)."""
    check_temperature(tau)
    weights = (sample.scores.double() / tau).softmax(dim=1)
    return (weights * sample.outputs).sum(dim=1)


def hard_predictions(sample: MoESample) -> Float[Tensor, " n"]:
    """Hard predictions h_0(x), the output of the expert with the largest score."""
    return sample.outputs.double().gather(1, sample.winner[:, None]).squeeze(1)


def soft_risk(sample: MoESample, tau: float) -> Estimate:
    """Soft risk L_τ = E[(Y - h_τ)²]."""
    return mean_estimate((sample.target - soft_predictions(sample, tau)).square())


def hard_risk(sample: MoESample) -> Estimate:
    """Hard risk L_0 = E[(Y - h_0)²]."""
    return mean_estimate((sample.target - hard_predictions(sample)).square())


def risk_gap(sample: MoESample, tau: float) -> Estimate:
    """Difference L_τ - L_0, with the standard error of the paired differences."""
    soft, hard = soft_predictions(sample, tau), hard_predictions(sample)
    return mean_estimate((hard - soft) * (2 * sample.target - soft - hard))


def risk_curve(sample: MoESample, taus: Sequence[float]) -> RiskCurve:
    """Soft risks, their differences to the hard risk, and the hard risk, at each temperature."""
    soft = tuple(soft_risk(sample, tau) for tau in taus)
    gaps = tuple(risk_gap(sample, tau) for tau in taus)
    return RiskCurve(tuple(taus), soft, gaps, hard_risk(sample))


def winner_odds(sample: MoESample, tau: float) -> Float[Tensor, " n"]:
    """log((1 - p)/p) of the winner's weight p, accurate also where p rounds to 1."""
    check_temperature(tau)
    ranked = ranked_scores(sample.scores, sample.scores.shape[1])
    return ((ranked[:, 1:] - ranked[:, :1]) / tau).logsumexp(dim=1)


def soft_to_hard_constant(
    *, B_f: float, B_Y: float, n_experts: int, C: float, alpha: float
) -> float:
    """Constant C_sh with |L_τ - L_0| <= C_sh τ^α for every τ (Theorem 4.5).

    Args:
        B_f: bound of every expert, |f_k| <= B_f.
        B_Y: bound of the target, |Y| <= B_Y.
        n_experts: E.
        C: constant of the margin tail P(Δ <= t) <= C t^α, eq. 4.4.
        alpha: its exponent.
    """
    require(C > 0 and alpha > 0, f"need a margin tail with C > 0 and alpha > 0, got {C=}, {alpha=}")
    return _common_bound_factor(B_f, B_Y, n_experts) * C * math.gamma(alpha + 1)


def coarea_constant(*, B_f: float, B_Y: float, n_experts: int, C_margin: float) -> float:
    """Constant C_co(φ) with |L_τ - L_0| <= C_co τ for τ <= τ_0 (Corollary 4.4).

    C_margin is that of P(Δ_min <= δ) <= C_margin δ, Proposition 3.7; τ_0 is where e^(-δ_0/τ) <= τ.
    """
    require(C_margin > 0, f"need C_margin > 0, got {C_margin=}")
    return _common_bound_factor(B_f, B_Y, n_experts) * (C_margin + 1)


def boundary_constant(*, B: float, B_stu: float) -> BoundaryConstant:
    """Constant of L̃_bdry <= C · BM(τ; ε), Lemma 5.5; it does not depend on ε."""
    require(B >= 0 and B_stu >= 0, f"need bounds >= 0, got {B=}, {B_stu=}")
    return BoundaryConstant(2 * B**2 + 2 * B_stu**2, (B + B_stu) ** 2)


def ambiguous(sample: MoESample, tau: float, epsilon: float) -> Bool[Tensor, " n"]:
    """Mark the inputs in U_ε(τ), where no expert has more than 1 - ε of the weight."""
    require(0 < epsilon < 0.5, f"need 0 < epsilon < 1/2, got {epsilon=}")
    return winner_odds(sample, tau) >= math.log(epsilon) - math.log1p(-epsilon)


def confident_expert(sample: MoESample, tau: float, epsilon: float) -> Int[Tensor, " n"]:
    """The expert with weight above 1 - ε, or -1 inside U_ε(τ)."""
    return sample.winner.masked_fill(ambiguous(sample, tau, epsilon), -1)


def risk_decomposition(sample: MoESample, tau: float, epsilon: float) -> RiskDecomposition:
    """Split the risk by Lemma 5.5, on a sample with the noiseless target μ and its bounds B."""
    loss = (sample.target - soft_predictions(sample, tau)).square()
    inside = ambiguous(sample, tau, epsilon).double()
    constant = boundary_constant(
        B=sample.target.abs().max().item(), B_stu=sample.outputs.abs().max().item()
    )
    mass = mean_estimate(inside)
    return RiskDecomposition(
        mean_estimate(loss),
        mean_estimate(loss * (1 - inside)),
        mean_estimate(loss * inside),
        mass,
        constant,
        mass.times(constant.paper),
        mass.times(constant.sharp),
    )


def cell_control(
    sample: MoESample,
    labels: Int[Tensor, " n"],
    tau: float,
    epsilon: float,
    permutation: Sequence[int] | None = None,
) -> tuple[CellControl, ...]:
    """Both sides of Proposition 5.8 in each teacher cell; the target is μ, f*_k on cell k.

    `labels` (n,) are the teacher cells of the inputs; `permutation` is the student expert of each
    cell, the identity for None.
    """
    experts = sample.scores.shape[1]
    check_labels(labels, sample)
    order = range(experts) if permutation is None else permutation
    leader, h = confident_expert(sample, tau, epsilon), soft_predictions(sample, tau)
    worst = 4 * sample.outputs.abs().max().item() ** 2 * epsilon**2
    controls = []
    for cell, expert in enumerate(order):
        inside = ((labels == cell) & (leader == expert)).double()
        left = (sample.target - h).square() * inside
        error = (sample.outputs[:, expert] - sample.target).square()
        right = (error / 2 - worst) * inside
        columns = (inside, left, right, left - right)
        controls.append(CellControl(cell, *(mean_estimate(column) for column in columns)))
    return tuple(controls)


def check_temperature(*taus: float) -> None:
    """Raise unless every temperature is positive."""
    for tau in taus:
        require(tau > 0, f"need a temperature tau > 0, got {tau=}")


def check_labels(labels: Int[Tensor, " n"], sample: MoESample) -> None:
    """Raise unless there is a valid cell label for every input."""
    n, experts = sample.scores.shape
    require(len(labels) == n, f"need {n} labels, got {len(labels)}", ShapeError)
    low, high = torch.aminmax(labels)
    require(
        bool(low >= 0 and high < experts),
        f"labels must lie in 0 … {experts - 1}, got {low.item()} … {high.item()}",
    )


def _common_bound_factor(B_f: float, B_Y: float, n_experts: int) -> float:
    """Factor 4 B_f (B_Y + B_f)(E - 1) that C_sh and C_co share."""
    require(B_f > 0 and B_Y >= 0, f"need bounds B_f > 0 and B_Y >= 0, got {B_f=}, {B_Y=}")
    require(n_experts > 1, f"need 2 experts or more, got {n_experts=}")
    return 4 * B_f * (B_Y + B_f) * (n_experts - 1)
