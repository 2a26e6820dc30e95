r"""Effects of perturbations on the whole model, counted in runs compared with the clean run.

`FullEffects` counts for each perturbation

    flips       share of tokens whose experts differ from those of the clean pass, by layer
    moved       Σ_{e ∈ S \ S'} w_e / Σ_{e ∈ S} w_e: clean weight of the experts that a token lost
    loss        -log P(next token)
    KL          Σ_v P(v) log(P(v) / P'(v)), P of the clean pass, P' of the perturbed one

The floor of the KL is measured in a pass in which flipping tokens get the experts and weights of
the clean pass: the KL that would remain if no token flipped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tieline.core.predictions import next_token_losses
from tieline.core.statistics import (
    SequenceSums,
)
from tieline.run.condition import Condition, Perturbation
from tieline.run.forward import Ids
from tieline.run.observers import Observer, Outcome
from tieline.run.plan import Pass, Phase
from tieline.run.ranks import Ranks


@dataclass
class FullEffect:
    """Counts of one perturbation over all layers.

    `to_original` is the KL to the clean original if the perturbed model is another form of it.
    """

    flips: dict[str, SequenceSums] = field(default_factory=dict)
    any_layer: SequenceSums = field(default_factory=SequenceSums)
    moved: SequenceSums = field(default_factory=SequenceSums)
    shares: list[Tensor] = field(default_factory=list)
    loss: SequenceSums = field(default_factory=SequenceSums)
    kl: SequenceSums = field(default_factory=SequenceSums)
    floor: SequenceSums = field(default_factory=SequenceSums)
    to_original: SequenceSums = field(default_factory=SequenceSums)

    @property
    def sums(self) -> list[SequenceSums]:
        """All sums per sequence, in a fixed order."""
        divergences = (self.kl, self.floor, self.to_original)
        return [*self.flips.values(), self.any_layer, self.moved, self.loss, *divergences]

    def add_pass(self, run: Pass, outcome: Outcome, clean_losses: Tensor | None) -> None:
        """Count the flips, the KL and the loss of a free perturbed pass."""
        assert run.reference is not None
        assert outcome.logits is not None
        shape, lost = tuple(outcome.ids.shape), []
        for name, share in outcome.lost.items():
            changed = (share >= 0).view(shape)
            self.flips.setdefault(name, SequenceSums()).add(changed.double())
            lost.append(share.clamp(min=0))
        flipped = torch.stack([share >= 0 for share in outcome.lost.values()]).any(dim=0)
        moved = torch.stack(lost)
        self.any_layer.add(flipped.double().view(shape))
        self.moved.add(moved.mean(dim=0).view(shape))
        self.shares.append(moved.flatten().float())
        self.kl.add(outcome.divergence(run.reference))
        for original in run.others:
            self.to_original.add(outcome.divergence(original))
        if clean_losses is not None:
            self.loss.add(next_token_losses(outcome.logits, outcome.ids) - clean_losses)


class FullEffects(Observer):
    """Counts the differences of perturbed passes, free and forced, from the clean pass.

    Attributes:
        effects: counts by perturbation.
        loss: loss of the clean passes.
    """

    def __init__(self, perturbations: Sequence[Perturbation]) -> None:
        """Count passes under these perturbations."""
        self.effects = {perturbation: FullEffect() for perturbation in perturbations}
        self.loss = SequenceSums()
        self._losses: dict[Pass, Tensor] = {}

    def on_pass_done(self, run: Pass, outcome: Outcome) -> None:
        """Count a clean, a forced or a free pass."""
        if run.reference is None:
            self._count_clean(run, outcome)
            return
        assert run.condition.perturbation is not None
        effect = self.effects[run.condition.perturbation]
        if run.condition.choice == "forced":
            effect.floor.add(outcome.divergence(run.reference))
        else:
            effect.add_pass(run, outcome, self._losses.get(run.reference))

    def _count_clean(self, run: Pass, outcome: Outcome) -> None:
        """Count the loss of a clean pass."""
        assert outcome.logits is not None
        if outcome.ids.shape[1] > 1:
            self._losses[run] = next_token_losses(outcome.logits, outcome.ids)
            self.loss.add(self._losses[run])

    def join(self, ranks: Ranks) -> None:
        """Add up the counts of all processes."""
        effects = list(self.effects.values())
        ranks.join_sums([self.loss, *(sums for effect in effects for sums in effect.sums)])
        lost = {
            str(n): torch.cat(effect.shares) for n, effect in enumerate(effects) if effect.shares
        }
        for number, shares in ranks.join_rows(lost).items():
            effects[int(number)].shares[:] = [shares]


def audit_phase(name: str, batches: Mapping[int, Ids], conditions: Sequence[Condition]) -> Phase:
    """Plan a clean pass of each batch, and a free and a forced pass under each condition."""
    passes = [Pass(number) for number in batches]
    passes += [
        Pass(number, chosen, Pass(number))
        for condition in conditions
        for number in batches
        for chosen in (condition, condition.taking("forced"))
    ]
    return Phase(name, batches, tuple(passes), compares_routes=True, may_drop=True)


def compared_phase(name: str, batches: Mapping[int, Ids], conditions: Sequence[Condition]) -> Phase:
    """Plan a clean pass of each batch, and one under each condition that is compared with it."""
    passes = [Pass(number) for number in batches]
    passes += [Pass(n, condition, Pass(n)) for condition in conditions for n in batches]
    return Phase(name, batches, tuple(passes))


class Divergences(Observer):
    """Sums the KL of passes to their reference, by condition.

    Attributes:
        kl: sums by condition.
    """

    def __init__(self, conditions: Sequence[Condition]) -> None:
        """Count passes under these conditions."""
        self.kl = {condition: SequenceSums() for condition in conditions}

    def on_pass_done(self, run: Pass, outcome: Outcome) -> None:
        """Add the KL of a pass to its reference."""
        if run.reference is not None and outcome.logits is not None:
            self.kl[run.condition].add(outcome.divergence(run.reference))

    def join(self, ranks: Ranks) -> None:
        """Add up the sums of all processes."""
        ranks.join_sums(list(self.kl.values()))
