r"""Flips judged by combine weights, where a log holds expert ids and weights but no scores.

A softmax router without a selection bias ranks by its logits z, and log w_e = z_e + const of the
token: among the chosen experts, differences of log-weights are those of scores. What stands outside
of the choice is not known. Let i be the expert of the largest weight that leaves (S_A \ S_B), j the
one of the largest weight that enters, and

    d_A = log w_A(i) - min_{S_A} log w_A     distance of the leaver from the last place of A
    d_B = log w_B(j) - min_{S_B} log w_B     distance of the enterer from the last place of B
    s   = log w_B(j) - log w_A(i)            less the mean difference over the common experts

If both sides choose the largest scores, and those of B are those of A plus noise Δ, then
d_A + d_B <= Δ_j - Δ_i and Δ_i <= s <= Δ_j. So M = max(d_A + d_B, |s|) is no larger than noise of
the pair. Its law is taken from |Δ_i - Δ_j| of the last two ranks of tokens that do not flip,
size-biased and with a modelled tail (`score_noise.size_biased_tail`). The few chosen experts of a
token do not tell its own noise, so that all tokens share one law. An expert that enters from far
below shows in s, one that leaves from far above in d_A.

A selection bias or another function than softmax makes weights no measure of the choice: leavers
then stand anywhere among the chosen. So weights clear flips, if leavers and enterers stand in the
last place more often than chance (1 in k) explains; they accuse none.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from tieline.analysis.score_noise import (
    EXPONENTS,
    FEWEST_PAIRS,
    FlipTest,
    LayerNoise,
    layer_noise,
    size_biased_tail,
)
from tieline.trace.record import LayerTrace

FEWEST_CHOSEN = 3
"""Least k for which the noise of a token is known."""
MOST_NOISE = 0.1
"""Noise over the spread of the scores beyond which any expert may leave the choice."""
CHANCE = 0.005
"""Chance with which leavers of any rank stand in the last place as often as they do."""


class WeightEvidence(NamedTuple):
    """First flips of a layer beside the noise of its log-weights.

    Attributes:
        noise: differences of the log-weights of the chosen experts.
        test: p-values of the first flips.
        last: leavers of A and enterers of B that stand in the last place.
        movers: leavers and enterers of first flips, one of each per token.
        is_near: whether they stand in the last place more often than chance explains.
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
    """Judge first flips by combine weights; None where they say nothing of the choice.

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
    reference = _pair_differences(noise, fresh & ~flipped)
    if (len(rows) and len(reference) < FEWEST_PAIRS) or (noise.relative(fresh) or 0.0) > MOST_NOISE:
        return None
    scale = max(noise.size(fresh) or 0.0, noise.floor)
    steepest = np.full(len(rows), EXPONENTS[1])
    p = size_biased_tail(reference / scale, distances.margins / scale, steepest)
    test = FlipTest(rows, distances.margins, np.full(len(rows), scale), p, len(rows))
    k, last = a.facts.k, int((distances.of_a == 0).sum() + (distances.of_b == 0).sum())
    is_chance = len(rows) > 0 and stats.binom.sf(last - 1, 2 * len(rows), 1 / k) > CHANCE
    return WeightEvidence(noise, test, last, 2 * len(rows), not is_chance)


def _pair_differences(
    noise: LayerNoise, tokens: Bool[np.ndarray, " tokens"]
) -> Float[np.ndarray, " pairs"]:
    """|Δ_i - Δ_j| of the last two ranks of some tokens, ascending."""
    last_two = noise.difference[tokens][:, -2:]
    return np.sort(np.abs(last_two[:, 0] - last_two[:, 1]))


def weights_rank_choices(layer: LayerTrace) -> bool:
    """Whether the weights of a layer may be those of a softmax that also ranks the experts."""
    facts, weights = layer.facts, layer.weights
    if weights is None or layer.bias is not None or facts.k < FEWEST_CHOSEN or len(weights) == 0:
        return False
    ranked = facts.units in ("logits", "softmax") and facts.n_groups == 1 and not layer.smoothed
    return ranked and bool((weights > 0).all())


def _ranked_by_weight(layer: LayerTrace) -> LayerTrace:
    """The chosen experts of a layer in the order of their weights, log-weights as scores."""
    assert layer.weights is not None
    weights, order = layer.weights.sort(dim=1, descending=True, stable=True)
    experts = layer.experts[:, : layer.facts.k].gather(1, order)
    units = replace(layer.facts, units="logits")
    return LayerTrace(layer.name, units, experts, weights.double().log().float())


class MoverDistances(NamedTuple):
    """Distances of leaver and enterer of each flip, in units of log-weight.

    Attributes:
        of_a: d_A, zero where the leaver has the last place.
        of_b: d_B, likewise of the enterer.
        between: s.
    """

    of_a: Float[np.ndarray, " flips"]
    of_b: Float[np.ndarray, " flips"]
    between: Float[np.ndarray, " flips"]

    @property
    def margins(self) -> Float[np.ndarray, " flips"]:
        """M of each flip."""
        return np.maximum(self.of_a + self.of_b, np.abs(self.between))


def mover_distances(a: LayerTrace, b: LayerTrace, rows: Int[Tensor, " flips"]) -> MoverDistances:
    """Return how far leaver and enterer stand from the last place, and from each other.

    Args:
        a: the layer in A, ranked by weight.
        b: the same in B.
        rows: tokens whose sets differ.
    """
    same = a.experts[rows][:, :, None] == b.experts[rows][:, None, :]
    of_a, of_b = (_chosen_scores(layer)[rows] for layer in (a, b))
    stays_a, stays_b = same.any(2), same.any(1)
    leaver, enterer = (
        scores.masked_fill(stays, -torch.inf).amax(1)
        for scores, stays in ((of_a, stays_a), (of_b, stays_b))
    )
    count = stays_a.sum(1).clamp(min=1)
    common = ((of_b * stays_b).sum(1) - (of_a * stays_a).sum(1)) / count
    between = torch.where(stays_a.any(1), enterer - leaver - common, 0.0)
    distances = (leaver - of_a[:, -1], enterer - of_b[:, -1], between)
    return MoverDistances(*(x.numpy() for x in distances))


def _chosen_scores(layer: LayerTrace) -> Float[Tensor, "tokens k"]:
    """Log-weights in float64."""
    assert layer.scores is not None
    return layer.scores.double()
