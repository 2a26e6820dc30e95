"""A model as one side of a comparison: as it is or in an emulated number format, and its routes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tieline.models.emulate import Region
from tieline.models.model import Model
from tieline.models.model_stream import ModelStream
from tieline.run.condition import CLEAN, Condition, Perturbation
from tieline.run.corpus import stacked_batches
from tieline.run.observers import Observer
from tieline.run.plan import Logits, Pass, Phase, Plan
from tieline.run.ranks import Ranks
from tieline.run.recorder import RouteRecorder
from tieline.run.runner import Runner
from tieline.run.schedule import Progress
from tieline.trace.record import RoutingTrace


class Side(NamedTuple):
    """A model to run, as it is or in an emulated number format.

    Attributes:
        model: a Mixture-of-Experts model of transformers.
        emulated: name in `models.emulate.FORMATS` of a format that is emulated by rounding; the
            model must be in float32 then.
        parts: what is in that format: "all", "router" or "others".
        stream: reads the weights when they are needed; None if they are in memory.
        tokenizer: its tokenizer, where text is to be cut.
        changes: how it runs, where no format says it.
    """

    model: nn.Module
    emulated: str | None = None
    parts: Region = "all"
    stream: ModelStream | None = None
    tokenizer: Any = None
    changes: Condition | None = None

    @property
    def opened(self) -> Model:
        """The model as the runner takes it."""
        return Model(self.model, stream=self.stream)

    @property
    def condition(self) -> Condition:
        """How it runs."""
        if self.changes is not None:
            return self.changes
        if self.emulated is None:
            return CLEAN
        part = "model" if self.parts == "all" else self.parts
        return Condition(Perturbation("rounding", self.emulated, part))

    def recorder(self, number: int = 0) -> RouteRecorder:
        """Records the passes of this side, the model of that number in its plan."""
        name = self.emulated if self.parts == "all" else f"{self.emulated} {self.parts}"
        facts = {} if self.emulated is None else {"emulated": name}
        return RouteRecorder(self.model, of=lambda run: run.model == number, provenance=facts)


def trace_side(
    side: Side,
    ranks: Ranks,
    observers: Sequence[Observer] = (),
    progress: Progress | None = None,
) -> RoutingTrace:
    """Run batches through one model, and return their routing.

    Args:
        side: the model.
        ranks: the batches, and how processes share them.
        observers: what else looks at the passes, with their logits.
        progress: called with stage, done and total.
    """
    recorder = side.recorder()
    passes = tuple(Pass(n, side.condition) for n in ranks.numbered)
    logits: Logits = "optional" if observers else "none"
    plan = Plan((Phase("forward", ranks.numbered, passes, logits=logits),))
    Runner(side.opened, ranks=ranks).run(plan, [recorder, *observers], progress)
    return recorder.trace()


def trace_model(
    side: Side,
    sequences: Sequence[Int[Tensor, " _"]],
    *,
    documents: Sequence[int] | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
    parallel: str | None = None,
) -> RoutingTrace:
    """Record the routing of one model on these sequences.

    Args:
        side: the model.
        sequences: token ids.
        documents: number of each sequence as a document; 0, 1, ... by default.
        batch_size: sequences per forward pass.
        progress: called with stage, done and total.
        parallel: how processes share the model, which was loaded so.
    """
    ranks = Ranks.of(parallel, list(stacked_batches(sequences, batch_size)))
    trace = trace_side(side, ranks, progress=progress)
    return trace if documents is None else renumbered_documents(trace, documents)


def renumbered_documents(trace: RoutingTrace, documents: Sequence[int]) -> RoutingTrace:
    """The trace with other numbers for its documents 0, 1, ...."""
    return replace(trace, documents=torch.tensor(documents)[trace.documents.long()])
