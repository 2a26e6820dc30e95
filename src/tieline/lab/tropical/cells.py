"""Order-k cells of an affine router, one per chosen coalition (paper 3, Prop. 4.2, Thm. 4.5).

Cells are listed around the ties of d + 1 experts where these are few. Otherwise a search goes from
cell to cell through facets, by warm-started linear programmes (HiGHS). In homogeneous coordinates
y = (x, x_0), x_0 > 0, coalition I has a cell if a level t and a slack s > 0 exist with z_i - t >= s
for i in I and z_j - t <= -s for j not in I; s is made as large as the box |y| <= 1 allows. The cell
has a facet towards I - i + j if the same holds with z_i = z_j = t. A programme has N rows, of which
only those of experts that changed side are touched, and the solver starts from its last basis.
Time grows with cells times k (N - k), whatever C(N, d + 1) is.

A top-k router with biases -‖w‖²/2 chooses the k nearest points, so its cells are Voronoi cells and
number O(k (n-k)), far from C(n, k). Unbounded cells are those of the router without biases.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from typing import Any, cast

import numpy as np
from jaxtyping import Bool, Float, Int

from tieline.core.errors import ParameterError, require
from tieline.lab.tropical.affine import (
    RELATIVE_TOLERANCE,
    Count,
    CountingRouter,
    DegenerateError,
    RouterBias,
    RouterWeight,
    as_points,
    counting_router,
    why_degenerate,
)
from tieline.lab.tropical.capacity import expected_cells

MAX_SUBSETS = 50_000_000  # largest number of tied sets C(N, d + 1) that `count_cells` goes through
FEW_SUBSETS = 1_000_000
"""Largest number of tied sets for which `cells` lists corners instead of searching."""
LEAST_SLACK = 1e-8  # slack above which a cell or facet exists
MOST_EMPTY_SLACK = 1e-9  # slack below which it does not; HiGHS is accurate to 1e-10
MOST_POINTS = 128  # largest number of points of `voronoi_cells`

Masks = Bool[np.ndarray, "cells experts"]
Facets = Int[np.ndarray, "facets 4"]
Points = Float[np.ndarray, "cells dim"]
Diagram = tuple[Masks, Facets, Points]
"""Coalitions, facets as in `Cells`, and a point inside each cell."""


@dataclass(frozen=True)
class Cells:
    """Cells of a router."""

    # (C, k) chosen experts, ascending; cells are sorted by them
    coalitions: Int[np.ndarray, "cells k"]
    witnesses: Float[np.ndarray, "cells dim"]  # (C, d) a point inside each cell
    # (C,) z_[k] - z_[k+1] at the witness, for weights scaled to size 1; infinite where there
    # is one cell only
    margins: Float[np.ndarray, " cells"]
    # (F, 4) rows (cell, leaving, entering, neighbour): the wall z_leaving = z_entering bounds
    # the cell, and the cell behind it chooses `entering` instead. Each wall is listed from
    # both sides.
    facets: Int[np.ndarray, "facets 4"]
    method: str  # "tied sets" or "linear programming"

    def __len__(self) -> int:
        return len(self.coalitions)

    def neighbours(self, cell: int) -> Int[np.ndarray, " n"]:
        """Indices of the cells behind the facets of `cell`."""
        return self.facets[self.facets[:, 0] == cell, 3]


def count_cells(W: RouterWeight, b: RouterBias, k: int) -> Count:
    """Count the coalitions of k experts that some input chooses.

    Over k = 0 ... N the counts sum to Φ(N, d+1).

    Every cell is found once, at its lowest point, a tie of at most d + 1 experts. A router without
    bias has cones for cells and sums to 2 Σ_{j<=d} C(N-1, j).
    """
    from tieline.lab.tropical.compiled_counts import count_affine, count_linear

    router = essential(counting_router(W, b, k))
    experts, dim = router.W.shape
    no_experts = np.zeros(experts, dtype=np.bool_)
    require(
        comb(experts, dim + 1) <= MAX_SUBSETS,
        f"N = {experts}, d = {dim} has {comb(experts, dim + 1):.3g} tied sets, more than "
        f"{MAX_SUBSETS:.0e}; `cells` searches cell by cell, `expected_cells` gives the mean",
    )
    if router.linear:
        count, safety = count_linear(router.W, k, no_experts)
    else:
        count, safety = count_affine(router.W, router.b, k, no_experts)
    check_safety(router, safety)
    return Count(int(count), "order-k cells", "tied sets", float(safety))


def cells(W: RouterWeight, b: RouterBias, k: int, max_cells: int = 100_000) -> Cells:
    """List all cells, 0 <= k <= N, with inner points, facets and neighbours."""
    router = essential(counting_router(W, b, k))
    experts, dim = router.W.shape
    if k in (0, experts) or dim == 0:
        return _single_cell(router, k)
    if comb(experts, dim + 1) > FEW_SUBSETS:
        return search_cells(router, k, max_cells)
    diagram = (
        _cone_diagram(router, k)
        if router.linear
        else _corner_diagram(router.W, router.b, k, router)
    )
    return _cells_of_diagram(router, k, diagram, "tied sets")


def essential(router: CountingRouter) -> CountingRouter:
    """Restrict the router to the span of its weights' differences, which keeps all cells."""
    _, sizes, axes = np.linalg.svd(router.W, full_matrices=False)
    rank = int((sizes > RELATIVE_TOLERANCE * max(float(sizes[0]), 1e-300)).sum())
    if rank == router.W.shape[1]:
        return router
    turn = np.ascontiguousarray(axes[:rank].T)
    return replace(router, W=router.W @ turn, rotation=router.rotation @ turn)


def check_safety(router: CountingRouter, safety: float) -> None:
    """Raise if a gap within rounding decided a count."""
    if safety < 1.0:
        reason = why_degenerate(router.W, np.empty((0, router.W.shape[1])))
        raise DegenerateError(f"the router is not in general position: {reason}")


def _single_cell(router: CountingRouter, k: int) -> Cells:
    """Return the one cell for k = 0 or N, or equal weights of all experts."""
    experts, dim = len(router.b), len(router.rotation)
    order = np.argsort(-router.b, kind="stable")
    if 0 < k < experts:
        check_safety(
            router, float(router.b[order[k - 1]] - router.b[order[k]]) / RELATIVE_TOLERANCE
        )
    coalition = np.sort(order[:k])[None]
    nowhere = np.empty((0, 4), dtype=np.int64)
    return Cells(coalition, np.zeros((1, dim)), np.array([np.inf]), nowhere, "tied sets")


def _cone_diagram(router: CountingRouter, k: int) -> Diagram:
    """Diagram of cones, which all meet x_1 = 1 or x_1 = -1, and so do their facets."""
    halves = [_half_diagram(router, k, side) for side in (1.0, -1.0)]
    offset = len(halves[0][0])
    second_facets = halves[1][1] + np.array([offset, 0, 0, offset])
    masks, points = (np.concatenate([half[i] for half in halves]) for i in (0, 2))
    facets = np.concatenate([halves[0][1], second_facets])
    if masks.shape == (2, 2):  # two experts: the half-lines meet at 0, where more would tie at once
        first, second = masks.argmax(axis=1)
        facets = np.array([(0, first, second, 1), (1, second, first, 0)], dtype=np.int64)
    return masks, facets, points


def _half_diagram(router: CountingRouter, k: int, side: float) -> Diagram:
    """Diagram of a router without bias on the plane x_1 = side."""
    bias = side * router.W[:, 0]
    if router.W.shape[1] == 1:
        order = np.argsort(-bias, kind="stable")
        check_safety(router, float(bias[order[k - 1]] - bias[order[k]]) / RELATIVE_TOLERANCE)
        mask = np.isin(np.arange(len(order)), order[:k])[None]
        return mask, np.empty((0, 4), np.int64), np.array([[side]])
    masks, facets, points = _corner_diagram(np.ascontiguousarray(router.W[:, 1:]), bias, k, router)
    return masks, facets, np.column_stack([np.full(len(points), side), points])


def _corner_diagram(
    W: Float[np.ndarray, "experts dim"],
    b: Float[np.ndarray, " experts"],
    k: int,
    router: CountingRouter,
) -> Diagram:
    """Diagram (coalitions, facets, inner points) of z = W x + b, from its corners."""
    from tieline.lab.tropical.compiled_listing import tie_corners

    *arrays, safety = tie_corners(W, b, k)
    check_safety(router, safety)
    ties, above, corner_points = cast("tuple[np.ndarray, np.ndarray, np.ndarray]", arrays)
    size = W.shape[1] + 1
    masks, facets, raised_masks, corner_rows, first = [], [], [], [], 0
    for n_raised in range(1, size):
        corners = np.flatnonzero(above.sum(axis=1) == k - n_raised)
        raised_sets = list(combinations(range(size), n_raised))
        rows = {
            raised: first + i * len(corners) + np.arange(len(corners))
            for i, raised in enumerate(raised_sets)
        }
        first += len(raised_sets) * len(corners)
        for raised in raised_sets:
            mask = above[corners]
            np.put_along_axis(mask, ties[corners][:, list(raised)], True, axis=1)
            masks.append(mask)
            corner_rows.append(corners)
            raised_masks.append(np.tile(np.isin(np.arange(size), raised), (len(corners), 1)))
            for i, j in ((i, j) for i in raised for j in range(size) if j not in raised):
                neighbours = rows[tuple(sorted({*raised} - {i} | {j}))]
                facets.append(
                    np.stack([rows[raised], ties[corners, i], ties[corners, j], neighbours], axis=1)
                )
    masks, corner_rows = np.concatenate(masks), np.concatenate(corner_rows)
    first_row, cell = _distinct_masks(masks)
    masks, first_corner = masks[first_row], corner_rows[first_row]
    raised_mask = np.concatenate(raised_masks)[first_row]
    inside = _step_inside(W, b, ties[first_corner], raised_mask, masks, corner_points[first_corner])
    middle = np.stack([np.bincount(cell, x) for x in corner_points[corner_rows].T], axis=1)
    points = 0.5 * (inside + middle / np.bincount(cell)[:, None])
    return masks, _distinct_facets(np.concatenate(facets), cell, len(W)), points


def _distinct_masks(
    masks: Bool[np.ndarray, "rows experts"],
) -> tuple[Int[np.ndarray, " cells"], Int[np.ndarray, " rows"]]:
    """Return a row of each distinct mask, and the index of the distinct mask of each row."""
    bits = np.packbits(masks, axis=1)
    padded = np.zeros((len(bits), -(-bits.shape[1] // 8) * 8), np.uint8)
    padded[:, : bits.shape[1]] = bits
    names = padded.view(np.uint64)
    names = names[:, 0] if names.shape[1] == 1 else padded.view(f"V{padded.shape[1]}")[:, 0]
    _, first, index = np.unique(names, return_index=True, return_inverse=True)
    return first, index.ravel()


def _distinct_facets(
    facets: Int[np.ndarray, "sides 4"], name: Int[np.ndarray, " rows"], experts: int
) -> Facets:
    """Rename the cells of facets, and keep each facet once, in order."""
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
    corner: Float[np.ndarray, "corners dim"],
) -> Float[np.ndarray, "corners dim"]:
    """Step from each corner half way to the next wall, in the direction that parts the tie evenly.

    The step solves w_i · x - t = 1 for the chosen experts of the tie and -1 for the others.
    """
    goal = np.where(chosen, 1.0, -1.0)[..., None]
    lifted = np.concatenate([W[tied], np.full((*tied.shape, 1), -1.0)], axis=2)
    step = np.linalg.solve(lifted, goal)[..., 0]
    step /= np.abs(step[:, :-1]).max(axis=1, keepdims=True)
    score, change = corner @ W.T + b, step[:, :-1] @ W.T
    level = np.take_along_axis(score, tied[:, :1], axis=1)
    rise = np.where(mask, 1.0, -1.0) * (score - level)
    speed = np.where(mask, 1.0, -1.0) * (change - step[:, -1:])
    np.put_along_axis(speed, tied, 0.0, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        step_limit = np.where(speed < 0, -rise / speed, np.inf).min(axis=1)
    return (
        corner
        + np.minimum(0.5 * step_limit, 1.0 + np.abs(corner).max(axis=1))[:, None] * step[:, :-1]
    )


def _cells_of_diagram(router: CountingRouter, k: int, diagram: Diagram, method: str) -> Cells:
    """Convert a diagram to `Cells`, each cell once, in the order of coalitions."""
    masks, facets, points = diagram
    first_row, cell = _distinct_masks(masks)
    coalitions = np.nonzero(masks[first_row])[1].reshape(len(first_row), k)
    order = np.lexsort(coalitions.T[::-1])
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    rows = first_row[order]
    scores, members = points[rows] @ router.W.T + router.b, masks[rows]
    gaps = np.where(members, scores, np.inf).min(axis=1)
    gaps = gaps - np.where(members, -np.inf, scores).max(axis=1)
    require(bool((gaps > 0).all()), "a cell is too thin for float64", DegenerateError)
    witnesses = router.length * points[rows] @ router.rotation.T
    facets = _distinct_facets(facets, rank[cell], len(router.b))
    return Cells(coalitions[order], witnesses, gaps, facets, method)


def search_cells(router: CountingRouter, k: int, max_cells: int) -> Cells:
    """Find cells from one another, by crossing their facets."""
    search = CellSearch(router.W, router.b)
    start = np.random.default_rng(k).standard_normal(router.W.shape[1])
    order = np.argsort(-(router.W @ start + router.b), kind="stable")
    waiting = [frozenset(int(e) for e in order[:k])]
    numbers, facets, points = {waiting[0]: 0}, [], []
    visited: list[frozenset[int]] = []
    while waiting:
        coalition = waiting.pop(0)
        visited.append(coalition)
        _, y = search.slack(coalition)
        points.append(y[:-1] / y[-1])
        for leaving, entering in search.facets(coalition):
            behind = coalition - {leaving} | {entering}
            if behind not in numbers:
                require(
                    len(numbers) < max_cells,
                    f"more than {max_cells} cells; raise max_cells, or use `expected_cells`",
                )
                numbers[behind] = len(numbers)
                waiting.append(behind)
            facets.append((numbers[coalition], leaving, entering, numbers[behind]))
    masks = np.array([[e in c for e in range(len(router.b))] for c in visited])
    diagram = masks, np.array(facets, dtype=np.int64).reshape(-1, 4), np.array(points)
    return _cells_of_diagram(router, k, diagram, "linear programming")


class CellSearch:
    """Linear programmes for cells and facets of the router z = W x + b (weights of size 1)."""

    def __init__(
        self, W: Float[np.ndarray, "experts dim"], b: Float[np.ndarray, " experts"]
    ) -> None:
        try:
            import highspy
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "searching cells one by one needs HiGHS: pip install 'tieline[tropical]'"
            ) from error
        self.rows = np.column_stack([W, b])
        self.experts, self.size = self.rows.shape
        self.solver = highspy.Highs()
        for option, value in (
            ("output_flag", False),
            ("presolve", "off"),
            ("primal_feasibility_tolerance", 1e-10),
            ("dual_feasibility_tolerance", 1e-10),
        ):
            self.solver.setOptionValue(option, value)
        # columns y, t, s; a row z_e - t - (side) s per expert and x_0 - s >= 0; maximise s
        endless, size = self.solver.inf, self.size
        for _ in range(size):
            self.solver.addVar(-1.0, 1.0)
        self.solver.addVar(-endless, endless)
        self.solver.addVar(0.0, 1.0)
        self.solver.changeColCost(size + 1, -1.0)
        columns = np.arange(size + 2, dtype=np.int32)
        for row in self.rows:
            entries = np.concatenate([row, [-1.0, -1.0]])
            self.solver.addRow(0.0, endless, size + 2, columns, entries)
        last = np.array([size - 1, size + 1], dtype=np.int32)
        self.solver.addRow(0.0, endless, 2, last, np.array([1.0, -1.0]))
        self.sides = [1] * self.experts  # above (1), below (-1) or at (0) the level

    def slack(
        self, coalition: frozenset[int], tied: tuple[int, ...] = ()
    ) -> tuple[float, Float[np.ndarray, " d1"]]:
        """Largest slack s, and y, with `coalition` above, `tied` at the level, the rest below."""
        endless = self.solver.inf
        for expert in range(self.experts):
            side = 0 if expert in tied else 1 if expert in coalition else -1
            if self.sides[expert] != side:
                low, high = 0.0 if side >= 0 else -endless, 0.0 if side <= 0 else endless
                self.solver.changeCoeff(expert, self.size + 1, -float(side))
                self.solver.changeRowBounds(expert, low, high)
                self.sides[expert] = side
        self.solver.run()
        solution = np.array(self.solver.getSolution().col_value)
        return float(solution[-1]), solution[: self.size]

    def exists(self, coalition: frozenset[int], tied: tuple[int, ...] = ()) -> bool:
        """Whether the cell of `coalition`, or its facet at `tied`, is not empty."""
        slack, _ = self.slack(coalition, tied)
        require(
            not MOST_EMPTY_SLACK < slack < LEAST_SLACK,
            f"coalition {sorted(coalition)} is too thin (slack {slack:.1e}) to be told from empty",
            DegenerateError,
        )
        return slack >= LEAST_SLACK

    def facets(self, coalition: frozenset[int]) -> Iterator[tuple[int, int]]:
        """Yield the pairs (leaving, entering) whose wall bounds the cell."""
        outside = [e for e in range(self.experts) if e not in coalition]
        for leaving in sorted(coalition):
            for entering in outside:
                if self.exists(coalition, (leaving, entering)):
                    yield leaving, entering


def voronoi_cells(points: Any, k: int) -> int:
    """Count order-k Voronoi cells of plane points, no three on a line, no four on a circle."""
    sites = as_points(points, 2, 2)
    n = len(sites)
    require(n <= MOST_POINTS, f"at most {MOST_POINTS} points, got {n}: use expected_voronoi_cells")
    require(1 <= k < n, f"need 1 <= k < n, got {k=}, {n=}")
    _refuse_circles(sites)
    return (2 * k - 1) * n - (k * k - 1) - int(k_sets(sites)[: k - 1].sum())


def k_sets(points: Any) -> Int[np.ndarray, " orders"]:
    """Numbers e_i of sets of i points that a line separates from the rest, i = 1 ... n-1."""
    sites = as_points(points, 2, 2)
    n = len(sites)
    along = sites[None, :, :] - sites[:, None, :]
    left_counts = np.empty((n, n), dtype=np.int64)
    for i in range(n):
        x, y = along[i].T
        turn = np.outer(x, y) - np.outer(y, x)
        distinct = ~np.eye(n, dtype=bool)
        distinct[i], distinct[:, i] = False, False
        size = np.linalg.norm(along[i], axis=-1)
        small = np.abs(turn) <= RELATIVE_TOLERANCE * size[:, None] * size[None, :]
        if (small & distinct).any():
            a, b = np.argwhere(small & distinct)[0]
            raise ParameterError(f"points {i}, {a} and {b} lie on one line")
        left_counts[i] = ((turn > 0) & distinct).sum(axis=1)
    return np.bincount(left_counts[~np.eye(n, dtype=bool)], minlength=n - 1)[: n - 1]


def expected_voronoi_cells(n_points: int, k: int) -> float:
    """Expected order-k cells of iid N(0, I_2) points: (2k-1) n - (k²-1) - Σ_{i<k} E[e_i].

    E[e_i] = 2 C(n, i) P(M = 2), the cells of a Gaussian router without biases on the plane.
    """
    require(1 <= k < n_points, f"need 1 <= k < n, got {k=}, n={n_points}")
    cut_off = sum((expected_cells(n_points, i, 2, bias=False) for i in range(1, k)), 0.0)
    return (2 * k - 1) * n_points - (k * k - 1) - cut_off


def _refuse_circles(sites: np.ndarray) -> None:
    """Raise if four points lie on a circle, where their lifts (x, ‖x‖²) lie in a plane."""
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
            coplanar = (np.abs(volume) <= RELATIVE_TOLERANCE) & upper
            require(not coplanar.any(), f"four points with {i} and {i + 1 + j} lie on one circle")
