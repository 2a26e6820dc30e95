"""Tropical polynomials, their Newton polytopes and hypersurfaces (paper 3, Def. 3.5).

    TropicalPolynomial      P(x) = max_i (c_i + a_i · x); exponents a_i may be any real vectors
    symmetric_polynomial    the k-th elementary symmetric polynomial of affine scores (Thm. 4.5)

The terms that are the only maximum somewhere are the upper vertices of the points (a_i, c_i): one
per linear piece of P.
"""

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from jaxtyping import Bool, Float, Int, Real
from scipy.optimize import linprog
from scipy.spatial import ConvexHull, QhullError

from tieline.errors import ParameterError, ShapeError, require
from tieline.tropical.checks import Array, double_array

__all__ = ["MAX_TERMS", "TropicalPolynomial", "symmetric_polynomial"]

MAX_TERMS = 1 << 17
"""Largest number of terms that is written out."""


@dataclass(frozen=True)
class TropicalPolynomial:
    """P(x) = ⊕_i c_i ⊗ x^{⊗ a_i} = max_i (c_i + a_i · x).

    Attributes:
        exponents: (terms, d) vectors a_i.
        coefficients: (terms,) numbers c_i.
    """

    exponents: Float[np.ndarray, "terms dim"]
    coefficients: Float[np.ndarray, " terms"]

    def __post_init__(self) -> None:
        rows, terms = self.exponents.shape[0], len(self.coefficients)
        require(rows == terms > 0, f"{rows} exponents, {terms} coefficients", ShapeError)
        require(terms <= MAX_TERMS, f"{terms} terms, more than {MAX_TERMS}", ParameterError)

    def terms_at(self, x: Real[Array, "points dim"]) -> Float[np.ndarray, "points terms"]:
        """Value of every term at every point."""
        return double_array("x", x, 2) @ self.exponents.T + self.coefficients

    def evaluate(self, x: Real[Array, "points dim"]) -> Float[np.ndarray, " points"]:
        """P(x) at every point."""
        return self.terms_at(x).max(axis=1)

    def on_hypersurface(
        self, x: Real[Array, "points dim"], tolerance: float = 0.0
    ) -> Bool[np.ndarray, " points"]:
        """Whether two terms attain the maximum, to within `tolerance`: where P has a crease."""
        terms = self.terms_at(x)
        return (terms >= terms.max(axis=1, keepdims=True) - tolerance).sum(axis=1) >= 2

    def newton_polytope(self) -> Float[np.ndarray, "vertices dim"]:
        """Vertices of conv{a_i}, in the order of the terms."""
        return self.exponents[_hull_vertices(self.exponents)]

    def essential(self) -> "TropicalPolynomial":
        """The same function from the terms that alone are the maximum somewhere."""
        kept = _upper_vertices(self.exponents, self.coefficients)
        return TropicalPolynomial(self.exponents[kept], self.coefficients[kept])

    def plus(self, other: "TropicalPolynomial") -> "TropicalPolynomial":
        """P ⊕ Q, the larger of the two."""
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


def symmetric_polynomial(
    W: Real[Array, "experts dim"], b: Real[Array, " experts"], k: int
) -> TropicalPolynomial:
    """S_top-k(x) = max_{|I| = k} Σ_{i ∈ I} z_i(x), one term per coalition, C(N, k) in all.

    Its essential terms are the coalitions with a cell; its Newton polytope is the image under Wᵀ of
    the hypersimplex, whose vertices are all C(N, k) coalitions.
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


def _upper_vertices(
    exponents: Float[np.ndarray, "n dim"], coefficients: Float[np.ndarray, " n"]
) -> Int[np.ndarray, " kept"]:
    """Terms that are the only maximum somewhere."""
    order = np.lexsort((-coefficients, *exponents.T[::-1]))
    _, first = np.unique(exponents[order], axis=0, return_index=True)
    best = np.sort(order[first])  # of equal exponents only the largest coefficient can win
    lifted = np.column_stack([exponents[best], coefficients[best]])
    candidates = _hull_vertices(lifted)
    kept = [i for i in candidates.tolist() if _wins(lifted, i)]
    return best[np.array(kept, dtype=np.int64)]


def _wins(lifted: Float[np.ndarray, "n d1"], term: int) -> bool:
    """Whether one term beats all others by a margin at some x = y / y_0, y_0 > 0 (or near 0)."""
    others = np.delete(lifted, term, axis=0)
    if len(others) == 0:
        return True
    differences = others - lifted[term]
    scale = np.abs(differences).max(axis=1, keepdims=True)
    rows = np.column_stack([differences / scale, np.ones(len(others))])
    cost = np.zeros(rows.shape[1])
    cost[-1] = -1.0
    bounds = [(-1.0, 1.0)] * (lifted.shape[1] - 1) + [(0.0, 1.0), (0.0, 1.0)]
    found = linprog(cost, A_ub=rows, b_ub=np.zeros(len(rows)), bounds=bounds)
    return bool(found.success and found.x[-1] > 1e-9)
