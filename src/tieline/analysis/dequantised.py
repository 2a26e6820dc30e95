"""A quantised model of an engine as a float32 model of transformers: what does the format cost?

Between a model and its quantised copy in an engine lie two steps: the weights are rounded to the
format, and the engine computes with them in its own way. The same weights, dequantised and run by
transformers in float32, stand between the two:

    original → dequantised    what the format costs
    dequantised → engine      what the engine adds: its kernels, rounded activations, or a bug

`dequantised_model` builds the model in the middle from the tensors that the engine reads.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from tieline.core.errors import TraceError, require
from tieline.engines import dequantised

LARGEST_ERROR = 0.7
"""Relative error of a tensor beyond which it is another tensor, not a rounded one."""
MOST_PARAMETERS = 4_000_000_000
"""Largest model that is built anew: it takes 12 bytes per parameter of disk and memory."""
INDEX = "model.safetensors.index.json"


class Dequantised(NamedTuple):
    """A model with dequantised weights.

    Attributes:
        model: the model, in float32.
        bits: bits per weight of the quantised form; None if unknown.
        mismatched: tensors that are not those of the original, with their relative error
            |w' - w| / |w|; it is 1.6 for two exchanged experts of the demo model.
    """

    model: nn.Module
    bits: float | None
    mismatched: tuple[tuple[str, float], ...]


def dequantised_model(
    model: nn.Module, engine: str, quantised: str, python: str | Path | None = None
) -> Dequantised:
    """Return a copy of a model with the weights of its quantised form.

    Args:
        model: the original, a model of transformers.
        engine: the engine that reads the quantised form.
        quantised: its file or folder.
        python: the engine's Python.
    """
    original: Any = model
    with tempfile.TemporaryDirectory(prefix="tieline-dequantised-") as name:
        folder = Path(name)
        original.save_pretrained(folder)
        shapes = _stored_shapes(folder)
        arrays, facts = dequantised(quantised, engine, sorted(shapes), python)
        for key, array in arrays.items():
            fits = tuple(array.shape) == shapes[key]
            message = f"{quantised}: {key} is {tuple(array.shape)}, the model has {shapes[key]}"
            require(fits, f"{message}: it is of another model", TraceError)
        mismatched = _mismatched(folder, arrays)
        for old in (*folder.glob("*.safetensors"), folder / INDEX):
            old.unlink(missing_ok=True)
        tensors = {key: torch.from_numpy(array).contiguous() for key, array in arrays.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        copy = type(original).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    bits = facts.get("bits")
    bits_per_weight = float(bits) if isinstance(bits, int | float) else None
    return Dequantised(copy.eval(), bits_per_weight, mismatched)


def _mismatched(folder: Path, arrays: Mapping[str, np.ndarray]) -> tuple[tuple[str, float], ...]:
    """Tensors whose relative error no format explains, the largest error first."""
    errors: dict[str, float] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            for key in set(stored.keys()) & set(arrays):
                stored_tensor = stored.get_tensor(key).double()
                error = (
                    torch.from_numpy(arrays[key]).double() - stored_tensor
                ).norm() / stored_tensor.norm()
                errors[key] = float(error)
    odd = {key: error for key, error in errors.items() if not error <= LARGEST_ERROR}
    return tuple(sorted(odd.items(), key=lambda pair: -pair[1]))


def can_dequantise(model: nn.Module) -> bool:
    """Whether a model can be saved and is small enough to be rebuilt."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return count <= MOST_PARAMETERS and hasattr(model, "save_pretrained")


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a checkpoint by name."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        file_names = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
        files = [folder / name for name in sorted(set(file_names))]
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as stored:
            shapes |= {key: tuple(stored.get_slice(key).get_shape()) for key in stored.keys()}  # noqa: SIM118
    return shapes
