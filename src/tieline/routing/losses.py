"""Auxiliary losses of routing layers, and how to collect the routing that they need.

    balance_loss       E Σ_e f_e P_e               f share of the assignments, P mean probability
    router_z_loss      mean (logsumexp z)²
    boundary_loss      ε (K - k*)                  K mean number of experts in use (paper 1, sec. 6)
    sparsity_loss      mean Σ_e |w_e|              (ReMoE)

Every mean is over the tokens of `counts`, by default those of the call. Where a batch is spread
over processes, `counts` are those of the whole batch and each process computes its part of the
loss: the parts, and their gradients, add up to those of the batch.

    with collect_routing(model) as routing:
        loss = task_loss(model(x))
    loss = loss + auxiliary_loss(routing, balance=0.01)

Nothing is kept in the modules. A forward that activation checkpointing repeats during backward is
not collected again. Reentrant checkpointing runs the first forward without a graph, so no gradient
can reach the router, and `auxiliary_loss` raises.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.core.errors import TielineError, require
from tieline.core.numerics import is_recomputing
from tieline.routing.layer import MoE, Routing
from tieline.routing.smooth_gates import BandGate

__all__ = [
    "Counts",
    "LayerRouting",
    "auxiliary_loss",
    "balance_loss",
    "boundary_loss",
    "collect_routing",
    "is_collected",
    "router_z_loss",
    "sparsity_loss",
]

Scores = Float[Tensor, "*batch experts"]
Weights = Float[Tensor, "*batch experts"]
Scalar = Float[Tensor, ""]


class Counts(NamedTuple):
    """The batch that a loss averages over: assignments of each expert (E,) and tokens.

    Both are float64, in which every count up to 2^53 is exact, so that they can be added up over
    processes in one message.
    """

    assigned: Float[Tensor, " experts"]
    tokens: Scalar

    @classmethod
    def from_weights(cls, weights: Weights) -> "Counts":
        """Count assignments and tokens of the given weights (..., E)."""
        used = (weights != 0).flatten(0, -2)
        tokens = torch.full((), used.shape[0], dtype=torch.float64, device=weights.device)
        return cls(used.sum(dim=0).double(), tokens)


def balance_loss(scores: Scores, weights: Weights, counts: Counts | None = None) -> Scalar:
    """Return E Σ_e f_e P_e (GShard, Switch): 1 if f or P is uniform, E if one expert gets all.

    f_e is the share of all assignments that expert e got (no gradient), P_e = mean softmax(z)_e.
    """
    assigned, tokens = _batch_counts(weights, counts)
    share = (assigned / assigned.sum().clamp_min(1)).to(scores)
    probability = scores.softmax(dim=-1).flatten(0, -2).sum(dim=0) / tokens.to(scores)
    return scores.shape[-1] * (share * probability).sum()


def router_z_loss(scores: Scores, counts: Counts | None = None) -> Scalar:
    """Return the mean of (log Σ_e exp z_e)²; small logits keep low precision accurate."""
    tokens = _batch_counts(scores, counts).tokens.to(scores)
    return scores.logsumexp(dim=-1).square().sum() / tokens


def boundary_loss(
    epsilon: Scalar, weights: Weights, budget: float, counts: Counts | None = None
) -> Scalar:
    """Return ε (K - k*); its gradient in ε is the mean expert count K minus the budget k*.

    K carries no gradient, so descent narrows the band while more than k* experts are in use and
    widens it otherwise. Plain descent at rate η with ε = softplus(θ) is stable iff
    η K'(ε*) (1 - e^{-ε*})² < 2.
    """
    local, tokens = Counts.from_weights(weights), _batch_counts(weights, counts).tokens
    return epsilon * ((local.assigned.sum() - budget * local.tokens) / tokens).to(epsilon)


def sparsity_loss(weights: Weights, counts: Counts | None = None) -> Scalar:
    """Return the mean over tokens of Σ_e |w_e|."""
    tokens = _batch_counts(weights, counts).tokens.to(weights)
    return weights.abs().sum() / tokens


def _batch_counts(values: Tensor, counts: Counts | None) -> Counts:
    """Return the given counts, or count the values; raises without tokens."""
    require(bool(torch.is_floating_point(values)), f"expected floating values, got {values.dtype}")
    if counts is not None:
        return counts
    require(values.numel() > 0, f"a loss needs at least one token, got {tuple(values.shape)}")
    return Counts.from_weights(values)


@dataclass(frozen=True)
class LayerRouting:
    """One call of one layer: its name in the model, the layer and its routing."""

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
                hook = partial(_record_routing, records, name, module)
                hooks.callback(module.gate.register_forward_hook(hook).remove)
        yield records


def _record_routing(
    records: list[LayerRouting],
    name: str,
    layer: MoE,
    gate: nn.Module,
    inputs: tuple[Tensor, ...],
    weights: Tensor,
) -> None:
    """Forward hook of a gate: append scores and weights of a call to `records`."""
    if not is_recomputing():
        records.append(LayerRouting(name, layer, Routing(inputs[0], weights)))


def is_collected(layer: MoE) -> bool:
    """Return whether an open `collect_routing` records the calls of this layer."""
    return any(
        isinstance(hook, partial) and hook.func is _record_routing
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
    """Return the weighted sum of the losses, averaged over the collected layers.

    Args:
        records: from `collect_routing`.
        balance: coefficient of `balance_loss`.
        router_z: coefficient of `router_z_loss`.
        boundary: coefficient α of `boundary_loss`, for layers whose gate learns its ε.
        sparsity: coefficient of `sparsity_loss`.
        counts: per record, counts of the whole batch; by default the record is the whole batch.
    """
    require(len(records) > 0, "no routing was collected: the model ran no MoE layer", TielineError)
    total = torch.zeros((), device=records[0].routing.scores.device)
    for record, batch_counts in zip(records, counts or [None] * len(records), strict=True):
        _check_router_gradient(record)
        scores, weights, gate = record.routing.scores, record.routing.weights, record.layer.gate
        if balance:
            total = total + balance * balance_loss(scores, weights, batch_counts)
        if router_z:
            total = total + router_z * router_z_loss(scores, batch_counts)
        if boundary and isinstance(gate, BandGate) and gate.theta is not None:
            total = total + boundary * boundary_loss(
                gate.epsilon, weights, gate.budget, batch_counts
            )
        if sparsity:
            total = total + sparsity * sparsity_loss(weights, batch_counts)
    return total / len(records)


def _check_router_gradient(record: LayerRouting) -> None:
    """Raise if the router is trainable but its scores carry no gradient."""
    trainable = any(p.requires_grad for p in record.layer.router.parameters())
    require(
        record.routing.scores.requires_grad or not (trainable and torch.is_grad_enabled()),
        f"the scores of {record.name!r} carry no gradient although its router is trainable: "
        "use checkpoint(..., use_reentrant=False), or build the loss under no_grad",
        TielineError,
    )
