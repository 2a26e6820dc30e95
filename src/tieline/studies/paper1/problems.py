"""Small routers on which paper 1 is tested.

router         weight and bias of an affine router, drawn
orthonormal    a router whose rows are the first E axes of D: scores are coordinates
in_ball        uniform points of the ball of radius R
slope          exponent of a power law
"""

import torch
from torch import Tensor

from tieline.studies.claim import Run

__all__ = ["BIAS", "extrapolated", "in_ball", "orthonormal", "router"]

BIAS = 0.07
"""What the extrapolation to ε = 0 leaves of terms of order ε², in the ratios of order 2 below."""


def router(run: Run, experts: int, width: int, stream: int = 1) -> tuple[Tensor, Tensor]:
    """Weight (E, D) and bias (E,)."""
    weight = run.normal(experts, width, stream=1000 + stream)
    return weight, 0.5 * run.normal(experts, stream=2000 + stream)


def orthonormal(experts: int, width: int) -> Tensor:
    """The first E rows of the identity of size D."""
    return torch.eye(experts, width, dtype=torch.float64)


def in_ball(run: Run, n: int, width: int, radius: float = 1.0, stream: int = 7) -> Tensor:
    """Independent uniform points of the ball."""
    x = run.normal(n, width, stream=stream)
    u = torch.rand(n, 1, dtype=torch.float64, generator=run.generator(stream + 1))
    return radius * u ** (1 / width) * x / x.norm(dim=1, keepdim=True)


def extrapolated(shares: dict[float, tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """U_2/U_1 over ε, extrapolated to ε = 0 from two widths ε and 2ε, with its standard error."""
    (small, near_), (large, far) = sorted(shares.items())
    values, variance = [], 0.0
    for eps, (one, two), factor in ((small, near_, 2.0), (large, far, -1.0)):
        ratio = two.mean() / one.mean() / eps
        values.append(factor * ratio.item())
        relative = (1 / two.sum() + 1 / one.sum()).item()
        variance += (factor * ratio.item()) ** 2 * relative
    return sum(values), variance**0.5
