"""Low precision emulated by rounding: the model runs in float32 on the numbers of the format.

    with emulate(model, "fp8_e4m3", parts="router"):
        model(input_ids=ids)

Weights are rounded once, when the block is entered, and restored when it is left; activations are
rounded where a matrix product takes them in. Formats in which the whole computation happens (bf16,
fp16) also round what products, sums and elementwise products give back (`hf.formats`). Sums inside
a product stay in float32, as in matrix units, and so do tables of positions.

    parts     what is in the format
    router    the routers alone: their matrix, their input and, for bf16 and fp16, their logits
    all       the whole model; formats of 8 and 4 bits spare embeddings, output head and vectors
    others    the whole model but its routers

A router that makes its logits in float32 whatever the model's precision (DeepSeek-V3) keeps them so
under "all", as it would natively, and not under "router", where its own precision is the question.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tieline.errors import require
from tieline.hf.formats import Format, format_named
from tieline.hf.router_scope import (
    RouterScope,
    computes_single,
    kept_names,
    modular_routers,
    position_tables,
)

__all__ = ["Parts", "emulate", "weight_axis"]

Parts = Literal["router", "all", "others"]

_ACTIVATION_FIRST = frozenset(
    function
    for function in (
        torch.nn.functional.linear,
        getattr(torch, "_grouped_mm", None),
        getattr(torch.nn.functional, "grouped_mm", None),
    )
    if function is not None
)
_MATMUL = frozenset(
    {torch.matmul, torch.mm, torch.bmm}
    | {torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.bmm}
)
_ATTENTION = frozenset({torch.nn.functional.scaled_dot_product_attention})
_ELEMENTWISE = frozenset(
    {torch.add, torch.mul, torch.Tensor.add, torch.Tensor.mul, torch.Tensor.sub}
    | {torch.Tensor.__add__, torch.Tensor.__mul__, torch.Tensor.__radd__, torch.Tensor.__rmul__}
    | {torch.nn.functional.silu, torch.nn.functional.gelu}
)


@contextmanager
def emulate(
    model: nn.Module,
    number_format: Format | str,
    parts: Parts = "router",
    keep: Collection[str] = (),
) -> Iterator[None]:
    """Inside the block, these parts of `model` compute as if they were in the format.

    Args:
        model: a Mixture-of-Experts model of transformers in float32, or one of its routers.
        number_format: a `Format` or its name in `FORMATS`.
        parts: "router", "all" or "others".
        keep: names of routers that stay in full precision.
    """
    require(parts in ("router", "all", "others"), f"parts: router, all or others, got {parts!r}")
    chosen = format_named(number_format) if isinstance(number_format, str) else number_format
    routers = modular_routers(model)
    kept = kept_names(routers, keep)
    scope = RouterScope(routers, position_tables(model))
    single = {
        name for name, router in routers.items() if parts == "all" and computes_single(router)
    }
    with _rounded_weights(_weights(model, routers, chosen, parts, kept), chosen):
        storages = frozenset(_storage(weight) for weight in model.parameters())
        with scope.watching(), _Products(chosen, parts, kept, single, scope, storages):
            yield


def weight_axis(module: nn.Module, weight: Tensor) -> int:
    """The axis of a weight that its product sums over: the last, but for transposed experts."""
    return -2 if weight.ndim == 3 and getattr(module, "is_transposed", False) else -1


def _weights(
    model: nn.Module,
    routers: dict[str, nn.Module],
    chosen: Format,
    parts: Parts,
    kept: frozenset[str],
) -> list[tuple[Tensor, int]]:
    """Parameters to round, each with the axis that scales are shared along."""
    of_routers = {id(p): name for name, r in routers.items() for p in r.parameters()}
    spared = set() if chosen.plain else {id(p) for p in _ends(model)}
    found: dict[int, tuple[Tensor, int]] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            name = of_routers.get(id(weight))
            inside = name is not None
            wanted = {"router": inside, "others": not inside, "all": True}[parts]
            if not wanted or name in kept or id(weight) in spared:
                continue
            if weight.is_floating_point() and (chosen.plain or weight.ndim >= 2):
                found[id(weight)] = (weight, weight_axis(module, weight))
    return list(found.values())


def _ends(model: nn.Module) -> Iterator[Tensor]:
    """Parameters of the embeddings and of the output head."""
    for name in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, name, lambda: None)()
        if module is not None:
            yield from module.parameters()


@contextmanager
def _rounded_weights(weights: list[tuple[Tensor, int]], chosen: Format) -> Iterator[None]:
    before = [weight.data for weight, _ in weights]
    try:
        with torch.inference_mode(False), torch.no_grad():
            for weight, axis in weights:
                weight.data = chosen.weights(weight.data, axis)
        yield
    finally:
        for (weight, _), data in zip(weights, before, strict=True):
            weight.data = data


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Products(TorchFunctionMode):
    """Rounds what matrix products take and give, in the parts of the model that it is for."""

    def __init__(
        self,
        chosen: Format,
        parts: Parts,
        kept: frozenset[str],
        single: set[str],
        scope: RouterScope,
        weights: frozenset[int],
    ) -> None:
        super().__init__()
        self._format, self._parts = chosen, parts
        self._kept, self._single = kept, single
        self._scope, self._weights = scope, weights

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._active():
            return func(*args, **kwargs)
        places = self._operands(func, args)
        if places:
            operands = list(args)
            for place in places:
                operands[place] = self._rounded(operands[place], self._format.activations)
            return self._result(func(*operands, **kwargs))
        if func in _ELEMENTWISE and self._format.plain and self._scope.running is None:
            return self._result(func(*map(self._result, args), **kwargs))
        return func(*args, **kwargs)

    def _active(self) -> bool:
        running = self._scope.running
        if running is None:
            return self._parts != "router" and not self._scope.exact
        return self._parts != "others" and running not in self._kept

    def _operands(self, func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Places of the activations among the arguments of a product; none for other functions."""
        if func in _ACTIVATION_FIRST:
            return (0,)
        if func in _MATMUL:
            if self._format.plain:
                return (0, 1)
            return (0,) if _storage(args[1]) in self._weights else ()
        return (0, 1, 2) if func in _ATTENTION and self._format.plain else ()

    def _rounded(self, value: Any, rounding: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return rounding(value) if floats and rounding is not None else value

    def _result(self, value: Any) -> Any:
        """Rounded, but for single columns, such as the variance in a norm, and float32 logits."""
        if self._scope.running in self._single:
            return value
        if isinstance(value, Tensor) and value.ndim and value.shape[-1] == 1:
            return value
        return self._rounded(value, self._format.results)
