"""Where a run is further from float32 than sound runs of the same model in the same format.

A run B and R reference runs (`sound_runs`) are compared with one run A in float32 on the same
tokens. The level λ(t) is the logarithm of the median over experts of |Δ - median Δ|, Δ the
differences of the scores of token t in a layer: the noise of the token, which outliers among single
scores do not change. λ̄(t) is its mean over the reference runs, d(t) = λ_B(t) - λ̄(t). Three scores
of a token have an expectation of at most zero if B is sound:

    level     d(t) - τ          clipped at ±3: noise may be e^τ times that of the references
    tail      1{d(t) > q} - π   q: 99 % quantile of d of a reference run, plus τ, at least log 2
                                (not in 8 and 4 bits, where small states have more noise relative to
                                the scale of a tensor)
    far tail  the same          q larger by log 2.5, π smaller: few tokens far beyond the references
                                or with fewer than three recorded experts in common with A

Each score is summed over groups of tokens, layer by layer: all tokens, the first and the last
position, octaves of positions, single documents, rows of a batch and decoded tokens (if B recorded
them), frequent and rare token ids, and the experts that A chose in the layer before. A single row
of a router is tested by the level alone, of log |Δ - median Δ| - λ(t) over the scores of its
expert, which may be twice as loud, minus the amount by which the token is quieter than in the
references. If B has no scores, f_B(t) - (1 + φ) f̄(t) replaces them, f = 1 for flipped tokens.

Tokens of a document are correlated. Each sum is therefore divided by the standard deviation of the
sums of its documents, or by that of independent tokens in the reference runs if this is larger; the
sum of a single document by that of documents in the reference runs; and the far tail, which sound
runs do not have, by that of the allowed number of tokens. Tokens after the same prefix (a common
prompt, the same first token) are one draw, and so are tokens of equal scores in A, as in a router
before any attention, which sees the token id alone: their variance counts as often as they occur.
One limit holds for all layers, groups and scores: the 99.5 % quantile of the *largest* ratio under
the null hypothesis, which is that of each reference run against the others with random signs of its
documents.

Flips propagate: a flipped token passes a different state to the layers above, and attention passes
it to later tokens of the document; so does a single score that changes a combine weight. A layer is
therefore judged by the tokens that no such event in B has reached in an earlier layer: no flip,
except those of all reference runs, and no score that differs five times as much as the largest in
the references. A fault that makes flips is noise in its own layer and is detected there. Tokens
that nothing has reached are quieter than others in a late layer, while noise of the size of that
layer may occur at any of them: τ therefore grows by the median level of all tokens in the
references minus that of the judged tokens, which is zero in the first layer.

Some routers round scores as well as logits (LFM2-MoE in bf16, most under autocast). If all scores
of B less their selection bias lie on such a grid, those of the reference runs, which compute them
in float32, are rounded to it; and where the bias of B is that of A in 16 bits, they have B's.

An excess is attributed to a group if the group exceeds the limit and the tokens outside it do not
differ from the references; otherwise the noise as a whole is too large.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.analysis.score_noise import FEWEST_COMMON, LayerNoise, ScoreDifferences
from tieline.analysis.token_groups import (
    ComparedTokens,
    GroupKind,
    Sums,
    TokenGroups,
    prefix_repeats,
    token_clusters,
)
from tieline.trace.record import LayerTrace, RoutingTrace

KINDS_BY_SPECIFICITY: tuple[GroupKind, ...] = (
    "last position",
    "first position",
    "token",
    "rare tokens",
    "batch row",
    "document",
    "decode",
    "expert",
    "positions",
    "row",
)
"""Kinds of groups that an excess may be attributed to, most specific first."""

FALSE_ALARM_CHANCE = 0.005
"""Probability that any test of a sound run exceeds the limit."""
LEAST_LIMIT = 6.0
"""Least limit: emulated runs round the same weights, and are more alike than engines."""
SIGN_DRAWS = 1000
"""Draws of random signs that estimate the limit."""
CLIP = 3.0
"""Limit at which d is clipped."""
TAIL_QUANTILE, TAIL_SHARE = 0.99, 0.05
"""Quantile of d in reference runs beyond which a token is in the tail, and the allowed share π."""
LEAST_TAIL_EXCESS = 0.7
"""Least distance of the tail from that quantile, in logarithms: noise twice as large."""
FAR_TAIL_EXCESS, FAR_TAIL_SHARE = 0.9, 0.002
"""Distance of the far tail from the tail, in logarithms, and the allowed share of tokens."""
FAR_TAIL_SCORE = 2
"""Index of the far tail among the scores."""
LARGEST_TAIL_TOLERANCE = 1.5
"""τ from which on the tail is not tested."""
LATER_LAYER_FACTOR = 1.75
"""Factor of τ after the first layer: combine weights propagate noise of single scores."""
LEAST_DEVIATION = 1.6
"""√ranks times the least standard deviation of d: that of the difference of two draws of the log of
a median of |x| over ranks. It is needed because reference runs may share all of their noise."""
SUM_ROUNDING = 2.0**-22
"""Relative rounding of a sum of a score and its bias in float32."""
SPIKE_EXCESS = 1.6
"""Logarithm of the least ratio of a spike, a token's largest difference, to the references."""
ROW_TOLERANCE = 0.7
"""τ of the scores of one expert relative to the level of their tokens."""
FLIP_TOLERANCE = 0.3
"""φ: share by which the flips of a sound run may exceed those of the references."""
COUNT_VARIANCE = 4.0
"""Variance added to that of counts, so that a few counts are no evidence."""
FEWEST_TOKENS, FEWEST_CLUSTERS = 8, 4
"""Fewest tokens and clusters of a tested group."""
OUTSIDE_LIMIT = 3.0
"""Standard errors from which on the tokens outside a group exceed the references too."""
LEAST_GROUP_RATIO = 2.0
"""Least ratio of a group's noise to that outside it, for an excess attributed to the group."""
MOST_GROUP_SHARE = 0.5
"""Largest share of the tokens in a group that an excess is attributed to."""


class RunLayerNoise(NamedTuple):
    """Noise and flips of one layer of a run compared with A.

    Attributes:
        level: λ of each token; NaN with too few common experts.
        rows: log |Δ - median Δ| - λ of the experts that A recorded; NaN if B did not record one.
        flipped: 1 for tokens whose sets of experts differ, else 0; -1 if the run lacks the token.
        strange: tokens with too few common experts, though no group of experts changed.
    """

    level: Float[np.ndarray, " tokens"]
    rows: Float[np.ndarray, "tokens ranks"]
    flipped: Int[np.ndarray, " tokens"]
    strange: Bool[np.ndarray, " tokens"]

    @classmethod
    def from_noise(
        cls,
        noise: LayerNoise | ScoreDifferences | None,
        flipped: Bool[np.ndarray, " tokens"],
        has_groups: bool = False,
    ) -> "RunLayerNoise":
        """The layer from the differences of its scores; levels are NaN without scores."""
        if noise is None:
            unknown, none = np.full((len(flipped), 1), np.nan), np.zeros(len(flipped), dtype=bool)
            return cls(unknown[:, 0], unknown, flipped.astype(np.int8), none)
        difference = np.where(noise.common, noise.difference, np.nan)
        is_unknown = noise.common.sum(1) < FEWEST_COMMON
        difference[is_unknown] = np.nan
        size = np.abs(difference - _row_nanmedian(difference))
        level = np.log(_row_nanmedian(size) + noise.floor)
        rows = np.log(size + noise.floor) - level
        return cls(level[:, 0], rows, flipped.astype(np.int8), is_unknown & (not has_groups))

    def at_tokens(self, tokens: Int[np.ndarray, " _"]) -> "RunLayerNoise":
        """The layer at some tokens, given by index; -1 for tokens that the run lacks."""
        missing = tokens < 0
        level = np.where(missing, np.nan, self.level[tokens])
        rows = np.where(missing[:, None], np.nan, self.rows[tokens])
        flipped, strange = self.flipped[tokens], self.strange[tokens]
        return RunLayerNoise(level, rows, np.where(missing, -1, flipped), strange & ~missing)

    def largest_difference(self) -> Float[np.ndarray, " tokens"]:
        """Log max |Δ - median Δ| of each token; NaN if it is unknown."""
        return np.where(np.isnan(self.rows), -np.inf, self.rows).max(1) + self.level

    def with_quieted_rows(self, references: Sequence["RunLayerNoise"]) -> "RunLayerNoise":
        """The layer with rows lowered as far as their token's level is below the references."""
        mean = np.mean([x.level for x in references], axis=0)
        return self._replace(rows=self.rows + np.minimum(self.level - mean, 0.0)[:, None])

    def with_scores_as_tokens(self) -> "RunLayerNoise":
        """The layer with each score as a token of its own."""
        no_rows = np.full((self.rows.size, 1), np.nan)
        flipped = np.repeat(self.flipped, self.rows.shape[1])
        strange = np.zeros(self.rows.size, dtype=bool)
        return RunLayerNoise(self.rows.ravel(), no_rows, flipped, strange)


def round_scores_like(runs: Sequence[RoutingTrace], other: RoutingTrace) -> list[RoutingTrace]:
    """Round the scores of runs to bf16 or fp16 in layers where all scores of another run are."""
    rounded = [list[LayerTrace]() for _ in runs]
    for index, layer in enumerate(other.layers):  # by layer: its formats are those of all runs
        grids = _score_grids(layer)
        for run, layers in zip(runs, rounded, strict=True):
            if len(run.layers) == len(other.layers):
                layers.append(_round_layer_scores_like(run.layers[index], layer, grids))
    return [
        replace(run, layers=tuple(layers)) if len(run.layers) == len(other.layers) else run
        for run, layers in zip(runs, rounded, strict=True)
    ]


class _ScoreGrids(NamedTuple):
    """16-bit formats of the scores of a layer, and of these less their bias; None for none."""

    sums: torch.dtype | None
    scores: torch.dtype | None


def _score_grids(layer: LayerTrace) -> _ScoreGrids:
    """The 16-bit formats of the finite scores of a layer."""
    if layer.scores is None:
        return _ScoreGrids(None, None)
    finite = layer.scores.isfinite()
    sums = layer.scores[finite]
    grid_of_sums = _grid_of_16_bits(sums, 0.0)
    if grid_of_sums is not None:
        return _ScoreGrids(grid_of_sums, grid_of_sums)
    scores = (layer.scores - _bias_of_ranks(layer, layer.bias))[finite]
    return _ScoreGrids(None, _grid_of_16_bits(scores, SUM_ROUNDING * sums.abs()))


def _round_layer_scores_like(
    layer: LayerTrace, other: LayerTrace, grids: _ScoreGrids
) -> LayerTrace:
    """The layer with scores, and a selection bias, rounded to 16 bits as those of another are."""
    if layer.scores is None or other.scores is None:
        return layer
    bias = _bias_of_ranks(layer, layer.bias)
    scores = layer.scores - bias
    if layer.bias is not None and other.bias is not None:
        is_rounded = torch.allclose(layer.bias.float(), other.bias.float(), rtol=2**-8, atol=0.0)
        bias = _bias_of_ranks(layer, other.bias) if is_rounded else bias
    scores = _rounded(_rounded(scores, grids.scores) + bias, grids.sums).to(layer.scores)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return replace(layer, scores=scores, experts=layer.experts.gather(1, order), weights=None)


def _grid_of_16_bits(scores: Tensor, rounding: Tensor | float) -> torch.dtype | None:
    """The 16-bit format of all scores, up to the rounding of each; None if they are in none."""
    for grid in (torch.bfloat16, torch.float16):
        if bool(((scores.to(grid) - scores).abs() <= rounding).all()):
            return grid
    return None


def _rounded(scores: Tensor, grid: torch.dtype | None) -> Tensor:
    """The scores in a format."""
    return scores if grid is None else scores.to(grid).to(scores)


def _bias_of_ranks(layer: LayerTrace, bias: Tensor | None) -> Tensor:
    """The selection bias of the expert at each rank; zero without one."""
    zero = torch.zeros(1, dtype=torch.float32, device=layer.experts.device)
    return zero if bias is None else bias.float()[layer.experts.long()]


def _row_nanmedian(values: np.ndarray) -> np.ndarray:
    """Median of each row without NaN, as a column."""
    ordered, count = np.sort(values, axis=1), (~np.isnan(values)).sum(1)
    low, high = (np.maximum(count - 1, 0) // 2)[:, None], (count // 2)[:, None]
    high = np.minimum(high, values.shape[1] - 1)
    return (np.take_along_axis(ordered, low, 1) + np.take_along_axis(ordered, high, 1)) / 2


class Excess(NamedTuple):
    """A group of tokens in a layer that is further from A than the references.

    Attributes:
        layer: number of the layer.
        kind: the kind of group; "all" if the excess is not attributed to a group.
        number: document, row of a batch, token id, expert, or first position of an octave.
        ratio: e^d, d the mean over the group: its noise over that of the references.
        statistic: the largest ratio of a sum to its standard deviation.
        limit: limit of the statistic.
    """

    layer: int
    kind: GroupKind
    number: int | None
    ratio: float
    statistic: float
    limit: float


class _ExcessScores(NamedTuple):
    """Scores of the tokens of a layer: level and tails, or flips; zero if unknown.

    Attributes:
        values: scores minus those of the references.
        allowed: largest expectation of the values in a sound run.
        variance: least variance of the values.
        judged: mask of the judged tokens.
    """

    values: Float[np.ndarray, "scores tokens"]
    allowed: Float[np.ndarray, "scores tokens"]
    variance: Float[np.ndarray, "scores tokens"]
    judged: Bool[np.ndarray, " tokens"]


def _excess_scores(
    run: RunLayerNoise,
    references: Sequence[RunLayerNoise],
    fresh: np.ndarray,
    tail: float,
    tolerance: float,
) -> _ExcessScores:
    """Scores of a layer of a run compared with reference runs.

    Args:
        run: a layer of the run.
        references: the same layer of the references.
        fresh: tokens that earlier flips have not reached.
        tail: quantile of d where the tail begins; infinite for the level alone.
        tolerance: τ.
    """
    levels = np.stack([x.level for x in references])
    flips = np.mean([x.flipped for x in references], axis=0)
    if np.isnan(run.level).all():
        share = (1 + FLIP_TOLERANCE) * flips * (1 + 1 / len(references))
        values, allowed = (run.flipped - flips)[None], (FLIP_TOLERANCE * flips)[None]
        return _ExcessScores(values, allowed, share[None], np.ones(len(flips), dtype=bool))
    judged = fresh & ~np.isnan(levels).any(0)
    difference_to_mean = np.where(np.isnan(run.level), math.inf, run.level - levels.mean(0))
    difference = np.where(judged, np.clip(difference_to_mean, -CLIP, CLIP), 0.0)
    if tail == math.inf:
        return _ExcessScores(
            difference[None], (tolerance * judged)[None], 0.0 * judged[None], judged
        )
    beyond = tail + max(tolerance, LEAST_TAIL_EXCESS)
    is_far = np.isfinite(difference_to_mean) & (difference_to_mean > beyond + FAR_TAIL_EXCESS)
    farther = is_far | run.strange
    values = np.stack((difference, judged & (difference_to_mean > beyond), judged & farther))
    shares = TAIL_SHARE * judged, FAR_TAIL_SHARE * judged
    allowed = np.stack((tolerance * judged, *shares))
    return _ExcessScores(values, allowed, np.stack((0.0 * judged, *shares)), judged)


class _GroupSums:
    """Sums over all groups of one layer, for B and for each reference run against the others."""

    def __init__(
        self,
        run: RunLayerNoise,
        references: Sequence[RunLayerNoise],
        groups: TokenGroups,
        clusters: np.ndarray,
        fresh: np.ndarray,
        repeats: np.ndarray,
        tolerance: float,
        has_tail: bool,
    ) -> None:
        self._has_levels = not np.isnan(run.level).all()
        self._allowed_ratio = math.exp(tolerance) if self._has_levels else 1 + FLIP_TOLERANCE
        if not self._has_levels:
            references = [RunLayerNoise.from_noise(None, x.flipped > 0) for x in references]
        pairs = [(x, [y for y in references if y is not x]) for x in references]
        plain = [_excess_scores(*pair, fresh, math.inf, 0.0) for pair in pairs]
        pooled = np.concatenate([x.values[0][x.judged] for x in plain])
        least = LEAST_DEVIATION / math.sqrt(references[0].rows.shape[1])
        tail = max(float(np.quantile(pooled, TAIL_QUANTILE)), 2.33 * least) if len(pooled) else CLIP
        tail = tail if has_tail else math.inf
        self.scores = _excess_scores(run, references, fresh, tail, tolerance)
        nulls = [_excess_scores(*pair, fresh, tail, 0.0) for pair in pairs if has_tail]
        self._nulls = nulls if has_tail else plain  # the same numbers
        self.groups, self._clusters = groups, clusters
        self._variance = self.scores.variance.copy()
        if self._has_levels:
            spread = max(float(pooled.var()), least**2) if len(pooled) else 1.0
            self._variance[0] = self.scores.judged * spread
        self._variance *= repeats
        self._count = groups.cluster_sums(self.scores.judged.astype(float))
        self._is_document = np.array([kind == "document" for kind, _ in groups.names])
        is_spread = ((self._count > 0).sum(1) >= FEWEST_CLUSTERS) | self._is_document
        self.tested = is_spread & (self._count.sum(1) >= FEWEST_TOKENS)
        scores = range(len(self.scores.values))
        self._least_variances = [self._least_variance(score) for score in scores]

    def _variance_of_counts(self, score: int) -> float:
        """Variance added to a score that counts tokens; zero for a level."""
        return 0.0 if self._has_levels and score == 0 else COUNT_VARIANCE

    def group_statistics(self) -> Float[np.ndarray, "scores groups"]:
        """Sums of B minus the allowed sums, over their standard deviations."""
        values = self.scores.values - self.scores.allowed
        all_groups, no_signs = np.ones_like(self.tested), np.ones((1, self._count.shape[1]))
        ratios = [
            self._sums_over_deviations(self.groups.cluster_sums(x), score, all_groups, no_signs)[
                :, 0
            ]
            for score, x in enumerate(values)
        ]
        return np.where(self.tested, np.stack(ratios), -math.inf)

    def null_maxima(self, signs: Float[np.ndarray, "draws clusters"]) -> np.ndarray:
        """Largest statistic of each reference run and draw of the documents' signs."""
        maxima = np.zeros((len(self._nulls), len(signs)))
        for run, null in enumerate(self._nulls):
            for score, values in enumerate(null.values):
                mean = values.sum() / max(int(null.judged.sum()), 1)
                sums = self.groups.cluster_sums(np.where(null.judged, values - mean, 0.0))
                ratios = self._sums_over_deviations(sums, score, self.tested, signs)
                np.maximum(maxima[run], ratios.max(0, initial=0.0), out=maxima[run])
        return maxima

    def _sums_over_deviations(
        self, sums: Sums, score: int, groups: Bool[np.ndarray, " groups"], signs: np.ndarray
    ) -> Float[np.ndarray, "tested draws"]:
        """Sums of some groups over all clusters, over their standard deviations."""
        sums, least = sums[groups], self._least_variances[score][groups, None]
        totals = (torch.from_numpy(sums) @ torch.from_numpy(signs).T).numpy()  # on torch's threads
        if score == FAR_TAIL_SCORE:  # a fault would dominate the spread
            return totals / np.sqrt(least)
        number = np.maximum((self._count[groups] > 0).sum(1), 2)[:, None]
        spread = totals**2  # in place from here on: allocation takes longer than arithmetic
        spread /= number
        np.subtract((sums**2).sum(1)[:, None], spread, out=spread)
        spread *= number
        spread /= number - 1
        spread[self._is_document[groups]] = 0.0
        np.maximum(spread, least, out=spread)
        np.sqrt(spread, out=spread)
        return np.divide(totals, spread, out=spread)

    def _least_variance(self, score: int) -> Float[np.ndarray, " groups"]:
        """Least variance of each group's sum; for a document, at least that of reference runs."""
        floor = self.groups.cluster_sums(self._variance[score]).sum(1)
        floor = np.maximum(floor + self._variance_of_counts(score), 1e-12)
        if score == FAR_TAIL_SCORE:
            return floor
        single = self._variance_of_documents(score) * self._count.sum(1)
        return np.where(self._is_document, np.maximum(single, floor), floor)

    def _variance_of_documents(self, score: int) -> float:
        """Variance per token of the sum over one document, from the reference runs."""
        sums = [np.bincount(self._clusters, weights=null.values[score]) for null in self._nulls]
        deviations = np.stack(sums) - np.mean(sums, axis=1, keepdims=True)
        return float(
            (deviations**2).mean() * deviations.shape[1] / max(self.scores.judged.sum(), 1)
        )

    def statistic_outside(self, inside: Bool[np.ndarray, " tokens"]) -> float:
        """Largest statistic of the tokens outside a mask, taken together."""
        values = np.where(inside, 0.0, self.scores.values - self.scores.allowed)
        ratios = []
        for score, outer in enumerate(values):
            sums = np.bincount(self._clusters, weights=outer)
            spread = ((sums - sums.mean()) ** 2).sum() * len(sums) / (len(sums) - 1)
            floor = self._variance[score][~inside].sum() + self._variance_of_counts(score)
            ratios.append(sums.sum() / math.sqrt(max(spread, floor, 1e-12)))
        return max(ratios)

    def is_exception(self, inside: Bool[np.ndarray, " tokens"]) -> bool:
        """Whether these tokens are few and louder than the rest, which is within its limit."""
        if inside.mean() > MOST_GROUP_SHARE or self.statistic_outside(inside) >= OUTSIDE_LIMIT:
            return False
        outside = self.noise_ratio(~inside)  # may be large though documents differ too much to tell
        is_louder = self.noise_ratio(inside) >= LEAST_GROUP_RATIO * outside
        return is_louder and outside <= self._allowed_ratio

    def noise_ratio(self, inside: Bool[np.ndarray, " tokens"]) -> float:
        """Ratio of the tokens' noise, or of their flips without scores, to the references."""
        inside = inside & self.scores.judged
        if not inside.any():
            return 1.0
        mean = float(self.scores.values[0][inside].mean())
        if self._has_levels:
            return math.exp(mean)
        flips = float(self.scores.allowed[0][inside].mean()) / FLIP_TOLERANCE
        return (mean + flips) / max(flips, 1 / len(inside))


def find_excess(
    run: Sequence[RunLayerNoise],
    references: Sequence[Sequence[RunLayerNoise]],
    tokens: ComparedTokens,
    tolerance: float,
    layers_before: int = 0,
) -> tuple[Excess, ...]:
    """The excesses of a run over the reference runs, at most one per layer, in order of depth.

    Args:
        run: the layers of B, in order of depth.
        references: the layers of each reference run; at least two runs.
        tokens: the compared tokens.
        tolerance: τ.
        layers_before: routed layers before the first of B that were not compared.
    """
    repeats = prefix_repeats(tokens)
    repeats_by_layer = [np.maximum(repeats, x) for x in tokens.equal_scores] or [repeats] * len(run)
    tables = [
        pair
        for number in range(len(run))
        for pair in _group_sums(
            number, run, references, tokens, repeats_by_layer[number], tolerance, layers_before
        )
    ]
    generator = np.random.default_rng(0)
    signs = generator.choice((-1.0, 1.0), (SIGN_DRAWS, int(token_clusters(tokens).max()) + 1))
    null = np.max([table.null_maxima(signs) for _, table in tables], axis=0)
    limit = max(float(np.quantile(null, 1 - FALSE_ALARM_CHANCE)), LEAST_LIMIT)
    excess: dict[int, Excess] = {}
    for number, table in tables:
        table_excess = _excess_of_layer(number, table, limit)
        if table_excess is not None:
            excess.setdefault(number, table_excess)  # rows only if no tokens exceed
    return tuple(excess.values())


def _group_sums(
    number: int,
    run: Sequence[RunLayerNoise],
    references: Sequence[Sequence[RunLayerNoise]],
    tokens: ComparedTokens,
    repeats: Int[np.ndarray, " tokens"],
    tolerance: float,
    layers_before: int,
) -> list[tuple[int, _GroupSums]]:
    """Sums over groups of tokens of a layer and, with scores, over the rows of its router."""
    layer, reference_layers = run[number], [reference[number] for reference in references]
    fresh, clusters = _tokens_before_flips(number, run, references, tokens), token_clusters(tokens)
    groups = TokenGroups(tokens, number, clusters)
    has_tail = tolerance < LARGEST_TAIL_TOLERANCE
    allowed = tolerance * (LATER_LAYER_FACTOR if number + layers_before else 1.0)
    allowed += _level_drop_of_judged_tokens(reference_layers, fresh)
    table = _GroupSums(layer, reference_layers, groups, clusters, fresh, repeats, allowed, has_tail)
    tables = [(number, table)]
    if not np.isnan(layer.level).all():
        quiet, ranks = layer.with_quieted_rows(reference_layers), layer.rows.shape[1]
        rows = [x.with_scores_as_tokens() for x in (quiet, *reference_layers)]
        fresh, clusters, repeats = (np.repeat(x, ranks) for x in (fresh, clusters, repeats))
        groups = TokenGroups(tokens.with_scores_as_tokens(), number, clusters)
        loudest = max(tolerance, ROW_TOLERANCE)
        table = _GroupSums(rows[0], rows[1:], groups, clusters, fresh, repeats, loudest, False)
        tables.append((number, table))
    return tables


def _level_drop_of_judged_tokens(
    references: Sequence[RunLayerNoise], judged: Bool[np.ndarray, " tokens"]
) -> float:
    """How much quieter the judged tokens are than all tokens in the reference runs, at least 0.

    The median noise level of all tokens minus that of the judged ones, levels averaged over runs.
    """
    noise_level = np.mean([run.level for run in references], axis=0)
    is_known = ~np.isnan(noise_level)
    if not (judged & is_known).any():
        return 0.0
    difference = np.median(noise_level[is_known]) - np.median(noise_level[judged & is_known])
    return max(float(difference), 0.0)


def _tokens_before_flips(
    number: int,
    run: Sequence[RunLayerNoise],
    references: Sequence[Sequence[RunLayerNoise]],
    tokens: ComparedTokens,
) -> Bool[np.ndarray, " tokens"]:
    """Mask of tokens without an earlier flip, and without one of B before them in the document.

    Args:
        number: number of the layer.
        run: the layers of B.
        references: the layers of each reference run.
        tokens: the compared tokens.
    """
    count = len(tokens.documents)
    flipped, only_in_b = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    for layer in range(number):
        in_b = run[layer].flipped > 0
        in_references = np.array([reference[layer].flipped > 0 for reference in references])
        flipped = flipped | in_b | in_references.any(0)
        sizes = [reference[layer].largest_difference() for reference in references]
        spike = ~(run[layer].largest_difference() - np.mean(sizes, axis=0) <= SPIKE_EXCESS)
        only_in_b = (
            only_in_b | (in_b & ~in_references.all(0)) | (spike & ~np.isnan(run[layer].level).all())
        )
    codes = np.unique(tokens.documents, return_inverse=True)[1]
    first = np.full(int(codes.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, codes[only_in_b], tokens.positions[only_in_b])
    return ~flipped & (tokens.positions < first[codes])


def _excess_of_layer(number: int, layer: _GroupSums, limit: float) -> Excess | None:
    """The excess of one layer, attributed to the most specific groups that explain all of it."""
    largest = layer.group_statistics().max(0)
    if largest.max() <= limit:
        return None
    names = layer.groups.names
    for kind in KINDS_BY_SPECIFICITY:
        groups = [i for i, x in enumerate(names) if x[0] == kind and largest[i] > limit]
        inside = layer.groups.tokens_in(groups)
        if groups and layer.is_exception(inside):
            first = max(groups, key=lambda i: largest[i])
            ratio = layer.noise_ratio(layer.groups.tokens_in([first]))
            return Excess(number, kind, names[first][1], ratio, float(largest[first]), limit)
    if layer.groups.are_rows:
        return None  # noise of all rows is tested as noise of the tokens
    everything = np.ones_like(layer.scores.judged)
    return Excess(number, "all", None, layer.noise_ratio(everything), float(largest.max()), limit)
