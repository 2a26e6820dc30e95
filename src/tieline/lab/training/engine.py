"""Run a recipe in one process: prepare, train, checkpoint, resume, score, keep the result.

    result = run(enwik8_small("smooth1"), Path("runs/smooth1"))
    result = run(enwik8_small("smooth1"), Path("runs/smooth1"), resume=True)   # after a kill

The folder of a run holds `config.json`, checkpoints, `model/` (the trained model as transformers
saves it) and `result.json`. Weights, data order and all random numbers depend on the seed alone and
are restored exactly, so a run that was killed and resumed ends with the same loss.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import set_seed

from tieline.analysis.monitor_trainer import monitor_trainer
from tieline.core.errors import require
from tieline.core.files import check_folder, remove_rests, space_on
from tieline.core.records import Result, from_plain
from tieline.lab.training.checkpoint import (
    CheckpointError,
    checkpoint_step,
    incomplete_checkpoints,
    last_checkpoint,
    read_json,
    write_json,
)
from tieline.lab.training.config import TrainConfig
from tieline.lab.training.fetch import DataError
from tieline.lab.training.language import moe_layers
from tieline.lab.training.parallel.checkpoint import consolidate
from tieline.lab.training.tasks import Task, TaskData, task_of
from tieline.lab.training.trainer import RoutingTrainer, training_arguments
from tieline.models.running import no_bars

Report = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and its whole amount."""

Watch = Callable[[nn.Module, int], None]
"""Called with the model after a step, and the number of steps done."""

TIMED = 3


@dataclass(frozen=True, repr=False)
class TrainingResult(Result):
    """The result of a training run.

    Attributes:
        config: the run, `TrainConfig.to_dict()`.
        parameters: number of trained parameters.
        data: where the data come from.
        scores: scores of the task.
        seconds: wall time of the training in this process.
        cpu_seconds: its processor time.
        resumed_from: step at which this process began.
        history: logged values.
        folder: folder of the run.
    """

    format: ClassVar[str] = "tieline-training"

    config: dict[str, Any]
    parameters: int
    data: str
    scores: dict[str, Any]
    seconds: float
    cpu_seconds: float
    resumed_from: int
    history: tuple[dict[str, Any], ...]
    folder: str = ""

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Steps at which a value was logged and finite, with the value."""
        logged = ((entry.get("step", 0), entry.get(name)) for entry in self.history)
        return [(step, value) for step, value in logged if value is not None and isfinite(value)]

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return self.config["recipe"]

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.config["seed"]

    @property
    def steps(self) -> int:
        """Optimiser steps of the run."""
        return self.config["optim"]["steps"]


@dataclass(frozen=True, repr=False)
class TrainingPlan(Result):
    """What a run would do.

    Attributes:
        config: the run, `TrainConfig.to_dict()`.
        parameters: number of parameters.
        data: where the data come from, or why they are absent.
        step_seconds: measured time of a step, None without data.
        seconds: estimate for the whole training, None without data.
    """

    format: ClassVar[str] = "tieline-training-plan"

    config: dict[str, Any]
    parameters: int
    data: str
    step_seconds: float | None
    seconds: float | None


def run(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Report | None = None,
    watch: Watch | None = None,
) -> TrainingResult:
    """Train and score the model of a configuration in the folder `out`.

    Args:
        config: a whole run, from a recipe.
        out: a new folder; with `resume`, that of the same run.
        resume: continue from the newest complete checkpoint, from the start if there is none.
        progress: called at each stage.
        watch: called after every step; it must not change weights or random generators.
    """
    on_stage = progress or (lambda stage, done, of: None)
    check_folder(out / "model")
    checkpoint = prepare_folder(config, out, resume)
    if resume and (result := stored_result(out)) is not None:
        return result
    consolidate(checkpoint)
    task = task_of(config)
    on_stage("data", 0, 1)
    data = task.data(config)
    set_seed(config.seed)
    model = task.model(config)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", config.to_dict())
    arguments = training_arguments(config, out)
    on_step = _step_end(model, on_stage, watch)
    trainer = RoutingTrainer(config, model, arguments, data.train, on_step)
    if moe_layers(model):  # Soft MoE chooses nothing
        monitor_trainer(trainer, every=config.log_every)
    began, worked = time.perf_counter(), time.process_time()
    with no_bars(), space_on(out):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    times = time.perf_counter() - began, time.process_time() - worked
    on_stage("score", 0, 1)
    start = checkpoint_step(checkpoint)
    return save_result(config, out, (task, data, model), times, start, trainer.state.log_history)


def save_result(
    config: TrainConfig,
    out: Path,
    trained: tuple[Task, TaskData, nn.Module],
    times: tuple[float, float],
    resumed_from: int,
    history: list[dict[str, Any]],
) -> TrainingResult:
    """Score and save a trained model, and keep the result.

    Args:
        config: the run.
        out: its folder.
        trained: task, data and the whole model.
        times: wall and processor time of the training.
        resumed_from: step at which this process began.
        history: logged values.
    """
    task, data, model = trained
    model.eval()
    result = TrainingResult(
        config.to_dict(),
        parameter_count(model),
        data.about,
        task.evaluate(model, data, config),
        *times,
        resumed_from,
        tuple(history),
        str(out),
    )
    with no_bars():
        task.save(model, data, out / "model")
    result.to_json(out / "result.json")
    return result


def stored_result(out: Path) -> TrainingResult | None:
    """Return the result of a run that has ended, None if it has not."""
    path = out / "result.json"
    if not path.is_file():
        return None
    return replace(from_plain(TrainingResult, read_json(path)), folder=str(out))


def _step_end(
    model: nn.Module, on_stage: Report, watch: Watch | None
) -> Callable[[int, int], None]:
    def after_step(done: int, of: int) -> None:
        on_stage("train", done, of)
        if watch is not None:
            watch(model, done)

    return after_step


def plan(config: TrainConfig, progress: Report | None = None) -> TrainingPlan:
    """Return size, data and estimated time of a run; the time is measured on a few steps."""
    on_stage = progress or (lambda stage, done, of: None)
    on_stage("data", 0, 1)
    task = task_of(config)
    set_seed(config.seed)
    model = task.model(config)
    size = (config.to_dict(), parameter_count(model))
    try:
        data = task.data(config)
    except DataError as problem:
        return TrainingPlan(*size, f"absent: {problem}", None, None)
    on_stage("time", 0, 1)
    step = _step_seconds(model, data.train, config.optim.batch)
    return TrainingPlan(*size, data.about, step, step * config.optim.steps)


def _step_seconds(model: nn.Module, data: Any, batch: int) -> float:
    """Time forward and backward pass: the fastest of some micro-batches, times the batch."""
    micro = min(batch, 4)
    items = [data[i] for i in range(micro)]
    inputs = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    seconds = []
    for _ in range(TIMED):
        began = time.perf_counter()
        model.train()(**inputs).loss.backward()
        seconds.append(time.perf_counter() - began)
        model.zero_grad()
    return min(seconds) * batch / micro


def prepare_folder(config: TrainConfig, out: Path, resume: bool) -> Path | None:
    """Return the checkpoint to start from; raises if the folder holds another run.

    Removes the incomplete checkpoints of a killed run.
    """
    if out.is_dir():
        remove_rests(out / "config.json")
    if not resume:
        require(
            not out.exists() or (out.is_dir() and not any(out.iterdir())),
            f"{out} is not empty: a run begins in a new folder, or goes on with --resume",
        )
        return None
    path = out / "config.json"
    require(
        path.is_file(), f"{out} holds no run to resume: config.json is missing", CheckpointError
    )
    kept, fields = read_json(path), config.to_dict()
    differing = sorted(key for key in fields if kept.get(key) != fields[key])
    require(
        kept == fields,
        f"{out} holds another run: {differing or 'its fields'} differ from the recipe's",
        CheckpointError,
    )
    for half in incomplete_checkpoints(out):
        shutil.rmtree(half, ignore_errors=True)
    return last_checkpoint(out)


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in model.parameters())
