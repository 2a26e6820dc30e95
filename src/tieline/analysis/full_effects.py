r"""What perturbations do to the whole model, where effects add up over depth.

    flips       share of tokens whose experts differ from those of the clean pass, by layer
    moved       Σ_{e ∈ S \ S'} w_e / Σ_{e ∈ S} w_e: clean weight of the experts that a token lost
    loss        -log P(next token)
    KL          Σ_v P(v) log(P(v) / P'(v)), P of the clean pass, P' of the perturbed one

The floor of the KL is that of a pass in which flipping tokens get the experts and weights of the
clean one: what would remain if no token ever flipped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tieline.analysis.serving import Serving, equal_layers, exact_ties, replay_bytes, router_state
from tieline.core.statistics import SequenceSums, next_token_losses
from tieline.run.condition import Condition, Perturbation
from tieline.run.observers import Observer, Outcome
from tieline.run.plan import Ids, Pass, Phase
from tieline.run.ranks import Ranks
from tieline.trace.record import LayerTrace


@dataclass
class FullEffect:
    """What is counted of one perturbation over all layers."""

    flips: dict[str, SequenceSums] = field(default_factory=dict)
    any_layer: SequenceSums = field(default_factory=SequenceSums)
    moved: SequenceSums = field(default_factory=SequenceSums)
    shares: list[Tensor] = field(default_factory=list)
    loss: SequenceSums = field(default_factory=SequenceSums)
    kl: SequenceSums = field(default_factory=SequenceSums)
    floor: SequenceSums = field(default_factory=SequenceSums)

    @property
    def sums(self) -> list[SequenceSums]:
        """Everything that is counted per sequence."""
        return [*self.flips.values(), self.any_layer, self.moved, self.loss, self.kl, self.floor]

    def add(self, outcome: Outcome, clean: Pass) -> None:
        """Count the flips of a perturbed pass and its KL to the clean pass."""
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
        self.kl.add(outcome.divergence(clean))


class FullEffects(Observer):
    """Counts what perturbed passes, free and forced, differ by from the clean one.

    Attributes:
        effects: by perturbation.
        loss: of the clean passes.
    """

    def __init__(self, perturbations: Sequence[Perturbation]) -> None:
        """Count these perturbations."""
        self.effects = {perturbation: FullEffect() for perturbation in perturbations}
        self.loss = SequenceSums()
        self._losses: dict[Pass, Tensor] = {}

    def on_pass_done(self, run: Pass, outcome: Outcome) -> None:
        """Count a pass."""
        assert outcome.logits is not None
        if run.reference is None:
            if outcome.ids.shape[1] > 1:
                self._losses[run] = next_token_losses(outcome.logits, outcome.ids)
                self.loss.add(self._losses[run])
            return
        assert run.condition.perturbation is not None
        effect, clean = self.effects[run.condition.perturbation], run.reference
        if run.condition.choice == "forced":
            effect.floor.add(outcome.divergence(clean))
            return
        effect.add(outcome, clean)
        if run.reference in self._losses:
            losses = next_token_losses(outcome.logits, outcome.ids)
            effect.loss.add(losses - self._losses[run.reference])

    def join(self, ranks: Ranks) -> None:
        """Put together what the processes counted."""
        every = list(self.effects.values())
        ranks.join_sums([self.loss, *(sums for effect in every for sums in effect.sums)])
        lost = {str(n): torch.cat(effect.shares) for n, effect in enumerate(every) if effect.shares}
        for number, shares in ranks.join_rows(lost).items():
            every[int(number)].shares[:] = [shares]


def serving_effect(precision: str, effect: FullEffect, layers: Sequence[LayerTrace]) -> Serving:
    """Assemble what was counted of the model in a precision.

    Args:
        precision: a name in `SERVED`.
        effect: what was counted.
        layers: some routing of each layer.
    """
    counts = [int(count) for part in effect.kl.counts for count in part]
    return Serving(
        precision=precision,
        changed=effect.any_layer.mean(),
        kl=effect.kl.mean(),
        replayed=effect.floor.mean(),
        loss=effect.loss.mean(),
        tokens=sum(counts),
        sequences=len(counts),
        layers=len(effect.flips),
        replay_bytes=sum(replay_bytes(layer, weights=False) for layer in layers),
        routers=router_state(layers),
        equal_layers=equal_layers(layers),
        exact_ties=exact_ties(layers),
    )


def audit_phase(name: str, batches: Mapping[int, Ids], conditions: Sequence[Condition]) -> Phase:
    """Plan clean passes, and under each condition a free and a forced one."""
    passes = [Pass(number) for number in batches]
    passes += [
        Pass(number, chosen, Pass(number))
        for condition in conditions
        for number in batches
        for chosen in (condition, condition.taking("forced"))
    ]
    return Phase(name, batches, tuple(passes), compares_routes=True, may_drop=True)


def compared_phase(name: str, batches: Mapping[int, Ids], conditions: Sequence[Condition]) -> Phase:
    """Plan clean passes, and under each condition one that is compared with them."""
    passes = [Pass(number) for number in batches]
    passes += [Pass(n, condition, Pass(n)) for condition in conditions for n in batches]
    return Phase(name, batches, tuple(passes))


class Divergences(Observer):
    """The KL of passes to their reference, by condition.

    Attributes:
        kl: sums by condition.
    """

    def __init__(self, conditions: Sequence[Condition]) -> None:
        """Count passes under these conditions."""
        self.kl = {condition: SequenceSums() for condition in conditions}

    def on_pass_done(self, run: Pass, outcome: Outcome) -> None:
        """Count a pass."""
        if run.reference is not None and outcome.logits is not None:
            self.kl[run.condition].add(outcome.divergence(run.reference))

    def join(self, ranks: Ranks) -> None:
        """Put together what the processes counted."""
        ranks.join_sums(list(self.kl.values()))
