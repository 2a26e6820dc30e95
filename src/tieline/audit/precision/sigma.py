"""The noise σ of the logits that changes the experts of a given share of tokens.

The share grows with σ, from f_gap(0) σ / √π at first (Def. 6.3), so halving on
logarithms finds it.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from tieline.audit.precision.records import SigmaForFlips
from tieline.geometry.flips import flip_limits
from tieline.geometry.sections import reachable
from tieline.geometry.units import LogitView, logit_view
from tieline.numerics import one_thread
from tieline.trace.record import LayerTrace

__all__ = ["sigma_for_flips", "solve_increasing"]

STEPS, CLOSE = 24, 1e-3
LARGEST = 1e6


def sigma_for_flips(
    layers: Mapping[str, Sequence[LayerTrace]], share: float = 0.01
) -> SigmaForFlips:
    """σ at which `share` of tokens flip, in each layer and in the mean over layers.

    Args:
        layers: routing of the same tokens by layer, in parts.
        share: the share.
    """
    views = {name: [(part, logit_view(part)) for part in parts] for name, parts in layers.items()}
    with one_thread():
        alone = {
            name: solve_increasing(lambda s, p=parts: _rate(p, s), share)
            for name, parts in views.items()
        }
        known = [sigma for sigma in alone.values() if sigma is not None]
        start = sum(known) / len(known) if known else 0.01

        def mean(sigma: float) -> float:
            return sum(_rate(parts, sigma) for parts in views.values()) / len(views)

        return SigmaForFlips(share, solve_increasing(mean, share, start), alone)


def solve_increasing(
    rate: Callable[[float], float], target: float, start: float = 0.01
) -> float | None:
    """X > 0 with rate(x) = target for an increasing rate; None where none up to 10^6 has.

    Bracketed by factors of four, then halved on logarithms.
    """
    low = high = start
    while rate(high) < target:
        low, high = high, 4 * high
        if high > LARGEST:
            return None
    while rate(low) >= target:
        low, high = low / 4, low
        if low < 1 / LARGEST:
            return None
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rate(middle) < target else (low, middle)
        if high / low < 1 + CLOSE:
            break
    return math.sqrt(low * high)


def _rate(parts: Sequence[tuple[LayerTrace, LogitView]], sigma: float) -> float:
    """Share of tokens that flip within their groups."""
    flips = tokens = 0.0
    for layer, view in parts:
        beyond = max(0, reachable(layer) - view.scores.shape[1])
        low = flip_limits(view.scores, layer.facts.k, view.slope * sigma, beyond).low
        flips, tokens = flips + low.sum().item(), tokens + len(low)
    return flips / tokens
