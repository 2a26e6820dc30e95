"""Router cells on planes and surfaces of inputs, as exact polygons.

A cell is cut out of the polygon by removing, again and again, the corner that violates the router's
order most. An edge that a tie made names the two experts that tie there, which gives the cell
behind it. The areas of the cells must add up to that of the polygon; otherwise the router is
degenerate there and an error is raised. Lengths in a picture are lengths of input space.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.spatial import ConvexHull

from tieline.core.errors import TielineError, require
from tieline.core.records import to_plain
from tieline.lab.tropical.affine import (
    AffineRouter,
    Neurons,
    as_neurons,
    as_points,
    as_router,
    captured_inputs,
    chosen_experts,
)
from tieline.trace.record import LayerTrace

Label = tuple[int, int] | None
ROUNDING = 1e-12
MOST_CELLS = 20_000


class Polygon(NamedTuple):
    """A convex polygon: corner i and the label of the edge from it to the next."""

    corners: Float[np.ndarray, "corners 2"]
    labels: list[Label]


class PlanarCell(NamedTuple):
    """The cell of a coalition; an edge is labelled (leaving, entering) or None at the rim."""

    coalition: tuple[int, ...]
    polygon: Polygon


def polygon_area(corners: Float[np.ndarray, "corners 2"]) -> float:
    """Area of a polygon with counter-clockwise corners."""
    if len(corners) < 3:
        return 0.0
    x, y = (corners - corners[0]).T
    return float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1)) / 2)


def clip_polygon(polygon: Polygon, normal: np.ndarray, offset: float, label: Label) -> Polygon:
    """Clip a polygon to normal·x + offset >= 0; the new edge gets `label`."""
    corners, labels = polygon
    side = corners @ normal + offset
    if (side >= 0).all():
        return polygon
    clipped: list[np.ndarray] = []
    clipped_labels: list[Label] = []
    for i in range(len(corners)):
        j = (i + 1) % len(corners)
        if side[i] >= 0:
            clipped.append(corners[i])
            clipped_labels.append(labels[i])
        if (side[i] >= 0) != (side[j] >= 0):
            share = side[i] / (side[i] - side[j])
            clipped.append(corners[i] + share * (corners[j] - corners[i]))
            clipped_labels.append(label if side[i] >= 0 else labels[i])
    return Polygon(np.array(clipped).reshape(-1, 2), clipped_labels)


def cells_within(corners: Float[np.ndarray, "corners 2"], router: AffineRouter) -> list[PlanarCell]:
    """List the coalitions that a planar router chooses in a convex polygon, with their cells."""
    outline = Polygon(corners, [None] * len(corners))
    least = polygon_area(corners) * ROUNDING
    require(least > 0, "the polygon has no area")
    # off the centre, where pictures put their points and a router without bias ties
    start = corners.mean(axis=0) + 0.0137 * (corners[0] - corners.mean(axis=0))
    first = np.flatnonzero(chosen_experts(router.scores(start[None]), router.k)[0])
    queue, visited = deque([tuple(first.tolist())]), {tuple(first.tolist())}
    cells = []
    while queue:
        coalition = queue.popleft()
        polygon = cell_polygon(outline, router, coalition)
        if polygon_area(polygon.corners) <= least:
            continue
        cells.append(PlanarCell(coalition, polygon))
        require(len(cells) <= MOST_CELLS, f"more than {MOST_CELLS} cells: take a smaller window")
        for i, j in {label for label in polygon.labels if label is not None}:
            neighbour = tuple(sorted(set(coalition) - {i} | {j}))
            if neighbour not in visited:
                visited.add(neighbour)
                queue.append(neighbour)
    _check_covered_area(cells, corners)
    return cells


def cell_polygon(
    outline: Polygon, router: AffineRouter, coalition: tuple[int, ...], band: float = 0.0
) -> Polygon:
    """Clip `outline` to where the coalition's experts lead all others by at least `band`."""
    inside = np.zeros(len(router.bias), dtype=bool)
    inside[list(coalition)] = True
    polygon, scale = outline, float(np.abs(router.scores(outline.corners)).max()) or 1.0
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
        polygon = clip_polygon(
            polygon, normal, float(router.bias[i] - router.bias[j] - band), (i, j)
        )
    raise TielineError(f"the cell of {coalition} is lost in rounding: scores reach {scale:.1e}")


def split_by_lines(
    corners: Float[np.ndarray, "corners 2"],
    normals: Float[np.ndarray, "lines 2"],
    offsets: Float[np.ndarray, " lines"],
) -> list[tuple[bytes, np.ndarray]]:
    """Cut a convex polygon by lines into pieces: sign pattern and corners of each."""
    least = polygon_area(corners) * ROUNDING
    pieces = [(np.zeros(len(offsets), dtype=bool), Polygon(corners, [None] * len(corners)))]
    for line, (normal, offset) in enumerate(zip(normals, offsets, strict=True)):
        halves = []
        for signs, polygon in pieces:
            for positive in (True, False):
                way = 1.0 if positive else -1.0
                half = clip_polygon(polygon, way * normal, way * float(offset), None)
                if polygon_area(half.corners) > least:
                    marked = signs.copy()
                    marked[line] = positive
                    halves.append((marked, half))
        pieces = halves
    return [(np.packbits(signs).tobytes(), polygon.corners) for signs, polygon in pieces]


def _check_covered_area(cells: list[PlanarCell], corners: np.ndarray) -> None:
    """Raise unless the areas of the cells add up to that of the polygon."""
    covered, total = (
        sum(polygon_area(cell.polygon.corners) for cell in cells),
        polygon_area(corners),
    )
    if abs(covered - total) > 1e-8 * total:
        raise TielineError(
            f"the cells cover {covered / total:.6f} of the polygon: the router is degenerate there "
            "(three experts tie along a line, or two are equal); move the points or the router a "
            "little"
        )


Corners = list[list[float]]


@dataclass(frozen=True)
class Plane:
    """x(u, v) = origin + u axes[0] + v axes[1], with the three points and the window drawn."""

    origin: Float[np.ndarray, " dim"]
    axes: Float[np.ndarray, "2 dim"]
    marks: Float[np.ndarray, "3 2"]
    window: Float[np.ndarray, "4 2"]


@dataclass(frozen=True)
class SliceCell:
    """One coalition on the plane."""

    coalition: tuple[int, ...]  # the chosen experts
    corners: Corners  # its convex cell, counter-clockwise
    ties: list[tuple[int, int] | None]  # (leaving, entering) of each edge; None at the window's rim
    core: Corners  # the part where the gap is at least ε; the rest of the cell is its band
    kinks: list[Corners]  # segments on which a neuron of a chosen expert vanishes
    pieces: int  # parts into which the kinks cut the cell


@dataclass(frozen=True)
class Support:
    """Where one expert is chosen."""

    expert: int  # which
    cells: list[int]  # indices of its cells in the slice
    outline: list[Corners]  # edges on which it enters or leaves, as segments
    area: float  # of its support inside the window
    fill: float  # area / area of the convex hull; below 1 the support is not convex


@dataclass(frozen=True)
class Slice:
    """A picture of a router on a plane, as plain numbers."""

    n_experts: int
    k: int
    epsilon: float
    window: Corners
    marks: Corners
    cells: list[SliceCell]
    support: Support | None
    band_share: float

    def to_dict(self) -> dict[str, Any]:
        """Return the slice as JSON values."""
        return to_plain(self)


def plane_through(points: Any, margin: float = 0.6) -> Plane:
    """Build the plane through three points of R^d, with a margin relative to their box."""
    dim = np.shape(points)[-1]
    require(dim >= 2, f"a plane needs d >= 2, got d = {dim}")
    p = as_points(points, dim, 3)
    require(len(p) == 3, f"need three points, got {len(p)}")
    origin = p.mean(axis=0)
    q, r = np.linalg.qr((p[1:] - p[0]).T)
    sizes = np.abs(np.diag(r))
    require(bool(sizes.min() > 1e-9 * sizes.max()), "the three points lie on one line")
    axes = (q * np.sign(np.diag(r))).T
    marks = (p - origin) @ axes.T
    low, high = marks.min(axis=0), marks.max(axis=0)
    half = (0.5 + margin) * float((high - low).max())
    middle = (low + high) / 2
    window = middle + half * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    return Plane(origin, axes, marks, window)


def slice_router(
    points: Any,
    weight: Any,
    bias: Any,
    k: int,
    *,
    epsilon: float = 0.0,
    V: Any = None,
    c: Any = None,
    expert: int | None = None,
    margin: float = 0.6,
) -> Slice:
    """Cut the cells of a router by the plane through three inputs (3, d).

    Bands are gap < ε, in units of the score. Kinks are drawn for ReLU neurons V (N, H, d), c (N,
    H), and the support of `expert` is outlined, where they are given.
    """
    router = as_router(weight, bias, k)
    neurons = as_neurons(V, c, router)
    require(epsilon >= 0, f"need epsilon >= 0, got {epsilon}")
    plane = plane_through(as_points(points, router.weight.shape[1], 3), margin)
    flat, lines = _router_on_plane(router, neurons, plane)
    planar = cells_within(plane.window, flat)
    cells = [_plane_cell_record(cell, flat, epsilon, lines) for cell in planar]
    cores = sum(polygon_area(np.array(cell.core).reshape(-1, 2)) for cell in cells)
    return Slice(
        n_experts=len(router.bias),
        k=k,
        epsilon=epsilon,
        window=plane.window.tolist(),
        marks=plane.marks.tolist(),
        cells=cells,
        support=None if expert is None else expert_support(cells, expert),
        band_share=max(0.0, 1 - cores / polygon_area(plane.window)),
    )


def expert_support(cells: Sequence[SliceCell], expert: int) -> Support:
    """Union of the cells in which `expert` is chosen, with its share of its convex hull."""
    indices = [i for i, cell in enumerate(cells) if expert in cell.coalition]
    require(len(indices) > 0, f"expert {expert} is chosen nowhere on this slice")
    outline = []
    for cell in (cells[i] for i in indices):
        for edge, tie in enumerate(cell.ties):
            if tie is not None and tie[0] == expert:
                outline.append([cell.corners[edge], cell.corners[(edge + 1) % len(cell.corners)]])
    corners = np.concatenate([np.array(cells[i].corners) for i in indices])
    covered = sum(polygon_area(np.array(cells[i].corners)) for i in indices)
    return Support(expert, indices, outline, covered, covered / float(ConvexHull(corners).volume))


def slice_layer(
    layer: LayerTrace,
    weight: Any,
    tokens: tuple[int, int, int],
    *,
    bias: Any = None,
    epsilon: float = 0.0,
    expert: int | None = None,
) -> Slice:
    """`slice_router` through the router inputs of three tokens, captured with keep="inputs"."""
    points = captured_inputs(layer)[list(tokens)]
    return slice_router(points, weight, bias, layer.facts.k, epsilon=epsilon, expert=expert)


def _router_on_plane(
    router: AffineRouter, neurons: Neurons | None, plane: Plane
) -> tuple[AffineRouter, Neurons | None]:
    """Express router and neurons as functions of (u, v) on the plane."""
    (weight, bias, k), origin, axes = router, plane.origin, plane.axes
    flat = AffineRouter(weight @ axes.T, weight @ origin + bias, k)
    if neurons is None:
        return flat, None
    return flat, Neurons(neurons.weight @ axes.T, neurons.weight @ origin + neurons.bias)


def _plane_cell_record(
    cell: PlanarCell, router: AffineRouter, epsilon: float, neurons: Neurons | None
) -> SliceCell:
    """Describe a cell: corners, ties, core away from ties, kinks and pieces."""
    corners = cell.polygon.corners
    core = cell_polygon(Polygon(corners, [None] * len(corners)), router, cell.coalition, epsilon)
    return SliceCell(
        coalition=cell.coalition,
        corners=corners.tolist(),
        ties=cell.polygon.labels,
        core=core.corners.tolist(),
        kinks=[] if neurons is None else _kink_segments(cell, neurons),
        pieces=len(pieces_of_cell(cell, neurons)),
    )


def pieces_of_cell(cell: PlanarCell, lines: Neurons | None) -> list[tuple[bytes, np.ndarray]]:
    """Split a cell by the kinks of its experts: activation pattern and corners of each part."""
    corners = cell.polygon.corners
    if lines is None:
        return [(b"", corners)]
    active = list(cell.coalition)
    return split_by_lines(
        corners, lines.weight[active].reshape(-1, 2), lines.bias[active].reshape(-1)
    )


def _kink_segments(cell: PlanarCell, lines: Neurons) -> list[Corners]:
    """Return the segments inside the cell on which neurons of its experts vanish."""
    active, corners = list(cell.coalition), cell.polygon.corners
    normals, offsets = lines.weight[active].reshape(-1, 2), lines.bias[active].reshape(-1)
    segments = []
    for normal, offset in zip(normals, offsets, strict=True):
        side = corners @ normal + offset
        next_side = np.roll(side, -1)
        crossed = np.flatnonzero((side >= 0) != (next_side >= 0))
        if len(crossed) == 2:
            share = (side[crossed] / (side[crossed] - next_side[crossed]))[:, None]
            next_corners = np.roll(corners, -1, axis=0)[crossed]
            segments.append((corners[crossed] + share * (next_corners - corners[crossed])).tolist())
    return segments


@dataclass(frozen=True)
class PatchPieces:
    """Coalitions and (coalition, pattern) pieces that a triangulated surface meets."""

    coalitions: int
    pieces: int
    triangles: int
    area: float


def pieces_on_patch(
    points: Any, weight: Any, bias: Any, k: int, V: Any = None, c: Any = None
) -> PatchPieces:
    """Count coalitions and pieces on a triangulated surface through a (rows, columns, d) grid.

    Exact on the triangles, none of which may have area zero. A piece that the surface re-enters
    counts once. Without neurons V, c the pieces are the coalitions.
    """
    router = as_router(weight, bias, k)
    neurons = as_neurons(V, c, router)
    grid = np.asarray(points, dtype=np.float64)
    require(grid.ndim == 3 and min(grid.shape[:2]) >= 2, f"need a grid of points, got {grid.shape}")
    coalitions: set[tuple[int, ...]] = set()
    pieces: set[tuple[tuple[int, ...], bytes]] = set()
    covered, triangles = 0.0, _grid_triangles(grid)
    for corners in triangles:
        plane = plane_through(corners)
        outline = plane.marks if polygon_area(plane.marks) > 0 else plane.marks[::-1]
        flat, lines = _router_on_plane(router, neurons, plane)
        covered += polygon_area(outline)
        for cell in cells_within(outline, flat):
            coalitions.add(cell.coalition)
            pieces |= {(cell.coalition, signs) for signs, _ in pieces_of_cell(cell, lines)}
    return PatchPieces(len(coalitions), len(pieces), len(triangles), covered)


def grid_of(
    surface: Callable[[float, float], Any], rows: int, columns: int
) -> Float[np.ndarray, "rows columns dim"]:
    """Evaluate surface(s, t) at equal steps of 0 <= s, t <= 1."""
    require(rows >= 2 and columns >= 2, f"need rows, columns >= 2, got {rows=}, {columns=}")
    steps = [np.linspace(0, 1, n) for n in (rows, columns)]
    return np.array(
        [[np.asarray(surface(s, t), dtype=np.float64) for t in steps[1]] for s in steps[0]]
    )


def _grid_triangles(grid: np.ndarray) -> list[np.ndarray]:
    """Split a grid of points into two triangles per square."""
    triangles = []
    for i in range(grid.shape[0] - 1):
        for j in range(grid.shape[1] - 1):
            a, b, c, d = grid[i, j], grid[i, j + 1], grid[i + 1, j], grid[i + 1, j + 1]
            triangles += [np.stack([a, b, c]), np.stack([b, d, c])]
    return triangles
