"""Run a model that does not fit: all batches go through one part of it before the next is read.

    stream = ModelStream(model, weights)
    stream.run([lambda: forward(model, first), lambda: forward(model, second)])

Each batch is the model's own forward in lockstep with the others (`models.lockstep`). Where a pass
enters a unit (`models.stream_weights`) it parks; when all are there, the unit's weights are read,
all go through, the weights are dropped, and whatever needs them runs before that. So each byte is
read once, whatever the number of batches, and masks, rotary tables, dense first layers and hybrids
stay the model's business.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tieline.core.errors import UnsupportedModelError, require
from tieline.models.changes import subclass, swapped_class
from tieline.models.expert_groups import Change, ExpertGroups
from tieline.models.lockstep import Lockstep, Scope, current_pass
from tieline.models.stream_resume import Journal, Replay
from tieline.models.stream_weights import Weights

Done = Callable[[str], None]
"""Called with the name of a unit that all passes have left, while its weights are there."""

Told = Callable[[int, int], None]
"""Called with the bytes read so far and those of a whole pass over the checkpoint."""


Job = tuple[Callable[[], Any], Scope]
"""A function, and what is in force while it runs."""


def _under(job: Callable[[], Any], scope: Scope) -> Any:
    with scope():
        return job()


class ModelStream:
    """Runs passes over a model whose weights are read when they are needed.

    Attributes:
        model: the model, its weights on the meta device between runs.
        weights: where they come from.
        groups: experts that are read in groups, by unit.
    """

    def __init__(
        self, model: PreTrainedModel, weights: Weights, groups: dict[str, ExpertGroups]
    ) -> None:
        """Stream `model` from `weights`, the experts of some units in groups."""
        self.model, self.weights, self.groups = model, weights, groups
        self._first = self._unit_named(model.get_input_embeddings())
        self.head = self._unit_named(model.get_output_embeddings())

    def _unit_named(self, module: Any) -> str | None:
        return next((n for n, unit in self.weights.units.items() if unit is module), None)

    @property
    def size(self) -> int:
        """Bytes on disk that a run without the head reads, as far as can be told before."""
        names = [name for name in self.weights.units if name != self.head]
        return sum(self.weights.stored(name) for name in names)

    def resident(self, unit: str) -> int:
        """Bytes of memory that the weights of a unit take while they are there."""
        groups = self.groups.get(unit)
        size = self.weights.size(unit)
        return size if groups is None else size - groups.left_out

    def run(
        self,
        jobs: Sequence[Callable[[], Any]],
        *,
        done: Done | None = None,
        told: Told | None = None,
        scopes: Sequence[Scope | None] | None = None,
        settings: Sequence[Scope | None] | None = None,
        head: bool = True,
        journal: Journal | None = None,
        replay: Replay | None = None,
        begun: Callable[[], None] | None = None,
        at_head: Callable[[Lockstep], None] | None = None,
    ) -> list[Any]:
        """Run all jobs in lockstep and return what they return.

        Args:
            jobs: functions that call the model once, each in a thread of its own.
            done: called with each unit that all jobs have left, while its weights are there.
            told: called with the bytes read so far and those of the whole.
            scopes: what is in force while a job runs and not while it waits, for each job.
            settings: what is made ready outside its thread before a job goes on, for each job;
                neighbours that have the same one share it within a unit.
            head: whether the output head is read and run; without it the logits mean nothing.
            journal: keeps what a later run needs to go on.
            replay: units that an earlier run has left, which are not read again.
            begun: called once all jobs stand at the first unit that is read.
            at_head: given the passes when all wait for the output head, which is there; it brings
                them through, by default one after the other.
        """
        together, led = Lockstep(jobs, scopes, settings), _Led(self, done, told)
        with ExitStack() as stack:
            stack.callback(led.drop)
            stack.callback(together.close)
            skipped = set() if replay is None else {*replay.left}
            stack.enter_context(self._parking(skipped | (set() if head else {self.head})))
            if journal is not None:
                stack.enter_context(journal.watching())
            if replay is not None:
                stack.enter_context(replay.in_force())
            if not head:
                stack.enter_context(self._headless())
            if self._first is not None and self._first not in skipped:
                led.enter(self._first)  # forwards look at the device of the embedding
            together.go_all()
            if begun is not None:
                begun()
            while together.places:
                if at_head is not None and together.places == [self.head]:
                    led.enter(str(self.head))
                    at_head(together)
                else:
                    self._lead(together, led)
            led.leave()
            return together.results

    def _lead(self, together: Lockstep, led: "_Led") -> None:
        """Bring all passes through the unit where they are parked."""
        stops = together.places
        require(
            len(stops) == 1,
            f"the batches take different ways through the model, to {stops}: it cannot be "
            "streamed; batches of one length may go the same way",
            UnsupportedModelError,
        )
        unit = str(stops[0])
        led.enter(unit)
        together.go_all(unit)
        if unit in self.groups:
            self.groups[unit].lead(together)

    def run_inside(self, unit: str, jobs: Sequence[Job]) -> list[Any]:
        """Run jobs on a unit whose weights are there, side by side if its experts are grouped.

        Args:
            unit: its name.
            jobs: functions, each with what is in force while it runs.
        """
        if unit not in self.groups:
            return [_under(job, scope) for job, scope in jobs]
        together = Lockstep([job for job, _ in jobs], [scope for _, scope in jobs])
        try:
            together.go_all()
            self.groups[unit].lead(together)
            return together.results
        finally:
            together.close()

    @contextmanager
    def changed_experts(self, change: Change) -> Iterator[None]:
        """Inside the block, experts that are read in groups are what `change` makes of them."""
        with ExitStack() as stack:
            for groups in self.groups.values():
                stack.enter_context(groups.changed(change))
            yield

    @contextmanager
    def _parking(self, without: set[Any]) -> Iterator[None]:
        """Let passes park where they enter a unit, except these."""

        def park(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: object) -> None:
                here = current_pass()
                if here is not None:
                    here.park(name)

            return hook

        with ExitStack() as stack:
            for name, module in self.weights.units.items():
                if name in without:
                    continue
                # before all other hooks: those may look at the weights
                handle = module.register_forward_pre_hook(park(name), prepend=True)
                stack.callback(handle.remove)
            yield

    @contextmanager
    def _headless(self) -> Iterator[None]:
        """Replace the output head, whose weights are not read, by its first input column."""
        head = self.model.get_output_embeddings()
        if head is None or self.head is None:
            yield
            return

        def first_column(self: nn.Module, states: Any, *args: Any, **kwargs: Any) -> Any:
            return states[..., :1]

        with swapped_class(head, subclass(type(head), forward=first_column)):
            yield


class _Led:
    """Which unit's weights are in memory while passes are led through."""

    def __init__(self, stream: ModelStream, done: Done | None, told: Told | None) -> None:
        self._weights, self._groups = stream.weights, stream.groups
        self._done, self._told = done, told
        self._start, self._size = stream.weights.shards.bytes_read, stream.size
        self._here: str | None = None

    def enter(self, unit: str) -> None:
        """Read a unit, and drop the one before."""
        if unit == self._here:
            return
        self.leave()
        self._here = unit
        if unit in self._groups:
            self._weights.load(unit, without=self._groups[unit].targets)
            self._groups[unit].install()
        else:
            self._weights.load(unit)
            self._ahead(unit)
        if self._told is not None:
            read = self._weights.shards.bytes_read - self._start
            self._told(read, max(read, self._size))

    def leave(self) -> None:
        """Drop the unit that is there, which all passes have left."""
        if self._here is not None and self._done is not None:
            self._done(self._here)
        self.drop()

    def drop(self) -> None:
        """Drop the unit that is there, if any."""
        if self._here is not None:
            if self._here in self._groups:
                self._groups[self._here].remove()
            self._weights.free(self._here)
            self._here = None

    def _ahead(self, unit: str) -> None:
        """Have the next layer read ahead."""
        names = list(self._weights.units)
        rest = names[names.index(unit) + 1 :]
        parent = unit.rpartition(".")[0]
        following = next((name for name in rest if name in self._weights.layers), None)
        if following is not None and following.startswith(parent):
            self._weights.shards.prefetch(self._weights.plans[following].keys)
