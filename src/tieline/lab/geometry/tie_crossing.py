"""The output of a layer along the normal of a routing boundary (Paper 1, Figure 1).

As h → 0 the difference tends to the height of the jump for a layer that jumps and to zero for a
continuous one, linearly in h if it is Lipschitz. `step_exponent` distinguishes them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import require
from tieline.core.numerics import log_grid
from tieline.lab.power_law import exponent
from tieline.measure.boundary import Real

__all__ = ["LineWalk", "StepDifferences", "difference_by_step", "step_exponent", "walk_across"]

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LineWalk:
    """Output of a layer along a line."""

    # signed distance from the tie, positive on the side the normal points to
    offsets: Float[Tensor, " steps"]
    outputs: Float[Tensor, "steps out"]  # f at each of them
    jump: float  # largest ‖difference‖ of neighbouring outputs
    jump_at: float  # middle of the two offsets where it is


@dataclass(frozen=True, eq=False)
class StepDifferences:
    """How far apart the outputs on the two sides of a tie are."""

    steps: Float[Tensor, " steps"]  # h, length of the step across the tie, ascending
    largest: Float[Tensor, " steps"]  # largest difference over the ties, for each step
    median: Float[Tensor, " steps"]  # median difference over the ties, for each step


def walk_across(
    layer: Layer,
    point: Float[Tensor, " dim"],
    normal: Float[Tensor, " dim"],
    reach: Real = 1.0,
    steps: int = 400,
) -> LineWalk:
    """f(p + s n) for `steps` values of s from -reach to reach (Figures 1a and 1b).

    Args:
        layer: f, from (rows, dim) to (rows, out).
        point: p, from `nearest_tie_point`.
        normal: n, a unit vector.
        reach: largest distance from the tie.
        steps: number of points; an even number has none on the tie itself.
    """
    require(reach > 0 and steps >= 2, f"need reach > 0 and steps >= 2, got {reach=}, {steps=}")
    offsets = torch.linspace(-reach, reach, steps, dtype=torch.float64)
    with torch.no_grad():
        outputs = layer((point + offsets[:, None] * normal).to(point.dtype)).double()
    rise = outputs.diff(dim=0).norm(dim=1)
    at = int(rise.argmax())
    middle = (offsets[at] + offsets[at + 1]).item() / 2
    return LineWalk(offsets, outputs, rise[at].item(), middle)


def difference_by_step(
    layer: Layer,
    points: Float[Tensor, "ties dim"],
    normals: Float[Tensor, "ties dim"],
    steps: Float[Tensor, " steps"] | None = None,
) -> StepDifferences:
    """Largest and median over ties of ‖f(p + h n/2) - f(p - h n/2)‖, for each h (Figure 1c).

    Args:
        layer: f, as for `walk_across`.
        points: ties, in float64: below 1e-7 a float32 input cannot tell the two sides apart.
        normals: unit normals.
        steps: h; 1e-9 to 1 by default.
    """
    grid = log_grid(1e-9, 1.0, 4) if steps is None else steps.double()
    require(bool((grid > 0).all()), f"a step is > 0, got {grid.min().item()}")
    rows = []
    with torch.no_grad():
        for h in grid.tolist():
            ahead, behind = layer(points + h / 2 * normals), layer(points - h / 2 * normals)
            rows.append((ahead.double() - behind.double()).norm(dim=1))
    differences = torch.stack(rows)
    return StepDifferences(grid, differences.amax(dim=1), differences.median(dim=1).values)


def step_exponent(differences: StepDifferences) -> float:
    """Slope of log(largest) against log(h) over the lower half of the steps.

    0 for a jump, 1 for a Lipschitz map, NaN where the output does not change at all.
    """
    half = max(2, len(differences.steps) // 2)
    largest = differences.largest[:half].tolist()
    return exponent(differences.steps[:half].tolist(), largest) if min(largest) > 0 else math.nan
