"""Compiled linear programmes in few variables: open cones cut out by walls through the origin.

An affine wall a · x + c = 0 is the plane (a, c) · y = 0 through the origin of y = (x, 1), so an
open polyhedron is the open cone {A y > 0} with the row y_last > 0: unbounded pieces are no special
case, and a wall cuts the cone or it does not, whatever the distance. All rows are unit vectors;
cones are looked at inside the box |y_j| <= 1.

    maximise    largest c · y in {A y >= r, |y_j| <= 1}: Seidel's incremental method, expected time
                linear in the rows for a fixed number of variables
    reach       the same over a cone, from scratch: how far the cone reaches beyond a wall
    centre      a point of the cone moved to the middle of its chords
"""

from typing import no_type_check

import numpy as np

from tieline.tropical.compiled import compiled

SLACK = 1e-13
"""Violation of a unit row that counts as none."""


@compiled
@no_type_check
def maximise_one(A, r, c, y):
    """Largest c y with A y >= r on the segment |y| <= 1; False if there is none."""
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


@compiled
@no_type_check
def onto_wall(A, r, c, wall, level, pivot, count):
    """The programme on {wall · y = level} with variable `pivot` solved for: (A', r', c')."""
    n = len(wall)
    lower, rest, cost = np.empty((count + 2, n - 1)), np.empty(count + 2), np.empty(n - 1)
    for i in range(count + 2):
        if i < count:
            factor, rest[i] = A[i, pivot] / wall[pivot], r[i]
        else:  # the box of the variable that goes
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


@compiled
@no_type_check
def maximise(A, r, c, y):
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
        lower, rest, cost = onto_wall(A, r, c, A[i], r[i], pivot, i)
        part = np.empty(n - 1)
        if not maximise(lower, rest, cost, part):
            return False
        y[pivot], j = r[i] / A[i, pivot], 0
        for col in range(n):
            if col != pivot:
                y[col] = part[j]
                y[pivot] -= A[i, col] / A[i, pivot] * part[j]
                j += 1
    return True


@compiled
@no_type_check
def reach(A, count, c, y):
    """Largest c · y in the cone of the first `count` rows of A; at least 0, where the apex is.

    Rows are taken in a scrambled order, on which the expected time rests.
    """
    n = A.shape[1]
    rows, level = np.empty((count, n)), np.zeros(count)
    step = 7 if count % 7 else 11 if count % 11 else 13
    for i in range(count):
        rows[i] = A[(i * step + 3) % count] if count % step else A[i]
    if not maximise(rows, level, c, y):
        y[:] = 0.0
    value = 0.0
    for j in range(n):
        value += c[j] * y[j]
    return value


@compiled
@no_type_check
def centre(A, count, y):
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
