"""Critical points of a small teacher-student problem: which are minima, which strict saddles?

Theorem 5.17 says: if the profiled hard problem has a falling direction at every wall that is not
the teacher's (`tieline.limits.profile`), so has the soft problem. Here is the soft one, for two
affine experts in the plane with a normal of length 1: with a free length the infimum of L_τ is not
attained.

    find_critical_points   Newton's method on the gradient of L_τ from many starts, with the least
                           eigenvalue of the Hessian and its direction at each point found
    negative_curvature     λ_min and its eigenvector
    perturbed_curvature    λ_min(H) <= λ_min(H_0) + ‖H - H_0‖                      Lemma 5.15
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy import optimize
from torch import Tensor

from tieline.errors import require
from tieline.limits.cells import TwoCells
from tieline.limits.gaussian import gaussian_profile, gaussian_risk
from tieline.limits.population import Population, gaussian_grid, population_risk
from tieline.limits.transfer import Derivatives
from tieline.numerics import one_thread

__all__ = [
    "CriticalPoint",
    "CurvatureBound",
    "find_critical_points",
    "negative_curvature",
    "perturbed_curvature",
]

Matrix = Float[Tensor, "parameters parameters"]


@dataclass(frozen=True, eq=False)
class CriticalPoint:
    """A point where the gradient of L_τ vanishes, in (angle, offset, expert 1, expert 2).

    Attributes:
        student: the mixture there.
        risk: L̃_τ.
        gradient_norm: what is left of the gradient.
        least_eigenvalue: of the Hessian in (angle, offset, experts).
        direction: unit eigenvector of it, the way down at a saddle.
        drop: risk at the best of a few steps along ±direction, minus `risk`; negative at a saddle.
        misrouted: P(student cell ≠ teacher cell), for the better of the two labellings.
        kind: "minimum", "strict saddle" or "degenerate" (eigenvalue within 1e-7 of zero).
        hessian: (8, 8) of L̃_τ in (angle, offset, expert 1, expert 2).
    """

    student: TwoCells
    risk: float
    gradient_norm: float
    least_eigenvalue: float
    direction: Float[Tensor, " coordinates"]
    drop: float
    misrouted: float
    kind: str
    hessian: Float[Tensor, "coordinates coordinates"]


def negative_curvature(hessian: Matrix) -> tuple[float, Float[Tensor, " parameters"]]:
    """Least eigenvalue of a symmetric matrix and its unit eigenvector."""
    values, vectors = torch.linalg.eigh(hessian)
    return values[0].item(), vectors[:, 0]


@dataclass(frozen=True)
class CurvatureBound:
    """Lemma 5.15: `least` <= `bound`, the least eigenvalue of H_0 plus the distance to H."""

    least: float
    bound: float


def perturbed_curvature(reference: Matrix, hessian: Matrix) -> CurvatureBound:
    """λ_min(H) beside λ_min(H_0) + ‖H - H_0‖_op."""
    distance = torch.linalg.matrix_norm(hessian - reference, 2).item()
    least = negative_curvature(reference)[0]
    return CurvatureBound(negative_curvature(hessian)[0], least + distance)


def find_critical_points(
    teacher: TwoCells,
    tau: float,
    starts: int = 8,
    seed: int = 0,
    covariance: Float[Tensor, "2 2"] | None = None,
    spacing: float = 0.25,
) -> tuple[CriticalPoint, ...]:
    """Distinct critical points of L_τ reached from random walls with their best experts.

    Args:
        teacher: the target, in the plane.
        tau: temperature; the grid resolves τ >= 0.3 at the default spacing.
        starts: walls with random angle and offset.
        seed: of the starts.
        covariance: Σ of the inputs; the identity for None.
        spacing: of the grid (`gaussian_grid`).

    Returns:
        Points with a gradient below 1e-9, by increasing risk; both labellings of a mixture count.
    """
    require(starts > 0, f"need one start or more, got {starts=}")
    generator = torch.Generator().manual_seed(seed)
    points: list[CriticalPoint] = []
    with one_thread():
        grid = gaussian_grid(teacher, covariance, spacing, order=8)
        for _ in range(starts):
            draw = torch.rand(2, generator=generator, dtype=torch.float64)
            start = _start(teacher, draw, covariance, tau)
            found = _newton(grid, start, tau)
            if found is not None and all(_apart(found, p.student) for p in points):
                points.append(_describe(grid, teacher, found, tau, covariance))
    return tuple(sorted(points, key=lambda point: point.risk))


def _start(teacher: TwoCells, draw: Tensor, covariance: Tensor | None, tau: float) -> Tensor:
    angle, offset = 2 * math.pi * draw[0], 2 * draw[1] - 1
    wall = TwoCells(torch.stack([angle.cos(), angle.sin()]), offset, teacher.experts)
    experts = gaussian_profile(wall, teacher, covariance, tau).experts
    return torch.cat([angle[None], offset[None], experts.flatten()])


def _student(coordinates: Tensor) -> TwoCells:
    angle = coordinates[0]
    return TwoCells(
        torch.stack([angle.cos(), angle.sin()]), coordinates[1], coordinates[2:].reshape(2, 3)
    )


def _polar(grid: Population, coordinates: Tensor, tau: float) -> Derivatives:
    """Derivatives in (angle, offset, experts) by the chain rule from those in (normal, …)."""
    student = _student(coordinates)
    flat = population_risk(grid, student.flat(), tau)
    jacobian = torch.zeros(9, 8, dtype=torch.float64)
    jacobian[0, 0], jacobian[1, 0] = -student.normal[1], student.normal[0]
    jacobian[2:, 1:] = torch.eye(7, dtype=torch.float64)
    hessian = jacobian.T @ flat.hessian @ jacobian
    hessian[0, 0] -= flat.gradient[:2] @ student.normal
    return Derivatives(flat.value, jacobian.T @ flat.gradient, hessian)


def _newton(grid: Population, start: Tensor, tau: float) -> Tensor | None:
    def residual(q: np.ndarray) -> np.ndarray:
        return _polar(grid, torch.from_numpy(q), tau).gradient.numpy()

    def jacobian(q: np.ndarray) -> np.ndarray:
        return _polar(grid, torch.from_numpy(q), tau).hessian.numpy()

    q = optimize.root(
        residual, start.numpy(), jac=jacobian, options={"xtol": 1e-13, "maxfev": 100}
    ).x
    found = torch.from_numpy(q)
    small = found.abs().max().item() < 50 and np.linalg.norm(residual(q)) < 1e-9
    return found if small else None


def _apart(found: Tensor, other: TwoCells) -> bool:
    return bool((_student(found).flat() - other.flat()).norm() > 1e-5)


def _disagreement(student: TwoCells, teacher: TwoCells, covariance: Tensor | None) -> float:
    """P(the cells differ): a quarter of the hard risk of experts ±1."""
    signs = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    pair = student.with_experts(signs), teacher.with_experts(signs)
    return gaussian_risk(*pair, covariance).item() / 4


def _describe(
    grid: Population, teacher: TwoCells, q: Tensor, tau: float, covariance: Tensor | None
) -> CriticalPoint:
    at = _polar(grid, q, tau)
    least, direction = negative_curvature(at.hessian)
    steps = (s * h * direction for s in (1, -1) for h in (0.03, 0.1, 0.3))
    best = min(_polar(grid, q + step, tau).value for step in steps)
    student = _student(q)
    share = _disagreement(student, teacher, covariance)
    kind = "degenerate" if abs(least) < 1e-7 else "minimum" if least > 0 else "strict saddle"
    norm = at.gradient.norm().item()
    drop, misrouted = best - at.value, min(share, 1 - share)
    return CriticalPoint(
        student, at.value, norm, least, direction, drop, misrouted, kind, at.hessian
    )
