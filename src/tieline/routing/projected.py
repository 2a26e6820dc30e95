r"""Projected top-k: the k seats are shared by the experts that compete for the last of them.

    r = argmin ‖r - c/ε‖²   over   0 <= r_i <= 1,  Σ r_i = k
      = clip(c_i/ε - τ, 0, 1)   with τ such that the sum is k
    w_i ∝ score(z_i) · r_i

Where the gap c_[k] - c_[k+1] is at least ε this is top-k itself. Two experts with a smaller gap
share the last seat as ½ ± gap/(2ε), a straight ramp of width 2ε. A projection on a convex set moves
no further than its argument, so r is Lipschitz with constant 1/ε at ties of every order. Paper 1's
ramp (`smooth`) *adds* experts instead.

Groups share in the same way. With ρ the projection of the group scores onto {0 <= ρ_g <= 1, Σ ρ_g =
groups kept}, the experts are projected onto {0 <= r_i <= ρ_g(i), Σ r_i = k}.

Method. Σ clip(y_i - τ, 0, ρ_i) is piecewise linear in τ with a knee where an expert enters (τ =
y_i) and one where it is full (τ = y_i - ρ_i). With y = (c - c_p)/ε and p the expert at which the
caps of the better ones add up to k, the k-th best where all caps are 1, τ is in [-1, 0], so
scores outside [-1, 1] do not matter. Sorting the knees gives the piece with the sum k, and τ.

    ProjectedTopK        the gate
    projected_columns    the same shares for programs with slots per token
    project              the projection, with its own backward
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import stable_topk, top_values
from tieline.routing.gates import Groups, Scores, Share
from tieline.routing.smooth import BandGate, Columns

__all__ = ["ProjectedTopK", "project", "projected_columns"]

Caps = Float[Tensor, "*batch experts"]


class ProjectedTopK(BandGate):
    """Top-k with the seats shared among experts that tie for them: continuous in the scores.

    The shares are the projection of c/ε onto {0 <= r <= 1, Σ r = k}: those of `TopK` wherever the
    gap, and that of the groups, is at least ε, and Lipschitz with constant 1/ε everywhere (in ℓ2,
    without groups). A token uses k experts or more; how many more has no bound below the number of
    tied experts, since such a bound would make a jump.

    Args:
        k: seats, 1 <= k < E; the shares of a token sum to k.
        epsilon: width ε > 0 of the band, in units of the selection scores. None makes it a
            parameter, ε = softplus(θ), starting at 0.05 and driven to the budget by
            `losses.boundary_loss`.
        budget: experts per token that the boundary loss aims at, k* = k + 0.5 by default.
        detach_ramp: block the gradient through the shares, except to ε, as training wants; set
            False for gradient checks.
        options: see `SelectiveGate`.
    """

    def share(self, selection: Scores) -> Share:
        """The projection of the selection scores."""
        if self.detach_ramp:
            selection = selection.detach()
        return group_projection(selection, self.k, self.band_width(selection), self.groups)


def group_projection(
    selection: Scores, k: int, epsilon: float | Tensor, groups: Groups | None
) -> Share:
    """Shares of the experts (..., E), each capped by the share of its group."""
    caps = None
    if groups is not None and groups.chosen < groups.count:
        of_groups = project(groups.scores(selection), groups.chosen, epsilon)
        caps = groups.spread(of_groups, selection.shape[-1])
    return project(selection, k, epsilon, caps)


def projected_columns(
    selection: Float[Tensor, "tokens experts"],
    k: int,
    *,
    epsilon: float,
    groups: Groups | None = None,
) -> Columns:
    """Shares and experts in descending order of the scores, with as many slots as a token needs.

    A skipped slot has share 0. Arguments as for `ProjectedTopK`.
    """
    share = group_projection(selection, k, epsilon, groups)
    used = share.detach() != 0  # what is not a number is used, and shows
    slots = int(used.sum(dim=-1).max()) if len(share) else k
    ids = stable_topk(selection.detach().masked_fill(~used, -torch.inf), slots).indices
    return Columns(share.gather(-1, ids), ids)


def project(selection: Scores, k: int, epsilon: float | Tensor, caps: Caps | None = None) -> Share:
    """Project c/ε onto {0 <= r_i <= cap_i, Σ r_i = k}, differentiable in c, ε and the caps.

    Args:
        selection: scores c (..., E).
        k: sum of the shares, 1 <= k < E.
        epsilon: ε > 0; a scalar tensor gets a gradient.
        caps: largest share of each expert, in [0, 1] and k or more in sum; all 1 by default.
    """
    experts = selection.shape[-1]
    require(
        1 <= k < experts,
        f"need 1 <= k < number of experts for a choice to be shared, got {k=}, {experts=}",
        ShapeError,
    )
    if isinstance(epsilon, Tensor):
        width = epsilon.to(selection)
    else:  # a kernel fills it in: the host need not wait for a copy
        width = torch.full((), epsilon, dtype=selection.dtype, device=selection.device)
    share: Any = _Projection.apply(selection, width, caps, k)
    return share


class _Projection(torch.autograd.Function):
    """Forward by sorting; backward from the shares alone.

    A = {0 < r < cap} share a level, B = {r = cap > 0} follow their caps, Σ dr = 0:

        dr_A = (dc - mean_A dc)/ε - (r - mean_A r) dε/ε - Σ_B dcap / |A|,      dr_B = dcap
    """

    @staticmethod
    def forward(
        ctx: Any, selection: Tensor, epsilon: Tensor, caps: Tensor | None, k: int
    ) -> Tensor:
        """The shares."""
        share = _projected_shares(selection, epsilon, caps, k)
        ctx.save_for_backward(share, epsilon, caps)
        return share

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of scores, ε and caps."""
        share, epsilon, caps = ctx.saved_tensors
        full = share >= (1 if caps is None else caps)
        open_ = (share > 0) & ~full
        centred = grads[0] - _mean_over(open_, grads[0])
        of_scores = centred.masked_fill(~open_, 0) / epsilon
        of_epsilon = of_caps = None
        if ctx.needs_input_grad[1]:
            of_epsilon = -(of_scores * (share - _mean_over(open_, share))).sum()
        if caps is not None and ctx.needs_input_grad[2]:
            of_caps = centred.masked_fill(~(full & (share > 0)), 0)
        return of_scores, of_epsilon, of_caps, None


def _mean_over(mask: Bool[Tensor, "*batch experts"], values: Tensor) -> Float[Tensor, "*batch 1"]:
    """The mean of the values inside the mask; 0 where it is empty."""
    count = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return values.masked_fill(~mask, 0).sum(dim=-1, keepdim=True) / count


class _Choice(NamedTuple):
    """Rows where top-k itself is the answer, and that answer for all rows."""

    settled: Bool[Tensor, "*batch 1"]
    share: Share


def _projected_shares(selection: Tensor, epsilon: Tensor, caps: Tensor | None, k: int) -> Tensor:
    choice = _settled_choice(selection, epsilon, caps, k)
    if selection.device.type != "cpu" or torch.compiler.is_compiling():
        shared = _shared_seats(selection, epsilon, caps, k, selection.shape[-1])
        return torch.where(choice.settled, choice.share, shared)
    rows = choice.settled.logical_not().squeeze(-1)  # few: reading them back is free here
    if bool(rows.any()):
        some = None if caps is None else caps[rows]
        choice.share[rows] = _shared_seats(selection[rows], epsilon, some, k, None)
    return choice.share


def _settled_choice(selection: Tensor, epsilon: Tensor, caps: Tensor | None, k: int) -> _Choice:
    if caps is not None:
        selection = selection.masked_fill(caps == 0, -torch.inf)
    top = top_values(selection, k + 1)
    settled = top[..., k - 1 : k] - top[..., k:] >= epsilon
    if caps is not None:
        settled = settled & ((caps == 0) | (caps == 1)).all(dim=-1, keepdim=True)
    chosen = (selection < top[..., k - 1 : k]).logical_not()  # what is not a number is chosen
    return _Choice(settled, chosen.to(selection))


def _shared_seats(
    selection: Tensor, epsilon: Tensor, caps: Tensor | None, k: int, knees: int | None
) -> Tensor:
    """clip(y - τ, 0, cap); `knees`: how many scores matter, None to count them."""
    y = ((selection - _pivot_score(selection, caps, k)) / epsilon).clamp(-1, 1)
    if caps is not None:
        return _clipped_shares(y, _seat_level(y, caps, k), caps)
    if knees is None:
        knees = max(k, int((y > -1).sum(dim=-1).max()))
    few = top_values(y, knees) if knees < y.shape[-1] else y
    return _clipped_shares(y, _seat_level(few, torch.ones_like(few), k), torch.ones_like(y))


def _pivot_score(selection: Tensor, caps: Tensor | None, k: int) -> Float[Tensor, "*batch 1"]:
    """The score at which the caps of all scores from the largest down add up to k."""
    if caps is None:
        return top_values(selection, k)[..., -1:]
    ranked = stable_topk(selection, selection.shape[-1])
    filled = caps.gather(-1, ranked.indices).cumsum(dim=-1)
    index = (filled < k).sum(dim=-1, keepdim=True).clamp(max=selection.shape[-1] - 1)
    return ranked.values.gather(-1, index)


def _clipped_shares(y: Tensor, level: Tensor, caps: Tensor) -> Tensor:
    return torch.minimum((y - level).clamp(min=0), caps)


def _seat_level(y: Tensor, caps: Tensor, k: int) -> Float[Tensor, "*batch 1"]:
    """The τ in [-1, 0] with Σ clip(y - τ, 0, cap) = k.

    From τ = 0 down, the sum grows with the number of experts that have entered and are not full.
    All its terms are positive, so nothing cancels; one Newton step removes the rounding.
    """
    knees = torch.cat((y.clamp(-1, 0), (y - caps).clamp(-1, 0)), dim=-1)
    values, order = stable_topk(knees, knees.shape[-1])
    slope = torch.where(order < y.shape[-1], 1, -1).cumsum(dim=-1).to(y)
    start = torch.minimum(y.clamp(min=0), caps).sum(dim=-1, keepdim=True)
    rise = (slope[..., :-1] * -values.diff(dim=-1)).cumsum(dim=-1)
    height = start + torch.cat((torch.zeros_like(start), rise), dim=-1)
    index = ((height <= k).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    missing = (k - height.gather(-1, index)) / slope.gather(-1, index).clamp(min=1)
    level = (values.gather(-1, index) - missing).clamp(-1, 0)
    share = _clipped_shares(y, level, caps)
    inside = ((share > 0) & (share < caps)).sum(dim=-1, keepdim=True)
    return level + (share.sum(dim=-1, keepdim=True) - k) / inside.clamp(min=1) * (inside > 0)
