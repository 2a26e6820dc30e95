"""Auxiliary losses of a routing layer, as functions of its scores and weights.

balance_loss       E Σ_e f_e P_e               f share of the assignments, P mean probability
router_z_loss      mean (logsumexp z)²
boundary_loss      ε (K - k*)                  K mean number of experts in use (paper 1, sec. 6)
sparsity_loss      mean Σ_e |w_e|              (ReMoE)

Every mean is over the tokens of `counts`, by default those at hand. Where a batch is spread over
processes, `counts` are those of the whole batch, and each process gets its part of the loss: the
parts add up to the loss of the batch, and so do their gradients.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require

__all__ = ["Counts", "balance_loss", "boundary_loss", "router_z_loss", "sparsity_loss"]

Scores = Float[Tensor, "*batch experts"]
Weights = Float[Tensor, "*batch experts"]
Scalar = Float[Tensor, ""]


class Counts(NamedTuple):
    """The batch that a loss averages over: assignments of each expert (E,) and tokens.

    Both are float64, in which every count up to 2^53 is exact, so that they can be added up over
    processes in one message.
    """

    assigned: Float[Tensor, " experts"]
    tokens: Scalar

    @classmethod
    def of(cls, weights: Weights) -> "Counts":
        """Counts of the tokens at hand."""
        used = (weights != 0).flatten(0, -2)
        tokens = torch.tensor(len(used), dtype=torch.float64, device=weights.device)
        return cls(used.sum(dim=0).double(), tokens)


def balance_loss(scores: Scores, weights: Weights, counts: Counts | None = None) -> Scalar:
    """E Σ_e f_e P_e of GShard and Switch: 1 when either is uniform, up to E when all meet in one.

    f_e is the share of all assignments that expert e got (no gradient), P_e = mean softmax(z)_e.
    """
    assigned, tokens = _counts(weights, counts)
    share = (assigned / assigned.sum().clamp_min(1)).to(scores)
    probability = scores.softmax(dim=-1).flatten(0, -2).sum(dim=0) / tokens.to(scores)
    return scores.shape[-1] * (share * probability).sum()


def router_z_loss(scores: Scores, counts: Counts | None = None) -> Scalar:
    """Mean of (log Σ_e exp z_e)²: keeps logits small, where low precision resolves them."""
    tokens = _counts(scores, counts).tokens.to(scores)
    return scores.logsumexp(dim=-1).square().sum() / tokens


def boundary_loss(
    epsilon: Scalar, weights: Weights, budget: float, counts: Counts | None = None
) -> Scalar:
    """ε (K - k*): its gradient in ε is the excess of the mean expert count K over the budget k*.

    K is a count and carries no gradient, so descent narrows the band while more than k* experts are
    in use and widens it while fewer are. Plain descent at rate η with ε = softplus(θ) is stable iff
    η K'(ε*) (1 - e^{-ε*})² < 2.
    """
    own, tokens = Counts.of(weights), _counts(weights, counts).tokens
    return epsilon * ((own.assigned.sum() - budget * own.tokens) / tokens).to(epsilon)


def sparsity_loss(weights: Weights, counts: Counts | None = None) -> Scalar:
    """Mean over tokens of Σ_e |w_e|."""
    tokens = _counts(weights, counts).tokens.to(weights)
    return weights.abs().sum() / tokens


def _counts(values: Tensor, counts: Counts | None) -> Counts:
    """The given counts or, of at least one token, those at hand."""
    require(bool(torch.is_floating_point(values)), f"expected floating values, got {values.dtype}")
    if counts is not None:
        return counts
    require(values.numel() > 0, f"a loss needs at least one token, got {tuple(values.shape)}")
    return Counts.of(values)
