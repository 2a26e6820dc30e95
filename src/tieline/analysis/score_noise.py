r"""How far the scores of two runs are apart, token by token, and whether flips follow from it.

For the experts e that both sides kept of a token t,

    Δ_te = z_B(t, e) - z_A(t, e),      v_t = Σ_e (Δ_te - Δ̄_t)² / (n_t - 1),

with Δ̄_t the mean over the n_t experts: what all scores of a token have in common changes no choice,
and where probabilities are recorded it is not even known. The level of a token is log v_t, in
natural units. Noise below a few steps of float32 is rounding and counts as no noise.

The size of a layer's noise is relative to the spread of its scores: the median standard deviation
of a token's kept scores, over what the first C of E independent normal scores would have, so that
traces with few and with many kept ranks are comparable.

`flip_test` gives every first flip a p-value. A token flips in a layer if its sets of chosen experts
differ: S_A ≠ S_B. Its margin on side A is the distance of the scores of A that must have changed
places,

    margin_A = max_{i in S_A \ S_B} z_i - min_{j in S_B \ S_A} z_j >= z_[k] - z_[k+1],

on side B likewise, and its margin M is the larger of the two. An expert j whose score A did not
keep lies below the last one kept, which bounds the margin from below. Where routing is limited to
groups, the gap of the layer (including that between groups) takes the place of the margin.

Noise differs from token to token, so a margin is measured by the noise of its own token: by the
deviation s of Δ over the other experts that both sides kept, those that changed places left out.
A few experts estimate it badly; s² is therefore pulled towards the layer's median v₀, as if that
had been seen ν₀ times (the moderated variance of Smyth, 2004):

    s² = (ν₀ v₀ + Σ_e (Δ_e - Δ̄)²) / (ν₀ + n - 1),    trigamma(ν₀/2) = Var log v - trigamma((n-1)/2)

but never below what the token's own experts say, for a few tokens may be far noisier than the rest.
Only where most tokens have no noise at all, and none has flipped before, is a noisy token itself
what is to be explained: s is then at most 64 times the rounding of the scores.

Under noise, R = M/s is at most |Δ_i - Δ_j|/s of the pair that changed places. The law of the latter
is taken from the layer itself: from pairs of experts on one side of the threshold of which neither
changed places, so that no flip selects them. Its tail beyond the last 2 % is a power law with
Hill's exponent. So heavy tails are part of the reference, not of the evidence. Flips select large
noise: a pair changes places if its noise exceeds its distance, and the number of pairs within a
distance grows with it at most as its square (few experts: linearly). So the reference is weighted
by R² before p is read from it.

A p-value is given to *first* flips only: a token that flipped in an earlier layer carries another
residual stream, and its later flips are consequences. Over all first flips of all layers the false
discovery rate is held below 1/200 (Benjamini and Hochberg, 1995), so that two hundred sound runs
give about one unexplained flip.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import special
from torch import Tensor

from tieline.core.numerics import float_step
from tieline.measure.logit_view import logit_view
from tieline.trace.record import LayerTrace

FLOOR = 4.0
"""Steps of float32 below which a difference of scores counts as rounding."""
QUIET = 0.95
"""Share of the tokens without noise from which on a layer is silent."""
FEWEST_COMMON = 3
"""Experts that both sides must have kept of a token before its noise is known."""


class LayerNoise(NamedTuple):
    """Differences of the scores of one layer.

    Attributes:
        difference: Δ for the experts that A kept, in its order; zero where B did not keep one.
        common: which of them both sides kept.
        experts: the experts that A kept.
        variance: v of each token; NaN where fewer than three experts are common.
        level: log(v + floor²).
        floor: what counts as rounding, in units of score.
        spread: standard deviation of the scores of a token over all experts, its median.
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
        """Tokens whose noise is known."""
        return ~np.isnan(self.variance)

    @property
    def is_silent(self) -> bool:
        """Whether nearly all tokens have no noise."""
        levels = self.level[self.measured]
        limit = 2 * math.log(2 * self.floor)
        return len(levels) > 0 and bool(np.quantile(levels, QUIET) <= limit)

    def size(self, tokens: Bool[np.ndarray, " tokens"]) -> float | None:
        """Median noise √v of these tokens, zero where it is rounding; None if none is known."""
        levels = self.level[tokens & self.measured]
        if len(levels) == 0:
            return None
        size = math.exp(np.median(levels) / 2)
        return 0.0 if size <= 2 * self.floor else size

    def relative(self, tokens: Bool[np.ndarray, " tokens"]) -> float | None:
        """The size over the spread of the scores; None where all scores are alike."""
        size = self.size(tokens)
        return None if size is None or self.spread <= self.floor else size / self.spread


def comparable(a: LayerTrace, b: LayerTrace) -> str:
    """Return "ok", or why the scores of a layer cannot be compared."""
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
    """Return the differences of the scores of a layer that both sides recorded with scores.

    Args:
        a: the layer in A.
        b: the same tokens in B, experts numbered as in A.
    """
    of_a, of_b = (scores.double() for scores in plain_scores(a, b))
    matched = torch.full_like(of_a, torch.nan)
    for rank in range(of_b.shape[1]):  # a few ranks: faster than a table of all pairs
        same = a.experts == b.experts[:, rank, None]
        matched = torch.where(same, of_b[:, rank, None], matched)
    difference = matched - of_a
    both = difference.isfinite()
    difference = difference.masked_fill_(~both, 0.0)
    count = both.sum(1)
    mean = difference.sum(1) / count.clamp(min=1)
    centred = torch.where(both, difference - mean[:, None], 0.0)
    variance = centred.square().sum(1) / (count - 1).clamp(min=1)
    variance[count < FEWEST_COMMON] = torch.nan
    floor = FLOOR * max(_rounding_step(a), _rounding_step(b))
    level = (variance + floor**2).log()
    return LayerNoise(
        difference.numpy(),
        both.numpy(),
        a.experts.numpy(),
        variance.numpy(),
        level.numpy(),
        floor,
        _score_spread(a, of_a),
    )


def plain_scores(a: LayerTrace, b: LayerTrace) -> tuple[Tensor, Tensor]:
    """Return the scores of both sides in the units where noise of the logits is simplest.

    Probabilities without a correction bias become logits again: noise of a probability grows with
    it. With a bias the selection scores stay what they are.
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
    off = torch.where(finite, scores - mean[:, None], 0.0)
    deviation = (off.square().sum(1) / (count - 1).clamp(min=1)).sqrt()
    if len(deviation) == 0:
        return 0.0
    able = facts.n_experts * facts.k_groups // facts.n_groups
    return deviation.median().item() / top_deviation(able, min(scores.shape[1], able))


SMALL_GAPS = 0.05
"""Share of the tokens whose gaps give the density at zero."""


def gap_density(layer: LayerTrace, spread: float) -> float | None:
    """Tokens per unit of gap over spread, at a gap of zero: T p / q_p with p = 5 %.

    Args:
        layer: a layer with gaps.
        spread: spread of its scores.
    """
    gaps = layer.gap.double()
    if len(gaps) < FEWEST_PAIRS or spread <= 0:
        return None
    quantile = float(gaps.quantile(SMALL_GAPS))
    return len(gaps) * SMALL_GAPS * spread / quantile if quantile > 0 else None


@lru_cache(maxsize=64)
def top_deviation(experts: int, ranks: int) -> float:
    """Standard deviation of the expected first ranks of `experts` independent N(0, 1) scores."""
    if ranks < 2:
        return 1.0
    rank = np.arange(1, ranks + 1)
    expected = special.ndtri((experts - rank + 0.625) / (experts + 0.25))  # Blom's scores
    return float(expected.std(ddof=1))


FALSE_DISCOVERIES = 0.005
"""Share of the flips called unexplained that may be honest ones."""
TAIL = 0.02
"""Share of the reference pairs whose law is a power law."""
FEWEST_PAIRS = 100
"""Pairs of unflipped tokens without which a layer has no reference."""
LEAST_SHARE = 2 / 3
"""Share of a token's other experts that both sides must have kept: those that noise moved out of
the kept ranks are missing, and the rest alone would seem too quiet."""
SILENT = 64.0
"""Most noise, over rounding, that a token is granted in a layer where most have none at all."""
EXPONENTS = (1.0, 6.0)
"""Limits of the exponent of the tail."""
CROSSING = 2.0
"""Noise of size R makes pairs change places ∝ R² times: as many stand within R of each other, and
each is crossed as often as R is large."""
PRIOR = (1.0, 64.0)
"""Limits of ν₀."""


class FlipTest(NamedTuple):
    """First flips of a layer with their p-values.

    Attributes:
        tokens: places of the first flips.
        margins: margin of each, in units of score.
        noise: deviation of the scores of its own token.
        p: probability that noise of that token crosses such a margin; 1 where it cannot be told.
        tested: how many of them have a p-value.
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
    moved[rows] = _moved_experts(a, b, rows)
    scale, count = _token_noise(noise, rows, moved[rows], prior)
    others = (~moved[rows]).sum(1)
    able, freedom = count >= np.maximum(2, LEAST_SHARE * others), count - 1
    if fresh.all() and noise.is_silent:
        scale, able = np.minimum(scale, SILENT * noise.floor), np.ones_like(able)
        freedom = np.full_like(freedom, EXPONENTS[1])
    reference = _reference_ratios(noise, fresh, moved, a.facts.k, prior)
    able &= len(reference) >= FEWEST_PAIRS
    ratio = margins / np.maximum(scale, noise.floor)
    chance = size_biased_tail(reference, ratio, freedom)
    p = np.where(able & (margins > noise.floor), chance, 1.0)
    return FlipTest(rows, margins, scale, p, int(able.sum()))


def discoveries(p: Float[np.ndarray, " tests"], rate: float) -> Bool[np.ndarray, " tests"]:
    """Return the tests that Benjamini and Hochberg's rule rejects at this false discovery rate."""
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
    """Margin of these tokens, all of which must have flipped, in float64."""
    if a.facts.n_groups > 1:
        return torch.maximum(a.gap[rows], b.gap[rows])
    of_a, of_b = (scores[rows].double() for scores in plain_scores(a, b))
    in_a, in_b = a.experts[rows], b.experts[rows]
    k = a.facts.k
    return torch.maximum(
        _margin_on_side(of_a, in_a, in_b[:, :k], k), _margin_on_side(of_b, in_b, in_a[:, :k], k)
    )


def _margin_on_side(scores: Tensor, experts: Tensor, other: Tensor, k: int) -> Tensor:
    """Distance, in the scores of one side, of the experts that changed places."""
    chosen = experts[:, :k]
    leaving = ~(chosen[:, :, None] == other[:, None, :]).any(2)
    entering = ~(other[:, :, None] == chosen[:, None, :]).any(2)
    highest = scores[:, :k].masked_fill(~leaving, -torch.inf).amax(1)
    kept = other[:, :, None] == experts[:, None, k:]
    entered = (kept * scores[:, None, k:].nan_to_num(neginf=0.0)).sum(2)
    entered = torch.where(kept.any(2), entered, scores[:, -1:])
    return highest - entered.masked_fill(~entering, torch.inf).amin(1)


def _moved_experts(a: LayerTrace, b: LayerTrace, rows: np.ndarray) -> np.ndarray:
    """Which of A's kept experts of these tokens are chosen by one side only."""
    k, in_a, chosen = a.facts.k, a.experts[rows], b.experts[rows][:, : b.facts.k]
    in_b = (in_a[:, :, None] == chosen[:, None, :]).any(2)
    first = torch.arange(in_a.shape[1]) < k
    return (first[None, :] != in_b).numpy()


def _variance_prior(noise: LayerNoise, tokens: np.ndarray) -> tuple[float, float]:
    """(ν₀, v₀) of a layer, from the spread of log v over these tokens."""
    variance = noise.variance[tokens] + noise.floor**2
    if len(variance) < FEWEST_PAIRS:
        return PRIOR[0], float(np.median(variance)) if len(variance) else noise.floor**2
    logs = np.log(variance)
    low, middle, high = np.quantile(logs, [0.25, 0.5, 0.75])
    freedom = max(float(np.median(noise.common[tokens].sum(1))) - 1, 1.0)
    excess = ((high - low) / 1.349) ** 2 - float(special.polygamma(1, freedom / 2))
    return _trigamma_inverse(excess), float(np.exp(middle))


def _trigamma_inverse(value: float) -> float:
    """ν with trigamma(ν/2) = value, within the limits of the prior."""
    grid = np.geomspace(*PRIOR, 64)
    curve = special.polygamma(1, grid / 2)  # falling
    return float(np.interp(-value, -curve, grid))


def _token_noise(
    noise: LayerNoise, rows: np.ndarray, left_out: np.ndarray, prior: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """S of each of these tokens without some of its experts, and how many are left."""
    kept = noise.common[rows] & ~left_out
    count = kept.sum(1)
    values = np.where(kept, noise.difference[rows], 0.0)
    mean = values.sum(1) / np.maximum(count, 1)
    squares = (np.where(kept, values - mean[:, None], 0.0) ** 2).sum(1)
    (weight, middle), freedom = prior, np.maximum(count - 1, 0)
    pulled = (weight * middle + squares) / (weight + freedom)
    return np.sqrt(np.maximum(pulled, squares / np.maximum(freedom, 1))), count


def _reference_ratios(
    noise: LayerNoise, fresh: np.ndarray, moved: np.ndarray, k: int, prior: tuple[float, float]
) -> np.ndarray:
    """|Δ_i - Δ_j| / s, ascending, of two ranks beside the threshold that did not change places."""
    ranks = noise.common.shape[1]
    pair = slice(k, k + 2) if k + 1 < ranks else slice(k - 2, k)
    if pair.start < 0:
        return np.zeros(0)
    able = noise.common[:, pair].all(1) & ~moved[:, pair].any(1)
    rows = np.flatnonzero(fresh & able & (noise.common.sum(1) > FEWEST_COMMON))
    left_out = moved[rows]
    left_out[:, pair] = True
    scale, _ = _token_noise(noise, rows, left_out, prior)
    first, second = noise.difference[rows, pair].T
    return np.sort(np.abs(first - second) / np.maximum(scale, noise.floor))


def size_biased_tail(reference: np.ndarray, ratio: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """P(R >= ratio) for the ratios R of pairs that change places: Σ_{R >= ratio} R² / Σ R².

    Counted, and beyond the last 2 % by Hill's power law R^-α, whose weighted tail falls as
    R^-(α - 2); where α <= 2, it does not fall. The exponent is at most the degrees of freedom of s:
    few experts may agree by chance.
    """
    count = len(reference)
    if count < FEWEST_PAIRS:
        return np.ones_like(ratio)
    top = max(int(TAIL * count), 10)
    start = max(reference[-top - 1], 1.0)  # what is within one deviation is no tail
    exceeded = np.log(np.maximum(reference[-top:], start) / start)
    exponent = np.clip(1 / max(exceeded.mean(), 1e-9), *EXPONENTS)
    exponent = np.minimum(exponent, np.maximum(freedom, EXPONENTS[0]))
    weight = np.append(np.cumsum(reference[::-1] ** 2)[::-1], 0.0)
    counted = weight[np.searchsorted(reference, ratio)] / max(weight[0], np.finfo(float).tiny)
    share = max(weight[-top - 1], top * start**2) / max(weight[0], top * start**2)
    fall = np.maximum(exponent - CROSSING, 0.0)
    beyond = share * (np.maximum(ratio, start) / start) ** -fall
    return np.where(ratio > start, np.maximum(beyond, counted), np.maximum(counted, share))
