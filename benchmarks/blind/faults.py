"""Faults in weights, routers and experts: bugs of loaders, kernels and parallel layouts.

Faults of attention, positions and inputs are in `context_faults`, of files in `file_faults`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.blind import parts
from benchmarks.blind.changes import Case, Change
from benchmarks.blind.context_faults import CONTEXT_FAULTS
from benchmarks.blind.file_faults import FILE_FAULTS
from benchmarks.blind.precisions import integers
from benchmarks.blind.sound import adapters, merge_adapters

Weighing = Callable[[Tensor, Tensor], Tensor]
"""New combine weights (tokens, k) of experts (tokens, k) and their weights."""

SHARED = frozenset({"shared"})
SHARED_GATE = frozenset({"shared_gate"})
BIAS = frozenset({"bias"})
GROUPS = frozenset({"groups"})
SINKS = frozenset({"sinks"})
POST_NORM = frozenset({"post_norm"})


def inner_index(case: Case) -> int:
    """Return a random routed layer, but the last: no router sees what its experts do."""
    return case.draw(max(len(parts.routers(case.model)) - 1, 1))


def loaded_experts(case: Case, layer: int) -> list[int]:
    """Return the experts of a layer by their load in run A, heaviest first."""
    assert case.reference is not None
    trace = case.reference.layers[layer]
    chosen = trace.experts[:, : trace.facts.k].long().flatten()
    return torch.bincount(chosen, minlength=trace.facts.n_experts).argsort(descending=True).tolist()


@torch.no_grad()
def swap_experts(case: Case) -> None:
    """Exchange the two most used experts of a layer."""
    layer = inner_index(case)
    first, second = loaded_experts(case, layer)[:2]
    stacked = parts.experts(case.model)[layer]
    for weight in stacked.parameters():
        weight[[first, second]] = weight[[second, first]]


@torch.no_grad()
def scale_expert(case: Case, factor: float) -> None:
    """Multiply the output of the most used expert of a layer."""
    layer = inner_index(case)
    expert = loaded_experts(case, layer)[0]
    stacked = parts.experts(case.model)[layer]
    parts.down(stacked)[expert] *= factor


def other_activation(case: Case) -> None:
    """GELU in place of SiLU in the routed experts of all layers."""
    for stacked in parts.experts(case.model):
        stacked.act_fn = nn.GELU()  # type: ignore[assignment]


@torch.no_grad()
def swap_gate_and_up(case: Case) -> None:
    """Exchange the two halves of the first matrices of a layer's experts."""
    stacked = parts.experts(case.model)[inner_index(case)]
    weight = parts.gate_up(stacked)
    if parts.transposed(stacked):
        weight.copy_(weight.unflatten(2, (-1, 2)).flip(3).flatten(2))
    else:
        weight.copy_(weight.unflatten(1, (2, -1)).flip(1).flatten(1, 2))


@torch.no_grad()
def lose_partial_sum(case: Case) -> None:
    """Lose half of the hidden neurons of a layer's experts: a sum over ranks that is missing."""
    stacked = parts.experts(case.model)[inner_index(case)]
    weight = parts.down(stacked)
    axis = 1 if parts.transposed(stacked) else 2
    weight.narrow(axis, 0, weight.shape[axis] // 2).zero_()


@torch.no_grad()
def stale_layer(case: Case) -> None:
    """Weights of a layer from an earlier step: each 3 % of itself away, routers apart."""
    layer = case.inner(parts.routed_layers(case.model))
    apart = {id(parts.router_weight(router)) for router in parts.routers(case.model)}
    for weight in layer.parameters():
        if weight.ndim > 1 and id(weight) not in apart:
            weight.mul_(1 + 0.03 * case.normal(*weight.shape))


@torch.no_grad()
def other_router(case: Case) -> None:
    """The router of one layer has the matrix of another."""
    routers = parts.routers(case.model)
    layer = case.draw(len(routers))
    source = parts.router_weight(routers[(layer + 1) % len(routers)])
    parts.router_weight(routers[layer]).copy_(source.clone())


@torch.no_grad()
def roll_router(case: Case) -> None:
    """The rows of one router are one expert off."""
    weight = parts.router_weight(case.inner(parts.routers(case.model)))
    weight.copy_(weight.roll(1, dims=0))


@torch.no_grad()
def round_routers(case: Case) -> None:
    """Round the routers' matrices to int8."""
    for router in parts.routers(case.model):
        weight = parts.router_weight(router)
        weight.copy_(integers(8)(weight))


@contextmanager
def hooked(modules: list[nn.Module], hook: Any, before: bool = True) -> Iterator[None]:
    """Run with a hook on modules, before or after their forward."""
    if before:
        handles = [m.register_forward_pre_hook(hook) for m in modules]
    else:
        handles = [m.register_forward_hook(hook) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rounded_router_inputs(case: Case) -> Any:
    """Round the routers' inputs to int8 per token."""

    def rounded(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return integers(8)(arguments[0].float()).to(arguments[0].dtype), *arguments[1:]

    return hooked(parts.routers(case.model), rounded)


def jittered_inputs(case: Case) -> Any:
    """Jitter of training left on: inputs of routers times 1 ± 0.02."""

    def jittered(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states = arguments[0]
        draw = torch.rand(states.shape, generator=case.generator)
        return states * (0.98 + 0.04 * draw).to(states.dtype), *arguments[1:]

    return hooked(parts.routers(case.model), jittered)


@torch.no_grad()
def drop_bias(case: Case) -> None:
    """Selection biases of all layers are zero."""
    for block in parts.blocks(case.model):
        bias = parts.selection_bias(block)
        assert bias is not None
        bias.zero_()


def ignore_groups(case: Case) -> None:
    """Experts are chosen from all groups."""
    for router in parts.routers(case.model):
        for name in ("n_group", "num_group", "topk_group"):
            if hasattr(router, name):
                setattr(router, name, 1)


def reweighed(case: Case, weighing: Weighing, layers: slice | None = None) -> Any:
    """Other combine weights in one inner layer, or in some layers, without another choice."""
    stacked = parts.experts(case.model)
    chosen = [stacked[inner_index(case)]] if layers is None else stacked[layers]

    def hook(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        states, experts, weights = arguments
        return states, experts, weighing(experts, weights).to(weights.dtype)

    return hooked(chosen, hook)


def without_last(_: Tensor, weights: Tensor) -> Tensor:
    """Drop the smallest weight of each token and scale the others to the same sum."""
    kept = weights.scatter(1, weights.argmin(1, keepdim=True), 0.0)
    return kept * weights.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp_min(1e-6)


def reversed_weights(_: Tensor, weights: Tensor) -> Tensor:
    """The largest weight goes to the expert of the smallest."""
    ranks = weights.argsort(1).argsort(1)
    return weights.sort(1, descending=True).values.gather(1, ranks)


def even_weights(_: Tensor, weights: Tensor) -> Tensor:
    """All chosen experts weigh the same."""
    return weights.mean(1, keepdim=True).expand_as(weights)


def within_capacity(experts: Tensor, weights: Tensor) -> Tensor:
    """Drop tokens beyond a capacity of 1.25 even loads, later ones first."""
    chosen = nn.functional.one_hot(experts.long()).sum(1)
    order = chosen.cumsum(0).gather(1, experts.long())
    capacity = 1.25 * experts.numel() / max(int(experts.max()) + 1, 1)
    return weights.masked_fill(order > capacity, 0.0)


def without_rank(experts: Tensor, weights: Tensor) -> Tensor:
    """Lose the last quarter of the experts for the second half of a batch's tokens."""
    lost = experts >= 3 * (int(experts.max()) + 1) // 4
    late = torch.arange(len(experts))[:, None] >= len(experts) // 2
    return weights.masked_fill(lost & late, 0.0)


def open_shared_gates(case: Case) -> Any:
    """The gate of shared experts counts as one."""
    gates = [block.get_submodule("shared_expert_gate") for block in parts.blocks(case.model)]
    return hooked(gates, lambda _, __, output: torch.full_like(output, 30.0), before=False)


def lost_shared_expert(case: Case) -> Any:
    """The shared expert of one layer adds nothing."""
    module = case.inner(parts.shared_experts(case.model))
    return hooked([module], lambda _, __, output: torch.zeros_like(output), before=False)


def larger_epsilon(case: Case) -> None:
    """The ε of every norm is ten times as large."""
    for norm in parts.norms(case.model):
        for name in ("variance_epsilon", "eps"):
            if hasattr(norm, name):
                setattr(norm, name, 10 * getattr(norm, name))


@torch.no_grad()
def plain_norm(case: Case) -> None:
    """The norm before the feed-forward of one layer keeps its initial weight 1."""
    layer = case.inner(parts.routed_layers(case.model))
    layer.get_submodule("post_attention_layernorm").get_parameter("weight").fill_(1.0)


@torch.no_grad()
def swap_attention(case: Case) -> None:
    """Two neighbouring layers have each other's attention."""
    attentions = parts.attentions(case.model)
    first = case.draw(len(attentions) - 1)
    for a, b in zip(
        attentions[first].parameters(), attentions[first + 1].parameters(), strict=True
    ):
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)


@torch.no_grad()
def shrink_residual(case: Case) -> None:
    """The attention of one layer adds 0.8 of what it should."""
    layer = case.inner(parts.attentions(case.model))
    layer.get_submodule("o_proj").get_parameter("weight").mul_(0.8)


def doubled_adapter(case: Case) -> Any:
    """Adapters that are merged already are added once more, in the first layer."""
    return adapters(case, slice(0, 1))


WEIGHT_FAULTS: tuple[Change, ...] = (
    Change("expert swapped", weights=swap_experts, hints=("expert", "layer", "number")),
    Change("expert doubled", weights=partial(scale_expert, factor=2.0), hints=("expert", "layer")),
    Change("expert missing", weights=partial(scale_expert, factor=0.0), hints=("expert", "layer")),
    Change("gelu for silu", weights=other_activation, lacks=SINKS, hints=("expert",)),
    Change("gate and up swapped", weights=swap_gate_and_up, hints=("expert", "layer")),
    Change("partial sum lost", weights=lose_partial_sum, hints=("expert", "layer")),
    Change("stale layer", weights=stale_layer, hints=("layer",)),
    Change("another router", weights=other_router, hints=("router", "row", "layer", "offset")),
    Change(
        "router rows rolled",
        weights=roll_router,
        hints=("router", "row", "layer", "number", "offset"),
    ),
    Change(
        "router int8",
        weights=round_routers,
        context=rounded_router_inputs,
        hints=("router", "row", "layer"),
    ),
    Change("router jitter", context=jittered_inputs, hints=("router", "layer")),
    Change(
        "selection bias dropped",
        weights=drop_bias,
        needs=BIAS,
        hints=("bias", "offset", "router", "row", "scores"),
    ),
    Change("groups ignored", weights=ignore_groups, needs=GROUPS, hints=("group", "scores")),
    Change(
        "k - 1 in a layer",
        context=partial(reweighed, weighing=without_last),
        hints=("layer", "expert"),
    ),
    Change(
        "weights reversed",
        context=partial(reweighed, weighing=reversed_weights),
        hints=("layer", "expert"),
    ),
    Change(
        "weights even", context=partial(reweighed, weighing=even_weights), hints=("layer", "expert")
    ),
    Change(
        "capacity drops",
        context=partial(reweighed, weighing=within_capacity, layers=slice(None)),
        hints=("expert", "position", "document", "batch"),
    ),
    Change(
        "rank lost",
        context=partial(reweighed, weighing=without_rank, layers=slice(None)),
        hints=("expert", "document", "batch"),
    ),
    Change("shared gate ignored", context=open_shared_gates, needs=SHARED_GATE, hints=("expert",)),
    Change(
        "shared expert lost", context=lost_shared_expert, needs=SHARED, hints=("layer", "expert")
    ),
    Change("rms eps × 10", weights=larger_epsilon, hints=("token",)),
    Change("norm weight lost", weights=plain_norm, hints=("layer",)),
    Change("attention of layers swapped", weights=swap_attention, hints=("layer", "position")),
    Change(
        "residual × 0.8",
        weights=shrink_residual,
        lacks=POST_NORM,
        hints=("layer", "position"),
    ),
    Change(
        "adapter applied twice",
        both=merge_adapters,
        context=doubled_adapter,
        hints=("layer", "position"),
    ),
)
"""Faults of weights, routers and experts."""

FAULTS: tuple[Change, ...] = (*WEIGHT_FAULTS, *CONTEXT_FAULTS, *FILE_FAULTS)
"""All faults; `split.json` says which half each belongs to."""
