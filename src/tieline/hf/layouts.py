"""Where logits, weights and experts stand in a router's output, read and written.

layout    families               output
topk      64 of them             (logits, weights, ids, ...)
dense     llama4                 (weights (T, E), zero where not chosen; logits)
sorted    jetmoe                 (slot order, tokens, weights, experts' sizes, logits) by expert
method    dbrx                   (weights, ids) of a method of the block that takes the logits
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.ranking import stable_topk

__all__ = ["Choice", "choice_in", "logits_in", "with_choice"]

LOGITS = {"topk": 0, "dense": 1, "sorted": 4}


class Choice(NamedTuple):
    """Combine weights and experts of T tokens, k of each."""

    weights: Float[Tensor, "tokens k"]
    ids: Int[Tensor, "tokens k"]


def logits_in(layout: str, args: tuple[Any, ...], output: Any) -> Float[Tensor, "tokens experts"]:
    """The logits of a router's call, with their gradient."""
    logits = args[0] if layout == "method" else output[LOGITS[layout]]
    return logits.reshape(-1, logits.shape[-1])


def choice_in(layout: str, output: Any, k: int) -> Choice:
    """Weights and experts in a router's output, k columns of each, without gradient."""
    if layout == "dense":
        return Choice(*stable_topk(output[0].detach(), k))
    if layout == "sorted":
        return _unsorted(output, k)
    weights, ids = output[:2] if layout == "method" else output[1:3]
    return Choice(weights.detach().reshape(-1, k), ids.detach().reshape(-1, k))


def _unsorted(output: Any, k: int) -> Choice:
    """The slots back in order of token; one that was left out has weight 0 and expert 0."""
    slots, _, gates, sizes, logits = output
    experts = torch.arange(logits.shape[-1], device=slots.device)
    weights, ids = gates.detach().new_zeros(len(logits) * k), slots.new_zeros(len(logits) * k)
    ids[slots] = experts.repeat_interleave(torch.as_tensor(sizes, device=slots.device))
    weights[slots] = gates.detach()
    return Choice(weights.view(-1, k), ids.view(-1, k))


def with_choice(
    layout: str,
    output: Any,
    weights: Float[Tensor, "tokens columns"],
    experts: Int[Tensor, "tokens columns"],
    *,
    ids: Int[Tensor, "tokens columns"] | None = None,
    used: Bool[Tensor, "tokens columns"] | None = None,
) -> tuple[Any, ...]:
    """A router's output with another choice in it, in its own form and types.

    Args:
        layout: of the router's family.
        output: what the router returned.
        weights: weights to put there.
        experts: whose they are.
        ids: what stands for the experts where each slot is handed on; the experts by default.
        used: slots to hand on where slots are sorted; all by default.
    """
    if layout == "dense":
        dense = torch.zeros_like(output[0]).scatter(1, experts, weights.to(output[0]))
        return dense, *output[1:]
    if layout == "sorted":
        return _sorted(output, weights, experts, used)
    before = 0 if layout == "method" else 1
    pair = weights, experts if ids is None else ids
    return (*output[:before], *_shaped(output[before:], pair), *output[before + 2 :])


def _shaped(output: Any, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Each tensor in the type and leading axes of its predecessor."""
    return tuple(
        new.to(old).view(*old.shape[:-1], new.shape[-1])
        for new, old in zip(pair, output, strict=False)
    )


def _sorted(output: Any, weights: Tensor, experts: Tensor, used: Tensor | None) -> tuple[Any, ...]:
    """Slots in order of their experts, the token of each, its weight, and the experts' sizes."""
    n_experts, columns = output[4].shape[-1], experts.shape[-1]
    places = experts if used is None else experts.masked_fill(~used, n_experts)
    sizes = torch.bincount(places.flatten(), minlength=n_experts + 1).tolist()[:-1]
    slots = places.flatten().sort(stable=True).indices[: sum(sizes)]
    tokens = slots.div(columns, rounding_mode="trunc")
    return slots, tokens, weights.flatten()[slots].to(output[2]), sizes, output[4]
