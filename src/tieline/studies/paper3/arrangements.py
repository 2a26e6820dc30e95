"""Section 4.2, dense layers: general position, its failures, Zaslavsky's bound and the zonotope."""

import itertools
import math

import numpy as np
from scipy.spatial import ConvexHull

from tieline.studies.checks import at_least, at_most, near, none_of
from tieline.studies.claim import Evidence, Run
from tieline.studies.figure import chart, dots, line
from tieline.studies.fits import exponent
from tieline.studies.paper3.problems import dense, dense_regions, drawn
from tieline.studies.registry import claim
from tieline.tropical import DegenerateError, regions, zaslavsky, zonotope_counts

THREE = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
"""Normals of three lines of the plane, no two parallel."""


def lines(normals: np.ndarray, offsets: list[float]) -> int:
    """Regions of lines of the plane by linear programming, in any position."""
    return len(regions(*dense(normals, np.array(offsets)), 1))


def refused(normals: np.ndarray, offsets: list[float]) -> float:
    """1 if the exact count says that the lines are degenerate, 0 if it counts."""
    try:
        dense_regions(normals, np.array(offsets))
    except DegenerateError:
        return 1.0
    return 0.0


def position_failures(V: np.ndarray, c: np.ndarray) -> int:
    """Sets of hyperplanes that break general position (Def. 4.8, conditions i to iii)."""
    n, d = V.shape
    wrong = 0
    for size in range(2, d + 1):
        for some in itertools.combinations(range(n), size):
            wrong += int(np.linalg.matrix_rank(V[list(some)])) < size
    rows = np.column_stack([V, c])
    for some in itertools.combinations(range(n), d + 1):
        wrong += int(np.linalg.matrix_rank(rows[list(some)])) < d + 1
    return wrong


@claim(
    "p3-def4.8",
    "Def. 4.8",
    "general position",
    statement="No two hyperplanes are parallel, j <= d of them meet in dimension d - j, d + 1 of "
    "them nowhere; drawn weights have this with probability one.",
    tested="Ranks of all subsets of drawn neurons; the same for the walls z_i = z_j of a router.",
)
def general_position(run: Run) -> Evidence:
    """Subsets of drawn hyperplanes that break a condition."""
    r, wrong = drawn(run, 1), 0
    for _ in range(run.size(20, 200)):
        wrong += position_failures(r.standard_normal((7, 3)), r.standard_normal(7))
    W, b = r.standard_normal((4, 3)), r.standard_normal(4)
    pairs = list(itertools.combinations(range(4), 2))
    walls = np.array([W[i] - W[j] for i, j in pairs]), np.array([b[i] - b[j] for i, j in pairs])
    return Evidence(
        [
            none_of("sets of drawn neurons that break it", wrong),
            near("broken sets of the walls of 4 experts in R³", position_failures(*walls), 4 + 15,
                 0, part="corrected"),
        ],
        paper="with probability one",
        corrected="never for the walls of three experts",
        measured=f"{wrong} sets of neurons, {position_failures(*walls)} of walls",
        note="z_1 = z_2 and z_2 = z_3 give z_1 = z_3: the walls of a router are never in general "
        "position, as Thm 4.17 asks. Generic scores are enough for all that is counted here.",
    )  # fmt: skip


@claim(
    "p3-ex4.9",
    "Ex. 4.9",
    "three lines of the plane",
    statement="7 regions in general position, 6 if two are parallel, 6 if all meet in a point.",
    tested="Listings by linear programming; the exact count agrees or refuses with a reason.",
)
def three_lines(_run: Run) -> Evidence:
    """Regions of the three arrangements."""
    parallel = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    found = (
        lines(THREE, [0.0, 0.0, -1.0]),
        lines(parallel, [0.0, -1.0, 0.0]),
        lines(THREE, [0.0] * 3),
    )
    return Evidence(
        [
            near("general position", found[0], 7, 0),
            near("two parallel", found[1], 6, 0),
            near("one common point", found[2], 6, 0),
            near(
                "exact count in general position",
                dense_regions(THREE, np.array([0, 0, -1.0])),
                7,
                0,
            ),
            near("exact count of cones", dense_regions(THREE, np.zeros(3)), 6, 0),
            near("exact count refuses parallels", refused(parallel, [0.0, -1.0, 0.0]), 1, 0),
        ],
        paper="7, 6, 6",
        measured=", ".join(str(n) for n in found),
    )


@claim(
    "p3-prop4.10",
    "Prop. 4.10",
    "bound for dense layers",
    statement="A dense layer has at most Φ(H, d) = Θ(H^d) regions, with equality exactly in "
    "general position; the leading term is H^d/d!.",
    tested="Exact counts of drawn layers; listings of layers with a parallel pair, a common point, "
    "a repeated neuron; the exponent in H.",
)
def dense_bound(run: Run) -> Evidence:
    """Counts against Φ in and out of general position."""
    r, wrong = drawn(run, 1), 0
    widths = [4, 8, 16, 32]
    counts = [dense_regions(r.standard_normal((h, 3)), r.standard_normal(h)) for h in widths]
    wrong = sum(n != zaslavsky(h, 3) for n, h in zip(counts, widths, strict=True))
    below = []
    for spoil in ("parallel", "point", "twice"):
        V, c = r.standard_normal((6, 2)), r.standard_normal(6)
        V[1] = V[0] if spoil in ("parallel", "twice") else V[1]
        c = np.zeros(6) if spoil == "point" else c
        c[1] = c[0] if spoil == "twice" else c[1]
        below.append(len(regions(*dense(V, c), 1)))
    large = [2**n for n in range(10, 14)]
    return Evidence(
        [
            none_of("counts in general position other than Φ", wrong),
            at_most("most regions out of it", max(below), zaslavsky(6, 2) - 1),
            near("exponent of Φ(H, 3)", exponent(large, [zaslavsky(h, 3) for h in large]), 3, 0.01),
            near("Φ(H, 3) 3!/H³", 6 * zaslavsky(large[-1], 3) / large[-1] ** 3, 1, 1e-3),
        ],
        paper=zaslavsky(6, 2),
        measured=f"{zaslavsky(6, 2)} in general position; {below} parallel, meeting, repeated",
        figure=chart(
            "H",
            "regions, d = 3",
            [dots("counted", widths, counts), line("Φ", widths, [zaslavsky(h, 3) for h in widths])],
            x_scale="log",
            y_scale="log",
        ),
    )


@claim(
    "p3-rem4.11",
    "Rem. 4.11",
    "vertices of the zonotope",
    statement="Regions of a dense layer and vertices of its Newton zonotope in R^{d+1} are not in "
    "bijection but of the same order Θ(H^d).",
    tested="Vertices by the identity 2 regions - cones against the convex hull of all 2^H sums; "
    "their ratio as H grows.",
)
def zonotope(run: Run) -> Evidence:
    """Vertices of the hull against the counts."""
    V, c = drawn(run, 1).standard_normal((8, 2)), drawn(run, 2).standard_normal(8)
    counts = zonotope_counts(V, c)
    signs = np.array(list(itertools.product((0.0, 1.0), repeat=8)))
    hull = len(ConvexHull(signs @ np.column_stack([V, c])).vertices)
    closed = 2 * sum(math.comb(7, j) for j in range(3))
    wide = zonotope_counts(*(drawn(run, 3).standard_normal(s) for s in ((96, 2), 96)))
    return Evidence(
        [
            near("vertices of the hull of 2^8 sums", hull, counts.vertices, 0),
            near("2 Σ C(H-1, j)", counts.vertices, closed, 0),
            near("upper vertices are the regions", counts.upper, zaslavsky(8, 2), 0),
            at_least("not in bijection", counts.vertices - counts.upper, 1),
            near("vertices per region at H = 96", wide.vertices / wide.upper, 2, 0.05),
        ],
        paper="Θ(H^d)",
        corrected="vertices = 2 regions - regions without biases",
        measured=f"{hull} vertices, {counts.upper} regions; "
        f"ratio {wide.vertices / wide.upper:.3f} at H = 96",
    )


@claim(
    "p3-cor4.12",
    "Cor. 4.12",
    "the dense bound is reached",
    statement="Some weights give Φ(H, d) regions.",
    tested="Drawn layers and neurons on the moment curve, counted exactly.",
)
def dense_tight(run: Run) -> Evidence:
    """Layers with fewer regions than Φ."""
    r, wrong = drawn(run, 1), 0
    for h, d in ((10, 2), (9, 3), (8, 4), (7, 5)):
        wrong += dense_regions(r.standard_normal((h, d)), r.standard_normal(h)) != zaslavsky(h, d)
    t = np.linspace(-1, 1, 10)
    moment = dense_regions(np.column_stack([t, t**2]), t**3 - 0.3)
    return Evidence(
        [
            none_of("drawn layers below Φ", wrong),
            near("neurons on the moment curve", moment, zaslavsky(10, 2), 0),
        ],
        paper=zaslavsky(10, 2),
        measured=moment,
    )
