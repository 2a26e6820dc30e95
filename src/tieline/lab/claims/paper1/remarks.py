"""Remarks 4.5 and 5.4, section B.1 and the coarse bound of Theorem A.32."""

import math

import torch
from scipy.integrate import quad

from tieline.core.ranking import kth_largest
from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.demo_router_inputs import router_states
from tieline.lab.claims.evidence import (
    Evidence,
    at_least,
    at_most,
    chart,
    corrected,
    dots,
    near,
    none_of,
    qualified,
)
from tieline.lab.claims.routing_problems import streamed_router
from tieline.lab.geometry import occupation_bounds, tube_ratio
from tieline.lab.power_law import exponent


@claim("p1-rem4.5", "higher orders become negligible as R grows")
def shrinking_orders(_run: ClaimRun) -> Evidence:
    """The ratio of the ε-thickenings of orders n and m falls like (ε/R)^(n-m), so that higher
    orders are negligible as R grows.

    Setting: ε fixed and R → ∞, as the remark has it; orthonormal rows, E = 16, top 2
    Tested: Exponents in R of the ratios of orders 2, 1 and 3, 1 from R = 10 to 1000; beside them
        the ratio at the R where the scores have unit spread, D = 8, ε = 0.2.
    Overturned by: another exponent
    """
    radii = [10.0, 100.0, 1000.0]
    falls = {
        orders: exponent(radii, [order_ratio(orders, radius) for radius in radii])
        for orders in ((2, 1), (3, 1))
    }
    useful = order_ratio((2, 1), math.sqrt(8))
    return Evidence.of(
        near("exponent of order 2 over 1", falls[2, 1], -1, 1e-6),
        near("exponent of order 3 over 1", falls[3, 1], -2, 1e-6),
        corrected(at_least("order 2 over 1 at R = √D, ε = 0.2", useful, 0.1)),
        paper=-1,
        corrected="in the limit; at the spread of real scores see `p1-secB.1`",
        measured=f"{falls[2, 1]:.3f}, {falls[3, 1]:.3f}; {useful:.2f} at R = √D",
    )


def order_ratio(orders: tuple[int, int], radius: float) -> float:
    """U_n / U_m of 16 orthonormal rows, top 2, D = 8, ε = 0.2."""
    return tube_ratio(16, 2, dim=8, orders=orders, epsilon=0.2, radius=radius).value


@claim("p1-secB.1", "almost all near-boundary mass is on simple walls", number="sec. B.1")
def simple_walls(run: ClaimRun) -> Evidence:
    """Almost all near-boundary mass concentrates on simple walls, so that few experts are added.

    Setting: the trained model in the box, 16 experts, top 2; ε at which K = 2.5, the paper's
        budget, and a hundredth of it
    Tested: Among tokens with a gap below ε, the share with two or more experts inside the band.
    Overturned by: a share below 5 % at the budget of 2.5 experts
    Condition: ε → 0: at the ε of the paper's own budget a quarter or more of the near tokens are at
        edges and corners
    """
    scores = torch.cat([states.scores() for states in router_states(run.size(2_048, 16_384))])
    epsilon = budget_width(scores)
    useful, small = (edge_share(scores, width) for width in (epsilon, epsilon / 100))
    return Evidence.of(
        at_most("share of order 2 or more at K = 2.5", useful, 0.05),
        qualified(at_most("the same at a hundredth of that ε", small, 0.05)),
        corrected(at_least("share at K = 2.5", useful, 0.15)),
        paper="almost none",
        corrected=useful,
        measured=f"{100 * useful:.0f} % at ε = {epsilon:.2f}, {100 * small:.1f} % at a hundredth",
    )


def band_counts(scores: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Experts below the second best within ε of it, per token."""
    threshold = kth_largest(scores, 2)
    return ((threshold - scores < epsilon) & (scores < threshold)).sum(dim=-1)


def budget_width(scores: torch.Tensor) -> float:
    """The ε at which half an expert per token is added, by bisection."""
    low, high = 0.0, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        more = band_counts(scores, middle).double().mean().item() > 0.5
        low, high = (low, middle) if more else (middle, high)
    return high


def edge_share(scores: torch.Tensor, epsilon: float) -> float:
    """Among tokens with an expert in the band, the share with two or more."""
    counts = band_counts(scores, epsilon)
    return ((counts >= 2).sum() / (counts >= 1).sum().clamp_min(1)).item()


@claim("p1-rem5.4", "the occupation bound decreases with the order")
def falling_bound(_run: ClaimRun) -> Evidence:
    """The bound of Thm 5.3 decreases with n in the small-ε regime, for the sum over slices is
    finite.

    Setting: Σ = I, all C(E, n + 1) flats at distance 1, T = 1
    Tested: The bound at orders 1, 2, 3 for E = 16 at ε = 0.01; the ε from which order 2 exceeds
        order 1, for E = 16 and 64.
    Overturned by: a bound that grows with n as ε → 0
    """
    small = [order_bound(16, n, 0.01) for n in (1, 2, 3)]
    crossing = {experts: first_growth(experts) for experts in (16, 64)}
    return Evidence.of(
        at_most("order 2 over order 1, ε = 0.01", small[1] / small[0], 1),
        at_most("order 3 over order 2, ε = 0.01", small[2] / small[1], 1),
        corrected(
            at_most("E = 16: ε from which order 2 exceeds order 1", crossing[16], 0.5),
            at_most("E = 64: the same", crossing[64], 0.15),
        ),
        paper="decreases",
        corrected=f"for ε below {crossing[16]:.2f} (E = 16), {crossing[64]:.2f} (E = 64)",
        measured=", ".join(f"{value:.2g}" for value in small),
    )


def order_bound(experts: int, order: int, epsilon: float) -> float:
    """Σ_J K_{J,n} ε^n ∫ t^(-n/2) e^(-b/t) dt, b = (1 - ε)²/2, over 0 < t < 1."""
    volume = math.pi ** (order / 2) / math.gamma(order / 2 + 1)
    constant = math.comb(experts, order + 1) * volume / (2 * math.pi) ** (order / 2)
    return constant * epsilon**order * time_integral(order, (1 - epsilon) ** 2 / 2)


def time_integral(order: int, b: float) -> float:
    """∫_0^1 t^(-n/2) e^(-b/t) dt."""
    return quad(lambda t: t ** (-order / 2) * math.exp(-b / t) if t > 0 else 0.0, 0, 1)[0]


def first_growth(experts: int) -> float:
    """Least ε on a grid at which the bound of order 2 exceeds that of order 1."""
    grid = (0.005 * step for step in range(1, 180))
    return next((e for e in grid if order_bound(experts, 2, e) > order_bound(experts, 1, e)), 1.0)


@claim(
    "p1-thmA.32-coarse", "the coarse occupation bound", number="Thm A.32, last part", seconds=0.3
)
def coarse_bound(run: ClaimRun) -> Evidence:
    """E[A_ε(T)] <= Σ_J K_J ε^n ∫ t^(-n/2) e^(-b_J/t) dt <= K^sum ε^n ∫ t^(-n/2) e^(-b_min/t) dt.

    Setting: a drawn router of 4 experts in R³, order 1, T = 1, ε = 0.1
    Tested: Time that 2,000 Brownian paths spend within ε of any tie, against the sum over ties of
        the bound, and that against the coarse one; inputs near several ties at once, which the
        union counts more than once.
    Overturned by: a time above the sum, or a sum above the coarse bound
    """
    weight, bias = streamed_router(run, 4, 3, stream=5)
    start, epsilon = 0.6 * run.normal(3, stream=44), 0.1
    fine, coarse = slice_sums(weight, bias, start, epsilon)
    spent, several = time_near_ties(run, weight, bias, start, epsilon)
    library = occupation_bounds(start, weight, bias, order=1, epsilon=epsilon, horizon=1.0).bound
    return Evidence.of(
        at_most("time near any tie over the sum of the bounds", spent / fine, 1),
        at_most("the sum over the coarse bound", fine / coarse, 1 + 1e-12),
        none_of("paths that are near ties for longer than by their sum", several),
        corrected(at_most("the package's bound over this sum", library / fine, 1 + 1e-6)),
        paper=coarse,
        corrected=fine,
        measured=spent,
        figure=chart("", "time", dots("measured, fine, coarse", [1, 2, 3], [spent, fine, coarse])),
    )


def slice_sums(
    weight: torch.Tensor, bias: torch.Tensor, start: torch.Tensor, epsilon: float
) -> tuple[float, float]:
    """The sum over pairs of the bound of order 1, and the coarse bound."""
    pairs = torch.combinations(torch.arange(len(weight)))
    normals = weight[pairs[:, 0]] - weight[pairs[:, 1]]
    offsets = normals @ start + bias[pairs[:, 0]] - bias[pairs[:, 1]]
    away = (offsets.abs() / normals.norm(dim=1) - epsilon).clamp_min(0)
    constant = 2 / math.sqrt(2 * math.pi) * epsilon
    times = [time_integral(1, float(distance) ** 2 / 2) for distance in away]
    return constant * sum(times), constant * len(times) * max(times)


def time_near_ties(
    run: ClaimRun, weight: torch.Tensor, bias: torch.Tensor, start: torch.Tensor, epsilon: float
) -> tuple[float, int]:
    """Mean time within ε of any wall z_i = z_j up to T = 1; paths that break the union bound."""
    paths, steps = run.size(500, 4_000), 200
    moves = run.normal(paths, steps, 3, stream=45) / math.sqrt(steps)
    x = start + moves.cumsum(dim=1)
    pairs = torch.combinations(torch.arange(len(weight)))
    normals = weight[pairs[:, 0]] - weight[pairs[:, 1]]
    offsets = bias[pairs[:, 0]] - bias[pairs[:, 1]]
    near_wall = ((x @ normals.T + offsets) / normals.norm(dim=1)).abs() <= epsilon
    once = near_wall.any(dim=-1).double().mean(dim=1)
    counted = near_wall.double().sum(dim=-1).mean(dim=1)
    return once.mean().item(), int((once > counted + 1e-12).sum())
