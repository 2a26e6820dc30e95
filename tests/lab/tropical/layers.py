"""Layers that the tests of tropical geometry share."""

import numpy as np


def gaussian(seed, experts, width, dim):
    """W, b, V, c drawn in this order from one generator."""
    r = np.random.default_rng(seed)
    W, b = r.standard_normal((experts, dim)), r.standard_normal(experts)
    return W, b, r.standard_normal((experts, width, dim)), r.standard_normal((experts, width))


def integers(seed, experts, width, dim, size):
    """The same shapes with integer entries, often degenerate for small `size`."""
    r = np.random.default_rng(seed)
    shapes = (experts, dim), (experts,), (experts, width, dim), (experts, width)
    return tuple(r.integers(-size, size + 1, shape) for shape in shapes)


def signature(layer, k, points):
    """The (coalition, pattern) pairs at the points, by definition."""
    W, b, V, c = layer
    scores = points @ W.T + b
    values = np.einsum("ehd,pd->peh", V, points) + c
    pairs = []
    for z, v in zip(scores, values, strict=True):
        chosen = sorted(np.argsort(-z, kind="stable")[:k].tolist())
        pairs.append((tuple(chosen), (v[chosen] > 0).tobytes()))
    return pairs
