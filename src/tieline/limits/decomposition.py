"""Where the soft risk comes from: the ambiguous layer, the interior, and each teacher cell.

    U_ε(τ) = {max_k p_k <= 1 - ε},  G_ε its complement                   eq. 5.3
    L̃ = L̃_int + L̃_bdry,  L̃_bdry <= (B + B_stu)² P(U_ε)                   Lemma 5.5
    E[(μ - h)² 1_A] >= ½ E[(f_k - f*_k)² 1_A] - 4 B_stu² ε² P(A)         Proposition 5.8

with A = Ω*_k ∩ {p_k >= 1 - ε}. Ambiguity is decided on log-odds, since 1 - ε rounds to 1 for
small ε. (5.3) puts {max p = 1 - ε} into U and Prop. 5.8 puts {p_k = 1 - ε} into G: a null set.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.limits.constants import BoundaryConstant, boundary_constant
from tieline.limits.risk import MoESample, soft_predictions, winner_odds
from tieline.numerics import Estimate, mean_estimate

__all__ = [
    "CellControl",
    "RiskDecomposition",
    "ambiguous",
    "cell_control",
    "confident_expert",
    "risk_decomposition",
]


@dataclass(frozen=True)
class RiskDecomposition:
    """The two parts of L̃_τ and what bounds the second.

    Attributes:
        total: L̃_τ.
        interior: L̃_int = E[(μ - h)² 1_G].
        boundary: L̃_bdry = E[(μ - h)² 1_U].
        mass: BM(τ; ε) = P(U).
        constant: bounds of (μ - h)², the paper's and the sharp one.
        paper_bound: (2B² + 2B_stu²) P(U).
        sharp_bound: (B + B_stu)² P(U).
    """

    total: Estimate
    interior: Estimate
    boundary: Estimate
    mass: Estimate
    constant: BoundaryConstant
    paper_bound: Estimate
    sharp_bound: Estimate


def ambiguous(sample: MoESample, tau: float, eps: float) -> Bool[Tensor, " n"]:
    """Membership of U_ε(τ): no expert has more than 1 - ε of the weight."""
    require(0 < eps < 0.5, f"need 0 < eps < 1/2, got {eps=}")
    return winner_odds(sample, tau) >= math.log(eps) - math.log1p(-eps)


def confident_expert(sample: MoESample, tau: float, eps: float) -> Int[Tensor, " n"]:
    """The expert with weight above 1 - ε, or -1 inside U_ε(τ)."""
    return sample.winner.masked_fill(ambiguous(sample, tau, eps), -1)


def risk_decomposition(sample: MoESample, tau: float, eps: float) -> RiskDecomposition:
    """Lemma 5.5 on a sample whose target is the noiseless μ; bounds B are those of the sample."""
    loss = (sample.target - soft_predictions(sample, tau)).square()
    inside = ambiguous(sample, tau, eps).double()
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


@dataclass(frozen=True)
class CellControl:
    """Both sides of Proposition 5.8 for one cell.

    Attributes:
        cell: k.
        mass: P(A_{k,ε}).
        left: E[(μ - h)² 1_A].
        right: ½ E[(f_k - f*_k)² 1_A] - 4 B_stu² ε² P(A).
        slack: left - right, paired; never negative.
    """

    cell: int
    mass: Estimate
    left: Estimate
    right: Estimate
    slack: Estimate


def cell_control(
    sample: MoESample,
    labels: Int[Tensor, " n"],
    tau: float,
    eps: float,
    permutation: Sequence[int] | None = None,
) -> tuple[CellControl, ...]:
    """Proposition 5.8 in each teacher cell; the target is μ, which is f*_k on cell k.

    Args:
        sample: the student, with the noiseless target.
        labels: (n,) teacher cell of each input.
        tau: temperature.
        eps: 0 < ε < 1/2.
        permutation: student expert of each cell; the identity for None.
    """
    experts = sample.scores.shape[1]
    check_labels(labels, sample)
    order = range(experts) if permutation is None else permutation
    leader, h = confident_expert(sample, tau, eps), soft_predictions(sample, tau)
    worst = 4 * sample.outputs.abs().max().item() ** 2 * eps**2
    controls = []
    for cell, expert in enumerate(order):
        inside = ((labels == cell) & (leader == expert)).double()
        left = (sample.target - h).square() * inside
        error = (sample.outputs[:, expert] - sample.target).square()
        right = (error / 2 - worst) * inside
        columns = (inside, left, right, left - right)
        controls.append(CellControl(cell, *(mean_estimate(column) for column in columns)))
    return tuple(controls)


def check_labels(labels: Int[Tensor, " n"], sample: MoESample) -> None:
    """Refuse cell labels that do not fit the sample."""
    n, experts = sample.scores.shape
    require(len(labels) == n, f"need {n} labels, got {len(labels)}", ShapeError)
    low, high = torch.aminmax(labels)
    require(
        bool(low >= 0 and high < experts),
        f"labels must lie in 0 … {experts - 1}, got {low.item()} … {high.item()}",
    )
