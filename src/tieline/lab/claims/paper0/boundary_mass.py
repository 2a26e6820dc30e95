"""Sections 2 and 3: symmetries, boundary masses, ambiguity, level sets and the coarea formula."""

import itertools
import math

import torch
from numpy.polynomial.legendre import leggauss
from scipy import special

from tieline.core.statistics import mean_estimate
from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import (
    Evidence,
    at_least,
    at_most,
    chart,
    corrected,
    dots,
    line,
    near,
    none_of,
    qualified,
    sampled,
    within,
)
from tieline.lab.claims.routing_problems import (
    GraphRouter,
    bounded_mixture,
    drawn_router,
    gaussian_affine_scores,
    pair_mass,
    pair_walls,
)
from tieline.lab.geometry import (
    ambiguity_mass,
    boundary_mass_pair,
    boundary_mass_top,
    gaussian_gap_density,
    gaussian_pair_density,
    pair_gap,
    top_gap,
)
from tieline.lab.limits.risk import MoESample, soft_predictions
from tieline.lab.limits.two_cells import gaussian_boundary_mass, normal_density, two_cells
from tieline.lab.limits.wall_integrals import surface_integral
from tieline.lab.power_law import exponent

EPSILON, TAU = 0.1, 0.3
KAPPA = math.log((1 - EPSILON) / EPSILON)
"""κ_ε for ε = 0.1."""


@claim("p0-sec2-gauge", "gauge and permutation symmetry")
def gauge_and_permutation_symmetry(run: ClaimRun) -> Evidence:
    """Adding c(x) to all scores changes no weight; relabelling experts together with their scores
    changes no prediction, so a minimiser has E! copies.

    Setting: any mixture; here 4 experts at τ = 0.3, one shift of all scores and all relabellings
    Tested: All 24 relabellings and a drawn shift of a mixture of 4 experts.
    Overturned by: a prediction that changes by more than rounding
    """
    sample = bounded_mixture(run, run.size(2_000, 20_000))
    before = soft_predictions(sample, TAU)
    shift = 5 * run.normal(len(before), stream=9)[:, None]
    moved = MoESample(sample.scores + shift, sample.outputs, sample.target)
    copies = [
        MoESample(sample.scores[:, list(p)], sample.outputs[:, list(p)], sample.target)
        for p in itertools.permutations(range(4))
    ]
    changes = [(soft_predictions(copy, TAU) - before).abs().max().item() for copy in copies]
    scores_permuted = MoESample(sample.scores[:, [1, 0, 2, 3]], sample.outputs, sample.target)
    broken = (soft_predictions(scores_permuted, TAU) - before).abs().max().item()
    shifted = (soft_predictions(moved, TAU) - before).abs().max().item()
    checks = [
        at_most("change under a shift of all scores", shifted, 1e-12),
        at_most("change under 24 relabellings", max(changes), 1e-12),
        near("distinct relabellings", len(copies), math.factorial(4), 0),
        *corrected(at_least("change when scores alone are relabelled", broken, 0.1)),
    ]
    return Evidence.of(checks, paper="no change", measured=max(*changes, shifted))


@claim("p0-def3.1", "pairwise boundary mass and ambiguity events")
def pair_events(run: ClaimRun) -> Evidence:
    """The chance that some pair's own softmax weight lies in [ε, 1-ε] at temperature τ is
    BM_pair(κ_ε τ), κ_ε = log((1-ε)/ε).

    Setting: the definition and identity (3.6) as written, Gaussian inputs, ε = 0.1, τ = 0.3
    Tested: Both sides counted on the same draws, 6 experts, and the weight formed as written.
    Overturned by: a token that one side counts and the other does not
    """
    scores = gaussian_affine_scores(run, run.size(20_000, 400_000), *drawn_router(run, 6, 4))
    i, j = torch.triu_indices(6, 6, 1)
    share = torch.sigmoid((scores[:, i] - scores[:, j]) / TAU)
    event = ((share >= EPSILON) & (share <= 1 - EPSILON)).any(dim=1).double().mean().item()
    mass = float(boundary_mass_pair(scores, KAPPA * TAU))
    checks = [near("P(some pair ambiguous) and BM_pair(κτ)", event, mass, 1e-12)]
    return Evidence.of(checks, paper=mass, measured=event)


@claim("p0-rem3.2", "ambiguity is a slab", number="Remark 3.2")
def ambiguity_is_a_slab(run: ClaimRun) -> Evidence:
    """A pair is ambiguous exactly where its score difference is at most κ_ε τ.

    Setting: every pair and every ε in (0, 1/2), in exact arithmetic; float64 for ε >= 1e-6
    Tested: Membership pair by pair, for ε from 0.4 to 1e-6; then for ε = 1e-17, where 1 - ε rounds
        to 1 and the weight as written accepts everything.
    Overturned by: a pair for which weight and slab disagree at an ε that float64 resolves
    """
    gap = 30 * run.normal(run.size(100_000, 2_000_000), stream=1)
    differ = 0
    for epsilon in (0.4, 0.1, 1e-3, 1e-6):
        share = torch.sigmoid(gap / TAU)
        event = (share >= epsilon) & (share <= 1 - epsilon)
        differ += (event != (gap.abs() <= TAU * math.log((1 - epsilon) / epsilon))).sum().item()
    tiny = 1e-17
    share = torch.sigmoid(gap / TAU)
    naive = ((share >= tiny) & (share <= 1 - tiny)).double().mean().item()
    slab_mass = (gap.abs() <= TAU * (math.log1p(-tiny) - math.log(tiny))).double().mean().item()
    return Evidence.of(
        none_of("pairs that differ", differ),
        corrected(
            at_least("excess of the weight as written at ε = 1e-17", naive - slab_mass, 0.05)
        ),
        paper="equal",
        measured=f"{differ} differ",
        note="In floating point the slab is the safe form: at ε = 1e-17 the weight as written "
        f"calls {naive:.3f} of the pairs ambiguous, the slab {slab_mass:.3f}.",
    )


@claim("p0-rem3.3", "binary case", number="Remark 3.3")
def two_expert_ambiguity(run: ClaimRun) -> Evidence:
    """For two experts the ambiguous inputs are those with score difference in [τ log(ε/(1-ε)), τ
    log((1-ε)/ε)].

    Setting: two experts, a curved router, ε = 0.1
    Tested: Counted on a curved router with two experts, by K-way softmax and by the slab, and
        against the quadrature of the slab.
    Overturned by: a mass that quadrature and counts do not share
    """
    router = GraphRouter()
    gap = router(run.normal(run.size(400_000, 4_000_000), 3, stream=1))
    scores = torch.stack([gap, torch.zeros_like(gap)], dim=1)
    ambiguous, counted = (
        ambiguity_mass(scores, EPSILON, TAU),
        boundary_mass_top(scores, 1, KAPPA * TAU),
    )
    exact = router.mass(KAPPA * TAU)
    checks = [
        near("softmax and slab on the same draws", float(ambiguous), float(counted), 0),
        within("counted against quadrature", float(counted), counted.stderr.item(), exact),
    ]
    return Evidence.of(checks, paper=exact, measured=float(counted))


@claim("p0-sec2-pair", "BM_pair as a proxy of BM_top")
def pair_proxy(run: ClaimRun) -> Evidence:
    """BM_pair bounds BM_top from above and is technically convenient in its place.

    Setting: an inequality for every router; its size for independent normal scores, 2 to 256
        experts
    Tested: Inclusion on draws; the ratio of the two at small widths by quadrature for independent
        normal scores, for 2 to 256 experts.
    Overturned by: an input whose top gap is smaller than its smallest pair gap
    """
    scores = run.normal(run.size(20_000, 200_000), 16, stream=1)
    outside = (pair_gap(scores) > top_gap(scores)).sum().item()
    sizes = [2, 4, 8, 16, 32, 64, 128, 256]
    ratio = [gaussian_pair_density(e) / gaussian_gap_density(e, 1) for e in sizes]
    width = 1e-3
    measured = float(boundary_mass_pair(scores, width)) / 16 / 15 * 2 * math.sqrt(math.pi) / width
    error = math.sqrt(1 / (len(scores) * 120 / math.sqrt(math.pi) * width))
    return Evidence.of(
        none_of("tokens with a smaller top gap than pair gap", outside),
        corrected(
            near("ratio at E = 16", ratio[3], 38.337, 1e-3),
            near("ratio at E = 256", ratio[-1], 6514, 1),
            within("pair density over its formula at E = 16", measured, error, 1.0, bias=0.05),
        ),
        paper="an upper bound",
        corrected="useless for many experts",
        measured=f"{ratio[3]:.2f}× at E=16, {ratio[-1]:.0f}× at E=256",
        figure=chart("experts", "BM_pair / BM_top", line("ratio at w → 0", sizes, ratio), log="xy"),
        note="True, and of no use for many experts: the bound is 6514 times too large at E = 256.",
    )


@claim("p0-eq5.3", "K-way ambiguity region", number="eq. 5.3, 5.4")
def ambiguity_region(run: ClaimRun) -> Evidence:
    """U_ε is the set of inputs whose largest softmax weight is at most 1 - ε, BM(τ; ε) its mass;
    outside it one expert has weight at least 1 - ε.

    Setting: definition of the K-way region, 8 experts, ε = 0.1
    Tested: The library's mass, decided on log-odds, against the weights as written; and at ε =
        1e-17, where only log-odds still tell.
    Overturned by: a weight above 1 - ε inside the region, or below outside
    """
    scores = gaussian_affine_scores(run, run.size(50_000, 500_000), *drawn_router(run, 8, 5))
    weight = torch.softmax(scores / TAU, dim=1).amax(dim=1)
    written = (weight <= 1 - EPSILON).double().mean().item()
    odds = float(ambiguity_mass(scores, EPSILON, TAU))
    sure = torch.tensor([[0.0, -45.0]], dtype=torch.float64)
    tiny = float(ambiguity_mass(sure, 1e-17))
    rounded = (torch.softmax(sure, dim=1).amax(dim=1) <= 1 - 1e-17).double().mean().item()
    checks = [
        near("mass by weights and by log-odds", odds, written, 1e-12),
        *corrected(near("a gap of 45 is called ambiguous at ε = 1e-17", rounded - tiny, 1, 0)),
    ]
    return Evidence.of(checks, paper=written, measured=odds)


@claim("p0-rem5.4", "sandwich of the ambiguity mass", number="Remark 5.4")
def ambiguity_mass_sandwich(run: ClaimRun) -> Evidence:
    """BM_top(κ_ε τ) <= BM(τ; ε) <= BM_top(κ_{ε,E} τ) <= BM_pair(κ_{ε,E} τ), with equality of the
    first two for two experts.

    Setting: every router; normal scores of 2 to 64 experts, five temperatures
    Tested: The chain on draws for E = 2, 4, 16, 64 and τ over two decades.
    Overturned by: one violation of the chain
    """
    violations, n, taus = 0, run.size(10_000, 100_000), [0.03, 0.1, 0.3, 1.0, 3.0]
    curves: dict[str, list[float]] = {"lower": [], "mass": [], "upper": []}
    for experts in (2, 4, 16, 64):
        scores = run.normal(n, experts, stream=experts)
        for tau in taus:
            outer = tau * (KAPPA + math.log(experts - 1))
            lower = float(boundary_mass_top(scores, 1, tau * KAPPA * (1 - 1e-12)))
            mass = float(ambiguity_mass(scores, EPSILON, tau))
            upper = float(boundary_mass_top(scores, 1, outer * (1 + 1e-12)))
            violations += (
                not lower <= mass <= upper <= float(boundary_mass_pair(scores, outer + 1e-9))
            )
            violations += experts == 2 and lower != upper
            if experts == 16:
                for name, value in zip(curves, (lower, mass, upper), strict=True):
                    curves[name].append(value)
    checks = [none_of("violations of the chain", violations)]
    figure = chart(
        "τ",
        "mass",
        line("BM_top(κτ)", taus, curves["lower"], dashed=True),
        dots("BM(τ; ε), E = 16", taus, curves["mass"]),
        line("BM_top(κ_E τ)", taus, curves["upper"], dashed=True),
        log="x",
    )
    return Evidence.of(checks, paper="a chain", measured=f"{violations} violations", figure=figure)


@claim("p0-asm3.4", "regular interfaces, and how to see that they are not")
def regular_interfaces(run: ClaimRun) -> Evidence:
    """Near every wall the gradient of the score difference is bounded below; mass near zero
    together with tiny gradients shows that it is not.

    Setting: an assumption, not a theorem: what decides it is measured, on a router that meets it
        and on a smooth one that does not
    Tested: A curved regular wall and S = x³: P(|S| <= w)/w as w falls, and the smallest gradient
        among the inputs with |S| <= w.
    Overturned by: a proof that smooth routers cannot have a vanishing gradient on a wall
    Condition: the gradient does not vanish on the wall; the diagnosis is its smallest value among
        near-ties, and the growth of P(|S| <= w)/w
    """
    router, n = GraphRouter(), run.size(200_000, 2_000_000)
    x = run.normal(n, 3, stream=1)
    gap, steep = router(x), router.gradient(x).norm(dim=1)
    first = x[:, 0]
    cubic, flat = first**3, 3 * first.square()
    widths = [0.3, 0.1, 0.03, 0.01]
    good = [(gap.abs() <= w).double().mean().item() / w for w in widths]
    bad = [(cubic.abs() <= w).double().mean().item() / w for w in widths]
    near_wall = gap.abs() <= widths[-1]
    least, least_bad = steep[near_wall].min().item(), flat[cubic.abs() <= widths[-1]].min().item()
    return Evidence.of(
        at_least("smallest gradient near x³ = 0", least_bad, 0.1),
        qualified(
            at_least("smallest gradient near the regular wall", least, 1.0),
            near("exponent of P/w, regular", exponent(widths, good), 0, 0.05),
        ),
        corrected(near("exponent of P/w, S = x³", exponent(widths, bad), -2 / 3, 0.05)),
        paper="an assumption",
        measured=f"gradients >= {least:.3f} against {least_bad:.2g}",
        figure=chart(
            "w",
            "P(|S| ≤ w) / w",
            dots("regular wall", widths, good),
            dots("S = x³", widths, bad),
            log="xy",
        ),
        note="S = x³ is smooth and breaks the assumption: its mass grows like w^(1/3).",
    )


@claim("p0-eq3.8", "level-set profile")
def level_set_profile(run: ClaimRun) -> Evidence:
    """F(t), the integral of p/‖∇S‖ over the level set S = t, is finite and continuous at 0, and is
    the density of S there.

    Setting: under Assumption 3.4: a sphere and a curved wall under a Gaussian
    Tested: A sphere under a Gaussian (F is a χ² density), and a curved wall: quadrature of F over t
        against P(|S| <= w).
    Overturned by: a level-set integral that is not the density of S
    """
    radius = 1.3
    area = 4 * math.pi * radius**2 * math.exp(-(radius**2) / 2) / (2 * math.pi) ** 1.5
    sphere = area / (2 * radius)
    router, width = GraphRouter(), 0.5
    nodes, weights = (torch.from_numpy(a) for a in leggauss(24))
    inside = width * sum(
        w * router.profile(width * t) for t, w in zip(nodes.tolist(), weights.tolist(), strict=True)
    )
    step = [abs(router.profile(t) - router.profile(0.0)) for t in (1e-2, 1e-4)]
    levels = [i / 10 for i in range(-20, 21)]
    checks = [
        near(
            "sphere: surface integral and χ² density",
            sphere,
            radius * math.exp(-(radius**2) / 2) / (2**1.5 * special.gamma(1.5)),
            1e-12,
        ),
        near("∫F over [-w, w] and P(|S| <= w)", float(inside), router.mass(width), 1e-9),
        at_most("|F(t) - F(0)| at t = 1e-4", step[1], 1e-4 * max(step[0], 1e-3)),
    ]
    figure = chart("t", "F(t)", line("curved wall", levels, [router.profile(t) for t in levels]))
    return Evidence.of(checks, paper=router.mass(width), measured=float(inside), figure=figure)


@claim("p0-prop3.5", "coarea expansion for two experts")
def coarea_expansion(run: ClaimRun) -> Evidence:
    """BM_ε(τ) = C_ε τ + o(τ) with C_ε = 2κ_ε times the surface integral of p/‖∇S‖.

    Setting: two experts, under Assumption 3.4, a curved wall; an equality to first order
    Tested: A curved wall: C_ε from points sampled on the surface, BM from counts of the softmax,
        both against quadrature; the error falls like τ³.
    Overturned by: a constant that the surface integral does not give, or a remainder of order τ
    """
    router = GraphRouter()
    y = run.normal(run.size(100_000, 1_000_000), 2, stream=1)
    surface = mean_estimate(router.on_surface(y, 0.0)).times(2 * KAPPA)
    lines = surface_integral(router, 3, lines=run.size(4_000, 40_000), seed=run.seed)
    exact, taus = 2 * KAPPA * router.profile(0.0), [0.2, 0.1, 0.05, 0.025]
    masses = [router.mass(KAPPA * tau) for tau in taus]
    remainders = [mass - exact * tau for mass, tau in zip(masses, taus, strict=True)]
    gap = router(run.normal(run.size(400_000, 4_000_000), 3, stream=2))
    counted = ambiguity_mass(torch.stack([gap, torch.zeros_like(gap)], dim=1), 0.1, 0.05)
    checks = [
        sampled("C_ε from the surface", surface, exact),
        sampled("F(0) by lines through the surface", lines, router.profile(0.0)),
        within("BM at τ = 0.05 by counting", float(counted), counted.stderr.item(), masses[2]),
        near("order of the remainder", exponent(taus, remainders), 3, 0.2),
        at_most("relative remainder at τ = 0.025", abs(remainders[-1] / masses[-1]), 0.01),
    ]
    figure = chart(
        "τ",
        "BM(τ) / τ",
        line("C_ε", taus, [exact] * 4, dashed=True),
        dots("quadrature", taus, [m / t for m, t in zip(masses, taus, strict=True)]),
        log="x",
    )
    return Evidence.of(checks, paper=exact, measured=surface.value, figure=figure)


@claim("p0-lem3.6", "tube formula of one wall")
def wall_tube_formula(run: ClaimRun) -> Evidence:
    """P(|S| <= w) = 2w F(0) + o(w) for any regular wall.

    Setting: one pair under Assumption 3.4, a curved wall; an equality to first order
    Tested: Quadrature on a curved wall: the remainder over w³ tends to F''(0)/3.
    Overturned by: a remainder that is not o(w)
    """
    router, h = GraphRouter(), 0.02
    zero = router.profile(0.0)
    bend = (router.profile(h) - 2 * zero + router.profile(-h)) / h**2
    widths = [0.4, 0.2, 0.1, 0.05]
    remainders = [router.mass(w) - 2 * w * zero for w in widths]
    return Evidence.of(
        near("order of the remainder", exponent(widths, remainders), 3, 0.1),
        near("remainder / w³ at w = 0.05", remainders[-1] / widths[-1] ** 3, bend / 3, 2e-3),
        near("P / 2w at w = 0.05 over F(0)", router.mass(0.05) / 0.1 / zero, 1, 1e-3),
        paper=zero,
        corrected=f"2wF(0) + w³F''(0)/3, F'' = {bend:.5f}",
        measured=router.mass(0.05) / 0.1,
    )


@claim("p0-eq3.9", "union bound for many experts")
def boundary_mass_union_bound(run: ClaimRun) -> Evidence:
    """BM_pair(κ_ε τ) <= C̃ τ + o(τ), C̃ the sum of the pairs' constants.

    Setting: any number of experts, an upper bound; affine routers under a Gaussian, E = 4 and 12
    Tested: Affine routers of 4 and 12 experts under a Gaussian: counts against the exact sum.
    Overturned by: a mass above the sum of the pairs' constants by more than o(τ)
    """
    checks, ratios = [], []
    for experts in (4, 12):
        weight, bias = drawn_router(run, experts, 5)
        scores = gaussian_affine_scores(run, run.size(200_000, 2_000_000), weight, bias)
        for tau in (0.1, 0.01):
            bound = 2 * KAPPA * tau * pair_mass(weight, bias, 0.0)[1].sum().item()
            mass = boundary_mass_pair(scores, KAPPA * tau)
            error = mass.stderr.item()
            ratios.append(float(mass) / bound)
            checks.append(
                at_most(f"BM_pair, E = {experts}, τ = {tau}", float(mass), bound, 4 * error)
            )
    checks += corrected(at_least("tightness at E = 4, τ = 0.01", ratios[1], 0.9))
    return Evidence.of(
        checks, paper="at most 1", measured=f"{min(ratios):.3f} to {max(ratios):.3f}"
    )


@claim("p0-prop3.7", "linear margin tail")
def linear_margin_tail(run: ClaimRun) -> Evidence:
    """P(Δ_min <= δ) <= C_margin δ for δ up to some δ_0; C_margin is the sum over pairs of twice the
    largest F near zero.

    Setting: under Assumption 3.4, an upper bound with some constant; 8 experts, δ up to 0.1
    Tested: An affine router of 8 experts: C_margin in closed form, counts over two decades.
    Overturned by: a mass above C_margin δ with C_margin as in the proof
    """
    weight, bias = drawn_router(run, 8, 5)
    scores = gaussian_affine_scores(run, run.size(200_000, 2_000_000), weight, bias)
    widths = [0.001, 0.003, 0.01, 0.03, 0.1]
    grid = torch.linspace(-widths[-1], widths[-1], 201, dtype=torch.float64)
    normals, shift = pair_walls(weight, bias)
    spread = normals.norm(dim=1)
    highest = normal_density((grid[:, None] - shift) / spread).div(spread).amax(dim=0)
    constant = 2 * highest.sum().item()
    masses = boundary_mass_pair(scores, torch.tensor(widths, dtype=torch.float64))
    excess = (masses.value - 4 * masses.stderr - constant * torch.tensor(widths)).max().item()
    ratio = (masses.value / (constant * torch.tensor(widths))).tolist()
    return Evidence.of(
        at_most("largest excess over C_margin δ", excess, 0),
        corrected(at_least("tightness at δ = 0.003", ratio[1], 0.9)),
        paper=constant,
        measured=masses.value[0].item() / widths[0],
        figure=chart(
            "δ",
            "P(Δ_min ≤ δ) / δ",
            line("C_margin", widths, [constant] * 5, dashed=True),
            dots("counted", widths, [r * constant for r in ratio]),
            log="x",
        ),
    )


@claim("p0-ex3.8", "linear router under a Gaussian", number="Example 3.8")
def gaussian_linear_router(run: ClaimRun) -> Evidence:
    """P(|S| <= r) = Φ((r-b)/σ) - Φ((-r-b)/σ) = 2r φ(b/σ)/σ + o(r), and the surface integral of
    p/‖v‖ is φ(b/σ)/σ.

    Setting: the example's own setting: a linear router, N(0, Σ) with a drawn Σ in R⁴
    Tested: Counts in four dimensions with a drawn covariance, the surface integral over the
        hyperplane by quadrature, and the next term of the expansion.
    Overturned by: a count outside four standard errors of (3.11)
    """
    factor = run.normal(4, 4, stream=1)
    covariance = factor @ factor.T + 0.5 * torch.eye(4, dtype=torch.float64)
    normal, offset, radius = run.normal(4, stream=2), 0.7, 0.2
    router = two_cells(normal=normal, offset=offset, slopes=torch.zeros(2, 4))
    mass = gaussian_boundary_mass(router, radius, covariance)
    root = torch.linalg.cholesky(covariance)
    draws = run.normal(run.size(400_000, 4_000_000), 4, stream=3) @ root.T
    inside = ((draws @ normal + offset).abs() <= radius).double().mean().item()
    error = math.sqrt(inside * (1 - inside) / len(draws))
    square = (normal @ covariance @ normal).item()
    next_term = 1 + radius**2 * (offset**2 / square**2 - 1 / square) / 6
    small = gaussian_boundary_mass(router, 0.02, covariance)
    return Evidence.of(
        within("P(|S| <= r) by counting", inside, error, mass.exact),
        near("hyperplane integral in the plane", *_hyperplane_integral(2.0, 0.7), 1e-10),
        corrected(
            near("next order over first", mass.next_order / mass.first_order, next_term, 1e-12),
            at_most(
                "relative error of the next order at r = 0.02",
                abs(small.next_order / small.exact - 1),
                1e-7,
            ),
        ),
        at_most(
            "relative error of the first order at r = 0.02",
            abs(small.first_order / small.exact - 1),
            1e-3,
        ),
        paper=mass.first_order,
        corrected=mass.next_order,
        measured=inside,
        note=f"exact by Φ: {mass.exact:.9f}",
    )


def _hyperplane_integral(scale: float, offset: float) -> tuple[float, float]:
    """Integral of p/‖v‖ over {v·x + b = 0} in the plane, ‖v‖ = scale, and its value φ(b/σ)/σ."""
    y = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    foot = -offset / scale
    along = (
        normal_density(y) * normal_density(torch.tensor(foot, dtype=torch.float64))
    ).sum().item() * 0.005
    target = normal_density(torch.tensor(offset / scale, dtype=torch.float64)).item() / scale
    return along / scale, target


@claim("p0-lem5.7", "linear scaling of the ambiguity mass")
def ambiguity_mass_scaling(run: ClaimRun) -> Evidence:
    """BM(τ; ε) <= C_ε τ for small τ, by the pairs' slabs of width κ_{ε,E} τ.

    Setting: a fixed router under Assumption 3.4, an upper bound for small τ; 6 experts
    Tested: An affine router of 6 experts: counts against the sum over pairs, τ over two decades.
    Overturned by: a mass above the pairs' slabs, or an exponent other than 1
    """
    weight, bias = drawn_router(run, 6, 4)
    scores = gaussian_affine_scores(run, run.size(200_000, 2_000_000), weight, bias)
    taus, width = [0.3, 0.1, 0.03, 0.01], KAPPA + math.log(5)
    mass = [ambiguity_mass(scores, 0.1, tau) for tau in taus]
    bound = [pair_mass(weight, bias, width * tau)[0].sum().item() for tau in taus]
    excess = max(float(m) - b for m, b in zip(mass, bound, strict=True))
    power = exponent(taus[1:], [float(m) for m in mass[1:]])
    return Evidence.of(
        at_most("largest excess over the bound", excess, 0),
        near("exponent of BM in τ", power, 1, 0.08),
        paper=bound[-1] / taus[-1],
        measured=float(mass[-1]) / taus[-1],
        figure=chart(
            "τ",
            "BM(τ; ε) / τ",
            line(
                "sum over pairs",
                taus,
                [b / t for b, t in zip(bound, taus, strict=True)],
                dashed=True,
            ),
            dots("counted", taus, [float(m) / t for m, t in zip(mass, taus, strict=True)]),
            log="x",
        ),
    )
