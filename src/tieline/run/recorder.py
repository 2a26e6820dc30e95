"""The routing of passes as traces: an observer that records what the routers choose.

    recorder = RouteRecorder(model.module)
    Runner(model, ranks=ranks).run(clean_plan("forward", ranks.numbered), [recorder])
    recorder.trace()                the routing of all batches of all processes

Rows of batches are documents, numbered in the order of the passes. `models.capture` records the
same of a model that somebody else runs.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tieline.core.errors import TielineError, TraceError, require
from tieline.core.records import from_plain, to_plain
from tieline.core.text import layer_label
from tieline.models.capture import ObserverSettings, layer_observers, model_facts
from tieline.models.class_changes import Call
from tieline.models.documents import Batch
from tieline.models.families import chosen_routers
from tieline.models.model import Model
from tieline.models.pass_copies import PassChecks, layers_on_cpu
from tieline.run.observers import Observer, Site
from tieline.run.plan import Ids, Logits, Pass, Phase, Plan
from tieline.run.ranks import Ranks
from tieline.run.runner import Runner
from tieline.run.schedule import Progress
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace, take_tokens
from tieline.trace.selection import concatenate

PLAIN = ObserverSettings(4, (), False, False)
"""What a comparison of runs needs of each layer: ranks, no counts K(ε), inputs or distances."""


def clean_plan(name: str, batches: Mapping[int, Ids], logits: Logits = "none") -> Plan:
    """A plan of one pass per batch of the model as it is."""
    return Plan((Phase(name, batches, tuple(map(Pass, batches)), logits=logits),))


@dataclass(frozen=True)
class _OpenPass:
    """A pass that has begun: its tokens, the place of the first, its layers so far."""

    batch: Batch
    offset: int
    layers: dict[str, LayerTrace] = field(default_factory=dict)
    checks: PassChecks = field(default_factory=PassChecks)

    def move_to_cpu(self) -> None:
        """Move the layers so far to the CPU together, and raise what their checks refuse."""
        moved = layers_on_cpu(tuple(self.layers.values()), self.checks)
        self.layers.update(zip(list(self.layers), moved, strict=True))


class RouteRecorder(Observer):
    """Records the routing of passes as one trace, in the order in which they begin.

    Args:
        model: the model of the passes.
        settings: what is kept of each layer.
        layers: names of the routers to record; all by default.
        of: which passes are recorded; all by default.
        provenance: what the trace says beside the facts of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: ObserverSettings = PLAIN,
        layers: Collection[str] | None = None,
        of: Callable[[Pass], bool] | None = None,
        provenance: Mapping[str, object] | None = None,
    ) -> None:
        self._settings, self._of = settings, of
        self._observers = layer_observers(chosen_routers(model, layers), settings)
        self._model, self._added = model, dict(provenance or {})
        self._provenance: dict[str, object] = {}
        self._passes: dict[Pass, _OpenPass] = {}
        self._layers: tuple[str, ...] | None = None
        self._tokens = self._documents = 0
        self._joined: RoutingTrace | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the routers that are recorded."""
        return tuple(self._observers)

    def watches(self, run: Pass) -> bool:
        """Whether the pass is recorded."""
        return self._of is None or self._of(run)

    def on_start(self, run: Pass, ids: Int[Tensor, "rows length"]) -> None:
        """Number the documents and tokens of a pass."""
        if not self.watches(run):
            return
        self._provenance = self._provenance or model_facts(self._model) | self._added
        rows, length = ids.shape
        numbers = torch.arange(self._documents, self._documents + rows)
        documents = numbers[:, None].expand(rows, length).flatten()
        positions = torch.arange(length).expand(rows, length).flatten()
        batch = Batch(ids.detach().cpu().long().flatten(), documents, positions, None, ids.numel())
        self._passes[run] = _OpenPass(batch, self._tokens)
        self._documents, self._tokens = self._documents + rows, self._tokens + ids.numel()

    def on_router(self, run: Pass, site: Site, call: Call, output: Any) -> None:
        """Record a call of a router."""
        observer = self._observers.get(site.name)
        if observer is None:
            return
        opened = self._passes[run]
        require(
            site.name not in opened.layers,
            f"{layer_label(site.name)} ran twice in one forward pass",
            TielineError,
        )
        record = observer.observe(site.module, call, output, opened.batch, opened.checks)
        opened.layers[site.name] = record

    def on_pass_done(self, run: Pass, outcome: Any) -> None:
        """Check that every pass runs the same layers."""
        if run not in self._passes:
            return
        self._passes[run].move_to_cpu()
        names = tuple(self._passes[run].layers)
        require(bool(names), "no router ran in the forward pass", TielineError)
        self._layers = self._layers or names
        require(
            names == self._layers,
            f"layers {sorted(set(names) ^ set(self._layers))} ran in some forward passes only",
            TielineError,
        )

    def recorded(self, run: Pass, name: str) -> LayerTrace | None:
        """The record of a router in one pass; None if it has not run."""
        self._passes[run].move_to_cpu()
        return self._passes[run].layers.get(name)

    def offset(self, run: Pass) -> int:
        """Place of the first token of a pass in the trace of this process."""
        return self._passes[run].offset

    def layer(self, name: str) -> RoutingTrace | None:
        """Return one layer of all passes; None if some have not run it.

        The router inputs are handed over: the passes themselves keep none for this layer.
        """
        if any(name not in opened.layers for opened in self._passes.values()):
            return None
        for opened in self._passes.values():
            opened.move_to_cpu()
        pieces = []
        for opened in self._passes.values():
            pieces.append(self._trace((opened.layers[name],), opened.batch))
            opened.layers[name] = replace(opened.layers[name], inputs=None)
        return concatenate(pieces) if pieces else None

    def inside(self, unit: str) -> list[str]:
        """Names of the recorded routers in a unit, in the order in which they ran."""
        first = next(iter(self._passes.values()))
        return [name for name in first.layers if unit and f"{name}.".startswith(f"{unit}.")]

    def state(self, unit: str) -> dict[str, Any] | None:
        """Records of the routers in a unit, without inputs: tensors, and values by layer."""
        tensors: dict[str, Tensor] = {}
        values = []
        for name in self.inside(unit):
            trace = self.layer(name)
            if trace is None:
                continue
            layer = trace.layers[0]
            columns = {f.name: getattr(layer, f.name) for f in fields(layer)}
            tensors |= {
                f"{len(values)}|{column}": value
                for column, value in columns.items()
                if isinstance(value, Tensor) and column != "inputs"
            }
            values.append({"name": name, "facts": to_plain(layer.facts)})
        return {"tensors": tensors, "values": values} if values else None

    def restore(self, unit: str, state: dict[str, Any]) -> None:
        """Take the records of a unit from an earlier run, for passes that are under way."""
        for number, value in enumerate(state["values"]):
            columns = {
                key.partition("|")[2]: tensor
                for key, tensor in state["tensors"].items()
                if key.startswith(f"{number}|")
            }
            facts = from_plain(LayerFacts, value["facts"])
            layer = LayerTrace(name=value["name"], facts=facts, **columns)
            for opened in self._passes.values():
                tokens = slice(opened.offset, opened.offset + len(opened.batch.tokens))
                opened.layers[layer.name] = take_tokens(layer, tokens)

    def join(self, ranks: Ranks) -> None:
        """Put the traces of all processes together."""
        require(bool(self._passes), "no forward pass has been recorded", TraceError)
        pieces = [self._trace(tuple(x.layers.values()), x.batch) for x in self._passes.values()]
        trace = concatenate(pieces)
        self._joined = ranks.join_trace(trace)

    def trace(self) -> RoutingTrace:
        """The routing of all passes, once they have ended."""
        require(self._joined is not None, "the passes have not ended: no trace yet", TraceError)
        assert self._joined is not None
        return self._joined

    def _trace(self, layers: tuple[LayerTrace, ...], batch: Batch) -> RoutingTrace:
        keys = batch.tokens, batch.documents, batch.positions
        return RoutingTrace(layers, *keys, self._settings.epsilons, self._provenance)


def recorded_routes(
    model: Model,
    ranks: Ranks,
    settings: ObserverSettings = PLAIN,
    memory: int | None = None,
    on_progress: Progress | None = None,
) -> RoutingTrace:
    """Run batches through a model as it is, and return their routing.

    Args:
        model: the model, in memory or streamed.
        ranks: the batches, and how processes share them.
        settings: what is kept of each layer.
        memory: bytes that a streamed model may take; None for what is free.
        on_progress: called with stage, done and total.
    """
    recorder = RouteRecorder(model.module, settings)
    plan = clean_plan("forward", ranks.numbered)
    Runner(model, ranks=ranks, memory=memory).run(plan, [recorder], on_progress)
    return recorder.trace()
