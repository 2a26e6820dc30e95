"""Baseline layers of papers 1 and 2, by name.

    expert_choice   experts choose tokens                           `ExpertChoice`
    gshard          top-k with gate noise and capacity              `GShardTopK`
    remoe           ReLU gate; its L1 loss by `SparsityController`  `ReLUGate`
    soft_moe        slots that mix tokens                           `SoftMoE`
    smear           experts whose parameters are averaged           `Smear`

Only `remoe` treats each token alone. `Smear` and `SoftMoE` mix all tokens of a sequence, also those
that come later, and do not suit causal models (paper 1, B.2).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tieline.core.errors import ShapeError, require
from tieline.routing.activations import ActivationName
from tieline.routing.dispatch import dispatch
from tieline.routing.gates import Softmax
from tieline.routing.layer import ROUTERS, Experts, check_fit, moe
from tieline.routing.routers import Router

__all__ = ["BASELINES", "Smear", "SoftMoE", "baseline"]


class Smear(nn.Module):
    """SMEAR: one expert per sequence, the average of all experts' parameters.

        θ̄ = Σ_e w_e θ_e,  w = softmax(router(mean of the sequence's tokens)),  y_t = f(x_t; θ̄)

    Muqeeth et al. (2024). Smooth and as cheap as one expert per token. Acts on the last two axes,
    tokens and features.

    Args:
        router: applied to the mean of a sequence's tokens.
        experts: the experts to average.
        temperature: of the softmax.
    """

    batch_dependent = True

    def __init__(self, router: Router, experts: Experts, *, temperature: float = 1.0) -> None:
        super().__init__()
        check_fit(router, experts)
        self.router, self.gate, self.experts = router, Softmax(temperature), experts

    def weights(self, x: Float[Tensor, "*batch tokens dim"]) -> Float[Tensor, "*batch experts"]:
        """Return the weights w of each sequence."""
        return self.gate(self.router(x.mean(dim=-2)))

    def forward(self, x: Float[Tensor, "*batch tokens dim"]) -> Float[Tensor, "*batch tokens dim"]:
        """Return f(x; θ̄)."""
        require(x.ndim >= 2, f"tokens must be (..., T, D), got {tuple(x.shape)}", ShapeError)
        if not x.numel():
            return x
        experts = self.experts
        weights = self.weights(x).reshape(-1, experts.n_experts)
        w_in, w_out, b_in, b_out = (
            None if p is None else torch.einsum("be,e...->b...", weights.to(p), p)
            for p in (experts.w_in, experts.w_out, experts.b_in, experts.b_out)
        )
        assert w_in is not None
        assert w_out is not None
        sequence = torch.arange(len(weights), device=x.device).repeat_interleave(x.shape[-2])
        one_hot_sequence = F.one_hot(sequence, len(weights)).to(x)
        flat = x.reshape(-1, x.shape[-1])
        y = dispatch(flat, one_hot_sequence, w_in, w_out, b_in, activation=experts.activation)
        y = y if b_out is None else y + one_hot_sequence.to(y) @ b_out.to(y)
        return y.view_as(x)


class SoftMoE(nn.Module):
    """Soft MoE: every slot of an expert is a mixture of tokens, every token a mixture of slots.

        Z = X Φ                 scores (T, S) of T tokens and S = E·p slots
        X̃ = softmax_T(Z)ᵀ X     what the slots hold
        Y = softmax_S(Z) Ỹ      Ỹ_s = f_e(X̃_s), e the expert of slot s

    Puigcerver et al. (2024). Smooth, without any choice. Acts on the last two axes, tokens and
    features.

    Args:
        experts: the experts f_e.
        slots: p >= 1 slots per expert.
        normalise: whether tokens and slot vectors are normalised, with a learnt scale; otherwise
            the softmaxes of wide layers saturate.
    """

    batch_dependent = True

    def __init__(self, experts: Experts, *, slots: int = 1, normalise: bool = True) -> None:
        super().__init__()
        require(slots >= 1, f"an expert needs at least one slot, got {slots=}")
        dim = experts.d_model
        self.experts, self.slots = experts, slots
        self.phi = nn.Parameter(torch.randn(experts.n_experts * slots, dim) / math.sqrt(dim))
        self.scale = nn.Parameter(torch.ones(())) if normalise else None

    def scores(self, x: Float[Tensor, "*batch tokens dim"]) -> Float[Tensor, "*batch tokens s"]:
        """Return the scores Z, in at least float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        x, phi = x.to(dtype), self.phi.to(dtype)
        if self.scale is None:
            return F.linear(x, phi)
        return F.linear(F.normalize(x, dim=-1), self.scale * F.normalize(phi, dim=-1))

    def forward(self, x: Float[Tensor, "*batch tokens dim"]) -> Float[Tensor, "*batch tokens dim"]:
        """Return the output Y."""
        require(x.ndim >= 2, f"tokens must be (..., T, D), got {tuple(x.shape)}", ShapeError)
        if not x.numel():
            return x
        scores, n_experts = self.scores(x), self.experts.n_experts
        slots = scores.softmax(dim=-2).mT.to(x) @ x
        flat = slots.reshape(-1, x.shape[-1])
        owner = torch.arange(n_experts, device=x.device).repeat_interleave(self.slots)
        weights = F.one_hot(owner.repeat(len(flat) // len(owner)), n_experts).to(x)
        return scores.softmax(dim=-1).to(x) @ self.experts(flat, weights).view_as(slots)

    def extra_repr(self) -> str:
        """Slots."""
        return f"slots={self.slots}, normalise={self.scale is not None}"


BASELINES = ("expert_choice", "gshard", "remoe", "smear", "soft_moe")


def baseline(
    name: str,
    *,
    d_model: int,
    n_experts: int,
    k: int,
    d_hidden: int,
    router: str = "linear",
    activation: ActivationName = "swiglu",
    bias: bool = False,
    router_options: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """Return a layer x (..., T, D) → y (..., T, D), one of `BASELINES`.

    Arguments as for `moe`. k is an average where the layer does not fix it; SMEAR and Soft MoE do
    not use it, and Soft MoE has its own router. `options` are further arguments of gate or layer,
    such as `{"capacity_factor": 1.25}`, `{"slots": 2}` or `{"temperature": 0.5}`.
    """
    require(name in BASELINES, f"{name=} is not one of {list(BASELINES)}")
    require(router in ROUTERS, f"{router=} is not one of {sorted(ROUTERS)}")
    options, router_options = options or {}, router_options or {}
    if name in ("soft_moe", "smear"):
        experts = Experts(n_experts, d_model, d_hidden, activation=activation, bias=bias)
        if name == "soft_moe":
            return SoftMoE(experts, **options)
        return Smear(ROUTERS[router](d_model, n_experts, **router_options), experts, **options)
    return moe(
        d_model=d_model,
        n_experts=n_experts,
        k=k,
        d_hidden=d_hidden,
        router=router,
        gate="relu" if name == "remoe" else name,
        activation=activation,
        bias=bias,
        router_options=router_options,
        gate_options=options,
    )
