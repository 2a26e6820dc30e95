"""Watching routers at work: of Tieline's own layers and of transformers models, in one form.

    with watch_routing(model, calls.append):
        model(**batch)

Every call of a router becomes a `RouterCall`: the trace of its tokens, sums over all its logits and
what the gate made of them. Hooks are there while the block lasts and not before or after, so a
model that is not watched pays nothing. A forward pass that activation checkpointing repeats is not
reported again unless asked for.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from tieline.audit.monitor_calls import RouterCall, own_call, transformers_call
from tieline.errors import TielineError
from tieline.hf.batches import Batch, DocumentCounter
from tieline.hf.discovery import chosen_routers
from tieline.hf.families import RouterFamily, family_of
from tieline.hf.layers import LayerObserver, Settings
from tieline.recompute import is_recomputing
from tieline.routing.layer import MoE

__all__ = ["RouterCall", "untraced", "watch_routing"]

Take = Callable[[RouterCall], None]


@contextmanager
def watch_routing(
    model: nn.Module,
    take: Take,
    *,
    ranks: int | None = 4,
    repetitions: bool = False,
    training_only: bool = False,
    failed: Callable[[TielineError], None] | None = None,
) -> Iterator[None]:
    """Hand every call of every router of `model` to `take` while the block lasts.

    Tokens that the attention mask of a transformers model hides are left out.

    Args:
        model: a model, or a part of one, with `MoE` layers or transformers routers in it.
        take: is given each call, in the order in which routers run.
        ranks: ranks kept beyond k; None keeps all.
        repetitions: report forward passes that checkpointing repeats too.
        training_only: leave out calls in evaluation mode.
        failed: is told of calls that cannot be read, which otherwise raise.
    """
    reader = _Reader(take, repetitions, training_only, failed)
    own = {name: m for name, m in model.named_modules() if isinstance(m, MoE)}
    theirs = [m for m in model.modules() if family_of(m) is not None]
    with ExitStack() as stack:
        for name, layer in own.items():
            stack.callback(
                layer.gate.register_forward_hook(reader.of_gate(name, layer, ranks)).remove
            )
        if theirs or not own:  # the latter refuses a model without routers
            stack.callback(
                model.register_forward_pre_hook(untraced(reader.begin), with_kwargs=True).remove
            )
            for name, router in chosen_routers(model, None).items():
                _watch_router(stack, name, router, reader, ranks)
        yield


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that `torch.compile` calls as it is: it reads values, which a graph has none of."""
    return cast(Callable[..., Any], torch.compiler.disable(hook))


def _watch_router(
    stack: ExitStack, name: str, router: nn.Module, reader: "_Reader", ranks: int | None
) -> None:
    family = family_of(router)
    assert family is not None
    observer = LayerObserver(name, family, Settings(ranks, (), inputs=False, distances=False))
    report = reader.of_router(observer, router, family)
    if family.method == "__call__":
        hook = untraced(lambda m, args, named, output: report(args, named, output))
        stack.callback(router.register_forward_hook(hook, with_kwargs=True).remove)
        return
    plain = getattr(router, family.method)

    def observed(*args: Any, **named: Any) -> Any:
        output = plain(*args, **named)
        report(args, named, output)
        return output

    setattr(router, family.method, observed)
    stack.callback(delattr, router, family.method)


@dataclass
class _Reader:
    """Turns what hooks see into calls; knows the tokens of the forward pass under way."""

    take: Take
    repetitions: bool
    training_only: bool
    failed: Callable[[TielineError], None] | None
    batch: Batch | None = None

    def begin(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Read which tokens the pass has; other inputs than tokens are taken to hide none."""
        first = {"input_ids": args[0]} if args else {}
        try:
            self.batch = DocumentCounter().read(first | named)
        except (TielineError, RuntimeError, IndexError):
            self.batch = None

    def of_gate(self, name: str, layer: MoE, ranks: int | None) -> Callable[..., None]:
        """Hook of the gate of a layer of ours."""

        def read(gate: nn.Module, inputs: tuple[Any, ...], weights: torch.Tensor) -> None:
            self._report(gate, lambda: own_call(name, layer, inputs[0], weights, ranks))

        return untraced(read)

    def of_router(
        self, observer: LayerObserver, router: nn.Module, family: RouterFamily
    ) -> Callable[[tuple[Any, ...], dict[str, Any], Any], None]:
        """Report of a transformers router's call."""

        def read(args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            call = (args, named)
            make = lambda: transformers_call(observer, router, call, output, self.batch)  # noqa: E731
            self._report(router, make)

        return read

    def _report(self, module: nn.Module, make: Callable[[], RouterCall]) -> None:
        if is_recomputing() and not self.repetitions:
            return
        if self.training_only and not module.training:
            return
        try:
            call = make()
        except TielineError as problem:
            if self.failed is None:
                raise
            self.failed(problem)
        else:
            self.take(call)
