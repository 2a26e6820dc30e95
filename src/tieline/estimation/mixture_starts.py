"""Where the fit of a mixture of experts begins: from who answers for which row to parameters.

    shares of rows      from a tree of linear models (the first start) or random directions (the
                        others), then some steps of expectation-maximisation (`responsibilities`)
    the gate            its weights are brought near the shares by cross entropy, whatever the gate
    the experts         least squares with the shares as weights; those that are not linear begin at
                        the linear ones

Both the gate and the experts that are not linear are found by L-BFGS on a penalised loss. The fit
that follows minimises the squared error of the mixture and may undo any of this.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import one_hot

from tieline.estimation.model import MoEModel
from tieline.estimation.model_tree import linear_tree
from tieline.estimation.parameters import MoEParameters
from tieline.estimation.responsibilities import Responsibilities, responsibilities
from tieline.estimation.shared_gate import SharedGate

__all__ = ["Rows", "mixture_starts"]

WIDEST_TREE = 64
"""Widest input for which a tree is grown: the work grows like its cube."""

STEPS = 60
"""Steps of L-BFGS."""

PENALTY = 1e-6
"""Of squared parameters, beside a mean over rows."""


class Rows(NamedTuple):
    """Standardised rows with weights of mean 1: inputs (n, D), targets (n, C), weights (n)."""

    x: Float[Tensor, "rows width"]
    y: Float[Tensor, "rows outputs"]
    weight: Float[Tensor, " rows"]

    def take(self, index: Tensor) -> "Rows":
        """The rows of an index or mask, with weights of mean 1 again."""
        weight = self.weight[index]
        return Rows(self.x[index], self.y[index], weight / weight.mean())


def mixture_starts(
    regression: SharedGate, rows: Rows, starts: int, generator: torch.Generator
) -> Float[Tensor, "starts p"]:
    """Parameter vectors to begin with; the first is the same for every generator."""
    return torch.stack([
        _parameters(regression, rows, _answering(regression.model, rows, place, generator))
        for place in range(starts)
    ])  # fmt: skip


def _answering(
    model: MoEModel, rows: Rows, place: int, generator: torch.Generator
) -> Responsibilities:
    """Who answers for which row, by a tree at the first place and random directions after it."""
    x, y, weight = rows
    experts = model.n_experts
    directions = torch.randn(x.shape[1] + 1, experts, dtype=x.dtype, generator=generator)
    if place == 0 and x.shape[1] <= WIDEST_TREE:
        start = one_hot(linear_tree(x, y, weight, experts), experts).to(x)
    else:
        start = (x @ directions[:-1] + directions[-1]).softmax(dim=1)
    return responsibilities(x, y, weight, start)


def _parameters(
    regression: SharedGate, rows: Rows, answering: Responsibilities
) -> Float[Tensor, " p"]:
    gate = _gate(regression.model, rows, answering.share)
    experts = _experts(regression.model, rows, answering)
    return torch.cat([gate.router.flatten(), gate.bias, experts.flatten()])


def _gate(model: MoEModel, rows: Rows, share: Tensor) -> MoEParameters:
    """The gate whose weights are nearest to the shares in cross entropy."""
    n, width, q = model.n_experts, model.router_width, model.expert_width
    none = share.new_zeros(n, q)
    mass = rows.weight[:, None] * share
    spread = 0.1 + 0.9 * torch.rand(n, width, dtype=share.dtype, generator=_fixed())
    begin = torch.cat([(spread - spread.mean(dim=0)).flatten(), mass.mean(dim=0).log().clamp(-9)])

    def away(vector: Tensor) -> Tensor:
        router, bias = vector[: n * width].unflatten(0, (n, width)), vector[n * width :]
        scores = model.scores(MoEParameters(router, bias, none), rows.x)
        if model.link == "softmax":
            return -(mass * scores.log_softmax(dim=1)).sum() / len(mass)
        both = torch.nn.functional.binary_cross_entropy_with_logits
        return both(scores, share, weight=rows.weight[:, None], reduction="sum") / len(mass)

    found = _minimum(away, begin)
    return MoEParameters(found[: n * width].unflatten(0, (n, width)), found[n * width :], none)


def _experts(model: MoEModel, rows: Rows, answering: Responsibilities) -> Tensor:
    """Expert rows (C, N, q) by least squares with the shares as weights."""
    linear = answering.experts.permute(2, 0, 1)
    if model.expert == "linear":
        return linear
    one = torch.ones_like(linear[..., :1])
    begin = torch.cat([linear, one], dim=2) if model.expert == "two_layer" else linear
    shape = begin.shape
    mass = rows.weight[:, None] * answering.share

    def away(vector: Tensor) -> Tensor:
        experts = vector.unflatten(0, shape)
        gate = MoEParameters(torch.zeros_like(experts), torch.zeros_like(experts[..., 0]), experts)
        outputs = model.expert_outputs(gate, rows.x)  # (C, n, N)
        return (mass * (rows.y.mT[:, :, None] - outputs).square()).sum() / len(mass)

    return _minimum(away, begin.flatten()).unflatten(0, shape)


def _minimum(loss: Callable[[Tensor], Tensor], begin: Tensor) -> Tensor:
    """Where L-BFGS brings the penalised loss; the beginning if it meets no number."""

    def value_and_gradient(array):
        vector = torch.tensor(array, dtype=torch.float64, requires_grad=True)
        value = loss(vector) + PENALTY * vector.square().sum()
        (gradient,) = torch.autograd.grad(value, vector)
        return value.item(), gradient.numpy()

    options = {"maxiter": STEPS}
    found = minimize(
        value_and_gradient, begin.numpy(), jac=True, method="L-BFGS-B", options=options
    )
    end = torch.tensor(found.x, dtype=torch.float64)
    return end if bool(end.isfinite().all()) else begin


def _fixed() -> torch.Generator:
    return torch.Generator().manual_seed(0)
