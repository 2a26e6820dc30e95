"""Auditing a model that is streamed: every perturbation in one pass over the disk.

A batch under a perturbation is a forward pass of its own beside the clean one. In a layer the clean
passes go first, so that the others can be compared with what they chose; then one perturbation
after the other, whose weights are rounded once for all batches. At the output head, where logits
are large, one batch after the other goes through, clean and perturbed, and is compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Int
from torch import Tensor, nn

from tieline.analysis.perturbations import (
    Perturbation,
    changed_computation,
    changed_weights,
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
from tieline.hf.emulate import Rooms, format_named, rounded_in_pieces, weight_axis
from tieline.hf.lockstep import Lockstep
from tieline.hf.running import forward, text_config
from tieline.hf.streaming import ModelStream

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
        self._rooms, self._expert_rooms = Rooms(), Rooms()
        self._watches = [
            LocalWatch(local, number, (len(ids), ids.shape[1]), jumps_later=True)
            for number, ids in enumerate(batches)
        ]
        self._settings = {one: partial(self._rounded, one) for one in full}
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
            settings=[None if run.one is None else self._settings[run.one] for run in self._runs],
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
        here = {name: router for name, router in self._routers.items() if _in_memory(router)}
        known = {name: router for name, router in here.items() if name in watch.clean}
        with (
            changed_computation(self._stream.model, run.one, run.source),
            compared_routes(known, watch.clean, run.seen, run.forced),
        ):
            yield

    @contextmanager
    def _rounded(self, one: Perturbation) -> Iterator[None]:
        """The weights in memory as a perturbation has them."""
        with ExitStack() as stack:
            stack.enter_context(changed_weights(self._stream.model, one, rooms=self._rooms))
            if one.kind == "rounding" and one.part == "model":
                grid = format_named(str(one.level)).weights
                room = stack.enter_context(self._expert_rooms.lent())

                def rounded(module: nn.Module, experts: Tensor) -> Tensor:
                    return rounded_in_pieces(experts, grid, weight_axis(module, experts), room)

                stack.enter_context(self._stream.changed_experts(rounded))
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
                with self._settings[run.one]():
                    free.go()
                    runs.compare(self._full[run.one], free.result, run.seen)
                    free.result = None  # large
                    forced.go()
                    runs.compare_floor(self._full[run.one], forced.result)
                    forced.result = None
            clean.result = None


def _in_memory(router: nn.Module) -> bool:
    return not any(parameter.is_meta for parameter in router.parameters())


def check_room(
    stream: ModelStream, tokens: int, perturbations: int, room: int, largest: int
) -> None:
    """Refuse an audit whose hidden states do not fit beside the weights.

    Args:
        stream: the model.
        tokens: of the text.
        perturbations: how many.
        room: bytes of memory that are free.
        largest: bytes of the weights that are there at once.
    """
    width = getattr(text_config(stream.model), "hidden_size", None)
    if not isinstance(width, int):
        return
    each = STATES_KEPT * tokens * width * stream.model.dtype.itemsize
    needed = (1 + 2 * perturbations) * each + largest
    require(
        needed <= room,
        f"the hidden states of {tokens:,} tokens, clean and under {perturbations} perturbations, "
        f"need {needed / 1e9:.1f} GB beside the weights, and {room / 1e9:.1f} GB are there: take "
        "fewer --tokens or --formats",
        ParameterError,
    )
