"""Planar Voronoi routers z_i(x) = w_i·x - ‖w_i‖²/2: Lee's count of their order-k cells.

    k_sets                   e_i: sets of i points that a line cuts off, i = 1 ... n-1
    voronoi_cells            (2k-1) n - (k²-1) - Σ_{i<k} e_i, exact for points in general position
    expected_voronoi_cells   the same for iid normal points, E[e_i] = cells of a biasless router

A top-k router whose biases are -‖w‖²/2 chooses the k nearest points; its cells number O(k (n-k)),
far from C(n, k). Unbounded cells are those of the router without biases.
"""

from typing import Any

import numpy as np
from jaxtyping import Int

from tieline.errors import ParameterError, require
from tieline.tropical.affine import as_points
from tieline.tropical.expectation import expected_cells

__all__ = ["expected_voronoi_cells", "k_sets", "voronoi_cells"]

MOST_POINTS = 128
DEGENERATE = 1e-11
"""Relative size under which an orientation or in-circle test is taken for zero."""


def voronoi_cells(points: Any, k: int) -> int:
    """Number of order-k Voronoi cells of n points of the plane: Lee's formula with counted k-sets.

    Args:
        points: (n, 2) array, no three on a line and no four on a circle (refused), n <= 128.
        k: order, 1 <= k < n.
    """
    sites = as_points(points, 2, 2)
    n = len(sites)
    require(n <= MOST_POINTS, f"at most {MOST_POINTS} points, got {n}: use expected_voronoi_cells")
    require(1 <= k < n, f"need 1 <= k < n, got {k=}, {n=}")
    _refuse_circles(sites)
    return (2 * k - 1) * n - (k * k - 1) - int(k_sets(sites)[: k - 1].sum())


def k_sets(points: Any) -> Int[np.ndarray, " orders"]:
    """e_i, i = 1 ... n-1: the sets of i points that some line separates from the rest.

    Each corresponds to one directed line through two points with i - 1 points to its left.
    """
    sites = as_points(points, 2, 2)
    n = len(sites)
    along = sites[None, :, :] - sites[:, None, :]
    left = np.empty((n, n), dtype=np.int64)
    for i in range(n):
        x, y = along[i].T
        turn = np.outer(x, y) - np.outer(y, x)
        off = ~np.eye(n, dtype=bool)
        off[i], off[:, i] = False, False
        size = np.linalg.norm(along[i], axis=-1)
        small = np.abs(turn) <= DEGENERATE * size[:, None] * size[None, :]
        if (small & off).any():
            a, b = np.argwhere(small & off)[0]
            raise ParameterError(f"points {i}, {a} and {b} lie on one line")
        left[i] = ((turn > 0) & off).sum(axis=1)
    return np.bincount(left[~np.eye(n, dtype=bool)], minlength=n - 1)[: n - 1]


def expected_voronoi_cells(n_points: int, k: int) -> float:
    """E[order-k cells] of iid N(0, I_2) points: (2k-1) n - (k²-1) - Σ_{i<k} E[e_i].

    E[e_i] = 2 C(n, i) P(M = 2), the cells of a Gaussian router without biases on the plane.
    """
    require(1 <= k < n_points, f"need 1 <= k < n, got {k=}, n={n_points}")
    cut_off = sum((expected_cells(n_points, i, 2, bias=False) for i in range(1, k)), 0.0)
    return (2 * k - 1) * n_points - (k * k - 1) - cut_off


def _refuse_circles(sites: np.ndarray) -> None:
    """Refuse four points on a circle: the lifts (x, ‖x‖²) of which lie in a plane."""
    n = len(sites)
    centred = sites - sites.mean(axis=0)
    lifted = np.column_stack([centred, (centred**2).sum(axis=1)])
    lifted = lifted / np.abs(lifted).max(axis=0)
    for i in range(n - 3):
        edges = lifted[i + 1 :] - lifted[i]
        for j in range(len(edges) - 2):
            normal = np.cross(edges[j], edges[j + 1 :])
            volume = normal @ edges[j + 1 :].T
            upper = np.triu(np.ones_like(volume, dtype=bool), 1)
            found = (np.abs(volume) <= DEGENERATE) & upper
            require(not found.any(), f"four points with {i} and {i + 1 + j} lie on one circle")
