"""The limit τ → 0 of L_τ: its exact first order, the margin tail of its bounds, Γ-convergence.

    L_τ - L_0 = τ Σ_{k<l} ∫_facet (2 ln2 · d·[μ] - d²) p/‖∇S‖ + o(τ),

d = f_k - f_l and [μ] the jump of the target from the side of l to that of k. A target that is
continuous at the wall has [μ] = 0: soft routing is then *better* than hard, by first order in τ.

The sampled slope needs no trace of the target: with t and q the first and second expert of an
input, both sides of a wall contribute 2 ln2 (μ - f_q)(f_t - f_q) - (ln2 + ½)(f_t - f_q)², whose
mean over {Δ <= w}, divided by w, tends to the slope. The fitted C holds for t → 0; Theorem 4.5
needs one for every t > 0, which is at least as large.

Γ-convergence (Theorem 4.7) is for two affine experts and a Gaussian input. The router must be
normalised: with a free scale L_τ(φ) = L_1(φ/τ), so that inf L_τ is one number for all τ, equal to
inf L_0. Experts are profiled out, Ψ_τ(φ) = min_θ L̃_τ(θ, φ); over unit normals and bounded offsets

    sup_φ |Ψ_τ - Ψ_0| → 0,  inf Ψ_τ → inf Ψ_0,  argmin Ψ_τ → argmin Ψ_0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from scipy import optimize
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.numerics import one_thread
from tieline.core.ranking import gap, stable_topk
from tieline.core.statistics import Estimate, mean_estimate
from tieline.lab.geometry.tubes import gaussian_slab
from tieline.lab.limits.risk import (
    MoESample,
    check_temperature,
    hard_predictions,
    risk_gap,
    soft_predictions,
    soft_to_hard_constant,
)
from tieline.lab.limits.two_cells import (
    Covariance,
    TwoCells,
    gaussian_boundary_mass,
    gaussian_profile,
    same_wall,
    slice_at,
)
from tieline.measure.boundary import MarginTail, margin_tail

__all__ = [
    "FreeScale",
    "GammaConvergence",
    "Slope",
    "SoftToHardChain",
    "free_scale",
    "gamma_convergence",
    "gaussian_margin_constant",
    "gaussian_slope",
    "margin_constant",
    "router_margin_tail",
    "sampled_slope",
    "soft_to_hard_chain",
    "wall_grid",
]


@dataclass(frozen=True)
class Slope:
    """Slope dL_τ/dτ at 0⁺ and its two parts."""

    value: float  # the slope, `jump` + `smooth`
    jump: float  # ∫ 2 ln2 · d·[μ] p/‖∇S‖; zero unless the target jumps at the wall
    smooth: float  # -∫ d² p/‖∇S‖, never positive


@dataclass(frozen=True)
class SoftToHardChain:
    """|L_τ - L_0| and the bounds of Theorem 4.5's proof, each at most the next."""

    tau: float
    gap: Estimate  # L_τ - L_0, paired
    predictions: Estimate  # 2 (B_Y + B_f) E|h_τ - h_0|, eq. 4.6
    exponential: Estimate  # 4 B_f (B_Y + B_f)(E - 1) E[e^(-Δ/τ)], eq. 4.8
    bound: float  # C_sh τ^α


def gaussian_slope(student: TwoCells, teacher: TwoCells, covariance: Covariance = None) -> Slope:
    """Slope of `gaussian_risk` in τ at 0⁺.

    The target jumps at the student's wall only where the teacher's is the same hyperplane.
    """
    facet = slice_at(student, teacher, covariance)
    density, second = facet.weight[0].item(), facet.second[0]
    d = student.experts[0] - student.experts[1]
    smooth = -density * (d @ second @ d).item()
    jump = teacher.experts[0] - teacher.experts[1]
    side = same_wall(student, teacher)
    strength = 2 * math.log(2) * density * side * (d @ second @ jump).item()
    return Slope(strength + smooth, strength, smooth)


def sampled_slope(sample: MoESample, width: float) -> Estimate:
    """Slope of L_τ at 0⁺ from inputs with margin below 2w, with its standard error.

    (4 F(w) - F(2w))/2w, F(w) the mean of the integrand over {Δ <= w}; its bias is of order w².
    """
    require(width > 0, f"need a width > 0, got {width=}")
    first, second = stable_topk(sample.scores, 2).indices.unbind(dim=1)
    pick = sample.outputs.double().gather
    best, other = (pick(1, index[:, None]).squeeze(1) for index in (first, second))
    d, residual = best - other, sample.target - other
    integrand = 2 * math.log(2) * residual * d - (math.log(2) + 0.5) * d.square()
    window = 4 * (sample.margin <= width).double() - (sample.margin <= 2 * width).double()
    return mean_estimate(integrand * window / (2 * width))


def router_margin_tail(
    scores: Float[Tensor, "n experts"], mass: float = 0.05, confidence: float = 0.95
) -> MarginTail:
    """Fit the tail (C, α) of the top-two margins below their `mass`-quantile."""
    return margin_tail(gap(scores, 1), mass, confidence)


def margin_constant(margins: Float[Tensor, " n"], alpha: float, least: int = 100) -> Estimate:
    """Constant C = sup_t F(t)/t^α over the margins from the `least`-th smallest on.

    Below that rank F is too noisy: its relative error is 1/√rank. The standard error is that of F
    at the maximising t and ignores that a maximum over noise is a little too large.
    """
    require(alpha > 0, f"need alpha > 0, got {alpha=}")
    n = margins.numel()
    require(1 <= least <= n, f"need 1 <= least <= {n} margins, got {least=}", ShapeError)
    ordered, rank = margins.double().sort().values, torch.arange(1, n + 1, dtype=torch.float64)
    ratio = (rank / n / ordered.pow(alpha))[least - 1 :]
    index = int(ratio.argmax())
    share = (index + least) / n
    value = ratio[index].item()
    return Estimate(value, value * math.sqrt((1 - share) / (share * n)))


def gaussian_margin_constant(student: TwoCells, covariance: Covariance = None) -> float:
    """Best constant C = sup_{t > 0} P(|S| <= t)/t of eq. 4.4 at α = 1, for a linear router.

    2 φ(b/σ)/σ, the limit t → 0, where |b| <= σ; larger where the wall lies further out, since the
    density of S then grows away from zero.
    """
    at_zero = gaussian_boundary_mass(student, 0.0, covariance)
    spread, b = at_zero.spread, abs(student.offset.item())
    if b <= spread:
        return 2 * at_zero.density

    steepest: Any = optimize.minimize_scalar(
        lambda t: -gaussian_slab(b, spread, float(t)).exact / t,
        bounds=(0.0, b + 4 * spread),
        options={"xatol": 1e-8 * spread},
    )
    return -float(steepest.fun)


def soft_to_hard_chain(
    sample: MoESample,
    tau: float,
    *,
    C: float,
    alpha: float = 1.0,
    B_f: float | None = None,
    B_Y: float | None = None,
) -> SoftToHardChain:
    """Evaluate the chain of bounds of Theorem 4.5 at one temperature, on a sample.

    C and α are of the margin tail, for instance C = `margin_constant(sample.margin, alpha).value`;
    B_f and B_Y bound experts and target, by the largest of the sample for None.
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
    """Profiles Ψ_τ(cφ) of one wall φ over scales c, with their minima."""

    taus: tuple[float, ...]  # temperatures
    scales: tuple[float, ...]  # c
    profiles: tuple[tuple[float, ...], ...]  # one row per τ, Ψ_τ(cφ)
    infima: tuple[float, ...]  # minimum of each row


def wall_grid(angles: int, offsets: Sequence[float] = (0.0,)) -> Float[Tensor, "n 3"]:
    """Walls of the plane: unit normals at equal angles in [0, π), with each offset."""
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
    """Profile Ψ_τ and Ψ_0 over walls (n, D + 1) of unit normals and offsets, τ > 0."""
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
    students = [TwoCells(wall[:-1], wall[-1], teacher.experts) for wall in walls]
    with one_thread():
        rows = [
            torch.stack([gaussian_profile(s, teacher, tau=tau).value for s in students])
            for tau in (*taus, 0.0)
        ]
    profiles = torch.stack(rows)
    infima, index = profiles.min(dim=1)
    best = walls[index]
    spread = (profiles[:-1] - profiles[-1]).abs().amax(dim=1)
    distances = torch.minimum((best - best[-1]).norm(dim=1), (best + best[-1]).norm(dim=1))
    return GammaConvergence(
        tuple(taus),
        walls,
        profiles,
        tuple(infima.tolist()),
        best,
        tuple(spread.tolist()),
        tuple(distances[:-1].tolist()),
    )


def free_scale(
    wall: TwoCells, teacher: TwoCells, taus: Sequence[float], per_tau: Sequence[float]
) -> FreeScale:
    """Profile Ψ_τ(cφ) at scales c = τ·r, which equals Ψ_1(rφ): the scale must be fixed.

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
