"""Cells, witnesses, facets and neighbours of an order-k diagram, from corners or from a search."""

from itertools import combinations
from typing import cast

import numpy as np
from jaxtyping import Bool, Float, Int

from tieline.errors import require
from tieline.tropical.cells import Cells, check_safety
from tieline.tropical.checks import DegenerateError, Router
from tieline.tropical.search import CellSearch

__all__ = ["from_corners", "from_search", "whole_space"]

Masks = Bool[np.ndarray, "cells experts"]
Facets = Int[np.ndarray, "facets 4"]
Points = Float[np.ndarray, "cells dim"]
Diagram = tuple[Masks, Facets, Points]


def whole_space(router: Router, k: int) -> Cells:
    """The one cell of k = 0 or N, or of a router whose weights are all equal."""
    experts, dim = len(router.b), len(router.rotation)
    order = np.argsort(-router.b, kind="stable")
    if 0 < k < experts:
        check_safety(router, float(router.b[order[k - 1]] - router.b[order[k]]) / 1e-11)
    chosen = np.sort(order[:k])[None]
    nowhere = np.empty((0, 4), dtype=np.int64)
    return Cells(chosen, np.zeros((1, dim)), np.array([np.inf]), nowhere, "tied sets")


def from_corners(router: Router, k: int) -> Cells:
    """Cells and facets around all ties of d + 1 experts."""
    diagram = _cones(router, k) if router.linear else _diagram(router.W, router.b, k, router)
    return _assemble(router, k, diagram, "tied sets")


def _cones(router: Router, k: int) -> Diagram:
    """Cones, all of which, with all their facets, meet x_1 = 1 or x_1 = -1."""
    parts = [_slice(router, k, side) for side in (1.0, -1.0)]
    offset = len(parts[0][0])
    moved = parts[1][1] + np.array([offset, 0, 0, offset])
    masks, points = (np.concatenate([part[i] for part in parts]) for i in (0, 2))
    return masks, np.concatenate([parts[0][1], moved]), points


def _slice(router: Router, k: int, side: float) -> Diagram:
    """The diagram of a router without bias on x_1 = side."""
    bias = side * router.W[:, 0]
    if router.W.shape[1] == 1:
        order = np.argsort(-bias, kind="stable")
        check_safety(router, float(bias[order[k - 1]] - bias[order[k]]) / 1e-11)
        mask = np.isin(np.arange(len(order)), order[:k])[None]
        return mask, np.empty((0, 4), np.int64), np.array([[side]])
    masks, facets, points = _diagram(np.ascontiguousarray(router.W[:, 1:]), bias, k, router)
    return masks, facets, np.column_stack([np.full(len(points), side), points])


def _diagram(
    W: Float[np.ndarray, "experts dim"], b: Float[np.ndarray, " experts"], k: int, router: Router
) -> Diagram:
    """(coalitions, facets, points inside) of z = W x + b, from its corners."""
    from tieline.tropical.enumeration import corners

    *arrays, safety = corners(W, b, k)
    check_safety(router, safety)
    ties, above, places = cast("tuple[np.ndarray, np.ndarray, np.ndarray]", arrays)
    size = W.shape[1] + 1
    masks, facets, chosen, at, first = [], [], [], [], 0
    for up in range(1, size):
        here = np.flatnonzero(above.sum(axis=1) == k - up)
        parts = list(combinations(range(size), up))
        rows = {part: first + i * len(here) + np.arange(len(here)) for i, part in enumerate(parts)}
        first += len(parts) * len(here)
        for part in parts:
            mask = above[here]
            np.put_along_axis(mask, ties[here][:, list(part)], True, axis=1)
            masks.append(mask)
            at.append(here)
            chosen.append(np.tile(np.isin(np.arange(size), part), (len(here), 1)))
            for i, j in ((i, j) for i in part for j in range(size) if j not in part):
                behind = rows[tuple(sorted({*part} - {i} | {j}))]
                facets.append(np.stack([rows[part], ties[here, i], ties[here, j], behind], axis=1))
    masks, at, chosen = np.concatenate(masks), np.concatenate(at), np.concatenate(chosen)
    one, cell = _distinct(masks)
    inside = _step_inside(W, b, ties[at[one]], chosen[one], masks[one], places[at[one]])
    middle = np.stack([np.bincount(cell, x) for x in places[at].T], axis=1)
    points = 0.5 * (inside + middle / np.bincount(cell)[:, None])
    return masks[one], _renamed(np.concatenate(facets), cell, len(W)), points


def _distinct(
    masks: Bool[np.ndarray, "rows experts"],
) -> tuple[Int[np.ndarray, " cells"], Int[np.ndarray, " rows"]]:
    """(a row of each distinct mask, which distinct mask each row is)."""
    bits = np.packbits(masks, axis=1)
    words = np.zeros((len(bits), -(-bits.shape[1] // 8) * 8), np.uint8)
    words[:, : bits.shape[1]] = bits
    names = words.view(np.uint64)
    names = names[:, 0] if names.shape[1] == 1 else words.view(f"V{words.shape[1]}")[:, 0]
    _, first, index = np.unique(names, return_index=True, return_inverse=True)
    return first, index.ravel()


def _renamed(
    facets: Int[np.ndarray, "sides 4"], name: Int[np.ndarray, " rows"], experts: int
) -> Facets:
    """Facets with their cells renamed, each once, in order."""
    cell, behind = name[facets[:, 0]], name[facets[:, 3]]
    keys = (cell * experts + facets[:, 1]) * experts + facets[:, 2]
    _, once = np.unique(keys, return_index=True)
    return np.column_stack([cell, facets[:, 1:3], behind])[once].astype(np.int64)


def _step_inside(
    W: Float[np.ndarray, "experts dim"],
    b: Float[np.ndarray, " experts"],
    tied: Int[np.ndarray, "corners d1"],
    chosen: Bool[np.ndarray, "corners d1"],
    mask: Bool[np.ndarray, "corners experts"],
    place: Float[np.ndarray, "corners dim"],
) -> Float[np.ndarray, "corners dim"]:
    """From each corner, half way to the next wall along the direction that parts the tie evenly.

    The step solves w_i · x - t = 1 for the chosen experts of the tie and -1 for the others.
    """
    goal = np.where(chosen, 1.0, -1.0)[..., None]
    lifted = np.concatenate([W[tied], np.full((*tied.shape, 1), -1.0)], axis=2)
    step = np.linalg.solve(lifted, goal)[..., 0]
    step /= np.abs(step[:, :-1]).max(axis=1, keepdims=True)
    score, change = place @ W.T + b, step[:, :-1] @ W.T
    level = np.take_along_axis(score, tied[:, :1], axis=1)
    rise = np.where(mask, 1.0, -1.0) * (score - level)
    speed = np.where(mask, 1.0, -1.0) * (change - step[:, -1:])
    np.put_along_axis(speed, tied, 0.0, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        until = np.where(speed < 0, -rise / speed, np.inf).min(axis=1)
    return place + np.minimum(0.5 * until, 1.0 + np.abs(place).max(axis=1))[:, None] * step[:, :-1]


def _assemble(router: Router, k: int, diagram: Diagram, method: str) -> Cells:
    """The record of a diagram: cells in the order of their coalitions, each once."""
    masks, facets, points = diagram
    one, cell = _distinct(masks)
    coalitions = np.nonzero(masks[one])[1].reshape(len(one), k)
    order = np.lexsort(coalitions.T[::-1])
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    kept = one[order]
    gaps = _gaps(router, masks[kept], points[kept])
    require(bool((gaps > 0).all()), "a cell is too thin for float64", DegenerateError)
    witnesses = router.length * points[kept] @ router.rotation.T
    facets = _renamed(facets, rank[cell], len(router.b))
    return Cells(coalitions[order], witnesses, gaps, facets, method)


def _gaps(router: Router, masks: Masks, points: Points) -> Float[np.ndarray, " cells"]:
    """Smallest chosen less largest other score, negative outside the cell."""
    scores = points @ router.W.T + router.b
    inner = np.where(masks, scores, np.inf).min(axis=1)
    return inner - np.where(masks, -np.inf, scores).max(axis=1)


def from_search(router: Router, k: int, max_cells: int) -> Cells:
    """Cells found one from another through their facets."""
    search = CellSearch(router.W, router.b)
    start = np.random.default_rng(k).standard_normal(router.W.shape[1])
    order = np.argsort(-(router.W @ start + router.b), kind="stable")
    waiting = [frozenset(int(e) for e in order[:k])]
    seen, facets, points = {waiting[0]: 0}, [], []
    done: list[frozenset[int]] = []
    while waiting:
        coalition = waiting.pop(0)
        done.append(coalition)
        _, y = search.slack(coalition)
        points.append(y[:-1] / y[-1])
        for leaving, entering in search.facets(coalition):
            behind = coalition - {leaving} | {entering}
            if behind not in seen:
                require(
                    len(seen) < max_cells,
                    f"more than {max_cells} cells; raise max_cells, or use `expected_cells`",
                )
                seen[behind] = len(seen)
                waiting.append(behind)
            facets.append((seen[coalition], leaving, entering, seen[behind]))
    masks = np.array([[e in c for e in range(len(router.b))] for c in done])
    diagram = masks, np.array(facets, dtype=np.int64).reshape(-1, 4), np.array(points)
    return _assemble(router, k, diagram, "linear programming")
