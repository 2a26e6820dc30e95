"""When a Brownian path leaves a top-k cell, and how long the tokens of a model keep their experts.

    face_exit           P(one face is hit by t) = 2 Φ̄(r/√t)                      Paper 1, Prop. A.21
    face_quantile       the time by which it is hit with probability p           Paper 1, Prop. A.21
    exit_bounds         2 Φ̄(r_min/√t) <= P(exit by t) <= Σ 2 Φ̄(r_ij/√t)          Paper 1, Thm 5.1
    two_face_exit       P(one of two faces is hit by t), any angle between them
    score_flip_times    P(flip by t) of each token from its scores and the router's weight
    trace_flip_times    the same for the tokens of a recorded layer

r is the distance of the start to a face in units of noise, r_ij = (z_i - z_j) / ‖σᵀ(w_i - w_j)‖.
Flip times are of a hidden state that moves by σ dB: a lower bound (Thm 5.1), a simulation with its
standard error, and the union bound per token and time.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy import special
from torch import Tensor

from tieline.core.errors import ParameterError, TraceError, require
from tieline.core.numerics import one_thread
from tieline.lab.geometry.diffusion import exit_curve, top_k_cell
from tieline.measure.boundary import Real
from tieline.trace.record import LayerTrace

__all__ = [
    "ExitBounds",
    "FlipTimes",
    "exit_bounds",
    "face_exit",
    "face_quantile",
    "score_flip_times",
    "trace_flip_times",
    "two_face_exit",
]

PARALLEL = 1e-6
"""Smallest distance of the cosine of two faces from ±1."""


class ExitBounds(NamedTuple):
    """Limits of P(exit by t), one per time."""

    lower: Float[Tensor, "*times"]
    upper: Float[Tensor, "*times"]


@dataclass(frozen=True, eq=False)
class FlipTimes:
    """Distribution of the time to the first flip of each token.

    Attributes:
        times: t, ascending, in units in which the state moves by σ per unit of √t.
        lower: lower bound of P(flip by t), (T, times).
        value: P(flip by t), simulated.
        stderr: standard error of `value`.
        upper: upper bound.
        nearest: r_min of each token; its flip time has a median of at most (r_min / .6745)².
        paths: paths per token.
    """

    times: Float[Tensor, " times"]
    lower: Float[Tensor, "tokens times"]
    value: Float[Tensor, "tokens times"]
    stderr: Float[Tensor, "tokens times"]
    upper: Float[Tensor, "tokens times"]
    nearest: Float[Tensor, " tokens"]
    paths: int

    def median_bound(self) -> Float[Tensor, " tokens"]:
        """Time by which each token has flipped with probability ½ or more: (r_min / .6745)²."""
        return face_quantile(self.nearest, 0.5)


def face_exit(
    r: Float[Tensor, "*#shape"], t: Real | Float[Tensor, "*#shape"]
) -> Float[Tensor, "*all"]:
    """2 Φ̄(r/√t) by the reflection principle; 0 at t = 0."""
    time = torch.as_tensor(t, dtype=torch.float64)
    if not (time >= 0).all():  # formatting a tensor would take longer than the check
        raise ParameterError(f"a time is >= 0, got {t}")
    require(bool((r >= 0).all()), "a distance to a face is >= 0: the start must be in the cell")
    return torch.special.erfc(r.double() / (2 * time).sqrt()).where(time > 0, 0.0)


def face_quantile(
    r: Float[Tensor, "*#shape"], p: Real | Float[Tensor, "*#shape"]
) -> Float[Tensor, "*all"]:
    """(r / Φ⁻¹(1 - p/2))²: the time by which one face is hit with probability p."""
    share = torch.as_tensor(p, dtype=torch.float64)
    require(bool(((share > 0) & (share < 1)).all()), f"need 0 < p < 1, got {p}")
    return (r.double() / torch.special.ndtri(share / 2)).square()


def exit_bounds(r: Float[Tensor, "*batch faces"], times: Float[Tensor, " times"]) -> ExitBounds:
    """Bounds of P(exit by t) at each time, (*batch, times): nearest face (Thm 5.1), union bound."""
    hit = face_exit(r.double()[..., None, :], times.double()[:, None])
    return ExitBounds(hit.amax(dim=-1), hit.sum(dim=-1).clamp(max=1))


def two_face_exit(r1: Real, r2: Real, cosine: Real, t: Real) -> float:
    """P(one of two faces is hit by t), exactly; `cosine` is that of the angle of inward normals.

    In the plane of the normals the cell is a wedge of angle α = π - arccos(cosine). With R, θ the
    polar coordinates of the start, ν = nπ/α and x = R²/4t,

        P(no exit) = √(2R²/πt) e^(-x) Σ_{n odd} sin(νθ)/n · (I_{(ν-1)/2}(x) + I_{(ν+1)/2}(x)).

    Orthogonal faces need no series: 1 - Π (1 - 2 Φ̄(r_i/√t)). Nearly parallel faces meet too far
    away for the series.
    """
    require(r1 > 0 and r2 > 0 and t > 0, f"need r1, r2, t > 0, got {r1=}, {r2=}, {t=}")
    require(abs(cosine) <= 1 - PARALLEL, f"need |cosine| <= 1 - {PARALLEL:g}, got {cosine=}")
    stay = [math.erf(r / math.sqrt(2 * t)) for r in (r1, r2)]
    if cosine == 0:
        return 1 - stay[0] * stay[1]
    angle = math.pi - math.acos(cosine)
    along = (r2 - r1 * cosine) / math.sin(angle)
    radius, theta = math.hypot(r1, along), math.atan2(r1, along)
    x = radius**2 / (4 * t)
    # e^(-x) I_ν(x) falls like exp(-ν²/2x): past ν = √(80 x) + 60 nothing is left in float64
    last = math.ceil(angle / math.pi * (math.sqrt(80 * x) + 60))
    odd = np.arange(1, 2 * last + 2, 2)
    order = odd * math.pi / angle
    bessel = special.ive((order - 1) / 2, x) + special.ive((order + 1) / 2, x)
    series = math.fsum(np.sin(order * theta) / odd * bessel)
    return 1 - math.sqrt(2 * radius**2 / (math.pi * t)) * series


def score_flip_times(
    scores: Float[Tensor, "tokens experts"],
    k: int,
    W: Float[Tensor, "experts dim"],
    horizon: Real,
    *,
    sigma: Real | Float[Tensor, "dim dim"] = 1.0,
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
    curves, lower, upper, nearest = [], [], [], []
    with one_thread():
        for row in scores:
            cell = top_k_cell(row, k, W, sigma)
            curve = exit_curve(cell, horizon, steps, paths, seed)
            bounds = exit_bounds(cell.distances, curve.times)
            curves.append(curve)
            lower.append(bounds.lower)
            upper.append(bounds.upper)
            nearest.append(cell.distances.min())
    return FlipTimes(
        curves[0].times,
        torch.stack(lower),
        torch.stack([curve.value for curve in curves]),
        torch.stack([curve.stderr for curve in curves]),
        torch.stack(upper),
        torch.stack(nearest),
        paths,
    )


def trace_flip_times(
    layer: LayerTrace,
    W: Float[Tensor, "experts dim"],
    horizon: Real,
    *,
    tokens: int = 256,
    sigma: Real | Float[Tensor, "dim dim"] = 1.0,
    steps: int = 16,
    paths: int = 2000,
    seed: int = 0,
) -> FlipTimes:
    """`score_flip_times` of the first `tokens` tokens of a recorded layer that are not ties.

    The layer must have scores affine in its input, all E ranks kept, and no groups; W is the weight
    of its router. Other arguments as for `score_flip_times`.
    """
    facts, scores = layer.facts, layer.scores
    require(
        facts.affine, f"{layer.name}: scores that are not affine have no flat faces", TraceError
    )
    require(facts.n_groups == 1, f"{layer.name}: {facts.n_groups} groups are no top-k", TraceError)
    ranks = 0 if scores is None else scores.shape[1]
    require(
        scores is not None and ranks == facts.n_experts,
        f"{layer.name}: needs all {facts.n_experts} ranks, the trace keeps {ranks}",
        TraceError,
    )
    assert scores is not None
    by_expert = torch.zeros(scores.shape, dtype=torch.float64)
    by_expert.scatter_(1, layer.experts.long(), scores.double())
    clear = scores[:, facts.k - 1] > scores[:, facts.k]
    chosen = by_expert[clear][:tokens]
    return score_flip_times(
        chosen, facts.k, W, horizon, sigma=sigma, steps=steps, paths=paths, seed=seed
    )
