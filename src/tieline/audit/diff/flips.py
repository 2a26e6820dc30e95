r"""Where two runs choose other experts in one layer, how much weight that moves, and why.

A token flips if its sets of chosen experts differ: S_A ≠ S_B. Its margin on side A is how far the
scores of A stand apart that must have changed places,

    margin_A = max_{i in S_A \ S_B} z_i - min_{j in S_B \ S_A} z_j >= z_[k] - z_[k+1],

on side B likewise, and its margin is the larger of the two. An expert j whose score A did not keep
stands below the last one kept, which bounds the margin from below. Where routing is limited to
groups, the gap of the layer (that between groups included) takes the place of the margin.

The noise of a layer is the median of |z_B - z_A| over the experts that both kept, of unflipped
tokens alone, so that no flip widens the band that judges it. A flip is inside the tie band if its
margin is at most 6 times the noise: about 4 standard deviations of Gaussian noise, beyond which it
puts 0.4 % of its flips. Anything further is not explained by the margin.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tieline.audit.diff.records import WeightMoved
from tieline.numerics import float_step
from tieline.trace.ops import take_tokens
from tieline.trace.record import LayerTrace

__all__ = ["BAND", "NoiseBand", "flip_margins", "noise_band", "set_flips", "weight_moved"]

BAND = 6.0
ROWS = 16384
"""Tokens at a time whose scores are spread over all experts."""


class NoiseBand(NamedTuple):
    """Median absolute difference of the scores of unflipped tokens, and the tie band."""

    noise: float
    band: float


def set_flips(a: LayerTrace, b: LayerTrace) -> tuple[Bool[Tensor, " tokens"], float | None]:
    """Tokens whose sets differ, and the mean number of experts that do, over these tokens."""
    k = a.facts.k
    kept = (a.experts[:, :k, None] == b.experts[:, None, :k]).any(2).sum(1)
    flipped = kept < k
    return flipped, (k - kept[flipped]).double().mean().item() if bool(flipped.any()) else None


def weight_moved(
    a: LayerTrace, b: LayerTrace, flipped: Bool[Tensor, " tokens"]
) -> WeightMoved | None:
    """½ Σ_e |w_A(e) - w_B(e)| per token, weights of each token summing to one; None without them.

    Zero if both combine the same experts alike, one if they have no expert in common.
    """
    if a.weights is None or b.weights is None or len(flipped) == 0:
        return None
    k, (of_a, of_b) = a.facts.k, (_normalised(x) for x in (a.weights, b.weights))
    same = a.experts[:, :k, None] == b.experts[:, None, :k]
    shared = (same * of_b[:, None, :]).sum(2)
    entering = (of_b * ~same.any(1)).sum(1)
    moved = ((of_a - shared).abs().sum(1) + entering) / 2
    of_flipped = moved[flipped].mean().item() if bool(flipped.any()) else None
    p99 = float(np.quantile(moved.numpy(), 0.99, method="inverted_cdf"))
    return WeightMoved(moved.mean().item(), p99, moved.max().item(), of_flipped)


def noise_band(a: LayerTrace, b: LayerTrace, flipped: Bool[Tensor, " tokens"]) -> NoiseBand | None:
    """The noise of the scores and six times it; None if no unflipped token tells.

    Scores are floating-point numbers: a band narrower than six of their steps would find fault with
    their last digit, so it is not narrower.
    """
    differences = []
    for rows in (~flipped).nonzero().squeeze(1).split(ROWS):
        differences.append(_differences(take_tokens(a, rows), take_tokens(b, rows)))
    known = np.concatenate([np.zeros(0), *differences])
    if len(known) == 0:
        return None
    noise = float(np.median(known))
    return NoiseBand(noise, BAND * max(noise, _step(a), _step(b)))


def flip_margins(a: LayerTrace, b: LayerTrace) -> Float[Tensor, " tokens"]:
    """Margin of every token, all of which must have flipped, in float64."""
    if a.facts.n_groups > 1:
        return torch.maximum(a.gap, b.gap)
    return torch.maximum(_margin(a, b), _margin(b, a))


def _margin(here: LayerTrace, there: LayerTrace) -> Tensor:
    """How far apart, in the scores of one side, stand the experts that changed places."""
    k, scores = here.facts.k, _scores(here)
    own, other = here.experts[:, :k], there.experts[:, :k]
    leaving = ~(own[:, :, None] == other[:, None, :]).any(2)
    entering = ~(other[:, :, None] == own[:, None, :]).any(2)
    highest = scores[:, :k].masked_fill(~leaving, -torch.inf).amax(1)
    kept = other[:, :, None] == here.experts[:, None, k:]
    found = (kept * scores[:, None, k:].nan_to_num(neginf=0.0)).sum(2)
    found = torch.where(kept.any(2), found, scores[:, -1:])
    return highest - found.masked_fill(~entering, torch.inf).amin(1)


def _differences(a: LayerTrace, b: LayerTrace) -> np.ndarray:
    """|z_B - z_A| of every expert that both sides kept."""
    spread = torch.full((len(b.experts), b.facts.n_experts), torch.nan, dtype=torch.float64)
    spread.scatter_(1, b.experts, _scores(b))
    difference = (spread.gather(1, a.experts) - _scores(a)).abs()
    return difference[difference.isfinite()].numpy()


def _step(layer: LayerTrace) -> float:
    """Spacing of float32 (or of the scores' own coarser type) at the median threshold."""
    scores, k = _scores(layer), layer.facts.k
    assert layer.scores is not None
    middle = scores[:, k - 1].abs().median().reshape(1)
    eps = max(torch.finfo(layer.scores.dtype).eps, torch.finfo(torch.float32).eps)
    return float_step(middle, round(-np.log2(eps)), -126).item()


def _scores(layer: LayerTrace) -> Tensor:
    assert layer.scores is not None
    return layer.scores.double()


def _normalised(weights: Tensor) -> Tensor:
    """Weights that sum to one; equal ones where all have underflowed."""
    total = weights.double().sum(1, keepdim=True)
    return torch.where(total == 0, 1.0 / weights.shape[1], weights.double() / total)
