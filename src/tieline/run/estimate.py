"""How long a job will take: a measured pass of its model, times the passes that it plans.

    announce_total(model, batches, plan_work(plan), progress)

A pass under a condition costs more than a clean one: rounding is emulated, smoothed routers use
more experts, predictions are compared. `COSTS` says how much more, in clean passes; they were
measured on small models on a CPU, and a total that is wrong by a factor of two is a defect.
"""

import time
from collections.abc import Callable, Iterable

from tieline.models.model import Model
from tieline.run.condition import Condition
from tieline.run.forward import forward, only_running
from tieline.run.plan import Ids, Plan

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
