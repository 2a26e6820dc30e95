"""Boundary mass as a surface integral, for any smooth score difference and for linear routers.

    F(t) = ∫_{S=t} g p/‖∇S‖ dH,  X ~ N(0, I)                    surface_integral, eq. 3.8 (g = 1)
    P(|S| <= w) = ∫_{-w}^{w} F = 2w F(0) + o(w)                 Lemma 3.6
    BM_ε(τ) = 2 κ_ε F(0) τ + o(τ)                               coarea_check, Prop. 3.5
    BM_pair(w) <= 2w Σ_{k<l} F_kl(0) + o(w)                     pair_constants, eq. 3.9
    C_margin = Σ_{k<l} 2 sup_t F_kl(t)                          pair_constants, Prop. 3.7

F is measured on the surface, not by counting inputs near it: along lines parallel to an axis i with
the other coordinates drawn at random, each root x of S = t adds

    D |n_i|² · φ(x_i) g/|∂_i S|,   n = ∇S/‖∇S‖.

The factor D n_i² distributes each point of the surface over the D axes, so that lines that touch it
do not inflate the variance. Two roots within one cell of the search grid are missed.

F_kl(t) is the density of a_k - a_l at t. The sum over pairs counts ties of any two experts, near
the top or not; for many experts it says little about the top two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.statistics import Estimate, mean_estimate
from tieline.lab.limits.two_cells import (
    Covariance,
    ambiguity_width,
    check_covariance,
    gaussian_inputs,
    normal_density,
)

__all__ = ["CoareaCheck", "PairConstants", "coarea_check", "pair_constants", "surface_integral"]

Score = Callable[[Tensor], Tensor]
REACH, CELLS = 8.0, 256
"""End of the search grid on each line, in standard deviations, and its cells."""


@dataclass(frozen=True)
class CoareaCheck:
    """Boundary mass of a sample beside its first order from the surface (Prop. 3.5)."""

    taus: tuple[float, ...]  # temperatures
    masses: tuple[Estimate, ...]  # P(|S| <= κ_ε τ) on a sample
    first_orders: tuple[Estimate, ...]  # 2 κ_ε F(0) τ
    profile: Estimate  # F(0)
    constant: Estimate  # C_ε = 2 κ_ε F(0)
    # smallest ‖∇S‖ among the sample's inputs with |S| below the largest width, the diagnosis
    # of Assumption 3.4: tiny where a wall is nearly degenerate
    least_gradient: float


@dataclass(frozen=True, eq=False)
class PairConstants:
    """First-order constants of the pairwise boundary mass of a linear router."""

    densities: Float[Tensor, "experts experts"]  # (E, E) F_kl(0); zero on the diagonal
    union: float  # 2 Σ_{k<l} F_kl(0), slope of the union bound of eq. 3.9 in the width w
    margin: float  # C_margin with P(Δ_min <= δ) <= C_margin δ for every δ


def surface_integral(
    score: Score,
    dim: int,
    *,
    level: float = 0.0,
    integrand: Score | None = None,
    lines: int = 2000,
    seed: int = 0,
) -> Estimate:
    """F(t) = ∫_{S=t} g p/‖∇S‖ dH for X ~ N(0, I), with its standard error.

    S maps inputs (n, D) to (n,) and is differentiable; `level` is t, `integrand` maps inputs to g
    (n,), 1 for None. There are `lines` lines per axis, drawn by `seed`.
    """
    require(lines > 1, f"need 2 lines or more, got {lines=}")
    require(dim > 0, f"need dim > 0, got {dim=}")
    others = gaussian_inputs(lines, dim, seed)
    totals = sum(_line_sums(score, others, axis, level, integrand) for axis in range(dim))
    assert isinstance(totals, Tensor)
    return mean_estimate(totals)


def coarea_check(
    score: Score,
    dim: int,
    taus: tuple[float, ...],
    epsilon: float,
    *,
    n: int = 200_000,
    lines: int = 2000,
    seed: int = 0,
) -> CoareaCheck:
    """P(|S| <= κ_ε τ) of n draws of N(0, I) against 2 κ_ε F(0) τ from the surface S = 0."""
    require(len(taus) > 0 and min(taus) > 0, f"need temperatures > 0, got {taus}")
    kappa = ambiguity_width(epsilon)
    x = gaussian_inputs(n, dim, seed + 1).requires_grad_()
    s = score(x)
    (slope,) = torch.autograd.grad(s.sum(), x)
    distance = s.detach().abs()
    near = distance <= kappa * max(taus)
    least = slope[near].norm(dim=1).min().item() if bool(near.any()) else math.nan
    profile = surface_integral(score, dim, lines=lines, seed=seed)
    return CoareaCheck(
        taus,
        tuple(mean_estimate((distance <= kappa * tau).double()) for tau in taus),
        tuple(profile.times(2 * kappa * tau) for tau in taus),
        profile,
        profile.times(2 * kappa),
        least,
    )


def pair_constants(
    weight: Float[Tensor, "experts dim"],
    bias: Float[Tensor, " experts"] | None = None,
    covariance: Covariance = None,
) -> PairConstants:
    """F_kl(0) of all pairs, the union bound (3.9) and C_margin, for scores Wx + b, X ~ N(0, Σ)."""
    experts, dim = weight.shape
    require(experts > 1, f"need 2 experts or more, got {experts}", ShapeError)
    sigma = check_covariance(covariance, dim)
    w = weight.double()
    b = torch.zeros(experts, dtype=torch.float64) if bias is None else bias.double()
    require(len(b) == experts, f"need {experts} biases, got {len(b)}", ShapeError)
    gram = w @ sigma @ w.T
    variance = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    pair = torch.ones(experts, experts).triu(1).bool()
    least = variance[pair].min().item()
    require(
        least > 1e-12 * gram.diagonal().max().item(),
        f"two experts have the same weights: variance of a score difference {least:.3g}",
    )
    height = (2 * math.pi * variance[pair]).rsqrt()
    mean = (b[:, None] - b)[pair]
    at_zero = height * (-mean.square() / (2 * variance[pair])).exp()
    densities = torch.zeros(experts, experts, dtype=torch.float64).masked_scatter(pair, at_zero)
    return PairConstants(densities + densities.T, 2 * at_zero.sum().item(), 2 * height.sum().item())


def _line_sums(
    score: Score, others: Tensor, axis: int, level: float, integrand: Score | None
) -> Tensor:
    """Σ over the roots on each line of n_i² φ g/|∂_i S|."""
    grid = torch.linspace(-REACH, REACH, CELLS + 1, dtype=torch.float64)
    values = torch.stack([score(_with_coordinate(others, axis, t)) - level for t in grid], dim=1)
    line, cell = ((values[:, 1:] > 0) != (values[:, :-1] > 0)).nonzero(as_tuple=True)
    roots = _bisect_lines(score, others[line], axis, level, grid[cell], grid[cell + 1])
    points = _with_coordinate(others[line], axis, roots).detach().requires_grad_()
    (slope,) = torch.autograd.grad(score(points).sum(), points)
    share = slope[:, axis].abs() / slope.square().sum(dim=1)  # n_i²/|∂_i S|
    g = 1.0 if integrand is None else integrand(points.detach())
    return torch.zeros(len(others), dtype=torch.float64).index_add(
        0, line, share * normal_density(roots) * g
    )


def _with_coordinate(others: Tensor, axis: int, value: Tensor) -> Tensor:
    """The inputs with coordinate `axis` set."""
    points = others.clone()
    points[:, axis] = value
    return points


def _bisect_lines(
    score: Score, others: Tensor, axis: int, level: float, low: Tensor, high: Tensor
) -> Tensor:
    """Roots on all lines at once, between ends of different sign, to floating-point precision."""
    below = score(_with_coordinate(others, axis, low)) - level > 0
    for _ in range(50):
        middle = (low + high) / 2
        same = (score(_with_coordinate(others, axis, middle)) - level > 0) == below
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return (low + high) / 2
