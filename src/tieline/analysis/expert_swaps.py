"""Swaps of two experts: those that two runs show, and the choice past the nearest wall.

**Between two runs.** A token swaps if one expert i leaves its set and one expert j enters:
margin_A = z_A(i) - z_A(j) > 0 and margin_B = z_B(j) - z_B(i) > 0. U = margin_A / D,
D = margin_A + margin_B, is uniform and independent of D where the signed margin in A has a constant
density over |s| <= |n|, given the noise n = D of that pair: s is then uniform in (0, n). Neither
independence between experts nor light tails are needed. Only D below the 20 % quantile of the gap
is looked at, where densities are constant. Scores on a grid have ties, margin_B = 0, and no test.
U says whether choices follow scores; a fault that acts as noise has a uniform U too. The expected
number of swaps is T f(0) E[(-n)₊] to first order, f the density of the gap and n the noise of
z_[k] - z_[k+1] in tokens of small gap. Where it exceeds a tenth of the tokens, other pairs change
places as well, and it is not used.

**At a wall.** Raise the score of rank k + 1 to z_[k], and the router may as well choose its expert
j instead of the expert i of rank k. Expert j enters with the weight that the family gives to the
selection score z_[k]. Without a correction bias both scores are then equal and j takes over the
weight of i. With a bias b the scores that make the weights differ by it at the tie,

    w_j / w_i = s(z_[k] - b_j) / s(z_[k] - b_i),

s the function that turns what is ranked into a weight, and the weights of the chosen keep their sum
where the family renormalises them. Factors that belong to an expert go with it. At ties between
groups of experts the jump is not measured (Def. 10.1). A smoothed router uses both experts near a
tie; there the two exchange their shares, which at the tie itself are equal.

swap_margins       margin_A and margin_B of the swaps of a layer
swap_uniformity    Kolmogorov-Smirnov p-value of U
expected_swaps     expected and seen number, with its standard error clustered by document
recorded_choice    experts and weights of some tokens
swapped_choice     the same with the expert of rank k + 1 in place of that of rank k
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import stats
from torch import Tensor, nn

from tieline.analysis.score_noise import plain_scores
from tieline.core.errors import UnsupportedModelError
from tieline.models.families import RouterFamily, family_of
from tieline.models.parallel import full_tensor
from tieline.models.router_output import Choice
from tieline.models.router_rule import combine_rule, family_scale, renormalises_weights
from tieline.trace.record import LayerTrace, take_tokens

PerToken = Float[Tensor, " tokens"]

SMALL_GAP = 0.2
"""Quantile of the gap below which the density of margins is taken as constant."""
FEWEST_SWAPS = 30
MOST_TIES = 0.01
"""Share of margins that are zero from which on scores lie on a grid."""
MOST_SWAPS = 0.1
"""Share of the tokens beyond which the first order does not hold."""
TINY = 1e-30
"""Least weight that is divided by."""


class SwapMargins(NamedTuple):
    """Single swaps of a layer whose four scores are known.

    Attributes:
        tokens: which tokens.
        of_a: margin_A.
        of_b: margin_B.
    """

    tokens: Int[np.ndarray, " swaps"]
    of_a: Float[np.ndarray, " swaps"]
    of_b: Float[np.ndarray, " swaps"]


class ExpectedSwaps(NamedTuple):
    """Single swaps, expected from the noise and seen.

    Attributes:
        expected: T f(0) E[(-n)₊].
        error: standard error of counted - expected, clustered by document.
        counted: tokens that swapped one expert.
    """

    expected: float
    error: float
    counted: int


def swap_margins(a: LayerTrace, b: LayerTrace) -> SwapMargins:
    """Return the margins of all single swaps, whatever the ranks of their experts.

    Args:
        a: the layer in A, with scores.
        b: the same tokens in B.
    """
    k = a.facts.k
    chosen_a, chosen_b = a.experts[:, :k], b.experts[:, :k]
    leaves = ~(chosen_a[:, :, None] == chosen_b[:, None, :]).any(2)
    enters = ~(chosen_b[:, :, None] == chosen_a[:, None, :]).any(2)
    tokens = (leaves.sum(1) == 1).nonzero().flatten()
    leaver = chosen_a[tokens][leaves[tokens]]
    enterer = chosen_b[tokens][enters[tokens]]
    margins = []
    for layer, scores, sign in zip((a, b), plain_scores(a, b), (1.0, -1.0), strict=True):
        of = [_score_of(layer.experts[tokens], scores[tokens], x) for x in (leaver, enterer)]
        margins.append(sign * (of[0] - of[1]).numpy())
    finite = np.isfinite(margins[0]) & np.isfinite(margins[1])
    return SwapMargins(tokens.numpy()[finite], margins[0][finite], margins[1][finite])


def _score_of(experts: Tensor, scores: Tensor, wanted: Tensor) -> Tensor:
    """Score of one expert of each token in float64; NaN where it was not kept."""
    same = experts == wanted[:, None]
    score = torch.where(same, scores.double(), 0.0).sum(1)
    return torch.where(same.any(1), score, torch.nan)


def swap_uniformity(a: LayerTrace, b: LayerTrace) -> float | None:
    """Return the Kolmogorov-Smirnov p-value of U; None on a grid or with too few swaps.

    Args:
        a: the layer in A, with scores.
        b: the same tokens in B.
    """
    swaps = swap_margins(a, b)
    distance = swaps.of_a + swaps.of_b
    small = (distance > 0) & (distance <= float(a.gap.double().quantile(SMALL_GAP)))
    of_a, of_b = swaps.of_a[small], swaps.of_b[small]
    if len(of_a) < FEWEST_SWAPS or (np.minimum(of_a, of_b) == 0).mean() > MOST_TIES:
        return None
    return float(stats.kstest(of_a / (of_a + of_b), "uniform").pvalue)


def expected_swaps(
    a: LayerTrace, b: LayerTrace, documents: Int[np.ndarray, " tokens"]
) -> ExpectedSwaps | None:
    """Return how many single swaps the noise of small gaps makes; None beyond the first order.

    Args:
        a: the layer in A, with scores and at least one rank past k.
        b: the same tokens in B.
        documents: document of each token.
    """
    k, scores = a.facts.k, plain_scores(a, b)
    if a.experts.shape[1] <= k:
        return None
    gap = (scores[0][:, k - 1] - scores[0][:, k]).double().numpy()
    limit = float(np.quantile(gap, SMALL_GAP))
    of_b = [_score_of(b.experts, scores[1], a.experts[:, rank]).numpy() for rank in (k - 1, k)]
    noise = of_b[0] - of_b[1] - gap
    small = (gap <= limit) & np.isfinite(noise)
    if limit <= 0 or small.sum() < FEWEST_SWAPS:
        return None
    density = SMALL_GAP / limit
    expected = len(gap) * density * float(np.maximum(-noise[small], 0.0).mean())
    if expected > MOST_SWAPS * len(gap):
        return None
    swapped = np.zeros(len(gap))
    swapped[swap_margins(a, b).tokens] = 1.0
    share = np.where(small, np.maximum(-noise, 0.0) * density, 0.0) * len(gap) / small.sum()
    codes = np.unique(documents, return_inverse=True)[1]
    sums = np.bincount(codes, weights=swapped - np.nan_to_num(share))
    count = len(sums)
    spread = math.sqrt(((sums - sums.mean()) ** 2).sum() * count / max(count - 1, 1))
    return ExpectedSwaps(expected, max(spread, math.sqrt(expected)), int(swapped.sum()))


def recorded_choice(layer: LayerTrace, tokens: Int[Tensor, " chosen"]) -> Choice:
    """What the router chose for these tokens."""
    weights, experts = layer.combined()
    return Choice(weights[tokens], experts[tokens].long())


def swapped_choice(layer: LayerTrace, tokens: Int[Tensor, " chosen"], router: nn.Module) -> Choice:
    """The same with the expert of rank k + 1 in the place of that of rank k.

    Args:
        layer: a trace with at least k + 1 ranks.
        tokens: places of the tokens in it.
        router: the layer's router, for the facts of its family.
    """
    family, k = family_of(router), layer.facts.k
    if family is None:
        raise UnsupportedModelError(f"{type(router).__name__} is no router of a known family")
    weights, ids = recorded_choice(layer, tokens)
    ids, weights, before = ids.clone(), weights.clone(), weights.sum(dim=1, keepdim=True)
    some = take_tokens(layer, tokens)
    ids[:, k - 1] = some.experts[:, k].long()
    entering = _entering_weight(some, family, router)
    if layer.smoothed:  # the expert that leaves takes the place and the share of the other
        ids[:, k] = some.experts[:, k - 1].long()
        weights[:, k] *= weights[:, k - 1] / entering.clamp(min=TINY)
    weights[:, k - 1] = entering
    if layer.bias is not None and renormalises_weights(family, router):
        weights *= before / weights.sum(dim=1, keepdim=True).clamp(min=TINY)
    return Choice(weights, ids)


def _entering_weight(some: LayerTrace, family: RouterFamily, router: nn.Module) -> PerToken:
    """Weight that the entering expert gets in place of the leaving one, before normalisation."""
    k = some.facts.k
    assert some.weights is not None
    leaving, entering = some.experts[:, k - 1].long(), some.experts[:, k].long()
    if family.skip_class:  # to skip has no weight of its own to hand over
        return _raw_weight(some, family, router, entering)
    ratio = torch.ones(len(leaving))
    if some.bias is not None:
        raw = [_raw_weight(some, family, router, experts) for experts in (entering, leaving)]
        ratio = raw[0] / raw[1].clamp(min=TINY)
    scale = family_scale(family, router)
    if isinstance(scale, Tensor) and scale.numel() > 1:
        factor = full_tensor(scale.detach()).float().cpu()
        ratio = ratio * factor[entering] / factor[leaving]
    return some.weights[:, k - 1] * ratio


def _raw_weight(
    some: LayerTrace, family: RouterFamily, router: nn.Module, experts: Int[Tensor, " tokens"]
) -> PerToken:
    """s(z_[k] - b_e): the weight of an expert whose selection score is at the threshold."""
    assert some.scores is not None
    bias = 0.0 if some.bias is None else some.bias[experts]
    score = some.scores[:, some.facts.k - 1] - bias
    if some.facts.units == "logits" and combine_rule(family, router) == "sigmoid":
        return score.sigmoid()
    return score.clamp(min=0)
