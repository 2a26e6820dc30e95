"""Passes that go through a streamed model side by side, one unit at a time.

    lead_passes(model.stream, [PassJob(lambda: forward(module, ids)) for ids in batches])

Each pass is the model's own forward in a thread of its own, of which one runs at a time. Where it
enters a unit (`models.stream_weights`) it parks; when all are there, the unit's weights are read,
all go through, whatever else needs the weights runs, and they are dropped. So each byte is read
once, whatever the number of passes, and masks, rotary tables, dense first layers and hybrids stay
the model's business. Nothing runs at the same time, so that a pass computes what it would compute
alone; the threads only keep where each one stands.

    Lockstep       the passes: `go_all` lets those at one stop run until they park or end
    lead_passes    brings them through all units, and through the groups of experts inside
    run_in_unit    runs blocks of the unit whose weights are in memory
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tieline.core.errors import UnsupportedModelError, require
from tieline.models.class_changes import make_subclass, swapped_class
from tieline.models.model_stream import ExpertGroups, ModelStream
from tieline.run.observers import BlockRun, run_blocks

if TYPE_CHECKING:
    from tieline.run.resume import Journal, Replay

Scope = Callable[[], AbstractContextManager[Any]]
"""Makes what is in force while a pass runs, and not while it is parked."""


class PassJob(NamedTuple):
    """What a pass does.

    Attributes:
        function: calls the model once.
        scope: what is in force, in its own thread, while it runs.
        setting: what is made ready, by whoever leads, before it goes on; neighbours with the same
            one share it.
    """

    function: Callable[[], Any]
    scope: Scope = nullcontext
    setting: Scope = nullcontext


class _GivenUp(BaseException):
    """Ends the thread of a pass that nobody waits for any more."""


class ParkedPass(threading.Thread):
    """One function on its way.

    Attributes:
        stop: where it is parked; None before it begins and after it has ended.
        result: what it returned, once it has ended.
        ended: whether it has.
        number: its number among the passes.
        setting: what is made ready before it goes on.
    """

    def __init__(self, job: PassJob, number: int = 0) -> None:
        """Run `job` as the pass of this number."""
        super().__init__(daemon=True)
        self.number, self.setting = number, job.setting
        self._function, self._scope = job.function, job.scope
        self._inside: AbstractContextManager[Any] = nullcontext()
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._given_up = False
        self.stop: Hashable | None = None
        self.result: Any = None
        self.ended = False

    def run(self) -> None:
        """What the thread does."""
        try:
            with torch.inference_mode():
                self._wait()
                self.result = self._function()
                self._inside.__exit__(None, None, None)
        except _GivenUp:
            pass
        except BaseException as problem:  # raised again where the pass is waited for
            self._error = problem
            self._inside.__exit__(None, None, None)
        self.stop, self.ended = None, True
        self._back.release()

    def park(self, stop: Hashable) -> None:
        """Wait at a stop until the next turn; called by the pass itself."""
        self._inside.__exit__(None, None, None)
        self.stop = stop
        self._back.release()
        self._wait()

    def _wait(self) -> None:
        """Wait for a turn, and enter the scope of the pass."""
        self._turn.acquire()
        if self._given_up:
            raise _GivenUp
        self._inside = self._scope()
        self._inside.__enter__()

    def go(self) -> Hashable | None:
        """Let the pass run until it parks or ends; raises what it raised."""
        if not self.is_alive() and not self.ended:
            self.start()
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error
        return self.stop

    def give_up(self) -> None:
        """End the thread if it is parked."""
        if self.is_alive():
            self._given_up = True
            self._turn.release()
            self.join()


def current_pass() -> ParkedPass | None:
    """Return the pass whose thread this is; None outside of all."""
    thread = threading.current_thread()
    return thread if isinstance(thread, ParkedPass) else None


class Lockstep:
    """Passes that are led from stop to stop together."""

    def __init__(self, jobs: Sequence[PassJob]) -> None:
        """Make one pass of each job."""
        self.passes = [ParkedPass(job, number) for number, job in enumerate(jobs)]

    def go_all(self, stop: Hashable | None = None) -> None:
        """Let those that are parked at `stop` go on, one after the other, in their order.

        Those that have not begun need nothing made ready: they stop where they need weights.
        """
        ready = [parked for parked in self.passes if parked.stop == stop and not parked.ended]
        for setting, group in groupby(ready, key=lambda parked: parked.setting):
            with setting() if stop is not None else nullcontext():
                for parked in group:
                    parked.go()

    @property
    def stops(self) -> list[Hashable]:
        """Where passes are parked, without repetition, in the order of the passes."""
        return list(dict.fromkeys(parked.stop for parked in self.passes if not parked.ended))

    @property
    def results(self) -> list[Any]:
        """What the passes returned."""
        return [finished.result for finished in self.passes]

    def close(self) -> None:
        """Give up what has not ended."""
        for unfinished in self.passes:
            unfinished.give_up()


class StreamEvents:
    """What a run is told while its passes are led; methods do nothing unless overridden."""

    def on_begun(self) -> None:
        """Take note that all passes stand at the first unit that is read."""

    def on_read(self, done: int, total: int) -> None:
        """Take the bytes read so far and those of the whole run."""

    def on_unit_done(self, unit: str) -> None:
        """Take note that all passes have left a unit, whose weights are still in memory."""

    def at_head(self, passes: Lockstep, head: str) -> None:
        """Bring the passes through the output head, which is in memory; by default in order."""
        passes.go_all(head)


def lead_passes(
    stream: ModelStream,
    jobs: Sequence[PassJob],
    events: StreamEvents | None = None,
    *,
    head: bool = True,
    journal: "Journal | None" = None,
    replay: "Replay | None" = None,
) -> list[Any]:
    """Bring passes through a streamed model in lockstep and return what they return.

    Args:
        stream: the model.
        jobs: passes that call the model once, each in a thread of its own.
        events: what is told of the run.
        head: whether the output head is read and run; without it the logits mean nothing.
        journal: keeps what a later run needs to go on.
        replay: units that an earlier run has left, which are not read again.
    """
    events = events or StreamEvents()
    passes, resident = Lockstep(jobs), _ResidentUnit(stream, events)
    with ExitStack() as stack:
        stack.callback(resident.drop)
        stack.callback(passes.close)
        skipped = set() if replay is None else {*replay.left}
        stack.enter_context(_parking_at_units(stream, skipped | (set() if head else {stream.head})))
        stack.enter_context(_awaiting_groups(stream.groups.values()))
        if journal is not None:
            stack.enter_context(journal.watching())
        if replay is not None:
            stack.enter_context(replay.in_force())
        if not head:
            stack.enter_context(_without_head(stream))
        if stream.first is not None and stream.first not in skipped:
            resident.enter(stream.first)  # forwards look at the device of the embedding
        passes.go_all()
        events.on_begun()
        while passes.stops:
            _lead_through_unit(stream, passes, resident, events)
        resident.leave()
        return passes.results


def _lead_through_unit(
    stream: ModelStream, passes: Lockstep, resident: "_ResidentUnit", events: StreamEvents
) -> None:
    """Bring all passes through the unit where they are parked."""
    stops = passes.stops
    require(
        len(stops) == 1,
        f"the batches take different ways through the model, to {stops}: it cannot be "
        "streamed; batches of one length may go the same way",
        UnsupportedModelError,
    )
    unit = str(stops[0])
    resident.enter(unit)
    if unit == stream.head:
        events.at_head(passes, unit)
        return
    passes.go_all(unit)
    if unit in stream.groups:
        _lead_through_groups(stream.groups[unit], passes)


class GroupStop(NamedTuple):
    """Where a pass waits for experts: the unit, and the number of the group."""

    unit: str
    group: int


def _lead_through_groups(groups: ExpertGroups, passes: Lockstep) -> None:
    """Bring all passes that wait for experts of a unit through their groups."""
    while waiting := [
        stop for stop in passes.stops if isinstance(stop, GroupStop) and stop.unit == groups.unit
    ]:
        first = min(waiting)
        groups.read(first.group)
        passes.go_all(first)


@contextmanager
def _awaiting_groups(every: Iterable[ExpertGroups]) -> Iterator[None]:
    """Let passes park until the group of an expert is read; whoever is no pass reads it."""

    def obtain(groups: ExpertGroups, group: int) -> None:
        """Park until the group is read, or read it outside of all passes."""
        waiting = current_pass()
        if waiting is None:
            groups.read(group)
        else:
            waiting.park(GroupStop(groups.unit, group))

    groups_of_units = list(every)
    before = [groups.obtain for groups in groups_of_units]
    for groups in groups_of_units:
        groups.obtain = partial(obtain, groups)
    try:
        yield
    finally:
        for groups, obtained in zip(groups_of_units, before, strict=True):
            groups.obtain = obtained


def run_in_unit(stream: ModelStream, unit: str, blocks: Sequence[BlockRun]) -> list[Any]:
    """Run blocks of a unit whose weights are there, side by side if its experts are grouped.

    Args:
        stream: the model.
        unit: its name.
        blocks: functions, each with what is in force while it runs.
    """
    if unit not in stream.groups:
        return run_blocks(blocks)
    passes = Lockstep([PassJob(*block) for block in blocks])
    try:
        with _awaiting_groups([stream.groups[unit]]):
            passes.go_all()
            _lead_through_groups(stream.groups[unit], passes)
        return passes.results
    finally:
        passes.close()


@contextmanager
def _parking_at_units(stream: ModelStream, without: set[Any]) -> Iterator[None]:
    """Let passes park where they enter a unit, except these."""

    def park(name: str, module: nn.Module, args: object) -> None:
        """Park the pass that enters this unit."""
        here = current_pass()
        if here is not None:
            here.park(name)

    with ExitStack() as stack:
        for name, module in stream.weights.units.items():
            if name not in without:
                # before all other hooks: those may look at the weights
                handle = module.register_forward_pre_hook(partial(park, name), prepend=True)
                stack.callback(handle.remove)
        yield


@contextmanager
def _without_head(stream: ModelStream) -> Iterator[None]:
    """Replace the output head, whose weights are not read, by its first input column."""
    head = stream.model.get_output_embeddings()
    if head is None or stream.head is None:
        yield
        return

    def first_column(self: nn.Module, states: Any, *args: Any, **kwargs: Any) -> Any:
        """The first column of the states in place of logits."""
        return states[..., :1]

    with swapped_class(head, make_subclass(type(head), forward=first_column)):
        yield


class _ResidentUnit:
    """The unit whose weights are in memory while passes are led through."""

    def __init__(self, stream: ModelStream, events: StreamEvents) -> None:
        self._weights, self._groups, self._events = stream.weights, stream.groups, events
        self._start, self._size = stream.weights.shards.bytes_read, stream.size
        self._unit: str | None = None

    def enter(self, unit: str) -> None:
        """Read a unit, and drop the one before."""
        if unit == self._unit:
            return
        self.leave()
        self._unit = unit
        if unit in self._groups:
            self._weights.load(unit, without=self._groups[unit].targets)
            self._groups[unit].install()
        else:
            self._weights.load(unit)
            self._prefetch_after(unit)
        read = self._weights.shards.bytes_read - self._start
        self._events.on_read(read, max(read, self._size))

    def leave(self) -> None:
        """Drop the unit that is there, which all passes have left."""
        if self._unit is not None:
            self._events.on_unit_done(self._unit)
        self.drop()

    def drop(self) -> None:
        """Drop the unit that is there, if any."""
        if self._unit is not None:
            if self._unit in self._groups:
                self._groups[self._unit].remove()
            self._weights.free(self._unit)
            self._unit = None

    def _prefetch_after(self, unit: str) -> None:
        """Have the next layer read ahead."""
        names = list(self._weights.units)
        rest = names[names.index(unit) + 1 :]
        parent = unit.rpartition(".")[0]
        following = next((name for name in rest if name in self._weights.layers), None)
        if following is not None and following.startswith(parent):
            self._weights.shards.prefetch(self._weights.plans[following].keys)
