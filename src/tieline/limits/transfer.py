"""Whether gradient and Hessian of L_τ tend to those of L_0 (paper 0, Assumption 5.13).

    derivative_transfer   away from the teacher's wall: yes, and r(τ) is measured
    offset_curvature      at the teacher's wall: **no**. With the wall on the jump of the target

        ∂²L_τ/∂b² = E[d·[μ] | S = 0]/2 · p_S(0)/τ + O(1),

    which grows without bound, so that the assumption fails at the very point it is made for. L_0
    itself has a kink there (`tieline.limits.shape`).

Derivatives are exact: automatic differentiation of quadratures whose nodes move with the wall.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require
from tieline.limits.cells import TwoCells
from tieline.limits.gaussian import gaussian_risk
from tieline.limits.slices import slice_at
from tieline.limits.slope import same_wall
from tieline.numerics import one_thread

__all__ = [
    "DerivativeTransfer",
    "Derivatives",
    "OffsetCurvature",
    "derivative_transfer",
    "offset_curvature",
    "risk_derivatives",
]

Covariance = Float[Tensor, "width width"] | None


@dataclass(frozen=True, eq=False)
class Derivatives:
    """Value, gradient and Hessian of L̃_τ in (normal, offset, expert 1, expert 2)."""

    value: float
    gradient: Float[Tensor, " parameters"]
    hessian: Float[Tensor, "parameters parameters"]


def risk_derivatives(
    student: TwoCells, teacher: TwoCells, covariance: Covariance = None, tau: float = 0.0
) -> Derivatives:
    """Derivatives of `gaussian_risk`, at τ = 0 too, where student and teacher walls cross.

    Walls that are parallel in two dimensions or more are refused: how the risk changes when one
    turns is not in the integral over its score.
    """
    apart = teacher.normal / teacher.normal.norm()
    apart = apart - student.normal * (apart @ student.normal) / student.normal.square().sum()
    require(
        student.width == 1 or apart.norm().item() > 1e-6,
        f"walls must cross in dimension {student.width}, got normals "
        f"{student.normal.tolist()} and {teacher.normal.tolist()}",
    )

    def risk(parameters: Tensor) -> Tensor:
        return gaussian_risk(student.with_flat(parameters), teacher, covariance, tau)

    here = student.flat().detach().requires_grad_()
    with one_thread():
        value = risk(here)
        (gradient,) = torch.autograd.grad(value, here, create_graph=True)
        rows = [torch.autograd.grad(entry, here, retain_graph=True)[0] for entry in gradient]
    return Derivatives(value.item(), gradient.detach(), torch.stack(rows))


@dataclass(frozen=True, eq=False)
class DerivativeTransfer:
    """How far gradient and Hessian of L_τ are from those of L_0.

    Attributes:
        taus: temperatures.
        gradient_gaps: ‖∇L_τ - ∇L_0‖.
        hessian_gaps: operator norm of the difference of the Hessians.
        least_eigenvalues: of the Hessian of L_τ.
        hard: derivatives of L_0.
    """

    taus: tuple[float, ...]
    gradient_gaps: tuple[float, ...]
    hessian_gaps: tuple[float, ...]
    least_eigenvalues: tuple[float, ...]
    hard: Derivatives


def derivative_transfer(
    student: TwoCells, teacher: TwoCells, taus: Sequence[float], covariance: Covariance = None
) -> DerivativeTransfer:
    """r(τ) of Assumption 5.13, part by part, at a student whose wall is not the teacher's."""
    require(all(tau > 0 for tau in taus), f"need temperatures > 0, got {list(taus)}")
    require(
        same_wall(student, teacher) == 0,
        "L_0 has no Hessian on the teacher's own wall: see offset_curvature",
    )
    hard = risk_derivatives(student, teacher, covariance)
    soft = [risk_derivatives(student, teacher, covariance, tau) for tau in taus]
    return DerivativeTransfer(
        tuple(taus),
        tuple((s.gradient - hard.gradient).norm().item() for s in soft),
        tuple(torch.linalg.matrix_norm(s.hessian - hard.hessian, 2).item() for s in soft),
        tuple(torch.linalg.eigvalsh(s.hessian)[0].item() for s in soft),
        hard,
    )


@dataclass(frozen=True)
class OffsetCurvature:
    """∂²L_τ/∂b² against τ.

    Attributes:
        taus: temperatures.
        curvatures: ∂²L_τ/∂b² at each.
        rates: τ·∂²L_τ/∂b², which tends to `limit`.
        limit: E[d·[μ] | S = 0]/2 · p_S(0); zero off the teacher's wall.
    """

    taus: tuple[float, ...]
    curvatures: tuple[float, ...]
    rates: tuple[float, ...]
    limit: float


def offset_curvature(
    student: TwoCells, teacher: TwoCells, taus: Sequence[float], covariance: Covariance = None
) -> OffsetCurvature:
    """Curvature of L_τ when the wall is shifted, in any dimension and on any wall."""
    require(all(tau > 0 for tau in taus), f"need temperatures > 0, got {list(taus)}")
    curvatures = tuple(_offset_curvature(student, teacher, tau, covariance) for tau in taus)
    facet = slice_at(student, teacher, covariance)
    d = student.experts[0] - student.experts[1]
    jump = (teacher.experts[0] - teacher.experts[1]) * same_wall(student, teacher)
    limit = (facet.weight[0] * (d @ facet.second[0] @ jump) / 2).item()
    rates = tuple(tau * c for tau, c in zip(taus, curvatures, strict=True))
    return OffsetCurvature(tuple(taus), curvatures, rates, limit)


def _offset_curvature(
    student: TwoCells, teacher: TwoCells, tau: float, covariance: Covariance
) -> float:
    b = student.offset.detach().clone().requires_grad_()
    risk = gaussian_risk(TwoCells(student.normal, b, student.experts), teacher, covariance, tau)
    (first,) = torch.autograd.grad(risk, b, create_graph=True)
    return torch.autograd.grad(first, b)[0].item()
