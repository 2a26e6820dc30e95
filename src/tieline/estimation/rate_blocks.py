"""One block of a rate study: simulate, fit, compare. A worker runs it alone, on one thread."""

import math
import time
from typing import Any

from torch import Tensor

from tieline.estimation.distances import regression_distance
from tieline.estimation.fit import FitResult, fit
from tieline.estimation.parameters import MoEParameters
from tieline.estimation.quotient import quotient_losses
from tieline.estimation.rate_plan import Block, RatePlan
from tieline.estimation.rate_store import Row
from tieline.estimation.starts import near_truth, radius_at
from tieline.estimation.voronoi import voronoi_losses
from tieline.numerics import one_thread

__all__ = ["fit_block"]

POINTS = 10_000
"""Fresh inputs on which functions are compared."""


def fit_block(plan: RatePlan, block: Block) -> list[Row]:
    """A row for each repetition of the block."""
    begun = time.process_time()
    with one_thread():
        fitted = _fit(plan, block)
        losses = _losses(plan, fitted.params)
    seconds = (time.process_time() - begun) / len(block.repetitions)
    head = {"study": plan.key, "n": block.n, "radius": block.radius, "seconds": seconds}
    return [
        head
        | {"repetition": repetition, "status": int(fitted.status[at])}
        | {"iterations": int(fitted.iterations[at]), "loss": _number(fitted.loss[at])}
        | {name: _number(part[at]) for name, part in losses.items() if name != "empty"}
        | {"empty": int(losses["empty"][at])}
        for at, repetition in enumerate(block.repetitions)
    ]


def _fit(plan: RatePlan, block: Block) -> FitResult:
    """The best start of each repetition."""
    seeds = block.seeds(plan)
    sample = plan.source.simulate(plan.truth, block.n, seeds, noise=plan.noise, law=plan.law)
    radius = radius_at(block.radius, block.n, shrink=plan.shrink)
    starts = near_truth(plan.centre, radius, [seed ^ 1 for seed in seeds], plan.starts)
    steps: dict[str, Any] = {"iterations": plan.iterations} if plan.method == "lm" else {}
    found = fit(plan.model, sample.x, sample.y, starts, method=plan.method, quiet=True, **steps)
    return found.best()


def _losses(plan: RatePlan, params: MoEParameters) -> dict[str, Tensor]:
    """Raw and quotient loss, distance of the functions, and empty cells of each fit."""
    how = plan.loss, plan.paper, plan.power
    raw = voronoi_losses(params, plan.reference, *how)
    quotient = quotient_losses(plan.model, params, plan.reference, *how)
    home = plan.model.with_experts(plan.reference.n_experts)
    distance = regression_distance(
        plan.model, params, home, plan.reference, n=POINTS, seed=plan.seed + 2**40, law=plan.law
    )
    parts = {"raw": raw.values, "quotient": quotient.values, "function": distance.value}
    return parts | {"empty": quotient.empty}


def _number(value: Tensor) -> float | None:
    """A float for JSON; None where it is none."""
    found = value.item()
    return found if math.isfinite(found) else None
