"""What looks at a model while it runs.

    class Load(Observer):
        def watches(self, run):
            return run.condition == CLEAN
        def on_router(self, run, site, call, output):
            ...

    with observing(model, [Load()]):
        model(input_ids=ids)

An observer is told of calls of routers and blocks inside passes that it watches, of units that all
passes have left while their weights are still there, and of the logits of finished passes. What it
counts on several processes is put together by `join`. It never knows how passes are scheduled.

`RouteRecorder` records what the routers choose as a trace; rows of batches are documents, numbered
in the order of the passes. `models.capture` records the same of a model that somebody else runs.

    recorder = RouteRecorder(model.module)
    Runner(model, ranks=ranks).run(clean_plan("forward", ranks.numbered), [recorder])
    recorder.trace()                the routing of all batches of all processes
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import TielineError, TraceError, require
from tieline.core.numerics import is_recomputing
from tieline.core.predictions import ComparedPredictions
from tieline.core.records import from_plain, to_plain
from tieline.core.text import layer_label
from tieline.models.capture import (
    RecorderSettings,
    layer_recorders,
    layers_on_cpu,
    model_facts,
)
from tieline.models.class_changes import Call, swapped_class, wrapped_class
from tieline.models.emulate import unrounded_products
from tieline.models.families import HANDLER, RouterFamily, chosen_routers, family_of, find_routers
from tieline.models.pass_tokens import Batch
from tieline.models.routed_block import BlockCall, BlockRun
from tieline.models.router_checks import PassChecks
from tieline.models.router_output import Choice, live_output
from tieline.run.plan import Pass
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace, take_tokens
from tieline.trace.selection import concatenate

if TYPE_CHECKING:
    from tieline.run.ranks import Ranks

Rerun = Callable[[Sequence[BlockRun]], list[Any]]
"""Runs blocks whose weights are in memory and returns their outputs."""


class Site(NamedTuple):
    """A router of a model: its name, the module and its family."""

    name: str
    module: nn.Module
    family: RouterFamily


@dataclass(frozen=True)
class Outcome:
    """What a finished pass gave.

    Attributes:
        ids: its tokens.
        logits: its logits; None where the phase looks at none, or the model has none.
        references: logits of the passes that it is compared with.
        lost: by router, the share of routed weight that each token lost against the reference
            pass, -1 where its experts are the same.
        choices: by router, weights and experts, where later passes are compared with them.
        changed: by router, tokens whose experts a replay changed.
        compared: what comparisons with earlier passes share.
    """

    ids: Int[Tensor, "rows length"]
    logits: Float[Tensor, "rows length words"] | None
    references: Mapping[Pass, Tensor] = field(default_factory=dict)
    lost: Mapping[str, Tensor] = field(default_factory=dict)
    choices: Mapping[str, Choice] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)
    compared: dict[Pass, ComparedPredictions] = field(default_factory=dict)

    def divergence(self, other: Pass) -> Float[Tensor, "rows length"]:
        """KL of a pass that it is compared with to this one, at each token, in nats."""
        assert self.logits is not None
        if other not in self.compared:
            self.compared[other] = ComparedPredictions(self.references[other])
        return self.compared[other].divergence(self.logits)


class Observer:
    """Looks at passes; every method does nothing unless it is overridden.

    Attributes:
        blocks: modules whose calls it is shown, by name of the router that they contain.
    """

    blocks: Mapping[str, nn.Module] = {}

    def watches(self, run: Pass) -> bool:
        """Whether calls of routers and blocks in this pass are shown to it."""
        return False

    def on_start(self, run: Pass, ids: Int[Tensor, "rows length"]) -> None:
        """Take the tokens of a pass that begins."""

    def on_router(self, run: Pass, site: Site, call: Call, output: Any) -> None:
        """Look at a call of a router and what it returned."""

    def on_block(self, run: Pass, site: Site, call: BlockCall, rerun: Rerun | None) -> None:
        """Look at a call of a block.

        Args:
            run: the pass.
            site: the router in the block.
            call: arguments and output.
            rerun: runs blocks again now; None where that must wait for `on_unit_done`.
        """

    def on_unit_done(self, unit: str, rerun: Rerun) -> None:
        """Take note that all passes have left a unit, whose weights are still in memory.

        Args:
            unit: name of the module, such as that of a layer; "" for the whole model.
            rerun: runs blocks of the unit again.
        """

    def on_pass_done(self, run: Pass, outcome: Outcome) -> None:
        """Look at the logits of a finished pass, beside those that it is compared with."""

    def state(self, unit: str) -> Any:
        """Return what must be kept of a unit to resume after it; None for nothing."""
        return None

    def restore(self, unit: str, state: Any) -> None:
        """Take what `state` returned for a unit in an earlier run."""

    def join(self, ranks: "Ranks") -> None:
        """Put together what the processes counted, in the order of the batches."""


def sites_of(model: nn.Module) -> dict[str, Site]:
    """Return the routers of a model by name, without those that cannot be captured."""
    families = {name: (router, family_of(router)) for name, router in find_routers(model).items()}
    return {
        name: Site(name, router, family)
        for name, (router, family) in families.items()
        if family is not None and family.refused is None
    }


def run_blocks(blocks: Sequence[BlockRun]) -> list[Any]:
    """Run blocks one after the other."""
    outputs = []
    for job, scope in blocks:
        with scope():
            outputs.append(job())
    return outputs


class RoutersDone(BaseException):
    """Raised inside a pass in memory of which nothing more is looked at."""


class RoutersAlone(Observer):
    """Ends a pass once every router of the model has run; stands last among the observers.

    For models that have run whole before: a router that runs twice in a pass is not noticed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = frozenset(sites_of(model))
        self._called: dict[Pass, set[str]] = {}

    def watches(self, run: Pass) -> bool:
        """Every pass."""
        return True

    def on_router(self, run: Pass, site: Site, call: Call, output: Any) -> None:
        """End the pass after the last router."""
        called = self._called.setdefault(run, set())
        called.add(site.name)
        if called == self._names:
            raise RoutersDone


class Watch:
    """Shows the calls inside one pass to its observers, except those that observers make."""

    def __init__(self, run: Pass, observers: Sequence[Observer], reruns: bool = True) -> None:
        """Watch `run`; blocks can be run again at once if `reruns`."""
        self.run, self._reruns = run, reruns
        self.observers = [observer for observer in observers if observer.watches(run)]
        self.busy = False

    @contextmanager
    def hiding_calls(self) -> Iterator[None]:
        """Context in which observers compute: nothing is shown to them."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def show_router(self, site: Site, call: Call, output: Any) -> None:
        """Show a call of a router, which observers may call again."""
        handler: Any = getattr(site.module, HANDLER, None)
        columns = getattr(handler, "k_max", None)
        with self.hiding_calls(), unrounded_products():
            for observer in self.observers:
                observer.on_router(self.run, site, call, output)
        if columns is not None and hasattr(handler, "resize"):
            handler.resize(columns)  # a smoothed router counts the columns of its last call

    @contextmanager
    def blocks(self, sites: Mapping[str, Site]) -> Iterator[None]:
        """Show calls of blocks inside the context."""
        with ExitStack() as stack:
            for observer in self.observers:
                for name in [name for name in observer.blocks if name in sites]:
                    hook = partial(self._show_block, observer, sites[name])
                    block = observer.blocks[name]
                    stack.callback(block.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def _show_block(
        self,
        observer: Observer,
        site: Site,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Show the call of a block to its observer."""
        if self.busy:
            return
        with self.hiding_calls():
            call, rerun = BlockCall(args, kwargs, output), run_blocks if self._reruns else None
            observer.on_block(self.run, site, call, rerun)


Rewrite = Callable[[Site, Call, Any], Any]
"""Maps a router's call and output to the output that it returns instead."""


@contextmanager
def watching(
    watch: Watch, sites: Mapping[str, Site], rewrite: Rewrite | None = None, method: str = ""
) -> Iterator[None]:
    """Context in which the calls at these sites are shown to a watch.

    Args:
        watch: the watch of the pass.
        sites: routers by name.
        rewrite: what the routers return instead of their output; None to leave it.
        method: the method of the routers that is rewritten; by default that of their family.
    """

    def shown_output(site: Site, router: nn.Module, call: Call, output: Any) -> Any:
        """Show the call of a router, and return its rewritten output."""
        shown, rewritten = current
        if shown.busy or is_recomputing():
            return output
        if shown.observers:
            shown.show_router(site, call, live_output(site.family, router, output))
        return output if rewritten is None else rewritten(site, call, output)

    if not watch.observers and rewrite is None:
        yield
        return
    current: list[Any] = [watch, rewrite]
    with ExitStack() as stack:
        # classes are collected late, and must not keep the tensors of a run alive until then
        stack.callback(current.clear)
        for site in sites.values():
            name = method if method and site.family.method == "__call__" else site.family.method
            cls = wrapped_class(type(site.module), name, partial(shown_output, site))
            stack.enter_context(swapped_class(site.module, cls))
        stack.enter_context(watch.blocks(sites))
        yield


@contextmanager
def observing(
    model: nn.Module, observers: Sequence[Observer], run: Pass | None = None
) -> Iterator[None]:
    """Context in which observers see the calls of a model's routers, whoever calls the model.

    Args:
        model: a Mixture-of-Experts model of transformers.
        observers: what looks; those that do not watch `run` see nothing.
        run: the pass that the calls are attributed to; by default the clean pass of batch 0.
    """
    with watching(Watch(run or Pass(0), observers), sites_of(model)):
        yield


RANKS_ONLY = RecorderSettings(4, (), False, False)
"""What a comparison of runs needs of each layer: ranks, no counts K(ε), inputs or distances."""


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
        settings: RecorderSettings = RANKS_ONLY,
        layers: Collection[str] | None = None,
        of: Callable[[Pass], bool] | None = None,
        provenance: Mapping[str, object] | None = None,
    ) -> None:
        self._settings, self._of = settings, of
        self._observers = layer_recorders(chosen_routers(model, layers), settings)
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
        numbers = torch.arange(self._documents, self._documents + rows, device="cpu")
        documents = numbers[:, None].expand(rows, length).flatten()
        positions = torch.arange(length, device="cpu").expand(rows, length).flatten()
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

    def join(self, ranks: "Ranks") -> None:
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
        """A trace of these layers with the tokens of a batch."""
        keys = batch.tokens, batch.documents, batch.positions
        return RoutingTrace(layers, *keys, self._settings.epsilons, self._provenance)
