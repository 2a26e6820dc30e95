"""Checkpoints of a run on many ranks: every rank writes and reads its own shards.

    checkpoint-<step>/
        shards/           weights and moments as safetensors of every rank
        state.json, ...   everything else, written by rank 0 in the format of one process

`torch.distributed.checkpoint` decides which rank writes what and reads only what a rank needs. Its
Hugging Face storage writes safetensors whose headers say where each shard belongs; its default
storage keeps that in a pickle and is not used. No rank gathers more than its own shards, and a run
may be resumed by any number of ranks, also from the checkpoint of one process, whose files hold
tensors of the same names. One process first merges the shards into those files (`consolidate`).
A folder is renamed to its final name when all of it is on the disk.

Weights have their names in the state dict, tied ones that of the first. Moments are called
"<parameter number>.<name>" as in `tieline.lab.training.checkpoint`.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedConfig, TrainerControl, TrainerState

from tieline.core.errors import require
from tieline.core.processes import first_rank
from tieline.lab.training.checkpoint import (
    OPTIMIZER,
    WEIGHTS,
    CheckpointError,
    mark_complete,
    save_generators,
    save_groups,
)
from tieline.lab.training.config import TrainConfig
from tieline.models.spread import class_name

SHARDS = "shards"
KEPT = 2  # newest checkpoints that are not removed
FILES = 16
"""About how many files a rank writes: a file is made in memory before it is written."""
GENERATORS = ("cpu", "cuda")  # prefixes of the names in rng-<rank>.safetensors


@dataclass(frozen=True, eq=False)
class TrainingState:
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


def save_checkpoint(out: Path, step: int, config: TrainConfig, state: TrainingState) -> Path:
    """Write `checkpoint-<step>` and remove all but the newest two; every rank must call.

    Args:
        out: folder of the run, which all ranks see.
        step: steps done.
        config: the run.
        state: the state to keep.
    """
    target, partial = out / f"checkpoint-{step}", out / f".checkpoint-{step}.partial"

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / SHARDS).mkdir(parents=True)

    def finish() -> None:
        save_groups(partial, state.optimizer, state.scheduler, dict(state.gates))
        _save_configuration(state.model, partial)
        save_generators(partial, 0)
        _trainer_state(step, config, state).save_to_json(str(partial / "trainer_state.json"))
        mark_complete(partial, step)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _remove_old(out)

    first_rank(begin)
    write_shards(partial / SHARDS, named_weights(state.model) | named_moments(state.optimizer))
    first_rank(finish)
    return target


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read this rank's weights and moments, of many ranks or of one; every rank must call."""
    folder = checkpoint / SHARDS if is_sharded(checkpoint) else checkpoint
    stored = {
        name: tuple(tensor.size)
        for name, tensor in _stored_tensors(folder).items()
        if not name.startswith(GENERATORS)
    }
    weights = named_weights(model)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key in stored.keys() - weights.keys():
        number, _, name = key.partition(".")
        if number.isdigit() and int(number) < len(parameters):
            parameter = parameters[int(number)]
            scalar = not stored[key] and parameter.ndim > 0
            optimizer.state[parameter][name] = (
                torch.zeros(()) if scalar else torch.zeros_like(parameter)
            )
    tensors = weights | named_moments(optimizer)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differing = sorted(name for name, _ in shapes.items() ^ stored.items())
    require(not differing, f"{folder} does not fit the model: {differing[:3]}", CheckpointError)
    with torch.no_grad():
        read_shards(folder, tensors)


def is_sharded(checkpoint: Path) -> bool:
    """Return whether a checkpoint holds the shards of many ranks and no consolidated files."""
    return (checkpoint / SHARDS).is_dir() and not (checkpoint / WEIGHTS).is_file()


def consolidate(checkpoint: Path | None) -> None:
    """Merge the shards of a checkpoint into the files of one process, in one process.

    The files have other names until they are complete.
    """
    if checkpoint is None or not is_sharded(checkpoint):
        return
    stored = _stored_tensors(checkpoint / SHARDS)
    tensors = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in stored.items()
    }
    read_shards(checkpoint / SHARDS, tensors, alone=True)
    moments = {name for name in tensors if name.partition(".")[0].isdigit()}
    # weights last: `is_sharded` looks for their file
    for file, names in ((OPTIMIZER, moments), (WEIGHTS, tensors.keys() - moments)):
        partial = checkpoint / f".{file}.partial"
        save_file({name: tensors[name] for name in sorted(names)}, partial, {"format": "pt"})
        partial.rename(checkpoint / file)


def whole_model(checkpoint: Path, make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model that is not spread with the weights of a sharded checkpoint.

    Args:
        checkpoint: from `save_checkpoint`.
        make: returns a model of the same shape; the random numbers it draws are restored.
    """
    with torch.random.fork_rng():
        model = make()
    folder = checkpoint / SHARDS if is_sharded(checkpoint) else checkpoint
    with torch.no_grad():
        read_shards(folder, named_weights(model), alone=True)
    return model


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict, tied ones once, by the name of the first."""
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    weights: dict[str, Tensor] = {}
    stored: set[int] = set()
    for name, value in model.state_dict().items():
        identity = parameters.get(name, id(value))
        if identity not in stored:
            weights[name] = value.detach()
        stored.add(identity)
    return weights


def named_moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of an optimiser's state as "<parameter number>.<name>"."""
    return {
        f"{number}.{name}": value.detach()
        for number, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's shards of all tensors; every rank must call, with the same names.

    Args:
        folder: an empty folder that all ranks see.
        tensors: name → tensor, a `DTensor` where ranks hold shards of it; others are written once.
    """
    writer = HuggingFaceStorageWriter(str(folder), _file_numbers(tensors), save_distributed=True)
    with _as_checkpoint_error(folder, "written"):
        save(dict(tensors), storage_writer=writer)


def read_shards(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool = False) -> None:
    """Fill tensors in place, each rank its own shards; all ranks must call.

    Args:
        folder: of `write_shards` from any number of ranks, or with safetensors of one process.
        tensors: some or all of the names; the global shapes must agree.
        alone: whether this process reads by itself.
    """
    with _as_checkpoint_error(folder, "read"):
        reader = HuggingFaceStorageReader(str(folder))
        load(dict(tensors), storage_reader=reader, no_dist=alone)


def _stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return names, global shapes and dtypes of the tensors in a folder."""
    with _as_checkpoint_error(folder, "read"):
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        n: tensor for n, tensor in metadata.items() if isinstance(tensor, TensorStorageMetadata)
    }


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Number the file of each tensor: consecutive ones, about 1/16 of the bytes in each."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    most = max(1, sum(sizes.values()) // FILES)
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, size in sizes.items():
        if filled and filled + size > most:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


@contextmanager
def _as_checkpoint_error(folder: Path, verb: str) -> Iterator[None]:
    """Raise `CheckpointError` for every error of the library, and hide its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as problem:
        lines = str(problem).strip().splitlines()
        why = next((line for line in reversed(lines) if "Error" in line), lines[0] if lines else "")
        raise CheckpointError(f"{folder} cannot be {verb}: {why}") from problem


def _save_configuration(model: Any, folder: Path) -> None:
    """Write the configuration of a model of transformers, as its `save_pretrained` does."""
    config = getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        config.architectures, config.dtype = [class_name(model)], model.dtype
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)


def _trainer_state(step: int, config: TrainConfig, state: TrainingState) -> TrainerState:
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
    """Remove all checkpoints but the newest, and the partial ones of killed runs."""
    for path in out.glob(".checkpoint-*.partial"):
        shutil.rmtree(path, ignore_errors=True)
    steps = sorted(int(path.name.split("-")[1]) for path in out.glob("checkpoint-[0-9]*"))
    for step in steps[:-KEPT]:
        shutil.rmtree(out / f"checkpoint-{step}", ignore_errors=True)
