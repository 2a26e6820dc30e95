"""Which precision a model computes in, whatever its weights are stored in.

A CPU without units for half precision computes it in software: a pass in bfloat16 then takes
several times as long as one in float32 (3.2 times, measured on a small Qwen3-MoE), and float32
represents every half-precision weight exactly. So "auto" means float32 there, and the precision of
the checkpoint everywhere else. The demo model computes in float32 unless told otherwise, so that
its documented figures do not depend on the processor.
"""

import warnings
from typing import Any

import torch
from torch import nn

from tieline.core.errors import PrecisionWarning

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
    named = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    dtype = getattr(torch, named.removeprefix("torch."), None) if isinstance(named, str) else named
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
    if name != "auto" or not on_cpu or units is None or has_units(units):
        return DTYPES[name]
    short = {"bfloat16": "bf16", "float16": "fp16"}[precision_name(stored)]
    warnings.warn(
        f"computing in float32: the weights are stored in {precision_name(stored)}, for which this "
        f"CPU has no units (dtype {short} computes as stored, slowly)",
        PrecisionWarning,
        stacklevel=4,
    )
    return torch.float32


def has_units(names: tuple[str, ...]) -> bool:
    """Whether this CPU has one of these capabilities; no, if this torch cannot tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in names)


def remember_stored(model: nn.Module, stored: torch.dtype | None) -> None:
    """Note on a loaded model what its weights were stored in, for `stored_in`."""
    model._tieline_stored = None if stored is None else precision_name(stored)  # type: ignore[assignment]


def stored_in(model: nn.Module) -> str | None:
    """Return the precision that the model's weights were stored in; None if it was not noted."""
    return getattr(model, "_tieline_stored", None)


def precision_name(dtype: torch.dtype | None) -> str:
    """Return the name of a precision without its module, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
