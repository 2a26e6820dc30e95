"""Number formats as a matrix product sees them.

    name          weights                       activations          result of a product
    bf16, fp16    rounded                       rounded              rounded
    fp8_e4m3      scaled per output channel     scaled per token     not rounded
    fp8_e5m2      the same                      the same             not rounded
    int8          8 bits per output channel     8 bits per token     not rounded
    int8_group    8 bits per group of inputs    not rounded          not rounded
    int4          4 bits per output channel     not rounded          not rounded
    int4_group    4 bits per group of inputs    not rounded          not rounded

Rounding is to nearest, halves to even. A scale maps the largest |x| to the largest number of the
format, so nothing saturates; unscaled formats saturate at their largest number.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import require

GROUP_SIZE = 32
"""Inputs that share a scale in the formats per group."""


@dataclass(frozen=True)
class Rounding:
    """Round numbers to a grid.

    Attributes:
        dtype: floating-point type that the numbers are cast to; None for integers.
        levels: largest integer of a symmetric integer grid; None for casts.
        scaled: whether numbers that share a scale are first mapped to the range of the grid.
        group: how many neighbours along the contracted axis share a scale; None for all of them.
    """

    dtype: torch.dtype | None = None
    levels: int | None = None
    scaled: bool = False
    group: int | None = None

    def __call__(self, values: Float[Tensor, "*shape"], axis: int = -1) -> Float[Tensor, "*shape"]:
        """Return the nearest numbers of the grid, in the type of `values`.

        Args:
            values: weights or activations.
            axis: the axis that a product sums over, along which scales are shared.
        """
        if not self.scaled:
            return self._snapped(values)
        along = values.movedim(axis, -1)
        dim = along.shape[-1]
        size = min(self.group or dim, dim)
        padded = torch.nn.functional.pad(along, (0, -dim % size)).unflatten(-1, (-1, size))
        scale = padded.abs().amax(dim=-1, keepdim=True) / self._largest
        scale = scale.where(scale > 0, 1.0)
        rounded = self._snapped(padded / scale) * scale
        return rounded.flatten(-2)[..., :dim].movedim(-1, axis)

    @property
    def _largest(self) -> float:
        if self.dtype is None:
            return float(self.levels or 1)
        return torch.finfo(self.dtype).max

    def _snapped(self, values: Tensor) -> Tensor:
        if self.dtype is None:
            return values.round()
        return values.clamp(-self._largest, self._largest).to(self.dtype).to(values.dtype)


@dataclass(frozen=True)
class Format:
    """What a format does to the numbers of a matrix product.

    Attributes:
        name: its name in `FORMATS`.
        weights: how weights are rounded.
        activations: how activations are rounded; None if they are not.
        results: how results of products and sums are rounded; None if they are not.
        bits: bits of a stored weight, without its share of the scale (16 bits).
    """

    name: str
    weights: Rounding
    activations: Rounding | None = None
    results: Rounding | None = None
    bits: int = 16

    @property
    def plain(self) -> bool:
        """Whether the whole computation happens in the format, as for bf16 and fp16."""
        return self.results is not None


def _cast(name: str, dtype: torch.dtype) -> Format:
    grid = Rounding(dtype)
    return Format(name, grid, grid, grid, 16)


def _float8(name: str, dtype: torch.dtype) -> Format:
    grid = Rounding(dtype, scaled=True)
    return Format(name, grid, grid, None, 8)


def _integer(name: str, bits: Literal[4, 8], group: int | None, activations: bool) -> Format:
    levels = (1 << (bits - 1)) - 1
    grid = Rounding(levels=levels, scaled=True, group=group)
    tokens = Rounding(levels=levels, scaled=True) if activations else None
    return Format(name, grid, tokens, None, bits)


FORMATS: dict[str, Format] = {
    "bf16": _cast("bf16", torch.bfloat16),
    "fp16": _cast("fp16", torch.float16),
    "fp8_e4m3": _float8("fp8_e4m3", torch.float8_e4m3fn),
    "fp8_e5m2": _float8("fp8_e5m2", torch.float8_e5m2),
    "int8": _integer("int8", 8, None, activations=True),
    "int8_group": _integer("int8_group", 8, GROUP_SIZE, activations=False),
    "int4": _integer("int4", 4, None, activations=False),
    "int4_group": _integer("int4_group", 4, GROUP_SIZE, activations=False),
}
"""The formats by name."""


def format_named(name: str) -> Format:
    """Return the format of that name."""
    require(name in FORMATS, f"unknown format {name!r}: one of {', '.join(FORMATS)}")
    return FORMATS[name]
