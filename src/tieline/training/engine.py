"""What a run is about: a task makes the data and the model, and scores the result.

A task is an object with the three methods of `Task`; the registry is a dictionary. The engine knows
no more of it, so language, images and sentence pairs are trained by the same code.

Running a recipe: prepare, train, checkpoint, go on after a kill, score, keep the result.

    result = run(enwik8_small("smooth1"), Path("runs/smooth1"))
    result = run(enwik8_small("smooth1"), Path("runs/smooth1"), resume=True)   # after a kill

The folder of a run holds `config.json`, checkpoints, `model/` (the trained model as transformers
saves it), `result.json`. Weights, data order and every generator depend on the seed alone and are
restored exactly, so a run that was killed ends with the loss that it would have had.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import set_seed
from transformers.utils import logging

from tieline.analysis.monitor_trainer import monitor_trainer
from tieline.core.errors import require
from tieline.training.checkpoint import CheckpointError, last_checkpoint, read_json, write_json
from tieline.training.config import TrainConfig
from tieline.training.fetch import DataError
from tieline.training.trainer import RoutingTrainer, training_arguments

__all__ = [
    "TASKS",
    "Plan",
    "Task",
    "TaskData",
    "TrainResult",
    "Watch",
    "parameter_count",
    "plan",
    "prepare_folder",
    "register_task",
    "run",
    "task_of",
]


@runtime_checkable
class TaskData(Protocol):
    """Data of a task; what else it holds is between the task and itself.

    Attributes:
        train: `steps · batch` items in the order in which they are trained on, each a dictionary
            of tensors that the model's `forward` takes; the engine does not shuffle.
        about: where the data come from and how they are split.
    """

    @property
    def train(self) -> Dataset[Any]:
        """What is trained on, in order."""
        ...

    @property
    def about(self) -> str:
        """Where the data come from."""
        ...


@runtime_checkable
class Task(Protocol):
    """How one kind of run is prepared and scored."""

    def data(self, config: TrainConfig) -> TaskData:
        """The data, fetched if need be."""
        ...

    def model(self, config: TrainConfig) -> nn.Module:
        """A fresh model whose `forward(**items)` returns an output with a `loss`."""
        ...

    def evaluate(self, model: nn.Module, data: Any, config: TrainConfig) -> dict[str, Any]:
        """Scores of the trained model, as plain values."""
        ...

    def save(self, model: nn.Module, data: Any, folder: Any) -> None:
        """Write the trained model into a new folder."""
        ...


TASKS: dict[str, Task] = {}
"""Tasks by name."""


def register_task(name: str, task: Task) -> Task:
    """Make a task known; refuses a name that is taken."""
    require(name not in TASKS, f"the task {name!r} is registered already")
    TASKS[name] = task
    return task


def task_of(config: TrainConfig) -> Task:
    """The task of a run."""
    require(config.task in TASKS, f"the task {config.task!r} is not one of {sorted(TASKS)}")
    return TASKS[config.task]


Report = Callable[[str, int, int], None]
"""Told a stage, how much of it is done, and of how much."""

Watch = Callable[[nn.Module, int], None]
"""Shown the model after a step, and told how many are done."""

TIMED = 3


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        config: the run, in plain values.
        parameters: number of trained parameters.
        data: where the data come from.
        scores: what the task found.
        seconds: wall time of the training of this process.
        cpu_seconds: its processor time.
        resumed_from: step at which this process began.
        history: what was logged.
    """

    config: dict[str, Any]
    parameters: int
    data: str
    scores: dict[str, Any]
    seconds: float
    cpu_seconds: float
    resumed_from: int
    history: list[dict[str, float]]

    def to_dict(self) -> dict[str, Any]:
        """The record in plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """What a run would do.

    Attributes:
        config: the run, in plain values.
        parameters: number of parameters.
        data: where the data come from, or why they are absent.
        step_seconds: measured time of a step, None without data.
        seconds: estimate for the whole training.
    """

    config: dict[str, Any]
    parameters: int
    data: str
    step_seconds: float | None
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """The record in plain values."""
        return asdict(self)


def run(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Report | None = None,
    watch: Watch | None = None,
) -> TrainResult:
    """Train what `config` says, in the folder `out`, and score it.

    Args:
        config: a whole run, from a recipe.
        out: a new folder; with `resume`, that of the same run.
        resume: go on from the newest complete checkpoint, from the start if there is none.
        progress: told the stages.
        watch: shown the model after every step; it leaves weights and generators as they are.
    """
    tell = progress or (lambda stage, done, of: None)
    checkpoint = prepare_folder(config, out, resume)
    if resume and (out / "result.json").is_file():
        return TrainResult(**read_json(out / "result.json"))
    task = task_of(config)
    tell("data", 0, 1)
    data = task.data(config)
    set_seed(config.seed)
    model = task.model(config)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", config.to_dict())
    trainer = RoutingTrainer(
        config,
        model,
        training_arguments(config, out),
        data.train,
        _step_end(model, tell, watch),
    )
    monitor_trainer(trainer, every=config.log_every)
    began, worked = time.perf_counter(), time.process_time()
    with _no_bars():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    tell("score", 0, 1)
    model.eval()
    result = TrainResult(
        config=config.to_dict(),
        parameters=parameter_count(model),
        data=data.about,
        scores=task.evaluate(model, data, config),
        seconds=seconds,
        cpu_seconds=worked,
        resumed_from=int(checkpoint.name.split("-")[1]) if checkpoint else 0,
        history=trainer.state.log_history,
    )
    with _no_bars():
        task.save(model, data, out / "model")
    write_json(out / "result.json", result.to_dict())
    return result


def _step_end(model: nn.Module, tell: Report, watch: Watch | None) -> Callable[[int, int], None]:
    def ended(done: int, of: int) -> None:
        tell("train", done, of)
        if watch is not None:
            watch(model, done)

    return ended


@contextmanager
def _no_bars() -> Iterator[None]:
    """No bars of transformers for every file it writes; `progress` tells how far a run is."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def plan(config: TrainConfig, progress: Report | None = None) -> Plan:
    """What `run` would do: size, data, and an estimate of the time from some steps done here."""
    tell = progress or (lambda stage, done, of: None)
    tell("data", 0, 1)
    task = task_of(config)
    set_seed(config.seed)
    model = task.model(config)
    try:
        data = task.data(config)
    except DataError as problem:
        return Plan(config.to_dict(), parameter_count(model), f"absent: {problem}", None, None)
    tell("time", 0, 1)
    step = _step_seconds(model, data.train, config.optim.batch)
    return Plan(
        config.to_dict(), parameter_count(model), data.about, step, step * config.optim.steps
    )


def _step_seconds(model: nn.Module, data: Any, batch: int) -> float:
    """Time of forward and backward pass: the fastest of some micro-batches, times the batch."""
    micro = min(batch, 4)
    items = [data[i] for i in range(micro)]
    inputs = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    found = []
    for _ in range(TIMED):
        began = time.perf_counter()
        model.train()(**inputs).loss.backward()
        found.append(time.perf_counter() - began)
        model.zero_grad()
    return min(found) * batch / micro


def prepare_folder(config: TrainConfig, out: Path, resume: bool) -> Path | None:
    """The checkpoint to begin at; refuses the folder of another run."""
    known = out / "config.json"
    if not resume:
        require(
            not out.exists() or (out.is_dir() and not any(out.iterdir())),
            f"{out} is not empty: a run begins in a new folder, or goes on with --resume",
        )
        return None
    require(
        known.is_file(), f"{out} holds no run to resume: config.json is missing", CheckpointError
    )
    kept, wanted = read_json(known), config.to_dict()
    differing = sorted(key for key in wanted if kept.get(key) != wanted[key])
    require(
        kept == wanted,
        f"{out} holds another run: {differing or 'its fields'} differ from the recipe's",
        CheckpointError,
    )
    return last_checkpoint(out)


def parameter_count(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())
