"""How many experts are near the threshold, and the orders of the near-ties.

    near_counts          K(ε) = #{i : z_i > z_[k] - ε}                                  Def. 4.1
    tie_order            0 if Δ >= ε, else #{i : |z_i - z_[k]| < ε} - 1                 Def. 4.2
    order_from_counts    the same from the first k + 1 ranks and K(ε)                   Def. 4.2
    order_shares         share of tokens of each order                                  Def. 4.2
    epsilon_for_extra    ε at which a token has on average k + 1/2 experts              Def. 4.3

Counts need the scores of every expert. On the first C ranks they are lower limits, exact for each
token whose last kept rank lies outside the band (`censored_share` is the share of the others).
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.errors import require
from tieline.core.ranking import kth_largest, ranked_scores
from tieline.core.statistics import Estimate
from tieline.geometry.boundary import Real

__all__ = [
    "censored_share",
    "epsilon_for_extra",
    "near_counts",
    "order_from_counts",
    "order_shares",
    "tie_order",
]

Scores = Float[Tensor, "tokens experts"]


def near_counts(
    scores: Scores, k: int, epsilons: Sequence[float]
) -> Int[Tensor, "tokens epsilons"]:
    """K(ε): number of experts above z_[k] - ε, the chosen ones included (Def. 4.1).

    Args:
        scores: (T, E) scores, or the first C ranks of them.
        k: number of experts chosen.
        epsilons: positive tolerances in units of score.
    """
    below = _below_threshold(scores, k)
    counts = [(below < epsilon).sum(dim=-1) for epsilon in epsilons]
    return torch.stack(counts, dim=-1) if counts else below.new_zeros(len(below), 0).long()


def tie_order(scores: Scores, k: int, epsilon: Real) -> Int[Tensor, " tokens"]:
    """Largest n for which the token is within ε of an order-n tie (Def. 4.2; Paper 1, Def. 3.2).

    0 if z_[k] - z_[k+1] >= ε: near-ties inside the chosen set alone make no discontinuity.
    Otherwise the number of scores within ε of z_[k], less one.
    """
    experts = scores.shape[1]
    require(1 <= k < experts, f"a tie needs 1 <= k < number of scores, got {k=}, {experts}")
    require(epsilon > 0, f"need epsilon > 0, got {epsilon}")
    within = _below_threshold(scores, k).abs() < epsilon
    top = ranked_scores(scores, k + 1)
    crosses = top[:, k - 1] - top[:, k] < epsilon
    return (within.sum(dim=-1) - 1) * crosses


def order_from_counts(
    ranked: Scores, k: int, epsilon: float, near: Int[Tensor, " tokens"]
) -> Int[Tensor, " tokens"]:
    """`tie_order` of all experts from the first k + 1 ranks and K(ε), as a trace keeps them."""
    top = ranked[:, : k + 1].double()
    above = (top[:, :k] - top[:, k - 1 : k] < epsilon).sum(dim=-1)
    crosses = top[:, k - 1] - top[:, k] < epsilon
    return (near.long() - k + above - 1) * crosses


def order_shares(orders: Int[Tensor, " tokens"], most: int) -> Float[Tensor, " orders"]:
    """Share of tokens of order 0, 1, ..., `most`; the last entry counts all orders from there."""
    require(most >= 1 and orders.numel() > 0, f"need most >= 1 and a token, got {most=}")
    return torch.bincount(orders.clamp(max=most), minlength=most + 1).double() / orders.numel()


def epsilon_for_extra(ranked: Scores, k: int, extra: float = 0.5) -> Estimate:
    """inf{ε : mean K(ε) >= k + extra}, with standard error (Def. 4.3).

    The ⌈extra · T⌉-th smallest of all distances z_[k] - z_[j], j > k. Its standard error is half of
    the change of ε when `extra` varies by one standard error of the mean count either way.

    Args:
        ranked: scores of the first C ranks, descending.
        k: number of experts chosen.
        extra: wanted mean number of experts beyond k.
    """
    distances = ranked[:, k - 1 : k].double() - ranked[:, k:].double()
    below = distances.flatten().sort().values
    epsilon = _order_statistic(below, extra, len(ranked))
    if not math.isfinite(epsilon):
        reach = f"k + {extra:g} = {k + extra:g} of {ranked.shape[1]} kept ranks"
        return Estimate(None, None, f"not answerable: no ε reaches {reach}")
    counts = (distances <= epsilon).sum(dim=-1)
    error = counts.double().std().item() / math.sqrt(len(ranked)) if len(ranked) > 1 else 0.0
    ends = [_order_statistic(below, extra + sign * error, len(ranked)) for sign in (-1, 1)]
    return Estimate(epsilon, (ends[1] - ends[0]) / 2)


def censored_share(ranked: Scores, k: int, epsilon: float) -> float:
    """Share of tokens whose last kept rank is within ε: further ranks may be as well."""
    return (ranked[:, k - 1].double() - ranked[:, -1].double() < epsilon).double().mean().item()


def _order_statistic(ordered: Float[Tensor, " n"], per_token: float, tokens: int) -> float:
    """Entry ⌈per_token · tokens⌉ (from 1) of an ascending list; infinite past its end."""
    rank = max(1, math.ceil(per_token * tokens - 1e-9))
    return ordered[rank - 1].item() if rank <= len(ordered) else math.inf


def _below_threshold(scores: Scores, k: int) -> Float[Tensor, "tokens experts"]:
    """z_[k] - z_i in float64: negative for experts ranked above the k-th."""
    return kth_largest(scores, k).double() - scores.double()
