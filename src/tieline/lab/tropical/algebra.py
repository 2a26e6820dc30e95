"""Tropical algebra (R ∪ {-∞}, ⊕ = max, ⊗ = +): polynomials, rational functions (paper 3, Sec. 3).

    plus, times, power           a ⊕ b, a ⊗ b, a^{⊗ n}                                      Def. 3.4
    elementary_symmetric         e_k(z), the sum of the k largest scores
    TropicalPolynomial           P(x) = max_i (c_i + a_i · x) with real exponents a_i       Def. 3.5
    symmetric_polynomial         e_k of affine scores                                       Thm. 4.5
    rational_form                a ReLU network as F = P - Q, both convex                   Def. 3.6
    zonotope_counts              vertices of the Newton zonotope of a dense layer         Prop. 4.10

The terms of P that are the only maximum somewhere are the upper vertices of the points (a_i, c_i),
one per linear piece of P.

A layer with weights A = A⁺ - A⁻ maps x = p - q to (A⁺p + A⁻q + b) - (A⁺q + A⁻p), and ReLU of p - q
is max(p, q) - q. Terms that are never the maximum are dropped after each step; the rest still grows
with width and depth, which is the paper's "complexity folded into P and Q".

Σ_h max(0, v_h · x + c_h) is a tropical polynomial whose terms are the vertices of the zonotope
Σ_h [0, (v_h, c_h)] in R^{d+1}; its upper vertices are the linear regions of the layer. Vertices are
the regions of the central arrangement {(v_h, c_h) · y = 0}, of which the affine arrangement is the
slice y_last = 1, so (the "not strictly bijective" of Rem. 4.11, in numbers)

    vertices = 2 regions - regions of the same neurons without biases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Real
from scipy.optimize import linprog
from scipy.spatial import ConvexHull, QhullError
from torch import Tensor

from tieline.core.errors import ParameterError, ShapeError, require
from tieline.lab.tropical.affine import Array, RouterBias, RouterWeight, double_array
from tieline.lab.tropical.regions import count_regions

ZERO, ONE = -math.inf, 0.0  # neutral elements of ⊕ and ⊗
MAX_TERMS = 1 << 17  # largest number of terms of a polynomial


def plus(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Tropical sum a ⊕ b = max(a, b)."""
    return torch.maximum(a, b)


def times(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Tropical product a ⊗ b = a + b."""
    return a + b


def power(a: Float[Tensor, "*shape"], n: int) -> Float[Tensor, "*shape"]:
    """Tropical power a^{⊗ n} = n a for n >= 0; 0 for n = 0, also at -∞."""
    require(n >= 0, f"tropical powers need n >= 0, got {n}")
    return torch.zeros_like(a) if n == 0 else n * a


def elementary_symmetric(
    scores: Float[Tensor, "*batch experts"], k: int
) -> Float[Tensor, "*batch"]:
    """Score of the best coalition, e_k(z) = max_{|I| = k} Σ_{i ∈ I} z_i (Sec. 3.5).

    Computed as e_k(z_1 … z_n) = e_k(z_1 … z_{n-1}) ⊕ z_n ⊗ e_{k-1}(z_1 … z_{n-1}) without ranking,
    so that equality with the sum of the k largest scores can be tested.
    """
    experts = scores.shape[-1]
    require(0 <= k <= experts, f"need 0 <= k <= {experts} experts, got {k=}")
    best = [torch.zeros_like(scores[..., 0])]
    best += [torch.full_like(best[0], ZERO) for _ in range(k)]
    for expert in range(experts):
        for order in range(min(k, expert + 1), 0, -1):
            best[order] = plus(best[order], times(scores[..., expert], best[order - 1]))
    return best[k]


@dataclass(frozen=True)
class TropicalPolynomial:
    """P(x) = ⊕_i c_i ⊗ x^{⊗ a_i} = max_i (c_i + a_i · x)."""

    exponents: Float[np.ndarray, "terms dim"]  # (terms, d) vectors a_i
    coefficients: Float[np.ndarray, " terms"]  # (terms,) numbers c_i

    def __post_init__(self) -> None:
        rows, terms = self.exponents.shape[0], len(self.coefficients)
        require(rows == terms > 0, f"{rows} exponents, {terms} coefficients", ShapeError)
        require(terms <= MAX_TERMS, f"{terms} terms, more than {MAX_TERMS}", ParameterError)

    def terms_at(self, x: Real[Array, "points dim"]) -> Float[np.ndarray, "points terms"]:
        """Evaluate every term at every point."""
        return double_array("x", x, 2) @ self.exponents.T + self.coefficients

    def evaluate(self, x: Real[Array, "points dim"]) -> Float[np.ndarray, " points"]:
        """Evaluate P(x) at every point."""
        return self.terms_at(x).max(axis=1)

    def on_hypersurface(
        self, x: Real[Array, "points dim"], tolerance: float = 0.0
    ) -> Bool[np.ndarray, " points"]:
        """Whether two terms attain the maximum, to within `tolerance`, so that P has a crease."""
        terms = self.terms_at(x)
        return (terms >= terms.max(axis=1, keepdims=True) - tolerance).sum(axis=1) >= 2

    def newton_polytope(self) -> Float[np.ndarray, "vertices dim"]:
        """Vertices of conv{a_i}, in the order of the terms."""
        return self.exponents[_hull_vertices(self.exponents)]

    def essential(self) -> "TropicalPolynomial":
        """Drop the terms that are nowhere the only maximum; the function stays the same."""
        order = np.lexsort((-self.coefficients, *self.exponents.T[::-1]))
        _, first = np.unique(self.exponents[order], axis=0, return_index=True)
        best = np.sort(order[first])  # the largest coefficient of equal exponents
        lifted = np.column_stack([self.exponents[best], self.coefficients[best]])
        winners = [i for i in _hull_vertices(lifted).tolist() if _is_essential(lifted, i)]
        kept = best[np.array(winners, dtype=np.int64)]
        return TropicalPolynomial(self.exponents[kept], self.coefficients[kept])

    def plus(self, other: "TropicalPolynomial") -> "TropicalPolynomial":
        """P ⊕ Q, the maximum of the two."""
        return TropicalPolynomial(
            np.concatenate([self.exponents, other.exponents]),
            np.concatenate([self.coefficients, other.coefficients]),
        )

    def times(self, other: "TropicalPolynomial") -> "TropicalPolynomial":
        """P ⊗ Q, the sum of the two: Newton polytopes add (Minkowski)."""
        exponents = self.exponents[:, None] + other.exponents[None]
        coefficients = self.coefficients[:, None] + other.coefficients[None]
        return TropicalPolynomial(exponents.reshape(-1, exponents.shape[2]), coefficients.ravel())

    def scaled(self, factor: float) -> "TropicalPolynomial":
        """The function factor · P, factor >= 0: a tropical power."""
        require(factor >= 0, f"tropical powers need a factor >= 0, got {factor}")
        return TropicalPolynomial(factor * self.exponents, factor * self.coefficients)


def symmetric_polynomial(W: RouterWeight, b: RouterBias, k: int) -> TropicalPolynomial:
    """Polynomial S_top-k(x) = max_{|I| = k} Σ_{i ∈ I} z_i(x), with C(N, k) terms.

    Its essential terms are those of coalitions with a cell; its Newton polytope is the image under
    Wᵀ of the hypersimplex, whose vertices are all C(N, k) coalitions.
    """
    W, b = double_array("W", W, 2), double_array("b", b, 1)
    experts = len(b)
    require(0 <= k <= experts, f"need 0 <= k <= N = {experts}, got {k=}")
    require(comb(experts, k) <= MAX_TERMS, f"C({experts}, {k}) = {comb(experts, k)} terms")
    chosen = np.zeros((comb(experts, k), experts))
    for row, coalition in enumerate(combinations(range(experts), k)):
        chosen[row, list(coalition)] = 1.0
    return TropicalPolynomial(chosen @ W, chosen @ b)


def _hull_vertices(points: Float[np.ndarray, "n dim"]) -> Int[np.ndarray, " vertices"]:
    """Indices of the vertices of the convex hull, also of flat or single point sets."""
    _, first = np.unique(points, axis=0, return_index=True)
    kept = np.sort(first)
    centred = points[kept] - points[kept].mean(axis=0)
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    rank = int((sizes > 1e-10 * max(float(sizes[0]), 1e-300)).sum()) if len(kept) > 1 else 0
    flat = centred @ axes[:rank].T
    if rank == 0:
        return kept[:1]
    if rank == 1:
        return kept[np.unique([flat[:, 0].argmin(), flat[:, 0].argmax()])]
    try:
        return kept[np.sort(ConvexHull(flat).vertices)]
    except QhullError as error:  # pragma: no cover - points in no general position for Qhull
        raise ParameterError(f"no convex hull of {len(kept)} exponents: {error}") from error


def _is_essential(lifted: Float[np.ndarray, "n d1"], term: int) -> bool:
    """Whether a term exceeds all others by a margin at some x = y / y_0, y_0 > 0 (or near 0)."""
    others = np.delete(lifted, term, axis=0)
    if len(others) == 0:
        return True
    differences = others - lifted[term]
    scale = np.abs(differences).max(axis=1, keepdims=True)
    rows = np.column_stack([differences / scale, np.ones(len(others))])
    cost = np.zeros(rows.shape[1])
    cost[-1] = -1.0
    bounds = [(-1.0, 1.0)] * (lifted.shape[1] - 1) + [(0.0, 1.0), (0.0, 1.0)]
    solution = linprog(cost, A_ub=rows, b_ub=np.zeros(len(rows)), bounds=bounds)
    return bool(solution.success and solution.x[-1] > 1e-9)


@dataclass(frozen=True)
class TropicalRational:
    """F = P ⊘ Q = P - Q."""

    numerator: TropicalPolynomial  # P
    denominator: TropicalPolynomial  # Q

    def evaluate(self, x: Real[Array, "points dim"]) -> Float[np.ndarray, " points"]:
        """Evaluate F(x) at every point."""
        return self.numerator.evaluate(x) - self.denominator.evaluate(x)


def rational_form(
    layers: Sequence[tuple[Real[Array, "_ _"], Real[Array, " _"]]],
) -> list[TropicalRational]:
    """Tropical rational function of each output of x ↦ A_L relu(… relu(A_1 x + b_1) …) + b_L."""
    require(len(layers) > 0, "a network needs one layer at least")
    dim = double_array("A", layers[0][0], 2).shape[1]
    axes, none = np.eye(dim), np.zeros((1, dim))
    pairs = [(_single_term(axes[i : i + 1]), _single_term(none)) for i in range(dim)]
    for depth, (A, b) in enumerate(layers):
        weights, bias = double_array("A", A, 2), double_array("b", b, 1)
        require(
            weights.shape == (len(bias), len(pairs)),
            f"layer {depth}: weights {weights.shape}, {len(bias)} biases, {len(pairs)} inputs",
            ShapeError,
        )
        pairs = [_affine_pair(pairs, row, shift) for row, shift in zip(weights, bias, strict=True)]
        if depth + 1 < len(layers):
            pairs = [(p.plus(q).essential(), q) for p, q in pairs]
    return [TropicalRational(p, q) for p, q in pairs]


Pair = tuple[TropicalPolynomial, TropicalPolynomial]


def _affine_pair(pairs: list[Pair], row: Float[np.ndarray, " into"], shift: float) -> Pair:
    """Return (A⁺p + A⁻q + b, A⁺q + A⁻p) for one output."""
    none = np.zeros((1, pairs[0][0].exponents.shape[1]))
    p, q = TropicalPolynomial(none, np.array([float(shift)])), _single_term(none)
    for weight, (upper, lower) in zip(row, pairs, strict=True):
        above, below = (upper, lower) if weight >= 0 else (lower, upper)
        if weight != 0:
            p = p.times(above.scaled(abs(float(weight)))).essential()
            q = q.times(below.scaled(abs(float(weight)))).essential()
    return p, q


def _single_term(exponents: Float[np.ndarray, "1 dim"]) -> TropicalPolynomial:
    """The polynomial of one term a · x."""
    return TropicalPolynomial(exponents, np.zeros(1))


class ZonotopeCounts(NamedTuple):
    """Numbers of vertices of the Newton zonotope."""

    vertices: int  # all of them; 2 Σ_{j<=d} C(H-1, j) in general position
    upper: int  # those seen from above, the linear regions of the layer; Φ(H, d)
    both: int  # those seen from above and from below; 2 Σ_{j<d} C(H-1, j)


def zonotope_counts(V: Real[Array, "hidden dim"], c: Real[Array, " hidden"]) -> ZonotopeCounts:
    """Count vertices of Σ_h [0, (v_h, c_h)], neurons v_h · x + c_h in general position, d <= 5."""
    weights, biases = double_array("V", V, 2)[None], double_array("c", c, 1)[None]
    router = np.zeros((1, weights.shape[2])), np.zeros(1)
    upper = int(count_regions(*router, weights, biases, 1))
    both = int(count_regions(*router, weights, np.zeros_like(biases), 1))
    return ZonotopeCounts(2 * upper - both, upper, both)
