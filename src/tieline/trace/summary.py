"""Streaming summaries: what a trace says, in memory that does not grow with the tokens.

A summary holds integer counts per layer and a sample of whole tokens. Summaries of parts of a run
merge to the summary of the whole, exactly, in any order and grouping:

    merge([a, b, c])  ==  merge([merge([c, a]), b])  ==  summary of all tokens at once

load             tokens that chose each expert
gaps             counts of the gap on the grid of `tieline.trace.counts`
near             counts of K(ε) = #{i : z_i > z_[k] - ε} for each ε
orders           counts of the order of tie: 0 if z_[k] - z_[k+1] >= ε,
                 else #{i : |z_i - z_[k]| < ε} - 1
moments          exact sums of z_[r] and z_[r]²
coalitions       sketch of the different sets of chosen experts
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.records import canonical
from tieline.trace.counts import ExactMoments, GridCdf, LogHistogram
from tieline.trace.record import (
    TOKEN_KEYS,
    LayerFacts,
    LayerTrace,
    RoutingTrace,
    check_epsilons,
    identical,
    token_hash,
)
from tieline.trace.sampling import (
    DistinctCount,
    DistinctSketch,
    Rows,
    distinct_count,
    rows_of,
    smallest_rows,
)

MOST_TOKENS = 1 << 38
"""Largest number of tokens for which no count or exact sum overflows."""


class TokenKey(NamedTuple):
    """Document and position of a token."""

    document: int
    position: int


@dataclass(frozen=True, eq=False)
class SharedBias:
    """The correction bias that all tokens share, if they do.

    Attributes:
        value: the bias (E,); None if the router has none, or if it changed.
        changed: whether two batches had different biases (during training).
    """

    value: Float[Tensor, " experts"] | None = None
    changed: bool = False

    def __add__(self, other: "SharedBias") -> "SharedBias":
        same = identical(self.value, other.value) and not (self.changed or other.changed)
        return self if same else SharedBias(None, changed=True)


@dataclass(frozen=True, eq=False)
class LayerSummary:
    """Statistics of one layer over all tokens of a run.

    Tokens with scores that are not finite count in `tokens`, `nonfinite`, `load` and `coalitions`
    only. Fields that the source did not record are None.

    Attributes:
        name: qualified name of the router module.
        facts: how the router chooses.
        tokens: number of tokens.
        load: tokens that chose each expert; sums to k times `tokens`.
        coalitions: sketch of the different sets of chosen experts.
        bias: correction bias that the selection scores contain.
        nonfinite: number of tokens with a score that is not finite among the first k.
        first_nonfinite: the first of them by document and position.
        gaps: counts of `LayerTrace.gap`; exact ties are its zeros.
        group_gaps: counts of the gap between chosen and other groups.
        group_decides: tokens whose gap is that between groups, smaller than that between experts.
        distances: counts of the Euclidean distance to the nearest tie.
        near: counts of K(ε) = 0, ..., E, per ε.
        orders: counts of the orders 0, ..., E - 1 of tie, per ε.
        moments: exact moments of the score of each kept rank.
    """

    name: str
    facts: LayerFacts
    tokens: int
    load: Int[Tensor, " experts"]
    coalitions: DistinctSketch
    bias: SharedBias = SharedBias()
    nonfinite: int = 0
    first_nonfinite: TokenKey | None = None
    gaps: LogHistogram | None = None
    group_gaps: LogHistogram | None = None
    group_decides: int = 0
    distances: LogHistogram | None = None
    near: Int[Tensor, "epsilons counts"] | None = None
    orders: Int[Tensor, "epsilons orders"] | None = None
    moments: ExactMoments | None = None

    @property
    def measured(self) -> int:
        """Number of tokens with finite scores: the total of every histogram."""
        return self.tokens - self.nonfinite

    @property
    def exact_ties(self) -> int:
        """Number of tokens whose gap is exactly zero."""
        return self.known_gaps().zeros

    def known_gaps(self) -> LogHistogram:
        """Return the gap histogram; raises if there is none."""
        if self.gaps is None:
            raise TraceError(f"layer {self.name!r} has ids only: no gaps can be computed from it")
        return self.gaps

    def gap_cdf(self) -> GridCdf:
        """Return #{gap < w} and #{gap <= w} at every point w of the grid; exact."""
        return self.known_gaps().cdf()

    def gap_quantiles(self, probabilities: Sequence[float]) -> tuple[tuple[float, float], ...]:
        """Return, for each probability, the ends of the bin with the quantile of the gap."""
        return tuple(self.known_gaps().quantile(probability) for probability in probabilities)

    def mean_near(self) -> Float[Tensor, " epsilons"]:
        """Return the mean of K(ε) per ε, in float64."""
        if self.near is None:
            raise TraceError(f"layer {self.name!r} was summarised without counts K(ε)")
        counts = torch.arange(self.near.shape[1], dtype=torch.float64)
        return (self.near.double() @ counts) / self.measured


_SUMS = ("tokens", "load", "coalitions", "bias", "nonfinite", "group_decides")
_OPTIONAL_SUMS = ("gaps", "group_gaps", "distances", "near", "orders", "moments")


def merge_layers(first: LayerSummary, second: LayerSummary) -> LayerSummary:
    """Merge the summaries of a layer; exact, commutative and associative."""
    _require_alike(first, second)
    merged = {name: getattr(first, name) + getattr(second, name) for name in _SUMS}
    for name in _OPTIONAL_SUMS:
        value, other = getattr(first, name), getattr(second, name)
        merged[name] = None if value is None else value + other
    keys = [s.first_nonfinite for s in (first, second) if s.first_nonfinite is not None]
    if merged["tokens"] > MOST_TOKENS:
        raise TraceError(f"a summary holds at most 2^38 tokens, got {merged['tokens']}")
    return LayerSummary(
        name=first.name, facts=first.facts, first_nonfinite=min(keys, default=None), **merged
    )


def _require_alike(first: LayerSummary, second: LayerSummary) -> None:
    same = first.name == second.name and first.facts == second.facts
    if not same:
        raise TraceError(
            f"layers must be the same router: {first.name!r} {first.facts} is not "
            f"{second.name!r} {second.facts}"
        )
    for name in _OPTIONAL_SUMS:
        value, other = getattr(first, name), getattr(second, name)
        if not ((value is None) == (other is None) and _shape(value) == _shape(other)):
            raise TraceError(f"layer {first.name!r}: {name} was recorded differently in two parts")


def _shape(value: object) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


@dataclass(frozen=True, eq=False)
class RoutingSummary:
    """Statistics of all tokens of a run, and a sample of them.

    Attributes:
        layers: statistics per MoE layer, in order of depth.
        sample: trace of the `sample_size` tokens with the smallest hash of (document, position),
            or of all tokens if there are fewer; ordered by document and position.
        sample_size: largest number of tokens in the sample.
        epsilons: the grid of ε at which K(ε) and the orders of ties are counted.
        sources: provenance of each part, without repetition, in a fixed order.
    """

    layers: tuple[LayerSummary, ...]
    sample: RoutingTrace
    sample_size: int
    epsilons: tuple[float, ...] = ()
    sources: tuple[dict[str, object], ...] = ()

    def __post_init__(self) -> None:
        check_epsilons(self.epsilons)
        names = tuple(layer.name for layer in self.layers)
        tokens = {layer.tokens for layer in self.layers}
        sampled = tuple(layer.name for layer in self.sample.layers)
        require(names == sampled, f"sample of layers {sampled}, counts of {names}", TraceError)
        require(
            len(tokens) == 1, f"all layers must count the same tokens, got {tokens}", TraceError
        )
        if not (self.sample.n_tokens <= min(self.sample_size, self.tokens)):
            raise TraceError(
                f"{self.sample.n_tokens} sampled of {self.tokens} tokens, size {self.sample_size}"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens T summarised."""
        return self.layers[0].tokens

    def distinct_tokens(self) -> DistinctCount:
        """Estimate the number of different (document, position) from the sample.

        Fewer than `tokens` if parts overlap, or number their documents alike.
        """
        hashes = token_hash(self.sample.documents, self.sample.positions)
        return distinct_count(hashes, self.sample_size)

    def layer(self, name: str) -> LayerSummary:
        """Return the layer whose router has this name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise TraceError(
            f"no layer {name!r} in the summary; it has {[x.name for x in self.layers]}"
        )


def merge(summaries: Sequence[RoutingSummary]) -> RoutingSummary:
    """Merge summaries; the result equals the summary of one run over all tokens."""
    require(len(summaries) > 0, "nothing to merge: got no summaries", TraceError)
    return functools.reduce(_merged, summaries[1:], summaries[0])


def _merged(first: RoutingSummary, second: RoutingSummary) -> RoutingSummary:
    for what in ("epsilons", "sample_size"):
        value, other = getattr(first, what), getattr(second, what)
        require(value == other, f"summaries differ in {what}: {value} is not {other}", TraceError)
    names = [[layer.name for layer in summary.layers] for summary in (first, second)]
    require(names[0] == names[1], f"summaries of different layers: {names}", TraceError)
    pairs = zip(first.layers, second.layers, strict=True)
    layers = tuple(merge_layers(value, other) for value, other in pairs)
    return RoutingSummary(
        layers=layers,
        sample=sample_trace(layers, _merged_sample(first, second), first.epsilons),
        sample_size=first.sample_size,
        epsilons=first.epsilons,
        sources=distinct_sources((*first.sources, *second.sources)),
    )


def _merged_sample(first: RoutingSummary, second: RoutingSummary) -> list[Rows]:
    samples = (first.sample, second.sample)
    keys = [{name: getattr(sample, name) for name in TOKEN_KEYS} for sample in samples]
    pairs = zip(*(sample.layers for sample in samples), strict=True)
    return [
        smallest_rows(
            [rows_of(layer, key) for layer, key in zip(pair, keys, strict=True)], first.sample_size
        )
        for pair in pairs
    ]


def sample_trace(
    layers: Sequence[LayerSummary], rows: Sequence[Rows], epsilons: tuple[float, ...]
) -> RoutingTrace:
    """Return the sampled rows of all layers as one trace; all must have seen the same tokens."""
    keys = {name: rows[0][name] for name in TOKEN_KEYS}
    for layer, columns in zip(layers, rows, strict=True):
        same = all(torch.equal(keys[name], columns[name]) for name in TOKEN_KEYS)
        if not same:
            raise TraceError(
                f"layers {layers[0].name!r} and {layer.name!r} did not see the same tokens"
            )
    records = tuple(
        LayerTrace(
            name=layer.name,
            facts=layer.facts,
            bias=layer.bias.value,
            **{name: value for name, value in columns.items() if name not in TOKEN_KEYS},
        )
        for layer, columns in zip(layers, rows, strict=True)
    )
    tokens, documents, positions = (keys[name] for name in TOKEN_KEYS)
    return RoutingTrace(records, tokens, documents, positions, epsilons)


def distinct_sources(sources: Sequence[dict[str, object]]) -> tuple[dict[str, object], ...]:
    """Return each source once, ordered by its text."""
    return tuple(dict(sorted({canonical(source): source for source in sources}.items())).values())
