"""What a router returned, brought to one form: logits (T, E), weights (T, k), ids (T, k).

A smoothed router (`hf.smooth`) has k_max columns; a slot that it skips is read as the token's first
expert with weight 0.
"""

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tieline.errors import UnsupportedModelError, require
from tieline.hf.families import RouterFamily
from tieline.hf.layouts import choice_in, logits_in
from tieline.hf.smooth_router import smoothing_of

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
        logits = logits_in(family.layout, args, output).detach()
        weights, ids = choice_in(family.layout, output, k)
        weights, ids = weights.view(len(logits), k), ids.view(len(logits), k)
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


def _check_ids(family: RouterFamily, experts: int, ids: Tensor) -> None:
    inside = not ids.dtype.is_floating_point
    if ids.numel():
        inside = inside and bool(ids.min() >= 0) and bool(ids.max() < experts)
    message = f"family {family.name!r} returned expert ids outside 0..{experts - 1}"
    require(inside, message, UnsupportedModelError)
