"""Distances to ties by quadratic programmes over every polyhedron of the definition."""

import itertools

import numpy as np
from scipy.optimize import nnls


def programme_distance(x, weight, bias, k, order):
    """Smallest distance from x to {z_J equal, P above, the rest below}, over all J and P."""
    experts, best = len(weight), np.inf
    for tied in itertools.combinations(range(experts), order + 1):
        rows = weight[list(tied[1:])] - weight[tied[0]]
        foot = x - np.linalg.pinv(rows) @ (rows @ x - bias[tied[0]] + bias[list(tied[1:])])
        within = np.linalg.svd(rows)[2][order:].T
        rest = [e for e in range(experts) if e not in tied]
        for above in range(max(0, k - order), min(k - 1, len(rest)) + 1):
            for chosen in itertools.combinations(rest, above):
                sign = np.array([1.0 if e in chosen else -1.0 for e in rest])
                walls = sign[:, None] * (weight[rest] - weight[tied[0]])
                levels = -sign * (bias[rest] - bias[tied[0]])
                slide = shortest(walls @ within, levels - walls @ foot) if rest else 0.0
                best = min(best, np.hypot(np.linalg.norm(x - foot), slide))
    return best


def shortest(rows, levels):
    """min ‖u‖ subject to rows u >= levels (least distance programming); infinite if none is."""
    system, target = np.vstack([rows.T, levels]), np.zeros(rows.shape[1] + 1)
    target[-1] = 1.0
    residual = system @ nnls(system, target, maxiter=1000)[0] - target
    if np.linalg.norm(residual) < 1e-9:
        return np.inf
    return np.linalg.norm(residual[:-1] / residual[-1])
