"""Gates: scores (T, E) → weights (T, E), with an exact zero for every expert that is not used.

    Softmax        w = softmax(z / τ)
    Hard           w = 1 on the best expert: the limit of Softmax for τ → 0
    Sigmoid        w = σ(z)
    ReLUGate       w = max(z, 0)                                             (ReMoE)
    TopK           w ∝ score(z) on the k experts of largest selection score
    SmoothTopK     TopK made continuous: experts fade in                     (`smooth`)
    ProjectedTopK  TopK made continuous: tied experts share a seat           (`projected`)
    ExpertChoice   w_te = softmax(z)_te where token t is among the C = ⌈kT/E⌉ best of expert e
    GShardTopK     TopK with noisy scores in training and at most C = ⌈c k T/E⌉ tokens per expert

A gate computes in at least float32, since bfloat16 scores tie in 4 % of tokens at E = 64, k = 8. It
holds parameters only; controllers with running state live in `tieline.lab.training`. A new gate
overrides `weights`.

Gates that choose (`SelectiveGate`) have w_i ∝ score(z_i) · share_i(c): the selection scores c,
which a correction bias may move, decide the choice, and z combines the outputs. A new one overrides
`share`: 1 on the k largest c for `TopK`, a ramp for `SmoothTopK`, a
projection for `ProjectedTopK`.

`ExpertChoice` and `GShardTopK` depend on all T tokens of the call (`batch_dependent`): a token's
output changes with its neighbours, and in a causal model with tokens that come after it. They are
implemented for comparison; every other gate treats each token alone.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import group_scores, stable_topk, topk_mask

__all__ = [
    "ChoiceOptions",
    "ExpertChoice",
    "GShardTopK",
    "Gate",
    "Groups",
    "Hard",
    "Law",
    "ReLUGate",
    "SelectiveGate",
    "Sigmoid",
    "Softmax",
    "TopK",
    "expert_capacity",
]

Scores = Float[Tensor, "*batch experts"]
Weights = Float[Tensor, "*batch experts"]
Share = Float[Tensor, "*batch experts"]


class Law(Enum):
    """A property of a gate's weights, tested for every gate that lists it in `laws`."""

    SUMS_TO_ONE = "the weights of a token sum to 1"
    SHIFT_INVARIANT = "adding a constant to all scores of a token changes nothing"
    CONTINUOUS = "weights are continuous in the scores, at ties too"
    EQUIVARIANT = "away from ties, permuting the experts permutes the weights"
    SYMMETRIC = "experts with equal scores have equal weights"


class Gate(nn.Module):
    """Base of all gates: checks the scores, converts them to float32 or wider, calls `weights`."""

    laws: frozenset[Law] = frozenset({Law.CONTINUOUS, Law.EQUIVARIANT, Law.SYMMETRIC})
    batch_dependent: bool = False  # whether the weights of a token depend on other tokens
    most_active: int | None = None  # largest number of experts of a token; None for no bound

    def forward(self, scores: Scores) -> Weights:
        """Return the weight of each expert, in the dtype of the scores or float32 if wider."""
        require(
            scores.ndim >= 1 and scores.is_floating_point(),
            f"scores must be floating (..., E), got {tuple(scores.shape)} {scores.dtype}",
            ShapeError,
        )
        return self.weights(scores.to(torch.promote_types(scores.dtype, torch.float32)))

    def weights(self, scores: Scores) -> Weights:
        """Return the weights from scores of at least float32; override this in a new gate."""
        raise NotImplementedError


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
        """Return softmax(z / τ)."""
        return (scores / self.temperature).softmax(dim=-1)

    def extra_repr(self) -> str:
        """Temperature."""
        return f"temperature={self.temperature}"


class Hard(Gate):
    """w = 1 on the best expert and 0 elsewhere: `Softmax` in the limit τ → 0.

    At an exact tie the lower index gets weight 1, where the limit would share it. Gradients are 0.
    """

    laws = frozenset({Law.SUMS_TO_ONE, Law.SHIFT_INVARIANT, Law.EQUIVARIANT})

    def weights(self, scores: Scores) -> Weights:
        """Return the one-hot vector of the best expert."""
        return topk_mask(scores, 1).to(scores)


class Sigmoid(Gate):
    """w = σ(z): experts do not compete (paper 4, eq. 4)."""

    def weights(self, scores: Scores) -> Weights:
        """Return σ(z)."""
        return scores.sigmoid()


class ReLUGate(Gate):
    """w = max(z, 0): continuous and sparse, using every expert of positive score (ReMoE)."""

    def weights(self, scores: Scores) -> Weights:
        """Return max(z, 0)."""
        return scores.relu()


@dataclass(frozen=True)
class Groups:
    """Group-limited routing: only experts of the `chosen` best of `count` groups may be used.

    Attributes:
        count: number of groups; consecutive experts form a group.
        chosen: number of groups a token may use.
        score: a group's score is its largest selection score, or the sum of its two largest.
    """

    count: int
    chosen: int
    score: Literal["max", "top2sum"] = "top2sum"

    def __post_init__(self) -> None:
        require(
            1 <= self.chosen <= self.count,
            f"need 1 <= chosen groups <= groups, got {self.chosen} of {self.count}",
        )
        require(self.score in ("max", "top2sum"), f"unknown group score {self.score!r}")

    def scores(self, selection: Scores) -> Float[Tensor, "*batch groups"]:
        """Return the score of each group, in the dtype of the selection scores."""
        return group_scores(selection, self.count, self.score)

    def spread(self, per_group: Tensor, n_experts: int) -> Tensor:
        """Repeat a value per group for each of its experts."""
        return per_group.repeat_interleave(n_experts // self.count, dim=-1)

    def check(self, n_experts: int, k: int) -> None:
        """Raise unless the groups divide the experts and k experts fit in the chosen groups."""
        size = n_experts // self.count
        require(
            n_experts % self.count == 0 and (self.score == "max" or size >= 2),
            f"{self.count} groups scored by {self.score} do not divide {n_experts} experts",
            ShapeError,
        )
        require(
            k <= self.chosen * size,
            f"k = {k} exceeds the {self.chosen * size} experts of the chosen groups",
            ShapeError,
        )


class ChoiceOptions(TypedDict, total=False):
    """Keyword arguments of `SelectiveGate`, for gates that pass them on."""

    scoring: Literal["softmax", "sigmoid"]
    order: Literal["before", "after"]
    renormalize: bool
    selection_bias: Tensor | None
    groups: Groups | None
    scale: float


class SelectiveGate(Gate):
    """Base of the gates that choose experts; a subclass overrides `share`.

    Args:
        k: experts chosen per token.
        scoring: "softmax" or "sigmoid", the function score(z).
        order: "before": the scores score(z) + bias are ranked; "after": the logits z + bias are,
            and score(z) is taken over the chosen experts alone.
        renormalize: whether the weights of a token sum to `scale`. A softmax taken after the choice
            always does.
        selection_bias: correction bias (E,) added to what is ranked, never to the weights; kept
            as a buffer that a controller may update.
        groups: group-limited choice.
        scale: factor on all weights.

    Softmax keeps the order of the logits, so the logits are ranked unless a bias or a sum over
    groups needs the probabilities: gaps of logits do not depend on the other experts.
    """

    fractional = True  # whether a share may lie strictly between 0 and 1

    def __init__(
        self,
        k: int,
        *,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        order: Literal["before", "after"] = "before",
        renormalize: bool = True,
        selection_bias: Tensor | None = None,
        groups: Groups | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        _check_choice_size(k)
        require(scoring in ("softmax", "sigmoid"), f"unknown scoring {scoring!r}")
        require(order in ("before", "after"), f"order must be 'before' or 'after', got {order!r}")
        require(0 < scale < math.inf, f"scale must be positive and finite, got {scale!r}")
        if selection_bias is not None:
            require(
                selection_bias.ndim == 1
                and selection_bias.is_floating_point()
                and bool(selection_bias.isfinite().all()),
                "selection_bias must be a finite floating vector (E,), got "
                f"{tuple(selection_bias.shape)} {selection_bias.dtype}",
            )
            if groups is not None:
                groups.check(len(selection_bias), k)
        self.k, self.scoring, self.order, self.scale = k, scoring, order, scale
        self.renormalize = renormalize or (scoring, order) == ("softmax", "after")
        self.groups = groups
        self.selection_bias: Tensor | None
        self.register_buffer("selection_bias", selection_bias)

    @property
    def sums_to(self) -> float | None:
        """Sum of the weights of a token; None if it varies."""
        return self.scale if self.renormalize else None

    def weights(self, scores: Scores) -> Weights:
        """Return score(z) · share, renormalised if `renormalize`."""
        self._check_experts(scores.shape[-1])
        return self._combine(scores, self.share(self.selection(scores)))

    def selection(self, scores: Scores) -> Scores:
        """Return the selection scores c (..., E) that are ranked."""
        sums_groups = self.groups is not None and self.groups.score == "top2sum"
        ranks_logits = self.scoring == "softmax" and self.selection_bias is None and not sums_groups
        if self.order == "before" and not ranks_logits:
            scores = self._score_function(scores)
        return scores if self.selection_bias is None else scores + self.selection_bias.to(scores)

    def share(self, selection: Scores) -> Share:
        """Return the share of each expert in the choice, from 0 (not used) to 1."""
        raise NotImplementedError

    def _score_function(self, scores: Scores) -> Scores:
        """Return score(z)."""
        return scores.softmax(dim=-1) if self.scoring == "softmax" else scores.sigmoid()

    def _combine(self, scores: Scores, share: Share) -> Weights:
        """Return score(z) · share, divided by its sum if the gate renormalises."""
        if not self.renormalize:
            return self.scale * self._score_function(scores) * share
        # Masking before the softmax makes it relative to the largest score in use: no overflow, no
        # empty sum, although a bias may have passed over a larger score.
        log_score = scores if self.scoring == "softmax" else F.logsigmoid(scores)
        mass = log_score.masked_fill(share == 0, -torch.inf).softmax(dim=-1)
        if self.fractional:
            mass = mass * share
            mass = mass / mass.sum(dim=-1, keepdim=True)
        return mass if self.scale == 1 else self.scale * mass

    def _check_experts(self, experts: int) -> None:
        """Raise unless k, bias and groups fit this number of experts."""
        require(self.k <= experts, f"need k <= experts, got k={self.k} of {experts}", ShapeError)
        bias = experts if self.selection_bias is None else len(self.selection_bias)
        require(
            bias == experts, f"selection_bias has {bias} entries for {experts} experts", ShapeError
        )
        if self.groups is not None:
            self.groups.check(experts, self.k)

    def extra_repr(self) -> str:
        """Options of the choice."""
        options = f"k={self.k}, scoring={self.scoring!r}, order={self.order!r}"
        return f"{options}, renormalize={self.renormalize}, groups={self.groups}"


class TopK(SelectiveGate):
    """The k experts of largest selection score: discontinuous where the k-th and (k+1)-th tie.

    Ties go to the lower index. Routing as published:

        Mixtral      TopK(2)
        OLMoE        TopK(8, renormalize=False)
        gpt-oss      TopK(4, order="after")
        DeepSeek-V3  TopK(8, scoring="sigmoid", selection_bias=bias, groups=Groups(8, 4), scale=2.5)
    """

    fractional = False

    @property
    def laws(self) -> frozenset[Law]:  # type: ignore[override]
        """`SUMS_TO_ONE` if renormalised, `SHIFT_INVARIANT` with softmax scores."""
        return laws_of_choice(self)

    @property
    def most_active(self) -> int | None:  # type: ignore[override]
        """Largest number of experts per token: k."""
        return self.k

    def share(self, selection: Scores) -> Share:
        """Return 1 on the chosen experts and 0 elsewhere, without a gradient."""
        return topk_mask(self._within_groups(selection.detach()), self.k).to(selection)

    def _within_groups(self, selection: Scores) -> Scores:
        """Return the selection scores with minus infinity outside the chosen groups."""
        if self.groups is None:
            return selection
        chosen_groups = topk_mask(self.groups.scores(selection), self.groups.chosen)
        return selection.masked_fill(
            ~self.groups.spread(chosen_groups, selection.shape[-1]), -torch.inf
        )


def laws_of_choice(gate: SelectiveGate) -> frozenset[Law]:
    """Return the laws that follow from scoring, normalisation, bias and groups."""
    laws = {Law.SUMS_TO_ONE} if gate.sums_to == 1 else set()
    if gate.selection_bias is None and gate.groups is None:
        laws |= {Law.EQUIVARIANT}
    if gate.scoring == "softmax":
        laws |= {Law.SHIFT_INVARIANT}
    return frozenset(laws)


def expert_capacity(tokens: int, n_experts: int, k: int, factor: float = 1.0) -> int:
    """Return C = ⌈factor · kT/E⌉, at least 1 and at most T: tokens that one expert may hold."""
    return min(tokens, max(1, math.ceil(factor * k * tokens / n_experts)))


class ExpertChoice(Gate):
    """Each expert takes its C best tokens; a token has k experts on average, from none to all.

    Zhou et al. (2022). The load is even by construction; ties go to the earlier token.

    Args:
        k: experts per token on average (their capacity factor c).
    """

    laws = frozenset({Law.SHIFT_INVARIANT, Law.EQUIVARIANT})
    batch_dependent = True

    def __init__(self, k: int) -> None:
        super().__init__()
        _check_choice_size(k)
        self.k = k

    def weights(self, scores: Scores) -> Weights:
        """Return softmax(z) where the expert took the token, zero elsewhere."""
        experts = scores.shape[-1]
        require(self.k <= experts, f"need k <= experts, got k={self.k} of {experts}")
        probability = scores.reshape(-1, experts).softmax(dim=-1)
        if not len(probability):
            return probability.view_as(scores)
        capacity = expert_capacity(len(probability), experts, self.k)
        accepted = topk_mask(probability.T, capacity).T
        return (probability * accepted).view_as(scores)

    def extra_repr(self) -> str:
        """Experts per token."""
        return f"k={self.k}"


class GShardTopK(TopK):
    """Top-k whose experts hold at most C tokens, with noisy scores in training.

    Lepikhin et al. (2021), set as in paper 1 (C.3.2: noise 1.0, capacity factor 1.5). The first
    choices of all tokens are assigned before the second ones, tokens in their order. A token whose
    expert is full loses that expert, and its weight is not given to the others.

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
        self.is_bounded = not math.isinf(capacity_factor)  # compilers make numbers symbols

    @property
    def laws(self) -> frozenset[Law]:  # type: ignore[override]
        """The laws of `TopK` but `SUMS_TO_ONE`: tokens that lose an expert sum to less than 1."""
        return super().laws - {Law.SUMS_TO_ONE}

    def weights(self, scores: Scores) -> Weights:
        """Return top-k weights, zero where the expert was full."""
        if self.training and self.noise > 0:
            scores = scores + torch.randn_like(scores) * (self.noise / scores.shape[-1])
        weights = super().weights(scores)
        if not (self.is_bounded and scores.numel()):
            return weights
        return weights * self._fits_capacity(scores.detach()).view_as(weights)

    def _fits_capacity(self, scores: Scores) -> Tensor:
        """Return a mask (T, E) of the requested experts that have room for the token."""
        scores = scores.reshape(-1, scores.shape[-1])
        tokens, experts = scores.shape
        capacity = expert_capacity(tokens, experts, self.k, self.capacity_factor)
        choices = stable_topk(scores, self.k).indices.T.reshape(-1, 1)  # rank first, then token
        requested = torch.zeros(len(choices), experts, dtype=torch.int64, device=scores.device)
        requested.scatter_(1, choices, 1)
        seated = (requested.cumsum(dim=0) <= capacity) & (requested == 1)
        return seated.view(self.k, tokens, experts).any(dim=0)

    def extra_repr(self) -> str:
        """Choice, capacity and noise."""
        return f"{super().extra_repr()}, capacity_factor={self.capacity_factor}, noise={self.noise}"


def _check_choice_size(k: int) -> None:
    """Raise unless k >= 1."""
    require(isinstance(k, int) and k >= 1, f"k must be an integer >= 1, got {k!r}")
