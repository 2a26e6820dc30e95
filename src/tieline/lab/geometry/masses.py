"""Mass of tokens near a tie, from the scores of all experts.

    top_gap             Δ = z_[k] - z_[k+1]                             Def. 1.2
    pair_gap            Δ_min = min_{i != j} |z_i - z_j|                Def. 1.3
    linf_distance       inf over y ∈ Γ^(n) of max_i |z_i(x) - z_i(y)|   Paper 1, Def. 4.6
    boundary_mass_top   BM_top(w) of scores, with standard error        Def. 2.1
    boundary_mass_pair  BM_pair(w) = P(Δ_min <= w)                      Def. 2.2
    ambiguity_mass      BM(τ; ε) = P(max softmax(z / τ) <= 1 - ε)       Def. 2.3

BM_pair bounds BM_top from above but says little for many experts: their ratio is about 38 at E = 16
and 6514 at E = 256 for independent normal scores.

Two scores become equal when each moves by half of their difference, so the distance of Def. 4.6 at
order 1 is *half* of the gap. Tieline calls a token near a tie where the gap itself is below ε.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import gap, ranked_scores
from tieline.core.statistics import empirical_cdf
from tieline.measure.boundary import Gaps, Real, Scores

__all__ = [
    "Mass",
    "ambiguity_mass",
    "boundary_mass_pair",
    "boundary_mass_top",
    "linf_distance",
    "pair_gap",
    "top_gap",
]


@dataclass(frozen=True, eq=False)
class Mass:
    """A share of tokens with the standard error √(p (1-p) / T) of independent ones.

    Has the shape of the requested widths; `float(mass)` is the value for a single width.

    Attributes:
        value: share of tokens, in float64.
        stderr: its standard error; 0 at shares 0 and 1, where `MassProfile` has a proper band.
    """

    value: Float[Tensor, "*grid"]
    stderr: Float[Tensor, "*grid"]

    def __float__(self) -> float:
        return self.value.item()


def top_gap(scores: Scores, k: int = 1) -> Gaps:
    """Δ = z_[k] - z_[k+1] in float64: the margin by which each token keeps its top-k set (1.2).

    Zero on a tie. Requires 1 <= k < E.
    """
    experts = _pairwise_scores(scores).shape[1]
    require(1 <= k < experts, f"a gap needs 1 <= k < E, got {k=}, E={experts}")
    return gap(scores, k)


def pair_gap(scores: Scores) -> Gaps:
    """Δ_min: smallest |z_i - z_j| over pairs of experts, attained by neighbours (Def. 1.3)."""
    return -ranked_scores(_pairwise_scores(scores), scores.shape[1]).diff(dim=-1).amax(dim=-1)


def linf_distance(scores: Scores, k: int, order: int = 1) -> Float[Tensor, " tokens"]:
    """½ min_a (z_[a] - z_[a+n]) over the windows of ranks a..a+n that hold k and k + 1.

    The n + 1 scores of a window meet in its middle and the others stay. Exact where every vector of
    scores can be reached, that is for W of full row rank (E <= D); a lower limit otherwise.

    Args:
        scores: (T, E).
        k: number of experts chosen, 1 <= k < E.
        order: n, 1 <= n < E.
    """
    experts = scores.shape[1]
    require(1 <= k < experts, f"a tie needs 1 <= k < E, got {k=}, E={experts}")
    require(1 <= order < experts, f"need 1 <= order < E, got {order=}, E={experts}")
    ranked = ranked_scores(scores, experts)
    first, last = max(0, k - order), min(k - 1, experts - 1 - order)
    window = ranked[:, first : last + 1] - ranked[:, first + order : last + order + 1]
    return window.amin(dim=1) / 2


def boundary_mass_top(scores: Scores, k: int, width: Real | Float[Tensor, "*grid"]) -> Mass:
    """BM_top(w) = P(Δ <= w) with its standard error (Def. 2.1; Paper 0, sec. 2).

    Args:
        scores: (T, E) scores of all experts.
        k: number of experts chosen.
        width: w >= 0, one or many; a gap equal to a width is counted.
    """
    return _mass_of_gaps(top_gap(scores, k), width)


def boundary_mass_pair(scores: Scores, width: Real | Float[Tensor, "*grid"]) -> Mass:
    """BM_pair(w) = P(Δ_min <= w), at least BM_top(w) for every k (Def. 2.2).

    Args:
        scores: the scores of all experts; a truncated list has other neighbours.
        width: w >= 0, one or many.
    """
    return _mass_of_gaps(pair_gap(scores), width)


def ambiguity_mass(scores: Scores, epsilon: Real, tau: Real = 1.0) -> Mass:
    """BM(τ; ε): share of tokens whose largest softmax weight is at most 1 - ε (Def. 2.3).

    Decided on log-odds, log Σ_{i > 1} exp((z_[i] - z_[1]) / τ) >= logit ε, since 1 - ε rounds to 1
    when ε is small. The sandwich of Paper 0, Remark 5.4, with Δ at k = 1,

        BM_top(τ κ) <= BM(τ; ε) <= BM_top(τ (κ + log(E - 1))),  κ = log((1 - ε) / ε),

    holds with equality at E = 2.
    """
    require(
        0 < epsilon < 1 and tau > 0, f"need 0 < epsilon < 1 and tau > 0, got {epsilon=}, {tau=}"
    )
    ranked = ranked_scores(_pairwise_scores(scores), scores.shape[1])
    log_odds = ((ranked[:, 1:] - ranked[:, :1]) / tau).logsumexp(dim=-1)
    share = (log_odds >= math.log(epsilon) - math.log1p(-epsilon)).double().mean()
    return _binomial_mass(share, len(scores))


def _mass_of_gaps(gaps: Gaps, width: Real | Float[Tensor, "*grid"]) -> Mass:
    """Share of gaps of at most `width`, with its standard error."""
    at = torch.as_tensor(width, dtype=torch.float64)
    require(bool((at >= 0).all()), f"a width is >= 0, got {width}")
    return _binomial_mass(empirical_cdf(gaps, at), gaps.numel())


def _binomial_mass(share: Float[Tensor, "*grid"], tokens: int) -> Mass:
    """A share with the standard error √(p (1 - p) / tokens)."""
    return Mass(share, (share * (1 - share) / tokens).sqrt())


def _pairwise_scores(scores: Scores) -> Scores:
    """The scores, which must be finite, of a token and two experts or more."""
    tokens, experts = scores.shape
    require(
        tokens > 0 and experts > 1,
        f"need a token and 2 experts or more, got {tokens} tokens of {experts} experts",
        ShapeError,
    )
    require(
        bool(torch.isfinite(scores).all()),
        "scores must be finite: leave masked experts out before comparing all pairs",
    )
    return scores
