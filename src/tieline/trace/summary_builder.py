"""Make a streaming summary, batch by batch, while a model runs.

`SummaryBuilder` takes batches; `summarise` takes a whole trace. The statistics of a batch are
computed inside a forward pass, so they use NumPy, which costs less per call than torch and starts
no threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.text import layer_label
from tieline.trace.counts import ExactMoments, LogHistogram
from tieline.trace.record import LayerTrace, RoutingTrace, check_epsilons, take_tokens
from tieline.trace.summary import (
    SPAN,
    DistinctSketch,
    LayerSummary,
    RoutingSummary,
    SampleBuffer,
    SharedBias,
    TokenKey,
    coalition_hash,
    distinct_sources,
    merge_layers,
    rows_of,
    sample_trace,
    token_hash,
)


def summarise_chunk(
    chunk: LayerTrace,
    documents: Int[Tensor, " tokens"],
    positions: Int[Tensor, " tokens"],
    epsilons: tuple[float, ...],
    ceiling: int = SPAN,
) -> LayerSummary:
    """Summarise one batch.

    Args:
        chunk: what the router did, on the CPU.
        documents: document of each token.
        positions: position of each token in its document.
        epsilons: the ε of the columns of `chunk.near`.
        ceiling: coalitions with at least this hash are left out; a full sketch would drop them.
    """
    chosen = _chosen_in_chunk(chunk)
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


def _chosen_in_chunk(chunk: LayerTrace) -> np.ndarray:
    """Chosen experts (k, T) as int64, all of them between 0 and E - 1."""
    chosen = np.ascontiguousarray(chunk.experts.numpy()[:, : chunk.facts.k].T, dtype=np.int64)
    low, high = int(chosen.min(initial=0)), int(chosen.max(initial=0))
    if not (low >= 0 and high < chunk.facts.n_experts):
        raise TraceError(
            f"{layer_label(chunk.name)}: experts must lie in 0 ... {chunk.facts.n_experts - 1}, "
            f"got {low if low < 0 else high}"
        )
    return chosen


def _nonfinite_tokens(chunk: LayerTrace) -> np.ndarray:
    """Tokens with a score that is not finite among the first k.

    The first and the k-th suffice: scores descend, and NaN ranks above all.
    """
    if chunk.scores is None:
        return np.zeros(0, dtype=np.int64)
    scores = _numpy_scores(chunk.scores)
    first, last = scores[:, 0], scores[:, chunk.facts.k - 1]
    return np.flatnonzero(~(np.isfinite(first) & np.isfinite(last)))


def _without_tokens(chunk: LayerTrace, tokens: np.ndarray) -> LayerTrace:
    """The chunk without some tokens."""
    if len(tokens) == 0:
        return chunk
    keep = np.setdiff1d(np.arange(len(chunk.experts)), tokens)
    return take_tokens(chunk, torch.from_numpy(keep))


def _score_statistics(chunk: LayerTrace, epsilons: tuple[float, ...]) -> dict[str, object]:
    """The fields of a summary that count scores, which must be finite."""
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
        "moments": None if chunk.scores is None else ExactMoments.of(chunk.scores.detach()),
    }


def _chunk_gap_histogram(chunk: LayerTrace, name: str) -> LogHistogram | None:
    """Histogram of a column of gaps or distances, if it was recorded."""
    values = getattr(chunk, name)
    try:
        return None if values is None else LogHistogram.of(values.detach())
    except TraceError as error:
        raise TraceError(f"{layer_label(chunk.name)}: {name}: {error}") from error


def _near_counts(chunk: LayerTrace) -> Tensor | None:
    """Counts of K(ε), one row per ε."""
    if chunk.near is None:
        return None
    columns = np.ascontiguousarray(chunk.near.numpy().T, dtype=np.int64)
    return _value_counts(columns, chunk.facts.n_experts + 1, f"{layer_label(chunk.name)}: near")


def _tie_order_counts(chunk: LayerTrace, epsilons: tuple[float, ...]) -> Tensor | None:
    """Counts of the order of tie, one row per ε.

    #{i : |z_i - z_[k]| < ε} = K(ε) - #{i < k : z_[i] - z_[k] >= ε} is exact: K(ε) was counted over
    all experts, and the other ranks were kept.
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
    """Scores for NumPy, which has no bfloat16."""
    return (scores.float() if scores.dtype == torch.bfloat16 else scores).detach().numpy()


def _value_counts(rows: np.ndarray, size: int, name: str) -> Tensor:
    """How often 0, ..., size - 1 occur in each row."""
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
        sample_size: number of whole tokens to keep.
        provenance: JSON values that say where the tokens come from.
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
            layer: place or name of the layer. Layers are ordered by place, or, if named, by their
                first batch.
            chunk: what the router did; tensors on other devices are copied to the CPU.
            documents: document of each token.
            positions: position of each token in its document.
            tokens: token ids; -1 where unknown.
        """
        chunk, documents, positions = _on_cpu(chunk), documents.cpu(), positions.cpu()
        keys = {"tokens": tokens.cpu(), "documents": documents, "positions": positions}
        _check_chunk(chunk, keys, self._epsilons)
        state = self._layers.get(layer)
        ceiling = SPAN if state is None else state.summary.coalitions.ceiling
        new = summarise_chunk(chunk, documents, positions, self._epsilons, ceiling)
        if state is None:
            self._layers[layer] = state = _LayerState(new, SampleBuffer(self._sample_size))
        else:
            state.summary = merge_layers(state.summary, new)
        rows = rows_of(chunk, keys, self._keep_inputs)
        state.sample.add(rows, token_hash(documents, positions))

    def summary(self) -> RoutingSummary:
        """Return the summary of all batches so far; more may be added afterwards."""
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


def _on_cpu(chunk: LayerTrace) -> LayerTrace:
    """The chunk without gradients and on the CPU."""
    moved = {
        name: value.detach().cpu()
        for name, value in chunk.tensors().items()
        if value.requires_grad or value.device.type != "cpu"
    }
    return replace(chunk, **moved) if moved else chunk


def _check_chunk(
    chunk: LayerTrace, keys: Mapping[str, Tensor], epsilons: tuple[float, ...]
) -> None:
    """Refuse a batch whose ids or ε do not fit its tokens."""
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
