"""NaN and infinite weights, refused by name: of a whole model, or of a tensor as it is read."""

import torch
from torch import Tensor, nn

from tieline.core.errors import UnsupportedModelError

CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of weights that can hold NaN and be compared."""


def check_weights(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights, naming the first such tensor.

    One pass over the parameters, without a copy: a NaN anywhere makes minimum and maximum NaN.
    """
    wrong = {name: p for name, p in model.named_parameters() if not is_finite(p)}
    for name, tensor in wrong.items():
        others = f", and so are values of {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        raise UnsupportedModelError(_first_wrong(name, tensor) + others)


def check_tensor(name: str, tensor: Tensor) -> None:
    """Refuse a tensor with a NaN or an infinite number, by its name."""
    if not is_finite(tensor):
        raise UnsupportedModelError(_first_wrong(name, tensor))


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite; true for types that hold no NaN."""
    if tensor.is_meta or not tensor.numel() or tensor.dtype not in CHECKED:
        return True
    low, high = torch.aminmax(tensor.detach())
    return bool(low.isfinite()) and bool(high.isfinite())


def _first_wrong(name: str, tensor: Tensor) -> str:
    bad = ~tensor.detach().isfinite()
    return (
        f"weight {name!r}: {int(bad.sum()):,} of {bad.numel():,} values are NaN or infinite, the "
        f"first at {bad.nonzero()[0].tolist()}"
    )
