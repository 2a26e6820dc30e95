"""Soft forms of a router's hard choice, and the change of the loss they make near ties.

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
    at_least_float32,
    combine_rule,
    renormalises_weights,
)
from tieline.models.smoothed_model import smooth_, unsmooth_
from tieline.models.smoothed_router import RouterSmoothing, router_smoothing
from tieline.routing.smooth_gates import Columns
from tieline.trace.record import LayerTrace

NEGLIGIBLE_SHARE = 1e-9
"""Shares below this are dropped: they do not change the output in float32."""


@dataclass
class TemperatureSmoothing(RouterSmoothing):
    """Softmax of the selection scores at the temperature τ, which `epsilon` holds."""

    divided: bool = False

    def columns(self, selection: Selection) -> Columns:
        """Return the experts of non-negligible share, the largest first."""
        scores = at_least_float32(selection.scores)
        # a router that divides weights e^z by their sum multiplies the share by e^z once more
        power = 1 / self.epsilon - (1.0 if self.divided else 0.0)
        share = (scores.double() * power).softmax(dim=-1)
        share = share.masked_fill(share < NEGLIGIBLE_SHARE, 0.0).to(scores)
        slots = int((share > 0).sum(dim=-1).max()) if len(share) else 1
        ids = stable_topk(share, slots).indices
        return Columns(share.gather(1, ids), ids)


@contextmanager
def softened_routers(model: nn.Module, widths: Mapping[str, float]) -> Iterator[None]:
    """Context manager in which the given routers make a soft choice.

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
                setattr(router, HANDLER, TemperatureSmoothing(**values, divided=divided))
        yield
    finally:
        unsmooth_(model)


def soft_share(gaps: Tensor, width: float, k: int) -> Tensor:
    """Return the second expert's share at a gap: softmax of two for k = 1, else a ramp."""
    if k == 1:
        return torch.sigmoid(-gaps / width)
    return (0.5 - gaps / (2 * width)).clamp(min=0)


LN2 = math.log(2)


MOMENTS = {"softmax": (LN2, LN2 - 1 / 2, LN2 - 5 / 8), "projection": (1 / 4, 1 / 12, 1 / 32)}
"""Moments M₁, M₂, M₃ of the second expert's share, M_j = ∫ a(u)^j du."""


MAX_UNCOVERED = 0.02
"""Largest part of ∫ a(u) du beyond the near tokens for which `change_parts` is still valid."""


class WallTokens(NamedTuple):
    """Tokens near a tie (wall) in a layer.

    Attributes:
        tokens: places of the tokens in the trace.
        gaps: gap of each.
        gradient: norm of the loss's gradient in the layer's output.
        jump: norm of the jump Δ.
        first: ℓ'(0).
        bend: c where it was computed, else 0.
        exact: indices of the tokens with a computed c.
    """

    tokens: Int[Tensor, " near"]
    gaps: Float[Tensor, " near"]
    gradient: Float[Tensor, " near"]
    jump: Float[Tensor, " near"]
    first: Float[Tensor, " near"]
    bend: Float[Tensor, " near"]
    exact: Int[Tensor, " exact"]

    @property
    def drawn(self) -> float:
        """Number of near tokens per token with a computed `bend`."""
        return len(self.tokens) / max(1, len(self.exact))


def slope_parts(walls: WallTokens, form: str) -> tuple[Tensor, Tensor]:
    """Return each near token's part of the slope: by the gradient, and by the curvature.

    Weighed by (4 · 1{g <= w} - 1{g <= 2w}) / 2w, whose mean estimates a density at zero with an
    error of order w². Curvature is computed for a random subset, which represents all tokens.
    """
    width = walls.gaps.max() / 2
    weight = (4.0 * (walls.gaps <= width) - 1.0) / (2 * width)
    first, second, _ = MOMENTS[form]
    return first * walls.first * weight, second * walls.drawn * walls.bend * weight


def interpolated_choice(
    layer: LayerTrace, tokens: Int[Tensor, " some"], router: nn.Module, share: float
) -> Choice:
    """Return a choice of k + 1 experts, the last two sharing a seat with shares 1 - a and a.

    Weights are interpolated between the recorded choice and `swapped_choice`; a is `share`.
    """
    k = layer.facts.k
    recorded, swapped = recorded_choice(layer, tokens), swapped_choice(layer, tokens, router)
    shared_weights = (1 - share) * recorded.weights[:, : k - 1] + share * swapped.weights[
        :, : k - 1
    ]
    pair = [(1 - share) * recorded.weights[:, k - 1 : k], share * swapped.weights[:, k - 1 : k]]
    ids = torch.cat([recorded.ids[:, :k], swapped.ids[:, k - 1 : k]], dim=1)
    return Choice(torch.cat([shared_weights, *pair], dim=1), ids)


def choice_override(rows: Int[Tensor, " rows"], choice: Choice) -> Callable[[RouterOutput], Choice]:
    """Return a rule that replaces the router's choice at the given rows."""

    def rule(output: RouterOutput) -> Choice:
        weights, ids = padded_choice(Choice(output.weights, output.ids), choice.ids.shape[1])
        positions = rows.to(ids.device)
        return Choice(
            weights.index_copy(0, positions, choice.weights.to(weights)),
            ids.index_copy(0, positions, choice.ids.to(ids)),
        )

    return rule


def change_parts(walls: WallTokens, form: str, width: float) -> Float[Tensor, " near"] | None:
    """Return a ℓ'(0) + a² c of each near token at its gap; None if farther tokens matter too.

    Its mean over all tokens estimates the change of the loss at this width on the same sample; the
    difference from the measured change is thus free of sampling error in the near tokens.
    """
    last = walls.gaps.max() / width
    beyond = torch.log1p(torch.exp(-last)) / LN2 if form == "softmax" else (1 - last).clamp(min=0)
    if beyond > MAX_UNCOVERED:
        return None
    share = soft_share(walls.gaps, width, 1 if form == "softmax" else 2)
    return share * walls.first + share.square() * walls.drawn * walls.bend
