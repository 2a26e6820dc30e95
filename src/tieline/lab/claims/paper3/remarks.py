"""Examples and remarks of paper 3 that need a number of their own."""

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
from tieline.lab.claims.routing_problems import crofton_pieces, dense_regions, numpy_generator
from tieline.lab.power_law import exponent
from tieline.lab.tropical import paper_effective_bound, zaslavsky


@claim("p3-ex4.3", "top-1 cells as a Voronoi diagram")
def top_one_voronoi_cells(run: ClaimRun) -> Evidence:
    """The walls z_i = z_j are perpendicular bisectors of the expert centroids: top-1 cells are a
    Voronoi diagram.

    Setting: affine scores with centroids w_i, as the example has it
    Tested: Share of inputs whose best expert is not the nearest w_i, for drawn biases and for
        b_i = -‖w_i‖²/2, 10 experts in the plane.
    Overturned by: the words 'power diagram', or the bias of the condition
    Condition: b_i = -‖w_i‖²/2 up to a common constant; otherwise a power diagram
    """
    r = numpy_generator(run, 61)
    weight, x = r.standard_normal((10, 2)), 2 * r.standard_normal((20_000, 2))
    any_bias = not_nearest(weight, 0.5 * r.standard_normal(10), x)
    voronoi = not_nearest(weight, -(weight**2).sum(axis=1) / 2, x)
    return Evidence.of(
        at_most("share not nearest, drawn biases", any_bias, 0),
        qualified(at_most("share not nearest, b = -‖w‖²/2", voronoi, 0)),
        corrected(at_least("share not nearest, drawn biases", any_bias, 0.1)),
        paper=0,
        measured=f"{100 * any_bias:.0f} % for drawn biases, {100 * voronoi:.0f} % under it",
    )


def not_nearest(weight: np.ndarray, bias: np.ndarray, x: np.ndarray) -> float:
    """Share of inputs whose best expert is not the one with the nearest weight vector."""
    best = (x @ weight.T + bias).argmax(axis=1)
    nearest = ((x[:, None] - weight) ** 2).sum(axis=-1).argmin(axis=1)
    return float((best != nearest).mean())


@claim("p3-rem4.4", "pairwise boundaries of a top-1 router")
def pairwise_walls(run: ClaimRun) -> Evidence:
    """N experts define N(N-1)/2 potential pairwise boundaries.

    Setting: potential ones, an upper bound; 12 experts in the plane and in R¹¹
    Tested: Pairs that meet along a wall, by linear programmes, in the plane and in R¹¹.
    Overturned by: more walls than pairs
    """
    r, n = numpy_generator(run, 62), 12
    counts = [existing_walls(r.standard_normal((n, d)), r.standard_normal(n)) for d in (2, n - 1)]
    return Evidence.of(
        at_most("walls in the plane", counts[0], n * (n - 1) // 2),
        near("walls in R^(N-1)", counts[1], n * (n - 1) // 2, 0),
        corrected(at_most("walls in the plane: at most 3N - 6", counts[0], 3 * n - 6)),
        paper=n * (n - 1) // 2,
        measured=f"{counts[0]} in the plane, {counts[1]} in R^{n - 1}",
    )


def existing_walls(weight: np.ndarray, bias: np.ndarray) -> int:
    """Pairs of experts that tie for the best score somewhere, strictly above all others."""
    count, n = 0, len(weight)
    for i, j in itertools.combinations(range(n), 2):
        others = [m for m in range(n) if m not in (i, j)]
        # z_i = z_j, z_i - z_m >= t, maximise t <= 1
        rows = np.hstack([weight[others] - weight[i], np.ones((n - 2, 1))])
        limits = bias[i] - bias[others]
        tie = np.append(weight[i] - weight[j], 0.0)[None]
        goal = np.append(np.zeros(weight.shape[1]), -1.0)
        spans = [(-1e6, 1e6)] * weight.shape[1] + [(None, 1.0)]
        found = linprog(goal, rows, limits, tie, [bias[j] - bias[i]], spans)
        count += bool(found.status == 0 and -found.fun > 1e-9)
    return count


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


@claim("p3-rem4.23", "what breaks transversality costs regions")
def without_transversality(run: ClaimRun) -> Evidence:
    """Any violation of transversality strictly lowers the number of regions.

    Setting: arrangements of lines in the plane: against the largest number, as the remark means it
    Tested: Three lines through one point, two parallel ones, two equal ones, each among six drawn
        lines: regions against Φ(6, 2) and against the same lines moved by 1e-3.
    Overturned by: a degenerate arrangement with Φ(6, 2) regions
    """
    degenerate, moved = degenerate_counts(run)
    most = zaslavsky(6, 2)
    return Evidence.of(
        at_most("most regions of a degenerate arrangement", max(degenerate.values()), most - 1),
        near("least after moving the lines", min(moved), most, 0),
        paper=f"< {most}",
        measured=", ".join(f"{name} {count}" for name, count in degenerate.items()),
    )


def degenerate_counts(run: ClaimRun) -> tuple[dict[str, int], list[int]]:
    """Regions of three degenerate arrangements of six lines, and after a small move."""
    r = numpy_generator(run, 64)
    V, c = r.standard_normal((6, 2)), r.standard_normal(6)
    point = np.array([0.3, -0.2])
    through, parallel, equal = (V.copy(), c.copy()), (V.copy(), c.copy()), (V.copy(), c.copy())
    through[1][:3] = -V[:3] @ point
    parallel[0][1] = parallel[0][0]
    equal[0][1], equal[1][1] = equal[0][0], equal[1][0]
    cases = {"through one point": through, "parallel": parallel, "equal": equal}
    counts = {name: sampled_regions(r, *case) for name, case in cases.items()}
    moved = [
        dense_regions(v + 1e-3 * r.standard_normal((6, 2)), o + 1e-3 * r.standard_normal(6))
        for v, o in cases.values()
    ]
    return counts, moved


def sampled_regions(r: np.random.Generator, V: np.ndarray, c: np.ndarray) -> int:
    """Regions of lines by their signs at random points of three scales; exact for few lines."""
    x = np.concatenate([s * r.standard_normal((60_000, 2)) for s in (0.5, 3.0, 100.0)])
    return len(np.unique(x @ V.T + c > 0, axis=0))


@claim("p3-rem4.28", "Θ of the effective capacity", expected=Verdict.FAILS)
def effective_theta(_run: ClaimRun) -> Evidence:
    """The expected pieces on a manifold are Θ(Vol(π(M))/Vol(S^{d-1}) C(N, k) (kH)^d_eff).

    Setting: isotropic routers, a curve in R⁸, length as its volume, k = 4, H = 8; a constant that
        depends on the manifold alone
    Tested: The exact expectation over the formula, N = 8 to 512.
    Overturned by: a constant that may depend on N, or d_eff = d - 1
    """
    experts = [8, 32, 128, 512]
    ratios = [theta_ratio(n) for n in experts]
    return Evidence.of(
        at_least("ratio at N = 512 over that at N = 8", ratios[-1] / ratios[0], 0.1),
        corrected(at_most("exponent of the ratio in N", exponent(experts, ratios), -2)),
        paper="a constant",
        corrected="1 + (L/π)(kH + ρ), which grows no faster than N",
        measured=", ".join(f"{ratio:.2g}" for ratio in ratios),
        figure=chart(
            "N", "expected pieces over the formula", line("k = 4", experts, ratios), log="xy"
        ),
    )


def theta_ratio(n_experts: int) -> float:
    """Expected pieces along a quarter circle over the paper's formula."""
    length = math.pi / 2
    return crofton_pieces(n_experts, 4, 8, length) / paper_effective_bound(
        n_experts, 4, 8, 1, 8, length
    )


@claim("p3-rem5.2", "the width penalty under the manifold hypothesis")
def width_penalty(_run: ClaimRun) -> Evidence:
    """With d_eff of 10 to 20 in place of d_in, combinatorial depth dominates the penalty m^-d_eff.

    Setting: the paper's own law, gain C(mN, mk)/C(N, k) · m^-d_eff, m = 2; that the penalty does
        not exist is `p3-thm5.1`
    Tested: The product for N = 16, k = 2 and for N = 64, k = 6 (DeepSeek's), d_eff = 10 and 20.
    Overturned by: a product above 1 for N = 16, k = 2
    Condition: log C(mN, mk) - log C(N, k) > d_eff log m: many chosen experts, as 6 of 64
    """
    small = [split_gain(16, 2, d) for d in (10, 20)]
    large = [split_gain(64, 6, d) for d in (10, 20)]
    return Evidence.of(
        at_least("16 experts, top 2: least product", min(small), 1),
        qualified(at_least("64 experts, top 6: least product", min(large), 1)),
        paper="> 1",
        measured=f"16, 2: {small[0]:.2g}, {small[1]:.2g}; 64, 6: {large[0]:.2g}, {large[1]:.2g}",
    )


def split_gain(n_experts: int, k: int, dim: int) -> float:
    """C(2N, 2k)/C(N, k) · 2^-d."""
    return math.comb(2 * n_experts, 2 * k) / math.comb(n_experts, k) * 2.0**-dim


@claim("p3-rem5.4", "experts too narrow for the manifold")
def rank_deficiency(run: ClaimRun) -> Evidence:
    """If H/m < d_eff, the experts' weights do not span the tangent space: rank is lost.

    Setting: drawn weights, d_eff = 6, H = 8 split by m = 2, k = 2; one expert, as printed, and the
        coalition that is active
    Tested: Rank on the tangent space of one split expert and of the k m active ones.
    Overturned by: a rank counted over the coalition, as Thm 4.26 does
    Condition: of a single expert; the active coalition has rank min(kH, d_eff), which splitting
        keeps
    """
    alone, together = tangent_ranks(run, tangent=6, width=8, parts=2, k=2)
    return Evidence.of(
        at_most("rank of the active coalition", together, 5),
        qualified(near("rank of one split expert", alone, 4, 0)),
        corrected(near("rank of the active coalition", together, 6, 0)),
        paper="deficient",
        measured=f"{alone} of one expert, {together} of the coalition, d_eff = 6",
    )


def tangent_ranks(run: ClaimRun, tangent: int, width: int, parts: int, k: int) -> tuple[int, int]:
    """Rank on a tangent space of one expert of width H/m, and of the k m that are active."""
    r = numpy_generator(run, 65)
    basis = np.linalg.qr(r.standard_normal((32, tangent)))[0]
    experts = r.standard_normal((k * parts, width // parts, 32)) @ basis
    ranks = (experts[0], experts.reshape(-1, tangent))
    return tuple(int(np.linalg.matrix_rank(rows)) for rows in ranks)  # type: ignore[return-value]


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
    """Number of the k(N-k) inequalities of the cell at the origin that no others imply."""
    r = numpy_generator(run, 66)
    weight, bias = r.standard_normal((n_experts, dim)), r.standard_normal(n_experts)
    chosen = np.argsort(-bias)[:k]
    pairs = [(u, v) for u in chosen for v in range(n_experts) if v not in chosen]
    rows = np.array([weight[v] - weight[u] for u, v in pairs])  # rows x <= limits
    limits = np.array([bias[u] - bias[v] for u, v in pairs])
    needed = 0
    for i in range(len(pairs)):
        others = [j for j in range(len(pairs)) if j != i]
        found = linprog(-rows[i], rows[others], limits[others], bounds=[(-1e4, 1e4)] * dim)
        needed += bool(found.status == 0 and -found.fun > limits[i] + 1e-7)
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
    spread, mean, error, planar = chamber_shares(run)
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


def chamber_shares(run: ClaimRun) -> tuple[float, float, float, int]:
    """Largest over least share of one router, mean share of one order with error, planar orders."""
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
