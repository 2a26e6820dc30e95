"""A ReLU network as a tropical rational function F = P ⊘ Q (paper 3, Def. 3.6).

    rational_form    P and Q, both convex, with F = P - Q for every output of a network

A layer with weights A = A⁺ - A⁻ maps x = p - q to (A⁺p + A⁻q + b) - (A⁺q + A⁻p), and ReLU of p - q
is max(p, q) - q. Terms that are never the maximum are dropped after each step; what is left still
grows with width and depth, which is the paper's "complexity folded into P and Q".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Real

from tieline.errors import ShapeError, require
from tieline.tropical.checks import Array, double_array
from tieline.tropical.polynomials import TropicalPolynomial

__all__ = ["TropicalRational", "rational_form"]

Pair = tuple[TropicalPolynomial, TropicalPolynomial]


@dataclass(frozen=True)
class TropicalRational:
    """F = P ⊘ Q = P - Q.

    Attributes:
        numerator: P.
        denominator: Q.
    """

    numerator: TropicalPolynomial
    denominator: TropicalPolynomial

    def evaluate(self, x: Real[Array, "points dim"]) -> Float[np.ndarray, " points"]:
        """F(x) at every point."""
        return self.numerator.evaluate(x) - self.denominator.evaluate(x)


def rational_form(
    layers: Sequence[tuple[Real[Array, "_ _"], Real[Array, " _"]]],
) -> list[TropicalRational]:
    """One tropical rational function per output of x ↦ A_L relu(… relu(A_1 x + b_1) …) + b_L.

    Args:
        layers: (A, b) of each affine map in order; ReLU stands between them, not after the last.
    """
    require(len(layers) > 0, "a network needs one layer at least")
    width = double_array("A", layers[0][0], 2).shape[1]
    axes, none = np.eye(width), np.zeros((1, width))
    pairs = [(_term(axes[i : i + 1]), _term(none)) for i in range(width)]
    for depth, (A, b) in enumerate(layers):
        weights, bias = double_array("A", A, 2), double_array("b", b, 1)
        require(
            weights.shape == (len(bias), len(pairs)),
            f"layer {depth}: weights {weights.shape}, {len(bias)} biases, {len(pairs)} inputs",
            ShapeError,
        )
        pairs = [_affine(pairs, row, shift) for row, shift in zip(weights, bias, strict=True)]
        if depth + 1 < len(layers):
            pairs = [(p.plus(q).essential(), q) for p, q in pairs]
    return [TropicalRational(p, q) for p, q in pairs]


def _affine(pairs: list[Pair], row: Float[np.ndarray, " into"], shift: float) -> Pair:
    """(A⁺p + A⁻q + b, A⁺q + A⁻p) for one output."""
    width = pairs[0][0].exponents.shape[1]
    p = TropicalPolynomial(np.zeros((1, width)), np.array([float(shift)]))
    q = _term(np.zeros((1, width)))
    for weight, (upper, lower) in zip(row, pairs, strict=True):
        above, below = (upper, lower) if weight >= 0 else (lower, upper)
        if weight != 0:
            p = p.times(above.scaled(abs(float(weight)))).essential()
            q = q.times(below.scaled(abs(float(weight)))).essential()
    return p, q


def _term(exponents: Float[np.ndarray, "1 dim"]) -> TropicalPolynomial:
    return TropicalPolynomial(exponents, np.zeros(1))
