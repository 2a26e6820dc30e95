"""Mass of the slab |S| <= r around one decision surface S = 0 (Paper 0, sec. 3).

    gaussian_slab      S = ⟨v, X⟩ + b of normal inputs: exact, first and next order    Ex. 3.8
    surface_density    ∫_{S=0} p/‖∇S‖ dH from samples of S, the constant of Lemma 3.6

The surface integral is the density of S(X) at zero, whatever S: so it is estimated from margins
alone, and the gradients are not needed.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.geometry.kinds import Real
from tieline.numerics import Estimate

__all__ = ["SlabMass", "gaussian_slab", "surface_density"]


@dataclass(frozen=True)
class SlabMass:
    """P(|S| <= r) of a normal S.

    Attributes:
        exact: Φ((r-b)/σ) - Φ((-r-b)/σ) (Paper 0, (3.11)).
        first_order: 2 r φ(b/σ)/σ (Paper 0, (3.12)).
        next_order: first_order · (1 + r² (b²/σ⁴ - 1/σ²)/6).
    """

    exact: float
    first_order: float
    next_order: float


def gaussian_slab(mean: Real, spread: Real, width: Real) -> SlabMass:
    """P(|S| <= r) for S ~ N(b, σ²): for X ~ N(0, Σ), b the offset and σ² = vᵀΣv (Ex. 3.8).

    Args:
        mean: b.
        spread: σ > 0.
        width: r >= 0.
    """
    require(spread > 0, f"need spread > 0, got {spread=}")
    require(width >= 0, f"a width is >= 0, got {width=}")
    near, far = ((sign * width - abs(mean)) / spread for sign in (1, -1))
    exact = _between(far, near)
    density = math.exp(-((mean / spread) ** 2) / 2) / (spread * math.sqrt(2 * math.pi))
    first = 2 * width * density
    curve = width**2 * (mean**2 / spread**4 - 1 / spread**2) / 6
    return SlabMass(exact, first, first * (1 + curve))


def surface_density(margins: Float[Tensor, " samples"], width: Real) -> Estimate:
    """Density of S at zero, n_w / (2 w n), with standard error √(f / (2 w n)).

    n_w of the n margins have |S| <= w; the bias is f″w²/6.
    """
    require(width > 0, f"need width > 0, got {width=}")
    require(margins.numel() > 0, "a density needs a sample, got none", ShapeError)
    span = 2 * width * margins.numel()
    density = (margins.double().abs() <= width).sum().item() / span
    return Estimate(density, math.sqrt(density / span))


def _between(low: Real, high: Real) -> float:
    """Φ(high) - Φ(low), both from the lower tail, where digits are not lost against one."""
    ends = torch.special.ndtr(torch.tensor([low, high], dtype=torch.float64))
    return (ends[1] - ends[0]).item()
