"""Ties or a bug: three questions about two runs, each with its own evidence.

1. Does each router choose from its own scores? Where the scores of a side are known, its choice
   must be the largest of them, exact ties apart. If not, the choice is broken, whatever the noise.
2. Do first flips follow the noise of their own token? (`flip_tests`) This clears sound runs. It
   rarely convicts: a bug that acts as noise widens the noise of the tokens whose flips it causes.
3. Is the noise of the size (`noise_size`) and the shape (`noise_shapes`) that was to be expected?

A question that the inputs cannot answer is answered "cannot tell", with what is missing, and never
raises an alarm.
"""

from collections.abc import Sequence

import numpy as np

from tieline.analysis.diff_records import (
    Alignment,
    Answer,
    Causes,
    Conclusion,
    LayerDiff,
    Pattern,
)
from tieline.analysis.noise_shapes import NoiseShape, find_patterns
from tieline.analysis.noise_size import Expected, judge_size

TOLERATED = 0.005
"""Share of the first flips that may be unexplained without a word of alarm."""
AGAINST_IDS = "although the token ids agree otherwise"


def answered(
    alignment: Alignment,
    unranked: Sequence[tuple[int, int]],
    layers: Sequence[LayerDiff],
    shapes: Sequence[NoiseShape],
    near: Sequence[np.ndarray],
    expected: Expected | None,
) -> Causes:
    """Answer the three questions and draw the conclusion.

    Args:
        alignment: how the runs were aligned.
        unranked: for each layer, tokens of A and of B whose choice is not that of their scores.
        layers: the layers compared.
        shapes: effects of the noise of each layer.
        near: where scores of one side are missing, the share of tokens with a smaller gap than
            that of each first flip.
        expected: the format whose noise is to be expected.
    """
    choice = _choice(layers, unranked)
    flips = _flips(layers, near)
    patterns = (*_misnumbered(alignment), *find_patterns(shapes, _referred(shapes)))
    size = judge_size(shapes, expected)
    shape = _shape(shapes, patterns)
    flipped = any(layer.flip.count for layer in layers)
    return Causes(
        conclusion=_conclude(flipped, choice, flips, size, patterns),
        choice=choice,
        flips=flips,
        size=size,
        shape=shape,
        patterns=patterns,
        expected=None if expected is None else expected.name,
    )


def _conclude(
    flipped: bool, choice: Answer, flips: Answer, size: Answer, patterns: Sequence[Pattern]
) -> Conclusion:
    if choice.answer == "no":
        return "choice against scores"
    if patterns:
        return "pattern"
    if size.answer == "no":
        return "noise larger than expected"
    if flips.answer == "no":
        return "flips wider than their noise"
    if not flipped:
        return "no flips"
    return "explained by ties" if flips.answer == "yes" else "cannot tell"


def _referred(shapes: Sequence[NoiseShape]) -> bool:
    return any(shape.beyond is not None for shape in shapes)


def _choice(layers: Sequence[LayerDiff], unranked: Sequence[tuple[int, int]]) -> Answer:
    for layer, counts in zip(layers, unranked, strict=True):
        for side, count in zip("AB", counts, strict=True):
            if count:
                return Answer(
                    "no",
                    f"{count:,} tokens of {side} in layer {layer.name!r} chose an expert of a "
                    "lower score than one they left out: look for another k, a bias, groups, or "
                    "routes of another layer or step",
                )
    missing = [side for side in "AB" if any(_without(layer, side) for layer in layers)]
    if missing:
        sides = " and ".join(missing)
        return Answer("cannot tell", f"{sides} has no scores beyond those of the chosen experts")
    return Answer("yes", "every token chose the largest of its own scores")


def _without(layer: LayerDiff, side: str) -> bool:
    """Whether a side lacks the scores that its choice could be checked by."""
    status = layer.attribution_status
    return f"{side} has expert ids only" in status or f"{side} has the scores of chosen" in status


def _flips(layers: Sequence[LayerDiff], near: Sequence[np.ndarray]) -> Answer:
    attributions = [layer.attribution for layer in layers if layer.attribution is not None]
    blind = next((x for x in layers if x.attribution is None and x.flip.count), None)
    if blind is not None:
        why = blind.attribution_status.removeprefix("not attributable: ")
        return Answer("cannot tell", why + _near_words(near))
    first = sum(x.explained + x.unexplained for x in attributions)
    odd, later = sum(x.unexplained for x in attributions), sum(x.later for x in attributions)
    follow = f"; {later:,} later flips are consequences" if later else ""
    if first == 0:
        return Answer("yes", "no token flips")
    if odd == 0:
        return Answer("yes", f"all {first:,} first flips follow the noise of their token{follow}")
    text = f"{odd:,} of {first:,} first flips are wider than the noise of their own token{follow}"
    return Answer("no" if odd > TOLERATED * first else "yes", text)


def _near_words(near: Sequence[np.ndarray]) -> str:
    """Where the first flips stand among the gaps of the side that has scores."""
    shares = np.concatenate([np.zeros(0), *near])
    if len(shares) == 0:
        return ""
    middle = float(np.median(shares))
    return (
        f"; half of the {len(shares):,} first flips are among the {100 * middle:.2g} % of tokens "
        "with the smallest gaps (ties put them near 0 %, unrelated choices at 50 %)"
    )


def _misnumbered(alignment: Alignment) -> list[Pattern]:
    """Shifts and renumberings that the alignment found, although the token ids deny them."""
    patterns = []
    for note in alignment.notes:
        if AGAINST_IDS in note:
            shift = float(alignment.token_shift)
            patterns.append(Pattern("lag", None, shift, 1.0, f"lag of tokens: {note}"))
    if alignment.permuted:
        count = float(len(alignment.permuted))
        note = next(note for note in alignment.notes if "numbered differently" in note)
        layer = alignment.permuted[0].name_a
        patterns.append(Pattern("permutation", layer, count, 1.0, f"permutation: {note}"))
    return patterns


def _shape(shapes: Sequence[NoiseShape], patterns: Sequence[Pattern]) -> Answer:
    if patterns:
        return Answer("no", "; ".join(pattern.text for pattern in patterns))
    if any(shape.relative is not None for shape in shapes):
        return Answer("yes", "no pattern over positions, documents, layers or experts")
    return Answer("cannot tell", "the scores of both sides are needed to measure their noise")
