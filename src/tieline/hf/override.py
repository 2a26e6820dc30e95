"""Forcing a router's choice: its output is rewritten, everything around it runs as it always does.

    with override_choice(router, rule):
        block(hidden_states)

`rule` is given what the router found and returns the weights and experts that the block shall use.
As in `capture`, the router's class is replaced by a subclass of itself for as long as that lasts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tieline.errors import UnsupportedModelError
from tieline.hf.families import RouterFamily, family_of
from tieline.hf.layouts import Choice, with_choice
from tieline.hf.outputs import RouterOutput, read_output

__all__ = ["Choice", "Rule", "override_choice", "write_output"]


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
