"""What a run is about: a task makes the data and the model, and scores the result.

A task is an object with the three methods of `Task`; the registry is a dictionary. The engine knows
no more of it, so language, images and sentence pairs are trained by the same code.
"""

from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.utils.data import Dataset

from tieline.errors import require
from tieline.training.config import TrainConfig

__all__ = ["TASKS", "Task", "TaskData", "register_task", "task_of"]


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
