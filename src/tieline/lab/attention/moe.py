"""One row of self-attention as a mixture of experts with quadratic affinity (paper 4, section 2).

Let X = [x_1, …, x_N] be the tokens of a sequence in one vector of dimension ND and E_j the matrix
that cuts token j out of it, X E_j = x_j. Row i of the attention is

    Σ_j G(s(X))_j · X P_j,   s_j(X) = X M_ij Xᵀ + c,   M_ij = s E_i W_Q W_Kᵀ E_jᵀ,   P_j = E_j W_V

with G = softmax or σ: every token is an expert, linear in the input, and its score is a quadratic
function of the same input. c is the bias of sigmoid attention. Biases of the projections add a
linear term b_j to the score and a constant to the expert; the paper has neither.

The parts are those of a layer of this package: `QuadraticRouter`, then `Softmax` or `Sigmoid`. Only
the symmetric part of M_ij acts on X, and that is what `router.matrices` holds. Router and experts
need memory proportional to N²D²: this is for study, not for computing attention.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.lab.attention.sigmoid import (
    AttentionKind,
    ScoreBias,
    check_kind,
    score_bias,
    score_scale,
)
from tieline.routing.gates import Gate, Sigmoid, Softmax
from tieline.routing.routers import QuadraticRouter

__all__ = ["AttentionMoE", "TokenExperts", "attention_as_moe"]

Sequence = Float[Tensor, "*batch tokens_dim"]


@dataclass(frozen=True, eq=False)
class TokenExperts:
    """X ↦ X P_j (+ constant): expert j takes the value of token j.

    Attributes:
        maps: P_j (E, N·D, d_v).
        constant: b_v (d_v), the same for all experts.
    """

    maps: Float[Tensor, "experts tokens_dim d_value"]
    constant: Float[Tensor, " d_value"]

    def __call__(self, sequence: Sequence) -> Float[Tensor, "*batch experts d_value"]:
        """Outputs of all experts for sequences (..., N·D)."""
        return torch.einsum("...x,exv->...ev", sequence, self.maps) + self.constant


@dataclass(frozen=True, eq=False)
class AttentionMoE:
    """An attention row as a mixture, evaluated on one sequence.

    Calling it with another sequence (..., N·D) gives the same row of the attention over that one.

    Attributes:
        router: scores X A_j Xᵀ + b_j·X + c_j as `matrices`, `linear` and `constant`.
        gate: `Softmax` or `Sigmoid`.
        experts: one linear map per token.
        sequence: the tokens as one vector X (N·D).
        scores: s(X) (E); E = N, or the tokens up to the row if causal.
        weights: G(s(X)) (E), the attention weights of the row.
        output: the row (d_v).
    """

    router: QuadraticRouter
    gate: Gate
    experts: TokenExperts
    sequence: Float[Tensor, " tokens_dim"]
    scores: Float[Tensor, " experts"]
    weights: Float[Tensor, " experts"]
    output: Float[Tensor, " d_value"]

    def __call__(self, sequence: Sequence) -> Float[Tensor, "*batch d_value"]:
        """Σ_j G(s(X))_j X P_j for sequences (..., N·D)."""
        return _mix(self.gate(self.router(sequence)), self.experts(sequence))


def attention_as_moe(
    x: Float[Tensor, "tokens dim"],
    w_q: Float[Tensor, "width_q d_query"],
    w_k: Float[Tensor, "width_k d_key"],
    w_v: Float[Tensor, "width_v d_value"],
    *,
    row: int,
    kind: AttentionKind,
    causal: bool = False,
    scale: float | None = None,
    bias: ScoreBias = None,
    b_q: Float[Tensor, " b_query"] | None = None,
    b_k: Float[Tensor, " b_key"] | None = None,
    b_v: Float[Tensor, " b_value"] | None = None,
) -> AttentionMoE:
    """Row `row` of one attention head over x as router, gate and experts (paper 4, section 2).

    Args:
        x: tokens (N, D).
        w_q: query map (D, d_k), applied as x W_Q; `SelfAttention.head` gives all maps of a head.
        w_k: key map (D, d_k).
        w_v: value map (D, d_v).
        row: position i of the query, 0 <= i < N.
        kind: "softmax" or "sigmoid".
        causal: whether the tokens after the row are left out; E is then i + 1.
        scale: factor s of the scores, 1/√d_k if None.
        bias: bias of sigmoid scores, see `sigmoid_attention`.
        b_q: optional bias of the queries, likewise `b_k` and `b_v`.
        b_k: optional bias of the keys.
        b_v: optional bias of the values.
    """
    check_kind(kind, bias)
    head = _HeadMaps.of(x, (w_q, w_k, w_v), (b_q, b_k, b_v))
    n_tokens = len(x)
    require(0 <= row < n_tokens, f"need 0 <= row < {n_tokens} tokens, got {row=}", ShapeError)
    factor = score_scale(scale, w_q.shape[1])
    cuts = _cuts(x)
    chosen = cuts[: row + 1] if causal else cuts
    keys = len(chosen) if bias == "-log seen" else n_tokens
    router = _router(head, cuts[row], chosen, factor, score_bias(bias, keys))
    experts = TokenExperts(chosen @ head.w_v, head.b_v)
    gate = Softmax() if kind == "softmax" else Sigmoid()
    sequence = x.detach().flatten()
    scores = router(sequence)
    weights = gate(scores)
    output = _mix(weights, experts(sequence))
    return AttentionMoE(router, gate, experts, sequence, scores, weights, output)


class _HeadMaps(NamedTuple):
    """Maps and biases of one head, without gradients; an absent bias is zero."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    b_q: Tensor
    b_k: Tensor
    b_v: Tensor

    @classmethod
    def of(
        cls, x: Tensor, maps: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]
    ) -> "_HeadMaps":
        got = f"x {tuple(x.shape)}, maps {[tuple(w.shape) for w in maps]}"
        fit = x.ndim == 2 and all(w.ndim == 2 and len(w) == x.shape[1] for w in maps)
        require(fit, f"x must be (N, D) and every map have D rows, got {got}", ShapeError)
        require(
            maps[0].shape == maps[1].shape and maps[0].shape[1] >= 1,
            f"queries and keys must have one dimension >= 1, got {got}",
            ShapeError,
        )
        tensors = (x, *maps, *(b for b in biases if b is not None))
        require(
            x.is_floating_point() and all(t.dtype == x.dtype for t in tensors),
            f"x, maps and biases must have one floating dtype, got {[t.dtype for t in tensors]}",
            ShapeError,
        )
        filled = [
            w.new_zeros(w.shape[1]) if b is None else b for w, b in zip(maps, biases, strict=True)
        ]
        require(
            all(b.shape == w.shape[1:] for w, b in zip(maps, filled, strict=True)),
            f"a bias is as wide as its map, got {[tuple(b.shape) for b in filled]} for {got}",
            ShapeError,
        )
        return cls(*(t.detach() for t in (*maps, *filled)))


def _router(
    head: _HeadMaps, query_cut: Tensor, key_cuts: Tensor, scale: float, bias: float
) -> QuadraticRouter:
    """Scores scale · (x_i W_Q + b_q)·(x_j W_K + b_k) + bias, multiplied out in X."""
    n_experts, sequence, dim = key_cuts.shape
    left = query_cut @ (scale * head.w_q @ head.w_k.T)
    linear = query_cut @ (scale * head.w_q @ head.b_k) + key_cuts @ (scale * head.w_k @ head.b_q)
    parameters = {
        "left": left.repeat(n_experts, 1, 1),
        "right": key_cuts.clone(),
        "linear": linear,
        "constant": (scale * head.b_q @ head.b_k + bias).repeat(n_experts),
    }
    with torch.device("meta"):  # draws no random numbers for parameters that are given
        router = QuadraticRouter(sequence, n_experts, kind="full", rank=dim)
    router.load_state_dict(parameters, assign=True)
    return router.requires_grad_(False)


def _cuts(x: Tensor) -> Float[Tensor, "tokens tokens_dim dim"]:
    """E_j of all tokens: X E_j = x_j."""
    tokens, dim = x.shape
    eye = torch.eye(tokens * dim, dtype=x.dtype, device=x.device)
    return eye.view(tokens * dim, tokens, dim).transpose(0, 1)


def _mix(weights: Tensor, outputs: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * outputs).sum(dim=-2)
