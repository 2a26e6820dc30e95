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
    Causes,
    ChoiceAnswer,
    Conclusion,
    FlipAnswer,
    LayerDiff,
    Pattern,
    ShapeAnswer,
    YesNo,
)
from tieline.analysis.noise_shapes import NoiseShape, find_patterns
from tieline.analysis.noise_size import Expected, judge_size

TOLERATED = 0.005
"""Share of the first flips that may be unexplained without an alarm."""
MOST_MOVES = 5
"""Renumbered experts that a pattern names."""


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
        conclusion=_conclude(flipped, choice.answer, flips.answer, size.answer, patterns),
        choice=choice,
        flips=flips,
        size=size,
        shape=shape,
        patterns=patterns,
        expected=None if expected is None else expected.name,
    )


def _conclude(
    flipped: bool, choice: YesNo, flips: YesNo, size: YesNo, patterns: Sequence[Pattern]
) -> Conclusion:
    if choice == "no":
        return "choice against scores"
    if patterns:
        return "pattern"
    if size == "no":
        return "noise larger than expected"
    if flips == "no":
        return "flips wider than their noise"
    if not flipped:
        return "no flips"
    return "explained by ties" if flips == "yes" else "cannot tell"


def _referred(shapes: Sequence[NoiseShape]) -> bool:
    return any(shape.beyond is not None for shape in shapes)


def _choice(layers: Sequence[LayerDiff], unranked: Sequence[tuple[int, int]]) -> ChoiceAnswer:
    for layer, counts in zip(layers, unranked, strict=True):
        for side, count in zip("AB", counts, strict=True):
            if count:
                return ChoiceAnswer("no", layer.name, side, count)
    missing = tuple(side for side in "AB" if any(_without(layer, side) for layer in layers))
    return ChoiceAnswer("cannot tell" if missing else "yes", missing=missing)


def _without(layer: LayerDiff, side: str) -> bool:
    """Whether a side lacks the scores that its choice could be checked by."""
    status = layer.attribution_status
    return f"{side} has expert ids only" in status or f"{side} has the scores of chosen" in status


def _flips(layers: Sequence[LayerDiff], near: Sequence[np.ndarray]) -> FlipAnswer:
    attributions = [layer.attribution for layer in layers if layer.attribution is not None]
    blind = next((x for x in layers if x.attribution is None and x.flip.count), None)
    first = sum(x.explained + x.unexplained for x in attributions)
    odd, later = (sum(getattr(x, n) for x in attributions) for n in ("unexplained", "later"))
    if blind is not None:
        shares = np.concatenate([np.zeros(0), *near])
        return FlipAnswer(
            "cannot tell",
            obstacle=blind.attribution_status.removeprefix("not attributable: "),
            near=len(shares),
            near_share=float(np.median(shares)) if len(shares) else None,
        )
    return FlipAnswer("no" if odd > TOLERATED * first else "yes", first, odd, later)


def _misnumbered(alignment: Alignment) -> list[Pattern]:
    """Shifts that the token ids deny, and renumberings of experts."""
    patterns, moved = [], alignment.permuted
    if alignment.against_ids and alignment.token_shift:
        patterns.append(Pattern("lag", None, float(alignment.token_shift), 1.0))
    if moved:
        pairs = zip(moved[0].moved_experts, moved[0].moved_to, strict=True)
        patterns.append(
            Pattern(
                "permutation",
                moved[0].name_a,
                float(len(moved)),
                1.0,
                number=len(alignment.pairs),
                moves=tuple(pairs)[:MOST_MOVES],
            )
        )
    return patterns


def _shape(shapes: Sequence[NoiseShape], patterns: tuple[Pattern, ...]) -> ShapeAnswer:
    if patterns:
        return ShapeAnswer("no", patterns)
    measured = any(shape.relative is not None for shape in shapes)
    return ShapeAnswer("yes" if measured else "cannot tell")
