"""What each process does of an analysis that several processes share.

    share = Share.of("data", parts)       this process's part of the batches
    share.whole_trace(trace)              the trace of all batches and layers, on every process
    share.all_sums([sums, ...])           per-sequence sums of all batches

Batches are those of one process, and each is run by one process, so records do not depend on the
number of processes: they are put together in the order of the batches. In the ways of
`hf.spread` where all processes see all tokens there is nothing to put together but the layers of a
pipeline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn

from tieline.core.errors import require
from tieline.core.processes import gathered_plain, gathered_tensors
from tieline.core.statistics import SequenceSums
from tieline.models.running import forward, only_running
from tieline.models.spread import SHARES_TEXT, check_parallel
from tieline.trace.ranks import merge_layers, merge_traces
from tieline.trace.record import RoutingTrace

Ids = Int[Tensor, "_ _"]


@dataclass(frozen=True, eq=False)
class Share:
    """This process's part of the batches of an analysis.

    Attributes:
        parallel: how processes share the work; None for one process.
        batches: token ids that this process runs.
        number: place of the first of them among all batches.
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
    def of(cls, parallel: str | None, parts: Sequence[Ids]) -> "Share":
        """Cut the batches into consecutive shares, of which this process takes its own."""
        ranks = check_parallel(parallel)
        if parallel not in SHARES_TEXT:
            return cls(parallel, tuple(parts), passes=len(parts))
        require(
            len(parts) >= ranks,
            f"{len(parts)} batches are too few for {ranks} processes: take more tokens or a "
            "smaller batch_size",
        )
        edges = [len(parts) * rank // ranks for rank in range(ranks + 1)]
        first, last = edges[dist.get_rank()], edges[dist.get_rank() + 1]
        before = parts[:first]
        return cls(
            parallel,
            tuple(parts[first:last]),
            first,
            sum(len(part) for part in before),
            sum(part.numel() for part in before),
            max(end - start for start, end in pairwise(edges)),
        )

    @property
    def own_tokens(self) -> int:
        """Tokens that this process runs."""
        return sum(part.numel() for part in self.batches)

    def keep_pace(self, *models: nn.Module) -> None:
        """Run passes that nobody looks at, where parameters are gathered from all processes."""
        if self.parallel == "fsdp":
            for _ in range(self.passes - len(self.batches)):
                for model in models:
                    with only_running(model):
                        forward(model, self.batches[-1])

    def whole_trace(self, part: RoutingTrace) -> RoutingTrace:
        """The trace of all batches and layers, numbered as in one process."""
        if self.parallel in SHARES_TEXT:
            return merge_traces(replace(part, documents=part.documents + self.documents))
        return merge_layers(part) if self.parallel == "pp" else part

    def all_layers(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by layer, of all stages of a pipeline."""
        if self.parallel != "pp":
            return dict(own)
        return {name: value for part in gathered_tensors(own) for name, value in part.items()}

    def all_plain(self, own: list[Any]) -> list[Any]:
        """JSON values, one per layer, of all stages of a pipeline."""
        if self.parallel != "pp":
            return own
        return [value for part in gathered_plain(own) for value in part]

    def all_tokens(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors with a row per token or sequence, of all batches, by names that all share."""
        if self.parallel not in SHARES_TEXT:
            return dict(own)
        parts = gathered_tensors(own)
        return {name: torch.cat([part[name] for part in parts]) for name in own}

    def all_sums(self, sums: Sequence[SequenceSums]) -> None:
        """Make per-sequence sums those of all batches, in place."""
        if self.parallel not in SHARES_TEXT:
            return
        own = {}
        for place, one in enumerate(sums):
            empty = torch.empty(0, dtype=torch.float64)
            own[f"{place}.sums"] = torch.cat([empty, *one.sums])
            own[f"{place}.counts"] = torch.cat([empty.float(), *one.counts])
        found = self.all_tokens(own)
        for place, one in enumerate(sums):
            values, counts = found[f"{place}.sums"], found[f"{place}.counts"]
            one.sums[:], one.counts[:] = ([values], [counts]) if len(values) else ([], [])

    def facts(self) -> dict[str, object]:
        """What the record says about the processes."""
        if self.parallel is None:
            return {}
        return {"parallel": self.parallel, "processes": dist.get_world_size()}
