"""One row of self-attention as a mixture of experts with quadratic scores (paper 4, section 2).

Let X = [x_1, …, x_N] be the tokens of a sequence in one vector of dimension ND and E_j the matrix
that cuts token j out of it, X E_j = x_j. Row i of the attention is

    Σ_j G(s(X))_j · X P_j,   s_j(X) = X M_ij Xᵀ + c,   M_ij = s E_i W_Q W_Kᵀ E_jᵀ,   P_j = E_j W_V

with G = softmax or σ: every token is an expert, linear in the input, and its score is a quadratic
function of the same input. c is the bias of sigmoid attention. Biases of the projections add a
linear term b_j to the score and a constant to the expert; the paper has neither.

The parts are those of a layer of this package: `QuadraticRouter`, then `Softmax` or `Sigmoid`. Only
the symmetric part of M_ij acts on X, and that is what `QuadraticRouter.matrices` holds. Router and
experts need memory proportional to N²D²: this is for study, not for computing attention.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.lab.attention.softmax_and_sigmoid import (
    AttentionKind,
    HeadWeights,
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
    """X ↦ X P_j (+ constant): expert j takes the value of token j."""

    maps: Float[Tensor, "experts tokens_dim d_value"]  # P_j (E, N·D, d_v)
    constant: Float[Tensor, " d_value"]  # b_v (d_v), the same for all experts

    def __call__(self, sequence: Sequence) -> Float[Tensor, "*batch experts d_value"]:
        """Outputs of all experts for sequences (..., N·D)."""
        return torch.einsum("...x,exv->...ev", sequence, self.maps) + self.constant


@dataclass(frozen=True, eq=False)
class AttentionMoE:
    """An attention row as a mixture, evaluated on one sequence.

    Calling it with another sequence (..., N·D) gives the same row of the attention over that one.
    """

    router: QuadraticRouter  # scores X A_j Xᵀ + b_j·X + c_j as `matrices`, `linear` and `constant`
    gate: Gate  # `Softmax` or `Sigmoid`
    experts: TokenExperts  # one linear map per token
    sequence: Float[Tensor, " tokens_dim"]  # the tokens as one vector X (N·D)
    scores: Float[Tensor, " experts"]  # s(X) (E); E = N, or the tokens up to the row if causal
    weights: Float[Tensor, " experts"]  # G(s(X)) (E), the attention weights of the row
    output: Float[Tensor, " d_value"]  # the row (d_v)

    def __call__(self, sequence: Sequence) -> Float[Tensor, "*batch d_value"]:
        """Σ_j G(s(X))_j X P_j for sequences (..., N·D)."""
        return _weighted_values(self.gate(self.router(sequence)), self.experts(sequence))


def attention_as_moe(
    x: Float[Tensor, "tokens dim"],
    head: HeadWeights,
    *,
    row: int,
    kind: AttentionKind,
    causal: bool = False,
    scale: float | None = None,
    bias: ScoreBias = None,
) -> AttentionMoE:
    """Row `row` of one attention head over x as router, gate and experts (paper 4, section 2).

    Args:
        x: tokens (N, D).
        head: maps of queries, keys (D, d_k) and values (D, d_v), applied as x W, and their biases;
            `SelfAttention.head` returns those of a layer.
        row: position i of the query, 0 <= i < N.
        kind: "softmax" or "sigmoid".
        causal: whether the tokens after the row are left out; E is then i + 1.
        scale: factor s of the scores, 1/√d_k if None.
        bias: bias of sigmoid scores, see `sigmoid_attention`.
    """
    check_kind(kind, bias)
    maps, biases = _checked_head(x, head)
    n_tokens = len(x)
    require(0 <= row < n_tokens, f"need 0 <= row < {n_tokens} tokens, got {row=}", ShapeError)
    factor = score_scale(scale, maps[0].shape[1])
    eye = torch.eye(x.numel(), dtype=x.dtype, device=x.device)
    cuts = eye.view(x.numel(), *x.shape).transpose(0, 1)  # E_j of all tokens: X E_j = x_j
    visible_cuts = cuts[: row + 1] if causal else cuts
    keys = len(visible_cuts) if bias == "-log seen" else n_tokens
    router = _quadratic_router(
        maps, biases, (cuts[row], visible_cuts), factor, score_bias(bias, keys)
    )
    experts = TokenExperts(visible_cuts @ maps[2], biases[2])
    gate = Softmax() if kind == "softmax" else Sigmoid()
    sequence = x.detach().flatten()
    scores = router(sequence)
    weights = gate(scores)
    output = _weighted_values(weights, experts(sequence))
    return AttentionMoE(router, gate, experts, sequence, scores, weights, output)


def _checked_head(x: Tensor, head: HeadWeights) -> tuple[list[Tensor], list[Tensor]]:
    """Return maps and biases without gradients, zeros for absent biases; raises if they misfit."""
    maps, given = head[:3], head[3:]
    got = f"x {tuple(x.shape)}, maps {[tuple(w.shape) for w in maps]}"
    fit = x.ndim == 2 and all(w.ndim == 2 and len(w) == x.shape[1] for w in maps)
    require(fit, f"x must be (N, D) and every map have D rows, got {got}", ShapeError)
    require(
        maps[0].shape == maps[1].shape and maps[0].shape[1] >= 1,
        f"queries and keys must have one dimension >= 1, got {got}",
        ShapeError,
    )
    biases = [w.new_zeros(w.shape[1]) if b is None else b for w, b in zip(maps, given, strict=True)]
    dtypes = [tensor.dtype for tensor in (x, *maps, *biases)]
    require(
        x.is_floating_point() and set(dtypes) == {x.dtype},
        f"x, maps and biases must have one floating dtype, got {dtypes}",
        ShapeError,
    )
    require(
        all(b.shape == w.shape[1:] for w, b in zip(maps, biases, strict=True)),
        f"a bias is as wide as its map, got {[tuple(b.shape) for b in biases]} for {got}",
        ShapeError,
    )
    return [w.detach() for w in maps], [b.detach() for b in biases]


def _quadratic_router(
    maps: list[Tensor], biases: list[Tensor], cuts: tuple[Tensor, Tensor], scale: float, bias: float
) -> QuadraticRouter:
    """Scores scale · (x_i W_Q + b_q)·(x_j W_K + b_k) + bias, multiplied out in X."""
    (w_q, w_k, _), (b_q, b_k, _), (query_cut, key_cuts) = maps, biases, cuts
    n_experts, sequence, dim = key_cuts.shape
    left = query_cut @ (scale * w_q @ w_k.T)
    linear = query_cut @ (scale * w_q @ b_k) + key_cuts @ (scale * w_k @ b_q)
    parameters = {
        "left": left.repeat(n_experts, 1, 1),
        "right": key_cuts.clone(),
        "linear": linear,
        "constant": (scale * b_q @ b_k + bias).repeat(n_experts),
    }
    with torch.device("meta"):  # draws no random numbers for parameters that are given
        router = QuadraticRouter(sequence, n_experts, kind="full", rank=dim)
    router.load_state_dict(parameters, assign=True)
    return router.requires_grad_(False)


def _weighted_values(weights: Tensor, outputs: Tensor) -> Tensor:
    """Σ_j w_j o_j over the second axis from the end."""
    return (weights.unsqueeze(-1) * outputs).sum(dim=-2)
