"""Integrals over a wall S = 0: boundary mass, and the change of the risk when the wall moves.

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

A moving wall (paper 0, Proposition 5.10 and Assumptions 5.12, 5.14): let S_t = S + t·δS. Expert
1 gains ground where δS > 0, and with D(μ) = (f_1 - μ)² - (f_2 - μ)²

    dL̃_0/dt at 0⁺ = ∫_{S=0} [δS⁺ D(μ_2) - δS⁻ D(μ_1)] p/‖∇S‖,                     eq. 5.6

μ_i the trace of the target from the side of expert i. **It is a one-sided derivative**: at a wall
of the teacher μ_1 ≠ μ_2, the derivative at 0⁻ has the traces exchanged, and at the teacher itself
the two differ in sign (a kink, not a critical point). Off the teacher's walls both agree.

Ψ_τ(φ) = min_θ L̃_τ(θ, φ) is the risk with its experts optimised out (`gaussian_profile`). A linear
router moves its wall by affine functions on the wall: D + 1 parameters, D independent velocities,
since scaling the router moves nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import stable_topk
from tieline.core.statistics import Estimate, mean_estimate
from tieline.lab.limits.risk import MoESample
from tieline.lab.limits.two_cells import (
    Covariance,
    TwoCells,
    ambiguity_width,
    check_covariance,
    gaussian_inputs,
    gaussian_profile,
    gaussian_risk,
    normal_density,
    normal_rule,
    same_wall,
    slice_at,
)

__all__ = [
    "CoareaCheck",
    "PairConstants",
    "ProfileVariation",
    "VelocityGram",
    "WallVariation",
    "coarea_check",
    "moved",
    "pair_constants",
    "profile_variation",
    "sampled_wall_derivative",
    "surface_integral",
    "velocity_gram",
    "wall_derivative",
    "wall_variation",
]

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
    totals = sum(_sum_over_line_roots(score, others, axis, level, integrand) for axis in range(dim))
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


def _sum_over_line_roots(
    score: Score, others: Tensor, axis: int, level: float, integrand: Score | None
) -> Tensor:
    """Sum n_i² φ g/|∂_i S| over the roots on each line."""
    grid = torch.linspace(-REACH, REACH, CELLS + 1, dtype=torch.float64)
    values = torch.stack([score(_with_coordinate(others, axis, t)) - level for t in grid], dim=1)
    line, cell = ((values[:, 1:] > 0) != (values[:, :-1] > 0)).nonzero(as_tuple=True)
    roots = _roots_on_lines(score, others[line], axis, level, grid[cell], grid[cell + 1])
    points = _with_coordinate(others[line], axis, roots).detach().requires_grad_()
    (slope,) = torch.autograd.grad(score(points).sum(), points)
    share = slope[:, axis].abs() / slope.square().sum(dim=1)  # n_i²/|∂_i S|
    g = 1.0 if integrand is None else integrand(points.detach())
    return torch.zeros(len(others), dtype=torch.float64).index_add(
        0, line, share * normal_density(roots) * g
    )


def _with_coordinate(others: Tensor, axis: int, value: Tensor) -> Tensor:
    """Return the inputs with coordinate `axis` set to the value."""
    points = others.clone()
    points[:, axis] = value
    return points


def _roots_on_lines(
    score: Score, others: Tensor, axis: int, level: float, low: Tensor, high: Tensor
) -> Tensor:
    """Bisect on all lines at once, between ends of different sign, to floating-point precision."""
    below = score(_with_coordinate(others, axis, low)) - level > 0
    for _ in range(50):
        middle = (low + high) / 2
        same_side = (score(_with_coordinate(others, axis, middle)) - level > 0) == below
        low, high = torch.where(same_side, middle, low), torch.where(same_side, high, middle)
    return (low + high) / 2


Direction = Float[Tensor, " columns"]


@dataclass(frozen=True)
class WallVariation:
    """One-sided derivatives of L̃_0 along a motion of the wall, by formula and by differences."""

    right: float  # eq. 5.6 at 0⁺
    left: float  # the same at 0⁻
    right_difference: float  # (4 L(h/2) - L(h) - 3 L(0))/h, extrapolated
    left_difference: float  # the same from below
    second: float  # second derivative by central differences; not meaningful at a kink
    kink: bool  # whether the two sides differ


@dataclass(frozen=True, eq=False)
class VelocityGram:
    """Inner products of the velocities of a wall that changes of its parameters produce."""

    # (D + 1, D + 1) ∫_{S=0} (x̃/‖∇S‖)(x̃/‖∇S‖)ᵀ p dH over changes of (normal, offset)
    gram: Float[Tensor, "columns columns"]
    rank: int  # dimension of the space of velocities


@dataclass(frozen=True)
class ProfileVariation:
    """Ψ_τ along a motion of the wall."""

    value: float  # Ψ_τ(φ)
    first: float  # dΨ/dt at t = 0
    second: float  # d²Ψ/dt²
    speed: float  # squared norm of the velocity in L²(p dH)
    descent: float  # λ_nd = -second/speed where `first` vanishes; negative if Ψ curves upwards
    curvature: float  # α_fr, the least eigenvalue of the Hessian in the experts


def moved(student: TwoCells, direction: Direction, step: float | Tensor) -> TwoCells:
    """Shift (normal, offset) of a student by step·direction; `direction` is (D + 1,)."""
    require(
        len(direction) == student.dim + 1,
        f"a direction needs {student.dim + 1} entries (normal, offset), got {len(direction)}",
        ShapeError,
    )
    change = step * direction
    return TwoCells(student.normal + change[:-1], student.offset + change[-1], student.experts)


def wall_derivative(
    student: TwoCells,
    teacher: TwoCells,
    direction: Direction,
    covariance: Covariance = None,
    side: int = 1,
) -> float:
    """One-sided derivative dL̃_0/dt at 0⁺ (side 1) or 0⁻ (side -1), by the wall integral 5.6.

    Args:
        student: whose wall moves.
        teacher: the target.
        direction: (D + 1,) change of (normal, offset) per unit of t.
        covariance: Σ of the inputs; the identity for None.
        side: sign of the t that tend to zero.
    """
    require(side in (1, -1), f"side is 1 or -1, got {side}")
    moved(student, direction, 0.0)
    velocity = side * direction.double()
    mean, across, density = _distribution_on_wall(student, covariance)
    orientation = same_wall(student, teacher)
    if orientation:  # traces differ: split by the sign of the velocity
        gained, lost = (1, 0) if orientation == 1 else (0, 1)
        form = velocity
        target = torch.stack([teacher.experts[gained], teacher.experts[lost]])
    else:  # one trace on both sides: the teacher's cell at each point of the wall
        form = torch.cat([teacher.normal, teacher.offset[None]])
        target = teacher.experts
    value, weight, centre, rest = _condition_on_affine_form(mean, across, form)
    trace = target[(value < 0).long()]
    contrast = (student.experts[0] - student.experts[1]).expand_as(trace)
    residual = student.experts.sum(dim=0) - 2 * trace
    cubic = _mean_product_of_forms(velocity.expand_as(trace), contrast, residual, centre, rest)
    return side * (density * (weight * cubic).sum()).item()


def wall_variation(
    student: TwoCells,
    teacher: TwoCells,
    direction: Direction,
    covariance: Covariance = None,
    step: float = 1e-4,
) -> WallVariation:
    """First variation (5.6) on both sides against finite differences, and the second variation."""
    require(step > 0, f"need a step > 0, got {step=}")

    def risk(t: float) -> float:
        return gaussian_risk(moved(student, direction, t), teacher, covariance).item()

    unmoved_risk, h = risk(0.0), step
    above, below = ((4 * risk(t / 2) - risk(t) - 3 * unmoved_risk) / t for t in (h, -h))
    wide = 30 * h
    second = (risk(wide) - 2 * unmoved_risk + risk(-wide)) / wide**2
    right, left = (wall_derivative(student, teacher, direction, covariance, s) for s in (1, -1))
    kink = bool(same_wall(student, teacher))
    return WallVariation(right, left, above, below, second, kink)


def sampled_wall_derivative(
    sample: MoESample, score_change: Float[Tensor, "n experts"], width: float
) -> Estimate:
    """Derivative of the hard risk along a change of the scores: the mean of 1{Δ <= w} D ∂S/2w.

    For any router, experts and target. At a wall where the target jumps it tends to the mean of the
    two one-sided derivatives, with a bias of order w; elsewhere the bias is of order w².

    `score_change` (n, E) is the derivative of each score by the parameter; the target is noiseless.
    """
    require(width > 0, f"need a width > 0, got {width=}")
    require(
        score_change.shape == sample.scores.shape,
        f"score_change must be {tuple(sample.scores.shape)}, got {tuple(score_change.shape)}",
        ShapeError,
    )
    pair = stable_topk(sample.scores, 2).indices
    speed = -score_change.double().gather(1, pair).diff(dim=1).squeeze(1)
    loss = (sample.outputs.gather(1, pair) - sample.target[:, None]).square()
    contrast = loss[:, 0] - loss[:, 1]
    near = (sample.margin <= width).double()
    return mean_estimate(near * contrast * speed / (2 * width))


def velocity_gram(wall: TwoCells, covariance: Covariance = None) -> VelocityGram:
    """Gram matrix of the velocities δS/‖∇S‖ in L²(p dH) on the wall, for X ~ N(0, Σ)."""
    facet = slice_at(wall, wall, covariance)
    gram = facet.weight[0] * facet.second[0] / wall.normal.norm()
    return VelocityGram(gram, int(torch.linalg.matrix_rank(gram, rtol=1e-10)))


def profile_variation(
    wall: TwoCells,
    teacher: TwoCells,
    direction: Direction,
    covariance: Covariance = None,
    tau: float = 0.0,
) -> ProfileVariation:
    """First and second variation of Ψ_τ, exact where the walls cross; τ = 0 is the hard problem.

    The experts of `wall` are not used; `direction` must move it. See also `wall_derivative`.
    """
    require(wall.dim == teacher.dim, f"dimensions differ: {wall.dim}, {teacher.dim}", ShapeError)
    move = direction.double()
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    profile = gaussian_profile(moved(wall, move, t), teacher, covariance, tau)
    speed = (move @ velocity_gram(wall, covariance).gram @ move).item()
    require(speed > 0, f"the direction {direction.tolist()} does not move the wall")
    (first,) = torch.autograd.grad(profile.value, t, create_graph=True)
    second = torch.autograd.grad(first, t)[0].item()
    value = profile.value.item()
    return ProfileVariation(value, first.item(), second, speed, -second / speed, profile.curvature)


def _distribution_on_wall(
    student: TwoCells, covariance: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and covariance of X given S = 0, and the density of S there."""
    sigma = check_covariance(covariance, student.dim)
    forward = sigma @ student.normal
    spread = (student.normal @ forward).sqrt()
    z = -student.offset / spread
    mean = torch.cat([forward * z / spread, torch.ones(1, dtype=torch.float64)])
    across = sigma - forward[:, None] * forward / spread**2
    return mean, torch.nn.functional.pad(across, (0, 1, 0, 1)), normal_density(z) / spread


def _condition_on_affine_form(
    mean: Tensor, across: Tensor, form: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nodes of an affine form: values, weights, conditional means (n, D + 1) and covariance."""
    level, spread = form @ mean, (form @ across @ form).clamp(min=0).sqrt()
    if spread <= 1e-13 * (1 + form.abs().max()):
        unit = torch.ones(1, dtype=torch.float64)
        return level[None], unit, mean[None], across
    gain = across @ form / spread
    y, weight = normal_rule([(-level / spread, 0.0)])
    return level + spread * y, weight, mean + y[:, None] * gain, across - gain[:, None] * gain


def _mean_product_of_forms(a: Tensor, b: Tensor, c: Tensor, mean: Tensor, rest: Tensor) -> Tensor:
    """E[(a·x̃)(b·x̃)(c·x̃)] of a Gaussian x̃, row by row."""
    means = [(form * mean).sum(dim=1) for form in (a, b, c)]
    pairs = [((p @ rest) * q).sum(dim=1) for p, q in ((b, c), (a, c), (a, b))]
    linear = sum(m * pair for m, pair in zip(means, pairs, strict=True))
    return means[0] * means[1] * means[2] + linear
