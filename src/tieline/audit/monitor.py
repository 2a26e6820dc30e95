"""Watching the routing of a model while it trains: some scalars every n steps.

    with RoutingMonitor(model, every=10, writers=[JsonlWriter("routing.jsonl")]) as monitor:
        for batch in batches:
            loss(model(batch)).backward()
            optimizer.step()
            monitor.step()

On the steps between, the model has no hook and nothing is computed or waited for. On a logged step
each router's scores are read once, in the forward pass; a pass that activation checkpointing
repeats is not counted again, and all micro-batches of a step are counted together. Under data
parallelism the scalars are those of this process's tokens.
"""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from torch import nn

from tieline.audit.monitor_checks import LossCheck, RoutingWarning, probability_warning
from tieline.audit.monitor_scalars import LayerScalars, layer_scalars, model_scalars
from tieline.audit.monitor_watch import RouterCall, watch_routing
from tieline.audit.monitor_writers import Writer
from tieline.errors import TielineError, require
from tieline.numerics import one_thread

__all__ = ["RoutingMonitor"]


class RoutingMonitor:
    """Scalars of the routing of `model`, every n steps, as `dict[str, float]` and to writers.

    The scalars and their formulas are listed in `tieline.audit.monitor_scalars`. What cannot be
    measured is told as a `RoutingWarning`, once, and never stops the training.

    Args:
        model: a model with Tieline's `MoE` layers or transformers routers.
        every: n; steps 0, n, 2n, ... are logged.
        writers: take the scalars of each logged step.
        prefix: put before the name of each scalar.
        per_layer: also give the scalars of each layer, as prefix + layer + "/" + name.
        training_only: leave out forward passes in evaluation mode.
        check_losses: warn where an auxiliary loss is silently off.
        start: number of the first step.

    Attributes:
        last: scalars of the last logged step.
        told: the warnings so far.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 10,
        writers: Sequence[Writer] = (),
        prefix: str = "routing/",
        per_layer: bool = False,
        training_only: bool = True,
        check_losses: bool = True,
        start: int = 0,
    ) -> None:
        require(every >= 1, f"a monitor logs every n >= 1 steps, got every={every}")
        self.every, self.writers, self.prefix = every, tuple(writers), prefix
        self.per_layer, self.training_only = per_layer, training_only
        self.check_losses = check_losses
        self.last: dict[str, float] = {}
        self.told: list[str] = []
        self._kinds: set[str] = set()
        self._model, self._step = model, start
        self._calls: dict[str, list[RouterCall]] = defaultdict(list)
        self._problem: TielineError | None = None
        self._hooks: ExitStack | None = None
        with watch_routing(model, _ignore):  # refuse a model without routers now, not in the loop
            pass
        if start % every == 0:
            self.arm()

    def arm(self) -> None:
        """Watch the routers from now on, until `read`."""
        if self._hooks is not None:
            return
        self._calls.clear()
        self._problem = None
        hooks = ExitStack()
        hooks.enter_context(
            watch_routing(
                self._model, self._take, training_only=self.training_only, failed=self._failed
            )
        )
        if self.check_losses:
            hooks.enter_context(LossCheck(self._model, self._tell))
        self._hooks = hooks

    def read(self, step: int) -> dict[str, float]:
        """Stop watching; scalars of what was seen, which are also given to the writers.

        Args:
            step: number under which they are written.
        """
        self.disarm()
        layers = self._layers(step)
        if not layers:
            return {}
        found = model_scalars(layers)
        if self.per_layer:
            for name, layer in layers.items():
                found |= {f"{name}/{key}": value for key, value in layer.plain().items()}
        self.last = {self.prefix + name: value for name, value in found.items()}
        for writer in self.writers:
            writer.write(step, self.last)
        return self.last

    def step(self) -> dict[str, float]:
        """End a training step: its scalars if it was a logged one, nothing otherwise."""
        found = self.read(self._step) if self._hooks is not None else {}
        self._step += 1
        if self._step % self.every == 0:
            self.arm()
        return found

    def disarm(self) -> None:
        """Take all hooks off the model."""
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None

    def close(self) -> None:
        """Take all hooks off the model and close the writers."""
        self.disarm()
        for writer in self.writers:
            writer.close()

    def __enter__(self) -> "RoutingMonitor":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _layers(self, step: int) -> dict[str, LayerScalars]:
        """What each layer did; nothing if a call could not be read."""
        calls = {name: some for name, some in self._calls.items() if some}
        self._calls.clear()
        problem, self._problem = self._problem, None
        try:
            if problem is not None:
                raise problem
            with one_thread():  # many small operations
                layers = {name: layer_scalars(some) for name, some in calls.items()}
        except TielineError as found:
            self._tell(f"routing was not measured (first at step {step}): {found}", str(found))
            return {}
        for name, layer in layers.items():
            self._tell(probability_warning(name, layer.logits), "probabilities")
        return layers

    def _take(self, call: RouterCall) -> None:
        if call.tokens and call.logits is not None:
            self._calls[call.trace.name].append(call)

    def _failed(self, problem: TielineError) -> None:
        self._problem = self._problem or problem

    def _tell(self, message: str | None, kind: str) -> None:
        """Warn, once for each kind."""
        if message is None or kind in self._kinds:
            return
        self._kinds.add(kind)
        self.told.append(message)
        warnings.warn(message, RoutingWarning, stacklevel=4)


def _ignore(call: RouterCall) -> None:
    """Do nothing with a call."""
