"""Laying one run on another: by document and position, layer by layer, expert by expert.

Looked for and reported: tokens and layers numbered one apart, experts numbered otherwise, dense
layers that one side counts, rows of -1, other k. What cannot be laid on each other is refused, with
what does not match and where.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from tieline.audit.diff.notes import alignment_notes
from tieline.audit.diff.pairings import Pairing, pairings
from tieline.audit.diff.permutation import Matching, match_experts
from tieline.audit.diff.places import Places, Routed, common_places, equal_ids, routed_part
from tieline.audit.diff.records import Alignment, LayerPair
from tieline.audit.diff.refusals import (
    check_ids,
    check_layers,
    check_related,
    check_sizes,
    check_tokens,
)
from tieline.audit.diff.search import sample_choices, search
from tieline.trace.checks import check_layer
from tieline.trace.lazy import LazyLayers
from tieline.trace.ops import take_tokens
from tieline.trace.record import LayerTrace, RoutingTrace

__all__ = ["Aligned", "align"]

SHIFTS = (0, 1, -1)


class Aligned(NamedTuple):
    """Two traces laid on each other.

    Attributes:
        a: trace of A without what was not routed.
        b: trace of B, likewise.
        places: the tokens they share.
        pairing: the layers they share.
        numbers: for each pair, the number in A of each expert of B.
        alignment: the account of it.
    """

    a: RoutingTrace
    b: RoutingTrace
    places: Places
    pairing: Pairing
    numbers: list[np.ndarray]
    alignment: Alignment

    def pair(self, index: int) -> tuple[LayerTrace, LayerTrace]:
        """The layers of a pair: the same tokens, experts numbered as in A, the same k."""
        i, j = self.pairing.pairs[index]
        about = self.alignment.pairs[index]
        first = _cut(self.a.layers[i], self.places.in_a, about)
        second = _cut(self.b.layers[j], self.places.in_b, about)
        numbers = torch.from_numpy(self.numbers[index])
        return first, replace(second, experts=numbers[second.experts.long()])


def align(a: RoutingTrace, b: RoutingTrace, *, partial: bool = False) -> Aligned:
    """Lay B on A.

    Args:
        a: the run that is compared with; names and numbers of the result are its own.
        b: the other run.
        partial: compare what both have where one has fewer tokens or a smaller k, instead of
            refusing.
    """
    side_a, side_b = routed_part(a, "A"), routed_part(b, "B")
    a, b = side_a.trace, side_b.trace
    _check_values(a, "A")
    _check_values(b, "B")
    places = {shift: common_places(a, b, shift) for shift in SHIFTS}
    ids = {shift: equal_ids(a, b, found) for shift, found in places.items()}
    base = check_ids(a, b, places, ids)
    places = {shift: found for shift, found in places.items() if len(found.in_a)}
    ways = pairings([x.name for x in a.layers], [x.name for x in b.layers])
    best = search(sample_choices(a, b, places), ways, base)
    verified = ids[base].known > 0
    found = places[best.shift]
    check_layers(a, b, best.pairing)
    check_tokens(a, b, found, (side_a.tokens, side_b.tokens), partial)
    sizes = [check_sizes(a, b, pair, partial) for pair in best.pairing.pairs]
    matches = [
        _match(a, b, found, pair, experts)
        for pair, experts in zip(best.pairing.pairs, sizes, strict=True)
    ]
    pairs = tuple(
        _pair_record(a, b, p, m) for p, m in zip(best.pairing.pairs, matches, strict=True)
    )
    check_related(pairs, [match.beyond_chance for match in matches], verified)
    account = _account((side_a, side_b), found, best.shift, best.pairing, pairs)
    account = replace(account, ids_checked=ids[base].known)
    notes = alignment_notes(account, against_ids=verified and best.shift != base)
    numbers = [np.argsort(match.to_b) for match in matches]
    return Aligned(a, b, found, best.pairing, numbers, replace(account, notes=notes))


def _cut(layer: LayerTrace, places: torch.Tensor, about: LayerPair) -> LayerTrace:
    """What is compared of a layer: some tokens, the first k experts, scores, weights."""
    facts = replace(layer.facts, k=about.k, n_experts=about.n_experts)
    weights = None if layer.weights is None else layer.weights[:, : about.k]
    experts = layer.experts.long()
    lean = LayerTrace(layer.name, facts, experts, layer.scores, weights, layer.group_gap)
    return take_tokens(lean, places)


def _check_values(trace: RoutingTrace, side: str) -> None:
    """Refuse impossible values; what is read from a file was checked when it was read."""
    if not isinstance(trace.layers, LazyLayers):
        for layer in trace.layers:
            check_layer(replace(layer, name=f"{side}: {layer.name}"))


def _match(
    a: RoutingTrace, b: RoutingTrace, found: Places, pair: tuple[int, int], experts: int
) -> Matching:
    first, second = a.layers[pair[0]], b.layers[pair[1]]
    chosen_a = first.experts[found.in_a, : first.facts.k].long().numpy()
    chosen_b = second.experts[found.in_b, : second.facts.k].long().numpy()
    return match_experts(chosen_a, chosen_b, experts)


def _pair_record(
    a: RoutingTrace, b: RoutingTrace, pair: tuple[int, int], match: Matching
) -> LayerPair:
    first, second = a.layers[pair[0]], b.layers[pair[1]]
    moved = np.flatnonzero(match.to_b != np.arange(len(match.to_b)))
    return LayerPair(
        first.name,
        second.name,
        len(match.to_b),
        first.facts.k,
        second.facts.k,
        match.agreement,
        match.chance,
        tuple(moved.tolist()),
        tuple(match.to_b[moved].tolist()),
        match.unseen,
    )


def _account(
    sides: tuple[Routed, Routed],
    found: Places,
    shift: int,
    pairing: Pairing,
    pairs: tuple[LayerPair, ...],
) -> Alignment:
    a, b = (side.trace for side in sides)
    paired_a, paired_b = {i for i, _ in pairing.pairs}, {j for _, j in pairing.pairs}
    return Alignment(
        tokens=len(found.in_a),
        documents=len(a.documents[found.in_a].unique()),
        token_shift=shift,
        layer_shift=pairing.shift,
        pairs=pairs,
        only_a=tuple(x.name for i, x in enumerate(a.layers) if i not in paired_a),
        only_b=tuple(x.name for j, x in enumerate(b.layers) if j not in paired_b),
        tokens_only_a=a.n_tokens - len(found.in_a),
        tokens_only_b=b.n_tokens - len(found.in_b),
        unrouted_a=sides[0].tokens,
        unrouted_b=sides[1].tokens,
        dense_a=sides[0].layers,
        dense_b=sides[1].layers,
        ids_checked=0,
    )
