"""Selection scores of every router, clean and under a precision, to choose a band's width by."""

from collections.abc import Sequence
from typing import Any

from tieline.models.changes import Call
from tieline.models.smooth_calibration import Measured, Scores, gap_noise, precision_named
from tieline.models.smooth_router import LayerPlan, plan_layers
from tieline.run.condition import CLEAN, Condition, Perturbation
from tieline.run.observers import Observer, Site
from tieline.run.plan import Ids, Pass, Phase, Plan
from tieline.run.runner import Runner
from tieline.run.schedule import Progress


class ScoreCollector(Observer):
    """Keeps the selection scores of routers, by condition and router name."""

    def __init__(self, plans: Sequence[LayerPlan], conditions: Sequence[Condition]) -> None:
        """Collect the scores of these routers."""
        self.scores = {
            condition: {plan.name: Scores(plan) for plan in plans} for condition in conditions
        }

    def watches(self, run: Pass) -> bool:
        """Every pass."""
        return True

    def on_router(self, run: Pass, site: Site, call: Call, output: Any) -> None:
        """Keep the scores of a call."""
        scores = self.scores[run.condition].get(site.name)
        if scores is not None:
            scores(site.module, call, output)


def smoothable_layers(runner: Runner) -> list[LayerPlan]:
    """Return the routers of the first model that choose some of their experts."""
    plans, _ = plan_layers(runner.models[0].module, None)
    return [plan for plan in plans if plan.k < plan.n_experts]


def noise_perturbation(name: str) -> Perturbation:
    """Return the perturbation that "bf16", "model bf16" or "router bf16" names."""
    level, parts = precision_named(name)
    return Perturbation("rounding", level, "router" if parts == "router" else "model")


def measure_scores(
    runner: Runner, batches: Sequence[Ids], noise: str | None, on_progress: Progress | None = None
) -> Measured:
    """Run calibration tokens, clean and under a precision, and return scores and σ of the gap.

    Args:
        runner: runs the model; every process runs all of these batches.
        batches: token ids.
        noise: precision whose noise is measured beside the clean pass; None for none.
        on_progress: called with stage, done and total.
    """
    plans, numbered = smoothable_layers(runner), dict(enumerate(batches))
    conditions = [CLEAN] if noise is None else [CLEAN, Condition(noise_perturbation(noise))]
    passes = tuple(Pass(number, condition) for condition in conditions for number in numbered)
    collector = ScoreCollector(plans, conditions)
    phase = Phase("calibration", numbered, passes, logits="none")
    alone = Runner(*runner.models, memory=runner.memory)
    alone.run(Plan((phase,)), [collector], on_progress)
    clean = collector.scores[CLEAN]
    if noise is None:
        return Measured(clean, {})
    return Measured(clean, gap_noise(plans, clean, collector.scores[conditions[1]]))
