"""Constants of the soft-to-hard comparison of paper 0.

    soft_to_hard_constant   C_sh = 4 B_f (B_Y + B_f)(E - 1) C Γ(α + 1)           Theorem 4.5
    coarea_constant         C_co = 4 B_f (B_Y + B_f)(E - 1)(C_margin + 1)        Corollary 4.4
    boundary_constant       (B + B_stu)² beside the paper's 2B² + 2B_stu²        Lemma 5.5

All are upper bounds; `tieline.limits.slope` gives the exact first order that they bound.
"""

import math
from dataclasses import dataclass

from tieline.errors import require

__all__ = ["BoundaryConstant", "boundary_constant", "coarea_constant", "soft_to_hard_constant"]


def soft_to_hard_constant(
    *, B_f: float, B_Y: float, n_experts: int, C: float, alpha: float
) -> float:
    """C_sh with |L_τ - L_0| <= C_sh τ^α for every τ (Theorem 4.5).

    Args:
        B_f: bound of every expert, |f_k| <= B_f.
        B_Y: bound of the target, |Y| <= B_Y.
        n_experts: E.
        C: constant of the margin tail P(Δ <= t) <= C t^α, eq. 4.4.
        alpha: its exponent.
    """
    require(C > 0 and alpha > 0, f"need a margin tail with C > 0 and alpha > 0, got {C=}, {alpha=}")
    return _outputs(B_f, B_Y, n_experts) * C * math.gamma(alpha + 1)


def coarea_constant(*, B_f: float, B_Y: float, n_experts: int, C_margin: float) -> float:
    """C_co(φ) with |L_τ - L_0| <= C_co τ for τ <= τ_0 (Corollary 4.4).

    C_margin is that of P(Δ_min <= δ) <= C_margin δ, Proposition 3.7; τ_0 is where e^(-δ_0/τ) <= τ.
    """
    require(C_margin > 0, f"need C_margin > 0, got {C_margin=}")
    return _outputs(B_f, B_Y, n_experts) * (C_margin + 1)


@dataclass(frozen=True)
class BoundaryConstant:
    """Bound of (μ - h)²: the paper's 2B² + 2B_stu², and the sharp (B + B_stu)²."""

    paper: float
    sharp: float


def boundary_constant(*, B: float, B_stu: float) -> BoundaryConstant:
    """Constant of L̃_bdry <= C · BM(τ; ε), Lemma 5.5; it does not depend on ε."""
    require(B >= 0 and B_stu >= 0, f"need bounds >= 0, got {B=}, {B_stu=}")
    return BoundaryConstant(2 * B**2 + 2 * B_stu**2, (B + B_stu) ** 2)


def _outputs(B_f: float, B_Y: float, n_experts: int) -> float:
    """4 B_f (B_Y + B_f)(E - 1)."""
    require(B_f > 0 and B_Y >= 0, f"need bounds B_f > 0 and B_Y >= 0, got {B_f=}, {B_Y=}")
    require(n_experts > 1, f"need 2 experts or more, got {n_experts=}")
    return 4 * B_f * (B_Y + B_f) * (n_experts - 1)
