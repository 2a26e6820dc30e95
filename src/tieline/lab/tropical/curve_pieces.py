"""Pieces that a curve of inputs meets, and their expectation for a Gaussian router.

Along a segment every score is linear, so each pair of experts changes order at most once. The next
change of the coalition is the first crossing of a chosen expert by a faster one that is not chosen;
all segments take their next step together.

The paper's bound divides a d_eff-dimensional volume by a (d-1)-dimensional one, which is meaningful
only for d_eff = d - 1. An m-flat meets C(N, k) P(M <= m+1) cells on average:
`expected_cells(N, k, m)`. A Gaussian router makes ρ/π switches per radian; a trained one differs as
its weights and its inputs do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import special
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.statistics import Estimate, mean_estimate
from tieline.lab.tropical.affine import (
    AffineRouter,
    Neurons,
    as_neurons,
    as_points,
    as_router,
    captured_inputs,
    chosen_experts,
)
from tieline.lab.tropical.capacity import capacity_bound, wall_density
from tieline.trace.record import LayerTrace, RoutingTrace

CHUNK = 1 << 22  # pairs of experts over all segments that are held at once


class CoalitionWalk(NamedTuple):
    """Every change of coalition, by segment and in the order of the walk."""

    segment: Int[np.ndarray, " events"]  # which segment it happens on
    share: Float[np.ndarray, " events"]  # position as a share of the segment, in (0, 1)
    leaving: Int[np.ndarray, " events"]  # the expert that is no longer chosen
    entering: Int[np.ndarray, " events"]  # the expert that is chosen from there on
    first: Bool[np.ndarray, "segments experts"]  # experts chosen at the start of each segment

    def per_segment(self) -> Int[np.ndarray, " segments"]:
        """Number of changes on each segment."""
        return np.bincount(self.segment, minlength=len(self.first))


def walk_coalitions(
    starts: Float[np.ndarray, "segments dim"],
    ends: Float[np.ndarray, "segments dim"],
    router: AffineRouter,
) -> CoalitionWalk:
    """Find the changes of coalition along the segments from `starts` to `ends`."""
    experts = len(router.bias)
    size = max(1, CHUNK // experts**2)
    chunks = [
        _walk_segments(
            router.scores(starts[begin : begin + size]),
            router.scores(ends[begin : begin + size]),
            router.k,
        )
        for begin in range(0, len(starts), size)
    ]
    shifted = [chunk._replace(segment=chunk.segment + i * size) for i, chunk in enumerate(chunks)]
    return CoalitionWalk(*(np.concatenate(columns) for columns in zip(*shifted, strict=True)))


def _walk_segments(start: np.ndarray, end: np.ndarray, k: int) -> CoalitionWalk:
    """Find the changes of coalition along a chunk of segments of scores."""
    first = chosen_experts(start, k)
    slope = end - start
    closing = slope[:, None, :] - slope[:, :, None]
    lead = start[:, :, None] - start[:, None, :]
    with np.errstate(divide="ignore", invalid="ignore"):  # when j passes i: (segments, i, j)
        overtakes = np.where(closing > 0, lead / closing, np.inf)
    inside, rows = first.copy(), np.arange(len(start))
    events: list[tuple[np.ndarray, ...]] = []
    while len(rows):
        swappable = inside[rows][:, :, None] & ~inside[rows][:, None, :]
        times = np.where(swappable, overtakes[rows], np.inf).reshape(len(rows), -1)
        best = times.argmin(axis=1)
        when = times[np.arange(len(rows)), best]
        switching = when < 1
        rows, best, when = rows[switching], best[switching], when[switching]
        leaving, entering = np.divmod(best, start.shape[1])
        inside[rows, leaving], inside[rows, entering] = False, True
        at_start = when <= 0  # a tie at the very start is settled before the walk begins
        first[rows[at_start]] = inside[rows[at_start]]
        events.append(tuple(x[~at_start] for x in (rows, when, leaving, entering)))
    segment, share, leaving, entering = map(np.concatenate, zip(*events, strict=True))
    order = np.argsort(segment, kind="stable")  # events of one segment are in order already
    return CoalitionWalk(segment[order], share[order], leaving[order], entering[order], first)


@dataclass(frozen=True)
class PathPieces:
    """Numbers of pieces, switches and kinks that a curve meets."""

    pieces: int  # 1 + switches + kinks: stretches on which the layer is one formula
    switches: int  # changes of the chosen coalition
    kinks: int  # zeros of neurons of chosen experts; 0 where no neurons were given
    coalitions: int  # different coalitions met
    length: float  # Euclidean length
    spherical_length: float  # length on the unit sphere, of (x, lift) where the router has biases
    expected_switches: float  # of a Gaussian router along that spherical length
    segments: int  # straight segments walked
    status: str = "ok"  # "ok", or a caveat of the numbers


def pieces_along(
    points: Any, weight: Any, bias: Any, k: int, V: Any = None, c: Any = None
) -> PathPieces:
    """Count switches, kinks and coalitions along the polyline through (n, d) points, exactly.

    Successive points must differ. V (N, H, d) and c (N, H) are the experts' neurons; without
    them only switches are counted.
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
    walked = walk_coalitions(path[:-1], path[1:], router)
    angle = spherical_length(path, lift=bias_scale(router))
    kinks = 0 if neurons is None else _count_kinks(path, walked, neurons)
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
    """Count pieces of the curve t ↦ curve(t), 0 <= t <= 1, on polylines of doubling fineness.

    Stops when two successive polylines have the same switches and kinks. A curve that touches a
    wall may not settle before `most` segments; the status then says so.
    """
    require(2 <= start <= most, f"need 2 <= start <= most, got {start=}, {most=}")
    before, segments = None, start
    while True:
        samples = [curve(i / segments) for i in range(segments + 1)]
        points = np.stack([np.asarray(x, dtype=np.float64).reshape(-1) for x in samples])
        pieces = pieces_along(points, weight, bias, k, V, c)
        counts = pieces.switches, pieces.kinks, pieces.coalitions
        if counts == before:
            return pieces
        if segments >= most:
            return replace(pieces, status=f"not settled: {most} segments still change the count")
        before, segments = counts, min(2 * segments, most)


def spherical_length(points: Any, *, lift: float = 0.0) -> float:
    """Length of the image under (x, lift) ↦ (x, lift) / ‖(x, lift)‖ (Def. 4.26, `bias_scale`)."""
    path = np.asarray(points, dtype=np.float64)
    path = np.column_stack([path, np.full(len(path), lift)])
    norms = np.linalg.norm(path, axis=1, keepdims=True)
    require(bool((norms > 0).all()), "the curve meets the origin, which has no direction")
    return float(angles_between(path[:-1] / norms[:-1], path[1:] / norms[1:]).sum())


def angles_between(a: np.ndarray, b: np.ndarray) -> Float[np.ndarray, " pairs"]:
    """Angle between unit rows: 2 atan2(‖a - b‖, ‖a + b‖), exact where arccos(a·b) loses half."""
    return 2 * np.arctan2(np.linalg.norm(a - b, axis=1), np.linalg.norm(a + b, axis=1))


def expected_switches(n_experts: int, k: int, length: float) -> float:
    """Expected switches (L/π) ρ of a Gaussian router along a curve of spherical length L.

    Crofton's formula: each wall piece is met in proportion to length, whatever the curve, and a
    half-circle meets ρ = √π f_gap(0) walls.
    """
    require(length >= 0, f"need a length >= 0, got {length}")
    return length / math.pi * wall_density(n_experts, k)


def expected_kinks(k: int, hidden: int, length: float) -> float:
    """Expected zeros (L/π) kH of active Gaussian neurons along a curve of spherical length L."""
    require(k >= 1 and hidden >= 1, f"need k >= 1 and hidden >= 1, got {k=}, {hidden=}")
    return length / math.pi * k * hidden


def paper_effective_bound(
    n_experts: int, k: int, hidden: int, d_eff: int, dim: int, volume: float
) -> float:
    """Paper's bound C(N, k) Vol(π(M)) / Vol(S^{d-1}) Φ(kH, d_eff), as printed (Thm. 4.26).

    Without its O(...) term and without meaning for d_eff < d - 1: Vol(π(M)) is then no
    (d-1)-dimensional volume, and shrinking the curve's unit of length changes the ratio.
    """
    require(1 <= d_eff <= dim, f"need 1 <= d_eff <= d, got {d_eff=}, d={dim}")
    sphere = math.log(2) + dim / 2 * math.log(math.pi) - float(special.gammaln(dim / 2))
    return volume * math.exp(math.log(capacity_bound(n_experts, k, hidden, d_eff)) - sphere)


def bias_scale(router: AffineRouter) -> float:
    """Lift sd(bias) / sd(weight) at which a router with biases is one without on R^{d+1}."""
    spread = float(router.bias.std())
    return 0.0 if spread == 0 else spread / float(router.weight.std())


def coalitions_of(walked: CoalitionWalk) -> set[bytes]:
    """Set of the different coalitions of a walk, each as packed bits."""
    coalitions = {np.packbits(row).tobytes() for row in walked.first}
    current, row = -1, walked.first[0]
    for segment, leaving, entering in zip(
        walked.segment, walked.leaving, walked.entering, strict=True
    ):
        if segment != current:
            current, row = segment, walked.first[segment].copy()
        row[leaving], row[entering] = False, True
        coalitions.add(np.packbits(row).tobytes())
    return coalitions


def _count_kinks(path: np.ndarray, walked: CoalitionWalk, neurons: Neurons) -> int:
    """Count zeros of neurons within the stretches on which their expert is chosen."""
    u = np.einsum("ehd,pd->peh", neurons.weight, path) + neurons.bias
    with np.errstate(divide="ignore", invalid="ignore"):
        zeros = u[:-1] / (u[:-1] - u[1:])
    zeros = np.where((zeros > 0) & (zeros < 1), zeros, np.inf)
    total = 0
    for segment in range(len(zeros)):
        events = walked.segment == segment
        chosen_since = np.where(walked.first[segment], 0.0, np.nan)
        for share, leaver, joiner in zip(
            walked.share[events], walked.leaving[events], walked.entering[events], strict=True
        ):
            total += int(
                (
                    (zeros[segment, leaver] > chosen_since[leaver])
                    & (zeros[segment, leaver] < share)
                ).sum()
            )
            chosen_since[leaver], chosen_since[joiner] = np.nan, share
        active = np.flatnonzero(~np.isnan(chosen_since))
        inside = (zeros[segment, active] > chosen_since[active, None]) & (
            zeros[segment, active] < 1
        )
        total += int(inside.sum())
    return total


@dataclass(frozen=True)
class Crossings:
    """Switches of coalition along straight lines between pairs of router inputs."""

    pairs: int  # lines walked
    switches: Estimate  # mean number per line
    needed: float  # mean number of experts that differ between the ends: no walk has fewer switches
    angle: float  # mean angle between the ends, in radians
    per_radian: float  # switches over spherical length, all lines together
    per_length: float  # switches over Euclidean length, all lines together
    expected_per_radian: float  # ρ/π of a Gaussian router of this shape
    agreement: float  # share of ends whose choice by the given weight is that of the trace


def token_pairs(
    trace: RoutingTrace, pairs: int, kind: Literal["neighbours", "any"], seed: int = 0
) -> Int[Tensor, "pairs 2"]:
    """Draw pairs of token indices: neighbours in a text without repetition, or any two."""
    require(pairs >= 1, f"need at least one pair, got {pairs}")
    draw = torch.Generator().manual_seed(seed)
    if kind == "any":
        require(trace.n_tokens >= 2, f"a pair needs two tokens, got {trace.n_tokens}", TraceError)
        first = torch.randint(trace.n_tokens, (pairs,), generator=draw)
        other = torch.randint(trace.n_tokens - 1, (pairs,), generator=draw)
        return torch.stack([first, other + (other >= first).long()], dim=1)
    follows = (trace.documents[1:] == trace.documents[:-1]) & (trace.positions.diff() == 1)
    starts = follows.nonzero().squeeze(1)
    require(len(starts) > 0, "no two tokens of the trace follow each other in a text", TraceError)
    starts = starts[torch.randperm(len(starts), generator=draw)[:pairs]]
    return torch.stack([starts, starts + 1], dim=1)


def crossings(
    layer: LayerTrace, weight: Any, pairs: Int[Tensor, "pairs 2"], bias: Any = None
) -> Crossings:
    """Count switches between the router inputs of token pairs (Thm. 4.26, corrected)."""
    inputs = captured_inputs(layer)
    router = as_router(weight, bias, layer.facts.k)
    data = as_points(inputs, router.weight.shape[1], 2)
    ends = data[pairs.numpy()]
    length = np.linalg.norm(ends[:, 1] - ends[:, 0], axis=1)
    keep = length > 0  # equal inputs, such as the first tokens of two texts, give no line
    require(bool(keep.any()), "every pair has the same input at both ends", TraceError)
    ends, length = ends[keep], length[keep]
    counts = walk_coalitions(ends[:, 0], ends[:, 1], router).per_segment()
    sets = [chosen_experts(router.scores(ends[:, side]), router.k) for side in (0, 1)]
    traced = layer.experts[:, : layer.facts.k].long()[pairs[torch.from_numpy(keep)]]
    traced_sets = np.zeros((2, *sets[0].shape), dtype=bool)
    np.put_along_axis(traced_sets, traced.transpose(0, 1).numpy(), True, axis=2)
    lifted = np.concatenate([ends, np.full((*ends.shape[:2], 1), bias_scale(router))], axis=2)
    unit = lifted / np.linalg.norm(lifted, axis=2, keepdims=True)
    angle = angles_between(unit[:, 0], unit[:, 1])
    return Crossings(
        pairs=len(counts),
        switches=mean_estimate(torch.from_numpy(counts).double()),
        needed=float((sets[0] & ~sets[1]).sum(axis=1).mean()),
        angle=float(angle.mean()),
        per_radian=float(counts.sum() / angle.sum()),
        per_length=float(counts.sum() / length.sum()),
        expected_per_radian=wall_density(len(router.bias), router.k) / np.pi,
        agreement=float((traced_sets == np.stack(sets)).all(axis=2).mean()),
    )
