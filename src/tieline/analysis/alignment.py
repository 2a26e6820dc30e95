"""Aligning two runs: by document and position, layer by layer, expert by expert.

Engines number things differently: tokens and layers one apart, experts permuted, dense layers
counted or not, rows of -1, another k. `align` finds such differences and records them;
what cannot be aligned raises an error that names what does not match and where.

align              the two traces on each other
check_*            refusals
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from tieline.analysis.correspondences import (
    CommonTokens,
    ExpertPermutation,
    IdCheck,
    Pairing,
    RoutedSide,
    common_tokens,
    equal_ids,
    match_experts,
    pairings,
    routed_side,
    sample_choices,
    search,
)
from tieline.analysis.diff_records import Alignment, LayerPair
from tieline.core.errors import TraceError, require
from tieline.trace.check import check_layer
from tieline.trace.record import LayerTrace, LazyLayers, RoutingTrace, take_tokens

RELATED = 0.1
"""Agreement beyond chance below which runs without known token ids count as unrelated."""


def check_sizes(a: RoutingTrace, b: RoutingTrace, pair: tuple[int, int], partial: bool) -> int:
    """Return the number of experts; raises if the counts differ, or k differs without `partial`.

    A number of experts that was inferred from the largest id may be too small.
    """
    first, second = a.layers[pair[0]], b.layers[pair[1]]
    counts = first.facts.n_experts, second.facts.n_experts
    where = f"layer {first.name!r} of A", f"layer {second.name!r} of B"
    for count, trace, here in zip(counts, (a, b), where, strict=True):
        inferred = str(trace.provenance.get("n_experts", "")).startswith("inferred")
        require(
            count == max(counts) or inferred,
            f"number of experts differs: {count} in {here}, {max(counts)} in the other",
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
    a: RoutingTrace, b: RoutingTrace, common: Mapping[int, CommonTokens], ids: Mapping[int, IdCheck]
) -> int:
    """Return the shift at which the token ids agree, 0 if unknown; raises on other tokens."""
    require(any(len(tokens.in_a) for tokens in common.values()), _apart(a, b), TraceError)
    if all(check.checked == 0 for check in ids.values()):
        return 0 if len(common[0].in_a) else next(s for s, x in common.items() if len(x.in_a))
    agreeing = [s for s, check in ids.items() if check.checked > 0 and check.different == 0]
    if agreeing:
        return agreeing[0]
    check, tokens = ids[0], common[0]
    at = tokens.in_a[check.first or 0], tokens.in_b[check.first or 0]
    raise TraceError(
        f"different tokenisations: {check.different} of {check.checked} token ids differ, the "
        f"first at document {int(a.documents[at[0]])}, position {int(a.positions[at[0]])}: "
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
    a: RoutingTrace, b: RoutingTrace, common: CommonTokens, unrouted: tuple[int, int], partial: bool
) -> None:
    """Refuse if one side lacks more tokens than one per document and those it did not route."""
    documents = len(a.documents[common.in_a].unique())
    for here, there, trace, missed in (("A", "B", a, unrouted[1]), ("B", "A", b, unrouted[0])):
        kept = common.in_a if trace is a else common.in_b
        lacking = trace.n_tokens - len(kept)
        if partial or lacking <= documents + missed:
            continue
        held = torch.zeros(trace.n_tokens, dtype=torch.bool)
        held[kept] = True
        first = int((~held).float().argmax())
        raise TraceError(
            f"{there} lacks {lacking} of the {trace.n_tokens} tokens of {here}, the first at "
            f"document {int(trace.documents[first])}, position {int(trace.positions[first])}: "
            "truncated? partial (--partial) compares what both have"
        )


def check_related(
    pairs: Sequence[LayerPair], beyond: Sequence[float | None], verified: bool
) -> None:
    """Refuse runs that agree no more than unrelated ones, unless token ids prove the tokens."""
    agreements = [agreement for agreement in beyond if agreement is not None]
    if verified or not agreements or sum(agreements) / len(agreements) >= RELATED:
        return
    pair = pairs[next(i for i, agreement in enumerate(beyond) if agreement is not None)]
    raise TraceError(
        "A and B cannot be aligned: no shift of tokens or layers and no renumbering of experts "
        f"makes their choices agree. Layers {pair.name_a!r} and {pair.name_b!r} share "
        f"{100 * pair.agreement:.1f} % of the chosen experts, unrelated runs would share "
        f"{100 * pair.chance:.1f} %"
    )


def _apart(a: RoutingTrace, b: RoutingTrace) -> str:
    return f"A and B have no token in common: {_extent('A', a)}; {_extent('B', b)}"


def _extent(side: str, trace: RoutingTrace) -> str:
    if trace.n_tokens == 0:
        return f"{side} is empty"
    columns = (("documents", trace.documents), ("positions", trace.positions))
    ranges = [f"{name} {int(x.min())} to {int(x.max())}" for name, x in columns]
    return f"{side} has {', '.join(ranges)}"


def _names(trace: RoutingTrace) -> str:
    names = [layer.name for layer in trace.layers]
    return f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0]


SHIFTS = (0, 1, -1)


class Aligned(NamedTuple):
    """Two aligned traces.

    Attributes:
        a: trace of A without what was not routed.
        b: trace of B, likewise.
        common: the tokens they share.
        pairing: the layers they share.
        numbers: for each pair, the number in A of each expert of B.
        alignment: how they were aligned.
        unranked: for each pair, tokens of A and of B whose choice is not that of their scores.
    """

    a: RoutingTrace
    b: RoutingTrace
    common: CommonTokens
    pairing: Pairing
    numbers: list[np.ndarray]
    alignment: Alignment
    unranked: list[tuple[int, int]]

    def pair(self, index: int) -> tuple[LayerTrace, LayerTrace]:
        """The layers of a pair: the same tokens, experts numbered as in A, the same k."""
        i, j = self.pairing.pairs[index]
        about = self.alignment.pairs[index]
        first = _cut(self.a.layers[i], self.common.in_a, about)
        second = _cut(self.b.layers[j], self.common.in_b, about)
        numbers = torch.from_numpy(self.numbers[index])
        bias = None if second.bias is None else second.bias[torch.argsort(numbers)]
        return first, replace(second, experts=numbers[second.experts], bias=bias)


def align(a: RoutingTrace, b: RoutingTrace, *, partial: bool = False) -> Aligned:
    """Align B with A: shift of tokens, pairing of layers and numbering of experts.

    Args:
        a: the run that is compared with; names and numbers of the result are its own.
        b: the other run.
        partial: compare what both have where one has fewer tokens or a smaller k, instead of
            refusing.
    """
    side_a, side_b = routed_side(a, "A"), routed_side(b, "B")
    a, b = side_a.trace, side_b.trace
    broken_a, broken_b = _check_values(a, "A"), _check_values(b, "B")
    common = {shift: common_tokens(a, b, shift) for shift in SHIFTS}
    ids = {shift: equal_ids(a, b, tokens) for shift, tokens in common.items()}
    base = check_ids(a, b, common, ids)
    common = {shift: tokens for shift, tokens in common.items() if len(tokens.in_a)}
    candidates = pairings([x.name for x in a.layers], [x.name for x in b.layers])
    best = search(sample_choices(a, b, common), candidates, base)
    verified = ids[base].checked > 0
    tokens = common[best.shift]
    check_layers(a, b, best.pairing)
    check_tokens(a, b, tokens, (side_a.tokens, side_b.tokens), partial)
    matches, records = [], []
    for pair in best.pairing.pairs:  # one pair after the other: a file is read once for all three
        matches.append(_match(a, b, tokens, pair, check_sizes(a, b, pair, partial)))
        records.append(_pair_record(a, b, pair, matches[-1]))
    pairs = tuple(records)
    check_related(pairs, [match.beyond_chance for match in matches], verified)
    account = _account((side_a, side_b), tokens, best.shift, best.pairing, pairs)
    denied = verified and best.shift != base
    account = replace(account, ids_checked=ids[base].checked, against_ids=denied)
    numbers = [np.argsort(match.to_b) for match in matches]
    unranked = [(broken_a.get(i, 0), broken_b.get(j, 0)) for i, j in best.pairing.pairs]
    return Aligned(a, b, tokens, best.pairing, numbers, account, unranked)


def _cut(layer: LayerTrace, tokens: torch.Tensor, about: LayerPair) -> LayerTrace:
    """Select the compared tokens, the first k experts, scores and weights of a layer."""
    facts = replace(layer.facts, k=about.k, n_experts=about.n_experts)
    weights = None if layer.weights is None else layer.weights[:, : about.k]
    more = {} if about.k < layer.facts.k else {"faded": layer.faded, "used": layer.used}
    experts = layer.experts.long()
    bias = layer.bias if layer.bias is None or len(layer.bias) == about.n_experts else None
    kept = (experts, layer.scores, weights, layer.group_gap)
    lean = LayerTrace(layer.name, facts, *kept, bias=bias, **more)
    return take_tokens(lean, tokens)


def _check_values(trace: RoutingTrace, side: str) -> dict[int, int]:
    """Refuse impossible values; what is read from a file was checked when it was read.

    Returns the layers in which tokens chose an expert of a lower score than one left out, with the
    number of these tokens.
    """
    if isinstance(trace.layers, LazyLayers):
        return {}
    broken = {}
    for index, layer in enumerate(trace.layers):
        count = _unranked(layer)
        if count:
            broken[index] = count
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
    a: RoutingTrace, b: RoutingTrace, common: CommonTokens, pair: tuple[int, int], experts: int
) -> ExpertPermutation:
    first, second = a.layers[pair[0]], b.layers[pair[1]]
    chosen_a = first.experts[common.in_a, : first.facts.k].long().numpy()
    chosen_b = second.experts[common.in_b, : second.facts.k].long().numpy()
    return match_experts(chosen_a, chosen_b, experts)


def _pair_record(
    a: RoutingTrace, b: RoutingTrace, pair: tuple[int, int], match: ExpertPermutation
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
    sides: tuple[RoutedSide, RoutedSide],
    common: CommonTokens,
    shift: int,
    pairing: Pairing,
    pairs: tuple[LayerPair, ...],
) -> Alignment:
    a, b = (side.trace for side in sides)
    paired_a, paired_b = {i for i, _ in pairing.pairs}, {j for _, j in pairing.pairs}
    return Alignment(
        tokens=len(common.in_a),
        documents=len(a.documents[common.in_a].unique()),
        token_shift=shift,
        layer_shift=pairing.shift,
        pairs=pairs,
        only_a=tuple(a.layers[i].name for i in range(len(a.layers)) if i not in paired_a),
        only_b=tuple(b.layers[j].name for j in range(len(b.layers)) if j not in paired_b),
        tokens_only_a=a.n_tokens - len(common.in_a),
        tokens_only_b=b.n_tokens - len(common.in_b),
        unrouted_a=sides[0].tokens,
        unrouted_b=sides[1].tokens,
        dense_a=sides[0].layers,
        dense_b=sides[1].layers,
        ids_checked=0,
        smoothed=tuple(
            side for side, run in (("A", a), ("B", b)) if any(x.smoothed for x in run.layers)
        ),
    )
