"""A change of a run: what differs between run A and run B, in the order of its slots.

slot      takes                     acts on
both      case                      the weights of A and B alike
weights   case                      the weights of B, in float32
(the precision of B is applied here)
context   case                      the forward passes of B
feed      case                      how documents become forward passes of B
file      case, trace of B          what was written about B
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from benchmarks.blind.feeds import Feed, plain
from benchmarks.blind.precisions import Precision
from benchmarks.blind.texts import Documents
from tieline.trace.record import RoutingTrace


@dataclass
class Case:
    """One run that a change is applied to.

    Attributes:
        model: a copy of the model that may be changed.
        documents: token ids, a row per document.
        generator: source of every draw of the change.
        reference: what run A recorded; None while A runs.
        shares: values that one slot leaves to a later one.
    """

    model: Any
    documents: Documents
    generator: torch.Generator
    reference: RoutingTrace | None = None
    shares: dict[str, Any] = field(default_factory=dict)

    def draw(self, below: int) -> int:
        """Return a random number in 0 ... below - 1."""
        return int(torch.randint(below, (1,), generator=self.generator))

    def normal(self, *shape: int) -> torch.Tensor:
        """Return standard normal numbers."""
        return torch.randn(shape, generator=self.generator)

    def inner(self, modules: list[nn.Module]) -> nn.Module:
        """Return a random module of several, but the last: no router sees what follows it."""
        return modules[self.draw(max(len(modules) - 1, 1))]


Edit = Callable[[Case], None]
Context = Callable[[Case], AbstractContextManager[Any]]
FileEdit = Callable[[Case, RoutingTrace], RoutingTrace]


def _nothing(_: Case) -> None:
    """Change nothing."""


def _plainly(_: Case) -> AbstractContextManager[None]:
    return nullcontext()


def _as_written(_: Case, trace: RoutingTrace) -> RoutingTrace:
    return trace


@dataclass(frozen=True)
class Change:
    """What differs between two runs; see the table above.

    Attributes:
        name: its name in the split and the tables.
        both: edit of the weights of both runs.
        weights: edit of the weights of B.
        context: what the forward passes of B run in.
        feed: how B is fed.
        file: edit of what B recorded.
        needs: traits that a model kind must have.
        lacks: traits that a model kind must not have.
        hints: words, one of which a right hint's kind contains; any other known word is wrong.
        precisions: names of the precisions of B of a sound change; faults take those of the split.
    """

    name: str
    both: Edit = _nothing
    weights: Edit = _nothing
    context: Context = _plainly
    feed: Feed = plain
    file: FileEdit = _as_written
    needs: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    hints: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("float32",)

    def fits(self, traits: frozenset[str]) -> bool:
        """Whether a model kind with these traits can have the change."""
        return self.needs <= traits and not self.lacks & traits


def reference_case(change: Change, model: nn.Module, documents: Documents, seed: int) -> Case:
    """Return the case of run A: the model with what both runs share."""
    case = Case(copy.deepcopy(model), documents, torch.Generator().manual_seed(seed))
    change.both(case)
    return case


def run_reference(case: Case) -> RoutingTrace:
    """Return what run A records, in float32."""
    with torch.no_grad():
        return plain(case.model, case.documents)


def run_changed(change: Change, precision: Precision, case: Case) -> RoutingTrace:
    """Return what run B records of the documents of A.

    Args:
        change: what differs beside the precision.
        precision: how B computes.
        case: the case of A after its run; its model is copied.
    """
    other = replace(case, model=copy.deepcopy(case.model))
    change.weights(other)
    precision.convert(other.model)
    with torch.no_grad(), change.context(other), precision.context(other.model):
        trace = change.feed(other.model, other.documents)
    return change.file(other, trace)
