"""The nearest tie of a given order: how far, at which point, in which direction.

    distance_to_tie     dist(x, Γ^(n)), Euclidean
    nearest_tie_point   the same with the point, the unit normal towards x and the experts that tie

Order 1 is min over i ∈ S, j ∉ S of (z_i - z_j) / ‖w_i - w_j‖ (Def. 5.2). Order n is the smallest
distance to a flat {z_J equal}, |J| = n + 1, whose projection of x is a tie *across the threshold*:
p scores above it with p <= k - 1 and p + n + 1 >= k + 1 (Paper 1, Def. A.5). No quadratic programme
is needed. Were the nearest point of Γ^(n) on a tie of more experts J', every direction that lets
one expert of J' go up (or each that lets one go down) would stay in Γ^(n); these directions span
the space of their scores positively, so x could not be strictly nearer along any: x would be there.

    dist² = δᵀ (A Aᵀ)⁻¹ δ,  δ = A x - d = (z_j - z_i)_j,   z(y) = z - W Aᵀ (A Aᵀ)⁻¹ δ

are functions of the scores alone, so D enters only through x W.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.geometry.distance import expert_distances, nearest_tie
from tieline.geometry.ties import TieFlats, check_router, tie_flats, tie_sets

__all__ = ["TiePoint", "affine_scores", "distance_to_tie", "nearest_tie_point"]

ROWS = 512
"""Inputs turned into float64 at once, so that the copy stays in cache."""

ENTRIES = 1 << 21
"""Largest number of (token, set, score) entries that a search over tie sets holds at once."""

FIRST_TRY = 8
"""Nearest flats of a token whose projections are looked at before more are."""


@dataclass(frozen=True, eq=False)
class TiePoint:
    """The nearest order-n tie of each token.

    Attributes:
        distance: ‖x - point‖ in float64; infinite where the router has no such tie.
        point: the projection of x.
        normal: unit vector from the point towards x; where x is on the tie, a normal of it.
        experts: the experts that tie there, (T, n + 1).
    """

    distance: Float[Tensor, " tokens"]
    point: Float[Tensor, "tokens width"]
    normal: Float[Tensor, "tokens width"]
    experts: Int[Tensor, "tokens tied"]


def distance_to_tie(
    x: Float[Tensor, "*batch width"],
    W: Float[Tensor, "experts width"],
    b: Float[Tensor, " experts"] | None,
    k: int,
    order: int = 1,
) -> Float[Tensor, "*batch"]:
    """Euclidean distance from x to the ties of order n or more: dist(x, Γ^(n)), in float64.

    Args:
        x: inputs of the router.
        W: its weight, one row per expert.
        b: its bias, or None.
        k: number of experts chosen, 1 <= k < E.
        order: n >= 1; n + 1 experts tie. Beyond 1 any n + 1 rows of W must be affinely independent.
    """
    weight, bias = check_router(W, b, k)
    scores = affine_scores(x.reshape(-1, x.shape[-1]), weight, bias)
    return _nearest(scores, weight, bias, k, order)[0].reshape(x.shape[:-1])


def nearest_tie_point(
    x: Float[Tensor, "tokens width"],
    W: Float[Tensor, "experts width"],
    b: Float[Tensor, " experts"] | None,
    k: int,
    order: int = 1,
) -> TiePoint:
    """`distance_to_tie` with the point where it is attained, the normal and the tied experts."""
    weight, bias = check_router(W, b, k)
    inputs, scores = x.detach().double(), affine_scores(x, weight, bias)
    distance, experts = _nearest(scores, weight, bias, k, order)
    normals = weight[experts[:, 1:]] - weight[experts[:, :1]]
    held = scores.gather(1, experts)
    rise = held[:, 1:] - held[:, :1]
    # least squares and not the Gram matrix: the point is on the tie to the last digits
    step = torch.linalg.lstsq(normals, rise[:, :, None]).solution.squeeze(2)
    point = inputs - step
    away = torch.where(distance[:, None] > 0, step, normals[:, 0])
    return TiePoint(distance, point, away / away.norm(dim=1, keepdim=True), experts)


def affine_scores(
    x: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "experts width"],
    bias: Float[Tensor, " experts"],
) -> Float[Tensor, "tokens experts"]:
    """Scores z = W x + b in float64."""
    require(x.shape[1] == weight.shape[1], f"{x.shape[1]=}, {weight.shape[1]=}", ShapeError)
    scores = bias.repeat(len(x), 1)
    columns = weight.T.contiguous()
    for rows, part in zip(scores.split(ROWS), x.detach().split(ROWS), strict=True):
        rows.addmm_(part.double(), columns)
    return scores


def _nearest(
    scores: Tensor, weight: Tensor, bias: Tensor, k: int, order: int
) -> tuple[Float[Tensor, " tokens"], Int[Tensor, "tokens tied"]]:
    if order == 1:
        found = nearest_tie(scores, expert_distances(weight), k)
        return found.distance, torch.stack([found.entering, found.leaving], dim=1)
    flats = tie_flats(weight, bias, tie_sets(len(weight), order))
    gram = weight @ weight.T
    rows = max(1, ENTRIES // flats.inverse_grams[:, 0].numel())
    parts = [_search(part, flats, gram, k) for part in scores.split(rows)]
    distance, which = (torch.cat(column) for column in zip(*parts, strict=True))
    return distance, flats.experts[which]


def _search(scores: Tensor, flats: TieFlats, gram: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Smallest distance to a flat whose projection is a tie across the threshold, and the flat."""
    held = scores[:, flats.experts]
    rise = held[:, :, 1:] - held[:, :, :1]
    multipliers = torch.einsum("tmi,mij->tmj", rise, flats.inverse_grams)
    square = (rise * multipliers).sum(dim=2).clamp(min=0)
    distance = scores.new_full((len(scores),), torch.inf)
    which = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    left, take = torch.arange(len(scores), device=scores.device), min(FIRST_TRY, square.shape[1])
    while len(left):
        near = square[left].topk(take, dim=1, largest=False, sorted=True)
        chosen = multipliers[left].gather(1, near.indices[:, :, None].expand(-1, -1, rise.shape[2]))
        valid = _across(scores[left], flats.experts[near.indices], chosen, gram, k)
        some, first = valid.max(dim=1)
        place = first[:, None]
        distance[left[some]] = near.values.gather(1, place)[some, 0].sqrt()
        which[left[some]] = near.indices.gather(1, place)[some, 0]
        left = left[~some] if take < square.shape[1] else left[:0]
        take = min(4 * take, square.shape[1])
    return distance, which


def _across(scores: Tensor, experts: Tensor, multipliers: Tensor, gram: Tensor, k: int) -> Tensor:
    """Whether the projection of each token on each of its flats (tokens, c) crosses the threshold.

    Scores that equal the level there up to rounding may count on either side: the set is closed.
    """
    pull = gram[experts[:, :, 1:]] - gram[experts[:, :, :1]]
    moved = scores[:, None, :] - (multipliers[..., None] * pull).sum(dim=2)
    rise = moved - moved.gather(2, experts).mean(dim=2, keepdim=True)
    rise.scatter_(2, experts, -torch.inf)
    slack = 1e-12 * scores.abs().amax().clamp(min=1e-300)
    most, least = (rise >= -slack).sum(dim=2), (rise > slack).sum(dim=2)
    return (least <= k - 1) & (most + experts.shape[2] >= k + 1)
