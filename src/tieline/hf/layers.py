"""One router under observation: each of its calls becomes a `LayerTrace`.

Everything that needs the scores of all experts happens here, while they exist: the ranks, the
counts K(ε) and the exact distance to the nearest tie. The scores are read in few passes, where they
are; only the results go to the CPU.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.errors import TielineError, UnsupportedModelError, require
from tieline.geometry.distance import NEIGHBOURS, expert_distances, nearest_tie
from tieline.hf.batches import Batch
from tieline.hf.families import RouterFamily
from tieline.hf.outputs import RouterOutput, read_output
from tieline.hf.selection import Selection, at_least_single, restrict, select
from tieline.hf.verify import check_distinct, check_finite, check_selected
from tieline.ranking import Ranked, ranked_choice
from tieline.trace import LayerFacts, LayerTrace

__all__ = ["Call", "LayerObserver", "Settings", "near_counts"]

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """What is kept of each layer.

    Attributes:
        ranks: number m of ranks kept beyond k; None keeps all.
        epsilons: grid of ε at which K(ε) is counted.
        inputs: whether router inputs are kept.
        distances: whether Euclidean distances to the nearest tie are computed where exact.
    """

    ranks: int | None
    epsilons: tuple[float, ...]
    inputs: bool
    distances: bool


class _Ranking(NamedTuple):
    """Scores of all experts inside the chosen groups, their ranks, and the ranks to keep."""

    scores: Tensor
    ranked: Ranked
    kept: Ranked
    facts: LayerFacts


class LayerObserver:
    """Turns the calls of one router into records."""

    def __init__(self, name: str, family: RouterFamily, settings: Settings) -> None:
        """Observe the router called `name`, which is of `family`."""
        self.name = name
        self.family = family
        self._settings = settings
        self._verified = False
        self._matrix: tuple[tuple[int, int], Tensor] | None = None

    @torch.no_grad()
    def observe(self, router: nn.Module, call: Call, output: Any, batch: Batch) -> LayerTrace:
        """The record of one call: which experts, by which scores, how near to a tie."""
        reason = self.family.refused_in_training
        if reason is not None and router.training:
            raise UnsupportedModelError(f"layer {self.name!r} ({self.family.name}): {reason}")
        found = self._kept_rows(read_output(self.family, router, call[0], output), batch)
        selection = select(self.family, router, found.logits, call)
        check_finite(selection.scores, self.name, batch)
        scores, group_gap = selection.scores, None
        if selection.limit is not None:
            scores, group_gap = restrict(scores, found.ids, selection.limit)
        ranking = self._rank(at_least_single(scores), found, selection)
        return LayerTrace(
            name=self.name,
            facts=ranking.facts,
            experts=_to_cpu(ranking.kept.indices, _integers(ranking.facts.n_experts)),
            scores=_to_cpu(ranking.kept.values, torch.float32),
            weights=_to_cpu(_in_order(found, ranking.kept), torch.float32),
            group_gap=None if group_gap is None else group_gap.cpu(),
            distance=self._distance(router, ranking),
            near=self._near(ranking),
            bias=None if selection.bias is None else _to_cpu(selection.bias, torch.float32),
            inputs=self._inputs(call, batch),
        )

    def _kept_rows(self, found: RouterOutput, batch: Batch) -> RouterOutput:
        require(
            len(found.logits) == batch.routed,
            f"layer {self.name!r} routed {len(found.logits)} tokens of a batch of {batch.routed}; "
            "a trace needs layers that see the same tokens: choose them with `layers`, or capture "
            "the part of the model that runs them",
            TielineError,
        )
        if batch.kept is None:
            return found
        kept = batch.kept.to(found.logits.device)
        return RouterOutput(*(tensor.index_select(0, kept) for tensor in found))

    def _rank(self, scores: Tensor, found: RouterOutput, selection: Selection) -> _Ranking:
        """The ranks of the scores, verified against the router's own choice."""
        k, experts = found.ids.shape[1], scores.shape[1]
        wanted = experts if self._settings.ranks is None else k + self._settings.ranks
        needed = min(max(wanted, k + NEIGHBOURS + 1), experts)
        if not self._verified:
            check_distinct(found.ids, self.name, self.family.name)
        ranked = ranked_choice(scores, found.ids, k, needed)
        selected, threshold = scores.gather(1, found.ids), ranked.values[:, k - 1]
        check_selected(selected, threshold, selection.rounding, self.name, self.family.name)
        self._verified = True
        kept = Ranked(ranked.values[:, :wanted], ranked.indices[:, :wanted])
        return _Ranking(scores, ranked, kept, self._facts(experts, k, selection))

    def _facts(self, experts: int, k: int, selection: Selection) -> LayerFacts:
        affine = selection.units == "logits" and self.family.weight is not None
        if selection.limit is None:
            return LayerFacts(experts, k, selection.units, affine=affine)
        limit = selection.limit
        return LayerFacts(
            experts, k, selection.units, limit.n_groups, limit.k_groups, limit.score, affine
        )

    def _near(self, ranking: _Ranking) -> Int[Tensor, "tokens epsilons"] | None:
        """K(ε) on the grid of the settings."""
        if not self._settings.epsilons:
            return None
        threshold = ranking.ranked.values[:, ranking.facts.k - 1]
        counts = near_counts(ranking.scores, threshold, self._settings.epsilons)
        return _to_cpu(counts, _integers(ranking.facts.n_experts))

    def _distance(self, router: nn.Module, ranking: _Ranking) -> Float[Tensor, " tokens"] | None:
        """Distance to the nearest tie; ties between groups have none in closed form."""
        facts = ranking.facts
        if not (self._settings.distances and facts.affine and facts.n_groups == 1):
            return None
        weight = attrgetter(self.family.weight or "")(router)
        if weight.is_meta:  # offloaded: its values are elsewhere between two calls
            return None
        version = 0 if weight.is_inference() else weight._version  # moves with every training step
        state = (weight.data_ptr(), version)
        if self._matrix is None or self._matrix[0] != state:
            self._matrix = (state, expert_distances(weight))
        tie = nearest_tie(ranking.scores, self._matrix[1], facts.k, ranking.ranked)
        return tie.distance.cpu()

    def _inputs(self, call: Call, batch: Batch) -> Float[Tensor, "tokens width"] | None:
        if not self._settings.inputs:
            return None
        args, named = call
        states = (args[0] if args else named["hidden_states"]).detach()
        states = states.reshape(-1, states.shape[-1])
        if batch.kept is not None:
            states = states.index_select(0, batch.kept.to(states.device))
        return _to_cpu(states, torch.float32)


def _in_order(found: RouterOutput, ranked: Ranked) -> Tensor:
    """Combine weights in the order of the ranks."""
    chosen = ranked.indices[:, : found.ids.shape[1]]
    if torch.equal(chosen, found.ids):
        return found.weights
    of_all = found.weights.new_zeros(found.logits.shape)
    return of_all.scatter_(1, found.ids, found.weights).gather(1, chosen)


def near_counts(
    scores: Float[Tensor, "tokens experts"],
    threshold: Float[Tensor, " tokens"],
    epsilons: tuple[float, ...],
) -> Int[Tensor, "tokens epsilons"]:
    """K(ε) = #{i : z_i > z_[k] - ε}, given z_[k]: one comparison and one sum of bytes per ε.

    In the dtype of the scores: a difference rounds by 2^-24 of itself, which is nothing to an ε.
    """
    below = threshold[:, None] - scores
    counts = torch.empty(len(scores), len(epsilons), dtype=torch.int32, device=scores.device)
    for column, epsilon in enumerate(epsilons):
        within = (below < epsilon).view(torch.int8)
        torch.sum(within, dim=1, dtype=torch.int32, out=counts[:, column])
    return counts


def _integers(experts: int) -> torch.dtype:
    """The smallest type that holds ids and counts of so many experts."""
    return torch.int16 if experts <= torch.iinfo(torch.int16).max else torch.int32


def _to_cpu(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy on the CPU: what the model does later to its own tensors does not change a record."""
    return tensor.detach().to(device="cpu", dtype=dtype, copy=True)
