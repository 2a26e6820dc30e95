r"""Tokens that swap a single expert: where scores cross, how many do, and exchanged scores.

A token swaps if one expert i leaves its set and one expert j enters: margin_A = z_A(i) - z_A(j) > 0
and margin_B = z_B(j) - z_B(i) > 0. U = margin_A / D, D = margin_A + margin_B, is uniform and
independent of D if the signed margin s in A has a constant density over |s| <= |n|, given the noise
n = D of that pair: s is then uniform in (0, n). Neither independence between experts nor light
tails are needed. Only D below the 20 % quantile of the gap is used, where densities are constant.
Scores on a grid have ties, margin_B = 0, and no test. U tests whether choices follow scores; a
fault that acts as noise has a uniform U too (`swap_uniformity`). The expected number of swaps is
T f(0) E[(-n)₊] to first order, f the density of the gap and n the noise of z_[k] - z_[k+1] in
tokens of small gap (`expected_swaps`). If it exceeds a tenth of the tokens, other pairs change
places as well, and it is not used.

Where a sort, a gather or a table of ids goes wrong for some tokens, experts stand beside scores of
other experts. Both runs then seem to choose by their scores, and the differences look like rare
spikes. But spikes hit one score; here i and j have each other's,

    |Δ_i - Δ̄ + m| <= 3 s   and   |Δ_j - Δ̄ - m| <= 3 s,   m = margin_A > 8 s,

with Δ̄ and s median and deviation of Δ over the other common experts of the token, s at least the
size of the layer's noise (`exchanged_swaps`). A router that ranks probabilities of 16 bits takes
scores for equal that differ by the rounding, and its choice then stands at the scores in their
order: m must exceed that too.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from tieline.analysis.score_noise import FEWEST_COMMON, LayerNoise, comparable_scores
from tieline.models.band_width import NORMAL_MEDIAN
from tieline.trace.record import LayerTrace

SWAP_GAP_QUANTILE = 0.2
"""Quantile of the gap below which the density of margins is assumed constant."""
FEWEST_SWAPS = 30
MOST_TIES = 0.01
"""Largest share of zero margins for scores that are not on a grid."""
MOST_SWAPS = 0.1
"""Largest expected share of swapped tokens for which the first order holds."""

WIDE, CLOSE = 8.0, 3.0
"""Deviations of a token's noise: least margin of exchanged experts, and largest distance of each
from the score of the other."""
TAKEN_FOR_EQUAL = 2.0**-6
"""Relative distance of probabilities that a router of 16 bits may take for equal: two steps of
bf16, as a score and its selection bias are rounded each."""


class SwapMargins(NamedTuple):
    """Single swaps of a layer whose four scores are known.

    Attributes:
        tokens: indices of the tokens.
        leaver: the expert that leaves.
        enterer: the expert that enters.
        margin_a: margin_A.
        margin_b: margin_B.
    """

    tokens: Int[np.ndarray, " swaps"]
    leaver: Int[np.ndarray, " swaps"]
    enterer: Int[np.ndarray, " swaps"]
    margin_a: Float[np.ndarray, " swaps"]
    margin_b: Float[np.ndarray, " swaps"]


class ExpectedSwaps(NamedTuple):
    """Expected and counted single swaps of a layer.

    Attributes:
        expected: T f(0) E[(-n)₊].
        error: standard error of counted - expected, clustered by document.
        counted: number of tokens that swapped one expert.
    """

    expected: float
    error: float
    counted: int


def swap_margins(a: LayerTrace, b: LayerTrace) -> SwapMargins:
    """Margins of all single swaps, for experts of any rank.

    Args:
        a: the layer in A, with scores.
        b: the same tokens in B.
    """
    k = a.facts.k
    chosen_a, chosen_b = a.experts[:, :k], b.experts[:, :k]
    same = chosen_a[:, :, None] == chosen_b[:, None, :]
    leaves, enters = ~same.any(2), ~same.any(1)
    tokens = (leaves.sum(1) == 1).nonzero().flatten()
    leaver = chosen_a[tokens][leaves[tokens]]
    enterer = chosen_b[tokens][enters[tokens]]
    margins = []
    for layer, scores, sign in zip((a, b), comparable_scores(a, b), (1.0, -1.0), strict=True):
        pair_scores = [
            _score_of(layer.experts[tokens], scores[tokens], x) for x in (leaver, enterer)
        ]
        margins.append(sign * (pair_scores[0] - pair_scores[1]).numpy())
    finite = np.isfinite(margins[0]) & np.isfinite(margins[1])
    columns = (*(x.numpy() for x in (tokens, leaver, enterer)), *margins)
    return SwapMargins(*(column[finite] for column in columns))


def _score_of(experts: Tensor, scores: Tensor, expert: Tensor) -> Tensor:
    """Score of one expert of each token in float64; NaN if it was not recorded."""
    is_expert = experts == expert[:, None]
    score = torch.where(is_expert, scores.double(), 0.0).sum(1)
    return torch.where(is_expert.any(1), score, torch.nan)


@dataclass(frozen=True)
class ExchangedSwaps:
    """Single swaps of a layer in which two experts have each other's scores.

    Attributes:
        count: number of these swaps.
        swaps: number of single swaps of which enough other scores are known.
    """

    count: int
    swaps: int


def exchanged_swaps(
    a: LayerTrace,
    b: LayerTrace,
    noise: LayerNoise,
    fresh: Bool[np.ndarray, " tokens"],
    swaps: SwapMargins | None = None,
) -> ExchangedSwaps:
    """Number of single swaps in which the leaver and the enterer have each other's scores.

    Args:
        a: the layer in A, with scores.
        b: the same tokens in B.
        noise: differences of the scores.
        fresh: tokens without an earlier flip, the only ones that count.
        swaps: the single swaps if they were measured before.
    """
    swaps = swap_margins(a, b) if swaps is None else swaps
    swaps = SwapMargins(*(column[fresh[swaps.tokens]] for column in swaps))
    is_leaver, is_enterer = (
        noise.experts[swaps.tokens] == expert[:, None] for expert in (swaps.leaver, swaps.enterer)
    )
    difference, common = noise.difference[swaps.tokens], noise.common[swaps.tokens]
    others = common & ~is_leaver & ~is_enterer
    judged = others.sum(1) >= FEWEST_COMMON
    judged &= (common & is_leaver).any(1) & (common & is_enterer).any(1)
    if not judged.any():
        return ExchangedSwaps(0, 0)
    margin, difference = swaps.margin_a[judged], difference[judged]
    rest = np.where(others[judged], difference, np.nan)
    centre = np.nanmedian(rest, axis=1)
    deviation = np.nanmedian(np.abs(rest - centre[:, None]), axis=1) / NORMAL_MEDIAN
    deviation = np.maximum(deviation, max(noise.size(fresh) or 0.0, noise.floor))
    leaver, enterer = (difference[x[judged]] - centre for x in (is_leaver, is_enterer))
    error = np.maximum(np.abs(leaver + margin), np.abs(enterer - margin))
    least = np.maximum(WIDE * deviation, _taken_for_equal(a, b)[swaps.tokens[judged]])
    exchanged = (margin > least) & (error <= CLOSE * deviation)
    return ExchangedSwaps(int(exchanged.sum()), len(margin))


def _taken_for_equal(a: LayerTrace, b: LayerTrace) -> Float[np.ndarray, " tokens"]:
    """Largest distance of comparable scores of each token that a router may take for equal.

    A relative distance of probabilities is an absolute one of logits.
    """
    threshold = comparable_scores(a, b)[0][:, a.facts.k - 1].double().abs().numpy()
    are_logits = a.facts.units == "logits" or (a.bias is None and b.bias is None)
    return TAKEN_FOR_EQUAL * (np.ones_like(threshold) if are_logits else threshold)


def swap_uniformity(a: LayerTrace, b: LayerTrace, swaps: SwapMargins | None = None) -> float | None:
    """Kolmogorov-Smirnov p-value of U; None on a grid or with too few swaps.

    Args:
        a: the layer in A, with scores.
        b: the same tokens in B.
        swaps: their single swaps if they were measured before.
    """
    swaps = swap_margins(a, b) if swaps is None else swaps
    distance = swaps.margin_a + swaps.margin_b
    small = (distance > 0) & (distance <= float(a.gap.double().quantile(SWAP_GAP_QUANTILE)))
    margin_a, margin_b = swaps.margin_a[small], swaps.margin_b[small]
    if len(margin_a) < FEWEST_SWAPS or (np.minimum(margin_a, margin_b) == 0).mean() > MOST_TIES:
        return None
    return float(stats.kstest(margin_a / (margin_a + margin_b), "uniform").pvalue)


def expected_swaps(
    a: LayerTrace,
    b: LayerTrace,
    documents: Int[np.ndarray, " tokens"],
    swaps: SwapMargins | None = None,
) -> ExpectedSwaps | None:
    """Number of single swaps expected from the noise of small gaps; None beyond the first order.

    Args:
        a: the layer in A, with scores and at least one rank past k.
        b: the same tokens in B.
        documents: document of each token.
        swaps: the single swaps if they were measured before.
    """
    k, scores = a.facts.k, comparable_scores(a, b)
    if a.experts.shape[1] <= k:
        return None
    gap = (scores[0][:, k - 1] - scores[0][:, k]).double().numpy()
    limit = float(np.quantile(gap, SWAP_GAP_QUANTILE))
    pair_scores = [
        _score_of(b.experts, scores[1], a.experts[:, rank]).numpy() for rank in (k - 1, k)
    ]
    noise = pair_scores[0] - pair_scores[1] - gap
    small = (gap <= limit) & np.isfinite(noise)
    if limit <= 0 or small.sum() < FEWEST_SWAPS:
        return None
    density = SWAP_GAP_QUANTILE / limit
    expected = len(gap) * density * float(np.maximum(-noise[small], 0.0).mean())
    if expected > MOST_SWAPS * len(gap):
        return None
    swapped = np.zeros(len(gap))
    swapped[(swap_margins(a, b) if swaps is None else swaps).tokens] = 1.0
    share = np.where(small, np.maximum(-noise, 0.0) * density, 0.0) * len(gap) / small.sum()
    codes = np.unique(documents, return_inverse=True)[1]
    sums = np.bincount(codes, weights=swapped - np.nan_to_num(share))
    count = len(sums)
    spread = math.sqrt(((sums - sums.mean()) ** 2).sum() * count / max(count - 1, 1))
    return ExpectedSwaps(expected, max(spread, math.sqrt(expected)), int(swapped.sum()))
