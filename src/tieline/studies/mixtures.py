"""Random models on which papers 2 and 4 are tested, and measures that look the same but are not.

drawn          parameters of a model
inputs         uniform on the cube
largest_gap    max |f - f'| over inputs
split_scale    one expert as two of half the mass, (1 ± s)^{1/p} times as strong
shift_rows     all rows v(β) moved by one vector
twisted        A with an antisymmetric part
without_row    the first router row zero
"""

import math

import torch
from torch import Tensor

from tieline.estimation import MoEModel, MoEParameters
from tieline.estimation.gates import router_directions
from tieline.studies.claim import Run

__all__ = [
    "drawn",
    "inputs",
    "largest_gap",
    "shift_rows",
    "split_scale",
    "twisted",
    "without_row",
]


def drawn(run: Run, model: MoEModel, stream: int = 1, router: float = 1.0) -> MoEParameters:
    """Normal parameters; rows of length about `router`, the last bias 0."""
    params = model.unflatten(run.normal(model.n_parameters, stream=stream))
    bias = params.bias - params.bias[-1] if model.link == "softmax" else params.bias
    return MoEParameters(router * params.router, bias, params.experts)


def inputs(run: Run, n: int, d: int, stream: int = 9) -> Tensor:
    """Uniform on [-1, 1]ᵈ."""
    return 2 * torch.rand(n, d, dtype=torch.float64, generator=run.generator(stream)) - 1


def largest_gap(model: MoEModel, one: MoEParameters, other: MoEParameters, x: Tensor) -> float:
    """Largest |f - f'|; each may have its own number of experts."""
    f = [model.with_experts(p.n_experts).regression(p, x) for p in (one, other)]
    return float((f[0] - f[1]).abs().max())


def split_scale(
    model: MoEModel, truth: MoEParameters, size: float = 0.5, place: int | None = None
) -> MoEParameters:
    """The first expert as two: half the mass each, φ times 1 ± size; f is the same.

    Args:
        model: with experts of some degree p, or two-layer.
        truth: the parameters; for the sigmoid link the first row must be zero.
        size: share of the strength that moves.
        place: coordinate of η that carries the strength; None is the whole row with degree p.
    """
    order = [0, *range(truth.n_experts)]
    router, bias, experts = (
        truth.router[order],
        truth.bias[order].clone(),
        truth.experts[order].clone(),
    )
    half = bias[0] - math.log(2) if model.link == "softmax" else torch.logit(bias[0].sigmoid() / 2)
    bias[:2] = half
    factors = torch.tensor([1 + size, 1 - size], dtype=torch.float64)
    if place is None:
        experts[:2] *= factors.unsqueeze(-1) ** (1 / (model.ridge.degree or 1))
    else:
        experts[:2, place] *= factors
    return MoEParameters(router, bias, experts)


def shift_rows(model: MoEModel, truth: MoEParameters, step: Tensor) -> MoEParameters:
    """Rows whose v(β) = β/(‖β‖ + τ1) are all moved by `step`; the same f by softmax."""
    tau = model.tau[0]
    v = router_directions("perturbed", truth.router, tau) + step
    rows = tau * v / (1 - torch.linalg.vector_norm(v, dim=-1, keepdim=True))
    return MoEParameters(rows, truth.bias, truth.experts)


def twisted(truth: MoEParameters, size: float = 0.3) -> MoEParameters:
    """Quadratic scores on the plane with `size` added to A_12 and taken from A_21; the same f."""
    rows = truth.router.clone()
    rows[:, 1] += size
    rows[:, 2] -= size
    return MoEParameters(rows, truth.bias, truth.experts)


def without_row(truth: MoEParameters) -> MoEParameters:
    """The parameters with a zero row for the first expert."""
    rows = truth.router.clone()
    rows[0] = 0
    return MoEParameters(rows, truth.bias, truth.experts)
