"""Coalitions that a model's router meets between the hidden states of its tokens.

    token_pairs      pairs of tokens: neighbours in the text, or any two
    crossings        switches per pair, per radian and per unit of length, against a Gaussian router

Each pair is joined by a straight line in the router's input space, walked exactly. The expectation
of a Gaussian router is ρ/π per radian (Crofton); a trained one differs as its weights and its
inputs do.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.numerics import Estimate, mean_estimate
from tieline.trace.record import LayerTrace, RoutingTrace
from tieline.tropical.affine import as_points, as_router, chosen
from tieline.tropical.expectation import wall_density
from tieline.tropical.manifold import angles, bias_scale
from tieline.tropical.walking import walk

__all__ = ["Crossings", "crossings", "token_pairs"]


@dataclass(frozen=True)
class Crossings:
    """Switches of coalition along straight lines between pairs of router inputs.

    Attributes:
        pairs: lines walked.
        switches: mean number per line.
        needed: mean number of experts that differ between the ends: no walk has fewer switches.
        angle: mean angle between the ends, in radians.
        per_radian: switches over spherical length, all lines together.
        per_length: switches over Euclidean length, all lines together.
        expected_per_radian: ρ/π of a Gaussian router of this shape.
        agreement: share of ends whose choice by the given weight is that of the trace.
    """

    pairs: int
    switches: Estimate
    needed: float
    angle: float
    per_radian: float
    per_length: float
    expected_per_radian: float
    agreement: float


def token_pairs(
    trace: RoutingTrace, pairs: int, kind: Literal["neighbours", "any"], seed: int = 0
) -> Int[Tensor, "pairs 2"]:
    """Pairs of token indices drawn without repetition: next to each other in a text, or any two."""
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
    """Coalitions met between the router inputs of token pairs (Thm. 4.26, corrected).

    Args:
        layer: a layer captured with keep="inputs".
        weight: (E, D) matrix of its router.
        pairs: indices of tokens, such as `token_pairs` draws.
        bias: (E,) bias of the router, if it adds one to the logits.
    """
    require(layer.inputs is not None, f"layer {layer.name!r} keeps no inputs", TraceError)
    require(layer.facts.affine, f"layer {layer.name!r} has no affine scores", TraceError)
    router = as_router(weight, bias, layer.facts.k)
    data = as_points(layer.inputs, router.weight.shape[1], 2)
    ends = data[pairs.numpy()]
    length = np.linalg.norm(ends[:, 1] - ends[:, 0], axis=1)
    keep = length > 0  # the same input twice, as the first tokens of two texts, is no line
    require(bool(keep.any()), "every pair has the same input at both ends", TraceError)
    ends, length = ends[keep], length[keep]
    counts = walk(ends[:, 0], ends[:, 1], router).per_segment()
    sets = [chosen(router.scores(ends[:, side]), router.k) for side in (0, 1)]
    seen = layer.experts[:, : layer.facts.k].long()[pairs[torch.from_numpy(keep)]]
    angle = _angles(ends, bias_scale(router))
    return Crossings(
        pairs=len(counts),
        switches=mean_estimate(torch.from_numpy(counts).double()),
        needed=float((sets[0] & ~sets[1]).sum(axis=1).mean()),
        angle=float(angle.mean()),
        per_radian=float(counts.sum() / angle.sum()),
        per_length=float(counts.sum() / length.sum()),
        expected_per_radian=wall_density(len(router.bias), router.k) / np.pi,
        agreement=float(np.mean([_agrees(sets[i], seen[:, i]) for i in (0, 1)])),
    )


def _angles(ends: np.ndarray, lift: float) -> np.ndarray:
    lifted = np.concatenate([ends, np.full((*ends.shape[:2], 1), lift)], axis=2)
    unit = lifted / np.linalg.norm(lifted, axis=2, keepdims=True)
    return angles(unit[:, 0], unit[:, 1])


def _agrees(sets: np.ndarray, seen: Tensor) -> float:
    traced = torch.zeros(sets.shape, dtype=torch.bool).scatter_(1, seen, True)
    return float((traced.numpy() == sets).all(axis=1).mean())
