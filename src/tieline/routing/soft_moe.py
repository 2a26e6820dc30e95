"""Soft MoE: every slot of an expert is a mixture of tokens, every token a mixture of slots.

    Z = X Φ                 scores (T, S) of T tokens and S = E·p slots
    X̃ = softmax_T(Z)ᵀ X     what the slots hold
    Y = softmax_S(Z) Ỹ      Ỹ_s = f_e(X̃_s), e the expert of slot s

Puigcerver et al. (2024). Smooth, without any choice; each token's output depends on all tokens of
its sequence, also on those after it, so it does not suit causal models (paper 1, B.2).
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tieline.errors import ShapeError, require
from tieline.routing.experts import Experts

__all__ = ["SoftMoE"]


class SoftMoE(nn.Module):
    """The layer of the module docstring over the last two axes, tokens and width.

    Args:
        experts: the experts f_e.
        slots: p >= 1 slots per expert.
        normalise: whether tokens and slot vectors are compared by their direction, with a learnt
            scale: without it, wide layers turn the softmaxes into choices.
    """

    batch_dependent = True

    def __init__(self, experts: Experts, *, slots: int = 1, normalise: bool = True) -> None:
        super().__init__()
        require(slots >= 1, f"an expert needs at least one slot, got {slots=}")
        width = experts.d_model
        self.experts, self.slots = experts, slots
        self.phi = nn.Parameter(torch.randn(experts.n_experts * slots, width) / math.sqrt(width))
        self.scale = nn.Parameter(torch.ones(())) if normalise else None

    def scores(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens s"]:
        """Z, in at least float32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        x, phi = x.to(wide), self.phi.to(wide)
        if self.scale is None:
            return F.linear(x, phi)
        return F.linear(F.normalize(x, dim=-1), self.scale * F.normalize(phi, dim=-1))

    def forward(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """Y."""
        require(x.ndim >= 2, f"tokens must be (..., T, D), got {tuple(x.shape)}", ShapeError)
        if not x.numel():
            return x
        scores = self.scores(x)
        held = scores.softmax(dim=-2).mT.to(x) @ x
        flat = held.reshape(-1, x.shape[-1])
        out = self.experts(flat, self._owners(flat)).view_as(held)
        return scores.softmax(dim=-1).to(x) @ out

    def _owners(self, flat: Tensor) -> Float[Tensor, "rows experts"]:
        """Weight 1 for the expert of each slot, sequence after sequence."""
        n_experts = self.experts.n_experts
        owner = torch.arange(n_experts, device=flat.device).repeat_interleave(self.slots)
        return F.one_hot(owner.repeat(len(flat) // len(owner)), n_experts).to(flat)

    def extra_repr(self) -> str:
        """Slots."""
        return f"slots={self.slots}, normalise={self.scale is not None}"
