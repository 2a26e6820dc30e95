"""Auxiliary losses of a routing layer, as functions of its scores and weights.

balance_loss       E Σ_e f_e P_e               f share of the assignments, P mean probability
router_z_loss      mean (logsumexp z)²
boundary_loss      ε (K - k*)                  K mean number of experts in use (paper 1, sec. 6)
sparsity_loss      mean Σ_e |w_e|              (ReMoE)
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require

__all__ = ["balance_loss", "boundary_loss", "router_z_loss", "sparsity_loss"]

Scores = Float[Tensor, "*batch experts"]
Weights = Float[Tensor, "*batch experts"]
Scalar = Float[Tensor, ""]


def balance_loss(scores: Scores, weights: Weights) -> Scalar:
    """E Σ_e f_e P_e of GShard and Switch: 1 when either is uniform, up to E when all meet in one.

    f_e is the share of all assignments that expert e got (no gradient), P_e = mean softmax(z)_e.
    """
    _check_tokens(scores)
    used = (weights != 0).flatten(0, -2).sum(dim=0)
    assigned = used / used.sum().clamp_min(1)
    probability = scores.softmax(dim=-1).flatten(0, -2).mean(dim=0)
    return scores.shape[-1] * (assigned * probability).sum()


def router_z_loss(scores: Scores) -> Scalar:
    """Mean of (log Σ_e exp z_e)²: keeps logits small, where low precision resolves them."""
    _check_tokens(scores)
    return scores.logsumexp(dim=-1).square().mean()


def boundary_loss(epsilon: Scalar, weights: Weights, budget: float) -> Scalar:
    """ε (K - k*): its gradient in ε is the excess of the mean expert count K over the budget k*.

    K is a count and carries no gradient, so descent narrows the band while more than k* experts are
    in use and widens it while fewer are. Plain descent at rate η with ε = softplus(θ) is stable iff
    η K'(ε*) (1 - e^{-ε*})² < 2.
    """
    _check_tokens(weights)
    in_use = (weights != 0).sum(dim=-1).to(epsilon).mean()
    return epsilon * (in_use - budget)


def sparsity_loss(weights: Weights) -> Scalar:
    """Mean over tokens of Σ_e |w_e|."""
    _check_tokens(weights)
    return weights.abs().sum(dim=-1).mean()


def _check_tokens(values: Tensor) -> None:
    require(values.numel() > 0, f"a loss needs at least one token, got {tuple(values.shape)}")
    require(bool(torch.is_floating_point(values)), f"expected floating values, got {values.dtype}")
