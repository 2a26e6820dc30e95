"""Sections 3.2 to 3.5: the semiring, tropical polynomials, and networks as their quotients."""

import itertools

import numpy as np
import torch

from tieline.ranking import ranked_scores
from tieline.studies.checks import at_least, at_most, none_of
from tieline.studies.claim import Evidence, Run
from tieline.studies.paper3.problems import drawn
from tieline.studies.registry import claim
from tieline.tropical import (
    TropicalPolynomial,
    elementary_symmetric,
    rational_form,
    symmetric_polynomial,
)
from tieline.tropical.semiring import ONE, ZERO, plus, power, times


@claim(
    "p3-def3.4",
    "Def. 3.4",
    "tropical semiring",
    statement="R ∪ {-∞} with x ⊕ y = max(x, y), x ⊗ y = x + y is a semiring with neutral elements "
    "-∞ and 0; x^{⊗k} = kx.",
    tested="Every law on triples of a dyadic lattice and -∞, exactly.",
)
def semiring(run: Run) -> Evidence:
    """Triples that break a law."""
    n = run.size(2_000, 20_000)
    draw = torch.randint(-40, 41, (3, n), generator=run.generator(1)).double() / 8
    draw[:, : n // 10] = torch.where(draw[:, : n // 10] > 0, draw[:, : n // 10], ZERO)
    a, b, c = draw
    zero, one = torch.full_like(a, ZERO), torch.full_like(a, ONE)
    laws = {
        "⊕ associates": (plus(plus(a, b), c), plus(a, plus(b, c))),
        "⊕ commutes": (plus(a, b), plus(b, a)),
        "⊗ associates": (times(times(a, b), c), times(a, times(b, c))),
        "⊗ commutes": (times(a, b), times(b, a)),
        "⊗ distributes over ⊕": (times(a, plus(b, c)), plus(times(a, b), times(a, c))),
        "-∞ is neutral for ⊕": (plus(a, zero), a),
        "0 is neutral for ⊗": (times(a, one), a),
        "-∞ annihilates": (times(a, zero), zero),
        "x^{⊗3} = x ⊗ x ⊗ x": (power(a, 3), times(a, times(a, a))),
    }
    return Evidence(
        [none_of(name, (x != y).sum().item()) for name, (x, y) in laws.items()],
        paper="a semiring",
        measured=f"{len(laws)} laws on {n} triples",
    )


@claim(
    "p3-def3.5",
    "Def. 3.5",
    "tropical polynomials",
    statement="A tropical polynomial is convex and piecewise affine; its hypersurface, where two "
    "terms attain the maximum, is where it is not differentiable.",
    tested="Convexity on drawn pairs; along drawn lines the points where the slope jumps against "
    "the points of the hypersurface; essential terms against slopes that occur.",
)
def polynomials(run: Run) -> Evidence:
    """Violations of convexity, and creases off the hypersurface."""
    r = drawn(run, 1)
    P = TropicalPolynomial(r.integers(0, 5, (9, 2)).astype(float), r.standard_normal(9))
    x, y = r.standard_normal((2, run.size(2_000, 20_000), 2)) * 3
    convex = P.evaluate((x + y) / 2) - (P.evaluate(x) + P.evaluate(y)) / 2
    low, high = x, y
    differ = P.terms_at(low).argmax(1) != P.terms_at(high).argmax(1)
    low, high = low[differ], high[differ]
    start = P.terms_at(low).argmax(1)
    for _ in range(60):
        middle = (low + high) / 2
        same = P.terms_at(middle).argmax(1) == start
        low, high = np.where(same[:, None], middle, low), np.where(same[:, None], high, middle)
    off = int((~P.on_hypersurface(low, 1e-9)).sum())
    slopes = {
        tuple(P.exponents[i]) for i in P.terms_at(30 * r.standard_normal((40_000, 2))).argmax(1)
    }
    kept = {tuple(row) for row in P.essential().exponents}
    return Evidence(
        [
            at_most("largest violation of convexity", float(convex.max()), 1e-12),
            none_of("creases off the hypersurface", off),
            none_of("drawn points on it", int(P.on_hypersurface(x).sum())),
            none_of("slopes met that are no essential term", len(slopes - kept)),
        ],
        paper="convex, creased on its hypersurface",
        measured=f"{len(low)} creases, {off} off it",
        note="The paper's exponents are in N^d; a router's weights are real, and nothing changes.",
    )


@claim(
    "p3-def3.6",
    "Def. 3.6",
    "a network as a tropical quotient",
    statement="A ReLU network is P - Q with tropical polynomials P and Q; its zero set lies on the "
    "hypersurface of P ⊕ Q.",
    tested="P and Q of a drawn network with two hidden layers against its own evaluation; zeros "
    "found by bisection against the hypersurface of P ⊕ Q.",
    seconds=2,
)
def quotients(run: Run) -> Evidence:
    """Largest error of P - Q, and zeros off the hypersurface."""
    r = drawn(run, 1)
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
    for _ in range(60):
        middle = (low + high) / 2
        below = (forward(middle) < shift)[:, None]
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    off = int((~form.numerator.plus(moved).on_hypersurface(low, 1e-7)).sum())
    terms = len(form.numerator.coefficients), len(Q.coefficients)
    return Evidence(
        [
            at_most("largest error of P - Q", error, 1e-9),
            at_least("zeros found", n, 100),
            none_of("zeros off the hypersurface of P ⊕ Q", off),
        ],
        paper="F = P - Q",
        measured=f"error {error:.1g}; {terms[0]} and {terms[1]} terms",
    )


@claim(
    "p3-sec3.5",
    "Sec. 3.5",
    "top-k score as a symmetric tropical polynomial",
    statement="The score of the chosen coalition is the k-th elementary symmetric tropical "
    "polynomial of the scores.",
    tested="The recursion that ranks nothing and the polynomial with C(N, k) terms, both against "
    "the sum of the k largest scores, for all k.",
)
def symmetric(run: Run) -> Evidence:
    """Largest error over k."""
    r, worst, recursion = drawn(run, 1), 0.0, 0.0
    W, b = r.standard_normal((7, 3)), r.standard_normal(7)
    x = r.standard_normal((run.size(300, 3_000), 3))
    scores = torch.from_numpy(x @ W.T + b)
    for k in range(1, 8):
        best = ranked_scores(scores, 7)[:, :k].sum(dim=1)
        recursion = max(recursion, (elementary_symmetric(scores, k) - best).abs().max().item())
        value = torch.from_numpy(symmetric_polynomial(W, b, k).evaluate(x))
        worst = max(worst, (value - best).abs().max().item())
    return Evidence(
        [
            at_most("error of the recursion", recursion, 1e-12),
            at_most("error of the polynomial", worst, 1e-12),
        ],
        paper="equal",
        measured=max(worst, recursion),
    )
