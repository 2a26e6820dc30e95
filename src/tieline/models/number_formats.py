"""Number formats: the precision that a model computes in, and grids that it is rounded to.

A matrix product sees them as:

    name          weights                       activations          result of a product
    bf16, fp16    rounded                       rounded              rounded
    fp8_e4m3      scaled per output channel     scaled per token     not rounded
    fp8_e5m2      the same                      the same             not rounded
    int8          8 bits per output channel     8 bits per token     not rounded
    int8_group    8 bits per group of inputs    not rounded          not rounded
    int4          4 bits per output channel     not rounded          not rounded
    int4_group    4 bits per group of inputs    not rounded          not rounded

A CPU without units for half precision computes it in software: a pass in bfloat16 then takes
several times as long as one in float32 (3.2 times, measured on a small Qwen3-MoE), and float32
represents every half-precision weight exactly. So dtype "auto" means float32 there, and the
precision of the checkpoint everywhere else (`computed_dtype`). The demo model computes in float32
unless told otherwise, so that its documented figures do not depend on the processor.

Rounding is to nearest, halves to even. A scale maps the largest |x| to the largest number of the
format, so nothing saturates; unscaled formats saturate at their largest number.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tieline.core.errors import PrecisionWarning, require

DTYPES: dict[str, str | torch.dtype] = {
    "auto": "auto",
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
"""Precisions by name; "auto" is that of the checkpoint, or float32 on a CPU without its units."""

HALF_UNITS: dict[torch.dtype, tuple[str, ...]] = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""Names in `torch.cpu.get_capabilities()` of what multiplies each half precision, x86 then ARM."""


def stored_dtype(config: Any) -> torch.dtype | None:
    """Return the precision that a configuration, or its text part, says the weights are stored in.

    None where it says nothing. Meaningful only before the weights are loaded: transformers then
    writes the precision of the loaded model in its place.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    stated = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    dtype = (
        getattr(torch, stated.removeprefix("torch."), None) if isinstance(stated, str) else stated
    )
    return dtype if isinstance(dtype, torch.dtype) else None


def computed_dtype(
    name: str, stored: torch.dtype | None, device: torch.device | None
) -> str | torch.dtype:
    """Return the precision to load a checkpoint in, with a `PrecisionWarning` if "auto" changes it.

    Args:
        name: a name in `DTYPES`.
        stored: precision of the weights on disk.
        device: where the model runs; None for all devices there are.
    """
    on_cpu = not torch.accelerator.is_available() if device is None else device.type == "cpu"
    units = HALF_UNITS.get(stored) if stored is not None else None
    if name != "auto" or not on_cpu or units is None or cpu_has_capability(units):
        return DTYPES[name]
    short = {"bfloat16": "bf16", "float16": "fp16"}[precision_name(stored)]
    warnings.warn(
        f"computing in float32: the weights are stored in {precision_name(stored)}, for which this "
        f"CPU has no units (dtype {short} computes as stored, slowly)",
        PrecisionWarning,
        stacklevel=4,
    )
    return torch.float32


def cpu_has_capability(names: tuple[str, ...]) -> bool:
    """Whether this CPU has one of these capabilities; no, if this torch cannot tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in names)


@contextmanager
def weights_in_float32(model: nn.Module, most: int) -> Iterator[None]:
    """Inside the block, weights in half precision are float32, which represents each exactly.

    Args:
        model: the model; weights that are not in memory stay as they are.
        most: bytes in float32 beyond which all stay as they are.
    """
    tensors = [*model.parameters(), *model.buffers()]
    half = [x for x in tensors if x.dtype in HALF_UNITS and not x.is_meta]
    if 4 * sum(x.numel() for x in half) > most:
        half = []
    stored = [x.data for x in half]
    try:
        for tensor in half:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(half, stored, strict=True):
            tensor.data = data


def note_stored_precision(model: nn.Module, stored: torch.dtype | None) -> None:
    """Note on a loaded model what its weights were stored in, for `stored_precision`."""
    model._tieline_stored = None if stored is None else precision_name(stored)  # type: ignore[assignment]


def stored_precision(model: nn.Module) -> str | None:
    """Return the precision that the model's weights were stored in; None if it was not noted."""
    return getattr(model, "_tieline_stored", None)


def precision_name(dtype: torch.dtype | None) -> str:
    """Return the name of a precision without its module, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class CutFp8Blocks(Fp8Dequantize):
    """Unpacks blocks of fp8 where the last ones are cut off by the end of the matrix.

    The 576 rows of a key-value projection of DeepSeek-V3 are four and a half blocks of 128, with
    five scales. transformers takes the block to be rows / scales, which it refuses where that is no
    whole number, and which is wrong where it is one by chance (192 rows with two scales). Here the
    block is that of the configuration where the scales fit it.
    """

    def _dequantize_one(
        self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Unpack a matrix whose last blocks may be cut off."""
        rows, columns = quantized.shape[-2:]
        more = self._missing_rows_and_columns(quantized, scales)
        if not any(more):
            return super()._dequantize_one(quantized, scales, output_dtype)
        padded = nn.functional.pad(quantized.float(), (0, more[1], 0, more[0]))
        return super()._dequantize_one(padded, scales, output_dtype)[..., :rows, :columns]

    def _missing_rows_and_columns(self, quantized: Tensor, scales: Tensor) -> list[int]:
        """Rows and columns that the last blocks lack; none where the scales are of other blocks."""
        config = getattr(self.hf_quantizer, "quantization_config", None)
        block = getattr(config, "weight_block_size", None) or ()
        sizes = list(zip(quantized.shape[-2:], block, scales.shape[-2:], strict=False))
        fits = all(-(-size // side) == count for size, side, count in sizes)
        return [count * side - size for size, side, count in sizes] if fits else []


GROUP_SIZE = 32
"""Inputs that share a scale in the formats per group."""


@dataclass(frozen=True)
class Rounding:
    """Round numbers to a grid.

    Attributes:
        dtype: floating-point type that the numbers are cast to; None for integers.
        mantissa: bits of the mantissa that float32 numbers keep, of a format that torch has no
            type for; None for all others.
        levels: largest integer of a symmetric integer grid; None for casts.
        scaled: whether numbers that share a scale are first mapped to the range of the grid.
        group: how many neighbours along the contracted axis share a scale; None for all of them.
    """

    dtype: torch.dtype | None = None
    levels: int | None = None
    scaled: bool = False
    group: int | None = None
    mantissa: int | None = None

    def __call__(self, values: Float[Tensor, "*shape"], axis: int = -1) -> Float[Tensor, "*shape"]:
        """Return the nearest numbers of the grid, in the type of `values`.

        Args:
            values: weights or activations.
            axis: the axis that a product sums over, along which scales are shared.
        """
        if not self.scaled:
            return self._snapped_values(values)
        along = values.movedim(axis, -1)
        dim = along.shape[-1]
        size = min(self.group or dim, dim)
        padded = torch.nn.functional.pad(along, (0, -dim % size)).unflatten(-1, (-1, size))
        scale = padded.abs().amax(dim=-1, keepdim=True) / self._largest_value
        scale = scale.where(scale > 0, 1.0)
        rounded = self._snapped_values(padded / scale) * scale
        return rounded.flatten(-2)[..., :dim].movedim(-1, axis)

    def write(self, values: Tensor, into: Tensor, axis: int = -1) -> None:
        """Write the nearest numbers of the grid into memory of the shape of `values`."""
        if self.scaled or self.dtype is None:
            into.copy_(self(values, axis))
            return
        torch.clamp(values, -self._largest_value, self._largest_value, out=into)
        into.copy_(into.to(self.dtype))

    @cached_property
    def _largest_value(self) -> float:
        if self.dtype is None:
            return float(self.levels or 1)
        return torch.finfo(self.dtype).max

    def _snapped_values(self, values: Tensor) -> Tensor:
        if self.mantissa is not None:
            return _short_mantissa(values.float(), 23 - self.mantissa).to(values.dtype)
        if self.dtype is None:
            return values.round()
        return (
            values.clamp(-self._largest_value, self._largest_value).to(self.dtype).to(values.dtype)
        )


def _short_mantissa(values: Float[Tensor, "*shape"], dropped: int) -> Float[Tensor, "*shape"]:
    """Float32 numbers without the last bits of their mantissa, to nearest, ties to even."""
    bits = values.contiguous().view(torch.int32)
    last = (bits >> dropped) & 1
    half = (1 << (dropped - 1)) - 1
    return ((bits + half + last) & -(1 << dropped)).view(torch.float32)


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


_BF16, _FP16, _TF32 = Rounding(torch.bfloat16), Rounding(torch.float16), Rounding(mantissa=10)
_E4M3, _E5M2 = (Rounding(t, scaled=True) for t in (torch.float8_e4m3fn, torch.float8_e5m2))
_INT8 = Rounding(levels=127, scaled=True)
_INT4 = Rounding(levels=7, scaled=True)

FORMATS: dict[str, Format] = {
    "bf16": Format("bf16", _BF16, _BF16, _BF16),
    "fp16": Format("fp16", _FP16, _FP16, _FP16),
    "fp8_e4m3": Format("fp8_e4m3", _E4M3, _E4M3, bits=8),
    "fp8_e5m2": Format("fp8_e5m2", _E5M2, _E5M2, bits=8),
    "int8": Format("int8", _INT8, _INT8, bits=8),
    "int8_group": Format("int8_group", replace(_INT8, group=GROUP_SIZE), bits=8),
    "int4": Format("int4", _INT4, bits=4),
    "int4_group": Format("int4_group", replace(_INT4, group=GROUP_SIZE), bits=4),
    "bf16_in": Format("bf16_in", _BF16, _BF16),  # results in float32, as fused gates have them
    "tf32": Format("tf32", _TF32, _TF32, bits=32),
}
"""The formats by name."""


OF_ROUTERS = ("bf16_in", "tf32")
"""Formats in which routers are computed apart from the model."""


def format_named(name: str) -> Format:
    """Return the format of that name."""
    require(name in FORMATS, f"unknown format {name!r}: one of {', '.join(FORMATS)}")
    return FORMATS[name]
