"""Aligning two runs: by document and position, layer by layer, expert by expert.

Engines number things differently: tokens and layers one apart, experts permuted, dense layers
counted or not, rows of -1, another k. `align` estimates such differences and records them; what
cannot be aligned raises an error that names what does not match and where.

Layers: a layer's number is the part of its name that distinguishes it, 3 in
`model.layers.3.mlp.gate`, `layers.3` or a table's `3`. Layers are paired by equal numbers, by
numbers one apart, or by order, where one program counts dense layers and the other does not.

Tokens: by document and position, B shifted by -1, 0 or 1.

Experts: by number, or by the renumbering that `estimate_permutation` finds in the choices.

`best_alignment` judges every shift and pairing on a sample of tokens, by how far the chosen experts
agree beyond chance once experts are renumbered. The plainest hypothesis stands unless another at
least halves the disagreement.

**Renumbered experts.** C[i, j] counts the tokens that choose i in A and j in B. The best
renumbering maximises Σ C[i, π(i)] (an assignment problem). Experts that it moves are accepted only
in whole cycles, and only if every member that is seen often enough really goes there:

    κ(i) = (C[i, π(i)] - n_i m_j / T) / (min(n_i, m_j) - n_i m_j / T) > 1/2,   j = π(i)

with n_i and m_j the tokens that choose i in A and j in B: their overlap beyond what the loads
explain. A few flips therefore never look like a renumbering.

Experts with equal or nearly equal rows of the router are chosen together, or exchanged by any
noise: C[i, j] is as large as C[i, i]. So a cycle must at least halve the disagreement, and experts
that A scores alike or chooses together in most tokens keep their numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tieline.analysis.diff_records import Alignment, LayerPair
from tieline.core.errors import TraceError, require
from tieline.core.setting_fields import TraceSettingError
from tieline.core.text import layer_label
from tieline.trace.record import LayerTrace, LazyLayers, RoutingTrace, check_layer, take_tokens
from tieline.trace.selection import select_layers, select_tokens

SEEN = 5
"""Tokens that must choose an expert on both sides before it counts as evidence."""
NEAR = 0.05
"""Distance of the scores of two experts, over the spread of a token's scores, that is a tie."""
MOST_MATCHED = 2048
"""Most experts for which a renumbering is searched: the table of pairs has their square."""


class ExpertPermutation(NamedTuple):
    """Number in B of each expert of A, and how well the choices agree under it.

    Attributes:
        to_b: π.
        agreement: share of chosen experts in common, of the smaller k.
        chance: the same for independent choices of these loads.
        unseen: moved experts that were too rare to count as evidence.
    """

    to_b: Int[np.ndarray, " experts"]
    agreement: float
    chance: float
    unseen: int

    @property
    def beyond_chance(self) -> float | None:
        """(agreement - chance) / (1 - chance); None where all choices must agree."""
        if self.chance >= 1 - 1e-12:
            return None
        return (self.agreement - self.chance) / (1 - self.chance)


def co_occurrence(
    in_a: Int[np.ndarray, "tokens k_a"], in_b: Int[np.ndarray, "tokens k_b"], experts: int
) -> Int[np.ndarray, "experts experts"]:
    """C: tokens that choose i in A and j in B."""
    pairs = in_a.astype(np.int64)[:, :, None] * experts + in_b.astype(np.int64)[:, None, :]
    return np.bincount(pairs.ravel(), minlength=experts**2).reshape(experts, experts)


def estimate_permutation(
    in_a: Int[np.ndarray, "tokens k_a"],
    in_b: Int[np.ndarray, "tokens k_b"],
    experts: int,
    are_tied: Callable[[int, int], bool] = lambda i, j: False,
) -> ExpertPermutation:
    """Estimate the expert permutation from both runs' choices.

    Args:
        in_a: experts chosen in A.
        in_b: experts chosen in B.
        experts: number of experts, both sides.
        are_tied: whether two experts of A have nearly the same scores.
    """
    loads = [np.bincount(ids.ravel(), minlength=experts) for ids in (in_a, in_b)]
    identity, sizes = np.arange(experts), (len(in_a), min(in_a.shape[1], in_b.shape[1]))
    if experts > MOST_MATCHED:
        common = int((in_a[:, :, None] == in_b[:, None, :]).sum())
        return _permutation_agreement(identity, common, loads, sizes, 0)
    table = co_occurrence(in_a, in_b, experts)
    bonus = table * (experts + 1) + np.eye(experts, dtype=np.int64)  # of equals, the identity
    best = linear_sum_assignment(bonus, maximize=True)[1]
    together = co_occurrence(in_a, in_a, experts)

    def tied_or_joined(i: int, j: int) -> bool:
        """Whether A scores two experts alike, or chooses them together."""
        joined = _is_moved_together(i, j, together, loads[:1] * 2, len(in_a))
        return bool(joined) or are_tied(i, j)

    best = _without_ties(best, table, loads, tied_or_joined)
    to_b, unseen = _supported_cycles(best, table, loads, len(in_a))
    return _permutation_agreement(to_b, int(table[identity, to_b].sum()), loads, sizes, unseen)


def _permutation_agreement(
    to_b: np.ndarray, common: int, loads: list[np.ndarray], sizes: tuple[int, int], unseen: int
) -> ExpertPermutation:
    """Agreement and chance of a matching; `sizes` are tokens and experts per token."""
    tokens, k = max(sizes[0], 1), sizes[1]
    chance = float(loads[0] @ loads[1][to_b]) / (tokens * tokens * k)
    return ExpertPermutation(to_b, common / (tokens * k), min(chance, 1.0), unseen)


def _without_ties(
    best: np.ndarray,
    table: np.ndarray,
    loads: list[np.ndarray],
    are_tied: Callable[[int, int], bool],
) -> np.ndarray:
    """The assignment without cycles of tied experts, which any noise exchanges."""
    to_b = best.copy()
    for cycle in _permutation_cycles(best):
        same_number, new_number = table[cycle, cycle].sum(), table[cycle, best[cycle]].sum()
        chosen = min(load[cycle].sum() for load in loads)
        halved = chosen - new_number < 0.5 * (chosen - same_number)
        if not halved or all(are_tied(i, int(best[i])) for i in cycle):
            to_b[cycle] = cycle
    return to_b


def _supported_cycles(
    best: np.ndarray, table: np.ndarray, loads: list[np.ndarray], tokens: int
) -> tuple[np.ndarray, int]:
    """Keep the cycles of `best` that all evidence supports; also count experts without evidence."""
    to_b, unseen = np.arange(len(best)), 0
    for cycle in _permutation_cycles(best):
        witness = [_is_moved_together(i, int(best[i]), table, loads, tokens) for i in cycle]
        supported = [agrees for agrees in witness if agrees is not None]
        if supported and all(supported):
            to_b[cycle] = best[cycle]
            unseen += len(cycle) - len(supported)
    return to_b, unseen


def _is_moved_together(
    i: int, j: int, table: np.ndarray, loads: list[np.ndarray], tokens: int
) -> bool | None:
    """Whether κ > 1/2; None if the expert is too rare on one side."""
    n, m, common = int(loads[0][i]), int(loads[1][j]), int(table[i, j])
    if min(n, m) < SEEN:
        return None
    chance, most = n * m / tokens, min(n, m)
    return common - chance > 0.5 * (most - chance) or common == n == m


def _permutation_cycles(permutation: np.ndarray) -> list[list[int]]:
    """Cycles of more than one element."""
    remaining, cycles = set(np.flatnonzero(permutation != np.arange(len(permutation))).tolist()), []
    while remaining:
        cycle, element = [], min(remaining)
        while element in remaining:
            remaining.discard(element)
            cycle.append(element)
            element = int(permutation[element])
        cycles.append(cycle)
    return cycles


def have_equal_scores(layer: LayerTrace, i: int, j: int) -> bool:
    """Whether two experts have nearly equal scores in most tokens that kept both."""
    if layer.scores is None:
        return False
    of_i, of_j = (layer.experts == i), (layer.experts == j)
    rows = of_i.any(1) & of_j.any(1)
    if int(rows.sum()) < SEEN:
        return False
    scores = layer.scores[rows].double().nan_to_num(neginf=0.0)
    distances = ((scores * of_i[rows]).sum(1) - (scores * of_j[rows]).sum(1)).abs()
    return bool(distances.median() <= NEAR * scores.std(1).median())


class Pairing(NamedTuple):
    """A pairing of the layers of A and B.

    Attributes:
        shift: number in B minus number in A, or place where names have no number; None if layers
            with numbers are paired by order.
        pairs: places in A and B.
    """

    shift: int | None
    pairs: tuple[tuple[int, int], ...]


def layer_pairings(names_a: Sequence[str], names_b: Sequence[str]) -> list[Pairing]:
    """Return all distinct pairings of the layers, the simplest first."""
    of_a, of_b = numbers_in_layer_names(names_a), numbers_in_layer_names(names_b)
    count_a, count_b = len(names_a), len(names_b)
    candidates: list[Pairing] = []
    if of_a is not None and of_b is not None:
        indices = {number: index for index, number in enumerate(of_b)}
        for shift in (0, 1, -1):
            pairs = [(i, indices[n + shift]) for i, n in enumerate(of_a) if n + shift in indices]
            candidates.append(Pairing(shift, tuple(pairs)))
        candidates.append(Pairing(None, tuple((i, i) for i in range(min(count_a, count_b)))))
    else:
        for shift in (0, 1, -1):
            pairs = [(i, i + shift) for i in range(count_a) if 0 <= i + shift < count_b]
            candidates.append(Pairing(shift, tuple(pairs)))
    distinct = {pairing.pairs: pairing for pairing in reversed(candidates) if pairing.pairs}
    return [pairing for pairing in candidates if distinct.get(pairing.pairs) is pairing]


def numbers_in_layer_names(names: Sequence[str]) -> list[int] | None:
    """The number of each layer; None if the names do not give different ones."""
    names_split = [name.split(".") for name in names]
    for depth in range(min(map(len, names_split), default=0)):
        column = [segments[depth] for segments in names_split]
        if all(word.isascii() and word.isdecimal() and len(word) < 10 for word in column):
            numbers = [int(word) for word in column]
            if len(set(numbers)) == len(numbers):
                return numbers
    return None


class RoutedTrace(NamedTuple):
    """A trace in which every token is routed in every layer, with counts of what was left out."""

    trace: RoutingTrace
    tokens: int
    layers: tuple[str, ...]


class CommonTokens(NamedTuple):
    """Indices in A and in B of the common tokens, ordered by document and position."""

    in_a: Int[Tensor, " tokens"]
    in_b: Int[Tensor, " tokens"]


class IdCheck(NamedTuple):
    """Tokens whose ids are known on both sides, and the index of the first difference."""

    checked: int
    different: int
    first: int | None


def routed_side(trace: RoutingTrace, side: str) -> RoutedTrace:
    """Drop dense layers and unrouted tokens, and count those that an importer dropped before."""
    provenance = trace.provenance
    count, names = provenance.get("tokens_left_out"), provenance.get("layers_left_out")
    tokens = count if isinstance(count, int) else 0
    layers = tuple(map(str, names)) if isinstance(names, list) else ()
    if isinstance(trace.layers, LazyLayers):  # a file holds no -1: it is refused when it is read
        return RoutedTrace(trace, tokens, layers)
    routed = [_routed_rows(layer, side) for layer in trace.layers]
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


def _routed_rows(layer: LayerTrace, side: str) -> Tensor:
    """Which tokens have experts; raises if a row has some experts and some -1."""
    unrouted = layer.experts[:, : layer.facts.k] == -1
    partial = unrouted.any(1) & ~unrouted.all(1)
    require(
        not bool(partial.any()),
        f"{side}, {layer_label(layer.name)}: {int(partial.sum())} tokens have some experts -1 and "
        f"others not, the first at index {int(partial.float().argmax())}",
        TraceError,
    )
    return ~unrouted.all(1)


def common_tokens(a: RoutingTrace, b: RoutingTrace, shift: int) -> CommonTokens:
    """Return where tokens have the same document and a position in B `shift` later than in A.

    Raises if a trace has a (document, position) twice.
    """
    documents = [trace.documents.long().numpy() for trace in (a, b)]
    positions = [a.positions.long().numpy(), b.positions.long().numpy() - shift]
    codes = np.unique(np.concatenate(documents), return_inverse=True)[1]
    low = min((int(x.min()) for x in positions if len(x)), default=0)
    span = max((int(x.max()) for x in positions if len(x)), default=0) - low + 1
    keys = codes * span + np.concatenate(positions) - low
    split = len(documents[0])
    for side, trace, side_keys in (("A", a, keys[:split]), ("B", b, keys[split:])):
        _require_unique_tokens(side, trace, side_keys)
    matched = np.intersect1d(keys[:split], keys[split:], assume_unique=True, return_indices=True)
    return CommonTokens(torch.from_numpy(matched[1]), torch.from_numpy(matched[2]))


def _require_unique_tokens(side: str, trace: RoutingTrace, keys: np.ndarray) -> None:
    """Raise if a document and position occur twice on one side."""
    order = np.argsort(keys, kind="stable")
    repeats = np.flatnonzero(np.diff(keys[order]) == 0)
    if len(repeats):
        row = int(order[repeats[0]])
        raise TraceError(
            f"{side}: {len(repeats)} tokens occur twice, the first is position "
            f"{int(trace.positions[row])} of document {int(trace.documents[row])}"
        )


def equal_ids(a: RoutingTrace, b: RoutingTrace, common: CommonTokens) -> IdCheck:
    """Count the common tokens with known ids, and those whose ids differ."""
    of_a, of_b = a.tokens[common.in_a].long(), b.tokens[common.in_b].long()
    both_known = (of_a >= 0) & (of_b >= 0)
    different = both_known & (of_a != of_b)
    first = int(different.float().argmax()) if bool(different.any()) else None
    return IdCheck(int(both_known.sum()), int(different.sum()), first)


SAMPLE = 4096
"""Tokens on which hypotheses are judged."""
CLEAR = 0.75
"""Agreement beyond chance from which no other hypothesis is tried."""


class AlignmentHypothesis(NamedTuple):
    """One alignment and how well the choices agree under it, beyond chance: 1 for the same."""

    shift: int
    pairing: Pairing
    agreement: float


class SampledChoices(NamedTuple):
    """Chosen experts, and their number, of every layer at the sampled tokens of one shift."""

    in_a: list[tuple[np.ndarray, int]]
    in_b: list[tuple[np.ndarray, int]]


def sample_choices(
    a: RoutingTrace, b: RoutingTrace, common: dict[int, CommonTokens]
) -> dict[int, SampledChoices]:
    """For each shift, the choices of both sides; every layer is read once."""
    samples = {}
    for shift, (in_a, in_b) in common.items():
        step = np.linspace(0, len(in_a) - 1, min(len(in_a), SAMPLE)).round().astype(int)
        samples[shift] = in_a[np.unique(step)], in_b[np.unique(step)]
    sampled = {shift: SampledChoices([], []) for shift in common}
    for side, trace in enumerate((a, b)):
        for layer in trace.layers:
            for shift, tokens in samples.items():
                sampled[shift][side].append(_choices_at_tokens(layer, tokens[side]))
    return sampled


def best_alignment(
    sampled: dict[int, SampledChoices], candidates: Sequence[Pairing], base_shift: int
) -> AlignmentHypothesis:
    """Choose the best hypothesis.

    Args:
        sampled: choices by shift of the tokens.
        candidates: pairings of layers, the plainest first.
        base_shift: the shift at which the token ids agree, 0 if they are unknown.
    """
    plain = _judge_hypothesis(sampled[base_shift], base_shift, candidates[0])
    if plain.agreement >= CLEAR:
        return plain
    rivals = [
        _judge_hypothesis(choices, shift, pairing)
        for shift, choices in sorted(sampled.items(), key=lambda item: abs(item[0] - base_shift))
        for pairing in candidates
        if (shift, pairing) != (base_shift, candidates[0]) and len(choices.in_a[0][0])
    ]
    best = max(rivals, key=lambda rival: rival.agreement, default=plain)
    return best if 1 - best.agreement < 0.5 * (1 - plain.agreement) else plain


def _judge_hypothesis(choices: SampledChoices, shift: int, pairing: Pairing) -> AlignmentHypothesis:
    """Mean agreement beyond chance over the pairs where it is defined."""
    sides = [(*choices.in_a[i], *choices.in_b[j]) for i, j in pairing.pairs]
    agreements = [
        estimate_permutation(a, b, max(e_a, e_b)).beyond_chance for a, e_a, b, e_b in sides
    ]
    defined = [agreement for agreement in agreements if agreement is not None]
    return AlignmentHypothesis(shift, pairing, float(np.mean(defined)) if defined else 1.0)


def _choices_at_tokens(layer: LayerTrace, tokens: Tensor) -> tuple[np.ndarray, int]:
    """Chosen experts (tokens, k) of a layer, and its number of experts."""
    facts = layer.facts
    return layer.experts[tokens, : facts.k].long().numpy(), facts.n_experts


RELATED = 0.1
"""Agreement beyond chance below which runs without known token ids count as unrelated."""


def require_equal_sizes(
    a: RoutingTrace, b: RoutingTrace, pair: tuple[int, int], partial: bool
) -> int:
    """Return the number of experts; raises if the counts differ, or k differs without `partial`.

    A number of experts that was inferred from the largest id may be too small.
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
    a: RoutingTrace, b: RoutingTrace, common: Mapping[int, CommonTokens], ids: Mapping[int, IdCheck]
) -> int:
    """Return the shift at which the token ids agree, 0 if unknown; raises on other tokens."""
    require(
        any(len(tokens.in_a) for tokens in common.values()),
        f"A and B have no token in common: {_token_extent('A', a)}; {_token_extent('B', b)}",
        TraceError,
    )
    if all(check.checked == 0 for check in ids.values()):
        return 0 if len(common[0].in_a) else next(s for s, x in common.items() if len(x.in_a))
    agreeing = [s for s, check in ids.items() if check.checked > 0 and check.different == 0]
    if agreeing:
        return agreeing[0]
    check, tokens = ids[0], common[0]
    rows = tokens.in_a[check.first or 0], tokens.in_b[check.first or 0]
    raise TraceError(
        f"different tokenisations: {check.different} of {check.checked} token ids differ, the "
        f"first at document {int(a.documents[rows[0]])}, position {int(a.positions[rows[0]])}: "
        f"{int(a.tokens[rows[0]])} in A, {int(b.tokens[rows[1]])} in B"
    )


def require_paired_layers(a: RoutingTrace, b: RoutingTrace, pairing: Pairing) -> None:
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
    """Refuse if one side lacks more tokens than one per document and those it did not route."""
    documents = len(a.documents[common.in_a].unique())
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
            "truncated? {partial} compares what both have"
        )


def require_related_runs(
    pairs: Sequence[LayerPair], beyond_chance: Sequence[float | None], verified: bool
) -> None:
    """Refuse runs that agree no more than unrelated ones, unless token ids prove the tokens."""
    agreements = [agreement for agreement in beyond_chance if agreement is not None]
    if verified or not agreements or sum(agreements) / len(agreements) >= RELATED:
        return
    pair = pairs[next(i for i, agreement in enumerate(beyond_chance) if agreement is not None)]
    raise TraceError(
        "A and B cannot be aligned: no shift of tokens or layers and no renumbering of experts "
        f"makes their choices agree. In A {layer_label(pair.name_a)} and in B "
        f"{layer_label(pair.name_b)} share {100 * pair.agreement:.1f} % of the chosen experts, "
        f"unrelated runs would share {100 * pair.chance:.1f} %"
    )


def _token_extent(side: str, trace: RoutingTrace) -> str:
    """Range of documents and positions of one side, as a phrase."""
    if trace.n_tokens == 0:
        return f"{side} is empty"
    columns = (("documents", trace.documents), ("positions", trace.positions))
    ranges = [f"{name} {int(x.min())} to {int(x.max())}" for name, x in columns]
    return f"{side} has {', '.join(ranges)}"


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
        first = _compared_layer(self.a.layers[i], self.common.in_a, about)
        second = _compared_layer(self.b.layers[j], self.common.in_b, about)
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
    broken_a, broken_b = _unranked_by_layer(a, "A"), _unranked_by_layer(b, "B")
    common = {shift: common_tokens(a, b, shift) for shift in SHIFTS}
    ids = {shift: equal_ids(a, b, tokens) for shift, tokens in common.items()}
    base = token_id_shift(a, b, common, ids)
    common = {shift: tokens for shift, tokens in common.items() if len(tokens.in_a)}
    candidates = layer_pairings([x.name for x in a.layers], [x.name for x in b.layers])
    best = best_alignment(sample_choices(a, b, {base: common[base]}), candidates[:1], base)
    if best.agreement < CLEAR:
        best = best_alignment(sample_choices(a, b, common), candidates, base)
    verified = ids[base].checked > 0
    tokens = common[best.shift]
    require_paired_layers(a, b, best.pairing)
    require_common_tokens(a, b, tokens, (side_a.tokens, side_b.tokens), partial)
    matches, records = [], []
    for pair in best.pairing.pairs:  # one pair after the other: a file is read once for all three
        experts = require_equal_sizes(a, b, pair, partial)
        match, record = _matched_pair(a.layers[pair[0]], b.layers[pair[1]], tokens, experts)
        matches.append(match)
        records.append(record)
    pairs = tuple(records)
    require_related_runs(pairs, [match.beyond_chance for match in matches], verified)
    account = _alignment_record((side_a, side_b), tokens, best.shift, best.pairing, pairs)
    denied = verified and best.shift != base
    account = replace(account, ids_checked=ids[base].checked, against_ids=denied)
    numbers = [np.argsort(match.to_b) for match in matches]
    unranked = [(broken_a.get(i, 0), broken_b.get(j, 0)) for i, j in best.pairing.pairs]
    return Aligned(a, b, tokens, best.pairing, numbers, account, unranked)


def _compared_layer(layer: LayerTrace, tokens: torch.Tensor, about: LayerPair) -> LayerTrace:
    """Select the compared tokens, the first k experts, scores and weights of a layer."""
    facts = replace(layer.facts, k=about.k, n_experts=about.n_experts)
    weights = None if layer.weights is None else layer.weights[:, : about.k]
    more = {} if about.k < layer.facts.k else {"faded": layer.faded, "used": layer.used}
    experts = layer.experts.long()
    bias = layer.bias if layer.bias is None or len(layer.bias) == about.n_experts else None
    columns = (experts, layer.scores, weights, layer.group_gap)
    slim_layer = LayerTrace(layer.name, facts, *columns, bias=bias, **more)
    return take_tokens(slim_layer, tokens)


def _unranked_by_layer(trace: RoutingTrace, side: str) -> dict[int, int]:
    """Refuse impossible values; what is read from a file was checked when it was read.

    Returns the layers in which tokens chose an expert of a lower score than one left out, with the
    number of these tokens.
    """
    if isinstance(trace.layers, LazyLayers):
        return {}
    broken = {}
    for index, layer in enumerate(trace.layers):
        count = _count_unranked_tokens(layer)
        if count:
            broken[index] = count
            layer = replace(layer, scores=None)
        check_layer(replace(layer, name=f"{side}: {layer.name}"))
    return broken


def _count_unranked_tokens(layer: LayerTrace) -> int:
    """Tokens that chose an expert whose score is lower than that of one they did not choose."""
    k = layer.facts.k
    if layer.scores is None or layer.scores.shape[1] == k or not layer.scores.isfinite().any():
        return 0
    return int((layer.scores[:, :k].amin(1) < layer.scores[:, k:].amax(1)).sum())


def _matched_pair(
    first: LayerTrace, second: LayerTrace, common: CommonTokens, experts: int
) -> tuple[ExpertPermutation, LayerPair]:
    """Estimated renumbering of the experts of two paired layers, and the record of both."""
    chosen_a, _ = _choices_at_tokens(first, common.in_a)
    chosen_b, _ = _choices_at_tokens(second, common.in_b)
    scored = first if first.has_gaps else second  # numbers agree where experts are tied
    match = estimate_permutation(
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
    pairing: Pairing,
    pairs: tuple[LayerPair, ...],
) -> Alignment:
    """How two runs were aligned, with what was left over on each side."""
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
