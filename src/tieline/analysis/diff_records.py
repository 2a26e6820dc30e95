"""The result of comparing two runs, as frozen records.

    RoutingDiff        the whole result
    ├─ alignment       `Alignment`: tokens, layers and experts that were compared or left out
    ├─ layers          one `LayerDiff` per pair of layers, in order of depth
    │  ├─ weight       `WeightMoved`
    │  └─ attribution  `Attribution`: first flips that noise explains, and unexplained ones
    ├─ causes          `Causes`: answers to three questions, with the patterns of the noise
    ├─ tokens          `TokenDiff`: flips over all layers, first divergent layer, compounding
    ├─ logits          `LogitsDiff` if two models were run
    ├─ dequantised     `DequantisedSplit` if an engine ran a quantised model
    └─ observations    `Observation`s: the data of the findings, most severe first

A section is None if the inputs do not allow it; its `status` has the reason.
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
    """A pair of compared layers.

    Attributes:
        name_a: name in A.
        name_b: name in B.
        n_experts: number of experts.
        k_a: experts per token that A chose.
        k_b: experts per token that B chose.
        agreement: share of chosen experts in common, after renumbering B's experts.
        chance: expected agreement of unrelated runs with these loads.
        moved_experts: experts of A with a different number in B; empty if all numbers are equal.
        moved_to: their numbers in B, in the same order.
        unseen: moved experts that too few tokens chose, whose numbers in B are guesses.
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
    """Alignment of B with A.

    Attributes:
        tokens: number of compared tokens.
        documents: number of their documents.
        token_shift: position in B minus position in A of the same token.
        layer_shift: number of a layer in B minus its number in A; None if they are paired by order.
        pairs: the compared layers.
        only_a: layers of A without a partner.
        only_b: layers of B without a partner.
        tokens_only_a: number of tokens of A without a partner.
        tokens_only_b: number of tokens of B without a partner.
        unrouted_a: number of tokens of A left out because they were not routed (rows of -1).
        unrouted_b: the same for B.
        dense_a: layers of A that route no token, which are dense layers.
        dense_b: the same for B.
        ids_checked: number of tokens whose ids are known on both sides; they are equal.
        notes: one sentence for each of the `differences`.
        against_ids: whether the token ids agree at a different shift than the choices.
        smoothed: the sides, "A" and "B", with smoothed routers. The k experts of top-k are
            compared; the weights are continuous where two of them are exchanged.
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
        """Differences that two runs of one program do not have, most severe first."""
        present: dict[Difference, bool] = {
            "token shift": self.token_shift != 0 or self.against_ids,
            "layer shift": self.layer_shift != 0,
            "experts": bool(self.permuted),
            "k": any(pair.k_a != pair.k_b for pair in self.pairs),
            "layers": any((self.only_a, self.only_b, self.dense_a, self.dense_b)),
            "tokens": bool(self.tokens_only_a or self.tokens_only_b),
            "unrouted": bool(self.unrouted_a or self.unrouted_b),
        }
        return tuple(name for name, is_present in present.items() if is_present)

    @property
    def permuted(self) -> tuple[LayerPair, ...]:
        """The pairs in which B numbers the experts differently."""
        return tuple(pair for pair in self.pairs if pair.moved_experts)


@dataclass(frozen=True)
class WeightMoved:
    """Share of a token's combine weight that moves to other experts, over the tokens of a layer.

    Attributes:
        mean: mean over all tokens.
        p99: 99th percentile.
        largest: largest value.
        flipped_mean: mean over the tokens that flipped; None if there are none.
    """

    mean: float
    p99: float
    largest: float
    flipped_mean: float | None


@dataclass(frozen=True)
class Attribution:
    """Whether noise explains the flips of a layer.

    Attributes:
        noise: standard deviation of the differences of a token's scores between A and B around
            their mean, median over tokens without an earlier flip.
        unexplained: number of first flips that the noise of their own token does not explain.
        widest: widest margin of a first flip; None if there is none.
        unexplained_tokens: (document, position, margin) in A of up to 20 unexplained flips, widest
            first.
        explained: number of first flips that the noise of their own token explains.
        later: number of flips of tokens that flipped in an earlier layer.
        relative: noise over the spread of the layer's scores; None if all scores are equal.
        smallest_p: smallest p-value of a first flip; None if there is none.
        swaps: number of tokens that exchange one expert.
        expected_swaps: expected number from the noise of small gaps, to first order; None if the
            first order does not hold.
        swaps_error: standard error of the difference of the two, clustered by document.
        uniform_p: p-value of the position of the crossing between the scores of A and B, which is
            uniform if choices follow scores; None with few swaps or scores on a grid.
        evidence: "scores", or the combine "weights" of the chosen experts, whose logarithms are
            scores up to a constant; `noise` is then that of log-weights.
        last: with weights, number of experts that leave from or enter at the last rank.
        movers: with weights, number of experts that leave or enter, two for each first flip.
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
    "exchanged scores",
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
        text: the difference and where to look for its cause.
        kind: the kind of pattern.
        layer: name of the layer in A, or of the tensor ("weights"); None for all layers.
        effect: size of the effect: a difference of log variances, a share or a ratio.
        limit: least effect that counts; zero if compared with reference runs.
        number: the expert, document, row of a batch or token id; the first position; the shift of
            a lag; the number of compared layers ("permutation") or different tensors ("weights").
        flips: number of flips with a lag or with exchanged scores.
        detail: "bias" if offsets are the recorded selection bias; "beside" if a layer is compared
            with its neighbours; "reference" if the noise is compared with that of sound runs;
            "most" if with that of most documents; the side of the weights.
        moves: the first permuted experts, as numbers in A and in B.
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
        text: the evidence, or the missing input.
        answer: "yes", "no" or "cannot tell".
        layer: the first layer in which it does not.
        side: the side of that router, "A" or "B".
        tokens: number of tokens of that layer that do not choose the largest scores.
        missing: sides without the necessary scores.
    """

    answer: YesNo
    layer: str = ""
    side: str = ""
    tokens: int = 0
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class FlipAnswer(Sentence):
    """Whether the noise of their own token explains the first flips.

    Attributes:
        text: the evidence, or the missing input.
        answer: "yes", "no" or "cannot tell".
        first: number of flips of tokens without an earlier flip.
        unexplained: number of first flips that are wider than their noise.
        later: number of flips of tokens with an earlier flip.
        obstacle: reason why flips cannot be judged.
        near: number of first flips whose gap is known on one side.
        near_share: share of tokens with a smaller gap, median over these flips.
        last_share: with combine weights as evidence, the share of leaving and entering experts that
            have the last rank of their side; None with scores.
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
    """Whether the noise of the scores has the expected size.

    Attributes:
        text: the evidence, or the missing input.
        answer: "yes", "no" or "cannot tell".
        kind: "no scores" or "equal" scores; "not stated" without an expected format; compared with
            "reference" runs, or with the rounding error of the "format"; or judged by the number of
            "flips".
        layer: first layer with noise.
        relative: its noise over the spread of its scores.
        largest: the largest relative noise, if another layer has it.
        like: formats whose rounding has this size, finest and coarsest; "less" or "more" if none.
        expected: the expected format.
        origin: source of that expectation.
        judged: the layer that decides the answer.
        ratio: its noise over that of the reference run.
        noise: its relative noise, if the format does not explain it.
        allowed: the largest relative noise that the format explains in that layer.
        flips: share of the tokens of that layer that flip, if it decides the answer.
        most_flips: largest share of flips that is explained.
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
    """Whether the noise is free of patterns that rounding does not make.

    Attributes:
        text: the evidence, or the missing input.
        answer: "yes", "no" or "cannot tell".
        patterns: the patterns.
    """

    answer: YesNo
    patterns: tuple[Pattern, ...] = ()


@dataclass(frozen=True)
class OutputAnswer(Sentence):
    """Whether noise explains the distance of the predictions.

    Attributes:
        text: the evidence.
        answer: "yes" or "no".
        kl: KL(A ‖ B), nats per token; without a reference run, over tokens before the first flip
            of their document.
        limit: largest KL that the noise explains.
        reference: KL of the expected format in this model; None without a reference run.
        loss: loss of B minus that of A, nats per token.
        expected: the format whose noise is expected; None if the noise of the scores is used.
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
"""Conclusions of a comparison. "explained by ties" needs a known format or a measured reference;
"near-ties, size unknown" is the same without one."""
ACCUSING: tuple[Conclusion, ...] = (
    "noise larger than expected",
    "pattern",
    "flips wider than their noise",
    "choice against scores",
    "outputs differ",
)
"""Conclusions that ties are not the only cause."""


@dataclass(frozen=True)
class Causes:
    """Whether ties explain the differences of two runs: the data of the verdict.

    Attributes:
        conclusion: the verdict in a few words.
        choice: whether each router chooses the largest of its own scores.
        flips: whether the noise of their own token explains the first flips.
        size: whether the noise has the expected size.
        shape: whether the noise is free of patterns that rounding does not make.
        patterns: the patterns, most specific first.
        expected: the format whose noise is expected; None if it is not stated.
        outputs: whether noise explains the distance of the predictions; None if they were not
            compared or their limit is unknown.
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
        """Whether the conclusion is in `ACCUSING`."""
        return self.conclusion in ACCUSING


@dataclass(frozen=True)
class LayerDiff:
    """Comparison of a layer of A with its partner in B.

    Attributes:
        name: name in A.
        name_b: name in B.
        n_experts: number of experts.
        k: number of compared experts per token.
        flip: share of tokens whose sets of experts differ.
        changed: mean number of different experts, over the tokens that flipped.
        weight: combine weight moved.
        weight_status: "ok", or the reason why there is none.
        attribution: flips that noise explains, and unexplained ones.
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
    """Divergence of two runs up to one layer.

    Attributes:
        name: name of the layer in A.
        first: number of tokens that flip in this layer for the first time.
        cumulative: share of tokens that flip in this or an earlier layer.
        independent: that share if layers flipped independently of each other.
        fresh: flip rate of tokens without an earlier flip.
        after: flip rate of tokens with an earlier flip.
    """

    name: str
    first: int
    cumulative: float
    independent: float
    fresh: Share
    after: Share


@dataclass(frozen=True)
class TokenDiff:
    """Flips of the tokens over all layers.

    Attributes:
        anywhere: share of tokens that flip in at least one layer.
        choices: share of all (token, layer) choices that differ.
        never: number of tokens that flip in no layer.
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
        """Flip rates of tokens without and with an earlier flip, over all layers but the first."""
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
    """Distance of the final distributions of two models, in nats per predicted token.

    With r = P_B/P_A, k3 = r - 1 - log r >= 0. Its mean over tokens drawn from A is KL(A ‖ B).

    Attributes:
        k3: mean of k3 at the tokens of the text, which RL code logs for texts generated by A.
        k3_error: standard error, clustered by document; None for a single document.
        kl: mean of KL(A ‖ B) over the vocabulary, the expectation of k3 under A.
        kl_error: standard error, clustered by document.
        kl_p99: 99th percentile over tokens.
        kl_flipped: mean over tokens that flip in at least one layer; None if there are none.
        kl_unflipped: mean over tokens that flip in no layer; None if there are none.
        loss_a: mean loss of A on the text.
        loss_b: mean loss of B.
        tokens: number of predicted tokens.
        loss_error: standard error of loss_b - loss_a, clustered by document.
        kl_before: mean over tokens before the first flip of their document; None if there are none.
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
    """The KL of two runs with and without A's routes replayed in B.

    Attributes:
        live: KL of B without replay.
        ids: KL of B with A's experts.
        both: KL of B with A's experts and combine weights.
        tokens: number of predicted tokens.
        changed: number of choices of all layers that replay changed.
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
        format_flips: share of tokens that flip between the original and the dequantised weights, by
            layer: the effect of the format.
        engine_flips: share of tokens that flip between the dequantised weights and the engine, by
            layer: the effect of the engine.
        format_any: share of tokens that flip by the format in at least one layer.
        engine_any: share of tokens that flip by the engine in at least one layer.
        format_kl: mean KL of the predictions of original and dequantised, in nats; None without
            predictions.
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
    """Comparison of the routing of two runs on the same tokens.

    Attributes:
        verdict: the differences, whether ties explain them, and what to do, in a few sentences.
        findings: the observations as sentences, most severe first.
        observations: the data of the findings, most severe first.
        metrics: named numbers: "flip" (worst layer), "flip:mean", "flip:any", "unexplained" (first
            flips that noise does not explain: worst layer, share of its tokens),
            "unexplained:count", "weight" (worst layer's mean), "noise" (first layer with noise,
            over the spread of its scores), "kl", "k3". Numbers that the inputs do not allow are
            absent.
        alignment: alignment of tokens, layers and experts.
        layers: comparison of each pair of layers.
        tokens: flips over all layers.
        logits: distance of the final distributions; None unless two models were run.
        provenance: sources of "a" and "b", as JSON values.
        timings: seconds per stage.
        causes: whether ties explain the differences: the data of the verdict.
        replay: the KL with A's routes replayed in B; None without the option `replay`.
        dequantised: effects of the format of a quantised side and of its engine; None unless an
            engine ran a quantised copy of the other side's model.
        serving: effect of the served precision of one side, compared with the other in float32;
            None unless such sides and their predictions were compared.
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
