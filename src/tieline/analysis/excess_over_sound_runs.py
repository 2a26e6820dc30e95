"""Where a run is further from float32 than sound runs of the same model in the same format.

A run B and R reference runs (`sound_runs`) are compared with one run A in float32, on the same
tokens. λ(t) is the logarithm of the median over experts of |Δ - median Δ|, the differences of the
scores of token t in a layer: the noise of the token as a whole, whatever single scores do. λ̄(t) is
its mean over the reference runs, d(t) = λ_B(t) - λ̄(t). Three scores of a token have an expectation
of at most zero where B is sound:

    level    d(t) - τ          cut at ± 3: noise may be e^τ times that of the references
    tail     1{d(t) > q} - π   q: 99 % quantile of d of a reference run, plus τ, at least log 2
                               (not in 8 and 4 bits: beside the scale of a tensor, small states
                               have more noise)
    far      the same, q larger by log 2.5 and π smaller: few tokens, far beyond the references

All are summed over groups of tokens, layer by layer: all tokens, the first and the last position,
octaves of positions, single documents, rows of a batch and decoded tokens (where B notes them),
frequent and rare token ids, and the experts that A chose in the layer before. One row of a router
is found by the level alone, of log |Δ - median Δ| - λ(t) over the scores of its expert, which may
be twice as loud, less what the token is quieter than in the references. Where B has no scores,
f_B(t) - (1 + φ) f̄(t) takes their place, f saying whether a token flips.

Tokens of a document are alike, so that every sum is divided by the standard deviation that the sums
of its documents have, at least by that of independent tokens in the reference runs; the sum of a
single document by that of documents in the reference runs, and the far tail, which sound runs have
not, by that of as many tokens as are allowed. Tokens after the same prefix (a common prompt, the
same first token) are one draw: their variance counts as often as they come. One limit serves all
layers, groups and scores: the 99.5 % quantile of the *largest* ratio under the null, that of each
reference run against the others, whose documents change sign at random.

Flips carry on: a token that flips leaves another state to the layers above, and attention brings
that to the later tokens of its document; so does a single score that changes a combine weight. So a
layer is judged by the tokens that nothing of the kind in B has reached in an earlier layer: no
flip, but for those that all reference runs have, and no score that differs five times as much as
the largest of the references. A fault that makes flips is noise in its own layer, and is found
there. Tokens that nothing has reached are the quiet ones of a late layer, while noise of the size
of that layer may stand anywhere: so τ grows by the median level of all tokens in the references
less that of the judged ones, zero in the first layer.

Some routers round scores as well as logits (LFM2-MoE in bf16). Where all scores of B lie on such a
grid, those of the reference runs, which compute them in float32, are rounded to it.

An excess is named by a group if that exceeds the limit and the tokens outside it are as they are in
the references; otherwise the noise as a whole is too large.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from tieline.analysis.score_noise import FEWEST_COMMON, LayerNoise
from tieline.trace.record import LayerTrace, RoutingTrace

GroupKind = Literal[
    "all",
    "first position",
    "last position",
    "positions",
    "document",
    "batch row",
    "decode",
    "token",
    "rare tokens",
    "expert",
    "row",
]
"""Groups of tokens, or of the scores of one expert."""
SPECIFIC: tuple[GroupKind, ...] = (
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
"""The groups that an excess is named by, the most specific first."""
Sums = Float[np.ndarray, "groups clusters"]

LEVEL = 0.005
"""Chance that any of the tests of a sound run exceeds the limit."""
LEAST_LIMIT = 6.0
"""Least limit: emulated runs round the same weights, and are more alike than engines are."""
DRAWS = 1000
"""Changes of sign that the limit is taken from."""
CUT = 3.0
"""Largest |d| that counts."""
TAIL, TAIL_SHARE = 0.99, 0.05
"""Quantile of d in reference runs beyond which a token is in the tail; π, the share allowed."""
FAR = 0.7
"""Least logarithm by which a token in the tail exceeds that quantile: noise twice as large."""
FARTHER, FARTHER_SHARE = 0.9, 0.002
"""Logarithm that the far tail begins beyond the tail, and the share of tokens allowed there."""
FARTHER_SCORE = 2
"""Number of the far tail among the scores."""
WIDE = 1.5
"""τ from which on the tail is not looked at."""
LATER = 1.75
"""How much larger τ is after the first layer: combine weights carry on noise of single scores."""
DRAWN = 1.6
"""Least deviation of d is this over √ranks: that of the log of the median of so many |x|, twice
drawn. Reference runs may share all of their noise."""
SPIKE = 1.6
"""Logarithm by which the largest difference of a token's scores exceeds references: five-fold."""
ROW = 0.7
"""τ of the scores of one expert beside those of its tokens."""
MORE_FLIPS = 0.3
"""φ: flips that a sound run may have more than the references."""
COUNTS = 4.0
"""Variance added to that of counts, so that a few of them are no evidence."""
FEWEST_TOKENS, FEWEST_CLUSTERS = 8, 4
"""Tokens and documents of a group without which it is not tested."""
CLUSTERS = 12
"""Documents without which stretches of them are the clusters."""
FREQUENT = 8
"""Token ids that are groups of their own."""
RARE = 2
"""Most tokens of an id that counts as rare."""
OUTSIDE = 3.0
"""Standard errors from which on the tokens outside a group are too loud as well."""
APART = 2.0
"""How much louder than those a group must be that an excess is named by."""
MOST_INSIDE = 0.5
"""Share of the tokens above which a group is no exception."""


class RunLayer(NamedTuple):
    """One layer of a run beside that of A.

    Attributes:
        level: λ of each token; NaN where too few experts are common.
        rows: log |Δ - median Δ| - λ of the experts that A kept; NaN where B did not keep one.
        flipped: 1 for tokens whose set of experts differs; -1 where the run has no such token.
    """

    level: Float[np.ndarray, " tokens"]
    rows: Float[np.ndarray, "tokens ranks"]
    flipped: Int[np.ndarray, " tokens"]

    @classmethod
    def from_noise(
        cls, noise: LayerNoise | None, flipped: Bool[np.ndarray, " tokens"]
    ) -> "RunLayer":
        """The layer by the differences of its scores; levels are NaN without them."""
        if noise is None:
            unknown = np.full((len(flipped), 1), np.nan)
            return cls(unknown[:, 0], unknown, flipped.astype(np.int8))
        difference = np.where(noise.common, noise.difference, np.nan)
        difference[noise.common.sum(1) < FEWEST_COMMON] = np.nan
        size = np.abs(difference - _row_median(difference))
        level = np.log(_row_median(size) + noise.floor)
        rows = np.log(size + noise.floor) - level
        return cls(level[:, 0], rows, flipped.astype(np.int8))

    def at_tokens(self, tokens: Int[np.ndarray, " _"]) -> "RunLayer":
        """The same of some tokens; -1 for one that the run does not have."""
        missing = tokens < 0
        level = np.where(missing, np.nan, self.level[tokens])
        rows = np.where(missing[:, None], np.nan, self.rows[tokens])
        return RunLayer(level, rows, np.where(missing, -1, self.flipped[tokens]))

    def largest_difference(self) -> Float[np.ndarray, " tokens"]:
        """Return log max |Δ - median Δ| of each token; NaN where it is unknown."""
        return np.where(np.isnan(self.rows), -np.inf, self.rows).max(1) + self.level

    def with_rows_above(self, references: Sequence["RunLayer"]) -> "RunLayer":
        """The same with rows as quiet as their tokens are beside the references."""
        mean = np.mean([x.level for x in references], axis=0)
        return self._replace(rows=self.rows + np.minimum(self.level - mean, 0.0)[:, None])

    def with_single_scores(self) -> "RunLayer":
        """The same with every score a token of its own."""
        single = np.full((self.rows.size, 1), np.nan)
        flipped = np.repeat(self.flipped, self.rows.shape[1])
        return RunLayer(self.rows.ravel(), single, flipped)


def on_score_grid(run: RoutingTrace, other: RoutingTrace) -> RoutingTrace:
    """Round the scores of a run to bf16 or fp16 in layers where all of another run are."""
    if len(run.layers) != len(other.layers):
        return run
    layers = [_layer_on_grid(x, y) for x, y in zip(run.layers, other.layers, strict=True)]
    return replace(run, layers=tuple(layers))


def _layer_on_grid(layer: LayerTrace, other: LayerTrace) -> LayerTrace:
    """The layer with scores on the grid of another's, if that has one."""
    for grid in (torch.bfloat16, torch.float16):
        scores = other.scores
        if layer.scores is not None and scores is not None and scores.to(grid).equal(scores):
            return replace(layer, scores=layer.scores.to(grid).to(layer.scores.dtype))
    return layer


def _row_median(values: np.ndarray) -> np.ndarray:
    """Median of each row, NaN left out, as a column."""
    ordered, count = np.sort(values, axis=1), (~np.isnan(values)).sum(1)
    low, high = (np.maximum(count - 1, 0) // 2)[:, None], (count // 2)[:, None]
    high = np.minimum(high, values.shape[1] - 1)
    return (np.take_along_axis(ordered, low, 1) + np.take_along_axis(ordered, high, 1)) / 2


class ComparedTokens(NamedTuple):
    """The compared tokens.

    Attributes:
        documents: document of each token.
        positions: its position there.
        ids: its token id; None if unknown.
        chosen: by layer, the experts that A chose; empty where single scores take their place.
        kept: by layer, the experts that A scored.
        batch_rows: row of the batch that each token of B was run in; None if unknown.
        decoded: whether B decoded it, one token at a time; None if unknown.
    """

    documents: Int[np.ndarray, " tokens"]
    positions: Int[np.ndarray, " tokens"]
    ids: Int[np.ndarray, " tokens"] | None
    chosen: Sequence[Int[np.ndarray, "tokens k"]]
    kept: Sequence[Int[np.ndarray, "tokens ranks"]]
    batch_rows: Int[np.ndarray, " tokens"] | None = None
    decoded: Bool[np.ndarray, " tokens"] | None = None

    def with_single_scores(self) -> "ComparedTokens":
        """The same with every score a token of its own."""
        ranks = self.kept[0].shape[1]
        documents, positions = (np.repeat(x, ranks) for x in (self.documents, self.positions))
        return ComparedTokens(documents, positions, None, (), self.kept)


class Excess(NamedTuple):
    """A group of tokens in a layer that is further from A than the references.

    Attributes:
        layer: number of the layer.
        kind: the kind of group; "all" if the excess is not that of a group.
        number: document, row of a batch, token id, expert, or first position of an octave.
        ratio: e^d, d the mean over the group: its noise over that of the references.
        statistic: the largest ratio of a sum to its standard deviation.
        limit: limit of that.
    """

    layer: int
    kind: GroupKind
    number: int | None
    ratio: float
    statistic: float
    limit: float


class _TokenGroups:
    """Groups of tokens of one layer, as pairs (group, token), and the clusters of the tokens."""

    def __init__(
        self, tokens: ComparedTokens, layer: int, clusters: Int[np.ndarray, " tokens"]
    ) -> None:
        self.names: list[tuple[GroupKind, int | None]] = []
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []
        self.are_rows = not tokens.chosen
        if self.are_rows:
            self._add_group_per_number("row", tokens.kept[layer].reshape(-1, 1))
        else:
            self._add_token_groups(tokens, layer)
        self.group, self.token = (np.concatenate(x) for x in zip(*self._pairs, strict=True))
        self._shape = len(self.names), int(clusters.max()) + 1
        self._cells = self.group * self._shape[1] + clusters[self.token]

    def _add_token_groups(self, tokens: ComparedTokens, layer: int) -> None:
        """All groups but single rows of a router."""
        self._add_group("all", np.ones(len(tokens.documents), dtype=bool))
        self._add_group("first position", tokens.positions == 0)
        last = np.zeros(len(tokens.documents), dtype=bool)
        order = np.lexsort((tokens.positions, tokens.documents))
        last[order[np.flatnonzero(np.diff(tokens.documents[order], append=-1))]] = True
        self._add_group("last position", last)
        octave = np.log2(tokens.positions + 1).astype(int)
        for number in np.unique(octave[octave > 0]).tolist():
            self._add_group("positions", octave == number, 2**number - 1)
        self._add_group_per_number("document", tokens.documents[:, None])
        if tokens.batch_rows is not None:
            self._add_group_per_number("batch row", tokens.batch_rows[:, None])
        if tokens.decoded is not None:
            self._add_group("decode", tokens.decoded)
        if tokens.ids is not None:
            numbers, codes, counts = np.unique(tokens.ids, return_inverse=True, return_counts=True)
            self._add_group("rare tokens", counts[codes] <= RARE)
            for index in np.argsort(-counts, kind="stable")[:FREQUENT].tolist():
                self._add_group("token", codes == index, int(numbers[index]))
        if layer > 0:
            self._add_group_per_number("expert", tokens.chosen[layer - 1])

    def _add_group(self, kind: GroupKind, members: np.ndarray, number: int | None = None) -> None:
        """Add one group of tokens by its mask."""
        rows = np.flatnonzero(members)
        self._pairs.append((np.full(len(rows), len(self.names)), rows))
        self.names.append((kind, number))

    def _add_group_per_number(self, kind: GroupKind, columns: np.ndarray) -> None:
        """One group for each number in the rows of a table."""
        numbers, codes = np.unique(columns, return_inverse=True)
        rows = np.repeat(np.arange(len(columns)), columns.shape[1])
        self._pairs.append((codes.ravel() + len(self.names), rows))
        self.names.extend((kind, int(number)) for number in numbers)

    def cluster_sums(self, values: np.ndarray) -> Sums:
        """Sum of the values of each group in each cluster."""
        weights, cells = values[self.token], math.prod(self._shape)
        return np.bincount(self._cells, weights=weights, minlength=cells).reshape(self._shape)

    def tokens_in(self, numbers: Sequence[int]) -> np.ndarray:
        """Which tokens are in one of these groups."""
        inside = np.zeros(int(self.token.max()) + 1, dtype=bool)
        inside[self.token[np.isin(self.group, numbers)]] = True
        return inside


def token_clusters(tokens: ComparedTokens) -> Int[np.ndarray, " tokens"]:
    """Number of the cluster of each token: documents, or stretches of few documents."""
    codes = np.unique(tokens.documents, return_inverse=True)[1]
    stretches = -(-CLUSTERS // (int(codes.max()) + 1))
    return codes * stretches + tokens.positions * stretches // (int(tokens.positions.max()) + 1)


def prefix_repeats(tokens: ComparedTokens) -> Int[np.ndarray, " tokens"]:
    """How many documents have the same tokens up to here: with a common prompt all are one draw."""
    if tokens.ids is None:
        return np.ones(len(tokens.documents), dtype=np.int64)
    order = np.lexsort((tokens.positions, tokens.documents))
    prefixes: dict[tuple[int, int, int], int] = {}
    numbers = np.empty(len(order), dtype=np.int64)
    document, prefix = -1, -1
    for row in order.tolist():
        if tokens.documents[row] != document:
            document, prefix = int(tokens.documents[row]), -1
        key = prefix, int(tokens.positions[row]), int(tokens.ids[row])
        prefix = numbers[row] = prefixes.setdefault(key, len(prefixes))
    return np.bincount(numbers)[numbers]


class _ExcessScores(NamedTuple):
    """Scores of the tokens of a layer, level and tails or flips alone; zero where unknown.

    Attributes:
        values: what is beyond the references.
        allowed: what a sound run may have.
        variance: least variance of each token.
        judged: the tokens that have them.
    """

    values: Float[np.ndarray, "scores tokens"]
    allowed: Float[np.ndarray, "scores tokens"]
    variance: Float[np.ndarray, "scores tokens"]
    judged: Bool[np.ndarray, " tokens"]


def _excess_scores(
    run: RunLayer,
    references: Sequence[RunLayer],
    fresh: np.ndarray,
    tail: float,
    tolerance: float,
) -> _ExcessScores:
    """Scores of a run beside others.

    Args:
        run: a layer of the run.
        references: the same layer of the references.
        fresh: tokens that earlier flips have not reached.
        tail: the quantile; infinite for the level alone.
        tolerance: τ.
    """
    levels = np.stack([x.level for x in references])
    flips = np.mean([x.flipped for x in references], axis=0)
    if np.isnan(run.level).all():
        share = (1 + MORE_FLIPS) * flips * (1 + 1 / len(references))
        values, allowed = (run.flipped - flips)[None], (MORE_FLIPS * flips)[None]
        return _ExcessScores(values, allowed, share[None], np.ones(len(flips), dtype=bool))
    judged = fresh & ~np.isnan(levels).any(0)
    difference_to_mean = np.where(np.isnan(run.level), math.inf, run.level - levels.mean(0))
    difference = np.where(judged, np.clip(difference_to_mean, -CUT, CUT), 0.0)
    if tail == math.inf:
        return _ExcessScores(
            difference[None], (tolerance * judged)[None], 0.0 * judged[None], judged
        )
    beyond = tail + max(tolerance, FAR)
    farther = np.isfinite(difference_to_mean) & (difference_to_mean > beyond + FARTHER)
    values = np.stack((difference, judged & (difference_to_mean > beyond), judged & farther))
    shares = TAIL_SHARE * judged, FARTHER_SHARE * judged
    allowed = np.stack((tolerance * judged, *shares))
    return _ExcessScores(values, allowed, np.stack((0.0 * judged, *shares)), judged)


class _LayerSums:
    """The sums of all groups of one layer, of B and of every reference run beside the others."""

    def __init__(
        self,
        run: RunLayer,
        references: Sequence[RunLayer],
        groups: _TokenGroups,
        clusters: np.ndarray,
        fresh: np.ndarray,
        repeats: np.ndarray,
        tolerance: float,
        has_tail: bool,
    ) -> None:
        self._has_levels = not np.isnan(run.level).all()
        if not self._has_levels:
            references = [RunLayer.from_noise(None, x.flipped > 0) for x in references]
        pairs = [(x, [y for y in references if y is not x]) for x in references]
        plain = [_excess_scores(*pair, fresh, math.inf, 0.0) for pair in pairs]
        pooled = np.concatenate([x.values[0][x.judged] for x in plain])
        least = DRAWN / math.sqrt(references[0].rows.shape[1])
        tail = max(float(np.quantile(pooled, TAIL)), 2.33 * least) if len(pooled) else CUT
        tail = tail if has_tail else math.inf
        self.scores = _excess_scores(run, references, fresh, tail, tolerance)
        self._nulls = [_excess_scores(*pair, fresh, tail, 0.0) for pair in pairs]
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
        """Variance added to that of a count; none to that of a level."""
        return 0.0 if self._has_levels and score == 0 else COUNTS

    def group_statistics(self) -> Float[np.ndarray, "scores groups"]:
        """Sums of B beyond what is allowed, over their standard deviations."""
        values = self.scores.values - self.scores.allowed
        every, as_it_is = np.ones_like(self.tested), np.ones((1, self._count.shape[1]))
        ratios = [
            self._sums_over_deviations(self.groups.cluster_sums(x), score, every, as_it_is)[:, 0]
            for score, x in enumerate(values)
        ]
        return np.where(self.tested, np.stack(ratios), -math.inf)

    def null_maxima(self, signs: Float[np.ndarray, "draws clusters"]) -> np.ndarray:
        """Largest statistic of each draw and reference run, documents with these signs."""
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
        """Totals over clusters of some groups, over their standard deviations."""
        sums, least = sums[groups], self._least_variances[score][groups, None]
        totals = (torch.from_numpy(sums) @ torch.from_numpy(signs).T).numpy()  # on torch's threads
        if score == FARTHER_SCORE:  # hardly any in sound runs: a fault would hide in its own spread
            return totals / np.sqrt(least)
        number = np.maximum((self._count[groups] > 0).sum(1), 2)[:, None]
        spread = totals**2  # one array from here on: fresh memory takes longer than the numbers
        spread /= number
        np.subtract((sums**2).sum(1)[:, None], spread, out=spread)
        spread *= number
        spread /= number - 1
        spread[self._is_document[groups]] = 0.0
        np.maximum(spread, least, out=spread)
        np.sqrt(spread, out=spread)
        return np.divide(totals, spread, out=spread)

    def _least_variance(self, score: int) -> Float[np.ndarray, " groups"]:
        """Least variance of the sum of each group; that of a document is known by the others."""
        floor = self.groups.cluster_sums(self._variance[score]).sum(1)
        floor = np.maximum(floor + self._variance_of_counts(score), 1e-12)
        if score == FARTHER_SCORE:
            return floor
        single = self._variance_of_documents(score) * self._count.sum(1)
        return np.where(self._is_document, np.maximum(single, floor), floor)

    def _variance_of_documents(self, score: int) -> float:
        """Variance per token of the sum of one document, over the reference runs."""
        sums = [np.bincount(self._clusters, weights=null.values[score]) for null in self._nulls]
        deviations = np.stack(sums) - np.mean(sums, axis=1, keepdims=True)
        return float(
            (deviations**2).mean() * deviations.shape[1] / max(self.scores.judged.sum(), 1)
        )

    def statistic_outside(self, inside: Bool[np.ndarray, " tokens"]) -> float:
        """Largest statistic of the tokens outside, all taken together."""
        values = np.where(inside, 0.0, self.scores.values - self.scores.allowed)
        ratios = []
        for score, outer in enumerate(values):
            sums = np.bincount(self._clusters, weights=outer)
            spread = ((sums - sums.mean()) ** 2).sum() * len(sums) / (len(sums) - 1)
            floor = self._variance[score][~inside].sum() + self._variance_of_counts(score)
            ratios.append(sums.sum() / math.sqrt(max(spread, floor, 1e-12)))
        return max(ratios)

    def is_exception(self, inside: Bool[np.ndarray, " tokens"]) -> bool:
        """Whether these are an exception: few, louder than the rest, which is as expected."""
        if inside.mean() > MOST_INSIDE or self.statistic_outside(inside) >= OUTSIDE:
            return False
        return self.noise_ratio(inside) >= APART * self.noise_ratio(~inside)

    def noise_ratio(self, inside: Bool[np.ndarray, " tokens"]) -> float:
        """Noise of tokens over that of the references; of flips, if there are no scores."""
        inside = inside & self.scores.judged
        if not inside.any():
            return 1.0
        mean = float(self.scores.values[0][inside].mean())
        if self._has_levels:
            return math.exp(mean)
        flips = float(self.scores.allowed[0][inside].mean()) / MORE_FLIPS
        return (mean + flips) / max(flips, 1 / len(inside))


def find_excess(
    run: Sequence[RunLayer],
    references: Sequence[Sequence[RunLayer]],
    tokens: ComparedTokens,
    tolerance: float,
) -> tuple[Excess, ...]:
    """Return where a run is further from A than the reference runs, in order of depth.

    Args:
        run: the layers of B, in order of depth.
        references: the layers of each reference run; at least two runs.
        tokens: the compared tokens.
        tolerance: τ.
    """
    repeats = prefix_repeats(tokens)
    tables = [
        pair
        for number in range(len(run))
        for pair in _layer_sums(number, run, references, tokens, repeats, tolerance)
    ]
    generator = np.random.default_rng(0)
    signs = generator.choice((-1.0, 1.0), (DRAWS, int(token_clusters(tokens).max()) + 1))
    null = np.max([table.null_maxima(signs) for _, table in tables], axis=0)
    limit = max(float(np.quantile(null, 1 - LEVEL)), LEAST_LIMIT)
    excess: dict[int, Excess] = {}
    for number, table in tables:
        table_excess = _excess_of_layer(number, table, limit)
        if table_excess is not None:
            excess.setdefault(number, table_excess)  # a row is named where no tokens are
    return tuple(excess.values())


def _layer_sums(
    number: int,
    run: Sequence[RunLayer],
    references: Sequence[Sequence[RunLayer]],
    tokens: ComparedTokens,
    repeats: Int[np.ndarray, " tokens"],
    tolerance: float,
) -> list[tuple[int, _LayerSums]]:
    """The groups of tokens of a layer and, with scores, the rows of its router."""
    of_b, of_references = run[number], [reference[number] for reference in references]
    fresh, clusters = _tokens_before_flips(number, run, references, tokens), token_clusters(tokens)
    groups = _TokenGroups(tokens, number, clusters)
    allowed, has_tail = tolerance * (LATER if number else 1.0), tolerance < WIDE
    allowed += _quietness(of_references, fresh)
    table = _LayerSums(of_b, of_references, groups, clusters, fresh, repeats, allowed, has_tail)
    tables = [(number, table)]
    if not np.isnan(of_b.level).all():
        quiet, ranks = of_b.with_rows_above(of_references), of_b.rows.shape[1]
        rows = [x.with_single_scores() for x in (quiet, *of_references)]
        fresh, clusters, repeats = (np.repeat(x, ranks) for x in (fresh, clusters, repeats))
        groups = _TokenGroups(tokens.with_single_scores(), number, clusters)
        loudest = max(tolerance, ROW)
        table = _LayerSums(rows[0], rows[1:], groups, clusters, fresh, repeats, loudest, False)
        tables.append((number, table))
    return tables


def _quietness(references: Sequence[RunLayer], fresh: Bool[np.ndarray, " tokens"]) -> float:
    """How much quieter the judged tokens are in the references than all tokens, in logarithms."""
    level = np.mean([x.level for x in references], axis=0)
    judged, everywhere = level[fresh & ~np.isnan(level)], level[~np.isnan(level)]
    if len(judged) == 0:
        return 0.0
    return max(float(np.median(everywhere) - np.median(judged)), 0.0)


def _tokens_before_flips(
    number: int,
    run: Sequence[RunLayer],
    references: Sequence[Sequence[RunLayer]],
    tokens: ComparedTokens,
) -> Bool[np.ndarray, " tokens"]:
    """Tokens that neither flipped themselves in a layer before, nor follow one of B's.

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
        spike = ~(run[layer].largest_difference() - np.mean(sizes, axis=0) <= SPIKE)
        only_in_b = (
            only_in_b | (in_b & ~in_references.all(0)) | (spike & ~np.isnan(run[layer].level).all())
        )
    codes = np.unique(tokens.documents, return_inverse=True)[1]
    first = np.full(int(codes.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, codes[only_in_b], tokens.positions[only_in_b])
    return ~flipped & (tokens.positions < first[codes])


def _excess_of_layer(number: int, layer: _LayerSums, limit: float) -> Excess | None:
    """The excess of one layer, by the groups that hold all of it, if some do."""
    largest = layer.group_statistics().max(0)
    if largest.max() <= limit:
        return None
    names = layer.groups.names
    for kind in SPECIFIC:
        groups = [i for i, x in enumerate(names) if x[0] == kind and largest[i] > limit]
        inside = layer.groups.tokens_in(groups)
        if groups and layer.is_exception(inside):
            first = max(groups, key=lambda i: largest[i])
            ratio, statistic = (
                layer.noise_ratio(layer.groups.tokens_in([first])),
                float(largest[first]),
            )
            return Excess(number, kind, names[first][1], ratio, statistic, limit)
    if layer.groups.are_rows:
        return None  # noise of all rows is that of the tokens
    everything = np.ones_like(layer.scores.judged)
    return Excess(number, "all", None, layer.noise_ratio(everything), float(largest.max()), limit)
