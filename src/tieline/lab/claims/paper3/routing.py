"""Section 4.1: the cells of a router, their shape and their number."""

import math

import numpy as np

from tieline.lab.claims.checks import at_least, corrected, near, none_of, qualified, within
from tieline.lab.claims.claim import ClaimRun, Evidence, chart, dots, line
from tieline.lab.claims.problems import drawn, numpy_router
from tieline.lab.claims.registry import claim
from tieline.lab.tropical import cells, count_cells, expected_cells, symmetric_polynomial, zaslavsky
from tieline.lab.tropical.affine import chosen


@claim("p3-prop4.2", "top-1 cells")
def top_one(run: ClaimRun) -> Evidence:
    """The boundaries of a top-1 router are the hypersurface of max z_i, those of a power diagram,
    and part R^d into N convex cells.

    Setting: every affine top-1 router, as printed: N cells; N = 16 on the plane and N = 5 in R⁴
    Tested: Cells of drawn routers with N - 1 >= d and with d >= N - 1; power distances against
        scores.
    Overturned by: the words 'at most N', or rank [W 1] = N among the hypotheses
    Condition: rank [W 1] = N; in fewer dimensions a drawn router leaves experts without a cell
    """
    W, b = numpy_router(run, 1, 16, 2)
    planar = [
        int(count_cells(*numpy_router(run, 100 + s, 16, 2), 1)) for s in range(run.size(60, 600))
    ]
    full = [int(count_cells(*numpy_router(run, 900 + s, 5, 4), 1)) for s in range(20)]
    x = 3 * drawn(run, 2).standard_normal((500, 2))
    power = ((x[:, None] - W) ** 2).sum(axis=2) - (W**2).sum(axis=1) - 2 * b
    wrong = int((power.argmin(axis=1) != (x @ W.T + b).argmax(axis=1)).sum())
    mean, error = float(np.mean(planar)), float(np.std(planar)) / math.sqrt(len(planar))
    exact = expected_cells(16, 1, 2)
    checks = [
        near("fewest cells of 16 experts on the plane", min(planar), 16, 0),
        *qualified(
            near("fewest cells of 5 experts in R⁴", min(full), 5, 0),
            none_of("inputs nearer in power to another expert", wrong),
        ),
        *corrected(within("mean on the plane", mean, error, exact)),
    ]
    return Evidence.of(checks, paper="N = 16", corrected=exact, measured=mean)


@claim("p3-thm4.5", "an order-k diagram", seconds=1)
def order_k(run: ClaimRun) -> Evidence:
    """The cells of a top-k router are convex, part where the k-th symmetric polynomial is creased,
    and neighbours differ by one swap, as on the hypersimplex.

    Setting: a drawn router, N = 8, k = 3 on the plane; shape of cells, not their number
    Tested: Essential terms of the polynomial against listed cells; convexity on pairs of inputs
        with one coalition; the neighbours of each cell.
    Overturned by: a cell that is not convex, or neighbours more than a swap apart
    """
    W, b = numpy_router(run, 1, 8, 2)
    listed = cells(W, b, 3)
    terms = len(symmetric_polynomial(W, b, 3).essential().coefficients)
    swaps = 0
    for cell, out, new, other in listed.facets:
        expected = set(listed.coalitions[cell]) - {out} | {new}
        swaps += expected != set(listed.coalitions[other])
    x = 2 * drawn(run, 2).standard_normal((run.size(3_000, 30_000), 2))
    y = x + 0.7 * drawn(run, 3).standard_normal(x.shape)
    first, other, middle = (chosen(p @ W.T + b, 3) for p in (x, y, (x + y) / 2))
    same = (first == other).all(axis=1)
    broken = int((middle != first).any(axis=1)[same].sum())
    return Evidence.of(
        near("essential terms and cells", terms, len(listed), 0),
        near("listed and counted cells", len(listed), int(count_cells(W, b, 3)), 0),
        none_of("neighbours that differ by more than a swap", swaps),
        none_of("midpoints that leave a cell", broken),
        at_least("pairs in one cell", int(same.sum()), 100),
        paper="an order-k diagram",
        measured=f"{len(listed)} cells of {math.comb(8, 3)} coalitions",
    )


@claim("p3-thm4.5-cells", "number of cells", number="Thm 4.5, App. D", seconds=2)
def number_of_cells(run: ClaimRun) -> Evidence:
    """The router has exactly C(N, k) cells, the vertices of the hypersimplex.

    Setting: every affine router, as the text and App. D use it: C(N, k) cells; N = 8, d = 1 to 7
    Tested: Exact counts for N = 8, all k, d = 1 ... 7; sums over k against Φ(N, d+1); means over
        drawn routers against the closed form.
    Overturned by: rank [W 1] = N among the hypotheses
    Condition: rank [W 1] = N, generic for d >= N - 1
    """
    counts = {
        d: [int(count_cells(*numpy_router(run, d, 8, d), k)) for k in range(9)] for d in range(1, 8)
    }
    missing = {d: 256 - sum(by_k) for d, by_k in counts.items()}
    sums = sum(sum(by_k) != zaslavsky(8, d + 1) for d, by_k in counts.items())
    routers = [numpy_router(run, 50 + s, 16, 2) for s in range(run.size(100, 1_000))]
    cells_drawn = np.array([int(count_cells(*router, 4)) for router in routers])
    mean, error = float(cells_drawn.mean()), float(cells_drawn.std()) / math.sqrt(len(routers))
    dims, exact = list(counts), expected_cells(16, 4, 2)
    return Evidence.of(
        none_of("coalitions of 8 experts without a cell, d = 2", missing[2]),
        qualified(none_of("the same, d = 7", missing[7])),
        corrected(
            none_of("sums over k other than Φ(8, d+1)", sums),
            within("mean, N = 16, k = 4, d = 2", mean, error, exact),
            near("expectation, d = 2", exact, 47.74, 0.01),
            near("expectation, d = 8", expected_cells(16, 4, 8), 1654.76, 0.01),
        ),
        paper=1820,
        corrected=exact,
        measured=mean,
        figure=chart(
            "d",
            "cells of N = 8, k = 4",
            dots("counted", dims, [counts[d][4] for d in dims]),
            line("expected", dims, [expected_cells(8, 4, d) for d in dims]),
            line("C(N, k)", dims, [70.0] * 7, dashed=True),
        ),
        note="Measured: mean cells of drawn routers with N = 16, k = 4 on the plane.",
    )


def bent_supports(W: np.ndarray, b: np.ndarray) -> int:
    """Experts of a top-2 router in R^{N-1} with two inputs in their support, the midpoint outside.

    One of two rivals leads the expert by 3 at either input, and both by 1 halfway between.
    """
    bent = 0
    for expert in range(len(b)):
        others = np.delete(np.arange(len(b)), expert)
        leads = np.full((2, len(others)), -9.0)
        leads[:, :2] = [[3.0, -1.0], [-1.0, 3.0]]
        x = np.linalg.solve(W[others] - W[expert], (leads - b[others] + b[expert]).T).T
        mask = chosen(np.vstack([x, x.mean(axis=0)]) @ W.T + b, 2)[:, expert]
        bent += mask.tolist() == [True, True, False]
    return bent


@claim("p3-thm4.5-supports", "supports of single experts")
def supports(run: ClaimRun) -> Evidence:
    """The region that a single expert serves is not convex, 1 < k < N.

    Setting: every expert of every router with 1 < k < N, as printed
    Tested: Pairs of inputs in an expert's support with their midpoint outside, for each expert of a
        router in R^{N-1}; the scores x, -x, -10 on a line, whose first support is a half-line.
    Overturned by: 'may be non-convex' in place of 'is', or rank [W 1] = N
    Condition: rank [W 1] = N
    """
    bent = bent_supports(*numpy_router(run, 2, 5, 4))
    ramp = np.linspace(-40, 40, 4_001)[:, None]
    mask = chosen(ramp @ np.array([[1.0, -1.0, 0.0]]) + np.array([0.0, 0.0, -10.0]), 2)
    ends = [int(np.abs(np.diff(mask[:, e].astype(int))).sum()) for e in range(3)]
    return Evidence.of(
        at_least("fewest ends of a support on the line", min(ends), 2),
        qualified(near("bent supports of 5 experts in R⁴", bent, 5, 0)),
        corrected(near("ends of the first expert's half-line", ends[0], 1, 0)),
        paper="never convex",
        corrected="convex half-lines for two of three experts",
        measured=f"{bent} of 5 bent in R⁴; ends {ends} on a line",
    )


@claim("p3-ex4.6", "top-2 of three experts")
def three_experts(run: ClaimRun) -> Evidence:
    """Three cells, each the meeting of two half-spaces; an expert serves two adjacent cells whose
    union is not convex.

    Setting: the example: three experts, k = 2, generic planar routers
    Tested: Cells of drawn planar routers, with and without bias; walls of each; midpoints.
    Overturned by: another number
    """
    counts, walls, bent = set(), set(), set()
    for stream in range(10, 20):
        W, b = numpy_router(run, stream, 3, 2)
        listed = cells(W, b, 2)
        counts |= {len(listed), int(count_cells(W, np.zeros(3), 2))}
        walls |= {len(listed.neighbours(cell)) for cell in range(len(listed))}
        bent.add(bent_supports(W, b))
    return Evidence.of(
        near("fewest cells", min(counts), 3, 0),
        near("most cells", max(counts), 3, 0),
        near("fewest walls", min(walls), 2, 0),
        near("most walls", max(walls), 2, 0),
        near("experts with a bent support, fewest", min(bent), 3, 0),
        paper="3 cells of 2 walls",
        measured=f"{sorted(counts)} cells of {sorted(walls)} walls",
    )


@claim("p3-rem4.7", "softmax keeps the cells")
def softmax_keeps(run: ClaimRun) -> Evidence:
    """Softmax is increasing, so that the boundaries of the router are the same with it.

    Setting: exact arithmetic; float64 on the draws
    Tested: Coalitions of the logits and of their softmax in float64; logits 40 apart in float32.
    Overturned by: a coalition that softmax changes
    """
    scores = drawn(run, 1).standard_normal((run.size(20_000, 200_000), 16))
    soft = np.exp(scores - scores.max(axis=1, keepdims=True))
    soft /= soft.sum(axis=1, keepdims=True)
    wrong = int((chosen(scores, 4) != chosen(soft, 4)).any(axis=1).sum())
    far = np.array([[0.0, -120.0, -110.0]], dtype=np.float32)
    ties = float(np.exp(far)[0, 1] == np.exp(far)[0, 2])
    checks = [
        none_of("inputs with another coalition", wrong),
        *corrected(near("logits 110 down tie after softmax in float32", ties, 1, 0)),
    ]
    return Evidence.of(checks, paper="the same", measured=wrong)
