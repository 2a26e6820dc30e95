"""Convex polygons of the plane cut by the ties of a router and by the kinks of its experts.

    clip            the part of a polygon on one side of a line, edges keeping their labels
    cells_within    every coalition met in a polygon, with its convex cell
    split_by_lines  a convex cell cut into pieces by lines

A cell is found from the polygon by cutting away, again and again, the corner that violates the
router's order most; an edge that a tie made names the two experts which tie there, so that the cell
behind it is known. The areas of the cells must add up to that of the polygon, or the router is
degenerate there and refused.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from tieline.errors import TielineError, require
from tieline.tropical.affine import Router, chosen

__all__ = ["Label", "PlanarCell", "Polygon", "area", "cells_within", "clip", "split_by_lines"]

Label = tuple[int, int] | None
ROUNDING = 1e-12
MOST_CELLS = 20_000


class Polygon(NamedTuple):
    """A convex polygon: corner i and the label of the edge from it to the next."""

    corners: Float[np.ndarray, "corners 2"]
    labels: list[Label]


class PlanarCell(NamedTuple):
    """Where a coalition is chosen; an edge is labelled (leaving, entering) or None at the rim."""

    coalition: tuple[int, ...]
    polygon: Polygon


def area(corners: Float[np.ndarray, "corners 2"]) -> float:
    """Area of a polygon whose corners go round counter-clockwise."""
    if len(corners) < 3:
        return 0.0
    x, y = (corners - corners[0]).T
    return float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1)) / 2)


def clip(polygon: Polygon, normal: np.ndarray, offset: float, label: Label) -> Polygon:
    """The part where normal·x + offset >= 0; the new edge gets `label`."""
    corners, labels = polygon
    side = corners @ normal + offset
    if (side >= 0).all():
        return polygon
    kept: list[np.ndarray] = []
    named: list[Label] = []
    for i in range(len(corners)):
        j = (i + 1) % len(corners)
        if side[i] >= 0:
            kept.append(corners[i])
            named.append(labels[i])
        if (side[i] >= 0) != (side[j] >= 0):
            share = side[i] / (side[i] - side[j])
            kept.append(corners[i] + share * (corners[j] - corners[i]))
            named.append(label if side[i] >= 0 else labels[i])
    return Polygon(np.array(kept).reshape(-1, 2), named)


def cells_within(corners: Float[np.ndarray, "corners 2"], router: Router) -> list[PlanarCell]:
    """Every coalition that a planar router chooses inside a convex polygon, with its cell.

    Args:
        corners: of the polygon, counter-clockwise.
        router: scores on the plane.
    """
    whole = Polygon(corners, [None] * len(corners))
    least = area(corners) * ROUNDING
    require(least > 0, "the polygon has no area")
    # off the centre: pictures put their points there, and a router without bias ties at the origin
    start = corners.mean(axis=0) + 0.0137 * (corners[0] - corners.mean(axis=0))
    first = np.flatnonzero(chosen(router.scores(start[None]), router.k)[0])
    queue, seen = deque([tuple(first.tolist())]), {tuple(first.tolist())}
    cells = []
    while queue:
        coalition = queue.popleft()
        polygon = cell_polygon(whole, router, coalition)
        if area(polygon.corners) <= least:
            continue
        cells.append(PlanarCell(coalition, polygon))
        require(len(cells) <= MOST_CELLS, f"more than {MOST_CELLS} cells: take a smaller window")
        for neighbour in _neighbours(coalition, polygon):
            if neighbour not in seen:
                seen.add(neighbour)
                queue.append(neighbour)
    _check_area(cells, corners)
    return cells


def cell_polygon(
    whole: Polygon, router: Router, coalition: tuple[int, ...], band: float = 0.0
) -> Polygon:
    """Where every expert of the coalition leads every other one by at least `band`."""
    inside = np.zeros(len(router.bias), dtype=bool)
    inside[list(coalition)] = True
    polygon, scale = whole, float(np.abs(router.scores(whole.corners)).max()) or 1.0
    for _ in range(len(inside) ** 2):  # each pair of experts cuts once
        if not len(polygon.corners) or inside.all():
            return polygon
        scores = router.scores(polygon.corners)
        low = np.where(inside, scores, np.inf)
        high = np.where(inside, -np.inf, scores)
        lead = low.min(axis=1) - high.max(axis=1) - band
        worst = int(lead.argmin())
        if lead[worst] >= -ROUNDING * scale:
            return polygon
        i, j = int(low[worst].argmin()), int(high[worst].argmax())
        normal = router.weight[i] - router.weight[j]
        polygon = clip(polygon, normal, float(router.bias[i] - router.bias[j] - band), (i, j))
    raise TielineError(f"the cell of {coalition} is lost in rounding: scores reach {scale:.1e}")


def split_by_lines(
    corners: Float[np.ndarray, "corners 2"],
    normals: Float[np.ndarray, "lines 2"],
    offsets: Float[np.ndarray, " lines"],
) -> list[tuple[bytes, np.ndarray]]:
    """A convex polygon cut by lines: the sign pattern of each piece and its corners."""
    least = area(corners) * ROUNDING
    pieces = [(np.zeros(len(offsets), dtype=bool), Polygon(corners, [None] * len(corners)))]
    for line, (normal, offset) in enumerate(zip(normals, offsets, strict=True)):
        parts = []
        for signs, polygon in pieces:
            for positive in (True, False):
                way = 1.0 if positive else -1.0
                part = clip(polygon, way * normal, way * float(offset), None)
                if area(part.corners) > least:
                    marked = signs.copy()
                    marked[line] = positive
                    parts.append((marked, part))
        pieces = parts
    return [(np.packbits(signs).tobytes(), polygon.corners) for signs, polygon in pieces]


def _neighbours(coalition: tuple[int, ...], polygon: Polygon) -> list[tuple[int, ...]]:
    pairs = {label for label in polygon.labels if label is not None}
    return [tuple(sorted(set(coalition) - {i} | {j})) for i, j in pairs]


def _check_area(cells: list[PlanarCell], corners: np.ndarray) -> None:
    covered, whole = sum(area(cell.polygon.corners) for cell in cells), area(corners)
    if abs(covered - whole) > 1e-8 * whole:
        raise TielineError(
            f"the cells cover {covered / whole:.6f} of the polygon: the router is degenerate there "
            "(three experts tie along a line, or two are equal); move the points or the router a "
            "little"
        )
