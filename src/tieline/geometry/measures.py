"""All measures of a trace: one frozen record per layer and one for the model.

    measure_layer    a layer's record
    measure          every layer's and the model's

What a trace cannot answer (ids only, no inputs, no weight) is said in the status of the section.
Jumps need the experts themselves and are measured elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.geometry.angular import AngularSpread, angular_spread
from tieline.geometry.load import coalitions, expert_load
from tieline.geometry.predictions import (
    noise_densities,
    noise_flips,
    precision_flips,
    product_section,
)
from tieline.geometry.records import (
    Answer,
    LayerMeasures,
    ModelMeasures,
    ModelRate,
    NoiseFlips,
    PrecisionFlips,
    ProductFlips,
    RoutingMeasures,
)
from tieline.geometry.sections import (
    check_finite,
    distance_section,
    gap_section,
    near_section,
    quantiles,
    scored,
)
from tieline.geometry.settings import MeasureSettings
from tieline.geometry.units import LogitView, logit_view
from tieline.numerics import mean_estimate
from tieline.trace.record import LayerTrace, RoutingTrace

__all__ = ["MeasureSettings", "measure", "measure_layer"]

PerToken = Float[Tensor, " tokens"]
SOFTMAX_SIZES = "not answerable: softmax scores do not tell the size of the logits that are rounded"


def measure_layer(
    layer: LayerTrace,
    settings: MeasureSettings | None = None,
    epsilons: tuple[float, ...] = (),
    weight: Float[Tensor, "experts width"] | None = None,
) -> LayerMeasures:
    """All measures of one layer, each with the reason where it cannot be answered.

    Args:
        layer: the layer's trace.
        settings: grids and formats; `MeasureSettings()` by default.
        epsilons: the ε grid of `layer.near` (`RoutingTrace.epsilons`).
        weight: weight of a linear router, for the row of the low-precision matrix product.
    """
    return _measured(layer, settings or MeasureSettings(), epsilons, weight).record


def measure(
    trace: RoutingTrace,
    settings: MeasureSettings | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> RoutingMeasures:
    """All measures of every layer and of the model.

    Args:
        trace: the trace; its layers are visited one after the other.
        settings: grids and formats; `MeasureSettings()` by default.
        weights: (E, D) weight of each linear router by the name of its layer.
    """
    chosen = settings or MeasureSettings()
    weights = weights or {}
    done = [
        _measured(layer, chosen, trace.epsilons, weights.get(layer.name)) for layer in trace.layers
    ]
    records = tuple(one.record for one in done)
    return RoutingMeasures(records, _model(done, chosen), dict(trace.provenance))


@dataclass(frozen=True)
class _Measured:
    """A layer's record and what each of its tokens contributes to the model's."""

    record: LayerMeasures
    gaps: PerToken | None
    noise: dict[str, PerToken] = field(default_factory=dict)
    precision: dict[str, PerToken] = field(default_factory=dict)


def _measured(
    layer: LayerTrace,
    settings: MeasureSettings,
    epsilons: tuple[float, ...],
    weight: Tensor | None,
) -> _Measured:
    check_finite(layer)
    facts, status = layer.facts, scored(layer)
    view = logit_view(layer) if status == "ok" else None
    noise = _noise(layer, view, settings) if view else []
    rounded = _precisions(layer, view, settings) if view and view.logits is not None else []
    chosen = layer.experts[:, : facts.k]
    record = LayerMeasures(
        name=layer.name,
        tokens=len(chosen),
        n_experts=facts.n_experts,
        k=facts.k,
        units=facts.units,
        load=expert_load(chosen, facts.n_experts, settings.cold_below),
        coalitions=coalitions(chosen, facts.n_experts),
        gap=Answer(gap_section(layer.gap, settings)) if view else Answer(None, status),
        near=Answer(near_section(layer, settings, epsilons)) if view else Answer(None, status),
        distance=distance_section(layer, settings),
        noise=Answer(tuple(row for row, _ in noise)) if view else Answer(None, status),
        precision=_precision_answer(view, tuple(row for row, _ in rounded), status),
        product=_product(layer, view, weight, settings, status),
        angular=_angular(layer),
    )
    return _Measured(
        record,
        layer.gap if view else None,
        {f"{row.sigma:g}": chance for row, chance in noise},
        {row.precision: flipped for row, flipped in rounded},
    )


def _noise(
    layer: LayerTrace, view: LogitView, settings: MeasureSettings
) -> list[tuple[NoiseFlips, PerToken]]:
    density = noise_densities(layer, view)
    return [noise_flips(layer, view, sigma, density) for sigma in settings.sigmas]


def _precisions(
    layer: LayerTrace, view: LogitView, settings: MeasureSettings
) -> list[tuple[PrecisionFlips, PerToken]]:
    return [precision_flips(layer, view, name) for name in settings.precisions]


def _precision_answer(
    view: LogitView | None, rows: tuple[PrecisionFlips, ...], status: str
) -> Answer[tuple[PrecisionFlips, ...]]:
    if view is None or view.logits is None:
        return Answer(None, status if view is None else SOFTMAX_SIZES)
    return Answer(rows)


def _product(
    layer: LayerTrace,
    view: LogitView | None,
    weight: Tensor | None,
    settings: MeasureSettings,
    status: str,
) -> Answer[ProductFlips]:
    if view is None:
        return Answer(None, status)
    return product_section(layer, view, weight, settings.product_precision)


def _angular(layer: LayerTrace) -> Answer[AngularSpread]:
    if layer.inputs is None:
        return Answer(None, "not answerable: router inputs were not kept")
    return Answer(angular_spread(layer.inputs, layer.facts.n_experts, layer.facts.k))


def _model(done: list[_Measured], settings: MeasureSettings) -> ModelMeasures:
    gaps = [one.gaps for one in done if one.gaps is not None]
    units = {one.record.units for one in done if one.gaps is not None}
    loads = [one.record.load for one in done]
    status = "ok" if len(units) == 1 else f"not answerable: {len(units)} kinds of score"
    pooled = len(units) == 1
    return ModelMeasures(
        gap=Answer(gap_section(torch.cat(gaps), settings)) if pooled else Answer(None, status),
        smallest_gap=(
            Answer(quantiles(torch.stack(gaps).amin(dim=0), settings))
            if pooled
            else Answer(None, status)
        ),
        noise=_rates([(one.record.name, one.noise) for one in done]),
        precision=_rates([(one.record.name, one.precision) for one in done]),
        dead=sum(len(load.dead) for load in loads),
        cold=sum(len(load.cold) for load in loads),
        evenness=sum(load.evenness for load in loads) / len(loads),
    )


def _rates(layers: list[tuple[str, dict[str, PerToken]]]) -> tuple[ModelRate, ...]:
    """One rate per perturbation, over the layers that know it."""
    names = list(dict.fromkeys(name for _, chances in layers for name in chances))
    return tuple(
        _rate(name, [(layer, chances[name]) for layer, chances in layers if name in chances])
        for name in names
    )


def _rate(name: str, layers: list[tuple[str, PerToken]]) -> ModelRate:
    chances = torch.stack([chance for _, chance in layers])
    means = chances.mean(dim=1)
    worst = int(means.argmax())
    return ModelRate(
        name=name,
        mean=mean_estimate(chances.mean(dim=0)),
        any_layer=mean_estimate(1 - (1 - chances).prod(dim=0)),
        worst_layer=layers[worst][0],
        worst=means[worst].item(),
        layers=len(layers),
    )
