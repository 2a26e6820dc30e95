"""What a router returned, brought to one form: logits (T, E), weights (T, k), ids (T, k).

layout    families               output
topk      64 of them             (logits, weights, ids, ...)
dense     llama4                 (weights (T, E), zero where not chosen; logits)
sorted    jetmoe                 (slot order, tokens, weights, experts' sizes, logits) by expert
method    dbrx                   (weights, ids) of a method of the block that takes the logits

A smoothed router (`hf.smooth`) has k_max columns; a slot that it skips is read as the token's first
expert with weight 0.
"""

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tieline.errors import UnsupportedModelError, require
from tieline.hf.families import RouterFamily
from tieline.hf.smooth_router import smoothing_of
from tieline.ranking import stable_topk

__all__ = ["RouterOutput", "read_output"]


class RouterOutput(NamedTuple):
    """Logits (or probabilities), combine weights and chosen experts of T tokens."""

    logits: Tensor
    weights: Tensor
    ids: Tensor


def read_output(
    family: RouterFamily, router: nn.Module, args: tuple[Any, ...], output: Any
) -> RouterOutput:
    """The router's logits, weights and ids; refuses an output of another form, naming it."""
    smoothing = smoothing_of(router)
    k = int(attrgetter(family.k)(router)) if smoothing is None else smoothing.k_max
    try:
        logits, weights, ids = _READERS[family.layout](args, output, k)
        logits = logits.detach().reshape(-1, logits.shape[-1])
        weights = weights.detach().reshape(len(logits), k)
        ids = ids.detach().reshape(len(logits), k)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as problem:
        raise UnsupportedModelError(
            f"{type(router).__name__} of family {family.name!r} did not return what its record "
            f"says (layout {family.layout!r}, k={k}): {problem}"
        ) from problem
    if smoothing is not None:
        ids = torch.where(weights == 0, ids[:, :1], ids)
    _check_ids(family, logits.shape[-1], ids)
    if family.skip_class:
        ids = ids.masked_fill(weights == 0, logits.shape[-1] - 1)
    return RouterOutput(logits, weights, ids)


def _read_topk(args: tuple[Any, ...], output: Any, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return output[0], output[1], output[2]


def _read_dense(args: tuple[Any, ...], output: Any, k: int) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = stable_topk(output[0].detach(), k)
    return output[1], weights, ids


def _read_sorted(args: tuple[Any, ...], output: Any, k: int) -> tuple[Tensor, Tensor, Tensor]:
    slots, _, gates, sizes, logits = output
    experts = torch.arange(logits.shape[-1], device=slots.device)
    ids = slots.new_zeros(len(logits) * k)
    ids[slots] = experts.repeat_interleave(torch.as_tensor(sizes, device=slots.device))
    weights = gates.detach().new_zeros(len(logits) * k)
    weights[slots] = gates.detach()
    return logits, weights, ids


def _read_method(args: tuple[Any, ...], output: Any, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return args[0], output[0], output[1]


def _check_ids(family: RouterFamily, experts: int, ids: Tensor) -> None:
    inside = not ids.dtype.is_floating_point
    if ids.numel():
        inside = inside and bool(ids.min() >= 0) and bool(ids.max() < experts)
    message = f"family {family.name!r} returned expert ids outside 0..{experts - 1}"
    require(inside, message, UnsupportedModelError)


_READERS = {
    "topk": _read_topk,
    "dense": _read_dense,
    "sorted": _read_sorted,
    "method": _read_method,
}
