"""Coalitions and pieces that a surface of inputs meets.

pieces_on_patch   different coalitions and pieces on a grid of points, exact on its triangles
grid_of           the grid of a callable (s, t) ↦ x on [0, 1]²
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from tieline.errors import require
from tieline.tropical.affine import as_neurons, as_router
from tieline.tropical.planar import area, cells_within
from tieline.tropical.slices import (
    lines_on_plane,
    pieces_of,
    plane_through,
    restricted_on_plane,
)

__all__ = ["PatchPieces", "grid_of", "pieces_on_patch"]


@dataclass(frozen=True)
class PatchPieces:
    """What a triangulated surface meets: different coalitions, and (coalition, pattern) pieces."""

    coalitions: int
    pieces: int
    triangles: int
    area: float


def pieces_on_patch(
    points: Any, weight: Any, bias: Any, k: int, V: Any = None, c: Any = None
) -> PatchPieces:
    """Coalitions and pieces on a surface through a grid of points, cut into triangles.

    Exact on the triangles. A piece that the surface leaves and enters again counts once.

    Args:
        points: (rows, columns, d) grid, rows and columns >= 2; no triangle may be flat.
        weight: (N, d) router weight.
        bias: (N,) router bias or None.
        k: experts chosen per input.
        V: (N, H, d) weights of ReLU neurons, or None: pieces are then the coalitions.
        c: (N, H) their biases.
    """
    router = as_router(weight, bias, k)
    neurons = as_neurons(V, c, router)
    grid = np.asarray(points, dtype=np.float64)
    require(grid.ndim == 3 and min(grid.shape[:2]) >= 2, f"need a grid of points, got {grid.shape}")
    coalitions: set[tuple[int, ...]] = set()
    pieces: set[tuple[tuple[int, ...], bytes]] = set()
    covered, triangles = 0.0, _triangles(grid)
    for corners in triangles:
        plane = plane_through(corners)
        outline = plane.marks if area(plane.marks) > 0 else plane.marks[::-1]
        lines = None if neurons is None else lines_on_plane(neurons, plane.origin, plane.axes)
        covered += area(outline)
        for cell in cells_within(outline, restricted_on_plane(router, plane.origin, plane.axes)):
            coalitions.add(cell.coalition)
            pieces |= {(cell.coalition, signs) for signs, _ in pieces_of(cell, lines)}
    return PatchPieces(len(coalitions), len(pieces), len(triangles), covered)


def grid_of(
    surface: Callable[[float, float], Any], rows: int, columns: int
) -> Float[np.ndarray, "rows columns width"]:
    """Points surface(s, t) at equal steps of 0 <= s, t <= 1."""
    require(rows >= 2 and columns >= 2, f"need rows, columns >= 2, got {rows=}, {columns=}")
    at = [np.linspace(0, 1, n) for n in (rows, columns)]
    return np.array([[np.asarray(surface(s, t), dtype=np.float64) for t in at[1]] for s in at[0]])


def _triangles(grid: np.ndarray) -> list[np.ndarray]:
    found = []
    for i in range(grid.shape[0] - 1):
        for j in range(grid.shape[1] - 1):
            a, b, c, d = grid[i, j], grid[i, j + 1], grid[i + 1, j], grid[i + 1, j + 1]
            found += [np.stack([a, b, c]), np.stack([b, d, c])]
    return found
