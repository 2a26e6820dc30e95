"""Smooth top-k: experts just below the threshold fade in, so that no tie makes the output jump.

    u_i = 1 + (c_i - c_[k]) / ε          1 at the threshold, 0 at the lower end of the band
    s(u) = u^a / (u^a + (1 - u)^b)       on [0, 1]; 0 below, 1 above
    w_i ∝ score(z_i) · s(u_i)

Paper 1, section 6, has s = e^h with h the log-smoothstep, which is not a number at u = 0. a = b = 1
makes s(u) = u, a ramp as wide as the band; the paper's b = 50 climbs from 10 to 90 % within u in
[.0275, .0883], which moves a near-step to c_[k] - ε.

`BandGate` is what this gate shares with `projected.ProjectedTopK`: the width ε, given or learned.

`SmoothTopK` is the gate. `smooth_columns` gives the same shares for programs with a fixed number of
slots per token: those of the first k_max ranks and the experts that hold them, from one sort, with

    u_j = 1 + (c_[j] - c_[k]) / ε_t,    ε_t = min(ε, c_[k] - c_[k_max+1]),    j = 1, ..., k_max.
"""

import math
from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import kth_largest, stable_topk, topk_mask
from tieline.routing.gates import (
    ChoiceOptions,
    Groups,
    Law,
    Scores,
    SelectiveGate,
    Share,
    laws_of_choice,
)

__all__ = ["BandGate", "Columns", "SmoothTopK", "lower_groups", "smooth_columns", "smoothstep"]

START = 0.05
"""Initial value of a learnable ε; softplus(-9) would take 12,000 steps to matter."""


def smoothstep(u: Float[Tensor, "*shape"], a: float, b: float) -> Float[Tensor, "*shape"]:
    """s(u) = u^a / (u^a + (1-u)^b), 0 for u <= 0 and 1 for u >= 1, with finite gradients.

    The ratio is evaluated strictly inside (0, 1) only: outside it the derivative of the power may
    be infinite, and infinity times the zero of a clamp is not a number.
    """
    inside = (u > 0) & (u < 1)
    x = torch.where(inside, u, 0.5)
    rise = x**a
    ramp = rise / (rise + (1 - x) ** b)
    return torch.where(inside, ramp, u.detach().clamp(0, 1))  # a clamp keeps what is not a number


def lower_groups(
    selection: Scores, groups: Groups, epsilon: float | Tensor, a: float, b: float
) -> Scores:
    """c_i - B·(1 - s(u_g)), B = range of c + ε: lower the experts of groups that are not chosen.

    u_g follows from the scores of the groups as u from those of the experts. A group that ties with
    a chosen one is not lowered, so no tie of groups makes a jump.
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
        start = None if epsilon is not None else torch.tensor(math.log(math.expm1(START)))
        self.theta = None if start is None else nn.Parameter(start)

    @property
    def laws(self) -> frozenset[Law]:  # type: ignore[override]
        """The laws of `TopK` and continuity; symmetry without bias and groups."""
        laws = laws_of_choice(self) | {Law.CONTINUOUS}
        return laws | {Law.SYMMETRIC} if Law.EQUIVARIANT in laws else laws

    @property
    def epsilon(self) -> Float[Tensor, ""]:
        """The width ε of the band as a tensor, with a gradient if it is learnable."""
        if self.theta is not None:
            return F.softplus(self.theta)
        return torch.tensor(self.fixed_epsilon, dtype=torch.float64)

    def band_width(self, selection: Scores) -> float | Tensor:
        """ε in the dtype of the scores; a fixed one stays a number, which no device waits for."""
        return self.fixed_epsilon if self.theta is None else self.epsilon.to(selection)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """The choice and the band."""
        band = "learnable" if self.theta is not None else self.fixed_epsilon
        return f"{super().extra_repr()}, epsilon={band}"


class SmoothTopK(BandGate):
    """Top-k with every expert less than ε below the threshold partly in: continuous in the scores.

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
        """s(u), with the experts of other groups lowered first."""
        if self.detach_ramp:
            selection = selection.detach()
        epsilon = self.band_width(selection)
        if self.groups is not None:
            selection = lower_groups(selection, self.groups, epsilon, self.a, self.b)
        return self._ramp(selection, self.k, epsilon, self.k_max)

    def _ramp(self, selection: Scores, k: int, epsilon: float | Tensor, k_max: int | None) -> Share:
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
