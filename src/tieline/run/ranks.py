"""What each process runs of a plan that several processes share.

    ranks = Ranks.share_batches("data", batches)     the batches of this process
    ranks.numbered                        the same by their numbers among all batches
    ranks.join_sums([sums, ...])          per-sequence sums of all batches
    ranks.join_trace(trace)               the trace of all batches and layers, on every process

Batches are those of one process, and each is run by one process, so records do not depend on the
number of processes: they are put together in the order of the batches. Where all processes see all
tokens (`models.spread`) there is nothing to put together but the layers of a pipeline. Traces
travel as the files of `trace.store`: safetensors and JSON, no pickle.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn

from tieline.core.collectives import gathered_bytes, gathered_plain, gathered_tensors
from tieline.core.errors import TraceError, require
from tieline.core.statistics import SequenceSums
from tieline.models.parallel import SHARES_TEXT, check_parallel
from tieline.run.forward import forward, only_running
from tieline.trace.record import (
    RoutingTrace,
)
from tieline.trace.selection import concatenate
from tieline.trace.store import load_trace, save_trace

Ids = Int[Tensor, "_ _"]


@dataclass(frozen=True, eq=False)
class Ranks:
    """The batches that this process runs, and how results of all processes are put together.

    Attributes:
        parallel: how processes share the work; None for one process.
        batches: token ids that this process runs.
        number: number of the first of them among all batches.
        documents: sequences in the batches before.
        tokens: tokens in the batches before.
        passes: forward passes of the process that runs most.
    """

    parallel: str | None
    batches: tuple[Ids, ...]
    number: int = 0
    documents: int = 0
    tokens: int = 0
    passes: int = 0

    @classmethod
    def share_batches(cls, parallel: str | None, batches: Sequence[Ids]) -> "Ranks":
        """Cut the batches into consecutive parts, of which this process takes one."""
        count = check_parallel(parallel)
        if parallel not in SHARES_TEXT:
            return cls(parallel, tuple(batches), passes=len(batches))
        require(
            len(batches) >= count,
            f"{len(batches)} batches are too few for {count} processes: take more tokens or a "
            "smaller batch_size",
        )
        edges = [len(batches) * rank // count for rank in range(count + 1)]
        first, last = edges[dist.get_rank()], edges[dist.get_rank() + 1]
        before = batches[:first]
        return cls(
            parallel,
            tuple(batches[first:last]),
            first,
            sum(len(ids) for ids in before),
            sum(ids.numel() for ids in before),
            max(end - start for start, end in pairwise(edges)),
        )

    @property
    def numbered(self) -> dict[int, Ids]:
        """Its batches by their numbers among all batches."""
        return dict(enumerate(self.batches, self.number))

    def keep_pace(self, *models: nn.Module) -> None:
        """Run passes that nobody looks at, where parameters are gathered from all processes."""
        if self.parallel == "fsdp":
            for _ in range(self.passes - len(self.batches)):
                for model in models:
                    with only_running(model):
                        forward(model, self.batches[-1])

    def join_trace(self, trace: RoutingTrace) -> RoutingTrace:
        """The trace of all batches and layers, numbered as in one process."""
        if self.parallel in SHARES_TEXT:
            return gather_traces(replace(trace, documents=trace.documents + self.documents))
        return gather_layers(trace) if self.parallel == "pp" else trace

    @property
    def staged(self) -> bool:
        """Whether each process has some of the layers, as stages of a pipeline do."""
        return self.parallel == "pp"

    @property
    def share_text(self) -> bool:
        """Whether processes run different batches."""
        return self.parallel in SHARES_TEXT

    def join_layers(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather tensors by layer from all stages of a pipeline."""
        if self.parallel != "pp":
            return dict(tensors)
        return {name: value for rank in gathered_tensors(tensors) for name, value in rank.items()}

    def join_plain(self, values: list[Any]) -> list[Any]:
        """Gather JSON values, one per layer, from all stages of a pipeline."""
        if self.parallel != "pp":
            return values
        return [value for rank in gathered_plain(values) for value in rank]

    def join_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather tensors with a row per token or sequence, by names that all processes have."""
        if not self.share_text:
            return dict(tensors)
        by_rank = gathered_tensors(tensors)
        return {name: torch.cat([rank[name] for rank in by_rank]) for name in tensors}

    def join_counts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add up counts of all processes, by names that all processes have."""
        if not self.share_text:
            return dict(tensors)
        rows = self.join_rows({name: count[None] for name, count in tensors.items()})
        return {name: counts.sum(dim=0) for name, counts in rows.items()}

    def join_lists(self, rows: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Gather a list of named tensors, those of the first process first."""
        if not self.share_text:
            return [dict(row) for row in rows]
        numbered = {
            f"{n}.{name}": value for n, row in enumerate(rows) for name, value in row.items()
        }
        gathered: list[dict[str, Tensor]] = []
        for tensors in gathered_tensors(numbered):
            count = 1 + max((int(key.partition(".")[0]) for key in tensors), default=-1)
            lists: list[dict[str, Tensor]] = [{} for _ in range(count)]
            for key, value in tensors.items():
                number, _, name = key.partition(".")
                lists[int(number)][name] = value
            gathered += lists
        return gathered

    def join_sums(self, sums: Sequence[SequenceSums]) -> None:
        """Make per-sequence sums those of all batches, in place."""
        if not self.share_text:
            return
        tensors = {}
        for number, quantity in enumerate(sums):
            empty = torch.empty(0, dtype=torch.float64, device="cpu")
            tensors[f"{number}.sums"] = torch.cat([empty, *quantity.sums])
            tensors[f"{number}.counts"] = torch.cat([empty.float(), *quantity.counts])
        joined = self.join_rows(tensors)
        for number, quantity in enumerate(sums):
            values, counts = joined[f"{number}.sums"], joined[f"{number}.counts"]
            quantity.sums[:] = [values] if len(values) else []
            quantity.counts[:] = [counts] if len(values) else []

    def provenance(self) -> dict[str, object]:
        """What the record of a result says about the processes."""
        if self.parallel is None:
            return {}
        return {"parallel": self.parallel, "processes": dist.get_world_size()}


def gather_traces(trace: RoutingTrace | None) -> RoutingTrace:
    """Merge the tokens of all ranks, in order of rank; a rank without tokens passes None."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "own"
        if trace is not None:
            save_trace(trace, local)
        merged = concatenate([load_trace(path) for path in _rank_folders(local, Path(folder))])
        return replace(merged, layers=tuple(merged.layers))  # read while the files are there


def gather_layers(trace: RoutingTrace) -> RoutingTrace:
    """Put the layers of all ranks, which saw the same tokens, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / "own"
        save_trace(trace, local)
        traces = [load_trace(path) for path in _rank_folders(local, Path(folder))]
        return replace(traces[0], layers=tuple(layer for shard in traces for layer in shard.layers))


def _rank_folders(local: Path, folder: Path) -> list[Path]:
    """Return folders with the files of each rank that has any, in order of rank."""
    if not dist.is_initialized():
        return [local]
    folders = []
    for rank, data in enumerate(gathered_bytes(_folder_as_bytes(local))):
        if data:
            folders.append(folder / f"rank-{rank}")
            _write_folder(data, folders[-1])
    require(bool(folders), "no rank has captured a token", TraceError)
    return folders


def _folder_as_bytes(folder: Path) -> bytes:
    """Pack the files of a folder: one line of JSON with their sizes, then their bytes."""
    if not folder.is_dir():
        return b""
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    sizes = json.dumps({name: len(data) for name, data in contents.items()})
    return b"\n".join([sizes.encode(), b"".join(contents.values())])


def _write_folder(data: bytes, folder: Path) -> None:
    """Write the files that `_folder_as_bytes` packed."""
    line, _, rest = data.partition(b"\n")
    folder.mkdir()
    for name, size in json.loads(line).items():
        (folder / Path(name).name).write_bytes(rest[:size])
        rest = rest[size:]
