"""Checkpoints of a run on many ranks: each rank writes its own parts.

    checkpoint-<step>/
        parts/            model and moments, as safetensors of every rank (`parts`)
        state.json, ...   what is no tensor, written by rank 0 as one process does

No rank gathers more than its own, and a run may be resumed by any number of ranks: each reads what
it needs of the parts. One process makes whole files of them first (`make_whole`), which are those
that it would have written itself. A folder is renamed to its name when all of it is on the disk.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedConfig, TrainerControl, TrainerState

from tieline.core.errors import require
from tieline.core.processes import first_rank, is_first
from tieline.lab.training.checkpoint import (
    OPTIMIZER,
    WEIGHTS,
    CheckpointError,
    mark_complete,
    save_generators,
    save_groups,
)
from tieline.lab.training.config import TrainConfig
from tieline.lab.training.parallel.parts import part_shapes, read_parts, whole_parts, write_parts
from tieline.models.spread import class_name


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


def save_checkpoint(out: Path, step: int, config: TrainConfig, state: RunState) -> Path:
    """Write `checkpoint-<step>` and remove all but the newest two; every rank must call.

    Args:
        out: folder of the run, which all ranks see.
        step: steps done.
        config: the run.
        state: the state to keep.
    """
    target, half = out / f"checkpoint-{step}", out / f".checkpoint-{step}.partial"

    def begin() -> None:
        shutil.rmtree(half, ignore_errors=True)
        (half / PARTS).mkdir(parents=True)

    def finish() -> None:
        save_groups(half, state.optimizer, state.scheduler, dict(state.gates))
        _save_configuration(state.model, half)
        save_generators(half, 0)
        _trainer_state(step, config, state).save_to_json(str(half / "trainer_state.json"))
        mark_complete(half, step)
        shutil.rmtree(target, ignore_errors=True)
        half.rename(target)
        _remove_old(out)

    first_rank(begin)
    write_parts(half / PARTS, named_tensors(state.model, state.optimizer))
    first_rank(finish)
    return target


def _save_configuration(model: Any, folder: Path) -> None:
    """Write what describes a model of transformers, as its `save_pretrained` does."""
    config = getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        config.architectures, config.dtype = [class_name(model)], model.dtype
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)


PARTS = "parts"
MODEL, MOMENTS = "model.", "optimizer."


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return weights, tied ones once, and moments, by names that do not depend on the ranks."""
    same = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict().items():
        if same.get(name, -1) not in seen:
            weights[MODEL + name] = value.detach()
        seen.add(same.get(name, id(value)))
    moments = {
        f"{MOMENTS}{number}.{name}": value.detach()
        for number, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }
    return weights | moments


def is_cut(checkpoint: Path) -> bool:
    """Return whether a checkpoint holds parts of many ranks and no whole files."""
    return (checkpoint / PARTS).is_dir() and not (checkpoint / WEIGHTS).is_file()


def load_cut(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read this rank's weights and moments from parts; every rank must call."""
    shapes = part_shapes(checkpoint / PARTS)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key in (key for key in shapes if key.startswith(MOMENTS)):
        number, _, name = key.removeprefix(MOMENTS).partition(".")
        known = number.isdigit() and int(number) < len(parameters)
        require(known, f"{checkpoint}: moments of {key!r} are of no parameter", CheckpointError)
        like = parameters[int(number)]
        fresh = torch.zeros_like(like) if shapes[key] or not like.shape else torch.zeros(())
        optimizer.state[like][name] = fresh
    own = named_tensors(model, optimizer)
    foreign = sorted(shapes.keys() - own.keys())
    require(not foreign, f"{checkpoint} does not fit the model: {foreign[:3]}", CheckpointError)
    with torch.no_grad():
        read_parts(checkpoint / PARTS, own)


def make_whole(checkpoint: Path | None) -> None:
    """Add the whole files of one process to a checkpoint of parts, in one process.

    They have other names until they are complete.
    """
    if checkpoint is None or not is_cut(checkpoint):
        return
    found = whole_parts(checkpoint / PARTS)
    for prefix, name in (
        (MOMENTS, OPTIMIZER),
        (MODEL, WEIGHTS),
    ):  # weights last: they are looked for
        tensors = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
        half = checkpoint / f".{name}.partial"
        save_file(tensors, half, {"format": "pt"})
        half.rename(checkpoint / name)


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


def _remove_old(out: Path) -> None:
    """Remove all checkpoints but the newest, and what killed runs left half-written."""
    for path in out.glob(".checkpoint-*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    steps = sorted(int(path.name.split("-")[1]) for path in out.glob("checkpoint-[0-9]*"))
    for step in steps[:-KEPT]:
        shutil.rmtree(out / f"checkpoint-{step}", ignore_errors=True)
