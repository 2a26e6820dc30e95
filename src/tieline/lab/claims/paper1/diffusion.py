"""Sections 5 and A.5: when and where random perturbations leave a cell, and the time near ties."""

import math

import torch
from scipy.integrate import quad
from torch import Tensor

from tieline.core.ranking import gap, topk_mask
from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import (
    Check,
    Evidence,
    at_least,
    at_most,
    chart,
    corrected,
    dots,
    line,
    near,
    none_of,
    standard_errors_off,
    within,
)
from tieline.lab.claims.routing_problems import one_wall_cell, pair_walls, router_from_stream
from tieline.lab.geometry import (
    exit_bounds,
    exit_curve,
    face_exit,
    face_quantile,
    nearest_tie_point,
    top_k_cell,
)
from tieline.lab.geometry.exit_time import TopKCell, exit_orders, sample_exits
from tieline.lab.geometry.occupation import (
    BrownianPaths,
    flat_occupation,
    occupation_bounds,
    sampled_occupation,
)
from tieline.lab.geometry.ties import tie_flat
from tieline.lab.power_law import exponent


def drawn_cell(run: ClaimRun, experts: int = 8, width: int = 16, k: int = 2) -> TopKCell:
    """Cell of the drawn input with the largest gap, for a drawn router."""
    weight, bias = router_from_stream(run, experts, width)
    x = run.normal(50, width, stream=3)
    scores = x @ weight.T + bias
    return top_k_cell(scores[gap(scores, k).argmax()], k, weight)


@claim("p1-propA.21", "hitting time of one face")
def face_hitting_time(run: ClaimRun) -> Evidence:
    """P(τ <= t) = 2(1 - Φ(Y_0/c√t)), and P(τ <= (Y_0/c q_δ)²) = 1 - δ with q_δ = Φ⁻¹((1+δ)/2).

    Setting: one face, every σ; distance 1, t = 1
    Tested: Simulation with Brownian bridges, 16 steps, against the law; the quantile put back into
        it; and what 16 steps give without bridges.
    Overturned by: a law other than the reflected one
    """
    curve = exit_curve(one_wall_cell(), 1.0, 16, run.size(250_000, 1_000_000), run.seed)
    exact = face_exit(torch.ones(1, dtype=torch.float64), 1.0).item()
    errors = []
    for delta in (0.05, 0.5, 0.95):
        when = face_quantile(torch.tensor(1.7, dtype=torch.float64), 1 - delta)
        errors.append(
            abs(face_exit(torch.tensor(1.7, dtype=torch.float64), when).item() - 1 + delta)
        )
    return Evidence.of(
        within("P(τ <= 1) at distance 1", curve.value[-1].item(), curve.stderr[-1].item(), exact),
        at_most("standard error", curve.stderr[-1].item(), 0.001),
        at_most("quantile put back into the law", max(errors), 1e-12),
        corrected(near("without bridges", curve.naive[-1].item(), 0.256, 0.01)),
        paper=exact,
        measured=curve.value[-1].item(),
        note="The law is 2Φ̄(1) = .3173; seen at 16 steps only, a path seems to leave with .256.",
    )


def _exits_between_bounds(run: ClaimRun, cell: TopKCell, horizon: float) -> Evidence:
    """Evidence that simulated exit probabilities lie between the two bounds."""
    curve = exit_curve(cell, horizon, 64, run.size(40_000, 400_000), run.seed)
    bounds = exit_bounds(cell.distances, curve.times)
    low = (bounds.lower - curve.value - 4 * curve.stderr).max().item()
    high = (curve.value - 4 * curve.stderr - bounds.upper).max().item()
    return Evidence.of(
        at_most("lower bound less the simulation", low, 0.002),
        corrected(at_most("simulation less the union bound", high, 0.002)),
        paper=bounds.lower[-1].item(),
        corrected=f"at most {bounds.upper[-1].item():.4f}",
        measured=curve.value[-1].item(),
        figure=chart(
            "t",
            "P(exit by t)",
            line("lower bound", curve.times, bounds.lower, dashed=True),
            dots("simulated", curve.times, curve.value, curve.stderr),
            line("union bound", curve.times, bounds.upper, dashed=True),
        ),
    )


@claim("p1-thmA.22", "lower bound of the exit probability", seconds=0.5)
def exit_lower_bound(run: ClaimRun) -> Evidence:
    """P(exit by t) >= 2(1 - Φ(r_min/√t)).

    Setting: a lower bound for every cell and time; 8 experts in R¹⁶, isotropic noise
    Tested: A drawn cell of 8 experts in 16 dimensions, 64 steps with bridges; the union bound from
        above beside it.
    Overturned by: an exit probability below the bound
    """
    cell = drawn_cell(run)
    return _exits_between_bounds(run, cell, cell.distances.min().item() ** 2)


@claim("p1-corA.23", "the exit time is finite")
def exit_time_is_finite(run: ClaimRun) -> Evidence:
    """P(τ < ∞) = 1.

    Setting: every cell and start; 8 experts in R¹⁶
    Tested: The lower bound at t = 10⁶ r_min², and a simulation up to 400 r_min²; the mean of τ for
        one face grows with the horizon without end.
    Overturned by: a cell that keeps a path with positive probability
    """
    cell = drawn_cell(run)
    least = cell.distances.min()
    late = face_exit(least[None], 1e6 * least.item() ** 2).item()
    curve = exit_curve(cell, 400 * least.item() ** 2, 256, run.size(2_000, 20_000), run.seed)
    t = torch.logspace(0, 8, 9, dtype=torch.float64)
    means = [_mean_truncated_exit_time(horizon.item()) for horizon in t]
    return Evidence.of(
        at_least("lower bound at 10⁶ r²", late, 0.999),
        at_least("simulated by 400 r²", curve.value[-1].item(), 0.95),
        corrected(
            near(
                "exponent of E[min(τ, T)] in T, one face",
                exponent(t[4:].tolist(), means[4:]),
                0.5,
                0.01,
            )
        ),
        paper=1,
        corrected="almost surely finite, with infinite mean",
        measured=late,
    )


def _mean_truncated_exit_time(horizon: float) -> float:
    """E[min(τ, T)] for one face at distance 1, the integral of P(τ > t)."""
    edges = torch.cat([torch.zeros(1), torch.logspace(-3, math.log10(horizon), 20_000)]).double()
    middle = (edges[1:] + edges[:-1]) / 2
    return (torch.erf(1 / (2 * middle).sqrt()) * edges.diff()).sum().item()


@claim("p1-lemA.25", "cell boundaries are the ties")
def cell_boundaries_are_ties(run: ClaimRun) -> Evidence:
    """Γ is the union of the boundaries of all cells.

    Setting: affine scores with linearly independent rows, the paper's assumption, 6 experts in R⁸
    Tested: Around ties, arbitrarily small steps reach two cells; around other inputs, steps shorter
        than the distance to Γ reach one.
    Overturned by: a tie inside a cell, or a boundary without tie
    """
    weight, bias = router_from_stream(run, 6, 8)
    x = run.normal(run.size(100, 1_000), 8, stream=3)
    tie = nearest_tie_point(x, weight, bias, 2)
    away = run.normal(len(x), 60, 8, stream=4)
    away = away / away.norm(dim=2, keepdim=True)
    on = topk_mask((tie.point[:, None] + 1e-6 * away) @ weight.T + bias, 2)
    off = topk_mask((x[:, None] + 0.999 * tie.distance[:, None, None] * away) @ weight.T + bias, 2)
    single_cells = (on == on[:, :1]).all(dim=2).all(dim=1).sum().item()
    crossed = (off != off[:, :1]).any(dim=2).any(dim=1).sum().item()
    checks = [
        none_of("ties with one cell around", single_cells),
        none_of("inputs with two cells within their distance", crossed),
    ]
    return Evidence.of(checks, paper="equal sets", measured=f"{single_cells + crossed} exceptions")


def annulus_hits(
    run: ClaimRun, dim: int, start: float, inner: float, outer: float, n: int
) -> float:
    """Share of Brownian paths that meet the inner before the outer sphere, by walk on spheres."""
    x = torch.zeros(n, dim, dtype=torch.float64)
    x[:, 0] = start
    generator, inside = run.generator(dim), torch.zeros(n, dtype=torch.bool)
    alive = torch.ones(n, dtype=torch.bool)
    for _ in range(4_000):
        reach = x[alive].norm(dim=1)
        step = torch.minimum(reach - inner, outer - reach)
        reached = step < 1e-4 * inner
        rows = alive.nonzero().squeeze(1)
        inside[rows[reached]] = reach[reached] - inner < outer - reach[reached]
        alive[rows[reached]] = False
        if not alive.any():
            break
        direction = torch.randn(int(alive.sum()), dim, dtype=torch.float64, generator=generator)
        x[alive] += step[~reached][:, None] * direction / direction.norm(dim=1, keepdim=True)
    return inside.double().mean().item()


def annulus_law(dim: int, start: float, inner: float, outer: float) -> float:
    """Exact P(inner before outer sphere): log(R/a)/log(R/r), or with powers 2 - d for logs."""
    if dim == 2:
        return math.log(outer / start) / math.log(outer / inner)
    power = 2 - dim
    return (start**power - outer**power) / (inner**power - outer**power)


@claim("p1-lemA.27", "Brownian motion misses points")
def brownian_misses_points(run: ClaimRun) -> Evidence:
    """In two or more dimensions a Brownian path never meets a given point a ≠ 0.

    Setting: two and three dimensions
    Tested: The chance to meet a small ball before a large one by walks on spheres against the
        harmonic formula; its fall as the ball shrinks.
    Overturned by: a chance that does not vanish with the ball
    """
    checks, n = [], run.size(4_000, 100_000)
    for dim in (2, 3):
        share = annulus_hits(run, dim, 1.0, 0.1, 4.0, n)
        exact = annulus_law(dim, 1.0, 0.1, 4.0)
        error = math.sqrt(exact * (1 - exact) / n)
        checks.append(
            within(f"d = {dim}, r = 0.1, R = 4", share, error, exact, bias=1e-3, resolution=0.1)
        )
    radii = [10.0**-k for k in range(1, 10)]
    curve = [annulus_law(2, 1.0, r, 4.0) for r in radii]
    checks.append(at_most("d = 2, r = 1e-9", curve[-1], 0.07))
    checks.append(at_most("d = 3, r = 1e-9", annulus_law(3, 1.0, 1e-9, 4.0), 1e-8))
    line_ = annulus_hits(run, 1, 1.0, 0.1, 4.0, n)
    checks += corrected(near("d = 1, r = 0.1", line_, 3 / 3.9, 0.04))
    return Evidence.of(
        checks,
        paper=0,
        measured=curve[-1],
        figure=chart(
            "radius of the ball",
            "chance to meet it",
            line("d = 2", radii, curve),
            line("d = 3", radii, [annulus_law(3, 1.0, r, 4.0) for r in radii]),
            log="xy",
        ),
        note="In the plane the chance falls like 1/log(1/r) only: edges are missed, but not by "
        "far.",
    )


@claim("p1-corA.28", "a path from a ≠ 0 misses the origin")
def path_misses_origin(run: ClaimRun) -> Evidence:
    """By translation, a Brownian motion that starts at a ≠ 0 never meets the origin.

    Setting: the plane, three starts
    Tested: Walks from three starts in the plane: the chance to meet the ball of radius r depends on
        the distance alone and falls with r.
    Overturned by: a chance that depends on the direction
    """
    n, checks = run.size(3_000, 100_000), []
    for start in (0.5, 1.0, 2.0):
        exact = annulus_law(2, start, 0.05, 4.0)
        share = annulus_hits(run, 2, start, 0.05, 4.0, n)
        error = math.sqrt(exact * (1 - exact) / n)
        checks.append(within(f"start at {start}", share, error, exact, bias=1e-3, resolution=0.1))
    checks.append(at_most("limit r → 0: r = 1e-300", annulus_law(2, 1.0, 1e-300, 4.0), 0.01))
    return Evidence.of(checks, paper=0, measured=checks[-1].measured)


@claim("p1-lemA.29", "linear image of Brownian motion")
def linear_image(run: ClaimRun) -> Evidence:
    """A B_t is a Brownian motion with covariance AAᵀ; (AAᵀ)^(-½) makes it standard.

    Setting: a drawn 2 × 5 matrix
    Tested: Covariance of increments over two disjoint intervals, entry by entry, before and after.
    Overturned by: a covariance outside four standard errors
    """
    n, a = run.size(50_000, 500_000), run.normal(2, 5, stream=1)
    first, second = (run.normal(n, 5, stream=s) * math.sqrt(t) for s, t in ((2, 0.3), (3, 0.7)))
    early, late = first @ a.T, second @ a.T
    values, vectors = torch.linalg.eigh(a @ a.T)
    root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    pairs = {
        "first increment": (early, early, 0.3 * a @ a.T),
        "second increment": (late, late, 0.7 * a @ a.T),
        "the two together": (early, late, torch.zeros(2, 2, dtype=torch.float64)),
        "made standard": (early @ root, early @ root, 0.3 * torch.eye(2, dtype=torch.float64)),
    }
    checks = [
        at_most(
            f"{name}: standard errors", standard_errors_off(x[:, :, None] * y[:, None], exact), 4
        )
        for name, (x, y, exact) in pairs.items()
    ]
    return Evidence.of(checks, paper="AAᵀ", measured=max(check.measured for check in checks))


@claim("p1-thmA.30", "exits are of order 1", seconds=0.5)
def exits_are_order_one(run: ClaimRun) -> Evidence:
    """A path leaves its cell through an order-1 tie, and through none of higher order, almost
    surely.

    Setting: every cell, almost surely; 8 experts in R¹⁶, isotropic noise, tolerance 1e-9
    Tested: Scores at simulated exits: the share within ε of a tie of order 2 falls like ε.
    Overturned by: exits at ties of order 2 whose share does not fall with the tolerance
    """
    cell = drawn_cell(run)
    horizon = 9 * cell.distances.min().item() ** 2
    exits = sample_exits(cell, horizon, 64, run.size(40_000, 400_000), run.seed)
    widths = [0.2, 0.1, 0.05, 0.025]
    shares = [(exit_orders(exits, epsilon) >= 2).double().mean().item() for epsilon in widths]
    exact = (exit_orders(exits, 1e-9) != 1).sum().item()
    figure = chart("ε", "share of exits of order ≥ 2", dots("simulated", widths, shares), log="xy")
    return Evidence.of(
        none_of("exits whose order at ε = 1e-9 is not 1", exact),
        near("exponent of the share of order 2 and more in ε", exponent(widths, shares), 1, 0.15),
        paper=0,
        corrected="0 at ε = 0, proportional to ε at a tolerance",
        measured=f"{shares[-1]:.4f} at ε = 0.025",
        figure=figure,
    )


@claim("p1-thm5.1", "exit through order-1 ties, with a bound on the time", seconds=1.0)
def exit_theorem(run: ClaimRun) -> Evidence:
    """The exit point is an order-1 tie almost surely, and P(exit by t) >= 2(1 - Φ(r_min/√t)), r_min
    the smallest normalised distance.

    Setting: a constant invertible σ, as the theorem says; 6 experts in R⁸, σ not isotropic
    Tested: Both on a drawn cell under noise that is not isotropic.
    Overturned by: an exit probability below the bound, or an exit of order 2
    """
    weight, bias = router_from_stream(run, 6, 8)
    sigma = torch.eye(8, dtype=torch.float64) + 0.3 * run.normal(8, 8, stream=5)
    scores = run.normal(40, 8, stream=3) @ weight.T + bias
    cell = top_k_cell(scores[gap(scores, 2).argmax()], 2, weight, sigma)
    bounds, order = (
        _exits_between_bounds(run, cell, cell.distances.min().item() ** 2),
        exits_are_order_one(run),
    )
    return Evidence.of(
        *bounds.checks,
        *order.checks,
        paper=bounds.paper,
        corrected=bounds.corrected,
        measured=bounds.measured,
        figure=bounds.figure,
    )


@claim("p1-propA.31", "time near one flat")
def one_flat(run: ClaimRun) -> Evidence:
    """E ∫ 1{dist(x_t, S) < ε} dt <= K_n ε^n ∫ t^(-n/2) e^(-b/t) dt, in closed form for n = 1, 2 and
    more.

    Setting: upper bounds, n = 1, 2, 3; 5 experts in R⁷
    Tested: The expected time by drawing a uniform time and the path at it, against the exact value
        and both bounds, n = 1, 2, 3; and a start within ε, where the bound is infinite.
    Overturned by: a time above the bound
    """
    weight, bias = router_from_stream(run, 5, 7)
    epsilon, horizon = 0.3, 4.0
    checks: list[Check] = []
    values: list[tuple[float, float, float]] = []
    n_draws = run.size(200_000, 2_000_000)
    for n in (1, 2, 3):
        flat = tie_flat(weight, bias, tuple(range(n + 1)))
        x0 = flat.nearest + 0.8 * flat.basis[:, 0]
        occupation = flat_occupation(flat, x0, epsilon=epsilon, horizon=horizon)
        time = horizon * torch.rand(n_draws, dtype=torch.float64, generator=run.generator(n))
        x = x0 + time.sqrt()[:, None] * run.normal(n_draws, 7, stream=10 + n)
        share = (((x - flat.nearest) @ flat.basis).norm(dim=1) < epsilon).double().mean().item()
        error = horizon * math.sqrt(share * (1 - share) / n_draws)
        exact = occupation.exact or math.nan
        checks += [
            within(f"sampled and exact, n = {n}", horizon * share, error, exact, resolution=0.1),
            at_most(f"exact and the paper's bound, n = {n}", exact, float(occupation.paper)),
            *corrected(
                at_most(
                    f"exact and the finite bound, n = {n}", exact, float(occupation.bound), 1e-9
                )
            ),
        ]
        values.append((exact, float(occupation.bound), float(occupation.paper)))
    checks += _start_on_flat_checks(weight, bias)
    return Evidence.of(
        checks,
        paper=values[1][2],
        corrected=values[1][1],
        measured=values[1][0],
        note="For n >= 2 the bound is infinite when the start is within ε of the flat, and says "
        "nothing; min(T, bound) does.",
    )


def _start_on_flat_checks(weight: Tensor, bias: Tensor) -> list[Check]:
    """Check a start on the flat itself, n = 2, where the paper's bound is infinite."""
    flat = tie_flat(weight, bias, (0, 1, 2))
    occupation = flat_occupation(flat, flat.nearest, epsilon=0.3, horizon=4.0)
    return [
        *corrected(
            near("the paper's bound from within ε", float(occupation.paper), math.inf),
            at_most("the finite one", float(occupation.bound), 4.0),
        )
    ]


def _bounded_time_near_ties(
    run: ClaimRun, order: int, count: int
) -> tuple[list[Check], list[float]]:
    """Check sampled times near order-n ties against both bounds; checks and numbers."""
    weight, bias = router_from_stream(run, 5, 7)
    x0, checks, row = run.normal(7, stream=3), [], []
    for epsilon in (0.4, 0.2, 0.1):
        bounds = occupation_bounds(x0, weight, bias, order=order, epsilon=epsilon, horizon=4.0)
        paths = BrownianPaths(x0, 4.0, paths=count, seed=run.seed)
        time = sampled_occupation(paths, weight, bias, 2, order=order, epsilon=epsilon)
        value, error = time.value or 0.0, time.standard_error or 0.0
        least, where = value - 4 * error, f"n = {order}, ε = {epsilon}"
        checks.append(at_most(f"time and bound, {where}", least, float(bounds.paper)))
        checks += corrected(at_most(f"time and finite bound, {where}", least, float(bounds.bound)))
        row += [value, float(bounds.bound), float(bounds.paper)]
    return checks, row


@claim("p1-thm5.3", "time near order-n ties", number="Thm 5.3, A.32", seconds=1.0)
def many_flats(run: ClaimRun) -> Evidence:
    """The expected time within ε of Γ^(n) is at most the sum over flats of the bounds of Prop.
    A.31: 2ΣKε√T for n = 1, ΣKε²E_1(b/T) for n = 2.

    Setting: upper bounds, n = 1, 2; 5 experts in R⁷, three widths
    Tested: Simulated paths of a drawn router, by exact distance to Γ^(n), n = 1, 2, three widths.
    Overturned by: a time above the sum over flats
    """
    paths = run.size(400, 8_192)
    (order_one, ones), (order_two, twos) = (_bounded_time_near_ties(run, n, paths) for n in (1, 2))
    widths = [0.4, 0.2, 0.1]
    share = [second / first for first, second in zip(ones[::3], twos[::3], strict=True)]
    checks = [
        *order_one,
        *order_two,
        *corrected(at_least("share of order 2 falls with ε", share[0], share[2])),
    ]
    figure = chart(
        "ε",
        "expected time",
        line("paper, n = 1", widths, ones[2::3], dashed=True),
        line("finite bound, n = 1", widths, ones[1::3]),
        dots("simulated, n = 1", widths, ones[::3]),
        line("finite bound, n = 2", widths, twos[1::3]),
        dots("simulated, n = 2", widths, twos[::3]),
        log="xy",
    )
    return Evidence.of(checks, paper=ones[-1], corrected=ones[-2], measured=ones[-3], figure=figure)


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
    crossing = {experts: least_epsilon_of_growth(experts) for experts in (16, 64)}
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
    """Bound Σ_J K_{J,n} ε^n ∫ t^(-n/2) e^(-b/t) dt, b = (1 - ε)²/2, over 0 < t < 1."""
    volume = math.pi ** (order / 2) / math.gamma(order / 2 + 1)
    constant = math.comb(experts, order + 1) * volume / (2 * math.pi) ** (order / 2)
    return constant * epsilon**order * time_integral(order, (1 - epsilon) ** 2 / 2)


def time_integral(order: int, b: float) -> float:
    """Integrate t^(-n/2) e^(-b/t) over 0 < t < 1."""
    return quad(lambda t: t ** (-order / 2) * math.exp(-b / t) if t > 0 else 0.0, 0, 1)[0]


def least_epsilon_of_growth(experts: int) -> float:
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
    weight, bias = router_from_stream(run, 4, 3, stream=5)
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


def slice_sums(weight: Tensor, bias: Tensor, start: Tensor, epsilon: float) -> tuple[float, float]:
    """Sum over pairs of the bound of order 1, and the coarse bound."""
    normals, offsets = pair_walls(weight, bias)
    away = ((normals @ start + offsets).abs() / normals.norm(dim=1) - epsilon).clamp_min(0)
    constant = 2 / math.sqrt(2 * math.pi) * epsilon
    times = [time_integral(1, float(distance) ** 2 / 2) for distance in away]
    return constant * sum(times), constant * len(times) * max(times)


def time_near_ties(
    run: ClaimRun, weight: Tensor, bias: Tensor, start: Tensor, epsilon: float
) -> tuple[float, int]:
    """Mean time within ε of a wall z_i = z_j up to T = 1; number of paths above the union bound."""
    paths, steps = run.size(500, 4_000), 200
    moves = run.normal(paths, steps, 3, stream=45) / math.sqrt(steps)
    x = start + moves.cumsum(dim=1)
    normals, offsets = pair_walls(weight, bias)
    near_wall = ((x @ normals.T + offsets) / normals.norm(dim=1)).abs() <= epsilon
    once = near_wall.any(dim=-1).double().mean(dim=1)
    counted = near_wall.double().sum(dim=-1).mean(dim=1)
    return once.mean().item(), int((once > counted + 1e-12).sum())
