"""Expert functions h(x, η) of papers 2 and 4: ridge functions of u = a·x + b.

    linear        u                        η = (a, b)
    polynomial    uᵖ                       η = (a, b)
    relu          max(u, 0)                η = (a, b)
    gelu          u Φ(u)                   η = (a, b)
    tanh          tanh u                   η = (a, b)
    two_layer     λ φ(u), φ one of the above except polynomial      η = (a, b, λ)

A ridge function is its value and its slope; the Jacobian of a model needs no more. `curvature` is
φ″ away from kinks, for the tests of identifiability. `degree` is the
p of φ(tu) = tᵖ φ(u) for t > 0, by which mass and scale of an expert can trade.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tieline.errors import require

__all__ = ["EXPERTS", "Ridge", "ridge_function"]

_SQRT_2PI = math.sqrt(2 * math.pi)


@dataclass(frozen=True)
class Ridge:
    """φ with its slope.

    Attributes:
        value: u ↦ φ(u).
        slope: u ↦ φ′(u); the left one at the kink of ReLU.
        curvature: u ↦ φ″(u) where it exists.
        degree: p if φ is positively homogeneous of degree p, else None.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    curvature: Callable[[Tensor], Tensor]
    degree: int | None = None


def _gelu_slope(u: Tensor) -> Tensor:
    return torch.special.ndtr(u) + u * torch.exp(-0.5 * u * u) / _SQRT_2PI


def _gelu_curvature(u: Tensor) -> Tensor:
    return (2 - u * u) * torch.exp(-0.5 * u * u) / _SQRT_2PI


def _tanh_slope(u: Tensor) -> Tensor:
    return 1 - torch.tanh(u).square()


def _tanh_curvature(u: Tensor) -> Tensor:
    return -2 * torch.tanh(u) * _tanh_slope(u)


def _power(p: int) -> Ridge:
    second = torch.zeros_like if p == 1 else lambda u: p * (p - 1) * u ** (p - 2)
    return Ridge(lambda u: u**p, lambda u: p * u ** (p - 1), second, degree=p)


RIDGES = {
    "linear": Ridge(lambda u: u, torch.ones_like, torch.zeros_like, degree=1),
    "relu": Ridge(torch.relu, lambda u: (u > 0).to(u.dtype), torch.zeros_like, degree=1),
    "gelu": Ridge(lambda u: u * torch.special.ndtr(u), _gelu_slope, _gelu_curvature),
    "tanh": Ridge(torch.tanh, _tanh_slope, _tanh_curvature),
}
EXPERTS = (*RIDGES, "polynomial", "two_layer")


def ridge_function(expert: str, power: int = 2, activation: str = "relu") -> Ridge:
    """The φ of an expert.

    Args:
        expert: one of `EXPERTS`.
        power: p >= 1 of a polynomial expert.
        activation: φ of a two-layer expert.
    """
    require(expert in EXPERTS, f"expert must be one of {EXPERTS}, got {expert!r}")
    if expert == "polynomial":
        require(power >= 1, f"a polynomial expert needs a power >= 1, got {power}")
        return _power(power)
    name = activation if expert == "two_layer" else expert
    require(name in RIDGES, f"activation must be one of {tuple(RIDGES)}, got {name!r}")
    return RIDGES[name]
