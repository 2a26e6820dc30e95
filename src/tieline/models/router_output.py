"""A router's output read and written: logits (T, E), weights (T, k) and experts (T, k).

    read_output, write_output     the output in one form, and back into the layout of its family
    override_choice               force the choice of a router inside a block of code
    attach_handler                let a handler rewrite every output of a router; detach_handler
    live_output                   the router's own output where a replay has replaced it

Everything around the router runs unchanged: its class is replaced by a subclass of itself.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tieline.core.errors import UnsupportedModelError, require
from tieline.models.class_changes import (
    Call,
    pickled_by,
    restore_class,
    swapped_class,
    wrapped_class,
)
from tieline.models.families import HANDLER, RouterFamily, family_of
from tieline.models.router_checks import PassChecks, refuse_if
from tieline.models.router_output_layouts import NO_CHOICE, Choice, NewChoice
from tieline.models.router_rule import family_choice


def padded_choice(choice: Choice, columns: int) -> Choice:
    """The same choice in `columns` slots or more: those added repeat the first with weight 0."""
    weights, ids = choice
    extra = columns - ids.shape[1]
    if extra <= 0:
        return choice
    none = weights.new_zeros(len(weights), extra)
    return Choice(torch.cat((weights, none), 1), torch.cat((ids, ids[:, :1].expand(-1, extra)), 1))


class RouterOutput(NamedTuple):
    """Logits (or probabilities), combine weights and chosen experts of T tokens."""

    logits: Tensor
    weights: Tensor
    ids: Tensor


Rule = Callable[[RouterOutput], Choice]
Handler = Callable[[nn.Module, Call, Any], Any]
"""Maps a router, its call and its output to the output that it returns instead."""


_OTHER_FORM = AttributeError, LookupError, RuntimeError, TypeError, ValueError


def read_output(
    family: RouterFamily,
    router: nn.Module,
    call: Call,
    output: Any,
    checks: PassChecks | None = None,
) -> RouterOutput:
    """Return logits, weights and ids without gradient; refuses an output of another form.

    A handler with an attribute `k_max`, as `smooth_` attaches, returned that many columns; a slot
    that it skips is read as the token's first expert with weight 0. Where the output holds no
    choice, weights and ids are those of the family's rule.

    Args:
        family: the record of the router's family.
        router: the router.
        call: positional and keyword arguments of the observed call.
        output: what it returned.
        checks: where it is read later whether the ids are experts; None to read it now.
    """
    columns = getattr(getattr(router, HANDLER, None), "k_max", None)
    k = family.chosen_count(router) if columns is None else columns
    try:
        logits = family.layout.logits(call[0], output).detach()
        if family.layout.has_choice:
            weights, ids = (tensor.detach() for tensor in family.layout.choice(output, k))
        else:
            weights, ids = family_choice(family, router, logits, call, k)
        weights, ids = weights.view(len(logits), k), ids.view(len(logits), k)
    except _OTHER_FORM as problem:
        raise UnsupportedModelError(
            f"{type(router).__name__} of family {family.name!r} did not return what its record "
            f"says ({family.layout!r}, k={k}): {problem}"
        ) from problem
    if columns is not None:
        ids = torch.where(weights == 0, ids[:, :1], ids)
    ids = _expert_ids(family, logits.shape[-1], ids, checks)
    if family.skip_class:
        ids = ids.masked_fill(weights == 0, logits.shape[-1] - 1)
    return RouterOutput(logits, weights, ids)


def _expert_ids(
    family: RouterFamily, experts: int, ids: Tensor, checks: PassChecks | None
) -> Tensor:
    """The ids; refused if they are no numbers of experts, and inside until that is read."""

    def raise_outside_experts() -> None:
        message = f"family {family.name!r} returned expert ids outside 0..{experts - 1}"
        raise UnsupportedModelError(message)

    if ids.dtype.is_floating_point:
        raise_outside_experts()
    if not ids.numel():
        return ids
    low, high = ids.aminmax()
    if ids.device.type == "cpu":
        if low.item() < 0 or high.item() >= experts:
            raise_outside_experts()
        return ids
    refuse_if((low < 0) | (high >= experts), raise_outside_experts, checks)
    return ids.clamp(0, experts - 1)


def write_output(family: RouterFamily, output: Any, live: RouterOutput, choice: Choice) -> Any:
    """Return a router's `output` with another choice, in the form and types of its family.

    Args:
        family: the router's family.
        output: what the router returned.
        live: the same as `read_output` returns it.
        choice: the weights and experts to write.
    """
    cast = Choice(choice.weights.to(live.weights), choice.ids.to(live.ids))
    return with_experts(family, output, cast, live.logits.shape[-1])


def with_experts(family: RouterFamily, output: Any, choice: Choice, n_experts: int) -> Any:
    """Return a router's `output` with these weights and experts.

    A skip class, where the family has one, is the highest expert number and is written as expert 0
    with weight 0.
    """
    weights, ids = choice
    if family.skip_class:
        skipped = ids == n_experts - 1
        weights, ids = weights.masked_fill(skipped, 0), ids.masked_fill(skipped, 0)
    return family.layout.with_choice(output, NewChoice(weights, ids))


LIVE = "_tieline_live"


class LiveOutput(NamedTuple):
    """What a router returned by itself, and what was returned instead."""

    live: Any
    rewritten: Any


def note_live_output(router: nn.Module, live: Any, rewritten: Any) -> Any:
    """Return `rewritten`, after a note of the router's own output for those that observe it."""
    router.__dict__[LIVE] = LiveOutput(live, rewritten)
    return rewritten


def forget_live_output(router: nn.Module) -> None:
    """Take the note of `note_live_output` away."""
    router.__dict__.pop(LIVE, None)


def live_output(family: RouterFamily, router: nn.Module, output: Any) -> Any:
    """Return what the router itself returned in the call whose `output` may be a replayed one.

    A method of a block may be observed below the replay: its output is the router's own then.
    """
    note = router.__dict__.get(LIVE)
    if note is None or (family.in_block and note.rewritten is not output):
        return output
    return note.live


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
    require(
        family.layout.has_choice,
        f"the choice of {type(router).__name__} of family {family.name!r} cannot be replaced: "
        f"{NO_CHOICE}",
        UnsupportedModelError,
    )

    def forced_output(router: nn.Module, call: Call, output: Any) -> Any:
        live = read_output(family, router, call, output)
        choice = rules[0](live)
        resize = getattr(getattr(router, HANDLER, None), "resize", None)
        if resize is not None:  # what counts the columns of a smoothed router
            resize(choice.ids.shape[1])
        return write_output(family, output, live, choice)

    rules = [rule]
    with swapped_class(router, wrapped_class(type(router), family.method, forced_output)):
        yield
    rules.clear()  # the class is collected late, and must not keep the tensors of a rule alive


def attach_handler(router: nn.Module, family: RouterFamily, handler: Handler) -> None:
    """Let `router` return what `handler` makes of its output."""
    setattr(router, HANDLER, handler)
    method = "forward" if family.method == "__call__" else family.method
    router.__class__ = handled_class(type(router), method, HANDLER)


def detach_handler(router: nn.Module) -> None:
    """Undo the last `attach_handler`."""
    restore_class(router)
    delattr(router, HANDLER)


@functools.cache
def handled_class(
    cls: type[nn.Module], method: str, attribute: str, name: str | None = None
) -> type[nn.Module]:
    """Make a subclass whose `method` is rewritten by the handler in an attribute of the router.

    Copies of a router carry a copy of their handler, which a class could not give them.
    """

    def handled_output(router: nn.Module, call: Call, output: Any) -> Any:
        return router.__dict__[attribute](router, call, output)

    subclass = wrapped_class(cls, method, handled_output, name)
    return pickled_by(subclass, handled_class, cls, method, attribute, name)
