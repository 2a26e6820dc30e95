"""Captures on many ranks: each rank runs its share of the sequences, and all get the whole record.

    trace = trace_on_ranks(model, sequences)           # equal to the trace of one process
    summary = summarise_on_ranks(model, sequences)     # equal, in constant memory

Documents keep their numbers of one process, so that a record does not depend on the number of
ranks. Records travel as their own files: safetensors and JSON, no pickle. Every rank holds the
whole model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn

from tieline.core.errors import TraceError, require
from tieline.models.capture import DEFAULT_EPSILONS, capture
from tieline.models.running import batches, forward, only_running
from tieline.trace.builder import SAMPLE_SIZE, SummaryBuilder
from tieline.trace.ranks import merge_summaries, merge_traces
from tieline.trace.record import LayerTrace, RoutingTrace
from tieline.trace.summary import RoutingSummary

Sequences = Sequence[Int[Tensor, " _"]]


def trace_on_ranks(
    model: nn.Module, sequences: Sequences, *, batch_size: int = 8, **options: Any
) -> RoutingTrace:
    """Return the routing of all sequences, in their order, on every rank.

    Args:
        model: a model of transformers, the same on every rank.
        sequences: token ids, the same on every rank; each rank runs a contiguous part.
        batch_size: sequences per forward pass.
        options: of `capture`.
    """
    start, own = _share(sequences)
    part = None
    with only_running(model), capture(model, **options) as recorder:
        for ids in batches(own, batch_size):
            forward(model, ids)
        if own:
            part = recorder.trace()
            part = replace(part, documents=part.documents + start)
    return merge_traces(part)


def summarise_on_ranks(
    model: nn.Module,
    sequences: Sequences,
    *,
    batch_size: int = 8,
    epsilons: tuple[float, ...] = DEFAULT_EPSILONS,
    sample_size: int = SAMPLE_SIZE,
    provenance: dict[str, object] | None = None,
    **options: Any,
) -> RoutingSummary:
    """Return the summary of the routing of all sequences, on every rank.

    Args:
        model: see `trace_on_ranks`.
        sequences: see `trace_on_ranks`.
        batch_size: see `trace_on_ranks`.
        epsilons: grid of `capture` and of the summary.
        sample_size: number of whole tokens in the summary.
        provenance: where the tokens come from.
        options: further options of `capture`.
    """
    start, own = _share(sequences)
    builder = SummaryBuilder(epsilons, sample_size, provenance)
    sink = _Shifted(builder, start)
    with only_running(model), capture(model, epsilons=epsilons, sink=sink, **options):
        for ids in batches(own, batch_size):
            forward(model, ids)
    return merge_summaries(builder.summary() if own else None)


class _Shifted:
    """A sink that numbers documents as in one process."""

    def __init__(self, sink: SummaryBuilder, start: int) -> None:
        self._sink, self._start = sink, start

    def update(
        self,
        layer: int | str,
        chunk: LayerTrace,
        documents: Int[Tensor, " tokens"],
        positions: Int[Tensor, " tokens"],
        tokens: Int[Tensor, " tokens"],
    ) -> None:
        """Update the sink with shifted documents."""
        self._sink.update(layer, chunk, documents + self._start, positions, tokens)


def _share(sequences: Sequences) -> tuple[int, Sequences]:
    """Return the number of this rank's first sequence, and its sequences."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    require(len(sequences) > 0, "nothing to capture: got no sequences", TraceError)
    first, last = (len(sequences) * place // ranks for place in (rank, rank + 1))
    return first, sequences[first:last]
