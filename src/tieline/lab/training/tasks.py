"""The tasks that a run can train: each makes the data and the model, and scores the result.

    language     the decoder on a stream of tokens
    images       CIFAR-10
    domains      PACS with one domain left out
    sentences    GLUE

A new kind of run is a class with the methods of `Task` and an entry of `TASKS`.
"""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.utils.data import Dataset

from tieline.core.errors import require
from tieline.lab.training.config import TrainConfig
from tieline.lab.training.image_tasks import DomainTask, ImageTask
from tieline.lab.training.language import LanguageModelling
from tieline.lab.training.sentence_tasks import SentenceTask


@runtime_checkable
class TaskData(Protocol):
    """Data of a task; it may hold more, which only the task itself uses.

    Attributes:
        train: `steps · batch` items in training order, each a dictionary of tensors that the
            model's `forward` takes; the engine does not shuffle.
        about: where the data come from and how they are split.
    """

    @property
    def train(self) -> Dataset[Any]:
        """Training items, in order."""
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
