"""Section 5.1: what splitting experts gains."""

import itertools
import math

import numpy as np

from tieline.studies.checks import at_most, near
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.figure import chart, line
from tieline.studies.paper3.problems import drawn, layer
from tieline.studies.registry import claim
from tieline.tropical import capacity_bound, count_regions, expected_regions, zaslavsky


def law(n: int, k: int, m: int, d_eff: int) -> float:
    """(Ne/k)^{(m-1)k} m^{-d_eff - 1/2}, as printed."""
    return (n * math.e / k) ** ((m - 1) * k) * m ** (-d_eff - 0.5)


@claim(
    "p3-thm5.1",
    "Thm 5.1",
    "gain of splitting",
    statement="Splitting every expert in m multiplies the bound by (Ne/k)^{(m-1)k} m^{-d_eff-1/2} "
    "(1 + o(1)) as N grows, k and m fixed.",
    tested="The ratio of C(N, k) H^d_eff after and before in integers, N up to 10⁸, over the law; "
    "the ratio of Thm 4.26's own bound, which has (kH)^d_eff; the ratio of expected pieces.",
    expected=Verdict.FAILS,
)
def splitting(_run: Run) -> Evidence:
    """Exact ratio over the law, and what is left of it."""
    k, m, d = 2, 2, 3
    sizes = [10**p for p in range(2, 9)]
    over = [math.comb(m * n, m * k) / math.comb(n, k) / m**d / law(n, k, m, d) for n in sizes]
    constant = (
        math.factorial(k)
        / math.factorial(m * k)
        * m ** (m * k + 0.5)
        * (k / math.e) ** ((m - 1) * k)
    )
    kept = capacity_bound(32, 4, 8, d) / math.comb(32, 4)
    split = capacity_bound(64, 8, 4, d) / math.comb(64, 8)
    gain = expected_regions(64, 8, 4, d) / expected_regions(32, 4, 8, d)
    printed = law(32, 4, 2, d)
    return Evidence(
        [
            near("ratio over the law at N = 10⁸, k = m = 2", over[-1], 1, 1e-3),
            near("the same against its limit", over[-1], constant, 1e-6, part="corrected"),
            near("width factor of Thm 4.26 after and before", split / kept, 1, 0, part="corrected"),
            near("law for k = 200, over the exact ratio", _large_k(200, m), 1, 2e-3,
                 part="corrected"),
            at_most("gain of expected pieces, 32 experts", gain, 3, part="corrected"),
        ],
        paper=printed,
        corrected=gain,
        measured=f"limit {constant:.4f} of the law at k = m = 2; expected pieces ×{gain:.2f}",
        figure=chart("N", "exact ratio / law, k = m = 2", [
            line("exact", sizes, over), line("the paper", sizes, [1.0] * len(sizes), dashed=True),
        ], x_scale="log"),
        note="Stirling is used at fixed k, where it is off by a constant; and H^d_eff should be "
        "(kH)^d_eff, which splitting leaves alone, so that there is no width penalty. Of the law's "
        f"{printed:.3g} for 32 experts, k = 4, split in two, the expected pieces show {gain:.2f}.",
    )  # fmt: skip


def _large_k(k: int, m: int) -> float:
    """Limit of the exact ratio over the law as N grows, for large k."""
    log = math.lgamma(k + 1) - math.lgamma(m * k + 1) + (m * k + 0.5) * math.log(m)
    return math.exp(log + (m - 1) * k * (math.log(k) - 1))


@claim(
    "p3-cor5.3",
    "Cor. 5.3",
    "granularity limit",
    statement="Splitting must stop at m_max = ⌊H/d_eff⌋: with fewer neurons per expert than "
    "dimensions the leading term can no longer be reached.",
    tested="Layers that run all their experts, with 8 neurons in R³ as 1 × 8, 2 × 4, 4 × 2 and 8 × "
    "1; top-k layers on both sides of the limit against their expectation.",
    expected=Verdict.FAILS,
)
def granularity_limit(run: Run) -> Evidence:
    """Pieces as experts are split past the limit."""
    splits = [1, 2, 4, 8]
    found = [int(count_regions(*layer(drawn(run, m), m, 8 // m, 3), m)) for m in splits]
    routed = [expected_regions(4 * m, m, 8 // m, 3) for m in splits]
    drops = sum(b < a for a, b in itertools.pairwise(routed))
    beyond = np.array(
        [
            int(count_regions(*layer(drawn(run, 60 + s), 16, 2, 3), 4))
            for s in range(run.size(30, 300))
        ]
    )
    return Evidence(
        [
            at_most("pieces at m = 4 and 8, past m_max = 2", max(found[2:]), zaslavsky(8, 3) - 1),
            near("pieces at m = 8", found[3], zaslavsky(8, 3), 0, part="corrected"),
            near("pieces at m = 1", found[0], zaslavsky(8, 3), 0, part="corrected"),
            near("splits that lower the expected pieces of top-k", drops, 0, 0, part="corrected"),
            near("mean pieces at m = 4, over the expectation", float(beyond.mean()) / routed[2], 1,
                 0.1, part="corrected"),
        ],
        paper="m <= 2",
        corrected="kH >= d_eff, which splitting keeps",
        measured=f"{found} pieces at m = {splits}; expected top-k {[round(x) for x in routed]}",
        note="A cell is cut by the coalition's kH hyperplanes together, not by one expert's.",
    )  # fmt: skip
