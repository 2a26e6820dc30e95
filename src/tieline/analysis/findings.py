"""What an inspection says: named numbers, findings and a verdict.

flip@P         share of tokens that change experts, P a format or σ of noise; mean over layers
flip@P:any     in at least one layer, each layer with clean inputs
flip@P:worst   in the worst layer
tie@P          share of tokens that tie after rounding to P, mean over layers
ties           share of tokens and layers that tie exactly
gap@p          quantile of the gap over all layers
jump           median jump at near-ties, over all layers together; jump:worst of the worst layer
dangerous      share of near-ties whose jump is dangerous
loss           mean change of a sequence's loss by one swap, in nats
dead, cold     numbers of experts;    evenness of the load, mean over layers
experts        experts in use per token, mean over layers: k, or more where routers are smoothed

Each finding is made by one small function from the number that it states, once for all layers, and
the most severe come first. Flips in a layer are a warning where their interval begins at 2 % or
above, a notice from 0.5 % on.

A verdict has the word that the interval of flip@bf16:any allows: robust below 0.2 %, fragile from
2 % on, mostly stable between. An interval that holds a threshold allows two words, and the verdict
says that the tokens are too few to tell. Intervals are clustered by document.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal

import torch

from tieline.analysis.inspection import Finding, JumpMeasures, LayerJumps, Severity
from tieline.core.statistics import Share, clustered_share
from tieline.measure.measure_records import MeasureSettings
from tieline.measure.measures import LayerMeasures, ModelRate, RoutingMeasures

ROBUST_BELOW, FRAGILE_FROM = 0.002, 0.02
"""Share of tokens flipping in some layer: up to where routing is robust, from where fragile."""

NO_REPAIR = (
    "What to do: nothing, unless runs must choose the same experts exactly; then replay them."
)
REPAIR = (
    "What to do: keep the routers in float32 (`tieline audit` names those that matter), or make "
    "the routing continuous with `tieline smooth`."
)
MORE_TOKENS = "What to do: route more tokens (--tokens, --text) before you decide."
"""The advice that ends a verdict."""

MOST = 0.5
"""Share of near-ties from which on "most" of them are meant."""

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
    found["experts"] = experts_per_token(measures.layers)
    return {name: value for name, value in found.items() if value is not None}


def metric_names(loss_jumps: bool = False, settings: MeasureSettings | None = None) -> set[str]:
    """Return every metric that an inspection with these settings can have.

    Args:
        loss_jumps: whether losses are measured.
        settings: grids and formats of the measures.
    """
    grid = settings or MeasureSettings()
    causes = [*grid.precisions, *(f"{sigma:g}" for sigma in grid.sigmas)]
    flips = {f"flip@{cause}{which}" for cause in causes for which in ("", ":any", ":worst")}
    ties = {f"tie@{name}" for name in grid.precisions}
    gaps = {f"gap@{level:g}" for level in grid.probabilities}
    single = {"ties", "jump", "jump:worst", "dangerous", "dead", "cold", "evenness", "experts"}
    return flips | ties | gaps | single | ({"loss"} if loss_jumps else set())


def experts_per_token(layers: Sequence[LayerMeasures]) -> float:
    """Experts in use per token, mean over layers."""
    return sum(layer.k if layer.used is None else layer.used for layer in layers) / len(layers)


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
    """How the routing is, in one sentence, as far as the interval of its flips can tell."""
    leading, layers = leading_rate(measures), len(measures.layers)
    if leading is None:
        return (
            f"The trace of {layers} layers has no scores: only the load of the experts is known. "
            "Inspect the model itself, or a trace with scores, to see its ties."
        )
    rate, cause = leading
    share, numbers = _share_of(rate), _jump_metrics(jumps)
    height = ""
    if numbers.get("jump") is not None:
        height = f"moves the output of its layer by {percent(numbers['jump'] or 0.0)} (median)"
    if any(layer.used is not None for layer in measures.layers):
        return _smoothed_verdict(measures, share, cause, height)
    states, harm = possible_states(share), _harm(jumps)
    flips = f"{with_interval(share)} of tokens change an expert in at least one of {layers} layers"
    harmless = harm == "harmless" and states != ("robust",)
    but = ", but mostly at harmless ties" if harmless else ""
    join = ", yet such a change " if harmless else ", and such a change "
    words = f"{flips} {cause}{join + height if height else ''}"
    return f"{_head(states, but)}: {words}. {_advice(states, harm)}"


State = Literal["robust", "mostly stable", "fragile"]
STATES: tuple[tuple[float, State], ...] = (
    (ROBUST_BELOW, "robust"),
    (FRAGILE_FROM, "mostly stable"),
    (math.inf, "fragile"),
)
"""Each word with the share of tokens below which it holds."""


def possible_states(share: Share) -> tuple[State, ...]:
    """The words that the interval of a share allows; one if it lies between two thresholds."""
    low, high = share.low or 0.0, 1.0 if share.high is None else share.high
    below = (0.0, *(edge for edge, _ in STATES))
    return tuple(
        word
        for least, (edge, word) in zip(below, STATES, strict=False)
        if low < edge and high >= least
    )


def _head(states: tuple[State, ...], but: str) -> str:
    if len(states) == 1:
        return f"Routing is {states[0]}{but}"
    if len(states) == len(STATES):
        return f"Too few tokens to tell how stable routing is{but}"
    return f"Routing is {' or '.join(states)}, too few tokens to tell which{but}"


def _advice(states: tuple[State, ...], harm: str) -> str:
    if states == ("robust",) or harm == "harmless":
        return NO_REPAIR
    return MORE_TOKENS if "robust" in states or harm == "unclear" else REPAIR


def _harm(jumps: tuple[LayerJumps, ...]) -> str:
    """Whether most near-ties are "dangerous" or "harmless", "unclear" or "unknown"."""
    known = [layer.value for layer in jumps if layer.value is not None]
    return dangerous_share(known)[1] if known else "unknown"


def dangerous_share(layers: Sequence[JumpMeasures]) -> tuple[Share, str]:
    """Share of near-ties with a large jump, and whether that is most of them, few, or unclear."""
    near = [layer.near for layer in layers]
    high = [jump >= x.dangerous_above for x in layers for jump in x.near.jumps]
    documents = torch.tensor([document for sample in near for document in sample.documents])
    share = clustered_share(torch.tensor(high), documents)
    if (share.low or 0.0) >= MOST:
        return share, "dangerous"
    return share, "harmless" if (share.high or 0.0) < MOST else "unclear"


def _share_of(rate: ModelRate) -> Share:
    """Tokens that flip somewhere; results of earlier versions have no interval."""
    return rate.any_share or Share(rate.any_layer.value, 0.0, 1.0, 0, 0, status="no interval")


def with_interval(share: Share) -> str:
    """A share with its interval, as "1.7 % (95 % interval 1.5 % to 1.9 %)"."""
    low, high = percent(share.low or 0.0), percent(1.0 if share.high is None else share.high)
    return f"{percent(share.value or 0.0)} (95 % interval {low} to {high})"


def _smoothed_verdict(measures: RoutingMeasures, share: Share, cause: str, height: str) -> str:
    """What is left to flip where experts fade in below the threshold."""
    layers, mean = measures.layers, experts_per_token(measures.layers)
    smoothed = sum(layer.used is not None for layer in layers)
    where = "" if smoothed == len(layers) else f" in {smoothed} of {len(layers)} layers"
    ks = sorted({layer.k for layer in layers})
    return (
        f"Routing is smoothed{where}: tokens use {mean:.2f} experts on average, where top-k uses "
        f"{' or '.join(map(str, ks))}. {with_interval(share)} of tokens exchange two experts at "
        f"the threshold in at least one of {len(layers)} layers {cause}"
        f"{', which ' + height if height else ''}. {NO_REPAIR}"
    )


def percent(share: float) -> str:
    """A share in percent with two digits, without exponents."""
    value = 100 * share
    if 0 < value < 0.001:
        return "< 0.001 %"
    if value >= 99.5:
        return f"{value:.0f} %"
    return f"{value:.2g} %"


WARN_FLIPS, NOTE_FLIPS = 0.02, 0.005
WARN_TIES = 0.001
BUSY = 3.0
"""Times its even load from which an expert counts as overloaded."""
FEW_TOKENS = 4096
MOST_NAMED = 6
"""Experts or layers that a sentence names one by one."""

_RANK: dict[Severity, int] = {"warning": 0, "notice": 1, "info": 2}


def findings(measures: RoutingMeasures, jumps: tuple[LayerJumps, ...]) -> tuple[Finding, ...]:
    """All findings, most severe first."""
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
    rates = measures.model.precision
    for rate in rates:
        if rate.name == "bf16":
            yield _worst_flips(rate, labels, "if the router's logits are rounded to bf16")
    others = {rate.name: rate.any_layer.value or 0.0 for rate in rates if rate.name != "bf16"}
    if others:
        named = ", ".join(f"{name} {percent(share)}" for name, share in others.items())
        text = f"tokens that change experts in at least one layer in other formats: {named}"
        yield Finding("info", text, max(others.values()), None, "flips")
    yield from _product_flips(measures.layers, labels)
    if not rates:
        for rate in measures.model.noise:
            yield _worst_flips(rate, labels, f"under noise of {rate.name} on the router's logits")


def _worst_flips(rate: ModelRate, labels: dict[str, str], cause: str) -> Finding:
    share = rate.worst_share or Share(rate.worst, 0.0, 1.0, 0, 0)
    text = (
        f"{with_interval(share)} of tokens change experts in {labels[rate.worst_layer]}, the worst"
    )
    sure = share.low or 0.0
    severity = _graded(sure) if rate.name in ("bf16", LEADING_SIGMA) else "info"
    return Finding(severity, f"{text}, {cause}", rate.worst, rate.worst_layer, "flips")


def _product_flips(layers: Sequence[LayerMeasures], labels: dict[str, str]) -> Iterator[Finding]:
    found = {
        layer.name: (product.precision, product.flip_emulated.value)
        for layer in layers
        if (product := layer.product.value) is not None
    }
    shares = {n: share for n, (_, share) in found.items() if share and share >= WARN_FLIPS}
    if shares:
        worst = max(shares, key=shares.__getitem__)
        where = _by_layer({n: percent(share) for n, share in _descending(shares)}, labels)
        text = (
            f"tokens that change experts if a {found[worst][0]} matrix product computes the "
            f"logits: {where}"
        )
        yield Finding("warning", text, shares[worst], worst, "flips")


def _graded(share: float) -> Severity:
    return "warning" if share >= WARN_FLIPS else "notice" if share >= NOTE_FLIPS else "info"


def _jumps(jumps: tuple[LayerJumps, ...], labels: dict[str, str]) -> Iterator[Finding]:
    known = {layer.name: layer.value for layer in jumps if layer.value is not None}
    heights = {name: _height(value) for name, value in known.items()}
    judged = {name: dangerous_share([value]) for name, value in known.items()}
    dangerous = {n: heights[n] for n, (_, word) in judged.items() if word == "dangerous"}
    if dangerous:
        worst = max(dangerous, key=dangerous.__getitem__)
        where = _by_layer({n: percent(h) for n, h in _descending(dangerous)}, labels)
        text = (
            f"swapping the tied experts changes the output by {where} (median of "
            f"{len(known[worst].near.jumps)} near-ties), and by at least "
            f"{percent(known[worst].dangerous_above)} for most of them"
        )
        yield Finding("warning", text, dangerous[worst], worst, "jump")
    unclear = {n: percent(s.value or 0.0) for n, (s, word) in judged.items() if word == "unclear"}
    if unclear:
        above = percent(next(iter(known.values())).dangerous_above)
        text = (
            f"too few near-ties to tell whether most change the output by at least {above}: "
            f"{_by_layer(unclear, labels)} do"
        )
        yield Finding("info", text, float(len(unclear)), None, "jump")
    harmless = [name for name, (_, word) in judged.items() if word == "harmless"]
    if harmless:
        worst = max(harmless, key=heights.__getitem__)
        text = (
            f"ties are mostly harmless in {_listed([labels[name] for name in harmless])}: swapping "
            f"the tied experts changes the output by {percent(heights[worst])} at most (median per "
            "layer)"
        )
        yield Finding("info", text, heights[worst], worst, "jump")


def _height(value: JumpMeasures) -> float:
    """Median jump of the near sample."""
    ordered = sorted(value.near.jumps)
    return ordered[(len(ordered) - 1) // 2]


def _losses(jumps: tuple[LayerJumps, ...], labels: dict[str, str]) -> Iterator[Finding]:
    means, words = {}, {}
    for layer in jumps:
        loss = layer.value.loss if layer.value else None
        if loss is None or loss.mean.value is None:
            continue
        middle = loss.absolute.value[loss.absolute.probabilities.index(0.5)]
        error = loss.mean.standard_error or math.nan
        means[layer.name] = loss.mean.value
        mean = f"mean {loss.mean.value:+.2g} ± {error:.1g}"
        words[layer.name] = f"{middle:.2g} nats in {labels[layer.name]} ({mean})"
    if means:
        worst = max(means, key=lambda name: abs(means[name]))
        where = _joined(list(words.values()))
        text = f"one swap changes the loss of its sequence by a median of {where}"
        yield Finding("info", text, means[worst], worst, "loss")


def _ties(layers: Sequence[LayerMeasures], labels: dict[str, str]) -> Iterator[Finding]:
    gaps = {x.name: x.gap.value for x in layers if x.gap.value is not None and x.gap.value.ties}
    if not gaps:
        return
    shares = {name: gap.ties / gap.tokens for name, gap in gaps.items()}
    worst = max(shares, key=shares.__getitem__)
    cells = {n: f"{gaps[n].ties} tokens ({percent(share)})" for n, share in _descending(shares)}
    text = (
        f"scores tie exactly for {_by_layer(cells, labels)}: which expert such a token gets "
        "depends on the order in which a kernel meets equal scores"
    )
    severity = "warning" if shares[worst] >= WARN_TIES else "notice"
    yield Finding(severity, text, shares[worst], worst, "ties")


def _dead(layers: Sequence[LayerMeasures], labels: dict[str, str]) -> Iterator[Finding]:
    dead = [layer for layer in layers if layer.load.dead]
    if dead:
        count = sum(len(layer.load.dead) for layer in dead)
        named = _joined([_named_experts(layer, labels) for layer in dead])
        text = f"{named} {'are' if count > 1 else 'is'} never used by these {dead[0].tokens} tokens"
        where = dead[0].name if len(dead) == 1 else None
        yield Finding("notice", text, float(count), where, "dead")
    cold = {x.name: f"{len(x.load.cold)} of {x.n_experts}" for x in layers if x.load.cold}
    if cold:
        below = percent(layers[0].load.cold_below)
        text = f"experts with less than {below} of an even load: {_by_layer(cold, labels)}"
        count = sum(len(layer.load.cold) for layer in layers)
        yield Finding("info", text, float(count), None, "cold")


def _named_experts(layer: LayerMeasures, labels: dict[str, str]) -> str:
    dead = layer.load.dead
    many = "s" if len(dead) > 1 else ""
    return f"expert{many} {_listed([str(expert) for expert in dead])} of {labels[layer.name]}"


def _load(layers: Sequence[LayerMeasures], labels: dict[str, str]) -> Iterator[Finding]:
    busy = [x for x in layers if x.load.busiest >= BUSY and x.n_experts > x.k]
    busy.sort(key=lambda layer: -layer.load.busiest)
    if not busy:
        return
    words = []
    for layer in busy:
        expert = max(range(layer.n_experts), key=layer.load.counts.__getitem__)
        words.append(f"expert {expert} of {labels[layer.name]} {layer.load.busiest:.1f} times")
    text = f"experts that carry far more than an even load: {_joined(words)}"
    yield Finding("notice", text, busy[0].load.busiest, busy[0].name, "load")


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


def _descending(shares: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda item: -item[1])


def _by_layer(cells: dict[str, str], labels: dict[str, str]) -> str:
    """Words for each layer, as "58 % in layer 1 and 51 % in layer 2"."""
    return _joined([f"{text} in {labels[name]}" for name, text in cells.items()])


def _joined(words: Sequence[str]) -> str:
    """A list of words with "and" before the last; those beyond `MOST_NAMED` are counted."""
    if len(words) > MOST_NAMED:
        return f"{', '.join(words[:MOST_NAMED])} and {len(words) - MOST_NAMED} more"
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMED])
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"
