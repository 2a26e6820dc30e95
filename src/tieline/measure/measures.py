"""All measures of a trace or of a summary: one record per layer, one for the model.

    measure_layer      a layer of a trace
    measure_layers     every layer of a trace, on all cores
    measure            every layer of a trace, and the model
    joined_measures    the model, of layers that were measured one by one
    measure_summary    every layer and the model, from the streaming summary of a long run

The status of a section says why a trace cannot answer it (ids only, no inputs, no weight). Jumps
need the experts themselves and are measured in `tieline.analysis`.

A summary counts load, gaps, distances, K(ε) and orders of ties over all tokens; noise, rounding,
margin tail and smallest gap are measured on its sample, which is drawn by hash and thus random.
Quantiles of counts are known to one bin of the grid, 1/32 of their value, and their intervals
include that. The boundary mass is given at grid points, where counts are exact.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.numerics import one_thread
from tieline.core.records import short_repr
from tieline.core.statistics import (
    Estimate,
    Quantiles,
    Share,
    clustered_error,
    clustered_share,
    mean_estimate,
    normal_quantile,
    quantile_record,
)
from tieline.core.text import layer_label
from tieline.measure.boundary import (
    GapMeasures,
    NearMeasures,
    density_from_masses,
    epsilon_reaching_count,
    gap_section,
    mass_profile,
    near_section,
)
from tieline.measure.distance import (
    AngularSpread,
    DistanceMeasures,
    angular_section,
    distance_section,
)
from tieline.measure.expert_load import (
    Coalitions,
    ExpertLoad,
    coalitions,
    expert_load,
    load_from_counts,
    log10_possible,
)
from tieline.measure.measure_settings import Measurement, MeasureSettings
from tieline.measure.noise_flips import NoiseFlips, logit_view, noise_densities, noise_flips
from tieline.measure.rounding_flips import (
    PrecisionFlips,
    ProductFlips,
    precision_flips,
    product_section,
)
from tieline.trace.counts import LogHistogram, grid_points
from tieline.trace.record import LayerTrace, RoutingTrace, check_finite_scores
from tieline.trace.summary import LayerSummary, RoutingSummary

PerToken = Float[Tensor, " tokens"]


SOFTMAX_SIZES = "not answerable: softmax scores do not tell the size of the logits that are rounded"


@dataclass(frozen=True)
class LayerMeasures:
    """All measures of one layer.

    Those of a smoothed router, which has no wall where top-k has one, say how far its tokens are
    from the tie at which top-k would exchange two experts.

    Attributes:
        used: mean number of experts in use per token, of a smoothed router; None for top-k, which
            uses k.
    """

    name: str
    tokens: int
    n_experts: int
    k: int
    units: str
    load: ExpertLoad
    coalitions: Coalitions
    gap: Measurement[GapMeasures]
    near: Measurement[NearMeasures]
    distance: Measurement[DistanceMeasures]
    noise: Measurement[tuple[NoiseFlips, ...]]
    precision: Measurement[tuple[PrecisionFlips, ...]]
    product: Measurement[ProductFlips]
    angular: Measurement[AngularSpread]
    used: float | None = None

    __repr__ = short_repr


@dataclass(frozen=True)
class ModelRate:
    """A flip rate over the layers that can be measured.

    Attributes:
        name: the noise, "0.01" for σ or "bf16" for a format.
        mean: mean over layers.
        any_layer: share of tokens that flip in at least one layer, each layer with clean inputs.
        worst_layer: name of the layer with the highest rate.
        worst: the rate of that layer.
        layers: number of these layers.
        any_share: `any_layer` with its interval, clustered by document.
        worst_share: `worst`, likewise; that it is the largest of many is not in the interval.
    """

    name: str
    mean: Estimate
    any_layer: Estimate
    worst_layer: str
    worst: float
    layers: int
    any_share: Share | None = None
    worst_share: Share | None = None


@dataclass(frozen=True)
class ModelMeasures:
    """Measures of the model as a whole.

    Attributes:
        gap: distribution of the gaps of all layers together.
        smallest_gap: quantiles of each token's smallest gap over the layers.
        noise: flips under noise of each σ.
        precision: flips by rounding to each format, emulated.
        dead: number of dead experts over all layers.
        cold: number of cold experts over all layers.
        evenness: mean evenness of the load.
    """

    gap: Measurement[GapMeasures]
    smallest_gap: Measurement[Quantiles]
    noise: tuple[ModelRate, ...]
    precision: tuple[ModelRate, ...]
    dead: int
    cold: int
    evenness: float

    __repr__ = short_repr


@dataclass(frozen=True)
class RoutingMeasures:
    """Measures of every layer and of the model."""

    layers: tuple[LayerMeasures, ...]
    model: ModelMeasures
    provenance: dict[str, object]

    __repr__ = short_repr


def measure_layer(
    layer: LayerTrace,
    settings: MeasureSettings | None = None,
    epsilons: tuple[float, ...] = (),
    weight: Float[Tensor, "experts dim"] | None = None,
) -> LayerMeasures:
    """All measures of one layer; the status of a section says why it is missing.

    Args:
        layer: the layer's trace.
        settings: grids and formats; `MeasureSettings()` by default.
        epsilons: the ε grid of `layer.near` (`RoutingTrace.epsilons`).
        weight: weight of a linear router, for the row of the low-precision matrix product.
    """
    return measured_layer(layer, settings or MeasureSettings(), epsilons, weight).record


def measure(
    trace: RoutingTrace,
    settings: MeasureSettings | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> RoutingMeasures:
    """All measures of every layer and of the model.

    Args:
        trace: the trace.
        settings: grids and formats; `MeasureSettings()` by default.
        weights: (E, D) weight of each linear router by the name of its layer.
    """
    chosen = settings or MeasureSettings()
    layers = measure_layers(trace, chosen, weights or {})
    return joined_measures(layers, chosen, trace)


def measure_layers(
    trace: RoutingTrace, settings: MeasureSettings, weights: Mapping[str, Tensor]
) -> list["MeasuredLayer"]:
    """Measure every layer on a thread of its own, as many at once as torch uses threads.

    A layer is many small operations, on which threads wait for each other longer than they gain.
    Arguments as for `measure`.
    """
    threads = torch.get_num_threads()

    def measured(layer: LayerTrace) -> MeasuredLayer:
        """Measure one layer on this thread alone."""
        with one_thread():
            return measured_layer(layer, settings, trace.epsilons, weights.get(layer.name))

    if threads == 1 or len(trace.layers) == 1:
        return [measured(layer) for layer in trace.layers]
    try:
        with ThreadPoolExecutor(min(threads, len(trace.layers))) as pool:
            return list(pool.map(measured, trace.layers))
    finally:
        torch.set_num_threads(threads)  # a thread that ends leaves its own number behind


def joined_measures(
    done: Sequence["MeasuredLayer"], settings: MeasureSettings, trace: RoutingTrace
) -> RoutingMeasures:
    """Compute the measures of the model from the measured layers.

    Args:
        done: every layer of the trace, in order.
        settings: grids and formats.
        trace: the trace, for its documents and provenance.
    """
    with one_thread():
        model = _model_measures(list(done), settings, trace.documents.long())
    return RoutingMeasures(tuple(layer.record for layer in done), model, dict(trace.provenance))


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer's record with the values per token from which the model's is made."""

    record: LayerMeasures
    gaps: PerToken | None
    noise: dict[str, PerToken] = field(default_factory=dict)
    precision: dict[str, PerToken] = field(default_factory=dict)

    __repr__ = short_repr


def measured_layer(
    layer: LayerTrace,
    settings: MeasureSettings,
    epsilons: tuple[float, ...],
    weight: Tensor | None,
) -> MeasuredLayer:
    """Measure one layer, and keep what the measures of the model are made of."""
    check_finite_scores(layer)
    facts, chosen, unknown = layer.facts, layer.experts[:, : layer.facts.k], gap_status(layer)
    used = None if layer.used is None else layer.used.double().mean().item()
    record = LayerMeasures(
        name=layer.name,
        tokens=len(chosen),
        n_experts=facts.n_experts,
        k=facts.k,
        units=facts.units,
        load=expert_load(chosen, facts.n_experts, settings.cold_below),
        coalitions=coalitions(chosen, facts.n_experts),
        gap=Measurement(None, unknown),
        near=Measurement(None, unknown),
        distance=distance_section(layer, settings),
        noise=Measurement(None, unknown),
        precision=Measurement(None, unknown),
        product=Measurement(None, unknown),
        angular=angular_section(layer),
        used=used,
    )
    return (
        MeasuredLayer(record, None)
        if unknown != "ok"
        else _with_score_sections(layer, record, settings, epsilons, weight)
    )


def _with_score_sections(
    layer: LayerTrace,
    record: LayerMeasures,
    settings: MeasureSettings,
    epsilons: tuple[float, ...],
    weight: Tensor | None,
) -> MeasuredLayer:
    """Add the sections that need scores on both sides of the threshold."""
    view = logit_view(layer)
    density = noise_densities(layer, view)
    noise = noise_flips(layer, view, settings.sigmas, density)
    precisions = settings.precisions if view.logits is not None else ()
    rounded = [precision_flips(layer, view, name) for name in precisions]
    rows = tuple(row for row, _ in rounded)
    record = dataclasses.replace(
        record,
        gap=Measurement(gap_section(layer.gap, settings)),
        near=Measurement(near_section(layer, settings, epsilons)),
        noise=Measurement(tuple(row for row, _ in noise)),
        precision=Measurement(None, SOFTMAX_SIZES) if view.logits is None else Measurement(rows),
        product=product_section(layer, view, weight, settings.product_precision),
    )
    return MeasuredLayer(
        record,
        layer.gap,
        {f"{row.sigma:g}": chance for row, chance in noise},
        {row.precision: flipped for row, flipped in rounded},
    )


def _model_measures(
    done: list[MeasuredLayer], settings: MeasureSettings, documents: Int[Tensor, " tokens"]
) -> ModelMeasures:
    """Measures of the model as a whole."""
    gaps = [layer.gaps for layer in done if layer.gaps is not None]
    units = {layer.record.units for layer in done if layer.gaps is not None}
    status = f"not answerable: {len(units)} kinds of score"
    gap, smallest = Measurement(None, status), Measurement(None, status)
    if len(units) == 1:
        gap = Measurement(gap_section(torch.cat(gaps), settings))
        smallest = Measurement(
            quantile_record(
                torch.stack(gaps).amin(dim=0), settings.probabilities, settings.confidence
            )
        )
    return ModelMeasures(
        gap=gap,
        smallest_gap=smallest,
        noise=_model_rates([(layer.record.name, layer.noise) for layer in done], documents),
        precision=_model_rates([(layer.record.name, layer.precision) for layer in done], documents),
        **load_totals([layer.record for layer in done]),
    )


def load_totals(layers: Sequence[LayerMeasures]) -> dict[str, Any]:
    """The load of the model from that of its layers."""
    loads = [layer.load for layer in layers]
    return {
        "dead": sum(len(load.dead) for load in loads),
        "cold": sum(len(load.cold) for load in loads),
        "evenness": sum(load.evenness for load in loads) / len(loads),
    }


def _model_rates(
    layers: list[tuple[str, dict[str, PerToken]]], documents: Int[Tensor, " tokens"]
) -> tuple[ModelRate, ...]:
    """One rate per perturbation, over the layers that have it."""
    names = list(dict.fromkeys(name for _, chances in layers for name in chances))
    return tuple(
        _model_rate(
            name,
            [(layer, chances[name]) for layer, chances in layers if name in chances],
            documents,
        )
        for name in names
    )


def _model_rate(
    name: str, layers: list[tuple[str, PerToken]], documents: Int[Tensor, " tokens"]
) -> ModelRate:
    """The rate of one perturbation over layers, with intervals clustered by document."""
    chances = torch.stack([chance for _, chance in layers])
    means = chances.mean(dim=1)
    worst, somewhere = int(means.argmax()), 1 - (1 - chances).prod(dim=0)
    return ModelRate(
        name=name,
        mean=_clustered_mean(chances.mean(dim=0), documents),
        any_layer=_clustered_mean(somewhere, documents),
        worst_layer=layers[worst][0],
        worst=means[worst].item(),
        layers=len(layers),
        any_share=clustered_share(somewhere, documents),
        worst_share=clustered_share(chances[worst], documents),
    )


def _clustered_mean(values: PerToken, documents: Int[Tensor, " tokens"]) -> Estimate:
    """Mean with its standard error by documents; by tokens if there is one document."""
    unclustered = mean_estimate(values)
    error = clustered_error(values, documents)
    return unclustered if error is None else Estimate(unclustered.value, error)


def gap_status(layer: LayerTrace) -> str:
    """Return "ok" if scores on both sides of the threshold are available, else the reason."""
    k, experts = layer.facts.k, layer.facts.n_experts
    if layer.scores is None:
        return "not answerable: the trace has expert ids only, no scores"
    if k == experts:
        return f"not answerable: all {experts} experts are chosen, so no tie is possible"
    if layer.scores.shape[1] == k:
        return f"not answerable: only the {k} chosen scores were kept, not the next one"
    return "ok"


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
    doubled = middle[OCTAVE:]
    fitting = int((doubled <= mass).sum())
    if fitting == 0 or fitting == len(doubled):
        where = "exactly zero" if fitting == 0 else "beyond the grid"
        return Estimate(None, None, f"not answerable: the {mass:g}-quantile is {where}")
    width = grid_points()[fitting - 1].item()
    return density_from_masses(middle[fitting - 1].item(), doubled[fitting - 1].item(), width, n)


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
            epsilon_half=epsilon_reaching_count(
                summary.facts.k + 0.5, epsilons, experts, summary.facts.k
            ),
        )
    )


def _mean_count(counts: Int[Tensor, " values"]) -> Estimate:
    """Mean of a number that was v in `counts[v]` cases."""
    n = int(counts.sum())
    values = torch.arange(len(counts), dtype=torch.float64, device=counts.device)
    share = counts.double() / n
    mean = (share @ values).item()
    variance = (share @ (values - mean).square()).item()
    return Estimate(mean, math.sqrt(variance / max(1, n - 1)))
