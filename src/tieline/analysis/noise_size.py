"""Whether the noise between two runs has the size that a number format explains.

A product of a router rounds weights, inputs and, in 16-bit formats, its result. With normal numbers
its relative error is ε (`PRODUCT_ERRORS`). Measured over families (`benchmarks/attribution.py
--calibrate`), the noise of the first routed layer, relative to the spread of its scores, is

    relative noise = c · ε,    0.36 <= c <= 3.5

for every format: c depends on the model, hardly on the format. Noise beyond 6 ε is therefore larger
than the format explains. Later layers add the noise of earlier ones and may each have four times as
much, up to sixteen times; in 16 bits at most five times the loudest earlier layer. That layer
counts by the mean over its tokens if it is above the median: attention hands the noise of few loud
tokens to all, as where a hard choice of its own picks the tokens it attends to. Sums in float32
depend on their order and length; their ε may be 64 times as large. If a model is available, it runs
five times more in emulated rounding and `excess_over_sound_runs` decides; compared with a single
reference run, noise may be 1.6 times as large.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from scipy import stats

from tieline.analysis.diff_records import Pattern, SizeAnswer, YesNo
from tieline.analysis.excess_over_sound_runs import LATER_LAYER_FACTOR, Excess
from tieline.analysis.noise_shapes import LIMITS, NoiseShape
from tieline.core.setting_fields import require_setting
from tieline.models.number_formats import OF_ROUTERS

LOGIT_SPREAD = 10.0
"""Standard deviation of the logits over the vocabulary in nats, as language models have it; turns
relative noise of the logits into nats."""
PRODUCT_ERRORS = {
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
FORMAT_ALIASES = {"fp8": "fp8_e4m3", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
FLOAT32_SUM_FACTOR = 64.0
"""Factor of ε by which sums in float32 may differ."""
SAFETY_FACTOR, SMALLEST_FACTOR = 6.0, 0.3
"""Largest and smallest c that a format explains."""
LAYER_GROWTH, LARGEST_LAYER_GROWTH = 4.0, 16.0
"""Largest growth of the noise from one layer to the next, and over all layers."""
GROWTH_IN_16_BITS = 5.0
"""Largest ratio in 16 bits of a layer's noise to that of the loudest earlier layer, which counts as
at least ε. By medians it is at most 3.6 in 587 sound pairs without formats that round one layer
alone."""
LARGEST_RATIO = 1.6
"""Largest ratio of a layer's noise to that of one emulated reference run."""
TOLERANCES = {"fp32": 1.4, "tf32": 0.3, "bf16": 0.2, "bf16_in": 0.2, "fp16": 0.2}
"""τ: logarithm of the largest ratio of a sound run's noise to that of emulated runs. Kernels of 16
bits differ by the order and width of their sums."""
COARSE_TOLERANCE = 1.6
"""τ of 8 and 4 bits: scales per tensor, channel or group, and 7 instead of 8 bits, change the noise
five-fold."""
FEWEST_COUNTED = 100
"""Fewest tokens for judging the number of flips."""
FEWEST_TOKENS = 20
"""Fewest tokens for judging a layer."""
MOST_UNEXPLAINED = 5
"""Number of flips that may be unexplained without an alarm."""


class ExpectedFormat(NamedTuple):
    """A format whose noise is expected, and the source of that expectation."""

    name: str
    origin: str


def canonical_format(name: object) -> str:
    """Name of a format, its alias or dtype in `PRODUCT_ERRORS`; raises on an unknown one."""
    format_name = str(name).lower().removeprefix("torch.").removesuffix("-emulated")
    format_name = FORMAT_ALIASES.get(format_name, format_name)
    choices = ", ".join([*PRODUCT_ERRORS, "fp8"])
    require_setting(
        format_name in PRODUCT_ERRORS,
        "{expect}: no format {name}; one of {choices}",
        name=repr(name),
        choices=choices,
    )
    return format_name


def expected_format(
    format_name: str | None, a: Mapping[str, object], b: Mapping[str, object]
) -> ExpectedFormat | None:
    """The format whose noise is expected; None if it is not stated.

    Args:
        format_name: what the caller expects.
        a: provenance of A.
        b: provenance of B.
    """
    if format_name is not None:
        return ExpectedFormat(canonical_format(format_name), "as asked")
    names = [side.get("model") for side in (a, b)]
    if None in names or names[0] != names[1]:
        return None  # two models differ by their weights
    formats = [recorded_format(side) for side in (a, b)]
    if None in formats:
        return None
    order = list(PRODUCT_ERRORS)
    return ExpectedFormat(max(filter(None, formats), key=order.index), "the coarser of both sides")


def recorded_format(provenance: Mapping[str, object]) -> str | None:
    """Format that a side recorded as that of its computation; None if there is none."""
    name = str(provenance.get("emulated", provenance.get("dtype"))).partition(" ")[0]
    name = FORMAT_ALIASES.get(name, name)
    return name if name in PRODUCT_ERRORS else None


def noise_tolerance(expected: ExpectedFormat | None) -> float:
    """τ of the expected format (`excess_over_sound_runs`)."""
    return COARSE_TOLERANCE if expected is None else TOLERANCES.get(expected.name, COARSE_TOLERANCE)


def allowed_noise(name: str, depth: int) -> float:
    """Largest relative noise that a format explains `depth` layers after the first routed one."""
    product_error = PRODUCT_ERRORS[name] * (FLOAT32_SUM_FACTOR if name == "fp32" else 1.0)
    return SAFETY_FACTOR * product_error * min(LAYER_GROWTH**depth, LARGEST_LAYER_GROWTH)


def formats_with_noise(relative: float) -> tuple[str, ...]:
    """Formats of whole models that explain this relative noise in a first routed layer.

    The finest and the coarsest of them, or one; ("less",) or ("more",) if no format does.
    """
    if relative <= allowed_noise("fp32", 0):
        return ("fp32",)
    formats = [
        name
        for name, error in PRODUCT_ERRORS.items()
        if name not in ("fp32", *OF_ROUTERS)
        and SMALLEST_FACTOR * error <= relative <= SAFETY_FACTOR * error
    ]
    if not formats:
        return ("more",) if relative > SAFETY_FACTOR * PRODUCT_ERRORS["int4"] else ("less",)
    return (formats[0],) if len(formats) == 1 else (formats[0], formats[-1])


def judge_noise_size(
    shapes: Sequence[NoiseShape],
    expected: ExpectedFormat | None,
    excess: Sequence[Excess] | None = None,
    layers_before: int = 0,
) -> SizeAnswer:
    """Judge whether the noise has the expected size.

    Args:
        shapes: effects of each layer, in order of depth.
        expected: the expected format; None if unknown.
        excess: where B exceeds reference runs; None without reference runs.
        layers_before: routed layers before the first compared one.
    """
    by_depth = list(enumerate(shapes, layers_before))
    measured = [(i, x) for i, x in by_depth if x.relative is not None]
    if excess and expected is not None:
        return _excess_answer(shapes, excess[0], expected)
    if not measured:
        too_many = None if excess is not None else _judge_flip_count(by_depth, expected)
        return too_many or SizeAnswer("cannot tell", "no scores")
    loudest = max(measured, key=lambda pair: pair[1].relative or 0.0)[1]
    first = next((x for _, x in measured if x.relative), None)
    if first is None:
        return _judge_flip_count(by_depth, expected) or SizeAnswer("yes", "equal")
    noise = SizeAnswer(
        "cannot tell",
        "not stated",
        layer=first.name,
        relative=first.relative,
        largest=None if loudest is first else loudest.relative,
        like=formats_with_noise(first.relative or 0.0),
    )
    if expected is None:
        return _judge_flip_count(by_depth, None) or noise
    if excess is None:
        answer = _judge_against_format(noise, measured, expected)
    else:
        answer = _judge_beside_references(noise, measured, expected)
    too_many = _judge_flip_count(by_depth, expected) if answer.answer == "yes" else None
    return too_many or answer


MOST_FLIPS = {"fp32": 0.001, "tf32": 0.1, "fp16": 0.15, "bf16": 0.3, "bf16_in": 0.3}
MOST_FLIPS_UNKNOWN = 0.85
"""Largest share of flipped tokens in the first routed layer without scores, by format, and in 8 and
4 bits or if no format is stated."""


def _judge_flip_count(
    by_depth: Sequence[tuple[int, NoiseShape]], expected: ExpectedFormat | None
) -> SizeAnswer | None:
    """The answer "no" if flips alone are too many for the format, else None.

    The limit is a fixed share without scores. With scores in float32 it is the 99.5 % quantile of a
    Poisson law with mean T f(0) E[(-n)₊] = T f(0) σ √2 / √(2π), f the density of the gap over the
    spread and σ the largest relative noise that float32 explains.
    """
    name = None if expected is None else expected.name
    for depth, shape in by_depth:
        limit = MOST_FLIPS.get(name or "", MOST_FLIPS_UNKNOWN)
        if shape.tokens or depth:
            limit = _most_float32_flips(shape, depth) if name == "fp32" else 1.0
        too_many = shape.flips > limit and shape.flips * shape.total > MOST_UNEXPLAINED
        if too_many and shape.total >= FEWEST_COUNTED:
            share = {"flips": shape.flips, "most_flips": limit, "judged": shape.name}
            origin = "" if expected is None else expected.origin
            return SizeAnswer("no", "flips", expected=name, origin=origin, **share)
    return None


def _most_float32_flips(shape: NoiseShape, depth: int) -> float:
    """Largest share of tokens that float32 flips, `depth` layers after the first routed one."""
    if shape.density is None:
        return 1.0
    flips = shape.density * allowed_noise("fp32", depth) / math.sqrt(math.pi)
    return float(stats.poisson.ppf(0.995, flips)) / shape.total


def _excess_answer(
    shapes: Sequence[NoiseShape], excess: Excess, expected: ExpectedFormat
) -> SizeAnswer:
    """The answer "no" for a layer that exceeds the reference runs."""
    shape = shapes[excess.layer]
    return SizeAnswer(
        "no",
        "reference",
        layer=shape.name,
        relative=shape.relative,
        like=formats_with_noise(shape.relative or 0.0),
        expected=expected.name,
        origin=expected.origin,
        judged=shape.name,
        ratio=excess.ratio,
    )


def _judge_against_format(
    noise: SizeAnswer, measured: Sequence[tuple[int, NoiseShape]], expected: ExpectedFormat
) -> SizeAnswer:
    """The answer for a known format: by the reference run if there is one, else by ε."""
    noise = replace(noise, expected=expected.name, origin=expected.origin)
    compared = [
        x for _, x in measured if x.reference_ratio is not None and x.tokens >= FEWEST_TOKENS
    ]
    if compared:
        loud_layers = [x for x in compared if (x.reference_ratio or 0.0) > LARGEST_RATIO]
        judged = (
            loud_layers[0] if loud_layers else max(compared, key=lambda x: x.reference_ratio or 0.0)
        )
        answer: YesNo = "no" if loud_layers else "yes"
        return replace(
            noise, answer=answer, kind="reference", judged=judged.name, ratio=judged.reference_ratio
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


def _judge_beside_references(
    noise: SizeAnswer, measured: Sequence[tuple[int, NoiseShape]], expected: ExpectedFormat
) -> SizeAnswer:
    """The answer for a run without an excess over reference runs.

    Flips may have reached all but a few tokens of a late layer, which are then judged there. Such a
    layer is too loud if it is beyond the limit of the format and, by its median token, beyond the
    references as well.
    """
    expectation = {"expected": expected.name, "origin": expected.origin}
    largest_ratio = math.exp(LATER_LAYER_FACTOR * noise_tolerance(expected))
    for (_, shape), limit in zip(measured, _noise_limits(measured, expected.name), strict=True):
        ratio = shape.reference_ratio or 0.0
        if (shape.relative or 0.0) > limit and ratio > largest_ratio:
            judged = {"judged": shape.name, "ratio": ratio} | expectation
            return replace(noise, answer="no", kind="reference", **judged)
    return replace(noise, answer="yes", kind="reference", **expectation)


def loud_document_patterns(
    shapes: Sequence[NoiseShape], expected: ExpectedFormat | None, layers_before: int = 0
) -> tuple[Pattern, ...]:
    """The pattern of documents louder than a 16-bit format explains, while most are not.

    The limit of the first routed layer holds for the median noise of each document too. It also has
    to be as far above that of the median document as the limit of "document" says, which tells one
    document alone.
    """
    name = "" if expected is None else expected.name
    shape = next((shape for shape in shapes if shape.relative), None)
    if name not in TOLERANCES or name == "fp32" or layers_before or shape is None:
        return ()
    loud, limit = shape.loud_document, LIMITS["document"]
    if loud is None or loud.relative <= allowed_noise(name, 0) or 2 * math.log(loud.ratio) < limit:
        return ()
    effect = 2 * math.log(loud.ratio)
    return (Pattern("document", shape.name, effect, limit, loud.number, detail="most"),)


def _noise_limits(measured: Sequence[tuple[int, NoiseShape]], name: str) -> list[float]:
    """Largest relative noise of each layer by the format and, in 16 bits, by the earlier layers."""
    limits, loudest = [], 0.0
    for depth, shape in measured:
        limit = allowed_noise(name, depth)
        if loudest and name in TOLERANCES and name != "fp32" and shape.tokens >= FEWEST_COUNTED:
            limit = min(limit, GROWTH_IN_16_BITS * max(loudest, PRODUCT_ERRORS[name]))
        limits.append(limit)
        loudest = max(loudest, shape.relative or 0.0, shape.mean or 0.0)
    return limits


def kl_of_logit_noise(relative_noise: float) -> float:
    """KL = Var(d)/2 in nats for logits with this noise relative to their spread."""
    return 0.5 * (relative_noise * LOGIT_SPREAD) ** 2
