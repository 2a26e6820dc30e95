"""Run a recipe: prepare, train, checkpoint, resume, score, keep the result.

    result = run_training(recipe_config("enwik8-small-smooth1"), Path("runs/smooth1"))

The folder of a run holds `config.json`, checkpoints, `model/` (the trained model as transformers
saves it) and `result.json`. Weights, data order and all random numbers depend on the seed alone and
are restored exactly, so a run that was killed and resumed ends with the same loss.

A task makes the data and the model, and scores the result:

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
    first_rank,
    is_first_rank,
    join_processes,
    naming_lost_ranks,
)
from tieline.core.errors import require
from tieline.core.files import alone_in, check_folder, remove_rests, space_on
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
    RESUME,
    RoutingTrainer,
    rows_per_process,
    training_arguments,
)
from tieline.models.saved_models import no_loading_bars

Report = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and its whole amount."""

Watch = Callable[[nn.Module, int], None]
"""Called with the model after a step, and the number of steps done."""

TIMED = 3


@runtime_checkable
class TaskData(Protocol):
    """Data of a task; it may hold more, which only the task itself uses."""

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
    """How one kind of run is prepared and scored."""

    def data(self, config: TrainConfig) -> TaskData:
        """Load the data, after fetching them if necessary."""
        ...

    def model(self, config: TrainConfig) -> nn.Module:
        """Make a new model whose `forward(**items)` returns an output with a `loss`."""
        ...

    def evaluate(self, model: nn.Module, data: Any, config: TrainConfig) -> dict[str, Any]:
        """Score the trained model; returns JSON values."""
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
    with joined, naming_lost_ranks(RESUME), ExitStack() as folder:
        checkpoint = first_rank(lambda: _prepare_parallel(config, out, resume, folder))
        if checkpoint is None:
            return stored_result(out) if is_first_rank() else None
        start = Path(checkpoint) if checkpoint else None
        on_stage = progress if progress is not None and is_first_rank() else _no_progress
        trained = _train_steps(config, out, start, on_stage)
        # only rank 0 scores, and the others do not wait: that could exceed the timeout
        return _save_result(trained) if is_first_rank() else None


def _no_progress(stage: str, done: int, of: int) -> None:
    """Report no progress."""


def _prepare_parallel(
    config: TrainConfig, out: Path, resume: bool, folder: ExitStack
) -> str | None:
    """Check the run and fetch its data for all processes; returns its checkpoint, None at the end.

    A run without a checkpoint has the empty one. `folder` holds the folder of the run.
    """
    rows_per_process(config.optim)
    checkpoint = folder.enter_context(run_folder(config, out, resume))
    if resume and stored_result(out) is not None:
        return None
    task_of(config).data(config)
    return "" if checkpoint is None else str(checkpoint)


class _Trained(NamedTuple):
    """A trained model with its task and data, and how it was trained."""

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
) -> _Trained:
    """Load the data, make the model and run all steps that are left."""
    task = task_of(config)
    on_stage("data", 0, 1)
    data = task.data(config)
    set_seed(config.seed)
    model = task.model(config)
    first_rank(lambda: _write_config(config, out))
    selection = _Selection(config, out, task, data) if config.select_every else None
    on_step = _after_step(model, on_stage, watch, selection)
    trainer = RoutingTrainer(config, model, training_arguments(config, out), data.train, on_step)
    if (
        moe_layers(model) and not dist.is_initialized()
    ):  # of one process's tokens; Soft MoE has none
        monitor_trainer(trainer, every=config.log_every)
    began, worked = time.perf_counter(), time.process_time()
    with no_loading_bars(), space_on(out):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    times = time.perf_counter() - began, time.process_time() - worked
    if selection is not None:
        selection.load_best_(model)
    start, history = checkpoint_step(checkpoint), trainer.state.log_history
    return _Trained(config, out, task, data, model, times, start, history, on_stage)


class _Selection:
    """Keeps the weights of the best step by the score of the task on held-out training data.

    The weights and the step are in the folder of the run, so that a resumed run has the same best.
    """

    def __init__(self, config: TrainConfig, out: Path, task: Any, data: TaskData) -> None:
        self.every, self.steps, self.folder = config.select_every, config.optim.steps, out / "best"
        require(hasattr(task, "selection_score"), f"the task {config.task!r} selects no model")
        require(not dist.is_initialized(), "a model is selected by one process alone")
        self.task, self.data = task, data

    def look(self, model: nn.Module, step: int) -> None:
        """Score the model if it is time, and keep it if it is better than all before."""
        if step % self.every and step != self.steps:
            return
        training = model.training
        score = self.task.selection_score(model.eval(), self.data)
        model.train(training)
        path = self.folder / "best.json"
        if not path.is_file() or score > read_json(path)["score"]:
            save_weights(model, self.folder)
            write_json(path, {"step": step, "score": score})

    def load_best_(self, model: nn.Module) -> None:
        """Give the model the weights of the best step."""
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        model.load_state_dict(weights, strict=False)  # tied weights are stored once


def _write_config(config: TrainConfig, out: Path) -> None:
    """Write the configuration of a new run; that of a resumed one is there."""
    path, fields = out / "config.json", config.to_dict()
    with suppress(CheckpointError):
        if read_json(path) == fields:
            return
    write_json(path, fields, replace=False)


def _save_result(trained: _Trained) -> TrainingResult:
    """Score and save a trained model, and keep the result."""
    config, out, model = trained.config, trained.out, trained.model.eval()
    trained.on_stage("score", 0, 1)
    result = TrainingResult(
        config.to_dict(),
        parameter_count(model),
        trained.data.about,
        trained.task.evaluate(model, trained.data, config),
        *trained.times,
        trained.resumed_from,
        tuple(trained.history),
        str(out),
    )
    with no_loading_bars():
        trained.task.save(model, trained.data, out / "model")
    result.to_json(out / "result.json")
    return result


def stored_result(out: Path) -> TrainingResult | None:
    """Return the result of a run that has ended, None if it has not."""
    path = out / "result.json"
    if not path.is_file():
        return None
    return replace(from_plain(TrainingResult, read_json(path)), folder=str(out))


def _after_step(
    model: nn.Module, on_stage: Report, watch: Watch | None, selection: _Selection | None = None
) -> Callable[[int, int], None]:
    """A callback that reports each step and shows the model to `watch`."""

    def after_step(done: int, of: int) -> None:
        on_stage("train", done, of)
        if selection is not None:
            selection.look(model, done)
        if watch is not None:
            watch(model, done)

    return after_step


def training_plan(config: TrainConfig, progress: Report | None = None) -> TrainingPlan:
    """Return size, data and estimated time of a run; the time is measured on a few steps."""
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


@contextmanager
def run_folder(config: TrainConfig, out: Path, resume: bool) -> Iterator[Path | None]:
    """Hold the folder of a run alone, and yield the checkpoint to start from.

    Raises if the folder holds another run, or another process writes to it. Removes the incomplete
    checkpoints of a killed run.
    """
    check_folder(out / "model")
    if resume:
        _check_same_run(config, out)
    with alone_in(out):
        remove_rests(out / "config.json")
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
