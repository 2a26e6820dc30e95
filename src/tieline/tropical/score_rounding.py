"""Flips of normal scores that are rounded to a format: f_gap(0) weighed by the grid's step."""

import math

import numpy as np
import torch
from scipy import special

from tieline.errors import require
from tieline.geometry.rounding import grid_step

__all__ = ["gaussian_rounding_flips"]

PER_UNIT = 1024
"""Midpoints per unit of score: the step's jumps, at powers of two, fall between them."""


def gaussian_rounding_flips(
    n_experts: int, k: int, precision: str = "bf16", spread: float = 1.0
) -> float:
    """P(flip) = ¼ ∫ g(t) q(σt)/σ dt for independent N(0, σ²) scores rounded once to a format.

    g(t) = E!/((k-1)!(E-k-1)!) φ(t)² Φ̄(t)^(k-1) Φ(t)^(E-k-1) is the density of a zero gap at
    threshold t, which integrates to f_gap(0), and q the format's step there: two scores on one grid
    tie with probability q/2 per unit of gap density, and half of the ties fall to the wrong expert
    (Def. 7.3 of docs/definitions.md). First order in q f_gap(0), which overstates by that much.

    Args:
        n_experts: number of experts E.
        k: experts chosen, 1 <= k < E.
        precision: a floating-point format of `geometry.rounding.PRECISIONS`.
        spread: σ; the steps are relative, so it matters only up to a factor of two.
    """
    require(1 <= k < n_experts, f"need 1 <= k < E, got {k=}, E={n_experts}")
    require(spread > 0 and math.isfinite(spread), f"need a spread > 0, got {spread}")
    require(
        not precision.startswith("int"), f"{precision} has no step of its own: scaled per token"
    )
    t = (np.arange(-12 * PER_UNIT, 12 * PER_UNIT) + 0.5) / PER_UNIT
    ways = special.gammaln([n_experts + 1, k, n_experts - k]) @ np.array([1.0, -1.0, -1.0])
    below, above = special.log_ndtr(t), special.log_ndtr(-t)
    log_g = ways - t**2 - math.log(2 * math.pi) + (k - 1) * above + (n_experts - k - 1) * below
    step = grid_step(torch.from_numpy(spread * t)[None], precision)[0].numpy() / spread
    return float((np.exp(log_g) * step).sum() / PER_UNIT / 4)
