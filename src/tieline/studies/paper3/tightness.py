"""Section 4.2: whether the bound for top-k is reached, Table 1 and Example 4.21."""

import math

from tieline.studies.checks import at_least, at_most, near
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.figure import chart, line
from tieline.studies.fits import exponent
from tieline.studies.paper3.problems import layer
from tieline.studies.registry import claim
from tieline.tropical import (
    capacity_bound,
    count_regions,
    expected_regions,
    paper_capacities,
    sharp_bound,
)

MANY = [64, 256, 1024, 4096]
"""Numbers of experts at which shares are followed."""


@claim(
    "p3-thm4.19",
    "Thm 4.19",
    "lower bound for top-k",
    statement="Some weights give Ω(C(N, k) H^d) regions; by (6) every one of C(N, k) cells holds "
    "Φ(kH, d) of them.",
    tested="B*, which no weights exceed, over C(N, k) H^d as N grows; B* against the sum of (6).",
    expected=Verdict.FAILS,
)
def lower_bound(_run: Run) -> Evidence:
    """The largest constant that the lower bound could have."""
    share = [sharp_bound(n, 4, 8, 2) / (math.comb(n, 4) * 8**2) for n in MANY]
    summed, best = capacity_bound(16, 4, 5, 5), sharp_bound(16, 4, 5, 5)
    widths = [256, 1024, 4096]
    means = [expected_regions(6, 2, h, 2) for h in widths]
    return Evidence(
        [
            at_least("B* / (C(N, 4) H²) at N = 4096, H = 8", share[-1], 0.01),
            at_least("B* against the sum of (6), N = 16, k = 4, H = 5, d = 5", best, summed),
            near("exponent of the share in N", exponent(MANY, share), -1, 0.25, part="corrected"),
            near("exponent of expected pieces in H, N fixed", exponent(widths, means), 2, 0.05,
                 part="corrected"),
        ],
        paper="a constant",
        corrected="0 as N grows, k > d + 1",
        measured=f"{share[0]:.3g} at N = 64, {share[-1]:.2g} at 4096",
        figure=chart("N", "B* / (C(N, 4) H²), H = 8, d = 2", [line("upper bound", MANY, share)],
                     x_scale="log", y_scale="log"),
        note="A corner of d neurons is one point and lies in one cell, so it cannot be counted in "
        "C(N, k) of them; and the cells themselves number at most Φ(N, d+1). With N fixed the "
        "order H^d is right.",
    )  # fmt: skip


@claim(
    "p3-rem4.20",
    "Rem. 4.20",
    "tightness",
    statement="The capacity of top-k layers is Θ(C(N, k) (kH)^d).",
    tested="B* over C(N, k) Φ(kH, d) for growing N, and for growing H at fixed N.",
    expected=Verdict.FAILS,
)
def tight_order(_run: Run) -> Evidence:
    """The largest share of the bound that any weights have."""
    experts = [sharp_bound(n, 4, 5, 5) / capacity_bound(n, 4, 5, 5) for n in MANY]
    many = [sharp_bound(n, 8, 5, 5) / capacity_bound(n, 8, 5, 5) for n in MANY]
    wide = [sharp_bound(16, 4, 2**p, 2) / capacity_bound(16, 4, 2**p, 2) for p in (4, 8, 12)]
    limit = 16**2 / (math.comb(16, 4) * 4**2)
    return Evidence(
        [
            at_least("largest share, k = 8, d = 5, N = 4096", many[-1], 0.01),
            at_least("largest share, N = 16, k = 4, d = 2, H = 4096", wide[-1], 0.5),
            near("the same against N^d / (C(N, k) k^d)", wide[-1], limit, 0.1 * limit,
                 part="corrected"),
            at_most("share falls with N, k = 8", many[-1] / many[0], 0.1, part="corrected"),
        ],
        paper="Θ",
        corrected=f"at most {limit:.4f} of the bound for wide experts, N = 16, k = 4, d = 2",
        measured=wide[-1],
        figure=chart("N", "B* / bound, H = 5, d = 5", [
            line("k = 4", MANY, experts), line("k = 8", MANY, many),
        ], x_scale="log", y_scale="log"),
    )  # fmt: skip


@claim(
    "p3-table1",
    "Table 1",
    "capacities and costs",
    statement="Active and total parameters, and the exact capacity (tight bound) Φ(H, d), N Φ(H, "
    "d), C(N, k) Φ(kH, d), C(N, k) Φ(H, d).",
    tested="The formulas against sums written out; the bounds against B*.",
    expected=Verdict.CONDITION,
    condition="read as upper bounds: for top-k they are not reached",
)
def table(_run: Run) -> Evidence:
    """Differences from the formulas, and whether the top-k column is reached."""
    n, k, h, d = 16, 4, 5, 5
    found = paper_capacities(n, k, h, d)
    active = sum(math.comb(20, j) for j in range(6))
    best = sharp_bound(n, k, h, d)
    return Evidence(
        [
            at_least("B* against the top-k column", best, found.top_k),
            near("dense", found.dense, active, 0, part="condition"),
            near("top-1", found.top_1, n * active, 0, part="condition"),
            near("top-k", found.top_k, math.comb(n, k) * active, 0, part="condition"),
            near("normalised", found.normalised, math.comb(n, k) * 2**5, 0, part="condition"),
            near("B* for dense", sharp_bound(1, 1, 20, d), found.dense, 0, part="condition"),
            near("B* for top-1", sharp_bound(n, 1, 20, d), found.top_1, 0, part="condition"),
        ],
        paper=found.top_k,
        corrected=best,
        measured=f"{best / found.top_k:.3f} of the top-k column at most",
    )


@claim(
    "p3-ex4.21",
    "Ex. 4.21",
    "equal active compute",
    statement="With 20 active neurons in R⁵ a dense layer has 21,700 regions, top-1 of 16 has "
    "347,200, top-4 of 16 has 39,494,000: 1820 times the dense layer.",
    tested="The arithmetic; exact counts of the dense layer and of top-4 (the whole example in "
    "full mode, experts of width 2 in fast mode); B* and the expectation.",
    expected=Verdict.CONDITION,
    condition="as upper bounds",
    seconds=6,
)
def equal_compute(run: Run) -> Evidence:
    """Bounds, B*, expectation and counts."""
    found, best = paper_capacities(16, 4, 5, 5), sharp_bound(16, 4, 5, 5)
    mean = expected_regions(16, 4, 5, 5)
    dense_count = int(count_regions(*layer(0, 1, 20, 5), 1))
    width = 2 if run.fast else 5
    exact = int(count_regions(*layer(0, 16, width, 5), 4))
    expected = expected_regions(16, 4, width, 5)
    checks = [
        at_least("expected pieces of top-4", mean, found.top_k),
        at_least("B* against 39,494,000", best, found.top_k),
        near("dense", found.dense, 21_700, 0, part="condition"),
        near("top-1", found.top_1, 347_200, 0, part="condition"),
        near("top-4", found.top_k, 39_494_000, 0, part="condition"),
        at_most("pieces against the bound", exact, found.top_k, part="condition"),
        near("dense layer, counted", dense_count, 21_700, 0, part="condition"),
        near("B*", best, 21_640_016, 0, part="corrected"),
        near("expected pieces", mean, 154_641, 0.5, part="corrected"),
        near("expected top-4 per dense", mean / found.dense, 7.1, 0.05, part="corrected"),
        near(f"exact count, seed 0, H = {width}, over its expectation", exact / expected, 1, 0.15,
             part="corrected"),
    ]  # fmt: skip
    if not run.fast:
        checks.append(near("exact count, seed 0", exact, 161_208, 0, part="corrected"))
    return Evidence(
        checks,
        paper=found.top_k,
        corrected=f"B* {best}, expected {mean:.0f}",
        measured=f"{exact} exactly at H = {width} (expected {expected:.0f})",
        note="Top-1 of 16 expects "
        f"{expected_regions(16, 1, 20, 5):.0f} pieces, 2.2 times the dense layer; top-4 7.1 times.",
    )
