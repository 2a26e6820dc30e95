"""Tokens at the walls of a routed layer, and what first and second order make of them.

A softened token uses the experts of ranks k and k + 1, the second with the share a. With ℓ(a) the
change of the loss of its sequence,

    ℓ(a) ≈ a ℓ'(0) + a² c,      c = (ℓ(a*) - a* ℓ'(0)) / a*².

`slope_parts` sums this over a density at gap zero, which gives the slope at width 0;
`change_parts` takes each token at its own gap, which gives the change at a width in this sample.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.analysis.jumps import recorded_choice, swapped_choice
from tieline.lab.limits.temperature_limit import margin_constant
from tieline.lab.on_model.soft_choice import soft_share
from tieline.lab.on_model.soften_records import SoftLayer
from tieline.models.router_output import Choice, RouterOutput, padded_choice
from tieline.trace.record import LayerTrace

LN2 = math.log(2)
MOMENTS = {"softmax": (LN2, LN2 - 1 / 2, LN2 - 5 / 8), "projection": (1 / 4, 1 / 12, 1 / 32)}
"""M₁, M₂, M₃ of the share of the second expert."""
MOST_MISSED = 0.02
"""Largest part of ∫ a(u) du beyond the near tokens with which a width is still judged by them."""


class Walls(NamedTuple):
    """Near tokens of a layer: places, gaps, norms of gradient and jump, ℓ'(0), c where known."""

    tokens: Int[Tensor, " near"]
    gaps: Float[Tensor, " near"]
    gradient: Float[Tensor, " near"]
    jump: Float[Tensor, " near"]
    first: Float[Tensor, " near"]
    bend: Float[Tensor, " near"]
    exact: Int[Tensor, " exact"]

    @property
    def drawn(self) -> float:
        """Near tokens that each one with a known bend stands for."""
        return len(self.tokens) / max(1, len(self.exact))


def slope_parts(walls: Walls, form: str) -> tuple[Tensor, Tensor]:
    """Parts of each near token in the slope: by the gradient, and by the curvature.

    Weighed by (4 · 1{g <= w} - 1{g <= 2w}) / 2w, whose mean estimates a density at zero with an
    error of order w². Curvature is known of a random part of the tokens, which stand for all.
    """
    width = walls.gaps.max() / 2
    weight = (4.0 * (walls.gaps <= width) - 1.0) / (2 * width)
    first, second, _ = MOMENTS[form]
    return first * walls.first * weight, second * walls.drawn * walls.bend * weight


def shell_constant(record: SoftLayer, layer: LayerTrace, walls: Walls) -> float | None:
    """C_sh of Theorem 4.5; the largest gradient and jump seen stand for 2 (B_Y + B_f) and 2 B_f."""
    alpha = record.tail.exponent.value
    if alpha is None:
        return None
    gaps = layer.gap
    C = margin_constant(gaps, alpha, least=max(1, min(100, len(gaps) // 20))).value or 0.0
    steepest = (walls.gradient.max() * walls.jump.max()).item()
    if record.form == "softmax":
        return steepest * (layer.facts.n_experts - 1) * C * math.gamma(alpha + 1)
    return steepest * C / 2


def path_choice(
    layer: LayerTrace, tokens: Int[Tensor, " some"], router: nn.Module, share: float
) -> Choice:
    """The choice part of the way to the swap: k + 1 experts, the last two sharing a seat.

    Weights go in a straight line from the recorded ones to those of `swapped_choice`.
    """
    k = layer.facts.k
    before, after = recorded_choice(layer, tokens), swapped_choice(layer, tokens, router)
    kept = (1 - share) * before.weights[:, : k - 1] + share * after.weights[:, : k - 1]
    pair = [(1 - share) * before.weights[:, k - 1 : k], share * after.weights[:, k - 1 : k]]
    ids = torch.cat([before.ids[:, :k], after.ids[:, k - 1 : k]], dim=1)
    return Choice(torch.cat([kept, *pair], dim=1), ids)


def rule_at(rows: Int[Tensor, " rows"], choice: Choice) -> Callable[[RouterOutput], Choice]:
    """The router's own choice, except at these places."""

    def rule(output: RouterOutput) -> Choice:
        weights, ids = padded_choice(Choice(output.weights, output.ids), choice.ids.shape[1])
        at = rows.to(ids.device)
        return Choice(
            weights.index_copy(0, at, choice.weights.to(weights)),
            ids.index_copy(0, at, choice.ids.to(ids)),
        )

    return rule


def change_parts(walls: Walls, form: str, width: float) -> Float[Tensor, " near"] | None:
    """A ℓ'(0) + a² c of each near token at its own gap; None if more tokens matter at this width.

    The mean over all tokens estimates the change of the loss at this width on the same sample, so
    that its difference from the measured one is free of the luck of which tokens are near a wall.
    """
    last = walls.gaps.max() / width
    beyond = torch.log1p(torch.exp(-last)) / LN2 if form == "softmax" else (1 - last).clamp(min=0)
    if beyond > MOST_MISSED:
        return None
    share = soft_share(walls.gaps, width, 1 if form == "softmax" else 2)
    return share * walls.first + share.square() * walls.drawn * walls.bend
