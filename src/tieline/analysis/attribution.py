"""Attribute the differences of two runs to ties or to a bug, by three questions.

1. Does each router choose from its own scores? If the scores of a side are known, its choice must
   be the largest of them, exact ties apart. Otherwise the choice is broken, whatever the noise.
2. Do first flips follow the noise of their own token (`score_noise`)? A yes clears sound runs. A no
   is rare even for bugs: one that acts as noise widens the noise of the tokens that it flips.
3. Does the noise have the expected size (`noise_size`) and shape (`noise_shapes`)?

If predictions were compared, a fourth: is their distance explained by that noise? Experts, norms
and the head of the last layers may be wrong although all routes agree.

A question that the inputs cannot answer gets the answer "cannot tell", with the missing input, and
never raises an alarm.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tieline.analysis.diff_records import (
    ACCUSING,
    Alignment,
    Causes,
    ChoiceAnswer,
    Conclusion,
    FlipAnswer,
    LayerDiff,
    LogitsDiff,
    OutputAnswer,
    Pattern,
    ShapeAnswer,
    SizeAnswer,
    YesNo,
)
from tieline.analysis.excess_over_sound_runs import Excess
from tieline.analysis.noise_shapes import (
    NoiseShape,
    find_noise_patterns,
    find_patterns_without_reference,
    position_pattern,
)
from tieline.analysis.noise_size import (
    LAYER_GROWTH,
    MOST_UNEXPLAINED,
    ExpectedFormat,
    allowed_noise,
    judge_noise_size,
    kl_of_logit_noise,
    loud_document_patterns,
)
from tieline.core.statistics import Estimate

KL_FACTOR = 4.0
"""Largest ratio of the KL to that of a reference run: twice the deviation of the logits."""
KL_FACTOR_ONE_DOCUMENT = 16.0
"""The same for a single document, which leaves the standard errors unknown."""
KL_STANDARD_ERRORS = 3.0
"""Standard errors, of the KL and of the reference's, that are added to the limit."""


def judge_outputs(
    logits: LogitsDiff | None,
    reference: Estimate | None,
    size: SizeAnswer,
    expected: ExpectedFormat | None,
) -> OutputAnswer | None:
    """Judge whether noise explains the distance of the predictions; None if unknown.

    The limit is the KL of a reference run if there is one. Otherwise it follows from the largest
    noise that the expected format explains or, without a format, from the noise of the scores grown
    by one layer; the KL is then that of tokens before the first flip of their document.

    Args:
        logits: distance of the final distributions.
        reference: KL of the model in float32 to itself in the expected format.
        size: the noise of the scores.
        expected: the expected format.
    """
    if logits is None:
        return None
    name = None if expected is None else expected.name
    loss = logits.loss_b - logits.loss_a
    if reference is not None and reference.value is not None:
        errors = logits.kl_error, reference.standard_error
        factor = KL_FACTOR_ONE_DOCUMENT if None in errors else KL_FACTOR
        own, other = (KL_STANDARD_ERRORS * (error or 0.0) for error in errors)
        limit = factor * (reference.value + other) + own
        limit = max(limit, kl_of_logit_noise(allowed_noise("fp32", 2)))
        answer: YesNo = "no" if logits.kl > limit else "yes"
        return OutputAnswer(answer, logits.kl, limit, reference.value, loss, name)
    relative = _allowed_output_noise(size, name)
    if relative is None or logits.kl_before is None:
        return None
    limit = kl_of_logit_noise(relative)
    answer = "no" if logits.kl_before > limit else "yes"
    return OutputAnswer(answer, logits.kl_before, limit, None, loss, name)


def _allowed_output_noise(size: SizeAnswer, expected: str | None) -> float | None:
    """Largest relative noise of the outputs; None if unknown."""
    if expected is not None:
        return allowed_noise(expected, 2)
    if size.kind == "no scores":
        return None
    measured = max(size.largest or 0.0, size.relative or 0.0)
    return max(LAYER_GROWTH * measured, allowed_noise("fp32", 2))


MOST_UNEXPLAINED_SHARE = 0.25
"""Share of the first flips that may be unexplained without an alarm: rare spikes of single scores
are sound, and too rare to be in the reference. None may be unexplained if all scores are equal."""
FAR_MOVERS = "far movers"
"""Obstacle if experts leave from or enter at ranks other than the last, by their weights."""
MOST_LISTED_MOVES = 5
"""Renumbered experts that a pattern lists."""


class PredictionDistance(NamedTuple):
    """Distance of the predictions of A and B, and the KL of a reference run."""

    logits: LogitsDiff | None
    reference: Estimate | None = None


def attribute_causes(
    alignment: Alignment,
    unranked: Sequence[tuple[int, int]],
    layers: Sequence[LayerDiff],
    shapes: Sequence[NoiseShape],
    smaller_gaps: Sequence[np.ndarray],
    expected: ExpectedFormat | None,
    predictions: PredictionDistance | None = None,
    excess: Sequence[Excess] | None = None,
    layers_before: int = 0,
) -> Causes:
    """Answer the three questions and draw the conclusion.

    Args:
        alignment: how the runs were aligned.
        unranked: for each layer, number of tokens of A and of B that do not choose the largest of
            their scores.
        layers: the compared layers.
        shapes: effects of the noise of each layer.
        smaller_gaps: for layers with scores of one side only, the share of tokens with a smaller
            gap than each first flip.
        expected: the format whose noise is expected.
        predictions: distance of the predictions, here and in a reference run.
        excess: where B exceeds reference runs; None without reference runs.
        layers_before: routed layers before the first compared one.
    """
    choice = _judge_choice(layers, unranked)
    flips = _judge_flips(layers, smaller_gaps)
    if excess is None:
        scored = [x.attribution is None or x.attribution.evidence == "scores" for x in layers]
        judged = [  # patterns were not calibrated on the noise of weights
            x if is_scored else x._replace(relative=None)
            for x, is_scored in zip(shapes, scored, strict=True)
        ]
        patterns = find_noise_patterns(judged, layers_before)
        patterns = patterns or loud_document_patterns(judged, expected, layers_before)
    else:
        patterns = find_patterns_without_reference(shapes) or _excess_patterns(shapes, excess)
    patterns = (*_alignment_patterns(alignment), *patterns)
    size = judge_noise_size(shapes, expected, excess, layers_before)
    shape = _judge_noise_shape(shapes, patterns)
    flipped = any(layer.flip.count for layer in layers)
    logits, reference = predictions or (None, None)
    outputs = judge_outputs(logits, reference, size, expected)
    as_expected = size.answer if expected is not None or size.answer == "no" else "cannot tell"
    conclusion = _diff_conclusion(flipped, choice.answer, flips.answer, as_expected, patterns)
    if outputs is not None and outputs.answer == "no" and conclusion not in ACCUSING:
        conclusion = "outputs differ"
    return Causes(
        conclusion=conclusion,
        choice=choice,
        flips=flips,
        size=size,
        shape=shape,
        patterns=patterns,
        expected=None if expected is None else expected.name,
        outputs=outputs,
    )


def _diff_conclusion(
    flipped: bool, choice: YesNo, flips: YesNo, size: YesNo, patterns: Sequence[Pattern]
) -> Conclusion:
    """The conclusion from the answers to the three questions."""
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
    if flips != "yes":
        return "cannot tell"
    return "explained by ties" if size == "yes" else "near-ties, size unknown"


def _judge_choice(layers: Sequence[LayerDiff], unranked: Sequence[tuple[int, int]]) -> ChoiceAnswer:
    """Judge whether each router chooses the largest of its own scores."""
    for layer, counts in zip(layers, unranked, strict=True):
        for side, count in zip("AB", counts, strict=True):
            if count:
                return ChoiceAnswer("no", layer.name, side, count)
    missing = tuple(side for side in "AB" if any(_lacks_scores(layer, side) for layer in layers))
    return ChoiceAnswer("cannot tell" if missing else "yes", missing=missing)


def _lacks_scores(layer: LayerDiff, side: str) -> bool:
    """Whether a side lacks the scores for checking its choice."""
    status = layer.attribution_status
    return f"{side} has expert ids only" in status or f"{side} has the scores of chosen" in status


def _judge_flips(layers: Sequence[LayerDiff], smaller_gaps: Sequence[np.ndarray]) -> FlipAnswer:
    """Judge whether the noise of their own token explains the first flips."""
    attributions = [layer.attribution for layer in layers if layer.attribution is not None]
    unjudged = next((x for x in layers if x.attribution is None and x.flip.count), None)
    first = sum(x.explained + x.unexplained for x in attributions)
    unexplained, later = (
        sum(getattr(x, n) for x in attributions) for n in ("unexplained", "later")
    )
    if unjudged is not None:
        shares = np.concatenate([np.zeros(0), *smaller_gaps])
        return FlipAnswer(
            "cannot tell",
            obstacle=unjudged.attribution_status.removeprefix("not attributable: "),
            near=len(shares),
            near_share=float(np.median(shares)) if len(shares) else None,
        )
    silent = sum(x.unexplained for x in attributions if x.noise == 0)
    is_odd = silent > 0 or unexplained > max(MOST_UNEXPLAINED, MOST_UNEXPLAINED_SHARE * first)
    movers, last = (sum(getattr(x, n) for x in attributions) for n in ("movers", "last"))
    if is_odd and movers:
        return FlipAnswer("cannot tell", obstacle=FAR_MOVERS)
    share = last / movers if movers else None
    return FlipAnswer("no" if is_odd else "yes", first, unexplained, later, last_share=share)


def _alignment_patterns(alignment: Alignment) -> list[Pattern]:
    """A token shift that contradicts the token ids, and permuted experts."""
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
                moves=tuple(pairs)[:MOST_LISTED_MOVES],
            )
        )
    return patterns


def _excess_patterns(shapes: Sequence[NoiseShape], excess: Sequence[Excess]) -> tuple[Pattern, ...]:
    """The group of tokens with the first excess, else growth of the noise along positions."""
    first = excess[0] if excess else None
    if first is None:
        return ()
    if first.kind == "all":
        growth = position_pattern(shapes[first.layer])
        return () if growth is None else (growth,)
    layer = shapes[first.layer - (first.kind == "expert")].name
    effect = 2 * math.log(first.ratio)
    return (Pattern(first.kind, layer, effect, 0.0, first.number, detail="reference"),)


def _judge_noise_shape(shapes: Sequence[NoiseShape], patterns: tuple[Pattern, ...]) -> ShapeAnswer:
    """Judge whether the noise is free of patterns that rounding does not make."""
    if patterns:
        return ShapeAnswer("no", patterns)
    measured = any(shape.relative is not None for shape in shapes)
    return ShapeAnswer("yes" if measured else "cannot tell")
