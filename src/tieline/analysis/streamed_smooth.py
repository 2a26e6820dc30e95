"""What smoothing repairs in a model that is streamed: both forms in one pass over the files.

The original and its smoothed form have the same weights, so both go through a layer while it is
there, clean and under every perturbation; weights that are rounded serve both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Int
from torch import Tensor, nn

from tieline.analysis.perturbations import Perturbation, changed_computation, noise_generator
from tieline.analysis.precision_runs import clean_logits, compared_routes, model_logits
from tieline.analysis.repair import RepairForm, RepairSide, RepairTable, kept_choice
from tieline.analysis.streamed_audit import rounded_for
from tieline.core.errors import UnsupportedModelError, require
from tieline.models.lockstep import Lockstep, Pass, Scope
from tieline.models.router_call import Choice, override_choice
from tieline.models.running import forward, only_running
from tieline.models.smooth import Smoothing, smoothed_routers
from tieline.models.stream_rounding import StreamRounding, in_memory
from tieline.models.streaming import ModelStream

Ids = Int[Tensor, "_ _"]


class _Run(NamedTuple):
    """One forward pass.

    Attributes:
        batch: number of its batch.
        smoothed: whether it is of the smoothed form.
        one: its perturbation; None for the clean pass.
        forced: whether flipping tokens get the clean choice.
        source: of its noise.
        seen: what tokens lost in each layer.
        choices: of the clean pass of the same batch and form.
    """

    batch: int
    smoothed: bool
    one: Perturbation | None
    forced: bool
    source: Any
    seen: dict[str, Tensor]
    choices: dict[str, Choice]


class StreamedRepair:
    """The runs of a repair table over a streamed model."""

    def __init__(
        self,
        stream: ModelStream,
        record: Smoothing,
        batches: Sequence[Ids],
        perturbations: Sequence[Perturbation],
        seed: int,
    ) -> None:
        """Compare a model with its smoothed form.

        Args:
            stream: what runs the model, which is not smoothed itself.
            record: how it is smoothed.
            batches: token ids.
            perturbations: what to do to both forms.
            seed: of all noise.
        """
        kind = type(stream.model).__name__
        require(stream.head is not None, f"{kind} has no output head", UnsupportedModelError)
        self._stream, self._record, self._batches = stream, record, batches
        self._before = RepairSide(stream.model, perturbations)
        self._after = RepairForm(stream.model, perturbations)
        rounding = StreamRounding(stream)
        self._settings: dict[Perturbation | None, Scope | None] = {None: None}
        self._settings |= {one: rounded_for(rounding, one) for one in perturbations}
        choices: dict[tuple[int, bool], dict[str, Choice]] = {
            (number, form): {} for number in range(len(batches)) for form in (False, True)
        }
        self._runs = [_Run(*key, None, False, None, {}, found) for key, found in choices.items()]
        for place, one in enumerate(perturbations):
            for (number, form), found in choices.items():
                for forced in (False, True):
                    source = noise_generator(seed, place, number)
                    self._runs.append(_Run(number, form, one, forced, source, {}, found))

    def table(self, told: Callable[[int, int], None]) -> RepairTable:
        """Run all, and return the table."""
        with only_running(self._stream.model):
            self._stream.run(
                [partial(self._logits, run) for run in self._runs],
                scopes=[partial(self._in_force, run) for run in self._runs],
                settings=[self._settings[run.one] for run in self._runs],
                told=told,
                at_head=self._at_head,
            )
        size = sum(ids.numel() for ids in self._batches), sum(len(ids) for ids in self._batches)
        return self._after.table(self._before, list(self._before.effects), size)

    def _logits(self, run: _Run) -> Tensor:
        ids = self._batches[run.batch]
        output = forward(self._stream.model, ids)
        return (clean_logits if run.one is None else model_logits)(output, ids)

    @contextmanager
    def _in_force(self, run: _Run) -> Iterator[None]:
        """What holds while a pass runs."""
        model, routers = self._stream.model, self._before.routers
        here = {name: router for name, router in routers.items() if in_memory(router)}
        with ExitStack() as stack:
            if run.smoothed:
                stack.enter_context(smoothed_routers(model, self._record, here))
            if run.one is None:
                stack.enter_context(_kept(here, run.choices))
            else:
                known = {name: router for name, router in here.items() if name in run.choices}
                stack.enter_context(changed_computation(model, run.one, run.source))
                stack.enter_context(compared_routes(known, run.choices, run.seen, run.forced))
            yield

    def _at_head(self, together: Lockstep) -> None:
        """Bring batch after batch through the head, and compare its runs."""
        pairs = list(zip(self._runs, together.passes, strict=True))
        for number, ids in enumerate(self._batches):
            mine = [(run, one) for run, one in pairs if run.batch == number]
            clean: dict[bool, Tensor] = {}
            for run, one in mine[:2]:
                one.go()
                clean[run.smoothed], one.result = one.result, None
                self._side(run).count_experts(run.choices, ids)
            self._after.compare(clean[False], clean[True], ids)
            for perturbation in self._before.effects:
                with (self._settings[perturbation] or nullcontext)():
                    for run, one in mine:
                        if run.one == perturbation:
                            self._count(run, one, ids, clean)

    def _count(self, run: _Run, one: Pass, ids: Ids, clean: Mapping[bool, Tensor]) -> None:
        """Let a perturbed pass go to its end and count it."""
        one.go()
        logits, one.result = one.result, None
        side, own = self._side(run), clean[run.smoothed]
        assert run.one is not None
        if run.forced:
            side.count_floor(run.one, logits, own)
        else:
            side.count(run.one, logits, run.seen, ids, own, clean[False])

    def _side(self, run: _Run) -> RepairSide:
        return self._after if run.smoothed else self._before


@contextmanager
def _kept(routers: Mapping[str, nn.Module], choices: dict[str, Choice]) -> Iterator[None]:
    """Keep what these routers choose."""
    with ExitStack() as stack:
        for name, router in routers.items():
            stack.enter_context(override_choice(router, partial(kept_choice, choices, name)))
        yield
