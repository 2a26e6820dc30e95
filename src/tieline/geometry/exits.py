"""Where Brownian paths leave a top-k cell: the time, the face and the order of the exit point.

    sample_exits    first hit of a face by each path, with the scores there
    exit_orders     number of experts within ε of the tie where a path left, less one

Paper 1, Thm 5.1: a path leaves through an order-1 tie almost surely. At a tolerance ε > 0 a share
of the exits that is proportional to ε is within ε of a tie of order 2 or more.

Inside a step every face is met by a bridge of its own. With s = τ/(Δt - τ), the time τ at which a
bridge from y to y' meets the face has s ~ inverse Gaussian of mean y/|y'| and shape y²/Δt, exactly.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import require
from tieline.geometry.diffusion import TopKCell, batches, check_run
from tieline.geometry.kinds import Real

__all__ = ["Exits", "exit_orders", "sample_exits"]


@dataclass(frozen=True, eq=False)
class Exits:
    """The first exits of some paths.

    Attributes:
        time: when a path left; infinite where it had not by the horizon.
        face: which face of the cell it left through; -1 where it had not left.
        scores: scores at the exit up to a common shift; not a number where it had not left.
        horizon: last time of the simulation.
        cell: the cell.
    """

    time: Float[Tensor, " paths"]
    face: Int[Tensor, " paths"]
    scores: Float[Tensor, "paths experts"]
    horizon: Real
    cell: TopKCell


def sample_exits(
    cell: TopKCell, horizon: Real, steps: int = 16, paths: int = 10_000, seed: int = 0
) -> Exits:
    """Time, face and scores of the first exit of each path before the horizon.

    Faces that are not orthogonal are treated as if their bridges were independent within a step;
    `exit_curve` measures the same probability with less noise.

    Args:
        cell: from `top_k_cell`.
        horizon: last time.
        steps: number of steps.
        paths: number of paths.
        seed: of the generator.
    """
    check_run(horizon, steps, paths)
    generator = torch.Generator().manual_seed(seed)
    parts = [_one_batch(cell, horizon, steps, batch, generator) for batch in batches(paths)]
    time, face, place = (torch.cat(column) for column in zip(*parts, strict=True))
    return Exits(time, face, cell.scores + place @ cell.pull.T, horizon, cell)


def exit_orders(exits: Exits, eps: Real) -> Int[Tensor, " left"]:
    """Order at tolerance ε of each exit that happened: #{i : |z_i - level| < ε} - 1.

    The level is that of the two experts of the face, which tie there up to rounding.
    """
    require(eps > 0, f"need eps > 0, got {eps}")
    left = exits.face >= 0
    scores, pair = exits.scores[left], exits.cell.faces[exits.face[left]]
    level = scores.gather(1, pair).mean(dim=1, keepdim=True)
    return ((scores - level).abs() < eps).sum(dim=1) - 1


def _one_batch(
    cell: TopKCell, horizon: Real, steps: int, paths: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    dt, width = horizon / steps, cell.pull.shape[1]
    time = torch.full((paths,), torch.inf, dtype=torch.float64)
    face = torch.full((paths,), -1)
    place = torch.full((paths, width), torch.nan, dtype=torch.float64)
    alive, here = torch.arange(paths), torch.zeros(paths, width, dtype=torch.float64)
    for m in range(steps):
        step = torch.randn(len(alive), width, generator=generator, dtype=torch.float64)
        there = here + math.sqrt(dt) * step
        when, which = _first_hit(cell, here, there, dt, generator)
        out = when < torch.inf
        rows = alive[out]
        time[rows], face[rows] = m * dt + when[out], which[out]
        place[rows] = _at_the_face(
            cell, here[out], there[out], when[out] / dt, which[out], dt, generator
        )
        alive, here = alive[~out], there[~out]
    return time, face, place


def _first_hit(
    cell: TopKCell, here: Tensor, there: Tensor, dt: Real, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Time within the step and face of the first hit; infinite where there is none."""
    before = cell.distances + here @ cell.normals.T
    after = cell.distances + there @ cell.normals.T
    chance = (-2 * before * after / dt).exp()
    hit = torch.rand(before.shape, generator=generator, dtype=torch.float64) < chance
    ratio = torch.full_like(before, torch.inf)
    ratio[hit] = _inverse_gaussian(after[hit].abs() / before[hit], before[hit] ** 2 / dt, generator)
    first, which = ratio.min(dim=1)
    return torch.where(first < torch.inf, dt * first / (1 + first), torch.inf), which


def _inverse_gaussian(
    inverse_mean: Tensor, shape: Tensor, generator: torch.Generator
) -> Float[Tensor, " samples"]:
    """Inverse Gaussian numbers, in a form that holds for an infinite mean as well.

    x solves shape (x/mean - 1)² = v x, v the square of a normal: of the two roots the smaller with
    probability 1 / (1 + x/mean).
    """
    draw = torch.randn(shape.shape, generator=generator, dtype=torch.float64).square()
    lean = 2 * shape * inverse_mean + draw
    small = 2 * shape / (lean + (draw.square() + 4 * shape * inverse_mean * draw).sqrt())
    keep = torch.rand(shape.shape, generator=generator, dtype=torch.float64)
    keep = keep <= 1 / (1 + inverse_mean * small)
    return torch.where(keep, small, 1 / (inverse_mean.square() * small))


def _at_the_face(
    cell: TopKCell,
    here: Tensor,
    there: Tensor,
    share: Tensor,
    face: Tensor,
    dt: Real,
    generator: torch.Generator,
) -> Float[Tensor, "paths q"]:
    """Point of the bridge at that share of the step, given that it is on the face then.

    What moves along the face is independent of the distance to it.
    """
    share = share[:, None]
    noise = torch.randn(here.shape, generator=generator, dtype=torch.float64)
    point = here + share * (there - here) + (dt * share * (1 - share)).sqrt() * noise
    normal = cell.normals[face]
    above = cell.distances[face] + (point * normal).sum(dim=1)
    return point - above[:, None] * normal
