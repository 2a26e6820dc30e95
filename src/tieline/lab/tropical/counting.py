"""Compiled counting of order-k cells of an affine router z = W x + b on R^m, m >= 0.

    compiled                      compile a kernel by Numba and keep it on disk
    count_affine, count_linear    cells of a router with and without biases
    corners                       ties of d + 1 experts across the threshold

Lift: experts are the hyperplanes t = z_i(x) of R^{m+1}, and coalition I has a cell where I is the
set of experts above a cell of this arrangement. Sweep the lifted cells by x_1, those that reach
x_1 = -∞ there by x_2, and so on: every cell has one lowest point, a tie of m' + 1 experts for some
m' <= m, and every tied set is the lowest point of one cell. At a tie of T, where
x_1 = Σ_{i ∈ T} λ_i (z_i - t) + const, this cell has above it the experts above t and those of T
with λ_i > 0. So

    cells_k = Σ_{m' <= m} #{T : |T| = m' + 1, #above(T) + #{i ∈ T : λ_i > 0} = k},

where stage m' < m lies at x_q = -∞, q = m - m', and sees the router (W[:, q:], -W[:, q-1]).

Each cell and each facet of a router in general position whose weights span R^d has a corner. At a
corner with p experts above the tie T, the cells are above ∪ A for every A ⊂ T with |A| = k - p, and
two of them share a facet if they differ by one swap.

Weights have size 1 (`affine.counting_router`): gaps, slopes and inverses are judged against that,
not against weights that cancelled. Each function also returns its `safety`: the smallest relative
gap that decided anything, divided by the tolerance. Below 1 the input is degenerate and the count
must not be used.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, no_type_check

import numpy as np

from tieline.core.files import cache_folder

__all__ = [
    "ROUNDING",
    "TOLERANCE",
    "compiled",
    "corners",
    "count_affine",
    "count_linear",
    "with_double_room",
]

try:
    from numba import config, njit
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "counting and listing cells and pieces needs Numba: pip install 'tieline[tropical]'"
    ) from error


SETTINGS: Any = config
"""Numba's settings, created at run time."""
TOLERANCE = 1e-11
"""Relative gap under which a further tie or a parallel wall cannot be told from rounding."""
ROUNDING = 64 * 2.220446049250313e-16
"""Error of a solve, per unit of condition number."""
KERNELS = ("counting", "flats", "programmes")
"""Files of this folder that hold compiled functions."""


def _store() -> Path:
    """Folder of the stored kernels, in NUMBA_CACHE_DIR or the user's cache.

    Numba judges whether a stored kernel is stale by the file of the kernel, not by those of the
    kernels it calls. So the folder is named after the text of all kernel files.
    """
    here, digest = Path(__file__).parent, hashlib.sha256()
    for name in KERNELS:
        digest.update((here / f"{name}.py").read_bytes())
    return Path(SETTINGS.CACHE_DIR or cache_folder()) / f"kernels-{digest.hexdigest()[:16]}"


STORE = _store()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on its first call, or load it from the store."""
    before = SETTINGS.CACHE_DIR
    SETTINGS.CACHE_DIR = str(STORE)
    try:
        return njit(cache=True)(function)
    except (RuntimeError, OSError):  # no folder to write to: compile in every process
        return njit(function)
    finally:
        SETTINGS.CACHE_DIR = before


@compiled
@no_type_check
def next_subset(subset, n):
    """Advance `subset` of 0 ... n-1 to the next in lexicographic order; False after the last."""
    size = len(subset)
    for position in range(size - 1, -1, -1):
        if subset[position] < n - size + position:
            subset[position] += 1
            for later in range(position + 1, size):
                subset[later] = subset[later - 1] + 1
            return True
    return False


@compiled
@no_type_check
def invert(matrix, inverse):
    """Gauss-Jordan inverse with row pivoting; returns max(1, max|A⁻¹|), ∞ if there is none."""
    n = len(matrix)
    inverse[:] = 0.0
    for i in range(n):
        inverse[i, i] = 1.0
    for col in range(n):
        best = col
        for row in range(col + 1, n):
            if abs(matrix[row, col]) > abs(matrix[best, col]):
                best = row
        if matrix[best, col] == 0.0:
            return np.inf
        for j in range(n):
            matrix[col, j], matrix[best, j] = matrix[best, j], matrix[col, j]
            inverse[col, j], inverse[best, j] = inverse[best, j], inverse[col, j]
        scale = 1.0 / matrix[col, col]
        for j in range(n):
            matrix[col, j] *= scale
            inverse[col, j] *= scale
        for row in range(n):
            factor = matrix[row, col]
            if row != col and factor != 0.0:
                for j in range(n):
                    matrix[row, j] -= factor * matrix[col, j]
                    inverse[row, j] -= factor * inverse[col, j]
    largest = 1.0
    for i in range(n):
        for j in range(n):
            largest = max(largest, abs(inverse[i, j]))
    return largest


@compiled
@no_type_check
def solve_tie(W, b, tied, matrix, inverse, point):
    """Point x where the scores of `tied` agree (m + 1 experts in R^m); returns (t, condition)."""
    m = len(point)
    first = tied[0]
    for row in range(m):
        for col in range(m):
            matrix[row, col] = W[tied[row + 1], col] - W[first, col]
    condition = invert(matrix, inverse)
    level = b[first]
    for row in range(m):
        point[row] = 0.0
        for col in range(m):
            point[row] -= inverse[row, col] * (b[tied[col + 1]] - b[first])
        level += W[first, row] * point[row]
    return level, condition


@compiled
@no_type_check
def place_experts(W, b, k, must, tied, point, level, condition, side):
    """Set side = +1 above the tie, -1 below, 0 in it; returns (#above, #unclear, safety).

    Stops with #above = k as soon as no cell at the tie can choose k experts with all of `must`.
    """
    n, m = W.shape
    tolerance = max(TOLERANCE, ROUNDING * condition)
    above, unclear, safety, next_tied, spare = 0, 0, np.inf, 0, n - m - 1 - (k - m)
    for expert in range(n):
        if next_tied <= m and tied[next_tied] == expert:
            side[expert] = 0
            next_tied += 1
            continue
        score, scale = b[expert], 1.0 + abs(level)
        for j in range(m):
            score += W[expert, j] * point[j]
            scale += abs(point[j])
        rise = score - level
        side[expert] = 1 if rise > 0 else -1
        sure = abs(rise) / (tolerance * scale)
        safety = min(safety, sure)
        if sure < 1.0:
            unclear += 1
        elif rise > 0:
            above += 1
        else:
            spare -= 1
        if above == k or spare < 0 or (sure >= 1.0 and rise < 0 and must[expert]):
            return k, 0, safety
    return above, unclear, safety


@compiled
@no_type_check
def raise_tied(inverse, m, tied, side):
    """Set side = +1 / -1 in the tie by the sign of λ; returns (#raised, smallest |λ| / largest)."""
    last, smallest, largest, count = 0.0, np.inf, 0.0, 0
    for col in range(m + 1):
        weight = -last if col == m else inverse[0, col]
        last += 0.0 if col == m else weight
        smallest, largest = min(smallest, abs(weight)), max(largest, abs(weight))
        member = tied[0] if col == m else tied[col + 1]
        side[member] = 1 if weight > 0 else -1
        count += weight > 0
    return count, smallest / largest


@compiled
@no_type_check
def count_vertices(W, b, k, must):
    """#{T : |T| = m + 1, its lowest cell has k experts above, among them all of `must`}, safety."""
    n, m = W.shape
    if m + 1 > n:
        return 0, np.inf
    tied, side = np.arange(m + 1), np.zeros(n, np.int8)
    matrix, inverse, point = np.empty((m, m)), np.empty((m, m)), np.empty(m)
    count, safety, more = 0, np.inf, True
    while more:
        level, condition = solve_tie(W, b, tied, matrix, inverse, point)
        if ROUNDING * condition >= 1.0 or condition * TOLERANCE >= 1.0:
            return 0, 0.0
        above, unclear, sure = place_experts(W, b, k, must, tied, point, level, condition, side)
        if unclear and above < k < above + unclear + m + 1:
            return 0, sure
        if above < k <= above + m:
            up, tilt = raise_tied(inverse, m, tied, side)
            if above + up == k:
                count += holds(side, must)
            if tilt < ROUNDING * condition:
                return 0, 0.0
            if not unclear:
                safety = min(safety, sure)
        more = next_subset(tied, n)
    return count, safety


@compiled
@no_type_check
def holds(side, must):
    """Whether every expert of `must` is above."""
    inside = True
    for expert in range(len(side)):
        inside &= not must[expert] or side[expert] == 1
    return inside


@compiled
@no_type_check
def top_side(scores, k, side):
    """Set side = +1 for the k largest scores, else -1; returns the safety of their gap."""
    n = len(scores)
    order = np.argsort(-scores)
    for rank in range(n):
        side[order[rank]] = 1 if rank < k else -1
    if k == 0 or k == n:
        return np.inf
    inner, outer = scores[order[k - 1]], scores[order[k]]
    return (inner - outer) / (TOLERANCE * (1.0 + abs(inner)))


@compiled
@no_type_check
def count_affine(W, b, k, must):
    """Order-k cells of z = W x + b whose coalition holds `must`, and the safety of the count."""
    n, m = W.shape
    if k == 0 or k == n:
        return 1, np.inf
    side = np.zeros(n, np.int8)
    safety = top_side(b.copy() if m == 0 else -W[:, m - 1].copy(), k, side)
    count = 1 if holds(side, must) else 0
    for stage in range(1, m + 1):
        skipped = m - stage
        here = np.ascontiguousarray(W[:, skipped:])
        bias = b.copy() if skipped == 0 else -W[:, skipped - 1].copy()
        vertices, sure = count_vertices(here, bias, k, must)
        count += vertices
        safety = min(safety, sure)
    return count, safety


@compiled
@no_type_check
def count_linear(W, k, must):
    """Order-k cells of z = W x (no bias): cones, counted on x_1 = ±1 less those met on x_1 = 0."""
    n, m = W.shape
    if k == 0 or k == n:
        return 1, np.inf
    count, safety, sign = 0, np.inf, 1
    for dim in range(m - 1, -1, -1):
        bias = W[:, m - 1 - dim].copy()
        rest = np.ascontiguousarray(W[:, m - dim :])
        for direction in (1.0, -1.0):
            cells, sure = count_affine(rest, direction * bias, k, must)
            count += sign * cells
            safety = min(safety, sure)
        sign = -sign
    return count, safety


@compiled
@no_type_check
def corners(W, b, k):
    """(ties, above, points, safety): T as rows, its experts above as masks, where it is."""
    n, m = W.shape
    tied, side, no_experts = np.arange(m + 1), np.zeros(n, np.int8), np.zeros(n, np.bool_)
    matrix, inverse, point = np.empty((m, m)), np.empty((m, m)), np.empty(m)
    ties, above = np.empty((64, m + 1), np.int64), np.empty((64, n), np.bool_)
    points, total, safety, more = np.empty((64, m)), 0, np.inf, True
    while more:
        level, condition = solve_tie(W, b, tied, matrix, inverse, point)
        if ROUNDING * condition >= 1.0 or condition * TOLERANCE >= 1.0:
            return ties[:0], above[:0], points[:0], 0.0
        count, unclear, sure = place_experts(
            W, b, k, no_experts, tied, point, level, condition, side
        )
        if unclear and count < k < count + unclear + m + 1:
            return ties[:0], above[:0], points[:0], sure
        if count < k <= count + m:
            if total == len(ties):
                ties, above = with_double_room(ties), with_double_room(above)
                points = with_double_room(points)
            ties[total], above[total], points[total] = tied, side == 1, point
            total += 1
            safety = min(safety, sure)
        more = next_subset(tied, n)
    return ties[:total], above[:total], points[:total], safety


@compiled
@no_type_check
def with_double_room(array):
    """A copy with room for twice the rows."""
    larger = np.empty((2 * len(array), array.shape[1]), array.dtype)
    larger[: len(array)] = array
    return larger
