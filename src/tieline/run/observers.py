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
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.numerics import is_recomputing
from tieline.core.statistics import Predictions
from tieline.models.class_changes import Call, swapped_class, wrapped_class
from tieline.models.families import HANDLER, RouterFamily, family_of, find_routers
from tieline.models.routed_block import BlockRun
from tieline.models.router_output import Choice, live_output
from tieline.run.plan import Pass

if TYPE_CHECKING:
    from tieline.run.ranks import Ranks

Rerun = Callable[[Sequence[BlockRun]], list[Any]]
"""Runs blocks whose weights are in memory and returns their outputs."""


class Site(NamedTuple):
    """A router of a model: its name, the module and its family."""

    name: str
    module: nn.Module
    family: RouterFamily


class BlockSite(NamedTuple):
    """A call of a block: arguments, named arguments and output."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    output: Any


@dataclass(frozen=True)
class Outcome:
    """What a finished pass gave.

    Attributes:
        ids: its tokens.
        logits: its logits; None where the phase looks at none, or the model has none.
        predictions: those of the passes that it is compared with.
        lost: by router, the share of routed weight that each token lost against the reference
            pass, -1 where its experts are the same.
        choices: by router, weights and experts, where later passes are compared with them.
        changed: by router, tokens whose experts a replay changed.
    """

    ids: Int[Tensor, "rows length"]
    logits: Float[Tensor, "rows length words"] | None
    predictions: Mapping[Pass, Predictions] = field(default_factory=dict)
    lost: Mapping[str, Tensor] = field(default_factory=dict)
    choices: Mapping[str, Choice] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)

    @property
    def references(self) -> dict[Pass, Tensor]:
        """Logits of the passes that it is compared with."""
        return {other: predictions.logits for other, predictions in self.predictions.items()}

    def divergence(self, other: Pass) -> Float[Tensor, "rows length"]:
        """KL of a pass that it is compared with to this one, at each token, in nats."""
        assert self.logits is not None
        return self.predictions[other].divergence(self.logits)


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

    def on_block(self, run: Pass, site: Site, call: BlockSite, rerun: Rerun | None) -> None:
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


class Watch:
    """Shows the calls inside one pass to its observers, except those that observers make."""

    def __init__(self, run: Pass, observers: Sequence[Observer], reruns: bool = True) -> None:
        """Watch `run`; blocks can be run again at once if `reruns`."""
        self.run, self._reruns = run, reruns
        self.observers = [observer for observer in observers if observer.watches(run)]
        self.busy = False

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Context in which observers compute: nothing is shown to them."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def routed(self, site: Site, call: Call, output: Any) -> None:
        """Show a call of a router, which observers may call again."""
        handler: Any = getattr(site.module, HANDLER, None)
        columns = getattr(handler, "k_max", None)
        # an emulated number format is the model's, not that of the observers' own arithmetic
        exact = self.run.condition.perturbation is not None
        with self.looking(), torch._C.DisableTorchFunction() if exact else nullcontext():
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
                    hook = partial(self._blocked, observer, sites[name])
                    block = observer.blocks[name]
                    stack.callback(block.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def _blocked(
        self,
        observer: Observer,
        site: Site,
        module: nn.Module,
        args: tuple[Any, ...],
        named: dict[str, Any],
        output: Any,
    ) -> None:
        if self.busy:
            return
        with self.looking():
            call, rerun = BlockSite(args, named, output), run_blocks if self._reruns else None
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

    def after(site: Site, router: nn.Module, call: Call, output: Any) -> Any:
        if watch.busy or is_recomputing():
            return output
        if watch.observers:
            watch.routed(site, call, live_output(site.family, router, output))
        for rewritten in rewrites:
            output = rewritten(site, call, output)
        return output

    if not watch.observers and rewrite is None:
        yield
        return
    rewrites = [] if rewrite is None else [rewrite]
    with ExitStack() as stack:
        # classes are collected late, and must not keep the tensors of a pass alive until then
        stack.callback(rewrites.clear)
        for site in sites.values():
            name = method if method and site.family.method == "__call__" else site.family.method
            cls = wrapped_class(type(site.module), name, partial(after, site))
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
