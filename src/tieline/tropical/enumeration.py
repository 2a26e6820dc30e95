"""Compiled list of the corners of an order-k diagram: ties of d + 1 experts across the threshold.

Each cell and each facet of a router in general position whose weights span R^d has a corner. At a
corner with p experts above the tie T, the cells are above ∪ A for every A ⊂ T with |A| = k - p, and
two of them share a facet where they differ by one swap.
"""

from typing import no_type_check

import numpy as np

from tieline.tropical.compiled import compiled
from tieline.tropical.tied_sets import (
    ROUNDING,
    TOLERANCE,
    next_subset,
    place_experts,
    solve_tie,
)


@compiled
@no_type_check
def corners(W, b, k):
    """(ties, above, points, safety): T as rows, its experts above as masks, where it is."""
    n, m = W.shape
    tied, side, nobody = np.arange(m + 1), np.zeros(n, np.int8), np.zeros(n, np.bool_)
    matrix, inverse, point = np.empty((m, m)), np.empty((m, m)), np.empty(m)
    ties, above = np.empty((64, m + 1), np.int64), np.empty((64, n), np.bool_)
    points, total, safety, more = np.empty((64, m)), 0, np.inf, True
    while more:
        level, condition = solve_tie(W, b, tied, matrix, inverse, point)
        if ROUNDING * condition >= 1.0 or condition * TOLERANCE >= 1.0:
            return ties[:0], above[:0], points[:0], 0.0
        count, unclear, sure = place_experts(W, b, k, nobody, tied, point, level, condition, side)
        if unclear and count < k < count + unclear + m + 1:
            return ties[:0], above[:0], points[:0], sure
        if count < k <= count + m:
            if total == len(ties):
                ties, above = twice(ties), twice(above)
                points = twice(points)
            ties[total], above[total], points[total] = tied, side == 1, point
            total += 1
            safety = min(safety, sure)
        more = next_subset(tied, n)
    return ties[:total], above[:total], points[:total], safety


@compiled
@no_type_check
def twice(array):
    """A copy with room for twice the rows."""
    larger = np.empty((2 * len(array), array.shape[1]), array.dtype)
    larger[: len(array)] = array
    return larger
