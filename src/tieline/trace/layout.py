"""The shape and type of every tensor of a layer's record, as a table.

    axis        size
    tokens      T, common to all layers
    ranks       C, k <= C <= E
    k           experts chosen
    experts     E
    epsilons    points of the ε grid
    width       width of the router's input

The same table checks a record in memory and the header of a file.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from tieline.errors import TraceError

__all__ = [
    "LAYER_TENSORS",
    "MOST_EXPERTS",
    "TOKEN_IDS",
    "TensorLayout",
    "check_tensor",
    "kind_of",
]

Kind = Literal["integers", "floating-point numbers", "neither"]
MOST_EXPERTS = 1 << 16
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class TensorLayout(NamedTuple):
    """What a tensor holds and how its axes are called."""

    kind: Kind
    axes: tuple[str, ...]


_INT, _FLOAT = "integers", "floating-point numbers"
LAYER_TENSORS: Mapping[str, TensorLayout] = {
    "experts": TensorLayout(_INT, ("tokens", "ranks")),
    "scores": TensorLayout(_FLOAT, ("tokens", "ranks")),
    "weights": TensorLayout(_FLOAT, ("tokens", "k")),
    "group_gap": TensorLayout(_FLOAT, ("tokens",)),
    "distance": TensorLayout(_FLOAT, ("tokens",)),
    "near": TensorLayout(_INT, ("tokens", "epsilons")),
    "bias": TensorLayout(_FLOAT, ("experts",)),
    "inputs": TensorLayout(_FLOAT, ("tokens", "width")),
}
TOKEN_IDS = TensorLayout(_INT, ("tokens",))


def kind_of(dtype: torch.dtype) -> Kind:
    """Whether a type holds integers, real numbers or neither (booleans, complex numbers)."""
    if dtype in INTS:
        return _INT
    return _FLOAT if dtype in FLOATS else "neither"


def check_tensor(
    name: str, layout: TensorLayout, kind: Kind, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> None:
    """Refuse a tensor of another kind or shape; an axis missing from `sizes` may have any size."""
    if kind != layout.kind:
        raise TraceError(f"{name} must hold {layout.kind}, got {kind}")
    fits = len(shape) == len(layout.axes) and all(
        sizes.get(axis, size) == size for axis, size in zip(layout.axes, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(f"{axis}={sizes.get(axis, 'any')}" for axis in layout.axes)
        raise TraceError(f"{name} must have shape ({wanted}), got {shape}")
