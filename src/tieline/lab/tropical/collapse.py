"""Distances of data from a router's ties, the effect of centring, and measurements on a model.

The paper concludes from the cap's area that ‖μ‖^{-(d-1)} coalitions stay in reach. But ties are
walls and not points, so the chance to meet one falls only like R/‖μ‖, in any dimension. A
shared expert adds to the output, not to the scores, and so leaves every wall where it is; a router
bias -Wμ, or centred input, has the effect that the paper ascribes to it.

Switches of coalition are counted exactly on the straight lines between the inputs of two tokens:
neighbours in a text, and any two (Thm. 4.26, corrected).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import special

from tieline.core.errors import require
from tieline.lab.tropical.affine import (
    AffineRouter,
    as_points,
    as_router,
    captured_inputs,
    chosen_experts,
)
from tieline.lab.tropical.capacity import wall_density
from tieline.lab.tropical.curve_pieces import Crossings, crossings, token_pairs
from tieline.measure.distance import expert_distances, nearest_tie
from tieline.trace.record import LayerTrace, RoutingTrace


@dataclass(frozen=True)
class Saturation:
    """Distances of given data from the router's ties."""

    tokens: int  # number of points
    smallest: float  # smallest distance to a tie; the data are ε-saturated for every ε below it
    median: float  # median distance to a tie
    relative: float  # median distance / root mean square distance of the data from their mean
    coalitions: int  # different coalitions chosen
    commonest: float  # share of the commonest one; 1 if the router is constant on the data
    effective: float  # exp(entropy of the coalitions), the effective number of coalitions
    offset: float  # ‖mean‖ / root mean square distance from the mean, 0 for centred data


@dataclass(frozen=True)
class Centring:
    """Saturation of the same data and router in four variants."""

    as_is: Saturation  # scores W x + b
    centred: Saturation  # scores W (x - μ) + b, μ the mean of the data
    router_bias: Saturation  # scores W x + b - W μ: the same choice as `centred`, by a bias
    shared_expert: Saturation  # an expert added to every output; same scores as `as_is`


def cap_fraction(dim: int, sine: float) -> float:
    """Share ½ I_{sin²θ}((d-1)/2, ½) of S^{d-1} that a ball spans, sin θ = R/‖μ‖ (Prop. 5.6)."""
    _check_ball(dim, sine)
    return 0.5 * float(special.betainc((dim - 1) / 2, 0.5, sine**2))


def cap_constant(dim: int) -> float:
    """C(d) = 1 / ((d-1) B((d-1)/2, ½)); a cap is C(d) (R/‖μ‖)^{d-1} of S^{d-1} (Prop. 5.6)."""
    _check_ball(dim, 0.0)
    log_beta = float(special.betaln((dim - 1) / 2, 0.5))
    return math.exp(-log_beta) / (dim - 1)


def walls_in_ball(n_experts: int, k: int, dim: int, sine: float) -> float:
    """Expected number of walls that the ball of radius R around μ reaches, ρ I_{s²}(½, (d-1)/2).

    For a Gaussian router without bias, d >= 2, 0 <= s = R/‖μ‖ = `sine` <= 1. It falls like s for
    every d, where the paper has s^{d-1}.
    """
    _check_ball(dim, sine)
    return wall_density(n_experts, k) * float(special.betainc(0.5, (dim - 1) / 2, sine**2))


def ball_meets_tie(n_experts: int, k: int, dim: int, sine: float) -> float:
    """Probability 1 - exp(-`walls_in_ball`) that the ball of radius R around μ meets a tie.

    Treats walls as independent: exact to first order in s, and within 5 % of simulation for N =
    16, k = 4, d = 3 and 32 up to probabilities of 0.7.
    """
    return -math.expm1(-walls_in_ball(n_experts, k, dim, sine))


def saturation(points: Any, weight: Any, bias: Any, k: int) -> Saturation:
    """Measure distances to ties and use of coalitions on (n, d) inputs, 1 <= k < N (Def. 5.5)."""
    router = as_router(weight, bias, k)
    require(k < len(router.bias), f"with k = N = {k} nothing ties: need k < N")
    data = as_points(points, router.weight.shape[1], 1)
    return _saturation_of_data(data, router)


def centring(points: Any, weight: Any, bias: Any, k: int) -> Centring:
    """Compare centred input, a router bias and a shared expert on (n, d) inputs, n >= 2."""
    router = as_router(weight, bias, k)
    require(k < len(router.bias), f"with k = N = {k} nothing ties: need k < N")
    data = as_points(points, router.weight.shape[1], 2)
    mean = data.mean(axis=0)
    biased_router = router._replace(bias=router.bias - router.weight @ mean)
    as_is = _saturation_of_data(data, router)
    return Centring(
        as_is=as_is,
        centred=_saturation_of_data(data - mean, router),
        router_bias=_saturation_of_data(data, biased_router),
        shared_expert=_saturation_of_data(data, router),
    )


def centring_of_layer(layer: LayerTrace, weight: Any, bias: Any = None) -> Centring:
    """`centring` of the router inputs that a trace keeps (captured with keep="inputs")."""
    return centring(captured_inputs(layer), weight, bias, layer.facts.k)


def _saturation_of_data(data: np.ndarray, router: AffineRouter) -> Saturation:
    """Distances to ties and entropy of coalitions of the data under a router."""
    scores = router.scores(data)
    apart = expert_distances(torch.from_numpy(router.weight))
    distance = nearest_tie(torch.from_numpy(scores), router.k, apart).distance.numpy()
    rows = np.packbits(chosen_experts(scores, router.k), axis=1)
    shares = np.unique(rows, axis=0, return_counts=True)[1] / len(rows)
    mean = data.mean(axis=0)
    spread = math.sqrt(float(((data - mean) ** 2).sum(axis=1).mean()))
    return Saturation(
        tokens=len(data),
        smallest=float(distance.min()),
        median=float(np.median(distance)),
        relative=float(np.median(distance)) / spread if spread > 0 else math.inf,
        coalitions=len(shares),
        commonest=float(shares.max()),
        effective=float(np.exp(-(shares * np.log(shares)).sum())),
        offset=float(np.linalg.norm(mean)) / spread if spread > 0 else math.inf,
    )


def _check_ball(dim: int, sine: float) -> None:
    """Raise unless d >= 2 and 0 <= R/‖μ‖ <= 1."""
    require(dim >= 2, f"need a dimension d >= 2, got {dim}")
    require(0 <= sine <= 1, f"need 0 <= R/‖μ‖ <= 1, got {sine}")


PAIRS = 512
"""Pairs of tokens of each kind."""


@dataclass(frozen=True)
class RouterMeasurement:
    """Measurements of one router of a model on its own inputs.

    Attributes:
        name: name of the router.
        status: "ok", or the reason why its walls are unknown.
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


def measure_router(
    trace: RoutingTrace, layer: LayerTrace, weight: Any, bias: Any = None, seed: int = 0
) -> RouterMeasurement:
    """Measure one layer with affine scores, captured with keep="inputs".

    `weight` (E, D) and `bias` (E,) are those of its router; `seed` draws the pairs of tokens.
    """
    inputs = captured_inputs(layer).double().numpy()
    neighbours = token_pairs(trace, PAIRS, "neighbours", seed)
    any_two = token_pairs(trace, PAIRS, "any", seed)
    mean = inputs.mean(axis=0)
    spread = float(np.sqrt(((inputs - mean) ** 2).sum(axis=1).mean()))
    size = float(np.linalg.norm(mean))
    sine = min(1.0, spread / size) if size > 0 else 1.0
    facts = layer.facts
    return RouterMeasurement(
        name=layer.name,
        neighbours=crossings(layer, weight, neighbours, bias),
        any_two=crossings(layer, weight, any_two, bias),
        centring=centring_of_layer(layer, weight, bias),
        ball=spread / size if size > 0 else None,
        meets_tie=ball_meets_tie(facts.n_experts, facts.k, inputs.shape[1], sine),
    )
