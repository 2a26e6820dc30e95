"""Auditing a model that is streamed: every perturbation in one pass over the disk.

A batch under a perturbation is a forward pass of its own beside the clean one. In a layer the clean
passes go first, so that the others can be compared with what they chose; then one perturbation
after the other, whose weights are rounded once for all batches. At the output head, where logits
are large, one batch after the other goes through, clean and perturbed, and is compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Int
from torch import Tensor, nn

from tieline.analysis.perturbations import (
    Perturbation,
    changed_computation,
    noise_generator,
)
from tieline.analysis.precision_runs import (
    FullEffect,
    FullRuns,
    LocalRuns,
    LocalWatch,
    clean_logits,
    compared_routes,
    model_logits,
)
from tieline.core.errors import ParameterError, UnsupportedModelError, require
from tieline.core.statistics import SequenceSums, next_token_losses
from tieline.models.lockstep import Lockstep, Scope
from tieline.models.running import forward, text_config
from tieline.models.stream_loading import free_memory, resident_memory
from tieline.models.stream_rounding import StreamRounding, in_memory
from tieline.models.streaming import ModelStream

Ids = Int[Tensor, "_ _"]

STATES_KEPT = 2
"""Hidden states that a pass holds while it waits: what it goes on with, and the embeddings."""


class _Run(NamedTuple):
    """One forward pass.

    Attributes:
        batch: number of its batch.
        one: its perturbation; None for the clean pass.
        forced: whether flipping tokens get the clean choice.
        source: of its noise.
        seen: what tokens lost in each layer.
    """

    batch: int
    one: Perturbation | None
    forced: bool
    source: Any
    seen: dict[str, Tensor]


class StreamedAudit:
    """The clean and the perturbed runs of an audit over a streamed model."""

    def __init__(
        self,
        stream: ModelStream,
        routers: dict[str, nn.Module],
        batches: Sequence[Ids],
        local: LocalRuns,
        full: Mapping[Perturbation, FullEffect],
        seed: int,
    ) -> None:
        """Run these batches clean and under every perturbation.

        Args:
            stream: what runs the model.
            routers: its routers by name.
            batches: token ids.
            local: counts what perturbations do to each router by itself.
            full: where to count what they do in a full run.
            seed: of all noise.
        """
        kind = type(stream.model).__name__
        require(stream.head is not None, f"{kind} has no output head", UnsupportedModelError)
        self._stream, self._routers, self._batches = stream, routers, batches
        self._full, self.loss = full, SequenceSums()
        rounding = StreamRounding(stream)
        self._watches = [
            LocalWatch(local, number, (len(ids), ids.shape[1]), jumps_later=True)
            for number, ids in enumerate(batches)
        ]
        self._settings: dict[Perturbation | None, Scope | None] = {None: None}
        self._settings |= {one: rounded_for(rounding, one) for one in full}
        self._runs = [_Run(number, None, False, None, {}) for number in range(len(batches))]
        for place, one in enumerate(full):
            for number in range(len(batches)):
                for forced in (False, True):
                    source = noise_generator(seed, place, number)
                    self._runs.append(_Run(number, one, forced, source, {}))

    def run(self, told: Callable[[int, int], None]) -> None:
        """Run all, and count."""
        self._stream.run(
            [partial(self._logits, run) for run in self._runs],
            scopes=[partial(self._in_force, run) for run in self._runs],
            settings=[self._settings[run.one] for run in self._runs],
            done=self._left,
            told=told,
            at_head=self._at_head,
        )

    def _logits(self, run: _Run) -> Tensor:
        ids = self._batches[run.batch]
        output, logits = forward(self._stream.model, ids), clean_logits
        return (logits if run.one is None else model_logits)(output, ids)

    @contextmanager
    def _in_force(self, run: _Run) -> Iterator[None]:
        """What holds while a pass runs."""
        watch = self._watches[run.batch]
        if run.one is None:
            with watch.watching():
                yield
            return
        here = {name: router for name, router in self._routers.items() if in_memory(router)}
        known = {name: router for name, router in here.items() if name in watch.clean}
        with (
            changed_computation(self._stream.model, run.one, run.source),
            compared_routes(known, watch.clean, run.seen, run.forced),
        ):
            yield

    def _left(self, unit: str) -> None:
        """Count the jumps of a unit while its weights are there."""
        for watch in self._watches:
            watch.settle(partial(self._stream.run_inside, unit))

    def _at_head(self, together: Lockstep) -> None:
        """Bring batch after batch through the head, and compare its runs with the clean one."""
        pairs = list(zip(self._runs, together.passes, strict=True))
        for number, ids in enumerate(self._batches):
            mine = [(run, one) for run, one in pairs if run.batch == number]
            _, clean = mine[0]
            clean.go()
            runs = FullRuns(self._stream.model, self._routers, ids, {}, clean.result)
            if ids.shape[1] > 1:
                self.loss.add(next_token_losses(clean.result, ids))
            for (run, free), (_, forced) in zip(mine[1::2], mine[2::2], strict=True):
                assert run.one is not None
                with (self._settings[run.one] or nullcontext)():
                    free.go()
                    runs.compare(self._full[run.one], free.result, run.seen)
                    free.result = None  # large
                    forced.go()
                    runs.compare_floor(self._full[run.one], forced.result)
                    forced.result = None
            clean.result = None


def rounded_for(rounding: StreamRounding, one: Perturbation) -> Scope | None:
    """What a perturbation makes ready in each unit: rounded weights; None for noise."""
    if one.kind != "rounding":
        return None
    return partial(rounding.rounded, str(one.level), one.parts)


def check_room(stream: ModelStream, tokens: int, passes: int, memory: int | None) -> None:
    """Refuse a run whose hidden states do not fit beside the weights, which are there twice.

    Args:
        stream: the model.
        tokens: of the text.
        passes: how often the text goes through the model side by side.
        memory: bytes that the process may take; None for what is free.
    """
    width = getattr(text_config(stream.model), "hidden_size", None)
    if not isinstance(width, int):
        return
    room = free_memory() if memory is None else memory - resident_memory()
    states = passes * STATES_KEPT * tokens * width * stream.model.dtype.itemsize
    weights = 2 * max(map(stream.resident, stream.weights.units))
    require(
        states + weights <= room,
        f"the hidden states of {tokens:,} tokens in {passes} passes side by side need "
        f"{states / 1e9:.2f} GB beside {weights / 1e9:.2f} GB of weights, and "
        f"{room / 1e9:.2f} GB are there: take fewer --tokens, or perturbations",
        ParameterError,
    )
