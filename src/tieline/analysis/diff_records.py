"""The result of comparing two runs, as frozen records.

    RoutingDiff        everything
    ├─ alignment       `Alignment`: how the two were aligned, and what was left over
    ├─ layers          one `LayerDiff` per pair of layers, in order of depth
    │  ├─ weight       `WeightMoved`
    │  └─ attribution  `Attribution`: first flips that ties explain, and those that they do not
    ├─ causes          `Causes`: three questions answered, with the patterns found
    ├─ tokens          `TokenDiff`: tokens over all layers, first divergent layer, compounding
    ├─ logits          `LogitsDiff` where two models were run
    ├─ dequantised     `DequantisedSplit` where an engine ran a quantised model
    └─ observations    `Observation`s: the data of the findings, most severe first

A section that the inputs cannot give is None, and its `status` says why.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tieline.analysis.inspect_records import Finding, Observation
from tieline.analysis.served_precision import Recommendation, Serving
from tieline.core.records import Result, Worded
from tieline.core.statistics import Share
from tieline.trace.record import RoutingTrace


@dataclass(frozen=True)
class LayerPair:
    """Two layers that are compared.

    Attributes:
        name_a: name in A.
        name_b: name in B.
        n_experts: number of experts.
        k_a: experts per token that A chose.
        k_b: experts per token that B chose.
        agreement: share of chosen experts that both have, once B's experts are renumbered.
        chance: the same for unrelated runs with these loads.
        moved_experts: experts of A with another number in B; empty if all keep their numbers.
        moved_to: their numbers in B, in that order.
        unseen: experts that one of the two never chose, whose number in the other is a guess.
    """

    name_a: str
    name_b: str
    n_experts: int
    k_a: int
    k_b: int
    agreement: float
    chance: float
    moved_experts: tuple[int, ...] = ()
    moved_to: tuple[int, ...] = ()
    unseen: int = 0

    @property
    def k(self) -> int:
        """Experts per token that are compared."""
        return min(self.k_a, self.k_b)


Difference = Literal["token shift", "layer shift", "experts", "k", "layers", "tokens", "unrouted"]


@dataclass(frozen=True)
class Alignment(Worded):
    """How B was aligned with A.

    Attributes:
        tokens: tokens compared.
        documents: documents that they come from.
        token_shift: position in B minus position in A of what is the same token.
        layer_shift: number of a layer in B minus its number in A; None if they are paired by order.
        pairs: the layers that are compared.
        only_a: layers of A without a partner.
        only_b: layers of B without a partner.
        tokens_only_a: tokens of A without a partner.
        tokens_only_b: tokens of B without a partner.
        unrouted_a: tokens of A that were not routed (rows of -1) and were left out.
        unrouted_b: tokens of B, likewise.
        dense_a: layers of A that route no token: dense ones.
        dense_b: layers of B, likewise.
        ids_checked: tokens whose ids are known on both sides; they are equal.
        notes: one sentence for each of the `differences`.
        against_ids: whether the token ids agree at another shift than the choices.
        smoothed: the sides, "A" and "B", whose routers are smoothed. Compared are the k experts
            that top-k would choose; an exchange of two of them does not make the weights jump.
    """

    tokens: int
    documents: int
    token_shift: int
    layer_shift: int | None
    pairs: tuple[LayerPair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tokens_only_a: int
    tokens_only_b: int
    unrouted_a: int
    unrouted_b: int
    dense_a: tuple[str, ...]
    dense_b: tuple[str, ...]
    ids_checked: int
    against_ids: bool = False
    smoothed: tuple[str, ...] = ()

    sentences: ClassVar[tuple[str, ...]] = ("notes",)

    @property
    def notes(self) -> tuple[str, ...]:
        """The differences as sentences."""
        return self.sentence("notes")

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What two runs of one program would not show, most severe first."""
        present: dict[Difference, bool] = {
            "token shift": self.token_shift != 0 or self.against_ids,
            "layer shift": self.layer_shift != 0,
            "experts": bool(self.permuted),
            "k": any(pair.k_a != pair.k_b for pair in self.pairs),
            "layers": any((self.only_a, self.only_b, self.dense_a, self.dense_b)),
            "tokens": bool(self.tokens_only_a or self.tokens_only_b),
            "unrouted": bool(self.unrouted_a or self.unrouted_b),
        }
        return tuple(name for name, is_there in present.items() if is_there)

    @property
    def permuted(self) -> tuple[LayerPair, ...]:
        """The pairs in which B numbers its experts differently."""
        return tuple(pair for pair in self.pairs if pair.moved_experts)


@dataclass(frozen=True)
class WeightMoved:
    """Share of a token's combine weight that goes to other experts, over the tokens of a layer.

    Attributes:
        mean: over all tokens.
        p99: 99th percentile.
        largest: of any token.
        flipped_mean: over the tokens whose set changed; None if there are none.
    """

    mean: float
    p99: float
    largest: float
    flipped_mean: float | None


@dataclass(frozen=True)
class Attribution:
    """Why the sets of a layer differ.

    Attributes:
        noise: median deviation of the differences of a token's scores between A and B, over tokens
            without an earlier flip; what all scores of a token have in common is left out.
        unexplained: first flips that the noise of their own token does not explain.
        widest: widest margin of a first flip; None if there is none.
        unexplained_tokens: (document, position, margin) of up to 20 of them in A, widest first.
        explained: first flips that the noise of their own token explains.
        later: flips of tokens that had flipped in an earlier layer.
        relative: noise over the spread of the layer's scores; None where all scores are alike.
        smallest_p: smallest p-value of a first flip; None if there is none.
        swaps: tokens that exchange one expert.
        expected_swaps: the number that the noise of small gaps makes, to first order; None where
            that does not hold.
        swaps_error: standard error of the difference of the two, clustered by document.
        uniform_p: p-value of the place of the crossing between the scores of A and B, which is
            uniform where choices follow scores; None with few swaps or scores on a grid.
        evidence: "scores", or the combine "weights" of the chosen experts, whose logarithms are
            scores up to a constant; `noise` is then that of log-weights.
        last: with weights, experts that leave or enter in the last place of their side.
        movers: with weights, experts that leave or enter, two for each first flip.
    """

    noise: float
    unexplained: int
    widest: float | None
    unexplained_tokens: tuple[tuple[int, int, float], ...]
    explained: int
    later: int
    relative: float | None
    smallest_p: float | None
    swaps: int = 0
    expected_swaps: float | None = None
    swaps_error: float | None = None
    uniform_p: float | None = None
    evidence: Literal["scores", "weights"] = "scores"
    last: int = 0
    movers: int = 0


class Sentence(Worded):
    """Base of records that the report writes as one sentence."""

    sentences: ClassVar[tuple[str, ...]] = ("text",)

    @property
    def text(self) -> str:
        """The record as a sentence."""
        return self.sentence("text")


PatternKind = Literal[
    "lag",
    "permutation",
    "offset",
    "expert",
    "row",
    "positions",
    "first position",
    "last position",
    "token",
    "rare tokens",
    "document",
    "batch row",
    "decode",
    "layer",
    "weights",
]


@dataclass(frozen=True)
class Pattern(Sentence):
    """A shape of the differences that rounding does not make.

    Attributes:
        text: what differs and where to look.
        kind: what it is about.
        layer: name of the layer in A, or of the tensor ("weights"); None for all of them.
        effect: how strong it is: a difference of log variances, a share or a ratio.
        limit: effect from which on it counts; zero beside reference runs.
        number: the expert, document, row of a batch or token id; the first position; the shift of
            a lag; the layers compared ("permutation"); the tensors that differ ("weights").
        flips: flips that a lag was found in.
        detail: "bias" if offsets are the recorded selection bias; "beside" for the layers that a
            loud one is compared with; "reference" if the noise is compared with that
            of sound runs; the side of the weights.
        moves: numbers of experts in A and in B that a permutation exchanges, the first few.
    """

    kind: PatternKind
    layer: str | None
    effect: float
    limit: float
    number: int | None = None
    flips: int = 0
    detail: str = ""
    moves: tuple[tuple[int, int], ...] = ()


YesNo = Literal["yes", "no", "cannot tell"]


@dataclass(frozen=True)
class ChoiceAnswer(Sentence):
    """Whether each router chooses the largest of its own scores.

    Attributes:
        text: the evidence, or what is missing.
        answer: "yes", "no" or "cannot tell".
        layer: the first layer in which it does not.
        side: the side that does not, "A" or "B".
        tokens: tokens of that layer whose choice is not the largest of their scores.
        missing: sides without the scores that tell.
    """

    answer: YesNo
    layer: str = ""
    side: str = ""
    tokens: int = 0
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class FlipAnswer(Sentence):
    """Whether first flips are as wide as the noise of their own token.

    Attributes:
        text: the evidence, or what is missing.
        answer: "yes", "no" or "cannot tell".
        first: flips of tokens without an earlier flip.
        unexplained: those among them that are wider than their noise.
        later: flips of tokens with an earlier flip.
        obstacle: why flips cannot be judged.
        near: first flips whose gap is known on one side.
        near_share: median over these of the share of tokens with a smaller gap.
        last_share: where combine weights tell, the share of the experts that leave or enter which
            have the last place of their side; None where scores tell.
    """

    answer: YesNo
    first: int = 0
    unexplained: int = 0
    later: int = 0
    obstacle: str = ""
    near: int = 0
    near_share: float | None = None
    last_share: float | None = None


@dataclass(frozen=True)
class SizeAnswer(Sentence):
    """Whether the noise of the scores is of the size that was to be expected.

    Attributes:
        text: the evidence, or what is missing.
        answer: "yes", "no" or "cannot tell".
        kind: "no scores" or "equal" scores; "not stated" without an expected format; compared with
            "reference" runs, or with the rounding error of the "format"; or judged by the number of
            "flips".
        layer: first layer with noise.
        relative: its noise over the spread of its scores.
        largest: the largest relative noise, if another layer has it.
        like: formats whose rounding has this size, finest and coarsest; "less" or "more" if none.
        expected: the expected format.
        origin: who expects it.
        judged: the layer that decides.
        ratio: its noise over that of the reference run.
        noise: its relative noise, where the format does not explain it.
        allowed: the largest relative noise that the format explains there.
        flips: share of the tokens of that layer that flip, where this decides.
        most_flips: largest share that is explained.
    """

    answer: YesNo
    kind: Literal["no scores", "equal", "not stated", "reference", "format", "flips"]
    layer: str = ""
    relative: float | None = None
    largest: float | None = None
    like: tuple[str, ...] = ()
    expected: str | None = None
    origin: str = ""
    judged: str = ""
    ratio: float | None = None
    noise: float | None = None
    allowed: float | None = None
    flips: float | None = None
    most_flips: float | None = None


@dataclass(frozen=True)
class ShapeAnswer(Sentence):
    """Whether the noise lacks any pattern that rounding does not make.

    Attributes:
        text: the evidence, or what is missing.
        answer: "yes", "no" or "cannot tell".
        patterns: the patterns.
    """

    answer: YesNo
    patterns: tuple[Pattern, ...] = ()


@dataclass(frozen=True)
class OutputAnswer(Sentence):
    """Whether the predictions are no further apart than the noise explains.

    Attributes:
        text: the evidence.
        answer: "yes" or "no".
        kl: KL(A ‖ B), nats per token; over tokens before the first flip of their document where
            there is no reference run.
        limit: largest KL that the noise explains.
        reference: KL that the expected format makes in this model; None without a reference run.
        loss: loss of B minus that of A, nats per token.
        expected: the format whose noise is expected; None where the noise of the scores is taken.
    """

    answer: YesNo
    kl: float
    limit: float
    reference: float | None = None
    loss: float = 0.0
    expected: str | None = None


Conclusion = Literal[
    "no flips",
    "explained by ties",
    "near-ties, size unknown",
    "noise larger than expected",
    "pattern",
    "flips wider than their noise",
    "choice against scores",
    "outputs differ",
    "cannot tell",
]
"""What a comparison comes to. "explained by ties" needs a known format or a measured reference;
"near-ties, size unknown" is the same without one."""
ACCUSING: tuple[Conclusion, ...] = (
    "noise larger than expected",
    "pattern",
    "flips wider than their noise",
    "choice against scores",
    "outputs differ",
)
"""Conclusions that something other than ties is at work."""


@dataclass(frozen=True)
class Causes:
    """Whether ties explain the differences of two runs: the data of the verdict.

    Attributes:
        conclusion: the verdict in a few words.
        choice: whether each router chooses the largest of its own scores.
        flips: whether first flips follow the noise of their own token.
        size: whether the noise is of the size that was to be expected.
        shape: whether the noise lacks any pattern that rounding does not make.
        patterns: the patterns that were found, most specific first.
        expected: the format whose noise was to be expected; None if nobody says it.
        outputs: whether the predictions are no further apart than the noise explains; None where
            they were not compared or nothing says how far they may be.
    """

    conclusion: Conclusion
    choice: ChoiceAnswer
    flips: FlipAnswer
    size: SizeAnswer
    shape: ShapeAnswer
    patterns: tuple[Pattern, ...] = ()
    expected: str | None = None
    outputs: OutputAnswer | None = None

    @property
    def alarm(self) -> bool:
        """Whether something other than ties was found: the conclusion is in `ACCUSING`."""
        return self.conclusion in ACCUSING


@dataclass(frozen=True)
class LayerDiff:
    """One layer of A against its partner in B.

    Attributes:
        name: name in A.
        name_b: name in B.
        n_experts: number of experts.
        k: experts per token that are compared.
        flip: share of tokens whose set of experts differs.
        changed: mean number of experts that differ, over the tokens that flipped.
        weight: combine weight moved.
        weight_status: "ok", or why there is none.
        attribution: flips that ties explain, and those that they do not.
        attribution_status: "ok", or "not attributable: ..." with the reason.
    """

    name: str
    name_b: str
    n_experts: int
    k: int
    flip: Share
    changed: float | None
    weight: WeightMoved | None
    weight_status: str
    attribution: Attribution | None
    attribution_status: str


@dataclass(frozen=True)
class DepthStep:
    """How far the two runs have come apart at one layer.

    Attributes:
        name: name of the layer in A.
        first: tokens that flip here and in no layer before.
        cumulative: share of tokens that have flipped here or before.
        independent: what that share would be if layers flipped independently of each other.
        fresh: flip rate of tokens without a flip in a layer before.
        after: flip rate of tokens with one.
    """

    name: str
    first: int
    cumulative: float
    independent: float
    fresh: Share
    after: Share


@dataclass(frozen=True)
class TokenDiff:
    """Tokens over all layers.

    Attributes:
        anywhere: share of tokens that flip in at least one layer.
        choices: share of all (token, layer) choices that differ.
        never: tokens that flip nowhere.
        mean_flips: mean number of layers in which a token flips.
        depth: one step per layer.
    """

    anywhere: Share
    choices: float
    never: int
    mean_flips: float
    depth: tuple[DepthStep, ...]

    @property
    def later_rates(self) -> tuple[float, float]:
        """Flip rate over all layers but the first, of tokens without and with an earlier flip."""
        fresh, after = (
            [getattr(step, name) for step in self.depth[1:]] for name in ("fresh", "after")
        )
        rates = [
            sum(rate.count for rate in shares) / max(sum(rate.total for rate in shares), 1)
            for shares in (fresh, after)
        ]
        return rates[0], rates[1]


@dataclass(frozen=True)
class LogitsDiff:
    """How far the final distributions of two models are apart, in nats per predicted token.

    With r = P_B/P_A, k3 = r - 1 - log r >= 0. Its mean over tokens drawn from A is KL(A ‖ B).

    Attributes:
        k3: mean of k3 at the tokens of the text: what RL code logs, where the text is A's own.
        k3_error: standard error, clustered by document; None for a single document.
        kl: mean of KL(A ‖ B) over the vocabulary, the expectation of k3 under A.
        kl_error: standard error, clustered by document.
        kl_p99: 99th percentile over tokens.
        kl_flipped: mean over tokens that flip in at least one layer; None if there are none.
        kl_unflipped: mean over the others.
        loss_a: mean loss of A on the text.
        loss_b: mean loss of B.
        tokens: predicted tokens.
        loss_error: standard error of loss_b - loss_a, clustered by document.
        kl_before: mean over tokens before the first flip of their document, to which no flip has
            reached; None if there are none.
    """

    k3: float
    k3_error: float | None
    kl: float
    kl_error: float | None
    kl_p99: float
    kl_flipped: float | None
    kl_unflipped: float | None
    loss_a: float
    loss_b: float
    tokens: int
    loss_error: float | None = None
    kl_before: float | None = None


@dataclass(frozen=True)
class SplitPart:
    """Mean KL(A ‖ B) over predicted tokens, in nats.

    Attributes:
        kl: the mean.
        error: standard error, clustered by document; None for one document.
    """

    kl: float
    error: float | None


@dataclass(frozen=True)
class ReplaySplit:
    """The distance of two runs with and without A's routes replayed in B.

    Attributes:
        live: B as it is.
        ids: B with A's experts.
        both: B with A's experts and combine weights.
        tokens: predicted tokens.
        changed: choices of all layers that replay changed.
    """

    live: SplitPart
    ids: SplitPart
    both: SplitPart
    tokens: int
    changed: int

    @property
    def by_ids(self) -> float:
        """Share of the KL that replaying experts removes."""
        return 1 - self.ids.kl / self.live.kl if self.live.kl else 0.0

    @property
    def by_both(self) -> float:
        """Share of the KL that replaying experts and weights removes."""
        return 1 - self.both.kl / self.live.kl if self.live.kl else 0.0


@dataclass(frozen=True)
class DequantisedSplit:
    """A quantised side split by its dequantised weights, run by transformers in float32.

    Attributes:
        side: the quantised side, "A" or "B".
        bits: bits per weight of the quantised form; None if unknown.
        format_flips: tokens that flip between the original and the dequantised weights, by layer:
            what the format costs.
        engine_flips: tokens that flip between the dequantised weights and the engine, by layer:
            what the engine adds.
        format_any: tokens that flip by the format in at least one layer.
        engine_any: the same for the engine.
        format_kl: mean KL of the predictions of original and dequantised, in nats; None without.
        engine_kl: the same for dequantised and engine.
    """

    side: str
    bits: float | None
    format_flips: tuple[Share, ...]
    engine_flips: tuple[Share, ...]
    format_any: Share
    engine_any: Share
    format_kl: float | None
    engine_kl: float | None


@dataclass(frozen=True, repr=False)
class RoutingDiff(Result):
    """How two runs route the same tokens.

    Attributes:
        verdict: how the two differ, whether ties explain it, and what to do.
        findings: the observations as sentences, most severe first.
        observations: the data of the findings, most severe first.
        metrics: named numbers: "flip" (worst layer), "flip:mean", "flip:any", "unexplained" (first
            flips that noise does not explain: worst layer, share of its tokens),
            "unexplained:count", "weight" (worst layer's mean), "noise" (first layer with noise,
            over the spread of its scores), "kl", "k3". What the inputs cannot give is absent.
        alignment: how they were aligned.
        layers: layer by layer.
        tokens: over all layers.
        logits: final distributions; None unless two models were run.
        provenance: where "a" and "b" come from, as JSON values.
        timings: seconds per stage.
        causes: whether ties explain the differences: the data of the verdict.
        replay: the KL with A's routes replayed in B; None unless it was asked for.
        dequantised: what the format of a quantised side costs and what its engine adds; None
            unless an engine ran a quantised model beside the original.
        serving: what the precision of one side does beside the other in float32; None unless a
            served precision was compared with float32 and predictions were.
        recommendation: what to do about that precision, or about routers that do not choose; None
            without either.
        traces: the routing of A and of B; not part of the JSON.
    """

    format: ClassVar[str] = "tieline-diff"
    sentences: ClassVar[tuple[str, ...]] = ("verdict", "findings")

    observations: tuple[Observation, ...]
    metrics: dict[str, float]
    alignment: Alignment
    layers: tuple[LayerDiff, ...]
    tokens: TokenDiff
    logits: LogitsDiff | None
    provenance: dict[str, object]
    timings: dict[str, float]
    causes: Causes | None = None
    replay: ReplaySplit | None = None
    dequantised: DequantisedSplit | None = None
    serving: Serving | None = None
    recommendation: Recommendation | None = None
    traces: tuple[RoutingTrace, RoutingTrace] | None = field(
        default=None, metadata={"json": False}, compare=False
    )

    @property
    def verdict(self) -> str:
        """The comparison in a few sentences."""
        return self.sentence("verdict")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The observations as sentences."""
        return self.sentence("findings")
