"""Compiled flat sum: the pieces (coalition x activation pattern) of a top-k ReLU layer.

    pieces = Σ_{|S| <= d} #{cells of the router on flat(S) whose coalition holds owners(S)}

S runs over sets of neurons and flat(S) = {x : v_n x + c_n = 0, n in S}, depth first: a flat where
no coalition holds the owners has no deeper flat that counts. Flats keep orthonormal coordinates, so
restriction loses no accuracy. On a line the router's cells are intervals, found by walking along
it, and all points are placed among them at once.

Every function returns the count and its safety, as in `counting`.
"""

from typing import no_type_check

import numpy as np

from tieline.lab.tropical.counting import (
    ROUNDING,
    TOLERANCE,
    compiled,
    count_affine,
    count_linear,
    top_side,
)


@compiled
@no_type_check
def restrict(rows, bias, normal, foot, reflector):
    """Rows and biases in orthonormal coordinates of the hyperplane {x : normal · x = foot}.

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


@compiled
@no_type_check
def unit_reflector(normal):
    """Vector r of the reflection I - 2 r rᵀ that sends the unit `normal` to ± the last axis."""
    r = normal.copy()
    r[-1] += 1.0 if normal[-1] >= 0 else -1.0
    return r / np.sqrt((r * r).sum())


@compiled
@no_type_check
def next_swap(slope, height, side, here, tolerance):
    """Next change of the coalition on a line after `here`: (place, leaving, entering, runner-up).

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


@compiled
@no_type_check
def distance_in_tolerances(a, b, tolerance):
    """Distance of two places on a line, in tolerances."""
    if np.isinf(a) or np.isinf(b):
        return np.inf
    return abs(a - b) / (tolerance * (1.0 + max(abs(a), abs(b))))


@compiled
@no_type_check
def walk(slope, height, k, tolerance, ends, members):
    """Fill ends[i], where interval i closes, and its coalition members[i]; (#intervals, safety)."""
    side, here = members[0], -np.inf
    safety = top_side(-slope, k, side)
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


@compiled
@no_type_check
def walk_linear(slope, k, ends, members):
    """`walk` for scores that all vanish at 0."""
    ends[0], ends[1] = 0.0, np.inf
    return 2, min(top_side(-slope, k, members[0]), top_side(slope, k, members[1]))


@compiled
@no_type_check
def walk_line(slope, height, k, tolerance, linear):
    """Intervals of a line as (ends, members, safety)."""
    n = len(slope)
    room = 1 + n * (n - 1) // 2
    ends, members = np.empty(room), np.empty((room + 1, n), np.int8)
    if k == n:
        ends[0], members[0] = np.inf, 1
        steps, safety = 1, np.inf
    elif linear:
        steps, safety = walk_linear(slope, k, ends, members)
    else:
        steps, safety = walk(slope, height, k, tolerance, ends, members)
    return ends[:steps], members[:steps], safety


@compiled
@no_type_check
def count_useful(members, must):
    """Intervals and experts that count: the coalition holds `must` and the expert."""
    total = 0
    for i in range(len(members)):
        kept = True
        for expert in range(len(must)):
            kept &= not must[expert] or members[i, expert] == 1
        total += kept
        if not kept:
            members[i] = -1
    return total


@compiled
@no_type_check
def interval_of(ends, point):
    """Index of the interval that holds `point`."""
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if ends[middle] < point:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
@no_type_check
def count_points(V, c, owner, ends, members, tolerance):
    """Neurons that vanish on the line inside an interval where they count, and the safety."""
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


@compiled
@no_type_check
def smallest_spacing(points, tolerance):
    """Smallest distance of neighbours among sorted places, in tolerances."""
    safety = np.inf
    for i in range(1, len(points)):
        safety = min(safety, distance_in_tolerances(points[i], points[i - 1], tolerance))
    return safety


@compiled
@no_type_check
def count_line(R, a, V, c, owner, must, k, blur, shape):
    """Intervals and points that count on one line; shape as in `count_flats`."""
    tolerance = max(TOLERANCE, blur)
    ends, members, safety = walk_line(R[:, 0].copy(), a, k, tolerance, shape == 1)
    if safety < 1.0:
        return 0, safety
    total = count_useful(members, must)
    if total > 0 and shape == 2:
        for n in range(len(c)):  # a neuron that vanishes on the whole line repeats a wall
            if abs(V[n, 0]) <= tolerance and (members[:, owner[n]] == 1).any():
                return 0, 0.0
    elif total > 0:
        points, sure = count_points(V, c, owner, ends, members, tolerance)
        return total + points, min(safety, sure)
    return total, safety


@compiled
@no_type_check
def count_flats(R, a, V, c, owner, must, k, blur, shape):
    """Σ over the flats inside this one, of dimension m >= 1, and the safety of the sum.

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
        lower, shifted = restrict(R, a, normal, foot, r)
        neurons, biases = restrict(V[n + 1 :], c[n + 1 :], normal, foot, r)
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
