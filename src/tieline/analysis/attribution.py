"""Ties or a bug: three questions about two runs, each with its own evidence.

1. Does each router choose from its own scores? Where the scores of a side are known, its choice
   must be the largest of them, exact ties apart. If not, the choice is broken, whatever the noise.
2. Do first flips follow the noise of their own token? (`score_noise`) This clears sound runs. It
   rarely convicts: a bug that acts as noise widens the noise of the tokens whose flips it causes.
3. Is the noise of the size and the shape (`noise_shapes`) that was to be expected?

Where predictions were compared, a fourth: are they as near as that noise lets them be? Experts,
norms and the head of the last layers may be wrong although every route agrees.

A question that the inputs cannot answer is answered "cannot tell", with what is missing, and never
raises an alarm.

Size: a product of a router rounds weights, inputs and, in 16-bit formats, its result. With normal
numbers its relative error is ε (`ROUNDING`). Measured over families (`benchmarks/attribution.py
--calibrate`), the noise of the first routed layer, relative to the spread of its scores, is

    relative noise = c · ε,    0.36 <= c <= 3.5

for every format: c depends on the model, hardly on the format. Noise beyond 6 ε is therefore larger
than the format explains. Later layers add the noise of those before and are allowed four times as
much each, up to sixteen times; in 16 bits at most five times the loudest layer before. Sums in
float32 depend on their order and length; their ε is allowed 64 times as much. Where a model is at
hand, it runs five times more with its numbers rounded, and `excess_over_sound_runs` judges; beside
a single reference run noise may be 1.6 times as large.

attribute_causes   the answers and the conclusion
expected_format    the format that the caller names, else the one that both sides recorded
judge_size         whether the noise is larger than that format explains
sizes_like         the formats whose noise has this size
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import stats

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
    find_known_patterns,
    find_patterns,
    position_pattern,
)
from tieline.core.setting_fields import require_setting
from tieline.core.statistics import Estimate
from tieline.models.number_formats import OF_ROUTERS

ROUNDING = {
    "fp32": 5.1e-8,
    "tf32": 2.9e-4,
    "fp16": 4.1e-4,
    "bf16_in": 2.3e-3,
    "bf16": 3.3e-3,
    "int8_group": 5.3e-3,
    "int8": 9.2e-3,
    "fp8_e4m3": 3.6e-2,
    "fp8_e5m2": 7.2e-2,
    "int4_group": 9.7e-2,
    "int4": 1.2e-1,
}
"""ε: relative error of a product of normal numbers in each format, finest first."""
ALIASES = {"fp8": "fp8_e4m3", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
SUMS = 64.0
"""How much more than ε sums in float32 may differ."""
LARGEST, SMALLEST = 6.0, 0.3
"""Range of c that counts as the size of a format."""
GROWTH, MOST_GROWTH = 4.0, 16.0
"""How much more noise each layer may have than the one before, and all of them."""
GROWTH_IN_RUN = 5.0
"""How much more noise a layer in 16 bits may have than the loudest before it, at least ε: 3.6 in
587 sound pairs, where nothing is rounded in one layer alone."""
BEYOND = 1.6
"""How much more noise a layer may have than the same model emulated."""
TOLERANCES = {"fp32": 1.4, "tf32": 0.3, "bf16": 0.2, "bf16_in": 0.2, "fp16": 0.2}
"""τ: logarithm of how much more noise than emulated runs a sound run may have. Kernels of 16 bits
differ by the order and width of their sums."""
COARSE = 1.6
"""τ of 8 and 4 bits: a scale per tensor, channel or group, and 7 of 8 bits, differ five-fold."""
FEWEST_JUDGED = 100
"""Tokens without which nothing is said about the number of flips."""
FEWEST = 20
"""Tokens without which nothing is said about a layer."""


class Expected(NamedTuple):
    """A format whose noise is expected, and the source of that expectation."""

    name: str
    origin: str


def read_format(name: str) -> str:
    """Return the name in `ROUNDING` that is meant; raises on an unknown one."""
    format_name = ALIASES.get(name, name).removesuffix("-emulated")
    format_name = ALIASES.get(format_name, format_name)
    choices = ", ".join([*ROUNDING, "fp8"])
    require_setting(
        format_name in ROUNDING,
        "{expect}: no format {name}; one of {choices}",
        name=repr(name),
        choices=choices,
    )
    return format_name


def expected_format(
    format_name: str | None, a: Mapping[str, object], b: Mapping[str, object]
) -> Expected | None:
    """Return the format whose noise is expected; None if it is not stated.

    Args:
        format_name: what the caller expects.
        a: provenance of A.
        b: provenance of B.
    """
    if format_name is not None:
        return Expected(read_format(format_name), "as asked")
    names = [side.get("model") for side in (a, b)]
    if None in names or names[0] != names[1]:
        return None  # two models differ as their weights do
    formats = [recorded_format(side) for side in (a, b)]
    if None in formats:
        return None
    order = list(ROUNDING)
    return Expected(max(filter(None, formats), key=order.index), "the coarser of both sides")


def recorded_format(side: Mapping[str, object]) -> str | None:
    """Return the format in which a side says that it computed."""
    name = str(side.get("emulated", side.get("dtype"))).partition(" ")[0]
    name = ALIASES.get(name, name)
    return name if name in ROUNDING else None


def noise_tolerance(expected: Expected | None) -> float:
    """τ of the expected format (`excess_over_sound_runs`)."""
    return COARSE if expected is None else TOLERANCES.get(expected.name, COARSE)


def allowed_noise(name: str, depth: int) -> float:
    """Largest relative noise that a format explains `depth` layers after the first routed one."""
    error = ROUNDING[name] * (SUMS if name == "fp32" else 1.0)
    return LARGEST * error * min(GROWTH**depth, MOST_GROWTH)


def sizes_like(relative: float) -> tuple[str, ...]:
    """Return the formats of whole models whose noise has this size in a first routed layer.

    The finest and the coarsest of them, or one; ("less",) or ("more",) if no format fits.
    """
    if relative <= allowed_noise("fp32", 0):
        return ("fp32",)
    formats = [
        name
        for name, error in ROUNDING.items()
        if name not in ("fp32", *OF_ROUTERS) and SMALLEST * error <= relative <= LARGEST * error
    ]
    if not formats:
        return ("more",) if relative > LARGEST * ROUNDING["int4"] else ("less",)
    return (formats[0],) if len(formats) == 1 else (formats[0], formats[-1])


def judge_size(
    shapes: Sequence[NoiseShape],
    expected: Expected | None,
    excess: Sequence[Excess] | None = None,
) -> SizeAnswer:
    """Return whether the noise has the size that was to be expected.

    Args:
        shapes: effects of each layer, in order of depth.
        expected: the format; None if unknown.
        excess: where B exceeds reference runs; None without them.
    """
    measured = [(i, x) for i, x in enumerate(shapes) if x.relative is not None]
    if excess and expected is not None:
        return _size_of_excess(shapes, excess[0], expected)
    if not measured:
        too_many = None if excess is not None else _flips_beyond_format(shapes, expected)
        return too_many or SizeAnswer("cannot tell", "no scores")
    loudest = max(measured, key=lambda pair: pair[1].relative or 0.0)[1]
    first = next((x for _, x in measured if x.relative), None)
    if first is None:
        return _flips_beyond_format(shapes, expected) or SizeAnswer("yes", "equal")
    noise = SizeAnswer(
        "cannot tell",
        "not stated",
        layer=first.name,
        relative=first.relative,
        largest=None if loudest is first else loudest.relative,
        like=sizes_like(first.relative or 0.0),
    )
    if expected is None:
        return _flips_beyond_format(shapes, None) or noise
    if excess is None:
        answer = _judge_against(noise, measured, expected)
    else:
        expectation = {"expected": expected.name, "origin": expected.origin}
        answer = replace(noise, answer="yes", kind="reference", **expectation)
    too_many = _flips_beyond_format(shapes, expected) if answer.answer == "yes" else None
    return too_many or answer


MOST_FLIPS = {"fp32": 0.001, "tf32": 0.1, "fp16": 0.15, "bf16": 0.3, "bf16_in": 0.3}
MOST_UNKNOWN = 0.85
"""Share of the tokens of the first routed layer that may flip where no scores tell more, by format;
in 8 and 4 bits, or if no format is stated, most of them."""


def _flips_beyond_format(
    shapes: Sequence[NoiseShape], expected: Expected | None
) -> SizeAnswer | None:
    """The answer where flips alone are too many for the format; None where they are not.

    Without scores by a stated share. With scores and float32 by the 99.5 % quantile of a Poisson
    law with the expected number T f(0) E[(-n)₊] = T f(0) σ √2 / √(2π), f the density of the gap
    over the spread and σ the largest relative noise that float32 explains.
    """
    name = None if expected is None else expected.name
    for depth, shape in enumerate(shapes):
        most = MOST_FLIPS.get(name or "", MOST_UNKNOWN)
        if shape.tokens or depth:
            most = _float32_flips(shape, depth) if name == "fp32" else 1.0
        if shape.total >= FEWEST_JUDGED and shape.flips > most and shape.flips * shape.total > FEW:
            share = {"flips": shape.flips, "most_flips": most, "judged": shape.name}
            origin = "" if expected is None else expected.origin
            return SizeAnswer("no", "flips", expected=name, origin=origin, **share)
    return None


def _float32_flips(shape: NoiseShape, depth: int) -> float:
    """Share of the tokens that float32 flips at most, `depth` layers after the first."""
    if shape.density is None:
        return 1.0
    flips = shape.density * allowed_noise("fp32", depth) / math.sqrt(math.pi)
    return float(stats.poisson.ppf(0.995, flips)) / shape.total


def _size_of_excess(shapes: Sequence[NoiseShape], excess: Excess, expected: Expected) -> SizeAnswer:
    """The answer where something exceeds the reference runs."""
    shape = shapes[excess.layer]
    return SizeAnswer(
        "no",
        "reference",
        layer=shape.name,
        relative=shape.relative,
        like=sizes_like(shape.relative or 0.0),
        expected=expected.name,
        origin=expected.origin,
        judged=shape.name,
        ratio=excess.ratio,
    )


def _judge_against(
    noise: SizeAnswer, measured: Sequence[tuple[int, NoiseShape]], expected: Expected
) -> SizeAnswer:
    """The answer for a known format: by the reference run where there is one, else by ε."""
    noise = replace(noise, expected=expected.name, origin=expected.origin)
    compared = [x for _, x in measured if x.beyond is not None and x.tokens >= FEWEST]
    if compared:
        loud_layers = [x for x in compared if (x.beyond or 0.0) > BEYOND]
        judged = loud_layers[0] if loud_layers else max(compared, key=lambda x: x.beyond or 0.0)
        answer: YesNo = "no" if loud_layers else "yes"
        return replace(
            noise, answer=answer, kind="reference", judged=judged.name, ratio=judged.beyond
        )
    limits = _noise_limits(measured, expected.name)
    layers_beyond = [
        (x, limit)
        for (_, x), limit in zip(measured, limits, strict=True)
        if (x.relative or 0.0) > limit
    ]
    if not layers_beyond:
        return replace(noise, answer="yes", kind="format")
    judged, allowed = layers_beyond[0]
    return replace(
        noise,
        answer="no",
        kind="format",
        judged=judged.name,
        noise=judged.relative,
        allowed=allowed,
    )


def _noise_limits(measured: Sequence[tuple[int, NoiseShape]], name: str) -> list[float]:
    """Largest relative noise of each layer: by the format and, in 16 bits, by the layers before."""
    limits, loudest = [], 0.0
    for depth, shape in measured:
        limit = allowed_noise(name, depth)
        if loudest and name in TOLERANCES and name != "fp32" and shape.tokens >= FEWEST_JUDGED:
            limit = min(limit, GROWTH_IN_RUN * max(loudest, ROUNDING[name]))
        limits.append(limit)
        loudest = max(loudest, shape.relative or 0.0)
    return limits


LOGIT_SPREAD = 10.0
"""Standard deviation of logits, in nats, that noise relative to them is multiplied by."""
FAR = 4.0
"""How much more KL than a reference run counts as far: twice the deviation of the logits."""
FAR_UNKNOWN = 16.0
"""The same where a single document leaves the error of the means unknown."""
ERRORS = 3.0
"""Standard errors by which a KL must differ, its own and the reference's."""


def kl_of_noise(relative: float) -> float:
    """KL = Var(d)/2 in nats for logits that differ by this share of their spread."""
    return 0.5 * (relative * LOGIT_SPREAD) ** 2


def judge_outputs(
    logits: LogitsDiff | None,
    reference: Estimate | None,
    size: SizeAnswer,
    expected: Expected | None,
) -> OutputAnswer | None:
    """Return whether the predictions are as near as the noise lets them be; None if unknown.

    By the KL of a reference run where there is one. Else by the largest noise that the expected
    format explains or, if none is expected, by the noise of the scores grown by one layer; then
    over the tokens that no flip has reached.

    Args:
        logits: how far the final distributions are apart.
        reference: KL of the model in float32 to itself in the expected format.
        size: the noise of the scores.
        expected: the format.
    """
    if logits is None:
        return None
    name = None if expected is None else expected.name
    loss = logits.loss_b - logits.loss_a
    if reference is not None and reference.value is not None:
        errors = logits.kl_error, reference.standard_error
        far = FAR_UNKNOWN if None in errors else FAR
        limit = far * (reference.value + ERRORS * (errors[1] or 0.0)) + ERRORS * (errors[0] or 0.0)
        limit = max(limit, kl_of_noise(allowed_noise("fp32", 2)))
        answer: YesNo = "no" if logits.kl > limit else "yes"
        return OutputAnswer(answer, logits.kl, limit, reference.value, loss, name)
    relative = _largest_noise(size, name)
    if relative is None or logits.kl_before is None:
        return None
    limit = kl_of_noise(relative)
    answer = "no" if logits.kl_before > limit else "yes"
    return OutputAnswer(answer, logits.kl_before, limit, None, loss, name)


def _largest_noise(size: SizeAnswer, expected: str | None) -> float | None:
    """Relative noise that the outputs may have; None where nothing says it."""
    if expected is not None:
        return allowed_noise(expected, 2)
    if size.kind == "no scores":
        return None
    measured = max(size.largest or 0.0, size.relative or 0.0)
    return max(GROWTH * measured, allowed_noise("fp32", 2))


TOLERATED, FEW = 0.25, 5
"""Share and number of first flips that may be unexplained without an alarm: rare spikes of single
scores are sound, and too rare to be in the reference. None may be where all scores are equal."""
FAR_MOVERS = "far movers"
"""Obstacle where experts leave or enter in other places than the last, by their weights."""
MOST_MOVES = 5
"""Renumbered experts that a pattern names."""


class PredictionDistance(NamedTuple):
    """How far predictions are apart: of A and B, and the KL of a reference run."""

    logits: LogitsDiff | None
    reference: Estimate | None = None


def attribute_causes(
    alignment: Alignment,
    unranked: Sequence[tuple[int, int]],
    layers: Sequence[LayerDiff],
    shapes: Sequence[NoiseShape],
    near: Sequence[np.ndarray],
    expected: Expected | None,
    predictions: PredictionDistance | None = None,
    excess: Sequence[Excess] | None = None,
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
        predictions: how far the predictions are apart, here and in a reference run.
        excess: where B exceeds reference runs; None without them.
    """
    choice = _judge_choice(layers, unranked)
    flips = _judge_flips(layers, near)
    if excess is None:
        scored = [x.attribution is None or x.attribution.evidence == "scores" for x in layers]
        judged = [  # no pattern was ever tried on the noise of weights
            x if is_scored else x._replace(relative=None)
            for x, is_scored in zip(shapes, scored, strict=True)
        ]
        patterns = find_patterns(judged)
    else:
        patterns = find_known_patterns(shapes) or _excess_patterns(shapes, excess)
    patterns = (*_numbering_patterns(alignment), *patterns)
    size = judge_size(shapes, expected, excess)
    shape = _judge_shape(shapes, patterns)
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
    """The conclusion of the answers to the three questions."""
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
    """Whether each router chooses the largest of its own scores."""
    for layer, counts in zip(layers, unranked, strict=True):
        for side, count in zip("AB", counts, strict=True):
            if count:
                return ChoiceAnswer("no", layer.name, side, count)
    missing = tuple(side for side in "AB" if any(_lacks_scores(layer, side) for layer in layers))
    return ChoiceAnswer("cannot tell" if missing else "yes", missing=missing)


def _lacks_scores(layer: LayerDiff, side: str) -> bool:
    """Whether a side lacks the scores that its choice could be checked by."""
    status = layer.attribution_status
    return f"{side} has expert ids only" in status or f"{side} has the scores of chosen" in status


def _judge_flips(layers: Sequence[LayerDiff], near: Sequence[np.ndarray]) -> FlipAnswer:
    """Whether first flips are as wide as the noise of their own token."""
    attributions = [layer.attribution for layer in layers if layer.attribution is not None]
    unjudged = next((x for x in layers if x.attribution is None and x.flip.count), None)
    first = sum(x.explained + x.unexplained for x in attributions)
    unexplained, later = (
        sum(getattr(x, n) for x in attributions) for n in ("unexplained", "later")
    )
    if unjudged is not None:
        shares = np.concatenate([np.zeros(0), *near])
        return FlipAnswer(
            "cannot tell",
            obstacle=unjudged.attribution_status.removeprefix("not attributable: "),
            near=len(shares),
            near_share=float(np.median(shares)) if len(shares) else None,
        )
    silent = sum(x.unexplained for x in attributions if x.noise == 0)
    is_odd = silent > 0 or unexplained > max(FEW, TOLERATED * first)
    movers, last = (sum(getattr(x, n) for x in attributions) for n in ("movers", "last"))
    if is_odd and movers:
        return FlipAnswer("cannot tell", obstacle=FAR_MOVERS)
    share = last / movers if movers else None
    return FlipAnswer("no" if is_odd else "yes", first, unexplained, later, last_share=share)


def _numbering_patterns(alignment: Alignment) -> list[Pattern]:
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


def _excess_patterns(shapes: Sequence[NoiseShape], excess: Sequence[Excess]) -> tuple[Pattern, ...]:
    """The group that holds the first excess, if one does; else its growth along positions."""
    first = excess[0] if excess else None
    if first is None:
        return ()
    if first.kind == "all":
        growth = position_pattern(shapes[first.layer])
        return () if growth is None else (growth,)
    layer = shapes[first.layer - (first.kind == "expert")].name
    effect = 2 * math.log(first.ratio)
    return (Pattern(first.kind, layer, effect, 0.0, first.number, detail="reference"),)


def _judge_shape(shapes: Sequence[NoiseShape], patterns: tuple[Pattern, ...]) -> ShapeAnswer:
    """Whether the noise lacks any pattern that rounding does not make."""
    if patterns:
        return ShapeAnswer("no", patterns)
    measured = any(shape.relative is not None for shape in shapes)
    return ShapeAnswer("yes" if measured else "cannot tell")
