"""Named numbers of a model as a whole, and the one sentence that they come to.

flip@P         share of tokens that change experts, P a format or σ of noise; mean over layers
flip@P:any     in one layer at least, each layer with clean inputs
flip@P:worst   in the worst layer
tie@P          share of tokens that tie after rounding to P, mean over layers
ties           share of tokens and layers that tie exactly as they are
gap@p          quantile of the gap over all layers
jump           median jump at near-ties, over all layers together; jump:worst of the worst layer
dangerous      share of near-ties whose jump is dangerous
loss           mean change of a sequence's loss by one swap, in nats
dead, cold     numbers of experts;    evenness of the load, mean over layers

What is worth knowing about a model's routing, in plain words, the gravest first.

Every finding is made by one small function from the number that it states. Limits of severity are
constants here: rates of flips from 2 % in a layer on are a warning, from 0.5 % on a notice.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from tieline.analysis.inspection import Finding, JumpMeasures, LayerJumps, Severity
from tieline.geometry.measure_records import LayerMeasures, ModelRate, RoutingMeasures

__all__ = ["findings", "layer_labels", "leading_rate", "metrics", "percent", "verdict"]

ROBUST_BELOW, FRAGILE_FROM = 0.002, 0.02
"""Share of tokens flipping in some layer: up to where routing is robust, from where fragile."""

LEADING_SIGMA = "0.01"
"""Noise that stands in for bf16 where the size of the logits is unknown."""


def metrics(measures: RoutingMeasures, jumps: tuple[LayerJumps, ...]) -> dict[str, float]:
    """The numbers by name; those that the trace cannot answer are absent."""
    model = measures.model
    found: dict[str, float | None] = {}
    for rate in (*model.precision, *model.noise):
        found[f"flip@{rate.name}"] = rate.mean.value
        found[f"flip@{rate.name}:any"] = rate.any_layer.value
        found[f"flip@{rate.name}:worst"] = rate.worst
    found |= _tie_rates(measures)
    if model.gap.value is not None:
        gap = model.gap.value
        found["ties"] = gap.ties / gap.tokens
        levels = zip(gap.quantiles.probabilities, gap.quantiles.value, strict=True)
        found |= {f"gap@{level:g}": value for level, value in levels}
    found |= _jump_metrics(jumps)
    found |= {"dead": float(model.dead), "cold": float(model.cold), "evenness": model.evenness}
    return {name: value for name, value in found.items() if value is not None}


def _tie_rates(measures: RoutingMeasures) -> dict[str, float | None]:
    rates: dict[str, list[float]] = {}
    for layer in measures.layers:
        for row in layer.precision.value or ():
            if row.tie_emulated.value is not None:
                rates.setdefault(row.precision, []).append(row.tie_emulated.value)
    return {f"tie@{name}": sum(values) / len(values) for name, values in rates.items()}


def _jump_metrics(jumps: tuple[LayerJumps, ...]) -> dict[str, float | None]:
    known = [layer.value for layer in jumps if layer.value is not None]
    if not known:
        return {}
    every = [jump for layer in known for jump in layer.near.jumps]
    losses = [loss for layer in known for loss in layer.near.losses or () if loss is not None]
    return {
        "jump": median(every),
        "jump:worst": max(median(layer.near.jumps) for layer in known),
        "dangerous": sum(jump >= known[0].dangerous_above for jump in every) / len(every),
        "loss": sum(losses) / len(losses) if losses else None,
    }


def leading_rate(measures: RoutingMeasures) -> tuple[ModelRate, str] | None:
    """The flip rate that speaks for the model, and its cause in words: bf16 where it is known."""
    for rate in measures.model.precision:
        if rate.name == "bf16":
            return rate, "when the router's logits are rounded to bf16"
    for rate in measures.model.noise:
        if rate.name == LEADING_SIGMA:
            return rate, f"under noise of {LEADING_SIGMA} on the router's logits"
    return None


def verdict(measures: RoutingMeasures, jumps: tuple[LayerJumps, ...]) -> str:
    """How the routing is, in one sentence."""
    leading, layers = leading_rate(measures), len(measures.layers)
    if leading is None:
        return f"The trace of {layers} layers has no scores: only the load of the experts is known."
    rate, cause = leading
    share = rate.any_layer.value or 0.0
    flips = (
        f"{percent(share)} of tokens change an expert in at least one of {layers} layers {cause}"
    )
    numbers = _jump_metrics(jumps)
    jump, state = numbers.get("jump"), _state(share)
    if jump is None:
        return f"Routing is {state}: {flips}."
    height = f"such a change moves the output of its layer by {percent(jump)} (median)"
    if share >= ROBUST_BELOW and (numbers["dangerous"] or 0.0) < 0.5:
        return f"Routing is {state}, but mostly at harmless ties: {flips}, yet {height}."
    return f"Routing is {state}: {flips}, and {height}."


def _state(share: float) -> str:
    if share < ROBUST_BELOW:
        return "robust"
    return "mostly stable" if share < FRAGILE_FROM else "fragile"


def percent(share: float) -> str:
    """A share in percent with two digits."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 99.5 else f"{value:.2g} %"


WARN_FLIPS, NOTE_FLIPS = 0.02, 0.005
WARN_TIES = 0.001
BUSY = 3.0
"""Times its even load from which an expert counts as overloaded."""
FEW_TOKENS = 4096
MOST_NAMED = 6
"""Experts or layers that a sentence names one by one."""

_RANK: dict[Severity, int] = {"warning": 0, "notice": 1, "info": 2}


def findings(measures: RoutingMeasures, jumps: tuple[LayerJumps, ...]) -> tuple[Finding, ...]:
    """All findings, the gravest first."""
    labels = layer_labels([layer.name for layer in measures.layers])
    found = [
        *_flips(measures, labels),
        *_jumps(jumps, labels),
        *_losses(jumps, labels),
        *_ties(measures.layers, labels),
        *_dead(measures.layers, labels),
        *_load(measures.layers, labels),
        *_epsilon(measures.layers, labels),
        *_unanswered(measures.layers, jumps),
        *_few(measures.layers),
    ]
    return tuple(sorted(found, key=lambda finding: _RANK[finding.severity]))


def layer_labels(names: Sequence[str]) -> dict[str, str]:
    """Label "layer 3" for the name "model.layers.3.mlp.gate", where that tells the layers apart."""
    numbers = [re.search(r"\d+", name) for name in names]
    counts = Counter(match.group() for match in numbers if match)
    return {
        name: f"layer {match.group()}"
        if match and counts[match.group()] == 1
        else f"layer {name!r}"
        for name, match in zip(names, numbers, strict=True)
    }


def _flips(measures: RoutingMeasures, labels: dict[str, str]) -> Iterator[Finding]:
    for rate in measures.model.precision:
        grave = rate.name == "bf16"
        text = (
            f"{percent(rate.worst)} of tokens change experts in {labels[rate.worst_layer]}, the "
            f"worst, if the router's logits are rounded to {rate.name}; "
            f"{percent(rate.any_layer.value or 0.0)} do so in at least one of {rate.layers} layers"
        )
        severity = _graded(rate.worst) if grave else "info"
        yield Finding(severity, text, rate.worst, rate.worst_layer, "flips")
    for layer in measures.layers:
        product = layer.product.value
        share = product.flip_emulated.value if product else None
        if product and share is not None and share >= WARN_FLIPS:
            text = (
                f"{percent(share)} of tokens change experts in {labels[layer.name]} if its logits "
                f"are computed by a {product.precision} matrix product"
            )
            yield Finding("warning", text, share, layer.name, "flips")
    if not measures.model.precision:
        yield from _noise_flips(measures, labels)


def _noise_flips(measures: RoutingMeasures, labels: dict[str, str]) -> Iterator[Finding]:
    for rate in measures.model.noise:
        text = (
            f"{percent(rate.worst)} of tokens change experts in {labels[rate.worst_layer]}, the "
            f"worst, under noise of {rate.name} on the router's logits"
        )
        severity = _graded(rate.worst) if rate.name == "0.01" else "info"
        yield Finding(severity, text, rate.worst, rate.worst_layer, "flips")


def _graded(share: float) -> Severity:
    return "warning" if share >= WARN_FLIPS else "notice" if share >= NOTE_FLIPS else "info"


def _jumps(jumps: tuple[LayerJumps, ...], labels: dict[str, str]) -> Iterator[Finding]:
    known = {layer.name: layer.value for layer in jumps if layer.value is not None}
    dangerous = {name: value for name, value in known.items() if _share(value) >= 0.5}
    for name, value in sorted(dangerous.items(), key=lambda item: -_height(item[1])):
        text = (
            f"swapping the tied experts changes the output of {labels[name]} by "
            f"{percent(_height(value))} (median of {len(value.near.jumps)} near-ties); for "
            f"{percent(_share(value))} of them by at least {percent(value.dangerous_above)}"
        )
        yield Finding("warning", text, _height(value), name, "jump")
    harmless = [name for name in known if name not in dangerous]
    if harmless:
        worst = max(harmless, key=lambda name: _height(known[name]))
        text = (
            f"ties are mostly harmless in {_listed([labels[name] for name in harmless])}: swapping "
            f"the tied experts changes the output by {percent(_height(known[worst]))} at most "
            "(median per layer)"
        )
        yield Finding("info", text, _height(known[worst]), worst, "jump")


def _height(value: JumpMeasures) -> float:
    """Median jump of the near sample."""
    ordered = sorted(value.near.jumps)
    return ordered[(len(ordered) - 1) // 2]


def _share(value: JumpMeasures) -> float:
    return value.dangerous.value or 0.0


def _losses(jumps: tuple[LayerJumps, ...], labels: dict[str, str]) -> Iterator[Finding]:
    for layer in jumps:
        loss = layer.value.loss if layer.value else None
        if loss is None or loss.mean.value is None:
            continue
        middle = loss.absolute.value[loss.absolute.probabilities.index(0.5)]
        error = loss.mean.standard_error or math.nan
        text = (
            f"one swap in {labels[layer.name]} changes the loss of its sequence by {middle:.2g} "
            f"nats (median of {loss.swaps}), on average by {loss.mean.value:+.2g} ± {error:.1g}"
        )
        yield Finding("info", text, loss.mean.value, layer.name, "loss")


def _ties(layers: Sequence[LayerMeasures], labels: dict[str, str]) -> Iterator[Finding]:
    for layer in layers:
        gap = layer.gap.value
        if gap is None or gap.ties == 0:
            continue
        share = gap.ties / gap.tokens
        text = (
            f"{gap.ties} tokens ({percent(share)}) tie exactly in {labels[layer.name]}: which "
            "expert they get depends on the order in which a kernel meets equal scores"
        )
        severity = "warning" if share >= WARN_TIES else "notice"
        yield Finding(severity, text, share, layer.name, "ties")


def _dead(layers: Sequence[LayerMeasures], labels: dict[str, str]) -> Iterator[Finding]:
    for layer in layers:
        label, load = labels[layer.name], layer.load
        if load.dead:
            many = len(load.dead) > 1
            named = _listed([str(expert) for expert in load.dead])
            text = f"expert{'s' if many else ''} {named} of {label} {'are' if many else 'is'} "
            text += f"never used by these {layer.tokens} tokens"
            yield Finding("notice", text, float(len(load.dead)), layer.name, "dead")
        if load.cold:
            text = f"{len(load.cold)} of {layer.n_experts} experts of {label} get less than "
            text += f"{percent(load.cold_below)} of an even load"
            yield Finding("info", text, float(len(load.cold)), layer.name, "cold")


def _load(layers: Sequence[LayerMeasures], labels: dict[str, str]) -> Iterator[Finding]:
    for layer in layers:
        busiest = layer.load.busiest
        if busiest >= BUSY and layer.n_experts > layer.k:
            expert = max(range(layer.n_experts), key=layer.load.counts.__getitem__)
            text = (
                f"expert {expert} of {labels[layer.name]} carries {busiest:.1f} times its even load"
            )
            yield Finding("notice", text, busiest, layer.name, "load")


def _epsilon(layers: Sequence[LayerMeasures], labels: dict[str, str]) -> Iterator[Finding]:
    """One sentence per kind of score and k, since ε is in units of the score."""
    kinds: dict[tuple[str, int], dict[str, float]] = {}
    for layer in layers:
        half = layer.near.value.epsilon_half.value if layer.near.value else None
        if half is not None:
            kinds.setdefault((layer.units, layer.k), {})[layer.name] = half
    for (units, k), found in kinds.items():
        low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
        where = f"{found[low]:.2g} in {labels[low]}"
        if len(found) > 1:
            where += f" and {found[high]:.2g} in {labels[high]}"
        text = f"the ε that would give {k + 0.5:g} experts per token is {where} ({units})"
        yield Finding("info", text, found[low], low, "epsilon")


def _unanswered(
    layers: Sequence[LayerMeasures], jumps: tuple[LayerJumps, ...]
) -> Iterator[Finding]:
    reasons = Counter(f"gaps: {layer.gap.status}" for layer in layers if layer.gap.value is None)
    reasons.update(
        f"jumps: {layer.status}"
        for layer in jumps
        if layer.value is None and layer.status.startswith("not answerable")
    )
    for reason, count in reasons.items():
        yield Finding(
            "notice", f"{count} of {len(layers)} layers: {reason}", float(count), None, "gap"
        )


def _few(layers: Sequence[LayerMeasures]) -> Iterator[Finding]:
    tokens = layers[0].tokens
    if tokens < FEW_TOKENS:
        text = (
            f"only {tokens} tokens were routed: shares below {percent(3 / tokens)} are not resolved"
        )
        yield Finding("notice", text, float(tokens), None, "tokens")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"
