r"""Gates that are continuous at ties: experts near the threshold share in the choice.

    u_i = 1 + (c_i - c_[k]) / ε          1 at the threshold, 0 at the lower end of the band
    s(u) = u^a / (u^a + (1 - u)^b)       on [0, 1]; 0 below, 1 above
    w_i ∝ score(z_i) · s(u_i)            `SmoothTopK`: experts just below the threshold fade in

    r = argmin ‖r - c/ε‖²                over 0 <= r_i <= 1, Σ r_i = k
      = clip(c_i/ε - τ, 0, 1)            with τ such that the sum is k
    w_i ∝ score(z_i) · r_i               `ProjectedTopK`: experts that tie share the last seat

Smooth top-k is that of paper 1, section 6, which has s = e^h with h the log-smoothstep, not a
number at u = 0. a = b = 1 makes s(u) = u, a ramp as wide as the band; the paper's b = 50 climbs
from 10 to 90 % within u in [.0275, .0883], which moves a near-step to c_[k] - ε.

Projected top-k is top-k itself where the gap c_[k] - c_[k+1] is at least ε. Two experts with a
smaller gap share the last seat as ½ ± gap/(2ε), a straight ramp of width 2ε. A projection on a
convex set moves no further than its argument, so r is Lipschitz with constant 1/ε at ties of every
order. Groups share in the same way: with ρ the projection of the group scores onto {0 <= ρ_g <= 1,
Σ ρ_g = groups kept}, the experts are projected onto {0 <= r_i <= ρ_g(i), Σ r_i = k}.

Method of the projection. Σ clip(y_i - τ, 0, ρ_i) is piecewise linear in τ with a knee where an
expert enters (τ = y_i) and one where it is full (τ = y_i - ρ_i). With y = (c - c_p)/ε and p the
expert at which the caps of the better ones add up to k, the k-th best where all caps are 1, τ is in
[-1, 0], so scores outside [-1, 1] do not matter. Sorting the knees gives the piece with the sum k.

    BandGate                           base of both gates: the width ε, given or learned
    smooth_columns, projected_columns  the same shares as columns, one slot per expert in use
    seat_projection                    the projection, with its own backward pass
"""

import math
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import kth_largest, stable_topk, top_values, topk_mask
from tieline.routing.gates import (
    ChoiceOptions,
    Groups,
    Law,
    Scores,
    SelectiveGate,
    Share,
    laws_of_choice,
)

__all__ = [
    "BandGate",
    "Columns",
    "ProjectedTopK",
    "SmoothTopK",
    "lower_groups",
    "projected_columns",
    "seat_projection",
    "smooth_columns",
    "smoothstep",
]

Caps = Float[Tensor, "*batch experts"]

INITIAL_EPSILON = 0.05
"""Initial value of a learnable ε; softplus(-9) would take 12,000 steps to matter."""


def smoothstep(u: Float[Tensor, "*shape"], a: float, b: float) -> Float[Tensor, "*shape"]:
    """Return u^a / (u^a + (1-u)^b), 0 for u <= 0 and 1 for u >= 1, with finite gradients.

    The ratio is evaluated strictly inside (0, 1) only: outside it the derivative of the power may
    be infinite, and infinity times the zero gradient of a clamp is NaN.
    """
    inside = (u > 0) & (u < 1)
    x = torch.where(inside, u, 0.5)
    rise = x**a
    ramp = rise / (rise + (1 - x) ** b)
    return torch.where(inside, ramp, u.detach().clamp(0, 1))  # clamp keeps NaN


def lower_groups(
    selection: Scores, groups: Groups, epsilon: float | Tensor, a: float, b: float
) -> Scores:
    """Return c_i - B·(1 - s(u_g)), B = range of c + ε: lowers experts of groups not chosen.

    u_g is computed from the group scores as u is from the expert scores. A group that ties with a
    chosen one is not lowered, so ties of groups cause no jump.
    """
    of_groups = groups.scores(selection)
    below = of_groups - kth_largest(of_groups, groups.chosen)
    share = smoothstep(1 + below / epsilon, a, b)
    span = selection.amax(dim=-1, keepdim=True) - selection.amin(dim=-1, keepdim=True)
    return selection - (span + epsilon) * (1 - groups.spread(share, selection.shape[-1]))


class BandGate(SelectiveGate):
    """Base of the gates that share seats within a band of width ε around the threshold.

    Args:
        k: experts chosen per token.
        epsilon: width ε > 0 of the band, in units of the selection scores. None makes it a
            parameter, ε = softplus(θ), starting at 0.05 and driven to the budget by
            `losses.boundary_loss`.
        budget: experts per token that the boundary loss aims at, k* = k + 0.5 by default.
        detach_ramp: block the gradient through the shares, except to ε. The exact gradient harms
            training (perplexity 61 against 46); set False for gradient checks.
        options: see `SelectiveGate`.
    """

    def __init__(
        self,
        k: int,
        *,
        epsilon: float | None = None,
        budget: float | None = None,
        detach_ramp: bool = True,
        **options: Unpack[ChoiceOptions],
    ) -> None:
        super().__init__(k, **options)
        require(
            epsilon is None or 0 < epsilon < math.inf,
            f"epsilon must be positive and finite (None makes it learnable), got {epsilon!r}",
        )
        self.budget = k + 0.5 if budget is None else budget
        require(k <= self.budget < math.inf, f"the budget k* must be >= k, got {budget} for {k=}")
        self.fixed_epsilon, self.detach_ramp = epsilon, detach_ramp
        start = math.log(math.expm1(INITIAL_EPSILON))
        self.theta = nn.Parameter(torch.tensor(start)) if epsilon is None else None

    @property
    def laws(self) -> frozenset[Law]:  # type: ignore[override]
        """The laws of `TopK`, and continuity; symmetry too without bias and groups."""
        laws = laws_of_choice(self) | {Law.CONTINUOUS}
        return laws | {Law.SYMMETRIC} if Law.EQUIVARIANT in laws else laws

    @property
    def epsilon(self) -> Float[Tensor, ""]:
        """The width ε of the band as a tensor, with a gradient if it is learnable."""
        if self.theta is not None:
            return F.softplus(self.theta)
        return torch.tensor(self.fixed_epsilon, dtype=torch.float64, device="cpu")

    def band_width(self, selection: Scores) -> float | Tensor:
        """Return ε in the dtype of the scores; a fixed ε stays a float, to avoid a device copy."""
        return self.fixed_epsilon if self.theta is None else self.epsilon.to(selection)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """The choice and the band."""
        band = "learnable" if self.theta is not None else self.fixed_epsilon
        return f"{super().extra_repr()}, epsilon={band}"


class SmoothTopK(BandGate):
    """Top-k in which experts less than ε below the threshold fade in: continuous in the scores.

    Outside the band it equals `TopK`, as it does for ε → 0; at an exact tie all tied experts have
    full and equal share.

    Args:
        k: experts that are always in.
        epsilon, budget, detach_ramp: see `BandGate`.
        a: exponent at the lower end of the ramp.
        b: exponent at its upper end; 50 in the paper's experiments.
        k_max: at most this many experts per token. The band narrows per token to
            ε_t = min(ε, c_[k] - c_[k_max+1]), which keeps continuity; only where more than
            k_max - k + 1 experts tie exactly does a jump remain, and the lower indices are taken.
        options: see `SelectiveGate`; the choice of groups is smoothed too (`lower_groups`).
    """

    def __init__(
        self,
        k: int,
        *,
        epsilon: float | None = None,
        a: float = 1.0,
        b: float = 1.0,
        k_max: int | None = None,
        budget: float | None = None,
        detach_ramp: bool = True,
        **options: Unpack[ChoiceOptions],
    ) -> None:
        super().__init__(k, epsilon=epsilon, budget=budget, detach_ramp=detach_ramp, **options)
        positive = 0 < a < math.inf and 0 < b < math.inf
        require(positive, f"a and b must be positive and finite: {a=}, {b=}")
        require(k_max is None or k_max >= k, f"k_max must be >= k, got {k_max} for {k=}")
        self.a, self.b, self.k_max = a, b, k_max

    @property
    def most_active(self) -> int | None:  # type: ignore[override]
        """k_max."""
        return self.k_max

    @property
    def laws(self) -> frozenset[Law]:  # type: ignore[override]
        """The laws of `BandGate`; `k_max` breaks symmetry."""
        return super().laws if self.k_max is None else super().laws - {Law.SYMMETRIC}

    def share(self, selection: Scores) -> Share:
        """Return s(u), after lowering the experts of groups that are not chosen."""
        if self.detach_ramp:
            selection = selection.detach()
        epsilon = self.band_width(selection)
        if self.groups is not None:
            selection = lower_groups(selection, self.groups, epsilon, self.a, self.b)
        return self._ramp(selection, self.k, epsilon, self.k_max)

    def _ramp(self, selection: Scores, k: int, epsilon: float | Tensor, k_max: int | None) -> Share:
        """Return s(u) of every expert; `k_max` narrows the band per token."""
        threshold = kth_largest(selection, k)
        below = selection - threshold
        if k_max is None or k_max >= selection.shape[-1]:
            return smoothstep(1 + below / epsilon, self.a, self.b)
        room = threshold - kth_largest(selection, k_max + 1)
        learned = isinstance(epsilon, Tensor)
        width = torch.minimum(epsilon, room) if learned else room.clamp(max=epsilon)
        crowded = width <= 0
        share = smoothstep(1 + below / width.masked_fill(crowded, 1), self.a, self.b)
        return torch.where(crowded, topk_mask(selection, k).to(share), share)

    def extra_repr(self) -> str:
        """The choice and the ramp."""
        return f"{super().extra_repr()}, a={self.a}, b={self.b}, k_max={self.k_max}"


class Columns(NamedTuple):
    """Shares of the first ranks in descending order of the scores, and their experts."""

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
    """Return the experts that smooth top-k may use and their shares; unused slots have share 0.

    `selection` are the selection scores, `k_max` <= E the number of slots; other arguments as for
    `SmoothTopK`.
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


class ProjectedTopK(BandGate):
    """Top-k whose seats are shared among the experts that tie for them: continuous in the scores.

    The shares are the projection of c/ε onto {0 <= r <= 1, Σ r = k}: those of `TopK` wherever the
    gap, and that of the groups, is at least ε, and Lipschitz with constant 1/ε everywhere (in ℓ2,
    without groups). A token uses k experts or more; how many more has no bound below the number of
    tied experts, since such a bound would make a jump.

    Arguments as for `BandGate`; 1 <= k < E, and the shares of a token sum to k.
    """

    def share(self, selection: Scores) -> Share:
        """Return the projection of the selection scores."""
        if self.detach_ramp:
            selection = selection.detach()
        return group_projection(selection, self.k, self.band_width(selection), self.groups)


def group_projection(
    selection: Scores, k: int, epsilon: float | Tensor, groups: Groups | None
) -> Share:
    """Return the projected shares (..., E), each capped by the share of its group."""
    caps = None
    if groups is not None and groups.chosen < groups.count:
        of_groups = seat_projection(groups.scores(selection), groups.chosen, epsilon)
        caps = groups.spread(of_groups, selection.shape[-1])
    return seat_projection(selection, k, epsilon, caps)


def projected_columns(
    selection: Float[Tensor, "tokens experts"],
    k: int,
    *,
    epsilon: float,
    groups: Groups | None = None,
) -> Columns:
    """Return shares and experts in descending order of the scores, with as few slots as needed.

    Unused slots have share 0. Arguments as for `ProjectedTopK`.
    """
    share = group_projection(selection, k, epsilon, groups)
    used = share.detach() != 0  # NaN counts as used, so that it propagates
    slots = int(used.sum(dim=-1).max()) if len(share) else k
    ids = stable_topk(selection.detach().masked_fill(~used, -torch.inf), slots).indices
    return Columns(share.gather(-1, ids), ids)


def seat_projection(
    selection: Scores, k: int, epsilon: float | Tensor, caps: Caps | None = None
) -> Share:
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
    else:  # torch.full avoids a copy from the host
        width = torch.full((), epsilon, dtype=selection.dtype, device=selection.device)
    share: Any = _SeatProjection.apply(selection, width, caps, k)
    return share


class _SeatProjection(torch.autograd.Function):
    """Seat projection: forward by sorting, backward from the shares alone.

    A = {0 < r < cap} share a level, B = {r = cap > 0} follow their caps, Σ dr = 0:

        dr_A = (dc - mean_A dc)/ε - (r - mean_A r) dε/ε - Σ_B dcap / |A|,      dr_B = dcap
    """

    @staticmethod
    def forward(
        ctx: Any, selection: Tensor, epsilon: Tensor, caps: Tensor | None, k: int
    ) -> Tensor:
        """Return the shares."""
        share = _project_by_sorting(selection, epsilon, caps, k)
        ctx.save_for_backward(share, epsilon, caps)
        return share

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients in scores, ε and caps."""
        share, epsilon, caps = ctx.saved_tensors
        full = share >= (1 if caps is None else caps)
        open_ = (share > 0) & ~full
        centred = grads[0] - _masked_mean(open_, grads[0])
        of_scores = centred.masked_fill(~open_, 0) / epsilon
        of_epsilon = of_caps = None
        if ctx.needs_input_grad[1]:
            of_epsilon = -(of_scores * (share - _masked_mean(open_, share))).sum()
        if caps is not None and ctx.needs_input_grad[2]:
            of_caps = centred.masked_fill(~(full & (share > 0)), 0)
        return of_scores, of_epsilon, of_caps, None


def _masked_mean(mask: Bool[Tensor, "*batch experts"], values: Tensor) -> Float[Tensor, "*batch 1"]:
    """Return the mean of the values inside the mask; 0 if the mask is empty."""
    count = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return values.masked_fill(~mask, 0).sum(dim=-1, keepdim=True) / count


class _TopKRows(NamedTuple):
    """Rows where the projection equals top-k (`settled`), and the top-k shares of all rows."""

    settled: Bool[Tensor, "*batch 1"]
    share: Share


def _project_by_sorting(selection: Tensor, epsilon: Tensor, caps: Tensor | None, k: int) -> Tensor:
    """Return shares (..., E); on the CPU only rows where top-k is not exact are projected."""
    choice = _topk_rows(selection, epsilon, caps, k)
    if selection.device.type != "cpu" or torch.compiler.is_compiling():
        shared = _solve_shares(selection, epsilon, caps, k, selection.shape[-1])
        return torch.where(choice.settled, choice.share, shared)
    rows = choice.settled.logical_not().squeeze(-1)  # few; no read-back cost on CPU
    if bool(rows.any()):
        row_caps = None if caps is None else caps[rows]
        choice.share[rows] = _solve_shares(selection[rows], epsilon, row_caps, k, None)
    return choice.share


def _topk_rows(selection: Tensor, epsilon: Tensor, caps: Tensor | None, k: int) -> _TopKRows:
    """Return the rows whose gap is at least ε and whose groups all have share 0 or 1."""
    if caps is not None:
        selection = selection.masked_fill(caps == 0, -torch.inf)
    top = top_values(selection, k + 1)
    settled = top[..., k - 1 : k] - top[..., k:] >= epsilon
    if caps is not None:
        settled = settled & ((caps == 0) | (caps == 1)).all(dim=-1, keepdim=True)
    chosen = (selection < top[..., k - 1 : k]).logical_not()  # NaN is chosen
    return _TopKRows(settled, chosen.to(selection))


def _solve_shares(
    selection: Tensor, epsilon: Tensor, caps: Tensor | None, k: int, knees: int | None
) -> Tensor:
    """Return clip(y - τ, 0, cap); `knees` is the number of scores that matter, None to count."""
    y = ((selection - _pivot_score(selection, caps, k)) / epsilon).clamp(-1, 1)
    if caps is not None:
        return _clipped_shares(y, _solve_seat_level(y, caps, k), caps)
    if knees is None:
        knees = max(k, int((y > -1).sum(dim=-1).max()))
    top_scores = top_values(y, knees) if knees < y.shape[-1] else y
    return _clipped_shares(
        y, _solve_seat_level(top_scores, torch.ones_like(top_scores), k), torch.ones_like(y)
    )


def _pivot_score(selection: Tensor, caps: Tensor | None, k: int) -> Float[Tensor, "*batch 1"]:
    """Return the score at which the caps, summed from the largest score down, reach k."""
    if caps is None:
        return top_values(selection, k)[..., -1:]
    ranked = stable_topk(selection, selection.shape[-1])
    filled = caps.gather(-1, ranked.indices).cumsum(dim=-1)
    index = (filled < k).sum(dim=-1, keepdim=True).clamp(max=selection.shape[-1] - 1)
    return ranked.values.gather(-1, index)


def _clipped_shares(y: Tensor, level: Tensor, caps: Tensor) -> Tensor:
    """Return clip(y - τ, 0, cap)."""
    return torch.minimum((y - level).clamp(min=0), caps)


def _solve_seat_level(y: Tensor, caps: Tensor, k: int) -> Float[Tensor, "*batch 1"]:
    """Return the τ in [-1, 0] with Σ clip(y - τ, 0, cap) = k.

    From τ = 0 down, the sum grows with the number of experts that have entered and are not full.
    All terms are positive, so nothing cancels; one Newton step removes the rounding error.
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
