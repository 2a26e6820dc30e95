"""From what was counted to the rows of the audit."""

from collections.abc import Mapping

import torch

from tieline.audit.precision.clusters import SequenceSums
from tieline.audit.precision.full import FullEffect
from tieline.audit.precision.local import LocalEffect
from tieline.audit.precision.perturbations import Perturbation
from tieline.audit.precision.records import LayerEffect, PerturbationEffect
from tieline.numerics import Estimate

__all__ = ["perturbation_effect"]

LEAST_KL = 1e-14
"""Nats below which a KL is the rounding of its own sum."""


def perturbation_effect(
    perturbation: Perturbation, local: Mapping[str, LocalEffect], full: FullEffect
) -> PerturbationEffect:
    """The row of one perturbation.

    Args:
        perturbation: what was done.
        local: what it does to each router by itself, by name.
        full: what it does in a full run.
    """
    layers = tuple(_layer(name, effect, full) for name, effect in local.items())
    flips = SequenceSums().joined(*(effect.flips for effect in local.values())).mean()
    everywhere = SequenceSums().joined(*full.flips.values()).mean()
    kl, floor = full.kl.mean(), full.floor.mean()
    return PerturbationEffect(
        name=perturbation.name,
        kind=perturbation.kind,
        level=perturbation.level,
        part=perturbation.part,
        local=flips,
        local_flips=sum(effect.seen for effect in local.values()),
        predicted=_mean([layer.predicted for layer in layers]),
        predicted_low=_mean([layer.predicted_low for layer in layers]),
        full=everywhere,
        any_layer=full.any_layer.mean(),
        compounding=_ratio(everywhere, flips),
        moved=full.moved.mean(),
        moved_p99=_quantile(torch.cat(full.shares), 0.99) if full.shares else None,
        damage=SequenceSums().joined(*(effect.damage for effect in local.values())).mean(),
        loss=full.loss.mean(),
        kl=kl,
        kl_floor=floor,
        by_flips=_gone(kl, floor),
        layers=layers,
    )


def _layer(name: str, effect: LocalEffect, full: FullEffect) -> LayerEffect:
    tokens = sum(int(count.sum()) for count in effect.flips.counts)
    return LayerEffect(
        name=name,
        local=effect.flips.mean(),
        local_flips=effect.seen,
        repeats=effect.trials / tokens,
        predicted=effect.high.mean().value,
        predicted_low=effect.low.mean().value,
        full=full.flips.get(name, SequenceSums()).mean(),
        damage=effect.damage.mean(),
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _ratio(above: Estimate, below: Estimate) -> float | None:
    if above.value is None or not below.value:
        return None
    return above.value / below.value


def _gone(kl: Estimate, floor: Estimate) -> float | None:
    """1 - floor / KL; None where there is no KL to speak of."""
    if kl.value is None or floor.value is None or kl.value < LEAST_KL:
        return None
    return 1 - floor.value / kl.value


def _quantile(values: torch.Tensor, level: float) -> float:
    place = min(len(values) - 1, int(level * len(values)))
    return values.sort().values[place].item()
