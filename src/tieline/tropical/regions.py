"""Pieces of a top-k Mixture of Experts with one-hidden-layer ReLU experts (paper 3, Sec. 4.2).

A piece is an open set with one coalition (set of k chosen experts) and one activation pattern of
the neurons V[e, h] · x + c[e, h] of the chosen experts. A dense network is N = 1.

    count_regions    the number of pieces, by the flat sum (compiled)
    regions          the pieces themselves, each with a point inside, by linear programming
"""

from math import comb

import numpy as np
from jaxtyping import Float, Real

from tieline.errors import require
from tieline.tropical.checks import (
    Array,
    Count,
    DegenerateError,
    Layer,
    as_layer,
    why_degenerate,
)

__all__ = ["COUNTED", "MAX_DIM", "count_regions"]

MAX_DIM = 5
"""Largest input dimension of exact counts and listings of pieces."""

COUNTED = (
    "pieces (coalition x activation pattern): open sets where the layer is one analytic formula; "
    "affine for k = 1 or constant gates, smooth but not affine under softmax gates with k > 1; "
    "neighbouring pieces are counted apart even if the formula is the same in both"
)


def count_regions(
    W: Real[Array, "experts dim"],
    b: Real[Array, " experts"],
    V: Real[Array, "experts width dim"],
    c: Real[Array, "experts width"],
    k: int,
) -> Count:
    """Number of pieces: Σ_{|S| <= d} #{cells on flat(S) whose coalition holds the owners of S}.

    Exact for walls in general position, decided in float64 with every gap above 1e-11 (relative);
    anything nearer is refused with `DegenerateError`. Routers without bias, experts without bias
    and layers without any are no exception: their common point is counted by itself.

    Args:
        W: (N, d) router weights, d <= 5.
        b: (N,) router biases.
        V: (N, H, d) neurons' weights.
        c: (N, H) neurons' biases.
        k: experts chosen, 1 <= k <= N.
    """
    layer = as_layer(W, b, V, c, k)
    check_dim(layer)
    count, safety = _count(layer, k)
    if safety < 1.0:
        reason = why_degenerate(layer.router.W, layer.V)
        raise DegenerateError(
            f"walls are not in general position: {reason}; `regions` lists the pieces of such a "
            "layer by linear programming"
        )
    return Count(count, COUNTED, "flat sum", safety)


def check_dim(layer: Layer) -> None:
    """Refuse d > 5, naming what can be computed there."""
    dim = layer.V.shape[1]
    require(
        dim <= MAX_DIM,
        f"pieces are counted exactly for d <= {MAX_DIM}, got d = {dim}; `expected_regions`, "
        "`capacity_bound`, `sharp_bound` hold for any d, `count_cells` counts the router's cells",
    )


def _count(layer: Layer, k: int) -> tuple[int, float]:
    from tieline.tropical.flats import count_flats

    router, experts = layer.router, len(layer.router.b)
    free = router.linear or k == experts
    if layer.linear and free:
        return _count_cones(router.W, layer, k)
    shape = 2 if layer.linear else int(router.linear and k < experts)
    count, safety = count_flats(
        router.W, router.b, layer.V, layer.c, layer.owner, layer.nobody, k, 0.0, shape
    )
    if layer.linear:  # all neurons of the coalition chosen at 0 meet there
        width, dim = len(layer.c) // experts, layer.V.shape[1]
        count, safety = count + comb(k * width - 1, dim - 1), min(safety, _gap(router.b, k))
    return int(count), float(safety)


def _gap(scores: Float[np.ndarray, " experts"], k: int) -> float:
    """Safety of the choice of the k largest of `scores`."""
    from tieline.tropical.tied_sets import top_side

    return top_side(scores, k, np.zeros(len(scores), np.int8))


def _count_cones(W: Float[np.ndarray, "experts dim"], layer: Layer, k: int) -> tuple[int, float]:
    """Pieces of a layer without any bias: cones, met by x_1 = ±1, less those met by x_1 = 0."""
    from tieline.tropical.flats import count_flats

    V, owner = layer.V, layer.owner
    total, safety, sign = 0, float("inf"), 1
    while V.shape[1] > 1:
        rest = [np.ascontiguousarray(rows[:, 1:]) for rows in (W, V)]
        norms = np.linalg.norm(rest[1], axis=1)
        for side in (1.0, -1.0):
            found, sure = count_flats(
                rest[0], side * W[:, 0], rest[1] / norms[:, None], side * V[:, 0] / norms,
                owner, layer.nobody, k, 0.0, 0,
            )  # fmt: skip
            total, safety = total + sign * found, min(safety, sure)
        (W, V), sign = rest, -sign
    safety = min(safety, _gap(W[:, 0].copy(), k), _gap(-W[:, 0], k))
    return int(total + sign * 2), float(safety)
