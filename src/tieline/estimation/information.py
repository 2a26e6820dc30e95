"""How much the data say about each direction of the parameters.

    I = E[∇f(X) ∇f(X)ᵀ], X ~ μ

The flat directions of I are the symmetries of the model; the ratio of its largest eigenvalue to the
smallest of the others, with every parameter in units of its own information (diagonal 1), is the
condition number that decides how large n must be before the asymptotic rates show.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require
from tieline.estimation.design import LawName, draw_inputs
from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters

__all__ = ["Information", "information"]


@dataclass(frozen=True, eq=False)
class Information:
    """Spectrum of the information matrix with unit diagonal.

    Attributes:
        eigenvalues: in ascending order.
        nullity: eigenvalues below the threshold times the largest, flat parameters included.
        condition: largest over the smallest eigenvalue that is not flat.
        gap: smallest eigenvalue that is not flat over the largest that is; inf if none is flat.
    """

    eigenvalues: Float[Tensor, " p"]
    nullity: int
    condition: float
    gap: float


def information(
    model: MoEModel,
    params: MoEParameters,
    *,
    pinned: tuple[int, ...] = (),
    n: int = 4000,
    seed: int = 0,
    law: LawName = "uniform",
    threshold: float = 1e-12,
) -> Information:
    """Spectrum of the information matrix of one truth on n inputs.

    Args:
        model: the family.
        params: one problem.
        pinned: parameters that are known, by their place in the flat vector.
        n: inputs.
        seed: of the inputs.
        law: of the inputs.
        threshold: eigenvalues below this share of the largest count as flat.
    """
    require(n >= model.n_parameters, f"need n >= p = {model.n_parameters} inputs, got {n}")
    x = draw_inputs(law, n, model.d, seed)
    jacobian = model.jacobian(params, x)
    keep = [i for i in range(model.n_parameters) if i not in pinned]
    columns = jacobian[:, keep]
    scale = torch.linalg.vector_norm(columns, dim=0)
    columns = columns / torch.where(scale > 0, scale, 1.0)
    values = torch.linalg.svdvals(columns).square().flip(0)
    flat = int((values < threshold * values[-1]).sum())
    condition = float(values[-1] / values[flat]) if flat < len(values) else float("inf")
    below = values[flat - 1].item() if flat else 0.0
    gap = float(values[flat] / below) if below > 0 and flat < len(values) else float("inf")
    return Information(values, flat, condition, gap)
