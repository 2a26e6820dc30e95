"""Checkpoints of a run on many ranks: the files that one process would write.

The whole model and optimiser are gathered on rank 0, which writes them as `training.checkpoint`
and transformers' Trainer do: safetensors and JSON. So a run may go on with one process or another
number of ranks. (`torch.distributed.checkpoint` would write parts side by side, but its metadata is
a pickle.) A folder gets its name when all of it is on the disk.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState

from tieline.errors import require
from tieline.training.checkpoint import (
    CheckpointError,
    mark_complete,
    save_generators,
    save_optimizer,
)
from tieline.training.config import TrainConfig
from tieline.training.parallel.agree import first_rank
from tieline.training.parallel.whole import WholeOptimizer, whole_state

__all__ = ["RunState", "load_weights", "save_checkpoint", "whole_model"]

WEIGHTS = "model.safetensors"
KEPT = 2


@dataclass(frozen=True, eq=False)
class RunState:
    """All that changes while a run trains.

    Attributes:
        model: the model, spread or not.
        optimizer: of its parameters.
        scheduler: of the learning rates.
        gates: state of the gate schedule.
        history: what was logged.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    gates: Mapping[str, float]
    history: Sequence[Mapping[str, float]]


def save_checkpoint(
    out: Path, step: int, config: TrainConfig, state: RunState, fresh: Callable[[], nn.Module]
) -> Path:
    """Write `checkpoint-<step>` and remove all but the newest two; every rank must call.

    Args:
        out: folder of the run.
        step: steps done.
        config: the run.
        state: what to keep.
        fresh: makes a model that is not spread, to write from.
    """
    target = out / f"checkpoint-{step}"
    model = whole_model(state.model, fresh)
    optimizer = _Stated(WholeOptimizer(state.optimizer).state_dict())

    def write() -> str:
        assert model is not None
        partial = out / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _save_weights(model, partial)
        save_optimizer(partial, optimizer, state.scheduler, dict(state.gates))
        save_generators(partial, 0)
        _trainer_state(step, config, state).save_to_json(str(partial / "trainer_state.json"))
        mark_complete(partial, step)
        _into_place(partial, target)
        return str(target)

    return Path(first_rank(write))


def whole_model(model: nn.Module, fresh: Callable[[], nn.Module]) -> nn.Module | None:
    """The model in one piece, on rank 0; None on others, which must call too."""
    weights = whole_state(model)
    if not weights:
        return None
    with torch.random.fork_rng():
        plain = fresh()
    plain.load_state_dict(weights)
    return plain.train(model.training)


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Put the weights of a checkpoint into a model that is not spread."""
    path = checkpoint / WEIGHTS
    try:
        weights = load_file(path)
    except Exception as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem
    own = model.state_dict()
    loaded = {own[name].data_ptr() for name in weights if name in own}
    absent = [name for name in own if own[name].data_ptr() not in loaded]  # tied ones are there
    foreign = [name for name in weights if name not in own]
    wrong = [n for n in weights if n in own and weights[n].shape != own[n].shape]
    require(
        not (absent or foreign or wrong),
        f"{path} does not fit the model: {(absent or foreign or wrong)[:3]}",
        CheckpointError,
    )
    model.load_state_dict(weights, strict=False)


def _trainer_state(step: int, config: TrainConfig, state: RunState) -> TrainerState:
    """What the Trainer wants to know in order to go on."""
    optim = config.optim
    return TrainerState(
        global_step=step,
        max_steps=optim.steps,
        epoch=step / optim.steps,
        num_train_epochs=1,
        train_batch_size=optim.batch // optim.accumulate,
        logging_steps=config.log_every,
        save_steps=config.checkpoint_every,
        log_history=[dict(entry) for entry in state.history],
        stateful_callbacks={"TrainerControl": TrainerControl().state()},  # type: ignore[arg-type]
    )


class _Stated:
    """An optimiser of which only the state is known."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


def _save_weights(model: nn.Module, folder: Path) -> None:
    save = getattr(model, "save_pretrained", None)
    if callable(save):
        save(folder)
        return
    seen: dict[int, str] = {}
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if seen.setdefault(value.data_ptr(), name) == name:
            weights[name] = value.contiguous()
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def _into_place(partial: Path, target: Path) -> None:
    """Give the folder its name, and forget all but the newest."""
    _sync(partial)
    shutil.rmtree(target, ignore_errors=True)  # one that was cut short, or is written again
    partial.rename(target)
    _sync(target.parent)
    steps = sorted(int(p.name.split("-")[1]) for p in target.parent.glob("checkpoint-[0-9]*"))
    for step in steps[:-KEPT]:
        shutil.rmtree(target.parent / f"checkpoint-{step}", ignore_errors=True)


def _sync(folder: Path) -> None:
    """Make the files and names in a folder last through a power cut."""
    for path in (*folder.iterdir(), folder):
        if path.is_dir() and path != folder:
            continue
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
