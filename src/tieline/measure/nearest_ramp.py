"""The ramp whose noisy output is nearest to that of top-k, and the flips that a ramp saves."""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from torch import Tensor

from tieline.core.errors import require

RAMP_REACH = 8.0
"""Number of standard deviations at which integrals over the noise of a ramp end."""


MEAN_ABSOLUTE = math.sqrt(2 / math.pi)
"""E|n| of standard normal noise."""


def squared_ramp_change(noise: float, width: float) -> float:
    """Return ∫ (r(s + n) - r(s))² ds for the straight ramp r from 0 to 1 over |s| <= w/2, n > 0.

    n² (w - n/3) / w² for n <= w, else n - w/3; s is the signed margin of two experts. A step has
    w = 0. `tieline.lab.limits.continuity_cost` has the law for every ramp.
    """
    if noise <= width:
        return noise**2 * (width - noise / 3) / width**2 if width > 0 else 0.0
    return noise - width / 3


def flip_reduction(scale: float) -> float:
    """Return S_hard / S: how many times cheaper flips are with projected top-k of ε = c σ.

    Args:
        scale: c, the width of the band over the standard deviation of the margin's noise.
    """
    width = 2 * scale

    def integrand(x: float) -> float:
        return squared_ramp_change(x, width) * MEAN_ABSOLUTE * math.exp(-x * x / 2)

    knee = min(RAMP_REACH, width)
    intervals = ((0, knee), (knee, RAMP_REACH))
    return MEAN_ABSOLUTE / sum(quad(integrand, *ends)[0] for ends in intervals)


class NearestRamp(NamedTuple):
    """The straight ramp whose noisy output is nearest to that of top-k without noise.

    Attributes:
        epsilon: ε of `ProjectedTopK`; the ramp is straight over ±ε.
        share: mean square distance to the original as a share of the cost of flips.
        least: smallest share that any gate can have, E|n - n'| / (2 E|n|).
    """

    epsilon: float
    share: float
    least: float


def nearest_ramp(noise: Float[Tensor, " tokens"]) -> NearestRamp:
    """Choose the ε whose noisy output is nearest to top-k without noise, in mean square.

    E‖y_r(s + n) - y_top-k(s)‖² = f J² E g(n), with t = (n + ε)/(2ε) and

        g(n) = ⅔ε (t³ + (1 - t)³) for |n| <= ε,   |n| - ε/3 beyond;   |n| for top-k itself.

    The lower bound for every gate is ½ f J² E|n - n'| (docs/continuity.md). For normal noise this
    is 1/√2 of the cost of flips, and ε = 1.5 σ comes within 1 % of it.

    Args:
        noise: changes of the margin by noise, for example of the tokens of a calibration text.
    """
    values = noise.detach().double().flatten().cpu().numpy()
    size = float(abs(values).mean()) if len(values) else 0.0
    require(0 < size < math.inf, f"need noise that is finite and not zero, got a mean of {size}")
    ordered, n = np.sort(values), len(values)
    below = (1 + np.arange(n - 1)) / n
    least = float((below * (1 - below) * np.diff(ordered)).sum()) / size

    def share(log_scale: float) -> float:
        epsilon = size * math.exp(log_scale)
        inside = np.clip((values + epsilon) / (2 * epsilon), 0.0, 1.0)
        ramp = 2 * epsilon / 3 * (inside**3 + (1 - inside) ** 3)
        return float((ramp + np.maximum(abs(values) - epsilon, 0.0)).mean()) / size

    best: Any = minimize_scalar(share, bounds=(math.log(0.02), math.log(50.0)), method="bounded")
    return NearestRamp(size * math.exp(best.x), float(best.fun), least)
