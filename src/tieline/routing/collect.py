"""Collect the routing of every layer of a model, and add up its auxiliary losses.

    with collect_routing(model) as routing:
        loss = task_loss(model(x))
    loss = loss + auxiliary_loss(routing, balance=0.01)

Nothing is kept in the modules. A forward that activation checkpointing repeats during backward is
not collected again; under the reentrant kind, which runs the first forward without a graph, no
gradient can reach the router, and `auxiliary_loss` says so.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.errors import TielineError, require
from tieline.recompute import is_recomputing
from tieline.routing.layer import MoE, Routing
from tieline.routing.losses import (
    Counts,
    balance_loss,
    boundary_loss,
    router_z_loss,
    sparsity_loss,
)
from tieline.routing.smooth import SmoothTopK

__all__ = ["LayerRouting", "auxiliary_loss", "collect_routing", "is_collected"]


@dataclass(frozen=True)
class LayerRouting:
    """One call of one layer: its name in the model, the layer, and what it decided."""

    name: str
    layer: MoE
    routing: Routing


@contextmanager
def collect_routing(model: nn.Module) -> Iterator[list[LayerRouting]]:
    """Collect a record for every call of every `MoE` in `model` while the context is open."""
    records: list[LayerRouting] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, MoE):
                hook = partial(_record, records, name, module)
                hooks.callback(module.gate.register_forward_hook(hook).remove)
        yield records


def _record(
    records: list[LayerRouting],
    name: str,
    layer: MoE,
    gate: nn.Module,
    inputs: tuple[Tensor, ...],
    weights: Tensor,
) -> None:
    if not is_recomputing():
        records.append(LayerRouting(name, layer, Routing(inputs[0], weights)))


def is_collected(layer: MoE) -> bool:
    """Whether a `collect_routing` is open that sees the calls of this layer."""
    return any(
        isinstance(hook, partial) and hook.func is _record
        for hook in layer.gate._forward_hooks.values()
    )


def auxiliary_loss(
    records: Sequence[LayerRouting],
    *,
    balance: float = 0.0,
    router_z: float = 0.0,
    boundary: float = 0.0,
    sparsity: float = 0.0,
    counts: Sequence[Counts] | None = None,
) -> Float[Tensor, ""]:
    """Mean over the collected layers of the weighted losses.

    Args:
        records: from `collect_routing`.
        balance: coefficient of `balance_loss`.
        router_z: coefficient of `router_z_loss`.
        boundary: coefficient α of `boundary_loss`, for layers whose `SmoothTopK` learns its ε.
        sparsity: coefficient of `sparsity_loss`.
        counts: per record, the assignments and tokens of the batch that it is a part of; by
            default the record is the whole batch.
    """
    require(len(records) > 0, "no routing was collected: the model ran no MoE layer", TielineError)
    total = torch.zeros((), device=records[0].routing.scores.device)
    for record, over in zip(records, counts or [None] * len(records), strict=True):
        _check_graph(record)
        scores, weights, gate = record.routing.scores, record.routing.weights, record.layer.gate
        if balance:
            total = total + balance * balance_loss(scores, weights, over)
        if router_z:
            total = total + router_z * router_z_loss(scores, over)
        if boundary and isinstance(gate, SmoothTopK) and gate.theta is not None:
            total = total + boundary * boundary_loss(gate.epsilon, weights, gate.budget, over)
        if sparsity:
            total = total + sparsity * sparsity_loss(weights, over)
    return total / len(records)


def _check_graph(record: LayerRouting) -> None:
    trainable = any(p.requires_grad for p in record.layer.router.parameters())
    require(
        record.routing.scores.requires_grad or not (trainable and torch.is_grad_enabled()),
        f"the scores of {record.name!r} carry no gradient although its router is trainable: "
        "use checkpoint(..., use_reentrant=False), or build the loss under no_grad",
        TielineError,
    )
