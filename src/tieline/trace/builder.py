"""Making a streaming summary, batch by batch, while a model runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxtyping import Int
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.trace.chunk import summarise_chunk
from tieline.trace.hashing import SPAN, token_hash
from tieline.trace.layer_summary import LayerSummary, merge_layers
from tieline.trace.layout import LAYER_TENSORS
from tieline.trace.record import LayerTrace, RoutingTrace, check_epsilons
from tieline.trace.sample import SampleBuffer, rows_of
from tieline.trace.summary import RoutingSummary, distinct_sources, sample_trace

__all__ = ["SAMPLE_SIZE", "SummaryBuilder", "summarise"]

SAMPLE_SIZE = 4096


class SummaryBuilder:
    """Takes the batches of a run and gives the summary of all tokens so far.

    Memory is bounded by the sample: per layer about 2 `sample_size` rows and some 200 kB of counts.

    Args:
        epsilons: the ε of the columns of `LayerTrace.near`.
        sample_size: number of whole tokens to keep.
        provenance: JSON values that say where the tokens come from.
        keep_inputs: whether the sample keeps the router's inputs where they were captured, which
            may be larger than all the rest.
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
            layer: place or name of the layer. Layers are ordered by place, or, if they are named,
                in the order in which they came first.
            chunk: what the router did; tensors on other devices are copied to the CPU.
            documents: document of each token.
            positions: position of each token in its document.
            tokens: token ids; -1 where unknown.
        """
        chunk, documents, positions = _on_cpu(chunk), documents.cpu(), positions.cpu()
        keys = {"tokens": tokens.cpu(), "documents": documents, "positions": positions}
        _check(chunk, keys, self._epsilons)
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
        """The summary of all batches so far; more may be added afterwards."""
        require(len(self._layers) > 0, "no batch was summarised: no layer routed", TraceError)
        places = list(self._layers)
        if all(isinstance(place, int) for place in places):
            places = sorted(places)
        states = [self._layers[place] for place in places]
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
    """The summary of a trace, read layer by layer."""
    builder = SummaryBuilder(trace.epsilons, sample_size, trace.provenance, keep_inputs)
    for place, layer in enumerate(trace.layers):
        builder.update(place, layer, trace.documents, trace.positions, trace.tokens)
    return builder.summary()


def _on_cpu(chunk: LayerTrace) -> LayerTrace:
    """The chunk without gradients and on the CPU; itself if it is so already."""
    fields = {name: getattr(chunk, name) for name in LAYER_TENSORS}
    moved = {
        name: value.detach().cpu()
        for name, value in fields.items()
        if value is not None and (value.requires_grad or value.device.type != "cpu")
    }
    return replace(chunk, **moved) if moved else chunk


def _check(chunk: LayerTrace, keys: Mapping[str, Tensor], epsilons: tuple[float, ...]) -> None:
    count = len(chunk.experts)
    sizes = {name: tuple(value.shape) for name, value in keys.items()}
    require(
        all(size == (count,) for size in sizes.values()),
        f"layer {chunk.name!r}: need one id for each of {count} tokens, got {sizes}",
        TraceError,
    )
    columns = len(epsilons) if chunk.near is None else chunk.near.shape[1]
    require(
        columns == len(epsilons),
        f"layer {chunk.name!r}: near has {columns} columns for {len(epsilons)} epsilons",
        TraceError,
    )
