"""Two models that are streamed, side by side: one pass over each checkpoint.

All batches go through A up to its output head and wait there, then through B. With both heads in
memory, batch by batch goes through both, so that the logits of one batch at a time are there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tieline.core.errors import UnsupportedModelError, require
from tieline.models.capture import capture
from tieline.models.lockstep import Lockstep
from tieline.models.running import forward, only_running
from tieline.models.streaming import ModelStream
from tieline.trace.record import RoutingTrace

Take = Callable[[Any, Any, Tensor], None]
"""Takes the logits of A and of B for one batch, and its token ids."""

Told = Callable[[int, int], None]


def side_by_side(
    a: ModelStream,
    b: ModelStream,
    batches: Sequence[Int[Tensor, "_ _"]],
    take: Take,
    told: Told | None = None,
) -> tuple[RoutingTrace, RoutingTrace]:
    """Run two models on the same batches and return their routing.

    Args:
        a: the one.
        b: the other.
        batches: token ids.
        take: given the logits of both, batch by batch.
        told: called with the bytes read so far of both checkpoints, and those of the whole.
    """
    for stream in (a, b):
        kind = type(stream.model).__name__
        require(stream.head is not None, f"{kind} has no output head", UnsupportedModelError)
    whole = a.size + b.size
    tell = told or (lambda done, total: None)

    def at_both(passes_a: Lockstep, passes_b: Lockstep) -> None:
        for one, two, ids in zip(passes_a.passes, passes_b.passes, batches, strict=True):
            one.go()
            two.go()
            take(one.result, two.result, ids)
            one.result = two.result = None  # large

    def at_first(passes_a: Lockstep) -> None:
        tell_b = lambda done, total: tell(min(a.size + done, whole), whole)  # noqa: E731
        b.run(_jobs(b, batches), told=tell_b, at_head=partial(at_both, passes_a))

    with only_running(a.model), only_running(b.model):
        with _seen(a) as seen_a, _seen(b) as seen_b:
            tell_a = lambda done, total: tell(min(done, whole), whole)  # noqa: E731
            a.run(_jobs(a, batches), told=tell_a, at_head=at_first)
        return seen_a.trace(), seen_b.trace()


def _seen(stream: ModelStream) -> Any:
    return capture(stream.model, epsilons=(), distances=False)


def _jobs(stream: ModelStream, batches: Sequence[Tensor]) -> list[Callable[[], Any]]:
    def logits(ids: Tensor) -> Any:
        return getattr(forward(stream.model, ids), "logits", None)

    return [partial(logits, ids) for ids in batches]
