"""Check the weights of a loaded model: as many numbers as its files hold, all of them finite."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from tieline.core.errors import UnsupportedModelError
from tieline.core.untrusted_input import most_numbers, room_for_numbers, stored_tensors

CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of weights that can hold NaN and be compared."""


def check_built(model: nn.Module, files: Iterable[str | Path], quantised: bool) -> None:
    """Refuse a model on the meta device that has more numbers than its files.

    Args:
        model: the model, before any memory is allocated for its weights.
        files: the files of its checkpoint.
        quantised: whether a byte of a file may hold several numbers.
    """
    stored = stored_tensors(map(Path, files))
    size = most_numbers(stored, quantised)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    built = {name: p for name, p in model.named_parameters() if name not in tied}
    needed = sum(parameter.numel() for parameter in built.values())
    if not stored or needed <= room_for_numbers(size):
        return
    name, largest = max(built.items(), key=lambda item: item[1].numel())
    raise UnsupportedModelError(
        f"config.json describes a model of {needed:,} numbers, and the files hold at most "
        f"{size:,}: the largest tensor would be {name!r} of shape {tuple(largest.shape)}"
    )


def check_finite_weights(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights, naming the first such tensor.

    One pass over the parameters, without a copy: a NaN anywhere makes minimum and maximum NaN.
    """
    wrong = {name: p for name, p in model.named_parameters() if not is_finite_tensor(p)}
    for name, tensor in wrong.items():
        others = f", and so are values of {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        raise UnsupportedModelError(_not_finite_message(name, tensor) + others)


def check_finite_tensor(name: str, tensor: Tensor) -> None:
    """Refuse a tensor with a NaN or an infinite number, by its name."""
    if not is_finite_tensor(tensor):
        raise UnsupportedModelError(_not_finite_message(name, tensor))


def is_finite_tensor(tensor: Tensor) -> bool:
    """Return whether all numbers are finite; true for types that hold no NaN."""
    if tensor.is_meta or not tensor.numel() or tensor.dtype not in CHECKED:
        return True
    low, high = torch.aminmax(tensor.detach())
    return bool(low.isfinite()) and bool(high.isfinite())


def _not_finite_message(name: str, tensor: Tensor) -> str:
    """How many values of a tensor are NaN or infinite, and where the first is."""
    bad = ~tensor.detach().isfinite()
    return (
        f"weight {name!r}: {int(bad.sum()):,} of {bad.numel():,} values are NaN or infinite, the "
        f"first at {bad.nonzero()[0].tolist()}"
    )
