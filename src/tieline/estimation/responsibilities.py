"""Which expert answers for which row: expectation-maximisation for a Gaussian mixture.

With linear experts B_e, linear softmax gates π_e(x) and one noise variance s² the steps are

    E    r_te ∝ π_e(x_t) exp(-‖y_t - B_e (x_t, 1)‖² / 2s²)
    M    B_e by least squares with weights w_t r_te;  s² the mean squared residual;
         the gates by steps up the lower bound that the curvature Σ w φφᵀ / 2 gives the likelihood

(Jordan and Jacobs 1994). Experts are told apart by what they predict and not by where their rows
are, so that regions which no clustering of the inputs would find are found. What comes out begins
a least-squares fit of any gate and any experts; it is not the fit.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Responsibilities", "responsibilities"]

SMALLEST = 1e-8
"""Least noise variance, for standardised targets."""


class Responsibilities(NamedTuple):
    """What expectation-maximisation found.

    Attributes:
        share: r (n, E), rows sum to 1.
        experts: B (E, D + 1, C), the constant last.
        gate: linear gate (D + 1, E), the constant last.
        variance: s².
    """

    share: Float[Tensor, "rows experts"]
    experts: Float[Tensor, "experts inputs outputs"]
    gate: Float[Tensor, "inputs experts"]
    variance: float


def responsibilities(
    x: Float[Tensor, "rows width"],
    y: Float[Tensor, "rows outputs"],
    weight: Float[Tensor, " rows"],
    start: Float[Tensor, "rows experts"],
    *,
    iterations: int = 40,
    gate_steps: int = 5,
    ridge: float = 1e-4,
) -> Responsibilities:
    """Shares r after some steps of expectation-maximisation.

    Args:
        x: standardised inputs (n, D).
        y: standardised targets (n, C).
        weight: weights (n) of the rows.
        start: first shares (n, E), rows sum to 1.
        iterations: pairs of steps.
        gate_steps: steps of the gate in each.
        ridge: penalty of gates and experts over the total weight.
    """
    design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    mass = weight / weight.sum()
    eye = torch.eye(design.shape[1], dtype=x.dtype)
    curvature = 0.5 * (design * mass[:, None]).mT @ design + ridge * eye
    factor = torch.linalg.cholesky(curvature)
    share, gate = start, x.new_zeros(design.shape[1], start.shape[1])
    experts, variance = _experts(design, y, mass[:, None] * share, ridge), SMALLEST
    for _ in range(iterations):
        for _ in range(gate_steps):
            error = mass[:, None] * (share - (design @ gate).softmax(dim=1))
            gate = gate + torch.cholesky_solve(design.mT @ error - ridge * gate, factor)
        squares = _squares(design, y, experts)
        variance = max((mass[:, None] * share * squares).sum().item() / y.shape[1], SMALLEST)
        share = ((design @ gate).log_softmax(dim=1) - squares / (2 * variance)).softmax(dim=1)
        experts = _experts(design, y, mass[:, None] * share, ridge)
    return Responsibilities(share, experts, gate, variance)


def _experts(design: Tensor, y: Tensor, mass: Tensor, ridge: float) -> Tensor:
    """B_e by weighted least squares, (E, D + 1, C)."""
    weighted = mass.mT[:, :, None] * design  # (E, n, D + 1)
    gram = weighted.mT @ design
    eye = torch.eye(design.shape[1], dtype=design.dtype)
    size = mass.sum(dim=0)[:, None, None].clamp(min=1e-12)
    return torch.linalg.solve(gram + ridge * size * eye + 1e-12 * eye, weighted.mT @ y)


def _squares(design: Tensor, y: Tensor, experts: Tensor) -> Tensor:
    """‖y - B_e (x, 1)‖² (n, E)."""
    return (y - design @ experts).square().sum(dim=2).mT
