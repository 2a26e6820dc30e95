"""Experts: E small feed-forward networks held in four stacked tensors."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.core.errors import require
from tieline.routing.dispatch import ACTIVATIONS, ActivationName, dispatch

__all__ = ["Experts"]


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
        self, x: Float[Tensor, "tokens dim"], weights: Float[Tensor, "tokens experts"]
    ) -> Float[Tensor, "tokens dim"]:
        """Σ_e w_te f_e(x_t), leaving out the experts of zero weight."""
        y = dispatch(x, weights, self.w_in, self.w_out, self.b_in, activation=self.activation)
        return y if self.b_out is None else y + weights.to(y) @ self.b_out.to(y)

    def extra_repr(self) -> str:
        """Sizes and activation."""
        sizes = f"n_experts={self.n_experts}, d_model={self.d_model}, d_hidden={self.d_hidden}"
        return f"{sizes}, activation={self.activation!r}, bias={self.b_in is not None}"
