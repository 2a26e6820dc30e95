"""Checkpoints of a run on many ranks, written as one process would write them.

    whole_state         name → whole tensor, on rank 0
    WholeOptimizer      the state of an optimiser over parts, with whole tensors

The whole model and optimiser are gathered on rank 0 under the names and numbers that they have in
one process, and written as `training.checkpoint` and transformers' Trainer do. So a run may be
resumed by one process or by another number of ranks. (`torch.distributed.checkpoint` writes parts
side by side, but its metadata is a pickle.) A folder is renamed to its name when it is complete.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainerControl, TrainerState

from tieline.core.errors import require
from tieline.core.files import whole_folder
from tieline.training.checkpoint import (
    WEIGHTS,
    CheckpointError,
    mark_complete,
    save_generators,
    save_optimizer,
    save_weights,
)
from tieline.training.config import TrainConfig
from tieline.training.parallel.processes import first_rank, is_first


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with whole tensors on rank 0; empty on others, which must call too.

    Tensors are gathered one by one, so that other ranks never hold more than one of them.
    """
    return _gathered(model.state_dict())


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, cut like another tensor of its shape."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole.to(like.device)
    moved = whole.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


class WholeOptimizer:
    """The state of an optimiser with whole moments, in the form of `Optimizer.state_dict`.

    Args:
        optimizer: its state per parameter consists of tensors of its shape, or scalars.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on rank 0, without moments on others, which must call too."""
        state = self.optimizer.state_dict()
        moments = {number: _gathered(entries) for number, entries in state["state"].items()}
        return {"state": moments, "param_groups": state["param_groups"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut whole moments like the parameters and load them."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        moments = {
            number: {name: cut_like(whole, parameters[number]) for name, whole in entries.items()}
            for number, entries in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": moments})


def _gathered(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kept = {}
    for name, part in parts.items():
        whole = part.full_tensor() if isinstance(part, DTensor) else part
        if is_first():
            kept[name] = whole.detach().cpu()
    return kept


KEPT = 2


@dataclass(frozen=True, eq=False)
class RunState:
    """The changing state of a run.

    Attributes:
        model: the model, spread or not.
        optimizer: of its parameters.
        scheduler: of the learning rates.
        gates: state of the gate schedule.
        history: logged values.
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
        state: the state to keep.
        fresh: makes a model that is not spread.
    """
    target = out / f"checkpoint-{step}"
    model = whole_model(state.model, fresh)
    optimizer = _Stated(WholeOptimizer(state.optimizer).state_dict())

    def write() -> str:
        assert model is not None
        save = getattr(model, "save_pretrained", None) or partial(save_weights, model)
        with whole_folder(target, replace=True) as folder:
            save(folder)
            save_optimizer(folder, optimizer, state.scheduler, dict(state.gates))
            save_generators(folder, 0)
            _trainer_state(step, config, state).save_to_json(str(folder / "trainer_state.json"))
            mark_complete(folder, step)
        _remove_old(out)
        return str(target)

    return Path(first_rank(write))


def whole_model(model: nn.Module, fresh: Callable[[], nn.Module]) -> nn.Module | None:
    """Return the whole model on rank 0; None on others, which must call too."""
    weights = whole_state(model)
    if not weights:
        return None
    with torch.random.fork_rng():
        plain = fresh()
    plain.load_state_dict(weights)
    return plain.train(model.training)


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load the weights of a checkpoint into a model that is not spread."""
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
    """Return the state that the Trainer needs to resume."""
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
    """An optimiser reduced to its state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


def _remove_old(out: Path) -> None:
    """Remove all checkpoints but the newest, and what killed runs left half-written."""
    for path in out.glob(".checkpoint-*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    steps = sorted(int(path.name.split("-")[1]) for path in out.glob("checkpoint-[0-9]*"))
    for step in steps[:-KEPT]:
        shutil.rmtree(out / f"checkpoint-{step}", ignore_errors=True)
