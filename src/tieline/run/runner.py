"""Runs a plan and lets observers look.

An analysis is: conditions → plan → `runner.run(plan, observers)` → record.

    ranks = Ranks.of(parallel, corpus.batches(text))       batches of this process, by number
    batches, noise = ranks.numbered, Condition(Perturbation("score noise", 0.1), seed=(seed, 0))
    passes = [Pass(n) for n in batches]                    clean first: others refer to it
    passes += [Pass(n, noise, reference=Pass(n)) for n in batches]

    class Divergence(Observer):
        def __init__(self):
            self.kl = SequenceSums()
        def on_pass_done(self, run, outcome):
            if run.reference is not None:
                self.kl.add(outcome.divergence(run.reference))
        def join(self, ranks):
            ranks.join_sums([self.kl])

    divergence = Divergence()
    Runner(model, ranks=ranks).run(Plan((Phase("noise", batches, tuple(passes)),)), [divergence])

There are two schedules, which observers and conditions cannot tell apart:

    ByPass    the model is in memory. Batches are run in windows, so that the logits which later
              passes need fit in `WINDOW` bytes. Neighbouring passes whose weights are rounded alike
              share one rounding.
    ByUnit    weights are read from disk. All passes go through a layer before the next one is
              read (`run.lockstep`), and through the output head batch by batch.

Passes of several models (`Pass.model`) are run side by side; from disk, all passes wait at the head
of the first model while the second one is read.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from tieline.core.errors import UnsupportedModelError, require
from tieline.core.setting_fields import SettingError, require_setting
from tieline.core.statistics import Predictions
from tieline.models.capture import ObserverSettings
from tieline.models.class_changes import Call
from tieline.models.configuration import text_config
from tieline.models.emulate import Region, rounded_weights, weight_axis
from tieline.models.model import Model
from tieline.models.model_stream import ModelStream, free_memory, resident_memory
from tieline.models.number_formats import RoundingBuffers, format_named, rounded_in_pieces
from tieline.models.parallel import UNROUNDED
from tieline.models.stream_weights import Weights
from tieline.run.condition import REPLAYS, Condition, Rounded
from tieline.run.forward import (
    RunningPass,
    chosen_output,
    finite_logits,
    forward,
    model_logits,
    only_running,
    replayed_output,
)
from tieline.run.lockstep import (
    Lockstep,
    ParkedPass,
    PassJob,
    Scope,
    StreamEvents,
    lead_passes,
    run_in_unit,
)
from tieline.run.observers import (
    PLAIN,
    Observer,
    Outcome,
    RouteRecorder,
    Site,
    Watch,
    run_blocks,
    sites_of,
    watching,
)
from tieline.run.plan import Budget, CompletedRun, Pass, Phase, Plan, clean_plan
from tieline.run.ranks import Ranks
from tieline.run.resume import Journal, Replay
from tieline.trace.record import RoutingTrace

Progress = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and of how much."""

Models = Sequence[Model]
Observers = Sequence[Observer]

WINDOW = 32 << 20
"""Bytes of logits that are kept for later passes of a window of batches."""

KEPT = 16 << 20
"""Bytes of logits of a batch whose log-probabilities are kept for all that is compared with it."""

STATES_KEPT = 2
"""Hidden states that a pass holds while it waits: what it goes on with, and the embeddings."""

STREAMING = "streaming"
"""Stage of the progress while weights are read, counted in bytes."""


@runtime_checkable
class Resume(Protocol):
    """Keeps what a run from disk needs to go on after it was ended."""

    def replay(self, weights: Weights) -> Replay | None:
        """Return units that an earlier run has left; None if there are none."""
        ...

    def restore(self, units: list[str]) -> None:
        """Give observers back what they found in these units."""
        ...

    def keep(self, unit: str, left: list[str], journal: Journal) -> None:
        """Keep a unit that all passes have left, after the units in `left`."""
        ...


class Schedule:
    """What both schedules share: passes under way, and what later passes need of finished ones."""

    reruns = True
    """Whether blocks can be run again while a pass is inside them."""

    def __init__(
        self, models: Sequence[Model], phase: Phase, observers: Sequence[Observer]
    ) -> None:
        self.models, self.phase, self.observers = models, phase, observers
        self._sites = [sites_of(model.module) for model in models]
        self._choices, self._routes = phase.references_of_choices, phase.references_of_routes
        self._uses = Counter(other for run in phase.passes for other in run.compared_with)
        self._running: dict[Pass, RunningPass] = {}
        self._predictions: dict[Pass, Predictions] = {}

    def begin(self, run: Pass) -> RunningPass:
        """Prepare a pass."""
        ids = self.phase.batches[run.batch]
        self._running[run] = RunningPass(run, ids, run.condition.generator(run.batch))
        for observer in self.observers:
            observer.on_start(run, ids)
        return self._running[run]

    def module(self, run: Pass) -> nn.Module:
        """The model of a pass."""
        return self.models[run.model].module

    def logits(self, state: RunningPass) -> Any:
        """Run a pass and return its logits; None where the phase looks at none."""
        output = forward(self.module(state.run), state.ids)
        if self.phase.logits == "none":
            return None
        if self.phase.logits == "optional":
            return getattr(output, "logits", None)
        clean = state.run.condition.perturbation is None
        return (finite_logits if clean else model_logits)(output, state.ids)

    @contextmanager
    def scope(self, state: RunningPass) -> Iterator[None]:
        """Context in which a pass computes: its condition, and observers looking at it."""
        run, sites = state.run, self.sites(state.run)
        condition, watch = run.condition, Watch(run, self.observers, self.reruns)
        method = "forward" if condition.choice in REPLAYS else ""
        with (
            condition.computation(self.module(run), state.generator, sites),
            watching(watch, sites, self._rewrite(state), method),
        ):
            yield

    def sites(self, run: Pass) -> Mapping[str, Site]:
        """Routers of the pass's model whose weights are in memory."""
        return self._sites[run.model]

    def _rewrite(self, state: RunningPass) -> Callable[[Site, Call, Any], Any] | None:
        """What the routers of a pass return instead of their own output, and what is recorded."""
        run, kind = state.run, state.run.condition.choice
        if kind in REPLAYS:
            assert run.reference is not None
            return partial(replayed_output, state, self._running[run.reference], kind)
        records, traces = run in self._choices, run in self._routes
        reference = None
        if run.reference is not None and (kind == "forced" or self.phase.compares_routes):
            reference = self._running[run.reference]
        if not (records or traces or reference):
            return None
        return partial(chosen_output, state, reference, (records, traces))

    def finish(self, state: RunningPass, logits: Any) -> None:
        """Show the logits of a pass to the observers, and drop what no pass needs any more."""
        run = state.run
        kept = self._predictions
        compared = {other: kept[other] for other in run.compared_with if other in kept}
        outcome = Outcome(state.ids, logits, compared, state.lost, state.choices, state.changed)
        for observer in self.observers:
            observer.on_pass_done(run, outcome)
        if self._uses[run] and logits is not None:
            several = self._uses[run] > 1 and logits.numel() * logits.itemsize <= KEPT
            self._predictions[run] = Predictions(logits, keep=several)
        for other in run.compared_with:
            self._uses[other] -= 1
            if not self._uses[other]:
                self._predictions.pop(other, None)
                self._running.pop(other, None)
        if not self._uses[run]:
            self._running.pop(run, None)


class ByPass(Schedule):
    """Runs passes one after the other on models in memory."""

    def __init__(
        self,
        models: Models,
        phase: Phase,
        observers: Observers,
        budget: Budget | None,
    ) -> None:
        super().__init__(models, phase, observers)
        self._budget = budget or Budget()
        self._dropped: tuple[Any, ...] = ()
        self._done = 0

    def run(self, on_progress: Progress | None) -> CompletedRun:
        """Run the windows of batches, as long as there is time."""
        budget, slowest, batches = self._budget, 0.0, []
        for window in self.phase.windows(self._window()):
            began = budget.elapsed()
            if batches and began + slowest > budget.limit:
                break
            self._run_window(window, first=not batches, on_progress=on_progress)
            batches += dict.fromkeys(run.batch for run in window)
            slowest = max(slowest, budget.elapsed() - began)
        for observer in self.observers:
            observer.on_unit_done("", run_blocks)
        return CompletedRun(tuple(batches), self._dropped)

    def _window(self) -> int:
        """Batches whose logits are kept at once."""
        if self._budget.is_limited:
            return 1
        vocabulary = getattr(text_config(self.models[0].module), "vocab_size", None)
        vocabulary = vocabulary if isinstance(vocabulary, int) else 1 << 17
        largest = max((ids.numel() for ids in self.phase.batches.values()), default=1)
        size = 4 * largest * vocabulary * self.phase.most_kept
        return max(1, WINDOW // size) if size else max(1, len(self.phase.batches))

    def _run_window(
        self, window: Sequence[Pass], first: bool, on_progress: Progress | None
    ) -> None:
        """Run the passes of a window, those with equal weights under one rounding."""
        total = len(self.phase.passes)
        for (model, _), group in groupby(window, key=lambda run: (run.model, _weights_of(run))):
            runs = [run for run in group if run.condition.perturbation not in self._dropped]
            if first and runs and self._out_of_time(runs[0]):
                self._drop(runs[0])
            runs = [run for run in runs if run.condition.perturbation not in self._dropped]
            if not runs:
                continue
            with runs[0].condition.weights(self.models[model].module):
                for run in runs:
                    self._run_pass(run)
                    self._done += 1
                    if on_progress is not None:
                        on_progress(self.phase.name, min(self._done, total), total)

    def _run_pass(self, run: Pass) -> None:
        """Run one pass and show its logits."""
        state = self.begin(run)
        with self.scope(state):
            logits = self.logits(state)
        self.finish(state, logits)

    def _perturbations(self) -> list[Any]:
        """Perturbations of the phase, in order."""
        runs = self.phase.passes
        return [p for p in dict.fromkeys(run.condition.perturbation for run in runs) if p]

    def _out_of_time(self, run: Pass) -> bool:
        """Whether a perturbation begins, not the first one, and the time is up."""
        if not self._budget.is_limited or not self.phase.may_drop or not self._begins(run):
            return False
        later = run.condition.perturbation in self._perturbations()[1:]
        return later and self._budget.elapsed() > self._budget.limit

    def _begins(self, run: Pass) -> bool:
        """Whether this is the first pass under its perturbation."""
        perturbation = run.condition.perturbation
        same = (p for p in self.phase.passes if p.condition.perturbation == perturbation)
        return next(same) == run

    def _drop(self, run: Pass) -> None:
        """Leave out this perturbation and all that follow."""
        every = self._perturbations()
        self._dropped = tuple(every[every.index(run.condition.perturbation) :])


def _weights_of(run: Pass) -> tuple[Any, Rounded | None]:
    """What neighbouring passes share: the perturbation, and how weights are rounded."""
    return run.condition.perturbation, run.condition.rounded


class ByUnit(Schedule):
    """Brings all passes through one unit of the streamed models after the other."""

    reruns = False

    def __init__(
        self,
        models: Models,
        phase: Phase,
        observers: Observers,
        memory: int | None = None,
        resume: Resume | None = None,
    ) -> None:
        super().__init__(models, phase, observers)
        self._streams = [model.stream for model in models if model.stream is not None]
        self._memory, self._resume = memory, resume
        self._threads: dict[Pass, ParkedPass] = {}
        self._roundings = [StreamRounding(stream) for stream in self._streams]
        self._scopes: dict[tuple[int, Rounded], Scope] = {}

    def run(self, on_progress: Progress | None) -> CompletedRun:
        """Read the weights once and run every pass."""
        if self.phase.logits != "none":
            for stream in self._streams:
                kind = type(stream.model).__name__
                require(
                    stream.head is not None, f"{kind} has no output head", UnsupportedModelError
                )
        self._check_room()
        for run in self.phase.passes:
            self.begin(run)
        self._stream(0, on_progress)
        return CompletedRun(tuple(self.phase.batches))

    def _check_room(self) -> None:
        """Refuse more hidden states side by side than memory holds."""
        most = max(Counter(run.batch for run in self.phase.passes).values())
        if most > len(self._streams):
            check_room(self._streams[0], self.phase.tokens, most, self._memory)

    def _stream(self, number: int, on_progress: Progress | None) -> None:
        """Bring the passes of a model to its head, and then those of the models after it."""
        stream, journal, replay = self._streams[number], None, None
        if self._resume is not None:
            replay, journal = self._resume.replay(stream.weights), Journal(stream.weights)
        runs = [run for run in self.phase.passes if run.model == number]
        jobs = [
            PassJob(partial(self._job, state), partial(self.scope, state), self._rounded(state.run))
            for state in map(self._running.__getitem__, runs)
        ]
        left = [] if replay is None else [*replay.left]
        events = _UnitEvents(self, number, on_progress, journal, left)
        head = self.phase.logits != "none"
        if not head and stream.head is not None:
            stream.weights.check_unloaded(stream.head)
        lead_passes(stream, jobs, events, head=head, journal=journal, replay=replay)

    def _job(self, state: RunningPass) -> Any:
        """Logits of one pass; finishes it where the head is not run."""
        logits = self.logits(state)
        if self.phase.logits == "none":
            self.finish(state, None)
        return logits

    def sites(self, run: Pass) -> Mapping[str, Site]:
        """Routers of the pass's model whose weights are in memory."""
        every = self._sites[run.model]
        return {name: site for name, site in every.items() if in_memory(site.module)}

    def _rounded(self, run: Pass) -> Scope:
        """What is made ready for a pass in each unit: one object per rounding, to be shared."""
        rounded = run.condition.rounded
        if rounded is None:
            return nullcontext
        key = run.model, rounded
        if key not in self._scopes:
            self._scopes[key] = partial(self._roundings[run.model].rounded, *rounded)
        return self._scopes[key]

    def restore(self, units: list[str]) -> None:
        """Give observers back what an earlier run kept of these units."""
        if self._resume is not None:
            self._resume.restore(units)

    def unit_done(self, number: int, unit: str, left: list[str], journal: Journal | None) -> None:
        """Show observers a unit that all passes of a model have left, and keep its state."""
        for observer in self.observers:
            observer.on_unit_done(unit, partial(run_in_unit, self._streams[number], unit))
        if self._resume is not None and journal is not None:
            self._resume.keep(unit, left, journal)

    def bytes_before(self, number: int) -> tuple[int, int]:
        """Bytes of the models before this one, and of all."""
        sizes = [stream.size for stream in self._streams]
        return sum(sizes[:number]), sum(sizes)

    def at_head(self, number: int, passes: Lockstep, on_progress: Progress | None) -> None:
        """Wait for the other models, then bring batch after batch through the heads."""
        runs = [run for run in self.phase.passes if run.model == number]
        self._threads |= dict(zip(runs, passes.passes, strict=True))
        if number + 1 < len(self._streams):
            self._stream(number + 1, on_progress)
            return
        for batch in self.phase.batches:
            mine = [run for run in self.phase.passes if run.batch == batch]
            for _, group in groupby(mine, key=lambda run: (run.model, run.condition.rounded)):
                same = list(group)
                with self._rounded(same[0])():
                    for run in same:
                        self._end(run)

    def _end(self, run: Pass) -> None:
        """Let a pass go to its end."""
        thread = self._threads[run]
        thread.go()
        logits, thread.result = thread.result, None  # large
        self.finish(self._running[run], logits)


class _UnitEvents(StreamEvents):
    """Tells a schedule what happens while the passes of one of its models are led."""

    def __init__(
        self,
        schedule: ByUnit,
        number: int,
        on_progress: Progress | None,
        journal: Journal | None,
        left: list[str],
    ) -> None:
        self._schedule, self._number, self._on_progress = schedule, number, on_progress
        self._journal, self._left = journal, left

    def on_begun(self) -> None:
        self._schedule.restore(self._left)

    def on_unit_done(self, unit: str) -> None:
        self._left.append(unit)
        self._schedule.unit_done(self._number, unit, self._left, self._journal)

    def on_read(self, done: int, total: int) -> None:
        if self._on_progress is not None:
            before, size = self._schedule.bytes_before(self._number)
            total = total if len(self._schedule.models) == 1 else size
            self._on_progress(STREAMING, min(before + done, total), total)

    def at_head(self, passes: Lockstep, head: str) -> None:
        self._schedule.at_head(self._number, passes, self._on_progress)


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


def in_memory(module: nn.Module) -> bool:
    """Whether no weight of a module is on the meta device."""
    return not any(parameter.is_meta for parameter in module.parameters())


class HiddenStatesError(SettingError):
    """The hidden states of a streamed run do not fit beside the weights."""


def check_room(stream: ModelStream, tokens: int, passes: int, memory: int | None) -> None:
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


class Runner:
    """Runs plans on one model, or on several side by side."""

    def __init__(
        self, *models: Model, ranks: Ranks | None = None, memory: int | None = None
    ) -> None:
        """Run these models.

        Args:
            models: all in memory, or all streamed.
            ranks: how processes share the batches; by default there is one process.
            memory: bytes that the process may take where weights are streamed; None for what is
                free.
        """
        self.models, self.ranks, self.memory = models, ranks or Ranks(None, ()), memory
        self.streams = [model.stream for model in models if model.stream is not None]
        require(
            len(self.streams) in (0, len(models)),
            "models that are compared are both streamed, or both in memory",
        )

    @property
    def streamed(self) -> bool:
        """Whether weights are read from disk."""
        return bool(self.streams)

    def supports(self, condition: Condition) -> str | None:
        """Return why the models cannot run under a condition; None if they can."""
        return condition_refusal(condition, self.ranks.parallel)

    def run(
        self,
        plan: Plan,
        observers: Sequence[Observer],
        on_progress: Progress | None = None,
        *,
        budget: Budget | None = None,
        resume: Resume | None = None,
    ) -> CompletedRun:
        """Run every pass, show it to the observers, and join what processes counted.

        Args:
            plan: the passes.
            observers: what looks at them.
            on_progress: called with stage, done and total.
            budget: time after which batches and perturbations are left out; in memory only.
            resume: keeps units that are finished; from disk only.
        """
        for condition in plan.conditions:
            why = self.supports(condition)
            require(why is None, str(why))
        completed: list[CompletedRun] = []
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(only_running(model.module))
            for phase in plan.phases:
                if self.streamed:
                    require_setting(budget is None or not budget.is_limited, NO_BUDGET)
                    schedule = ByUnit(self.models, phase, observers, self.memory, resume)
                else:
                    schedule = ByPass(self.models, phase, observers, budget)
                completed.append(schedule.run(on_progress))
        self.ranks.keep_pace(*(model.module for model in self.models))
        for observer in observers:
            observer.join(self.ranks)
        return _completed_by_all(plan, completed)


def _completed_by_all(plan: Plan, completed: Sequence[CompletedRun]) -> CompletedRun:
    """Batches that no phase left out, and perturbations that some phase left out."""
    phases = list(zip(plan.phases, completed, strict=True))
    every = dict.fromkeys(number for phase in plan.phases for number in phase.batches)
    left_out = {n for phase, run in phases for n in phase.batches if n not in run.batches}
    dropped = dict.fromkeys(perturbation for run in completed for perturbation in run.dropped)
    return CompletedRun(tuple(n for n in every if n not in left_out), tuple(dropped))


NO_BUDGET = "a streamed audit has no result before its last layer: leave out {budget_minutes}"


def condition_refusal(condition: Condition, parallel: str | None) -> str | None:
    """Return why a model cannot run under a condition; None if it can.

    Args:
        condition: the condition.
        parallel: how processes share the model, a name in `models.spread.PARALLEL`; None for one.
    """
    if condition.rounded is not None and parallel in UNROUNDED:
        return (
            f"parallel {parallel!r}: low precision is emulated, and {UNROUNDED[str(parallel)]}: "
            "take data or ep"
        )
    if condition.smoothing is not None and condition.choice in REPLAYS:
        return "smoothed routers use other numbers of experts than a record has: no replay"
    return None


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
