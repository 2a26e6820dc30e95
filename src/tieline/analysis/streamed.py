"""Inspecting a model that is streamed: each layer is measured while its weights are there.

All batches are in a layer together, so its trace is whole when they leave it: its measures and
jumps are taken then, its router inputs are dropped, and nothing but the trace is kept of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tieline.analysis.inspection import LayerJumps
from tieline.analysis.jump import JumpSettings, measure_jumps
from tieline.analysis.stream_state import RunState
from tieline.analysis.swap import BlockSampler
from tieline.core.numerics import one_thread
from tieline.measure.measure_records import MeasureSettings
from tieline.measure.measures import (
    MeasuredLayer,
    RoutingMeasures,
    joined_measures,
    measured_layer,
)
from tieline.models.capture import Recorder, capture
from tieline.models.running import forward, only_running
from tieline.models.stream_resume import Journal
from tieline.models.streaming import ModelStream
from tieline.trace.record import RoutingTrace

Ids = Int[Tensor, "_ _"]

Matrices = Callable[[RoutingTrace], dict[str, Tensor]]
"""Gives the matrix of each linear router in a trace, by name."""


def streamed_trace(
    stream: ModelStream, batches: list[Ids], told: Callable[[int, int], None] | None = None
) -> RoutingTrace:
    """The routing of all batches, from one read of the weights without the output head.

    Args:
        stream: what runs the model.
        batches: token ids.
        told: called with the bytes read so far and those of the whole.
    """
    model = stream.model
    with only_running(model), capture(model, epsilons=(), distances=False) as recorder:
        jobs = [partial(_nothing, partial(forward, model, ids)) for ids in batches]
        stream.run(jobs, told=told, head=False)
    return recorder.trace()


@dataclass
class StreamedLayers:
    """Measures and jumps of the layers that a stream has left.

    Attributes:
        stream: what runs the model.
        recorder: what records its routers.
        names: routers to measure.
        settings: of the measures.
        matrices: reads the matrices of linear routers.
        sampler: what looks at the blocks; None if no jumps are asked for.
        plan: of the jumps.
        state: keeps what is found on disk; None to keep nothing.
    """

    stream: ModelStream
    recorder: Recorder
    names: tuple[str, ...]
    settings: MeasureSettings
    matrices: Matrices
    sampler: BlockSampler | None
    plan: JumpSettings
    state: RunState | None = None
    measured: dict[str, MeasuredLayer] = field(default_factory=dict)
    jumps: dict[str, LayerJumps] = field(default_factory=dict)
    _left: list[str] = field(default_factory=list)
    _journal: Journal | None = None

    def run(self, batches: list[Ids], told: Callable[[int, int], None]) -> None:
        """Run all batches without the head, and measure every layer that was not yet."""
        jobs: list[Callable[[], Any]] = [partial(forward, self.stream.model, b) for b in batches]
        weights, state = self.stream.weights, self.state
        replay = None if state is None else state.replay(weights)
        self._left = [] if replay is None else list(replay.left)
        self._journal = None if state is None else Journal(weights)
        self.stream.run(
            [partial(_nothing, job) for job in jobs],
            done=self.left,
            told=told,
            head=False,
            journal=self._journal,
            replay=replay,
            begun=self._restore,
        )

    def _restore(self) -> None:
        """Take what an earlier run found in the units that it has left."""
        if self.state is None:
            return
        numbers = [number for unit in self._left for number, _ in self._routers(unit)]
        found = sorted(map(self.state.router, numbers), key=itemgetter(0))  # as they have run
        for _, layer, measured, jumps in found:
            self.recorder.restore(layer)
            self.measured[layer.name] = measured
            if jumps is not None:
                self.jumps[layer.name] = jumps

    def _routers(self, unit: str) -> list[tuple[int, str]]:
        """Routers in a unit, with their numbers."""
        inside = [(i, n) for i, n in enumerate(self.names) if f"{n}.".startswith(f"{unit}.")]
        return [(number, name) for number, name in inside if unit]

    def left(self, unit: str) -> None:
        """Measure the routers in a unit that all batches have left, and keep where they stand."""
        for number, name in self._routers(unit):
            trace = self.recorder.layer(name)
            if trace is not None:
                self._measure(unit, name, trace)
                if self.state is not None:
                    found = self.measured[name], self.jumps.get(name)
                    place = self.recorder.called.index(name)
                    self.state.keep_router(number, place, trace, *found)
        self._left.append(unit)
        journal, finished = self._journal, unit in self.stream.weights.layers
        if self.state is not None and journal is not None and journal.usable and finished:
            self.state.keep_pass(journal, self._left)

    def _measure(self, unit: str, name: str, trace: RoutingTrace) -> None:
        layer, matrix = trace.layers[0], self.matrices(trace).get(name)
        with one_thread():  # many small operations
            self.measured[name] = measured_layer(layer, self.settings, trace.epsilons, matrix)
        if self.sampler is not None:
            with self.recorder.paused():
                runner = partial(self.stream.run_inside, unit)
                model, sampler = self.stream.model, self.sampler
                found = measure_jumps(model, trace, sampler, self.plan, runner=runner)
            self.jumps[name] = found[0]
            self.sampler.forget(name)

    def measures(self, trace: RoutingTrace) -> RoutingMeasures:
        """Measures of all layers and of the model, given the whole trace."""
        done = [self.measured[layer.name] for layer in trace.layers]
        return joined_measures(done, self.settings, trace)


def _nothing(job: Callable[[], Any]) -> None:
    """Run a pass and forget its output, which without a head means nothing."""
    job()
