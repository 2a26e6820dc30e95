"""The result of inspecting a model, as frozen records.

Inspection          measures, jumps, text sample, verdict, findings, metrics
├─ measures         `RoutingMeasures` of the geometry, one `LayerMeasures` per layer
├─ jumps            one `LayerJumps` per layer, in the order of `measures.layers`
│  └─ value         `JumpMeasures`: `JumpSample`s, `GapJumpTable`, `LossJumps`
├─ calibration      one `CalibrationNeed` per layer
├─ noise            `NoiseReport`: size of the model's own noise, and orders of ties at that size
├─ sample           `TextSample`: pieces of text with the gaps of their tokens
├─ judgement        `RoutingJudgement`: the data of the verdict
└─ observations     `Observation`s: the data of the findings, most severe first
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tieline.analysis.served_precision import (
    Recommendation,
    Serving,
)
from tieline.core.records import Result, short_repr
from tieline.core.statistics import Estimate, Quantiles, Share
from tieline.measure.calibration_need import CalibrationNeed
from tieline.measure.measures import RoutingMeasures
from tieline.trace.record import RoutingTrace

Severity = Literal["warning", "notice", "info"]
"""Severity of a finding: it needs action, is good to know, or only describes."""

SEVERITIES: dict[Severity, int] = {"warning": 0, "notice": 1, "info": 2}


@dataclass(frozen=True)
class JumpSample:
    """Tokens whose experts of ranks k and k + 1 were swapped; one entry per token in every field.

    Attributes:
        tokens: index of the token in the trace.
        documents: document of the token.
        positions: position of the token in its document.
        gaps: z_[k] - z_[k+1] within the chosen groups, in units of the selection score, ascending.
        jumps: ‖y_swapped - y‖ / ‖y‖, y the output of the layer's block for this token.
        leaving: expert of rank k, which the swap removes.
        entering: expert of rank k + 1, which takes its place and its weight.
        losses: change of the summed loss of the token's sequence, in nats, by swapping this token's
            choice in this layer alone; an entry or the whole field is None if not measured.
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

    A tie with a small jump is harmless, whatever its gap: dangerous tokens are in the first rows
    (small gap) and last columns (large jump).

    Attributes:
        gap_levels: probabilities whose gap quantiles, over all tokens, are the edges of the rows.
        gap_edges: these quantiles; a row holds low <= gap < high, the last one its upper edge too.
        jump_edges: edges of the columns: quantiles of the sampled jumps.
        counts: number of sampled tokens in each cell.
        shares: estimated share of all tokens in each cell; tokens of the near sample have weight
            one, tokens of the random sample the number of tokens that each represents.
    """

    gap_levels: tuple[float, ...]
    gap_edges: tuple[float, ...]
    jump_edges: tuple[float, ...]
    counts: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...]

    __repr__ = short_repr


@dataclass(frozen=True)
class LossJumps:
    """Change of the loss by swaps at near-ties, one swap per forward pass of a sequence.

    Attributes:
        mean: mean change of the summed loss of the sequence, in nats; positive if swaps hurt.
        absolute: quantiles of the absolute change.
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
        near: the tokens with the smallest gaps.
        random: a random sample of the other tokens, for comparison; may be empty.
        near_quantiles: quantiles of the jump over the near sample.
        random_quantiles: quantiles of the jump over the random sample; None if it is empty.
        dangerous: share of the near sample whose jump is at least `dangerous_above`.
        dangerous_above: relative change of the output from which a tie counts as dangerous.
        table: joint distribution of gap and jump.
        loss: change of the loss by swaps of the near sample; None if not requested.
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
    """Jumps of a layer, or the reason why they are missing.

    Attributes:
        name: name of the layer's router, as in `measures`.
        value: jumps of the layer; None if `status` is not "ok".
        status: "ok", "not measured: ..." or "not answerable: ...".
    """

    name: str
    value: JumpMeasures | None
    status: str = "ok"


@dataclass(frozen=True)
class TextPiece:
    """Text of one token and the distance of its routing to a tie.

    Attributes:
        text: text of the token, as plain characters; the joined pieces are the original text.
        token: token id.
        position: position in its document.
        gap: smallest relative gap over the layers: 0 on a tie, 1 for a typical token; None if no
            layer has gaps.
        gaps: relative gap for each layer of `TextSample.layers`, None for a layer without gaps.
    """

    text: str
    token: int
    position: int
    gap: float | None
    gaps: tuple[float | None, ...]


@dataclass(frozen=True)
class TextSample:
    """The first tokens of a document with their gaps, to be coloured by gap.

    Attributes:
        layers: names of the layers of `TextPiece.gaps`.
        document: number of the document.
        pieces: tokens in order.
        scales: unit of the relative gaps in each layer: the median gap over all tokens.
    """

    layers: tuple[str, ...]
    document: int
    pieces: tuple[TextPiece, ...]
    scales: tuple[float | None, ...]

    __repr__ = short_repr


@dataclass(frozen=True)
class OwnNoise:
    """Effect of rounding the whole model on one router.

    Attributes:
        name: name of the layer's router.
        precision: format that the model was rounded to.
        tokens: number of tokens compared.
        epsilon: size of the noise of the gap, in units of the selection score.
        flipped: share of tokens whose experts changed in the rounded run.
        orders: share of tokens of tie order 0, 1, ... at ε; the last entry includes higher orders.
    """

    name: str
    precision: str
    tokens: int
    epsilon: float
    flipped: Estimate
    orders: tuple[float, ...]


@dataclass(frozen=True)
class NoiseReport:
    """Noise of every layer with scores.

    Attributes:
        layers: one record per layer with scores, in order.
        status: "ok", or why nothing, or nothing but the layers, was measured.
    """

    layers: tuple[OwnNoise, ...] = ()
    status: str = "ok"

    def layer(self, name: str) -> OwnNoise | None:
        """Return the record of the layer with this name; None if it has none."""
        return next((layer for layer in self.layers if layer.name == name), None)


@dataclass(frozen=True)
class Observation:
    """One observation about a result, as data; the report writes its sentence.

    Attributes:
        case: subject, with a variant after a colon, such as "jump:harmless".
        severity: "warning", "notice" or "info".
        number: the number that the observation reports.
        layer: name of the layer's router; None for the model.
        layers: names of all layers concerned, in the order of the sentence.
        source: number format, noise level or reason that the observation refers to.
    """

    case: str
    severity: Severity
    number: float
    layer: str | None = None
    layers: tuple[str, ...] = ()
    source: str = ""

    @property
    def kind(self) -> str:
        """Return the case without its variant, such as "jump"."""
        return self.case.partition(":")[0]


@dataclass(frozen=True)
class Finding:
    """An observation as a sentence.

    Attributes:
        severity: "warning", "notice" or "info".
        text: the sentence, which contains the number.
        number: the number in the sentence, unrounded.
        layer: name of the layer's router; None for the model.
        kind: subject: "flips", "jump", "ties", "dead", "cold", "epsilon", "load", ...
    """

    severity: Severity
    text: str
    number: float
    layer: str | None = None
    kind: str = ""


Harm = Literal["dangerous", "harmless", "unclear"]
"""Whether most near-ties have a large jump; "unclear" if the interval contains one half."""


@dataclass(frozen=True)
class RoutingJudgement:
    """Effect of rounding on the routing, and what to do; `Inspection.verdict` is its sentences.

    Attributes:
        kind: "no scores" if gaps are unknown, "smoothed" if routers are smoothed, else "top-k".
        cause: perturbation of the routers alone: "bf16", or σ of noise on the logits.
        share: share of tokens whose experts `cause` changes in at least one layer, with interval.
        jump: median relative change of a layer's output at near-ties; None if not measured.
        experts: experts in use per token, mean over layers.
        recommendation: what to do about the precision served; None if it was not measured.
    """

    kind: Literal["no scores", "smoothed", "top-k"]
    cause: str = ""
    share: Share | None = None
    jump: float | None = None
    experts: float | None = None
    recommendation: Recommendation | None = None


@dataclass(frozen=True, repr=False)
class Inspection(Result):
    """Routing of a model on a text: gaps, ties, flips, jumps and load.

    Attributes:
        verdict: one sentence about the model.
        findings: the observations as sentences, most severe first.
        judgement: the data of the verdict.
        observations: the data of the findings, most severe first.
        metrics: named numbers of the model as a whole, for conditions such as `flip@bf16 > 0.02`:
            "flip@P" for each format and each σ of the noise (mean over layers), "flip@P:any" (share
            of tokens that flip in at least one layer), "flip@P:worst" (worst layer), "tie@P",
            "ties" (share of exact ties), "jump" and "jump:worst" (median relative jump at
            near-ties), "dangerous", "gap@p" (quantiles), "dead", "cold", "evenness"; for the
            precision served "changed@model P", "kl@model P", "loss@model P". Unknown numbers are
            absent.
        measures: measures of gaps, ties, flips and load.
        jumps: jump size per layer, in the order of `measures.layers`.
        sample: the first tokens of the text with their gaps; None if the text is unknown.
        provenance: model, revision, dtype, text, tokens, seed and versions, as JSON values.
        timings: seconds per stage ("tokenise", "forward", "measure", "jumps", "noise", "total")
            and "tokens_per_second" of the forward passes.
        calibration: length of such a text in which every expert gets enough tokens to calibrate a
            quantised model, layer by layer, the most demanding first.
        noise: effect of the precision served near the ties of each layer.
        serving: effect of the precision served on the model; None if it was not measured: the
            reason is in `noise.status`, or the model gives no logits if that is "ok".
        trace: the measured routing; not part of the JSON.
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
        """Return the judgement as a sentence."""
        return self.sentence("verdict")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the observations as sentences."""
        return self.sentence("findings")
