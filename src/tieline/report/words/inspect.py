"""Sentences of an inspection: its verdict, its findings, and notes on calibration and noise."""

import math
from collections.abc import Callable, Mapping, Sequence

from tieline.analysis.inspect_records import Finding, Inspection, JumpMeasures, Observation
from tieline.analysis.served_precision import Serving
from tieline.core.text import layer_labels
from tieline.measure.measures import LayerMeasures, RoutingMeasures
from tieline.report.words.numbers import (
    list_with_and,
    list_with_commas,
    percent,
    tokens_needed,
    with_interval,
)
from tieline.report.words.served_precision import served_sentences


def inspection_verdict(result: Inspection) -> str:
    """Write what serving does, what to do, and what rounding the routers alone does."""
    judgement, layers = result.judgement, result.measures.layers
    if judgement.share is None and result.serving is None:
        return (
            f"The trace of {len(layers)} layers has no scores: only the load of the experts is "
            "known. Inspect the model itself, or a trace with scores, to see its ties."
        )
    smoothed = judgement.kind == "smoothed"
    smoothing_note = [_smoothed_sentence(layers, judgement.experts or 0.0)] if smoothed else []
    routers_note = [_routers_alone_sentence(result)] if judgement.share is not None else []
    if result.serving is None or judgement.recommendation is None:
        reason = result.noise.status.removeprefix("not measured: ")
        if reason == "ok":  # the scores showed it, the predictions could not
            reason = "the model gives no logits for its tokens"
        unserved = f"What the precision served does was not measured: {reason}."
        return " ".join([*smoothing_note, *routers_note, unserved])
    return " ".join(
        [
            *smoothing_note,
            *served_sentences(
                result.serving,
                judgement.recommendation,
                *routers_note,
                tokens=_served_tokens_text(result.serving, max(layer.tokens for layer in layers)),
            ),
        ]
    )


def _served_tokens_text(serving: Serving, inspected: int) -> str:
    """State which of the inspected tokens were served; empty for all."""
    is_part = serving.tokens < inspected
    return f"the first {serving.tokens:,} of {inspected:,} tokens" if is_part else ""


def _routers_alone_sentence(result: Inspection) -> str:
    """State what rounding the logits alone does, and how far such a change moves the output."""
    judgement = result.judgement
    assert judgement.share is not None
    verb = "exchange two experts" if judgement.kind == "smoothed" else "change an expert"
    cause = _flip_cause_text(judgement.cause)
    sentence = f"{cause[0].upper()}{cause[1:]}, {with_interval(judgement.share)} of tokens {verb}"
    if judgement.jump is None:
        return f"{sentence}."
    median = percent(judgement.jump, trim=True)
    return f"{sentence}; such a change moves the output of its layer by {median} (median)."


def _smoothed_sentence(layers: Sequence[LayerMeasures], experts: float) -> str:
    """State how many layers are smoothed, and how many experts tokens use."""
    smoothed = sum(layer.used is not None for layer in layers)
    where = "" if smoothed == len(layers) else f" in {smoothed} of {len(layers)} layers"
    ks = " or ".join(map(str, sorted({layer.k for layer in layers})))
    return (
        f"Routing is smoothed{where}: tokens use {experts:.2f} experts on average, where top-k "
        f"uses {ks}."
    )


def _flip_cause_text(source: str) -> str:
    """Name what makes tokens flip: rounding to "bf16", or noise of the given σ."""
    if source == "bf16":
        return "with only the logits of the routers rounded to bf16, not their products"
    return f"under noise of {source} on the logits of the routers alone"


class _InspectedLayers:
    """Measures, jumps and labels of the layers of an inspection, by name."""

    def __init__(self, result: Inspection) -> None:
        self.measures: RoutingMeasures = result.measures
        self.layer: Mapping[str, LayerMeasures] = {x.name: x for x in result.measures.layers}
        self.jumps: Mapping[str, JumpMeasures] = {
            x.name: x.value for x in result.jumps if x.value is not None
        }
        self.label = layer_labels([x.name for x in result.measures.layers])

    def by_layer(self, names: Sequence[str], text: Callable[[str], str]) -> str:
        """Return `text(name)` for each layer, as in "58 % in layer 1 and 51 % in layer 2"."""
        return list_with_and([f"{text(name)} in {self.label[name]}" for name in names])


def inspection_findings(result: Inspection) -> tuple[Finding, ...]:
    """Write the observations, in their order."""
    layers = _InspectedLayers(result)
    return tuple(
        Finding(x.severity, FINDING_SENTENCES[x.case](x, layers), x.number, x.layer, x.kind)
        for x in result.observations
    )


def _worst_flips_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """Name the layer in which most tokens flip."""
    model = layers.measures.model
    rate = next(x for x in (*model.precision, *model.noise) if x.name == fact.source)
    share = with_interval(rate.worst_share) if rate.worst_share else percent(rate.worst, trim=True)
    where = layers.label[rate.worst_layer]
    return (
        f"{share} of tokens change experts in {where}, the worst, {_flip_cause_text(fact.source)}"
    )


def _format_flips_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """List the flip rates under other formats."""
    shares = ", ".join(
        f"{rate.name} {percent(rate.any_layer.value or 0.0, trim=True)}"
        for rate in layers.measures.model.precision
        if rate.name != "bf16"
    )
    return (
        f"tokens that change experts with the logits alone in other formats: {shares}; `tieline "
        "audit --serve FORMAT` says whether that is harmless"
    )


def _product_flips_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """List the flip rates if a matrix product in low precision computes the logits."""

    def share(name: str) -> str:
        product = layers.layer[name].product.value
        return percent(product.flip_emulated.value if product else None, trim=True)

    return (
        f"tokens that change experts if a {fact.source} matrix product computes the logits: "
        f"{layers.by_layer(fact.layers, share)}"
    )


def _dangerous_ties_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """List the layers in which most near-ties are dangerous."""

    def median(name: str) -> str:
        ordered = sorted(layers.jumps[name].near.jumps)
        return percent(ordered[(len(ordered) - 1) // 2], trim=True)  # the lower median

    worst = layers.jumps[fact.layers[0]]
    return (
        "swapping the tied experts changes the output by "
        f"{layers.by_layer(fact.layers, median)} (median of "
        f"{len(worst.near.jumps)} near-ties), and by at least "
        f"{percent(worst.dangerous_above, trim=True)} for most of them"
    )


def _unclear_ties_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """List the layers with too few near-ties to tell whether most are dangerous."""

    def share(name: str) -> str:
        return percent(layers.jumps[name].dangerous.value or 0.0, trim=True)

    limit = percent(layers.jumps[fact.layers[0]].dangerous_above, trim=True)
    return (
        f"too few near-ties to tell whether most change the output by at least {limit}: "
        f"{layers.by_layer(fact.layers, share)} do"
    )


def _harmless_ties_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """List the layers in which most near-ties change the output little."""
    labels = [layers.label[name] for name in fact.layers]
    change = percent(fact.number, trim=True)
    size = f"{change} (median)" if len(labels) == 1 else f"at most {change} (median of each layer)"
    return (
        f"ties matter little in {list_with_commas(labels)}: swapping the tied experts changes the "
        f"output by {size}"
    )


def _swap_loss_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """State how far one swap changes the loss of its sequence."""
    entries = []
    for name in fact.layers:
        loss = layers.jumps[name].loss
        if loss is not None:
            median = loss.absolute.value[loss.absolute.probabilities.index(0.5)]
            error = loss.mean.standard_error or math.nan
            mean = f"mean {loss.mean.value:+.2g} ± {error:.1g}"
            entries.append(f"{median:.2g} nats in {layers.label[name]} ({mean})")
    return f"one swap changes the loss of its sequence by a median of {list_with_and(entries)}"


def _exact_ties_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """List the layers with equal scores at the threshold."""

    def count(name: str) -> str:
        gaps = layers.layer[name].gap.value
        assert gaps is not None
        return f"{gaps.ties} tokens ({percent(gaps.ties / gaps.tokens, trim=True)})"

    return (
        f"scores tie exactly for {layers.by_layer(fact.layers, count)}: which expert such a token "
        "gets depends on the order in which a kernel meets equal scores"
    )


def _dead_experts_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """List the experts that no token chose."""
    entries = []
    for name in fact.layers:
        experts = [str(expert) for expert in layers.layer[name].load.dead]
        plural = "s" if len(experts) > 1 else ""
        entries.append(f"expert{plural} {list_with_commas(experts)} of {layers.label[name]}")
    tokens, verb = layers.layer[fact.layers[0]].tokens, "are" if fact.number > 1 else "is"
    return f"{list_with_and(entries)} {verb} never used by these {tokens} tokens"


def _cold_experts_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """Count the experts with little load, by layer."""

    def count(name: str) -> str:
        return f"{len(layers.layer[name].load.cold)} of {layers.layer[name].n_experts}"

    limit = percent(layers.measures.layers[0].load.cold_below, trim=True)
    where = layers.by_layer(fact.layers, count)
    return f"experts with less than {limit} of an even load: {where}"


def _overloaded_experts_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """List the experts with far more than an even load."""
    entries = []
    for name in fact.layers:
        load = layers.layer[name].load
        expert = max(range(layers.layer[name].n_experts), key=load.counts.__getitem__)
        entries.append(f"expert {expert} of {layers.label[name]} {load.busiest:.1f} times")
    return f"experts that carry far more than an even load: {list_with_and(entries)}"


def _half_expert_finding(fact: Observation, layers: _InspectedLayers) -> str:
    """State the ε that costs half an expert more per token."""

    def width(name: str) -> str:
        near = layers.layer[name].near.value
        return f"{near.epsilon_half.value if near else math.nan:.2g}"

    layer = layers.layer[fact.layers[0]]
    where = layers.by_layer(fact.layers, width)
    return f"the ε that would give {layer.k + 0.5:g} experts per token is {where} ({layer.units})"


FINDING_SENTENCES: dict[str, Callable[[Observation, _InspectedLayers], str]] = {
    "flips:worst": _worst_flips_finding,
    "flips:formats": _format_flips_finding,
    "flips:product": _product_flips_finding,
    "jump:dangerous": _dangerous_ties_finding,
    "jump:unclear": _unclear_ties_finding,
    "jump:harmless": _harmless_ties_finding,
    "loss": _swap_loss_finding,
    "ties": _exact_ties_finding,
    "dead": _dead_experts_finding,
    "cold": _cold_experts_finding,
    "load": _overloaded_experts_finding,
    "epsilon": _half_expert_finding,
    "gap": lambda fact, layers: f"{fact.number:.0f} of {len(layers.layer)} layers: {fact.source}",
    "tokens": lambda fact, layers: (
        f"only {fact.number:,.0f} tokens were routed: shares below "
        f"{percent(3 / fact.number, trim=True)} are not resolved"
    ),
}
"""Function that writes the sentence of an observation, by its case."""


def calibration_sentence(result: Inspection) -> str:
    """Write how many tokens calibration needs, by the layer that needs most; empty if unknown."""
    if not result.calibration:
        return ""
    need = result.calibration[0]
    if need.needed is None:
        tokens = f"at least {tokens_needed(need.low)}"
    else:
        tokens = f"about {tokens_needed(need.needed)}"
    return (
        f"Calibrating a quantised model takes {tokens} tokens of such text, until every expert has "
        f"{need.least:,}."
    )
