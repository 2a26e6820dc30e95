"""The soft form of a router's hard choice, and what first and second order make of it at walls.

    k = 1    softmax(c / τ) over all experts, each with the weight that it would have if chosen
    k > 1    the projection of `ProjectedTopK` with a band of width ε

As τ or ε goes to 0 both become the hard choice (Paper 0, section 2; Paper 1, section 6).

A softened token uses the experts of ranks k and k + 1, the second with the share a. With ℓ(a) the
change of the loss of its sequence,

    ℓ(a) ≈ a ℓ'(0) + a² c,      c = (ℓ(a*) - a* ℓ'(0)) / a*².

`slope_parts` sums this over a density at gap zero, which gives the slope at width 0;
`change_parts` takes each token at its own gap, which gives the change at a width in this sample.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.analysis.jumps import recorded_choice, swapped_choice
from tieline.core.errors import require
from tieline.core.ranking import stable_topk
from tieline.models.families import HANDLER
from tieline.models.router_output import Choice, RouterOutput, padded_choice
from tieline.models.router_rule import (
    Selection,
    at_least_single,
    combine_rule,
    renormalises_weights,
)
from tieline.models.smoothed_model import smooth_, unsmooth_
from tieline.models.smoothed_router import RouterSmoothing, router_smoothing
from tieline.routing.smooth_gates import Columns
from tieline.trace.record import LayerTrace

NEGLIGIBLE = 1e-9
"""Shares below are left out: float32 cannot tell the output from that with them."""


@dataclass
class Tempered(RouterSmoothing):
    """Softmax of the selection scores at the temperature τ, which `epsilon` holds."""

    divided: bool = False

    def columns(self, selection: Selection) -> Columns:
        """Return all experts of a share that matters, the largest first."""
        scores = at_least_single(selection.scores)
        # a router that divides weights e^z by their sum multiplies the share by e^z once more
        power = 1 / self.epsilon - (1.0 if self.divided else 0.0)
        share = (scores.double() * power).softmax(dim=-1)
        share = share.masked_fill(share < NEGLIGIBLE, 0.0).to(scores)
        slots = int((share > 0).sum(dim=-1).max()) if len(share) else 1
        ids = stable_topk(share, slots).indices
        return Columns(share.gather(1, ids), ids)


@contextmanager
def softened_routers(model: nn.Module, widths: Mapping[str, float]) -> Iterator[None]:
    """Inside the block, these routers make a soft choice.

    Args:
        model: a Mixture-of-Experts model of transformers that is not smoothed.
        widths: τ > 0 of routers that choose one expert, ε > 0 of the others, by name.
    """
    require(all(width > 0 for width in widths.values()), f"widths must be > 0, got {widths}")
    smooth_(model, epsilon=dict(widths), layers=list(widths), gate="projected")
    try:
        for name in widths:
            router = model.get_submodule(name)
            handler = router_smoothing(router)
            if handler is not None and handler.k == 1:
                values = {f.name: getattr(handler, f.name) for f in fields(handler)}
                softmax = combine_rule(handler.family, router).startswith("softmax")
                divided = renormalises_weights(handler.family, router) and softmax
                setattr(router, HANDLER, Tempered(**values, divided=divided))
        yield
    finally:
        unsmooth_(model)


def soft_share(gaps: Tensor, width: float, k: int) -> Tensor:
    """Share of the second of two experts with this gap: softmax for k = 1, else the ramp."""
    if k == 1:
        return torch.sigmoid(-gaps / width)
    return (0.5 - gaps / (2 * width)).clamp(min=0)


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


def path_choice(
    layer: LayerTrace, tokens: Int[Tensor, " some"], router: nn.Module, share: float
) -> Choice:
    """The choice part of the way to the swap: k + 1 experts, the last two sharing a seat.

    Weights go in a straight line from the recorded ones to those of `swapped_choice`.
    """
    k = layer.facts.k
    recorded, swapped = recorded_choice(layer, tokens), swapped_choice(layer, tokens, router)
    shared_weights = (1 - share) * recorded.weights[:, : k - 1] + share * swapped.weights[
        :, : k - 1
    ]
    pair = [(1 - share) * recorded.weights[:, k - 1 : k], share * swapped.weights[:, k - 1 : k]]
    ids = torch.cat([recorded.ids[:, :k], swapped.ids[:, k - 1 : k]], dim=1)
    return Choice(torch.cat([shared_weights, *pair], dim=1), ids)


def choice_at_rows(rows: Int[Tensor, " rows"], choice: Choice) -> Callable[[RouterOutput], Choice]:
    """The router's own choice, except at these places."""

    def rule(output: RouterOutput) -> Choice:
        weights, ids = padded_choice(Choice(output.weights, output.ids), choice.ids.shape[1])
        positions = rows.to(ids.device)
        return Choice(
            weights.index_copy(0, positions, choice.weights.to(weights)),
            ids.index_copy(0, positions, choice.ids.to(ids)),
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
