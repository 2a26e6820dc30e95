"""Passes that go through a streamed model side by side, one unit at a time.

    run_in_lockstep(model.stream, [PassJob(lambda: forward(module, ids)) for ids in batches])

Each pass is the model's own forward in a thread of its own, of which one runs at a time. Where it
enters a unit (`models.stream_weights`) it parks; when all are there, the unit's weights are read,
all go through, whatever else needs the weights runs, and they are dropped. So each byte is read
once, whatever the number of passes, and masks, rotary tables, dense first layers and hybrids stay
the model's business. Nothing runs at the same time, so that a pass computes what it would compute
alone; the threads only keep where each one stands.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tieline.core.errors import UnsupportedModelError, require
from tieline.core.memory import free_memory, freed_memory_kept, resident_memory
from tieline.core.setting_fields import SettingError
from tieline.models.class_changes import make_subclass, swapped_class
from tieline.models.configuration import text_config
from tieline.models.emulate import Region, rounded_weights, weight_axis
from tieline.models.model_stream import ExpertGroups, ModelStream
from tieline.models.number_formats import format_named
from tieline.models.rounding_buffers import RoundingBuffers, rounded_in_pieces
from tieline.run.condition import Rounded
from tieline.run.observers import (
    BlockRun,
    Site,
    run_blocks,
)
from tieline.run.plan import CompletedRun, Pass, Phase
from tieline.run.schedule import (
    Models,
    Observers,
    Progress,
    RunningPass,
    Schedule,
)

if TYPE_CHECKING:
    from tieline.run.resume import Journal, Replay, RunState


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


class _AbandonedPass(BaseException):
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
        except _AbandonedPass:
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
            raise _AbandonedPass
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


def run_in_lockstep(
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
        stack.callback(resident.close)
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
            _run_unit(stream, passes, resident, events)
        resident.leave()
        return passes.results


def _run_unit(
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
        _run_expert_groups(stream.groups[unit], passes)


class GroupStop(NamedTuple):
    """Where a pass waits for experts: the unit, and the number of the group."""

    unit: str
    group: int


def _run_expert_groups(groups: ExpertGroups, passes: Lockstep) -> None:
    """Bring all passes that wait for experts of a unit through their groups."""
    while waiting := [
        stop for stop in passes.stops if isinstance(stop, GroupStop) and stop.unit == groups.unit
    ]:
        first = min(waiting)
        groups.read_group(first.group)
        passes.go_all(first)


@contextmanager
def _awaiting_groups(expert_groups: Iterable[ExpertGroups]) -> Iterator[None]:
    """Let passes park until the group of an expert is read; whoever is no pass reads it."""

    def obtain(groups: ExpertGroups, group: int) -> None:
        """Park until the group is read, or read it outside of all passes."""
        waiting = current_pass()
        if waiting is None:
            groups.read_group(group)
        else:
            waiting.park(GroupStop(groups.unit, group))

    groups_of_units = list(expert_groups)
    obtain_functions = [groups.obtain for groups in groups_of_units]
    for groups in groups_of_units:
        groups.obtain = partial(obtain, groups)
    try:
        yield
    finally:
        for groups, obtained in zip(groups_of_units, obtain_functions, strict=True):
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
            _run_expert_groups(stream.groups[unit], passes)
        return passes.results
    finally:
        passes.close()


@contextmanager
def _parking_at_units(stream: ModelStream, skipped_units: set[Any]) -> Iterator[None]:
    """Let passes park where they enter a unit, except these."""

    def park(name: str, module: nn.Module, args: object) -> None:
        """Park the pass that enters this unit."""
        parked = current_pass()
        if parked is not None:
            parked.park(name)

    with ExitStack() as stack:
        for name, module in stream.weights.units.items():
            if name not in skipped_units:
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
    """The unit whose weights are in memory while passes are led through.

    The operating system is asked to read the next layer meanwhile. A thread that reads it into
    memory of this process is no faster, and half as fast where the cores are busy
    (docs/benchmarks.md).
    """

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
        self.close()

    def close(self) -> None:
        """Drop the unit that is there, if any."""
        if self._unit is not None:
            if self._unit in self._groups:
                self._groups[self._unit].remove()
            self._weights.free(self._unit)
            self._unit = None

    def _prefetch_after(self, unit: str) -> None:
        """Ask the operating system to read the layer after a unit."""
        names = list(self._weights.units)
        later, parent = names[names.index(unit) + 1 :], unit.rpartition(".")[0]
        following = next((name for name in later if name in self._weights.layers), "")
        if following.startswith(parent) and following:
            self._weights.shards.prefetch(self._weights.plans[following].keys)


STATES_KEPT = 2
"""Hidden states that a pass holds while it waits: what it goes on with, and the embeddings."""


STREAMING = "streaming"
"""Stage of the progress while weights are read, counted in bytes."""


class ByUnit(Schedule):
    """Brings all passes through one unit of the streamed models after the other."""

    reruns = False

    def __init__(
        self,
        models: Models,
        phase: Phase,
        observers: Observers,
        memory: int | None = None,
        resume: "RunState | None" = None,
    ) -> None:
        super().__init__(models, phase, observers)
        self._streams = [model.stream for model in models if model.stream is not None]
        self._memory, self._resume = memory, resume
        self._threads: dict[Pass, ParkedPass] = {}
        self._roundings = [StreamRounding(stream) for stream in self._streams]
        self._scopes: dict[tuple[int, Rounded], Scope] = {}

    def run(self, on_progress: Progress | None) -> CompletedRun:
        """Read the weights once and run every pass."""
        for stream in self._streams:
            headless = f"{type(stream.model).__name__} has no output head"
            has_logits = stream.head is not None or self.phase.logits == "none"
            require(has_logits, headless, UnsupportedModelError)
        most = max(Counter(run.batch for run in self.phase.passes).values())
        if most > len(self._streams):
            require_room_for_hidden_states(self._streams[0], self.phase.tokens, most, self._memory)
        for run in self.phase.passes:
            self.begin(run)
        with freed_memory_kept():
            self._lead_model(0, on_progress)
        return CompletedRun(tuple(self.phase.batches))

    def _lead_model(self, number: int, on_progress: Progress | None) -> None:
        """Bring the passes of a model to its head, and then those of the models after it."""
        stream, journal, replay = self._streams[number], None, None
        if self._resume is not None:
            replay, journal = self._resume.replay(stream.weights), self._resume.journal
        jobs = [
            PassJob(partial(self._pass_logits, state), partial(self.scope, state), rounding)
            for state, rounding in (
                (self._running[run], self._rounding(run)) for run in self._runs_of(number)
            )
        ]
        events = _ModelEvents(self, number, on_progress, [] if replay is None else [*replay.left])
        head = self.phase.logits != "none"
        if not head and stream.head is not None:
            stream.weights.check_unloaded(stream.head)
        run_in_lockstep(stream, jobs, events, head=head, journal=journal, replay=replay)

    def _runs_of(self, number: int) -> list[Pass]:
        """Passes of one of the models."""
        return [run for run in self.phase.passes if run.model == number]

    def _pass_logits(self, state: RunningPass) -> Any:
        """Logits of one pass; finishes it where the head is not run."""
        logits = self.logits(state)
        if self.phase.logits == "none":
            self.finish(state, None)
        return logits

    def sites(self, run: Pass) -> Mapping[str, Site]:
        """Routers of the pass's model whose weights are in memory."""
        return {
            name: site
            for name, site in self._sites[run.model].items()
            if not any(parameter.is_meta for parameter in site.module.parameters())
        }

    def _rounding(self, run: Pass) -> Scope:
        """What is made ready for a pass in each unit: one object per rounding, to be shared."""
        rounded = run.condition.rounded
        if rounded is None:
            return nullcontext
        key = run.model, rounded
        if key not in self._scopes:
            self._scopes[key] = partial(self._roundings[run.model].rounded, *rounded)
        return self._scopes[key]

    def lead_through_heads(self) -> None:
        """Bring batch after batch through the heads, which are all in memory."""
        for batch in self.phase.batches:
            runs = [run for run in self.phase.passes if run.batch == batch]
            for _, group in groupby(runs, key=lambda run: (run.model, run.condition.rounded)):
                equal_runs = list(group)
                with self._rounding(equal_runs[0])():
                    for run in equal_runs:
                        thread = self._threads[run]
                        thread.go()
                        logits, thread.result = thread.result, None  # large
                        self.finish(self._running[run], logits)


class _ModelEvents(StreamEvents):
    """What a schedule does while the passes of one of its models are led.

    Args:
        schedule: the schedule.
        number: number of the model.
        on_progress: called with `STREAMING` and bytes.
        units: units that all passes have left.
    """

    def __init__(
        self, schedule: ByUnit, number: int, on_progress: Progress | None, units: list[str]
    ) -> None:
        self._schedule, self._number, self._on_progress = schedule, number, on_progress
        self._units, self._resume = units, schedule._resume

    def on_begun(self) -> None:
        """Give observers back what an earlier run kept of units that were left."""
        if self._resume is not None:
            self._resume.restore(self._units)

    def on_unit_done(self, unit: str) -> None:
        """Show observers the unit, and keep its state."""
        self._units.append(unit)
        stream = self._schedule._streams[self._number]
        for observer in self._schedule.observers:
            observer.on_unit_done(unit, partial(run_in_unit, stream, unit))
        if self._resume is not None:
            self._resume.keep(unit, self._units)

    def on_read(self, done: int, total: int) -> None:
        """Report bytes of all models."""
        if self._on_progress is not None:
            sizes = [stream.size for stream in self._schedule._streams]
            total = total if len(sizes) == 1 else sum(sizes)
            self._on_progress(STREAMING, min(sum(sizes[: self._number]) + done, total), total)

    def at_head(self, passes: Lockstep, head: str) -> None:
        """Wait for the other models, then go through the heads."""
        schedule = self._schedule
        runs = schedule._runs_of(self._number)
        schedule._threads |= dict(zip(runs, passes.passes, strict=True))
        if self._number + 1 < len(schedule._streams):
            schedule._lead_model(self._number + 1, self._on_progress)
        else:
            schedule.lead_through_heads()


class StreamRounding:
    """Rounds what is in memory, into memory that is used again for the next layer."""

    def __init__(self, stream: ModelStream) -> None:
        """Round weights of this model."""
        self._stream = stream
        self._buffers, self._expert_buffers = RoundingBuffers(), RoundingBuffers()

    @contextmanager
    def rounded(
        self, number_format: str, region: Region, keep: Collection[str] = ()
    ) -> Iterator[None]:
        """Inside the block, the weights in memory are rounded, experts in groups too.

        Args:
            number_format: name of the format.
            region: "router", "all" or "others".
            keep: names of routers that stay in full precision.
        """
        model, grid = self._stream.model, format_named(number_format).weights
        with rounded_weights(model, number_format, region, keep, self._buffers):
            if region == "router":
                yield
                return
            with self._expert_buffers.borrow() as allocate:

                def change(module: nn.Module, experts: Tensor) -> Tensor:
                    """Experts of a group rounded to the grid of the format."""
                    return rounded_in_pieces(experts, grid, weight_axis(module, experts), allocate)

                with self._stream.changed_experts(change):
                    yield


class HiddenStatesError(SettingError):
    """The hidden states of a streamed run do not fit beside the weights."""


def require_room_for_hidden_states(
    stream: ModelStream, tokens: int, passes: int, memory: int | None
) -> None:
    """Refuse a run whose hidden states do not fit beside the weights, which are there twice.

    Args:
        stream: the model.
        tokens: of the text.
        passes: how often the text goes through the model side by side.
        memory: bytes that the process may take; None for what is free.
    """
    width = getattr(text_config(stream.model), "hidden_size", None)
    if not isinstance(width, int):
        return
    room = free_memory() if memory is None else memory - resident_memory()
    states = passes * STATES_KEPT * tokens * width * stream.model.dtype.itemsize
    weights = 2 * max(map(stream.resident, stream.weights.units))
    if states + weights > room:
        raise HiddenStatesError(
            "the hidden states of {count:,} tokens in {passes} passes side by side need "
            "{states:.2f} GB beside {weights:.2f} GB of weights, and {room:.2f} GB are there: take "
            "fewer {tokens}, or perturbations",
            count=tokens,
            passes=passes,
            states=states / 1e9,
            weights=weights / 1e9,
            room=room / 1e9,
        )
