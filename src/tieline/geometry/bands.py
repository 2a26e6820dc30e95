"""Nearness to a tie measured in scores instead of inputs, and the definition that is used.

    linf_distance    inf over y ∈ Γ^(n) of max_i |z_i(x) - z_i(y)|                Paper 1, Def. 4.6
    in_band          z_[k] - z_[k+1] < ε                                         Paper 1, Prop. A.20

The two differ by a factor 2: to make two scores equal one may move each by half of their
difference, so the distance of Def. 4.6 at order 1 is *half* of the gap, while Prop. A.20 and the
smoothing built on it compare the gap itself. Tieline says "near" for gap < ε throughout.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tieline.errors import require
from tieline.geometry.boundary import top_gap
from tieline.geometry.kinds import Real
from tieline.ranking import ranked_scores

__all__ = ["in_band", "linf_distance"]

Scores = Float[Tensor, "tokens experts"]


def linf_distance(scores: Scores, k: int, order: int = 1) -> Float[Tensor, " tokens"]:
    """½ min_a (z_[a] - z_[a+n]) over the windows of ranks a..a+n that hold k and k + 1.

    The n + 1 scores of a window meet in its middle, the others stay: exact where every vector of
    scores can be reached, that is for W of full row rank (E <= D), a lower limit otherwise.

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


def in_band(scores: Scores, k: int, eps: Real) -> Bool[Tensor, " tokens"]:
    """Whether an expert that is not chosen scores within ε of z_[k]: z_[k] - z_[k+1] < ε."""
    require(eps >= 0, f"a width is >= 0, got {eps=}")
    return torch.lt(top_gap(scores, k), eps)
