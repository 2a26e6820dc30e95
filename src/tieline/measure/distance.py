"""How far the router's inputs are from the nearest tie, and how they spread around the origin.

    expert_distances   D_ij = ‖w_i - w_j‖                                           Def. 5.1
    nearest_tie        dist(x, Γ) = min_{i ∈ S, j ∉ S} (z_i - z_j) / D_ij           Def. 5.2
    angular_spread     ‖mean‖ / radius, mean cosine, cap fraction, expected ties    Def. 9.1 - 9.3
    log_cap_fraction   log of ½ I_{sin²θ}((d-1)/2, ½)                               Def. 9.2
    distance_section, angular_section   the same for a layer of a trace

The distance is exact for affine routers z = W x + b: the token leaves its cell through the nearest
of the walls z_i = z_j, and walls that bound no cell are never the nearest (Paper 1, Def. 4.1).

Paper 3, Prop. 5.6: inputs in a ball of radius R around μ point into a cap of half-angle
θ = arcsin(R / ‖μ‖), which shrinks like (R / ‖μ‖)^(d-1). The paper concludes that routing collapses
at that rate; it does not. The walls of a linear router without bias pass through the origin, and
the expected number that meet the ball falls only like R / ‖μ‖ (`expected_ties`).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from scipy import special
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import Ranked, stable_topk
from tieline.core.statistics import Estimate, Quantiles, quantile_record
from tieline.measure.boundary import gap_density, gaussian_gap_density
from tieline.measure.measure_settings import Measurement, MeasureSettings
from tieline.trace.record import LayerTrace

NEIGHBOURS = 4
"""Ranks on either side of the threshold that are tried before all pairs."""

CHUNK = 1 << 18
"""Largest number of (token, expert) entries that the search over all pairs holds at once."""


INPUT_CHUNK = 1 << 16
"""Entries of router inputs that are held in float64 at once."""


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


@dataclass(frozen=True)
class DistanceMeasures:
    """Euclidean distance of the router's input to the nearest tie (Def. 5.2).

    Attributes:
        quantiles: of the distance.
        density: its density at zero, per unit of the input.
    """

    quantiles: Quantiles
    density: Estimate


def expert_distances(weight: Float[Tensor, "experts dim"]) -> Float[Tensor, "experts experts"]:
    """D_ij = ‖w_i - w_j‖ in float64 (Def. 5.1).

    Avoids the expansion ‖w_i‖² - 2 w_i·w_j + ‖w_j‖², which cancels for similar experts.
    """
    rows = weight.detach().double()
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")


def nearest_tie(
    scores: Float[Tensor, "tokens experts"],
    k: int,
    distances: Float[Tensor, "experts experts"],
    ranked: Ranked | None = None,
) -> NearestTie:
    """Distance to Γ: min over i ∈ S, j ∉ S of (z_i - z_j) / ‖w_i - w_j‖ (Def. 5.2).

    Tries a few ranks around the threshold first. A better pair outside them needs z_i - z_j below
    best · max D but has at least the difference of the first rank left out; where that rules it
    out the few ranks suffice, elsewhere all k (E - k) pairs are tried.

    Args:
        scores: (T, E) affine scores of all experts.
        k: number of experts chosen.
        distances: `expert_distances` of the router's weight.
        ranked: the first k + 5 ranks of `scores` (or all), if already known.
    """
    experts = scores.shape[1]
    require(distances.shape[0] == experts, f"{experts} experts, {distances.shape[0]=}", ShapeError)
    last = min(experts, k + NEIGHBOURS + 1)
    if ranked is None or ranked.values.shape[1] < last:
        ranked = stable_topk(scores.detach(), last)
    if k == experts:
        return _no_tie(scores)
    near, proved = _among_neighbours(ranked, distances, k)
    if scores.device.type != "cpu":  # which tokens are left is not read back
        return _with_all_pairs(near, proved, scores, ranked, distances, k)
    rest = (~proved).nonzero().squeeze(1)
    for rows in rest.split(max(1, CHUNK // experts)) if len(rest) else ():
        exact = _among_all(scores[rows].double(), ranked.indices[rows, :k].long(), distances)
        for column, values in zip(near, exact, strict=True):
            column[rows] = values
    return near


def _with_all_pairs(
    near: NearestTie,
    proved: Tensor,
    scores: Float[Tensor, "tokens experts"],
    ranked: Ranked,
    distances: Float[Tensor, "experts experts"],
    k: int,
) -> NearestTie:
    """The ties `near` where they are proved to be nearest, the best of all pairs elsewhere."""
    rows = max(1, CHUNK // scores.shape[1])
    chosen = ranked.indices[:, :k].long().split(rows)
    blocks = zip(scores.double().split(rows), chosen, strict=True)
    exact = zip(*(_among_all(block, ids, distances) for block, ids in blocks), strict=True)
    columns = (torch.cat(column) for column in exact)
    return NearestTie(*(torch.where(proved, a, b) for a, b in zip(near, columns, strict=True)))


def _among_neighbours(
    ranked: Ranked, distances: Float[Tensor, "experts experts"], k: int
) -> tuple[NearestTie, Tensor]:
    """Best pair of the few ranks around the threshold, and where it is proved to be the best."""
    first, last = max(0, k - NEIGHBOURS), min(ranked.values.shape[1], k + NEIGHBOURS)
    z, ids = ranked.values.detach().double(), ranked.indices.long()
    inner, outer = ids[:, first:k], ids[:, k:last]
    rise = z[:, first:k, None] - z[:, None, k:last]
    best = (
        _wall_distance(rise, distances[inner[:, :, None], outer[:, None, :]]).flatten(1).min(dim=1)
    )
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
    """Best of all pairs, one rank of chosen experts at a time to limit memory to (T, E)."""
    best = _no_tie(scores)
    outside = scores.scatter(1, chosen, -torch.inf)
    for leaving in chosen.unbind(dim=1):
        rise = scores.gather(1, leaving[:, None]) - outside
        ratio, entering = _wall_distance(rise, distances[leaving]).min(dim=1)
        better = ratio < best.distance
        candidate = NearestTie(ratio, leaving, entering)
        best = NearestTie(
            *(torch.where(better, a, b) for a, b in zip(candidate, best, strict=True))
        )
    return best


def _wall_distance(rise: Tensor, distance: Tensor) -> Tensor:
    """(z_i - z_j) / D_ij; 0 for equal scores even where D_ij = 0.

    A router that ranks computed softmax values may choose the lower of two scores that differ by
    their rounding: that token stands on the wall too.
    """
    return torch.where(rise <= 0, 0.0, rise / distance)


def _no_tie(scores: Float[Tensor, "tokens experts"]) -> NearestTie:
    """The answer where no wall exists: infinitely far."""
    nowhere = torch.full((len(scores),), -1, dtype=torch.long, device=scores.device)
    return NearestTie(torch.full_like(nowhere, torch.inf, dtype=torch.float64), nowhere, nowhere)


@dataclass(frozen=True)
class AngularSpread:
    """Where the router's inputs point.

    Attributes:
        mean_norm: ‖μ‖, μ the mean input.
        radius: root mean square of ‖x - μ‖.
        largest_radius: maximum of ‖x - μ‖, the R of Paper 3, Prop. 5.6.
        mean_over_radius: ‖μ‖ / radius; infinite where all inputs are equal.
        mean_cosine: ‖mean of x / ‖x‖‖: 1 where all inputs point the same way, 0 where they cancel.
        cap_fraction: share of the sphere in the cap subtended by the ball of `largest_radius`; 1
            where the ball contains the origin.
        log10_cap_fraction: its logarithm, which does not underflow.
        expected_ties: expected number of walls through the ball of root mean square radius, for a
            router of isotropic weights without bias.
    """

    mean_norm: float
    radius: float
    largest_radius: float
    mean_over_radius: float
    mean_cosine: float
    cap_fraction: float
    log10_cap_fraction: float
    expected_ties: float


def angular_spread(inputs: Float[Tensor, "tokens dim"], n_experts: int, k: int) -> AngularSpread:
    """Mean, radius, cap and expected ties of the router's inputs (Def. 9.1 - 9.3)."""
    tokens, dim = inputs.shape
    require(tokens > 0 and dim > 1, f"need a token and dim > 1, got {inputs.shape}", ShapeError)
    sums = torch.zeros(2, dim, dtype=torch.float64, device="cpu")
    chunks = inputs.split(max(1, INPUT_CHUNK // dim))
    for rows in chunks:  # in float64 a few at a time, so that they stay in the cache
        x = rows.double()
        sums[0] += x.sum(dim=0).cpu()
        sums[1] += (x / x.norm(dim=1, keepdim=True).clamp(min=1e-300)).sum(dim=0).cpu()
    mean, direction = sums / tokens
    radii = torch.cat([(rows.double() - mean.to(rows.device)).norm(dim=1) for rows in chunks])
    mean_norm, radius = mean.norm().item(), radii.square().mean().sqrt().item()
    largest = radii.max().item()
    log_cap = log_cap_fraction(largest / mean_norm if mean_norm > 0 else math.inf, dim)
    return AngularSpread(
        mean_norm=mean_norm,
        radius=radius,
        largest_radius=largest,
        mean_over_radius=mean_norm / radius if radius > 0 else math.inf,
        mean_cosine=direction.norm().item(),
        cap_fraction=math.exp(log_cap),
        log10_cap_fraction=log_cap / math.log(10),
        expected_ties=_expected_ties(radius, mean_norm, dim, n_experts, k),
    )


def log_cap_fraction(sine: float, dim: int) -> float:
    """Logarithm of ½ I_{sin²θ}((d-1)/2, ½), the share of the sphere within angle θ (Def. 9.2).

    Computed as x^a (1-x)^½ / (2 a B(a, ½)) · F(a + ½, 1; a + 1; x) with x = sin²θ, a = (d-1)/2,
    since the incomplete beta function underflows for large d. 0 for sin θ >= 1, where the ball
    contains the origin.
    """
    require(sine >= 0 and dim > 1, f"need sine >= 0 and dim > 1, got {sine=}, {dim=}")
    if sine >= 1:
        return 0.0
    if sine == 0:
        return -math.inf
    a, x = (dim - 1) / 2, sine**2
    series = float(special.hyp2f1(a + 0.5, 1.0, a + 1, x))
    head = a * math.log(x) + math.log1p(-x) / 2 - math.log(2 * a) - float(special.betaln(a, 0.5))
    return head + math.log(series)


def _expected_ties(radius: float, mean_norm: float, dim: int, n_experts: int, k: int) -> float:
    """ρ I_{s²}(½, (d-1)/2), s = R / ‖μ‖, ρ = √π f_gap(0) of iid normal scores (Def. 9.3)."""
    if k >= n_experts:
        return 0.0
    rho = math.sqrt(math.pi) * gaussian_gap_density(n_experts, k)
    s = min(1.0, radius / mean_norm) if mean_norm > 0 else 1.0
    return rho * float(special.betainc(0.5, (dim - 1) / 2, s**2))


def distance_section(layer: LayerTrace, settings: MeasureSettings) -> Measurement[DistanceMeasures]:
    """Distances to the nearest tie that were computed while capturing (Def. 5.2)."""
    if layer.distance is None:
        why = "no distances were kept" if layer.facts.affine else "the scores are not affine"
        return Measurement(None, f"not answerable: {why}")
    values = layer.distance.double()
    return Measurement(
        DistanceMeasures(
            quantile_record(values, settings.probabilities, settings.confidence),
            gap_density(values),
        )
    )


def angular_section(layer: LayerTrace) -> Measurement[AngularSpread]:
    """Directions of the router's inputs (Def. 9.1 - 9.3)."""
    if layer.inputs is None:
        return Measurement(None, "not answerable: router inputs were not kept")
    if layer.inputs.shape[-1] < 2:
        return Measurement(None, "not answerable: inputs of one dimension have no direction")
    return Measurement(angular_spread(layer.inputs, layer.facts.n_experts, layer.facts.k))
