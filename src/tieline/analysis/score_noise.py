"""How far the scores of two runs are apart, token by token and layer by layer.

For the experts e that both sides kept of a token t,

    Δ_te = z_B(t, e) - z_A(t, e),      v_t = Σ_e (Δ_te - Δ̄_t)² / (n_t - 1),

with Δ̄_t the mean over the n_t experts: what all scores of a token have in common changes no choice,
and where probabilities are recorded it is not even known. The level of a token is log v_t, in
natural units. Noise below a few steps of float32 is rounding and counts as no noise.

The size of a layer's noise is relative to the spread of its scores: the median standard deviation
of a token's kept scores, over what the first C of E independent normal scores would have, so that
traces with few and with many kept ranks are comparable.

layer_noise        Δ, v and levels of one layer
comparable         why the scores of two layers cannot be compared, or "ok"
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
from tieline.measure.flips import logit_view
from tieline.trace.record import LayerTrace

FLOOR = 4.0
"""Steps of float32 below which a difference of scores counts as rounding."""
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
    floor = FLOOR * max(_step(a), _step(b))
    level = (variance + floor**2).log()
    return LayerNoise(
        difference.numpy(),
        both.numpy(),
        a.experts.numpy(),
        variance.numpy(),
        level.numpy(),
        floor,
        _spread(a, of_a),
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


def _step(layer: LayerTrace) -> float:
    """Spacing of float32 (or of the scores' own coarser type) at the median threshold."""
    assert layer.scores is not None
    middle = layer.scores[:, layer.facts.k - 1].double().abs().median().reshape(1)
    eps = max(torch.finfo(layer.scores.dtype).eps, torch.finfo(torch.float32).eps)
    return float_step(middle, round(-math.log2(eps)), -126).item()


def _spread(layer: LayerTrace, scores: Tensor) -> float:
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


@lru_cache(maxsize=64)
def top_deviation(experts: int, ranks: int) -> float:
    """Standard deviation of the expected first ranks of `experts` independent N(0, 1) scores."""
    if ranks < 2:
        return 1.0
    rank = np.arange(1, ranks + 1)
    expected = special.ndtri((experts - rank + 0.625) / (experts + 0.25))  # Blom's scores
    return float(expected.std(ddof=1))
