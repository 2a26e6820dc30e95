"""Section 4.2, mixtures: the bounds for top-1 and top-k, and what exact counts say of them."""

import math

import numpy as np

from tieline.studies.checks import at_least, at_most, near, none_of, within
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.figure import chart, dots, line
from tieline.studies.paper3.problems import Layer, drawn, layer
from tieline.studies.registry import claim
from tieline.tropical import (
    capacity_bound,
    count_regions,
    count_regions_rational,
    expected_regions,
    regions,
    sharp_bound,
    zaslavsky,
)

INSTANCES = {(1, 4, 3, 2, 1): 16, (4, 8, 4, 2, 3): 161, (5, 6, 2, 3, 2): 74, (7, 8, 8, 3, 2): 1233}
"""(seed, N, H, d, k) of fully specified layers, with the number of their pieces."""


def placed(run: Run, experts: int, width: int, size: float = 1e-2) -> Layer:
    """A planar top-1 layer: the lines of each expert cross near its site, in its own cell."""
    angle = 2 * math.pi * np.arange(experts) / experts + 0.1
    sites = np.column_stack([np.cos(angle), np.sin(angle)])
    r = drawn(run, 40)
    direction = (
        r.uniform(0, math.pi)
        + math.pi * (np.arange(width) + r.uniform(0.3, 0.7, (experts, width))) / width
    )
    V = np.stack([np.cos(direction), np.sin(direction)], axis=2)
    c = size * r.uniform(-1, 1, (experts, width)) / width - np.einsum("ehd,ed->eh", V, sites)
    return Layer(sites, np.zeros(experts) + 1e-3 * r.standard_normal(experts), V, c)


def counted(run: Run, shape: tuple[int, int, int, int], n: int) -> np.ndarray:
    """Exact counts of n drawn layers (N, H, d, k)."""
    experts, width, dim, k = shape
    return np.array(
        [int(count_regions(*layer(drawn(run, 300 + s), experts, width, dim), k)) for s in range(n)]
    )


@claim(
    "p3-thm4.14",
    "Thm 4.14",
    "bound for top-1",
    statement="A top-1 layer has at most N Φ(H, d) = Θ(N H^d) regions.",
    tested="Exact counts of drawn layers against the bound; their mean against the closed form; "
    "the expectation per dense layer as H grows.",
    seconds=1,
)
def top_one_bound(run: Run) -> Evidence:
    """Largest share of the bound, and the mean."""
    counts = counted(run, (8, 8, 2, 1), run.size(60, 600))
    error = float(counts.std()) / math.sqrt(len(counts))
    widths = [4, 16, 64, 256, 1024]
    gain = [expected_regions(8, 1, h, 2) / zaslavsky(h, 2) for h in widths]
    return Evidence(
        [
            at_most("most pieces", int(counts.max()), capacity_bound(8, 1, 8, 2)),
            near("bound", capacity_bound(8, 1, 8, 2), 8 * zaslavsky(8, 2), 0),
            within("mean", float(counts.mean()), error, expected_regions(8, 1, 8, 2),
                   part="corrected"),
            near("expected pieces per dense region at H = 1024", gain[-1], 1, 0.02,
                 part="corrected"),
        ],
        paper=capacity_bound(8, 1, 8, 2),
        corrected=expected_regions(8, 1, 8, 2),
        measured=float(counts.mean()),
        figure=chart("H", "pieces / Φ(H, 2), N = 8", [
            line("expected", widths, gain), line("the bound", widths, [8.0] * 5, dashed=True),
        ], x_scale="log"),
        note="The bound stands. For Gaussian weights N C(H, d) P(M = 1) = C(H, d): the factor over "
        "a dense layer of the same width tends to 1, not to N.",
    )  # fmt: skip


@claim(
    "p3-rem4.15",
    "Rem. 4.15",
    "wide experts",
    statement="Inside a cell there are at most Φ(H + walls, d) regions; for H much larger than N "
    "the sum of Φ(H, d) over experts is asymptotically exact.",
    tested="Pieces per cell of drawn layers against both numbers; the share of N Φ(H, d) at H = 4 "
    "... 64, and for lines that cross inside their own expert's cell.",
    expected=Verdict.CONDITION,
    condition="the hyperplanes of each expert cross inside its own cell",
    seconds=2,
)
def wide_experts(run: Run) -> Evidence:
    """Share of the sum that drawn and placed layers have."""
    net = layer(drawn(run, 1), 4, 12, 2)
    listed = regions(*net, 1)
    most = int(np.bincount(listed.coalitions[:, 0]).max())
    widths = [4, 16, 64]
    share = [
        int(count_regions(*layer(drawn(run, 2), 4, h, 2), 1)) / capacity_bound(4, 1, h, 2)
        for h in widths
    ]
    own = placed(run, 4, 32)
    full = int(count_regions(*own, 1)) / capacity_bound(4, 1, 32, 2)
    return Evidence(
        [
            at_most("most pieces in a cell", most, zaslavsky(12, 2)),
            at_least("share of N Φ(H, d) at H = 64", share[-1], 0.9),
            near("share if lines cross at home", full, 1, 1e-12, part="condition"),
            at_most("most pieces in a cell, walls counted", most, zaslavsky(12 + 3, 2),
                    part="condition"),
            near("limit of the share, drawn", expected_regions(4, 1, 4096, 2)
                 / capacity_bound(4, 1, 4096, 2), 0.25, 0.01, part="corrected"),
        ],
        paper=1,
        corrected=0.25,
        measured=share[-1],
        figure=chart("H", "share of N Φ(H, 2), N = 4", [
            dots("drawn", widths, share),
            line("expected", widths, [expected_regions(4, 1, h, 2) / capacity_bound(4, 1, h, 2)
                                      for h in widths]),
            line("the paper", widths, [1.0] * 3, dashed=True),
        ], x_scale="log"),
    )  # fmt: skip


@claim(
    "p3-cor4.16",
    "Cor. 4.16",
    "the top-1 bound is reached",
    statement="Some top-1 layer with wide experts has Ω(N H^d) regions.",
    tested="N sites on a circle, the lines of each expert crossing near its site: counted exactly.",
)
def top_one_tight(run: Run) -> Evidence:
    """Layers of the construction below the bound."""
    shapes = [(4, 6), (8, 8), (12, 5)]
    found = [int(count_regions(*placed(run, n, h), 1)) for n, h in shapes]
    bound = [capacity_bound(n, 1, h, 2) for n, h in shapes]
    return Evidence(
        [
            near(f"pieces of the construction, N = {n}, H = {h}", a, z, 0)
            for (n, h), a, z in zip(shapes, found, bound, strict=True)
        ],
        paper="N Φ(H, d)",
        measured=f"{found} of {bound}",
    )


@claim(
    "p3-thm4.17",
    "Thm 4.17",
    "bound for top-k",
    statement="A top-k layer has at most C(N, k) Φ(kH, d) = Θ(C(N, k) (kH)^d) regions.",
    tested="Exact counts of specified layers by three methods; drawn layers against the bound and "
    "against B*; their mean against the closed form.",
    seconds=2,
)
def top_k_bound(run: Run) -> Evidence:
    """Counts of specified layers, and the largest share of the bound."""
    exact = {s: int(count_regions(*layer(*s[:4]), s[4])) for s in INSTANCES}
    listed = sum(len(regions(*layer(*s[:4]), s[4])) != n for s, n in INSTANCES.items())
    first = (1, 4, 3, 2, 1)
    rational = int(count_regions_rational(*layer(*first[:4]), first[4]))
    counts = counted(run, (8, 4, 2, 3), run.size(60, 600))
    error = float(counts.std()) / math.sqrt(len(counts))
    bound, better = capacity_bound(8, 3, 4, 2), sharp_bound(8, 3, 4, 2)
    worst = max(
        sharp_bound(n, k, h, d) / capacity_bound(n, k, h, d)
        for n in (2, 5, 9, 16) for k in range(1, n + 1) for h in (1, 3, 8) for d in range(1, 7)
    )  # fmt: skip
    return Evidence(
        [
            at_most("most pieces, N = 8, k = 3, H = 4, d = 2", int(counts.max()), bound),
            none_of("specified layers with another count",
                    sum(exact[s] != n for s, n in INSTANCES.items())),
            none_of("listings with another count", listed),
            near("in fractions", rational, INSTANCES[first], 0),
            at_most("most pieces against B*", int(counts.max()), better, part="corrected"),
            at_most("B* over the bound, all shapes", worst, 1, part="corrected"),
            within("mean", float(counts.mean()), error, expected_regions(8, 3, 4, 2),
                   part="corrected"),
        ],
        paper=bound,
        corrected=f"B* = {better}, expected {expected_regions(8, 3, 4, 2):.1f}",
        measured=float(counts.mean()),
        note="The assumption that all walls are in general position can never be met (Def. 4.8); "
        "the bound needs only generic scores.",
    )  # fmt: skip
