"""How far, in the router's input space, the nearest tie is.

    expert_distances   D_ij = ‖w_i - w_j‖                                        Def. 5.1
    nearest_tie        dist(x, Γ) = min_{i ∈ S, j ∉ S} (z_i - z_j) / D_ij        Def. 5.2

Exact for affine routers z = W x + b: the token leaves its cell through the nearest of the walls
z_i = z_j, and walls that bound no cell are never the nearest (Paper 1, Def. 4.1).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.ranking import Ranked, stable_topk

__all__ = ["NearestTie", "expert_distances", "nearest_tie"]

NEIGHBOURS = 4
"""Ranks on either side of the threshold that are tried before all pairs are."""

CHUNK = 1 << 18
"""Largest number of (token, expert) entries that the search over all pairs holds at once."""


class NearestTie(NamedTuple):
    """The wall nearest to each token.

    Attributes:
        distance: Euclidean distance to it, in float64; infinite where k = E.
        leaving: the chosen expert i that ties there.
        entering: the expert j, not chosen, that ties with it.
    """

    distance: Float[Tensor, " tokens"]
    leaving: Int[Tensor, " tokens"]
    entering: Int[Tensor, " tokens"]


def expert_distances(weight: Float[Tensor, "experts width"]) -> Float[Tensor, "experts experts"]:
    """D_ij = ‖w_i - w_j‖ in float64 (Def. 5.1).

    Without the expansion ‖w_i‖² - 2 w_i·w_j + ‖w_j‖², which cancels for experts that are alike.
    Needed once per router, not once per batch.
    """
    rows = weight.detach().double()
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")


def nearest_tie(
    scores: Float[Tensor, "tokens experts"],
    distances: Float[Tensor, "experts experts"],
    k: int,
    ranked: Ranked | None = None,
) -> NearestTie:
    """Distance to Γ: min over i ∈ S, j ∉ S of (z_i - z_j) / ‖w_i - w_j‖ (Def. 5.2).

    A pair that beats the best one among a few ranks around the threshold needs z_i - z_j below
    best · max D. Every pair outside these ranks has at least the difference of the first rank left
    out; where that is too large the few ranks are proved to be enough, elsewhere all k (E - k)
    pairs are tried, one chosen expert at a time.

    Args:
        scores: (T, E) affine scores of all experts.
        distances: `expert_distances` of the router's weight.
        k: number of experts chosen.
        ranked: the first ranks of `scores` where the caller has them: k + 5 or all of them.
    """
    experts = scores.shape[1]
    require(distances.shape[0] == experts, f"{experts} experts, {distances.shape[0]=}", ShapeError)
    last = min(experts, k + NEIGHBOURS + 1)
    if ranked is None or ranked.values.shape[1] < last:
        ranked = stable_topk(scores.detach(), last)
    if k == experts:
        return _no_tie(scores)
    near, proved = _among_neighbours(ranked, distances, k)
    rest = (~proved).nonzero().squeeze(1)
    if len(rest):
        chosen = ranked.indices[rest, :k]
        for rows, ids in zip(_chunks(rest, experts), _chunks(chosen, experts), strict=True):
            found = _among_all(scores[rows].double(), ids.long(), distances)
            for whole, part in zip(near, found, strict=True):
                whole[rows] = part
    return near


def _among_neighbours(
    ranked: Ranked, distances: Float[Tensor, "experts experts"], k: int
) -> tuple[NearestTie, Tensor]:
    """Best pair of the few ranks around the threshold, and where it is proved to be the best."""
    first, last = max(0, k - NEIGHBOURS), min(ranked.values.shape[1], k + NEIGHBOURS)
    z, ids = ranked.values.detach().double(), ranked.indices.long()
    inner, outer = ids[:, first:k], ids[:, k:last]
    rise = z[:, first:k, None] - z[:, None, k:last]
    best = _ratio(rise, distances[inner[:, :, None], outer[:, None, :]]).flatten(1).min(dim=1)
    leaving = inner.gather(1, (best.indices // outer.shape[1])[:, None]).squeeze(1)
    entering = outer.gather(1, (best.indices % outer.shape[1])[:, None]).squeeze(1)
    left_out = torch.full_like(best.values, torch.inf)
    if first > 0:
        left_out = torch.minimum(left_out, z[:, first - 1] - z[:, k])
    if last < len(distances):
        left_out = torch.minimum(left_out, z[:, k - 1] - z[:, last])
    proved = best.values * distances.max() <= left_out
    return NearestTie(best.values, leaving, entering), proved


def _among_all(
    scores: Float[Tensor, "tokens experts"],
    chosen: Int[Tensor, "tokens k"],
    distances: Float[Tensor, "experts experts"],
) -> NearestTie:
    """Best of all pairs, one rank of chosen experts at a time so that (T, E) is the largest."""
    best = _no_tie(scores)
    outside = scores.scatter(1, chosen, -torch.inf)
    for leaving in chosen.unbind(dim=1):
        rise = scores.gather(1, leaving[:, None]) - outside
        ratio, entering = _ratio(rise, distances[leaving]).min(dim=1)
        better = ratio < best.distance
        found = NearestTie(ratio, leaving, entering)
        best = NearestTie(*(torch.where(better, a, b) for a, b in zip(found, best, strict=True)))
    return best


def _ratio(rise: Tensor, distance: Tensor) -> Tensor:
    """(z_i - z_j) / D_ij; equal scores tie here, whatever D, and equal weights never otherwise."""
    return torch.where(rise == 0, 0.0, rise / distance)


def _no_tie(scores: Float[Tensor, "tokens experts"]) -> NearestTie:
    nowhere = torch.full((len(scores),), -1, dtype=torch.long, device=scores.device)
    return NearestTie(torch.full_like(nowhere, torch.inf, dtype=torch.float64), nowhere, nowhere)


def _chunks(rows: Tensor, experts: int) -> tuple[Tensor, ...]:
    return rows.split(max(1, CHUNK // experts))
