"""Gates that choose: selection scores rank the experts, a share in [0, 1] says how far each is in.

    w_i ∝ score(z_i) · share_i(c)        c the selection scores

What decides the choice (c, which a correction bias may move) and what combines the outputs (z) stay
apart. `TopK` has share 1 on the k largest c and 0 elsewhere; `SmoothTopK` has a ramp between.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.ranking import group_scores, topk_mask
from tieline.routing.gates import Gate, Law, Scores, Weights

__all__ = ["Groups", "SelectiveGate", "TopK"]

Share = Float[Tensor, "*batch experts"]


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
        """Score of each group, in the dtype of the selection scores."""
        return group_scores(selection, self.count, self.score)

    def spread(self, per_group: Tensor, n_experts: int) -> Tensor:
        """A value per group, repeated for each of its experts."""
        return per_group.repeat_interleave(n_experts // self.count, dim=-1)

    def check(self, n_experts: int, k: int) -> None:
        """Refuse an expert count that the groups do not divide or that leaves fewer than k."""
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


class SelectiveGate(Gate):
    """Base of the gates that choose; a subclass overrides `share`.

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

    Softmax keeps the order of the logits, so unless a bias or a sum over groups needs the
    probabilities themselves, the logits are ranked: their gaps do not depend on the other experts.
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
        require(isinstance(k, int) and k >= 1, f"k must be an integer >= 1, got {k!r}")
        require(scoring in ("softmax", "sigmoid"), f"unknown scoring {scoring!r}")
        require(order in ("before", "after"), f"order must be 'before' or 'after', got {order!r}")
        require(0 < scale < math.inf, f"scale must be positive and finite, got {scale!r}")
        _check_bias(selection_bias)
        if groups is not None and selection_bias is not None:
            groups.check(len(selection_bias), k)
        self.k, self.scoring, self.order, self.scale = k, scoring, order, scale
        self.renormalize = renormalize or (scoring, order) == ("softmax", "after")
        self.groups = groups
        self.selection_bias: Tensor | None
        self.register_buffer("selection_bias", selection_bias)

    @property
    def sums_to(self) -> float | None:
        """What the weights of a token sum to; None where that varies."""
        return self.scale if self.renormalize else None

    def weights(self, scores: Scores) -> Weights:
        """score(z) · share, renormalised if asked for."""
        self._check_experts(scores.shape[-1])
        return self._combine(scores, self.share(self.selection(scores)))

    def selection(self, scores: Scores) -> Scores:
        """The selection scores c (..., E) that are ranked."""
        if self.order == "before" and not self._logits_will_do:
            scores = scores.softmax(dim=-1) if self.scoring == "softmax" else scores.sigmoid()
        return scores if self.selection_bias is None else scores + self.selection_bias.to(scores)

    def share(self, selection: Scores) -> Share:
        """How far each expert is in the choice, from 0 (not used) to 1."""
        raise NotImplementedError

    @property
    def _logits_will_do(self) -> bool:
        sums_groups = self.groups is not None and self.groups.score == "top2sum"
        return self.scoring == "softmax" and self.selection_bias is None and not sums_groups

    def _combine(self, scores: Scores, share: Share) -> Weights:
        if not self.renormalize:
            score = scores.softmax(dim=-1) if self.scoring == "softmax" else scores.sigmoid()
            return self.scale * score * share
        # The softmax is relative to the largest score in use, so neither overflow nor an empty sum
        # can occur; the others leave as exp(-inf), for a bias may have passed over a larger score.
        log_score = scores if self.scoring == "softmax" else F.logsigmoid(scores)
        mass = log_score.masked_fill(share == 0, -torch.inf).softmax(dim=-1)
        if self.fractional:
            mass = mass * share
            mass = mass / mass.sum(dim=-1, keepdim=True)
        return mass if self.scale == 1 else self.scale * mass

    def _check_experts(self, experts: int) -> None:
        require(self.k <= experts, f"need k <= experts, got k={self.k} of {experts}", ShapeError)
        bias = experts if self.selection_bias is None else len(self.selection_bias)
        require(
            bias == experts, f"selection_bias has {bias} entries for {experts} experts", ShapeError
        )
        if self.groups is not None:
            self.groups.check(experts, self.k)

    def extra_repr(self) -> str:
        """The choice in one line."""
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
        """Sums to one if renormalised; shift-invariant if softmax ranks logits."""
        return laws_of_choice(self)

    def share(self, selection: Scores) -> Share:
        """1 on the chosen experts, 0 elsewhere; no gradient."""
        return topk_mask(self._within_groups(selection.detach()), self.k).to(selection)

    def _within_groups(self, selection: Scores) -> Scores:
        if self.groups is None:
            return selection
        kept = topk_mask(self.groups.scores(selection), self.groups.chosen)
        return selection.masked_fill(~self.groups.spread(kept, selection.shape[-1]), -torch.inf)


def laws_of_choice(gate: SelectiveGate) -> frozenset[Law]:
    """The laws that follow from scoring and normalisation alone."""
    laws = {Law.SUMS_TO_ONE} if gate.sums_to == 1 else set()
    if gate.selection_bias is None and gate.groups is None:
        laws |= {Law.EQUIVARIANT}
    if gate.scoring == "softmax":
        laws |= {Law.SHIFT_INVARIANT}
    return frozenset(laws)


def _check_bias(bias: Tensor | None) -> None:
    if bias is not None:
        require(
            bias.ndim == 1 and bias.is_floating_point() and bool(bias.isfinite().all()),
            f"selection_bias must be a finite floating vector (E,), got {tuple(bias.shape)} "
            f"{bias.dtype}",
        )
