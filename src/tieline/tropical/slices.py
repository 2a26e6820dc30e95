"""Two-dimensional pictures of a router: what it chooses on a plane through three inputs.

    plane_through     an orthonormal frame through three points, and the window around them
    slice_router      cells, bands gap < ε, kinks of active neurons, all exact polygons
    expert_support    where one expert is chosen: a union of cells, convex for no k > 1 but by luck
    slice_layer       the same for three hidden states of a captured layer

Lengths in the picture are lengths of input space. `Slice.to_dict` is plain data for `report`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.spatial import ConvexHull

from tieline.errors import TraceError, require
from tieline.trace.record import LayerTrace
from tieline.tropical.affine import Neurons, Router, as_neurons, as_points, as_router
from tieline.tropical.planar import (
    PlanarCell,
    Polygon,
    area,
    cell_polygon,
    cells_within,
    split_by_lines,
)

__all__ = [
    "Plane",
    "Slice",
    "SliceCell",
    "Support",
    "expert_support",
    "plane_through",
    "slice_layer",
    "slice_router",
]

Corners = list[list[float]]


@dataclass(frozen=True)
class Plane:
    """x(u, v) = origin + u axes[0] + v axes[1], with the three points and the window drawn."""

    origin: Float[np.ndarray, " width"]
    axes: Float[np.ndarray, "2 width"]
    marks: Float[np.ndarray, "3 2"]
    window: Float[np.ndarray, "4 2"]


@dataclass(frozen=True)
class SliceCell:
    """One coalition on the plane.

    Attributes:
        coalition: the chosen experts.
        corners: its convex cell, counter-clockwise.
        ties: for each edge the pair (leaving, entering) that ties there, None at the window's rim.
        core: the part where the gap is at least ε; the rest of the cell is its band.
        kinks: segments on which a neuron of a chosen expert vanishes.
        pieces: parts into which the kinks cut the cell.
    """

    coalition: tuple[int, ...]
    corners: Corners
    ties: list[tuple[int, int] | None]
    core: Corners
    kinks: list[Corners]
    pieces: int


@dataclass(frozen=True)
class Support:
    """Where one expert is chosen.

    Attributes:
        expert: which.
        cells: indices of its cells in the slice.
        outline: edges on which it enters or leaves, as segments.
        area: of its support inside the window.
        fill: area / area of the convex hull; below 1 the support is not convex.
    """

    expert: int
    cells: list[int]
    outline: list[Corners]
    area: float
    fill: float


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
        """Plain data, as `report` draws it and JSON holds it."""
        return asdict(self)


def plane_through(points: Any, margin: float = 0.6) -> Plane:
    """The plane through three points of R^d, centred between them.

    Args:
        points: (3, d) array, not on one line (refused), d >= 2.
        margin: room around the points, as a share of the larger side of their box.
    """
    width = np.shape(points)[-1]
    require(width >= 2, f"a plane needs d >= 2, got d = {width}")
    p = as_points(points, width, 3)
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
    """What a router chooses on the plane through three inputs.

    Args:
        points: (3, d) inputs.
        weight: (N, d) router weight.
        bias: (N,) router bias or None.
        k: experts chosen per input.
        epsilon: width ε of the bands, in units of the score: gap < ε.
        V: (N, H, d) weights of ReLU neurons, or None to leave kinks out.
        c: (N, H) their biases.
        expert: an expert whose support is to be outlined.
        margin: see `plane_through`.
    """
    router = as_router(weight, bias, k)
    neurons = as_neurons(V, c, router)
    require(epsilon >= 0, f"need epsilon >= 0, got {epsilon}")
    plane = plane_through(as_points(points, router.weight.shape[1], 3), margin)
    flat = restricted_on_plane(router, plane.origin, plane.axes)
    lines = None if neurons is None else lines_on_plane(neurons, plane.origin, plane.axes)
    planar = cells_within(plane.window, flat)
    cells = [_slice_cell(cell, flat, epsilon, lines) for cell in planar]
    cores = sum(area(np.array(cell.core).reshape(-1, 2)) for cell in cells)
    return Slice(
        n_experts=len(router.bias),
        k=k,
        epsilon=epsilon,
        window=plane.window.tolist(),
        marks=plane.marks.tolist(),
        cells=cells,
        support=None if expert is None else expert_support(cells, expert),
        band_share=max(0.0, 1 - cores / area(plane.window)),
    )


def expert_support(cells: Sequence[SliceCell], expert: int) -> Support:
    """The union of the cells whose coalition holds `expert`, and how far it is from convex."""
    mine = [i for i, cell in enumerate(cells) if expert in cell.coalition]
    require(len(mine) > 0, f"expert {expert} is chosen nowhere on this slice")
    outline = []
    for cell in (cells[i] for i in mine):
        for at, tie in enumerate(cell.ties):
            if tie is not None and tie[0] == expert:
                outline.append([cell.corners[at], cell.corners[(at + 1) % len(cell.corners)]])
    corners = np.concatenate([np.array(cells[i].corners) for i in mine])
    covered = sum(area(np.array(cells[i].corners)) for i in mine)
    return Support(expert, mine, outline, covered, covered / float(ConvexHull(corners).volume))


def slice_layer(
    layer: LayerTrace,
    weight: Any,
    tokens: tuple[int, int, int],
    *,
    bias: Any = None,
    epsilon: float = 0.0,
    expert: int | None = None,
    margin: float = 0.6,
) -> Slice:
    """`slice_router` through the router inputs of three tokens of a captured layer.

    Args:
        layer: a layer of a trace that keeps inputs (`capture(model, keep="inputs")`).
        weight: (E, D) matrix of its router.
        tokens: indices of three tokens.
        bias: (E,) bias of the router, if it adds one to the logits.
        epsilon: width of the bands.
        expert: an expert whose support is to be outlined.
        margin: see `plane_through`.
    """
    require(layer.inputs is not None, f"layer {layer.name!r} keeps no inputs", TraceError)
    require(layer.facts.affine, f"layer {layer.name!r} has no affine scores", TraceError)
    assert layer.inputs is not None
    points = layer.inputs[list(tokens)]
    k = layer.facts.k
    return slice_router(points, weight, bias, k, epsilon=epsilon, expert=expert, margin=margin)


def restricted_on_plane(router: Router, origin: np.ndarray, axes: np.ndarray) -> Router:
    """The router as a function of (u, v)."""
    return Router(router.weight @ axes.T, router.weight @ origin + router.bias, router.k)


def lines_on_plane(neurons: Neurons, origin: np.ndarray, axes: np.ndarray) -> Neurons:
    """The neurons as functions of (u, v)."""
    return Neurons(neurons.weight @ axes.T, neurons.weight @ origin + neurons.bias)


def _slice_cell(
    cell: PlanarCell, router: Router, epsilon: float, lines: Neurons | None
) -> SliceCell:
    corners = cell.polygon.corners
    core = cell_polygon(Polygon(corners, [None] * len(corners)), router, cell.coalition, epsilon)
    return SliceCell(
        coalition=cell.coalition,
        corners=corners.tolist(),
        ties=cell.polygon.labels,
        core=core.corners.tolist(),
        kinks=[] if lines is None else _kinks(cell, lines),
        pieces=len(pieces_of(cell, lines)),
    )


def pieces_of(cell: PlanarCell, lines: Neurons | None) -> list[tuple[bytes, np.ndarray]]:
    """Parts of a cell between the kinks of its experts: activation pattern and corners."""
    corners = cell.polygon.corners
    if lines is None:
        return [(b"", corners)]
    active = list(cell.coalition)
    return split_by_lines(
        corners, lines.weight[active].reshape(-1, 2), lines.bias[active].reshape(-1)
    )


def _kinks(cell: PlanarCell, lines: Neurons) -> list[Corners]:
    """Segments of the lines of active neurons inside the cell."""
    active, corners = list(cell.coalition), cell.polygon.corners
    normals, offsets = lines.weight[active].reshape(-1, 2), lines.bias[active].reshape(-1)
    found = []
    for normal, offset in zip(normals, offsets, strict=True):
        side = corners @ normal + offset
        ahead = np.roll(side, -1)
        crossed = np.flatnonzero((side >= 0) != (ahead >= 0))
        if len(crossed) == 2:
            share = (side[crossed] / (side[crossed] - ahead[crossed]))[:, None]
            after = np.roll(corners, -1, axis=0)[crossed]
            found.append((corners[crossed] + share * (after - corners[crossed])).tolist())
    return found
