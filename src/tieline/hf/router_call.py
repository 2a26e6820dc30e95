"""What a router returned, brought to one form: logits (T, E), weights (T, k), ids (T, k).

A smoothed router (`hf.smooth`) has k_max columns; a slot that it skips is read as the token's first
expert with weight 0.

Forcing a router's choice: its output is rewritten, everything around it runs as it always does.

    with override_choice(router, rule):
        block(hidden_states)

`rule` is given what the router found and returns the weights and experts that the block shall use.
As in `capture`, the router's class is replaced by a subclass of itself for as long as that lasts.

From a weights matrix (T, E) to the (weights, indices) of K columns that experts blocks take.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.core.errors import ShapeError, UnsupportedModelError, require
from tieline.core.ranking import stable_topk
from tieline.hf.families import RouterFamily, family_of
from tieline.hf.layouts import Choice, choice_in, logits_in, with_choice
from tieline.hf.smooth_router import SkipRule, smoothing_of

__all__ = [
    "Choice",
    "RouterOutput",
    "Rule",
    "override_choice",
    "read_output",
    "to_slots",
    "write_output",
]


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


Rule = Callable[[RouterOutput], Choice]


@contextmanager
def override_choice(router: nn.Module, rule: Rule) -> Iterator[None]:
    """Inside the block, `router` returns the choice that `rule` makes of its own.

    Args:
        router: a router of a known family.
        rule: maps the logits, weights and experts of a call to the weights and experts to use. A
            skip class, where the family has one, is its highest expert number.
    """
    family = family_of(router)
    if family is None or family.refused is not None:
        raise UnsupportedModelError(f"{type(router).__name__} is no router whose choice is known")
    before = type(router)
    router.__class__ = _overridden_class(before, family, rule)
    try:
        yield
    finally:
        router.__class__ = before


def _overridden_class(cls: type[nn.Module], family: RouterFamily, rule: Rule) -> type[nn.Module]:
    plain = getattr(cls, family.method)

    def overridden(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        found = read_output(family, self, args, output)
        return write_output(family, output, found, rule(found))

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {family.method: overridden, **names})


def write_output(
    family: RouterFamily, output: Any, found: RouterOutput, choice: Choice
) -> tuple[Any, ...]:
    """A router's `output` with another choice in it, in the form and types of its family.

    Args:
        family: the router's family.
        output: what the router returned.
        found: the same as `read_output` gives it.
        choice: the weights and experts to put there.
    """
    weights = choice.weights.to(found.weights)
    ids = choice.ids.to(found.ids)
    if family.skip_class:
        skipped = ids == found.logits.shape[-1] - 1
        weights, ids = weights.masked_fill(skipped, 0), ids.masked_fill(skipped, 0)
    return with_choice(family.layout, output, weights, ids)


def to_slots(
    weights: Float[Tensor, "tokens experts"], skip: SkipRule, columns: int | None = None
) -> Choice:
    """Weights and indices (T, K), the largest weight first; gradients reach `weights`.

    Args:
        weights: exact zeros where an expert is not used.
        skip: how the experts pass over a slot that has none; its weight is 0.
        columns: K; None for the largest number of experts that a token here uses.
    """
    used = int((weights != 0).sum(dim=1).max()) if len(weights) else 0
    columns = max(used, 1) if columns is None else columns
    require(
        used <= columns <= weights.shape[1],
        f"need {used} (experts of a token) <= columns <= {weights.shape[1]} (experts), "
        f"got {columns=}",
        ShapeError,
    )
    ids = stable_topk(weights.detach().abs(), columns).indices
    chosen = weights.gather(1, ids)
    return Choice(chosen, skip.applied(ids, chosen))
