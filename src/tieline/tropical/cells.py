"""Order-k cells of an affine router: where each coalition is chosen (paper 3, Prop. 4.2, Thm. 4.5).

count_cells    number of coalitions I with {x : min_I z > max_{not I} z} non-empty
cells          these coalitions with a point inside, facets and neighbours; k = 1 is the power
               diagram
"""

from dataclasses import dataclass
from math import comb

import numpy as np
from jaxtyping import Float, Int, Real

from tieline.errors import require
from tieline.tropical.checks import Array, Count, DegenerateError, Router, as_router, why_degenerate

__all__ = ["Cells", "cells", "count_cells"]

MAX_SUBSETS = 50_000_000
"""Largest number of tied sets C(N, d + 1) that `count_cells` goes through."""

FEW_SUBSETS = 1_000_000
"""Largest number of tied sets that `cells` goes through before it searches cell by cell."""


@dataclass(frozen=True)
class Cells:
    """Cells of a router.

    Attributes:
        coalitions: (C, k) chosen experts, ascending; cells are sorted by them.
        witnesses: (C, d) a point inside each cell.
        margins: (C,) z_[k] - z_[k+1] at the witness, for weights scaled to size 1; infinite where
            there is one cell only.
        facets: (F, 4) rows (cell, leaving, entering, neighbour): the wall z_leaving = z_entering
            bounds the cell, and the cell behind it chooses `entering` instead. Each wall is listed
            from both sides.
        method: "tied sets" or "linear programming".
    """

    coalitions: Int[np.ndarray, "cells k"]
    witnesses: Float[np.ndarray, "cells dim"]
    margins: Float[np.ndarray, " cells"]
    facets: Int[np.ndarray, "facets 4"]
    method: str

    def __len__(self) -> int:
        return len(self.coalitions)

    def neighbours(self, cell: int) -> Int[np.ndarray, " n"]:
        """Indices of the cells behind the facets of `cell`."""
        return self.facets[self.facets[:, 0] == cell, 3]


def count_cells(W: Real[Array, "experts dim"], b: Real[Array, " experts"], k: int) -> Count:
    """Coalitions of k experts that some input chooses; over k = 0 ... N they sum to Φ(N, d+1).

    Every cell is found once, at its lowest point, a tie of at most d + 1 experts. A router without
    bias has cones for cells and sums to 2 Σ_{j<=d} C(N-1, j).

    Args:
        W: (N, d) router weights.
        b: (N,) router biases.
        k: experts chosen, 0 <= k <= N.
    """
    from tieline.tropical.tied_sets import count_affine, count_linear

    router = essential(as_router(W, b, k))
    experts, dim = router.W.shape
    nobody = np.zeros(experts, dtype=np.bool_)
    require(
        comb(experts, dim + 1) <= MAX_SUBSETS,
        f"N = {experts}, d = {dim} has {comb(experts, dim + 1):.3g} tied sets, more than "
        f"{MAX_SUBSETS:.0e}; `cells` searches cell by cell, `expected_cells` gives the mean",
    )
    if router.linear:
        count, safety = count_linear(router.W, k, nobody)
    else:
        count, safety = count_affine(router.W, router.b, k, nobody)
    check_safety(router, safety)
    return Count(int(count), "order-k cells", "tied sets", float(safety))


def cells(
    W: Real[Array, "experts dim"], b: Real[Array, " experts"], k: int, max_cells: int = 100_000
) -> Cells:
    """All cells with a point inside, their facets and neighbours.

    Ties of d + 1 experts are gone through where these are few; otherwise cells are found one from
    another through their facets by linear programming (HiGHS), in time that grows with the cells.

    Args:
        W: (N, d) router weights.
        b: (N,) router biases.
        k: experts chosen, 0 <= k <= N.
        max_cells: the search refuses routers with more cells than this.
    """
    from tieline.tropical import diagrams

    router = essential(as_router(W, b, k))
    experts, dim = router.W.shape
    if k in (0, experts) or dim == 0:
        return diagrams.whole_space(router, k)
    if comb(experts, dim + 1) <= FEW_SUBSETS:
        return diagrams.from_corners(router, k)
    return diagrams.from_search(router, k, max_cells)


def essential(router: Router) -> Router:
    """The router on the span of its weights' differences, across which its cells do not change."""
    _, sizes, axes = np.linalg.svd(router.W, full_matrices=False)
    rank = int((sizes > 1e-11 * max(float(sizes[0]), 1e-300)).sum())
    if rank == router.W.shape[1]:
        return router
    turn = np.ascontiguousarray(axes[:rank].T)
    return Router(router.W @ turn, router.b, router.linear, router.rotation @ turn, router.length)


def check_safety(router: Router, safety: float) -> None:
    """Refuse a count that a gap within rounding decided."""
    if safety < 1.0:
        reason = why_degenerate(router.W, np.empty((0, router.W.shape[1])))
        raise DegenerateError(f"the router is not in general position: {reason}")
