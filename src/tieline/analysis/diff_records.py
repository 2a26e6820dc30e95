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
    └─ findings        `Finding`s, most severe first

A section that the inputs cannot give is None, and its `status` says why.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tieline.analysis.inspection import Finding
from tieline.analysis.replay_split import ReplaySplit
from tieline.core.records import Result
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


@dataclass(frozen=True)
class Alignment:
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
        notes: everything above that two runs of one model would not show, in words.
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
    notes: tuple[str, ...] = ()
    smoothed: tuple[str, ...] = ()

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
    """

    noise: float
    unexplained: int
    widest: float | None
    unexplained_tokens: tuple[tuple[int, int, float], ...]
    explained: int
    later: int
    relative: float | None
    smallest_p: float | None


PatternKind = Literal[
    "lag",
    "permutation",
    "offset",
    "expert",
    "row",
    "positions",
    "document",
    "layer",
    "weights",
]


@dataclass(frozen=True)
class Pattern:
    """A shape of the differences that rounding does not make.

    Attributes:
        kind: what it is about.
        layer: name of the layer in A; None for all of them.
        effect: how strong it is: a difference of log variances, a share or a ratio.
        limit: from where on it counts.
        text: what was seen and where to look.
    """

    kind: PatternKind
    layer: str | None
    effect: float
    limit: float
    text: str


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
        answer: "yes", "no" or "cannot tell".
        text: the evidence, or what is missing.
    """

    answer: Literal["yes", "no", "cannot tell"]
    text: str


Conclusion = Literal[
    "no flips",
    "explained by ties",
    "noise larger than expected",
    "pattern",
    "flips wider than their noise",
    "choice against scores",
    "cannot tell",
]


@dataclass(frozen=True)
class Causes:
    """Whether ties explain the differences of two runs, in three questions.

    Attributes:
        conclusion: the verdict in a word.
        choice: whether each router chooses the largest of its own scores.
        flips: whether first flips follow the noise of their own token.
        size: whether the noise is of the size that was to be expected.
        shape: whether the noise lacks any pattern that rounding does not make.
        patterns: the patterns that were found, most specific first.
        expected: the format whose noise was to be expected; None if nobody says it.
    """

    conclusion: Conclusion
    choice: Answer
    flips: Answer
    size: Answer
    shape: Answer
    patterns: tuple[Pattern, ...] = ()
    expected: str | None = None

    @property
    def alarm(self) -> bool:
        """Whether something other than ties was found."""
        return self.conclusion not in ("no flips", "explained by ties", "cannot tell")


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

    @property
    def words(self) -> str:
        """The split in one sentence."""
        weights = "" if self.bits is None else f" ({self.bits:.3g} bits per weight)"
        parts = [
            f"{share.count:,} tokens ({100 * (share.value or 0.0):.2g} %)"
            + ("" if kl is None else f" and {kl:.2g} nats")
            for share, kl in (
                (self.format_any, self.format_kl),
                (self.engine_any, self.engine_kl),
            )
        ]
        return (
            f"{self.side} is quantised{weights}: its weights, dequantised and run by transformers, "
            f"already flip {parts[0]}; the engine adds {parts[1]}"
        )


@dataclass(frozen=True, repr=False)
class RoutingDiff(Result):
    """How two runs route the same tokens.

    Attributes:
        verdict: a sentence or two in plain words.
        findings: most severe first.
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
        causes: whether ties explain the differences; None in files of earlier releases.
        replay: the KL with A's routes replayed in B; None unless it was asked for.
        dequantised: what the format of a quantised side costs and what its engine adds; None
            unless an engine ran a quantised model beside the original.
        traces: the routing of A and of B; not part of the JSON.
    """

    format: ClassVar[str] = "tieline-diff"

    verdict: str
    findings: tuple[Finding, ...]
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
    traces: tuple[RoutingTrace, RoutingTrace] | None = field(
        default=None, metadata={"json": False}, compare=False
    )
