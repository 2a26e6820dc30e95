"""Whether two records are the same, field by field and bit by bit."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

__all__ = ["identical"]


def identical(first: object, second: object) -> bool:
    """Whether two traces, summaries or parts of them hold the same values of the same types.

    Tensors must agree in type, shape and every bit, so that a NaN equals itself and 0 is not -0.
    Layers in memory equal the same layers on disk.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _same_tensor(first, second)
    if isinstance(first, str | bytes):
        return first == second
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            identical(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, Sequence) and isinstance(second, Sequence):
        return len(first) == len(second) and all(map(identical, first, second))
    if is_dataclass(first) and not isinstance(first, type):
        return type(first) is type(second) and all(
            identical(getattr(first, part.name), getattr(second, part.name))
            for part in fields(first)
        )
    return type(first) is type(second) and first == second


def _same_tensor(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    one, other = (value.contiguous().flatten().view(torch.uint8) for value in (first, second))
    return torch.equal(one, other)
