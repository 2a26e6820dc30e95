"""Run a recipe: prepare, train, checkpoint, resume, score and store the result.

    result = run_training(recipe_config("enwik8-small-smooth1"), Path("runs/smooth1"))

The folder of a run holds `config.json`, checkpoints, `model/` (the trained model as transformers
saves it) and `result.json`. Weights, data order and all random numbers depend on the seed alone and
are restored exactly, so a run that was killed and resumed ends with the same loss.

A task loads the data, builds the model and scores the result:

    language     the decoder on a stream of tokens
    images       CIFAR-10
    domains      PACS with one domain left out
    sentences    GLUE

A new kind of run is a class with the methods of `Task` and an entry of `TASKS`.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.utils.data import Dataset
from transformers import set_seed

from tieline.analysis.trainer_callbacks import monitor_trainer
from tieline.core.collectives import (
    TIMEOUT,
    is_first_rank,
    join_processes,
    naming_lost_ranks,
    run_on_first_rank,
)
from tieline.core.errors import require
from tieline.core.files import check_folder, locked_folder, naming_full_disk, remove_leftovers
from tieline.core.records import Result, from_plain, write_json
from tieline.lab.on_model.upcycled_model import parameter_count
from tieline.lab.training.checkpoint import (
    WEIGHTS,
    CheckpointError,
    checkpoint_step,
    incomplete_checkpoints,
    last_checkpoint,
    read_json,
    save_weights,
)
from tieline.lab.training.config import TrainConfig
from tieline.lab.training.data_files import DataError
from tieline.lab.training.image_tasks import DomainTask, ImageTask
from tieline.lab.training.language_tasks import LanguageModelling, moe_layers
from tieline.lab.training.sentence_tasks import SentenceTask
from tieline.lab.training.trainer import (
    RESUME_HINT,
    RoutingTrainer,
    rows_per_process,
    training_arguments,
)
from tieline.models.saved_models import no_loading_bars
from tieline.run.forward import evaluation_mode

Report = Callable[[str, int, int], None]
"""Called with a stage, the amount done and the total."""

Watch = Callable[[nn.Module, int], None]
"""Called after each step with the model and the number of steps done."""

TIMED_PASSES = 3


@runtime_checkable
class TaskData(Protocol):
    """Data of a task; implementations may add fields for the task itself."""

    @property
    def train(self) -> Dataset[Any]:
        """`steps · batch` dictionaries of the model's inputs, in training order."""
        ...

    @property
    def about(self) -> str:
        """Source and splits of the data."""
        ...


@runtime_checkable
class Task(Protocol):
    """A kind of run: loads data, builds, scores and saves the model."""

    def data(self, config: TrainConfig) -> TaskData:
        """Load the data, fetching it if necessary."""
        ...

    def model(self, config: TrainConfig) -> nn.Module:
        """Build a new model whose `forward(**items)` returns an output with a `loss`."""
        ...

    def evaluate(self, model: nn.Module, data: Any, config: TrainConfig) -> dict[str, Any]:
        """Return the scores of the trained model, as JSON values."""
        ...

    def save(self, model: nn.Module, data: Any, folder: Path) -> None:
        """Write the trained model into a new folder."""
        ...


TASKS: dict[str, Task] = {
    "language": LanguageModelling(),
    "images": ImageTask(),
    "domains": DomainTask(),
    "sentences": SentenceTask(),
}


def task_of(config: TrainConfig) -> Task:
    """Return the task of a run."""
    require(config.task in TASKS, f"the task {config.task!r} is not one of {sorted(TASKS)}")
    return TASKS[config.task]


@dataclass(frozen=True, repr=False)
class TrainingResult(Result):
    """The result of a training run.

    Attributes:
        config: the run, `TrainConfig.to_dict()`.
        parameters: number of trained parameters.
        data: where the data come from.
        scores: scores of the task.
        seconds: wall time of the training in this process.
        cpu_seconds: processor time of the training in this process.
        resumed_from: step at which this process started; 0 for a new run.
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
        """Return (step, value) for every step at which a value was logged and finite."""
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
    """Size, data and estimated time of a run.

    Attributes:
        config: the run, `TrainConfig.to_dict()`.
        parameters: number of parameters.
        data: source of the data, or why it is absent.
        step_seconds: measured time of a step; None without data.
        seconds: estimated time of the training; None without data.
    """

    format: ClassVar[str] = "tieline-training-plan"

    config: dict[str, Any]
    parameters: int
    data: str
    step_seconds: float | None
    seconds: float | None


def run_training(
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
    with run_folder(config, out, resume) as checkpoint:
        if resume and (result := stored_result(out)) is not None:
            return result
        return _save_result(_train_steps(config, out, checkpoint, progress or _no_progress, watch))


def run_parallel(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Report | None = None,
    timeout: float = TIMEOUT,
) -> TrainingResult | None:
    """Run `run_training` on the processes that torchrun started; only rank 0 returns the result.

    Args:
        config: a whole run; the rows of its micro-batches divide over the processes.
        out: a folder that all processes see; with `resume`, that of the same run on any number of
            processes.
        resume: continue from the newest complete checkpoint, from the start if there is none.
        progress: called at each stage, on rank 0.
        timeout: seconds after which a process that does not answer is lost.
    """
    joined = nullcontext() if dist.is_initialized() else join_processes(timeout=timeout)
    with joined, naming_lost_ranks(RESUME_HINT), ExitStack() as folder:
        checkpoint = run_on_first_rank(lambda: _prepare_parallel(config, out, resume, folder))
        if checkpoint is None:
            return stored_result(out) if is_first_rank() else None
        start = Path(checkpoint) if checkpoint else None
        on_stage = progress if progress is not None and is_first_rank() else _no_progress
        run = _train_steps(config, out, start, on_stage)
        # only rank 0 scores, and the others do not wait: that could exceed the timeout
        return _save_result(run) if is_first_rank() else None


def _no_progress(stage: str, done: int, of: int) -> None:
    """Ignore the progress."""


def _prepare_parallel(
    config: TrainConfig, out: Path, resume: bool, folder: ExitStack
) -> str | None:
    """Check the run and fetch its data for all processes; return the path of its checkpoint.

    The path is empty without a checkpoint, and None if the run has ended. The exit stack `folder`
    keeps the folder of the run locked.
    """
    rows_per_process(config.optim)
    checkpoint = folder.enter_context(run_folder(config, out, resume))
    if resume and stored_result(out) is not None:
        return None
    task_of(config).data(config)
    return "" if checkpoint is None else str(checkpoint)


class _TrainedRun(NamedTuple):
    """A trained model with task, data, times and history of its run."""

    config: TrainConfig
    out: Path
    task: Task
    data: TaskData
    model: nn.Module
    times: tuple[float, float]
    resumed_from: int
    history: list[dict[str, Any]]
    on_stage: Report


def _train_steps(
    config: TrainConfig,
    out: Path,
    checkpoint: Path | None,
    on_stage: Report,
    watch: Watch | None = None,
) -> _TrainedRun:
    """Load the data, build the model and run the remaining steps."""
    task = task_of(config)
    on_stage("data", 0, 1)
    data = task.data(config)
    set_seed(config.seed)
    model = task.model(config)
    run_on_first_rank(lambda: _write_config(config, out))
    selection = _BestModel(config, out, task, data) if config.select_every else None
    on_step = _step_callback(model, on_stage, watch, selection)
    trainer = RoutingTrainer(config, model, training_arguments(config, out), data.train, on_step)
    if (
        moe_layers(model) and not dist.is_initialized()
    ):  # measures one process's tokens; Soft MoE has no choices
        monitor_trainer(trainer, every=config.log_every)
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    with no_loading_bars(), naming_full_disk(out):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    times = time.perf_counter() - wall_start, time.process_time() - cpu_start
    if selection is not None:
        selection.load_best_(model)
    start, history = checkpoint_step(checkpoint), trainer.state.log_history
    return _TrainedRun(config, out, task, data, model, times, start, history, on_stage)


class _BestModel:
    """Stores the weights of the best step, by the task's score on held-out training data.

    Weights and step are stored in the folder of the run, so that a resumed run continues with them.
    """

    def __init__(self, config: TrainConfig, out: Path, task: Any, data: TaskData) -> None:
        self.every, self.steps, self.folder = config.select_every, config.optim.steps, out / "best"
        require(hasattr(task, "selection_score"), f"the task {config.task!r} selects no model")
        require(not dist.is_initialized(), "a model is selected by one process alone")
        self.task, self.data = task, data

    def score_if_due(self, model: nn.Module, step: int) -> None:
        """Score the model every `every` steps, and store it if it is the best so far."""
        if step % self.every and step != self.steps:
            return
        with evaluation_mode(model):
            score = self.task.selection_score(model, self.data)
        path = self.folder / "best.json"
        if not path.is_file() or score > read_json(path)["score"]:
            save_weights(model, self.folder)
            write_json(path, {"step": step, "score": score})

    def load_best_(self, model: nn.Module) -> None:
        """Load the weights of the best step into the model."""
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        model.load_state_dict(weights, strict=False)  # tied weights are stored once


def _write_config(config: TrainConfig, out: Path) -> None:
    """Write the configuration of a new run; a resumed run has it already."""
    path, fields = out / "config.json", config.to_dict()
    with suppress(CheckpointError):
        if read_json(path) == fields:
            return
    write_json(path, fields, replace=False)


def _save_result(run: _TrainedRun) -> TrainingResult:
    """Score and save a trained model, and write and return the result."""
    config, out, model = run.config, run.out, run.model.eval()
    run.on_stage("score", 0, 1)
    result = TrainingResult(
        config.to_dict(),
        parameter_count(model),
        run.data.about,
        run.task.evaluate(model, run.data, config),
        *run.times,
        run.resumed_from,
        tuple(run.history),
        str(out),
    )
    with no_loading_bars():
        run.task.save(model, run.data, out / "model")
    result.to_json(out / "result.json")
    return result


def stored_result(out: Path) -> TrainingResult | None:
    """Return the result of a completed run; None if the run is not complete."""
    path = out / "result.json"
    if not path.is_file():
        return None
    return replace(from_plain(TrainingResult, read_json(path)), folder=str(out))


def _step_callback(
    model: nn.Module, on_stage: Report, watch: Watch | None, selection: _BestModel | None = None
) -> Callable[[int, int], None]:
    """Return a callback that reports each step, selects the best model and calls `watch`."""

    def after_step(done: int, of: int) -> None:
        on_stage("train", done, of)
        if selection is not None:
            selection.score_if_due(model, done)
        if watch is not None:
            watch(model, done)

    return after_step


def training_plan(config: TrainConfig, progress: Report | None = None) -> TrainingPlan:
    """Return size, data and estimated time of a run, from the time of a few passes."""
    on_stage = progress or _no_progress
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
    """Estimate the seconds of a step from the fastest of `TIMED_PASSES` micro-batches."""
    micro = min(batch, 4)
    items = [data[i] for i in range(micro)]
    inputs = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    seconds = []
    for _ in range(TIMED_PASSES):
        wall_start = time.perf_counter()
        model.train()(**inputs).loss.backward()
        seconds.append(time.perf_counter() - wall_start)
        model.zero_grad()
    return min(seconds) * batch / micro


@contextmanager
def run_folder(config: TrainConfig, out: Path, resume: bool) -> Iterator[Path | None]:
    """Lock the folder of a run, and yield the checkpoint to start from (None for a new start).

    Raises if the folder holds another run, or another process writes to it. Removes the incomplete
    checkpoints of a killed run.
    """
    check_folder(out / "model")
    if resume:
        _check_same_run(config, out)
    with locked_folder(out):
        remove_leftovers(out / "config.json")
        if not resume:
            require(
                not any(out.iterdir()),
                f"{out} is not empty: a run begins in a new folder, or goes on with --resume",
            )
        for half in incomplete_checkpoints(out):
            shutil.rmtree(half, ignore_errors=True)
        yield last_checkpoint(out)


def _check_same_run(config: TrainConfig, out: Path) -> None:
    """Raise unless the folder holds a run of this configuration."""
    path = out / "config.json"
    require(
        path.is_file(), f"{out} holds no run to resume: config.json is missing", CheckpointError
    )
    stored_fields, fields = read_json(path), config.to_dict()
    differing = sorted(key for key in fields if stored_fields.get(key) != fields[key])
    require(
        stored_fields == fields,
        f"{out} holds another run: {differing or 'its fields'} differ from the recipe's",
        CheckpointError,
    )
