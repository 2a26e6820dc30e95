"""The result of inspecting a model, as frozen records.

Inspection          everything: measures, jumps, text sample, verdict, findings, metrics
├─ measures         `RoutingMeasures` of the geometry, one `LayerMeasures` per layer
├─ jumps            one `LayerJumps` per layer, in the order of `measures.layers`
│  └─ value         `JumpMeasures`: `JumpSample`s, `GapJumpTable`, `LossJumps`
├─ calibration      one `CalibrationNeed` per layer
├─ noise            `NoiseReport`: size of the model's own noise, and orders of ties at it
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
from tieline.measure.expert_load import CalibrationNeed
from tieline.measure.measures import RoutingMeasures
from tieline.trace.record import RoutingTrace

Severity = Literal["warning", "notice", "info"]
"""How severe a finding is: act on it, know it, or plain description."""

SEVERITIES: dict[Severity, int] = {"warning": 0, "notice": 1, "info": 2}


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
