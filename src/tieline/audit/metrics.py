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
"""

from statistics import median

from tieline.audit.records import LayerJumps
from tieline.geometry.records import ModelRate, RoutingMeasures

__all__ = ["leading_rate", "metrics", "percent", "verdict"]

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
