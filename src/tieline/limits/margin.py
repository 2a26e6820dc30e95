"""The margin tail of a router and the chain of inequalities that it feeds.

    router_margin_tail         (C, α) of P(Δ <= t) ~ C t^α near zero              eq. 4.4
    margin_constant            sup of F(t)/t^α over the sample: C that holds for every t
    gaussian_margin_constant   the same for a linear router of two experts, exact
    soft_to_hard_chain         |L_τ - L_0| and each bound of Theorem 4.5's proof, in order

The fitted C is that of the limit t → 0; Theorem 4.5 wants one that holds for every t > 0, which
is at least as large.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.geometry.density import MarginTail, margin_tail
from tieline.limits.cells import TwoCells
from tieline.limits.constants import soft_to_hard_constant
from tieline.limits.gaussian import gaussian_boundary_mass
from tieline.limits.risk import MoESample, hard_predictions, risk_gap, soft_predictions
from tieline.limits.slices import normal_density
from tieline.numerics import Estimate, mean_estimate
from tieline.ranking import gap

__all__ = [
    "SoftToHardChain",
    "gaussian_margin_constant",
    "margin_constant",
    "router_margin_tail",
    "soft_to_hard_chain",
]


def router_margin_tail(
    scores: Float[Tensor, "n experts"], mass: float = 0.05, confidence: float = 0.95
) -> MarginTail:
    """(C, α) fitted to the top-two margins below their `mass`-quantile (`geometry.margin_tail`)."""
    return margin_tail(gap(scores, 1), mass, confidence)


def margin_constant(margins: Float[Tensor, " n"], alpha: float, least: int = 100) -> Estimate:
    """C = sup_t F(t)/t^α over the margins from the `least`-th smallest on.

    Below that rank F is too noisy: its relative error is 1/√rank. The standard error given is that
    of F at the maximising t, and leaves out that a maximum over noise is a little too large.
    """
    require(alpha > 0, f"need alpha > 0, got {alpha=}")
    n = margins.numel()
    require(1 <= least <= n, f"need 1 <= least <= {n} margins, got {least=}", ShapeError)
    ordered, rank = margins.double().sort().values, torch.arange(1, n + 1, dtype=torch.float64)
    ratio = (rank / n / ordered.pow(alpha))[least - 1 :]
    at = int(ratio.argmax())
    share = (at + least) / n
    value = ratio[at].item()
    return Estimate(value, value * math.sqrt((1 - share) / (share * n)))


def gaussian_margin_constant(
    student: TwoCells, covariance: Float[Tensor, "width width"] | None = None
) -> float:
    """C = sup_{t > 0} P(|S| <= t)/t of a linear router, the best constant of eq. 4.4 at α = 1.

    2 φ(b/σ)/σ, the limit t → 0, where |b| <= σ; larger than that limit where the wall lies further
    out, since the density of S then grows away from zero.
    """
    at_zero = gaussian_boundary_mass(student, 0.0, covariance)
    spread, b = at_zero.spread, abs(student.offset.item())
    if b <= spread:
        return 2 * at_zero.density

    def still_rising(t: float) -> bool:
        ends = torch.tensor([(t - b) / spread, (t + b) / spread], dtype=torch.float64)
        slope = normal_density(ends).sum().item() / spread
        return t * slope > gaussian_boundary_mass(student, t, covariance).exact

    low, high = 0.0, b + 4 * spread
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if still_rising(middle) else (low, middle)
    return gaussian_boundary_mass(student, high, covariance).exact / high


@dataclass(frozen=True)
class SoftToHardChain:
    """|L_τ - L_0| and the bounds of Theorem 4.5's proof, each at most the next.

    Attributes:
        gap: L_τ - L_0, paired.
        predictions: 2 (B_Y + B_f) E|h_τ - h_0|, eq. 4.6.
        exponential: 4 B_f (B_Y + B_f)(E - 1) E[e^(-Δ/τ)], eq. 4.8.
        bound: C_sh τ^α.
    """

    tau: float
    gap: Estimate
    predictions: Estimate
    exponential: Estimate
    bound: float


def soft_to_hard_chain(
    sample: MoESample,
    tau: float,
    *,
    C: float,
    alpha: float = 1.0,
    B_f: float | None = None,
    B_Y: float | None = None,
) -> SoftToHardChain:
    """The chain of Theorem 4.5 at one temperature on a sample.

    Args:
        sample: the mixture and its target.
        tau: temperature.
        C: constant of the margin tail, for instance `margin_constant(sample.margin, alpha).value`.
        alpha: its exponent.
        B_f: bound of the experts; the largest |output| of the sample for None.
        B_Y: bound of the target, likewise.
    """
    B_f = sample.outputs.abs().max().item() if B_f is None else B_f
    B_Y = sample.target.abs().max().item() if B_Y is None else B_Y
    experts = sample.scores.shape[1]
    moved = mean_estimate((soft_predictions(sample, tau) - hard_predictions(sample)).abs())
    decay = mean_estimate((-sample.margin / tau).exp())
    constant = soft_to_hard_constant(B_f=B_f, B_Y=B_Y, n_experts=experts, C=C, alpha=alpha)
    return SoftToHardChain(
        tau,
        risk_gap(sample, tau),
        moved.times(2 * (B_Y + B_f)),
        decay.times(4 * B_f * (B_Y + B_f) * (experts - 1)),
        constant * tau**alpha,
    )
