r"""Full-forward runs: the perturbation acts in every layer, and what it does adds up over depth.

    flips       share of tokens whose experts differ from those of the clean run, by layer
    moved       Σ_{e ∈ S \ S'} w_e / Σ_{e ∈ S} w_e: clean weight of the experts that a token lost
    loss        -log P(next token)
    KL          Σ_v P(v) log(P(v) / P'(v)), P of the clean run, P' of the perturbed one

The floor of the KL is that of a run in which tokens that would flip get the experts and weights of
the clean run: what remains would remain if no token ever flipped.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.audit.precision.clusters import SequenceSums
from tieline.audit.precision.local import routed_set
from tieline.audit.precision.perturbations import Perturbation, applied
from tieline.audit.running import forward
from tieline.errors import UnsupportedModelError, require
from tieline.hf.outputs import RouterOutput
from tieline.hf.override import Choice, override_choice

__all__ = ["FullEffect", "FullRuns", "divergence", "model_logits", "next_losses"]

CHUNK = 1 << 22
"""Probabilities that are compared at once."""


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


class FullRuns:
    """Runs one batch under perturbations beside its clean run."""

    def __init__(
        self,
        model: nn.Module,
        routers: dict[str, nn.Module],
        ids: Int[Tensor, "rows length"],
        clean: dict[str, Choice],
        logits: Float[Tensor, "rows length words"],
    ) -> None:
        """Compare with the choices and logits of the clean run of these tokens."""
        self._model, self._routers, self._ids = model, routers, ids
        self._clean, self._logits = clean, logits
        self._loss = next_losses(logits, ids)

    def add(self, effect: FullEffect, perturbation: Perturbation, source: torch.Generator) -> None:
        """Run the batch perturbed, and perturbed with clean routes; count what differs."""
        state = source.get_state()
        logits, seen = self.run(perturbation, source, forced=False)
        shape, lost = tuple(self._ids.shape), []
        for name, share in seen.items():
            changed = (share >= 0).view(shape)
            effect.flips.setdefault(name, SequenceSums()).add(changed.double())
            lost.append(share.clamp(min=0))
        flipped = torch.stack([share >= 0 for share in seen.values()]).any(dim=0)
        moved = torch.stack(lost)
        effect.any_layer.add(flipped.double().view(shape))
        effect.moved.add(moved.mean(dim=0).view(shape))
        effect.shares.append(moved.flatten().float())
        effect.kl.add(divergence(self._logits, logits))
        if self._ids.shape[1] > 1:
            effect.loss.add(next_losses(logits, self._ids) - self._loss)
        floor, _ = self.run(perturbation, source.set_state(state), forced=True)
        effect.floor.add(divergence(self._logits, floor))

    def kept(
        self,
        sums: SequenceSums,
        perturbation: Perturbation,
        source: torch.Generator,
        keep: Collection[str],
    ) -> None:
        """The KL of a run in which some routers are kept as they are."""
        with applied(self._model, perturbation, source, keep):
            logits = model_logits(forward(self._model, self._ids), self._ids)
        sums.add(divergence(self._logits, logits))

    def run(
        self, perturbation: Perturbation, source: torch.Generator, forced: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits, and the weight that each token lost in each layer (-1 where it lost nothing).

        Args:
            perturbation: what to do.
            source: where noise comes from.
            forced: whether tokens whose experts change get the choice of the clean run.
        """
        seen: dict[str, Tensor] = {}
        with applied(self._model, perturbation, source), ExitStack() as stack:
            for name, router in self._routers.items():
                rule = partial(_rule, self._clean[name], seen, name, forced)
                stack.enter_context(override_choice(router, rule))
            logits = model_logits(forward(self._model, self._ids), self._ids)
        return logits, seen


def _rule(
    clean: Choice, seen: dict[str, Tensor], name: str, forced: bool, found: RouterOutput
) -> Choice:
    """Tell what the router found; where forced, give tokens that flip their clean experts."""
    before = routed_set(RouterOutput(found.logits, clean.weights, clean.ids))
    after = routed_set(found)
    flipped = (before != after).any(dim=1)
    lost = ~after.gather(1, clean.ids)
    size = clean.weights.double().sum(dim=1).clamp(min=1e-30)
    share = (clean.weights.double() * lost).sum(dim=1) / size
    seen[name] = torch.where(flipped, share, -1.0).cpu()
    if not forced:
        return Choice(found.weights, found.ids)
    return Choice(
        torch.where(flipped[:, None], clean.weights, found.weights),
        torch.where(flipped[:, None], clean.ids, found.ids),
    )


def model_logits(output: object, ids: Int[Tensor, "rows length"]) -> Tensor:
    """The logits (rows, length, words) of a model's output; refuses a model without them."""
    logits = getattr(output, "logits", None)
    require(
        isinstance(logits, Tensor) and logits.shape[:2] == ids.shape,
        "the model gives no logits for its tokens, so damage to its predictions has no measure",
        UnsupportedModelError,
    )
    assert isinstance(logits, Tensor)
    return logits


def next_losses(
    logits: Float[Tensor, "rows length words"], ids: Int[Tensor, "rows length"]
) -> Float[Tensor, "rows predicted"]:
    """Loss of each token that is predicted, all but the first, in float64 on the CPU."""
    words, targets = logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(logits.device)
    losses = torch.nn.functional.cross_entropy(words.float(), targets, reduction="none")
    return losses.double().view(len(ids), -1).cpu()


def divergence(
    clean: Float[Tensor, "rows length words"], other: Float[Tensor, "rows length words"]
) -> Float[Tensor, "rows length"]:
    """KL(clean ‖ other) of each token's prediction in nats, in float64: it may be 1e-12."""
    shape, words = clean.shape[:2], clean.shape[2]
    rows = max(1, CHUNK // words)
    pairs = zip(clean.flatten(0, 1).split(rows), other.flatten(0, 1).split(rows), strict=True)
    parts = []
    for before, after in pairs:
        p, q = before.double().log_softmax(dim=-1), after.double().log_softmax(dim=-1)
        parts.append((p.exp() * (p - q)).sum(dim=-1).clamp(min=0).cpu())
    return torch.cat(parts).view(shape)
