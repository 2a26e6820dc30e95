"""Mass near a decision surface and volume near ties.

    gaussian_slab        P(|S| <= r) of S = ⟨v, X⟩ + b for normal inputs        Paper 0, Ex. 3.8
    surface_density      ∫_{S=0} p/‖∇S‖ dH from samples of S                    Paper 0, Lemma 3.6
    ball_volume          ω_d = π^(d/2) / Γ(d/2 + 1)
    tube_fraction        ε-tube of one flat of codimension n at distance δ      Paper 1, Prop. A.13
    tube_leading_term    ω_{D-n} ω_n / ω_D (ε/R)^n, an upper bound of it        Paper 1, Thm 4.2
    sampled_tube         ε-tube of one flat, by sampling the ball
    tie_tube             ε-tube of all order-n ties: bounds and samples         Paper 1, Thm 4.2

The surface integral is the density of S(X) at zero, so it is estimated from margins without
gradients. Tubes are given as shares of the ball of radius R. The leading term bounds the tube of
one flat for every δ and ε, not only for large R, since the density of the normal coordinates is
largest at the origin.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy import integrate, special
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.statistics import Estimate, share_estimate
from tieline.lab.geometry.ties import check_router, distance_to_tie, tie_flats, tie_sets
from tieline.measure.boundary import Real

__all__ = [
    "SlabMass",
    "TieTube",
    "ball_volume",
    "gaussian_slab",
    "sampled_tube",
    "surface_density",
    "tie_tube",
    "tube_fraction",
    "tube_leading_term",
    "uniform_ball",
]


@dataclass(frozen=True)
class SlabMass:
    """P(|S| <= r) of a normal S.

    Attributes:
        exact: Φ((r-b)/σ) - Φ((-r-b)/σ) (Paper 0, (3.11)).
        first_order: 2 r φ(b/σ)/σ (Paper 0, (3.12)).
        next_order: first_order · (1 + r² (b²/σ⁴ - 1/σ²)/6).
        density: φ(b/σ)/σ, the surface integral (Paper 0, (3.14)).
    """

    exact: float
    first_order: float
    next_order: float
    density: float


@dataclass(frozen=True)
class TieTube:
    """Share of the ball within ε of the order-n ties of a router.

    Attributes:
        sampled: the share itself, by sampling, with its standard error.
        flats: sum over all flats S_J of their exact tubes: an upper bound.
        leading: the paper's bound: number of flats times the leading term (Paper 1, Thm 4.2).
        sets: number of flats.
    """

    sampled: Estimate
    flats: float
    leading: float
    sets: int


def gaussian_slab(mean: Real, spread: Real, width: Real) -> SlabMass:
    """P(|S| <= r) for S ~ N(b, σ²): for X ~ N(0, Σ), b the offset and σ² = vᵀΣv (Ex. 3.8)."""
    require(spread > 0, f"need spread > 0, got {spread=}")
    require(width >= 0, f"a width is >= 0, got {width=}")
    b, s = abs(mean), spread
    # both tails on the side of the offset: no digits are lost far from the surface
    ends = torch.tensor([width - b, -width - b], dtype=torch.float64) / s
    exact = -(torch.special.erfc(-ends / math.sqrt(2)) / 2).diff()
    density = math.exp(-(b**2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi))
    first = 2 * width * density
    relative = width**2 * (b**2 / s**4 - 1 / s**2) / 6
    return SlabMass(exact.item(), first, first * (1 + relative), density)


def surface_density(margins: Float[Tensor, " samples"], width: Real) -> Estimate:
    """Density of S at zero, n_w / (2 w n), with standard error √(f / (2 w n)).

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
    """Share of the ball ‖x‖ < R within ε of a flat of codimension n at distance δ from its centre.

        ∫ over ‖u-δ‖ < ε, ‖u‖ < R of ω_{D-n} (R² - ‖u‖²)^((D-n)/2) du / (ω_D R^D)

    In polar coordinates of u, ρ² / R² is Beta(n/2, (D-n)/2 + 1) and a cap of each sphere lies in
    the tube. One integral over ρ, whose square-root ends a cosine substitution removes; its
    integrand is positive, so tiny shares keep their digits too. 11 digits or more.

    Args:
        dim: D.
        codim: n, 1 <= n <= D.
        offset: δ >= 0.
        epsilon: ε >= 0.
        radius: R > 0.
    """
    _check_tube(dim, codim, offset, epsilon, radius)
    delta, width = offset / radius, epsilon / radius
    if width - delta >= 1:
        return 1.0
    inner = max(0.0, width - delta) ** 2
    inside = float(special.betainc(codim / 2, (dim - codim) / 2 + 1, inner))
    low, high = abs(delta - width), min(1.0, delta + width)
    if delta == 0 or high <= low:
        return inside
    return inside + _partial_spheres(dim, codim, delta, width, low, high)


def tube_leading_term(*, dim: int, codim: int, epsilon: Real, radius: Real) -> float:
    """ω_{D-n} ω_n / ω_D · (ε/R)^n: the tube of a flat through the centre to first order."""
    _check_tube(dim, codim, 0.0, epsilon, radius)
    if epsilon == 0:
        return 0.0
    log_ways = math.lgamma(dim / 2 + 1) - math.lgamma(codim / 2 + 1)
    log_ways -= math.lgamma((dim - codim) / 2 + 1)
    return math.exp(log_ways + codim * math.log(epsilon / radius))


def sampled_tube(
    *, dim: int, codim: int, offset: Real, epsilon: Real, radius: Real, samples: int, seed: int = 0
) -> Estimate:
    """`tube_fraction` by `samples` points of the ball, with its standard error."""
    _check_tube(dim, codim, offset, epsilon, radius)
    x = uniform_ball(samples, dim, radius, seed)[:, :codim]
    x[:, 0] -= offset
    return share_estimate(x.norm(dim=1) < epsilon)


def tie_tube(
    W: Float[Tensor, "experts dim"],
    b: Float[Tensor, " experts"] | None,
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
    _check_tube(dim, order, 0.0, epsilon, radius)
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
    """Independent uniform points of the ball, in float64."""
    require(samples >= 1, f"need a sample or more, got {samples=}")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, dim, generator=generator, dtype=torch.float64)
    length = torch.rand(samples, 1, generator=generator, dtype=torch.float64) ** (1 / dim)
    return x * (radius * length / x.norm(dim=1, keepdim=True))


def _partial_spheres(
    dim: int, codim: int, delta: Real, width: Real, low: Real, high: Real
) -> float:
    """∫ of the density of ρ times the share of its sphere within `width` of the flat."""
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
        cap = _cap_share(codim, rho, delta, width)
        return math.exp(log_density) * cap * (high - low) / 2 * math.sin(turn)

    cuts = _integration_points(dim, codim, low, high)
    return math.fsum(
        integrate.quad(integrand, a, z, epsabs=0, epsrel=1e-12, limit=200, full_output=1)[0]
        for a, z in itertools.pairwise(cuts)
    )


def _integration_points(dim: int, codim: int, low: Real, high: Real) -> list[float]:
    """Limits of the pieces of the integral, around the mode of ρ, a narrow peak for large D."""
    mode, spread = math.sqrt((codim - 1) / max(1, dim - 1)), 1 / math.sqrt(dim)
    points = [low, *(mode + s * spread for s in (-6, -1, 0, 1, 6)), high]
    shares = {min(1.0, max(0.0, (point - low) / (high - low))) for point in points}
    return sorted(math.acos(1 - 2 * share) for share in shares)


def _cap_share(codim: int, rho: Real, delta: Real, width: Real) -> float:
    """Share of the sphere ‖u‖ = ρ in R^n with ‖u - δ‖ < width.

    sin²(θ/2) of the cap's angle is (width² - (ρ-δ)²) / 4ρδ, whose factors do not cancel.
    """
    square = (width - rho + delta) * (width + rho - delta) / (4 * rho * delta)
    if codim == 1:
        return 0.5 if square < 1 else 1.0
    return float(special.betainc((codim - 1) / 2, (codim - 1) / 2, np.clip(square, 0.0, 1.0)))


def _check_tube(dim: int, codim: int, offset: Real, epsilon: Real, radius: Real) -> None:
    require(1 <= codim <= dim, f"need 1 <= codim <= dim, got {codim=}, {dim=}")
    require(offset >= 0, f"an offset is a distance >= 0, got {offset=}")
    require(epsilon >= 0, f"need epsilon >= 0, got {epsilon=}")
    require(radius > 0, f"need radius > 0, got {radius=}")
