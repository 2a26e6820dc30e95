"""Random perturbation of a router's input: dx = σ dB from x0 until the chosen set changes.

    top_k_cell             the faces of the cell of x0 and r_ij = (z_i - z_j)/‖σᵀ(w_i - w_j)‖
    normalised_distances   r_ij of many tokens, (T, k, E - k)                      Paper 1, Thm 5.1
    exit_curve             P(exit by t) by simulation, with Brownian bridges between the steps
    sample_exits           time and face of the first exit of each path, with the scores there
    exit_orders            number of experts within ε of the tie where a path left, less one

Only scores are simulated: z moves by L dB with L Lᵀ the covariance W σ σᵀ Wᵀ without the common
shift, which changes no choice. A step costs rank(L) <= min(D, E - 1) normals for every D.

Between two steps at distances y, y' from a face a path has hit it with probability exp(-2 y y'/Δt).
Multiplying the probabilities of not hitting is exact for one face and for orthogonal ones at any
number of steps; for other angles the error vanishes with the steps. Without bridges ("naive") a
path is seen only at the steps: 16 of them give .256 instead of .317. The time τ at which a bridge
from y to y' meets the face has s = τ/(Δt - τ) ~ inverse Gaussian of mean y/|y'| and shape y²/Δt.

Paper 1, Thm 5.1: a path leaves through an order-1 tie almost surely. At a tolerance ε > 0 a share
of the exits proportional to ε is within ε of a tie of order 2 or more.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import stable_topk
from tieline.lab.geometry.ties import affine_scores, check_router
from tieline.measure.boundary import Real
from tieline.measure.distance import expert_distances

__all__ = [
    "ExitCurve",
    "Exits",
    "TopKCell",
    "check_noise",
    "exit_curve",
    "exit_orders",
    "normalised_distances",
    "sample_exits",
    "top_k_cell",
]

BATCH = 4096
"""Paths simulated together: their distances to a dozen faces stay in cache."""

OUT_OF_REACH = 6.5
"""Faces beyond this many √t are ignored; they are hit with probability 8e-11."""


@dataclass(frozen=True, eq=False)
class TopKCell:
    """The top-k cell of one start, in coordinates of its noise.

    Attributes:
        scores: z at the start, (E,).
        pull: L, what a unit of each noise coordinate does to the scores, (E, q).
        faces: pairs (i, j) of a chosen expert and one that is not, (F, 2).
        distances: r_ij of each face, (F,).
        normals: inward unit normal of each face in noise coordinates, (F, q).
    """

    scores: Float[Tensor, " experts"]
    pull: Float[Tensor, "experts q"]
    faces: Int[Tensor, "faces 2"]
    distances: Float[Tensor, " faces"]
    normals: Float[Tensor, "faces q"]


@dataclass(frozen=True, eq=False)
class ExitCurve:
    """P(exit by t) at the end of each step.

    Attributes:
        times: t, ascending.
        value: with bridges between the steps.
        stderr: standard error of `value` over paths.
        naive: share of paths that were outside at some step: too low.
        paths: number of paths.
    """

    times: Float[Tensor, " steps"]
    value: Float[Tensor, " steps"]
    stderr: Float[Tensor, " steps"]
    naive: Float[Tensor, " steps"]
    paths: int


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


def normalised_distances(
    x: Float[Tensor, "tokens dim"],
    W: Float[Tensor, "experts dim"],
    b: Float[Tensor, " experts"] | None,
    k: int,
    sigma: Real | Float[Tensor, "dim dim"] = 1.0,
) -> Float[Tensor, "tokens k rest"]:
    """r_ij = (z_i - z_j) / ‖σᵀ(w_i - w_j)‖, i the chosen experts by rank, j the others by rank.

    Infinite where experts i and j have the same weight and never change places.
    """
    weight, bias = check_router(W, b, k)
    noise = weight @ check_noise(sigma, weight)
    ranked = stable_topk(affine_scores(x, weight, bias), len(weight))
    rise = ranked.values[:, :k, None] - ranked.values[:, None, k:]
    apart = expert_distances(noise)[ranked.indices[:, :k, None], ranked.indices[:, None, k:]]
    return torch.where(rise == 0, 0.0, rise / apart)


def top_k_cell(
    scores: Float[Tensor, " experts"],
    k: int,
    W: Float[Tensor, "experts dim"],
    sigma: Real | Float[Tensor, "dim dim"] = 1.0,
) -> TopKCell:
    """The top-k cell of a token with these scores, under noise σ of its input.

    Args:
        scores: z = W x0 + b of the start, which must not lie on a boundary.
        k: number of experts chosen, 1 <= k < E.
        W: router weight.
        sigma: σ, an invertible matrix or a positive number.
    """
    weight, _ = check_router(W, None, k)
    start = scores.detach().double()
    require(len(start) == len(weight), f"{len(start)} scores, {len(weight)} experts", ShapeError)
    ranked = stable_topk(start, len(start))
    inner, outer = ranked.indices[:k], ranked.indices[k:]
    gap = (ranked.values[k - 1] - ranked.values[k]).item()
    require(
        gap > 0, f"the start lies on a boundary: experts {inner[-1]}, {outer[0]} have gap {gap}"
    )
    noise = (weight - weight.mean(dim=0)) @ check_noise(sigma, weight)
    left, values, _ = torch.linalg.svd(noise, full_matrices=False)
    pull = (left * values)[:, values > 1e-13 * values[0]]
    faces = torch.cartesian_prod(inner, outer)
    normals = pull[faces[:, 0]] - pull[faces[:, 1]]
    length = normals.norm(dim=1)
    # experts of equal weight never change places
    moves = length > 1e-13 * length.max()
    faces, normals, length = faces[moves], normals[moves], length[moves]
    distances = (start[faces[:, 0]] - start[faces[:, 1]]) / length
    return TopKCell(start, pull, faces, distances, normals / length[:, None])


def exit_curve(
    cell: TopKCell,
    horizon: Real,
    steps: int = 16,
    paths: int = 100_000,
    seed: int = 0,
    *,
    drift: Float[Tensor, " faces"] | None = None,
) -> ExitCurve:
    """P(exit by t) at t = horizon/steps, ..., horizon, as 1 - mean of Π (1 - exp(-2 y y'/Δt)).

    Averages probabilities instead of zeros and ones: the same expectation with less noise. A drift
    changes the law of the steps, not that of the bridges between them.

    Args:
        cell: from `top_k_cell`.
        horizon: last time.
        steps: number of steps.
        paths: number of paths.
        seed: of the generator.
        drift: speed away from each face, μ_ij/‖σᵀ(w_i - w_j)‖; none by default.
    """
    check_run(horizon, steps, paths)
    speed = torch.zeros_like(cell.distances) if drift is None else drift.double()
    require(
        speed.shape == cell.distances.shape,
        f"{len(speed)} drifts, {len(cell.distances)} faces",
        ShapeError,
    )
    nearest = cell.distances + horizon * speed.clamp(max=0)
    near = nearest <= OUT_OF_REACH * math.sqrt(horizon)
    start, directions = cell.distances[near], _in_span(cell.normals[near])
    moves = speed[near] * (horizon / steps)
    generator = torch.Generator().manual_seed(seed)
    total, square, outside = (torch.zeros(steps, dtype=torch.float64) for _ in range(3))
    for batch in batches(paths):
        walk = _survival(start, directions, moves, batch, horizon / steps, steps, generator)
        stay, inside = (torch.stack(column) for column in zip(*walk, strict=True))
        total += stay.sum(dim=1)
        square += stay.square().sum(dim=1)
        outside += batch - inside.sum(dim=1)
    mean = total / paths
    spread = (square / paths - mean.square()).clamp(min=0) / max(1, paths - 1)
    times = torch.arange(1, steps + 1, dtype=torch.float64) * (horizon / steps)
    return ExitCurve(times, 1 - mean, spread.sqrt(), outside / paths, paths)


def sample_exits(
    cell: TopKCell, horizon: Real, steps: int = 16, paths: int = 10_000, seed: int = 0
) -> Exits:
    """Time, face and scores of the first exit of each path before the horizon.

    Bridges of different faces are taken as independent within a step; `exit_curve` measures the
    same probability with less noise. Arguments as for `exit_curve`.
    """
    check_run(horizon, steps, paths)
    generator = torch.Generator().manual_seed(seed)
    simulated = [
        _simulate_batch(cell, horizon, steps, batch, generator) for batch in batches(paths)
    ]
    time, face, position = (torch.cat(column) for column in zip(*simulated, strict=True))
    return Exits(time, face, cell.scores + position @ cell.pull.T, horizon, cell)


def exit_orders(exits: Exits, epsilon: Real) -> Int[Tensor, " left"]:
    """Order at tolerance ε of each exit that happened: #{i : |z_i - level| < ε} - 1.

    The level is that of the two experts of the face, which tie there up to rounding.
    """
    require(epsilon > 0, f"need epsilon > 0, got {epsilon}")
    left = exits.face >= 0
    scores, pair = exits.scores[left], exits.cell.faces[exits.face[left]]
    level = scores.gather(1, pair).mean(dim=1, keepdim=True)
    return ((scores - level).abs() < epsilon).sum(dim=1) - 1


def batches(paths: int) -> Iterator[int]:
    """Yield the numbers of paths that are simulated together."""
    for begin in range(0, paths, BATCH):
        yield min(BATCH, paths - begin)


def check_noise(
    sigma: Real | Float[Tensor, "dim dim"], weight: Float[Tensor, "experts dim"]
) -> Float[Tensor, "dim dim"]:
    """Return σ as a matrix in float64; raise if it is singular."""
    dim = weight.shape[1]
    matrix = torch.as_tensor(sigma, dtype=torch.float64)
    if matrix.ndim == 0:
        require(bool(matrix != 0), f"sigma must be invertible, got {sigma}")
        return matrix * torch.eye(dim, dtype=torch.float64)
    require(matrix.shape == (dim, dim), f"{tuple(matrix.shape)=}, {dim=}", ShapeError)
    values = torch.linalg.svdvals(matrix)
    ratio = (values[-1] / values[0]).item() if values[0] > 0 else 0.0
    require(ratio > 1e-12, f"sigma must be invertible, its singular values have ratio {ratio:.1e}")
    return matrix


def check_run(horizon: Real, steps: int, paths: int) -> None:
    """Raise unless the simulation has a positive horizon, steps and two paths."""
    require(horizon > 0 and math.isfinite(horizon), f"need a finite horizon > 0, got {horizon=}")
    require(steps >= 1 and paths >= 2, f"need steps >= 1 and paths >= 2, got {steps=}, {paths=}")


def _in_span(normals: Float[Tensor, "faces q"]) -> Float[Tensor, "faces thin"]:
    """The normals in coordinates of the space they span, so that a step draws min(F, q) numbers."""
    if normals.shape[0] >= normals.shape[1]:
        return normals
    left, values, _ = torch.linalg.svd(normals, full_matrices=False)
    return left * values


def _survival(
    start: Tensor,
    directions: Tensor,
    moves: Tensor,
    paths: int,
    dt: Real,
    steps: int,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield after each step the survival probability of each path and whether it is inside."""
    faces, dim = directions.shape
    y = start[:, None].expand(faces, paths).clone()
    stay = torch.ones(paths, dtype=torch.float64)
    inside = torch.ones(paths, dtype=torch.bool)
    noise, moved, hit = torch.empty(dim, paths, dtype=torch.float64), torch.empty_like(y), y.clone()
    directions, moves = directions * math.sqrt(dt), moves[:, None]
    for _ in range(steps):
        torch.addmm(y + moves, directions, noise.normal_(generator=generator), out=moved)
        torch.mul(y, moved, out=hit).mul_(-2 / dt).exp_().clamp_(max=1)
        stay = stay * hit.neg_().add_(1).prod(dim=0)
        inside = inside & (moved > 0).all(dim=0)
        y, moved = moved, y
        yield stay, inside


def _simulate_batch(
    cell: TopKCell, horizon: Real, steps: int, paths: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Time, face and noise coordinates of the first exit of each path."""
    dt, dim = horizon / steps, cell.pull.shape[1]
    time = torch.full((paths,), torch.inf, dtype=torch.float64)
    face = torch.full((paths,), -1)
    position = torch.full((paths, dim), torch.nan, dtype=torch.float64)
    alive, here = torch.arange(paths), torch.zeros(paths, dim, dtype=torch.float64)
    for m in range(steps):
        step = torch.randn(len(alive), dim, generator=generator, dtype=torch.float64)
        there = here + math.sqrt(dt) * step
        when, which = _first_hit(cell, here, there, dt, generator)
        out = when < torch.inf
        rows = alive[out]
        time[rows], face[rows] = m * dt + when[out], which[out]
        position[rows] = _at_the_face(
            cell, here[out], there[out], when[out] / dt, which[out], dt, generator
        )
        alive, here = alive[~out], there[~out]
    return time, face, position


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
    """Draw inverse Gaussian numbers; the mean may be infinite.

    x solves shape (x/mean - 1)² = v x, v the square of a normal; the smaller root is taken with
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

    Motion along the face is independent of the distance to it.
    """
    share = share[:, None]
    noise = torch.randn(here.shape, generator=generator, dtype=torch.float64)
    point = here + share * (there - here) + (dt * share * (1 - share)).sqrt() * noise
    normal = cell.normals[face]
    above = cell.distances[face] + (point * normal).sum(dim=1)
    return point - above[:, None] * normal
