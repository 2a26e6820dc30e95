"""Compiled listing of corners of cells, and of cells and pieces by small linear programmes.

An affine wall a · x + c = 0 is the plane (a, c) · y = 0 through the origin of y = (x, 1), so an
open polyhedron is the open cone {A y > 0} with the row y_last > 0. Unbounded pieces need no special
case, and whether a wall cuts the cone does not depend on its distance. All rows are unit vectors;
cones are intersected with the box |y_j| <= 1.

`piece_patterns` adds neurons one by one; one programme decides whether a neuron cuts a piece. A
neuron that does not is no wall of any smaller piece either. A programme's value is above CUT if a
wall cuts and below NONE if it does not; between them the input is nearly degenerate and the search
gives up (False, or status THIN).
"""

from typing import no_type_check

import numpy as np

from tieline.lab.tropical.compiled_counts import (
    ROUNDING,
    TOLERANCE,
    compiled_kernel,
    next_subset,
    place_experts,
    solve_tie,
)

SLACK = 1e-13
"""Violation of a unit row that counts as none."""
CUT, NONE = 1e-10, 1e-12
DONE, THIN, MANY = 0, 1, 2


@compiled_kernel
@no_type_check
def tie_corners(W, b, k):
    """List the ties of m + 1 experts: (ties as rows, masks of experts above, points, safety)."""
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


@compiled_kernel
@no_type_check
def with_double_room(array):
    """Copy the array to one with twice the rows."""
    larger = np.empty((2 * len(array), array.shape[1]), array.dtype)
    larger[: len(array)] = array
    return larger


@compiled_kernel
@no_type_check
def maximise_one(A, r, c, y):
    """Write to y a largest c y with A y >= r on |y| <= 1; False if nothing is feasible."""
    low, high = -1.0, 1.0
    for i in range(len(r)):
        a = A[i, 0]
        if a > SLACK:
            low = max(low, r[i] / a)
        elif a < -SLACK:
            high = min(high, r[i] / a)
        elif r[i] > SLACK:
            return False
    y[0] = high if c[0] > 0 else low
    return low <= high + SLACK


@compiled_kernel
@no_type_check
def restrict_to_wall(A, r, c, wall, level, pivot, count):
    """Eliminate variable `pivot` on {wall · y = level} from a programme: (A', r', c')."""
    n = len(wall)
    lower, rest, cost = np.empty((count + 2, n - 1)), np.empty(count + 2), np.empty(n - 1)
    for i in range(count + 2):
        if i < count:
            factor, rest[i] = A[i, pivot] / wall[pivot], r[i]
        else:  # the box of the eliminated variable
            factor, rest[i] = (1.0 if i == count else -1.0) / wall[pivot], -1.0
        rest[i] -= factor * level
        length, j = 0.0, 0
        for col in range(n):
            if col != pivot:
                lower[i, j] = (A[i, col] if i < count else 0.0) - factor * wall[col]
                length += lower[i, j] ** 2
                j += 1
        length = np.sqrt(length)
        if length > SLACK:
            lower[i] /= length
            rest[i] /= length
    j = 0
    for col in range(n):
        if col != pivot:
            cost[j] = c[col] - c[pivot] / wall[pivot] * wall[col]
            j += 1
    return lower, rest, cost


@compiled_kernel
@no_type_check
def maximise_linear(A, r, c, y):
    """Write to y a largest c · y with A y >= r, |y_j| <= 1; False if nothing is feasible."""
    n = len(c)
    if n == 1:
        return maximise_one(A, r, c, y)
    for j in range(n):
        y[j] = 1.0 if c[j] > 0 else -1.0
    for i in range(len(r)):
        value, pivot = -r[i], 0
        for j in range(n):
            value += A[i, j] * y[j]
            if abs(A[i, j]) > abs(A[i, pivot]):
                pivot = j
        if value >= -SLACK:
            continue
        if abs(A[i, pivot]) <= SLACK:
            return False
        lower, rest, cost = restrict_to_wall(A, r, c, A[i], r[i], pivot, i)
        solution = np.empty(n - 1)
        if not maximise_linear(lower, rest, cost, solution):
            return False
        y[pivot], j = r[i] / A[i, pivot], 0
        for col in range(n):
            if col != pivot:
                y[col] = solution[j]
                y[pivot] -= A[i, col] / A[i, pivot] * solution[j]
                j += 1
    return True


@compiled_kernel
@no_type_check
def cone_reach(A, count, c, y):
    """Largest c · y in the cone of the first `count` rows of A; at least 0, its value at the apex.

    Rows are taken in a scrambled order, which the expected time relies on.
    """
    n = A.shape[1]
    rows, level = np.empty((count, n)), np.zeros(count)
    step = 7 if count % 7 else 11 if count % 11 else 13
    for i in range(count):
        rows[i] = A[(i * step + 3) % count] if count % step else A[i]
    if not maximise_linear(rows, level, c, y):
        y[:] = 0.0
    value = 0.0
    for j in range(n):
        value += c[j] * y[j]
    return value


@compiled_kernel
@no_type_check
def centre_in_cone(A, count, y):
    """Move y, inside the cone of the first `count` rows, to the middle of its chords by axis."""
    n = len(y)
    values = np.empty(count)
    for _ in range(2):
        for i in range(count):
            values[i] = 0.0
            for j in range(n):
                values[i] += A[i, j] * y[j]
        for axis in range(n):
            low, high = -1.0 - y[axis], 1.0 - y[axis]
            for i in range(count):
                slope = A[i, axis]
                if slope > SLACK:
                    low = max(low, -values[i] / slope)
                elif slope < -SLACK:
                    high = min(high, -values[i] / slope)
            move = 0.5 * (low + high)
            y[axis] += move
            for i in range(count):
                values[i] += move * A[i, axis]


@compiled_kernel
@no_type_check
def pair_rows(rows, members):
    """Unit rows of z_i > z_j, i in the coalition and j not, then y_last > 0."""
    n, m = rows.shape
    k = members.sum()
    walls, at = np.zeros((k * (n - k) + 1, m)), 0
    for i in range(n):
        for j in range(n):
            if members[i] and not members[j]:
                difference = rows[i] - rows[j]
                walls[at] = difference / np.sqrt((difference * difference).sum())
                at += 1
    walls[at, m - 1] = 1.0
    return walls


@compiled_kernel
@no_type_check
def top_members(scores, k):
    """Mask of the k largest scores."""
    members = np.zeros(len(scores), np.bool_)
    members[np.argsort(-scores)[:k]] = True
    return members


@compiled_kernel
@no_type_check
def point_behind_wall(rows, start, stop, wall, k, point):
    """Write a point just behind `wall` on the way from start to stop; returns its coalition."""
    before, after = (wall * start).sum(), (wall * stop).sum()
    crossing = before / (before - after)
    ahead, tied = 1.0, crossing + 1e-9 * (1.0 - crossing)
    first, change = rows @ start, rows @ (stop - start)
    for i in range(len(rows)):
        for j in range(i):
            turn = change[i] - change[j]
            if turn != 0.0:
                tie = (first[j] - first[i]) / turn
                if tied < tie < ahead:
                    ahead = tie
    point[:] = start + 0.5 * (crossing + ahead) * (stop - start)
    return top_members(rows @ point, k)


@compiled_kernel
@no_type_check
def explore_cell(rows, members, point, k):
    """Return (walls, coalitions behind them, points there, status) of the cell around `point`.

    The router has the rows (w, b) (N, d + 1), `members` (N,) is the coalition and `point` (d + 1,)
    lies in its cell and is centred in place.
    """
    walls = pair_rows(rows, members)
    count, sure = len(walls), True
    centre_in_cone(walls, count, point)
    coalitions, points = np.empty((count, len(rows)), np.bool_), np.empty((count, rows.shape[1]))
    bounding, last = 0, count - 1
    while bounding < last:  # walls[:bounding] bound the cell, walls[last] is y_last > 0
        wall = walls[bounding].copy()
        walls[bounding], stop = walls[last], np.empty(rows.shape[1])
        value = cone_reach(walls, last, -wall, stop)
        if NONE < value < CUT:
            sure = False
        if value >= CUT:
            coalitions[bounding] = point_behind_wall(rows, point, stop, wall, k, points[bounding])
            walls[last] = walls[bounding]
            walls[bounding] = wall
            bounding += 1
        else:
            walls[bounding] = walls[last - 1]
            walls[last - 1] = walls[last]
            last -= 1
    return (
        walls[: bounding + 1].copy(),
        coalitions[:bounding].copy(),
        points[:bounding].copy(),
        sure,
    )


@compiled_kernel
@no_type_check
def plane_cuts_cone(A, count, row, point, other):
    """Decide whether the plane `row` cuts the cone; if so, write a point beyond it to `other`.

    Returns (sign of the row at `point`, 1 cut / 0 not cut / -1 not decided). A point on the plane
    itself is first moved off it, inside the cone.
    """
    n = len(point)
    stop = np.empty(n)
    value = (row * point).sum()
    if abs(value) < CUT:
        ahead = cone_reach(A, count, row, stop)
        if ahead < CUT:
            ahead = -cone_reach(A, count, -row, stop)
        point[:] = 0.5 * (point + stop)
        value = (row * point).sum()
    sign = 1.0 if value > 0 else -1.0
    far = cone_reach(A, count, -sign * row, stop)
    if far < CUT:
        return sign, 0 if far <= NONE else -1
    crossing = abs(value) / (abs(value) + far)
    other[:] = point + 0.5 * (1.0 + crossing) * (stop - point)
    return sign, 1


@compiled_kernel
@no_type_check
def piece_patterns(base, neurons, start, most):
    """List all pieces in the cone of `base`: (patterns, points, status).

    `base` (q, n) are the walls of the cell, `neurons` (K, n) may cut it and `start` (n,) lies
    inside; above `most` pieces the search gives up (status MANY).
    """
    q, n = base.shape
    K = len(neurons)
    A, signs = np.empty((q + K, n)), np.empty(K)
    A[:q] = base
    waiting, points = np.zeros((K + 1, K)), np.empty((K + 1, n))
    cuts, depths = np.zeros((K + 1, K), np.bool_), np.zeros(K + 1, np.int64)
    points[0], left = start, 1
    out, interior = np.empty((16, K), np.bool_), np.empty((16, n))
    total = 0
    while left > 0:
        left -= 1
        point, depth = points[left].copy(), depths[left]
        signs[:depth], cut = waiting[left, :depth], cuts[left].copy()
        count = q
        for t in range(depth):
            if cut[t]:
                A[count] = signs[t] * neurons[t]
                count += 1
        centre_in_cone(A, count, point)
        for t in range(depth, K):
            sign, state = plane_cuts_cone(A, count, neurons[t], point, points[left])
            if state < 0:
                return out[:0], interior[:0], THIN
            signs[t] = sign
            if state == 1:
                cut[t] = True
                waiting[left, :t], waiting[left, t] = signs[:t], -sign
                cuts[left], depths[left] = cut, t + 1
                left += 1
                A[count] = sign * neurons[t]
                count += 1
        if total == most:
            return out[:0], interior[:0], MANY
        if total == len(out):
            out, interior = with_double_room(out), with_double_room(interior)
        centre_in_cone(A, count, point)
        out[total], interior[total] = signs > 0, point
        total += 1
    return out[:total], interior[:total], DONE
