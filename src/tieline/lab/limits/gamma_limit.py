"""Γ-convergence of L_τ to L_0 (Theorem 4.7) for two affine experts and a Gaussian input.

The router must be normalised: with a free scale L_τ(φ) = L_1(φ/τ), so that inf L_τ is one number
for all τ, equal to inf L_0. Experts are profiled out,
Ψ_τ(φ) = min_θ L̃_τ(θ, φ); over unit normals and bounded offsets

    sup_φ |Ψ_τ - Ψ_0| → 0,  inf Ψ_τ → inf Ψ_0,  argmin Ψ_τ → argmin Ψ_0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.numerics import one_thread
from tieline.lab.limits.risk import check_temperature
from tieline.lab.limits.two_cells import TwoCells, gaussian_profile

__all__ = ["FreeScale", "GammaConvergence", "free_scale", "gamma_convergence", "wall_grid"]


@dataclass(frozen=True, eq=False)
class GammaConvergence:
    """Profiled risks over a set of normalised walls, against temperature."""

    taus: tuple[float, ...]  # temperatures, then 0
    walls: Float[Tensor, "n columns"]  # (n, D + 1) unit normal and offset of each candidate
    profiles: Float[Tensor, "rows n"]  # (taus + 1, n) Ψ_τ of each wall; the last row is Ψ_0
    infima: tuple[float, ...]  # inf over the walls of each row
    minimisers: Float[Tensor, "rows columns"]  # (taus + 1, D + 1) where it is attained
    uniform_gaps: tuple[float, ...]  # sup |Ψ_τ - Ψ_0| for each τ
    # from the minimiser at τ to that at 0; (normal, offset) and its negative are one
    distances: tuple[float, ...]


@dataclass(frozen=True)
class FreeScale:
    """min over scales c of Ψ_τ(cφ) for one wall φ."""

    taus: tuple[float, ...]  # temperatures
    scales: tuple[float, ...]  # c
    profiles: tuple[tuple[float, ...], ...]  # one row per τ, Ψ_τ(cφ)
    infima: tuple[float, ...]  # minimum of each row


def wall_grid(angles: int, offsets: Sequence[float] = (0.0,)) -> Float[Tensor, "n 3"]:
    """Unit normals at equal angles in [0, π), with each offset: walls of the plane."""
    require(angles > 0, f"need one angle or more, got {angles=}")
    theta = torch.arange(angles, dtype=torch.float64) * math.pi / angles
    level = torch.tensor(offsets, dtype=torch.float64)
    normals = torch.stack([theta.cos(), theta.sin()], dim=1)
    return torch.cat(
        [normals.repeat_interleave(len(level), 0), level.repeat(angles)[:, None]], dim=1
    )


def gamma_convergence(
    teacher: TwoCells, walls: Float[Tensor, "n columns"], taus: Sequence[float]
) -> GammaConvergence:
    """Ψ_τ and Ψ_0 over walls (n, D + 1) of unit normals and offsets, τ > 0."""
    require(
        walls.shape[1] == teacher.dim + 1,
        f"walls must have {teacher.dim + 1} columns, got {walls.shape[1]}",
        ShapeError,
    )
    lengths = walls[:, :-1].norm(dim=1)
    require(
        bool(((lengths - 1).abs() < 1e-6).all()),
        f"normals must have length 1, got {lengths.min():.9g} … {lengths.max():.9g}",
    )
    check_temperature(*taus)
    rows = [_wall_profiles(teacher, walls, tau) for tau in (*taus, 0.0)]
    profiles = torch.stack(rows)
    infima, at = profiles.min(dim=1)
    best = walls[at]
    spread = (profiles[:-1] - profiles[-1]).abs().amax(dim=1)
    apart = torch.minimum((best - best[-1]).norm(dim=1), (best + best[-1]).norm(dim=1))
    return GammaConvergence(
        tuple(taus),
        walls,
        profiles,
        tuple(infima.tolist()),
        best,
        tuple(spread.tolist()),
        tuple(apart[:-1].tolist()),
    )


def _wall_profiles(teacher: TwoCells, walls: Tensor, tau: float) -> Tensor:
    """Ψ_τ of every wall."""
    with one_thread():
        students = (TwoCells(wall[:-1], wall[-1], teacher.experts) for wall in walls)
        values = [gaussian_profile(s, teacher, tau=tau).value for s in students]
    return torch.stack(values)


def free_scale(
    wall: TwoCells, teacher: TwoCells, taus: Sequence[float], per_tau: Sequence[float]
) -> FreeScale:
    """Ψ_τ(cφ) at scales c = τ·r: equal to Ψ_1(rφ) for every τ, so the scale must be fixed.

    `wall` is φ; the ratios r = c/τ of `per_tau` are tried at each temperature.
    """
    require(all(r > 0 for r in per_tau), f"need scales > 0, got {list(per_tau)}")

    def scaled_wall(c: float) -> TwoCells:
        return TwoCells(c * wall.normal, c * wall.offset, wall.experts)

    rows = tuple(
        tuple(
            gaussian_profile(scaled_wall(tau * r), teacher, tau=tau).value.item() for r in per_tau
        )
        for tau in taus
    )
    return FreeScale(tuple(taus), tuple(per_tau), rows, tuple(min(row) for row in rows))
