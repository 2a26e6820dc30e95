"""Sound changes: what engines and kernels do to a run without a fault."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.blind import feeds, parts
from benchmarks.blind.changes import Case, Change
from benchmarks.blind.precisions import cast
from tieline.trace.record import RoutingTrace
from tieline.trace.selection import concatenate, select_tokens

Noise = Callable[[Tensor, torch.Generator], Tensor]
"""Noise of unit median size for logits, given a tensor of their shape."""


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise."""
    return torch.randn(like.shape, generator=generator)


def student(like: Tensor, generator: torch.Generator) -> Tensor:
    """Student's t with 2.5 degrees of freedom, scaled to the median size of normal noise."""
    seed = int(torch.randint(1 << 31, (1,), generator=generator))
    draws = np.random.default_rng(seed).standard_t(2.5, size=tuple(like.shape))
    scale = stats.norm.ppf(0.75) / stats.t.ppf(0.75, 2.5)
    return torch.from_numpy(scale * draws).to(like.dtype)


def spikes(like: Tensor, generator: torch.Generator, rate: float, factor: float) -> Tensor:
    """Normal noise, of which a share `rate` is `factor` times as large."""
    rare = torch.rand(like.shape, generator=generator) < rate
    return normal(like, generator) * torch.where(rare, factor, 1.0)


class RouterProducts(TorchFunctionMode):
    """Passes the products of routers' matrices through `change`, given router and logits."""

    def __init__(self, model: nn.Module, change: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        weights = [parts.router_weight(router) for router in parts.routers(model)]
        self._routers = {weight.data_ptr(): index for index, weight in enumerate(weights)}
        self._change = change

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Change the result of a router's product; pass everything else on."""
        result = function(*args, **(kwargs or {}))
        if function is F.linear:
            index = self._routers.get(args[1].data_ptr())
            return result if index is None else self._change(index, result)
        return result


def router_logits(model: nn.Module, ids: Tensor) -> dict[int, Tensor]:
    """Return the logits of every router on some documents, in float32, by hooks."""
    logits: dict[int, Tensor] = {}
    handles = [
        router.register_forward_hook(partial(_keep, logits, index))
        for index, router in enumerate(parts.routers(model))
    ]
    model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return logits


def _keep(logits: dict[int, Tensor], index: int, _: nn.Module, __: Any, output: Any) -> None:
    logits[index] = output[0].float()


@torch.no_grad()
def bf16_noise(model: nn.Module, ids: Tensor) -> list[float]:
    """Return 1.48 median deviations of every router's logits between float32 and bf16."""
    exact, other = router_logits(model, ids), copy.deepcopy(model)
    cast(other, torch.bfloat16)
    rounded = router_logits(other, ids)
    differences = [rounded[index] - exact[index] for index in sorted(exact)]
    return [1.4826 * float((d - d.median()).abs().median()) for d in differences]


@contextmanager
def noisy_logits(case: Case, noise: Noise) -> Iterator[None]:
    """Add noise of the size of bf16 to every logit."""
    sizes = bf16_noise(case.model, case.documents[:4])

    def change(index: int, logits: Tensor) -> Tensor:
        return logits + sizes[index] * noise(logits, case.generator)

    with RouterProducts(case.model, change):
        yield


def spiky_logits(case: Case) -> Any:
    """One score in 10² ... 10⁴ with 10 to 100 times the noise of the others."""
    rate = 10.0 ** -(2 + case.draw(3))
    factor = 10 ** (1 + case.draw(1001) / 1000)
    return noisy_logits(case, partial(spikes, rate=rate, factor=factor))


@torch.no_grad()
def near_equal_rows(case: Case, distance: float) -> None:
    """Make three rows of every router copies of others, up to a relative distance."""
    for router in parts.routers(case.model):
        weight = parts.router_weight(router)
        order = torch.randperm(len(weight), generator=case.generator)
        for target, source in zip(order[:3].tolist(), order[3:6].tolist(), strict=False):
            weight[target] = weight[source] * (1 + distance * case.normal(weight.shape[1]))


def outlier_channels(case: Case) -> None:
    """Norms × c on two to five channels and their readers ÷ c, c from 1 to 1000."""
    width = parts.embedding(case.model).weight.shape[1]
    channels = torch.randperm(width, generator=case.generator)[: 2 + case.draw(4)]
    parts.scale_channels(case.model, channels, 10 ** (case.draw(3001) / 1000))


@torch.no_grad()
def permute_neurons(case: Case) -> None:
    """Renumber the hidden neurons of every expert: sums in another order, the same function."""
    for stacked in parts.experts(case.model):
        first, second = parts.gate_up(stacked), parts.down(stacked)
        if parts.transposed(stacked):  # gate and up take turns
            order = torch.randperm(second.shape[1], generator=case.generator)
            first.copy_(first.unflatten(2, (-1, 2))[:, :, order].flatten(2))
            second.copy_(second[:, order])
            bias = stacked.get_parameter("gate_up_proj_bias")
            bias.copy_(bias.unflatten(1, (-1, 2))[:, order].flatten(1))
        else:
            order = torch.randperm(second.shape[2], generator=case.generator)
            first.copy_(first.unflatten(1, (2, -1))[:, :, order].flatten(1, 2))
            second.copy_(second[:, :, order])


def output_projections(model: nn.Module) -> list[nn.Module]:
    """Return the output projection of every attention layer."""
    return [attention.get_submodule("o_proj") for attention in parts.attentions(model)]


@torch.no_grad()
def merge_adapters(case: Case) -> None:
    """Add B A of rank 4 to the output projections, and leave A and B to later slots."""
    pairs = []
    for projection in output_projections(case.model):
        weight = projection.get_parameter("weight")
        rows, columns = weight.shape
        a, b = case.normal(4, columns) / math.sqrt(columns), 0.1 * case.normal(rows, 4)
        weight += b @ a
        pairs.append((a, b))
    case.shares["adapters"] = pairs


@torch.no_grad()
def unmerge_adapters(case: Case) -> None:
    """Take B A off again."""
    projections = output_projections(case.model)
    for projection, (a, b) in zip(projections, case.shares["adapters"], strict=True):
        projection.get_parameter("weight").sub_(b @ a)


@contextmanager
def adapters(case: Case, layers: slice = slice(None)) -> Iterator[None]:
    """Add B (A x) to the output of projections."""
    pairs = list(zip(output_projections(case.model), case.shares["adapters"], strict=True))
    handles = [
        projection.register_forward_hook(partial(_adapted, a, b))
        for projection, (a, b) in pairs[layers]
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adapted(a: Tensor, b: Tensor, _: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    states = arguments[0]
    return output + F.linear(F.linear(states, a.to(states.dtype)), b.to(states.dtype))


def half_identical(case: Case, trace: RoutingTrace) -> RoutingTrace:
    """Take every other document as run A recorded it."""
    assert case.reference is not None
    even = case.reference.documents % 2 == 0
    halves = [select_tokens(case.reference, even), select_tokens(trace, ~even)]
    return feeds.ordered(concatenate(halves))


BOTH_16 = ("bf16", "bf16 emulated")
OUTLIERS = frozenset({"outliers"})
"""Plain grids of 8 and 4 bits lose what outlier channels carry: that is no sound change."""

SOUND: tuple[Change, ...] = (
    Change("precision alone", precisions=BOTH_16),
    Change("fp16", precisions=("fp16",)),
    Change("tf32", precisions=("tf32",)),
    Change("bf16, float32 routers", precisions=("bf16, float32 routers",)),
    Change("bf16 weights", precisions=("bf16 weights, float32 sums",)),
    Change("int8 kernels", precisions=("int8",), lacks=OUTLIERS),
    Change("int8 weights", precisions=("int8 weights",), lacks=OUTLIERS),
    Change("4 bits", precisions=("int4", "int4 with zero"), lacks=OUTLIERS),
    Change("nf4", precisions=("nf4",), lacks=OUTLIERS),
    Change("mxfp4 experts", precisions=("mxfp4 experts",), lacks=OUTLIERS),
    Change("mxfp4", precisions=("mxfp4",), lacks=OUTLIERS),
    Change("fp8 blocks", precisions=("fp8 blocks",), lacks=OUTLIERS),
    Change("fp8 cache", precisions=("fp8 cache", "fp8 cache called bf16")),
    Change(
        "eager attention",
        feed=partial(feeds.with_attention, implementation="eager"),
        precisions=("float32", "bf16"),
    ),
    Change(
        "eager experts",
        feed=partial(feeds.with_experts, implementation="eager"),
        precisions=("float32", "bf16"),
    ),
    Change("one document at a time", feed=feeds.one_by_one, precisions=("float32", "bf16")),
    Change("batches of three", feed=feeds.in_threes, precisions=("float32", "bf16")),
    Change("documents reordered", feed=feeds.reordered, precisions=("float32", "bf16")),
    Change("padding on the left", feed=feeds.padded_left, precisions=("float32", "bf16")),
    Change("padding on the right", feed=feeds.padded_right, precisions=("float32", "bf16")),
    Change("packed", feed=feeds.packed, precisions=("float32", "bf16")),
    Change("two threads", feed=feeds.with_threads, precisions=("float32", "bf16")),
    Change("decoded with a cache", feed=feeds.decoded, precisions=("float32", "bf16")),
    Change("chunked prefill", feed=feeds.chunked, precisions=("float32", "bf16")),
    Change(
        "adapters not merged",
        both=merge_adapters,
        weights=unmerge_adapters,
        context=adapters,
        precisions=("float32", "bf16"),
    ),
    Change("neurons renumbered", weights=permute_neurons, precisions=("float32", "bf16")),
    Change("outliers in B", weights=outlier_channels, precisions=("float32", "bf16")),
    Change("outliers in both", both=outlier_channels, precisions=("bf16", "fp16")),
    Change(
        "near-equal router rows",
        both=partial(near_equal_rows, distance=1e-6),
        feed=feeds.in_threes,
        precisions=("float32", "bf16"),
    ),
    Change(
        "equal router rows",
        both=partial(near_equal_rows, distance=0.0),
        feed=feeds.in_threes,
        precisions=("float32", "bf16"),
    ),
    Change("half of the documents equal", file=half_identical, precisions=("bf16", "fp16")),
)
"""The sound changes; their precisions take turns."""

NOISE = ("float32 with bf16 noise",)

STRESS: tuple[Change, ...] = (
    Change("spikes", context=spiky_logits, precisions=NOISE),
    Change("t noise", context=lambda case: noisy_logits(case, student), precisions=NOISE),
    Change("outlier channels", weights=outlier_channels, precisions=("bf16",)),
)
"""Sound changes that are counted apart, 200 of each."""

FUNCTION_KEPT = frozenset(change.name for change in SOUND if "float32" in change.precisions)
"""Sound changes that leave the function of the model as it is."""
