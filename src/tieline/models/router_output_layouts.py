"""Where a router's output holds its logits (T, E), combine weights (T, k) and expert ids (T, k).

    TupleLayout     (logits, weights, ids, ...), in any order or by name; most families
    DenseLayout     (weights (T, E), zero where not chosen; logits)
    SortedLayout    (slot order, tokens, weights, experts' sizes, logits), sorted by expert
    ScoresLayout    the logits alone: the block around the router chooses

A layout reads the choice of an output and returns a copy of the output with another choice. The
record of a family (`RouterFamily.layout`) holds one; a family of yours may bring its own subclass.
"""

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import UnsupportedModelError
from tieline.core.ranking import stable_topk

Entry = int | str
"""Position in a tuple, or name of a mapping's key or of a field."""


class Choice(NamedTuple):
    """Combine weights and experts of T tokens, k of each."""

    weights: Float[Tensor, "tokens k"]
    ids: Int[Tensor, "tokens k"]


class NewChoice(NamedTuple):
    """A choice to write into a router's output.

    Attributes:
        weights: combine weight of each slot.
        experts: the expert of each slot.
        ids: indices to write where the output has one per slot; None for `experts` themselves. A
            slot that the experts skip has an index that is no expert.
        used: slots to write where slots are sorted by expert; None for all.
    """

    weights: Float[Tensor, "tokens columns"]
    experts: Int[Tensor, "tokens columns"]
    ids: Int[Tensor, "tokens columns"] | None = None
    used: Bool[Tensor, "tokens columns"] | None = None


class Layout(ABC):
    """Reads and writes the output of a router.

    Attributes:
        has_choice: whether the output holds weights and ids, so that they can be replaced.
    """

    has_choice: bool = True

    @abstractmethod
    def logits(self, args: tuple[Any, ...], output: Any) -> Float[Tensor, "tokens experts"]:
        """Return the logits of a call with these arguments, with their gradient."""

    @abstractmethod
    def choice(self, output: Any, k: int) -> Choice:
        """Return the k weights, with their gradient, and experts of each token."""

    @abstractmethod
    def with_choice(self, output: Any, choice: NewChoice) -> Any:
        """Return the output with another choice, in its own form and types."""


@dataclass(frozen=True)
class TupleLayout(Layout):
    """Logits, weights and ids are entries of a tuple, a mapping or a record.

    Attributes:
        logits_entry: position or name of the logits (or probabilities); None if they are the first
            argument of the observed method.
        weights_entry: position or name of the combine weights.
        ids_entry: position or name of the expert ids.
    """

    logits_entry: Entry | None = 0
    weights_entry: Entry = 1
    ids_entry: Entry = 2

    def logits(self, args: tuple[Any, ...], output: Any) -> Float[Tensor, "tokens experts"]:
        """Return the logits, leading axes joined."""
        entry = self.logits_entry
        logits = args[0] if entry is None else entry_of(output, entry)
        return logits.reshape(-1, logits.shape[-1])

    def choice(self, output: Any, k: int) -> Choice:
        """Return weights and ids, leading axes joined."""
        weights, ids = entry_of(output, self.weights_entry), entry_of(output, self.ids_entry)
        return Choice(weights.reshape(-1, k), ids.reshape(-1, k))

    def with_choice(self, output: Any, choice: NewChoice) -> Any:
        """Replace weights and ids; each keeps the type and leading axes of the old one."""
        ids = choice.experts if choice.ids is None else choice.ids
        entries = {self.weights_entry: choice.weights, self.ids_entry: ids}
        tensors = {entry: entry_of(output, entry) for entry in entries}
        shaped = {
            entry: value.to(tensors[entry]).view(*tensors[entry].shape[:-1], value.shape[-1])
            for entry, value in entries.items()
        }
        return with_entries(output, shaped)


COLUMNS = TupleLayout()
"""(logits, weights, ids, ...), as nearly all families of transformers return it."""


@dataclass(frozen=True)
class DenseLayout(Layout):
    """(weights (T, E), zero where an expert is not chosen; logits (T, E))."""

    def logits(self, args: tuple[Any, ...], output: Any) -> Float[Tensor, "tokens experts"]:
        """Return the logits, leading axes joined."""
        return output[1].reshape(-1, output[1].shape[-1])

    def choice(self, output: Any, k: int) -> Choice:
        """Return the k largest weights and their experts."""
        ids = stable_topk(output[0].detach(), k).indices
        return Choice(output[0].gather(1, ids), ids)

    def with_choice(self, output: Any, choice: NewChoice) -> Any:
        """Scatter the weights to their experts."""
        zeros = torch.zeros_like(output[0])
        return zeros.scatter(1, choice.experts, choice.weights.to(zeros)), *output[1:]


@dataclass(frozen=True)
class SortedLayout(Layout):
    """(slots in order of their experts, token and weight of each, experts' sizes, logits)."""

    def logits(self, args: tuple[Any, ...], output: Any) -> Float[Tensor, "tokens experts"]:
        """Return the logits, leading axes joined."""
        return output[4].reshape(-1, output[4].shape[-1])

    def choice(self, output: Any, k: int) -> Choice:
        """Return slots in token order; one that was left out has weight 0 and expert 0."""
        slots, _, gates, sizes, logits = output
        experts = torch.arange(logits.shape[-1], device=slots.device)
        experts = experts.repeat_interleave(torch.as_tensor(sizes, device=slots.device))
        weights = gates.new_zeros(len(logits) * k).index_copy(0, slots, gates)
        ids = slots.new_zeros(len(logits) * k).index_copy(0, slots, experts)
        return Choice(weights.view(-1, k), ids.view(-1, k))

    def with_choice(self, output: Any, choice: NewChoice) -> Any:
        """Sort the used slots by expert and count the slots of each expert."""
        n_experts, columns = output[4].shape[-1], choice.experts.shape[-1]
        experts = choice.experts
        if choice.used is not None:
            experts = experts.masked_fill(~choice.used, n_experts)
        sizes = torch.bincount(experts.flatten(), minlength=n_experts + 1).tolist()[:-1]
        slots = experts.flatten().sort(stable=True).indices[: sum(sizes)]
        tokens = slots.div(columns, rounding_mode="trunc")
        return slots, tokens, choice.weights.flatten()[slots].to(output[2]), sizes, output[4]


@dataclass(frozen=True)
class ScoresLayout(Layout):
    """The router returns its logits and the block around it chooses.

    Such a router can be captured, with the choice that the family's rule gives; its choice cannot
    be replaced.

    Attributes:
        entry: position or name of the logits in the output; None if the output is the logits.
    """

    entry: Entry | None = None
    has_choice = False

    def logits(self, args: tuple[Any, ...], output: Any) -> Float[Tensor, "tokens experts"]:
        """Return the logits, leading axes joined."""
        logits = output if self.entry is None else entry_of(output, self.entry)
        return logits.reshape(-1, logits.shape[-1])

    def choice(self, output: Any, k: int) -> Choice:
        """Refuse: the output holds no choice."""
        raise UnsupportedModelError(NO_CHOICE)

    def with_choice(self, output: Any, choice: NewChoice) -> Any:
        """Refuse: the output holds no choice."""
        raise UnsupportedModelError(NO_CHOICE)


NO_CHOICE = (
    "its record says where the scores are but not where the router returns weights and expert ids "
    "(layout ScoresLayout): let the router return them and say where by `layout=TupleLayout(...)`"
)
"""Why the choice of a router cannot be replaced that returns its logits alone."""


def entry_of(output: Any, entry: Entry) -> Any:
    """Return an entry of a tuple by position, or of a mapping or a record by name."""
    if isinstance(entry, str) and not isinstance(output, Mapping):
        return getattr(output, entry)
    return output[entry]


def with_entries(output: Any, entries: Mapping[Entry, Any]) -> Any:
    """Return a copy of a tuple, mapping, named tuple or dataclass with other entries."""
    if isinstance(output, Mapping):
        changed: Any = copy.copy(output)
        for entry, value in entries.items():
            changed[entry] = value
        return changed
    fields = {entry: value for entry, value in entries.items() if isinstance(entry, str)}
    if fields:
        named_tuple = hasattr(output, "_replace")
        return output._replace(**fields) if named_tuple else dataclasses.replace(output, **fields)
    values = list(output)
    for entry, value in entries.items():
        values[int(entry)] = value
    return output._make(values) if hasattr(output, "_make") else tuple(values)
