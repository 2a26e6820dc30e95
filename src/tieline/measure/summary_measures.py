"""All measures from the streaming summary of a long run.

A summary counts load, gaps, distances, K(ε) and orders of ties over all tokens; noise, rounding,
margin tail and smallest gap are measured on its sample, which is drawn by hash and thus random.
Quantiles of counts are known to one bin of the grid, 1/32 of their value, and their intervals
include that. The boundary mass is given at grid points, where counts are exact.
"""

import dataclasses
import functools
import math
import operator

import torch
from jaxtyping import Int
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.statistics import (
    Estimate,
    Quantiles,
    normal_quantile,
)
from tieline.core.text import layer_label
from tieline.measure.boundary import (
    GapMeasures,
    NearMeasures,
    density_from_masses,
    interpolated_epsilon,
    mass_profile,
)
from tieline.measure.distance import (
    DistanceMeasures,
)
from tieline.measure.expert_load import (
    Coalitions,
    load_from_counts,
    log10_possible,
)
from tieline.measure.measure_settings import Measurement, MeasureSettings
from tieline.measure.measures import LayerMeasures, RoutingMeasures, load_totals, measure
from tieline.trace.counts import LogHistogram, grid_points
from tieline.trace.summary import LayerSummary, RoutingSummary

OCTAVE = 32
"""Grid points from w to 2w."""


def measure_summary(
    summary: RoutingSummary, settings: MeasureSettings | None = None
) -> RoutingMeasures:
    """All measures of every layer and of the model, from a streaming summary.

    Arguments as for `measure`; noise and rounding are measured on the sample.
    """
    for layer in summary.layers:
        require(
            layer.nonfinite == 0,
            f"{layer_label(layer.name)}: scores of {layer.nonfinite} of {layer.tokens} tokens are "
            f"NaN or infinite, first at {layer.first_nonfinite}",
            TraceError,
        )
    chosen = settings or MeasureSettings()
    sampled = measure(summary.sample, chosen)
    layers = tuple(
        _counted_layer(counted, sampled_layer, summary.epsilons, chosen)
        for counted, sampled_layer in zip(summary.layers, sampled.layers, strict=True)
    )
    histograms = [layer.gaps for layer in summary.layers if layer.gaps is not None]
    pooled = functools.reduce(operator.add, histograms) if histograms else None
    model = dataclasses.replace(
        sampled.model, gap=_counted_gap(pooled, sampled.model.gap, chosen), **load_totals(layers)
    )
    return RoutingMeasures(layers, model, {"sources": list(summary.sources)})


def histogram_quantiles(histogram: LogHistogram, settings: MeasureSettings) -> Quantiles:
    """Quantiles of counts: the middle of their bin, limits by rank and by bin (Def. 2.4)."""
    n, half = histogram.total, normal_quantile(settings.confidence)
    rows = []
    for p in settings.probabilities:
        reach = half * math.sqrt(p * (1 - p) / n)
        low, high = histogram.quantile(max(p, 1 / n))
        first, _ = histogram.quantile(max(p - reach, 1 / n))
        _, last = histogram.quantile(min(max(p + reach, 1 / n), 1.0))
        rows.append(((low + high) / 2, first, last))
    return Quantiles(settings.probabilities, *zip(*rows, strict=True))


def histogram_density(histogram: LogHistogram) -> Estimate:
    """Density at zero, w the largest grid point with F(2w) <= 0.2 (Def. 3.2)."""
    n, mass = histogram.total, 0.2
    middle = (histogram.below() + histogram.at_most()).double() / (2 * n)
    wide = middle[OCTAVE:]
    fitting = int((wide <= mass).sum())
    if fitting == 0 or fitting == len(wide):
        where = "exactly zero" if fitting == 0 else "beyond the grid"
        return Estimate(None, None, f"not answerable: the {mass:g}-quantile is {where}")
    width = grid_points()[fitting - 1].item()
    return density_from_masses(middle[fitting - 1].item(), wide[fitting - 1].item(), width, n)


def _counted_layer(
    summary: LayerSummary,
    sampled: LayerMeasures,
    epsilons: tuple[float, ...],
    settings: MeasureSettings,
) -> LayerMeasures:
    """The sample's record with the sections that were counted over all tokens."""
    counted = summary.coalitions.count()
    possible = log10_possible(summary.facts.n_experts, summary.facts.k)
    distance = sampled.distance
    if summary.distances is not None:
        quantiles_of_distance = histogram_quantiles(summary.distances, settings)
        distance = Measurement(
            DistanceMeasures(quantiles_of_distance, histogram_density(summary.distances))
        )
    return dataclasses.replace(
        sampled,
        tokens=summary.tokens,
        load=load_from_counts(summary.load, settings.cold_below),
        coalitions=Coalitions(round(counted.value), None, possible, summary.tokens),
        gap=_counted_gap(summary.gaps, sampled.gap, settings),
        near=_counted_near(summary, sampled.near, epsilons, settings),
        distance=distance,
    )


def _counted_gap(
    histogram: LogHistogram | None, sampled: Measurement[GapMeasures], settings: MeasureSettings
) -> Measurement[GapMeasures]:
    """Gaps of all tokens by their histogram, with the sample's margin tail."""
    if histogram is None or sampled.value is None:
        return sampled
    points = grid_points()
    widths = torch.tensor(settings.widths, dtype=torch.float64)
    nearest = torch.searchsorted(points, widths).clamp(max=len(points) - 1).unique()
    counts, n = histogram.at_most()[nearest], histogram.total
    return Measurement(
        GapMeasures(
            quantiles=histogram_quantiles(histogram, settings),
            profile=mass_profile(counts, n, points[nearest], settings.confidence),
            density=histogram_density(histogram),
            tail=sampled.value.tail,
            ties=histogram.zeros,
            tokens=n,
        )
    )


def _counted_near(
    summary: LayerSummary,
    sampled: Measurement[NearMeasures],
    epsilons: tuple[float, ...],
    settings: MeasureSettings,
) -> Measurement[NearMeasures]:
    """Experts near the threshold, counted over all tokens."""
    if summary.near is None or summary.orders is None or sampled.value is None:
        return sampled
    experts = tuple(_mean_count(row) for row in summary.near)
    most = settings.most_orders
    orders = torch.nn.functional.pad(summary.orders, (0, most)).double() / summary.measured
    tails = orders[:, most:].sum(dim=1, keepdim=True)
    shares = torch.cat([orders[:, :most], tails], dim=1)
    return Measurement(
        NearMeasures(
            epsilons=epsilons,
            experts=experts,
            orders=tuple(tuple(row) for row in shares.tolist()),
            censored=(0.0,) * len(epsilons),
            epsilon_half=interpolated_epsilon(
                summary.facts.k + 0.5, epsilons, experts, summary.facts.k
            ),
        )
    )


def _mean_count(counts: Int[Tensor, " values"]) -> Estimate:
    """Mean of a number that was v in `counts[v]` cases."""
    n, values = int(counts.sum()), torch.arange(len(counts), dtype=torch.float64)
    share = counts.double() / n
    mean = (share @ values).item()
    variance = (share @ (values - mean).square()).item()
    return Estimate(mean, math.sqrt(variance / max(1, n - 1)))
