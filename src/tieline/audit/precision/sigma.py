"""The noise σ of the logits that changes the experts of a given share of tokens.

The share grows with σ, from f_gap(0) σ / √π at first (Def. 6.3), so lines
between logarithms find it in a few steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from tieline.audit.precision.predicted import chance_by_noise
from tieline.audit.precision.records import SigmaForFlips
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
    """The x > 0 with rate(x) = target, for an increasing rate; None where none up to 10^6 has.

    Bracketed by factors of four, then by straight lines between logarithms, on which a rate that
    grows like a power of x is found at once; every third step halves the bracket instead.
    """
    low = high = (start, rate(start))
    while high[1] < target:
        low, high = high, (4 * high[0], rate(4 * high[0]))
        if high[0] > LARGEST:
            return None
    while low[1] >= target:
        low, high = (low[0] / 4, rate(low[0] / 4)), low
        if low[0] < 1 / LARGEST:
            return None
    middle = high
    for step in range(STEPS):
        place = 0.5 if step % 3 == 2 or low[1] <= 0 else _on_line(low[1], high[1], target)
        x = low[0] * (high[0] / low[0]) ** place
        middle = (x, rate(x))
        low, high = (middle, high) if middle[1] < target else (low, middle)
        if abs(middle[1] / target - 1) < CLOSE or high[0] / low[0] < 1 + CLOSE:
            break
    return middle[0]


def _on_line(low: float, high: float, target: float) -> float:
    """Where a straight line between the logarithms meets the target, as a share of the way."""
    if high <= low:
        return 0.5
    return min(0.99, max(0.01, math.log(target / low) / math.log(high / low)))


def _rate(parts: Sequence[tuple[LayerTrace, LogitView]], sigma: float) -> float:
    """Predicted share of tokens that flip; its upper limit where it is an interval."""
    flips = tokens = 0.0
    for layer, view in parts:
        high = chance_by_noise(layer, view, sigma * torch.ones_like(view.scores)).high
        flips, tokens = flips + high.sum().item(), tokens + len(high)
    return flips / tokens
