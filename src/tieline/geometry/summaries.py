"""The same measures from a streaming summary of a long run.

What the summary counts over all tokens (load, gaps, distances, K(ε), orders of ties) is taken from
the counts; what needs whole tokens (noise, rounding, margin tail, smallest gap) from its sample,
which is drawn by hash and so is a random one.

Quantiles are known to one bin of the grid, 1/32 of their value, and their intervals say so. The
boundary mass is given at grid points, where counts are exact.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping

import torch
from jaxtyping import Int
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.geometry.boundary import mass_profile
from tieline.geometry.density import density_from_masses
from tieline.geometry.load import Coalitions, load_from_counts, log10_possible
from tieline.geometry.measures import measure
from tieline.geometry.records import (
    Answer,
    DistanceMeasures,
    GapMeasures,
    LayerMeasures,
    ModelMeasures,
    NearMeasures,
    Quantiles,
    RoutingMeasures,
)
from tieline.geometry.sections import interpolated_epsilon
from tieline.geometry.settings import MeasureSettings
from tieline.numerics import Estimate, normal_quantile
from tieline.trace.grid import LogHistogram, grid_points
from tieline.trace.layer_summary import LayerSummary
from tieline.trace.summary import RoutingSummary

__all__ = ["histogram_density", "histogram_quantiles", "measure_summary"]

OCTAVE = 32
"""Grid points from w to 2w."""


def measure_summary(
    summary: RoutingSummary,
    settings: MeasureSettings | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> RoutingMeasures:
    """All measures of every layer and of the model, from a streaming summary.

    Arguments as for `measures.measure`; inputs and products are those of the sample.
    """
    for layer in summary.layers:
        require(
            layer.nonfinite == 0,
            f"layer {layer.name!r}: scores of {layer.nonfinite} of {layer.tokens} tokens are NaN "
            f"or infinite, first at {layer.first_nonfinite}",
            TraceError,
        )
    chosen = settings or MeasureSettings()
    sampled = measure(summary.sample, chosen, weights)
    pairs = zip(summary.layers, sampled.layers, strict=True)
    layers = tuple(_layer(whole, part, summary.epsilons, chosen) for whole, part in pairs)
    sources: dict[str, object] = {"sources": list(summary.sources)}
    return RoutingMeasures(layers, _model(summary, sampled.model, layers, chosen), sources)


def histogram_quantiles(histogram: LogHistogram, settings: MeasureSettings) -> Quantiles:
    """Quantiles of counted numbers: middle of their bin, limits by rank and by bin (Def. 2.4)."""
    n, half = histogram.total, normal_quantile(settings.confidence)
    rows = []
    for p in settings.probabilities:
        reach = half * math.sqrt(p * (1 - p) / n)
        low, high = histogram.quantile(max(p, 1 / n))
        first, _ = histogram.quantile(max(p - reach, 1 / n))
        _, last = histogram.quantile(min(max(p + reach, 1 / n), 1.0))
        rows.append(((low + high) / 2, first, last))
    return Quantiles(settings.probabilities, *zip(*rows, strict=True))


def histogram_density(histogram: LogHistogram, mass: float = 0.2) -> Estimate:
    """Density at zero, w the largest grid point with F(2w) <= mass (Def. 3.2)."""
    n = histogram.total
    middle = (histogram.below() + histogram.at_most()).double() / (2 * n)
    wide = middle[OCTAVE:]
    fitting = int((wide <= mass).sum())
    if fitting == 0 or fitting == len(wide):
        where = "exactly zero" if fitting == 0 else "beyond the grid"
        return Estimate(None, None, f"not answerable: the {mass:g}-quantile is {where}")
    width = grid_points()[fitting - 1].item()
    return density_from_masses(middle[fitting - 1].item(), wide[fitting - 1].item(), width, n)


def _layer(
    whole: LayerSummary,
    part: LayerMeasures,
    epsilons: tuple[float, ...],
    settings: MeasureSettings,
) -> LayerMeasures:
    """The sample's record with everything that was counted over all tokens in its place."""
    counted = whole.coalitions.count()
    possible = log10_possible(whole.facts.n_experts, whole.facts.k)
    return dataclasses.replace(
        part,
        tokens=whole.tokens,
        load=load_from_counts(whole.load, settings.cold_below),
        coalitions=Coalitions(round(counted.value), None, possible, whole.tokens),
        gap=_gap(whole.gaps, part.gap, settings),
        near=_near(whole, part.near, epsilons, settings),
        distance=_distance(whole.distances, part.distance, settings),
    )


def _gap(
    histogram: LogHistogram | None, part: Answer[GapMeasures], settings: MeasureSettings
) -> Answer[GapMeasures]:
    if histogram is None or part.value is None:
        return part
    points = grid_points()
    wanted = torch.tensor(settings.widths, dtype=torch.float64)
    nearest = torch.searchsorted(points, wanted).clamp(max=len(points) - 1).unique()
    counts, n = histogram.at_most()[nearest], histogram.total
    return Answer(
        GapMeasures(
            quantiles=histogram_quantiles(histogram, settings),
            profile=mass_profile(counts, n, points[nearest], settings.confidence),
            density=histogram_density(histogram),
            tail=part.value.tail,
            ties=histogram.zeros,
            tokens=n,
        )
    )


def _distance(
    histogram: LogHistogram | None, part: Answer[DistanceMeasures], settings: MeasureSettings
) -> Answer[DistanceMeasures]:
    if histogram is None:
        return part
    found = histogram_quantiles(histogram, settings)
    return Answer(DistanceMeasures(found, histogram_density(histogram)))


def _near(
    whole: LayerSummary,
    part: Answer[NearMeasures],
    epsilons: tuple[float, ...],
    settings: MeasureSettings,
) -> Answer[NearMeasures]:
    if whole.near is None or whole.orders is None or part.value is None:
        return part
    experts = tuple(_mean_count(row) for row in whole.near)
    most = settings.most_orders
    orders = torch.nn.functional.pad(whole.orders, (0, most)).double() / whole.measured
    tails = orders[:, most:].sum(dim=1, keepdim=True)
    shares = torch.cat([orders[:, :most], tails], dim=1)
    return Answer(
        NearMeasures(
            epsilons=epsilons,
            experts=experts,
            orders=tuple(tuple(row) for row in shares.tolist()),
            censored=(0.0,) * len(epsilons),
            epsilon_half=interpolated_epsilon(
                whole.facts.k + 0.5, epsilons, experts, whole.facts.k
            ),
        )
    )


def _mean_count(counts: Int[Tensor, " values"]) -> Estimate:
    """Mean of a number of which `counts[v]` were v."""
    n, values = int(counts.sum()), torch.arange(len(counts), dtype=torch.float64)
    share = counts.double() / n
    mean = (share @ values).item()
    variance = (share @ (values - mean).square()).item()
    return Estimate(mean, math.sqrt(variance / max(1, n - 1)))


def _model(
    summary: RoutingSummary,
    sampled: ModelMeasures,
    layers: tuple[LayerMeasures, ...],
    settings: MeasureSettings,
) -> ModelMeasures:
    histograms = [layer.gaps for layer in summary.layers if layer.gaps is not None]
    pooled = functools.reduce(operator.add, histograms) if histograms else None
    return dataclasses.replace(
        sampled,
        gap=_gap(pooled, sampled.gap, settings),
        dead=sum(len(layer.load.dead) for layer in layers),
        cold=sum(len(layer.load.cold) for layer in layers),
        evenness=sum(layer.load.evenness for layer in layers) / len(layers),
    )
