"""Runs a plan and lets observers look.

An analysis is: conditions → plan → `runner.run(plan, observers)` → record.

    ranks = Ranks.share_batches(parallel, corpus.batches(text))   batches of this process
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
              read (`run.streamed_passes`), and through the output head batch by batch.

Passes of several models (`Pass.model`) are run side by side; from disk, all passes wait at the head
of the first model while the second one is read.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from tieline.core.errors import require
from tieline.core.setting_fields import require_setting
from tieline.models.capture import RecorderSettings
from tieline.models.model import Model
from tieline.models.parallel import UNROUNDED
from tieline.run.condition import REPLAYS, Condition
from tieline.run.forward import only_running
from tieline.run.observers import (
    RANKS_ONLY,
    Observer,
    RouteRecorder,
)
from tieline.run.plan import Budget, CompletedRun, Plan, clean_plan
from tieline.run.ranks import Ranks
from tieline.run.resume import RunState
from tieline.run.schedule import (
    ByPass,
    Progress,
)
from tieline.run.streamed_passes import ByUnit
from tieline.trace.record import RoutingTrace


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
        resume: RunState | None = None,
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
    numbers = dict.fromkeys(number for phase in plan.phases for number in phase.batches)
    left_out = {n for phase, run in phases for n in phase.batches if n not in run.batches}
    dropped = dict.fromkeys(perturbation for run in completed for perturbation in run.dropped)
    return CompletedRun(tuple(n for n in numbers if n not in left_out), tuple(dropped))


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
    settings: RecorderSettings = RANKS_ONLY,
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
