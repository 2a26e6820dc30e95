"""Whether the noise between two runs has a shape that rounding does not make.

Rounding acts on every layer, expert, document and position in much the same way. A bug often does
not. Each test compares one group of tokens with the others by the level log v of their noise
(`score_noise`), in tokens that flipped in no earlier layer, whose noise a flip would explain:

    positions   growth of the level over log2(1 + position), from position 1 to the last, in the
                first layer that has noise: rotary tables and caches (growing), masks (falling)
    document    level of the loudest document over that of the third loudest, in the same layer
    expert      growth of the level since the layer before, in tokens that chose an expert there:
                the largest over the third largest, so that a swapped pair stands out as well
    row         level of one expert's own scores, the largest over the third largest
    offset      share of the noise that is one number per expert, and its likeness to the
                selection bias that was recorded
    layer       relative size over that of the layers beside it
    lag         share of the flips that give a token the experts of its neighbour in A

Sound runs have shapes too, only weaker: expert outputs differ in size, sums grow longer along a
sequence, flips spread within a document. The limits below are therefore effects and not only
levels of significance; each was set beyond the largest effect in some hundred sound pairs of six
families (`benchmarks/attribution.py --calibrate`), and an effect must also be five to six standard
errors away from zero.

measure_shape    the effects of one layer
find_patterns    those beyond their limits, the most specific first
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tieline.analysis.diff_records import Pattern, PatternKind
from tieline.analysis.score_noise import LayerNoise

SURE = 6.0
"""Standard errors by which an effect must differ from zero."""
FEWEST = 20
"""Tokens of a group without which nothing is said about it."""
LIMITS = {
    "positions": 3.0,
    "document": 2.5,
    "expert": 2.0,
    "row": 4.0,
    "offset": 0.7,
    "spike": 3.5,
    "lag": 0.5,
}
"""Effects beyond which a shape counts: differences of log v, shares, or ratios of sizes."""
LIKENESS = 0.8
"""Correlation from which offsets are those of a recorded bias."""
DROPPED = 0.1
"""Least share of the bias that such offsets are: less is the rounding of its largest numbers."""
SIXTEEN_BITS = 0.025
"""Relative noise that 16 bits may make: another attention kernel, which begins at position 1."""


class Outlier(NamedTuple):
    """The group that stands out most.

    Attributes:
        group: which.
        excess: how much louder it is than the third loudest.
        error: standard error of that.
    """

    group: int
    excess: float
    error: float

    def beyond(self, limit: float) -> bool:
        """Whether the excess is large and sure."""
        return self.excess >= limit and self.excess >= SURE * self.error


class NoiseShape(NamedTuple):
    """Effects of one layer; None where there are too few tokens or groups.

    Attributes:
        name: name of the layer in A.
        relative: size of the noise over the spread of the scores; None where it is unknown.
        tokens: tokens without an earlier flip whose noise is known.
        rise: growth of the level from the first to the last position, with its error.
        document: the loudest document.
        expert: the expert of the layer before whose tokens gained most noise.
        row: the expert whose own scores differ most.
        offset: share of the noise that is one number per expert.
        likeness: correlation of these numbers with the recorded selection bias; None without one.
        lag: shift, share and number of the flips that have the experts of a neighbour in A.
        beyond: size of the noise over that of a single reference run; None without one.
        flips: share of the tokens that flip.
        total: tokens of the layer.
        density: tokens per unit of gap over spread, at a gap of zero; None without scores.
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
    beyond: float | None = None
    flips: float = 0.0
    total: int = 0
    density: float | None = None


class TokenKeys(NamedTuple):
    """Documents and positions of the compared tokens, in this order."""

    documents: Int[np.ndarray, " tokens"]
    positions: Int[np.ndarray, " tokens"]


def measure_shape(
    name: str,
    noise: LayerNoise,
    fresh: Bool[np.ndarray, " tokens"],
    keys: TokenKeys,
    before: tuple[Float[np.ndarray, " tokens"], Int[np.ndarray, "tokens k"]] | None,
    bias: Float[np.ndarray, " experts"] | None,
) -> NoiseShape:
    """Measure the effects of one layer, all but the lag.

    Args:
        name: name of the layer in A.
        noise: differences of the scores.
        fresh: tokens without an earlier flip.
        keys: documents and positions.
        before: level of each token in the layer before, and the experts that A chose there.
        bias: selection bias by which the two sides may differ.
    """
    relative = noise.relative(fresh)
    level = noise.level
    rows = np.flatnonzero(fresh & noise.measured)
    shape = NoiseShape(name, relative, len(rows))
    if not relative or len(rows) < FEWEST:
        return shape
    noisy = rows[noise.variance[rows] > (3 * noise.floor) ** 2]
    differences = _CentredDifferences(noise, rows)
    share, means = _expert_offsets(differences)
    numbers, codes = np.unique(keys.documents[rows], return_inverse=True)
    outlier = _loudest_group(codes, level[rows], len(numbers))
    return shape._replace(
        rise=_position_rise(level[noisy], keys.positions[noisy]),
        document=None if outlier is None else outlier._replace(group=int(numbers[outlier.group])),
        expert=None if before is None else _loudest_expert(level - before[0], rows, before[1]),
        row=_loudest_row(differences),
        offset=share,
        likeness=None if bias is None else _bias_likeness(means, bias),
    )


def _position_rise(level: np.ndarray, positions: np.ndarray) -> tuple[float, float] | None:
    """Least-squares growth over the octaves of positions, the first token left out."""
    octave = np.log2(positions + 1).astype(int)
    level, octave = level[octave > 0], octave[octave > 0]
    count = np.bincount(octave)
    octaves = np.flatnonzero(count >= 8)
    if len(octaves) < 3:
        return None
    sums = np.bincount(octave, weights=level)
    squares = np.bincount(octave, weights=level**2)
    mean = sums[octaves] / count[octaves]
    variance = (squares[octaves] / count[octaves] - mean**2) / count[octaves]
    centred = octaves - octaves.mean()
    weight = centred / (centred**2).sum() * (octaves[-1] - octaves[0])
    return float(weight @ mean), math.sqrt(max(float(weight**2 @ variance), 0.0))


def _loudest_expert(growth: np.ndarray, rows: np.ndarray, chosen: np.ndarray) -> Outlier | None:
    """The expert of the layer before whose tokens gained most, over the third most."""
    k, rows = chosen.shape[1], rows[~np.isnan(growth[rows])]
    if len(rows) == 0:
        return None
    codes = chosen[rows].ravel()
    values = np.repeat(growth[rows], k)
    return _loudest_group(codes, values, int(codes.max()) + 1)


def _loudest_group(codes: np.ndarray, values: np.ndarray, groups: int) -> Outlier | None:
    """The group of the largest mean, over the third largest; None with fewer than four groups."""
    count = np.bincount(codes, minlength=groups)
    tested = np.flatnonzero(count >= FEWEST)
    if len(tested) < 4:
        return None
    sums, squares = (np.bincount(codes, weights=w, minlength=groups) for w in (values, values**2))
    mean = sums[tested] / count[tested]
    error = np.sqrt(np.maximum(squares[tested] / count[tested] - mean**2, 0.0) / count[tested])
    return _first_over_third(tested, mean, error)


def _first_over_third(groups: np.ndarray, level: np.ndarray, error: np.ndarray) -> Outlier:
    """The group of the largest level, over the third largest."""
    order = np.argsort(-level)
    first, third = order[0], order[2]
    excess = float(level[first] - level[third])
    return Outlier(int(groups[first]), excess, math.hypot(error[first], error[third]))


class _CentredDifferences:
    """Centred differences of some tokens, one after the other, and the expert of each."""

    def __init__(self, noise: LayerNoise, rows: np.ndarray) -> None:
        measured, values = noise.common[rows], noise.difference[rows]
        mean = values.sum(1) / np.maximum(measured.sum(1), 1)
        self.values = (values - mean[:, None])[measured]
        self.experts = noise.experts[rows][measured]
        self.squares = self.values * self.values  # a power would take ten times as long
        self.count = np.bincount(self.experts)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over the tokens of each expert."""
        return np.bincount(self.experts, weights=values)


def _loudest_row(differences: _CentredDifferences) -> Outlier | None:
    """The expert whose own scores have the largest mean square of noise, in logarithms."""
    count = differences.count
    tested = np.flatnonzero(count >= FEWEST)
    if len(tested) < 4:
        return None
    sums, fourth = (
        differences.sums(differences.squares),
        differences.sums(differences.squares * differences.squares),
    )
    mean = np.maximum(sums[tested] / count[tested], np.finfo(float).tiny)
    spread = np.sqrt(np.maximum(fourth[tested] / count[tested] / mean**2 - 1, 0.0) / count[tested])
    return _first_over_third(tested, np.log(mean), spread)


def _expert_offsets(differences: _CentredDifferences) -> tuple[float | None, np.ndarray]:
    """Share of the noise that is one number per expert, and these numbers (NaN if too rare)."""
    count, tested = differences.count, differences.count >= FEWEST
    means = np.where(tested, differences.sums(differences.values) / np.maximum(count, 1), np.nan)
    total = float(differences.squares.sum())
    if total == 0 or tested.sum() < 4:
        return None, means
    return float((count[tested] * means[tested] ** 2).sum()) / total, means


def _bias_likeness(means: np.ndarray, bias: np.ndarray) -> float | None:
    """|correlation| of the offsets with the bias, over the experts with offsets.

    None where the offsets are a small share of the bias, as those of a rounded bias are.
    """
    chosen = np.flatnonzero(~np.isnan(means[: len(bias)]))
    if len(chosen) < 4 or np.ptp(bias[chosen]) == 0 or np.ptp(means[chosen]) == 0:
        return None
    if np.std(means[chosen]) < DROPPED * np.std(bias[chosen]):
        return None
    return abs(float(np.corrcoef(means[chosen], bias[chosen])[0, 1]))


def flip_lag(
    chosen_a: Int[np.ndarray, "tokens k"],
    chosen_b: Int[np.ndarray, "tokens k"],
    flipped: Bool[np.ndarray, " tokens"],
    keys: TokenKeys,
) -> tuple[int, float, int] | None:
    """Return the lag at which most flips have A's experts of a neighbour: shift, share, number.

    None unless twenty flips have a neighbour. The share is what lag one has beyond lag two, which
    tells how alike neighbours are by themselves.
    """
    rows = np.flatnonzero(flipped)
    if len(rows) < FEWEST:
        return None
    shares = {lag: _equal_share(chosen_a, chosen_b, rows, keys, lag) for lag in (-2, -1, 1, 2)}
    lag = max((-1, 1), key=lambda x: shares[x][0])
    share, count = shares[lag]
    return (lag, share - shares[2 * lag][0], count) if count >= FEWEST else None


def _equal_share(
    chosen_a: np.ndarray, chosen_b: np.ndarray, rows: np.ndarray, keys: TokenKeys, lag: int
) -> tuple[float, int]:
    """Share of these tokens whose experts in B are those of A `lag` tokens earlier."""
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


def find_patterns(shapes: Sequence[NoiseShape]) -> tuple[Pattern, ...]:
    """Return the shapes beyond their limits, the most specific first.

    What a more specific pattern brings with it is not repeated: a swapped expert is also a layer
    whose noise begins there.

    Args:
        shapes: the layers in order of depth.
    """
    noisy = [shape for shape in shapes if shape.relative]
    experts = [x for shape in noisy if (x := _loud_expert_pattern(shape, shapes))]
    offsets = [x for shape in noisy if (x := _expert_offset_pattern(shape, shapes))]
    rows = [x for shape in noisy if (x := _outlier_pattern("row", shape.name, shape.row))]
    positions = [x for shape in noisy[:1] if (x := position_pattern(shape))]
    documents = [x for s in noisy[:1] if (x := _outlier_pattern("document", s.name, s.document))]
    layers = _layer_patterns(shapes)
    lags = [x for shape in shapes if (x := _neighbour_lag_pattern(shape))][:1]
    for patterns in (lags, offsets, experts, rows, positions, documents, layers):
        if patterns:
            return (max(patterns, key=lambda pattern: abs(pattern.effect) / pattern.limit),)
    return ()


def find_known_patterns(shapes: Sequence[NoiseShape]) -> tuple[Pattern, ...]:
    """Return the patterns that need no reference: a lag, and offsets like the recorded bias."""
    lags = [x for shape in shapes if (x := _neighbour_lag_pattern(shape))]
    offsets = [
        x for shape in shapes if shape.relative and (x := _expert_offset_pattern(shape, shapes))
    ]
    return tuple([*lags, *(x for x in offsets if x.detail == "bias")][:1])


def _neighbour_lag_pattern(shape: NoiseShape) -> Pattern | None:
    """The lag of a layer whose flips mostly have the experts of a neighbour."""
    limit = LIMITS["lag"]
    if shape.lag is None or shape.lag[1] < limit:
        return None
    lag, share, count = shape.lag
    return Pattern("lag", shape.name, share, limit, number=lag, flips=count)


def _loud_expert_pattern(shape: NoiseShape, shapes: Sequence[NoiseShape]) -> Pattern | None:
    """An expert of the layer before, whose tokens gained noise."""
    index = next(i for i, other in enumerate(shapes) if other.name == shape.name)
    return _outlier_pattern("expert", shapes[index - 1].name, shape.expert)


def _outlier_pattern(kind: PatternKind, layer: str, outlier: Outlier | None) -> Pattern | None:
    """The pattern of one group whose excess is large and sure."""
    limit = LIMITS[kind]
    if outlier is None or not outlier.beyond(limit):
        return None
    return Pattern(kind, layer, outlier.excess, limit, number=outlier.group)


def _expert_offset_pattern(shape: NoiseShape, shapes: Sequence[NoiseShape]) -> Pattern | None:
    """Offsets of experts that are the recorded bias, or those of one layer alone."""
    limit = LIMITS["offset"]
    share, likeness = shape.offset or 0.0, shape.likeness or 0.0
    is_bias = likeness >= LIKENESS and share >= limit / 2
    other_offsets = [other.offset or 0.0 for other in shapes if other.name != shape.name]
    is_large = (shape.relative or 0.0) >= SIXTEEN_BITS  # a rounded bias shifts scores too
    is_single = share >= limit and max(other_offsets, default=1.0) < limit / 2 and is_large
    if not is_bias and not is_single:
        return None
    return Pattern(
        "offset",
        shape.name,
        share,
        limit / 2 if is_bias else limit,
        detail="bias" if is_bias else "",
    )


def position_pattern(shape: NoiseShape) -> Pattern | None:
    """Return the growth of a layer's noise along positions, if it is large and sure."""
    limit = LIMITS["positions"]
    rise, error = shape.rise or (0.0, 0.0)
    if abs(rise) < limit or abs(rise) < SURE * error:
        return None
    if rise > 0 and (shape.relative or 0.0) < SIXTEEN_BITS:
        return None
    return Pattern("positions", shape.name, rise, limit)


def _layer_patterns(shapes: Sequence[NoiseShape]) -> list[Pattern]:
    """Layers that are much louder than those beside them.

    A layer that is louder than the one before alone may be the first after what is rounded.
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
    """Relative noise of a layer that has some in enough tokens."""
    return shape.relative if shape.relative and shape.tokens >= 5 * FEWEST else None
