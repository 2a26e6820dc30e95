"""What is run: passes of batches under conditions, known before the first of them begins.

    clean = [Pass(number) for number in batches]
    rounded = [Pass(number, condition, reference=Pass(number)) for number in batches]
    plan = Plan((Phase("audit", batches, (*clean, *rounded)),))

A pass may be compared with other passes of the same batch, or take their experts: these come before
it in the phase. A phase that depends on the results of another one, such as the runs with the
routers that an audit keeps in float32, is a plan of its own; from disk each phase reads the files
once.

    announce_total(model, batches, plan_work(plan), progress)

estimates how long a job takes: a measured pass of its model, times the passes that it plans. A pass
under a condition costs more than a clean one: rounding is emulated, smoothed routers use more
experts, predictions are compared. `COSTS` says how much more, in clean passes; they were measured
on small models on a CPU, and a total that is wrong by a factor of two is a defect.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from tieline.core.errors import require
from tieline.models.model import Model
from tieline.run.condition import CLEAN, REPLAYS, Condition, Perturbation
from tieline.run.forward import Ids, forward, only_running

Logits = Literal["required", "optional", "none"]
"""Whether a phase looks at logits: "none" does not read the output head from disk."""


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes:
        batch: number of its batch in the phase.
        condition: how the model runs.
        reference: the pass of the same batch that it is compared with, and whose experts it takes
            where its condition says so.
        others: further passes of the same batch whose logits observers compare with.
        model: number of the model, where a phase runs several.
    """

    batch: int
    condition: Condition = CLEAN
    reference: "Pass | None" = None
    others: "tuple[Pass, ...]" = ()
    model: int = 0

    @property
    def compared_with(self) -> "tuple[Pass, ...]":
        """Passes whose logits are shown beside its own."""
        return self.others if self.reference is None else (self.reference, *self.others)


@dataclass(frozen=True, eq=False)
class Phase:
    """Passes that are run together.

    Attributes:
        name: stage of the progress.
        batches: token ids by number.
        passes: in order, the reference of each before it.
        compares_routes: whether observers are told the routed weight that each token lost against
            the reference (`Outcome.lost`) and the choices of references.
        logits: whether logits are looked at.
        may_drop: whether perturbations are left out when the time is up in the first batch.
    """

    name: str
    batches: Mapping[int, Ids]
    passes: tuple[Pass, ...]
    compares_routes: bool = False
    logits: Logits = "required"
    may_drop: bool = False

    def __post_init__(self) -> None:
        earlier: set[Pass] = set()
        for run in self.passes:
            missing = [other for other in run.compared_with if other not in earlier]
            require(
                not missing, f"{self.name}: {missing} must come before the passes that need them"
            )
            earlier.add(run)

    @property
    def tokens(self) -> int:
        """Tokens of all batches."""
        return sum(ids.numel() for ids in self.batches.values())

    @property
    def references_of_choices(self) -> set[Pass]:
        """Passes whose choice of experts later ones are compared with or forced to."""
        return {
            run.reference
            for run in self.passes
            if run.reference is not None
            and (self.compares_routes or run.condition.choice == "forced")
        }

    @property
    def references_of_routes(self) -> set[Pass]:
        """Passes whose routes later ones replay."""
        return {
            run.reference
            for run in self.passes
            if run.reference is not None and run.condition.choice in REPLAYS
        }

    @property
    def most_kept(self) -> int:
        """Passes of one batch whose logits are in memory at once beside the current ones."""
        first = self.passes[0].batch if self.passes else 0
        runs = [run for run in self.passes if run.batch == first]
        uses = Counter(other for run in runs for other in run.compared_with)
        kept, most = 0, 0
        for run in runs:
            kept += run in uses
            most = max(most, kept)
            for other in run.compared_with:
                uses[other] -= 1
                kept -= uses[other] == 0
        return most

    def windows(self, size: int) -> Iterator[tuple[Pass, ...]]:
        """Split the passes by consecutive batches, `size` batches at a time."""
        numbers = list(self.batches)
        for start in range(0, len(numbers), size):
            window = {*numbers[start : start + size]}
            yield tuple(run for run in self.passes if run.batch in window)


@dataclass(frozen=True, eq=False)
class Plan:
    """Phases that are run one after the other."""

    phases: tuple[Phase, ...]

    @property
    def passes(self) -> int:
        """Number of forward passes."""
        return sum(len(phase.passes) for phase in self.phases)

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions in order, without repetition."""
        return tuple(dict.fromkeys(run.condition for p in self.phases for run in p.passes))


class Budget:
    """Time that a run may take.

    Attributes:
        limit: seconds.
    """

    def __init__(self, limit: float = float("inf"), start: float | None = None) -> None:
        """Start the clock, unless it was started before."""
        self.limit, self._start = limit, time.perf_counter() if start is None else start

    def share(self, part: float) -> "Budget":
        """The first part of this time, on the same clock."""
        return Budget(part * self.limit, self._start)

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit at all."""
        return self.limit < float("inf")

    def elapsed(self) -> float:
        """Seconds since the clock was started."""
        return time.perf_counter() - self._start


@dataclass(frozen=True)
class CompletedRun:
    """What a run did.

    Attributes:
        batches: numbers of the batches that every phase with them has run.
        dropped: perturbations that some phase left out when the time was up.
    """

    batches: tuple[int, ...]
    dropped: tuple[Perturbation, ...] = ()


def clean_plan(name: str, batches: Mapping[int, Ids], logits: Logits = "none") -> Plan:
    """A plan of one pass per batch of the model as it is."""
    return Plan((Phase(name, batches, tuple(map(Pass, batches)), logits=logits),))


IN_ALL = "in all"
"""Stage of the progress that is called once, with 0 and the seconds of the whole job."""

LONG = 10.0
"""Seconds from which on the time of a job is announced."""

PROBE_TOKENS, SLOW = 1024, 5.0
"""Tokens of the pass that is measured, after one that is not unless that took so many seconds."""

COSTS = {"compared": 0.15, "router": 0.3, "model": 0.9, "smoothed": 1.0}
"""Clean passes that a pass costs more: its predictions are compared; its routers, or all of it, are
perturbed; its routers are smoothed."""


def pass_cost(condition: Condition, is_compared: bool = True) -> float:
    """Time of a pass under a condition, in clean passes.

    Args:
        condition: how the model runs.
        is_compared: whether its predictions are compared with others.
    """
    cost = 1.0 + (COSTS["compared"] if is_compared else 0.0)
    if condition.perturbation is not None:
        cost += COSTS["model" if condition.perturbation.part == "model" else "router"]
    return cost + (COSTS["smoothed"] if condition.smoothing is not None else 0.0)


def plan_work(plan: Plan) -> float:
    """Work of a plan: Σ over passes of tokens times cost, in tokens of a clean pass."""
    costs = (
        phase.batches[run.batch].numel() * pass_cost(run.condition, run.reference is not None)
        for phase in plan.phases
        for run in phase.passes
    )
    return sum(costs, 0.0)


def announce_total(
    model: Model,
    batches: Iterable[Ids],
    work: float,
    progress: Callable[[str, int, int], None] | None,
    beside: float = 0.0,
) -> None:
    """Measure a pass, and tell the progress how many seconds the job takes if these are many.

    Weights that are streamed tell their own time, by the bytes that were read.

    Args:
        model: the model, in memory in this process.
        batches: token ids, of which some are run.
        work: of the job, in tokens of a clean pass.
        progress: called with `IN_ALL`, 0 and the seconds; None to measure nothing.
        beside: seconds of the job that are spent beside passes.
    """
    first = next(iter(batches), None)
    if progress is None or model.stream is not None or first is None:
        return
    seconds = work * seconds_per_token(model, first) + beside
    if seconds >= LONG:
        progress(IN_ALL, 0, round(seconds))


def seconds_per_token(model: Model, ids: Ids) -> float:
    """Time of a clean pass of `PROBE_TOKENS` of these tokens, per token."""
    ids = ids[:, :PROBE_TOKENS]
    ids = ids[: max(1, PROBE_TOKENS // ids.shape[1])]
    seconds = 0.0
    with only_running(model.module):
        for _ in range(2):  # the first one touches fresh memory
            start = time.perf_counter()
            forward(model.module, ids)
            seconds = time.perf_counter() - start
            if seconds > SLOW:
                break
    return seconds / ids.numel()
