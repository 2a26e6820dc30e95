"""Patterns in the noise between two runs that rounding does not make.

Rounding acts on all layers, experts, documents and positions in much the same way; a bug often does
not. Each test compares a group of tokens with the others by the level log v of their noise
(`score_noise`), over tokens without an earlier flip, which would explain their noise:

    positions   growth of the level with log2(1 + position), from position 1 to the last, in the
                first layer with noise: rotary tables and caches (growing), masks (falling)
    document    level of the loudest document over that of the third loudest, in the same layer
    expert      growth of the level since the layer before, over tokens that chose an expert there:
                the largest over the third largest, so that an exchanged pair stands out as well
    row         level of one expert's own scores, the largest over the third largest
    offset      share of the noise that is a constant per expert, and its correlation with the
                recorded selection bias
    layer       relative size over that of the neighbouring layers
    lag         share of the flips that give a token the experts of its neighbour in A
    exchanged   share of the single swaps in which two experts have each other's scores

Sound runs have weaker patterns: expert outputs differ in size, sums grow longer along a sequence,
flips spread within a document. The limits below are therefore effects and not only levels of
significance. Each is larger than the largest effect in some hundred sound pairs of six families
(`benchmarks/attribution.py --calibrate`), and an effect must also be five to six standard errors
away from zero.

measure_noise_shape   the effects of one layer
find_noise_patterns   the most specific effect beyond its limit
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tieline.analysis.diff_records import Pattern, PatternKind
from tieline.analysis.score_noise import LayerNoise
from tieline.analysis.single_swaps import ExchangedSwaps

LEAST_STANDARD_ERRORS = 6.0
"""Least number of standard errors between an effect and zero."""
FEWEST_TOKENS = 20
"""Fewest tokens for judging a group."""
LIMITS = {
    "positions": 3.0,
    "document": 2.5,
    "expert": 2.0,
    "row": 4.0,
    "offset": 0.7,
    "spike": 3.5,
    "lag": 0.5,
    "exchanged scores": 0.03,
}
"""Limits of the effects: differences of log v, shares, or ratios of sizes."""
FEWEST_EXCHANGED = 6
"""Fewest swaps with exchanged scores that count: 3 at most in 340 sound pairs of layers."""
SINGLE_OFFSET = 0.8
"""Least share of offsets that no recorded bias explains: rows of a router rounded to 4 bits shift
all scores of an expert where its inputs have much in common (0.74); a dropped bias has 0.83."""
LEAST_LIKENESS = 0.8
"""Least correlation of offsets that are a recorded bias."""
LEAST_BIAS_SHARE = 0.1
"""Least size of such offsets over the bias: smaller ones are rounding of its largest numbers."""
FLOAT32_NOISE = 2e-5
"""Relative noise of sums in float32: a pattern in it that flips no token is of no consequence."""
SIXTEEN_BIT_NOISE = 0.025
"""Largest relative noise of 16 bits, by another attention kernel, which grows from position 1."""


class Outlier(NamedTuple):
    """The loudest group.

    Attributes:
        group: number of the group.
        excess: its level minus that of the third loudest.
        error: standard error of the excess.
    """

    group: int
    excess: float
    error: float

    def exceeds(self, limit: float) -> bool:
        """Whether the excess is large and significant."""
        return self.excess >= limit and self.excess >= LEAST_STANDARD_ERRORS * self.error


class LoudDocument(NamedTuple):
    """The document with the largest median noise.

    Attributes:
        number: number of the document.
        relative: its median noise over the spread of the layer's scores.
        ratio: its median noise over that of the median document.
    """

    number: int
    relative: float
    ratio: float


class NoiseShape(NamedTuple):
    """Effects of one layer; None with too few tokens or groups.

    Attributes:
        name: name of the layer in A.
        relative: size of the noise over the spread of the scores; None if unknown.
        tokens: number of tokens without an earlier flip whose noise is known.
        rise: growth of the level from the first to the last position, with its standard error.
        document: the loudest document.
        expert: the expert of the layer before whose tokens gained most noise.
        row: the expert whose own scores differ most.
        offset: share of the noise that is a constant per expert.
        likeness: |correlation| of these constants with the recorded selection bias; None without.
        lag: shift, share and number of the flips with the experts of a neighbour in A.
        exchanged: single swaps in which two experts have each other's scores; None without scores.
        reference_ratio: noise of the median token over that of reference runs; None without one.
        flips: share of the tokens that flip.
        total: number of tokens of the layer.
        density: tokens per unit of gap over spread, at a gap of zero; None without scores.
        mean: mean noise of all tokens over the spread; None without scores.
        loud_document: the document with the largest median noise; None with fewer than four.
    """

    name: str
    relative: float | None
    tokens: int
    rise: tuple[float, float] | None = None
    document: Outlier | None = None
    expert: Outlier | None = None
    row: Outlier | None = None
    offset: float | None = None
    likeness: float | None = None
    lag: tuple[int, float, int] | None = None
    exchanged: ExchangedSwaps | None = None
    reference_ratio: float | None = None
    flips: float = 0.0
    total: int = 0
    density: float | None = None
    mean: float | None = None
    loud_document: LoudDocument | None = None


class TokenKeys(NamedTuple):
    """Documents and positions of the compared tokens, in order."""

    documents: Int[np.ndarray, " tokens"]
    positions: Int[np.ndarray, " tokens"]


def measure_noise_shape(
    name: str,
    noise: LayerNoise,
    fresh: Bool[np.ndarray, " tokens"],
    keys: TokenKeys,
    layer_before: tuple[Float[np.ndarray, " tokens"], Int[np.ndarray, "tokens k"]] | None,
    bias: Float[np.ndarray, " experts"] | None,
) -> NoiseShape:
    """Measure the effects of one layer, except the lag.

    Args:
        name: name of the layer in A.
        noise: differences of the scores.
        fresh: tokens without an earlier flip.
        keys: documents and positions of the tokens.
        layer_before: level of each token in the layer before, and the experts that A chose there.
        bias: selection bias by which the two sides may differ.
    """
    relative = noise.relative(fresh)
    level = noise.level
    rows = np.flatnonzero(fresh & noise.measured)
    shape = NoiseShape(name, relative, len(rows), mean=noise.relative_mean)
    if not relative or len(rows) < FEWEST_TOKENS:
        return shape
    noisy = rows[noise.variance[rows] > (3 * noise.floor) ** 2]
    differences = _CentredDifferences(noise, rows)
    share, means = _expert_offsets(differences)
    numbers, codes = np.unique(keys.documents[rows], return_inverse=True)
    outlier = _loudest_group(codes, level[rows], len(numbers))
    return shape._replace(
        rise=_noise_growth_with_position(level[noisy], keys.positions[noisy]),
        document=None if outlier is None else outlier._replace(group=int(numbers[outlier.group])),
        loud_document=_loudest_document(numbers, codes, level[rows], noise.spread),
        expert=None
        if layer_before is None
        else _loudest_expert(level - layer_before[0], rows, layer_before[1]),
        row=_loudest_row(differences),
        offset=share,
        likeness=None if bias is None else _bias_likeness(means, bias),
    )


def _noise_growth_with_position(
    log_noise: np.ndarray, positions: np.ndarray
) -> tuple[float, float] | None:
    """Growth of the log noise over the document and its standard error; None with few positions.

    A least-squares line over doublings of the position, the first token apart.
    """
    octave = np.log2(positions + 1).astype(int)
    log_noise, octave = log_noise[octave > 0], octave[octave > 0]
    count = np.bincount(octave)
    octaves = np.flatnonzero(count >= 8)
    if len(octaves) < 3:
        return None
    sums = np.bincount(octave, weights=log_noise)
    squares = np.bincount(octave, weights=log_noise**2)
    mean = sums[octaves] / count[octaves]
    variance = (squares[octaves] / count[octaves] - mean**2) / count[octaves]
    centred = octaves - octaves.mean()
    weight = centred / (centred**2).sum() * (octaves[-1] - octaves[0])
    return float(weight @ mean), math.sqrt(max(float(weight**2 @ variance), 0.0))


def _loudest_expert(growth: np.ndarray, rows: np.ndarray, chosen: np.ndarray) -> Outlier | None:
    """The expert of the layer before whose tokens gained most noise, over the third most."""
    k, rows = chosen.shape[1], rows[~np.isnan(growth[rows])]
    if len(rows) == 0:
        return None
    codes = chosen[rows].ravel()
    values = np.repeat(growth[rows], k)
    return _loudest_group(codes, values, int(codes.max()) + 1)


def _loudest_group(codes: np.ndarray, values: np.ndarray, groups: int) -> Outlier | None:
    """The group with the largest mean, over the third largest; None with fewer than four groups."""
    count = np.bincount(codes, minlength=groups)
    tested = np.flatnonzero(count >= FEWEST_TOKENS)
    if len(tested) < 4:
        return None
    sums, squares = (np.bincount(codes, weights=w, minlength=groups) for w in (values, values**2))
    mean = sums[tested] / count[tested]
    error = np.sqrt(np.maximum(squares[tested] / count[tested] - mean**2, 0.0) / count[tested])
    return _loudest_over_third(tested, mean, error)


def _loudest_document(
    numbers: np.ndarray, codes: np.ndarray, level: np.ndarray, spread: float
) -> LoudDocument | None:
    """The document with the largest median noise; None with fewer than four of enough tokens."""
    count = np.bincount(codes, minlength=len(numbers))
    tested = np.flatnonzero(count >= FEWEST_TOKENS)
    if len(tested) < 4:
        return None
    ordered = level[np.lexsort((level, codes))]
    middle = (np.cumsum(count) - count + count // 2)[tested]
    medians = ordered[middle]
    loudest = int(medians.argmax())
    noise = math.exp(medians[loudest] / 2)
    ratio = math.exp((medians[loudest] - float(np.median(medians))) / 2)
    return LoudDocument(int(numbers[tested[loudest]]), noise / spread, ratio)


def _loudest_over_third(groups: np.ndarray, level: np.ndarray, error: np.ndarray) -> Outlier:
    """The group with the largest level, over the third largest."""
    order = np.argsort(-level)
    first, third = order[0], order[2]
    excess = float(level[first] - level[third])
    return Outlier(int(groups[first]), excess, math.hypot(error[first], error[third]))


class _CentredDifferences:
    """Differences of the scores of some tokens minus each token's mean, with their experts."""

    def __init__(self, noise: LayerNoise, rows: np.ndarray) -> None:
        measured, values = noise.common[rows], noise.difference[rows]
        mean = values.sum(1) / np.maximum(measured.sum(1), 1)
        self.values = (values - mean[:, None])[measured]
        self.experts = noise.experts[rows][measured]
        self.squares = self.values * self.values  # ten times as fast as a power
        self.count = np.bincount(self.experts)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum of the values of each expert."""
        return np.bincount(self.experts, weights=values)


def _loudest_row(differences: _CentredDifferences) -> Outlier | None:
    """The expert whose scores have the largest log mean square of noise, over the third largest."""
    count = differences.count
    tested = np.flatnonzero(count >= FEWEST_TOKENS)
    if len(tested) < 4:
        return None
    sums, fourth = (
        differences.sums(differences.squares),
        differences.sums(differences.squares * differences.squares),
    )
    mean = np.maximum(sums[tested] / count[tested], np.finfo(float).tiny)
    spread = np.sqrt(np.maximum(fourth[tested] / count[tested] / mean**2 - 1, 0.0) / count[tested])
    return _loudest_over_third(tested, np.log(mean), spread)


def _expert_offsets(differences: _CentredDifferences) -> tuple[float | None, np.ndarray]:
    """Share of the noise that is a constant per expert, and these constants (NaN if too rare)."""
    count, tested = differences.count, differences.count >= FEWEST_TOKENS
    means = np.where(tested, differences.sums(differences.values) / np.maximum(count, 1), np.nan)
    total = float(differences.squares.sum())
    if total == 0 or tested.sum() < 4:
        return None, means
    return float((count[tested] * means[tested] ** 2).sum()) / total, means


def _bias_likeness(means: np.ndarray, bias: np.ndarray) -> float | None:
    """|correlation| of the offsets with the bias, over the experts with offsets.

    None if the offsets are small compared with the bias, as for a rounded bias.
    """
    chosen = np.flatnonzero(~np.isnan(means[: len(bias)]))
    if len(chosen) < 4 or np.ptp(bias[chosen]) == 0 or np.ptp(means[chosen]) == 0:
        return None
    if np.std(means[chosen]) < LEAST_BIAS_SHARE * np.std(bias[chosen]):
        return None
    return abs(float(np.corrcoef(means[chosen], bias[chosen])[0, 1]))


def flip_lag(
    chosen_a: Int[np.ndarray, "tokens k"],
    chosen_b: Int[np.ndarray, "tokens k"],
    flipped: Bool[np.ndarray, " tokens"],
    keys: TokenKeys,
) -> tuple[int, float, int] | None:
    """The lag at which most flips have the experts of a neighbour in A: shift, share, number.

    None unless twenty flips have a neighbour. The share at lag two, which sound runs have as well
    because neighbours are alike, is subtracted.
    """
    rows = np.flatnonzero(flipped)
    if len(rows) < FEWEST_TOKENS:
        return None
    shares = {lag: _lagged_share(chosen_a, chosen_b, rows, keys, lag) for lag in (-2, -1, 1, 2)}
    lag = max((-1, 1), key=lambda shift: shares[shift][0])
    share, count = shares[lag]
    return (lag, share - shares[2 * lag][0], count) if count >= FEWEST_TOKENS else None


def _lagged_share(
    chosen_a: np.ndarray, chosen_b: np.ndarray, rows: np.ndarray, keys: TokenKeys, lag: int
) -> tuple[float, int]:
    """Share of rows whose experts in B are those of A `lag` tokens earlier, and number of rows."""
    other = rows - lag
    inside = (other >= 0) & (other < len(chosen_a))
    rows, other = rows[inside], other[inside]
    same = keys.documents[rows] == keys.documents[other]
    same &= keys.positions[rows] - keys.positions[other] == lag
    rows, other = rows[same], other[same]
    if len(rows) == 0:
        return 0.0, 0
    equal = np.sort(chosen_b[rows], axis=1) == np.sort(chosen_a[other], axis=1)
    return float(equal.all(1).mean()), len(rows)


def find_noise_patterns(
    shapes: Sequence[NoiseShape], layers_before: int = 0
) -> tuple[Pattern, ...]:
    """The most specific pattern beyond its limit, if there is one.

    Patterns that it implies are left out: an exchanged expert also makes a noisy layer.

    Args:
        shapes: the layers in order of depth.
        layers_before: routed layers before the first compared one. If there are any, their flips
            are unknown, and the noise may grow with them along positions and in a document.
    """
    noisy = [x for x in shapes if x.relative and (x.flips or x.relative > FLOAT32_NOISE)]
    first = [] if layers_before else noisy[:1]
    experts = [x for shape in noisy if (x := _loud_expert_pattern(shape, shapes))]
    offsets = [x for shape in noisy if (x := _expert_offset_pattern(shape, shapes))]
    rows = [x for shape in noisy if (x := _outlier_pattern("row", shape.name, shape.row))]
    positions = [x for shape in first if (x := position_pattern(shape))]
    documents = [x for s in first if (x := _outlier_pattern("document", s.name, s.document))]
    layers = _layer_patterns(shapes)
    lags = [x for shape in shapes if (x := _neighbour_lag_pattern(shape))][:1]
    exchanges = [x for shape in shapes if (x := _exchange_pattern(shape))]
    for patterns in (lags, exchanges, offsets, experts, rows, positions, documents, layers):
        if patterns:
            return (max(patterns, key=lambda pattern: abs(pattern.effect) / pattern.limit),)
    return ()


def find_patterns_without_reference(shapes: Sequence[NoiseShape]) -> tuple[Pattern, ...]:
    """The pattern that needs no reference run: a lag, exchanged scores, or a recorded bias."""
    lags = [x for shape in shapes if (x := _neighbour_lag_pattern(shape))]
    exchanges = [x for shape in shapes if (x := _exchange_pattern(shape))]
    offsets = [
        x for shape in shapes if shape.relative and (x := _expert_offset_pattern(shape, shapes))
    ]
    return tuple([*lags, *exchanges, *(x for x in offsets if x.detail == "bias")][:1])


def _neighbour_lag_pattern(shape: NoiseShape) -> Pattern | None:
    """Pattern of a layer whose flips mostly have the experts of a neighbour."""
    limit = LIMITS["lag"]
    if shape.lag is None or shape.lag[1] < limit:
        return None
    lag, share, count = shape.lag
    return Pattern("lag", shape.name, share, limit, number=lag, flips=count)


def _exchange_pattern(shape: NoiseShape) -> Pattern | None:
    """Pattern of a layer in which many swaps give two experts each other's scores."""
    limit, exchanged = LIMITS["exchanged scores"], shape.exchanged
    if exchanged is None or exchanged.count < max(FEWEST_EXCHANGED, limit * exchanged.swaps):
        return None
    share = exchanged.count / exchanged.swaps
    return Pattern("exchanged scores", shape.name, share, limit, flips=exchanged.count)


def _loud_expert_pattern(shape: NoiseShape, shapes: Sequence[NoiseShape]) -> Pattern | None:
    """Pattern of an expert of the layer before whose tokens gained noise."""
    index = next(i for i, other in enumerate(shapes) if other.name == shape.name)
    return _outlier_pattern("expert", shapes[index - 1].name, shape.expert)


def _outlier_pattern(kind: PatternKind, layer: str, outlier: Outlier | None) -> Pattern | None:
    """Pattern of a group whose excess is large and significant."""
    limit = LIMITS[kind]
    if outlier is None or not outlier.exceeds(limit):
        return None
    return Pattern(kind, layer, outlier.excess, limit, number=outlier.group)


def _expert_offset_pattern(shape: NoiseShape, shapes: Sequence[NoiseShape]) -> Pattern | None:
    """Pattern of offsets that are the recorded bias, or that a single layer has."""
    limit = LIMITS["offset"]
    share, likeness = shape.offset or 0.0, shape.likeness or 0.0
    is_bias = likeness >= LEAST_LIKENESS and share >= limit / 2
    other_offsets = [other.offset or 0.0 for other in shapes if other.name != shape.name]
    is_large = (shape.relative or 0.0) >= SIXTEEN_BIT_NOISE  # a rounded bias shifts scores too
    is_single = share >= SINGLE_OFFSET and max(other_offsets, default=1.0) < limit / 2 and is_large
    if not is_bias and not is_single:
        return None
    return Pattern(
        "offset",
        shape.name,
        share,
        limit / 2 if is_bias else SINGLE_OFFSET,
        detail="bias" if is_bias else "",
    )


def position_pattern(shape: NoiseShape) -> Pattern | None:
    """Pattern of a layer whose noise grows or falls along positions significantly."""
    limit = LIMITS["positions"]
    rise, error = shape.rise or (0.0, 0.0)
    if abs(rise) < limit or abs(rise) < LEAST_STANDARD_ERRORS * error:
        return None
    if rise > 0 and (shape.relative or 0.0) < SIXTEEN_BIT_NOISE:
        return None
    return Pattern("positions", shape.name, rise, limit)


def _layer_patterns(shapes: Sequence[NoiseShape]) -> list[Pattern]:
    """Patterns of layers that are much louder than both neighbours.

    A layer louder than the one before only may be the first after a rounded part of the model.
    """
    patterns, limit = [], LIMITS["spike"]
    sizes = [None, *map(_noise_size, shapes), None]
    for index, shape in enumerate(shapes):
        size_before, size, size_after = sizes[index : index + 3]
        if size is None or size_after is None:
            continue
        ratio = size / max(size_after, size_before or 0.0)
        if ratio >= limit:
            patterns.append(Pattern("layer", shape.name, ratio, limit, detail="beside"))
    return patterns


def _noise_size(shape: NoiseShape) -> float | None:
    """Relative noise of a layer; None if it is zero or has too few tokens."""
    return shape.relative if shape.relative and shape.tokens >= 5 * FEWEST_TOKENS else None
