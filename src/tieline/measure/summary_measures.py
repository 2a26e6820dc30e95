"""Measures of a streaming summary: those of a trace, from counts over all tokens and a sample.

A summary counts load, gaps, distances, K(ε) and orders of ties over all tokens; noise, rounding,
margin tail and smallest gap are measured on its sample, which is drawn by hash and thus random.
Quantiles of counts are known to one bin of the grid, 1/32 of their value; their intervals include
this error. The boundary mass is given at grid points, where counts are exact.
"""

import dataclasses
import functools
import math
import operator

import torch
from jaxtyping import Int
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.statistics import Estimate, Quantiles, normal_quantile
from tieline.core.text import layer_label
from tieline.measure.boundary import (
    GapMeasures,
    NearMeasures,
    density_from_masses,
    epsilon_reaching_count,
    mass_profile,
)
from tieline.measure.distance import DistanceMeasures
from tieline.measure.expert_load import Coalitions, load_from_counts, log10_possible
from tieline.measure.measure_settings import Measurement, MeasureSettings
from tieline.measure.measures import LayerMeasures, RoutingMeasures, load_totals, measure
from tieline.trace.counts import LogHistogram, grid_points
from tieline.trace.summary import LayerSummary, RoutingSummary

POINTS_PER_OCTAVE = 32
"""Number of grid points of a `LogHistogram` from w to 2w."""


def measure_summary(
    summary: RoutingSummary, settings: MeasureSettings | None = None
) -> RoutingMeasures:
    """Compute all measures of every layer and of the model from a streaming summary.

    Arguments as for `measure`; noise and rounding are measured on the sample.
    """
    for layer in summary.layers:
        require(
            layer.nonfinite == 0,
            f"{layer_label(layer.name)}: scores of {layer.nonfinite} of {layer.tokens} tokens are "
            f"NaN or infinite, first at {layer.first_nonfinite}",
            TraceError,
        )
    settings = settings or MeasureSettings()
    sampled = measure(summary.sample, settings)
    layers = tuple(
        _layer_from_summary(layer, sampled_layer, summary.epsilons, settings)
        for layer, sampled_layer in zip(summary.layers, sampled.layers, strict=True)
    )
    histograms = [layer.gaps for layer in summary.layers if layer.gaps is not None]
    pooled = functools.reduce(operator.add, histograms) if histograms else None
    gap = _gap_from_histogram(pooled, sampled.model.gap, settings)
    model = dataclasses.replace(sampled.model, gap=gap, **load_totals(layers))
    return RoutingMeasures(layers, model, {"sources": list(summary.sources)})


def histogram_quantiles(histogram: LogHistogram, settings: MeasureSettings) -> Quantiles:
    """Return quantiles of a histogram: the middle of their bin, with intervals (Def. 2.4).

    Intervals include the sampling error of the rank and the width of the bin.
    """
    n, z = histogram.total, normal_quantile(settings.confidence)
    rows = []
    for p in settings.probabilities:
        margin = z * math.sqrt(p * (1 - p) / n)
        low, high = histogram.quantile(max(p, 1 / n))
        lower_limit, _ = histogram.quantile(max(p - margin, 1 / n))
        _, upper_limit = histogram.quantile(min(max(p + margin, 1 / n), 1.0))
        rows.append(((low + high) / 2, lower_limit, upper_limit))
    return Quantiles(settings.probabilities, *zip(*rows, strict=True))


def histogram_density(histogram: LogHistogram) -> Estimate:
    """Return the density at zero, with w the largest grid point where F(2w) <= 0.2 (Def. 3.2)."""
    n, mass = histogram.total, 0.2
    f_w = (histogram.below() + histogram.at_most()).double() / (2 * n)
    f_2w = f_w[POINTS_PER_OCTAVE:]
    count = int((f_2w <= mass).sum())
    if count == 0 or count == len(f_2w):
        where = "exactly zero" if count == 0 else "beyond the grid"
        return Estimate(None, None, f"not answerable: the {mass:g}-quantile is {where}")
    width = grid_points()[count - 1].item()
    return density_from_masses(f_w[count - 1].item(), f_2w[count - 1].item(), width, n)


def _layer_from_summary(
    summary: LayerSummary,
    sampled: LayerMeasures,
    epsilons: tuple[float, ...],
    settings: MeasureSettings,
) -> LayerMeasures:
    """Return the sample's record with the measures that were counted over all tokens replaced."""
    n_sets = summary.coalitions.count()
    possible = log10_possible(summary.facts.n_experts, summary.facts.k)
    distance = sampled.distance
    if summary.distances is not None:
        quantiles = histogram_quantiles(summary.distances, settings)
        distance = Measurement(DistanceMeasures(quantiles, histogram_density(summary.distances)))
    return dataclasses.replace(
        sampled,
        tokens=summary.tokens,
        load=load_from_counts(summary.load, settings.cold_below),
        coalitions=Coalitions(round(n_sets.value), None, possible, summary.tokens),
        gap=_gap_from_histogram(summary.gaps, sampled.gap, settings),
        near=_near_from_summary(summary, sampled.near, epsilons, settings),
        distance=distance,
    )


def _gap_from_histogram(
    histogram: LogHistogram | None, sampled: Measurement[GapMeasures], settings: MeasureSettings
) -> Measurement[GapMeasures]:
    """Measure the gaps of all tokens from their histogram, with the margin tail of the sample."""
    if histogram is None or sampled.value is None:
        return sampled
    points = grid_points()
    widths = torch.tensor(settings.widths, dtype=torch.float64, device=points.device)
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


def _near_from_summary(
    summary: LayerSummary,
    sampled: Measurement[NearMeasures],
    epsilons: tuple[float, ...],
    settings: MeasureSettings,
) -> Measurement[NearMeasures]:
    """Measure the experts near the threshold from counts over all tokens."""
    if summary.near is None or summary.orders is None or sampled.value is None:
        return sampled
    experts = tuple(_mean_from_counts(row) for row in summary.near)
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
            epsilon_half=epsilon_reaching_count(
                summary.facts.k + 0.5, epsilons, experts, summary.facts.k
            ),
        )
    )


def _mean_from_counts(counts: Int[Tensor, " values"]) -> Estimate:
    """Mean of an integer variable that took the value v in `counts[v]` cases."""
    n = int(counts.sum())
    values = torch.arange(len(counts), dtype=torch.float64, device=counts.device)
    share = counts.double() / n
    mean = (share @ values).item()
    variance = (share @ (values - mean).square()).item()
    return Estimate(mean, math.sqrt(variance / max(1, n - 1)))
