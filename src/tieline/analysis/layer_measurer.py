"""Measures and jumps of each layer: from disk while its weights are there, in memory at the end.

From disk all batches are in a layer together, so its trace is whole when they leave it: its
measures and jumps are taken then, its router inputs are dropped, and nothing but the trace is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from tieline.analysis.inspection import LayerJumps
from tieline.analysis.jump import JumpSettings, measure_jumps
from tieline.analysis.linear import linear_weights
from tieline.analysis.swap import BlockSampler
from tieline.core.numerics import one_thread
from tieline.core.records import from_plain, to_plain
from tieline.measure.measure_records import MeasureSettings
from tieline.measure.measures import (
    LayerMeasures,
    MeasuredLayer,
    RoutingMeasures,
    joined_measures,
    measured_layer,
)
from tieline.models.running import only_running
from tieline.run.observers import Observer, Rerun
from tieline.run.processes import Ranks
from tieline.run.recorder import RouteRecorder
from tieline.trace.record import RoutingTrace

GAPS = "gaps"
NO_JUMPS = "not measured: jumps were not asked for"


@dataclass
class LayerMeasurer(Observer):
    """Measures the layers of a model that is inspected.

    Attributes:
        model: the model.
        recorder: records its routers.
        settings: of the measures.
        sampler: what looks at the blocks; None if no jumps are asked for.
        jump_settings: of the jumps.
    """

    model: nn.Module
    recorder: RouteRecorder
    settings: MeasureSettings
    sampler: BlockSampler | None
    jump_settings: JumpSettings
    _measured: dict[str, MeasuredLayer] = field(default_factory=dict)
    _jumps: dict[str, LayerJumps] = field(default_factory=dict)

    def on_unit_done(self, unit: str, rerun: Rerun) -> None:
        """Measure the routers in a unit that all passes have left; nothing in memory."""
        for name in self.recorder.inside(unit) if unit else ():
            trace = self.recorder.layer(name)
            if trace is not None:
                weights = linear_weights(self.model, trace)
                self._measured[name] = self._measure(trace, name, weights)
                self._measure_jumps(trace, name, rerun)

    def _measure(self, trace: RoutingTrace, name: str, weights: dict[str, Tensor]) -> MeasuredLayer:
        with one_thread():  # many small operations
            return measured_layer(
                trace.layer(name), self.settings, trace.epsilons, weights.get(name)
            )

    def _measure_jumps(self, trace: RoutingTrace, name: str, rerun: Rerun) -> None:
        if self.sampler is None:
            return
        (self._jumps[name],) = measure_jumps(
            self.model, trace, self.sampler, self.jump_settings, runner=rerun
        )
        self.sampler.forget(name)

    def measures(self, trace: RoutingTrace, ranks: Ranks) -> RoutingMeasures:
        """Measures of all layers and of the model, given the trace of all batches."""
        weights: dict[str, Tensor] = {}
        if not self._measured:
            weights = ranks.join_layers(linear_weights(self.model, trace))
        layers = [
            self._measured.get(layer.name) or self._measure(trace, layer.name, weights)
            for layer in trace.layers
        ]
        with one_thread():
            return joined_measures(layers, self.settings, trace)

    def jumps(
        self,
        trace: RoutingTrace,
        ranks: Ranks,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> tuple[LayerJumps, ...]:
        """Jumps of all layers, given the trace of all batches."""
        if self.sampler is None:
            return tuple(LayerJumps(layer.name, None, NO_JUMPS) for layer in trace.layers)
        if self._jumps:
            return tuple(self._jumps[layer.name] for layer in trace.layers)
        names = self.recorder.names
        local = replace(trace, layers=tuple(x for x in trace.layers if x.name in names))
        with only_running(self.model):
            jumps = measure_jumps(self.model, local, self.sampler, self.jump_settings, on_progress)
        plain = ranks.join_plain([to_plain(layer) for layer in jumps])
        return tuple(from_plain(LayerJumps, layer) for layer in plain) if ranks.staged else jumps

    def state(self, unit: str) -> dict[str, Any] | None:
        """What was measured in a unit: values per token, and records."""
        tensors: dict[str, Tensor] = {}
        values = []
        for name in self.recorder.inside(unit):
            if name not in self._measured:
                continue
            measured, number = self._measured[name], len(values)
            columns = {"noise": measured.noise, "precision": measured.precision}
            tensors |= {
                f"{number}|{kind}|{level}": column
                for kind, levels in columns.items()
                for level, column in levels.items()
            }
            if measured.gaps is not None:
                tensors[f"{number}|{GAPS}|"] = measured.gaps
            jumps = self._jumps.get(name)
            record = to_plain(measured.record, nonfinite_as_text=True)
            plain = None if jumps is None else to_plain(jumps, nonfinite_as_text=True)
            values.append({"name": name, "record": record, "jumps": plain})
        return {"tensors": tensors, "values": values} if values else None

    def restore(self, unit: str, state: dict[str, Any]) -> None:
        """Take what an earlier run measured in a unit."""
        for number, value in enumerate(state["values"]):
            columns: dict[str, dict[str, Tensor]] = {"noise": {}, "precision": {}, GAPS: {}}
            for key, tensor in state["tensors"].items():
                owner, kind, level = key.split("|", 2)
                if owner == str(number):
                    columns[kind][level] = tensor
            record = from_plain(LayerMeasures, value["record"])
            gaps = columns.pop(GAPS).get("")
            self._measured[value["name"]] = MeasuredLayer(record, gaps, **columns)
            if value["jumps"] is not None:
                self._jumps[value["name"]] = from_plain(LayerJumps, value["jumps"])
