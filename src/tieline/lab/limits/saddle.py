"""Derivatives of L_τ and its critical points (paper 0, Assumption 5.13, Lemma 5.15, Theorem 5.17).

With the wall on the jump of the target,

    ∂²L_τ/∂b² = E[d·[μ] | S = 0]/2 · p_S(0)/τ + O(1)

grows without bound, so Assumption 5.13 fails at the very point it is made for; L_0 itself has a
kink there (`wall_variation`). `risk_derivatives` differentiates quadratures whose nodes move
with the wall. `population_risk` also holds where the walls are parallel and at a router of zero:
for two affine experts, x̃ = (x, 1), S = φ·x̃, p = σ(S/τ), r = μ - h and d = f_1 - f_2,

    ∂h = (p' d x̃/τ, p x̃, (1 - p) x̃),  Hessian = 2 E[∂h ∂hᵀ] - 2 E[r ∂²h].

Theorem 5.17: if the profiled hard problem has a descent direction at every wall that is not the
teacher's (`profile_variation`), so has the soft problem. Critical points are those of the soft
problem in the plane with a normal of length 1: with a free length the infimum is not attained.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy import optimize
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.numerics import one_thread
from tieline.lab.limits.risk import check_temperature
from tieline.lab.limits.two_cells import (
    Covariance,
    TwoCells,
    check_covariance,
    gaussian_inputs,
    gaussian_profile,
    gaussian_risk,
    graded_rule,
    normal_density,
    same_wall,
    slice_at,
)

__all__ = [
    "CriticalPoint",
    "CurvatureBound",
    "DerivativeTransfer",
    "Derivatives",
    "OffsetCurvature",
    "WeightedInputs",
    "derivative_transfer",
    "find_critical_points",
    "gaussian_grid",
    "gaussian_points",
    "negative_curvature",
    "offset_curvature",
    "perturbed_curvature",
    "population_gradient",
    "population_risk",
    "risk_derivatives",
]

REACH = 8.5
"""End of the grid in standard deviations; the normal mass beyond is 2e-17."""

Matrix = Float[Tensor, "parameters parameters"]


@dataclass(frozen=True, eq=False)
class Derivatives:
    """Value, gradient and Hessian of L̃_τ in (normal, offset, expert 1, expert 2)."""

    value: float
    gradient: Float[Tensor, " parameters"]
    hessian: Matrix


@dataclass(frozen=True, eq=False)
class DerivativeTransfer:
    """Distances of the gradient and Hessian of L_τ from those of L_0."""

    taus: tuple[float, ...]  # temperatures
    gradient_gaps: tuple[float, ...]  # ‖∇L_τ - ∇L_0‖
    hessian_gaps: tuple[float, ...]  # operator norm of the difference of the Hessians
    least_eigenvalues: tuple[float, ...]  # of the Hessian of L_τ
    hard: Derivatives  # derivatives of L_0


@dataclass(frozen=True)
class OffsetCurvature:
    """Curvature ∂²L_τ/∂b² in the offset of the wall, by temperature."""

    taus: tuple[float, ...]  # temperatures
    curvatures: tuple[float, ...]  # ∂²L_τ/∂b² at each
    rates: tuple[float, ...]  # τ·∂²L_τ/∂b², which tends to `limit`
    limit: float  # E[d·[μ] | S = 0]/2 · p_S(0); zero off the teacher's wall


@dataclass(frozen=True, eq=False)
class WeightedInputs:
    """Weighted inputs with their targets, as a quadrature or sample of the population."""

    inputs: Float[Tensor, "n dim"]  # (n, D)
    target: Float[Tensor, " n"]  # (n,) μ at each input
    weight: Float[Tensor, " n"]  # (n,) adding up to 1


@dataclass(frozen=True, eq=False)
class CriticalPoint:
    """A point where the gradient of L_τ vanishes, in (angle, offset, expert 1, expert 2)."""

    student: TwoCells  # the mixture there
    risk: float  # L̃_τ
    gradient_norm: float  # norm of the remaining gradient
    least_eigenvalue: float  # of the Hessian in (angle, offset, experts)
    direction: Float[Tensor, " coordinates"]  # unit eigenvector of it, the way down at a saddle
    # risk at the best of a few steps along ±direction, minus `risk`; negative at a saddle
    drop: float
    misrouted: float  # P(student cell ≠ teacher cell), for the better of the two labellings
    kind: str  # "minimum", "strict saddle" or "degenerate" (eigenvalue within 1e-7 of zero)
    # (8, 8) of L̃_τ in (angle, offset, expert 1, expert 2)
    hessian: Float[Tensor, "coordinates coordinates"]


@dataclass(frozen=True)
class CurvatureBound:
    """Lemma 5.15: `least` <= `bound`, the least eigenvalue of H_0 plus the distance to H."""

    least: float
    bound: float


def risk_derivatives(
    student: TwoCells, teacher: TwoCells, covariance: Covariance = None, tau: float = 0.0
) -> Derivatives:
    """Derivatives of `gaussian_risk`, at τ = 0 too, where student and teacher walls cross.

    Raises for parallel walls in two dimensions or more: the integral over the score does not
    contain how the risk changes when one of them turns.
    """
    apart = teacher.normal / teacher.normal.norm()
    apart = apart - student.normal * (apart @ student.normal) / student.normal.square().sum()
    require(
        student.dim == 1 or apart.norm().item() > 1e-6,
        f"walls must cross in dimension {student.dim}, got normals "
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


def derivative_transfer(
    student: TwoCells, teacher: TwoCells, taus: Sequence[float], covariance: Covariance = None
) -> DerivativeTransfer:
    """Distances r(τ) of Assumption 5.13 at a student whose wall is not the teacher's."""
    check_temperature(*taus)
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


def offset_curvature(
    student: TwoCells, teacher: TwoCells, taus: Sequence[float], covariance: Covariance = None
) -> OffsetCurvature:
    """Curvature of L_τ in the offset of the wall, in any dimension and at any wall."""
    check_temperature(*taus)
    curvatures = tuple(_offset_curvature(student, teacher, tau, covariance) for tau in taus)
    facet = slice_at(student, teacher, covariance)
    d = student.experts[0] - student.experts[1]
    jump = (teacher.experts[0] - teacher.experts[1]) * same_wall(student, teacher)
    limit = (facet.weight[0] * (d @ facet.second[0] @ jump) / 2).item()
    rates = tuple(tau * c for tau, c in zip(taus, curvatures, strict=True))
    return OffsetCurvature(tuple(taus), curvatures, rates, limit)


def gaussian_grid(
    teacher: TwoCells,
    covariance: Float[Tensor, "2 2"] | None = None,
    spacing: float = 0.2,
    order: int = 10,
) -> WeightedInputs:
    """N(0, Σ) in the plane as a product rule: exact to rounding for layers wider than 0.5.

    Across the teacher's wall Gauss-Legendre panels that end on its jump; along it the trapezoidal
    rule, whose error falls like exp(-2π² w/spacing) for a layer of width w.
    """
    require(teacher.dim == 2, f"a grid needs dimension 2, got {teacher.dim}", ShapeError)
    require(spacing > 0 and order > 0, f"need spacing, order > 0, got {spacing=}, {order=}")
    sigma = check_covariance(covariance, 2)
    forward = sigma @ teacher.normal
    spread = (teacher.normal @ forward).sqrt()
    drift = forward / spread
    along = torch.tensor([-teacher.normal[1], teacher.normal[0]], dtype=torch.float64)
    along = along * ((torch.linalg.det(sigma)).sqrt() / spread)
    y, w = graded_rule([(-teacher.offset / spread, 0.0)], -REACH, REACH, order)
    z = torch.arange(-REACH, REACH + spacing / 2, spacing, dtype=torch.float64)
    weight = (w * normal_density(y))[:, None] * (spacing * normal_density(z))
    # X = drift·y + along·z: the second vector has Σ_⊥ = along alongᵀ, since v·along = 0
    inputs = y[:, None, None] * drift + z[:, None] * along
    target = teacher.outputs(inputs.flatten(0, 1)).reshape(len(y), len(z), 2)
    cell = (spread * y + teacher.offset < 0).long()[:, None, None].expand(-1, len(z), 1)
    values = target.gather(2, cell).flatten()
    return WeightedInputs(inputs.flatten(0, 1), values, weight.flatten())


def gaussian_points(
    teacher: TwoCells, n: int, seed: int, covariance: Covariance = None
) -> WeightedInputs:
    """Independent draws of N(0, Σ) with equal weights."""
    inputs = gaussian_inputs(n, teacher.dim, seed, covariance)
    return WeightedInputs(
        inputs, teacher.value(inputs), torch.full((n,), 1 / n, dtype=torch.float64)
    )


def population_gradient(
    population: WeightedInputs, parameters: Float[Tensor, " parameters"], tau: float
) -> tuple[float, Float[Tensor, " parameters"]]:
    """Value and gradient of L̃_τ at parameters in the order of `TwoCells.flat`."""
    terms, w = _risk_terms(population, parameters, tau), population.weight
    value = (w * terms.residual.square()).sum().item()
    return value, -2 * terms.rows.T @ (w * terms.residual)


def population_risk(
    population: WeightedInputs, parameters: Float[Tensor, " parameters"], tau: float
) -> Derivatives:
    """Value, gradient and Hessian of L̃_τ at parameters in the order of `TwoCells.flat`."""
    terms, w = _risk_terms(population, parameters, tau), population.weight
    value, gradient = population_gradient(population, parameters, tau)
    pull = w * terms.residual * terms.gate_slope
    bend = terms.inputs.T @ (
        (pull * terms.gate_balance / tau * terms.contrast)[:, None] * terms.inputs
    )
    mixed = terms.inputs.T @ (pull[:, None] * terms.inputs)
    zero = torch.zeros_like(mixed)
    blocks = ([bend, mixed, -mixed], [mixed, zero, zero], [-mixed, zero, zero])
    second = torch.cat([torch.cat(row, dim=1) for row in blocks])
    hessian = 2 * terms.rows.T @ (w[:, None] * terms.rows) - 2 * second
    return Derivatives(value, gradient, hessian)


def negative_curvature(hessian: Matrix) -> tuple[float, Float[Tensor, " parameters"]]:
    """Least eigenvalue of a symmetric matrix and its unit eigenvector."""
    values, vectors = torch.linalg.eigh(hessian)
    return values[0].item(), vectors[:, 0]


def perturbed_curvature(reference: Matrix, hessian: Matrix) -> CurvatureBound:
    """λ_min(H) and its bound λ_min(H_0) + ‖H - H_0‖_op (Lemma 5.15)."""
    distance = torch.linalg.matrix_norm(hessian - reference, 2).item()
    least = negative_curvature(reference)[0]
    return CurvatureBound(negative_curvature(hessian)[0], least + distance)


def find_critical_points(
    teacher: TwoCells, tau: float, starts: int = 8, seed: int = 0
) -> tuple[CriticalPoint, ...]:
    """Distinct critical points of L_τ reached from random walls with their best experts.

    Points with a gradient below 1e-9, by increasing risk; both labellings of a mixture count.

    In the plane. The grid resolves τ >= 0.3; `starts` walls have random angles and offsets.
    """
    require(starts > 0, f"need one start or more, got {starts=}")
    generator = torch.Generator().manual_seed(seed)
    points: list[CriticalPoint] = []
    with one_thread():
        grid = gaussian_grid(teacher, spacing=0.25, order=8)
        for _ in range(starts):
            draw = torch.rand(2, generator=generator, dtype=torch.float64)
            start = _random_start(teacher, draw, tau)
            root = _find_critical_coordinates(grid, start, tau)
            if root is None:
                continue
            flat = _student_at(root).flat()
            if all((flat - point.student.flat()).norm() > 1e-5 for point in points):
                points.append(_critical_point(grid, teacher, root, tau))
    return tuple(sorted(points, key=lambda point: point.risk))


def _offset_curvature(
    student: TwoCells, teacher: TwoCells, tau: float, covariance: Covariance
) -> float:
    """Return ∂²L_τ/∂b² of a student at one temperature."""
    b = student.offset.detach().clone().requires_grad_()
    risk = gaussian_risk(TwoCells(student.normal, b, student.experts), teacher, covariance, tau)
    (first,) = torch.autograd.grad(risk, b, create_graph=True)
    return torch.autograd.grad(first, b)[0].item()


@dataclass(frozen=True, eq=False)
class _RiskTerms:
    """Terms of value, gradient and Hessian: x̃, ∂h by row, residual, p(1 - p)/τ, 1 - 2p, d."""

    inputs: Tensor
    rows: Tensor
    residual: Tensor
    gate_slope: Tensor
    gate_balance: Tensor
    contrast: Tensor


def _risk_terms(population: WeightedInputs, parameters: Tensor, tau: float) -> _RiskTerms:
    """Evaluate these terms at parameters (normal, offset, experts)."""
    check_temperature(tau)
    n, dim = population.inputs.shape
    require(
        len(parameters) == 3 * (dim + 1),
        f"need {3 * (dim + 1)} parameters for dimension {dim}, got {len(parameters)}",
        ShapeError,
    )
    x = torch.cat([population.inputs, torch.ones(n, 1, dtype=torch.float64)], dim=1)
    router, *experts = parameters.double().reshape(3, dim + 1)
    first, second = (x @ expert for expert in experts)
    p, d = torch.sigmoid(x @ router / tau), first - second
    gate_slope = p * (1 - p) / tau
    rows = torch.cat([(gate_slope * d)[:, None] * x, p[:, None] * x, (1 - p)[:, None] * x], dim=1)
    return _RiskTerms(x, rows, population.target - second - p * d, gate_slope, 1 - 2 * p, d)


def _random_start(teacher: TwoCells, draw: Tensor, tau: float) -> Tensor:
    """Coordinates (angle, offset, experts) of a drawn wall with its best experts."""
    angle, offset = 2 * math.pi * draw[0], 2 * draw[1] - 1
    wall = TwoCells(torch.stack([angle.cos(), angle.sin()]), offset, teacher.experts)
    experts = gaussian_profile(wall, teacher, tau=tau).experts
    return torch.cat([angle[None], offset[None], experts.flatten()])


def _student_at(coordinates: Tensor) -> TwoCells:
    """Build the student with coordinates (angle, offset, experts)."""
    angle = coordinates[0]
    return TwoCells(
        torch.stack([angle.cos(), angle.sin()]), coordinates[1], coordinates[2:].reshape(2, 3)
    )


def _polar_derivatives(grid: WeightedInputs, coordinates: Tensor, tau: float) -> Derivatives:
    """Derivatives in (angle, offset, experts) by the chain rule from those in (normal, …)."""
    student = _student_at(coordinates)
    flat = population_risk(grid, student.flat(), tau)
    jacobian = torch.zeros(9, 8, dtype=torch.float64)
    jacobian[0, 0], jacobian[1, 0] = -student.normal[1], student.normal[0]
    jacobian[2:, 1:] = torch.eye(7, dtype=torch.float64)
    hessian = jacobian.T @ flat.hessian @ jacobian
    hessian[0, 0] -= flat.gradient[:2] @ student.normal
    return Derivatives(flat.value, jacobian.T @ flat.gradient, hessian)


def _find_critical_coordinates(grid: WeightedInputs, start: Tensor, tau: float) -> Tensor | None:
    """Search a zero of the gradient from a start; None if the search fails."""

    def polar_gradient(q: np.ndarray) -> np.ndarray:
        return _polar_derivatives(grid, torch.from_numpy(q), tau).gradient.numpy()

    def polar_hessian(q: np.ndarray) -> np.ndarray:
        return _polar_derivatives(grid, torch.from_numpy(q), tau).hessian.numpy()

    q = optimize.root(
        polar_gradient, start.numpy(), jac=polar_hessian, options={"xtol": 1e-13, "maxfev": 100}
    ).x
    point = torch.from_numpy(q)
    small = point.abs().max().item() < 50 and np.linalg.norm(polar_gradient(q)) < 1e-9
    return point if small else None


def _critical_point(
    grid: WeightedInputs, teacher: TwoCells, q: Tensor, tau: float
) -> CriticalPoint:
    """Describe a critical point: risk, curvature, and the best drop along its direction."""
    derivatives = _polar_derivatives(grid, q, tau)
    least, direction = negative_curvature(derivatives.hessian)
    steps = (s * h * direction for s in (1, -1) for h in (0.03, 0.1, 0.3))
    best = min(_polar_derivatives(grid, q + step, tau).value for step in steps)
    student = _student_at(q)
    # P(the cells differ) is a quarter of the hard risk of experts ±1
    signs = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    share = gaussian_risk(student.with_experts(signs), teacher.with_experts(signs)).item() / 4
    kind = "degenerate" if abs(least) < 1e-7 else "minimum" if least > 0 else "strict saddle"
    norm = derivatives.gradient.norm().item()
    drop, misrouted = best - derivatives.value, min(share, 1 - share)
    return CriticalPoint(
        student,
        derivatives.value,
        norm,
        least,
        direction,
        drop,
        misrouted,
        kind,
        derivatives.hessian,
    )
