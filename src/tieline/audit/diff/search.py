"""The alignment that the choices themselves speak for.

Every shift of tokens by -1, 0 or 1 and every pairing of layers is a hypothesis. It is judged by how
far the chosen experts agree beyond chance once experts are renumbered (`permutation`), on a sample
of tokens. The plainest one stands unless another at least halves the disagreement.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tieline.audit.diff.pairings import Pairing
from tieline.audit.diff.permutation import match_experts
from tieline.audit.diff.places import Places
from tieline.trace.record import LayerTrace, RoutingTrace

__all__ = ["Hypothesis", "Sampled", "sample_choices", "search"]

SAMPLE = 4096
"""Tokens on which hypotheses are judged."""
CLEAR = 0.75
"""Agreement beyond chance from which the plainest hypothesis needs no rivals."""


class Hypothesis(NamedTuple):
    """One alignment and how well the choices agree under it, beyond chance: 1 for the same."""

    shift: int
    pairing: Pairing
    agreement: float


class Sampled(NamedTuple):
    """Chosen experts, and their number, of every layer at the sampled tokens of one shift."""

    in_a: list[tuple[np.ndarray, int]]
    in_b: list[tuple[np.ndarray, int]]


def sample_choices(
    a: RoutingTrace, b: RoutingTrace, places: dict[int, Places]
) -> dict[int, Sampled]:
    """For each shift, the choices of both sides; every layer is read once."""
    picked = {shift: _spread(found) for shift, found in places.items()}
    sampled = {shift: Sampled([], []) for shift in places}
    for layer in a.layers:
        for shift, found in picked.items():
            sampled[shift].in_a.append(_chosen(layer, found.in_a))
    for layer in b.layers:
        for shift, found in picked.items():
            sampled[shift].in_b.append(_chosen(layer, found.in_b))
    return sampled


def search(sampled: dict[int, Sampled], ways: Sequence[Pairing], base_shift: int) -> Hypothesis:
    """The hypothesis that stands.

    Args:
        sampled: choices by shift of the tokens.
        ways: pairings of layers, the plainest first.
        base_shift: the shift that the token ids speak for, 0 if they are unknown.
    """
    plain = _judge(sampled[base_shift], base_shift, ways[0])
    if plain.agreement >= CLEAR:
        return plain
    rivals = [
        _judge(choices, shift, way)
        for shift, choices in sorted(sampled.items(), key=lambda item: abs(item[0] - base_shift))
        for way in ways
        if (shift, way) != (base_shift, ways[0]) and len(choices.in_a[0][0])
    ]
    best = max(rivals, key=lambda rival: rival.agreement, default=plain)
    return best if 1 - best.agreement < 0.5 * (1 - plain.agreement) else plain


def _judge(choices: Sampled, shift: int, way: Pairing) -> Hypothesis:
    """Mean agreement beyond chance over the pairs that can tell."""
    sides = [(*choices.in_a[i], *choices.in_b[j]) for i, j in way.pairs]
    found = [match_experts(a, b, max(e_a, e_b)).beyond_chance for a, e_a, b, e_b in sides]
    known = [agreement for agreement in found if agreement is not None]
    return Hypothesis(shift, way, float(np.mean(known)) if known else 1.0)


def _spread(places: Places) -> Places:
    """At most `SAMPLE` of the tokens, evenly spread."""
    count = len(places.in_a)
    step = np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).round().astype(int))
    return Places(places.in_a[step], places.in_b[step])


def _chosen(layer: LayerTrace, places: Tensor) -> tuple[np.ndarray, int]:
    facts = layer.facts
    return layer.experts[places, : facts.k].long().numpy(), facts.n_experts
