"""Captures on many ranks: each rank runs its share of the sequences, and all get the whole record.

    trace = trace_on_ranks(model, sequences)           # equal to the trace of one process
    summary = summarise_on_ranks(model, sequences)     # equal, in constant memory

Documents keep their numbers of one process, so that a record does not depend on the number of
ranks. Records travel as their own files: safetensors and JSON, no pickle. Every rank holds the
whole model.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn

from tieline.core.errors import TraceError, require
from tieline.hf.capture import DEFAULT_EPSILONS, capture
from tieline.hf.running import batches, forward, only_running
from tieline.trace.builder import SAMPLE_SIZE, SummaryBuilder
from tieline.trace.record import LayerTrace, RoutingTrace, concatenate
from tieline.trace.store import load_summary, load_trace, save_summary, save_trace
from tieline.trace.summary import RoutingSummary, merge

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


def merge_traces(part: RoutingTrace | None) -> RoutingTrace:
    """Merge the tokens of all ranks, in order of rank; a rank without tokens passes None."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own"
        if part is not None:
            save_trace(part, own)
        found = concatenate([load_trace(path) for path in _everywhere(own, Path(folder))])
        return replace(found, layers=tuple(found.layers))  # read while the files are there


def merge_summaries(part: RoutingSummary | None) -> RoutingSummary:
    """Merge the summaries of all ranks; a rank without tokens passes None."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own"
        if part is not None:
            save_summary(part, own)
        return merge([load_summary(path) for path in _everywhere(own, Path(folder))])


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


def _everywhere(own: Path, folder: Path) -> list[Path]:
    """Return folders with the files of each rank that has any, in order of rank."""
    if not dist.is_initialized():
        return [own]
    found = []
    for rank, data in enumerate(_gathered(_packed(own))):
        if data:
            found.append(folder / f"rank-{rank}")
            _unpack(data, found[-1])
    require(bool(found), "no rank has captured a token", TraceError)
    return found


def _packed(folder: Path) -> bytes:
    """Pack the files of a folder: one line of JSON with their sizes, then their bytes."""
    if not folder.is_dir():
        return b""
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    sizes = json.dumps({name: len(data) for name, data in contents.items()})
    return b"\n".join([sizes.encode(), b"".join(contents.values())])


def _unpack(data: bytes, folder: Path) -> None:
    line, _, rest = data.partition(b"\n")
    folder.mkdir()
    for name, size in json.loads(line).items():
        (folder / Path(name).name).write_bytes(rest[:size])
        rest = rest[size:]


def _gathered(data: bytes) -> list[bytes]:
    """Return the bytes of every rank; gloo gathers equal lengths, so shorter ones are padded."""
    ranks = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(rows, padded)
    return [row[: int(length)].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]
