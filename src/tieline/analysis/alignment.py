"""Align the tokens, layers and experts of two runs.

Engines number things differently: tokens and layers shifted by one, experts permuted, dense layers
counted or not, rows of -1 for unrouted tokens, another k. `align` estimates these differences and
records them. Runs that cannot be aligned raise an error that names the mismatch and its location.

Layers: the number of a layer is the part of its name that distinguishes it, 3 in
`model.layers.3.mlp.gate`, `layers.3` or a table's `3`. Layers are paired by equal names where one
side has some of the other's, by equal numbers, by numbers one apart, or by order if one program
counts dense layers and the other does not.

Tokens: by document and position, B shifted by -1, 0 or 1.

Experts: by number, or by the permutation estimated from the choices (`expert_permutation`).

`best_hypothesis` evaluates every shift and pairing on a sample of tokens, by the agreement of the
chosen experts beyond chance after renumbering. The simplest hypothesis is kept unless another at
least halves the disagreement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.analysis.diff_records import Alignment, LayerPair
from tieline.analysis.expert_permutation import (
    ExpertPermutation,
    estimate_expert_permutation,
    have_equal_scores,
)
from tieline.core.errors import TraceError, require
from tieline.core.setting_fields import TraceSettingError
from tieline.core.text import layer_label, layer_numbers
from tieline.trace.record import LayerTrace, LazyLayers, RoutingTrace, check_layer, take_tokens
from tieline.trace.selection import select_layers, select_tokens

SHIFTS = (0, 1, -1)
"""Shifts of tokens, and of layers by their numbers, that are tried, simplest first."""


class LayerPairing(NamedTuple):
    """A pairing of the layers of A and B.

    Attributes:
        shift: number in B minus number in A, or index if names have no number; None if layers with
            numbers are paired by order.
        pairs: indices in A and B.
    """

    shift: int | None
    pairs: tuple[tuple[int, int], ...]


def candidate_layer_pairings(names_a: Sequence[str], names_b: Sequence[str]) -> list[LayerPairing]:
    """All distinct pairings of the layers, simplest first."""
    numbers_a, numbers_b = layer_numbers(names_a), layer_numbers(names_b)
    count_a, count_b = len(names_a), len(names_b)
    candidates: list[LayerPairing] = []
    if set(names_b) < set(names_a) or set(names_a) < set(names_b):
        pairs = [(i, list(names_b).index(x)) for i, x in enumerate(names_a) if x in names_b]
        candidates.append(LayerPairing(0, tuple(pairs)))
    if numbers_a is not None and numbers_b is not None:
        indices = {number: index for index, number in enumerate(numbers_b)}
        for shift in SHIFTS:
            pairs = [
                (i, indices[n + shift]) for i, n in enumerate(numbers_a) if n + shift in indices
            ]
            candidates.append(LayerPairing(shift, tuple(pairs)))
        candidates.append(LayerPairing(None, tuple((i, i) for i in range(min(count_a, count_b)))))
    else:
        for shift in SHIFTS:
            pairs = [(i, i + shift) for i in range(count_a) if 0 <= i + shift < count_b]
            candidates.append(LayerPairing(shift, tuple(pairs)))
    distinct = {pairing.pairs: pairing for pairing in reversed(candidates) if pairing.pairs}
    return [pairing for pairing in candidates if distinct.get(pairing.pairs) is pairing]


MOST_DENSE_LAYERS = 4
"""Most layers that a model begins with before its first routed one."""


class RoutedTrace(NamedTuple):
    """A trace in which every token is routed in every layer, and the tokens and layers removed."""

    trace: RoutingTrace
    tokens_left_out: int
    layers_left_out: tuple[str, ...]


class CheckedSide(NamedTuple):
    """A routed trace without impossible values, and its unranked tokens by index of the layer."""

    routed: RoutedTrace
    unranked: dict[int, int]


class CommonTokens(NamedTuple):
    """Indices in A and in B of the common tokens, ordered by document and position."""

    in_a: Int[Tensor, " tokens"]
    in_b: Int[Tensor, " tokens"]


class TokenIdCheck(NamedTuple):
    """Tokens with ids on both sides, how many ids differ, and the index of the first difference."""

    checked: int
    different: int
    first: int | None

    @property
    def all_agree(self) -> bool:
        """Whether there are ids on both sides, and none differs."""
        return self.checked > 0 and self.different == 0


def drop_unrouted(trace: RoutingTrace, side: str) -> RoutedTrace:
    """Drop dense layers and unrouted tokens; the counts include those an importer dropped."""
    require(trace.n_tokens > 0, f"{side}: the trace has no tokens", TraceError)
    provenance = trace.provenance
    count, names = provenance.get("tokens_left_out"), provenance.get("layers_left_out")
    tokens = count if isinstance(count, int) else 0
    layers = tuple(map(str, names)) if isinstance(names, list) else ()
    if isinstance(trace.layers, LazyLayers):  # readers of files reject -1
        return RoutedTrace(trace, tokens, layers)
    routed = [_routed_mask(layer, side) for layer in trace.layers]
    dense = [index for index, rows in enumerate(routed) if not rows.any()]
    routed_layers = [index for index in range(len(routed)) if index not in dense]
    require(bool(routed_layers), f"{side}: no token was routed in any layer", TraceError)
    routed_in_all = torch.stack([routed[index] for index in routed_layers]).all(0)
    require(bool(routed_in_all.any()), f"{side}: no token was routed in all layers", TraceError)
    layers += tuple(trace.layers[index].name for index in dense)
    trace = select_layers(trace, routed_layers) if dense else trace
    missing = int((~routed_in_all).sum())
    return RoutedTrace(
        select_tokens(trace, routed_in_all) if missing else trace, tokens + missing, layers
    )


def _routed_mask(layer: LayerTrace, side: str) -> Tensor:
    """Mask of tokens with experts; raises if a row has both experts and -1."""
    unrouted = layer.experts[:, : layer.facts.k] == -1
    partial = unrouted.any(1) & ~unrouted.all(1)
    if bool(partial.any()):
        raise TraceError(
            f"{side}, {layer_label(layer.name)}: {int(partial.sum())} tokens have some experts -1 "
            f"and others not, the first at index {int(partial.float().argmax())}"
        )
    return ~unrouted.all(1)


def common_tokens(a: RoutingTrace, b: RoutingTrace, shift: int) -> CommonTokens:
    """Match tokens of the same document whose position in B is that in A plus `shift`.

    Raises if a (document, position) occurs twice in a trace.
    """
    documents = [trace.documents.long().numpy() for trace in (a, b)]
    positions = [a.positions.long().numpy(), b.positions.long().numpy() - shift]
    codes = np.unique(np.concatenate(documents), return_inverse=True)[1]
    low = min((int(x.min()) for x in positions if len(x)), default=0)
    span = max((int(x.max()) for x in positions if len(x)), default=0) - low + 1
    keys = codes * span + np.concatenate(positions) - low
    split = len(documents[0])
    if np.array_equal(keys[:split], keys[split:]) and (np.diff(keys[:split]) > 0).all():
        return CommonTokens(torch.arange(split, device="cpu"), torch.arange(split, device="cpu"))
    for side, trace, side_keys in (("A", a, keys[:split]), ("B", b, keys[split:])):
        _require_unique_tokens(side, trace, side_keys)
    matched = np.intersect1d(keys[:split], keys[split:], assume_unique=True, return_indices=True)
    return CommonTokens(torch.from_numpy(matched[1]), torch.from_numpy(matched[2]))


def _require_unique_tokens(side: str, trace: RoutingTrace, keys: np.ndarray) -> None:
    """Raise if a (document, position) occurs twice in a trace."""
    order = np.argsort(keys, kind="stable")
    repeats = np.flatnonzero(np.diff(keys[order]) == 0)
    if len(repeats):
        row = int(order[repeats[0]])
        raise TraceError(
            f"{side}: {len(repeats)} tokens occur twice, the first is position "
            f"{int(trace.positions[row])} of document {int(trace.documents[row])}"
        )


def compare_token_ids(a: RoutingTrace, b: RoutingTrace, common: CommonTokens) -> TokenIdCheck:
    """Compare the token ids of common tokens where both sides have them."""
    ids_a, ids_b = a.tokens[common.in_a].long(), b.tokens[common.in_b].long()
    both_known = (ids_a >= 0) & (ids_b >= 0)
    different = both_known & (ids_a != ids_b)
    first_different = int(different.float().argmax()) if bool(different.any()) else None
    return TokenIdCheck(int(both_known.sum()), int(different.sum()), first_different)


SAMPLED_TOKENS = 4096
"""Tokens on which hypotheses are evaluated."""
CLEAR_AGREEMENT = 0.75
"""Agreement beyond chance above which no other hypothesis is tried."""


class AlignmentHypothesis(NamedTuple):
    """One alignment and the agreement of the choices beyond chance: 1 for identical choices."""

    shift: int
    pairing: LayerPairing
    agreement: float


class SampledChoices(NamedTuple):
    """(Chosen experts, number of experts) of every layer at the sampled tokens of one shift."""

    in_a: list[tuple[np.ndarray, int]]
    in_b: list[tuple[np.ndarray, int]]


def sample_choices(
    a: RoutingTrace, b: RoutingTrace, common: dict[int, CommonTokens]
) -> dict[int, SampledChoices]:
    """Choices of both sides at sampled tokens, by shift; every layer is read once."""
    samples = {}
    for shift, (in_a, in_b) in common.items():
        step = np.linspace(0, len(in_a) - 1, min(len(in_a), SAMPLED_TOKENS)).round().astype(int)
        samples[shift] = in_a[np.unique(step)], in_b[np.unique(step)]
    sampled = {shift: SampledChoices([], []) for shift in common}
    for side, trace in enumerate((a, b)):
        for layer in trace.layers:
            for shift, tokens in samples.items():
                sampled[shift][side].append(_choices_at_tokens(layer, tokens[side]))
    return sampled


def best_hypothesis(
    sampled: dict[int, SampledChoices], candidates: Sequence[LayerPairing], base_shift: int
) -> AlignmentHypothesis:
    """The simplest hypothesis, unless another at least halves its disagreement.

    Args:
        sampled: choices by shift of the tokens.
        candidates: pairings of layers, simplest first.
        base_shift: the shift at which the token ids agree, 0 if they are unknown.
    """
    plain = _evaluate_hypothesis(sampled[base_shift], base_shift, candidates[0])
    if plain.agreement >= CLEAR_AGREEMENT:
        return plain
    rivals = [
        _evaluate_hypothesis(choices, shift, pairing)
        for shift, choices in sorted(sampled.items(), key=lambda item: abs(item[0] - base_shift))
        for pairing in candidates
        if (shift, pairing) != (base_shift, candidates[0]) and len(choices.in_a[0][0])
    ]
    best = max(rivals, key=lambda rival: rival.agreement, default=plain)
    return best if 1 - best.agreement < 0.5 * (1 - plain.agreement) else plain


def _evaluate_hypothesis(
    choices: SampledChoices, shift: int, pairing: LayerPairing
) -> AlignmentHypothesis:
    """The hypothesis with its mean agreement beyond chance over pairs of layers."""
    sides = [(*choices.in_a[i], *choices.in_b[j]) for i, j in pairing.pairs]
    agreements = [
        estimate_expert_permutation(a, b, max(e_a, e_b)).beyond_chance for a, e_a, b, e_b in sides
    ]
    defined = [agreement for agreement in agreements if agreement is not None]
    return AlignmentHypothesis(shift, pairing, float(np.mean(defined)) if defined else 1.0)


def _choices_at_tokens(layer: LayerTrace, tokens: Tensor) -> tuple[np.ndarray, int]:
    """Chosen experts (tokens, k) of a layer and its number of experts."""
    facts = layer.facts
    return layer.experts[tokens, : facts.k].long().numpy(), facts.n_experts


RELATED_AGREEMENT = 0.1
"""Agreement beyond chance below which runs without known token ids count as unrelated."""


def compared_expert_count(
    a: RoutingTrace, b: RoutingTrace, pair: tuple[int, int], partial: bool
) -> int:
    """Number of experts of a pair of layers; raises if it differs, or k differs without `partial`.

    A number of experts inferred from the largest id may be too small.
    """
    first, second = a.layers[pair[0]], b.layers[pair[1]]
    counts = first.facts.n_experts, second.facts.n_experts
    labels = f"{layer_label(first.name)} of A", f"{layer_label(second.name)} of B"
    for count, trace, label in zip(counts, (a, b), labels, strict=True):
        inferred = str(trace.provenance.get("n_experts", "")).startswith("inferred")
        require(
            count == max(counts) or inferred,
            f"number of experts differs: {count} in {label}, {max(counts)} in the other",
            TraceError,
        )
    k_a, k_b = first.facts.k, second.facts.k
    if not partial and k_a != k_b:
        raise TraceSettingError(
            "different k: {in_a} chooses {k_a} experts, {in_b} {k_b}; {partial} compares the first "
            "{least} of both",
            in_a=labels[0],
            in_b=labels[1],
            k_a=k_a,
            k_b=k_b,
            least=min(k_a, k_b),
        )
    return max(counts)


def token_id_shift(
    a: RoutingTrace,
    b: RoutingTrace,
    common: Mapping[int, CommonTokens],
    ids: Mapping[int, TokenIdCheck],
) -> int:
    """Shift at which the token ids agree, 0 if unknown; raises if the tokens differ."""
    require(
        any(len(tokens.in_a) for tokens in common.values()),
        f"A and B have no token in common: {_token_ranges('A', a)}; {_token_ranges('B', b)}",
        TraceError,
    )
    if all(check.checked == 0 for check in ids.values()):
        return 0 if len(common[0].in_a) else next(s for s, x in common.items() if len(x.in_a))
    agreeing = [s for s, check in ids.items() if check.all_agree]
    if agreeing:
        return agreeing[0]
    check, tokens = ids[0], common[0]
    rows = tokens.in_a[check.first or 0], tokens.in_b[check.first or 0]
    raise TraceError(
        f"different tokenisations: {check.different} of {check.checked} token ids differ, the "
        f"first at document {int(a.documents[rows[0]])}, position {int(a.positions[rows[0]])}: "
        f"{int(a.tokens[rows[0]])} in A, {int(b.tokens[rows[1]])} in B"
    )


def require_paired_layers(a: RoutingTrace, b: RoutingTrace, pairing: LayerPairing) -> None:
    """Raise if most layers have no partner."""
    fewest = min(len(a.layers), len(b.layers))
    ends = [dict.fromkeys((run.layers[0].name, run.layers[-1].name)) for run in (a, b)]
    require(
        2 * len(pairing.pairs) >= fewest,
        f"only {len(pairing.pairs)} layers of A ({' … '.join(ends[0])}) and B "
        f"({' … '.join(ends[1])}) match",
        TraceError,
    )


def require_common_tokens(
    a: RoutingTrace, b: RoutingTrace, common: CommonTokens, unrouted: tuple[int, int], partial: bool
) -> None:
    """Raise if a side lacks more tokens than one per document plus those it did not route."""
    documents = len(a.documents[common.in_a].unique())
    in_each = [len(trace.documents.unique()) for trace in (a, b)]
    is_cut_otherwise = a.n_tokens == b.n_tokens and in_each[0] != in_each[1]
    counts = "{} documents in A, {} in B;".format(*in_each)
    cause = counts if is_cut_otherwise else "truncated?"
    for side, other_side, trace, spared in (("A", "B", a, unrouted[1]), ("B", "A", b, unrouted[0])):
        common_rows = common.in_a if trace is a else common.in_b
        lacking = trace.n_tokens - len(common_rows)
        if partial or lacking <= documents + spared:
            continue
        has_partner = torch.zeros(trace.n_tokens, dtype=torch.bool, device="cpu")
        has_partner[common_rows] = True
        first = int((~has_partner).float().argmax())
        raise TraceSettingError(
            f"{other_side} lacks {lacking} of the {trace.n_tokens} tokens of {side}, the first at "
            f"document {int(trace.documents[first])}, position {int(trace.positions[first])}: "
            f"{cause} {{partial}} compares what both have"
        )


def require_related_runs(
    pairs: Sequence[LayerPair], beyond_chance: Sequence[float | None], verified: bool
) -> None:
    """Raise if runs agree no more than unrelated ones, unless token ids verify the tokens."""
    agreements = [agreement for agreement in beyond_chance if agreement is not None]
    if verified or not agreements or sum(agreements) / len(agreements) >= RELATED_AGREEMENT:
        return
    pair = pairs[next(i for i, agreement in enumerate(beyond_chance) if agreement is not None)]
    raise TraceError(
        "A and B cannot be aligned: no shift of tokens or layers and no renumbering of experts "
        f"makes their choices agree. In A {layer_label(pair.name_a)} and in B "
        f"{layer_label(pair.name_b)} share {100 * pair.agreement:.1f} % of the chosen experts, "
        f"unrelated runs would share {100 * pair.chance:.1f} %"
    )


def _token_ranges(side: str, trace: RoutingTrace) -> str:
    """Ranges of documents and positions of one side, as a phrase."""
    if trace.n_tokens == 0:
        return f"{side} is empty"
    columns = (("documents", trace.documents), ("positions", trace.positions))
    ranges = [f"{name} {int(x.min())} to {int(x.max())}" for name, x in columns]
    return f"{side} has {', '.join(ranges)}"


class AlignedRuns(NamedTuple):
    """Two aligned traces.

    Attributes:
        a: trace of A without unrouted tokens and dense layers.
        b: trace of B without unrouted tokens and dense layers.
        common: the common tokens.
        pairing: the paired layers.
        numbers_in_a: for each pair, the number in A of each expert of B.
        alignment: record of the alignment.
        unranked: for each pair, number of tokens of A and of B that chose an expert with a lower
            score than one left out.
    """

    a: RoutingTrace
    b: RoutingTrace
    common: CommonTokens
    pairing: LayerPairing
    numbers_in_a: list[np.ndarray]
    alignment: Alignment
    unranked: list[tuple[int, int]]

    @property
    def layers_before(self) -> int:
        """Number of routed layers before the first compared one, as far as a side tells it.

        A side may have recorded them; where neither has, a high number in the name says that there
        are some.
        """
        i, j = self.pairing.pairs[0]
        name = self.a.layers[i].name
        number = (layer_numbers([name]) or [0])[0]
        return max(i, j) or max(number - MOST_DENSE_LAYERS, 0)

    def layer_pair(self, index: int) -> tuple[LayerTrace, LayerTrace]:
        """The layers of a pair, with common tokens, experts numbered as in A, and the same k."""
        i, j = self.pairing.pairs[index]
        pair = self.alignment.pairs[index]
        first = _compared_layer(self.a.layers[i], self.common.in_a, pair)
        second = _compared_layer(self.b.layers[j], self.common.in_b, pair)
        if not pair.moved_experts:
            return first, second
        numbers = torch.from_numpy(self.numbers_in_a[index])
        bias = None if second.bias is None else second.bias[torch.argsort(numbers)]
        return first, replace(second, experts=numbers[second.experts], bias=bias)


def checked_side(trace: RoutingTrace, side: str) -> CheckedSide:
    """Side "A" or "B" of an alignment; raises on impossible values."""
    routed = drop_unrouted(trace, side)
    return CheckedSide(routed, _unranked_tokens_by_layer(routed.trace, side))


def align(a: RoutingTrace | CheckedSide, b: RoutingTrace, *, partial: bool = False) -> AlignedRuns:
    """Align B with A: shift of tokens, pairing of layers and numbering of experts.

    Args:
        a: the reference run, whose names and numbers the result uses; checked if it was before.
        b: the other run.
        partial: compare the common tokens and the smaller k instead of raising if they differ.
    """
    side_a, unranked_a = a if isinstance(a, CheckedSide) else checked_side(a, "A")
    side_b, unranked_b = checked_side(b, "B")
    a, b = side_a.trace, side_b.trace
    common = {0: common_tokens(a, b, 0)}
    ids = {0: compare_token_ids(a, b, common[0])}
    if not ids[0].all_agree:
        common = {shift: common_tokens(a, b, shift) for shift in SHIFTS}
        ids = {shift: compare_token_ids(a, b, tokens) for shift, tokens in common.items()}
    base = token_id_shift(a, b, common, ids)
    candidates = candidate_layer_pairings([x.name for x in a.layers], [x.name for x in b.layers])
    best = best_hypothesis(sample_choices(a, b, {base: common[base]}), candidates[:1], base)
    if best.agreement < CLEAR_AGREEMENT:
        common |= {shift: common_tokens(a, b, shift) for shift in SHIFTS if shift not in common}
        common = {shift: tokens for shift, tokens in common.items() if len(tokens.in_a)}
        best = best_hypothesis(sample_choices(a, b, common), candidates, base)
    verified = ids[base].checked > 0
    tokens = common[best.shift]
    require_paired_layers(a, b, best.pairing)
    require_common_tokens(a, b, tokens, (side_a.tokens_left_out, side_b.tokens_left_out), partial)
    matches, records = [], []
    for pair in best.pairing.pairs:  # pair by pair, so that each layer of a file is read once
        experts = compared_expert_count(a, b, pair, partial)
        match, record = _match_experts(a.layers[pair[0]], b.layers[pair[1]], tokens, experts)
        matches.append(match)
        records.append(record)
    pairs = tuple(records)
    require_related_runs(pairs, [match.beyond_chance for match in matches], verified)
    alignment = _alignment_record((side_a, side_b), tokens, best.shift, best.pairing, pairs)
    against_ids = verified and best.shift != base
    alignment = replace(alignment, ids_checked=ids[base].checked, against_ids=against_ids)
    numbers = [np.argsort(match.to_b) for match in matches]
    unranked = [(unranked_a.get(i, 0), unranked_b.get(j, 0)) for i, j in best.pairing.pairs]
    return AlignedRuns(a, b, tokens, best.pairing, numbers, alignment, unranked)


def _compared_layer(layer: LayerTrace, tokens: torch.Tensor, pair: LayerPair) -> LayerTrace:
    """The layer with the compared tokens, its scores, and the first k experts and weights."""
    facts = replace(layer.facts, k=pair.k, n_experts=pair.n_experts)
    weights = None if layer.weights is None else layer.weights[:, : pair.k]
    more = {} if pair.k < layer.facts.k else {"faded": layer.faded, "used": layer.used}
    experts = layer.experts.long()
    bias = layer.bias if layer.bias is None or len(layer.bias) == pair.n_experts else None
    columns = (experts, layer.scores, weights, layer.group_gap)
    slim_layer = LayerTrace(layer.name, facts, *columns, bias=bias, **more)
    all_tokens = torch.arange(len(experts), device="cpu")
    return slim_layer if torch.equal(tokens, all_tokens) else take_tokens(slim_layer, tokens)


def _unranked_tokens_by_layer(trace: RoutingTrace, side: str) -> dict[int, int]:
    """Number of tokens that chose a lower score than one left out, by index of the layer.

    Raises on impossible values. Layers of a file were checked when they were read.
    """
    if isinstance(trace.layers, LazyLayers):
        return {}
    counts = {}
    for index, layer in enumerate(trace.layers):
        count = _count_unranked_tokens(layer)
        if count:
            counts[index] = count
            layer = replace(layer, scores=None)
        check_layer(replace(layer, name=f"{side}: {layer.name}"))
    return counts


def _count_unranked_tokens(layer: LayerTrace) -> int:
    """Number of tokens that chose an expert with a lower score than one left out."""
    k = layer.facts.k
    if layer.scores is None or layer.scores.shape[1] == k or not layer.scores.isfinite().any():
        return 0
    return int((layer.scores[:, :k].amin(1) < layer.scores[:, k:].amax(1)).sum())


def _match_experts(
    first: LayerTrace, second: LayerTrace, common: CommonTokens, experts: int
) -> tuple[ExpertPermutation, LayerPair]:
    """Estimated permutation of the experts of two paired layers, and the record of the pair."""
    chosen_a, _ = _choices_at_tokens(first, common.in_a)
    chosen_b, _ = _choices_at_tokens(second, common.in_b)
    scored = first if first.has_gaps else second  # tied experts keep their numbers on both sides
    match = estimate_expert_permutation(
        chosen_a, chosen_b, experts, lambda i, j: have_equal_scores(scored, i, j)
    )
    moved = np.flatnonzero(match.to_b != np.arange(len(match.to_b)))
    record = LayerPair(
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
    return match, record


def _alignment_record(
    sides: tuple[RoutedTrace, RoutedTrace],
    common: CommonTokens,
    shift: int,
    pairing: LayerPairing,
    pairs: tuple[LayerPair, ...],
) -> Alignment:
    """Record of the alignment, with the tokens and layers left out on each side."""
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
        unrouted_a=sides[0].tokens_left_out,
        unrouted_b=sides[1].tokens_left_out,
        dense_a=sides[0].layers_left_out,
        dense_b=sides[1].layers_left_out,
        ids_checked=0,
        smoothed=tuple(
            side for side, trace in (("A", a), ("B", b)) if any(x.smoothed for x in trace.layers)
        ),
    )
