"""Pieces that a curve of inputs meets, beside what a Gaussian router would show.

    pieces_along              switches and kinks on a polyline, exact               measured
    pieces_along_curve        the same for a callable, refined until it settles     measured
    spherical_length          L, length of the curve seen from the origin           Def. 4.26
    expected_switches         (L/π) ρ, Crofton; with kinks (L/π)(kH + ρ)            corrected
    paper_effective_bound     C(N, k) Vol(π(M))/Vol(S^{d-1}) Φ(kH, d_eff)           Thm. 4.26

The paper's bound divides a d_eff-dimensional volume by a (d-1)-dimensional one, which has a meaning
only for d_eff = d - 1: it is printed beside the true numbers, never instead of them. An m-flat
meets C(N, k) P(M <= m+1) cells on average: `expected_cells(N, k, m)`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import special

from tieline.errors import require
from tieline.tropical.affine import Neurons, Router, as_neurons, as_points, as_router
from tieline.tropical.capacity import capacity_bound
from tieline.tropical.expectation import wall_density
from tieline.tropical.walking import Walk, walk

__all__ = [
    "PathPieces",
    "expected_kinks",
    "expected_switches",
    "paper_effective_bound",
    "pieces_along",
    "pieces_along_curve",
    "spherical_length",
]


@dataclass(frozen=True)
class PathPieces:
    """What a curve meets.

    Attributes:
        pieces: 1 + switches + kinks: stretches on which the layer is one formula.
        switches: changes of the chosen coalition.
        kinks: zeros of neurons of chosen experts; 0 where no neurons were given.
        coalitions: different coalitions met.
        length: Euclidean length.
        spherical_length: length on the unit sphere, of (x, lift) where the router has biases.
        expected_switches: of a Gaussian router along that spherical length.
        segments: straight segments walked.
        status: "ok", or what to know about the numbers.
    """

    pieces: int
    switches: int
    kinks: int
    coalitions: int
    length: float
    spherical_length: float
    expected_switches: float
    segments: int
    status: str = "ok"


def pieces_along(
    points: Any, weight: Any, bias: Any, k: int, V: Any = None, c: Any = None
) -> PathPieces:
    """Switches, kinks and coalitions along the polyline through `points`, exactly.

    Args:
        points: (n, d) array, n >= 2, no point twice in a row (refused).
        weight: (N, d) router weight.
        bias: (N,) router bias or None.
        k: experts chosen per input.
        V: (N, H, d) weights of the experts' neurons, or None to count switches only.
        c: (N, H) their biases.
    """
    router = as_router(weight, bias, k)
    neurons = as_neurons(V, c, router)
    path = as_points(points, router.weight.shape[1], 2)
    steps = np.linalg.norm(np.diff(path, axis=0), axis=1)
    require(
        bool((steps > 0).all()),
        f"points {int(steps.argmin())} and {int(steps.argmin()) + 1} of the curve are equal: "
        "leave repeated points out",
    )
    walked = walk(path[:-1], path[1:], router)
    lift = bias_scale(router)
    angle = spherical_length(path, lift=lift)
    kinks = 0 if neurons is None else _kinks(path, walked, neurons)
    switches = len(walked.segment)
    expected = 0.0 if k == len(router.bias) else expected_switches(len(router.bias), k, angle)
    return PathPieces(
        pieces=1 + switches + kinks,
        switches=switches,
        kinks=kinks,
        coalitions=len(coalitions_of(walked)),
        length=float(steps.sum()),
        spherical_length=angle,
        expected_switches=expected,
        segments=len(steps),
    )


def pieces_along_curve(
    curve: Callable[[float], Any],
    weight: Any,
    bias: Any,
    k: int,
    V: Any = None,
    c: Any = None,
    *,
    start: int = 64,
    most: int = 1 << 14,
) -> PathPieces:
    """The pieces of the curve t ↦ curve(t), 0 <= t <= 1, on polylines of doubling fineness.

    Ends when two polylines in a row have the same switches and kinks; a curve that touches a wall
    may not settle before `most` segments, which the status then says.
    """
    require(2 <= start <= most, f"need 2 <= start <= most, got {start=}, {most=}")
    before, segments = None, start
    while True:
        points = np.stack([_point(curve(i / segments)) for i in range(segments + 1)])
        found = pieces_along(points, weight, bias, k, V, c)
        if before is not None and _counts(before) == _counts(found):
            return found
        if segments >= most:
            words = f"not settled: {most} segments still change the count"
            return PathPieces(**{**found.__dict__, "status": words})
        before, segments = found, min(2 * segments, most)


def spherical_length(points: Any, *, lift: float = 0.0) -> float:
    """Length of the polyline's image under (x, lift) ↦ (x, lift) / ‖(x, lift)‖.

    Args:
        points: (n, d) points of the curve.
        lift: 0 for routers without bias, whose cells are cones; sd(bias) / sd(weight) for routers
            with one, which are biasless on R^{d+1}.
    """
    path = np.asarray(points, dtype=np.float64)
    path = np.column_stack([path, np.full(len(path), lift)])
    norms = np.linalg.norm(path, axis=1, keepdims=True)
    require(bool((norms > 0).all()), "the curve meets the origin, which has no direction")
    return float(angles(path[:-1] / norms[:-1], path[1:] / norms[1:]).sum())


def angles(a: np.ndarray, b: np.ndarray) -> Float[np.ndarray, " pairs"]:
    """Angle between unit rows: 2 atan2(‖a - b‖, ‖a + b‖), exact where arccos(a·b) loses half."""
    return 2 * np.arctan2(np.linalg.norm(a - b, axis=1), np.linalg.norm(a + b, axis=1))


def expected_switches(n_experts: int, k: int, length: float) -> float:
    """(L/π) ρ: switches that a Gaussian router makes along a curve of spherical length L.

    Crofton's formula: each wall piece is met in proportion to length, whatever the curve, and a
    half-circle meets ρ = √π f_gap(0) walls.
    """
    require(length >= 0, f"need a length >= 0, got {length}")
    return length / math.pi * wall_density(n_experts, k)


def expected_kinks(k: int, width: int, length: float) -> float:
    """(L/π) kH: zeros of active Gaussian neurons along a curve of spherical length L."""
    require(k >= 1 and width >= 1, f"need k >= 1 and width >= 1, got {k=}, {width=}")
    return length / math.pi * k * width


def paper_effective_bound(
    n_experts: int, k: int, width: int, d_eff: int, dim: int, volume: float
) -> float:
    """C(N, k) Vol(π(M)) / Vol(S^{d-1}) Φ(kH, d_eff), as printed (Thm. 4.26).

    Without its O(...) term and without meaning for d_eff < d - 1: Vol(π(M)) is then no
    (d-1)-dimensional volume, and shrinking the curve's unit of length changes the ratio.
    """
    require(1 <= d_eff <= dim, f"need 1 <= d_eff <= d, got {d_eff=}, d={dim}")
    sphere = math.log(2) + dim / 2 * math.log(math.pi) - float(special.gammaln(dim / 2))
    return volume * math.exp(math.log(capacity_bound(n_experts, k, width, d_eff)) - sphere)


def bias_scale(router: Router) -> float:
    """sd(bias) / sd(weight), the height at which a router with biases is one without on R^{d+1}."""
    spread = float(router.bias.std())
    return 0.0 if spread == 0 else spread / float(router.weight.std())


def coalitions_of(walked: Walk) -> set[bytes]:
    """The different coalitions of a walk, each as packed bits."""
    found = {np.packbits(row).tobytes() for row in walked.first}
    now, row = -1, walked.first[0]
    for segment, leaving, entering in zip(
        walked.segment, walked.leaving, walked.entering, strict=True
    ):
        if segment != now:
            now, row = segment, walked.first[segment].copy()
        row[leaving], row[entering] = False, True
        found.add(np.packbits(row).tobytes())
    return found


def _kinks(path: np.ndarray, walked: Walk, neurons: Neurons) -> int:
    """Zeros of neurons inside the stretches on which their expert is chosen."""
    u = np.einsum("ehd,pd->peh", neurons.weight, path) + neurons.bias
    with np.errstate(divide="ignore", invalid="ignore"):
        zeros = u[:-1] / (u[:-1] - u[1:])
    zeros = np.where((zeros > 0) & (zeros < 1), zeros, np.inf)
    total = 0
    for segment in range(len(zeros)):
        mine = walked.segment == segment
        since = np.where(walked.first[segment], 0.0, np.nan)
        for at, out, new in zip(
            walked.place[mine], walked.leaving[mine], walked.entering[mine], strict=True
        ):
            total += int(((zeros[segment, out] > since[out]) & (zeros[segment, out] < at)).sum())
            since[out], since[new] = np.nan, at
        left = np.flatnonzero(~np.isnan(since))
        inside = (zeros[segment, left] > since[left, None]) & (zeros[segment, left] < 1)
        total += int(inside.sum())
    return total


def _counts(found: PathPieces) -> tuple[int, int, int]:
    return found.switches, found.kinks, found.coalitions


def _point(value: Any) -> np.ndarray:
    return np.asarray(value, dtype=np.float64).reshape(-1)
