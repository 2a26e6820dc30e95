"""Checkpoints in safetensors and JSON: no pickle is written or read.

model.safetensors       weights
optimizer.safetensors   moments and step counts, "<parameter number>.<name>"
state.json              groups of the optimiser, scheduler, gate schedule
rng.safetensors         generators of torch; those of Python and NumPy as its metadata
complete.json           written last: a checkpoint without it is incomplete and is ignored
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tieline.core.errors import TielineError, require
from tieline.core.records import write_json

WEIGHTS, OPTIMIZER, GENERATORS = "model.safetensors", "optimizer.safetensors", "rng.safetensors"
STATE, COMPLETE = "state.json", "complete.json"
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


class CheckpointError(TielineError):
    """A checkpoint is malformed or belongs to another run."""


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or malformed one raises `CheckpointError`."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run; None if there is none."""
    complete = []
    for path in folder.glob("checkpoint-*"):
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match and (path / COMPLETE).is_file():
            complete.append((int(match[1]), path))
    return max(complete)[1] if complete else None


def incomplete_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run that were not completely written."""
    folders = [path for path in folder.glob("checkpoint-*") if CHECKPOINT_NAME.fullmatch(path.name)]
    return [path for path in folders if not (path / COMPLETE).is_file()]


def checkpoint_step(checkpoint: Path | None) -> int:
    """Return the step in a checkpoint's name; 0 for None."""
    return int(checkpoint.name.split("-")[1]) if checkpoint else 0


def mark_complete(folder: Path, step: int) -> None:
    """Mark a checkpoint as completely written."""
    write_json(folder / COMPLETE, {"step": step})


def save_weights(model: torch.nn.Module, folder: Path) -> None:
    """Write the weights of a model to one file, tied weights once."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[int, str] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if names.setdefault(value.data_ptr(), name) == name:
            weights[name] = value.contiguous()
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def save_optimizer(folder: Path, optimizer: Any, scheduler: Any, gates: dict[str, float]) -> None:
    """Write the state of optimiser, scheduler and gate schedule."""
    state = optimizer.state_dict()
    tensors = {
        f"{number}.{name}": value.detach().contiguous()
        for number, entries in state["state"].items()
        for name, value in entries.items()
    }
    save_file(tensors, folder / OPTIMIZER)
    groups = {"groups": state["param_groups"], "scheduler": scheduler.state_dict(), "gates": gates}
    write_json(folder / STATE, groups)


def load_optimizer(folder: Path, optimizer: Any, scheduler: Any) -> dict[str, float]:
    """Restore optimiser and scheduler from `save_optimizer`; return the gate schedule's state."""
    stored_state = read_json(folder / STATE)
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in _read_tensors(folder / OPTIMIZER)[0].items():
        number, _, name = key.partition(".")
        require(number.isdigit(), f"{folder / OPTIMIZER}: unknown entry {key!r}", CheckpointError)
        tensors.setdefault(int(number), {})[name] = value
    _check_optimizer_groups(folder, optimizer, stored_state, tensors)
    groups = [group | {"betas": tuple(group["betas"])} for group in stored_state["groups"]]
    optimizer.load_state_dict({"state": tensors, "param_groups": groups})
    scheduler.load_state_dict(stored_state["scheduler"])
    return stored_state["gates"]


def _check_optimizer_groups(
    folder: Path, optimizer: Any, stored_state: Any, tensors: dict[int, Any]
) -> None:
    """Raise unless stored groups and moments fit the optimiser's parameters."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    stored_sizes = [len(group["params"]) for group in stored_state.get("groups", ())]
    require(
        sizes == stored_sizes and set(stored_state) == {"groups", "scheduler", "gates"},
        f"{folder} keeps groups of {stored_sizes} parameters, the run has {sizes}",
        CheckpointError,
    )
    shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    for number, entries in tensors.items():
        require(
            number < len(shapes)
            and all(tuple(v.shape) in ((), shapes[number]) for v in entries.values()),
            f"{folder / OPTIMIZER}: moments of parameter {number} do not fit",
            CheckpointError,
        )


def save_generators(folder: Path) -> None:
    """Write the states of all random generators of this process."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    kind, keys, *others = np.random.get_state()  # noqa: NPY002, the global one is what others draw from
    plain = {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([kind, np.asarray(keys).tolist(), *others]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / GENERATORS, plain)


def load_generators(folder: Path) -> None:
    """Restore the states written by `save_generators`."""
    tensors, plain = _read_tensors(folder / GENERATORS)
    version, internal, gauss = json.loads(plain["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *others = json.loads(plain["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *others))  # noqa: NPY002
    torch.set_rng_state(tensors.pop("cpu"))
    if tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([tensors[f"cuda{i}"] for i in range(len(tensors))])


def _read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors and metadata of a safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem
