"""Order-k cells of an affine router: where each coalition is chosen (paper 3, Thm. 4.5).

count_cells    number of coalitions I with {x : min_I z > max_{not I} z} non-empty
"""

from math import comb

import numpy as np
from jaxtyping import Real

from tieline.errors import require
from tieline.tropical.checks import Array, Count, DegenerateError, Router, as_router, why_degenerate

__all__ = ["count_cells"]

MAX_SUBSETS = 50_000_000
"""Largest number of tied sets C(N, d + 1) that are enumerated."""


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
    require(
        safety >= 1.0,
        "the router is not in general position: "
        f"{why_degenerate(router.W, np.empty((0, router.W.shape[1])))}",
        DegenerateError,
    )
