"""Smooth top-k for programs that keep a fixed number of slots per token.

    u_j = 1 + (c_[j] - c_[k]) / ε_t,    ε_t = min(ε, c_[k] - c_[k_max+1]),    j = 1, ..., k_max

The shares of `SmoothTopK` (paper 1, section 6) at the first k_max ranks and the experts that hold
these; all other experts have share 0. One sort gives both, which is cheaper than the shares of all
experts and, for many experts, by far.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.ranking import stable_topk
from tieline.routing.selective import Groups
from tieline.routing.smooth import lower_groups, smoothstep

__all__ = ["Columns", "smooth_columns"]


class Columns(NamedTuple):
    """Shares s(u) of the first k_max ranks in descending order, and the experts that hold them."""

    share: Float[Tensor, "tokens columns"]
    ids: Int[Tensor, "tokens columns"]


def smooth_columns(
    selection: Float[Tensor, "tokens experts"],
    k: int,
    *,
    epsilon: float,
    k_max: int,
    a: float = 1.0,
    b: float = 1.0,
    groups: Groups | None = None,
) -> Columns:
    """The experts that smooth top-k may use, with their shares; a skipped slot has share 0.

    Args:
        selection: selection scores.
        k: experts that are always in.
        epsilon: width ε > 0 of the band.
        k_max: number of slots, k <= k_max <= E.
        a: exponent at the lower end of the ramp.
        b: exponent at its upper end.
        groups: group-limited choice, smoothed as well.
    """
    experts = selection.shape[-1]
    require(k <= k_max <= experts, f"need {k=} <= {k_max=} <= {experts} experts", ShapeError)
    if groups is not None:
        selection = lower_groups(selection, groups, epsilon, a, b)
    ranked = stable_topk(selection, min(k_max + 1, experts))
    threshold, values = ranked.values[:, k - 1 : k], ranked.values[:, :k_max]
    if k_max == experts:
        return Columns(smoothstep(1 + (values - threshold) / epsilon, a, b), ranked.indices)
    width = (threshold - ranked.values[:, k_max:]).clamp(max=epsilon)
    crowded = width <= 0
    share = smoothstep(1 + (values - threshold) / width.masked_fill(crowded, 1), a, b)
    first = (torch.arange(k_max, device=share.device) < k).to(share)
    return Columns(torch.where(crowded, first, share), ranked.indices[:, :k_max])
