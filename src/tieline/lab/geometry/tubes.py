"""Mass near a decision surface, volume near ties, and the share of a flat that is a tie.

The surface integral is the density of S(X) at zero, so it is estimated from margins without
gradients. Tubes are given as shares of the ball of radius R. The leading term bounds the tube of
one flat for every δ and ε, not only for large R, since the density of the normal coordinates is
largest at the origin.

On S_J the other experts lie above or below the tied ones; a point is an order-r tie where
max(0, k-r) <= p <= k-1 of them are above. α_{J,r} is the share of such directions in S_J. The
paper's upper bound α <= ½ holds for one choice of experts above, not for their union: with
E = 4, k = 2, r = 2 every point of S_J is a tie and α = 1.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy import integrate, optimize, special
from torch import Tensor
from torch.special import log_ndtr

from tieline.core.errors import ShapeError, require
from tieline.core.statistics import Estimate, share_estimate
from tieline.lab.geometry.ties import (
    Bias,
    Weight,
    check_router,
    distance_to_tie,
    tie_flat,
    tie_flats,
    tie_sets,
)
from tieline.measure.boundary import Real

__all__ = [
    "OrderRatio",
    "SlabMass",
    "SliceBounds",
    "TieTube",
    "ball_volume",
    "band_ratio",
    "gaussian_slab",
    "sampled_slice_density",
    "sampled_tube",
    "slice_bounds",
    "slice_density",
    "surface_density",
    "tie_tube",
    "tube_fraction",
    "tube_leading_term",
    "tube_ratio",
    "uniform_ball",
]


@dataclass(frozen=True)
class SlabMass:
    """P(|S| <= r) of a normal S, exact and expanded in r."""

    exact: float  # Φ((r-b)/σ) - Φ((-r-b)/σ) (Paper 0, (3.11))
    first_order: float  # 2 r φ(b/σ)/σ (Paper 0, (3.12))
    next_order: float  # first_order · (1 + r² (b²/σ⁴ - 1/σ²)/6)
    density: float  # φ(b/σ)/σ, the surface integral (Paper 0, (3.14))


@dataclass(frozen=True)
class TieTube:
    """Share of the ball within ε of the order-n ties of a router."""

    sampled: Estimate  # the share itself, by sampling, with its standard error
    flats: float  # sum over all flats S_J of their exact tubes: an upper bound
    leading: float  # the paper's bound: number of flats times the leading term (Paper 1, Thm 4.2)
    sets: int  # number of flats


def gaussian_slab(mean: Real, spread: Real, width: Real) -> SlabMass:
    """P(|S| <= r) for S ~ N(b, σ²): for X ~ N(0, Σ), b the offset and σ² = vᵀΣv (Ex. 3.8)."""
    require(spread > 0, f"need spread > 0, got {spread=}")
    require(width >= 0, f"a width is >= 0, got {width=}")
    b, s = abs(mean), spread
    # both tails on the side of the offset, which is accurate far from the surface too
    ends = torch.tensor([width - b, -width - b], dtype=torch.float64) / s
    exact = -(torch.special.erfc(-ends / math.sqrt(2)) / 2).diff()
    density = math.exp(-(b**2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi))
    first = 2 * width * density
    relative = width**2 * (b**2 / s**4 - 1 / s**2) / 6
    return SlabMass(exact.item(), first, first * (1 + relative), density)


def surface_density(margins: Float[Tensor, " samples"], width: Real) -> Estimate:
    """Density of S at zero (Paper 0, Lemma 3.6), n_w / (2 w n), standard error √(f / (2 w n)).

    n_w of the n margins have |S| <= w; the bias is f″w²/6.
    """
    require(width > 0, f"need width > 0, got {width=}")
    require(margins.numel() > 0, "a density needs a sample, got none", ShapeError)
    span = 2 * width * margins.numel()
    density = (margins.double().abs() <= width).sum().item() / span
    return Estimate(density, math.sqrt(density / span))


def ball_volume(dim: int) -> float:
    """ω_d, the volume of the unit ball in d dimensions."""
    require(dim >= 0, f"a dimension is >= 0, got {dim=}")
    return math.exp(dim / 2 * math.log(math.pi) - math.lgamma(dim / 2 + 1))


def tube_fraction(*, dim: int, codim: int, offset: Real, epsilon: Real, radius: Real) -> float:
    """Share of the ball ‖x‖ < R within ε of a flat of codimension n at distance δ (Prop. A.13).

        ∫ over ‖u-δ‖ < ε, ‖u‖ < R of ω_{D-n} (R² - ‖u‖²)^((D-n)/2) du / (ω_D R^D)

    In polar coordinates of u, ρ² / R² is Beta(n/2, (D-n)/2 + 1) and a cap of each sphere lies in
    the tube. One integral over ρ, whose square-root ends a cosine substitution removes; its
    integrand is positive, so tiny shares keep their digits too. 11 digits or more.

    D is `dim`, n `codim` (1 <= n <= D), δ `offset`, ε `epsilon` and R `radius`.
    """
    _check_tube_shape(dim, codim, offset, epsilon, radius)
    delta, width = offset / radius, epsilon / radius
    if width - delta >= 1:
        return 1.0
    inner = max(0.0, width - delta) ** 2
    inside = float(special.betainc(codim / 2, (dim - codim) / 2 + 1, inner))
    low, high = abs(delta - width), min(1.0, delta + width)
    if delta == 0 or high <= low:
        return inside
    return inside + _integrate_partial_spheres(dim, codim, delta, width, low, high)


def tube_leading_term(*, dim: int, codim: int, epsilon: Real, radius: Real) -> float:
    """ω_{D-n} ω_n / ω_D · (ε/R)^n: the tube of a central flat to first order (Paper 1, Thm 4.2)."""
    _check_tube_shape(dim, codim, 0.0, epsilon, radius)
    if epsilon == 0:
        return 0.0
    log_ways = math.lgamma(dim / 2 + 1) - math.lgamma(codim / 2 + 1)
    log_ways -= math.lgamma((dim - codim) / 2 + 1)
    return math.exp(log_ways + codim * math.log(epsilon / radius))


def sampled_tube(
    *, dim: int, codim: int, offset: Real, epsilon: Real, radius: Real, samples: int, seed: int = 0
) -> Estimate:
    """Monte-Carlo estimate of `tube_fraction` from `samples` points of the ball."""
    _check_tube_shape(dim, codim, offset, epsilon, radius)
    x = uniform_ball(samples, dim, radius, seed)[:, :codim]
    x[:, 0] -= offset
    return share_estimate(x.norm(dim=1) < epsilon)


def tie_tube(
    W: Weight,
    b: Bias,
    k: int,
    *,
    order: int,
    epsilon: Real,
    radius: Real,
    samples: int,
    seed: int = 0,
) -> TieTube:
    """Share of the ball of radius R within ε of Γ^(n), sampled, with two upper bounds.

    W (E, D) and b are the router's weight and bias, `samples` is the number of points of the ball.
    """
    weight, bias = check_router(W, b, k)
    dim = weight.shape[1]
    _check_tube_shape(dim, order, 0.0, epsilon, radius)
    flats = tie_flats(weight, bias, tie_sets(len(weight), order))
    exact = [
        tube_fraction(dim=dim, codim=order, offset=offset, epsilon=epsilon, radius=radius)
        for offset in flats.distances.tolist()
    ]
    x = uniform_ball(samples, dim, radius, seed)
    sampled = share_estimate(distance_to_tie(x, weight, bias, k, order) < epsilon)
    leading = len(exact) * tube_leading_term(dim=dim, codim=order, epsilon=epsilon, radius=radius)
    return TieTube(sampled, math.fsum(exact), leading, len(exact))


def uniform_ball(
    samples: int, dim: int, radius: Real, seed: int = 0
) -> Float[Tensor, "samples dim"]:
    """Draw independent uniform points of the ball, in float64."""
    require(samples >= 1, f"need a sample or more, got {samples=}")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, dim, generator=generator, dtype=torch.float64)
    length = torch.rand(samples, 1, generator=generator, dtype=torch.float64) ** (1 / dim)
    return x * (radius * length / x.norm(dim=1, keepdim=True))


def _integrate_partial_spheres(
    dim: int, codim: int, delta: Real, width: Real, low: Real, high: Real
) -> float:
    """Integrate the density of ρ times the share of its sphere within `width` of the flat."""
    rest = (dim - codim) / 2
    log_norm = math.log(2) - special.betaln(codim / 2, rest + 1)

    def integrand(turn: float) -> float:
        half = math.sin(turn / 2) ** 2
        rho = low + (high - low) * half
        # 1 - ρ without cancellation where the upper end is the sphere itself
        short = (1 - high) + (high - low) * math.cos(turn / 2) ** 2
        if rho <= 0 or short <= 0:
            return 0.0
        log_density = log_norm + (codim - 1) * math.log(rho) + rest * math.log(short * (1 + rho))
        cap = _sphere_cap_share(codim, rho, delta, width)
        return math.exp(log_density) * cap * (high - low) / 2 * math.sin(turn)

    cuts = _integration_points(dim, codim, low, high)
    return math.fsum(
        integrate.quad(integrand, a, z, epsabs=0, epsrel=1e-12, limit=200, full_output=1)[0]
        for a, z in itertools.pairwise(cuts)
    )


def _integration_points(dim: int, codim: int, low: Real, high: Real) -> list[float]:
    """Break points of the integral around the mode of ρ, a narrow peak for large D."""
    mode, spread = math.sqrt((codim - 1) / max(1, dim - 1)), 1 / math.sqrt(dim)
    points = [low, *(mode + s * spread for s in (-6, -1, 0, 1, 6)), high]
    shares = {min(1.0, max(0.0, (point - low) / (high - low))) for point in points}
    return sorted(math.acos(1 - 2 * share) for share in shares)


def _sphere_cap_share(codim: int, rho: Real, delta: Real, width: Real) -> float:
    """Share of the sphere ‖u‖ = ρ in R^n with ‖u - δ‖ < width.

    sin²(θ/2) of the cap's angle is (width² - (ρ-δ)²) / 4ρδ, whose factors do not cancel.
    """
    square = (width - rho + delta) * (width + rho - delta) / (4 * rho * delta)
    if codim == 1:
        return 0.5 if square < 1 else 1.0
    return float(special.betainc((codim - 1) / 2, (codim - 1) / 2, np.clip(square, 0.0, 1.0)))


def _check_tube_shape(dim: int, codim: int, offset: Real, epsilon: Real, radius: Real) -> None:
    """Raise unless codimension, offset, ε and radius describe a tube in a ball."""
    require(1 <= codim <= dim, f"need 1 <= codim <= dim, got {codim=}, {dim=}")
    require(offset >= 0, f"an offset is a distance >= 0, got {offset=}")
    require(epsilon >= 0, f"need epsilon >= 0, got {epsilon=}")
    require(radius > 0, f"need radius > 0, got {radius=}")


MOST_CHOICES = 4096
"""Largest number of choices of experts above that `slice_bounds` tries."""


@dataclass(frozen=True)
class SliceBounds:
    """Limits of α_{J,r} (Paper 1, Lemma A.16 and Thm A.18)."""

    lower: float  # max over choices of ½ I_{4s²(1-s²)}((d-1)/2, ½), d = D - r
    paper_upper: float  # ½, as in the paper's Thm 4.4
    upper: float  # 1, the bound that holds (the paper's own Thm A.18)
    choices: int  # number of choices of experts above that are admissible


@dataclass(frozen=True)
class OrderRatio:
    """Volume near order-n ties over volume near order-m ties, to first order in ε/R."""

    paper: Real  # by the paper's formula
    value: float  # corrected; the same for Euclidean tubes, (n+1)/(m+1) times as much for ℓ∞ bands


def slice_density(n_experts: int, k: int, order: int) -> float:
    """Share α of a flat of r + 1 equal scores that is an order-r tie, for orthonormal rows of W.

    α = Σ_j C(m,j) E[Φ̄(t)^j Φ(t)^(m-j)], m = E-r-1, t ~ N(0, 1/(r+1)), max(0,k-r) <= j <= k-1:
    the scores of a normal direction are independent, and conditioned on r + 1 of them being equal
    their level t has variance 1/(r+1). Trapezoidal rule; 12 digits.
    """
    require(1 <= k < n_experts, f"need 1 <= k < E, got {k=}, E={n_experts}")
    require(1 <= order < n_experts, f"need 1 <= order < E, got {order=}, E={n_experts}")
    others = n_experts - order - 1
    step = 1 / (64 * math.sqrt(order + 1))
    t = torch.arange(-64 * 12, 64 * 12 + 1, dtype=torch.float64) * step
    log_weight = -(order + 1) * t.square() / 2 + math.log(
        step * math.sqrt((order + 1) / 2 / math.pi)
    )
    total = torch.zeros_like(t)
    for above in _admissible_counts(others, k, order):
        log_choices = (
            math.lgamma(others + 1) - math.lgamma(above + 1) - math.lgamma(others - above + 1)
        )
        law = log_choices + above * log_ndtr(-t) + (others - above) * log_ndtr(t)
        total += (log_weight + law).exp()
    return total.sum().item()


def sampled_slice_density(
    W: Weight, k: int, experts: tuple[int, ...], samples: int, seed: int = 0
) -> Estimate:
    """Monte-Carlo estimate of α_{J,r} for any router, from `samples` directions of S_J.

    A bias moves S_J and the walls on it but does not change the share.
    """
    weight, _ = check_router(W, None, k)
    flat = tie_flat(weight, None, experts)
    require(samples >= 1, f"need a sample or more, got {samples=}")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, weight.shape[1], generator=generator, dtype=torch.float64)
    x -= (x @ flat.basis) @ flat.basis.T
    rest = torch.tensor([e for e in range(len(weight)) if e not in flat.experts], dtype=torch.long)
    rise = x @ (weight[rest] - weight[flat.experts[0]]).T
    above, order = (rise > 0).sum(dim=1), len(flat.experts) - 1
    hits = (above >= k - order) & (above <= k - 1)
    return share_estimate(hits)


def slice_bounds(W: Weight, k: int, experts: tuple[int, ...]) -> SliceBounds:
    """Lower bound of α_{J,r} (Lemma A.16), the paper's upper bound ½, and the correct one, 1.

    For a choice of experts above, ρ = max over unit û of the smallest signed product with the
    projected normals, L the longest normal, s = min(1/√2, ρ/4L). The best û is the direction of the
    shortest point of the convex hull of the normals, found by non-negative least squares.
    """
    weight, _ = check_router(W, None, k)
    flat = tie_flat(weight, None, experts)
    order, dim = len(flat.experts) - 1, weight.shape[1]
    rest = [e for e in range(len(weight)) if e not in flat.experts]
    if not rest:
        return SliceBounds(1.0, 0.5, 1.0, 1)
    raw = weight[rest] - weight[flat.experts[0]]
    normals = (raw - (raw @ flat.basis) @ flat.basis.T).numpy()
    longest = raw.norm(dim=1).max().item()
    counts = list(_admissible_counts(len(rest), k, order))
    choices = sum(math.comb(len(rest), above) for above in counts)
    require(choices <= MOST_CHOICES, f"{choices} choices of experts above, {MOST_CHOICES} at most")
    best = 0.0
    for above in counts:
        for chosen in itertools.combinations(range(len(rest)), above):
            sign = np.where(np.isin(np.arange(len(rest)), chosen), 1.0, -1.0)
            best = max(best, _slice_lower_bound(sign[:, None] * normals, longest, dim - order))
    return SliceBounds(best, 0.5, 1.0, choices)


def tube_ratio(
    n_experts: int, k: int, *, dim: int, orders: tuple[int, int], epsilon: Real, radius: Real
) -> OrderRatio:
    """U_n / U_m = Σα_n / Σα_m · ω_{D-n} ω_n / (ω_{D-m} ω_m) · (ε/R)^(n-m) (Thm 4.4).

    For orthonormal rows, `orders` = (n, m), to first order in ε/R.
    """
    volumes = [
        math.comb(n_experts, order + 1)
        * slice_density(n_experts, k, order)
        * tube_leading_term(dim=dim, codim=order, epsilon=epsilon, radius=radius)
        for order in orders
    ]
    require(volumes[1] > 0, f"need epsilon > 0, got {epsilon=}")
    return OrderRatio(volumes[0] / volumes[1], volumes[0] / volumes[1])


def band_ratio(
    n_experts: int, k: int, *, dim: int, orders: tuple[int, int], epsilon: Real, radius: Real
) -> OrderRatio:
    """U_n / U_m = Σκα_n / Σκα_m · ω_{D-n} / ω_{D-m} · (2ε/R)^(n-m) for bands of Def. 4.6 (Thm 4.7).

    Orthonormal rows, for which det(A_J A_Jᵀ) = r + 1. The paper takes {v : max|v_j| <= ε} of the r
    differences for the fibre, with volume (2ε)^r; moving all r + 1 scores by at most ε reaches
    {range of (0, v) <= 2ε}, with volume (r+1)(2ε)^r. So the true ratio has a factor (n+1)/(m+1).
    """
    require(
        epsilon > 0 and radius > 0, f"need epsilon > 0 and radius > 0, got {epsilon=}, {radius=}"
    )
    paper = []
    for order in orders:
        require(1 <= order <= dim, f"need 1 <= order <= dim, got {order=}, {dim=}")
        log_ball = (dim - order) / 2 * math.log(math.pi) - math.lgamma((dim - order) / 2 + 1)
        fibre = order * math.log(2 * epsilon / radius) - math.log(order + 1) / 2
        sets = math.comb(n_experts, order + 1) * slice_density(n_experts, k, order)
        paper.append(math.log(sets) + log_ball + fibre)
    ratio = math.exp(paper[0] - paper[1])
    return OrderRatio(ratio, ratio * (orders[0] + 1) / (orders[1] + 1))


def _admissible_counts(others: int, k: int, order: int) -> range:
    """Numbers of experts above the tied ones with which the tie crosses the threshold."""
    return range(max(0, k - order), min(k - 1, others) + 1)


def _slice_lower_bound(normals: np.ndarray, longest: Real, dim: int) -> float:
    """½ I_{4s²(1-s²)}((d-1)/2, ½) for one choice of signed normals; 0 if none satisfies all."""
    system = np.vstack([normals.T, np.ones(len(normals))])
    target = np.zeros(len(system))
    target[-1] = 1.0
    weights, _ = optimize.nnls(system, target)
    shortest = normals.T @ weights / weights.sum()
    rho = float(np.linalg.norm(shortest))
    s = min(1 / math.sqrt(2), rho / (4 * longest))
    if dim < 2:
        return 0.5 if rho > 0 else 0.0
    return 0.5 * float(special.betainc((dim - 1) / 2, 0.5, min(1.0, 4 * s * s * (1 - s * s))))
