"""The Mixture-of-Experts layer, composed of router, gate and experts, and the experts.

E small feed-forward networks are held in four stacked tensors.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import require
from tieline.routing.activations import ACTIVATIONS, ActivationName
from tieline.routing.dispatch import dispatch
from tieline.routing.gates import (
    ExpertChoice,
    Gate,
    GShardTopK,
    Hard,
    ReLUGate,
    SelectiveGate,
    Sigmoid,
    Softmax,
    TopK,
)
from tieline.routing.routers import CosineRouter, LinearRouter, QuadraticRouter, Router
from tieline.routing.smooth_gates import ProjectedTopK, SmoothTopK

__all__ = ["GATES", "ROUTERS", "Experts", "MoE", "Routing", "SharedExpert", "check_fit", "moe"]


@dataclass(frozen=True)
class Routing:
    """Scores and weights that a layer assigned to its tokens."""

    scores: Float[Tensor, "*batch experts"]
    weights: Float[Tensor, "*batch experts"]

    @property
    def active(self) -> Int[Tensor, "*batch"]:
        """Number of experts with non-zero weight, per token."""
        return (self.weights != 0).sum(dim=-1)


class Experts(nn.Module):
    """f_e(x) = W_out[e] h(W_in[e] x + b_in[e]) + b_out[e], evaluated where the weight is not zero.

    The layout of `w_in` (E, B·H, D), with the activated branch before the linear one, and of
    `w_out` (E, D, H) is the one that transformers uses for gate_up_proj and down_proj.

    Args:
        n_experts: number of experts E.
        d_model: dimension D of a token.
        d_hidden: hidden dimension H of an expert.
        activation: "swiglu", "geglu" (gated, B = 2), "relu" or "gelu" (B = 1).
        bias: whether both maps have biases.
    """

    def __init__(
        self,
        n_experts: int,
        d_model: int,
        d_hidden: int,
        *,
        activation: ActivationName = "swiglu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        require(
            min(n_experts, d_model, d_hidden) >= 1,
            f"need sizes >= 1, got {n_experts=}, {d_model=}, {d_hidden=}",
        )
        require(activation in ACTIVATIONS, f"{activation=} is not one of {sorted(ACTIVATIONS)}")
        rows = ACTIVATIONS[activation].branches * d_hidden
        self.n_experts, self.d_model, self.d_hidden = n_experts, d_model, d_hidden
        self.activation = activation
        self.w_in = nn.Parameter(torch.randn(n_experts, rows, d_model) / math.sqrt(d_model))
        self.w_out = nn.Parameter(torch.randn(n_experts, d_model, d_hidden) / math.sqrt(d_hidden))
        self.b_in = nn.Parameter(torch.zeros(n_experts, rows)) if bias else None
        self.b_out = nn.Parameter(torch.zeros(n_experts, d_model)) if bias else None

    def forward(
        self,
        x: Float[Tensor, "tokens dim"],
        weights: Float[Tensor, "tokens experts"],
        most: int | None = None,
    ) -> Float[Tensor, "tokens dim"]:
        """Return Σ_e w_te f_e(x_t) over the experts of non-zero weight; `most` as in `dispatch`."""
        maps = self.w_in, self.w_out, self.b_in
        y = dispatch(x, weights, *maps, activation=self.activation, most=most)
        return y if self.b_out is None else y + weights.to(y) @ self.b_out.to(y)

    def extra_repr(self) -> str:
        """Sizes and activation."""
        sizes = f"n_experts={self.n_experts}, d_model={self.d_model}, d_hidden={self.d_hidden}"
        return f"{sizes}, activation={self.activation!r}, bias={self.b_in is not None}"


class MoE(nn.Module):
    """y = Σ_e w_e(x) f_e(x) (+ shared(x)), with w = gate(router(x)).

    Args:
        router: x (..., D) → scores (..., E).
        gate: scores → weights, zeros for experts not used.
        experts: called with tokens (T, D) and weights (T, E).
        shared: optional module that is applied to every token.
    """

    def __init__(
        self, router: Router, gate: Gate, experts: Experts, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        check_fit(router, experts)
        k = getattr(gate, "k", 1)
        require(k <= experts.n_experts, f"k = {k} of only {experts.n_experts} experts")
        self.router, self.gate, self.experts, self.shared = router, gate, experts, shared

    def route(self, x: Float[Tensor, "*batch dim"]) -> Routing:
        """Return scores and weights of each token without evaluating an expert."""
        scores = self.router(x)
        return Routing(scores, self.gate(scores))

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Return the output of the layer."""
        weights = self.gate(self.router(x))
        bound = {"most": self.gate.most_active} if isinstance(self.experts, Experts) else {}
        y = self.experts(_flatten_tokens(x), _flatten_tokens(weights), **bound).view_as(x)
        return y if self.shared is None else y + self.shared(x)


class SharedExpert(nn.Module):
    """One expert that every token uses with weight 1; arguments as for `Experts`."""

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        activation: ActivationName = "swiglu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.expert = Experts(1, d_model, d_hidden, activation=activation, bias=bias)

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Return f(x)."""
        flat = _flatten_tokens(x)
        return self.expert(flat, flat.new_ones(len(flat), 1), most=1).view_as(x)


ROUTERS: dict[str, type[Router]] = {
    "linear": LinearRouter,
    "cosine": CosineRouter,
    "quadratic": QuadraticRouter,
}
GATES: dict[str, type[Gate]] = {
    "topk": TopK,
    "projected": ProjectedTopK,
    "smooth": SmoothTopK,
    "softmax": Softmax,
    "sigmoid": Sigmoid,
    "relu": ReLUGate,
    "hard": Hard,
    "expert_choice": ExpertChoice,
    "gshard": GShardTopK,
}


def moe(
    *,
    d_model: int,
    n_experts: int,
    k: int,
    d_hidden: int,
    router: str = "linear",
    gate: str = "topk",
    activation: ActivationName = "swiglu",
    bias: bool = False,
    shared_hidden: int | None = None,
    router_options: dict[str, Any] | None = None,
    gate_options: dict[str, Any] | None = None,
) -> MoE:
    """Build a layer from the names of its router and gate.

    Args:
        d_model: dimension D of a token.
        n_experts: number of experts E.
        k: experts per token; gates without a choice (softmax, sigmoid, relu, hard) do not use it.
        d_hidden: hidden dimension H of an expert.
        router: a key of `ROUTERS`.
        gate: a key of `GATES`.
        activation: activation of the experts.
        bias: whether the experts have biases.
        shared_hidden: hidden dimension of a shared expert, which every token uses; None for none.
        router_options: further arguments of the router, for example `{"tau": (0.1, 0.1)}`.
        gate_options: further arguments of the gate, for example `{"epsilon": 0.2}`.
    """
    require(router in ROUTERS, f"{router=} is not one of {sorted(ROUTERS)}")
    require(gate in GATES, f"{gate=} is not one of {sorted(GATES)}")
    require(1 <= k <= n_experts, f"need 1 <= k <= experts, got {k=}, {n_experts=}")
    options: dict[str, Any] = dict(gate_options or {})
    choice = (k,) if issubclass(GATES[gate], SelectiveGate | ExpertChoice) else ()
    shared = None
    if shared_hidden is not None:
        shared = SharedExpert(d_model, shared_hidden, activation=activation, bias=bias)
    return MoE(
        ROUTERS[router](d_model, n_experts, **(router_options or {})),
        GATES[gate](*choice, **options),
        Experts(n_experts, d_model, d_hidden, activation=activation, bias=bias),
        shared,
    )


def check_fit(router: Router, experts: Experts) -> None:
    """Raise unless router and experts agree on the dimension and the number of experts."""
    require(
        (router.d_model, router.n_experts) == (experts.d_model, experts.n_experts),
        f"router ({router.d_model} wide, {router.n_experts} experts) and experts "
        f"({experts.d_model} wide, {experts.n_experts}) do not fit",
    )


def _flatten_tokens(x: Float[Tensor, "*batch last"]) -> Float[Tensor, "tokens last"]:
    """Flatten all leading axes into one."""
    return x.reshape(-1, x.shape[-1])
