"""Section 3: linear regions, Zaslavsky's function, tropical polynomials, networks as quotients."""

import itertools
import math

import numpy as np
import torch

from tieline.core.ranking import ranked_scores
from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import (
    Evidence,
    at_least,
    at_most,
    corrected,
    near,
    none_of,
    qualified,
)
from tieline.lab.claims.routing_problems import (
    bisect_segments,
    dense_layer,
    dense_regions,
    drawn_layer,
    numpy_generator,
)
from tieline.lab.tropical import (
    TropicalPolynomial,
    elementary_symmetric,
    rational_form,
    regions,
    symmetric_polynomial,
    zaslavsky,
)
from tieline.lab.tropical.affine import chosen_experts
from tieline.lab.tropical.algebra import ONE, ZERO, plus, power, times


def bend_inside_pieces(points: np.ndarray, margins: np.ndarray, net: tuple, softmax: bool) -> float:
    """Largest relative second difference of the layer's output inside the pieces."""
    (W, b, V, c, k), out = net
    step = np.zeros_like(points)
    step[:, 0] = 0.5 * margins

    def layer_output(x: np.ndarray) -> np.ndarray:
        scores = x @ W.T + b
        gates = chosen_experts(scores, k) * (
            np.exp(scores - scores.max(axis=1, keepdims=True)) if softmax else 1.0
        )
        gates /= gates.sum(axis=1, keepdims=True)
        hidden = np.maximum(np.einsum("ehd,pd->peh", V, x) + c, 0)
        return (gates * np.einsum("peh,eh->pe", hidden, out)).sum(axis=1)

    middle = layer_output(points)
    second = layer_output(points + step) + layer_output(points - step) - 2 * middle
    return float(np.abs(second / (1 + np.abs(middle))).max())


@claim("p3-def3.1", "linear regions")
def linear_regions(run: ClaimRun) -> Evidence:
    """A linear region is a maximal connected open set on which the network is affine; the capacity
    of an architecture is the largest number of them.

    Setting: the definition for the paper's own layers: top-k with softmax gates (2), ReLU experts
    Tested: Second differences of a top-2 layer inside every piece (coalition × activation pattern),
        with softmax and with constant gates; two neurons that add up to a line.
    Overturned by: constant gates in (2), or pieces in place of affine regions
    Condition: k = 1 or constant gates, and output weights that do not cancel
    """
    net = drawn_layer(numpy_generator(run, 1), 6, 3, 2)
    out = numpy_generator(run, 2).standard_normal((6, 3))
    pieces = regions(*net, 2)
    soft, constant = (
        bend_inside_pieces(pieces.witnesses, pieces.margins, ((*net, 2), out), softmax)
        for softmax in (True, False)
    )
    first = regions(*net, 1)
    single = bend_inside_pieces(first.witnesses, first.margins, ((*net, 1), out), True)
    line = rational_form(
        [(np.array([[1.0], [-1.0]]), np.zeros(2)), (np.array([[1.0, -1.0]]), np.zeros(1))]
    )
    x = numpy_generator(run, 3).standard_normal((200, 1))
    folded = float(np.abs(line[0].evaluate(x) - x[:, 0]).max())
    neurons = dense_regions(np.array([[1.0], [2.0]]), np.array([0.0, 1.0]))
    return Evidence.of(
        at_most("second difference inside pieces, softmax gates, k = 2", soft, 1e-9),
        qualified(
            at_most("the same, constant gates", constant, 1e-9),
            at_most("the same, softmax gates, k = 1", single, 1e-9),
        ),
        corrected(
            at_least("softmax bends the layer", soft, 1e-4),
            near("relu(x) - relu(-x) is one line", folded, 0, 1e-12),
            near("pieces of two neurons on a line", neurons, 3, 0),
        ),
        paper="affine on each region",
        corrected="pieces: coalition × activation pattern",
        measured=f"bends by {soft:.2g} under softmax, {constant:.1g} without",
        note="Counted are pieces on which the layer is one formula; under softmax gates with k > 1 "
        "that formula is not affine, and pieces may be fewer than maximal regions would say.",
    )


@claim("p3-def3.2", "Zaslavsky's function")
def zaslavsky_function(run: ClaimRun) -> Evidence:
    """n hyperplanes in general position cut R^d into Φ(n, d) = Σ_{j<=d} C(n, j) regions, about
    n^d/d! for n much larger than d.

    Setting: general position, d up to 4
    Tested: Exact counts and listings of drawn arrangements, d = 1 ... 4; the ratio at n = 3000.
    Overturned by: a count other than Φ
    """
    r, wrong, listed = numpy_generator(run, 1), 0, 0
    shapes = [(5, 1), (3, 2), (9, 2), (12, 2), (4, 3), (8, 3), (3, 4), (7, 4)]
    for n, d in shapes:
        V, c = r.standard_normal((n, d)), r.standard_normal(n)
        wrong += dense_regions(V, c) != zaslavsky(n, d)
        listed += len(regions(*dense_layer(V, c), 1)) != zaslavsky(n, d)
    ratio = zaslavsky(3000, 3) * math.factorial(3) / 3000**3
    return Evidence.of(
        none_of("counts other than Φ", wrong),
        none_of("listings other than Φ", listed),
        near("Φ(3000, 3) 3!/3000³", ratio, 1, 2e-3),
        paper="Φ(n, d)",
        measured=f"{len(shapes)} arrangements, {wrong} differ",
    )


def two_layers(first: tuple, second: tuple) -> int:
    """Regions of a network with two hidden layers on the plane, counted pattern by pattern."""
    (A, a), (B, b) = first, second
    total = 0
    first_pieces = regions(*dense_layer(A, a), 1)
    for active in first_pieces.patterns[:, 0]:
        V, c = (B * active) @ A, B @ (active * a) + b
        cuts = np.linalg.norm(V, axis=1) > 0
        if not cuts.any():
            total += 1
            continue
        joint_regions = regions(*dense_layer(np.vstack([A, V[cuts]]), np.append(a, c[cuts])), 1)
        total += int((joint_regions.patterns[:, 0, : len(a)] == active).all(axis=1).sum())
    return total


@claim("p3-ex3.3", "two layers of three neurons", seconds=1)
def two_layer_example(run: ClaimRun) -> Evidence:
    """On the plane one layer of three neurons has 7 regions, two such layers have a maximum of 7 ·
    7 = 49.

    Setting: the example's 'maximum of 49 regions' for two layers of three neurons on the plane
    Tested: Exact counts of drawn two-layer networks; the largest number that the ranks of the first
        layer's activation patterns allow.
    Overturned by: a network with 49, or the words 'at most'
    Condition: 49 as an upper bound: at most 40 can be reached
    """
    r, most, counts = numpy_generator(run, 1), 0, set()
    for _ in range(run.size(80, 3_000)):
        A, a, B, b = (r.standard_normal(s) for s in ((3, 2), 3, (3, 3), 3))
        counts.add(len(regions(*dense_layer(A, a), 1)))
        most = max(most, two_layers((A, a), (B, b)))
    # with m neurons active the second layer sees min(m, 2) dimensions; one pattern of 8 is missing
    bounds = [zaslavsky(3, min(m, 2)) for m in (0, 1, 1, 1, 2, 2, 2, 3)]
    bound = sum(bounds) - min(bounds)
    return Evidence.of(
        near("largest number that the ranks allow", bound, 49, 0),
        qualified(
            at_most("most regions found, against 49", most, 49),
            at_most("largest number that the ranks allow, against 49", bound, 49),
        ),
        corrected(
            at_most("most regions found", most, bound),
            near("the bound from the ranks", bound, 40, 0),
            near("regions of one layer", max(counts), 7, 0),
            near("regions of one layer, fewest", min(counts), 7, 0),
        ),
        paper=49,
        corrected="at most 40",
        measured=f"7; at most {most} in drawn networks",
        note="Where one neuron of the first layer is active the second sees a line (4 regions), "
        "where none is, a point (1). 49 bounds the number and is never reached.",
    )


@claim("p3-def3.4", "tropical semiring")
def tropical_semiring(run: ClaimRun) -> Evidence:
    """R ∪ {-∞} with x ⊕ y = max(x, y), x ⊗ y = x + y is a semiring with neutral elements -∞ and 0;
    x^{⊗k} = kx.

    Setting: all triples of a lattice with -∞, exactly
    Tested: Every law on triples of a dyadic lattice and -∞, exactly.
    Overturned by: a law that fails
    """
    n = run.size(2_000, 20_000)
    draw = torch.randint(-40, 41, (3, n), generator=run.generator(1)).double() / 8
    draw[:, : n // 10] = torch.where(draw[:, : n // 10] > 0, draw[:, : n // 10], ZERO)
    a, b, c = draw
    zero, unit = torch.full_like(a, ZERO), torch.full_like(a, ONE)
    laws = {
        "⊕ associates": (plus(plus(a, b), c), plus(a, plus(b, c))),
        "⊕ commutes": (plus(a, b), plus(b, a)),
        "⊗ associates": (times(times(a, b), c), times(a, times(b, c))),
        "⊗ commutes": (times(a, b), times(b, a)),
        "⊗ distributes over ⊕": (times(a, plus(b, c)), plus(times(a, b), times(a, c))),
        "-∞ is neutral for ⊕": (plus(a, zero), a),
        "0 is neutral for ⊗": (times(a, unit), a),
        "-∞ annihilates": (times(a, zero), zero),
        "x^{⊗3} = x ⊗ x ⊗ x": (power(a, 3), times(a, times(a, a))),
    }
    checks = [none_of(name, (x != y).sum().item()) for name, (x, y) in laws.items()]
    return Evidence.of(checks, paper="a semiring", measured=f"{len(laws)} laws on {n} triples")


@claim("p3-def3.5", "tropical polynomials")
def tropical_polynomials(run: ClaimRun) -> Evidence:
    """A tropical polynomial is convex and piecewise affine; its hypersurface, where two terms
    attain the maximum, is where it is not differentiable.

    Setting: real exponents; nine terms on the plane
    Tested: Convexity on drawn pairs; along drawn lines the points where the slope jumps against the
        points of the hypersurface; essential terms against slopes that occur.
    Overturned by: a crease off the hypersurface
    """
    r = numpy_generator(run, 1)
    P = TropicalPolynomial(r.integers(0, 5, (9, 2)).astype(float), r.standard_normal(9))
    x, y = r.standard_normal((2, run.size(2_000, 20_000), 2)) * 3
    convex = P.evaluate((x + y) / 2) - (P.evaluate(x) + P.evaluate(y)) / 2
    low, high = x, y
    differ = P.terms_at(low).argmax(1) != P.terms_at(high).argmax(1)
    low, high = low[differ], high[differ]
    start = P.terms_at(low).argmax(1)
    low = bisect_segments(lambda x: (P.terms_at(x).argmax(1) == start)[:, None], low, high)
    misses = int((~P.on_hypersurface(low, 1e-9)).sum())
    slopes = {
        tuple(P.exponents[i]) for i in P.terms_at(30 * r.standard_normal((40_000, 2))).argmax(1)
    }
    essential = {tuple(row) for row in P.essential().exponents}
    return Evidence.of(
        at_most("largest violation of convexity", float(convex.max()), 1e-12),
        none_of("creases off the hypersurface", misses),
        none_of("drawn points on it", int(P.on_hypersurface(x).sum())),
        none_of("slopes met that are no essential term", len(slopes - essential)),
        paper="convex, creased on its hypersurface",
        measured=f"{len(low)} creases, {misses} off it",
        note="The paper's exponents are in N^d; a router's weights are real, and nothing changes.",
    )


@claim("p3-def3.6", "a network as a tropical quotient", seconds=2)
def network_tropical_quotient(run: ClaimRun) -> Evidence:
    """A ReLU network is P - Q with tropical polynomials P and Q (of real exponents); its decision
    boundary, where it changes sign, lies on the hypersurface of P ⊕ Q.

    Setting: a drawn ReLU network with two hidden layers
    Tested: P and Q of a drawn network with two hidden layers against its own evaluation; zeros
        found by bisection against the hypersurface of P ⊕ Q.
    Overturned by: a sign change off P ⊕ Q
    """
    r = numpy_generator(run, 1)
    sizes = [2, 3, 3, 1]
    net = [(r.standard_normal((o, i)), r.standard_normal(o)) for i, o in itertools.pairwise(sizes)]
    net[-1] = (net[-1][0], np.zeros(1))

    def forward(x: np.ndarray) -> np.ndarray:
        for A, b in net[:-1]:
            x = np.maximum(x @ A.T + b, 0)
        return (x @ net[-1][0].T + net[-1][1])[:, 0]

    form = rational_form(net)[0]
    x = 4 * r.standard_normal((run.size(2_000, 20_000), 2))
    error = float(np.abs(form.evaluate(x) - forward(x)).max())
    shift = float(np.median(forward(x)))
    Q = form.denominator
    moved = TropicalPolynomial(Q.exponents, Q.coefficients + shift)  # the zeros of F - median
    low, high = x[forward(x) < shift], x[forward(x) > shift]
    n = min(len(low), len(high))
    low, high = low[:n], high[:n]
    low = bisect_segments(lambda x: (forward(x) < shift)[:, None], low, high)
    misses = int((~form.numerator.plus(moved).on_hypersurface(low, 1e-7)).sum())
    terms = len(form.numerator.coefficients), len(Q.coefficients)
    return Evidence.of(
        at_most("largest error of P - Q", error, 1e-9),
        at_least("zeros found", n, 100),
        none_of("zeros off the hypersurface of P ⊕ Q", misses),
        paper="F = P - Q",
        measured=f"error {error:.1g}; {terms[0]} and {terms[1]} terms",
        note="The set of all zeros may be larger: max(0, x) is zero on a half line, and only x = 0 "
        "lies on the hypersurface.",
    )


@claim("p3-sec3.5", "top-k score as a symmetric tropical polynomial", number="Sec. 3.5")
def top_k_symmetric_polynomial(run: ClaimRun) -> Evidence:
    """The score of the chosen coalition is the k-th elementary symmetric tropical polynomial of the
    scores.

    Setting: seven experts, all k
    Tested: The recursion that ranks nothing and the polynomial with C(N, k) terms, both against the
        sum of the k largest scores, for all k.
    Overturned by: a score other than the sum of the k largest
    """
    r, worst, recursion = numpy_generator(run, 1), 0.0, 0.0
    W, b = r.standard_normal((7, 3)), r.standard_normal(7)
    x = r.standard_normal((run.size(300, 3_000), 3))
    scores = torch.from_numpy(x @ W.T + b)
    for k in range(1, 8):
        best = ranked_scores(scores, 7)[:, :k].sum(dim=1)
        recursion = max(recursion, (elementary_symmetric(scores, k) - best).abs().max().item())
        value = torch.from_numpy(symmetric_polynomial(W, b, k).evaluate(x))
        worst = max(worst, (value - best).abs().max().item())
    checks = [
        at_most("error of the recursion", recursion, 1e-12),
        at_most("error of the polynomial", worst, 1e-12),
    ]
    return Evidence.of(checks, paper="equal", measured=max(worst, recursion))
