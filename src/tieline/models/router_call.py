"""A router's output read and written: logits (T, E), weights (T, k) and experts (T, k).

    read_output, write_output     the output in one form, and back into the layout of its family
    override_choice               force the choice of a router inside a block of code
    attach, detach                let a handler rewrite every output of a router
    live_output                   the router's own output where a replay has replaced it
    to_slots                      a weights matrix (T, E) as the K columns that experts take
    SkipRule                      how a slot that no expert uses is left out

Everything around the router runs unchanged: its class is replaced by a subclass of itself.

A slot that is not used costs nothing where the experts allow it:

    experts of transformers, eager        index E, if the family's `eager_skip` says so
    the same, grouped_mm and batched_mm   index E, with `_is_expert_parallel` set on the experts
    the same, "tieline"                   index E
    identity experts with weight 0        the index of the first of them
    all others                            one of the token's experts with weight 0
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import ShapeError, UnsupportedModelError, require
from tieline.core.ranking import stable_topk
from tieline.models.changes import Call, restore_class, swapped_class, wrapped_class
from tieline.models.families import HANDLER, RouterFamily, family_of
from tieline.models.layouts import NO_CHOICE, Choice, NewChoice
from tieline.models.selection import family_choice
from tieline.models.spread import is_cut


def padded(choice: Choice, columns: int) -> Choice:
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


def read_output(family: RouterFamily, router: nn.Module, call: Call, output: Any) -> RouterOutput:
    """Return logits, weights and ids without gradient; refuses an output of another form.

    A handler with an attribute `k_max`, as `smooth_` attaches, returned that many columns; a slot
    that it skips is read as the token's first expert with weight 0. Where the output holds no
    choice, weights and ids are those of the family's rule.

    Args:
        family: the record of the router's family.
        router: the router.
        call: positional and keyword arguments of the observed call.
        output: what it returned.
    """
    columns = getattr(getattr(router, HANDLER, None), "k_max", None)
    k = int(attrgetter(family.k)(router)) if columns is None else columns
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


def note_live(router: nn.Module, live: Any, rewritten: Any) -> Any:
    """Return `rewritten`, after a note of the router's own output for those that observe it."""
    router.__dict__[LIVE] = LiveOutput(live, rewritten)
    return rewritten


def forget_live(router: nn.Module) -> None:
    """Take the note of `note_live` away."""
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

    def forced(router: nn.Module, call: Call, output: Any) -> Any:
        live = read_output(family, router, call, output)
        choice = rules[0](live)
        resize = getattr(getattr(router, HANDLER, None), "resize", None)
        if resize is not None:  # what counts the columns of a smoothed router
            resize(choice.ids.shape[1])
        return write_output(family, output, live, choice)

    rules = [rule]
    with swapped_class(router, wrapped_class(type(router), family.method, forced)):
        yield
    rules.clear()  # the class is collected late, and must not keep the tensors of a rule alive


def attach(router: nn.Module, family: RouterFamily, handler: Handler) -> None:
    """Let `router` return what `handler` makes of its output."""
    setattr(router, HANDLER, handler)
    method = "forward" if family.method == "__call__" else family.method
    router.__class__ = handled_class(type(router), method, HANDLER)


def detach(router: nn.Module) -> None:
    """Undo the last `attach`."""
    restore_class(router)
    delattr(router, HANDLER)


@functools.cache
def handled_class(
    cls: type[nn.Module], method: str, attribute: str, name: str | None = None
) -> type[nn.Module]:
    """Make a subclass whose `method` is rewritten by the handler in an attribute of the router.

    Copies of a router carry a copy of their handler, which a class could not give them.
    """

    def handled(router: nn.Module, call: Call, output: Any) -> Any:
        return router.__dict__[attribute](router, call, output)

    return wrapped_class(cls, method, handled, name)


IMPLEMENTATIONS = frozenset({"grouped_mm", "batched_mm", "tieline"})
"""Implementations that leave the index E out."""

FLAG = "_is_expert_parallel"
"""Attribute of transformers' experts that lets them leave the index E out."""


@dataclass(frozen=True)
class SkipRule:
    """When the index `sentinel` skips a slot.

    Attributes:
        sentinel: the index.
        eager: whether it skips under the family's eager experts.
        config: configuration with the `_experts_implementation` in force, read at each call since
            it may change; None where the family has one implementation only.
    """

    sentinel: int
    eager: bool
    config: Any = None

    @property
    def works(self) -> bool:
        """Whether the index skips a slot at present."""
        name = getattr(self.config, "_experts_implementation", None) or "eager"
        return self.eager if name == "eager" else name in IMPLEMENTATIONS

    def applied(
        self, ids: Int[Tensor, "tokens columns"], share: Float[Tensor, "tokens columns"]
    ) -> Int[Tensor, "tokens columns"]:
        """Replace experts of share 0 by the sentinel, if it skips them."""
        return ids.masked_fill(share == 0, self.sentinel) if self.works else ids


def experts_of(model: nn.Module, router_name: str) -> nn.Module | None:
    """Return the experts module beside a router; None if there is none."""
    parent = model.get_submodule(router_name.rpartition(".")[0])
    experts = getattr(parent, "experts", None)
    return experts if isinstance(experts, nn.Module) else None


def skip_rule(family: RouterFamily, experts: nn.Module | None, n_experts: int) -> SkipRule:
    """Return the skip rule for a router.

    Args:
        family: the record of its family.
        experts: the experts that it serves.
        n_experts: number of experts that it ranks.
    """
    if experts is not None and is_cut(experts):
        return SkipRule(n_experts, eager=False)  # tokens are sent to experts by their numbers
    if family.identity_experts is not None:
        count, first = family.identity_experts
        if getattr(experts, count, 0):
            return SkipRule(int(getattr(experts, first, 0)), eager=True)
    if experts is None or not hasattr(experts, FLAG):
        return SkipRule(n_experts, eager=family.eager_skip == "always")
    config = getattr(experts, "config", None)
    return SkipRule(n_experts, eager=family.eager_skip != "never", config=config)


def to_slots(
    weights: Float[Tensor, "tokens experts"], skip: SkipRule, columns: int | None = None
) -> Choice:
    """Return weights and indices (T, K), the largest weight first; gradients reach `weights`.

    Args:
        weights: exact zeros where an expert is not used.
        skip: how the experts skip an unused slot, whose weight is 0.
        columns: K; by default the largest number of experts that a token here uses.
    """
    used = int((weights != 0).sum(dim=1).max()) if len(weights) else 0
    columns = max(used, 1) if columns is None else columns
    if not (used <= columns <= weights.shape[1]):
        raise ShapeError(
            f"need {used} (experts of a token) <= columns <= {weights.shape[1]} (experts), "
            f"got {columns=}"
        )
    ids = stable_topk(weights.detach().abs(), columns).indices
    chosen = weights.gather(1, ids)
    return Choice(chosen, skip.applied(ids, chosen))
