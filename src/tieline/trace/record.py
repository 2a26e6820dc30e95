"""The records that every measurement starts from.

A *selection score* is the number that a router ranks: logits, or scores plus a correction bias.
`LayerTrace.scores` holds the largest of them in order, `weights` what combines the outputs; the two
are never the same argument, for a correction bias moves the choice and not the weight.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["LayerFacts", "LayerTrace", "RoutingTrace"]


@dataclass(frozen=True)
class LayerFacts:
    """How one router chooses: everything about its selection that is not data.

    Attributes:
        n_experts: number of experts E that the router scores.
        k: number of experts chosen per token.
        units: what a selection score is: the router's logits ("logits"), softmax probabilities
            ("softmax") or sigmoid scores ("sigmoid"); a correction bias is added in these units.
        n_groups: number of expert groups, 1 where routing is not group-limited.
        k_groups: number of groups a token may choose its experts from.
        group_score: how a group is scored: its largest score, or the sum of its two largest.
        affine: whether the selection scores are affine in the router's input (no activation, no
            bias in other units), so that Euclidean distances to a tie are exact.
    """

    n_experts: int
    k: int
    units: Literal["logits", "softmax", "sigmoid"] = "logits"
    n_groups: int = 1
    k_groups: int = 1
    group_score: Literal["max", "top2sum"] = "max"
    affine: bool = True


@dataclass(frozen=True)
class LayerTrace:
    """Routing of T tokens in one layer; C = min(E, k + m) ranks are kept.

    Attributes:
        name: qualified name of the router module.
        facts: how the router chooses.
        scores: selection scores of the first C ranks, descending, float32. For group-limited
            routers the ranks run over the experts of the chosen groups. None for ids-only traces.
        experts: experts that hold those ranks; the first k are the chosen ones.
        weights: combine weights of the first k ranks. None where the source has none.
        group_gap: score of the last chosen group minus that of the first one left out.
        distance: Euclidean distance of the router's input to the nearest tie (affine routers).
        near: number K(ε) of experts with a selection score above z_[k] - ε, per ε of the trace.
        bias: correction bias (E,) that the selection scores contain.
        inputs: the router's inputs, kept on request.
    """

    name: str
    facts: LayerFacts
    experts: Int[Tensor, "tokens ranks"]
    scores: Float[Tensor, "tokens ranks"] | None = None
    weights: Float[Tensor, "tokens k"] | None = None
    group_gap: Float[Tensor, " tokens"] | None = None
    distance: Float[Tensor, " tokens"] | None = None
    near: Int[Tensor, "tokens epsilons"] | None = None
    bias: Float[Tensor, " experts"] | None = None
    inputs: Float[Tensor, "tokens width"] | None = None

    @property
    def gap(self) -> Float[Tensor, " tokens"]:
        """Gap to the nearest change of the choice, in float64.

        z_[k] - z_[k+1] within the chosen groups, or the gap between groups if that is smaller.
        """
        from tieline.errors import TraceError, require

        k = self.facts.k
        require(self.scores is not None, f"layer {self.name!r} has ids only: no gaps", TraceError)
        assert self.scores is not None
        if self.scores.shape[1] == k:
            inner = torch.full((len(self.scores),), torch.inf, dtype=torch.float64)
        else:
            inner = self.scores[:, k - 1].double() - self.scores[:, k].double()
        return inner if self.group_gap is None else torch.minimum(inner, self.group_gap.double())


@dataclass(frozen=True)
class RoutingTrace:
    """Routing of the same T tokens in every layer.

    Attributes:
        layers: one record per MoE layer, in order of depth.
        tokens: token ids; -1 where unknown.
        documents: document that each token belongs to.
        positions: position of each token in its document.
        epsilons: the grid of ε at which `LayerTrace.near` counts.
        provenance: model, revision, dtype, versions, seed: JSON values only.
    """

    layers: tuple[LayerTrace, ...]
    tokens: Int[Tensor, " tokens"]
    documents: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    epsilons: tuple[float, ...] = ()
    provenance: dict[str, object] = field(default_factory=dict)
