"""The result of inspecting a model: frozen records, and what they conclude.

Inspection          everything: measures, jumps, text sample, verdict, findings, metrics
├─ measures         `RoutingMeasures` of the geometry, one `LayerMeasures` per layer
├─ jumps            one `LayerJumps` per layer, in the order of `measures.layers`
│  └─ value         `JumpMeasures`: `JumpSample`s, `GapJumpTable`, `LossJumps`
├─ calibration      one `CalibrationNeed` per layer
├─ noise            `NoiseReport`: size of the model's own noise, and orders of ties at it
├─ sample           `TextSample`: pieces of text with the gaps of their tokens
├─ judgement        `RoutingJudgement`: the data of the verdict
└─ observations     `Observation`s: the data of the findings, most severe first

Metrics, P a format or σ of noise:

flip@P         share of tokens that change experts, mean over layers
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

The judgement names the share of tokens that rounding the routers alone changes; what to do follows
from the precision served (`served_precision.recommend`). Intervals are clustered by document. Flips
in a layer are a warning where their interval begins at 2 % or above, a notice from 0.5 % on.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar, Literal

import torch

from tieline.analysis.served_precision import (
    SERVED_METRICS,
    Recommendation,
    Serving,
    recommend,
    served_rounding,
)
from tieline.core.records import Result, short_repr
from tieline.core.statistics import Estimate, Quantiles, Share, clustered_share
from tieline.measure.expert_load import CalibrationNeed
from tieline.measure.measure_settings import MeasureSettings
from tieline.measure.measures import LayerMeasures, ModelRate, RoutingMeasures
from tieline.trace.record import RoutingTrace

Severity = Literal["warning", "notice", "info"]
"""How severe a finding is: act on it, know it, or plain description."""


@dataclass(frozen=True)
class JumpSample:
    """Tokens whose experts of ranks k and k + 1 were swapped; one entry per token in every field.

    Attributes:
        tokens: place of the token in the trace.
        documents: document that it belongs to.
        positions: its position there.
        gaps: z_[k] - z_[k+1] within the chosen groups, in units of the selection score, ascending.
        jumps: ‖y_swapped - y‖ / ‖y‖, y the output of the layer's block for this token.
        leaving: expert of rank k, which the swap takes out.
        entering: expert of rank k + 1, which takes its place and its weight.
        losses: change of the summed loss of the token's sequence, in nats, when this token's
            choice in this layer alone is swapped; None for tokens, or altogether, where it was not
            measured.
    """

    tokens: tuple[int, ...]
    documents: tuple[int, ...]
    positions: tuple[int, ...]
    gaps: tuple[float, ...]
    jumps: tuple[float, ...]
    leaving: tuple[int, ...]
    entering: tuple[int, ...]
    losses: tuple[float | None, ...] | None = None

    __repr__ = short_repr


@dataclass(frozen=True)
class GapJumpTable:
    """Joint distribution of gap and jump: rows are gap bins, columns are jump bins.

    A tie is harmless where its jump is small, whatever its gap: dangerous tokens stand in the first
    rows (small gap) and last columns (large jump).

    Attributes:
        gap_levels: probabilities whose gap quantiles, over all tokens, are the edges of the rows.
        gap_edges: those quantiles; a row holds low <= gap < high, the last one its upper edge too.
        jump_edges: edges of the columns: quantiles of the sampled jumps.
        counts: sampled tokens in each cell.
        shares: estimated share of all tokens in each cell; the near sample counts once, each token
            of the random one stands for those it was drawn from.
    """

    gap_levels: tuple[float, ...]
    gap_edges: tuple[float, ...]
    jump_edges: tuple[float, ...]
    counts: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...]

    __repr__ = short_repr


@dataclass(frozen=True)
class LossJumps:
    """What a swap at a near-tie does to the loss, one swap per forward pass of a sequence.

    Attributes:
        mean: mean change of the summed loss of the sequence, in nats: positive where the swap
            hurts.
        absolute: quantiles of its absolute value.
        swaps: number of swaps measured.
    """

    mean: Estimate
    absolute: Quantiles
    swaps: int


@dataclass(frozen=True)
class JumpMeasures:
    """Jump of one layer's output at the ties of its router.

    Attributes:
        module: qualified name of the block whose output is compared.
        near: the tokens of the smallest gaps.
        random: tokens drawn evenly from all others, for comparison; may be empty.
        near_quantiles: of the jump over the near sample.
        random_quantiles: over the random one; None if that is empty.
        dangerous: share of the near sample whose jump is at least `dangerous_above`.
        dangerous_above: relative change of the output from which a tie counts as dangerous.
        table: gap × jump.
        loss: what the swaps of the near sample do to the loss; None where not asked for.
    """

    module: str
    near: JumpSample
    random: JumpSample
    near_quantiles: Quantiles
    random_quantiles: Quantiles | None
    dangerous: Estimate
    dangerous_above: float
    table: GapJumpTable
    loss: LossJumps | None = None

    __repr__ = short_repr


@dataclass(frozen=True)
class LayerJumps:
    """The jumps of a layer; `status` is "ok", or why there is no `value`.

    Attributes:
        name: name of the layer's router, as in `measures`.
        value: its jumps.
        status: "ok", "not measured: ..." or "not answerable: ...".
    """

    name: str
    value: JumpMeasures | None
    status: str = "ok"


@dataclass(frozen=True)
class TextPiece:
    """The text of one token and how near its routing is to a tie.

    Attributes:
        text: its part of the text, as plain characters; pieces joined give the text back.
        token: token id.
        position: position in its document.
        gap: its smallest relative gap over the layers: 0 on a tie, 1 for a typical token; None
            where no layer can tell.
        gaps: relative gap per layer of `TextSample.layers`, None for a layer that cannot tell.
    """

    text: str
    token: int
    position: int
    gap: float | None
    gaps: tuple[float | None, ...]


@dataclass(frozen=True)
class TextSample:
    """A stretch of the text, to be coloured by gap.

    Attributes:
        layers: names of the layers that `TextPiece.gaps` runs over.
        document: number of the document.
        pieces: its tokens in order.
        scales: gap that counts as 1 in each layer: its median over all tokens.
    """

    layers: tuple[str, ...]
    document: int
    pieces: tuple[TextPiece, ...]
    scales: tuple[float | None, ...]

    __repr__ = short_repr


@dataclass(frozen=True)
class OwnNoise:
    """What rounding the whole model does to one router.

    Attributes:
        name: name of the layer's router.
        precision: the format.
        tokens: tokens compared.
        epsilon: size of the noise of the gap, in units of the selection score.
        flipped: share of tokens whose experts changed in that run.
        orders: share of tokens of tie order 0, 1, ... at ε; the last entry counts all from there.
    """

    name: str
    precision: str
    tokens: int
    epsilon: float
    flipped: Estimate
    orders: tuple[float, ...]


@dataclass(frozen=True)
class NoiseReport:
    """The noise of every layer that shows it.

    Attributes:
        layers: one record per layer with scores, in order.
        status: "ok", or why nothing was measured.
    """

    layers: tuple[OwnNoise, ...] = ()
    status: str = "ok"

    def of(self, name: str) -> OwnNoise | None:
        """The record of a layer, None if it has none."""
        return next((layer for layer in self.layers if layer.name == name), None)


@dataclass(frozen=True)
class Observation:
    """One fact worth knowing about a result, as data; the report writes its sentence.

    Attributes:
        case: what it is about, with a variant after a colon: "jump:harmless".
        severity: "warning", "notice" or "info".
        number: the number that led to it.
        layer: name of the layer's router; None for the model.
        layers: names of all layers concerned, in the order of the sentence.
        source: number format, noise level or reason that it belongs to.
    """

    case: str
    severity: Severity
    number: float
    layer: str | None = None
    layers: tuple[str, ...] = ()
    source: str = ""

    @property
    def kind(self) -> str:
        """The case without its variant: "jump"."""
        return self.case.partition(":")[0]


@dataclass(frozen=True)
class Finding:
    """An observation as a sentence.

    Attributes:
        severity: "warning", "notice" or "info".
        text: the sentence, which contains the number.
        number: the number that led to it, unrounded.
        layer: name of the layer's router; None for the model.
        kind: what it is about: "flips", "jump", "ties", "dead", "cold", "epsilon", "load", ...
    """

    severity: Severity
    text: str
    number: float
    layer: str | None = None
    kind: str = ""


Harm = Literal["dangerous", "harmless", "unclear"]
"""Whether most near-ties have a large jump."""


@dataclass(frozen=True)
class RoutingJudgement:
    """What rounding does to the routing and what to do; `Inspection.verdict` is its sentences.

    Attributes:
        kind: "no scores" if gaps are unknown, "smoothed" if routers are smoothed, else "top-k".
        cause: what makes tokens flip in the routers alone: "bf16", or σ of noise on the logits.
        share: tokens that change an expert in at least one layer by that, with its interval.
        jump: median relative change of a layer's output at near-ties; None if not measured.
        experts: experts in use per token, mean over layers.
        recommendation: what to do about the precision served; None where that was not measured.
    """

    kind: Literal["no scores", "smoothed", "top-k"]
    cause: str = ""
    share: Share | None = None
    jump: float | None = None
    experts: float | None = None
    recommendation: Recommendation | None = None


@dataclass(frozen=True, repr=False)
class Inspection(Result):
    """What the routing of a model looks like on a text.

    Attributes:
        verdict: one sentence about the model.
        findings: the observations as sentences, most severe first.
        judgement: the data of the verdict.
        observations: the data of the findings, most severe first.
        metrics: named numbers of the model as a whole, for conditions such as `flip@bf16 > 0.02`:
            "flip@P" for each format and each σ of the noise (mean over layers), "flip@P:any" (share
            of tokens that flip in a layer at least), "flip@P:worst" (worst layer), "tie@P", "ties"
            (share of exact ties), "jump" and "jump:worst" (median relative jump at near-ties),
            "dangerous", "gap@p" (quantiles), "dead", "cold", "evenness"; of the precision served
            "changed@model P", "kl@model P", "loss@model P". What is not known is absent.
        measures: everything about gaps, ties, flips and load.
        jumps: jump size per layer, in the order of `measures.layers`.
        sample: a stretch of text with its gaps; None where no text is known.
        provenance: model, revision, dtype, text, tokens, seed and versions, as JSON values.
        timings: seconds per stage ("tokenise", "forward", "measure", "jumps", "noise", "total")
            and "tokens_per_second" of the forward passes.
        calibration: tokens of such a text until every expert has enough of them to calibrate a
            quantised model, layer by layer, the most demanding first.
        noise: what the precision served does near the ties of each layer.
        serving: what the precision served does to the model; None where it was not measured, for
            the reason in `noise.status`, or, where that is "ok", as the model gives no logits.
        trace: the routing that was measured; not part of the JSON.
    """

    format: ClassVar[str] = "tieline-inspection"
    sentences: ClassVar[tuple[str, ...]] = ("verdict", "findings")

    judgement: RoutingJudgement
    observations: tuple[Observation, ...]
    metrics: dict[str, float]
    measures: RoutingMeasures
    jumps: tuple[LayerJumps, ...]
    sample: TextSample | None
    provenance: dict[str, object]
    timings: dict[str, float]
    calibration: tuple[CalibrationNeed, ...] = ()
    noise: NoiseReport = NoiseReport((), "not measured: this needs the model")
    serving: Serving | None = None
    trace: RoutingTrace | None = field(default=None, metadata={"json": False}, compare=False)

    @property
    def verdict(self) -> str:
        """The judgement as a sentence."""
        return self.sentence("verdict")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The observations as sentences."""
        return self.sentence("findings")


MOST = 0.5
"""Share of near-ties from which on "most" of them are meant."""
LEADING_SIGMA = "0.01"
"""Noise that stands in for bf16 where the size of the logits is unknown."""
WARN_FLIPS, NOTE_FLIPS = 0.02, 0.005
WARN_TIES = 0.001
BUSY = 3.0
"""Load over an even one from which an expert counts as overloaded."""
FEW_TOKENS = 4096
SEVERITIES: dict[Severity, int] = {"warning": 0, "notice": 1, "info": 2}


def inspection_metrics(
    measures: RoutingMeasures, jumps: tuple[LayerJumps, ...]
) -> dict[str, float]:
    """The numbers by name; those that the trace cannot answer are absent."""
    model = measures.model
    numbers: dict[str, float | None] = {}
    for rate in (*model.precision, *model.noise):
        numbers[f"flip@{rate.name}"] = rate.mean.value
        numbers[f"flip@{rate.name}:any"] = rate.any_layer.value
        numbers[f"flip@{rate.name}:worst"] = rate.worst
    rates: dict[str, list[float]] = {}
    for layer in measures.layers:
        for row in layer.precision.value or ():
            if row.tie_emulated.value is not None:
                rates.setdefault(row.precision, []).append(row.tie_emulated.value)
    numbers |= {f"tie@{name}": sum(values) / len(values) for name, values in rates.items()}
    if model.gap.value is not None:
        gap = model.gap.value
        numbers["ties"] = gap.ties / gap.tokens
        levels = zip(gap.quantiles.probabilities, gap.quantiles.value, strict=True)
        numbers |= {f"gap@{level:g}": value for level, value in levels}
    numbers |= jump_metrics(jumps)
    numbers |= {"dead": float(model.dead), "cold": float(model.cold), "evenness": model.evenness}
    numbers["experts"] = experts_per_token(measures.layers)
    return {name: value for name, value in numbers.items() if value is not None}


def inspection_metric_names(
    loss_jumps: bool = False, settings: MeasureSettings | None = None, serve: str = "bf16"
) -> set[str]:
    """Return every metric that an inspection with these settings can have.

    Args:
        loss_jumps: whether losses are measured.
        settings: grids and formats of the measures.
        serve: the precision served, or "none".
    """
    grid = settings or MeasureSettings()
    causes = [*grid.precisions, *(f"{sigma:g}" for sigma in grid.sigmas)]
    flips = {f"flip@{cause}{which}" for cause in causes for which in ("", ":any", ":worst")}
    ties = {f"tie@{name}" for name in grid.precisions}
    gaps = {f"gap@{level:g}" for level in grid.probabilities}
    single = {"ties", "jump", "jump:worst", "dangerous", "dead", "cold", "evenness", "experts"}
    rounding = "" if serve == "none" else served_rounding(serve).name
    served = {f"{kind}@{rounding}" for kind in SERVED_METRICS if rounding}
    return flips | ties | gaps | single | served | ({"loss"} if loss_jumps else set())


def experts_per_token(layers: Sequence[LayerMeasures]) -> float:
    """Experts in use per token, mean over layers."""
    return sum(layer.k if layer.used is None else layer.used for layer in layers) / len(layers)


def jump_metrics(jumps: tuple[LayerJumps, ...]) -> dict[str, float | None]:
    """Median and worst jump, share of dangerous near-ties and mean loss; empty without jumps."""
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


def leading_rate(measures: RoutingMeasures) -> ModelRate | None:
    """Return the flip rate that speaks for the model: bf16 where it is known, else noise."""
    rates = {rate.name: rate for rate in (*measures.model.noise, *measures.model.precision)}
    return rates.get("bf16", rates.get(LEADING_SIGMA))


def judge_routing(
    measures: RoutingMeasures, jumps: tuple[LayerJumps, ...], serving: Serving | None = None
) -> RoutingJudgement:
    """Judge what rounding does to the routing, and what to do.

    Args:
        measures: of the routers by themselves.
        jumps: of every layer.
        serving: what the precision served does to the model; None where it was not measured.
    """
    rate = leading_rate(measures)
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
    near = [layer.near for layer in layers]
    high = [jump >= x.dangerous_above for x in layers for jump in x.near.jumps]
    documents = torch.tensor(
        [document for sample in near for document in sample.documents], device="cpu"
    )
    share = clustered_share(torch.tensor(high, device="cpu"), documents)
    if (share.low or 0.0) >= MOST:
        return share, "dangerous"
    return share, "harmless" if (share.high or 0.0) < MOST else "unclear"


def observe_routing(
    measures: RoutingMeasures, jumps: tuple[LayerJumps, ...]
) -> tuple[Observation, ...]:
    """Return everything worth knowing, most severe first; one observation for all layers."""
    observations = [
        *_observed_flips(measures),
        *_observed_jumps(jumps),
        *_observed_losses(jumps),
        *_observed_ties(measures.layers),
        *_observed_unused_experts(measures.layers),
        *_observed_overload(measures.layers),
        *_observed_epsilons(measures.layers),
        *_observed_gaps_in_data(measures.layers, jumps),
        *_observed_few_tokens(measures.layers),
    ]
    return tuple(sorted(observations, key=lambda x: SEVERITIES[x.severity]))


def _observed_flips(measures: RoutingMeasures) -> Iterator[Observation]:
    """Flips by rounding in the worst layer, by other formats and by a low-precision product."""
    rates = measures.model.precision
    yield from (_observed_worst_layer(rate) for rate in rates if rate.name == "bf16")
    other_rates = [rate.any_layer.value or 0.0 for rate in rates if rate.name != "bf16"]
    if other_rates:
        yield Observation("flips:formats", "info", max(other_rates))
    yield from _observed_product_flips(measures.layers)
    if not rates:
        yield from map(_observed_worst_layer, measures.model.noise)


def _observed_worst_layer(rate: ModelRate) -> Observation:
    """The layer in which a perturbation flips most tokens."""
    low = 0.0 if rate.worst_share is None else rate.worst_share.low or 0.0
    severity: Severity = "info"
    if rate.name in ("bf16", LEADING_SIGMA) and low >= NOTE_FLIPS:
        severity = "warning" if low >= WARN_FLIPS else "notice"
    return Observation(
        "flips:worst", severity, rate.worst, rate.worst_layer, (rate.worst_layer,), rate.name
    )


def _observed_product_flips(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """Layers whose low-precision product flips many tokens."""
    products = {x.name: x.product.value for x in layers if x.product.value is not None}
    shares = {name: x.flip_emulated.value or 0.0 for name, x in products.items()}
    names = _names_by_number({name: share for name, share in shares.items() if share >= WARN_FLIPS})
    if names:
        worst = names[0]
        source = products[worst].precision
        yield Observation("flips:product", "warning", shares[worst], worst, names, source)


def _observed_jumps(jumps: tuple[LayerJumps, ...]) -> Iterator[Observation]:
    """Layers whose jumps at near-ties are dangerous, unclear or harmless."""
    layers = {layer.name: layer.value for layer in jumps if layer.value is not None}
    heights = {name: jump_height(value) for name, value in layers.items()}
    harms = {name: dangerous_share([value])[1] for name, value in layers.items()}
    dangerous = _names_by_number(
        {n: heights[n] for n, harm in harms.items() if harm == "dangerous"}
    )
    if dangerous:
        height = heights[dangerous[0]]
        yield Observation("jump:dangerous", "warning", height, dangerous[0], dangerous)
    unclear = tuple(name for name, harm in harms.items() if harm == "unclear")
    if unclear:
        yield Observation("jump:unclear", "info", float(len(unclear)), None, unclear)
    harmless = tuple(name for name, harm in harms.items() if harm == "harmless")
    if harmless:
        worst = max(harmless, key=heights.__getitem__)
        yield Observation("jump:harmless", "info", heights[worst], worst, harmless)


def jump_height(value: JumpMeasures) -> float:
    """Return the median jump of the tokens nearest to a tie (the lower one of two)."""
    ordered = sorted(value.near.jumps)
    return ordered[(len(ordered) - 1) // 2]


def _observed_losses(jumps: tuple[LayerJumps, ...]) -> Iterator[Observation]:
    """The layer in which swaps change the loss most."""
    losses = {layer.name: layer.value.loss for layer in jumps if layer.value}
    means = {n: x.mean.value for n, x in losses.items() if x and x.mean.value is not None}
    if means:
        worst = max(means, key=lambda name: abs(means[name]))
        yield Observation("loss", "info", means[worst], worst, tuple(means))


def _observed_ties(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """Layers with exact ties."""
    gaps = {x.name: x.gap.value for x in layers if x.gap.value is not None and x.gap.value.ties}
    shares = {name: gap.ties / gap.tokens for name, gap in gaps.items()}
    names = _names_by_number(shares)
    if names:
        share = shares[names[0]]
        severity = "warning" if share >= WARN_TIES else "notice"
        yield Observation("ties", severity, share, names[0], names)


def _observed_unused_experts(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """Layers with experts that no token, or hardly any, chose."""
    dead = tuple(layer.name for layer in layers if layer.load.dead)
    if dead:
        count = sum(len(layer.load.dead) for layer in layers)
        yield Observation("dead", "notice", float(count), dead[0] if len(dead) == 1 else None, dead)
    cold = tuple(layer.name for layer in layers if layer.load.cold)
    if cold:
        count = sum(len(layer.load.cold) for layer in layers)
        yield Observation("cold", "info", float(count), None, cold)


def _observed_overload(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """Layers with an overloaded expert."""
    loads = {x.name: x.load.busiest for x in layers if x.load.busiest >= BUSY and x.n_experts > x.k}
    names = _names_by_number(loads)
    if names:
        yield Observation("load", "notice", loads[names[0]], names[0], names)


def _observed_epsilons(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """Smallest and largest ε of k + ½ experts, by kind of score and k: ε has the score's units."""
    kinds: dict[tuple[str, int], dict[str, float]] = {}
    for layer in layers:
        half = layer.near.value.epsilon_half.value if layer.near.value else None
        if half is not None:
            kinds.setdefault((layer.units, layer.k), {})[layer.name] = half
    for widths in kinds.values():
        low, high = min(widths, key=widths.__getitem__), max(widths, key=widths.__getitem__)
        names = (low, high) if len(widths) > 1 else (low,)
        yield Observation("epsilon", "info", widths[low], low, names)


def _observed_gaps_in_data(
    layers: Sequence[LayerMeasures], jumps: tuple[LayerJumps, ...]
) -> Iterator[Observation]:
    """What the trace cannot answer, with the number of layers."""
    reasons = Counter(f"gaps: {layer.gap.status}" for layer in layers if layer.gap.value is None)
    reasons.update(
        f"jumps: {layer.status}"
        for layer in jumps
        if layer.value is None and layer.status.startswith("not answerable")
    )
    for reason, count in reasons.items():
        yield Observation("gap", "notice", float(count), source=reason)


def _observed_few_tokens(layers: Sequence[LayerMeasures]) -> Iterator[Observation]:
    """That the text is short."""
    if layers[0].tokens < FEW_TOKENS:
        yield Observation("tokens", "notice", float(layers[0].tokens))


def _names_by_number(numbers: dict[str, float]) -> tuple[str, ...]:
    """Names by their numbers, the largest first."""
    return tuple(sorted(numbers, key=lambda name: -numbers[name]))
