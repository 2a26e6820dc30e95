"""A population as weighted points, and the soft risk over it with its exact derivatives.

    gaussian_grid       product rule for N(0, Σ) in the plane, one axis across the teacher's wall
    gaussian_points     independent draws in any dimension
    population_risk     L̃_τ(φ, θ), gradient and Hessian in closed form
    population_gradient the same without the Hessian

For two affine experts, x̃ = (x, 1), S = φ·x̃, p = σ(S/τ), r = μ - h and d = f_1 - f_2,

    ∂h = (p' d x̃/τ, p x̃, (1 - p) x̃),  Hessian = 2 E[∂h ∂hᵀ] - 2 E[r ∂²h].

Unlike `tieline.limits.transfer` this holds where the walls are parallel and at a router of zero.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.limits.cells import TwoCells, check_covariance, gaussian_inputs
from tieline.limits.risk import check_temperature
from tieline.limits.slices import graded_rule, normal_density
from tieline.limits.transfer import Derivatives

__all__ = [
    "Population",
    "gaussian_grid",
    "gaussian_points",
    "population_gradient",
    "population_risk",
]

REACH = 8.5  # normal mass beyond: 2e-17


@dataclass(frozen=True, eq=False)
class Population:
    """Weighted inputs with their targets.

    Attributes:
        inputs: (n, D).
        target: (n,) μ at each input.
        weight: (n,) adding up to 1.
    """

    inputs: Float[Tensor, "n width"]
    target: Float[Tensor, " n"]
    weight: Float[Tensor, " n"]


def gaussian_grid(
    teacher: TwoCells,
    covariance: Float[Tensor, "2 2"] | None = None,
    spacing: float = 0.2,
    order: int = 10,
) -> Population:
    """N(0, Σ) in the plane as a product rule: exact to rounding for integrands of width >= 0.5.

    Across the teacher's wall Gauss-Legendre panels that end on it, so that its jump costs nothing;
    along it the trapezoidal rule, whose error falls like exp(-2π² w/spacing) for a layer of w.
    """
    require(teacher.width == 2, f"a grid needs width 2, got {teacher.width}", ShapeError)
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
    return Population(inputs.flatten(0, 1), values, weight.flatten())


def gaussian_points(
    teacher: TwoCells, n: int, seed: int, covariance: Float[Tensor, "width width"] | None = None
) -> Population:
    """Independent draws of N(0, Σ) with equal weights."""
    inputs = gaussian_inputs(n, teacher.width, seed, covariance)
    return Population(inputs, teacher.value(inputs), torch.full((n,), 1 / n, dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class _Forward:
    """What value, gradient and Hessian share: x̃, ∂h row by row, residual, p'/τ, 1 - 2p, d."""

    inputs: Tensor
    rows: Tensor
    residual: Tensor
    turn: Tensor
    balance: Tensor
    contrast: Tensor


def _forward(population: Population, parameters: Tensor, tau: float) -> _Forward:
    check_temperature(tau)
    n, width = population.inputs.shape
    require(
        len(parameters) == 3 * (width + 1),
        f"need {3 * (width + 1)} parameters for width {width}, got {len(parameters)}",
        ShapeError,
    )
    x = torch.cat([population.inputs, torch.ones(n, 1, dtype=torch.float64)], dim=1)
    router, *experts = parameters.double().reshape(3, width + 1)
    first, second = (x @ expert for expert in experts)
    p, d = torch.sigmoid(x @ router / tau), first - second
    turn = p * (1 - p) / tau
    rows = torch.cat([(turn * d)[:, None] * x, p[:, None] * x, (1 - p)[:, None] * x], dim=1)
    return _Forward(x, rows, population.target - second - p * d, turn, 1 - 2 * p, d)


def population_gradient(
    population: Population, parameters: Float[Tensor, " parameters"], tau: float
) -> tuple[float, Float[Tensor, " parameters"]]:
    """Value and gradient of L̃_τ at parameters in the order of `TwoCells.flat`."""
    at, w = _forward(population, parameters, tau), population.weight
    value = (w * at.residual.square()).sum().item()
    return value, -2 * at.rows.T @ (w * at.residual)


def population_risk(
    population: Population, parameters: Float[Tensor, " parameters"], tau: float
) -> Derivatives:
    """Value, gradient and Hessian of L̃_τ at parameters in the order of `TwoCells.flat`."""
    at, w = _forward(population, parameters, tau), population.weight
    value, gradient = population_gradient(population, parameters, tau)
    pull = w * at.residual * at.turn
    bend = at.inputs.T @ ((pull * at.balance / tau * at.contrast)[:, None] * at.inputs)
    mixed = at.inputs.T @ (pull[:, None] * at.inputs)
    zero = torch.zeros_like(mixed)
    blocks = ([bend, mixed, -mixed], [mixed, zero, zero], [-mixed, zero, zero])
    second = torch.cat([torch.cat(row, dim=1) for row in blocks])
    hessian = 2 * at.rows.T @ (w[:, None] * at.rows) - 2 * second
    return Derivatives(value, gradient, hessian)
