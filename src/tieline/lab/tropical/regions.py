"""Pieces of a top-k Mixture of Experts with one-hidden-layer ReLU experts (paper 3, Sec. 4.2).

A piece is an open set with one coalition (set of k chosen experts) and one activation pattern of
the neurons V[e, h] · x + c[e, h] of the chosen experts. A dense network is N = 1.

The search of `regions` crosses every wall from one cell of the router into the next until no new
coalition appears; inside each cell, neurons are added one by one. It needs no general position:
walls that coincide, run parallel or meet in one point only leave fewer pieces.

The rational counts use that every piece touches a corner: a point where j neurons vanish and
d - j + 1 scores tie across the threshold. Corners are solved in fractions and the distinct pieces
around them counted, without rounding or tolerance; more than d walls through a corner are detected
exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np
from jaxtyping import Bool, Float, Int

from tieline.core.errors import require
from tieline.lab.tropical.affine import (
    Count,
    CountingLayer,
    DegenerateError,
    NeuronBias,
    NeuronWeight,
    RouterBias,
    RouterWeight,
    counting_layer,
    double_array,
    fraction_rows,
    why_degenerate,
)

MAX_DIM = 5  # largest input dimension of exact counts and listings of pieces
MAX_PIECES = 5_000_000  # most pieces that `regions` lists by default
COUNTED = (
    "pieces (coalition x activation pattern): open sets where the layer is one analytic formula; "
    "affine for k = 1 or constant gates, smooth but not affine under softmax gates with k > 1; "
    "neighbouring pieces are counted apart even if the formula is the same in both"
)
THIN_CUT = "a wall cuts a cell too thinly to be told from one that only touches it"

Row = list[Fraction]  # weights and, last, bias of one score or neuron
Piece = tuple[frozenset[int], frozenset[int]]  # a coalition and its active neurons


def count_regions(W: RouterWeight, b: RouterBias, V: NeuronWeight, c: NeuronBias, k: int) -> Count:
    """Count pieces, as Σ_{|S| <= d} #{cells on flat(S) whose coalition holds the owners of S}.

    Exact for d <= 5 and walls in general position, decided in float64 with every gap above 1e-11
    (relative); anything nearer is refused with `DegenerateError`. Routers without bias, experts
    without bias and layers without any are no exception: their common point is counted by itself.
    """
    layer = counting_layer(W, b, V, c, k)
    _check_dim(layer)
    count, safety = _count_by_flats(layer, k)
    if safety < 1.0:
        reason = why_degenerate(layer.router.W, layer.V)
        raise DegenerateError(
            f"walls are not in general position: {reason}; `regions` lists the pieces of such a "
            "layer by linear programming"
        )
    return Count(count, COUNTED, "flat sum", safety)


def _check_dim(layer: CountingLayer) -> None:
    """Raise for d > 5, naming functions that work there."""
    dim = layer.V.shape[1]
    require(
        dim <= MAX_DIM,
        f"pieces are counted exactly for d <= {MAX_DIM}, got d = {dim}; `expected_regions`, "
        "`capacity_bound`, `sharp_bound` hold for any d, `count_cells` counts the router's cells",
    )


def _count_by_flats(layer: CountingLayer, k: int) -> tuple[int, float]:
    """Count pieces by the compiled sweep over flats; count and safety."""
    from tieline.lab.tropical.compiled_counts import count_flats

    router, experts = layer.router, len(layer.router.b)
    free = router.linear or k == experts
    if layer.linear and free:
        return _count_cones(router.W, layer, k)
    shape = 2 if layer.linear else int(router.linear and k < experts)
    count, safety = count_flats(
        router.W, router.b, layer.V, layer.c, layer.owner, layer.no_experts, k, 0.0, shape
    )
    if layer.linear:  # all neurons of the coalition chosen at 0 meet there
        hidden, dim = len(layer.c) // experts, layer.V.shape[1]
        count, safety = (
            count + comb(k * hidden - 1, dim - 1),
            min(safety, _choice_safety(router.b, k)),
        )
    return int(count), float(safety)


def _choice_safety(scores: Float[np.ndarray, " experts"], k: int) -> float:
    """Safety of the choice of the k largest of `scores`."""
    from tieline.lab.tropical.compiled_counts import mark_top_experts

    return mark_top_experts(scores, k, np.zeros(len(scores), np.int8))


def _count_cones(
    W: Float[np.ndarray, "experts dim"], layer: CountingLayer, k: int
) -> tuple[int, float]:
    """Count pieces of a layer without biases, cones: those on x_1 = ±1 less those on x_1 = 0."""
    from tieline.lab.tropical.compiled_counts import count_flats

    V, owner = layer.V, layer.owner
    total, safety, sign = 0, float("inf"), 1
    while V.shape[1] > 1:
        rest = [np.ascontiguousarray(rows[:, 1:]) for rows in (W, V)]
        norms = np.linalg.norm(rest[1], axis=1)
        for side in (1.0, -1.0):
            count, sure = count_flats(
                rest[0], side * W[:, 0], rest[1] / norms[:, None], side * V[:, 0] / norms,
                owner, layer.no_experts, k, 0.0, 0,
            )  # fmt: skip
            total, safety = total + sign * count, min(safety, sure)
        (W, V), sign = rest, -sign
    safety = min(safety, _choice_safety(W[:, 0].copy(), k), _choice_safety(-W[:, 0], k))
    return int(total + sign * 2), float(safety)


@dataclass(frozen=True)
class Regions:
    """Pieces of a layer, each with a point inside."""

    coalitions: Int[np.ndarray, "pieces k"]  # (P, k) chosen experts, ascending
    # (P, k, H) which neurons of these experts are active
    patterns: Bool[np.ndarray, "pieces k hidden"]
    witnesses: Float[np.ndarray, "pieces dim"]  # (P, d) a point inside each piece
    # (P,) distance from the witness to the nearest wall of its piece
    margins: Float[np.ndarray, " pieces"]
    counted: str = COUNTED  # definition of a piece, in words
    method: str = "linear programming"  # how

    def __len__(self) -> int:
        return len(self.coalitions)


def regions(
    W: RouterWeight,
    b: RouterBias,
    V: NeuronWeight,
    c: NeuronBias,
    k: int,
    max_pieces: int = MAX_PIECES,
) -> Regions:
    """List all pieces, at most `max_pieces`, with a point inside each; d <= 5, any position."""
    layer = counting_layer(W, b, V, c, k)
    _check_dim(layer)
    pieces, remaining = [], max_pieces
    for cell in _walk_router_cells(layer, k):
        pieces.append(_pieces_in_cell(layer, *cell, remaining))
        remaining -= len(pieces[-1][2])
    coalitions, patterns, points = (
        np.concatenate(columns) for columns in zip(*pieces, strict=True)
    )
    router = layer.router
    witnesses = router.length * (points[:, :-1] / points[:, -1:]) @ router.rotation.T
    raw = tuple(
        double_array(n, a, x) for n, a, x in (("W", W, 2), ("b", b, 1), ("V", V, 3), ("c", c, 2))
    )
    margins = _witness_margins(raw, coalitions, patterns, witnesses)
    require(
        bool((margins > 0).all()),
        "a piece is too thin for its point to be told from its walls in float64",
        DegenerateError,
    )
    return Regions(coalitions, patterns, witnesses, margins)


def _walk_router_cells(
    layer: CountingLayer, k: int
) -> Iterator[
    tuple[Bool[np.ndarray, " experts"], Float[np.ndarray, "walls d1"], Float[np.ndarray, " d1"]]
]:
    """Yield every coalition with the walls of its cell and a point inside, by crossing walls."""
    from tieline.lab.tropical.compiled_listing import explore_cell, top_members

    rows = np.column_stack([layer.router.W, layer.router.b])
    experts, n_coordinates = rows.shape
    distinct = len(np.unique(rows, axis=0)) == experts
    require(
        k == experts or distinct,
        "two experts have the same router row: their scores tie everywhere",
        DegenerateError,
    )
    point = np.random.default_rng(n_coordinates).uniform(0.2, 0.4, n_coordinates)
    members = top_members(rows @ point, k)
    waiting, visited = [(members, point)], {members.tobytes()}
    while waiting:
        members, point = waiting.pop()
        walls, coalitions, points, is_certain = explore_cell(rows, members, point, k)
        require(is_certain, THIN_CUT, DegenerateError)
        yield members, walls, point
        for coalition, inside in zip(coalitions, points, strict=True):
            if coalition.tobytes() not in visited:
                visited.add(coalition.tobytes())
                waiting.append((coalition, inside))


def _pieces_in_cell(
    layer: CountingLayer,
    members: Bool[np.ndarray, " experts"],
    walls: Float[np.ndarray, "walls d1"],
    point: Float[np.ndarray, " d1"],
    most: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List the pieces inside one cell: (coalitions, patterns, points)."""
    from tieline.lab.tropical.compiled_listing import MANY, THIN, piece_patterns

    mine = members[layer.owner]
    neurons = np.column_stack([layer.V, layer.c])[mine]
    neurons /= np.linalg.norm(neurons, axis=1, keepdims=True)
    active, points, status = piece_patterns(walls, neurons, point, most)
    require(status != THIN, THIN_CUT, DegenerateError)
    require(status != MANY, "there are more than max_pieces pieces; raise it to list them")
    experts = np.flatnonzero(members)
    shape = (len(active), len(experts), -1)
    return np.tile(experts, (len(active), 1)), active.reshape(shape), points


def _witness_margins(
    raw: tuple[np.ndarray, ...],
    coalitions: Int[np.ndarray, "pieces k"],
    patterns: Bool[np.ndarray, "pieces k hidden"],
    witnesses: Float[np.ndarray, "pieces dim"],
) -> Float[np.ndarray, " pieces"]:
    """Distance to the nearest wall, negative where a witness lies in another piece."""
    W, b, V, c = raw
    scores = witnesses @ W.T + b
    values = np.einsum("pkhd,pd->pkh", V[coalitions], witnesses) + c[coalitions]
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


def count_cells_rational(W: RouterWeight, b: RouterBias, k: int) -> Count:
    """Count order-k cells of z = W x + b in exact arithmetic; slow, for small routers."""
    rows = fraction_rows(double_array("W", W, 2), double_array("b", b, 1))
    require(0 <= k <= len(rows), f"need 0 <= k <= N = {len(rows)}, got {k=}")
    return Count(_count_corners(rows, [], [], k), "order-k cells", "corners in fractions")


def count_regions_rational(
    W: RouterWeight, b: RouterBias, V: NeuronWeight, c: NeuronBias, k: int
) -> Count:
    """Count pieces in exact arithmetic, for small layers; arguments as for `count_regions`."""
    rows = fraction_rows(double_array("W", W, 2), double_array("b", b, 1))
    V, c = double_array("V", V, 3), double_array("c", c, 2)
    require(1 <= k <= len(rows), f"need 1 <= k <= N = {len(rows)}, got {k=}")
    neurons = fraction_rows(V.reshape(-1, V.shape[2]), c.ravel())
    owners = [e for e in range(V.shape[0]) for _ in range(V.shape[1])]
    return Count(_count_corners(rows, neurons, owners, k), COUNTED, "corners in fractions")


def _count_corners(router: list[Row], neurons: list[Row], owners: list[int], k: int) -> int:
    """Count the distinct pieces around all corners; layers without corners are first cut down."""
    dim, experts = len(router[0]) - 1, len(router)
    ties = 0 if k in (0, experts) else experts - 1
    hidden = len(neurons) // experts
    if ties + k * hidden < dim:  # no corner: add directions along which nothing changes
        router, neurons = _restrict_to_generic_flat(router, neurons, ties + k * hidden)
        dim = ties + k * hidden
    if dim == 0:
        return 1
    _check_corners(router, neurons, k, dim)
    pieces: set[Piece] = set()
    for j in range(min(dim, len(neurons)) + 1):
        for tied in combinations(range(experts), 0 if j == dim else dim - j + 1):
            for vanished in combinations(range(len(neurons)), j):
                pieces.update(_pieces_at_corner(router, neurons, owners, k, tied, vanished))
    return len(pieces)


def _check_corners(router: list[Row], neurons: list[Row], k: int, dim: int) -> None:
    """Raise if the walls of a coalition span fewer than d directions, so pieces lack corners."""
    experts, hidden = len(router), len(neurons) // len(router)
    ties = [] if k in (0, experts) else [_row_difference(row, router[0])[:-1] for row in router[1:]]
    for coalition in combinations(range(experts), k):
        normals = [neurons[e * hidden + h][:-1] for e in coalition for h in range(hidden)]
        rows = ties + normals
        if not rows or len(_eliminated_rows(rows, len(rows[0]))) < dim:
            raise DegenerateError(f"the walls of coalition {coalition} leave a direction free")


def _restrict_to_generic_flat(
    router: list[Row], neurons: list[Row], dim: int
) -> tuple[list[Row], list[Row]]:
    """Restrict the layer to a generic flat of dimension `dim`, which meets every piece."""
    full = len(router[0]) - 1
    r = np.random.default_rng(0).integers(-99, 100, (full, dim + 1))
    flat = [[Fraction(int(x)) for x in row] for row in r]

    def row_on_flat(row: Row) -> Row:
        columns = [
            sum((row[i] * flat[i][j] for i in range(full)), Fraction(0)) for j in range(dim + 1)
        ]
        return [*columns[:-1], columns[-1] + row[-1]]

    return [row_on_flat(row) for row in router], [row_on_flat(row) for row in neurons]


def _pieces_at_corner(
    router: list[Row],
    neurons: list[Row],
    owners: list[int],
    k: int,
    tied: Sequence[int],
    vanished: Sequence[int],
) -> Iterator[Piece]:
    """Yield the pieces that touch the corner where `tied` tie and `vanished` vanish, if any."""
    if len({owners[n] for n in vanished}) > k:
        return  # never active together
    walls = [neurons[n] for n in vanished]
    walls += [_row_difference(router[i], router[tied[0]]) for i in tied[1:]]
    point = _wall_intersection(walls)
    if point is None:
        return
    scores = [_affine_value(row, point) for row in router]
    level = scores[tied[0]] if tied else sorted(scores, reverse=True)[max(k - 1, 0)]
    above = frozenset(i for i, z in enumerate(scores) if z > level)
    equal = tuple(i for i, z in enumerate(scores) if z == level)
    if tied and not len(above) < k < len(above) + len(equal):
        return
    if len(equal) > max(len(tied), 1) and len(above) < k < len(above) + len(equal):
        raise DegenerateError(
            f"scores of experts {equal} tie in one point with {len(vanished)} neurons"
        )
    chosen = tied or equal
    for subset in combinations(chosen, k - len(above)):
        coalition = above | frozenset(subset)
        if not coalition.issuperset(owners[n] for n in vanished):
            continue  # the corners of that coalition's pieces are other sets
        yield from _patterns_at_corner(neurons, owners, coalition, point, set(vanished))


def _patterns_at_corner(
    neurons: list[Row], owners: list[int], coalition: frozenset[int], point: Row, vanished: set[int]
) -> Iterator[Piece]:
    """Yield the activation patterns, as sets of active neurons, of a coalition at `point`."""
    active, free = [], []
    for n, owner in enumerate(owners):
        if owner not in coalition:
            continue
        value = _affine_value(neurons[n], point)
        if value == 0 and n not in vanished:
            raise DegenerateError(f"neuron {n} also vanishes where {sorted(vanished)} do")
        if n in vanished:
            free.append(n)
        elif value > 0:
            active.append(n)
    for signs in product((False, True), repeat=len(free)):
        yield coalition, frozenset(active + [n for n, on in zip(free, signs, strict=True) if on])


def _affine_value(row: Row, point: Row) -> Fraction:
    """Evaluate the affine function of a row at a point."""
    return sum((w * x for w, x in zip(row, point, strict=False)), row[-1])


def _row_difference(row: Row, other: Row) -> Row:
    """Subtract two rows."""
    return [x - y for x, y in zip(row, other, strict=True)]


def _wall_intersection(walls: list[Row]) -> Row | None:
    """Solve for the common point of d walls in R^d; None if there is no unique one."""
    rows = _eliminated_rows(walls, len(walls))
    return [-row[-1] for row in rows] if len(rows) == len(walls) else None


def _eliminated_rows(rows: list[Row], columns: int) -> list[Row]:
    """Eliminate the first columns by Gauss-Jordan; return the rows with a pivot."""
    rows, rank = list(rows), 0
    for col in range(columns):
        pivot = next((r for r in range(rank, len(rows)) if rows[r][col] != 0), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        rows[rank] = [x / rows[rank][col] for x in rows[rank]]
        for r, row in enumerate(rows):
            if r != rank and row[col] != 0:
                rows[r] = [x - row[col] * y for x, y in zip(row, rows[rank], strict=True)]
        rank += 1
    return rows[:rank]
