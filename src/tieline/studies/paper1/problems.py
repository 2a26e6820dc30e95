"""Small routers on which paper 1 is tested.

router         weight and bias of an affine router, drawn
orthonormal    a router whose rows are the first E axes of D: scores are coordinates
in_ball        uniform points of the ball of radius R
slope          exponent of a power law
"""

import math

import torch
from scipy import stats
from torch import Tensor

from tieline.studies.claim import Run

__all__ = ["in_ball", "orthonormal", "router", "slope"]


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


def slope(x: list[float], y: list[float]) -> float:
    """Exponent of y ~ x^p by least squares of logarithms."""
    return float(stats.linregress([math.log(v) for v in x], [math.log(abs(v)) for v in y]).slope)
