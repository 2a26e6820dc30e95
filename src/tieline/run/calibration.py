"""Calibration tokens: run once so that routers show their scores, clean and under a precision.

calibration = calibrate(model, [ids], noise="bf16")
smooth_(model, budget=2.5, noise="bf16", calibration=calibration)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tieline.core.errors import require
from tieline.models.band_width import CalibrationScores, Scores, gap_noise, margin_changes
from tieline.models.class_changes import Call
from tieline.models.model import Model
from tieline.models.router_output import Handler
from tieline.models.smoothed_router import smoothable_layers
from tieline.run.condition import CLEAN, Condition, noise_perturbation
from tieline.run.forward import Ids
from tieline.run.observers import Observer, Site
from tieline.run.plan import Pass, Phase, Plan
from tieline.run.runner import Progress, Runner


class RouterWatcher(Observer):
    """Shows the calls of routers to handlers, whose return value is not used.

    Args:
        handlers: by condition and router name.
    """

    def __init__(self, handlers: Mapping[Condition, Mapping[str, Handler]]) -> None:
        self._handlers = handlers

    def watches(self, run: Pass) -> bool:
        """Every pass under a condition that has handlers."""
        return run.condition in self._handlers

    def on_router(self, run: Pass, site: Site, call: Call, output: Any) -> None:
        """Show a call to its handler."""
        handler = self._handlers[run.condition].get(site.name)
        if handler is not None:
            handler(site.module, call, output)


def watch_routers(
    runner: Runner,
    handlers: Mapping[Condition, Mapping[str, Handler]],
    batches: Sequence[Ids],
    on_progress: Progress | None = None,
    stage: str = "calibration",
) -> None:
    """Run tokens once under every condition while handlers see the calls of the routers.

    Args:
        runner: runs the model; every process runs all of these batches.
        handlers: by condition and router name.
        batches: token ids.
        on_progress: called with stage, done and total.
        stage: name of the stage.
    """
    numbered = dict(enumerate(batches))
    passes = tuple(Pass(number, condition) for condition in handlers for number in numbered)
    phase = Phase(stage, numbered, passes, logits="none")
    single_runner = Runner(*runner.models, memory=runner.memory)
    single_runner.run(Plan((phase,)), [RouterWatcher(handlers)], on_progress)


def measure_scores(
    runner: Runner, batches: Sequence[Ids], noise: str | None, on_progress: Progress | None = None
) -> CalibrationScores:
    """Run calibration tokens, clean and under a precision, and return scores and σ of the gap.

    Args:
        runner: runs the model; every process runs all of these batches.
        batches: token ids.
        noise: precision whose noise is measured beside the clean pass; None for none.
        on_progress: called with stage, done and total.
    """
    plans = smoothable_layers(runner.models[0].module)
    conditions = [CLEAN] if noise is None else [CLEAN, Condition(noise_perturbation(noise))]
    scores = {condition: {plan.name: Scores(plan) for plan in plans} for condition in conditions}
    watch_routers(runner, scores, batches, on_progress)
    if noise is None:
        return CalibrationScores(scores[CLEAN], {})
    changes = margin_changes(plans, scores[CLEAN], scores[conditions[1]])
    return CalibrationScores(scores[CLEAN], gap_noise(changes), changes)


def calibrate(
    model: nn.Module,
    batches: Sequence[Ids],
    noise: str | None = None,
    on_progress: Progress | None = None,
) -> CalibrationScores:
    """Run calibration tokens through a model in memory, for `models.smooth.smooth_`.

    Args:
        model: a Mixture-of-Experts model of transformers.
        batches: token ids (rows, length).
        noise: precision whose noise is measured, such as "bf16" or "router bf16"; None for none.
        on_progress: called with stage, done and total.
    """
    valid = len(batches) > 0 and all(ids.ndim == 2 and ids.numel() for ids in batches)
    require(valid, "calibration tokens are a list of tensors (rows, length) of token ids")
    return measure_scores(Runner(Model(model)), batches, noise, on_progress)
