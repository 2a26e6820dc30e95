"""Section 3.1: linear regions, Zaslavsky's function, and the example with two layers."""

import math

import numpy as np

from tieline.studies.checks import at_least, at_most, near, none_of
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.paper3.problems import dense, dense_regions, drawn, layer
from tieline.studies.registry import claim
from tieline.tropical import rational_form, regions, zaslavsky
from tieline.tropical.affine import chosen


def bend(points: np.ndarray, margins: np.ndarray, parts: tuple, softmax: bool) -> float:
    """Largest relative second difference of the layer's output inside the pieces."""
    (W, b, V, c, k), out = parts
    step = np.zeros_like(points)
    step[:, 0] = 0.5 * margins

    def output(x: np.ndarray) -> np.ndarray:
        scores = x @ W.T + b
        gates = chosen(scores, k) * (
            np.exp(scores - scores.max(axis=1, keepdims=True)) if softmax else 1.0
        )
        gates /= gates.sum(axis=1, keepdims=True)
        hidden = np.maximum(np.einsum("ehd,pd->peh", V, x) + c, 0)
        return (gates * np.einsum("peh,eh->pe", hidden, out)).sum(axis=1)

    middle = output(points)
    second = output(points + step) + output(points - step) - 2 * middle
    return float(np.abs(second / (1 + np.abs(middle))).max())


@claim(
    "p3-def3.1",
    "Def. 3.1",
    "linear regions",
    statement="A linear region is a maximal connected open set on which the network is affine; the "
    "capacity of an architecture is the largest number of them.",
    tested="Second differences of a top-2 layer inside every piece (coalition × activation "
    "pattern), with softmax and with constant gates; two neurons that add up to a line.",
    expected=Verdict.CONDITION,
    condition="k = 1 or constant gates, and output weights that do not cancel",
)
def linear_regions(run: Run) -> Evidence:
    """Whether the layer is affine on what is counted."""
    net = layer(drawn(run, 1), 6, 3, 2)
    out = drawn(run, 2).standard_normal((6, 3))
    found = regions(*net, 2)
    soft, constant = (
        bend(found.witnesses, found.margins, ((*net, 2), out), softmax) for softmax in (True, False)
    )
    first = regions(*net, 1)
    single = bend(first.witnesses, first.margins, ((*net, 1), out), True)
    line = rational_form(
        [(np.array([[1.0], [-1.0]]), np.zeros(2)), (np.array([[1.0, -1.0]]), np.zeros(1))]
    )
    x = drawn(run, 3).standard_normal((200, 1))
    folded = float(np.abs(line[0].evaluate(x) - x[:, 0]).max())
    pieces = dense_regions(np.array([[1.0], [2.0]]), np.array([0.0, 1.0]))
    return Evidence(
        [
            at_most("second difference inside pieces, softmax gates, k = 2", soft, 1e-9),
            at_most("the same, constant gates", constant, 1e-9, part="condition"),
            at_most("the same, softmax gates, k = 1", single, 1e-9, part="condition"),
            at_least("softmax bends the layer", soft, 1e-4, part="corrected"),
            near("relu(x) - relu(-x) is one line", folded, 0, 1e-12, part="corrected"),
            near("pieces of two neurons on a line", pieces, 3, 0, part="corrected"),
        ],
        paper="affine on each region",
        corrected="pieces: coalition × activation pattern",
        measured=f"bends by {soft:.2g} under softmax, {constant:.1g} without",
        note="Counted are pieces on which the layer is one formula; under softmax gates with k > 1 "
        "that formula is not affine, and pieces may be fewer than maximal regions would say.",
    )


@claim(
    "p3-def3.2",
    "Def. 3.2",
    "Zaslavsky's function",
    statement="n hyperplanes in general position cut R^d into Φ(n, d) = Σ_{j<=d} C(n, j) regions, "
    "about n^d/d! for n much larger than d.",
    tested="Exact counts and listings of drawn arrangements, d = 1 ... 4; the ratio at n = 3000.",
)
def zaslavsky_function(run: Run) -> Evidence:
    """Counts that differ from the formula."""
    r, wrong, listed = drawn(run, 1), 0, 0
    shapes = [(5, 1), (3, 2), (9, 2), (12, 2), (4, 3), (8, 3), (3, 4), (7, 4)]
    for n, d in shapes:
        V, c = r.standard_normal((n, d)), r.standard_normal(n)
        wrong += dense_regions(V, c) != zaslavsky(n, d)
        listed += len(regions(*dense(V, c), 1)) != zaslavsky(n, d)
    ratio = zaslavsky(3000, 3) * math.factorial(3) / 3000**3
    return Evidence(
        [
            none_of("counts other than Φ", wrong),
            none_of("listings other than Φ", listed),
            near("Φ(3000, 3) 3!/3000³", ratio, 1, 2e-3),
        ],
        paper="Φ(n, d)",
        measured=f"{len(shapes)} arrangements, {wrong} differ",
    )


def two_layers(first: tuple, second: tuple) -> int:
    """Regions of a network with two hidden layers on the plane, counted pattern by pattern."""
    (A, a), (B, b) = first, second
    total = 0
    found = regions(*dense(A, a), 1)
    for active in found.patterns[:, 0]:
        V, c = (B * active) @ A, B @ (active * a) + b
        cuts = np.linalg.norm(V, axis=1) > 0
        if not cuts.any():
            total += 1
            continue
        both = regions(*dense(np.vstack([A, V[cuts]]), np.append(a, c[cuts])), 1)
        total += int((both.patterns[:, 0, : len(a)] == active).all(axis=1).sum())
    return total


@claim(
    "p3-ex3.3",
    "Ex. 3.3",
    "two layers of three neurons",
    statement="On the plane one layer of three neurons has 7 regions, two such layers have a "
    "maximum of 7 · 7 = 49.",
    tested="Exact counts of drawn two-layer networks; the largest number that the ranks of the "
    "first layer's activation patterns allow.",
    expected=Verdict.FAILS,
    seconds=2,
)
def two_layer_example(run: Run) -> Evidence:
    """The most that two layers can have, and the most that was found."""
    r, most, one = drawn(run, 1), 0, set()
    for _ in range(run.size(80, 3_000)):
        A, a, B, b = (r.standard_normal(s) for s in ((3, 2), 3, (3, 3), 3))
        one.add(len(regions(*dense(A, a), 1)))
        most = max(most, two_layers((A, a), (B, b)))
    # with m neurons active the second layer sees min(m, 2) dimensions; one pattern of 8 is missing
    seen = [zaslavsky(3, min(m, 2)) for m in (0, 1, 1, 1, 2, 2, 2, 3)]
    bound = sum(seen) - min(seen)
    return Evidence(
        [
            near("largest number that the ranks allow", bound, 49, 0),
            at_most("most regions found", most, bound, part="corrected"),
            near("the bound from the ranks", bound, 40, 0, part="corrected"),
            near("regions of one layer", max(one), 7, 0, part="corrected"),
            near("regions of one layer, fewest", min(one), 7, 0, part="corrected"),
        ],
        paper=49,
        corrected="at most 40",
        measured=f"7; at most {most} in drawn networks",
        note="Where one neuron of the first layer is active the second sees a line (4 regions), "
        "where none is, a point (1). 49 bounds the number and is never reached.",
    )
