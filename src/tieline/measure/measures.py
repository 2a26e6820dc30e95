"""All measures of a trace: one record per layer, one for the model.

    measure_layer         a layer of a trace
    measure_layers        every layer of a trace, on all cores
    measure               every layer of a trace, and the model
    join_layer_measures   the model, from layers that were measured one by one

The status of a measure says why a trace cannot answer it (ids only, no inputs, no weight). Jumps
need the experts themselves and are measured in `tieline.analysis`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.numerics import one_thread
from tieline.core.records import short_repr
from tieline.core.statistics import (
    Estimate,
    Quantiles,
    Share,
    clustered_error,
    clustered_share,
    mean_estimate,
    quantile_record,
)
from tieline.measure.boundary import (
    GapMeasures,
    NearMeasures,
    measure_gaps,
    measure_near_experts,
)
from tieline.measure.distance import (
    AngularSpread,
    DistanceMeasures,
    measure_angular_spread,
    measure_distances,
)
from tieline.measure.expert_load import (
    Coalitions,
    ExpertLoad,
    coalitions,
    expert_load,
)
from tieline.measure.measure_settings import Measurement, MeasureSettings
from tieline.measure.noise_flips import NoiseFlips, logit_view, noise_flips, noisy_gap_density
from tieline.measure.rounding_flips import (
    PrecisionFlips,
    ProductFlips,
    measure_product_flips,
    precision_flips,
)
from tieline.trace.record import LayerTrace, RoutingTrace, check_finite_scores

PerToken = Float[Tensor, " tokens"]

UNKNOWN_LOGIT_SIZE = (
    "not answerable: softmax scores do not tell the size of the logits that are rounded"
)


@dataclass(frozen=True)
class LayerMeasures:
    """All measures of one layer.

    For a smoothed router, which has no walls, they describe the ties at which top-k would exchange
    two experts.

    Attributes:
        used: mean number of experts in use per token for a smoothed router; None for top-k, which
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
    """Flip rate of the model under one perturbation, over the layers that can be measured.

    Attributes:
        name: the perturbation, "0.01" for noise of σ or "bf16" for rounding to a format.
        mean: mean over layers.
        any_layer: share of tokens that flip in at least one layer, each layer with clean inputs.
        worst_layer: name of the layer with the highest rate.
        worst: rate of that layer.
        layers: number of measured layers.
        any_share: `any_layer` with its interval, clustered by document.
        worst_share: `worst` with its interval, not corrected for selecting the largest rate.
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
        dead: number of dead experts in all layers.
        cold: number of cold experts in all layers.
        evenness: evenness of the load, mean over layers.
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
    bias: Float[Tensor, " experts"] | None = None,
) -> LayerMeasures:
    """Compute all measures of one layer; the status of a measure says why it is missing.

    Args:
        layer: the layer's trace.
        settings: grids and formats; `MeasureSettings()` by default.
        epsilons: the ε grid of `layer.near` (`RoutingTrace.epsilons`).
        weight: weight of a linear router, for flips by a low-precision matrix product.
        bias: its bias; None for a router without one.
    """
    settings = settings or MeasureSettings()
    return measure_layer_per_token(layer, settings, epsilons, weight, bias).record


def measure(
    trace: RoutingTrace,
    settings: MeasureSettings | None = None,
    weights: Mapping[str, Tensor] | None = None,
    biases: Mapping[str, Tensor] | None = None,
) -> RoutingMeasures:
    """Compute all measures of every layer and of the model.

    Args:
        trace: the trace.
        settings: grids and formats; `MeasureSettings()` by default.
        weights: (E, D) weight of each linear router by the name of its layer.
        biases: (E,) bias of each linear router that has one.
    """
    settings = settings or MeasureSettings()
    layers = measure_layers(trace, settings, weights or {}, biases)
    return join_layer_measures(layers, settings, trace)


def measure_layers(
    trace: RoutingTrace,
    settings: MeasureSettings,
    weights: Mapping[str, Tensor],
    biases: Mapping[str, Tensor] | None = None,
) -> list["MeasuredLayer"]:
    """Measure each layer on its own thread, as many at once as torch uses threads.

    A layer consists of many small operations, for which several threads per layer are slower than
    one. Arguments as for `measure`.
    """
    threads = torch.get_num_threads()

    def measure_on_one_thread(layer: LayerTrace) -> MeasuredLayer:
        """Measure one layer with single-threaded operations."""
        with one_thread():
            weight, bias = weights.get(layer.name), (biases or {}).get(layer.name)
            return measure_layer_per_token(layer, settings, trace.epsilons, weight, bias)

    if threads == 1 or len(trace.layers) == 1:
        return [measure_on_one_thread(layer) for layer in trace.layers]
    try:
        with ThreadPoolExecutor(min(threads, len(trace.layers))) as pool:
            return list(pool.map(measure_on_one_thread, trace.layers))
    finally:
        torch.set_num_threads(threads)  # worker threads change the number for the process


def join_layer_measures(
    layers: Sequence["MeasuredLayer"], settings: MeasureSettings, trace: RoutingTrace
) -> RoutingMeasures:
    """Compute the measures of the model from the measured layers.

    Args:
        layers: every layer of the trace, in order.
        settings: grids and formats.
        trace: the trace, for its documents and provenance.
    """
    with one_thread():
        model = _model_measures(list(layers), settings, trace.documents.long())
    return RoutingMeasures(tuple(layer.record for layer in layers), model, dict(trace.provenance))


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer's record with the values per token that the model's record is computed from."""

    record: LayerMeasures
    gaps: PerToken | None
    noise: dict[str, PerToken] = field(default_factory=dict)
    precision: dict[str, PerToken] = field(default_factory=dict)

    __repr__ = short_repr


def measure_layer_per_token(
    layer: LayerTrace,
    settings: MeasureSettings,
    epsilons: tuple[float, ...],
    weight: Tensor | None,
    bias: Tensor | None = None,
) -> MeasuredLayer:
    """Measure one layer and return its record with the values per token."""
    check_finite_scores(layer)
    facts, chosen, status = layer.facts, layer.experts[:, : layer.facts.k], gap_status(layer)
    used = None if layer.used is None else layer.used.double().mean().item()
    record = LayerMeasures(
        name=layer.name,
        tokens=len(chosen),
        n_experts=facts.n_experts,
        k=facts.k,
        units=facts.units,
        load=expert_load(chosen, facts.n_experts, settings.cold_below),
        coalitions=coalitions(chosen, facts.n_experts),
        gap=Measurement(None, status),
        near=Measurement(None, status),
        distance=measure_distances(layer, settings),
        noise=Measurement(None, status),
        precision=Measurement(None, status),
        product=Measurement(None, status),
        angular=measure_angular_spread(layer),
        used=used,
    )
    if status != "ok":
        return MeasuredLayer(record, None)
    return _add_score_measures(layer, record, settings, epsilons, weight, bias)


def _add_score_measures(
    layer: LayerTrace,
    record: LayerMeasures,
    settings: MeasureSettings,
    epsilons: tuple[float, ...],
    weight: Tensor | None,
    bias: Tensor | None,
) -> MeasuredLayer:
    """Add the measures that need scores on both sides of the threshold."""
    view = logit_view(layer)
    density = noisy_gap_density(layer, view)
    noise = noise_flips(layer, view, settings.sigmas, density)
    precisions = settings.precisions if view.logits is not None else ()
    rounded = [precision_flips(layer, view, name) for name in precisions]
    rows = tuple(row for row, _ in rounded)
    precision_status = "ok" if view.logits is not None else UNKNOWN_LOGIT_SIZE
    record = dataclasses.replace(
        record,
        gap=Measurement(measure_gaps(layer.gap, settings)),
        near=Measurement(measure_near_experts(layer, settings, epsilons)),
        noise=Measurement(tuple(row for row, _ in noise)),
        precision=Measurement(rows if view.logits is not None else None, precision_status),
        product=measure_product_flips(layer, view, weight, settings.product_precision, bias),
    )
    return MeasuredLayer(
        record,
        layer.gap,
        {f"{row.sigma:g}": chance for row, chance in noise},
        {row.precision: flipped for row, flipped in rounded},
    )


def _model_measures(
    layers: list[MeasuredLayer], settings: MeasureSettings, documents: Int[Tensor, " tokens"]
) -> ModelMeasures:
    """Compute the measures of the model as a whole."""
    gaps = [layer.gaps for layer in layers if layer.gaps is not None]
    units = {layer.record.units for layer in layers if layer.gaps is not None}
    status = f"not answerable: {len(units)} kinds of score"
    gap, smallest = Measurement(None, status), Measurement(None, status)
    if len(units) == 1:
        gap = Measurement(measure_gaps(torch.cat(gaps), settings))
        smallest_gaps = torch.stack(gaps).amin(dim=0)
        smallest = Measurement(
            quantile_record(smallest_gaps, settings.probabilities, settings.confidence)
        )
    noise = [(layer.record.name, layer.noise) for layer in layers]
    precision = [(layer.record.name, layer.precision) for layer in layers]
    return ModelMeasures(
        gap=gap,
        smallest_gap=smallest,
        noise=_model_rates(noise, documents),
        precision=_model_rates(precision, documents),
        **load_totals([layer.record for layer in layers]),
    )


def load_totals(layers: Sequence[LayerMeasures]) -> dict[str, Any]:
    """Return the load fields of `ModelMeasures` from the loads of the layers."""
    loads = [layer.load for layer in layers]
    return {
        "dead": sum(len(load.dead) for load in loads),
        "cold": sum(len(load.cold) for load in loads),
        "evenness": sum(load.evenness for load in loads) / len(loads),
    }


def _model_rates(
    layers: list[tuple[str, dict[str, PerToken]]], documents: Int[Tensor, " tokens"]
) -> tuple[ModelRate, ...]:
    """Return the flip rate of each perturbation, over the layers that were measured under it."""
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
    """Return the flip rate of one perturbation, with intervals clustered by document."""
    chances = torch.stack([chance for _, chance in layers])
    means = chances.mean(dim=1)
    worst, any_chance = int(means.argmax()), 1 - (1 - chances).prod(dim=0)
    return ModelRate(
        name=name,
        mean=_clustered_mean(chances.mean(dim=0), documents),
        any_layer=_clustered_mean(any_chance, documents),
        worst_layer=layers[worst][0],
        worst=means[worst].item(),
        layers=len(layers),
        any_share=clustered_share(any_chance, documents),
        worst_share=clustered_share(chances[worst], documents),
    )


def _clustered_mean(values: PerToken, documents: Int[Tensor, " tokens"]) -> Estimate:
    """Mean with its standard error clustered by document, or by token if there is one document."""
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
