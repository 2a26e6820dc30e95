"""Sentences about the causes of a comparison: its four answers and the patterns of its noise."""

import math
from collections.abc import Callable

from tieline.analysis.diff_records import (
    ChoiceAnswer,
    FlipAnswer,
    Pattern,
    ShapeAnswer,
    SizeAnswer,
)
from tieline.report.words.numbers import percent

NO_SCORES = "the scores of both sides are needed to measure their noise"


def choice(answer: ChoiceAnswer) -> str:
    """Write whether routers choose the largest of their scores."""
    if answer.answer == "no":
        return (
            f"{answer.tokens:,} tokens of {answer.side} in layer {answer.layer!r} chose an expert "
            "of a lower score than one they left out: look for another k, a bias, groups, or "
            "routes of another layer or step"
        )
    if answer.missing:
        verb = "has" if len(answer.missing) == 1 else "have"
        sides = " and ".join(answer.missing)
        return f"{sides} {verb} no scores beyond those of the chosen experts"
    return "every token chose the largest of its own scores"


def flips(answer: FlipAnswer) -> str:
    """Write whether first flips are near-ties."""
    if answer.answer == "cannot tell":
        return answer.obstacle + _near(answer)
    if answer.first == 0:
        return "no token flips"
    if answer.unexplained == 0:
        return f"all {answer.first:,} first flips are near-ties{later_flips(answer)}"
    return (
        f"{answer.unexplained:,} of {answer.first:,} first flips are wider than the noise of their "
        f"own token{later_flips(answer)}"
    )


def later_flips(answer: FlipAnswer) -> str:
    """Write how many flips follow from earlier ones, after a semicolon; empty without them."""
    return f"; {answer.later:,} more follow from earlier flips" if answer.later else ""


def _near(answer: FlipAnswer) -> str:
    """Where the first flips stand among the gaps of the side that has scores."""
    if answer.near_share is None:
        return ""
    share = percent(answer.near_share, trim=True)
    return (
        f"; half of the {answer.near:,} first flips are among the {share} of tokens with the "
        "smallest gaps (ties put them near 0 %, unrelated choices at 50 %)"
    )


def size(answer: SizeAnswer) -> str:
    """Write how large the noise is, and whether the expected format explains it."""
    if answer.kind == "no scores":
        return NO_SCORES
    if answer.kind == "equal":
        return "the scores are equal up to the rounding of float32"
    noise = f"{_noise(answer.relative)} of the spread of the scores in layer {answer.layer!r}"
    if answer.largest is not None:
        noise += f", up to {_noise(answer.largest)} later"
    differ = f"the scores differ by {noise}, the size of {_rounding(answer.like)}"
    expected = f"{answer.expected} ({answer.origin})"
    if answer.kind == "not stated":
        return f"{differ}; state the expected format to judge that"
    if answer.ratio is not None:
        ratio = f"{answer.ratio:.{1 if answer.ratio < 10 else 0}f}"
        times = f"{ratio} times the noise that {expected} makes in this model"
        return f"layer {answer.judged!r} has {times}; {differ}"
    if answer.answer == "yes":
        return f"{differ}; {expected} explains that"
    return (
        f"the noise of layer {answer.judged!r} is {_noise(answer.noise)} of the spread of its "
        f"scores, and {expected} explains at most {_noise(answer.allowed)}; {differ}"
    )


def _noise(relative: float | None) -> str:
    return percent(relative or 0.0, trim=True, least=0.0)


def _rounding(like: tuple[str, ...]) -> str:
    """Formats whose rounding has the size of the noise."""
    special: dict[tuple[str, ...], str] = {
        ("fp32",): "float32 rounding",
        ("more",): "more than 4-bit rounding makes",
        ("less",): "less than 16-bit rounding makes",
    }
    return special.get(like, f"{' to '.join(like)} rounding")


def shape(answer: ShapeAnswer) -> str:
    """Write whether the noise has a pattern."""
    if answer.answer == "no":
        return "; ".join(pattern(x) for x in answer.patterns)
    if answer.answer == "yes":
        return "no pattern over positions, documents, layers or experts"
    return NO_SCORES


def pattern(shape: Pattern) -> str:
    """Write what a pattern is and where to look."""
    return PATTERNS[shape.kind](shape)


def token_shift(shift: int, against_ids: bool) -> str:
    """Write how tokens are shifted."""
    where = "after" if shift > 0 else "before"
    strange = ", although the token ids agree otherwise" if against_ids else ""
    return (
        f"tokens are shifted: what A has at position p, B has one position {where} it "
        f"({shift:+d}){strange}"
    )


def renumbering(layers: int, total: int, first: str, moves: tuple[tuple[int, int], ...]) -> str:
    """Write in how many layers experts are numbered differently."""
    pairs = ", ".join(f"{i} → {j}" for i, j in moves[:4]) + (", …" if len(moves) > 4 else "")
    return (
        f"experts are numbered differently in {layers} of {total} layers "
        f"(A → B in {first!r}: {pairs})"
    )


def _times(shape: Pattern) -> str:
    """Ratio of standard deviations behind a difference of log variances."""
    return f"{math.exp(abs(shape.effect) / 2):.2g}"


def _lag(shape: Pattern) -> str:
    if shape.layer is None:
        return f"lag of tokens: {token_shift(int(shape.effect), against_ids=True)}"
    where = "before" if (shape.number or 0) > 0 else "after"
    return (
        f"lag of tokens: {100 * shape.effect:.0f} % of {shape.flips:,} flips in layer "
        f"{shape.layer!r} have in B the experts that A gave to the token {where} it"
    )


def _permutation(shape: Pattern) -> str:
    moved = int(shape.effect)
    return f"permutation: {renumbering(moved, shape.number or 0, shape.layer or '', shape.moves)}"


def _expert(shape: Pattern) -> str:
    return (
        f"one expert: tokens that chose expert {shape.number} of layer {shape.layer!r} have "
        f"{_times(shape)} times the noise of others in the next layer: compare the weights of that "
        "expert (swapped, stale, or quantised otherwise)"
    )


def _row(shape: Pattern) -> str:
    return (
        f"one expert: the scores of expert {shape.number} in layer {shape.layer!r} differ "
        f"{_times(shape)} times as much as those of others: compare its row of the router"
    )


def _offset(shape: Pattern) -> str:
    bias = " that are the recorded selection bias" if shape.detail == "bias" else ""
    return (
        f"offsets of experts: {100 * shape.effect:.0f} % of the noise in layer {shape.layer!r} is "
        f"one number per expert{bias}: look for a selection bias that was dropped or added"
    )


def _positions(shape: Pattern) -> str:
    grows = shape.effect > 0
    return (
        f"positions: the noise of layer {shape.layer!r} {'grows' if grows else 'falls'} "
        f"{_times(shape)}-fold along positions: look at "
        f"{'rotary tables and caches' if grows else 'attention masks'}"
    )


def _document(shape: Pattern) -> str:
    return (
        f"one document: document {shape.number} has {_times(shape)} times the noise of others in "
        f"layer {shape.layer!r}: compare its tokens, positions and cache"
    )


def _layer(shape: Pattern) -> str:
    others = "the layers beside it" if shape.detail == "beside" else "the layer before"
    return (
        f"one layer: the scores of layer {shape.layer!r} differ {shape.effect:.2g} times as much "
        f"as those of {others}: compare its weights and the precision of its router"
    )


def _weights(shape: Pattern) -> str:
    return (
        f"weights: {shape.number} tensors of {shape.detail} are not those of the original, "
        f"{shape.layer!r} first (relative error {shape.effect:.2g}): exchanged, stale or of "
        "another checkpoint"
    )


PATTERNS: dict[str, Callable[[Pattern], str]] = {
    "lag": _lag,
    "permutation": _permutation,
    "expert": _expert,
    "row": _row,
    "offset": _offset,
    "positions": _positions,
    "document": _document,
    "layer": _layer,
    "weights": _weights,
}
"""The sentence of each kind of pattern."""
