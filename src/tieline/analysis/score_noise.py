r"""Differences of the scores of two runs, and p-values of flips under this noise.

For the experts e whose scores both sides recorded at a token t,

    Δ_te = z_B(t, e) - z_A(t, e),      v_t = Σ_e (Δ_te - Δ̄_t)² / (n_t - 1),

with Δ̄_t the mean over the n_t experts: a constant added to all scores of a token changes no choice,
and recorded probabilities do not determine it. The level of a token is log v_t, a natural
logarithm. Noise below a few steps of float32 is rounding and counts as zero.

The size of a layer's noise is relative to the spread of its scores: the median standard deviation
of a token's recorded scores, divided by that of the first C of E independent normal scores, so that
traces with few and with many recorded ranks are comparable.

`flip_test` gives every first flip a p-value. A token flips in a layer if its sets of chosen experts
differ: S_A ≠ S_B. Its margin on side A is the distance of the scores of A that must have changed
places,

    margin_A = max_{i in S_A \ S_B} z_i - min_{j in S_B \ S_A} z_j >= z_[k] - z_[k+1],

and the same on side B. Its margin M is the larger of the two. If A did not record the score of an
expert j, that score is at most the last recorded one, which bounds the margin from below. For
routing within groups, the gap of the layer (including that between groups) replaces the margin.

Noise differs from token to token, so a margin is divided by the noise of its own token: the
standard deviation s of Δ over the other common experts, without those that changed places. A few
experts estimate it badly; s² is therefore shrunk towards the layer's median v₀, which counts as
much as ν₀ observations (the moderated variance of Smyth, 2004):

    s² = (ν₀ v₀ + Σ_e (Δ_e - Δ̄)²) / (ν₀ + n - 1),    trigamma(ν₀/2) = Var log v - trigamma((n-1)/2)

but s is at least the deviation of the token's own experts, because a few tokens may be far noisier
than the rest. If most tokens have no noise at all and none has flipped before, a noisy token itself
needs an explanation: s is then at most 64 times the rounding of the scores.

Under noise, R = M/s is at most |Δ_i - Δ_j|/s of the pair that changed places. The law of the latter
is estimated from the same layer: from pairs of experts on one side of the threshold that did not
change places, so that no flip selects them. Its tail beyond the last 2 % is a power law with Hill's
exponent, so that heavy tails are part of the reference and not of the evidence. Flips select large
noise: a pair changes places if its noise exceeds its distance, and the number of pairs within a
distance grows at most as its square (with few experts linearly). The reference is therefore
weighted by R² before p is computed.

Only *first* flips have a p-value: a token that flipped in an earlier layer has a different residual
stream, and its later flips are consequences. The false discovery rate over all first flips of all
layers is controlled below 1/200 (Benjamini and Hochberg, 1995), so that two hundred sound runs give
about one unexplained flip.

If a log has expert ids and weights but no scores, `weight_evidence` tests flips by the combine
weights. A softmax router without a selection bias ranks by its logits z, and log w_e = z_e + const
for each token: differences of log-weights of chosen experts are differences of scores. Let i be the
leaving expert (in S_A \ S_B) and j the entering expert with the largest weight,

    d_A = log w_A(i) - min_{S_A} log w_A     distance of the leaver from the last rank of A
    d_B = log w_B(j) - min_{S_B} log w_B     distance of the enterer from the last rank of B
    s   = log w_B(j) - log w_A(i)            minus the mean difference over the common experts

If both sides choose the largest scores, and those of B are those of A plus noise Δ, then
d_A + d_B <= Δ_j - Δ_i and Δ_i <= s <= Δ_j. M = max(d_A + d_B, |s|) is therefore at most the noise
of the pair, whose law is that of the last two ranks of tokens that do not flip. The few chosen
experts of a token do not determine its own noise, so all tokens share one law. With a selection
bias or a function other than softmax, weights do not rank the choice, and leavers have any rank
among the chosen. Weights therefore clear flips if leavers and enterers have the last rank more
often than chance (1 in k) explains, and never accuse.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import special, stats
from torch import Tensor

from tieline.core.numerics import float_step
from tieline.measure.noise_flips import logit_view
from tieline.trace.record import LayerTrace

FLOOR_STEPS = 4.0
"""Steps of float32 below which a difference of scores is rounding."""
SILENT_SHARE = 0.95
"""Least share of tokens without noise in a silent layer."""
FEWEST_COMMON = 3
"""Fewest common experts of a token whose noise is known."""


class ScoreDifferences(NamedTuple):
    """What `LayerNoise` has of the same names."""

    difference: Float[np.ndarray, "tokens ranks"]
    common: Bool[np.ndarray, "tokens ranks"]
    floor: float


class LayerNoise(NamedTuple):
    """Differences of the scores of one layer.

    Attributes:
        difference: Δ for the experts that A recorded, in its order; zero if B did not record one.
        common: mask of the experts that both sides recorded.
        experts: the experts that A recorded.
        variance: v of each token; NaN with fewer than three common experts.
        level: log(v + floor²).
        floor: largest difference that counts as rounding, in units of score.
        spread: standard deviation of the scores of a token over all experts, median over tokens.
    """

    difference: Float[np.ndarray, "tokens ranks"]
    common: Bool[np.ndarray, "tokens ranks"]
    experts: Int[np.ndarray, "tokens ranks"]
    variance: Float[np.ndarray, " tokens"]
    level: Float[np.ndarray, " tokens"]
    floor: float
    spread: float

    @property
    def measured(self) -> Bool[np.ndarray, " tokens"]:
        """Mask of the tokens whose noise is known."""
        return ~np.isnan(self.variance)

    @property
    def is_silent(self) -> bool:
        """Whether nearly all tokens have no noise."""
        levels = self.level[self.measured]
        limit = 2 * math.log(2 * self.floor)
        return len(levels) > 0 and bool(np.quantile(levels, SILENT_SHARE) <= limit)

    def size(self, tokens: Bool[np.ndarray, " tokens"]) -> float | None:
        """Median noise √v of these tokens, zero if it is rounding; None if no token's is known."""
        levels = self.level[tokens & self.measured]
        if len(levels) == 0:
            return None
        size = math.exp(np.median(levels) / 2)
        return 0.0 if size <= 2 * self.floor else size

    def relative(self, tokens: Bool[np.ndarray, " tokens"]) -> float | None:
        """The size over the spread of the scores; None if all scores are equal."""
        size = self.size(tokens)
        return None if size is None or self.spread <= self.floor else size / self.spread

    @property
    def relative_mean(self) -> float | None:
        """Mean noise √v of all tokens over the spread; None if unknown or all scores are equal."""
        variance = self.variance[self.measured]
        if len(variance) == 0 or self.spread <= self.floor:
            return None
        return float(np.sqrt(variance).mean()) / self.spread


def comparison_status(a: LayerTrace, b: LayerTrace) -> str:
    """Return "ok", or the reason why the scores of a layer cannot be compared."""
    sides = (("A", a), ("B", b))
    for side, layer in sides:
        if layer.scores is None:
            return f"not attributable: {side} has expert ids only, no scores"
        if not layer.has_gaps:
            return f"not attributable: {side} has the scores of chosen experts only"
    grouped = [side for side, layer in sides if layer.facts.n_groups > 1]
    if len(grouped) == 1:
        return f"not attributable: only {grouped[0]} routes within groups"
    if a.facts.units != b.facts.units:
        return f"not attributable: scores of A are {a.facts.units}, those of B {b.facts.units}"
    return "ok"


def layer_noise(a: LayerTrace, b: LayerTrace) -> LayerNoise:
    """Differences of the scores of a layer.

    Args:
        a: the layer in A.
        b: the same tokens in B, experts numbered as in A.
    """
    scores_a, scores_b = (scores.double() for scores in comparable_scores(a, b))
    difference, is_common = _matched_differences(a, b, scores_a, scores_b)
    count = is_common.sum(1)
    mean = difference.sum(1) / count.clamp(min=1)
    centred = torch.where(is_common, difference - mean[:, None], 0.0)
    variance = centred.square().sum(1) / (count - 1).clamp(min=1)
    variance[count < FEWEST_COMMON] = torch.nan
    floor = _rounding_floor(a, b)
    level = (variance + floor**2).log()
    return LayerNoise(
        difference.numpy(),
        is_common.numpy(),
        a.experts.numpy(),
        variance.numpy(),
        level.numpy(),
        floor,
        _score_spread(a, scores_a),
    )


def score_differences(a: LayerTrace, b: LayerTrace) -> ScoreDifferences:
    """Differences of the scores of a layer alone; see `layer_noise`."""
    scores_a, scores_b = (scores.double() for scores in comparable_scores(a, b))
    difference, is_common = _matched_differences(a, b, scores_a, scores_b)
    return ScoreDifferences(difference.numpy(), is_common.numpy(), _rounding_floor(a, b))


def _matched_differences(
    a: LayerTrace, b: LayerTrace, scores_a: Tensor, scores_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Δ of the experts that A recorded, zero where B did not record one, and where it did."""
    if scores_b.shape[1] ** 2 >= a.facts.n_experts:
        of_all = scores_b.new_full((len(scores_b), a.facts.n_experts), torch.nan)
        matched = of_all.scatter_(1, b.experts, scores_b).gather(1, a.experts)
    else:  # few ranks of many experts
        matched = torch.full_like(scores_a, torch.nan)
        for rank in range(scores_b.shape[1]):
            same = a.experts == b.experts[:, rank, None]
            matched = torch.where(same, scores_b[:, rank, None], matched)
    difference = matched.sub_(scores_a)
    is_common = difference.isfinite()
    return difference.masked_fill_(~is_common, 0.0), is_common


def _rounding_floor(a: LayerTrace, b: LayerTrace) -> float:
    """Largest difference of scores that counts as rounding."""
    return FLOOR_STEPS * max(_rounding_step(a), _rounding_step(b))


def comparable_scores(a: LayerTrace, b: LayerTrace) -> tuple[Tensor, Tensor]:
    """Scores of both sides in the same units, logits if possible.

    Probabilities without a correction bias are converted to logits, because the noise of a
    probability grows with it. Selection scores with a bias are not converted.
    """
    assert a.scores is not None
    assert b.scores is not None
    if a.facts.units == "logits" or a.bias is not None or b.bias is not None:
        return a.scores, b.scores
    return logit_view(a).scores, logit_view(b).scores


def _rounding_step(layer: LayerTrace) -> float:
    """Spacing of float32 (or of the scores' own coarser type) at the median threshold."""
    assert layer.scores is not None
    middle = layer.scores[:, layer.facts.k - 1].double().abs().median().reshape(1)
    eps = max(torch.finfo(layer.scores.dtype).eps, torch.finfo(torch.float32).eps)
    return float_step(middle, round(-math.log2(eps)), -126).item()


def _score_spread(layer: LayerTrace, scores: Tensor) -> float:
    """Standard deviation of a token's scores over all experts, median over tokens."""
    facts = layer.facts
    finite = scores.isfinite()
    count = finite.sum(1)
    mean = scores.where(finite, 0.0).sum(1) / count.clamp(min=1)
    deviations = torch.where(finite, scores - mean[:, None], 0.0)
    deviation = (deviations.square().sum(1) / (count - 1).clamp(min=1)).sqrt()
    if len(deviation) == 0:
        return 0.0
    reachable = facts.n_experts * facts.k_groups // facts.n_groups
    return deviation.median().item() / top_score_deviation(
        reachable, min(scores.shape[1], reachable)
    )


DENSITY_QUANTILE = 0.05
"""Quantile of the gap that estimates the density at zero."""


def gap_density(layer: LayerTrace, spread: float) -> float | None:
    """Tokens per unit of gap over spread, at a gap of zero: T p / q_p with p = 5 %.

    Args:
        layer: a layer with gaps.
        spread: spread of its scores.
    """
    gaps = layer.gap.double()
    if len(gaps) < FEWEST_PAIRS or spread <= 0:
        return None
    quantile = float(gaps.quantile(DENSITY_QUANTILE))
    return len(gaps) * DENSITY_QUANTILE * spread / quantile if quantile > 0 else None


@lru_cache(maxsize=64)
def top_score_deviation(experts: int, ranks: int) -> float:
    """Standard deviation of the expected first ranks of `experts` independent N(0, 1) scores."""
    if ranks < 2:
        return 1.0
    rank = np.arange(1, ranks + 1)
    expected = special.ndtri((experts - rank + 0.625) / (experts + 0.25))  # Blom's scores
    return float(expected.std(ddof=1))


FALSE_DISCOVERIES = 0.005
"""False discovery rate of unexplained flips."""
TAIL_SHARE = 0.02
"""Share of the reference pairs in the tail, which is a power law."""
FEWEST_PAIRS = 100
"""Fewest pairs of unflipped tokens for a reference."""
LEAST_COMMON_SHARE = 2 / 3
"""Least share of a token's other experts that both sides recorded: experts that noise moved out of
the recorded ranks are missing, and the rest alone would seem too quiet."""
MOST_SILENT_NOISE = 64.0
"""Largest noise s of a token, over rounding, in a silent layer."""
TAIL_EXPONENTS = (1.0, 6.0)
"""Limits of the exponent of the tail."""
SIZE_BIAS = 2.0
"""Exponent by which flips select noise: the number of pairs that noise of size R exchanges is
proportional to R², because the number of pairs within R and the chance of each grow with R."""
PRIOR_FREEDOM = (1.0, 64.0)
"""Limits of ν₀."""


class FlipTest(NamedTuple):
    """First flips of a layer with their p-values.

    Attributes:
        tokens: indices of the first flips.
        margins: margin of each, in units of score.
        noise: s of its own token.
        p: probability that noise of that token crosses such a margin; 1 if it cannot be estimated.
        tested: number of flips with an estimated p-value.
    """

    tokens: Int[np.ndarray, " flips"]
    margins: Float[np.ndarray, " flips"]
    noise: Float[np.ndarray, " flips"]
    p: Float[np.ndarray, " flips"]
    tested: int


def flip_test(
    a: LayerTrace, b: LayerTrace, noise: LayerNoise, flipped: np.ndarray, fresh: np.ndarray
) -> FlipTest:
    """Test the first flips of a layer against the noise of their own tokens.

    Args:
        a: the layer in A.
        b: the same tokens in B, experts numbered as in A.
        noise: the differences of their scores.
        flipped: which tokens flip.
        fresh: which tokens flipped in no earlier layer.
    """
    rows = np.flatnonzero(flipped & fresh)
    margins = flip_margins(a, b, torch.from_numpy(rows)).numpy()
    if len(rows) == 0:
        return FlipTest(rows, margins, np.zeros(0), np.zeros(0), 0)
    prior = _variance_prior(noise, np.flatnonzero(fresh & noise.measured))
    moved = np.zeros(noise.common.shape, dtype=bool)
    k, in_a, chosen = a.facts.k, a.experts[rows], b.experts[rows][:, : b.facts.k]
    in_b = (in_a[:, :, None] == chosen[:, None, :]).any(2)
    first = torch.arange(in_a.shape[1], device="cpu") < k
    moved[rows] = (first[None, :] != in_b).numpy()
    scale, count = _token_noise(noise, rows, moved[rows], prior)
    n_unmoved = (~moved[rows]).sum(1)
    testable, freedom = count >= np.maximum(2, LEAST_COMMON_SHARE * n_unmoved), count - 1
    if fresh.all() and noise.is_silent:
        scale, testable = np.minimum(scale, MOST_SILENT_NOISE * noise.floor), np.ones_like(testable)
        freedom = np.full_like(freedom, TAIL_EXPONENTS[1])
    reference = _reference_ratios(noise, fresh, moved, a.facts.k, prior)
    testable &= len(reference) >= FEWEST_PAIRS
    ratio = margins / np.maximum(scale, noise.floor)
    chance = place_change_probability(reference, ratio, freedom)
    p = np.where(testable & (margins > noise.floor), chance, 1.0)
    return FlipTest(rows, margins, scale, p, int(testable.sum()))


def rejected_tests(p: Float[np.ndarray, " tests"], rate: float) -> Bool[np.ndarray, " tests"]:
    """Mask of tests rejected by Benjamini and Hochberg's rule at this false discovery rate."""
    order = np.argsort(p)
    allowed = rate * np.arange(1, len(p) + 1) / max(len(p), 1)
    below = np.flatnonzero(p[order] <= allowed)
    rejected = np.zeros(len(p), dtype=bool)
    if len(below):
        rejected[order[: below[-1] + 1]] = True
    return rejected


def flip_margins(
    a: LayerTrace, b: LayerTrace, rows: Int[Tensor, " flips"]
) -> Float[Tensor, " flips"]:
    """Margin M of these tokens, all of which must have flipped, in float64."""
    if a.facts.n_groups > 1:
        return torch.maximum(a.gap[rows], b.gap[rows])
    scores_a, scores_b = (scores[rows].double() for scores in comparable_scores(a, b))
    in_a, in_b = a.experts[rows], b.experts[rows]
    k = a.facts.k
    return torch.maximum(
        _margin_on_side(scores_a, in_a, in_b[:, :k], k),
        _margin_on_side(scores_b, in_b, in_a[:, :k], k),
    )


def _margin_on_side(scores: Tensor, experts: Tensor, other: Tensor, k: int) -> Tensor:
    """Distance of the experts that changed places, by the scores of one side."""
    chosen = experts[:, :k]
    leaving = ~(chosen[:, :, None] == other[:, None, :]).any(2)
    entering = ~(other[:, :, None] == chosen[:, None, :]).any(2)
    highest = scores[:, :k].masked_fill(~leaving, -torch.inf).amax(1)
    is_kept = other[:, :, None] == experts[:, None, k:]
    entering_scores = (is_kept * scores[:, None, k:].nan_to_num(neginf=0.0)).sum(2)
    entering_scores = torch.where(is_kept.any(2), entering_scores, scores[:, -1:])
    return highest - entering_scores.masked_fill(~entering, torch.inf).amin(1)


def _variance_prior(noise: LayerNoise, tokens: np.ndarray) -> tuple[float, float]:
    """(ν₀, v₀) of a layer, from the spread of log v over these tokens."""
    variance = noise.variance[tokens] + noise.floor**2
    if len(variance) < FEWEST_PAIRS:
        return PRIOR_FREEDOM[0], float(np.median(variance)) if len(variance) else noise.floor**2
    logs = np.log(variance)
    low, middle, high = np.quantile(logs, [0.25, 0.5, 0.75])
    freedom = max(float(np.median(noise.common[tokens].sum(1))) - 1, 1.0)
    excess = ((high - low) / 1.349) ** 2 - float(special.polygamma(1, freedom / 2))
    grid = np.geomspace(*PRIOR_FREEDOM, 64)
    curve = special.polygamma(1, grid / 2)  # falling
    return float(np.interp(-excess, -curve, grid)), float(np.exp(middle))


def _token_noise(
    noise: LayerNoise, rows: np.ndarray, left_out: np.ndarray, prior: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The deviation s of each token over its other experts, and the number of these."""
    counted = noise.common[rows] & ~left_out
    count = counted.sum(1)
    values = np.where(counted, noise.difference[rows], 0.0)
    mean = values.sum(1) / np.maximum(count, 1)
    squares = (np.where(counted, values - mean[:, None], 0.0) ** 2).sum(1)
    (weight, middle), freedom = prior, np.maximum(count - 1, 0)
    moderated = (weight * middle + squares) / (weight + freedom)
    return np.sqrt(np.maximum(moderated, squares / np.maximum(freedom, 1))), count


def _reference_ratios(
    noise: LayerNoise, fresh: np.ndarray, moved: np.ndarray, k: int, prior: tuple[float, float]
) -> np.ndarray:
    """|Δ_i - Δ_j| / s of two ranks next to the threshold that did not change places, ascending."""
    ranks = noise.common.shape[1]
    pair = slice(k, k + 2) if k + 1 < ranks else slice(k - 2, k)
    if pair.start < 0:
        return np.zeros(0)
    unmoved = noise.common[:, pair].all(1) & ~moved[:, pair].any(1)
    rows = np.flatnonzero(fresh & unmoved & (noise.common.sum(1) > FEWEST_COMMON))
    left_out = moved[rows]
    left_out[:, pair] = True
    scale, _ = _token_noise(noise, rows, left_out, prior)
    first, second = noise.difference[rows, pair].T
    return np.sort(np.abs(first - second) / np.maximum(scale, noise.floor))


def place_change_probability(
    reference: np.ndarray, ratio: np.ndarray, degrees_of_freedom: np.ndarray
) -> np.ndarray:
    """P-value of a change of places under score noise: P(R >= ratio) = Σ_{R >= ratio} R² / Σ R².

    R are noise ratios, ascending in `reference`, of pairs of ranks that kept their places. A pair
    changes places in proportion to R, hence the second power.

    The sum is over the reference, and in its last 2 % over Hill's power law R^-α, whose weighted
    tail falls as R^-(α - 2), or not at all if α <= 2. The exponent is at most the degrees of
    degrees_of_freedom of s, because few experts may agree by chance.
    """
    count = len(reference)
    if count < FEWEST_PAIRS:
        return np.ones_like(ratio)
    top = max(int(TAIL_SHARE * count), 10)
    start = max(reference[-top - 1], 1.0)  # the tail starts beyond one deviation
    log_excesses = np.log(np.maximum(reference[-top:], start) / start)
    exponent = np.clip(1 / max(log_excesses.mean(), 1e-9), *TAIL_EXPONENTS)
    exponent = np.minimum(exponent, np.maximum(degrees_of_freedom, TAIL_EXPONENTS[0]))
    weight = np.append(np.cumsum(reference[::-1] ** 2)[::-1], 0.0)
    counted = weight[np.searchsorted(reference, ratio)] / max(weight[0], np.finfo(float).tiny)
    share = max(weight[-top - 1], top * start**2) / max(weight[0], top * start**2)
    tail_slope = np.maximum(exponent - SIZE_BIAS, 0.0)
    modelled = share * (np.maximum(ratio, start) / start) ** -tail_slope
    return np.where(ratio > start, np.maximum(modelled, counted), np.maximum(counted, share))


FEWEST_CHOSEN = 3
"""Least k for an estimate of the noise of a token."""
MOST_NOISE = 0.1
"""Noise over the spread of the scores beyond which an expert of any rank may leave."""
MOST_CHANCE = 0.005
"""Largest p-value of the number of movers at the last rank, if each rank were equally likely."""


class WeightEvidence(NamedTuple):
    """First flips of a layer and the noise of its log-weights.

    Attributes:
        noise: differences of the log-weights of the chosen experts.
        test: p-values of the first flips.
        last: number of leavers of A and enterers of B at the last rank.
        movers: number of leavers and enterers of first flips, one of each per token.
        is_near: whether more of them have the last rank than chance explains.
    """

    noise: LayerNoise
    test: FlipTest
    last: int
    movers: int
    is_near: bool


def weight_evidence(
    a: LayerTrace,
    b: LayerTrace,
    flipped: Bool[np.ndarray, " tokens"],
    fresh: Bool[np.ndarray, " tokens"],
) -> WeightEvidence | None:
    """Test first flips by combine weights; None if these are no evidence.

    Args:
        a: the layer in A.
        b: the same tokens in B, experts numbered as in A.
        flipped: which tokens flip.
        fresh: which tokens flipped in no earlier layer.
    """
    if not all(weights_rank_choices(layer) for layer in (a, b)):
        return None
    scored = _ranked_by_weight(a), _ranked_by_weight(b)
    rows = np.flatnonzero(flipped & fresh)
    distances = mover_distances(*scored, torch.from_numpy(rows))
    noise = layer_noise(*scored)
    last_two = noise.difference[fresh & ~flipped][:, -2:]
    reference = np.sort(np.abs(last_two[:, 0] - last_two[:, 1]))
    if (len(rows) and len(reference) < FEWEST_PAIRS) or (noise.relative(fresh) or 0.0) > MOST_NOISE:
        return None
    scale = max(noise.size(fresh) or 0.0, noise.floor)
    steepest = np.full(len(rows), TAIL_EXPONENTS[1])
    p = place_change_probability(reference / scale, distances.margins / scale, steepest)
    test = FlipTest(rows, distances.margins, np.full(len(rows), scale), p, len(rows))
    k, last = a.facts.k, int((distances.to_last_a == 0).sum() + (distances.to_last_b == 0).sum())
    is_chance = len(rows) > 0 and stats.binom.sf(last - 1, 2 * len(rows), 1 / k) > MOST_CHANCE
    return WeightEvidence(noise, test, last, 2 * len(rows), not is_chance)


def weights_rank_choices(layer: LayerTrace) -> bool:
    """Whether the weights of a layer may be a softmax of the scores that rank the experts."""
    facts, weights = layer.facts, layer.weights
    if weights is None or layer.bias is not None or facts.k < FEWEST_CHOSEN or len(weights) == 0:
        return False
    ranked = facts.units in ("logits", "softmax") and facts.n_groups == 1 and not layer.smoothed
    return ranked and bool((weights > 0).all())


def _ranked_by_weight(layer: LayerTrace) -> LayerTrace:
    """The layer with its chosen experts ordered by weight and log-weights as scores."""
    assert layer.weights is not None
    weights, order = layer.weights.sort(dim=1, descending=True, stable=True)
    experts = layer.experts[:, : layer.facts.k].gather(1, order)
    units = replace(layer.facts, units="logits")
    return LayerTrace(layer.name, units, experts, weights.double().log().float())


class MoverDistances(NamedTuple):
    """Distances of leaver and enterer of each flip, in units of log-weight.

    Attributes:
        to_last_a: d_A, zero if the leaver has the last rank.
        to_last_b: d_B, zero if the enterer has the last rank.
        between: s.
    """

    to_last_a: Float[np.ndarray, " flips"]
    to_last_b: Float[np.ndarray, " flips"]
    between: Float[np.ndarray, " flips"]

    @property
    def margins(self) -> Float[np.ndarray, " flips"]:
        """M of each flip."""
        return np.maximum(self.to_last_a + self.to_last_b, np.abs(self.between))


def mover_distances(a: LayerTrace, b: LayerTrace, rows: Int[Tensor, " flips"]) -> MoverDistances:
    """Distances of leaver and enterer from the last rank and from each other.

    Args:
        a: the layer in A, ranked by weight.
        b: the same tokens in B, ranked by weight.
        rows: tokens whose sets differ.
    """
    same = a.experts[rows][:, :, None] == b.experts[rows][:, None, :]
    assert a.scores is not None
    assert b.scores is not None
    scores_a, scores_b = a.scores[rows].double(), b.scores[rows].double()
    stays_a, stays_b = same.any(2), same.any(1)
    leaver, enterer = (
        scores.masked_fill(stays, -torch.inf).amax(1)
        for scores, stays in ((scores_a, stays_a), (scores_b, stays_b))
    )
    count = stays_a.sum(1).clamp(min=1)
    common = ((scores_b * stays_b).sum(1) - (scores_a * stays_a).sum(1)) / count
    between = torch.where(stays_a.any(1), enterer - leaver - common, 0.0)
    distances = (leaver - scores_a[:, -1], enterer - scores_b[:, -1], between)
    return MoverDistances(*(x.numpy() for x in distances))
