"""Self-attention with softmax and with sigmoid weights.

    softmax_attention    softmax(s q kᵀ) v       (paper 4, eq. 1)
    sigmoid_attention    σ(s q kᵀ + b) v         (paper 4, eq. 2, with a bias)

Softmax makes tokens compete for a row's unit mass, sigmoid judges each alone; a row of either is a
mixture of experts, which `tieline.routing.attention_moe` spells out. Neither is ever held as a
matrix of all queries by all keys. The layer around them is `tieline.routing.self_attention`.
"""

import math
from typing import Literal, get_args

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ParameterError, ShapeError, require
from tieline.routing.sigmoid_tiles import sigmoid_tiles

__all__ = [
    "AttentionKind",
    "ScoreBias",
    "check_kind",
    "score_bias",
    "sigmoid_attention",
    "softmax_attention",
]

AttentionKind = Literal["softmax", "sigmoid"]
ScoreBias = float | Literal["-log n"] | None

# Widths and lengths that must agree have names of their own here: `_check_inputs` compares them,
# and says which value breaks which rule.
Queries = Float[Tensor, "... queries d_query"]
Keys = Float[Tensor, "... keys d_key"]
Values = Float[Tensor, "... values d_value"]
Mixed = Float[Tensor, "... queries d_value"]


def softmax_attention(
    q: Queries, k: Keys, v: Values, *, causal: bool = False, scale: float | None = None
) -> Mixed:
    """softmax(s q kᵀ) v, through torch's fused kernels; zero where there is no key.

    Args:
        q: queries (..., N, d_k).
        k: keys (..., M, d_k).
        v: values (..., M, d_v).
        causal: whether query i sees the keys 0..i only; needs N = M.
        scale: s, 1/√d_k if None.
    """
    _check_inputs(q, k, v, causal)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=_scale(q, scale))


def sigmoid_attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    causal: bool = False,
    scale: float | None = None,
    bias: ScoreBias = None,
) -> Mixed:
    """σ(s q kᵀ + b) v, computed in tiles; zero where there is no key.

    Differentiable once in q, k and v. Memory beyond inputs and output is a few tiles whatever the
    length; the backward pass computes the weights a second time instead of keeping them.

    Args:
        q: queries (..., N, d_k).
        k: keys (..., M, d_k).
        v: values (..., M, d_v).
        causal: whether query i sees the keys 0..i only; needs N = M.
        scale: s, 1/√d_k if None.
        bias: b; None is 0, the plain form of paper 4, whose outputs grow with M; "-log n" is
            -log M, which starts the weights of a row at a sum near 1 as those of softmax are.
    """
    _check_inputs(q, k, v, causal)
    return sigmoid_tiles(q, k, v, _scale(q, scale), score_bias(bias, k.shape[-2]), causal)


def score_bias(bias: ScoreBias, n_keys: int) -> float:
    """The number b that a bias stands for among `n_keys` keys."""
    if bias is None:
        return 0.0
    if isinstance(bias, str):
        require(bias == "-log n", f"bias must be a number, None or '-log n', got {bias!r}")
        return -math.log(max(n_keys, 1))
    require(math.isfinite(bias), f"bias must be finite, got {bias=}")
    return float(bias)


def _scale(q: Tensor, scale: float | None) -> float:
    if scale is None:
        return 1 / math.sqrt(q.shape[-1])
    require(math.isfinite(scale), f"scale must be finite, got {scale=}")
    return float(scale)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    rules = {
        "q, k and v need a length and a width": min(q.ndim, k.ndim, v.ndim) >= 2,
        "q, k and v must have equal leading axes": q.shape[:-2] == k.shape[:-2] == v.shape[:-2],
        "queries and keys must have one width >= 1": q.shape[-1:] == k.shape[-1:] != (0,),
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
    """Refuse an unknown kind, and a bias that its weights would not feel."""
    kinds = get_args(AttentionKind)
    require(kind in kinds, f"kind must be one of {kinds}, got {kind!r}")
    require(
        kind == "sigmoid" or bias is None,
        f"softmax weights do not depend on a bias: bias must be None, got {bias!r}",
        ParameterError,
    )
    score_bias(bias, 1)
