"""Gates whose choice depends on the batch: what the papers compare with, not what we recommend.

    ExpertChoice   w_te = softmax(z)_te where token t is among the C = ⌈kT/E⌉ best of expert e
    GShardTopK     top-k with noise on the scores in training, and at most C = ⌈c k T/E⌉ tokens per
                   expert: those beyond lose that expert

T counts all tokens of the call. Every other gate of the package treats a token alike alone and in a
batch; `batch_dependent` tells these apart. Under them a token's output can change with its
neighbours, and in a causal model with tokens that come after it.
"""

import math

import torch
from torch import Tensor

from tieline.errors import require
from tieline.ranking import stable_topk, topk_mask
from tieline.routing.gates import Gate, Law, Scores, Weights
from tieline.routing.selective import TopK

__all__ = ["ExpertChoice", "GShardTopK", "capacity"]


def capacity(tokens: int, n_experts: int, k: int, factor: float = 1.0) -> int:
    """C = ⌈factor · kT/E⌉, at least 1 and at most T: tokens that one expert may hold."""
    return min(tokens, max(1, math.ceil(factor * k * tokens / n_experts)))


class ExpertChoice(Gate):
    """Each expert takes its C best tokens; a token has k experts on average, from none to all.

    Zhou et al. (2022). The load is even by construction; of equal scores the earlier token goes in.

    Args:
        k: experts per token on average (their capacity factor c).
    """

    laws = frozenset({Law.SHIFT_INVARIANT, Law.EQUIVARIANT})
    batch_dependent = True

    def __init__(self, k: int) -> None:
        super().__init__()
        require(isinstance(k, int) and k >= 1, f"k must be an integer >= 1, got {k!r}")
        self.k = k

    def weights(self, scores: Scores) -> Weights:
        """softmax(z) where the expert took the token, zero elsewhere."""
        experts = scores.shape[-1]
        require(self.k <= experts, f"need k <= experts, got k={self.k} of {experts}")
        probability = scores.reshape(-1, experts).softmax(dim=-1)
        if not len(probability):
            return probability.view_as(scores)
        held = capacity(len(probability), experts, self.k)
        taken = topk_mask(probability.T, held).T
        return (probability * taken).view_as(scores)

    def extra_repr(self) -> str:
        """Experts per token."""
        return f"k={self.k}"


class GShardTopK(TopK):
    """Top-k whose experts hold at most C tokens, with noisy scores in training.

    Lepikhin et al. (2021), set as in paper 1 (C.3.2: noise 1.0, capacity factor 1.5). The first
    choices of all tokens are seated before the second ones, and tokens in their order; who finds an
    expert full loses that expert, and its weight is not given to the others.

    Args:
        k: experts chosen per token.
        capacity_factor: c; infinity drops no token.
        noise: scores get N(0, (noise/E)²) noise in training mode, as in Tutel; 0 for none.
    """

    batch_dependent = True

    def __init__(self, k: int, *, capacity_factor: float = 1.5, noise: float = 1.0) -> None:
        super().__init__(k)
        require(capacity_factor > 0, f"the capacity factor must be positive: {capacity_factor}")
        require(0 <= noise < math.inf, f"noise must be >= 0 and finite, got {noise}")
        self.capacity_factor, self.noise = capacity_factor, noise

    @property
    def laws(self) -> frozenset[Law]:  # type: ignore[override]
        """Those of top-k, but a token that lost an expert sums to less than 1."""
        return super().laws - {Law.SUMS_TO_ONE}

    def weights(self, scores: Scores) -> Weights:
        """Top-k weights, zero where the expert was full."""
        if self.training and self.noise > 0:
            scores = scores + torch.randn_like(scores) * (self.noise / scores.shape[-1])
        weights = super().weights(scores)
        if math.isinf(self.capacity_factor) or not scores.numel():
            return weights
        return weights * self._seated(scores.detach()).view_as(weights)

    def _seated(self, scores: Scores) -> Tensor:
        """Whether an expert has room for a token (T, E), for the k experts that the token wants."""
        scores = scores.reshape(-1, scores.shape[-1])
        tokens, experts = scores.shape
        held = capacity(tokens, experts, self.k, self.capacity_factor)
        choices = stable_topk(scores, self.k).indices.T.reshape(-1, 1)  # rank first, then token
        wanted = torch.zeros(len(choices), experts, dtype=torch.int64, device=scores.device)
        wanted.scatter_(1, choices, 1)
        seated = (wanted.cumsum(dim=0) <= held) & (wanted == 1)
        return seated.view(self.k, tokens, experts).any(dim=0)

    def extra_repr(self) -> str:
        """Choice, capacity and noise."""
        return f"{super().extra_repr()}, capacity_factor={self.capacity_factor}, noise={self.noise}"
