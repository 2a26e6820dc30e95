"""A pretended accelerator "fake": a device of its own to torch, whose data stay on the CPU.

torch lets a device be registered in Python (PrivateUse1). Every operator runs on the CPU data of
its tensors, so results equal those of the CPU bit for bit, but

- tensors of two devices do not mix, as on CUDA: only numbers (tensors without axes) of the CPU may
  stand in an elementwise operation, and indices of the CPU may index;
- a generator of the CPU draws nothing on the device;
- whatever would make the host wait for an accelerator is counted (`counting`): reading a number
  back, copies between the devices, results whose shape depends on the data.

Tensors look contiguous whatever the strides of their data are, there is one stream, and no kernel
of an accelerator runs: what this cannot show is listed in docs/accelerators.md.
"""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._device import _device_constructors

NAME = "fake"
COPIES = {"_copy_from", "copy_", "_to_copy", "_copy_from_and_resize", "set_"}
READS = {"_local_scalar_dense", "equal", "is_nonzero", "allclose"}
SIZED_BY_DATA = {
    "nonzero",
    "masked_select",
    "bincount",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "repeat_interleave",
    "histogram",
}
"""Operators whose result has a shape that only the data know: the host waits for it."""
TAKES_CPU_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
GROUPED = {"_grouped_mm", "grouped_mm"}
STRICT = {"mm", "bmm", "addmm", "baddbmm", "cat", "stack", "index_select", "gather", "scatter"}
"""Operators that take not even a number of the CPU."""


@dataclass
class Traffic:
    """What the host had to wait for, operator by operator.

    Attributes:
        reads: numbers read back, and results sized by data.
        to_cpu: copies from the device that block.
        to_device: copies from the CPU's pageable memory.
        asynchronous: copies that do not block.
        launches: operators that ran on the device.
    """

    reads: Counter[str] = field(default_factory=Counter)
    to_cpu: Counter[str] = field(default_factory=Counter)
    to_device: Counter[str] = field(default_factory=Counter)
    asynchronous: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)

    @property
    def waits(self) -> int:
        """Synchronisations: reads and blocking copies of both directions."""
        return sum(map(Counter.total, (self.reads, self.to_cpu, self.to_device)))

    def __str__(self) -> str:
        copies = f"to CPU {dict(self.to_cpu)}, to device {dict(self.to_device)}"
        return f"reads {dict(self.reads)}, {copies}"


OPEN: list[Traffic] = []


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count the traffic inside the block."""
    traffic = Traffic()
    OPEN.append(traffic)
    try:
        yield traffic
    finally:
        OPEN.remove(traffic)


_LARGEST: list[int] = []


@contextmanager
def full_above(n_bytes: int) -> Iterator[None]:
    """Run out of memory inside the block where a tensor takes more than this many bytes."""
    _LARGEST.append(n_bytes)
    try:
        yield
    finally:
        _LARGEST.pop()


def _note(kind: str, name: str) -> None:
    for traffic in OPEN:
        getattr(traffic, kind)[name] += 1


def why_unavailable() -> str | None:
    """The reason why this torch cannot pretend; None if it can."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"torch {torch.__version__} registers no device in Python"
    if not hasattr(getattr(torch._C, "_acc", None), "create_empty_tensor"):
        return f"torch {torch.__version__} makes no tensor of a device registered in Python"
    return None


class _Tables:
    """CPU data behind the tensors of the device, by the address of their empty storage."""

    def __init__(self) -> None:
        self.data: dict[int, tuple[torch.Tensor, StorageWeakRef]] = {}
        self.limit = 256
        self._lock = threading.Lock()  # an address that is dropped may be another thread's by then

    def add(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            self.data[storage._cdata] = data, StorageWeakRef(storage)
            if len(self.data) > self.limit:
                kept = {key: row for key, row in self.data.items() if not row[1].expired()}
                for key in self.data.keys() - kept.keys():
                    del self.data[key]
                self.limit = 2 * len(kept) + 256


_TABLES = _Tables()


class PretendedTensor(torch.Tensor):
    """A class of its own, so that `nn.Parameter` keeps it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else str(self)


def _wrapped(data: torch.Tensor) -> torch.Tensor:
    """A tensor of the device over CPU data."""
    if _LARGEST and data.nbytes > _LARGEST[-1]:
        raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {data.nbytes} bytes")
    with torch.inference_mode(False):
        tensor = torch._C._acc.create_empty_tensor(list(data.shape), data.dtype)
        tensor.__class__ = PretendedTensor
        _TABLES.add(tensor, data)
        return tensor


def _data(x: Any) -> Any:
    """The CPU data of a tensor of the device; anything else as it is."""
    if not isinstance(x, torch.Tensor) or x.device.type != NAME:
        return x
    return _TABLES.data[x.untyped_storage()._cdata][0]


_TESTS = Path(__file__).parents[1]


def called_by_a_test(frames: int) -> bool:
    """Whether the caller so many frames above is code of the suite."""
    return _TESTS in Path(sys._getframe(frames + 1).f_code.co_filename).parents


class RecordsOnCPU(TorchFunctionMode):
    """Make the tensors of tests on the CPU, and those of the package on the default device.

    For tests whose inputs are records, which are on the CPU whatever the default device is.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None and called_by_a_test(1):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


_Generator = torch.Generator


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    """Makes annotations that say `torch.Generator` hold for generators of every device."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)


class PretendedGenerator(torch.Generator, metaclass=_AnyGenerator):
    """A generator that says it is on the device."""

    def __new__(cls, device: Any = None) -> Any:
        """A generator of the CPU's numbers, of this class if the device is the pretended one.

        Without a device it is one of the CPU, as torch makes it; a test gets one of the default
        device, so that tests that draw numbers with a seed do so wherever `--device` says.
        """
        if device is None:
            device = torch.get_default_device() if called_by_a_test(1) else "cpu"
        if torch.device(device).type != NAME:
            return _Generator(device=device)
        generator = super().__new__(cls, device="cpu")
        _ON_DEVICE.add(generator._cdata)
        return generator

    def __del__(self) -> None:
        _ON_DEVICE.discard(self._cdata)

    @property
    def device(self) -> torch.device:
        """The pretended device."""
        return torch.device(NAME, 0)


_ON_DEVICE: set[int] = set()
"""Addresses of the generators of the device: an operator gets another object for the same one."""


def _check_devices(name: str, leaves: list[torch.Tensor], generator: Any) -> None:
    """Raise where CUDA would: tensors of two devices, or a generator of the CPU."""
    if generator is not None and generator._cdata not in _ON_DEVICE:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    others = [x for x in leaves if x.device.type != NAME and (x.dim() or name in STRICT)]
    if others and name not in TAKES_CPU_INDICES:
        raise RuntimeError(
            f"aten::{name}: Expected all tensors to be on the same device, but found at least two "
            f"devices, {NAME}:0 and {others[0].device}!"
        )
    for other in others:
        if other.is_floating_point():
            raise RuntimeError(f"aten::{name}: {NAME}:0 is indexed into {other.device}")
        _note("to_device", f"{name} by CPU indices")


def _note_traffic(name: str, leaves: list[torch.Tensor], args: tuple, kwargs: dict) -> None:
    """Count what an operator would make the host wait for."""
    _note("launches", name)
    masked = name in TAKES_CPU_INDICES and any(
        isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    )
    sized = name in SIZED_BY_DATA and kwargs.get("output_size") is None
    if name in READS or sized:
        _note("reads", name)
    elif masked:
        _note("reads", f"{name} by a mask")
    elif name in GROUPED and leaves[0].dtype != torch.bfloat16:
        _note("reads", "offsets of grouped_mm, not in bfloat16")


def _note_copy(name: str, source: torch.Tensor, to: str, blocking: bool) -> None:
    """Count a copy between the devices."""
    if source.device.type == to:
        return
    if not blocking:
        _note("asynchronous", name)
    elif to == "cpu":
        _note("to_cpu", name)
    elif source.device.type == "cpu":
        _note("to_device", name)


def _is_blocking(op: Any, args: tuple, kwargs: dict) -> bool:
    names = [argument.name for argument in op._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    return not bound.get("non_blocking", False)


def _run(op: Any, plain: tuple, kwargs: dict) -> Any:
    """The operator on CPU data, with what accelerators can and the CPU cannot."""
    name = op._schema.name.removeprefix("aten::")
    if name == "histc" and not plain[0].is_floating_point():
        return op(plain[0].float(), *plain[1:], **kwargs).to(plain[0].dtype)
    try:
        return op(*plain, **kwargs)
    except RuntimeError:  # the wrapper looks contiguous where its data are not
        if name in ("view", "_unsafe_view", "_reshape_alias"):
            return plain[0].reshape(plain[1])
        if name in GROUPED:
            return op(
                *(x.contiguous() if isinstance(x, torch.Tensor) else x for x in plain), **kwargs
            )
        raise


def _leaves(args: tuple, kwargs: dict) -> list[Any]:
    """Arguments of an operator with its lists of tensors or numbers taken apart."""
    leaves: list[Any] = []
    for argument in (*args, *kwargs.values()):
        leaves.extend(argument) if isinstance(argument, list | tuple) else leaves.append(argument)
    return leaves


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The function of a value, or of every entry of a list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, entry) for entry in value])
    return function(value)


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operator: check devices, count traffic, compute on the CPU data, wrap the result."""
    name = op._schema.name.removeprefix("aten::")
    target = kwargs.get("device")
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    values = _leaves(args, kwargs)
    leaves = [x for x in values if isinstance(x, torch.Tensor)]
    generator = next((g for g in values if isinstance(g, _Generator)), None)
    if name in COPIES:
        to = torch.device(target).type if target is not None else leaves[0].device.type
        source = leaves[0] if target is not None else leaves[-1]
        to = leaves[1].device.type if name == "_copy_from" else to
        source = leaves[0] if name == "_copy_from" else source
        _note_copy(name, source, to, _is_blocking(op, args, kwargs))
    else:
        _check_devices(name, leaves, generator)
        _note_traffic(name, leaves, args, kwargs)
    if name == "_copy_from":
        _data(args[1]).copy_(_data(args[0]))
        return args[1]
    with torch.inference_mode(False), torch.no_grad():
        cpu_kwargs = {key: _mapped(_data, value) for key, value in kwargs.items()}
        out = _run(op, _mapped(_data, args), cpu_kwargs)
    back = {id(_data(x)): x for x in leaves}
    on_cpu = target is not None and torch.device(target).type == "cpu"

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in back:
            return x if on_cpu else _wrapped(x)
        if back[id(x)].shape != x.shape:  # squeeze_ and its like change the shape in place
            back[id(x)].data = _wrapped(x)
        return back[id(x)]

    return _mapped(wrap, out)


class _Module(backend_registration._DummyBackendModule):
    """What `torch.fake` is asked for."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, *_: Any) -> None:
        _note("reads", "synchronize")

    def set_device(self, *_: Any) -> None:
        pass

    def is_bf16_supported(self) -> bool:
        return True


PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear")
"""Operators that autocast runs in its dtype, those of CUDA's list that routing uses."""


def _autocast(op: Any, *args: Any) -> Any:
    """Run a product in the dtype of autocast."""
    dtype = torch.get_autocast_dtype(NAME)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        narrow = (x.to(dtype) if getattr(x, "dtype", None) == torch.float32 else x for x in args)
        return op(*narrow)


_LIBRARIES: list[torch.library.Library] = []


def register() -> str:
    """Register the device, once per process; returns its name."""
    if _LIBRARIES:
        return NAME
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_fallback, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in PRODUCTS:
        product = getattr(torch.ops.aten, name).default
        aten.impl(name, functools.partial(_autocast, product), "AutocastPrivateUse1")
    generic = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd")
    for full in generic:  # a generic kernel would never reach the fallback
        name, _, overload = full.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        if full.startswith("aten::") and op is not None and name != "_copy_from":
            implementation: Callable[..., Any] = functools.partial(_fallback, op)
            aten.impl(full.removeprefix("aten::"), implementation, "PrivateUse1")
    address = safetensors.torch.storage_ptr
    safetensors.torch.storage_ptr = lambda tensor: address(
        _data(tensor)
    )  # empty storages have none
    torch.Generator = PretendedGenerator  # type: ignore[misc,assignment]
    _LIBRARIES.extend((every, aten))
    return NAME
