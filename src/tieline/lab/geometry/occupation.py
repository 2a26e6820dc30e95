"""Time that a Brownian path spends within ε of the ties of order n (Paper 1, Thm 5.3).

    flat_occupation        E ∫_0^T 1{dist(x_t, S) < ε} dt of one flat: bounds and, where the noise
                           of its normal coordinates is isotropic, the exact value
    occupation_bounds      the sum of the bounds over all flats of order n
    sampled_occupation     the time near Γ^(n) itself, by simulation

With K = ω_n / ((2π)^(n/2) √det Σ_⊥), δ = ‖Σ_⊥^(-½)(s - μ)‖ - ε/√λ_min and b = δ₊²/2,

    bound = K ε^n ∫_0^T t^(-n/2) e^(-b/t) dt
          = K ε (2√T e^(-b/T) - 2√(πb) erfc √(b/T))          n = 1 (the paper drops b: 2 K ε √T)
          = K ε² E_1(b/T)                                    n = 2
          = K ε^n b^(1-n/2) Γ(n/2 - 1, b/T)                  n > 2

which for n >= 2 is infinite where the start is within ε of the flat. No path stays longer than T,
so `bound` is min(T, bound).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy import integrate, special
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.statistics import Estimate, mean_estimate
from tieline.lab.geometry.exit_time import check_noise, check_simulation_sizes, path_batch_sizes
from tieline.lab.geometry.ties import TieFlat, check_router, distance_to_tie, tie_flat, tie_sets
from tieline.lab.geometry.tubes import ball_volume
from tieline.measure.boundary import Real

__all__ = [
    "BrownianPaths",
    "Occupation",
    "flat_occupation",
    "occupation_bounds",
    "sampled_occupation",
]


@dataclass(frozen=True)
class Occupation:
    """Expected time near ties up to the horizon T."""

    paper: Real  # the paper's bound, possibly infinite
    # the finite one: for each flat min(T, bound), sharper at n = 1, and T at most in all
    bound: Real
    # the expected time itself; None for several flats or noise that is not isotropic
    exact: float | None
    horizon: Real  # T
    flats: int  # number of flats


def flat_occupation(
    flat: TieFlat,
    start: Float[Tensor, " dim"],
    *,
    epsilon: Real,
    horizon: Real,
    sigma: Real | Float[Tensor, "dim dim"] = 1.0,
) -> Occupation:
    """Expected time within ε of one flat: the paper's bound, a finite bound, the exact value.

    Exact where Σ_⊥ = λ I, as for σ a number: ∫_0^T P(χ'²_n(‖s-μ‖²/λt) < ε²/λt) dt by quadrature.

    Args:
        flat: from `tie_flat`.
        start: x0.
        epsilon: ε > 0.
        horizon: T > 0.
        sigma: invertible matrix or number other than 0.
    """
    _check_epsilon_and_horizon(epsilon, horizon)
    noise = flat.basis.T @ check_noise(sigma, flat.normals)
    covariance = noise @ noise.T
    values, vectors = torch.linalg.eigh(covariance)
    offset = flat.basis.T @ (flat.nearest - start.double())
    reach = ((vectors.T @ offset) / values.sqrt()).norm().item()
    b = max(0.0, reach - epsilon / math.sqrt(values[0].item())) ** 2 / 2
    n = len(values)
    scale = ball_volume(n) / ((2 * math.pi) ** (n / 2) * values.prod().sqrt().item()) * epsilon**n
    sharp = scale * _time_integral(n, b, horizon)
    paper = 2 * scale * math.sqrt(horizon) if n == 1 else sharp
    exact = None
    if bool(values[-1] - values[0] <= 1e-12 * values[-1]):
        exact = _isotropic_occupation(
            n, offset.norm().item(), epsilon, horizon, values.mean().item()
        )
    return Occupation(paper, min(horizon, sharp), exact, horizon, 1)


def occupation_bounds(
    x0: Float[Tensor, " dim"],
    W: Float[Tensor, "experts dim"],
    b: Float[Tensor, " experts"] | None,
    *,
    order: int,
    epsilon: Real,
    horizon: Real,
    sigma: Real | Float[Tensor, "dim dim"] = 1.0,
) -> Occupation:
    """Bounds of the expected time within ε of the order-n ties: sums over all flats (Thm 5.3).

    From x0 with router weight W and bias b; other arguments as for `flat_occupation`.
    """
    weight, bias = check_router(W, b, 1)
    occupations = [
        flat_occupation(
            tie_flat(weight, bias, tuple(experts)),
            x0,
            epsilon=epsilon,
            horizon=horizon,
            sigma=sigma,
        )
        for experts in tie_sets(len(weight), order).tolist()
    ]
    paper, total = math.fsum(p.paper for p in occupations), math.fsum(p.bound for p in occupations)
    exact = occupations[0].exact if len(occupations) == 1 else None
    return Occupation(paper, min(horizon, total), exact, horizon, len(occupations))


@dataclass(frozen=True, eq=False)
class BrownianPaths:
    """Simulated paths x0 + σ B_t up to the horizon T."""

    start: Float[Tensor, " dim"]  # x0
    horizon: Real  # T > 0
    sigma: Real | Float[Tensor, "dim dim"] = 1.0  # invertible matrix or number other than 0
    steps: int = 32  # observations of each path
    paths: int = 4096  # number of paths
    seed: int = 0  # of the random numbers


def sampled_occupation(
    paths: BrownianPaths,
    W: Float[Tensor, "experts dim"],
    b: Float[Tensor, " experts"] | None,
    k: int,
    *,
    order: int,
    epsilon: Real,
) -> Estimate:
    """Mean time within ε of Γ^(n) up to T, over simulated paths, with its standard error.

    Each path is observed `steps` times, T/steps apart, first at a uniform time within the first
    interval: the share of observations within ε times T is unbiased for any number of steps.
    """
    weight, bias = check_router(W, b, k)
    _check_epsilon_and_horizon(epsilon, paths.horizon)
    check_simulation_sizes(paths.horizon, paths.steps, paths.paths)
    spread, dt = check_noise(paths.sigma, weight), paths.horizon / paths.steps
    dim = len(paths.start)
    require(dim == weight.shape[1], f"{dim=}, {weight.shape[1]=}", ShapeError)
    generator = torch.Generator().manual_seed(paths.seed)
    times = []
    for batch in path_batch_sizes(paths.paths):
        lag = dt * torch.rand(batch, 1, generator=generator, dtype=torch.float64)
        x, stayed = paths.start.double().repeat(batch, 1), torch.zeros(batch, dtype=torch.float64)
        for m in range(paths.steps):
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64) @ spread.T
            x = x + noise * (lag.sqrt() if m == 0 else math.sqrt(dt))
            stayed += dt * (distance_to_tie(x, weight, bias, k, order) < epsilon)
        times.append(stayed)
    return mean_estimate(torch.cat(times))


def _time_integral(n: int, b: Real, horizon: Real) -> float:
    """∫_0^T t^(-n/2) e^(-b/t) dt; infinite for n >= 2 and b = 0."""
    if n == 1:
        root = math.sqrt(b / horizon)
        rest = math.exp(-b / horizon) - math.sqrt(math.pi) * root * math.erfc(root)
        return 2 * math.sqrt(horizon) * rest
    if b == 0:
        return math.inf
    if n == 2:
        return float(special.exp1(b / horizon))
    half = n / 2 - 1
    return float(b**-half * special.gamma(half) * special.gammaincc(half, b / horizon))


def _isotropic_occupation(
    n: int, offset: Real, epsilon: Real, horizon: Real, variance: Real
) -> float:
    """∫_0^T P(‖N(offset, variance t I_n)‖ < ε) dt, by quadrature in √t, where it is smooth."""
    from scipy import stats  # takes half a second to load

    def integrand(root: float) -> float:
        scale = variance * root * root
        if scale == 0:
            return 0.0
        return 2 * root * float(stats.ncx2.cdf(epsilon**2 / scale, n, offset**2 / scale))

    top = math.sqrt(horizon)
    knee = min(top, max(abs(offset - epsilon), epsilon) / math.sqrt(variance))
    pieces = [(0.0, knee), (knee, top)]
    return math.fsum(
        integrate.quad(integrand, *ends, epsabs=1e-13, epsrel=1e-11, limit=200, full_output=1)[0]
        for ends in pieces
        if ends[1] > ends[0]
    )


def _check_epsilon_and_horizon(epsilon: Real, horizon: Real) -> None:
    """Raise unless ε and the horizon are positive, the horizon finite."""
    require(epsilon > 0, f"need epsilon > 0, got {epsilon=}")
    require(horizon > 0 and math.isfinite(horizon), f"need a finite horizon > 0, got {horizon=}")
