"""The soft form of a router's hard choice, for as long as a block of code runs.

    k = 1    softmax(c / τ) over all experts, each with the weight that it would have if chosen
    k > 1    the projection of `ProjectedTopK` with a band of width ε

As τ or ε goes to 0 both become the hard choice (Paper 0, section 2; Paper 1, section 6).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from tieline.core.errors import require
from tieline.core.ranking import stable_topk
from tieline.models.families import HANDLER
from tieline.models.router_rule import (
    Selection,
    at_least_single,
    combine_rule,
    renormalises_weights,
)
from tieline.models.smoothed_model import smooth_, unsmooth_
from tieline.models.smoothed_router import RouterSmoothing, router_smoothing
from tieline.routing.smooth_gates import Columns

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
