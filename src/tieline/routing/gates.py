"""Gates: scores (T, E) → weights (T, E), with an exact zero for every expert that is not used.

    Softmax      w = softmax(z / τ)
    Hard         w = 1 on the best expert: the limit of Softmax for τ → 0
    Sigmoid      w = σ(z)
    ReLUGate     w = max(z, 0)                                             (ReMoE)
    TopK         w ∝ score(z) on the k experts of largest selection score  (`selective`)
    SmoothTopK   TopK made continuous                                      (`smooth`)
    ExpertChoice, GShardTopK   gates that depend on the batch              (`batchwise`)

A gate computes in at least float32, for bfloat16 scores tie in 4 % of tokens at E = 64, k = 8, and
holds parameters only; controllers with running state live in `tieline.training`. A new gate
overrides `weights`.
"""

import math
from enum import Enum

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.errors import ShapeError, require
from tieline.ranking import topk_mask

__all__ = ["Gate", "Hard", "Law", "ReLUGate", "Sigmoid", "Softmax"]

Scores = Float[Tensor, "*batch experts"]
Weights = Float[Tensor, "*batch experts"]


class Law(Enum):
    """What a gate promises of its weights; tested as a property wherever a gate claims it."""

    SUMS_TO_ONE = "the weights of a token sum to 1"
    SHIFT_INVARIANT = "adding a constant to all scores of a token changes nothing"
    CONTINUOUS = "weights are continuous in the scores, at ties too"
    EQUIVARIANT = "away from ties, permuting the experts permutes the weights"
    SYMMETRIC = "experts with equal scores have equal weights"


class Gate(nn.Module):
    """Base of all gates: checks and widens the scores, then asks `weights`."""

    laws: frozenset[Law] = frozenset({Law.CONTINUOUS, Law.EQUIVARIANT, Law.SYMMETRIC})
    batch_dependent: bool = False  # whether the weights of a token depend on other tokens

    def forward(self, scores: Scores) -> Weights:
        """Weights of each expert, in the dtype of the scores or float32 if that is wider."""
        require(
            scores.ndim >= 1 and scores.is_floating_point(),
            f"scores must be floating (..., E), got {tuple(scores.shape)} {scores.dtype}",
            ShapeError,
        )
        return self.weights(widened(scores))

    def weights(self, scores: Scores) -> Weights:
        """Weights from scores of at least float32; what a new gate overrides."""
        raise NotImplementedError


def widened(scores: Scores) -> Scores:
    """Scores in float32 unless they are wider already."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


class Softmax(Gate):
    """w = softmax(z / τ): dense routing, the soft relaxation of paper 0 (eq. 2.2).

    Args:
        temperature: τ > 0.
    """

    laws = frozenset(Law)

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        require(
            0 < temperature < math.inf, f"temperature must be positive and finite: {temperature=}"
        )
        self.temperature = temperature

    def weights(self, scores: Scores) -> Weights:
        """softmax(z / τ)."""
        return (scores / self.temperature).softmax(dim=-1)

    def extra_repr(self) -> str:
        """Temperature."""
        return f"temperature={self.temperature}"


class Hard(Gate):
    """w = 1 on the best expert and 0 elsewhere: Softmax in the limit τ → 0.

    At an exact tie the limit would be shared; this gate gives all to the lower index. Its gradient
    is zero.
    """

    laws = frozenset({Law.SUMS_TO_ONE, Law.SHIFT_INVARIANT, Law.EQUIVARIANT})

    def weights(self, scores: Scores) -> Weights:
        """One-hot of the first rank."""
        return topk_mask(scores, 1).to(scores)


class Sigmoid(Gate):
    """w = σ(z): every expert is judged alone (paper 4, eq. 4)."""

    def weights(self, scores: Scores) -> Weights:
        """σ(z)."""
        return scores.sigmoid()


class ReLUGate(Gate):
    """w = max(z, 0): continuous and sparse, with as many experts as scores are positive (ReMoE)."""

    def weights(self, scores: Scores) -> Weights:
        """max(z, 0)."""
        return scores.relu()
