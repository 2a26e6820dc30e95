"""Forcing a router's choice: its output is rewritten, everything around it runs as it always does.

    with override_choice(router, rule):
        block(hidden_states)

`rule` is given what the router found and returns the weights and experts that the block shall use.
As in `capture`, the router's class is replaced by a subclass of itself for as long as that lasts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.errors import UnsupportedModelError
from tieline.hf.families import RouterFamily, family_of
from tieline.hf.outputs import RouterOutput, read_output

__all__ = ["Choice", "Rule", "override_choice", "write_output"]


class Choice(NamedTuple):
    """Combine weights and experts of T tokens, k of each."""

    weights: Float[Tensor, "tokens k"]
    ids: Int[Tensor, "tokens k"]


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
    return _WRITERS[family.layout](output, weights, ids)


def _write_topk(output: Any, weights: Tensor, ids: Tensor) -> tuple[Any, ...]:
    return output[0], weights.view_as(output[1]), ids.view_as(output[2]), *output[3:]


def _write_dense(output: Any, weights: Tensor, ids: Tensor) -> tuple[Any, ...]:
    return torch.zeros_like(output[0]).scatter_(1, ids, weights.to(output[0])), *output[1:]


def _write_sorted(output: Any, weights: Tensor, ids: Tensor) -> tuple[Any, ...]:
    """Slots in order of their experts, the token of each, its weight, and the experts' sizes."""
    logits = output[4]
    slots = ids.flatten().sort(stable=True).indices
    tokens = slots.div(ids.shape[1], rounding_mode="trunc")
    sizes = torch.bincount(ids.flatten(), minlength=logits.shape[-1]).tolist()
    return slots, tokens, weights.flatten()[slots].to(output[2]), sizes, logits


def _write_method(output: Any, weights: Tensor, ids: Tensor) -> tuple[Any, ...]:
    return weights.view_as(output[0]), ids.view_as(output[1])


_WRITERS = {
    "topk": _write_topk,
    "dense": _write_dense,
    "sorted": _write_sorted,
    "method": _write_method,
}
