"""Tensors of many ranks in one folder: each rank writes and reads its own parts.

    write_parts(folder, tensors)     on every rank; names are the same everywhere
    read_parts(folder, tensors)      into tensors that may be cut otherwise, on any number of ranks
    part_shapes(folder)              name → shape of the whole tensor

`torch.distributed.checkpoint` plans who writes what and reads only what a rank needs; its Hugging
Face storage writes safetensors, whose headers say where each part belongs. Its usual storage, which
is not used here, keeps that in a pickle. A file is made in memory before it is written, so the
tensors of a rank go to several files of about 1/16 of them each: that, or one tensor, is all the
memory that writing takes.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tieline.core.errors import require
from tieline.lab.training.checkpoint import CheckpointError

FILES = 16
"""About how many files a rank writes."""


def write_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's parts of all tensors; every rank must call, with the same names.

    Args:
        folder: an empty folder that all ranks see.
        tensors: name → tensor, a `DTensor` where ranks have parts of it; others are written once.
    """
    places = _files(tensors)
    writer = HuggingFaceStorageWriter(str(folder), places, save_distributed=True)
    with _named(folder, "written"):
        save(dict(tensors), storage_writer=writer)


def read_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors in place, each rank its own parts; all ranks must call.

    Args:
        folder: of `write_parts`, from any number of ranks.
        tensors: some or all of the names; shapes of the whole must agree.
    """
    known = part_shapes(folder)
    for name, tensor in tensors.items():
        require(name in known, f"{folder} has no {name!r}", CheckpointError)
        fits = tuple(tensor.shape) == known[name]
        wrong = f"{folder}: {name!r} has the shape {known[name]}, not {tuple(tensor.shape)}"
        require(fits, wrong, CheckpointError)
    with _named(folder, "read"):
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))


def part_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the names in a folder of parts, with the shapes of the whole tensors."""
    with _named(folder, "read"):
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: tuple(facts.size)
        for name, facts in found.items()
        if isinstance(facts, TensorStorageMetadata)
    }


def whole_parts(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder, whole, in one process."""
    with _named(folder, "read"):
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in found.items()
        if isinstance(facts, TensorStorageMetadata)
    }
    with _named(folder, "read"):
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Number of the file of each tensor: consecutive ones, about 1/16 of the bytes in each."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    most = max(1, sum(sizes.values()) // FILES)
    places: dict[str, int] = {}
    number, filled = 1, 0
    for name, size in sizes.items():
        if filled and filled + size > most:
            number, filled = number + 1, 0
        places[name] = number
        filled += size
    return places


@contextmanager
def _named(folder: Path, done: str) -> Iterator[None]:
    """Raise `CheckpointError` for whatever the library raises, and hide its advice."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointError:
        raise
    except Exception as problem:
        words = str(problem).strip().splitlines()
        why = next((line for line in reversed(words) if "Error" in line), words[0] if words else "")
        raise CheckpointError(f"{folder} cannot be {done}: {why}") from problem
