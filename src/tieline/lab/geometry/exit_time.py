"""First time at which a random walk of a router's input, dx = σ dB, leaves the top-k cell of x0.

r_ij = (z_i - z_j) / ‖σᵀ(w_i - w_j)‖ is the distance of the start to a face in units of noise.

Only scores are simulated: z moves by L dB, where L Lᵀ is the covariance W σ σᵀ Wᵀ without the
common shift, which changes no choice. A step draws rank(L) <= min(D, E - 1) normals for every D.

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
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import special
from torch import Tensor

from tieline.core.errors import ParameterError, ShapeError, TraceError, require
from tieline.core.numerics import one_thread
from tieline.core.ranking import stable_topk
from tieline.core.text import layer_label
from tieline.lab.geometry.ties import Bias, Scores, Weight, affine_scores, check_router
from tieline.measure.boundary import Real
from tieline.measure.distance import expert_distances
from tieline.trace.record import LayerTrace

__all__ = [
    "ExitBounds",
    "ExitCurve",
    "Exits",
    "FlipTimes",
    "TopKCell",
    "check_noise",
    "exit_bounds",
    "exit_curve",
    "exit_orders",
    "face_exit",
    "face_quantile",
    "normalised_distances",
    "sample_exits",
    "score_flip_times",
    "top_k_cell",
    "trace_flip_times",
    "two_face_exit",
]

Noise = Real | Float[Tensor, "dim dim"]  # σ, a positive number or an invertible matrix

PATHS_AT_ONCE = 4096
"""Paths simulated together, so that their distances to a dozen faces fit into the cache."""

REACH_IN_DEVIATIONS = 6.5
"""Faces beyond this many √t are ignored; they are hit with probability 8e-11."""


@dataclass(frozen=True, eq=False)
class TopKCell:
    """The top-k cell of one input, in the coordinates of its noise."""

    scores: Float[Tensor, " experts"]  # z at the start, (E,)
    # L, change of the scores per unit of each noise coordinate, (E, q)
    pull: Float[Tensor, "experts q"]
    faces: Int[Tensor, "faces 2"]  # pairs (i, j) of a chosen expert and one that is not, (F, 2)
    distances: Float[Tensor, " faces"]  # r_ij of each face, (F,)
    # inward unit normal of each face in noise coordinates, (F, q)
    normals: Float[Tensor, "faces q"]


@dataclass(frozen=True, eq=False)
class ExitCurve:
    """Probability of having left the cell by the end of each step."""

    times: Float[Tensor, " steps"]  # t, ascending
    value: Float[Tensor, " steps"]  # with bridges between the steps
    stderr: Float[Tensor, " steps"]  # standard error of `value` over paths
    naive: Float[Tensor, " steps"]  # share of paths that were outside at some step: too low
    paths: int  # number of paths


@dataclass(frozen=True, eq=False)
class Exits:
    """Time, face and scores at the first exit of each simulated path."""

    time: Float[Tensor, " paths"]  # when a path left; infinite where it had not by the horizon
    face: Int[Tensor, " paths"]  # which face of the cell it left through; -1 where it had not left
    # scores at the exit up to a common shift; not a number where it had not left
    scores: Float[Tensor, "paths experts"]
    horizon: Real  # last time of the simulation
    cell: TopKCell  # the cell


def normalised_distances(
    x: Float[Tensor, "tokens dim"], W: Weight, b: Bias, k: int, sigma: Noise = 1.0
) -> Float[Tensor, "tokens k rest"]:
    """r_ij = (z_i - z_j) / ‖σᵀ(w_i - w_j)‖, i the chosen experts by rank, j the others by rank.

    Infinite where experts i and j have the same weight and never change places.
    """
    weight, bias = check_router(W, b, k)
    noise = weight @ check_noise(sigma, weight)
    ranked = stable_topk(affine_scores(x, weight, bias), len(weight))
    rise = ranked.values[:, :k, None] - ranked.values[:, None, k:]
    noise_lengths = expert_distances(noise)[
        ranked.indices[:, :k, None], ranked.indices[:, None, k:]
    ]
    return torch.where(rise == 0, 0.0, rise / noise_lengths)


def top_k_cell(
    scores: Float[Tensor, " experts"], k: int, W: Weight, sigma: Noise = 1.0
) -> TopKCell:
    """Build the top-k cell of a token from its scores, under noise σ of its input.

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
    left_vectors, values, _ = torch.linalg.svd(noise, full_matrices=False)
    pull = (left_vectors * values)[:, values > 1e-13 * values[0]]
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

    Averages exit probabilities instead of 0 or 1 per path: the same expectation with less variance.
    A drift changes the distribution of the steps but not that of the bridges between them.

    `drift` is the speed away from each face, μ_ij/‖σᵀ(w_i - w_j)‖; none by default.
    """
    check_simulation_sizes(horizon, steps, paths)
    speed = torch.zeros_like(cell.distances) if drift is None else drift.double()
    require(
        speed.shape == cell.distances.shape,
        f"{len(speed)} drifts, {len(cell.distances)} faces",
        ShapeError,
    )
    nearest = cell.distances + horizon * speed.clamp(max=0)
    reachable = nearest <= REACH_IN_DEVIATIONS * math.sqrt(horizon)
    start, directions = cell.distances[reachable], _normals_in_their_span(cell.normals[reachable])
    moves = speed[reachable] * (horizon / steps)
    generator = torch.Generator().manual_seed(seed)
    total, square, outside = (torch.zeros(steps, dtype=torch.float64) for _ in range(3))
    for batch in path_batch_sizes(paths):
        walk = _simulate_survival(
            start, directions, moves, batch, horizon / steps, steps, generator
        )
        survival, inside = (torch.stack(column) for column in zip(*walk, strict=True))
        total += survival.sum(dim=1)
        square += survival.square().sum(dim=1)
        outside += batch - inside.sum(dim=1)
    mean = total / paths
    spread = (square / paths - mean.square()).clamp(min=0) / max(1, paths - 1)
    times = torch.arange(1, steps + 1, dtype=torch.float64) * (horizon / steps)
    return ExitCurve(times, 1 - mean, spread.sqrt(), outside / paths, paths)


def sample_exits(
    cell: TopKCell, horizon: Real, steps: int = 16, paths: int = 10_000, seed: int = 0
) -> Exits:
    """Simulate the first exit of each path before the horizon: time, face and scores.

    Bridges of different faces are taken as independent within a step; `exit_curve` measures the
    same probability with less noise. Arguments as for `exit_curve`.
    """
    check_simulation_sizes(horizon, steps, paths)
    generator = torch.Generator().manual_seed(seed)
    simulated = [
        _simulate_exits(cell, horizon, steps, batch, generator) for batch in path_batch_sizes(paths)
    ]
    time, face, position = (torch.cat(column) for column in zip(*simulated, strict=True))
    return Exits(time, face, cell.scores + position @ cell.pull.T, horizon, cell)


def exit_orders(exits: Exits, epsilon: Real) -> Int[Tensor, " left"]:
    """Order of the tie at each exit, at tolerance ε: #{i : |z_i - level| < ε} - 1.

    The level is the common score of the two experts of the face. Other paths are left out.
    """
    require(epsilon > 0, f"need epsilon > 0, got {epsilon}")
    exited = exits.face >= 0
    scores, pair = exits.scores[exited], exits.cell.faces[exits.face[exited]]
    level = scores.gather(1, pair).mean(dim=1, keepdim=True)
    return ((scores - level).abs() < epsilon).sum(dim=1) - 1


def path_batch_sizes(paths: int) -> Iterator[int]:
    """Yield the number of paths in each batch."""
    for begin in range(0, paths, PATHS_AT_ONCE):
        yield min(PATHS_AT_ONCE, paths - begin)


def check_noise(sigma: Noise, weight: Weight) -> Float[Tensor, "dim dim"]:
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


def check_simulation_sizes(horizon: Real, steps: int, paths: int) -> None:
    """Raise unless the simulation has a positive horizon, steps and two paths."""
    require(horizon > 0 and math.isfinite(horizon), f"need a finite horizon > 0, got {horizon=}")
    require(steps >= 1 and paths >= 2, f"need steps >= 1 and paths >= 2, got {steps=}, {paths=}")


def _normals_in_their_span(normals: Float[Tensor, "faces q"]) -> Float[Tensor, "faces thin"]:
    """Express the normals in a basis of their span, so that a step draws min(F, q) numbers."""
    if normals.shape[0] >= normals.shape[1]:
        return normals
    left_vectors, values, _ = torch.linalg.svd(normals, full_matrices=False)
    return left_vectors * values


def _simulate_survival(
    start: Tensor,
    directions: Tensor,
    moves: Tensor,
    paths: int,
    dt: Real,
    steps: int,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each path's survival probability after every step, and whether it is inside."""
    faces, dim = directions.shape
    y = start[:, None].expand(faces, paths).clone()
    survival = torch.ones(paths, dtype=torch.float64)
    inside = torch.ones(paths, dtype=torch.bool)
    noise, next_y, hit = (
        torch.empty(dim, paths, dtype=torch.float64),
        torch.empty_like(y),
        y.clone(),
    )
    directions, moves = directions * math.sqrt(dt), moves[:, None]
    for _ in range(steps):
        torch.addmm(y + moves, directions, noise.normal_(generator=generator), out=next_y)
        torch.mul(y, next_y, out=hit).mul_(-2 / dt).exp_().clamp_(max=1)
        survival = survival * hit.neg_().add_(1).prod(dim=0)
        inside = inside & (next_y > 0).all(dim=0)
        y, next_y = next_y, y
        yield survival, inside


def _simulate_exits(
    cell: TopKCell, horizon: Real, steps: int, paths: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return time, face and noise coordinates of the first exit of each path."""
    dt, dim = horizon / steps, cell.pull.shape[1]
    time = torch.full((paths,), torch.inf, dtype=torch.float64)
    face = torch.full((paths,), -1)
    position = torch.full((paths, dim), torch.nan, dtype=torch.float64)
    alive, begin = torch.arange(paths), torch.zeros(paths, dim, dtype=torch.float64)
    for m in range(steps):
        step = torch.randn(len(alive), dim, generator=generator, dtype=torch.float64)
        end = begin + math.sqrt(dt) * step
        hit_time, hit_face = _draw_first_hit(cell, begin, end, dt, generator)
        exited = hit_time < torch.inf
        rows = alive[exited]
        time[rows], face[rows] = m * dt + hit_time[exited], hit_face[exited]
        position[rows] = _draw_exit_position(
            cell, begin[exited], end[exited], hit_time[exited] / dt, hit_face[exited], dt, generator
        )
        alive, begin = alive[~exited], end[~exited]
    return time, face, position


def _draw_first_hit(
    cell: TopKCell, begin: Tensor, end: Tensor, dt: Real, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw the time within the step and the face of the first hit; infinity without a hit."""
    before = cell.distances + begin @ cell.normals.T
    after = cell.distances + end @ cell.normals.T
    chance = (-2 * before * after / dt).exp()
    hit = torch.rand(before.shape, generator=generator, dtype=torch.float64) < chance
    ratio = torch.full_like(before, torch.inf)
    ratio[hit] = _draw_inverse_gaussian(
        after[hit].abs() / before[hit], before[hit] ** 2 / dt, generator
    )
    first, face = ratio.min(dim=1)
    return torch.where(first < torch.inf, dt * first / (1 + first), torch.inf), face


def _draw_inverse_gaussian(
    inverse_mean: Tensor, shape: Tensor, generator: torch.Generator
) -> Float[Tensor, " samples"]:
    """Draw inverse Gaussian numbers; the mean may be infinite.

    x solves shape (x/mean - 1)² = v x, v the square of a normal; the smaller root is taken with
    probability 1 / (1 + x/mean).
    """
    draw = torch.randn(shape.shape, generator=generator, dtype=torch.float64).square()
    linear_term = 2 * shape * inverse_mean + draw
    small = 2 * shape / (linear_term + (draw.square() + 4 * shape * inverse_mean * draw).sqrt())
    take_smaller = torch.rand(shape.shape, generator=generator, dtype=torch.float64)
    take_smaller = take_smaller <= 1 / (1 + inverse_mean * small)
    return torch.where(take_smaller, small, 1 / (inverse_mean.square() * small))


def _draw_exit_position(
    cell: TopKCell,
    begin: Tensor,
    end: Tensor,
    share: Tensor,
    face: Tensor,
    dt: Real,
    generator: torch.Generator,
) -> Float[Tensor, "paths q"]:
    """Draw the bridge at that share of the step, conditioned on being on the face.

    Motion along the face is independent of the distance from it.
    """
    share = share[:, None]
    noise = torch.randn(begin.shape, generator=generator, dtype=torch.float64)
    point = begin + share * (end - begin) + (dt * share * (1 - share)).sqrt() * noise
    normal = cell.normals[face]
    above = cell.distances[face] + (point * normal).sum(dim=1)
    return point - above[:, None] * normal


COSINE_MARGIN = 1e-6
"""Smallest distance of the cosine of two faces from ±1."""


class ExitBounds(NamedTuple):
    """Limits of P(exit by t), one per time."""

    lower: Float[Tensor, "*times"]
    upper: Float[Tensor, "*times"]


@dataclass(frozen=True, eq=False)
class FlipTimes:
    """Distribution of the time until each token's first flip."""

    # t, ascending, in units in which the state moves by σ per unit of √t
    times: Float[Tensor, " times"]
    lower: Float[Tensor, "tokens times"]  # lower bound of P(flip by t), (T, times)
    value: Float[Tensor, "tokens times"]  # P(flip by t), simulated
    stderr: Float[Tensor, "tokens times"]  # standard error of `value`
    upper: Float[Tensor, "tokens times"]  # upper bound
    # r_min of each token; its flip time has a median of at most (r_min / .6745)²
    nearest: Float[Tensor, " tokens"]
    paths: int  # paths per token

    def median_bound(self) -> Float[Tensor, " tokens"]:
        """Upper bound of each token's median flip time: (r_min / .6745)²."""
        return face_quantile(self.nearest, 0.5)


def face_exit(
    r: Float[Tensor, "*#shape"], t: Real | Float[Tensor, "*#shape"]
) -> Float[Tensor, "*all"]:
    """Probability 2 Φ̄(r/√t) that a face at distance r is hit by t (Paper 1, Prop. A.21)."""
    time = torch.as_tensor(t, dtype=torch.float64)
    if not (time >= 0).all():  # formatting a tensor would take longer than the check
        raise ParameterError(f"a time is >= 0, got {t}")
    require(bool((r >= 0).all()), "a distance to a face is >= 0: the start must be in the cell")
    return torch.special.erfc(r.double() / (2 * time).sqrt()).where(time > 0, 0.0)


def face_quantile(
    r: Float[Tensor, "*#shape"], p: Real | Float[Tensor, "*#shape"]
) -> Float[Tensor, "*all"]:
    """Time (r / Φ⁻¹(1 - p/2))² by which a face at distance r is hit with probability p."""
    share = torch.as_tensor(p, dtype=torch.float64)
    require(bool(((share > 0) & (share < 1)).all()), f"need 0 < p < 1, got {p}")
    return (r.double() / torch.special.ndtri(share / 2)).square()


def exit_bounds(r: Float[Tensor, "*batch faces"], times: Float[Tensor, " times"]) -> ExitBounds:
    """Bounds 2 Φ̄(r_min/√t) <= P(exit by t) <= Σ 2 Φ̄(r_ij/√t), (*batch, times) (Thm 5.1)."""
    hit = face_exit(r.double()[..., None, :], times.double()[:, None])
    return ExitBounds(hit.amax(dim=-1), hit.sum(dim=-1).clamp(max=1))


def two_face_exit(r1: Real, r2: Real, cosine: Real, t: Real) -> float:
    """Exact P(exit by t) through two faces; `cosine` is that of the angle of the inward normals.

    In the plane of the normals the cell is a wedge of angle α = π - arccos(cosine). With R, θ the
    polar coordinates of the start, ν = nπ/α and x = R²/4t,

        P(no exit) = √(2R²/πt) e^(-x) Σ_{n odd} sin(νθ)/n · (I_{(ν-1)/2}(x) + I_{(ν+1)/2}(x)).

    Orthogonal faces need no series: 1 - Π (1 - 2 Φ̄(r_i/√t)). Nearly parallel faces meet too far
    away for the series.
    """
    require(r1 > 0 and r2 > 0 and t > 0, f"need r1, r2, t > 0, got {r1=}, {r2=}, {t=}")
    require(
        abs(cosine) <= 1 - COSINE_MARGIN, f"need |cosine| <= 1 - {COSINE_MARGIN:g}, got {cosine=}"
    )
    survival = [math.erf(r / math.sqrt(2 * t)) for r in (r1, r2)]
    if cosine == 0:
        return 1 - survival[0] * survival[1]
    angle = math.pi - math.acos(cosine)
    along = (r2 - r1 * cosine) / math.sin(angle)
    radius, theta = math.hypot(r1, along), math.atan2(r1, along)
    x = radius**2 / (4 * t)
    # e^(-x) I_ν(x) falls like exp(-ν²/2x): beyond ν = √(80 x) + 60 it is zero in float64
    last = math.ceil(angle / math.pi * (math.sqrt(80 * x) + 60))
    odd = np.arange(1, 2 * last + 2, 2)
    order = odd * math.pi / angle
    bessel = special.ive((order - 1) / 2, x) + special.ive((order + 1) / 2, x)
    series = math.fsum(np.sin(order * theta) / odd * bessel)
    return 1 - math.sqrt(2 * radius**2 / (math.pi * t)) * series


def score_flip_times(
    scores: Scores,
    k: int,
    W: Weight,
    horizon: Real,
    *,
    sigma: Noise = 1.0,
    steps: int = 16,
    paths: int = 2000,
    seed: int = 0,
) -> FlipTimes:
    """P(flip by t) at `steps` times up to the horizon, for each token.

    Args:
        scores: (T, E) scores z = W x + b of the unperturbed states, none of them a tie.
        k: number of experts chosen.
        W: router weight.
        horizon: last time.
        sigma: noise of the state per unit of √t, invertible.
        steps: number of times.
        paths: paths per token.
        seed: of the generator; all tokens share the noise, which sharpens their comparison.
    """
    require(len(scores) > 0, "flip times need a token, got none")
    with one_thread():
        cells = [top_k_cell(token, k, W, sigma) for token in scores]
        curves = [exit_curve(cell, horizon, steps, paths, seed) for cell in cells]
        bounds = [exit_bounds(cell.distances, curves[0].times) for cell in cells]
    return FlipTimes(
        curves[0].times,
        torch.stack([bound.lower for bound in bounds]),
        torch.stack([curve.value for curve in curves]),
        torch.stack([curve.stderr for curve in curves]),
        torch.stack([bound.upper for bound in bounds]),
        torch.stack([cell.distances.min() for cell in cells]),
        paths,
    )


def trace_flip_times(
    layer: LayerTrace,
    W: Weight,
    horizon: Real,
    *,
    tokens: int = 256,
    sigma: Noise = 1.0,
    steps: int = 16,
    paths: int = 2000,
    seed: int = 0,
) -> FlipTimes:
    """`score_flip_times` of the first `tokens` tokens of a recorded layer, exact ties left out.

    The layer must have scores affine in its input, all E ranks kept, and no groups; W is the weight
    of its router. Other arguments as for `score_flip_times`.
    """
    facts, scores, label = layer.facts, layer.scores, layer_label(layer.name)
    require(facts.affine, f"{label}: scores that are not affine have no flat faces", TraceError)
    require(facts.n_groups == 1, f"{label}: {facts.n_groups} groups are no top-k", TraceError)
    ranks = 0 if scores is None else scores.shape[1]
    require(
        scores is not None and ranks == facts.n_experts,
        f"{label}: needs all {facts.n_experts} ranks, the trace keeps {ranks}",
        TraceError,
    )
    assert scores is not None
    by_expert = torch.zeros(scores.shape, dtype=torch.float64)
    by_expert.scatter_(1, layer.experts.long(), scores.double())
    clear = scores[:, facts.k - 1] > scores[:, facts.k]
    start_scores = by_expert[clear][:tokens]
    return score_flip_times(
        start_scores, facts.k, W, horizon, sigma=sigma, steps=steps, paths=paths, seed=seed
    )
