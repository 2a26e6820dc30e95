"""Conclusions of an inspection from its measures: metrics, judgement and observations.

Metrics, P a format or σ of noise:

flip@P         share of tokens that change experts, mean over layers
flip@P:any     share that change in at least one layer, each layer with clean inputs
flip@P:worst   share that change in the worst layer
tie@P          share of tokens that tie after rounding to P, mean over layers
ties           share of tokens and layers that tie exactly
gap@p          quantile of the gap over all layers
jump           median jump at near-ties of all layers together; jump:worst in the worst layer
dangerous      share of near-ties whose jump is dangerous
loss           mean change of a sequence's loss by one swap, in nats
dead, cold     numbers of experts;    evenness of the load, mean over layers
experts        experts in use per token, mean over layers: k, or more where routers are smoothed

The judgement reports the share of tokens that rounding the routers alone changes; the recommended
action follows from the precision served (`served_precision.recommend`). Intervals are clustered by
document. Flips in a layer are a warning if their interval lies above 2 %, a notice above 0.5 %.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median, median_low

import torch

from tieline.analysis.inspect_records import (
    SEVERITIES,
    Harm,
    JumpMeasures,
    LayerJumps,
    Observation,
    RoutingJudgement,
    Severity,
)
from tieline.analysis.served_precision import SERVED_METRICS, Serving, recommend, served_rounding
from tieline.core.statistics import Share, clustered_share
from tieline.measure.measure_settings import MeasureSettings
from tieline.measure.measures import LayerMeasures, ModelRate, RoutingMeasures

MAJORITY = 0.5
"""Share of near-ties from which the report says "most"."""
HEADLINE_SIGMA = "0.01"
"""Noise that is reported instead of bf16 if the size of the logits is unknown."""
WARN_FLIPS, NOTE_FLIPS = 0.02, 0.005
"""Shares of flipped tokens in a layer from which they are a warning or a notice."""
WARN_TIES = 0.001
"""Share of exact ties in a layer from which they are a warning."""
OVERLOAD = 3.0
"""Load relative to an even load from which an expert counts as overloaded."""
FEW_TOKENS = 4096
"""Number of tokens below which a text is reported as short."""


def inspection_metrics(
    measures: RoutingMeasures, jumps: tuple[LayerJumps, ...]
) -> dict[str, float]:
    """Return the metrics by name, without those that the trace cannot answer."""
    model = measures.model
    metrics: dict[str, float | None] = {}
    for rate in (*model.precision, *model.noise):
        metrics[f"flip@{rate.name}"] = rate.mean.value
        metrics[f"flip@{rate.name}:any"] = rate.any_layer.value
        metrics[f"flip@{rate.name}:worst"] = rate.worst
    ties: dict[str, list[float]] = {}
    for layer in measures.layers:
        for row in layer.precision.value or ():
            if row.tie_emulated.value is not None:
                ties.setdefault(row.precision, []).append(row.tie_emulated.value)
    metrics |= {f"tie@{name}": sum(values) / len(values) for name, values in ties.items()}
    if model.gap.value is not None:
        gap = model.gap.value
        metrics["ties"] = gap.ties / gap.tokens
        levels = zip(gap.quantiles.probabilities, gap.quantiles.value, strict=True)
        metrics |= {f"gap@{level:g}": value for level, value in levels}
    metrics |= jump_metrics(jumps)
    metrics |= {"dead": float(model.dead), "cold": float(model.cold), "evenness": model.evenness}
    metrics["experts"] = experts_per_token(measures.layers)
    return {name: value for name, value in metrics.items() if value is not None}


def inspection_metric_names(
    loss_jumps: bool = False, settings: MeasureSettings | None = None, serve: str = "bf16"
) -> set[str]:
    """Return the names of all metrics that an inspection with these settings can have.

    Args:
        loss_jumps: whether losses are measured.
        settings: grids and formats of the measures.
        serve: the precision served, or "none".
    """
    grid = settings or MeasureSettings()
    causes = [*grid.precisions, *(f"{sigma:g}" for sigma in grid.sigmas)]
    flips = {f"flip@{cause}{scope}" for cause in causes for scope in ("", ":any", ":worst")}
    ties = {f"tie@{name}" for name in grid.precisions}
    gaps = {f"gap@{level:g}" for level in grid.probabilities}
    single = {"ties", "jump", "jump:worst", "dangerous", "dead", "cold", "evenness", "experts"}
    rounding = "" if serve == "none" else served_rounding(serve).name
    served = {f"{kind}@{rounding}" for kind in SERVED_METRICS if rounding}
    return flips | ties | gaps | single | served | ({"loss"} if loss_jumps else set())


def experts_per_token(layers: Sequence[LayerMeasures]) -> float:
    """Return the number of experts in use per token, mean over layers."""
    return sum(layer.k if layer.used is None else layer.used for layer in layers) / len(layers)


def jump_metrics(jumps: tuple[LayerJumps, ...]) -> dict[str, float | None]:
    """Return median and worst jump, dangerous share and mean loss; empty without jumps."""
    layers = [layer.value for layer in jumps if layer.value is not None]
    if not layers:
        return {}
    all_jumps = [jump for layer in layers for jump in layer.near.jumps]
    losses = [loss for layer in layers for loss in layer.near.losses or () if loss is not None]
    return {
        "jump": median(all_jumps),
        "jump:worst": max(median(layer.near.jumps) for layer in layers),
        "dangerous": sum(jump >= layers[0].dangerous_above for jump in all_jumps) / len(all_jumps),
        "loss": sum(losses) / len(losses) if losses else None,
    }


def headline_flip_rate(measures: RoutingMeasures) -> ModelRate | None:
    """Return the flip rate that is reported for the model: by bf16 if known, else by noise."""
    rates = {rate.name: rate for rate in (*measures.model.noise, *measures.model.precision)}
    return rates.get("bf16", rates.get(HEADLINE_SIGMA))


def judge_routing(
    measures: RoutingMeasures, jumps: tuple[LayerJumps, ...], serving: Serving | None = None
) -> RoutingJudgement:
    """Judge the effect of rounding on the routing and recommend an action.

    Args:
        measures: measures of the routers by themselves.
        jumps: jumps of every layer.
        serving: effect of the precision served on the model; None if it was not measured.
    """
    rate = headline_flip_rate(measures)
    recommendation = None if serving is None else recommend(serving)
    if rate is None:
        return RoutingJudgement("no scores", recommendation=recommendation)
    smoothed = any(layer.used is not None for layer in measures.layers)
    return RoutingJudgement(
        kind="smoothed" if smoothed else "top-k",
        cause=rate.name,
        share=rate.any_share or Share(rate.any_layer.value, 0.0, 1.0, 0, 0, status="no interval"),
        jump=jump_metrics(jumps).get("jump"),
        experts=experts_per_token(measures.layers),
        recommendation=recommendation,
    )


def dangerous_share(layers: Sequence[JumpMeasures]) -> tuple[Share, Harm]:
    """Return the share of near-ties with a large jump, and whether that is most of them."""
    is_large = [jump >= layer.dangerous_above for layer in layers for jump in layer.near.jumps]
    documents = [document for layer in layers for document in layer.near.documents]
    share = clustered_share(
        torch.tensor(is_large, device="cpu"), torch.tensor(documents, device="cpu")
    )
    if (share.low or 0.0) >= MAJORITY:
        return share, "dangerous"
    return share, "harmless" if (share.high or 0.0) < MAJORITY else "unclear"


def routing_observations(
    measures: RoutingMeasures, jumps: tuple[LayerJumps, ...]
) -> tuple[Observation, ...]:
    """Return all observations, most severe first; one observation covers all layers concerned."""
    observations = [
        *_flip_observations(measures),
        *_jump_observations(jumps),
        *_loss_observations(jumps),
        *_exact_tie_observations(measures.layers),
        *_unused_expert_observations(measures.layers),
        *_overload_observations(measures.layers),
        *_epsilon_observations(measures.layers),
        *_missing_data_observations(measures.layers, jumps),
        *_few_tokens_observations(measures.layers),
    ]
    return tuple(sorted(observations, key=lambda x: SEVERITIES[x.severity]))


def _flip_observations(measures: RoutingMeasures) -> Iterator[Observation]:
    """Observe flips by rounding to bf16, to other formats and by a low-precision product."""
    rates = measures.model.precision
    yield from (_worst_layer_observation(rate) for rate in rates if rate.name == "bf16")
    other_rates = [rate.any_layer.value or 0.0 for rate in rates if rate.name != "bf16"]
    if other_rates:
        yield Observation("flips:formats", "info", max(other_rates))
    yield from _product_flip_observations(measures.layers)
    if not rates:
        yield from map(_worst_layer_observation, measures.model.noise)


def _worst_layer_observation(rate: ModelRate) -> Observation:
    """Observe the layer in which a perturbation flips most tokens."""
    low = 0.0 if rate.worst_share is None else rate.worst_share.low or 0.0
    severity: Severity = "info"
    if rate.name in ("bf16", HEADLINE_SIGMA) and low >= NOTE_FLIPS:
        severity = "warning" if low >= WARN_FLIPS else "notice"
    return Observation(
        "flips:worst", severity, rate.worst, rate.worst_layer, (rate.worst_layer,), rate.name
    )


def _product_flip_observations(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """Observe layers in which a low-precision product flips many tokens."""
    products = {x.name: x.product.value for x in layers if x.product.value is not None}
    shares = {name: x.flip_emulated.value or 0.0 for name, x in products.items()}
    names = _names_descending(
        {name: share for name, share in shares.items() if share >= WARN_FLIPS}
    )
    if names:
        worst = names[0]
        source = products[worst].precision
        yield Observation("flips:product", "warning", shares[worst], worst, names, source)


def _jump_observations(jumps: tuple[LayerJumps, ...]) -> Iterator[Observation]:
    """Observe layers whose jumps at near-ties are dangerous, unclear or harmless."""
    layers = {layer.name: layer.value for layer in jumps if layer.value is not None}
    medians = {name: median_near_jump(value) for name, value in layers.items()}
    harms = {name: dangerous_share([value])[1] for name, value in layers.items()}
    dangerous = _names_descending(
        {n: medians[n] for n, harm in harms.items() if harm == "dangerous"}
    )
    if dangerous:
        largest = medians[dangerous[0]]
        yield Observation("jump:dangerous", "warning", largest, dangerous[0], dangerous)
    unclear = tuple(name for name, harm in harms.items() if harm == "unclear")
    if unclear:
        yield Observation("jump:unclear", "info", float(len(unclear)), None, unclear)
    harmless = tuple(name for name, harm in harms.items() if harm == "harmless")
    if harmless:
        worst = max(harmless, key=medians.__getitem__)
        yield Observation("jump:harmless", "info", medians[worst], worst, harmless)


def median_near_jump(value: JumpMeasures) -> float:
    """Return the median jump of the tokens nearest to a tie (the lower of two middle values)."""
    return median_low(value.near.jumps)


def _loss_observations(jumps: tuple[LayerJumps, ...]) -> Iterator[Observation]:
    """Observe the layer in which swaps change the loss most."""
    losses = {layer.name: layer.value.loss for layer in jumps if layer.value}
    means = {n: x.mean.value for n, x in losses.items() if x and x.mean.value is not None}
    if means:
        worst = max(means, key=lambda name: abs(means[name]))
        yield Observation("loss", "info", means[worst], worst, tuple(means))


def _exact_tie_observations(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """Observe layers with exact ties."""
    gaps = {x.name: x.gap.value for x in layers if x.gap.value is not None and x.gap.value.ties}
    shares = {name: gap.ties / gap.tokens for name, gap in gaps.items()}
    names = _names_descending(shares)
    if names:
        share = shares[names[0]]
        severity = "warning" if share >= WARN_TIES else "notice"
        yield Observation("ties", severity, share, names[0], names)


def _unused_expert_observations(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """Observe layers with dead or cold experts."""
    dead = tuple(layer.name for layer in layers if layer.load.dead)
    if dead:
        count = sum(len(layer.load.dead) for layer in layers)
        yield Observation("dead", "notice", float(count), dead[0] if len(dead) == 1 else None, dead)
    cold = tuple(layer.name for layer in layers if layer.load.cold)
    if cold:
        count = sum(len(layer.load.cold) for layer in layers)
        yield Observation("cold", "info", float(count), None, cold)


def _overload_observations(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """Observe layers with an overloaded expert."""
    choosing = [layer for layer in layers if layer.n_experts > layer.k]
    loads = {x.name: x.load.busiest for x in choosing if x.load.busiest >= OVERLOAD}
    names = _names_descending(loads)
    if names:
        yield Observation("load", "notice", loads[names[0]], names[0], names)


def _epsilon_observations(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """Observe the smallest and largest ε of k + ½ experts for each unit of scores and each k."""
    widths_by_kind: dict[tuple[str, int], dict[str, float]] = {}
    for layer in layers:
        half = layer.near.value.epsilon_half.value if layer.near.value else None
        if half is not None:
            widths_by_kind.setdefault((layer.units, layer.k), {})[layer.name] = half
    for widths in widths_by_kind.values():
        low, high = min(widths, key=widths.__getitem__), max(widths, key=widths.__getitem__)
        names = (low, high) if len(widths) > 1 else (low,)
        yield Observation("epsilon", "info", widths[low], low, names)


def _missing_data_observations(
    layers: Sequence[LayerMeasures], jumps: tuple[LayerJumps, ...]
) -> Iterator[Observation]:
    """Observe what the trace cannot answer, with the number of layers."""
    reasons = Counter(f"gaps: {layer.gap.status}" for layer in layers if layer.gap.value is None)
    reasons.update(
        f"jumps: {layer.status}"
        for layer in jumps
        if layer.value is None and layer.status.startswith("not answerable")
    )
    for reason, count in reasons.items():
        yield Observation("gap", "notice", float(count), source=reason)


def _few_tokens_observations(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """Observe that the text is short."""
    if layers[0].tokens < FEW_TOKENS:
        yield Observation("tokens", "notice", float(layers[0].tokens))


def _names_descending(numbers: dict[str, float]) -> tuple[str, ...]:
    """Return the names in descending order of their numbers."""
    return tuple(sorted(numbers, key=lambda name: -numbers[name]))
