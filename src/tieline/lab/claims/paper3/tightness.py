"""Section 4.2: whether the bound for top-k is reached; coalitions, their cells and chambers."""

import itertools
import math

import numpy as np
from scipy.optimize import linprog

from tieline.lab.claims.claim import ClaimRun, Verdict, claim
from tieline.lab.claims.evidence import (
    Evidence,
    at_least,
    at_most,
    chart,
    corrected,
    line,
    near,
    qualified,
)
from tieline.lab.claims.routing_problems import (
    dense_regions,
    drawn_layer,
    numpy_generator,
    numpy_router,
)
from tieline.lab.power_law import exponent
from tieline.lab.tropical import (
    attainability,
    capacity_bound,
    count_cells,
    count_regions,
    expected_regions,
    paper_capacities,
    sharp_bound,
    zaslavsky,
)
from tieline.lab.tropical.affine import chosen_experts

MANY = [64, 256, 1024, 4096]
"""Numbers of experts at which shares are computed."""


@claim("p3-thm4.19", "lower bound for top-k", expected=Verdict.FAILS)
def top_k_lower_bound(_run: ClaimRun) -> Evidence:
    """Some weights give Ω(C(N, k) H^d) regions; by (6) every one of C(N, k) cells holds Φ(kH, d) of
    them.

    Setting: existence with one constant for all N, as Ω says; d and k fixed, N growing. With N
        fixed and H growing the order H^d is right
    Tested: B*, which no weights exceed, over C(N, k) H^d as N grows; B* against the sum of (6).
    Overturned by: weights with more than B*, or k <= (d+1)/2 among the hypotheses
    """
    share = [sharp_bound(n, 4, 8, 2) / (math.comb(n, 4) * 8**2) for n in MANY]
    summed, best = capacity_bound(16, 4, 5, 5), sharp_bound(16, 4, 5, 5)
    widths = [256, 1024, 4096]
    means = [expected_regions(6, 2, h, 2) for h in widths]
    return Evidence.of(
        at_least("B* / (C(N, 4) H²) at N = 4096, H = 8", share[-1], 0.01),
        at_least("B* against the sum of (6), N = 16, k = 4, H = 5, d = 5", best, summed),
        corrected(
            near("exponent of the share in N", exponent(MANY, share), -1, 0.25),
            near("exponent of expected pieces in H, N fixed", exponent(widths, means), 2, 0.05),
        ),
        paper="a constant",
        corrected="0 as N grows, for every k > (d+1)/2 (`p5-levels`)",
        measured=f"{share[0]:.3g} at N = 64, {share[-1]:.2g} at 4096",
        figure=chart(
            "N", "B* / (C(N, 4) H²), H = 8, d = 2", line("upper bound", MANY, share), log="xy"
        ),
        note="A corner of d neurons is one point and lies in one cell, so it cannot be counted in "
        "C(N, k) of them; and the cells themselves number at most Φ(N, d+1). With N fixed the "
        "order H^d is right.",
    )


@claim("p3-rem4.20", "tightness", expected=Verdict.FAILS)
def tight_order(_run: ClaimRun) -> Evidence:
    """The capacity of top-k layers is Θ(C(N, k) (kH)^d).

    Setting: Θ in N and H, as printed
    Tested: B* over C(N, k) Φ(kH, d) for growing N, and for growing H at fixed N.
    Overturned by: an upper bound only
    """
    experts = [sharp_bound(n, 4, 5, 5) / capacity_bound(n, 4, 5, 5) for n in MANY]
    many = [sharp_bound(n, 8, 5, 5) / capacity_bound(n, 8, 5, 5) for n in MANY]
    wide_ratios = [sharp_bound(16, 4, 2**p, 2) / capacity_bound(16, 4, 2**p, 2) for p in (4, 8, 12)]
    limit = 16**2 / (math.comb(16, 4) * 4**2)
    return Evidence.of(
        at_least("largest share, k = 8, d = 5, N = 4096", many[-1], 0.01),
        at_least("largest share, N = 16, k = 4, d = 2, H = 4096", wide_ratios[-1], 0.5),
        corrected(
            near("the same against N^d / (C(N, k) k^d)", wide_ratios[-1], limit, 0.1 * limit),
            at_most("share falls with N, k = 8", many[-1] / many[0], 0.1),
        ),
        paper="Θ",
        corrected=f"at most {limit:.4f} of the bound for wide experts, N = 16, k = 4, d = 2",
        measured=wide_ratios[-1],
        figure=chart(
            "N",
            "B* / bound, H = 5, d = 5",
            line("k = 4", MANY, experts),
            line("k = 8", MANY, many),
            log="xy",
        ),
    )


@claim("p3-table1", "capacities and costs")
def table_one_capacities(_run: ClaimRun) -> Evidence:
    """Active and total parameters, and the exact capacity (tight bound) Φ(H, d), N Φ(H, d), C(N, k)
    Φ(kH, d), C(N, k) Φ(H, d).

    Setting: the row 'Exact capacity (tight bound)', N = 16, k = 4, H = 5, d = 5
    Tested: The formulas against sums written out; the bounds against B*.
    Overturned by: the words 'upper bound'
    Condition: read as upper bounds: for top-k they are not reached
    """
    n, k, h, d = 16, 4, 5, 5
    capacities = paper_capacities(n, k, h, d)
    active = sum(math.comb(20, j) for j in range(6))
    best = sharp_bound(n, k, h, d)
    return Evidence.of(
        at_least("B* against the top-k column", best, capacities.top_k),
        qualified(
            near("dense", capacities.dense, active, 0),
            near("top-1", capacities.top_1, n * active, 0),
            near("top-k", capacities.top_k, math.comb(n, k) * active, 0),
            near("normalised", capacities.normalised, math.comb(n, k) * 2**5, 0),
            near("B* for dense", sharp_bound(1, 1, 20, d), capacities.dense, 0),
            near("B* for top-1", sharp_bound(n, 1, 20, d), capacities.top_1, 0),
        ),
        paper=capacities.top_k,
        corrected=best,
        measured=f"{best / capacities.top_k:.3f} of the top-k column at most",
    )


@claim("p3-rem4.13", "dense capacity is polynomial in the width")
def polynomial_width(run: ClaimRun) -> Evidence:
    """Φ(H, d) grows like H^d: no super-polynomial growth of a dense layer with its width.

    Setting: one dense layer of drawn neurons, the bound and the count
    Tested: Exponent of Φ(H, d) in H for d = 2, 5; regions counted in the plane against Φ.
    Overturned by: an exponent above d
    """
    widths = [64, 256, 1024]
    powers = {d: exponent(widths, [zaslavsky(h, d) for h in widths]) for d in (2, 5)}
    r = numpy_generator(run, 63)
    counted = dense_regions(r.standard_normal((20, 2)), r.standard_normal(20))
    return Evidence.of(
        *(near(f"exponent, d = {d}", power, d, 0.05) for d, power in powers.items()),
        near("regions of 20 neurons in the plane", counted, zaslavsky(20, 2), 0),
        paper="d",
        measured=f"{powers[2]:.3f}, {powers[5]:.3f}; {counted} regions",
    )


@claim("p3-ex4.21", "equal active compute", seconds=6, full_seconds=45)
def equal_compute(run: ClaimRun) -> Evidence:
    """With 20 active neurons in R⁵ a dense layer has 21,700 regions, top-1 of 16 has 347,200, top-4
    of 16 has 39,494,000: 1820 times the dense layer.

    Setting: 'maximal number of linear regions' of the example's three layers
    Tested: The arithmetic; exact counts of the dense layer and of top-4 (the whole example in full
        mode, experts of width 2 in fast mode); B* and the expectation.
    Overturned by: the words 'at most'
    Condition: as upper bounds
    """
    capacities, best = paper_capacities(16, 4, 5, 5), sharp_bound(16, 4, 5, 5)
    mean = expected_regions(16, 4, 5, 5)
    dense_count = int(count_regions(*drawn_layer(0, 1, 20, 5), 1))
    width = 2 if run.fast else 5
    exact = int(count_regions(*drawn_layer(0, 16, width, 5), 4))
    expected = expected_regions(16, 4, width, 5)
    checks = [
        at_least("expected pieces of top-4", mean, capacities.top_k),
        at_least("B* against 39,494,000", best, capacities.top_k),
        *qualified(
            near("dense", capacities.dense, 21_700, 0),
            near("top-1", capacities.top_1, 347_200, 0),
            near("top-4", capacities.top_k, 39_494_000, 0),
            at_most("pieces against the bound", exact, capacities.top_k),
            near("dense layer, counted", dense_count, 21_700, 0),
        ),
        *corrected(
            near("B*", best, 21_640_016, 0),
            near("expected pieces", mean, 154_641, 0.5),
            near("expected top-4 per dense", mean / capacities.dense, 7.1, 0.05),
            near(
                f"exact count, seed 0, H = {width}, over its expectation", exact / expected, 1, 0.15
            ),
        ),
    ]
    if not run.fast:
        checks += corrected(near("exact count, seed 0", exact, 161_208, 0))
    return Evidence.of(
        checks,
        paper=capacities.top_k,
        corrected=f"B* {best}, expected {mean:.0f}",
        measured=f"{exact} exactly at H = {width} (expected {expected:.0f})",
        note="Top-1 of 16 expects "
        f"{expected_regions(16, 1, 20, 5):.0f} pieces, 2.2 times the dense layer; top-4 7.1 times.",
    )


@claim("p3-lem4.18", "every coalition reached", seconds=1)
def coalition_reachability(run: ClaimRun) -> Evidence:
    """Some router chooses every set of k experts on a set of positive measure.

    Setting: existence of a router in the given d_in for every N and k, as printed
    Tested: The construction W x = 1_S where rank W = N; weights on the moment curve; drawn routers
        with 8 experts, k = 4, on the plane, where Radon's theorem forbids it.
    Overturned by: d_in >= N - 1, or 2k - 1 <= d_in, among the hypotheses
    Condition: rank [W 1] = N, or k or N - k at most (d+1)/2; impossible for k >= ⌊(d+3)/2⌋ and N -
        k >= d + 2
    """
    W, reached = numpy_generator(run, 1).standard_normal((6, 6)), 0
    for coalition in itertools.combinations(range(6), 3):
        target = np.isin(np.arange(6), coalition).astype(float)
        mask = chosen_experts((W @ np.linalg.solve(W, target))[None], 3)[0]
        reached += bool((mask == target.astype(bool)).all())
    t = np.linspace(-1, 1, 9)
    curve = np.column_stack([t, t**2, t**3])
    moment = int(count_cells(curve, -(t**4), 2))
    most = max(
        int(count_cells(*numpy_router(run, 20 + s, 8, 2), 4)) for s in range(run.size(200, 4_000))
    )
    checks = [
        at_least("most cells of 8 experts, k = 4, on the plane", most, 70),
        *qualified(
            near("coalitions reached by construction, N = d = 6", reached, 20, 0),
            near("cells on the moment curve, N = 9, k = 2, d = 3", moment, 36, 0),
        ),
        *corrected(
            near("70 cells cannot be had", float(attainability(8, 4, 2) == "by none"), 1, 0),
            at_most("the most that Φ leaves", most, zaslavsky(8, 3) - 8),
        ),
    ]
    return Evidence.of(checks, paper=70, corrected="fewer than 70", measured=most)


@claim("p3-secA-minimal", "the minimal representation of a cell", number="App. A")
def minimal_inequalities(run: ClaimRun) -> Evidence:
    """The k(N-k) inequalities z_u >= z_v, u chosen and v not, are the minimal representation of a
    top-k cell.

    Setting: drawn scores, N = 6, k = 2, in R⁵ and in the plane
    Tested: Inequalities of a cell that cannot be left out, by linear programmes.
    Overturned by: the words 'a representation'
    Condition: rank [W 1] = N; on the plane most of the inequalities can be left out
    """
    full, plane = (needed_inequalities(run, dim) for dim in (5, 2))
    return Evidence.of(
        near("needed in the plane", plane, 8, 0),
        qualified(near("needed in R⁵", full, 8, 0)),
        corrected(at_most("needed in the plane", plane, 7)),
        paper=8,
        measured=f"{full} of 8 in R⁵, {plane} of 8 in the plane",
    )


def needed_inequalities(run: ClaimRun, dim: int, n_experts: int = 6, k: int = 2) -> int:
    """Count the inequalities of the cell at the origin, of k(N-k), that others do not imply."""
    r = numpy_generator(run, 66)
    weight, bias = r.standard_normal((n_experts, dim)), r.standard_normal(n_experts)
    coalition = np.argsort(-bias)[:k]
    pairs = [(u, v) for u in coalition for v in range(n_experts) if v not in coalition]
    rows = np.array([weight[v] - weight[u] for u, v in pairs])  # rows x <= limits
    limits = np.array([bias[u] - bias[v] for u, v in pairs])
    needed = 0
    for i in range(len(pairs)):
        others = [j for j in range(len(pairs)) if j != i]
        programme = linprog(-rows[i], rows[others], limits[others], bounds=[(-1e4, 1e4)] * dim)
        needed += bool(programme.status == 0 and -programme.fun > limits[i] + 1e-7)
    return needed


@claim("p3-secF-chambers", "permutation chambers of equal measure", number="App. F")
def equal_chambers(run: ClaimRun) -> Evidence:
    """For an isotropic router the sphere is cut into N! permutation chambers of equal measure.

    Setting: N = 4; one draw of the router, as printed, in R⁸; and the mean over draws
    Tested: Shares of the 24 orders over the sphere for one router: largest over least; mean share
        of one order over 400 routers; orders that exist in the plane.
    Overturned by: the words 'in expectation'
    Condition: in expectation over the router; one router's chambers differ, and for d < N - 1 most
        of the N! do not exist
    """
    spread, mean, error, planar = permutation_chamber_shares(run)
    return Evidence.of(
        at_most("one router in R⁸: largest share over the least", spread, 1.2),
        qualified(
            at_most(
                "mean share of one order, off by standard errors", abs(mean - 1 / 24) / error, 4
            )
        ),
        corrected(at_most("orders of four experts on a circle", planar, 12)),
        paper="1/24",
        measured=f"ratio {spread:.1f} for one router, mean {mean:.4f} ± {error:.4f}, {planar} on "
        "a circle",
    )


def permutation_chamber_shares(run: ClaimRun) -> tuple[float, float, float, int]:
    """Ratio of shares of one router, mean share of one order with error, planar orders."""
    r = numpy_generator(run, 67)
    x = r.standard_normal((run.size(40_000, 200_000), 8))
    weight = r.standard_normal((4, 8))
    orders = np.unique(np.argsort(x @ weight.T, axis=1), axis=0, return_counts=True)[1]
    routers = r.standard_normal((run.size(400, 2_000), 4, 8))
    points = x[:500]
    scores = np.einsum("rnd,pd->rpn", routers, points)
    shares = (np.diff(scores, axis=-1) > 0).all(axis=-1).mean(axis=1)
    circle = r.standard_normal((20_000, 2)) @ r.standard_normal((2, 4))
    planar = len(np.unique(np.argsort(circle, axis=1), axis=0))
    spread = float(orders.max() / orders.min()) if len(orders) == 24 else math.inf
    return spread, float(shares.mean()), float(shares.std() / math.sqrt(len(shares))), planar
