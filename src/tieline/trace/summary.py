"""Streaming summaries: statistics of a trace in memory that does not grow with the tokens.

A summary holds integer counts per layer and a sample of whole tokens. Summaries of parts of a run
merge exactly to the summary of the whole run, in any order and grouping:

    merge([a, b, c])  ==  merge([merge([c, a]), b])  ==  summary of all tokens at once

load             tokens that chose each expert
gaps             counts of the gap on the grid of `tieline.trace.counts`
near             counts of K(ε) = #{i : z_i > z_[k] - ε} for each ε
orders           counts of the order of tie: 0 if z_[k] - z_[k+1] >= ε,
                 else #{i : |z_i - z_[k]| < ε} - 1
moments          exact sums of z_[r] and z_[r]²
coalitions       sketch of the different sets of chosen experts

The sample keeps all recorded fields of the n tokens with the smallest `token_hash`. So every layer
keeps the same tokens, and the sample of a union is the sample of the parts' samples. A token that
occurs twice is kept once; if its two records differ, the one that is smaller byte by byte is kept,
token ids first, so that all layers agree.

`SummaryBuilder` takes batches while a model runs; `summarise` takes a whole trace. Statistics of
a batch are computed inside a forward pass, so they use NumPy, which costs less per call than torch
and starts no threads.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.records import canonical_json, short_repr
from tieline.core.text import layer_label
from tieline.trace.counts import (
    HASH_SPAN,
    DistinctCount,
    DistinctSketch,
    ExactMoments,
    GridCdf,
    LogHistogram,
    coalition_hash,
    distinct_count,
    token_hash,
)
from tieline.trace.record import (
    LAYER_TENSORS,
    TOKEN_KEYS,
    LayerFacts,
    LayerTrace,
    RoutingTrace,
    check_epsilons,
    identical_values,
    take_tokens,
)

MOST_TOKENS = 1 << 38
"""Largest number of tokens for which no count or exact sum overflows."""


Rows = Mapping[str, Tensor]


def token_rows(chunk: LayerTrace, keys: Rows, keep_inputs: bool = True) -> Rows:
    """Return the recorded tensors with a row per token, and ids, documents and positions."""
    rows = {name: value for name, value in chunk.rows().items() if keep_inputs or name != "inputs"}
    return {**keys, **rows}


class SampleBuffer:
    """Collects the rows of one layer's sample and drops tokens that cannot be in it any more."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._samples: list[Rows] = []
        self._pending = 0
        self._limit = HASH_SPAN

    def add(self, rows: Rows, hashes: np.ndarray) -> None:
        """Add the rows whose hash does not exceed the largest one of a full sample."""
        chosen = torch.from_numpy(np.flatnonzero(hashes <= self._limit))
        if len(chosen) == 0 and self._samples:
            return
        self._samples.append({name: _copied_rows(value, chosen) for name, value in rows.items()})
        self._pending += len(chosen)
        if self._pending >= 2 * self._size:
            self.rows()

    def rows(self) -> Rows:
        """Return the sample so far, ordered by document and position."""
        sample = rows_with_smallest_hashes(self._samples, self._size)
        self._samples, self._pending = [sample], len(sample["documents"])
        if self._pending == self._size:
            hashes = token_hash(sample["documents"], sample["positions"])
            self._limit = int(hashes.max(initial=-1))
        return sample


def rows_with_smallest_hashes(samples: list[Rows], size: int) -> Rows:
    """Return the `size` tokens with the smallest hash, ordered by document and position."""
    names = {tuple(sample) for sample in samples}
    if len(names) != 1:
        raise TraceError(f"samples must hold the same fields, got {sorted(names)}")
    joined = {
        name: _joined_rows(name, [sample[name] for sample in samples]) for name in names.pop()
    }
    rows = _without_repeated_tokens(joined)
    hashes = token_hash(rows["documents"], rows["positions"])
    order = np.lexsort((rows["positions"], rows["documents"], hashes))[:size]
    kept = {name: value[torch.from_numpy(order)] for name, value in rows.items()}
    order = np.lexsort((kept["positions"], kept["documents"]))
    return {name: value[torch.from_numpy(order)] for name, value in kept.items()}


def _without_repeated_tokens(rows: Rows) -> Rows:
    """Keep one row per (document, position): the smallest of its records byte by byte."""
    documents, positions = rows["documents"].numpy(), rows["positions"].numpy()
    order = np.lexsort((positions, documents))
    repeated = (np.diff(documents[order]) == 0) & (np.diff(positions[order]) == 0)
    if not repeated.any():
        return rows
    names = [*TOKEN_KEYS, *(name for name in LAYER_TENSORS if name in rows)]
    columns = [rows[name] if rows[name].ndim == 2 else rows[name][:, None] for name in names]
    row_bytes = torch.cat(
        [column.contiguous().view(torch.uint8) for column in columns], dim=1
    ).numpy()
    byte_ranks = np.unique(row_bytes, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.lexsort((byte_ranks, positions, documents))
    repeated = (np.diff(documents[order]) == 0) & (np.diff(positions[order]) == 0)
    first = torch.from_numpy(order[np.concatenate(([True], ~repeated))])
    return {name: value[first] for name, value in rows.items()}


def _copied_rows(value: Tensor, chosen: Tensor) -> Tensor:
    """Copy some rows, integers as int64, so that the sample keeps no batch in memory."""
    rows = value.detach().index_select(0, chosen)
    return rows if rows.is_floating_point() else rows.long()


def _joined_rows(name: str, values: list[Tensor]) -> Tensor:
    """Concatenate a column of several samples; raises unless they agree in type and width."""
    kinds = {(value.dtype, tuple(value.shape[1:])) for value in values}
    if len(kinds) != 1:
        raise TraceError(f"{name} must have one type and width in all parts, got {kinds}")
    return torch.cat(values)


class TokenKey(NamedTuple):
    """Document and position of a token."""

    document: int
    position: int


@dataclass(frozen=True, eq=False)
class SharedBias:
    """The correction bias of a router, if it was the same for all tokens.

    Attributes:
        value: the bias (E,); None if the router has none, or if it changed.
        changed: whether two batches had different biases (during training).
    """

    value: Float[Tensor, " experts"] | None = None
    changed: bool = False

    def __add__(self, other: "SharedBias") -> "SharedBias":
        same = identical_values(self.value, other.value) and not (self.changed or other.changed)
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
        first_nonfinite: the first such token by document and position.
        gaps: counts of `LayerTrace.gap`; exact ties are its zeros.
        group_gaps: counts of the gap between chosen and other groups.
        group_decides: number of tokens whose gap between groups is smaller than that between
            experts.
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

    __repr__ = short_repr

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
            raise TraceError(
                f"{layer_label(self.name)} has ids only: no gaps can be computed from it"
            )
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
            raise TraceError(f"{layer_label(self.name)} was summarised without counts K(ε)")
        counts = torch.arange(self.near.shape[1], dtype=torch.float64, device=self.near.device)
        return (self.near.double() @ counts) / self.measured


_SUMMED_FIELDS = ("tokens", "load", "coalitions", "bias", "nonfinite", "group_decides")
_OPTIONAL_FIELDS = ("gaps", "group_gaps", "distances", "near", "orders", "moments")


def merge_layer_summaries(first: LayerSummary, second: LayerSummary) -> LayerSummary:
    """Merge the summaries of a layer; exact, commutative and associative."""
    _check_same_router(first, second)
    merged = {name: getattr(first, name) + getattr(second, name) for name in _SUMMED_FIELDS}
    for name in _OPTIONAL_FIELDS:
        value, other = getattr(first, name), getattr(second, name)
        merged[name] = None if value is None else value + other
    keys = [s.first_nonfinite for s in (first, second) if s.first_nonfinite is not None]
    if merged["tokens"] > MOST_TOKENS:
        raise TraceError(f"a summary holds at most 2^38 tokens, got {merged['tokens']}")
    return LayerSummary(
        name=first.name, facts=first.facts, first_nonfinite=min(keys, default=None), **merged
    )


def _check_same_router(first: LayerSummary, second: LayerSummary) -> None:
    """Raise unless two summaries are of the same router and hold the same fields."""
    same = first.name == second.name and first.facts == second.facts
    if not same:
        raise TraceError(
            f"layers must be the same router: {first.name!r} {first.facts} is not "
            f"{second.name!r} {second.facts}"
        )
    for name in _OPTIONAL_FIELDS:
        value, other = getattr(first, name), getattr(second, name)
        if not (
            (value is None) == (other is None) and _shape_or_empty(value) == _shape_or_empty(other)
        ):
            raise TraceError(
                f"{layer_label(first.name)}: {name} was recorded differently in two parts"
            )


def _shape_or_empty(value: object) -> tuple[int, ...]:
    """Return the shape of a tensor, () for other values."""
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

    __repr__ = short_repr

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


def merge_summaries(summaries: Sequence[RoutingSummary]) -> RoutingSummary:
    """Merge summaries; the result equals the summary of one run over all tokens."""
    require(len(summaries) > 0, "nothing to merge: got no summaries", TraceError)
    return functools.reduce(_merge_two_summaries, summaries[1:], summaries[0])


def _merge_two_summaries(first: RoutingSummary, second: RoutingSummary) -> RoutingSummary:
    """Merge two summaries."""
    for what in ("epsilons", "sample_size"):
        value, other = getattr(first, what), getattr(second, what)
        require(value == other, f"summaries differ in {what}: {value} is not {other}", TraceError)
    names = [[layer.name for layer in summary.layers] for summary in (first, second)]
    require(names[0] == names[1], f"summaries of different layers: {names}", TraceError)
    pairs = zip(first.layers, second.layers, strict=True)
    layers = tuple(merge_layer_summaries(value, other) for value, other in pairs)
    return RoutingSummary(
        layers=layers,
        sample=sample_trace(layers, _merged_sample(first, second), first.epsilons),
        sample_size=first.sample_size,
        epsilons=first.epsilons,
        sources=distinct_sources((*first.sources, *second.sources)),
    )


def _merged_sample(first: RoutingSummary, second: RoutingSummary) -> list[Rows]:
    """Return each layer's sample of the union of two samples."""
    samples = (first.sample, second.sample)
    keys = [{name: getattr(sample, name) for name in TOKEN_KEYS} for sample in samples]
    pairs = zip(*(sample.layers for sample in samples), strict=True)
    return [
        rows_with_smallest_hashes(
            [token_rows(layer, key) for layer, key in zip(pair, keys, strict=True)],
            first.sample_size,
        )
        for pair in pairs
    ]


def sample_trace(
    layers: Sequence[LayerSummary], rows: Sequence[Rows], epsilons: tuple[float, ...]
) -> RoutingTrace:
    """Return the sampled rows of all layers as a trace; raises unless their tokens are equal."""
    keys = {name: rows[0][name] for name in TOKEN_KEYS}
    for layer, columns in zip(layers, rows, strict=True):
        same = all(torch.equal(keys[name], columns[name]) for name in TOKEN_KEYS)
        if not same:
            first, other = layer_label(layers[0].name), layer_label(layer.name)
            raise TraceError(f"{first} and {other} did not see the same tokens")
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
    """Return each source once, ordered by its JSON text."""
    return tuple(
        dict(sorted({canonical_json(source): source for source in sources}.items())).values()
    )


def summarise_chunk(
    chunk: LayerTrace,
    documents: Int[Tensor, " tokens"],
    positions: Int[Tensor, " tokens"],
    epsilons: tuple[float, ...],
    ceiling: int = HASH_SPAN,
) -> LayerSummary:
    """Return the statistics of one batch of one layer.

    Args:
        chunk: what the router did, on the CPU.
        documents: document of each token.
        positions: position of each token in its document.
        epsilons: the ε of the columns of `chunk.near`.
        ceiling: coalitions with at least this hash are omitted, as a full sketch would drop them.
    """
    chosen = _chosen_experts(chunk)
    nonfinite = _nonfinite_tokens(chunk)
    experts = chunk.facts.n_experts
    hashes = coalition_hash(chosen)
    keys = (TokenKey(int(documents[i]), int(positions[i])) for i in nonfinite)
    return LayerSummary(
        name=chunk.name,
        facts=chunk.facts,
        tokens=len(chunk.experts),
        load=torch.from_numpy(np.bincount(chosen.ravel(), minlength=experts)),
        coalitions=DistinctSketch.empty().with_hashes(hashes[hashes < ceiling]),
        bias=SharedBias(None if chunk.bias is None else chunk.bias.detach().clone()),
        nonfinite=len(nonfinite),
        first_nonfinite=min(keys, default=None),
        **_score_statistics(_without_tokens(chunk, nonfinite), epsilons),  # pyright: ignore[reportArgumentType]
    )


def _chosen_experts(chunk: LayerTrace) -> np.ndarray:
    """Return the chosen experts (k, T) as int64; raises if one is outside 0 ... E - 1."""
    chosen = np.ascontiguousarray(chunk.experts.numpy()[:, : chunk.facts.k].T, dtype=np.int64)
    low, high = int(chosen.min(initial=0)), int(chosen.max(initial=0))
    if not (low >= 0 and high < chunk.facts.n_experts):
        raise TraceError(
            f"{layer_label(chunk.name)}: experts must lie in 0 ... {chunk.facts.n_experts - 1}, "
            f"got {low if low < 0 else high}"
        )
    return chosen


def _nonfinite_tokens(chunk: LayerTrace) -> np.ndarray:
    """Return the tokens with a non-finite score among the first k.

    It suffices to look at ranks 1 and k: scores descend, and NaN ranks above every number.
    """
    if chunk.scores is None:
        return np.zeros(0, dtype=np.int64)
    scores = _numpy_scores(chunk.scores)
    first, last = scores[:, 0], scores[:, chunk.facts.k - 1]
    return np.flatnonzero(~(np.isfinite(first) & np.isfinite(last)))


def _without_tokens(chunk: LayerTrace, tokens: np.ndarray) -> LayerTrace:
    """Return the chunk without these tokens."""
    if len(tokens) == 0:
        return chunk
    keep = np.setdiff1d(np.arange(len(chunk.experts)), tokens)
    return take_tokens(chunk, torch.from_numpy(keep))


def _score_statistics(chunk: LayerTrace, epsilons: tuple[float, ...]) -> dict[str, object]:
    """Return the fields of a summary that are computed from scores, which must be finite."""
    gaps = _chunk_gap_histogram(chunk, "gap") if chunk.has_gaps else None
    group_decides = 0
    if gaps is not None and chunk.group_gap is not None:
        group_decides = int((chunk.group_gap.double() < chunk.inner_gap).sum())
    return {
        "gaps": gaps,
        "group_gaps": _chunk_gap_histogram(chunk, "group_gap"),
        "group_decides": group_decides,
        "distances": _chunk_gap_histogram(chunk, "distance"),
        "near": _near_counts(chunk),
        "orders": _tie_order_counts(chunk, epsilons) if gaps is not None else None,
        "moments": None
        if chunk.scores is None
        else ExactMoments.from_scores(chunk.scores.detach()),
    }


def _chunk_gap_histogram(chunk: LayerTrace, name: str) -> LogHistogram | None:
    """Return the histogram of a column of gaps or distances; None if it was not recorded."""
    values = getattr(chunk, name)
    try:
        return None if values is None else LogHistogram.from_values(values.detach())
    except TraceError as error:
        raise TraceError(f"{layer_label(chunk.name)}: {name}: {error}") from error


def _near_counts(chunk: LayerTrace) -> Tensor | None:
    """Return the counts (ε, E + 1) of the values 0, ..., E of K(ε), one row per ε."""
    if chunk.near is None:
        return None
    columns = np.ascontiguousarray(chunk.near.numpy().T, dtype=np.int64)
    return _value_counts(columns, chunk.facts.n_experts + 1, f"{layer_label(chunk.name)}: near")


def _tie_order_counts(chunk: LayerTrace, epsilons: tuple[float, ...]) -> Tensor | None:
    """Return the counts (ε, E) of the orders of tie 0, ..., E - 1, one row per ε.

    #{i : |z_i - z_[k]| < ε} = K(ε) - #{i < k : z_[i] - z_[k] >= ε} is exact: K(ε) was counted over
    all experts, and the scores of ranks 1, ..., k are recorded.
    """
    if chunk.near is None or chunk.scores is None:
        return None
    k, experts = chunk.facts.k, chunk.facts.n_experts
    gap = chunk.inner_gap.detach().numpy()
    ranked = _numpy_scores(chunk.scores)[:, :k].T.astype(np.float64, order="C")
    rise = ranked - ranked[-1]
    near = np.ascontiguousarray(chunk.near.numpy().T)
    small = np.uint8 if k < 256 else np.uint32  # bytes are added 32 at a time
    orders = np.zeros((len(epsilons), len(gap)), dtype=np.int64)
    for row, epsilon in enumerate(epsilons):
        above = np.add.reduce((rise >= epsilon).view(np.uint8), axis=0, dtype=small)
        np.multiply(near[row] - above.astype(np.int64) - 1, gap < epsilon, out=orders[row])
    return _value_counts(orders, experts, f"{layer_label(chunk.name)}: orders of ties")


def _numpy_scores(scores: Tensor) -> np.ndarray:
    """Return scores as a NumPy array; bfloat16, which NumPy lacks, becomes float32."""
    return (scores.float() if scores.dtype == torch.bfloat16 else scores).detach().numpy()


def _value_counts(rows: np.ndarray, size: int, name: str) -> Tensor:
    """Return how often each of 0, ..., size - 1 occurs in each row; raises for other values."""
    low, high = int(rows.min(initial=0)), int(rows.max(initial=0))
    if not (low >= 0 and high < size):
        raise TraceError(f"{name} must lie in 0 ... {size - 1}, got {low if low < 0 else high}")
    counts = [np.bincount(row, minlength=size) for row in rows]
    return torch.from_numpy(np.array(counts, dtype=np.int64).reshape(len(rows), size))


SAMPLE_SIZE = 4096


class SummaryBuilder:
    """Collects the batches of a run into one summary.

    Memory per layer is bounded by about 2 `sample_size` rows and 200 kB of counts.

    Args:
        epsilons: the ε of the columns of `LayerTrace.near`.
        sample_size: number of tokens to sample, with all their fields.
        provenance: JSON values about the source of the tokens.
        keep_inputs: whether the sample keeps captured router inputs, which may be large.
    """

    def __init__(
        self,
        epsilons: tuple[float, ...] = (),
        sample_size: int = SAMPLE_SIZE,
        provenance: Mapping[str, object] | None = None,
        keep_inputs: bool = False,
    ) -> None:
        check_epsilons(epsilons)
        require(sample_size >= 1, f"need sample_size >= 1, got {sample_size}")
        self._epsilons = epsilons
        self._sample_size = sample_size
        self._sources = distinct_sources([dict(provenance or {})])
        self._keep_inputs = keep_inputs
        self._layers: dict[int | str, _LayerState] = {}

    def update(
        self,
        layer: int | str,
        chunk: LayerTrace,
        documents: Int[Tensor, " tokens"],
        positions: Int[Tensor, " tokens"],
        tokens: Int[Tensor, " tokens"],
    ) -> None:
        """Add a batch of one layer.

        Args:
            layer: index or name of the layer. Layers are ordered by index, or, if named, by their
                first batch.
            chunk: what the router did; tensors on other devices are copied to the CPU.
            documents: document of each token.
            positions: position of each token in its document.
            tokens: token ids; -1 where unknown.
        """
        chunk, documents, positions = _chunk_on_cpu(chunk), documents.cpu(), positions.cpu()
        keys = {"tokens": tokens.cpu(), "documents": documents, "positions": positions}
        _check_chunk(chunk, keys, self._epsilons)
        state = self._layers.get(layer)
        ceiling = HASH_SPAN if state is None else state.summary.coalitions.ceiling
        new = summarise_chunk(chunk, documents, positions, self._epsilons, ceiling)
        if state is None:
            self._layers[layer] = state = _LayerState(new, SampleBuffer(self._sample_size))
        else:
            state.summary = merge_layer_summaries(state.summary, new)
        rows = token_rows(chunk, keys, self._keep_inputs)
        state.sample.add(rows, token_hash(documents, positions))

    def summary(self) -> RoutingSummary:
        """Return the summary of all batches so far; further batches may follow."""
        require(len(self._layers) > 0, "no batch was summarised: no layer routed", TraceError)
        keys = list(self._layers)
        if all(isinstance(key, int) for key in keys):
            keys = sorted(keys)
        states = [self._layers[key] for key in keys]
        layers = tuple(state.summary for state in states)
        rows = [state.sample.rows() for state in states]
        return RoutingSummary(
            layers=layers,
            sample=sample_trace(layers, rows, self._epsilons),
            sample_size=self._sample_size,
            epsilons=self._epsilons,
            sources=self._sources,
        )


@dataclass(eq=False)
class _LayerState:
    """Counts and sample of one layer so far."""

    summary: LayerSummary
    sample: SampleBuffer


def summarise(
    trace: RoutingTrace, sample_size: int = SAMPLE_SIZE, keep_inputs: bool = False
) -> RoutingSummary:
    """Summarise a trace, read layer by layer."""
    builder = SummaryBuilder(trace.epsilons, sample_size, trace.provenance, keep_inputs)
    for index, layer in enumerate(trace.layers):
        builder.update(index, layer, trace.documents, trace.positions, trace.tokens)
    return builder.summary()


def _chunk_on_cpu(chunk: LayerTrace) -> LayerTrace:
    """Return the chunk detached and on the CPU."""
    moved = {
        name: value.detach().cpu()
        for name, value in chunk.tensors().items()
        if value.requires_grad or value.device.type != "cpu"
    }
    return replace(chunk, **moved) if moved else chunk


def _check_chunk(
    chunk: LayerTrace, keys: Mapping[str, Tensor], epsilons: tuple[float, ...]
) -> None:
    """Raise unless there is one id per token and one column of `near` per ε."""
    count = len(chunk.experts)
    sizes = {name: tuple(value.shape) for name, value in keys.items()}
    if not all(size == (count,) for size in sizes.values()):
        raise TraceError(
            f"{layer_label(chunk.name)}: need one id for each of {count} tokens, got {sizes}"
        )
    columns = len(epsilons) if chunk.near is None else chunk.near.shape[1]
    if columns != len(epsilons):
        raise TraceError(
            f"{layer_label(chunk.name)}: near has {columns} columns for {len(epsilons)} epsilons"
        )
