"""Sections 4.2 and 5.1: whether the bound for top-k is reached, and the gain of splitting."""

import itertools
import math

import numpy as np

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
from tieline.lab.claims.routing_problems import drawn_layer, numpy_generator, numpy_router
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
from tieline.lab.tropical.affine import chosen

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
    wide = [sharp_bound(16, 4, 2**p, 2) / capacity_bound(16, 4, 2**p, 2) for p in (4, 8, 12)]
    limit = 16**2 / (math.comb(16, 4) * 4**2)
    return Evidence.of(
        at_least("largest share, k = 8, d = 5, N = 4096", many[-1], 0.01),
        at_least("largest share, N = 16, k = 4, d = 2, H = 4096", wide[-1], 0.5),
        corrected(
            near("the same against N^d / (C(N, k) k^d)", wide[-1], limit, 0.1 * limit),
            at_most("share falls with N, k = 8", many[-1] / many[0], 0.1),
        ),
        paper="Θ",
        corrected=f"at most {limit:.4f} of the bound for wide experts, N = 16, k = 4, d = 2",
        measured=wide[-1],
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


@claim("p3-ex4.21", "equal active compute", seconds=6)
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
        mask = chosen((W @ np.linalg.solve(W, target))[None], 3)[0]
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


def printed_splitting_law(n: int, k: int, m: int, d_eff: int) -> float:
    """(Ne/k)^{(m-1)k} m^{-d_eff - 1/2}, as printed."""
    return (n * math.e / k) ** ((m - 1) * k) * m ** (-d_eff - 0.5)


@claim("p3-thm5.1", "gain of splitting", expected=Verdict.FAILS)
def splitting_gain(_run: ClaimRun) -> Evidence:
    """Splitting every expert in m multiplies the bound by (Ne/k)^{(m-1)k} m^{-d_eff-1/2} (1 + o(1))
    as N grows, k and m fixed.

    Setting: the formula for N → ∞ with k and m fixed, in exact integers
    Tested: The ratio of C(N, k) H^d_eff after and before in integers, N up to 10⁸, over the law;
        the ratio of Thm 4.26's own bound, which has (kH)^d_eff; the ratio of expected pieces.
    Overturned by: k → ∞ as well, for which Stirling's constant tends to 1
    """
    k, m, d = 2, 2, 3
    sizes = [10**p for p in range(2, 9)]
    over = [
        math.comb(m * n, m * k) / math.comb(n, k) / m**d / printed_splitting_law(n, k, m, d)
        for n in sizes
    ]
    constant = (
        math.factorial(k)
        / math.factorial(m * k)
        * m ** (m * k + 0.5)
        * (k / math.e) ** ((m - 1) * k)
    )
    kept = capacity_bound(32, 4, 8, d) / math.comb(32, 4)
    split = capacity_bound(64, 8, 4, d) / math.comb(64, 8)
    gain = expected_regions(64, 8, 4, d) / expected_regions(32, 4, 8, d)
    printed = printed_splitting_law(32, 4, 2, d)
    return Evidence.of(
        near("ratio over the law at N = 10⁸, k = m = 2", over[-1], 1, 1e-3),
        corrected(
            near("the same against its limit", over[-1], constant, 1e-6),
            near("width factor of Thm 4.26 after and before", split / kept, 1, 0),
            near("law for k = 200, over the exact ratio", _limit_for_large_k(200, m), 1, 2e-3),
            at_most("gain of expected pieces, 32 experts", gain, 3),
        ),
        paper=printed,
        corrected=gain,
        measured=f"limit {constant:.4f} of the law at k = m = 2; expected pieces ×{gain:.2f}",
        figure=chart(
            "N",
            "exact ratio / law, k = m = 2",
            line("exact", sizes, over),
            line("the paper", sizes, [1.0] * len(sizes), dashed=True),
            log="x",
        ),
        note="Stirling is used at fixed k, where it is off by a constant; and H^d_eff should be "
        "(kH)^d_eff, which splitting leaves alone, so that there is no width penalty. Of the law's "
        f"{printed:.3g} for 32 experts, k = 4, split in two, the expected pieces show {gain:.2f}.",
    )


def _limit_for_large_k(k: int, m: int) -> float:
    """Limit of the exact ratio over the law as N grows, for large k."""
    log = math.lgamma(k + 1) - math.lgamma(m * k + 1) + (m * k + 0.5) * math.log(m)
    return math.exp(log + (m - 1) * k * (math.log(k) - 1))


@claim("p3-cor5.3", "granularity limit", expected=Verdict.FAILS)
def granularity_limit(run: ClaimRun) -> Evidence:
    """Splitting must stop at m_max = ⌊H/d_eff⌋: with fewer neurons per expert than dimensions the
    leading term can no longer be reached.

    Setting: H/m < d_eff, full active set and top-k layers in R³
    Tested: Layers that run all their experts, with 8 neurons in R³ as 1 × 8, 2 × 4, 4 × 2 and 8 ×
        1; top-k layers on both sides of the limit against their expectation.
    Overturned by: the condition kH >= d_eff, which splitting keeps
    """
    splits = [1, 2, 4, 8]
    counts = [
        int(count_regions(*drawn_layer(numpy_generator(run, m), m, 8 // m, 3), m)) for m in splits
    ]
    routed = [expected_regions(4 * m, m, 8 // m, 3) for m in splits]
    drops = sum(b < a for a, b in itertools.pairwise(routed))
    beyond = np.array(
        [
            int(count_regions(*drawn_layer(numpy_generator(run, 60 + s), 16, 2, 3), 4))
            for s in range(run.size(30, 300))
        ]
    )
    return Evidence.of(
        at_most("pieces at m = 4 and 8, past m_max = 2", max(counts[2:]), zaslavsky(8, 3) - 1),
        corrected(
            near("pieces at m = 8", counts[3], zaslavsky(8, 3), 0),
            near("pieces at m = 1", counts[0], zaslavsky(8, 3), 0),
            near("splits that lower the expected pieces of top-k", drops, 0, 0),
            near(
                "mean pieces at m = 4, over the expectation",
                float(beyond.mean()) / routed[2],
                1,
                0.1,
            ),
        ),
        paper="m <= 2",
        corrected="kH >= d_eff, which splitting keeps",
        measured=f"{counts} pieces at m = {splits}; expected top-k {[round(x) for x in routed]}",
        note="A cell is cut by the coalition's kH hyperplanes together, not by one expert's.",
    )
