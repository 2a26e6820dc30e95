"""Multi-head self-attention with softmax or sigmoid weights, as a layer."""

import math
from typing import TypedDict

from jaxtyping import Float
from torch import Tensor, nn

from tieline.errors import ShapeError, require
from tieline.routing.attention import (
    AttentionKind,
    ScoreBias,
    check_kind,
    sigmoid_attention,
    softmax_attention,
)

__all__ = ["HeadWeights", "SelfAttention"]


class HeadWeights(TypedDict):
    """Maps (D, d) of one head, applied as x w, and their biases (d)."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    b_q: Tensor | None
    b_k: Tensor | None
    b_v: Tensor | None


class SelfAttention(nn.Module):
    """W_o of the heads' attention over W_q x, W_k x and W_v x, softmax or sigmoid.

    Args:
        d_model: width D of a token.
        n_heads: number of heads, a divisor of D.
        kind: "softmax" or "sigmoid".
        causal: whether a token sees itself and those before it only.
        scale: factor of the scores, 1/√(D / heads) if None.
        bias: b added to sigmoid scores, see `sigmoid_attention`; softmax would not feel it.
        projection_bias: whether the four projections have biases.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        kind: AttentionKind = "softmax",
        causal: bool = False,
        scale: float | None = None,
        bias: ScoreBias = None,
        projection_bias: bool = False,
    ) -> None:
        super().__init__()
        require(
            d_model >= 1 and n_heads >= 1 and d_model % n_heads == 0,
            f"heads must divide the width, got {d_model=}, {n_heads=}",
        )
        check_kind(kind, bias)
        require(scale is None or math.isfinite(scale), f"scale must be finite, got {scale=}")
        self.d_model, self.n_heads = d_model, n_heads
        self.kind, self.causal, self.scale = kind, causal, scale
        self.bias: ScoreBias = bias
        self.query, self.key, self.value, self.out = (
            nn.Linear(d_model, d_model, bias=projection_bias) for _ in range(4)
        )

    def forward(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """Attention of every token to its sequence, (..., N, D) in and out."""
        require(
            x.ndim >= 2 and x.shape[-1] == self.d_model and x.is_floating_point(),
            f"tokens must be floating (..., N, {self.d_model}), got {tuple(x.shape)} {x.dtype}",
            ShapeError,
        )
        q, k, v = (self._split(project(x)) for project in (self.query, self.key, self.value))
        return self.out(self._attend(q, k, v).transpose(-3, -2).flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(-3, -2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kind == "softmax":
            return softmax_attention(q, k, v, causal=self.causal, scale=self.scale)
        return sigmoid_attention(q, k, v, causal=self.causal, scale=self.scale, bias=self.bias)

    def head(self, index: int) -> HeadWeights:
        """Weights of one head as `attention_as_moe` takes them."""
        require(0 <= index < self.n_heads, f"need 0 <= head < {self.n_heads}, got {index}")
        width = self.d_model // self.n_heads
        rows = slice(index * width, (index + 1) * width)
        layers = (self.query, self.key, self.value)
        w_q, w_k, w_v = (layer.weight[rows].T for layer in layers)
        b_q, b_k, b_v = (None if m.bias is None else m.bias[rows] for m in layers)
        return {"w_q": w_q, "w_k": w_k, "w_v": w_v, "b_q": b_q, "b_k": b_k, "b_v": b_v}

    def extra_repr(self) -> str:
        """Widths and kind."""
        return (
            f"d_model={self.d_model}, n_heads={self.n_heads}, kind={self.kind!r}, "
            f"causal={self.causal}, bias={self.bias!r}"
        )
