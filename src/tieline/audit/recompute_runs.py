"""Forward passes of one batch in several ways, each with what the routers did."""

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from tieline.audit.monitor_watch import RouterCall, watch_routing
from tieline.audit.recompute_compare import Run
from tieline.errors import TielineError, require

__all__ = ["Inputs", "checkpointed", "compiled", "other_threads", "plain", "split"]


@dataclass(frozen=True)
class Inputs:
    """Arguments of a call, which can be cut along the rows of the batch."""

    args: tuple[Any, ...]
    named: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, batch: Any) -> "Inputs":
        """Arguments from a tensor, a mapping or a tuple; ids go to `input_ids`."""
        if isinstance(batch, Mapping):
            return cls((), {**_no_cache(module), **batch})
        if (
            isinstance(batch, Tensor)
            and not batch.is_floating_point()
            and hasattr(module, "config")
        ):
            return cls((), {"input_ids": batch, **_no_cache(module)})
        return cls(batch if isinstance(batch, tuple) else (batch,), {})

    @property
    def rows(self) -> int:
        """Size of the first axis of the first tensor."""
        for value in (*self.args, *self.named.values()):
            if isinstance(value, Tensor) and value.ndim:
                return len(value)
        raise TielineError("the batch holds no tensor: nothing can be run")

    def parts(self, count: int) -> list["Inputs"]:
        """The same call in `count` smaller ones; what has no row per row of the batch is shared."""
        rows = self.rows
        edges = [rows * part // count for part in range(count + 1)]
        spans = itertools.pairwise(edges)
        return [self._cut(slice(start, stop), rows) for start, stop in spans]

    def _cut(self, span: slice, rows: int) -> "Inputs":
        def cut(value: Any) -> Any:
            has_rows = isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
            return value[span] if has_rows else value

        return Inputs(
            tuple(cut(value) for value in self.args),
            {name: cut(value) for name, value in self.named.items()},
        )


def plain(module: nn.Module, inputs: Inputs) -> Run:
    """A forward pass without gradients."""
    with torch.no_grad():
        return _observed(module, lambda: module(*inputs.args, **inputs.named))


def split(module: nn.Module, inputs: Inputs, count: int) -> Run:
    """The same in smaller batches, one after the other."""
    done = [plain(module, part) for part in inputs.parts(count)]
    calls = [call for run in done for call in run.calls]
    outputs = [run.output for run in done if run.output is not None]
    return Run(torch.cat(outputs), tuple(calls), done[0].rounding)


def other_threads(module: nn.Module, inputs: Inputs) -> Run:
    """The same on one thread, or on two if torch has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        return plain(module, inputs)
    finally:
        torch.set_num_threads(before)


def compiled(module: nn.Module, inputs: Inputs, backend: str) -> Run:
    """The same compiled."""
    fast: Any = torch.compile(module, backend=backend)
    with torch.no_grad():
        return _observed(module, lambda: fast(*inputs.args, **inputs.named))


def checkpointed(module: nn.Module, inputs: Inputs) -> tuple[Run, Run]:
    """A pass under checkpointing and its repetition in the backward pass.

    Where nothing needs a gradient nothing is repeated, and a second plain pass stands in for it.
    """
    outputs: list[Tensor] = []
    errors: list[str] = []

    def forward(*args: Any, **named: Any) -> Tensor:
        output = main_tensor(module(*args, **named))
        outputs.append(output.detach())
        return output

    def run() -> Tensor:
        leaves = _leaves(module, inputs)
        with torch.enable_grad(), set_checkpoint_early_stop(False):
            output = checkpoint(forward, *inputs.args, use_reentrant=False, **inputs.named)
            assert isinstance(output, Tensor)
            if output.requires_grad and leaves:
                try:
                    torch.autograd.grad(output.float().sum(), leaves, allow_unused=True)
                except CheckpointError as problem:
                    errors.append(str(problem))
        return output

    seen = _observed(module, run)
    first = [call for call in seen.calls if not call.recomputed]
    again = [call for call in seen.calls if call.recomputed]
    if not again and not errors:
        return Run(outputs[0], tuple(first), seen.rounding), plain(module, inputs)
    repeated = outputs[1] if len(outputs) > 1 else None
    error = errors[0] if errors else None
    return (
        Run(outputs[0], tuple(first), seen.rounding),
        Run(repeated, tuple(again), seen.rounding, error),
    )


def main_tensor(output: Any) -> Tensor:
    """The logits or hidden states in what a module returned."""
    for found in (output, getattr(output, "logits", None)):
        if isinstance(found, Tensor):
            return found
    first = output[0] if isinstance(output, tuple) or hasattr(output, "keys") else None
    require(isinstance(first, Tensor), f"no tensor in an output of type {type(output).__name__}")
    assert isinstance(first, Tensor)
    return first


def _observed(module: nn.Module, run: Callable[[], Any]) -> Run:
    """The run from the random numbers of now, which are as they were afterwards."""
    calls: list[RouterCall] = []
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with (
        torch.random.fork_rng(devices=[device.index for device in devices]),
        watch_routing(module, calls.append, ranks=None, repetitions=True),
    ):
        output = main_tensor(run()).detach()
    return Run(output, tuple(calls), _rounding(module))


def _leaves(module: nn.Module, inputs: Inputs) -> list[Tensor]:
    """What gradients are asked for: parameters, and inputs that want one."""
    tensors = (*module.parameters(), *inputs.args, *inputs.named.values())
    return [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]


def _rounding(module: nn.Module) -> float:
    """Unit roundoff of the coarsest type in which the module computes."""
    kinds = {p.dtype for p in module.parameters() if p.dtype.is_floating_point}
    if torch.is_autocast_enabled("cpu"):
        kinds.add(torch.get_autocast_dtype("cpu"))
    if torch.is_autocast_enabled("cuda"):
        kinds.add(torch.get_autocast_dtype("cuda"))
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)


def _no_cache(module: nn.Module) -> dict[str, Any]:
    """Models of transformers keep no cache, which would cost memory and serve nothing."""
    known = "use_cache" in inspect.signature(module.forward).parameters
    return {"use_cache": False} if known else {}
