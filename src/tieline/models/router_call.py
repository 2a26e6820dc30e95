"""A router's output read and written: logits (T, E), weights (T, k) and experts (T, k).

layout    families    output
topk      64 of them  (logits, weights, ids, ...)
dense     llama4      (weights (T, E), zero where not chosen; logits)
sorted    jetmoe      (slot order, tokens, weights, experts' sizes, logits), sorted by expert
method    dbrx        (weights, ids), returned by a method of the block that takes the logits

    read_output, write_output     the output in one form, and back into the form of its family
    override_choice               force the choice of a router inside a block of code
    attach, detach                let a handler rewrite every output of a router
    to_slots                      a weights matrix (T, E) as the K columns that experts take
    SkipRule                      how a slot that no expert uses is left out

Everything around the router runs unchanged: its class is replaced by a subclass of itself.

A slot that is not used costs nothing where the experts allow it:

    experts of transformers, eager        index E, but for the families in `EAGER_COUNTS_ALL`
    the same, grouped_mm and batched_mm   index E, with `_is_expert_parallel` set on the experts
    the same, "tieline"                   index E
    longcat_flash with zero experts       the index of the first zero expert, which is the identity
    all others                            one of the token's experts with weight 0
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tieline.core.errors import ShapeError, UnsupportedModelError, require
from tieline.core.ranking import stable_topk
from tieline.models.changes import Call, restore_class, swapped_class, wrapped_class
from tieline.models.families import HANDLER, RouterFamily, family_of
from tieline.models.family_table import TRANSFORMERS_FAMILIES
from tieline.models.spread import is_cut

LOGITS = {"topk": 0, "dense": 1, "sorted": 4}


class Choice(NamedTuple):
    """Combine weights and experts of T tokens, k of each."""

    weights: Float[Tensor, "tokens k"]
    ids: Int[Tensor, "tokens k"]


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


def read_output(
    family: RouterFamily, router: nn.Module, args: tuple[Any, ...], output: Any
) -> RouterOutput:
    """Return logits, weights and ids without gradient; refuses an output of another form.

    A handler with an attribute `k_max`, as `hf.smooth` attaches, returned that many columns; a slot
    that it skips is read as the token's first expert with weight 0.
    """
    columns = getattr(getattr(router, HANDLER, None), "k_max", None)
    k = int(attrgetter(family.k)(router)) if columns is None else columns
    try:
        logits = logits_in(family.layout, args, output).detach()
        weights, ids = choice_in(family.layout, output, k)
        weights, ids = weights.view(len(logits), k), ids.view(len(logits), k)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as problem:
        raise UnsupportedModelError(
            f"{type(router).__name__} of family {family.name!r} did not return what its record "
            f"says (layout {family.layout!r}, k={k}): {problem}"
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


def write_output(
    family: RouterFamily, output: Any, found: RouterOutput, choice: Choice
) -> tuple[Any, ...]:
    """Return a router's `output` with another choice, in the form and types of its family.

    Args:
        family: the router's family.
        output: what the router returned.
        found: the same as `read_output` returns it.
        choice: the weights and experts to write.
    """
    weights = choice.weights.to(found.weights)
    ids = choice.ids.to(found.ids)
    if family.skip_class:
        skipped = ids == found.logits.shape[-1] - 1
        weights, ids = weights.masked_fill(skipped, 0), ids.masked_fill(skipped, 0)
    return with_choice(family.layout, output, weights, ids)


def logits_in(layout: str, args: tuple[Any, ...], output: Any) -> Float[Tensor, "tokens experts"]:
    """Return the logits of a router's call, with their gradient."""
    logits = args[0] if layout == "method" else output[LOGITS[layout]]
    return logits.reshape(-1, logits.shape[-1])


def choice_in(layout: str, output: Any, k: int) -> Choice:
    """Return the k weights and experts per token in a router's output, without gradient."""
    if layout == "dense":
        return Choice(*stable_topk(output[0].detach(), k))
    if layout == "sorted":
        return _unsorted(output, k)
    weights, ids = output[:2] if layout == "method" else output[1:3]
    return Choice(weights.detach().reshape(-1, k), ids.detach().reshape(-1, k))


def _unsorted(output: Any, k: int) -> Choice:
    """Slots back in token order; a slot that was left out has weight 0 and expert 0."""
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
    """Return a router's output with another choice, in its own form and types.

    Args:
        layout: of the router's family.
        output: what the router returned.
        weights: weights to write.
        experts: the expert of each weight.
        ids: indices to write for the experts where the output has one per slot; by default the
            experts themselves.
        used: slots to write where slots are sorted by expert; by default all.
    """
    if layout == "dense":
        dense = torch.zeros_like(output[0]).scatter(1, experts, weights.to(output[0]))
        return dense, *output[1:]
    if layout == "sorted":
        return _sorted(output, weights, experts, used)
    first = 0 if layout == "method" else 1
    pair = weights, experts if ids is None else ids
    return (*output[:first], *_shaped(output[first:], pair), *output[first + 2 :])


def _shaped(output: Any, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Each tensor in the type and leading axes of the one it replaces."""
    return tuple(
        new.to(old).view(*old.shape[:-1], new.shape[-1])
        for new, old in zip(pair, output, strict=False)
    )


def _sorted(output: Any, weights: Tensor, experts: Tensor, used: Tensor | None) -> tuple[Any, ...]:
    """Slots in order of their experts, the token and weight of each, and the experts' sizes."""
    n_experts, columns = output[4].shape[-1], experts.shape[-1]
    places = experts if used is None else experts.masked_fill(~used, n_experts)
    sizes = torch.bincount(places.flatten(), minlength=n_experts + 1).tolist()[:-1]
    slots = places.flatten().sort(stable=True).indices[: sum(sizes)]
    tokens = slots.div(columns, rounding_mode="trunc")
    return slots, tokens, weights.flatten()[slots].to(output[2]), sizes, output[4]


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

    def forced(router: nn.Module, call: Call, output: Any) -> Any:
        found = read_output(family, router, call[0], output)
        choice = rule(found)
        resize = getattr(getattr(router, HANDLER, None), "resize", None)
        if resize is not None:  # what counts the columns of a smoothed router
            resize(choice.ids.shape[1])
        return write_output(family, output, found, choice)

    with swapped_class(router, wrapped_class(type(router), family.method, forced)):
        yield


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


EAGER_COUNTS_ALL = frozenset({"gpt_oss", "nemotron_h", "openai_privacy_filter"})
"""Families whose eager experts take the index E for an expert."""

EAGER_SKIPS = frozenset(family.name for family in TRANSFORMERS_FAMILIES) - EAGER_COUNTS_ALL
"""Families with the experts interface whose eager experts leave the index E out."""

EAGER_ALONE = frozenset({"step3p7"})
"""Families without the experts interface whose experts leave the index E out."""

IMPLEMENTATIONS = frozenset({"grouped_mm", "batched_mm", "tieline"})
"""Implementations that leave the index E out."""

FLAG = "_is_expert_parallel"


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


def skip_rule(family: str, experts: nn.Module | None, n_experts: int) -> SkipRule:
    """Return the skip rule for a router.

    Args:
        family: name of its family.
        experts: the experts that it serves.
        n_experts: number of experts that it ranks.
    """
    if experts is not None and is_cut(experts):
        return SkipRule(n_experts, eager=False)  # tokens are sent to experts by their numbers
    if family == "longcat_flash" and getattr(experts, "zero_expert_num", 0):
        return SkipRule(int(getattr(experts, "num_routed_experts", 0)), eager=True)
    if experts is None or not hasattr(experts, FLAG):
        return SkipRule(n_experts, eager=family in EAGER_ALONE)
    config = getattr(experts, "config", None)
    return SkipRule(n_experts, eager=family in EAGER_SKIPS, config=config)


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
