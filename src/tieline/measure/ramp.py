r"""What a straight ramp between two experts does to the cost of flips under normal noise.

With s the signed margin of two experts and r the ramp from 0 to 1 over |s| <= w/2,

    ∫ (r(s + n) - r(s))² ds  =  n² (w - n/3) / w²   for 0 <= n <= w,      n - w/3   beyond

A step has w = 0. `tieline.lab.limits.continuity` has the law for every ramp.
"""

import math

from scipy.integrate import quad

__all__ = ["MEAN_ABSOLUTE", "REACH", "flip_reduction", "straight_change"]

MEAN_ABSOLUTE = math.sqrt(2 / math.pi)
"""E|n| of standard normal noise."""

REACH = 8.0
"""Standard deviations at which integrals over the noise end."""


def straight_change(noise: float, width: float) -> float:
    """∫ (r(s + n) - r(s))² ds of the straight ramp of a width, n > 0."""
    if noise <= width:
        return noise**2 * (width - noise / 3) / width**2 if width > 0 else 0.0
    return noise - width / 3


def flip_reduction(scale: float) -> float:
    """S_hard / S: how many times cheaper flips are by projected top-k with ε = c σ.

    Args:
        scale: c, the width of the band over the standard deviation of the margin's noise.
    """
    width = 2 * scale

    def weighted(x: float) -> float:
        return straight_change(x, width) * MEAN_ABSOLUTE * math.exp(-x * x / 2)

    knee = min(REACH, width)
    return MEAN_ABSOLUTE / sum(quad(weighted, *ends)[0] for ends in ((0, knee), (knee, REACH)))
