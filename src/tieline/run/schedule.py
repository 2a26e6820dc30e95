"""How the passes of a phase are run: what schedules share, and the one of models in memory.

`run.streamed_passes` has the schedule of models that are read from disk.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from tieline.core.predictions import ComparedPredictions
from tieline.core.ranking import sets_differ
from tieline.models.capture import LayerRecorder
from tieline.models.class_changes import Call
from tieline.models.configuration import text_config
from tieline.models.families import HANDLER
from tieline.models.model import Model
from tieline.models.pass_tokens import Batch
from tieline.models.replay import LayerReplay
from tieline.models.router_output import (
    Choice,
    RouterOutput,
    padded_choice,
    read_output,
    write_output,
)
from tieline.models.router_output_layouts import NewChoice
from tieline.run.condition import REPLAYS
from tieline.run.forward import finite_logits, forward, model_logits
from tieline.run.observers import (
    RANKS_ONLY,
    Observer,
    Outcome,
    RoutersDone,
    Site,
    Watch,
    run_blocks,
    sites_of,
    watching,
)
from tieline.run.plan import Budget, CompletedRun, Ids, Pass, Phase
from tieline.trace.record import LayerTrace


@dataclass
class RunningPass:
    """A pass under way.

    Attributes:
        run: the pass.
        ids: its tokens.
        generator: source of its noise.
        choices: by router, its weights and experts, where they are needed later.
        routes: by router, the same as a trace, where they are replayed later.
        lost: by router, the routed weight that each token lost against the reference.
        changed: by router, tokens whose experts a replay changed.
    """

    run: Pass
    ids: Ids
    generator: torch.Generator
    choices: dict[str, Choice] = field(default_factory=dict)
    routes: dict[str, LayerTrace] = field(default_factory=dict)
    lost: dict[str, Tensor] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)


def chosen_output(
    state: RunningPass,
    reference: RunningPass | None,
    recorded: tuple[bool, bool],
    site: Site,
    call: Call,
    output: Any,
) -> Any:
    """Record a router's choice, compare it with the reference, and force that where asked.

    Args:
        state: the pass.
        reference: the pass to compare with; None for none.
        recorded: whether choices, and whether routes, are kept for later passes.
        site: the router.
        call: its call.
        output: what it returned.
    """
    if recorded[1]:
        with torch._C.DisableTorchFunction():
            state.routes[site.name] = _recorded_route(site, call, output)
    clean = None if reference is None else reference.choices.get(site.name)
    if not recorded[0] and clean is None:
        return output
    routed = read_output(site.family, site.module, call, output)
    choice = Choice(routed.weights, routed.ids)
    if recorded[0]:
        state.choices[site.name] = choice
    if clean is None:
        return output
    forced = state.run.condition.choice == "forced"
    state.lost[site.name], choice = compared_choice(clean, routed, forced)
    if not forced:
        return output
    handler = getattr(site.module, HANDLER, None)
    resize, skip = (getattr(handler, name, None) for name in ("resize", "skip"))
    if resize is not None:  # what counts the columns of a smoothed router
        resize(choice.ids.shape[1])
    if skip is None:
        return write_output(site.family, output, routed, choice)
    ids = skip.applied(choice.ids, choice.weights)
    return site.family.layout.with_choice(output, NewChoice(*choice, ids, choice.weights > 0))


def _recorded_route(site: Site, call: Call, output: Any) -> LayerTrace:
    """The choice of one call as the record that a replay takes."""
    tokens = torch.arange(
        len(read_output(site.family, site.module, call, output).ids), device="cpu"
    )
    batch = Batch(tokens, torch.zeros_like(tokens), tokens, None, len(tokens))
    return LayerRecorder(site.name, site.family, RANKS_ONLY).observe(
        site.module, call, output, batch
    )


def replayed_output(
    state: RunningPass, reference: RunningPass, weights: str, site: Site, call: Call, output: Any
) -> Any:
    """Return a router's output with the experts of the reference pass, and count what changed."""
    record = reference.routes.get(site.name)
    if record is None:
        return output
    layer = LayerReplay(site.name, site.module, record, weights)
    replayed = layer(site.module, call, output)
    state.changed[site.name] = layer.changed
    return replayed


def compared_choice(clean: Choice, routed: RouterOutput, forced: bool) -> tuple[Tensor, Choice]:
    r"""Compare a router's choice with that of a reference pass.

    Args:
        clean: weights and experts of the reference.
        routed: what the router returned.
        forced: whether tokens whose experts differ take the choice of the reference.

    Returns:
        The share of routed weight that each token lost, Σ_{e ∈ S \ S'} w_e / Σ_{e ∈ S} w_e, -1
        where its experts are the same; and the choice to take.
    """
    clean_set = routed_set(RouterOutput(routed.logits, clean.weights, clean.ids))
    routed_mask = routed_set(routed)
    flipped = sets_differ(clean_set, routed_mask)
    lost_slots = ~routed_mask.gather(1, clean.ids)
    size = clean.weights.double().sum(dim=1).clamp(min=1e-30)
    share = (clean.weights.double() * lost_slots).sum(dim=1) / size
    lost = torch.where(flipped, share, -1.0).cpu()
    choice = Choice(routed.weights, routed.ids)
    if not forced:
        return lost, choice
    clean_choice, choice = (
        padded_choice(clean, choice.ids.shape[1]),
        padded_choice(choice, clean.ids.shape[1]),
    )
    return lost, Choice(
        torch.where(flipped[:, None], clean_choice.weights, choice.weights),
        torch.where(flipped[:, None], clean_choice.ids, choice.ids),
    )


def routed_set(routed: RouterOutput) -> Tensor:
    """Return the chosen experts as a mask (tokens, experts)."""
    empty = torch.zeros_like(routed.logits, dtype=torch.bool)
    return empty.scatter_(1, routed.ids, True)


Progress = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and of how much."""


Models = Sequence[Model]


Observers = Sequence[Observer]


WINDOW = 32 << 20
"""Bytes of logits that are kept for later passes of a window of batches."""


class Schedule:
    """What both schedules share: passes under way, and what later passes need of finished ones."""

    reruns = True
    """Whether blocks can be run again while a pass is inside them."""

    def __init__(
        self, models: Sequence[Model], phase: Phase, observers: Sequence[Observer]
    ) -> None:
        self.models, self.phase, self.observers = models, phase, observers
        self._sites = [sites_of(model.module) for model in models]
        self._choices, self._routes = phase.references_of_choices, phase.references_of_routes
        self._uses = Counter(other for run in phase.passes for other in run.compared_with)
        self._running: dict[Pass, RunningPass] = {}
        self._logits: dict[Pass, Tensor] = {}
        self._compared: dict[Pass, ComparedPredictions] = {}

    def begin(self, run: Pass) -> RunningPass:
        """Prepare a pass."""
        ids = self.phase.batches[run.batch]
        self._running[run] = RunningPass(run, ids, run.condition.generator(run.batch))
        for observer in self.observers:
            observer.on_start(run, ids)
        return self._running[run]

    def module(self, run: Pass) -> nn.Module:
        """The model of a pass."""
        return self.models[run.model].module

    def logits(self, state: RunningPass) -> Any:
        """Run a pass and return its logits; None where the phase looks at none."""
        predicts = self.phase.logits != "none"
        try:
            output = forward(self.module(state.run), state.ids, predicts=predicts)
        except RoutersDone:
            return None
        if not predicts:
            return None
        if self.phase.logits == "optional":
            return getattr(output, "logits", None)
        clean = state.run.condition.perturbation is None
        return (finite_logits if clean else model_logits)(output, state.ids)

    @contextmanager
    def scope(self, state: RunningPass) -> Iterator[None]:
        """Context in which a pass computes: its condition, and observers looking at it."""
        run, sites = state.run, self.sites(state.run)
        condition, watch = run.condition, Watch(run, self.observers, self.reruns)
        method = "forward" if condition.choice in REPLAYS else ""
        with (
            condition.computation(self.module(run), state.generator, sites),
            watching(watch, sites, self._rewrite(state), method),
        ):
            yield

    def sites(self, run: Pass) -> Mapping[str, Site]:
        """Routers of the pass's model whose weights are in memory."""
        return self._sites[run.model]

    def _rewrite(self, state: RunningPass) -> Callable[[Site, Call, Any], Any] | None:
        """What the routers of a pass return instead of their own output, and what is recorded."""
        run, kind = state.run, state.run.condition.choice
        if kind in REPLAYS:
            assert run.reference is not None
            return partial(replayed_output, state, self._running[run.reference], kind)
        records, traces = run in self._choices, run in self._routes
        reference = None
        if run.reference is not None and (kind == "forced" or self.phase.compares_routes):
            reference = self._running[run.reference]
        if not (records or traces or reference):
            return None
        return partial(chosen_output, state, reference, (records, traces))

    def finish(self, state: RunningPass, logits: Any) -> None:
        """Show the logits of a pass to the observers, and drop what no pass needs any more."""
        run = state.run
        compared = {
            other: self._logits[other] for other in run.compared_with if other in self._logits
        }
        outcome = Outcome(
            state.ids,
            logits,
            compared,
            state.lost,
            state.choices,
            state.changed,
            self._compared,
        )
        for observer in self.observers:
            observer.on_pass_done(run, outcome)
        if self._uses[run] and logits is not None:
            self._logits[run] = logits
        for other in run.compared_with:
            self._uses[other] -= 1
            if not self._uses[other]:
                self._logits.pop(other, None)
                self._compared.pop(other, None)
                self._running.pop(other, None)
        if not self._uses[run]:
            self._running.pop(run, None)


class ByPass(Schedule):
    """Runs passes one after the other on models in memory."""

    def __init__(
        self,
        models: Models,
        phase: Phase,
        observers: Observers,
        budget: Budget | None,
    ) -> None:
        super().__init__(models, phase, observers)
        self._budget = budget or Budget()
        self._dropped: tuple[Any, ...] = ()
        self._done = 0

    def run(self, on_progress: Progress | None) -> CompletedRun:
        """Run the windows of batches, as long as there is time."""
        budget, slowest, batches = self._budget, 0.0, []
        for window in self.phase.windows(self._window()):
            began = budget.elapsed()
            if batches and began + slowest > budget.limit:
                break
            self._run_window(window, first=not batches, on_progress=on_progress)
            batches += dict.fromkeys(run.batch for run in window)
            slowest = max(slowest, budget.elapsed() - began)
        for observer in self.observers:
            observer.on_unit_done("", run_blocks)
        return CompletedRun(tuple(batches), self._dropped)

    def _window(self) -> int:
        """Batches whose logits are kept at once."""
        if self._budget.is_limited:
            return 1
        vocabulary = getattr(text_config(self.models[0].module), "vocab_size", None)
        vocabulary = vocabulary if isinstance(vocabulary, int) else 1 << 17
        largest = max((ids.numel() for ids in self.phase.batches.values()), default=1)
        size = 4 * largest * vocabulary * self.phase.most_kept
        return max(1, WINDOW // size) if size else max(1, len(self.phase.batches))

    def _run_window(
        self, window: Sequence[Pass], first: bool, on_progress: Progress | None
    ) -> None:
        """Run the passes of a window, those with equal weights under one rounding."""
        total = len(self.phase.passes)
        for (model, *_), group in groupby(
            window, key=lambda run: (run.model, run.condition.perturbation, run.condition.rounded)
        ):
            runs = [run for run in group if run.condition.perturbation not in self._dropped]
            if first and runs and self._out_of_time(runs[0]):
                self._drop(runs[0])
            runs = [run for run in runs if run.condition.perturbation not in self._dropped]
            if not runs:
                continue
            with runs[0].condition.weights(self.models[model].module):
                for run in runs:
                    state = self.begin(run)
                    with self.scope(state):
                        logits = self.logits(state)
                    self.finish(state, logits)
                    self._done += 1
                    if on_progress is not None:
                        on_progress(self.phase.name, min(self._done, total), total)

    def _perturbations(self) -> list[Any]:
        """Perturbations of the phase, in order."""
        runs = self.phase.passes
        return [p for p in dict.fromkeys(run.condition.perturbation for run in runs) if p]

    def _out_of_time(self, run: Pass) -> bool:
        """Whether a perturbation begins, not the first one, and the time is up."""
        perturbation = run.condition.perturbation
        passes = (p for p in self.phase.passes if p.condition.perturbation == perturbation)
        if not self._budget.is_limited or not self.phase.may_drop or next(passes) != run:
            return False
        later = perturbation in self._perturbations()[1:]
        return later and self._budget.elapsed() > self._budget.limit

    def _drop(self, run: Pass) -> None:
        """Leave out this perturbation and all that follow."""
        perturbations = self._perturbations()
        self._dropped = tuple(perturbations[perturbations.index(run.condition.perturbation) :])
