"""Compiled counts of the order-k cells of a router z = W x + b on R^m, and of pieces of a layer.

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

Pieces are summed over flats where neurons vanish,

    pieces = Σ_{|S| <= d} #{cells of the router on flat(S) whose coalition holds owners(S)},

S a set of neurons and flat(S) = {x : v_n x + c_n = 0, n in S}, depth first: a flat where no
coalition holds the owners has no deeper flat that counts. Flats keep orthonormal coordinates, so
restriction loses no accuracy. On a line the router's cells are intervals, found by walking along
it, and all points are placed among them at once.

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
KERNELS = ("compiled_counts", "compiled_listing")
"""Files of this folder that hold compiled functions."""


def _kernel_store() -> Path:
    """Folder of the stored kernels, in NUMBA_CACHE_DIR or the user's cache.

    Numba judges whether a stored kernel is stale by the file of the kernel, not by those of the
    kernels it calls. So the folder is named after the text of all kernel files.
    """
    here, digest = Path(__file__).parent, hashlib.sha256()
    for name in KERNELS:
        digest.update((here / f"{name}.py").read_bytes())
    return Path(SETTINGS.CACHE_DIR or cache_folder()) / f"kernels-{digest.hexdigest()[:16]}"


STORE = _kernel_store()


def compiled_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` on its first call, or load it from the store."""
    before = SETTINGS.CACHE_DIR
    SETTINGS.CACHE_DIR = str(STORE)
    try:
        return njit(cache=True)(function)
    except (RuntimeError, OSError):  # no folder to write to: compile in every process
        return njit(function)
    finally:
        SETTINGS.CACHE_DIR = before


@compiled_kernel
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


@compiled_kernel
@no_type_check
def invert_matrix(matrix, inverse):
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


@compiled_kernel
@no_type_check
def solve_tie(W, b, tied, matrix, inverse, point):
    """Point x where the scores of `tied` agree (m + 1 experts in R^m); returns (t, condition)."""
    m = len(point)
    first = tied[0]
    for row in range(m):
        for col in range(m):
            matrix[row, col] = W[tied[row + 1], col] - W[first, col]
    condition = invert_matrix(matrix, inverse)
    level = b[first]
    for row in range(m):
        point[row] = 0.0
        for col in range(m):
            point[row] -= inverse[row, col] * (b[tied[col + 1]] - b[first])
        level += W[first, row] * point[row]
    return level, condition


@compiled_kernel
@no_type_check
def place_experts(W, b, k, must, tied, point, level, condition, side):
    """Set side = +1 above the tie, -1 below, 0 in it; returns (#above, #unclear, safety).

    Returns early with #above = k if no cell at the tie can choose k experts with all of `must`.
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


@compiled_kernel
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


@compiled_kernel
@no_type_check
def count_vertices(W, b, k, must):
    """Count ties T of m + 1 experts whose lowest cell chooses k with all of `must`; safety."""
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
                count += holds_experts(side, must)
            if tilt < ROUNDING * condition:
                return 0, 0.0
            if not unclear:
                safety = min(safety, sure)
        more = next_subset(tied, n)
    return count, safety


@compiled_kernel
@no_type_check
def holds_experts(side, must):
    """Whether every expert of `must` is above the tie."""
    inside = True
    for expert in range(len(side)):
        inside &= not must[expert] or side[expert] == 1
    return inside


@compiled_kernel
@no_type_check
def mark_top_experts(scores, k, side):
    """Set side = +1 for the k largest scores, else -1; returns the safety of their gap."""
    n = len(scores)
    order = np.argsort(-scores)
    for rank in range(n):
        side[order[rank]] = 1 if rank < k else -1
    if k == 0 or k == n:
        return np.inf
    inner, outer = scores[order[k - 1]], scores[order[k]]
    return (inner - outer) / (TOLERANCE * (1.0 + abs(inner)))


@compiled_kernel
@no_type_check
def count_affine(W, b, k, must):
    """Count order-k cells of z = W x + b whose coalition holds `must`; count and safety."""
    n, m = W.shape
    if k == 0 or k == n:
        return 1, np.inf
    side = np.zeros(n, np.int8)
    safety = mark_top_experts(b.copy() if m == 0 else -W[:, m - 1].copy(), k, side)
    count = 1 if holds_experts(side, must) else 0
    for stage in range(1, m + 1):
        skipped = m - stage
        here = np.ascontiguousarray(W[:, skipped:])
        bias = b.copy() if skipped == 0 else -W[:, skipped - 1].copy()
        vertices, sure = count_vertices(here, bias, k, must)
        count += vertices
        safety = min(safety, sure)
    return count, safety


@compiled_kernel
@no_type_check
def count_linear(W, k, must):
    """Count order-k cells of z = W x, cones: those on x_1 = ±1 less those on x_1 = 0."""
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


@compiled_kernel
@no_type_check
def restrict_to_plane(rows, bias, normal, foot, reflector):
    """Rows and biases on the hyperplane {x : normal · x = foot}, in orthonormal coordinates.

    The Householder reflection I - 2 r rᵀ sends the unit normal to the last axis, which is dropped.
    """
    n, m = rows.shape
    lower, shifted = np.empty((n, m - 1)), np.empty(n)
    for row in range(n):
        along, turned = 0.0, 0.0
        for j in range(m):
            along += rows[row, j] * normal[j]
            turned += rows[row, j] * reflector[j]
        shifted[row] = bias[row] + foot * along
        for j in range(m - 1):
            lower[row, j] = rows[row, j] - 2.0 * turned * reflector[j]
    return lower, shifted


@compiled_kernel
@no_type_check
def unit_reflector(normal):
    """Vector r of the reflection I - 2 r rᵀ that sends the unit `normal` to ± the last axis."""
    r = normal.copy()
    r[-1] += 1.0 if normal[-1] >= 0 else -1.0
    return r / np.sqrt((r * r).sum())


@compiled_kernel
@no_type_check
def next_swap(slope, height, side, here, tolerance):
    """Next change of coalition on a line after `here`: (position, leaving, entering, runner-up).

    Slopes that differ by less than the tolerance return `here` as runner-up, which gives safety 0.
    """
    first, second, leaving, entering = np.inf, np.inf, -1, -1
    for i in range(len(side)):
        if side[i] != 1:
            continue
        for j in range(len(side)):
            if side[j] == 1:
                continue
            turn = slope[j] - slope[i]
            if abs(turn) <= tolerance:
                return here, -1, -1, here
            if turn < 0:
                continue
            crossing = (height[i] - height[j]) / turn
            if crossing < first:
                first, second, leaving, entering = crossing, first, i, j
            elif crossing < second:
                second = crossing
    return first, leaving, entering, second


@compiled_kernel
@no_type_check
def distance_in_tolerances(a, b, tolerance):
    """Distance of two positions on a line, in tolerances."""
    if np.isinf(a) or np.isinf(b):
        return np.inf
    return abs(a - b) / (tolerance * (1.0 + max(abs(a), abs(b))))


@compiled_kernel
@no_type_check
def sweep_line(slope, height, k, tolerance, ends, members):
    """Write the end and coalition of each interval of a line; returns (#intervals, safety)."""
    side, here = members[0], -np.inf
    safety = mark_top_experts(-slope, k, side)
    for step in range(len(ends)):
        if safety < 1.0:
            return step, safety
        crossing, leaving, entering, second = next_swap(
            slope, height, members[step], here, tolerance
        )
        ends[step] = crossing
        if leaving < 0:
            return step + 1, safety if np.isinf(crossing) else 0.0
        safety = min(
            safety,
            distance_in_tolerances(crossing, second, tolerance),
            distance_in_tolerances(crossing, here, tolerance),
        )
        members[step + 1] = members[step]
        members[step + 1, leaving], members[step + 1, entering] = -1, 1
        here = crossing
    return 0, 0.0


@compiled_kernel
@no_type_check
def walk_line(slope, height, k, tolerance, linear):
    """Return the intervals of a line as (ends, members, safety)."""
    n = len(slope)
    room = 1 + n * (n - 1) // 2
    ends, members = np.empty(room), np.empty((room + 1, n), np.int8)
    if k == n:
        ends[0], members[0] = np.inf, 1
        steps, safety = 1, np.inf
    elif linear:
        ends[0], ends[1], steps = 0.0, np.inf, 2  # all scores vanish at 0
        safety = min(
            mark_top_experts(-slope, k, members[0]), mark_top_experts(slope, k, members[1])
        )
    else:
        steps, safety = sweep_line(slope, height, k, tolerance, ends, members)
    return ends[:steps], members[:steps], safety


@compiled_kernel
@no_type_check
def mark_useless_intervals(members, must):
    """Count intervals whose coalition holds `must`; set members of the others to -1."""
    total = 0
    for i in range(len(members)):
        kept = True
        for expert in range(len(must)):
            kept &= not must[expert] or members[i, expert] == 1
        total += kept
        if not kept:
            members[i] = -1
    return total


@compiled_kernel
@no_type_check
def interval_of(ends, point):
    """Index of the interval that contains `point`."""
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if ends[middle] < point:
            low = middle + 1
        else:
            high = middle
    return low


@compiled_kernel
@no_type_check
def count_points(V, c, owner, ends, members, tolerance):
    """Count neurons that vanish in an interval whose coalition holds their expert; and safety."""
    points, safety, count = np.empty(len(c)), np.inf, 0
    last = len(ends) - 1
    for n in range(len(c)):
        expert = owner[n]
        if abs(V[n, 0]) <= tolerance * (1.0 + abs(c[n])):
            if (members[:, expert] == 1).any():
                return 0, 0.0
            continue
        point = -c[n] / V[n, 0]
        i = interval_of(ends, point)
        counts = members[i, expert] == 1
        if counts or (i > 0 and members[i - 1, expert] == 1):
            safety = min(
                safety, distance_in_tolerances(point, ends[i - 1], tolerance) if i > 0 else np.inf
            )
        if counts or (i < last and members[i + 1, expert] == 1):
            safety = min(safety, distance_in_tolerances(point, ends[i], tolerance))
        if counts:
            points[count] = point
            count += 1
    return count, min(safety, smallest_spacing(np.sort(points[:count]), tolerance))


@compiled_kernel
@no_type_check
def smallest_spacing(points, tolerance):
    """Smallest distance of neighbours among sorted positions, in tolerances."""
    safety = np.inf
    for i in range(1, len(points)):
        safety = min(safety, distance_in_tolerances(points[i], points[i - 1], tolerance))
    return safety


@compiled_kernel
@no_type_check
def count_line(R, a, V, c, owner, must, k, blur, shape):
    """Count useful intervals and points on one line; shape as in `count_flats`."""
    tolerance = max(TOLERANCE, blur)
    ends, members, safety = walk_line(R[:, 0].copy(), a, k, tolerance, shape == 1)
    if safety < 1.0:
        return 0, safety
    total = mark_useless_intervals(members, must)
    if total > 0 and shape == 2:
        for n in range(len(c)):  # a neuron that vanishes on the whole line repeats a wall
            if abs(V[n, 0]) <= tolerance and (members[:, owner[n]] == 1).any():
                return 0, 0.0
    elif total > 0:
        points, sure = count_points(V, c, owner, ends, members, tolerance)
        return total + points, min(safety, sure)
    return total, safety


@compiled_kernel
@no_type_check
def count_flats(R, a, V, c, owner, must, k, blur, shape):
    """Sum cells over all flats inside this one, of dimension m >= 1; sum and safety.

    Args:
        R: (N, m) router weights on the flat.
        a: (N,) its biases.
        V: (n, m) neurons that may still vanish.
        c: (n,) their biases.
        owner: (n,) expert of each neuron.
        must: (N,) experts that own a vanished neuron.
        k: experts chosen.
        blur: error of the coordinates so far, relative.
        shape: 0 in general; 1 for a router without bias (on this flat only); 2 for neurons without
            bias, whose common point is left to the caller.
    """
    m = R.shape[1]
    if m == 1:
        return count_line(R, a, V, c, owner, must, k, blur, shape)
    if shape == 1:
        total, safety = count_linear(R, k, must)
    else:
        total, safety = count_affine(R, a, k, must)
    if total == 0 or safety < 1.0:
        return total, safety
    for n in range(len(c)):
        expert = owner[n]
        length = np.sqrt((V[n] * V[n]).sum())
        added = not must[expert]
        if added and must.sum() == k:
            continue
        if length <= max(TOLERANCE, blur):
            return 0, 0.0
        normal = V[n] / length
        foot, r = -c[n] / length, unit_reflector(normal)
        lower, shifted = restrict_to_plane(R, a, normal, foot, r)
        neurons, biases = restrict_to_plane(V[n + 1 :], c[n + 1 :], normal, foot, r)
        must[expert] = True
        deeper, sure = count_flats(
            lower, shifted, neurons, biases, owner[n + 1 :], must, k,
            max(blur, ROUNDING) / length, 2 if shape == 2 else 0,
        )  # fmt: skip
        must[expert] = not added
        total += deeper
        safety = min(safety, sure)
        if safety < 1.0:
            return 0, safety
    return total, safety
