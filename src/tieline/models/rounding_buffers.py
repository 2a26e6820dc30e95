"""Round tensors piece by piece or in place, into memory that is reused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tieline.models.number_formats import Rounding

PIECE = 1 << 18
"""Numbers that are rounded at a time, so that they stay in the processor's cache."""
POOLED = 16 << 20
"""Bytes of a weight from which its memory is used again."""


class MemoryLayout(NamedTuple):
    """Shape, strides and type of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes of its numbers."""
        return self.shape.numel() * self.dtype.itemsize


Allocate = Callable[[MemoryLayout], Tensor]
"""Returns memory for a tensor of a layout."""


class RoundingBuffers:
    """Reuses the memory of rounded weights for later ones of the same shape."""

    def __init__(self) -> None:
        """Start without memory."""
        self._free: dict[MemoryLayout, list[Tensor]] = {}

    @contextmanager
    def borrow(self) -> Iterator[Allocate]:
        """Lend memory until the block ends, and drop what no large weight used meanwhile."""
        lent: dict[MemoryLayout, list[Tensor]] = {}

        def allocate(layout: MemoryLayout) -> Tensor:
            free = self._free.get(layout)
            buffer = free.pop() if free else allocate_buffer(layout)
            if layout.size >= POOLED:
                lent.setdefault(layout, []).append(buffer)
            return buffer

        yield allocate
        self._free = lent or self._free


def allocate_buffer(layout: MemoryLayout) -> Tensor:
    """Return new memory of a layout on the CPU."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu")


@lru_cache(maxsize=4096)
def rounded_layout(rounding: Rounding, layout: MemoryLayout, axis: int) -> MemoryLayout:
    """Return the layout of what a rounding returns for a tensor of a layout.

    Asked once of torch's kernels on the meta device, which are Python and take milliseconds.
    """
    shape, stride, dtype = layout
    with torch._C.DisableTorchFunction():
        values = torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
        result = rounding(values, axis)
    return MemoryLayout(result.shape, result.stride(), result.dtype)


def rounded_in_pieces(
    values: Tensor, rounding: Rounding, axis: int = -1, allocate: Allocate = allocate_buffer
) -> Tensor:
    """Round piece by piece; the result has the strides that `rounding` itself returns.

    Args:
        values: weights or activations; rows along the first axis are rounded by themselves.
        rounding: the grid.
        axis: the axis that a product sums over.
        allocate: gives memory for the result; by default new memory.
    """
    if values.numel() <= PIECE or values.device.type != "cpu" or values.requires_grad:
        return rounding(values, axis)
    layout = MemoryLayout(values.shape, values.stride(), values.dtype)
    result = allocate(rounded_layout(rounding, layout, axis))
    source, target = values, result
    if values.ndim > 2 and axis == -1 and values.is_contiguous():
        source, target = values.flatten(0, -2), result.view(-1, result.shape[-1])
    for piece, into in zip(_pieces(source), _pieces(target), strict=True):
        rounding.write(piece, into, axis)
    return result


def round_in_place(values: Tensor, rounding: Rounding) -> None:
    """Round numbers where they are, piece by piece, to a grid without scales."""
    for piece in _pieces(values.view(-1) if values.is_contiguous() else values):
        rounding.write(piece, piece)


def _pieces(values: Tensor) -> tuple[Tensor, ...]:
    """Views of some rows each that fit the processor's cache."""
    if values.numel() <= PIECE:
        return (values,)
    return values.split(max(1, PIECE * values.shape[0] // values.numel()))
