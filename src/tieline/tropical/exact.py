"""Pieces by rational arithmetic: a second method, exact for weights that are rational numbers.

Every piece touches a corner: a point where j neurons vanish and d - j + 1 scores tie across the
threshold. Corners are solved in fractions, the pieces around each are collected, and equal ones
counted once. No rounding, no tolerance; more walls through a corner than d is found exactly.

    count_regions_rational    pieces of a layer
    count_cells_rational      order-k cells of a router
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, product

import numpy as np
from jaxtyping import Real

from tieline.errors import require
from tieline.tropical.checks import Array, Count, DegenerateError, double_array
from tieline.tropical.regions import COUNTED

__all__ = ["count_cells_rational", "count_regions_rational"]

Row = list[Fraction]
Piece = tuple[frozenset[int], frozenset[int]]


def count_cells_rational(
    W: Real[Array, "experts dim"], b: Real[Array, " experts"], k: int
) -> Count:
    """Order-k cells of z = W x + b in exact arithmetic; slow, for small routers."""
    rows = _rows(double_array("W", W, 2), double_array("b", b, 1))
    require(0 <= k <= len(rows), f"need 0 <= k <= N = {len(rows)}, got {k=}")
    return Count(_count(rows, [], [], k), "order-k cells", "corners in fractions")


def count_regions_rational(
    W: Real[Array, "experts dim"],
    b: Real[Array, " experts"],
    V: Real[Array, "experts width dim"],
    c: Real[Array, "experts width"],
    k: int,
) -> Count:
    """Pieces of the layer in exact arithmetic; arguments as for `count_regions`; small layers."""
    rows = _rows(double_array("W", W, 2), double_array("b", b, 1))
    V, c = double_array("V", V, 3), double_array("c", c, 2)
    require(1 <= k <= len(rows), f"need 1 <= k <= N = {len(rows)}, got {k=}")
    neurons = _rows(V.reshape(-1, V.shape[2]), c.ravel())
    owners = [e for e in range(V.shape[0]) for _ in range(V.shape[1])]
    return Count(_count(rows, neurons, owners, k), COUNTED, "corners in fractions")


def _rows(weights: np.ndarray, biases: np.ndarray) -> list[Row]:
    return [[Fraction(x) for x in (*w, c)] for w, c in zip(weights, biases, strict=True)]


def _count(router: list[Row], neurons: list[Row], owners: list[int], k: int) -> int:
    """Distinct pieces around all corners; 2^walls · C(N, k) in one go where walls have none."""
    dim, experts = len(router[0]) - 1, len(router)
    ties = 0 if k in (0, experts) else experts - 1
    width = len(neurons) // experts
    if ties + k * width < dim:  # no corner: add directions along which nothing changes
        router, neurons = _without_idle(router, neurons, ties + k * width)
        dim = ties + k * width
    if dim == 0:
        return 1
    _check_corners(router, neurons, k, dim)
    pieces: set[Piece] = set()
    for j in range(min(dim, len(neurons)) + 1):
        sizes = [0] if j == dim else [dim - j + 1]
        for tied in (t for s in sizes for t in combinations(range(experts), s)):
            for vanished in combinations(range(len(neurons)), j):
                pieces.update(_around(router, neurons, owners, k, tied, vanished))
    return len(pieces)


def _check_corners(router: list[Row], neurons: list[Row], k: int, dim: int) -> None:
    """Refuse a coalition whose walls span fewer than d directions: its pieces have no corner."""
    experts, width = len(router), len(neurons) // len(router)
    ties = [] if k in (0, experts) else [_minus(row, router[0])[:-1] for row in router[1:]]
    for coalition in combinations(range(experts), k):
        own = [neurons[e * width + h][:-1] for e in coalition for h in range(width)]
        if _rank(ties + own) < dim:
            raise DegenerateError(f"the walls of coalition {coalition} leave a direction free")


def _without_idle(router: list[Row], neurons: list[Row], dim: int) -> tuple[list[Row], list[Row]]:
    """The layer on a generic flat of dimension `dim`, which meets every piece."""
    full = len(router[0]) - 1
    r = np.random.default_rng(0).integers(-99, 100, (full, dim + 1))
    flat = [[Fraction(int(x)) for x in row] for row in r]

    def moved(row: Row) -> Row:
        columns = [
            sum((row[i] * flat[i][j] for i in range(full)), Fraction(0)) for j in range(dim + 1)
        ]
        return [*columns[:-1], columns[-1] + row[-1]]

    return [moved(row) for row in router], [moved(row) for row in neurons]


def _around(
    router: list[Row],
    neurons: list[Row],
    owners: list[int],
    k: int,
    tied: Sequence[int],
    vanished: Sequence[int],
) -> Iterator[Piece]:
    """The pieces that touch the corner where `tied` tie and `vanished` vanish, if it is one."""
    if len({owners[n] for n in vanished}) > k:
        return  # never active together
    walls = [neurons[n] for n in vanished]
    walls += [_minus(router[i], router[tied[0]]) for i in tied[1:]]
    point = _solve(walls)
    if point is None:
        return
    scores = [_at(row, point) for row in router]
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
    for part in combinations(chosen, k - len(above)):
        coalition = above | frozenset(part)
        if not coalition.issuperset(owners[n] for n in vanished):
            continue  # the corners of that coalition's pieces are other sets
        yield from _patterns(neurons, owners, coalition, point, set(vanished))


def _patterns(
    neurons: list[Row], owners: list[int], coalition: frozenset[int], point: Row, vanished: set[int]
) -> Iterator[Piece]:
    """Activation patterns, as sets of active neurons, of one coalition around `point`."""
    active, free = [], []
    for n, owner in enumerate(owners):
        if owner not in coalition:
            continue
        value = _at(neurons[n], point)
        if value == 0 and n not in vanished:
            raise DegenerateError(f"neuron {n} also vanishes where {sorted(vanished)} do")
        if n in vanished:
            free.append(n)
        elif value > 0:
            active.append(n)
    for signs in product((False, True), repeat=len(free)):
        yield coalition, frozenset(active + [n for n, on in zip(free, signs, strict=True) if on])


def _at(row: Row, point: Row) -> Fraction:
    return sum((w * x for w, x in zip(row, point, strict=False)), row[-1])


def _minus(row: Row, other: Row) -> Row:
    return [x - y for x, y in zip(row, other, strict=True)]


def _rank(rows: list[Row]) -> int:
    rows, rank = [list(row) for row in rows], 0
    for col in range(len(rows[0]) if rows else 0):
        pivot = next((r for r in range(rank, len(rows)) if rows[r][col] != 0), None)
        if pivot is not None:
            rows[rank], rows[pivot] = rows[pivot], rows[rank]
            for r in range(rank + 1, len(rows)):
                factor = rows[r][col] / rows[rank][col]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[rank], strict=True)]
            rank += 1
    return rank


def _solve(walls: list[Row]) -> Row | None:
    """The common point of d walls in R^d; None where they are parallel."""
    rows, dim = [list(wall) for wall in walls], len(walls)
    for col in range(dim):
        pivot = next((r for r in range(col, dim) if rows[r][col] != 0), None)
        if pivot is None:
            return None
        rows[col], rows[pivot] = rows[pivot], rows[col]
        rows[col] = [x / rows[col][col] for x in rows[col]]
        for r in range(dim):
            factor = rows[r][col]
            if r != col and factor != 0:
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[col], strict=True)]
    return [-row[-1] for row in rows]
