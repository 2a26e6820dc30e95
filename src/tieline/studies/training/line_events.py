"""Every place on a line through input space where a layer could jump.

On a line p + s n the scores of a linear router are affine in s, z_e(s) = z_e(p) + s w_e·n. The
weights of top-k can jump only where two scores are equal, those of smooth top-k only there or where
two scores are ε apart (the band's lower end, or the threshold's owner changes). All these places
are known in closed form:

    s = (z_j - z_i + c) / ((w_i - w_j)·n),    c ∈ {0, ε, -ε}

so a line is checked as a whole by looking at both sides of each, and not on a grid that a narrow
jump falls through.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require

__all__ = ["LineJumps", "event_offsets", "largest_jump"]

ROWS = 512


@dataclass(frozen=True)
class LineJumps:
    """The largest change of the output across any event of a line.

    Attributes:
        events: number of events on the line.
        largest: largest ‖f(s + h/2) - f(s - h/2)‖ over them.
        relative: the same over ‖f‖ there.
        at: offset s of it; not a number without events.
        step: h.
    """

    events: int
    largest: float
    relative: float
    at: float
    step: float


def event_offsets(
    scores: Float[Tensor, " experts"],
    rates: Float[Tensor, " experts"],
    reach: float,
    epsilon: float = 0.0,
) -> Float[Tensor, " events"]:
    """Offsets s in [-reach, reach] at which two scores are equal or ε apart, ascending.

    Args:
        scores: z at s = 0, in float64.
        rates: dz/ds.
        reach: largest offset.
        epsilon: width of the band; 0 for equal scores alone.
    """
    require(reach > 0 and epsilon >= 0, f"need reach > 0 and ε >= 0, got {reach=}, {epsilon=}")
    first, second = torch.triu_indices(len(scores), len(scores), 1)
    apart, slope = scores[second] - scores[first], rates[first] - rates[second]
    shifts = (0.0,) if epsilon == 0 else (0.0, epsilon, -epsilon)
    found = torch.cat([(apart + shift) / slope for shift in shifts])
    return found[found.abs() <= reach].sort().values  # parallel scores give no finite offset


def largest_jump(
    layer: Callable[[Tensor], Tensor],
    point: Float[Tensor, " width"],
    normal: Float[Tensor, " width"],
    events: Float[Tensor, " events"],
    step: float = 1e-9,
) -> LineJumps:
    """The largest change of f over a step across any of the events.

    Args:
        layer: f, from (rows, width) to (rows, out), in float64.
        point: p.
        normal: n, a unit vector.
        events: from `event_offsets`.
        step: h.
    """
    best = LineJumps(len(events), 0.0, 0.0, torch.nan, step)
    for part in events.split(ROWS) if len(events) else ():
        with torch.no_grad():
            ahead, behind = (
                layer(point + (part[:, None] + side * step / 2) * normal) for side in (1, -1)
            )
        change = (ahead - behind).norm(dim=1)
        at = int(change.argmax())
        if change[at] > best.largest:
            size = behind[at].norm().item()
            largest = change[at].item()
            best = LineJumps(len(events), largest, largest / size, part[at].item(), step)
    return best
