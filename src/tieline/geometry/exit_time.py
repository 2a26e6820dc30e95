"""When a Brownian path leaves a top-k cell: exact laws for one and two faces, bounds for all.

r is the distance of the start to a face in units of noise, r_ij = (z_i - z_j) / ‖σᵀ(w_i - w_j)‖.

    face_exit        P(one face is hit by t) = 2 Φ̄(r/√t)                      Paper 1, Prop. A.21
    face_quantile    the time by which it is hit with probability p           Paper 1, Prop. A.21
    exit_bounds      2 Φ̄(r_min/√t) <= P(exit by t) <= Σ 2 Φ̄(r_ij/√t)          Paper 1, Thm 5.1
    two_face_exit    P(one of two faces is hit by t), any angle between them
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy import special
from torch import Tensor

from tieline.errors import require
from tieline.geometry.kinds import Real

__all__ = ["ExitBounds", "exit_bounds", "face_exit", "face_quantile", "two_face_exit"]

PARALLEL = 1e-6
"""How near to ±1 the cosine of two faces may come."""


class ExitBounds(NamedTuple):
    """Limits of P(exit by t), one per time."""

    lower: Float[Tensor, "*times"]
    upper: Float[Tensor, "*times"]


def face_exit(
    r: Float[Tensor, "*#shape"], t: Real | Float[Tensor, "*#shape"]
) -> Float[Tensor, "*all"]:
    """2 Φ̄(r/√t) by the reflection principle; 0 at t = 0."""
    time = torch.as_tensor(t, dtype=torch.float64)
    require(bool((time >= 0).all()), f"a time is >= 0, got {t}")
    require(bool((r >= 0).all()), "a distance to a face is >= 0: the start must be in the cell")
    return torch.special.erfc(r.double() / (2 * time).sqrt()).where(time > 0, 0.0)


def face_quantile(
    r: Float[Tensor, "*#shape"], p: Real | Float[Tensor, "*#shape"]
) -> Float[Tensor, "*all"]:
    """(r / Φ⁻¹(1 - p/2))²: the time by which one face is hit with probability p.

    The paper states it for δ = 1 - p, with q_δ = Φ⁻¹((1 + δ)/2).
    """
    share = torch.as_tensor(p, dtype=torch.float64)
    require(bool(((share > 0) & (share < 1)).all()), f"need 0 < p < 1, got {p}")
    return (r.double() / torch.special.ndtri(share / 2)).square()


def exit_bounds(r: Float[Tensor, "*batch faces"], times: Float[Tensor, " times"]) -> ExitBounds:
    """Lower and upper bound of P(exit by t) at each time, (*batch, times); both lie in [0, 1].

    The lower one is the law of the nearest face alone (Thm 5.1), the upper one the union bound.
    """
    hit = face_exit(r.double()[..., None, :], times.double()[:, None])
    return ExitBounds(hit.amax(dim=-1), hit.sum(dim=-1).clamp(max=1))


def two_face_exit(r1: Real, r2: Real, cosine: Real, t: Real) -> float:
    """P(one of two faces is hit by t), exactly; `cosine` is that of the angle of inward normals.

    In the plane of the normals the cell is a wedge of angle α = π - arccos(cosine). With R, θ the
    polar coordinates of the start, ν = nπ/α and x = R²/4t,

        P(no exit) = √(2R²/πt) e^(-x) Σ_{n odd} sin(νθ)/n · (I_{(ν-1)/2}(x) + I_{(ν+1)/2}(x)).

    Orthogonal faces need no series: 1 - Π (1 - 2 Φ̄(r_i/√t)). Faces that are nearly
    parallel meet too far away for the series.
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
