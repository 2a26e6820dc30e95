"""The pieces of a top-k ReLU layer one by one, found by linear programming.

From one cell of the router the search crosses every wall into the next, until no new coalition
appears; inside each cell neurons are added one by one. It needs no general position: walls that
coincide, run parallel or meet in one point only leave fewer pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Real

from tieline.errors import require
from tieline.tropical.checks import Array, DegenerateError, Layer, as_layer, double_array
from tieline.tropical.regions import COUNTED, check_dim

__all__ = ["Regions", "regions"]

MAX_PIECES = 5_000_000


@dataclass(frozen=True)
class Regions:
    """Pieces of a layer, each with a point inside.

    Attributes:
        coalitions: (P, k) chosen experts, ascending.
        patterns: (P, k, H) which neurons of these experts are active.
        witnesses: (P, d) a point inside each piece.
        margins: (P,) distance from the witness to the nearest wall of its piece.
        counted: what was counted, in words.
        method: how.
    """

    coalitions: Int[np.ndarray, "pieces k"]
    patterns: Bool[np.ndarray, "pieces k width"]
    witnesses: Float[np.ndarray, "pieces dim"]
    margins: Float[np.ndarray, " pieces"]
    counted: str = COUNTED
    method: str = "linear programming"

    def __len__(self) -> int:
        return len(self.coalitions)


def regions(
    W: Real[Array, "experts dim"],
    b: Real[Array, " experts"],
    V: Real[Array, "experts width dim"],
    c: Real[Array, "experts width"],
    k: int,
    max_pieces: int = MAX_PIECES,
) -> Regions:
    """All pieces with a point inside each: linear programmes, no general position needed.

    Args:
        W: (N, d) router weights, d <= 5.
        b: (N,) router biases.
        V: (N, H, d) neurons' weights.
        c: (N, H) neurons' biases.
        k: experts chosen, 1 <= k <= N.
        max_pieces: refuse layers with more pieces than this.
    """
    layer = as_layer(W, b, V, c, k)
    check_dim(layer)
    found, left = [], max_pieces
    for cell in router_cells(layer, k):
        found.append(_pieces_of(layer, *cell, left))
        left -= len(found[-1][2])
    coalitions, patterns, points = (np.concatenate(parts) for parts in zip(*found, strict=True))
    router = layer.router
    places = router.length * (points[:, :-1] / points[:, -1:]) @ router.rotation.T
    raw = tuple(
        double_array(n, a, x) for n, a, x in (("W", W, 2), ("b", b, 1), ("V", V, 3), ("c", c, 2))
    )
    margins = _margins(raw, coalitions, patterns, places)
    require(
        bool((margins > 0).all()),
        "a piece is too thin for its point to be told from its walls in float64",
        DegenerateError,
    )
    return Regions(coalitions, patterns, places, margins)


def router_cells(
    layer: Layer, k: int
) -> Iterator[
    tuple[Bool[np.ndarray, " experts"], Float[np.ndarray, "walls d1"], Float[np.ndarray, " d1"]]
]:
    """Every coalition with the walls of its cell and a point inside, by crossing walls."""
    from tieline.tropical.pieces import explore, top_members

    rows = np.column_stack([layer.router.W, layer.router.b])
    experts, size = rows.shape
    distinct = len(np.unique(rows, axis=0)) == experts
    require(
        k == experts or distinct,
        "two experts have the same router row: their scores tie everywhere",
        DegenerateError,
    )
    point = np.random.default_rng(size).uniform(0.2, 0.4, size)
    members = top_members(rows @ point, k)
    waiting, seen = [(members, point)], {members.tobytes()}
    while waiting:
        members, point = waiting.pop()
        walls, coalitions, points, sure = explore(rows, members, point, k)
        require(sure, _near(), DegenerateError)
        yield members, walls, point
        for coalition, place in zip(coalitions, points, strict=True):
            if coalition.tobytes() not in seen:
                seen.add(coalition.tobytes())
                waiting.append((coalition, place))


def _pieces_of(
    layer: Layer,
    members: Bool[np.ndarray, " experts"],
    walls: Float[np.ndarray, "walls d1"],
    point: Float[np.ndarray, " d1"],
    most: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(coalitions, patterns, points) of the pieces inside one cell."""
    from tieline.tropical.pieces import MANY, THIN, patterns

    mine = members[layer.owner]
    neurons = np.column_stack([layer.V, layer.c])[mine]
    neurons /= np.linalg.norm(neurons, axis=1, keepdims=True)
    active, places, status = patterns(walls, neurons, point, most)
    require(status != THIN, _near(), DegenerateError)
    require(status != MANY, "there are more than max_pieces pieces; raise it to list them")
    experts = np.flatnonzero(members)
    shape = (len(active), len(experts), -1)
    return np.tile(experts, (len(active), 1)), active.reshape(shape), places


def _margins(
    raw: tuple[np.ndarray, ...],
    coalitions: Int[np.ndarray, "pieces k"],
    patterns: Bool[np.ndarray, "pieces k width"],
    places: Float[np.ndarray, "pieces dim"],
) -> Float[np.ndarray, " pieces"]:
    """Distance to the nearest wall, negative where a witness lies in another piece."""
    W, b, V, c = raw
    scores = places @ W.T + b
    values = np.einsum("pkhd,pd->pkh", V[coalitions], places) + c[coalitions]
    norms = np.linalg.norm(V[coalitions], axis=-1)
    margin = (np.where(patterns, values, -values) / norms).min(axis=(1, 2))
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, coalitions, True, axis=1)
    for i in range(W.shape[0]):
        for j in range(W.shape[0]):
            across = chosen[:, i] & ~chosen[:, j]
            wall = np.linalg.norm(W[i] - W[j])
            rise = (scores[:, i] - scores[:, j]) / (wall or 1.0)
            margin = np.where(across & ((wall > 0) | (rise <= 0)), np.minimum(margin, rise), margin)
    return margin


def _near() -> str:
    return "a wall cuts a cell too thinly to be told from one that only touches it"
