"""Sentences of a comparison: its verdict, findings and causes, and the notes of its alignment."""

import math
from collections.abc import Callable, Sequence

from tieline.analysis.diff_records import (
    Alignment,
    Causes,
    ChoiceAnswer,
    DequantisedSplit,
    FlipAnswer,
    OutputAnswer,
    Pattern,
    ReplaySplit,
    RoutingDiff,
    ShapeAnswer,
    SizeAnswer,
)
from tieline.analysis.inspect_records import Finding, Observation
from tieline.core.text import layer_label
from tieline.report.words.numbers import less_or_more_text, percent
from tieline.report.words.served_precision import MEND_ROUTER_ACTION, served_sentences

REPLAY_ADVICE = (
    "What to do: replay the routes of A in B with `tieline.replay` where they must agree; `tieline "
    "audit` compares the remedies."
)
NAME_FORMAT_ADVICE = (
    "What to do: name the precision with --expect, or give the model, and compare again."
)
NOTHING_ADVICE = "What to do: nothing."
BROKEN_ROUTER_SENTENCES = {
    "mend router": "All scores of a layer are equal: an untrained or broken router. What to do: "
    f"{MEND_ROUTER_ACTION}",
    "no ties": "All experts are chosen: no tie is possible. What to do: nothing about routing.",
}
"""Sentences on routers that make no choice, by recommended action."""
TIE_CONCLUSIONS = ("no flips", "explained by ties")
"""Conclusions that leave no bug to look for."""
CAPTURE_ADVICE = "What to do: capture both runs with scores and compare them again."


def diff_verdict(result: RoutingDiff) -> str:
    """Write whether the two route alike and, if not, whether ties explain it."""
    layers, tokens = result.layers, result.alignment.tokens
    flips = sum(layer.flip.count for layer in layers)
    size = f"{tokens:,} tokens in {len(layers)} layers"
    aligned = " once aligned" if result.alignment.differences else ""
    if flips == 0:
        summary = f"A and B choose the same experts for all {size}{aligned}."
    else:
        worst = max(layer.flip.value or 0.0 for layer in layers)
        summary = (
            f"A and B choose other experts in {_share_text(flips / (tokens * len(layers)))} of the "
            f"choices of {size}{aligned} (worst layer: {_share_text(worst)}); "
            f"{_share_text(result.tokens.anywhere.value)} of the tokens differ somewhere."
        )
    causes = result.causes
    if causes is None:
        return summary
    sentences = [
        summary,
        CONCLUSION_SENTENCES[causes.conclusion](causes),
        *_advice_on_ties(result, causes),
    ]
    return " ".join(filter(None, sentences))


def _advice_on_ties(result: RoutingDiff, causes: Causes) -> list[str]:
    """Return advice if ties explain everything: by the precision served, if it was measured."""
    if causes.conclusion not in TIE_CONCLUSIONS:
        return []
    if result.serving is None and result.recommendation is not None:
        return [BROKEN_ROUTER_SENTENCES[result.recommendation.action]]
    if result.serving is None or result.recommendation is None:
        return [NOTHING_ADVICE if causes.conclusion == "no flips" else REPLAY_ADVICE]
    return served_sentences(result.serving, result.recommendation)


def _near_ties_text(answer: FlipAnswer, expected: str | None = None) -> str:
    """State how many first flips are near-ties, and which format's rounding has their size."""
    near_ties = answer.first - answer.unexplained
    count = (
        f"All {near_ties:,}" if near_ties == answer.first else f"{near_ties:,} of {answer.first:,}"
    )
    size = "" if expected is None else f", as large as {expected} rounding explains"
    return f"{count} first flips are near-ties{size}{later_flips_text(answer)}"


CONCLUSION_SENTENCES: dict[str, Callable[[Causes], str]] = {
    "no flips": lambda causes: "",
    "explained by ties": lambda causes: (
        f"{_near_ties_text(causes.flips, causes.expected)}. No sign of a bug."
    ),
    "near-ties, size unknown": lambda causes: (
        f"{_near_ties_text(causes.flips)}; whether noise of this size is right cannot be told: "
        f"{causes.size.text}. {NAME_FORMAT_ADVICE}"
    ),
    "cannot tell": lambda causes: (
        f"Cannot tell whether ties explain that: {causes.flips.text}. {CAPTURE_ADVICE}"
    ),
    "choice against scores": lambda causes: (
        f"A router does not follow its scores: {causes.choice.text}."
    ),
    "pattern": lambda causes: f"Not ties alone, a pattern in the differences: {causes.shape.text}.",
    "outputs differ": lambda causes: (
        f"{'The flips are near-ties' if causes.flips.first else 'Routes agree'}, outputs do not: "
        f"{causes.outputs.text if causes.outputs else ''}. What to do: look at experts, norms or "
        "the head."
    ),
    "noise larger than expected": lambda causes: (
        f"Noise louder than {causes.expected or 'any format'} explains, another format or a fault: "
        f"{causes.size.text}. What to do: compare the precision and the weights from the first "
        "layer named below."
    ),
    "flips wider than their noise": lambda causes: (
        f"Not ties alone: {causes.flips.text}. What to do: look for a bug in the layers and tokens "
        "named below."
    ),
}
"""Function that writes the sentence of each conclusion."""


def diff_findings(result: RoutingDiff) -> tuple[Finding, ...]:
    """Write the observations, in their order."""

    def observation_sentence(fact: Observation) -> str:
        if fact.case.endswith(":pattern"):
            assert result.causes is not None
            return next(x.text for x in result.causes.patterns if x.kind == fact.kind)
        return FINDING_SENTENCES[fact.case](fact, result)

    return tuple(
        Finding(x.severity, observation_sentence(x), x.number, x.layer, x.kind)
        for x in result.observations
    )


def _answer_writer(name: str) -> Callable[[Observation, RoutingDiff], str]:
    """Return a function that writes the text of one answer of `Causes`."""
    return lambda fact, result: getattr(result.causes, name).text


def _unexplained_flips_finding(fact: Observation, result: RoutingDiff) -> str:
    """State how many flips are wider than their noise, and the widest."""
    attribution = next(x.attribution for x in result.layers if x.name == fact.layer)
    assert attribution is not None
    document, position, margin = attribution.unexplained_tokens[0]
    return (
        f"{fact.number:,.0f} first flips in {len(fact.layers)} layers are wider than the noise of "
        f"their own token: the widest, at document {document}, position {position}, crosses "
        f"{margin:.3g} where the noise of the layer is {attribution.noise:.2g}"
    )


def _unrelated_routers_finding(fact: Observation, result: RoutingDiff) -> str:
    """State the share of experts in common, and that of unrelated routers."""
    pair = next(x for x in result.alignment.pairs if x.name_a == fact.layer)
    return (
        f"the two share {_share_text(pair.agreement)} of the chosen experts, and unrelated routers "
        f"would share {_share_text(pair.chance)}"
    )


def _smoothed_sides_finding(fact: Observation, result: RoutingDiff) -> str:
    """State which sides are smoothed, and what that means for flips."""
    smoothed = result.alignment.smoothed
    sides = "A and B are" if len(smoothed) == 2 else f"{smoothed[0]} is"
    return (
        f"{sides} smoothed: compared are the k experts that top-k would choose, and where two of "
        "them change places the weights do not jump"
    )


def replay_sentence(split: ReplaySplit) -> str:
    """Write by how much replaying A's routes in B reduces the KL."""
    ids, both = (less_or_more_text(x) for x in (split.by_ids, split.by_both))
    return (
        f"with A's experts replayed in B the KL is {split.ids.kl:.3g} instead of "
        f"{split.live.kl:.3g} nats ({ids}), with A's weights too {split.both.kl:.3g} ({both})"
    )


def dequantised_sentence(split: DequantisedSplit) -> str:
    """Write what the format of a quantised side costs and what its engine adds."""
    weights = "" if split.bits is None else f" ({split.bits:.3g} bits per weight)"
    by_format, by_engine = (
        f"{share.count:,} tokens ({_share_text(share.value or 0.0)})"
        + ("" if kl is None else f" and {kl:.2g} nats")
        for share, kl in (
            (split.format_any, split.format_kl),
            (split.engine_any, split.engine_kl),
        )
    )
    return (
        f"{split.side} is quantised{weights}: its weights, dequantised and run by transformers, "
        f"already flip {by_format}; the engine adds {by_engine}"
    )


FINDING_SENTENCES: dict[str, Callable[[Observation, RoutingDiff], str]] = {
    "alignment": lambda fact, result: ALIGNMENT_NOTES[fact.source](result.alignment),
    "choice": _answer_writer("choice"),
    "noise": _answer_writer("size"),
    "outputs": _answer_writer("outputs"),
    "unexplained": _unexplained_flips_finding,
    "attribution": lambda fact, result: f"{fact.number:,.0f} flips are {fact.source}",
    "unrelated": _unrelated_routers_finding,
    "compounding": lambda fact, result: (
        "flips compound: a token that has flipped before flips in "
        f"{_share_text(result.tokens.later_rates[1])} of the layers that follow, others in "
        f"{_share_text(result.tokens.later_rates[0])}"
    ),
    "kl": lambda fact, result: (
        f"the final distributions are {fact.number:.3g} nats apart per token (KL of A and B)"
    ),
    "kl:flipped": lambda fact, result: (
        f"tokens that flip somewhere are {_factor(fact.number)} times as far apart as the others"
    ),
    "smoothed": _smoothed_sides_finding,
    "interval": lambda fact, result: (
        "there are fewer than 4 documents: intervals are clustered by stretches of text"
    ),
    "replay": lambda fact, result: replay_sentence(result.replay) if result.replay else "",
    "dequantised": lambda fact, result: (
        dequantised_sentence(result.dequantised) if result.dequantised else ""
    ),
}
"""Function that writes the sentence of an observation, by its case."""


def alignment_notes(alignment: Alignment) -> tuple[str, ...]:
    """Write the differences that alignment had to undo, most severe first."""
    return tuple(ALIGNMENT_NOTES[difference](alignment) for difference in alignment.differences)


def _renumbered_experts_note(alignment: Alignment) -> str:
    """State in how many layers experts are numbered differently."""
    renumbered = alignment.permuted
    moves = tuple(zip(renumbered[0].moved_experts, renumbered[0].moved_to, strict=True))
    return renumbering_text(len(renumbered), len(alignment.pairs), renumbered[0].name_a, moves)


def _different_k_note(alignment: Alignment) -> str:
    """State in how many layers k differs."""
    different = [pair for pair in alignment.pairs if pair.k_a != pair.k_b]
    first = different[0]
    return (
        f"different k in {len(different)} layers: A chooses {first.k_a} experts, B {first.k_b}; "
        f"the first {first.k} of both are compared"
    )


def _unpaired_layers_note(alignment: Alignment) -> str:
    """List the layers that one side lacks or does not route."""
    only = _fill_for_each_side(
        "{} layers are in {side} only ({})", alignment.only_a, alignment.only_b
    )
    dense = "{} layers of {side} route nothing: dense ({})"
    return "; ".join([*only, *_fill_for_each_side(dense, alignment.dense_a, alignment.dense_b)])


def _fill_for_each_side(template: str, names_a: Sequence[str], names_b: Sequence[str]) -> list[str]:
    """Fill the template for each side that has names, with their number and the first three."""
    return [
        template.format(
            len(names),
            ", ".join(map(layer_label, names[:3])) + (", …" if len(names) > 3 else ""),
            side=side,
        )
        for side, names in (("A", names_a), ("B", names_b))
        if names
    ]


def _tokens_of_sides_text(template: str, count_a: int, count_b: int) -> str:
    """Fill the template for each side that has tokens to count."""
    counts = (("A", count_a), ("B", count_b))
    return "; ".join(template.format(count, side) for side, count in counts if count)


ALIGNMENT_NOTES: dict[str, Callable[[Alignment], str]] = {
    "token shift": lambda x: (
        token_shift_text(x.token_shift, x.against_ids)
        if x.token_shift
        else "tokens are not shifted, although their ids are"
    ),
    "layer shift": lambda x: (
        "layers are paired by order: their numbers do not match"
        if x.layer_shift is None
        else f"layers are shifted: layer l of A is layer l{x.layer_shift:+d} of B"
    ),
    "experts": _renumbered_experts_note,
    "k": _different_k_note,
    "layers": _unpaired_layers_note,
    "tokens": lambda x: _tokens_of_sides_text(
        "{} tokens are in {} only", x.tokens_only_a, x.tokens_only_b
    ),
    "unrouted": lambda x: _tokens_of_sides_text(
        "{} tokens of {} were not routed (-1) and are left out", x.unrouted_a, x.unrouted_b
    ),
}
"""Function that writes the note on each difference between two runs."""


def _share_text(share: float | None) -> str:
    """Return a share as a percentage; "none" if it is unknown."""
    return "none" if share is None else percent(share, trim=True, least=0.0)


NO_SCORES_TEXT = "the scores of both sides are needed to measure their noise"


def choice_answer(answer: ChoiceAnswer) -> str:
    """Write whether routers choose the largest of their scores."""
    if answer.answer == "no":
        return (
            f"{answer.tokens:,} tokens of {answer.side} in {layer_label(answer.layer)} chose an "
            "expert of a lower score than one they left out: look for another k, a bias, groups, "
            "or routes of another layer or step"
        )
    if answer.missing:
        verb = "has" if len(answer.missing) == 1 else "have"
        sides = " and ".join(answer.missing)
        return f"{sides} {verb} no scores beyond those of the chosen experts"
    return "every token chose the largest of its own scores"


def flips_answer(answer: FlipAnswer) -> str:
    """Write whether first flips are near-ties."""
    if answer.answer == "cannot tell":
        obstacle = OBSTACLE_TEXTS.get(answer.obstacle, answer.obstacle)
        return obstacle + _near_ties_position_text(answer)
    if answer.first == 0:
        return "no token flips"
    if answer.unexplained == 0:
        weights = _last_places_text(answer)
        return f"all {answer.first:,} first flips are near-ties{weights}{later_flips_text(answer)}"
    return (
        f"{answer.unexplained:,} of {answer.first:,} first flips are wider than the noise of their "
        f"own token{later_flips_text(answer)}"
    )


OBSTACLE_TEXTS = {
    "far movers": "by their combine weights, experts leave or enter in other places than the last: "
    "a selection bias, another function than softmax, or a fault"
}
"""Why first flips cannot be judged, where the record gives a short name."""


def _last_places_text(answer: FlipAnswer) -> str:
    """Write what combine weights tell about the first flips; empty if scores were compared."""
    if answer.last_share is None:
        return ""
    share = percent(answer.last_share, trim=True)
    return (
        f" by their combine weights ({share} of the experts that left or entered had the last "
        "place of their side)"
    )


def later_flips_text(answer: FlipAnswer) -> str:
    """Write how many flips follow from earlier ones, after a semicolon; empty without them."""
    return f"; {answer.later:,} more follow from earlier flips" if answer.later else ""


def _near_ties_position_text(answer: FlipAnswer) -> str:
    """State the rank of the first flips among the gaps of the side that has scores."""
    if answer.near_share is None:
        return ""
    share = percent(answer.near_share, trim=True)
    return (
        f"; half of the {answer.near:,} first flips are among the {share} of tokens with the "
        "smallest gaps (ties put them near 0 %, unrelated choices at 50 %)"
    )


def noise_size_answer(answer: SizeAnswer) -> str:
    """Write how large the noise is, and whether the expected format explains it."""
    if answer.kind == "no scores":
        return NO_SCORES_TEXT
    if answer.kind == "flips":
        return _too_many_flips_text(answer)
    if answer.kind == "equal":
        return "the scores are equal up to the rounding of float32"
    noise = (
        f"{_noise_text(answer.relative)} of the spread of the scores in {layer_label(answer.layer)}"
    )
    if answer.largest is not None:
        noise += f", up to {_noise_text(answer.largest)} later"
    differ = f"the scores differ by {noise}, {_noise_like_rounding_text(answer.like)}"
    expected = f"{answer.expected} ({answer.origin})"
    if answer.kind == "not stated":
        return f"{differ}; no format is expected that it could be judged by"
    if answer.ratio is not None:
        ratio = f"{answer.ratio:.{1 if answer.ratio < 10 else 0}f}"
        quantity = "flips" if answer.relative is None else "noise"
        times = f"{ratio} times the {quantity} that {expected} makes in this model"
        loud = f"{layer_label(answer.judged)} has {times}"
        return loud if answer.relative is None else f"{loud}; {differ}"
    if answer.answer == "yes":
        return f"{differ}; {expected} explains that"
    return (
        f"the noise of {layer_label(answer.judged)} is {_noise_text(answer.noise)} of the spread "
        f"of its scores, and {expected} explains at most {_noise_text(answer.allowed)}; {differ}"
    )


def _too_many_flips_text(answer: SizeAnswer) -> str:
    """State how many tokens flip, and how many the format explains."""
    expected = "any format" if answer.expected is None else f"{answer.expected} ({answer.origin})"
    return (
        f"{_share_text(answer.flips)} of the tokens of {layer_label(answer.judged)} flip, and "
        f"{expected} explains at most {_share_text(answer.most_flips)}"
    )


def _noise_text(relative: float | None) -> str:
    """Return noise as a percentage of the spread of the scores."""
    return percent(relative or 0.0, trim=True, least=0.0)


def _noise_like_rounding_text(like: tuple[str, ...]) -> str:
    """Name the formats whose rounding has the size of the noise."""
    special: dict[tuple[str, ...], str] = {
        ("fp32",): "the size of float32 rounding",
        ("more",): "more than 4-bit rounding makes",
        ("less",): "less than 16-bit rounding makes",
    }
    size = "the size" if len(like) == 1 else "between the sizes"
    return special.get(like, f"{size} of {' and '.join(like)} rounding")


def outputs_answer(answer: OutputAnswer) -> str:
    """Write how far the predictions differ, and how far the cause allows."""
    differ = f"the predictions differ by {answer.kl:.3g} nats per token (loss {answer.loss:+.2g})"
    if answer.reference is not None:
        return f"{differ}; {answer.expected} makes {answer.reference:.2g} in this model"
    cause = "the noise of the scores" if answer.expected is None else answer.expected
    return f"{differ}; {cause} explains at most {answer.limit:.2g}"


def pattern_answer(answer: ShapeAnswer) -> str:
    """Write whether the noise has a pattern."""
    if answer.answer == "no":
        return "; ".join(pattern_sentence(x) for x in answer.patterns)
    if answer.answer == "yes":
        return "no pattern over positions, documents, layers or experts"
    return NO_SCORES_TEXT


def pattern_sentence(shape: Pattern) -> str:
    """Write what a pattern of the noise is and where to look for its cause."""
    return PATTERN_SENTENCES[shape.kind](shape)


def token_shift_text(shift: int, against_ids: bool) -> str:
    """Write how tokens are shifted."""
    where = "after" if shift > 0 else "before"
    strange = ", although the token ids agree otherwise" if against_ids else ""
    return (
        f"tokens are shifted: what A has at position p, B has one position {where} it "
        f"({shift:+d}){strange}"
    )


def renumbering_text(
    layers: int, total: int, first: str, moves: tuple[tuple[int, int], ...]
) -> str:
    """Write in how many layers experts are numbered differently."""
    pairs = ", ".join(f"{i} → {j}" for i, j in moves[:4]) + (", …" if len(moves) > 4 else "")
    return (
        f"experts are numbered differently in {layers} of {total} layers "
        f"(A → B in {layer_label(first)}: {pairs})"
    )


def _factor(ratio: float) -> str:
    """Return a ratio with two significant digits, without an exponent: 1.5, 150."""
    return f"{float(f'{ratio:.2g}'):,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def _noise_ratio(shape: Pattern) -> str:
    """Return exp(|d| / 2), the ratio of standard deviations for a difference d of log variances."""
    return _factor(math.exp(abs(shape.effect) / 2))


def _lag_pattern_sentence(shape: Pattern) -> str:
    """State that B has the experts of a neighbouring token."""
    if shape.layer is None:
        return f"lag of tokens: {token_shift_text(int(shape.effect), against_ids=True)}"
    where = "before" if (shape.number or 0) > 0 else "after"
    return (
        f"lag of tokens: {percent(shape.effect, trim=True)} of {shape.flips:,} flips in "
        f"{layer_label(shape.layer)} have in B the experts that A gave to the token {where} it"
    )


def _compared_group(shape: Pattern) -> str:
    """Name what a group with larger noise is compared with."""
    return "sound runs" if shape.detail == "reference" else "others"


def _document_pattern_sentence(shape: Pattern) -> str:
    """State that one document, or some of them, are louder than the others."""
    noise, where = f"{_noise_ratio(shape)} times the noise of", layer_label(shape.layer)
    if shape.detail == "most":
        return (
            f"documents: document {shape.number}, the loudest, has {noise} most others in {where}, "
            "more than the format explains: compare the tokens, positions and cache of the "
            "documents that flip most"
        )
    return (
        f"one document: document {shape.number} has {noise} {_compared_group(shape)} in {where}: "
        "compare its tokens, positions and cache"
    )


def _positions_pattern_sentence(shape: Pattern) -> str:
    """State that the noise changes along positions."""
    if shape.detail == "reference":
        return (
            f"positions: from position {shape.number} on, tokens have {_noise_ratio(shape)} times "
            f"the noise of sound runs in {layer_label(shape.layer)}, and others do not: look at "
            "rotary tables, masks and caches"
        )
    grows = shape.effect > 0
    return (
        f"positions: the noise of {layer_label(shape.layer)} {'grows' if grows else 'falls'} "
        f"{_noise_ratio(shape)}-fold along positions: look at "
        f"{'rotary tables and caches' if grows else 'attention masks'}"
    )


def _group_pattern_writer(group: str, advice: str) -> Callable[[Pattern], str]:
    """Return a writer for a group of tokens with more noise than in sound runs."""
    return lambda shape: (
        f"{group.format(shape.number)}: {_noise_ratio(shape)} times the noise of sound runs in "
        f"{layer_label(shape.layer)}, and other tokens do not have it: {advice}"
    )


PATTERN_SENTENCES: dict[str, Callable[[Pattern], str]] = {
    "lag": _lag_pattern_sentence,
    "permutation": lambda x: (
        f"permutation: {renumbering_text(int(x.effect), x.number or 0, x.layer or '', x.moves)}"
    ),
    "exchanged scores": lambda x: (
        f"exchanged scores: in {x.flips:,} tokens of {layer_label(x.layer)} "
        f"({percent(x.effect, trim=True)} of those that swap one expert) the two experts have each "
        "other's scores: ids and scores do not belong together; look at sorting, gathering and "
        "tables of experts"
    ),
    "expert": lambda x: (
        f"one expert: tokens that chose expert {x.number} of {layer_label(x.layer)} have "
        f"{_noise_ratio(x)} times the noise of {_compared_group(x)} in the next layer: compare the "
        "weights of that expert (swapped, stale, or quantised otherwise)"
    ),
    "row": lambda x: (
        f"one expert: the scores of expert {x.number} in {layer_label(x.layer)} differ "
        f"{_noise_ratio(x)} times as much as those of {_compared_group(x)}: compare its row of the "
        "router"
    ),
    "offset": lambda x: (
        f"offsets of experts: {percent(x.effect, trim=True)} of the noise in "
        f"{layer_label(x.layer)} is one number per expert"
        f"{' that are the recorded selection bias' * (x.detail == 'bias')}: look for a selection "
        "bias that was dropped or added"
    ),
    "positions": _positions_pattern_sentence,
    "first position": _group_pattern_writer(
        "the first position of documents", "look at masks, padding and attention sinks"
    ),
    "last position": _group_pattern_writer(
        "the last position of documents", "look at what is done to the last token of a sequence"
    ),
    "batch row": _group_pattern_writer(
        "documents in row {} of their batch", "look at padding, masks and indices of the batch"
    ),
    "decode": _group_pattern_writer(
        "tokens decoded one at a time", "compare the cache and positions of decoding with prefill"
    ),
    "token": _group_pattern_writer("token id {}", "compare its row of the embedding"),
    "rare tokens": _group_pattern_writer(
        "tokens that are rare here", "compare rows of the embedding"
    ),
    "document": _document_pattern_sentence,
    "layer": lambda x: (
        f"one layer: the scores of {layer_label(x.layer)} differ {_factor(x.effect)} times as much "
        "as those of the layers beside it: compare its weights and the precision of its router"
    ),
    "weights": lambda x: (
        f"weights: {x.number} tensors of {x.detail} are not those of the original, {x.layer!r} "
        f"first (relative error {x.effect:.2g}): exchanged, stale or of another checkpoint"
    ),
}
"""Function that writes the sentence of each kind of pattern."""
