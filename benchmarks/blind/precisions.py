"""Precisions that a run is computed in: native, by kernels of torch, or by rounding of our own.

Routers stay as they are in formats of 8 and 4 bits, as quantised checkpoints have them; embeddings
and the output head too.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.blind import parts
from benchmarks.blind.attention import Attention, edited_attention
from tieline.models.emulate import emulate

Grid = Callable[[Tensor], Tensor]
"""Rounds numbers that are contracted along the last axis."""


@dataclass(frozen=True)
class Precision:
    """How a run computes.

    Attributes:
        name: its name.
        expect: the format that `diff` is told to expect.
        convert: changes a copy of the model, in place.
        context: what the forward passes run in.
    """

    name: str
    expect: str
    convert: Callable[[Any], None] = lambda _: None
    context: Callable[[Any], AbstractContextManager[Any]] = lambda _: nullcontext()


def integers(bits: int, group: int | None = None) -> Grid:
    """Symmetric integers with one scale per row, or per `group` neighbours of a row."""
    levels = (1 << (bits - 1)) - 1

    def rounded(values: Tensor) -> Tensor:
        scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / levels
        return (values / scale).round() * scale

    return rounded if group is None else _grouped(rounded, group)


def _grouped(grid: Grid, size: int) -> Grid:
    """Apply a grid to `size` neighbours at a time."""

    def rounded(values: Tensor) -> Tensor:
        width = values.shape[-1]
        padded = F.pad(values, (0, -width % size)).unflatten(-1, (-1, size))
        return grid(padded).flatten(-2)[..., :width]

    return rounded


def four_bits_with_zero(values: Tensor) -> Tensor:
    """Sixteen levels between the smallest and the largest number."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    step = ((high - low) / 15).clamp_min(1e-12)
    return ((values - low) / step).round() * step + low


def normal_quantiles(values: Tensor) -> Tensor:
    """The 16 levels of NF4: quantiles of a normal law, scaled to the largest number."""
    middle = torch.linspace(0.5 / 16, 1 - 0.5 / 16, 16, dtype=torch.float64)
    levels = torch.special.ndtri(middle).float()
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / levels.max()
    return levels[(values[..., None] / scale[..., None] - levels).abs().argmin(-1)] * scale


def microscaled(values: Tensor) -> Tensor:
    """MXFP4: E2M1 numbers, scaled by a power of two."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    largest = values.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    scale = torch.exp2(largest.log2().floor() - 2)
    size = (values / scale).abs().clamp(max=6.0)
    return levels[(size[..., None] - levels).abs().argmin(-1)] * values.sign() * scale


def float8(values: Tensor) -> Tensor:
    """E4M3 numbers, scaled to their largest."""
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


def ten_bits(values: Tensor) -> Tensor:
    """Mantissas of ten bits, as TensorFloat-32 has them."""
    bits = values.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@torch.no_grad()
def round_matrices(model: nn.Module, grid: Grid, only_experts: bool = False) -> None:
    """Round the matrices of a model along their contracted axis, in place."""
    for name, weight, axis in parts.matrices(model):
        if ".experts." in name or not only_experts:
            weight.copy_(grid(weight.movedim(axis, -1)).movedim(-1, axis))


@torch.no_grad()
def cast(model: Any, dtype: torch.dtype) -> None:
    """Cast parameters as `from_pretrained` does; buffers such as rotary tables stay float32."""
    spared = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    for name, parameter in model.named_parameters():
        if not any(part in name for part in spared) and "e_score_correction" not in name:
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def int8_kernels(model: nn.Module) -> None:
    """Linear layers by torch's dynamic int8 kernels; stacked experts on the grid of int8."""
    grid = integers(8)
    for stacked in parts.experts(model):
        for weight in (parts.gate_up(stacked), parts.down(stacked)):
            axis = -2 if parts.transposed(stacked) else -1
            weight.data = grid(weight.data.movedim(axis, -1)).movedim(-1, axis)
    apart = {id(m) for router in parts.routers(model) for m in router.modules()}
    apart.add(id(model.get_submodule("lm_head")))
    for owner in list(model.modules()):
        for name, child in owner.named_children():
            if type(child) is nn.Linear and id(child) not in apart:
                setattr(owner, name, Int8Linear(child))


class Int8Linear(nn.Module):
    """A linear layer computed by torch's packed int8 kernel, activations quantised on the fly."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight  # what callers look at
        scale = float(linear.weight.abs().max().clamp_min(1e-12)) / 127
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the kernels are old, not wrong
            packed = torch.quantize_per_tensor(linear.weight.detach(), scale, 0, torch.qint8)
        bias = None if linear.bias is None else linear.bias.detach()
        self.packed = torch.ops.quantized.linear_prepack(packed, bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return W x + b."""
        return torch.ops.quantized.linear_dynamic(states.float(), self.packed, reduce_range=True)


class RoundedOperands(TorchFunctionMode):
    """Rounds both operands of matrix products along the contracted axis."""

    PRODUCTS = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm)

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self._grid = grid

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Round the operands of products; pass everything else on."""
        if function in self.PRODUCTS and args[0].is_floating_point():
            axis = -1 if function is F.linear else -2
            second = self._grid(args[1].movedim(axis, -1)).movedim(-1, axis)
            args = (self._grid(args[0]), second, *args[2:])
        return function(*args, **(kwargs or {}))


class RoundedInputs(RoundedOperands):
    """Rounds the first operand of linear layers alone."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Round the inputs of linear layers; pass everything else on."""
        if function is F.linear:
            args = (self._grid(args[0]), *args[1:])
        return function(*args, **(kwargs or {}))


@contextmanager
def eager_experts(model: Any) -> Iterator[None]:
    """Run experts one by one, so that their products are seen by function modes."""
    before = model.config._experts_implementation
    _set_experts(model, "eager")
    try:
        yield
    finally:
        _set_experts(model, before)


def _set_experts(model: Any, implementation: str) -> None:
    model.set_experts_implementation(implementation)


@contextmanager
def products(model: Any, mode: TorchFunctionMode) -> Iterator[None]:
    """Run inside a function mode that sees the products of experts too."""
    with eager_experts(model), mode:
        yield


def float8_cache(model: Any) -> AbstractContextManager[None]:
    """Keys and values pass through E4M3, unscaled, as in a cache of 8 bits."""

    def short(values: Tensor) -> Tensor:
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)

    def edit(call: Attention) -> Attention:
        return replace(call, key=short(call.key), value=short(call.value))

    return edited_attention(model, edit)


def _bf16(model: Any) -> None:
    cast(model, torch.bfloat16)


def _with_bf16(*edits: Callable[[Any], None]) -> Callable[[Any], None]:
    """Apply edits in float32, then cast to bfloat16."""

    def convert(model: Any) -> None:
        for edit in edits:
            edit(model)
        _bf16(model)

    return convert


def _matrices(grid: Grid, only_experts: bool = False) -> Callable[[Any], None]:
    return lambda model: round_matrices(model, grid, only_experts)


def _float32_routers(model: Any) -> None:
    """Cast to bfloat16, but for the routers' matrices, whose inputs are then widened."""
    routers = parts.routers(model)
    kept = [parts.router_weight(router).data.clone() for router in routers]
    _bf16(model)
    for router, weight in zip(routers, kept, strict=True):
        for parameter in router.parameters():
            parameter.data = parameter.data.float()
        parts.router_weight(router).data = weight
        router.register_forward_pre_hook(_widened)


def _widened(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return arguments[0].float(), *arguments[1:]


def _tf32(model: Any) -> AbstractContextManager[None]:
    return products(model, RoundedOperands(ten_bits))


def _float8_inputs(model: Any) -> AbstractContextManager[None]:
    return products(model, RoundedInputs(_grouped(float8, 32)))


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", "fp32"),
        Precision("bf16", "bf16", _bf16),
        Precision("bf16 emulated", "bf16", context=lambda m: emulate(m, "bf16", region="all")),
        Precision("bf16, float32 routers", "bf16", _float32_routers),
        Precision("bf16 weights, float32 sums", "bf16", lambda m: _through(m, torch.bfloat16)),
        Precision("fp16", "fp16", lambda m: cast(m, torch.float16)),
        Precision("float32 with bf16 noise", "bf16"),
        Precision("tf32", "tf32", context=_tf32),
        Precision("int8", "int8", int8_kernels),
        Precision("int8 weights", "int8", _with_bf16(_matrices(integers(8)))),
        Precision("int4", "int4", _with_bf16(_matrices(integers(4, 32)))),
        Precision("int4 with zero", "int4", _matrices(_grouped(four_bits_with_zero, 64))),
        Precision("nf4", "int4", _with_bf16(_matrices(_grouped(normal_quantiles, 64)))),
        Precision("mxfp4 experts", "int4", _with_bf16(_matrices(_grouped(microscaled, 32), True))),
        Precision("mxfp4", "int4", _with_bf16(_matrices(_grouped(microscaled, 32)))),
        Precision("fp8 blocks", "fp8", _matrices(_grouped(float8, 32)), _float8_inputs),
        Precision("fp8 cache", "fp8", _bf16, float8_cache),
        Precision("fp8 cache called bf16", "bf16", _bf16, float8_cache),
    )
}
"""The precisions by name."""

LOUDER_IS_NEUTRAL = frozenset({"fp8 cache called bf16"})
"""Precisions named wrongly to `diff`: "louder than the format" is right there, an alarm is not."""


@torch.no_grad()
def _through(model: nn.Module, dtype: torch.dtype) -> None:
    """Round parameters to a type and keep them in float32."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype).to(parameter.dtype))
