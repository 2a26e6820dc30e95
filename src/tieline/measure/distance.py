"""Distance of router inputs to the nearest tie, and their spread around the origin.

    expert_distances   D_ij = ‖w_i - w_j‖                                           Def. 5.1
    nearest_tie        dist(x, Γ) = min_{i ∈ S, j ∉ S} (z_i - z_j) / D_ij           Def. 5.2
    angular_spread     ‖mean‖ / radius, mean cosine, cap fraction, expected ties    Def. 9.1 - 9.3
    log_cap_fraction   log of ½ I_{sin²θ}((d-1)/2, ½)                               Def. 9.2
    measure_distances, measure_angular_spread   the same for a layer of a trace

The distance is exact for affine routers z = W x + b: the nearest wall z_i = z_j always bounds the
token's cell (Paper 1, Def. 4.1).

Paper 3, Prop. 5.6: inputs in a ball of radius R around μ point into a cap of half-angle
θ = arcsin(R / ‖μ‖), which shrinks like (R / ‖μ‖)^(d-1). The paper concludes that routing collapses
at that rate. It does not: the walls of a linear router without bias pass through the origin, and
the expected number of walls through the ball falls only like R / ‖μ‖ (`expected_ties`).
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
"""Number of ranks on either side of the threshold that are tried before all pairs."""

CHUNK = 1 << 18
"""Largest number of (token, expert) entries that the search over all pairs holds at once."""

INPUT_CHUNK = 1 << 16
"""Number of entries of router inputs that are held in float64 at once."""


class NearestTie(NamedTuple):
    """The wall z_i = z_j nearest to each token.

    Attributes:
        distance: Euclidean distance to the wall, in float64; infinite if k = E.
        leaving: the chosen expert i of the tie.
        entering: the expert j of the tie, which is not chosen.
    """

    distance: Float[Tensor, " tokens"]
    leaving: Int[Tensor, " tokens"]
    entering: Int[Tensor, " tokens"]


@dataclass(frozen=True)
class DistanceMeasures:
    """Euclidean distance of the router's input to the nearest tie (Def. 5.2).

    Attributes:
        quantiles: quantiles of the distance.
        density: density of the distance at zero, per unit of the input.
    """

    quantiles: Quantiles
    density: Estimate


def expert_distances(weight: Float[Tensor, "experts dim"]) -> Float[Tensor, "experts experts"]:
    """Return D_ij = ‖w_i - w_j‖ in float64 (Def. 5.1).

    The expansion ‖w_i‖² - 2 w_i·w_j + ‖w_j‖² is avoided: it cancels for similar experts.
    """
    rows = weight.detach().double()
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")


def nearest_tie(
    scores: Float[Tensor, "tokens experts"],
    k: int,
    distances: Float[Tensor, "experts experts"],
    ranked: Ranked | None = None,
) -> NearestTie:
    """Return the distance to Γ, min over i ∈ S, j ∉ S of (z_i - z_j) / ‖w_i - w_j‖ (Def. 5.2).

    Tries a few ranks around the threshold first. A nearer pair outside these ranks would need
    z_i - z_j < best · max D, but its difference is at least that of the first excluded rank. Tokens
    for which this does not rule out a nearer pair are searched over all k (E - k) pairs.

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
    near, proved = _nearest_among_neighbours(ranked, distances, k)
    if scores.device.type != "cpu":  # reading back which tokens are unproved would synchronise
        return _replace_unproved(near, proved, scores, ranked, distances, k)
    rest = (~proved).nonzero().squeeze(1)
    for rows in rest.split(max(1, CHUNK // experts)) if len(rest) else ():
        chosen = ranked.indices[rows, :k].long()
        exact = _nearest_among_all_pairs(scores[rows].double(), chosen, distances)
        for column, values in zip(near, exact, strict=True):
            column[rows] = values
    return near


def _replace_unproved(
    near: NearestTie,
    proved: Tensor,
    scores: Float[Tensor, "tokens experts"],
    ranked: Ranked,
    distances: Float[Tensor, "experts experts"],
    k: int,
) -> NearestTie:
    """Replace ties that are not proved to be the nearest by the nearest over all pairs."""
    rows = max(1, CHUNK // scores.shape[1])
    chosen = ranked.indices[:, :k].long().split(rows)
    blocks = zip(scores.double().split(rows), chosen, strict=True)
    exact = (_nearest_among_all_pairs(block, ids, distances) for block, ids in blocks)
    columns = (torch.cat(column) for column in zip(*exact, strict=True))
    return NearestTie(*(torch.where(proved, a, b) for a, b in zip(near, columns, strict=True)))


def _nearest_among_neighbours(
    ranked: Ranked, distances: Float[Tensor, "experts experts"], k: int
) -> tuple[NearestTie, Tensor]:
    """Return the best pair of the ranks around the threshold, and where no pair can be better."""
    first, last = max(0, k - NEIGHBOURS), min(ranked.values.shape[1], k + NEIGHBOURS)
    z, ids = ranked.values.detach().double(), ranked.indices.long()
    inner, outer = ids[:, first:k], ids[:, k:last]
    rise = z[:, first:k, None] - z[:, None, k:last]
    pair_distances = _wall_distance(rise, distances[inner[:, :, None], outer[:, None, :]])
    best = pair_distances.flatten(1).min(dim=1)
    leaving = inner.gather(1, (best.indices // outer.shape[1])[:, None]).squeeze(1)
    entering = outer.gather(1, (best.indices % outer.shape[1])[:, None]).squeeze(1)
    excluded_rise = torch.full_like(best.values, torch.inf)
    if first > 0:
        excluded_rise = torch.minimum(excluded_rise, z[:, first - 1] - z[:, k])
    if last < len(distances):
        excluded_rise = torch.minimum(excluded_rise, z[:, k - 1] - z[:, last])
    proved = best.values * distances.max() <= excluded_rise
    return NearestTie(best.values, leaving, entering), proved


def _nearest_among_all_pairs(
    scores: Float[Tensor, "tokens experts"],
    chosen: Int[Tensor, "tokens k"],
    distances: Float[Tensor, "experts experts"],
) -> NearestTie:
    """Return the best of all pairs; loops over chosen ranks to limit memory to (T, E)."""
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
    """Return (z_i - z_j) / D_ij, and 0 for z_i <= z_j even if D_ij = 0.

    A router that ranks computed softmax values may choose the lower of two scores that differ by
    rounding only; that token counts as lying on the wall too.
    """
    return torch.where(rise <= 0, 0.0, rise / distance)


def _no_tie(scores: Float[Tensor, "tokens experts"]) -> NearestTie:
    """Return infinite distances and experts -1, for routers without walls."""
    no_expert = torch.full((len(scores),), -1, dtype=torch.long, device=scores.device)
    infinite = torch.full_like(no_expert, torch.inf, dtype=torch.float64)
    return NearestTie(infinite, no_expert, no_expert)


@dataclass(frozen=True)
class AngularSpread:
    """Directions of the router's inputs.

    Attributes:
        mean_norm: ‖μ‖, μ the mean input.
        radius: root mean square of ‖x - μ‖.
        largest_radius: maximum of ‖x - μ‖, the R of Paper 3, Prop. 5.6.
        mean_over_radius: ‖μ‖ / radius; infinite if all inputs are equal.
        mean_cosine: ‖mean of x / ‖x‖‖: 1 if all inputs point the same way, 0 if they cancel.
        cap_fraction: share of the sphere in the cap subtended by the ball of `largest_radius`; 1
            if the ball contains the origin.
        log10_cap_fraction: logarithm of `cap_fraction`, which does not underflow.
        expected_ties: expected number of walls through the ball of root mean square radius, for a
            router with isotropic weights and no bias.
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
    """Compute mean, radius, cap and expected ties of the router's inputs (Def. 9.1 - 9.3)."""
    tokens, dim = inputs.shape
    require(tokens > 0 and dim > 1, f"need a token and dim > 1, got {inputs.shape}", ShapeError)
    sums = torch.zeros(2, dim, dtype=torch.float64, device="cpu")
    chunks = inputs.split(max(1, INPUT_CHUNK // dim))
    for rows in chunks:  # float64 copies of a few rows stay in the processor's cache
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
    """Return log ½ I_{sin²θ}((d-1)/2, ½), the log share of the sphere within angle θ (Def. 9.2).

    Computed as x^a (1-x)^½ / (2 a B(a, ½)) · F(a + ½, 1; a + 1; x) with x = sin²θ, a = (d-1)/2,
    because the incomplete beta function underflows for large d. 0 if sin θ >= 1: the ball then
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
    """Return ρ I_{s²}(½, (d-1)/2), s = R / ‖μ‖, ρ = √π f_gap(0) of iid normal scores (Def. 9.3)."""
    if k >= n_experts:
        return 0.0
    rho = math.sqrt(math.pi) * gaussian_gap_density(n_experts, k)
    s = min(1.0, radius / mean_norm) if mean_norm > 0 else 1.0
    return rho * float(special.betainc(0.5, (dim - 1) / 2, s**2))


def measure_distances(
    layer: LayerTrace, settings: MeasureSettings
) -> Measurement[DistanceMeasures]:
    """Measure the distances to the nearest tie that were computed at capture (Def. 5.2)."""
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


def measure_angular_spread(layer: LayerTrace) -> Measurement[AngularSpread]:
    """Measure the directions of the router's inputs (Def. 9.1 - 9.3)."""
    if layer.inputs is None:
        return Measurement(None, "not answerable: router inputs were not kept")
    if layer.inputs.shape[-1] < 2:
        return Measurement(None, "not answerable: inputs of one dimension have no direction")
    return Measurement(angular_spread(layer.inputs, layer.facts.n_experts, layer.facts.k))
