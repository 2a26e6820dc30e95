"""Boundary mass of a linear router with many experts, bounded pair by pair (paper 0, sec. 3).

    F_kl(t) = density of a_k - a_l at t, normal for X ~ N(0, Σ)          eq. 3.8
    BM_pair(w) <= 2w Σ_{k<l} F_kl(0) + o(w)                              eq. 3.9
    C_margin = Σ_{k<l} 2 sup_t F_kl(t)                                   Proposition 3.7

A tie of any two experts counts, near the top or not; for many experts the sum says little about
the top two.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.limits.cells import check_covariance

__all__ = ["PairConstants", "pair_constants"]


@dataclass(frozen=True, eq=False)
class PairConstants:
    """First-order constants of the pairwise boundary mass of a linear router.

    Attributes:
        densities: (E, E) F_kl(0); zero on the diagonal.
        union: 2 Σ_{k<l} F_kl(0), slope of the union bound of eq. 3.9 in the width w.
        margin: C_margin with P(Δ_min <= δ) <= C_margin δ for every δ.
    """

    densities: Float[Tensor, "experts experts"]
    union: float
    margin: float


def pair_constants(
    weight: Float[Tensor, "experts width"],
    bias: Float[Tensor, " experts"] | None = None,
    covariance: Float[Tensor, "width width"] | None = None,
) -> PairConstants:
    """F_kl(0) of all pairs, the union bound (3.9) and C_margin, for scores Wx + b, X ~ N(0, Σ)."""
    experts, width = weight.shape
    require(experts > 1, f"need 2 experts or more, got {experts}", ShapeError)
    sigma = check_covariance(covariance, width)
    w = weight.double()
    b = torch.zeros(experts, dtype=torch.float64) if bias is None else bias.double()
    require(len(b) == experts, f"need {experts} biases, got {len(b)}", ShapeError)
    gram = w @ sigma @ w.T
    variance = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    pair = torch.ones(experts, experts).triu(1).bool()
    least = variance[pair].min().item()
    require(
        least > 1e-12 * gram.diagonal().max().item(),
        f"two experts have the same weights: variance of a score difference {least:.3g}",
    )
    height = (2 * math.pi * variance[pair]).rsqrt()
    mean = (b[:, None] - b)[pair]
    at_zero = height * (-mean.square() / (2 * variance[pair])).exp()
    densities = torch.zeros(experts, experts, dtype=torch.float64).masked_scatter(pair, at_zero)
    return PairConstants(densities + densities.T, 2 * at_zero.sum().item(), 2 * height.sum().item())
