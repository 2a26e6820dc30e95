"""Run a model in a lower precision or with noise, by rounding and hooks, in float32.

    with emulate(model, "fp8_e4m3", region="router"):
        model(input_ids=ids)

emulate       rounds weights once, on entry, and activations where a matrix product takes them in;
              bf16 and fp16 also round what products, sums and elementwise products return
              (see the table). Sums inside a product and tables of positions stay in float32.
score_noise   adds N(0, σ²) to every logit of every router
state_noise   adds N(0, (ρ · rms(x))²) to every coordinate of a hidden state x: of the routers'
              inputs alone, or of the output of every routed decoder layer

    region    what is in the format
    router    the routers alone: their matrix, their input and, for bf16 and fp16, their logits
    all       the whole model; formats of 8 and 4 bits spare embeddings, output head and vectors
    others    the whole model but its routers

A router that makes its logits in float32 whatever the model's precision (DeepSeek-V3) keeps them so
under "all", as it would natively, but not under "router", where its own precision is the question.

The formats are those of `models.number_formats`.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tieline.core.errors import UnsupportedModelError, require
from tieline.core.text import layer_label
from tieline.models.families import family_of, find_routers
from tieline.models.linear_routers import logits_matrix, makes_one_product
from tieline.models.number_formats import Format, format_named
from tieline.models.parallel import local_shard
from tieline.models.rounding_buffers import RoundingBuffers, round_in_place, rounded_in_pieces


def modular_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers by name; refuses those that are not modules of their own."""
    routers = find_routers(model)
    for name, router in routers.items():
        family = family_of(router)
        assert family is not None
        require(
            family.refused is None,
            f"{layer_label(name)}: its precision cannot be set apart: {family.refused}",
            UnsupportedModelError,
        )
        require(
            not family.in_block,
            f"{layer_label(name)}: {type(router).__name__} of family {family.name!r} is no module "
            f"that routes by itself, so its precision cannot be set apart",
            UnsupportedModelError,
        )
    return routers


class RouterScope:
    """Follows which router is running.

    Attributes:
        running: name of the router at work; None between calls.
        exact: whether a module that always computes in float32, such as a table of positions, is
            at work.
    """

    def __init__(self, routers: dict[str, nn.Module], exact: Collection[nn.Module] = ()) -> None:
        """Watch these routers, and modules that compute in float32 in any precision."""
        self._routers, self._exact = routers, exact
        self.running: str | None = None
        self.exact = False

    @contextmanager
    def watching(self) -> Iterator["RouterScope"]:
        """Follow the calls inside this context."""
        handles = []
        for name, router in self._routers.items():
            handles.append(router.register_forward_pre_hook(self._setter("running", name)))
            ended = self._setter("running", None)
            handles.append(router.register_forward_hook(ended, always_call=True))
        for module in self._exact:
            handles.append(module.register_forward_pre_hook(self._setter("exact", True)))
            ended = self._setter("exact", False)
            handles.append(module.register_forward_hook(ended, always_call=True))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
            self.running, self.exact = None, False

    @contextmanager
    def inside_routers(self, mode: TorchFunctionMode) -> Iterator[None]:
        """A mode is in force while a router runs: elsewhere it would only take time."""
        entered: list[TorchFunctionMode] = []

        def enter(*call: object) -> None:
            entered.append(mode.__enter__())

        def leave(*call: object) -> None:
            if entered:  # not where an earlier hook has failed
                entered.pop().__exit__(None, None, None)

        handles = []
        for router in self._routers.values():
            handles.append(router.register_forward_pre_hook(enter))
            handles.append(router.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _setter(self, attribute: str, value: object) -> Callable[..., None]:
        """Hook that sets an attribute of this scope."""
        return lambda *call: setattr(self, attribute, value)


def computes_logits_in_float32(router: nn.Module) -> bool:
    """Whether a router's logits are computed in float32 even if weights and inputs are bf16.

    Runs a copy in bf16 on one random token, once for each router; False for a router that needs
    more than its input, and for one that rounds its logits to bf16 before it converts them to
    float32.
    """
    tensors = [*router.parameters(), *router.buffers()]  # on "meta" until a streamed unit is read
    state = (type(router), *((tensor.dtype, tensor.device) for tensor in tensors))
    if _SINGLE_LOGITS.get(router, (None, False))[0] != state:
        _SINGLE_LOGITS[router] = (state, _bf16_copy_returns_float32(router))
    return _SINGLE_LOGITS[router][1]


_SINGLE_LOGITS: WeakKeyDictionary[nn.Module, tuple[Any, bool]] = WeakKeyDictionary()
"""Whether routers that were tried compute float32 logits; with class, types, devices tried."""


def _bf16_copy_returns_float32(router: nn.Module) -> bool:
    """Whether a copy of a router in bf16 returns float32 logits that bf16 does not hold."""
    family, matrix = family_of(router), logits_matrix(router)
    arguments = inspect.signature(router.forward).parameters.values()
    needed = [x for x in arguments if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    if family is None or matrix is None or len(needed) != 1:
        return False
    with torch.inference_mode(False), torch.no_grad():
        trial = copy.deepcopy(router).to(torch.bfloat16)
        trial._forward_hooks.clear()
        trial._forward_pre_hooks.clear()
        draw = torch.Generator("cpu").manual_seed(0)
        token = torch.randn(1, matrix.shape[1], generator=draw, device="cpu")
        token = token.to(matrix.device, torch.bfloat16)
        name = family.bias_argument
        bias = {} if name is None else {name: torch.zeros(len(matrix), device=matrix.device)}
        logits = family.layout.logits((token,), trial(token, **bias))
    return logits.dtype == torch.float32 and not torch.equal(logits.bfloat16().float(), logits)


def position_tables(model: nn.Module) -> list[nn.Module]:
    """Return modules with numbers but no parameters: rotary tables, float32 in every model."""
    return [
        module
        for module in model.modules()
        if not any(True for _ in module.parameters())
        and any(buffer.is_floating_point() for buffer in module.buffers())
    ]


def spared_routers(routers: Collection[str], keep: Collection[str]) -> frozenset[str]:
    """Return the routers to leave alone; refuses unknown names."""
    unknown = sorted(set(keep) - set(routers))
    require(not unknown, f"no routers named {unknown} to keep; the model has {list(routers)}")
    return frozenset(keep)


@contextmanager
def score_noise(model: nn.Module, sigma: float, generator: torch.Generator) -> Iterator[None]:
    """Inside the block, every router's logits have independent N(0, σ²) noise.

    Args:
        model: a model whose routers make their logits by one product, or such a router.
        sigma: standard deviation, in units of the logits.
        generator: source of the noise, on the CPU.
    """
    require(sigma >= 0, f"noise must be >= 0, got sigma={sigma}")
    routers = modular_routers(model)
    for name, router in routers.items():
        if not makes_one_product(router):
            raise UnsupportedModelError(
                f"{layer_label(name)}: the logits of {type(router).__name__} are not one product"
            )
    scope = RouterScope(routers)
    with scope.watching(), scope.inside_routers(_NoisyLogits(scope, sigma, generator)):
        yield


@contextmanager
def state_noise(
    model: nn.Module,
    ratio: float,
    generator: torch.Generator,
    region: Literal["router", "all"] = "router",
) -> Iterator[None]:
    """Inside the block, hidden states have noise of `ratio` times their root mean square.

    Args:
        model: a Mixture-of-Experts model, or one of its routers.
        ratio: ρ.
        generator: source of the noise, on the CPU.
        region: "router" for the routers' inputs alone, "all" for the output of every decoder layer
            that has a router.
    """
    require(ratio >= 0, f"noise must be >= 0, got ratio={ratio}")
    require(region in ("router", "all"), f"region: router or all, got {region!r}")

    def noisy_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Add noise to the first argument."""
        return _with_state_noise(args[0], ratio, generator), *args[1:]

    def noisy_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Add noise to the hidden states that a layer returns."""
        if isinstance(output, Tensor):
            return _with_state_noise(output, ratio, generator)
        return _with_state_noise(output[0], ratio, generator), *output[1:]

    handles = []
    for name, router in modular_routers(model).items():
        if region == "router":
            handles.append(router.register_forward_pre_hook(noisy_input))
        else:
            layer = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
            handles.append(layer.register_forward_hook(noisy_output))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _NoisyLogits(TorchFunctionMode):
    """Adds noise to the product inside a router."""

    def __init__(self, scope: RouterScope, sigma: float, generator: torch.Generator) -> None:
        super().__init__()
        self._scope, self._sigma, self._generator = scope, sigma, generator

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and self._scope.running is not None:
            return result + self._sigma * _normal_noise(result, self._generator)
        return result


def _with_state_noise(states: Tensor, ratio: float, generator: torch.Generator) -> Tensor:
    """States x with noise N(0, (ρ · rms(x))²) on every coordinate."""
    size = states.square().mean(dim=-1, keepdim=True).sqrt()
    return states + ratio * size * _normal_noise(states, generator)


def _normal_noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers of the shape, type and device of a tensor."""
    return torch.randn(like.shape, generator=generator, device=generator.device).to(like)


Region = Literal["router", "all", "others"]

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
    region: Region = "router",
    keep: Collection[str] = (),
) -> Iterator[None]:
    """Inside the block, parts of `model` compute as if they were in the format.

    Args:
        model: a Mixture-of-Experts model of transformers in float32, or one of its routers.
        number_format: a `Format` or its name in `FORMATS`.
        region: "router", "all" or "others".
        keep: names of routers that stay in full precision.
    """
    arguments = (model, number_format, region, keep)
    with rounded_weights(*arguments), rounded_products(*arguments):
        yield


@contextmanager
def rounded_weights(
    model: nn.Module,
    number_format: Format | str,
    region: Region = "router",
    keep: Collection[str] = (),
    buffers: "RoundingBuffers | None" = None,
) -> Iterator[None]:
    """Inside the block, the weights that are in memory are rounded; see `emulate`.

    Args:
        model: the model, some of whose weights may be on the meta device.
        number_format: a `Format` or its name.
        region: "router", "all" or "others".
        keep: names of routers that stay in full precision.
        buffers: memory to round into; by default new memory.
    """
    chosen, routers = _checked_format(number_format, region), modular_routers(model)
    rounded = _weights_to_round(model, routers, chosen, region, spared_routers(routers, keep))
    weights = [(local_shard(weight, axis), axis) for weight, axis in rounded]
    originals = [weight.data for weight, _ in weights]
    with (buffers or RoundingBuffers()).borrow() as allocate:
        try:
            for weight, axis in weights:
                with torch.inference_mode(weight.is_inference()), torch.no_grad():
                    weight.data = rounded_in_pieces(weight.data, chosen.weights, axis, allocate)
            yield
        finally:
            for (weight, _), data in zip(weights, originals, strict=True):
                weight.data = data


@contextmanager
def rounded_products(
    model: nn.Module,
    number_format: Format | str,
    region: Region = "router",
    keep: Collection[str] = (),
) -> Iterator[None]:
    """Inside the block, what products take in and return is rounded; see `emulate`.

    It holds for the thread that enters it.
    """
    chosen, routers = _checked_format(number_format, region), modular_routers(model)
    kept = spared_routers(routers, keep)
    if region == "router":
        scope = RouterScope(routers)
        parameters = (x for router in routers.values() for x in router.parameters())
        weights = frozenset(_storage_address(x) for x in parameters if not x.is_meta)
        mode = _ProductRounding(chosen, region, kept, set(), scope, weights)
        with scope.watching(), scope.inside_routers(mode):
            yield
        return
    single = {
        name
        for name, router in routers.items()
        if region == "all" and computes_logits_in_float32(router)
    }
    storages = frozenset(
        _storage_address(weight) for weight in model.parameters() if not weight.is_meta
    )
    scope = RouterScope(routers, position_tables(model))
    with scope.watching(), _ProductRounding(chosen, region, kept, single, scope, storages):
        yield


@contextmanager
def unrounded_products() -> Iterator[None]:
    """Inside the block nothing is rounded, though `emulate` is in force.

    An emulated format is the model's, not that of arithmetic which looks at the model.
    """
    modes = _get_current_function_mode_stack()
    rounding = any(isinstance(mode, _ProductRounding) for mode in modes)
    with torch._C.DisableTorchFunction() if rounding else nullcontext():
        yield


def _checked_format(number_format: Format | str, region: Region) -> Format:
    """The format of a name, once the region is known to be one."""
    require(region in ("router", "all", "others"), f"region: router, all or others, got {region!r}")
    return format_named(number_format) if isinstance(number_format, str) else number_format


def weight_axis(module: nn.Module, weight: Tensor) -> int:
    """Return the axis that a weight's product sums over: the last, except in transposed experts."""
    return -2 if weight.ndim == 3 and getattr(module, "is_transposed", False) else -1


def _weights_to_round(
    model: nn.Module,
    routers: dict[str, nn.Module],
    chosen: Format,
    region: Region,
    kept: frozenset[str],
) -> list[tuple[Tensor, int]]:
    """Parameters to round, each with the axis along which scales are shared."""
    of_routers = {id(p): name for name, r in routers.items() for p in r.parameters()}
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    parameters = [p for module in ends if module is not None for p in module.parameters()]
    spared = set() if chosen.plain else {id(p) for p in parameters}
    weights: dict[int, tuple[Tensor, int]] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            name = of_routers.get(id(weight))
            in_router = name is not None
            in_region = {"router": in_router, "others": not in_router, "all": True}[region]
            if not in_region or name in kept or id(weight) in spared or weight.is_meta:
                continue
            if weight.is_floating_point() and (chosen.plain or weight.ndim >= 2):
                weights[id(weight)] = (weight, weight_axis(module, weight))
    return list(weights.values())


def _storage_address(tensor: Tensor) -> int:
    """Address of the memory that a tensor is a view of."""
    return local_shard(tensor).untyped_storage().data_ptr()


_ROUNDED = "_tieline_rounded"
"""Attribute of a tensor that was rounded, with the state of the mode that rounded it."""

_READS_ONLY = frozenset({torch.nn.functional.silu, torch.nn.functional.softmax})
"""Functions written in Python that write to their arguments only where `inplace` asks for it."""


_MOVES = frozenset(
    {torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.flatten, torch.Tensor.contiguous}
    | {torch.Tensor.transpose, torch.Tensor.permute, torch.Tensor.unsqueeze, torch.Tensor.expand}
    | {torch.Tensor.__getitem__, torch.Tensor.__neg__, torch.Tensor.neg, torch.neg, torch.cat}
    | {torch.Tensor.chunk, torch.chunk, torch.Tensor.split, torch.Tensor.to}
)
"""Functions whose result has numbers of their first argument, moved or negated."""


_WRITES_TO_FIRST = frozenset({torch.Tensor.__setitem__, torch.Tensor.index_add_})
"""Functions that write to the memory of their first argument and to no other."""


@cache
def _may_write(function: Any) -> bool:
    """Whether a function of torch may write to its arguments, by the convention of its name."""
    name = getattr(function, "__name__", "")
    if isinstance(function, FunctionType) and function.__module__ != "torch._tensor":
        return function not in _READS_ONLY
    if name.startswith("__") and name.endswith("__"):
        updates = name[2] == "i" and hasattr(Tensor, f"__{name[3:]}")  # __iadd__ of __add__
        return updates or name in ("__setitem__", "__set__")
    return name.endswith("_")


class _ProductRounding(TorchFunctionMode):
    """Rounds inputs and outputs of matrix products in the chosen parts of the model.

    Rounding to a type twice is rounding once, so a tensor that was rounded here is left as it is,
    unless something may have written to it since.
    """

    def __init__(
        self,
        chosen: Format,
        region: Region,
        kept: frozenset[str],
        single: set[str],
        scope: RouterScope,
        weights: frozenset[int],
    ) -> None:
        super().__init__()
        self._format, self._region = chosen, region
        self._kept, self._single = kept, single
        self._scope, self._weights = scope, weights
        self._unwritten = object()
        self._written: set[int] = set()

    def __enter__(self) -> "_ProductRounding":
        self._unwritten = object()  # what was written before the block is not known
        return super().__enter__()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        writes = _may_write(func) or kwargs.get("out") is not None or kwargs.get("inplace")
        if writes:
            self._note_write(func, args)
        if not self._active():
            return func(*args, **kwargs)
        positions = self._operands(func, args)
        if positions:
            operands = list(args)
            for position in positions:
                operands[position] = self._rounded(operands[position], self._format.activations)
            return self._result(func(*operands, **kwargs), is_new=not writes)
        if func in _ELEMENTWISE and self._format.plain and self._scope.running is None:
            return self._result(func(*map(self._result, args), **kwargs), is_new=not writes)
        result = func(*args, **kwargs)
        if func in _MOVES:
            self._carry_mark(args[0], result)
        return result

    def _note_write(self, func: Any, args: tuple[Any, ...]) -> None:
        """Tensors rounded so far may hold other numbers now: those of one memory, or all."""
        if func in _WRITES_TO_FIRST:
            self._written.add(_storage_address(args[0]))
        else:
            self._unwritten, self._written = object(), set()

    def _is_marked(self, value: Tensor, state: tuple[Any, object]) -> bool:
        """Whether a tensor was rounded so, and nothing may have written to it since."""
        if getattr(value, _ROUNDED, None) != state:
            return False
        return not self._written or _storage_address(value) not in self._written

    def _active(self) -> bool:
        """Whether products that run now are rounded."""
        running = self._scope.running
        if running is None:
            return self._region != "router" and not self._scope.exact
        return self._region != "others" and running not in self._kept

    def _operands(self, func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Positions of the activations in a product's arguments; none for other functions."""
        if func in _ACTIVATION_FIRST:
            return (0,)
        if func in _MATMUL:
            if self._format.plain:
                return (0, 1)
            return (0,) if _storage_address(args[1]) in self._weights else ()
        return (0, 1, 2) if func in _ATTENTION and self._format.plain else ()

    def _rounded(self, value: Any, rounding: Any, is_new: bool = False) -> Any:
        """Round a tensor to a grid, unless it lies on it already; a new one where it is."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or rounding is None:
            return value
        state = (rounding, self._unwritten)
        if not rounding.scaled and self._is_marked(value, state):
            return value
        if is_new and type(value) is Tensor and not value.requires_grad:
            round_in_place(value, rounding)  # nobody else has it, and fresh memory is slow
            rounded = value
        else:
            rounded = rounded_in_pieces(value, rounding)
        setattr(rounded, _ROUNDED, state)
        return rounded

    def _result(self, value: Any, is_new: bool = False) -> Any:
        """Round, except single columns, such as the variance in a norm, and float32 logits."""
        if self._scope.running in self._single:
            return value
        if isinstance(value, Tensor) and value.ndim and value.shape[-1] == 1:
            return value
        return self._rounded(value, self._format.results, is_new)

    def _carry_mark(self, source: Any, result: Any) -> None:
        """Mark numbers that were moved as rounded if those that they come from were."""
        sources = (source,) if isinstance(source, Tensor) else source
        mark = getattr(sources[0], _ROUNDED, None)
        results = (result,) if isinstance(result, Tensor) else result
        if mark is None or results[0].dtype != sources[0].dtype:
            return
        if all(self._is_marked(tensor, mark) for tensor in sources):
            for tensor in results:
                setattr(tensor, _ROUNDED, mark)
