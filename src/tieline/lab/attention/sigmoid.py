"""Self-attention with softmax or sigmoid weights, as functions and as a multi-head layer.

With softmax tokens compete for a row's unit mass, with sigmoid each is weighted alone; a row of
either is a mixture of experts (`tieline.lab.attention.moe`). Neither ever builds the matrix of
all queries by all keys.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tieline.core.errors import ParameterError, ShapeError, require
from tieline.lab.attention.tiles import sigmoid_tiles

__all__ = [
    "AttentionKind",
    "HeadWeights",
    "ScoreBias",
    "SelfAttention",
    "check_kind",
    "score_bias",
    "score_scale",
    "sigmoid_attention",
    "softmax_attention",
]

AttentionKind = Literal["softmax", "sigmoid"]
ScoreBias = float | Literal["-log n", "-log seen"] | None

# Axes that must agree have different names here: `_check_inputs` compares them, with clear errors.
Queries = Float[Tensor, "... queries d_query"]
Keys = Float[Tensor, "... keys d_key"]
Values = Float[Tensor, "... values d_value"]
Mixed = Float[Tensor, "... queries d_value"]
Visible = Bool[Tensor, "... seeing seen"]


def softmax_attention(
    q: Queries, k: Keys, v: Values, *, causal: bool = False, scale: float | None = None
) -> Mixed:
    """softmax(s q kᵀ) v (paper 4, eq. 1), by torch's fused kernels; zero where there is no key.

    Arguments as for `sigmoid_attention`.
    """
    _check_attention_inputs(q, k, v, causal)
    factor = score_scale(scale, q.shape[-1])
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=factor)


def sigmoid_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    causal: bool = False,
    scale: float | None = None,
    bias: ScoreBias = None,
    mask: Visible | None = None,
) -> Mixed:
    """σ(s q kᵀ + b) v (paper 4, eq. 2), computed in tiles; zero where there is no key.

    Differentiable once in q, k and v. Memory beyond inputs and output is a few tiles whatever the
    length; the backward pass recomputes the weights.

    Args:
        q: queries (..., N, d_k).
        k: keys (..., M, d_k).
        v: values (..., M, d_v).
        causal: whether query i sees the keys 0..i only; needs N = M.
        scale: s, 1/√d_k if None.
        bias: b: 0 for None, the plain form of paper 4, whose outputs grow with M; -log M for
            "-log n", with which the weights of a row initially sum to about 1; and minus the
            logarithm of the number of keys that the query itself sees for "-log seen", which does
            not depend on padding, on the keys after a query, or on how a sequence is cut into
            calls.
        mask: which keys each query sees, (N, M) or with leading axes of q, or 1 for some of them.
    """
    _check_attention_inputs(q, k, v, causal)
    factor = score_scale(scale, q.shape[-1])
    if mask is not None:
        _check_attention_mask(mask, q, k)
        mask = _per_sequence(mask.tril() if causal else mask, q)
        causal = False
    constant, rows = _score_biases(bias, q, k, causal, mask)
    return sigmoid_tiles(q, k, v, factor, constant, causal, rows, mask)


def _score_biases(
    bias: ScoreBias, q: Tensor, k: Tensor, causal: bool, mask: Tensor | None
) -> tuple[float, Tensor | None]:
    """The bias of all scores, and that of each query (S, N) if they differ."""
    if bias != "-log seen" or (mask is None and not causal):
        return score_bias(bias, k.shape[-2]), None
    if mask is None:
        counts = torch.arange(1, q.shape[-2] + 1, device=q.device).unsqueeze(0)
    else:
        counts = mask.sum(dim=-1).clamp(min=1)
    return 0.0, -counts.to(torch.promote_types(q.dtype, torch.float32)).log()


def _per_sequence(mask: Visible, q: Tensor) -> Bool[Tensor, "sequences seeing seen"]:
    """The mask (S, N, M) of S runs of consecutive heads, as few as the leading axes allow."""
    lead = q.shape[:-2]
    given = (1,) * (len(lead) + 2 - mask.ndim) + tuple(mask.shape[:-2])
    axes = max((axis + 1 for axis, size in enumerate(given) if size > 1), default=0)
    runs = lead[:axes]
    small = mask.reshape(*given[:axes], *mask.shape[-2:]).expand(*runs, *mask.shape[-2:])
    return small.reshape(math.prod(runs), *mask.shape[-2:])


def _check_attention_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise unless the mask is boolean and broadcasts to (..., queries, keys)."""
    expected = (*q.shape[:-1], k.shape[-2])
    sizes = zip(reversed(mask.shape[:-2]), reversed(q.shape[:-2]), strict=False)
    fits = (
        mask.dtype == torch.bool
        and 2 <= mask.ndim <= q.ndim
        and mask.shape[-2:] == expected[-2:]
        and all(given in (1, size) for given, size in sizes)
    )
    require(
        fits,
        f"a mask is boolean {expected}, 1 for leading axes it does not tell apart, got "
        f"{tuple(mask.shape)} {mask.dtype}",
        ShapeError,
    )


def score_bias(bias: ScoreBias, n_keys: int) -> float:
    """The number b that a bias stands for among `n_keys` keys, all of which are seen."""
    if bias is None:
        return 0.0
    if isinstance(bias, str):
        by_count = bias in ("-log n", "-log seen")
        require(by_count, f"bias must be a number, None, '-log n' or '-log seen', got {bias!r}")
        return -math.log(max(n_keys, 1))
    require(math.isfinite(bias), f"bias must be finite, got {bias=}")
    return float(bias)


def score_scale(scale: float | None, dim: int) -> float:
    """The factor s of the scores, 1/√dim if None."""
    if scale is None:
        return 1 / math.sqrt(dim)
    require(math.isfinite(scale), f"scale must be finite, got {scale=}")
    return float(scale)


def _check_attention_inputs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Raise unless q, k and v have matching axes and one floating dtype."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    rules = {
        "q, k and v need a length and a dimension": min(q.ndim, k.ndim, v.ndim) >= 2,
        "q, k and v must have equal leading axes": q.shape[:-2] == k.shape[:-2] == v.shape[:-2],
        "queries and keys must have one dimension >= 1": q.shape[-1:] == k.shape[-1:] != (0,),
        "there must be a value for every key": k.shape[-2:-1] == v.shape[-2:-1],
        "causal attention needs as many keys as queries": not causal
        or q.shape[-2:-1] == k.shape[-2:-1],
    }
    for rule, kept in rules.items():
        require(kept, f"{rule}, got {shapes}", ShapeError)
    require(
        q.is_floating_point() and q.dtype == k.dtype == v.dtype,
        f"q, k and v must have one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}",
        ShapeError,
    )


def check_kind(kind: str, bias: ScoreBias) -> None:
    """Raise for an unknown kind, and for a bias with softmax, which it would not change."""
    kinds = get_args(AttentionKind)
    require(kind in kinds, f"kind must be one of {kinds}, got {kind!r}")
    require(
        kind == "sigmoid" or bias is None,
        f"softmax weights do not depend on a bias: bias must be None, got {bias!r}",
        ParameterError,
    )
    score_bias(bias, 1)


class HeadWeights(NamedTuple):
    """Maps (D, d) of one head, applied as x w, and their biases (d); None is a zero bias."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None


class SelfAttention(nn.Module):
    """W_o of the heads' attention over W_q x, W_k x and W_v x, softmax or sigmoid.

    Args:
        d_model: dimension D of a token.
        n_heads: number of heads, a divisor of D.
        kind: "softmax" or "sigmoid".
        causal: whether a token sees itself and those before it only.
        scale: factor of the scores, 1/√(D / heads) if None.
        bias: b added to sigmoid scores, see `sigmoid_attention`; None for softmax.
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
            f"heads must divide the dimension, got {d_model=}, {n_heads=}",
        )
        check_kind(kind, bias)
        score_scale(scale, d_model // n_heads)
        self.d_model, self.n_heads = d_model, n_heads
        self.kind, self.causal, self.scale = kind, causal, scale
        self.bias: ScoreBias = bias
        self.query, self.key, self.value, self.out = (
            nn.Linear(d_model, d_model, bias=projection_bias) for _ in range(4)
        )

    def forward(self, x: Float[Tensor, "*batch tokens dim"]) -> Float[Tensor, "*batch tokens dim"]:
        """Attention of every token to its sequence, (..., N, D) in and out."""
        require(
            x.ndim >= 2 and x.shape[-1] == self.d_model and x.is_floating_point(),
            f"tokens must be floating (..., N, {self.d_model}), got {tuple(x.shape)} {x.dtype}",
            ShapeError,
        )
        q, k, v = (self._split(project(x)) for project in (self.query, self.key, self.value))
        return self.out(self._attend(q, k, v).transpose(-3, -2).flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        """Split heads from the last axis."""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(-3, -2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kind == "softmax":
            return softmax_attention(q, k, v, causal=self.causal, scale=self.scale)
        return sigmoid_attention(q, k, v, causal=self.causal, scale=self.scale, bias=self.bias)

    def head(self, index: int) -> HeadWeights:
        """Weights of one head as `attention_as_moe` takes them."""
        require(0 <= index < self.n_heads, f"need 0 <= head < {self.n_heads}, got {index}")
        dim = self.d_model // self.n_heads
        rows = slice(index * dim, (index + 1) * dim)
        layers = (self.query, self.key, self.value)
        maps = (layer.weight[rows].T for layer in layers)
        biases = (None if layer.bias is None else layer.bias[rows] for layer in layers)
        return HeadWeights(*maps, *biases)

    def extra_repr(self) -> str:
        """Dimensions and kind."""
        return (
            f"d_model={self.d_model}, n_heads={self.n_heads}, kind={self.kind!r}, "
            f"causal={self.causal}, bias={self.bias!r}"
        )
