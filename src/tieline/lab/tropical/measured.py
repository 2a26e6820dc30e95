"""What a model's own router inputs meet, beside the formulas for Gaussian routers.

    measured_layer    coalitions along real hidden states, saturation and centring of one router

Switches of coalition are counted exactly on the straight lines between the inputs of two tokens:
neighbours in a text, and any two (Paper 3, Thm. 4.26, corrected). Saturation is the distance of the
inputs from the ties, as they are and after their mean is taken away (Def. 5.5, Remark 5.10).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tieline.lab.tropical.affine import captured_inputs
from tieline.lab.tropical.collapse import Centring, ball_meets_tie, centring_of_layer
from tieline.lab.tropical.manifold import Crossings, crossings, token_pairs
from tieline.trace.record import LayerTrace, RoutingTrace

PAIRS = 512
"""Pairs of tokens of each kind."""


@dataclass(frozen=True)
class RouterMeasurement:
    """One router of a model on its own inputs.

    Attributes:
        name: name of the router.
        status: "ok", or why its walls are not known.
        neighbours: lines between neighbouring tokens of a text.
        any_two: lines between any two tokens.
        centring: saturation as is, with centred inputs, and by a router bias.
        ball: R/‖μ‖, root mean square distance of the inputs from their mean over the norm of that.
        meets_tie: chance that a ball of that size meets a tie of a Gaussian router.
    """

    name: str
    status: str = "ok"
    neighbours: Crossings | None = None
    any_two: Crossings | None = None
    centring: Centring | None = None
    ball: float | None = None
    meets_tie: float | None = None


def measured_layer(
    trace: RoutingTrace, layer: LayerTrace, weight: Any, bias: Any = None, seed: int = 0
) -> RouterMeasurement:
    """Measure one layer with affine scores, captured with keep="inputs".

    Args:
        trace: the routing.
        layer: one of its layers.
        weight: (E, D) matrix of its router.
        bias: (E,) bias of its router, None for none.
        seed: of the pairs.
    """
    inputs = captured_inputs(layer).double().numpy()
    near = token_pairs(trace, PAIRS, "neighbours", seed)
    far = token_pairs(trace, PAIRS, "any", seed)
    mean = inputs.mean(axis=0)
    spread = float(np.sqrt(((inputs - mean) ** 2).sum(axis=1).mean()))
    size = float(np.linalg.norm(mean))
    sine = min(1.0, spread / size) if size > 0 else 1.0
    facts = layer.facts
    return RouterMeasurement(
        name=layer.name,
        neighbours=crossings(layer, weight, near, bias),
        any_two=crossings(layer, weight, far, bias),
        centring=centring_of_layer(layer, weight, bias),
        ball=spread / size if size > 0 else None,
        meets_tie=ball_meets_tie(facts.n_experts, facts.k, inputs.shape[1], sine),
    )
