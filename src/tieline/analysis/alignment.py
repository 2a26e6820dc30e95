"""Aligning two runs: by document and position, layer by layer, expert by expert.

Engines number things differently: tokens and layers one apart, experts permuted, dense layers
counted or not, rows of -1, another k. `align` finds such differences and reports them as notes;
what cannot be aligned raises an error that names what does not match and where.

align              the two traces on each other
alignment_notes    what two runs of one program would not show, in words
check_*            refusals
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from tieline.analysis.correspondences import (
    IdCheck,
    Matching,
    Pairing,
    Places,
    Routed,
    common_places,
    equal_ids,
    match_experts,
    pairings,
    routed_part,
    sample_choices,
    search,
)
from tieline.analysis.diff_records import Alignment, LayerPair
from tieline.core.errors import TraceError, require
from tieline.trace.check import check_layer
from tieline.trace.record import LayerTrace, LazyLayers, RoutingTrace, take_tokens


def alignment_notes(found: Alignment, against_ids: bool) -> tuple[str, ...]:
    """Return everything that two runs of one program would not show, most severe first.

    Args:
        found: the alignment.
        against_ids: whether the token ids agree at another shift than the choices.
    """
    return tuple(
        note
        for note in (
            _token_shift(found, against_ids),
            _layer_shift(found),
            _experts(found),
            _k(found),
            _layers(found),
            _tokens(found),
            _unrouted(found),
        )
        if note
    )


def _token_shift(found: Alignment, against_ids: bool) -> str:
    if found.token_shift == 0:
        return "tokens are not shifted, although their ids are" if against_ids else ""
    where = "after" if found.token_shift > 0 else "before"
    strange = ", although the token ids agree otherwise" if against_ids else ""
    return (
        f"tokens are shifted: what A has at position p, B has one position {where} it "
        f"({found.token_shift:+d}){strange}"
    )


def _layer_shift(found: Alignment) -> str:
    if found.layer_shift is None:
        return "layers are paired by order: their numbers do not match"
    if found.layer_shift == 0:
        return ""
    return f"layers are shifted: layer l of A is layer l{found.layer_shift:+d} of B"


def _experts(found: Alignment) -> str:
    moved = found.permuted
    if not moved:
        return ""
    first = moved[0]
    pairs = list(zip(first.moved_experts, first.moved_to, strict=True))
    shown = ", ".join(f"{i} → {j}" for i, j in pairs[:4]) + (", …" if len(pairs) > 4 else "")
    return (
        f"experts are numbered differently in {len(moved)} of {len(found.pairs)} layers "
        f"(A → B in {first.name_a!r}: {shown})"
    )


def _k(found: Alignment) -> str:
    different = [pair for pair in found.pairs if pair.k_a != pair.k_b]
    if not different:
        return ""
    first = different[0]
    return (
        f"different k in {len(different)} layers: A chooses {first.k_a} experts, B {first.k_b}; "
        f"the first {first.k} of both are compared"
    )


def _layers(found: Alignment) -> str:
    only = _sides("{} layers are in {side} only ({})", found.only_a, found.only_b)
    dense = _sides("{} layers of {side} route nothing: dense ({})", found.dense_a, found.dense_b)
    return "; ".join([*only, *dense])


def _sides(words: str, names_a: Sequence[str], names_b: Sequence[str]) -> list[str]:
    """Format `words` for each side that has names, with their number and the first three."""
    return [
        words.format(
            len(names), ", ".join(names[:3]) + (", …" if len(names) > 3 else ""), side=side
        )
        for side, names in (("A", names_a), ("B", names_b))
        if names
    ]


def _tokens(found: Alignment) -> str:
    return _counts("{} tokens are in {} only", found.tokens_only_a, found.tokens_only_b)


def _unrouted(found: Alignment) -> str:
    words = "{} tokens of {} were not routed (-1) and are left out"
    return _counts(words, found.unrouted_a, found.unrouted_b)


def _counts(words: str, count_a: int, count_b: int) -> str:
    counts = (("A", count_a), ("B", count_b))
    return "; ".join(words.format(count, side) for side, count in counts if count)


RELATED = 0.1
"""Agreement beyond chance below which runs without known token ids count as unrelated."""


def check_sizes(a: RoutingTrace, b: RoutingTrace, pair: tuple[int, int], partial: bool) -> int:
    """Return the number of experts; raises if the counts differ, or k differs without `partial`.

    A number of experts that was inferred from the largest id may be too small.
    """
    first, second = a.layers[pair[0]], b.layers[pair[1]]
    counts = first.facts.n_experts, second.facts.n_experts
    where = f"layer {first.name!r} of A", f"layer {second.name!r} of B"
    for own, trace, here in zip(counts, (a, b), where, strict=True):
        inferred = str(trace.provenance.get("n_experts", "")).startswith("inferred")
        require(
            own == max(counts) or inferred,
            f"number of experts differs: {own} in {here}, {max(counts)} in the other",
            TraceError,
        )
    k_a, k_b = first.facts.k, second.facts.k
    require(
        partial or k_a == k_b,
        f"different k: {where[0]} chooses {k_a} experts, {where[1]} {k_b}; partial (--partial) "
        f"compares the first {min(k_a, k_b)} of both",
        TraceError,
    )
    return max(counts)


def check_ids(
    a: RoutingTrace, b: RoutingTrace, places: Mapping[int, Places], ids: Mapping[int, IdCheck]
) -> int:
    """Return the shift at which the token ids agree, 0 if unknown; raises on other tokens."""
    require(any(len(found.in_a) for found in places.values()), _apart(a, b), TraceError)
    if all(check.known == 0 for check in ids.values()):
        return 0 if len(places[0].in_a) else next(s for s, x in places.items() if len(x.in_a))
    agreeing = [s for s, check in ids.items() if check.known > 0 and check.different == 0]
    if agreeing:
        return agreeing[0]
    check, found = ids[0], places[0]
    at = found.in_a[check.first or 0], found.in_b[check.first or 0]
    raise TraceError(
        f"different tokenisations: {check.different} of {check.known} token ids differ, the first "
        f"at document {int(a.documents[at[0]])}, position {int(a.positions[at[0]])}: "
        f"{int(a.tokens[at[0]])} in A, {int(b.tokens[at[1]])} in B"
    )


def check_layers(a: RoutingTrace, b: RoutingTrace, pairing: Pairing) -> None:
    """Raise if most layers have no partner."""
    fewest = min(len(a.layers), len(b.layers))
    require(
        2 * len(pairing.pairs) >= fewest,
        f"only {len(pairing.pairs)} layers of A ({_names(a)}) and B ({_names(b)}) match",
        TraceError,
    )


def check_tokens(
    a: RoutingTrace, b: RoutingTrace, found: Places, unrouted: tuple[int, int], partial: bool
) -> None:
    """Refuse if one side lacks more tokens than one per document and those it did not route."""
    documents = len(a.documents[found.in_a].unique())
    for here, there, own, missed in (("A", "B", a, unrouted[1]), ("B", "A", b, unrouted[0])):
        kept = found.in_a if own is a else found.in_b
        lacking = own.n_tokens - len(kept)
        if partial or lacking <= documents + missed:
            continue
        held = torch.zeros(own.n_tokens, dtype=torch.bool)
        held[kept] = True
        first = int((~held).float().argmax())
        raise TraceError(
            f"{there} lacks {lacking} of the {own.n_tokens} tokens of {here}, the first at "
            f"document {int(own.documents[first])}, position {int(own.positions[first])}: "
            "truncated? partial (--partial) compares what both have"
        )


def check_related(
    pairs: Sequence[LayerPair], beyond: Sequence[float | None], verified: bool
) -> None:
    """Refuse runs that agree no more than unrelated ones, unless token ids prove the tokens."""
    known = [agreement for agreement in beyond if agreement is not None]
    if verified or not known or sum(known) / len(known) >= RELATED:
        return
    pair = pairs[next(i for i, agreement in enumerate(beyond) if agreement is not None)]
    raise TraceError(
        "A and B cannot be aligned: no shift of tokens or layers and no renumbering of experts "
        f"makes their choices agree. Layers {pair.name_a!r} and {pair.name_b!r} share "
        f"{100 * pair.agreement:.1f} % of the chosen experts, unrelated runs would share "
        f"{100 * pair.chance:.1f} %"
    )


def _apart(a: RoutingTrace, b: RoutingTrace) -> str:
    return f"A and B have no token in common: {_range('A', a)}; {_range('B', b)}"


def _range(side: str, trace: RoutingTrace) -> str:
    if trace.n_tokens == 0:
        return f"{side} is empty"
    parts = (("documents", trace.documents), ("positions", trace.positions))
    words = [f"{name} {int(x.min())} to {int(x.max())}" for name, x in parts]
    return f"{side} has {', '.join(words)}"


def _names(trace: RoutingTrace) -> str:
    names = [layer.name for layer in trace.layers]
    return f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0]


SHIFTS = (0, 1, -1)


class Aligned(NamedTuple):
    """Two aligned traces.

    Attributes:
        a: trace of A without what was not routed.
        b: trace of B, likewise.
        places: the tokens they share.
        pairing: the layers they share.
        numbers: for each pair, the number in A of each expert of B.
        alignment: how they were aligned.
        unranked: for each pair, tokens of A and of B whose choice is not that of their scores.
    """

    a: RoutingTrace
    b: RoutingTrace
    places: Places
    pairing: Pairing
    numbers: list[np.ndarray]
    alignment: Alignment
    unranked: list[tuple[int, int]]

    def pair(self, index: int) -> tuple[LayerTrace, LayerTrace]:
        """The layers of a pair: the same tokens, experts numbered as in A, the same k."""
        i, j = self.pairing.pairs[index]
        about = self.alignment.pairs[index]
        first = _cut(self.a.layers[i], self.places.in_a, about)
        second = _cut(self.b.layers[j], self.places.in_b, about)
        numbers = torch.from_numpy(self.numbers[index])
        bias = None if second.bias is None else second.bias[torch.argsort(numbers)]
        return first, replace(second, experts=numbers[second.experts], bias=bias)


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
    broken_a, broken_b = _check_values(a, "A"), _check_values(b, "B")
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
    matches, records = [], []
    for pair in best.pairing.pairs:  # one pair after the other: a file is read once for all three
        matches.append(_match(a, b, found, pair, check_sizes(a, b, pair, partial)))
        records.append(_pair_record(a, b, pair, matches[-1]))
    pairs = tuple(records)
    check_related(pairs, [match.beyond_chance for match in matches], verified)
    account = _account((side_a, side_b), found, best.shift, best.pairing, pairs)
    account = replace(account, ids_checked=ids[base].known)
    notes = alignment_notes(account, against_ids=verified and best.shift != base)
    numbers = [np.argsort(match.to_b) for match in matches]
    unranked = [(broken_a.get(i, 0), broken_b.get(j, 0)) for i, j in best.pairing.pairs]
    return Aligned(a, b, found, best.pairing, numbers, replace(account, notes=notes), unranked)


def _cut(layer: LayerTrace, places: torch.Tensor, about: LayerPair) -> LayerTrace:
    """What is compared of a layer: some tokens, the first k experts, scores, weights."""
    facts = replace(layer.facts, k=about.k, n_experts=about.n_experts)
    weights = None if layer.weights is None else layer.weights[:, : about.k]
    more = {} if about.k < layer.facts.k else {"faded": layer.faded, "used": layer.used}
    experts = layer.experts.long()
    bias = layer.bias if layer.bias is None or len(layer.bias) == about.n_experts else None
    kept = (experts, layer.scores, weights, layer.group_gap)
    lean = LayerTrace(layer.name, facts, *kept, bias=bias, **more)
    return take_tokens(lean, places)


def _check_values(trace: RoutingTrace, side: str) -> dict[int, int]:
    """Refuse impossible values; what is read from a file was checked when it was read.

    Returns the layers in which tokens chose an expert of a lower score than one left out, with the
    number of these tokens.
    """
    if isinstance(trace.layers, LazyLayers):
        return {}
    broken = {}
    for place, layer in enumerate(trace.layers):
        count = _unranked(layer)
        if count:
            broken[place] = count
            layer = replace(layer, scores=None)
        check_layer(replace(layer, name=f"{side}: {layer.name}"))
    return broken


def _unranked(layer: LayerTrace) -> int:
    """Tokens that chose an expert whose score is lower than that of one they did not choose."""
    k = layer.facts.k
    if layer.scores is None or layer.scores.shape[1] == k or not layer.scores.isfinite().any():
        return 0
    return int((layer.scores[:, :k].amin(1) < layer.scores[:, k:].amax(1)).sum())


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
        only_a=tuple(a.layers[i].name for i in range(len(a.layers)) if i not in paired_a),
        only_b=tuple(b.layers[j].name for j in range(len(b.layers)) if j not in paired_b),
        tokens_only_a=a.n_tokens - len(found.in_a),
        tokens_only_b=b.n_tokens - len(found.in_b),
        unrouted_a=sides[0].tokens,
        unrouted_b=sides[1].tokens,
        dense_a=sides[0].layers,
        dense_b=sides[1].layers,
        ids_checked=0,
        smoothed=tuple(
            side for side, run in (("A", a), ("B", b)) if any(x.smoothed for x in run.layers)
        ),
    )
