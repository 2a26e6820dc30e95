r"""Remedies side by side: what each leaves of a perturbation, how far it moves the model, its cost.

    to the original   KL(P ‖ Q), P the original in float32, Q the repaired model, perturbed
    two runs          KL(Q ‖ Q'), Q' a second run of the repaired model under the perturbation
    moved             KL(P ‖ P'), P' the repaired model in float32

    nothing           the model as it is
    float32           routers kept in float32: all of them, or the list of the audit
    replay            Q takes the experts that P chose, and Q' those that Q chose: with live
                      weights, or with the weights that were recorded
    smooth            projected top-k, ε = c σ with σ the noise of each layer's gap
    ramp              paper 1's ramp with as many experts per token as the middle one of those

Q and Q' are the two draws of a condition (`run.condition`).
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from tieline.analysis.audit_records import (
    KeepList,
    PerturbationEffect,
    Remedy,
    RemedyEffect,
    RemedyTable,
)
from tieline.analysis.model_effects import Divergences
from tieline.analysis.served_precision import replay_bytes
from tieline.analysis.smooth import NOISE, SmoothingCalibration
from tieline.core.errors import TielineError, require
from tieline.core.statistics import Estimate, SequenceSums
from tieline.core.text import layer_label
from tieline.models.capture import capture
from tieline.models.emulate import modular_routers
from tieline.models.experts import KERNEL, can_use_experts, using_experts
from tieline.models.families import family_of
from tieline.models.number_formats import format_named
from tieline.models.replay import replay
from tieline.models.smoothed_model import Smoothing, smoothed_routers, smoothing_record
from tieline.models.smoothed_router import GateName
from tieline.run.calibration import measure_scores
from tieline.run.condition import ChoiceMode, Condition, Perturbation
from tieline.run.forward import Ids, forward, only_running
from tieline.run.plan import Budget, CompletedRun, Pass, Phase, Plan
from tieline.run.runner import Progress, Runner
from tieline.trace.record import LayerTrace

SCALES = (4.0, 16.0, 64.0)
"""c = ε/σ of the smoothed forms."""

USUAL = ("router bf16", "model bf16", "model int8")
"""Perturbations that remedies are tried on unless others are named."""

ROUNDS, TIMED_ROWS = 3, 2
"""How often each form is timed, and on how many sequences."""

UNMOVED = Estimate(0.0, 0.0)


def chosen_perturbations(
    run: Sequence[Perturbation], names: Sequence[str] | None
) -> list[Perturbation]:
    """The perturbations of an audit that remedies are tried on.

    Args:
        run: all of the audit.
        names: which; ("all",) for all, () for none, None for the usual ones or else all roundings.
    """
    by_name = {perturbation.name: perturbation for perturbation in run}
    if names is None:
        usual = [by_name[name] for name in USUAL if name in by_name]
        return usual or [perturbation for perturbation in run if perturbation.kind == "rounding"]
    if tuple(names) == ("all",):
        return list(run)
    unknown = [name for name in names if name not in by_name]
    require(
        not unknown,
        f"remedies are tried on perturbations of the audit: {', '.join(unknown)} is none of "
        f"{', '.join(by_name)}, all, none",
    )
    return [by_name[name] for name in names]


def extra_bytes(router: nn.Module, number_format: str) -> int:
    """Return the bytes that the router's weights take in float32 beyond those of the format."""
    bits = 32 - format_named(number_format).bits
    return sum(weight.numel() for weight in router.parameters()) * bits // 8


def keep_list(damages: Mapping[str, float], costs: Mapping[str, int], wanted: float) -> KeepList:
    """Choose routers by damage per byte until their damage is at least `wanted` of the whole.

    Args:
        damages: jump-weighted damage D_l >= 0 of each layer.
        costs: bytes to keep each layer's router in float32.
        wanted: share of the damage to recover, in (0, 1].
    """
    require(0 < wanted <= 1, f"the share of damage to recover is in (0, 1], got {wanted}")
    total = sum(damages.values())
    order = sorted(damages, key=lambda name: damages[name] / max(1, costs[name]), reverse=True)
    routers: list[str] = []
    recovered_damage = 0.0
    for name in order:
        if recovered_damage >= wanted * total * (1 - 1e-12) or damages[name] <= 0:
            break
        routers.append(name)
        recovered_damage += damages[name]
    return KeepList(
        wanted=wanted,
        layers=tuple(routers),
        recovered=recovered_damage / total if total > 0 else 0.0,
        bytes=sum(costs[name] for name in routers),
        bytes_all=sum(costs.values()),
    )


def with_remaining_kl(
    keep: KeepList, sums: SequenceSums | None, row: PerturbationEffect
) -> KeepList:
    """Return the list with the KL that remains under a perturbation: 0 if every router is kept.

    Args:
        keep: the routers.
        sums: KL of the run that keeps them; None if there was none.
        row: what the perturbation does without them.
    """
    keeps_all = len(keep.layers) == len(row.layers)
    kl = Estimate(0.0, 0.0) if keeps_all else None if sums is None else sums.mean()
    if kl is None or kl.value is None or not row.kl.value:
        return replace(keep, kl=kl)
    return replace(keep, kl=kl, recovered_kl=1 - kl.value / row.kl.value)


class SmoothedForm(NamedTuple):
    """A way to smooth the model, with the experts per token that it uses."""

    name: str
    gate: GateName
    experts: float
    record: Smoothing


def smoothed_forms(runner: Runner, calibration: Ids) -> list[SmoothedForm]:
    """Return projected top-k of three widths, and the ramp with as many experts as the middle one.

    Args:
        runner: runs the model.
        calibration: tokens that the noise σ and the number of experts are taken from.
    """
    model = runner.models[0].module
    noise_scores = SmoothingCalibration(model, measure_scores(runner, [calibration], NOISE), NOISE)
    forms = []
    for scale in SCALES:
        widths = noise_scores.by_noise(scale)
        experts = noise_scores.experts(widths, "projected")
        record = smoothing_record(model, epsilon=widths, gate="projected")
        forms.append(SmoothedForm(f"smoothed, ε = {scale:g} σ", "projected", experts, record))
    budget, slots = forms[1].experts, min(plan.n_experts for plan in noise_scores.plans)
    if budget > max(plan.k for plan in noise_scores.plans):
        widths = noise_scores.by_budget(budget, "ramp")
        record = smoothing_record(model, epsilon=widths, gate="ramp", k_max=slots)
        forms.append(SmoothedForm("smoothed by a ramp", "ramp", budget, record))
    return forms


REPLAYS: dict[str, Literal["live", "recorded"]] = {
    "replay of experts": "live",
    "replay, weights too": "recorded",
}
NOTHING, ALL_ROUTERS, LISTED = "nothing", "float32 routers", "float32 routers, listed"


class Repaired(NamedTuple):
    """Two runs of a repaired model under a perturbation.

    Attributes:
        first: its condition, compared with the clean original.
        second: the second draw, compared with `compared`.
        compared: the first run that the second is compared with.
    """

    first: Condition
    second: Condition
    compared: Condition


class RemedyRuns:
    """Tries remedies on batches of text."""

    def __init__(
        self,
        runner: Runner,
        conditions: Mapping[Perturbation, Condition],
        keeps: Mapping[str, KeepList],
        costs: Mapping[str, int],
        calibration: Ids,
        routes: Mapping[str, Sequence[LayerTrace]],
    ) -> None:
        """Prepare the remedies that the model allows.

        Args:
            runner: runs the model, in float32.
            conditions: what to repair, by perturbation.
            keeps: routers to keep in float32, by name of the perturbation.
            costs: bytes that all routers take more in float32, by name of the perturbation.
            calibration: tokens that the noise σ and the number of experts are taken from.
            routes: some clean routing of every router, by name.
        """
        self._runner, self._model = runner, runner.models[0].module
        self._conditions, self._keeps, self._costs = conditions, keeps, costs
        self._impossible: list[str] = []
        forms = self._allowed("smoothing", lambda: smoothed_forms(runner, calibration))
        self._forms: list[SmoothedForm] = forms or []
        self._replay_bytes = self._allowed("replay", lambda: replay_bytes_by_weights(routes)) or {}
        self._repaired = {
            (remedy, perturbation.name): pair
            for perturbation, condition in conditions.items()
            for remedy, pair in self._pairs(perturbation, condition).items()
        }
        self._moved = {form.name: Condition(smoothing=form.record) for form in self._forms}
        self._divergences = Divergences(())
        self._times: dict[str, float] = {}
        if not runner.streamed:
            with only_running(self._model):
                self._times = self._timed(calibration[:TIMED_ROWS])

    def _allowed(self, remedy: str, make: Callable[[], Any]) -> Any:
        """What `make` returns; None, and the reason noted, if this model does not allow it."""
        try:
            return make()
        except TielineError as problem:
            self._impossible.append(f"{remedy}: {problem}")
            return None

    def _pairs(self, perturbation: Perturbation, condition: Condition) -> dict[str, Repaired]:
        """The two runs of every remedy under a perturbation, those with the same weights first."""
        first, second = condition, condition.again()
        pairs = {NOTHING: Repaired(first, second, first)}
        for name, weights in REPLAYS.items() if self._replay_bytes else ():
            pairs[name] = Repaired(first.taking(weights), second.taking(weights), first)
        for form in self._forms:
            smoothed = replace(condition, smoothing=form.record)
            pairs[form.name] = Repaired(smoothed, smoothed.again(), smoothed)
        if perturbation.kind != "rounding":
            return pairs
        routers = tuple(modular_routers(self._model))
        listed_routers = (
            self._keeps[perturbation.name].layers if perturbation.name in self._keeps else ()
        )
        if perturbation.part != "router":
            pairs[ALL_ROUTERS] = _keeping_routers(condition, routers)
        if 0 < len(listed_routers) < len(routers):
            pairs[LISTED] = _keeping_routers(condition, listed_routers)
        return pairs

    def run(
        self, batches: Mapping[int, Ids], budget: Budget, on_progress: Progress | None
    ) -> CompletedRun:
        """Run every remedy on these batches, as long as there is time.

        Second runs take every other batch, and their errors are those of it. What is compared with
        the original takes every batch, so that remedies are compared on the same tokens.

        Args:
            batches: token ids by number.
            budget: the time.
            on_progress: called with stage, done and total.
        """
        half = [number for number in batches if number % 2 == 0]
        passes = [Pass(number) for number in batches]
        passes += [Pass(n, moved, Pass(n)) for moved in self._moved.values() for n in batches]
        for pair in self._repaired.values():
            for number in batches:
                clean = Pass(number)
                passes.append(Pass(number, pair.first, clean))
                if number in half:
                    passes.append(Pass(number, pair.second, Pass(number, pair.compared, clean)))
        phase = Phase("remedies", batches, tuple(passes))
        pairs = [condition for pair in self._repaired.values() for condition in pair[:2]]
        self._divergences = Divergences([*self._moved.values(), *pairs])
        limits = None if self._runner.streamed else budget
        return self._runner.run(Plan((phase,)), [self._divergences], on_progress, budget=limits)

    def _timed(self, ids: Ids) -> dict[str, float]:
        """Median time of a forward pass over the original's, by remedy, all in turns.

        As in `smooth`, the original runs with its own experts, and smoothed forms with our kernel
        where it takes them.
        """
        forms: dict[str, Callable[[], AbstractContextManager[Any]]] = {NOTHING: nullcontext}
        if self._replay_bytes:
            with capture(self._model, distances=False, epsilons=()) as recorder:
                forward(self._model, ids)
            for name, weights in REPLAYS.items():
                forms[name] = partial(replay, self._model, recorder.trace(), weights)
        experts = self._experts_of_forms(ids)
        for form in self._forms:
            forms[form.name] = partial(self._smoothed, form.record, experts)
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(1 + ROUNDS):
            for name, form in forms.items():
                with form():
                    start = time.process_time()
                    forward(self._model, ids)
                    seconds[name].append(time.process_time() - start)
        middle = {name: statistics.median(spent[1:]) for name, spent in seconds.items()}
        return {name: value / max(middle[NOTHING], 1e-9) for name, value in middle.items()}

    def _experts_of_forms(self, ids: Ids) -> str | None:
        """Our kernel of the experts; None where the model cannot run by it."""
        if not can_use_experts(self._model):
            return None
        try:
            with using_experts(self._model, KERNEL):
                forward(self._model, ids)
        except TielineError:
            return None
        return KERNEL

    @contextmanager
    def _smoothed(self, record: Smoothing, experts: str | None) -> Iterator[None]:
        """Inside the block, the model is smoothed and its experts are these."""
        routers = smoothed_routers(self._model, record, modular_routers(self._model))
        with routers, using_experts(self._model, experts):
            yield

    def table(self, batches: Sequence[Ids]) -> RemedyTable:
        """Assemble what was counted.

        Args:
            batches: all batches that were run, by any process.
        """
        counts = []
        for router in modular_routers(self._model).values():
            family = family_of(router)
            assert family is not None
            counts.append(int(attrgetter(family.k)(router)))
        k = sum(counts) / len(counts)
        effects = partial(self._effects, batches)
        spent = None if self._runner.streamed else 1.0
        rows = [Remedy(NOTHING, "nothing", UNMOVED, k, spent, 0, {}, effects(NOTHING))]
        for name in (ALL_ROUTERS, LISTED):
            rows.append(Remedy(name, "float32", UNMOVED, k, None, 0, {}, effects(name)))
        for name, weights in REPLAYS.items():
            size, spent = self._replay_bytes.get(weights, 0), self._times.get(name)
            rows.append(Remedy(name, "replay", UNMOVED, k, spent, size, {}, effects(name)))
        for form in self._forms:
            kind = "smooth" if form.gate == "projected" else "ramp"
            moved = self._divergences.kl[self._moved[form.name]].mean()
            widths, spent = form.record.epsilons, self._times.get(form.name)
            row = Remedy(form.name, kind, moved, form.experts, spent, 0, widths, effects(form.name))
            rows.append(row)
        sums = [self._divergences.kl[pair.second] for pair in self._repaired.values()]
        return RemedyTable(
            tuple(row for row in rows if row.effects),
            tuple(perturbation.name for perturbation in self._conditions),
            sum(ids.numel() for ids in batches),
            NOISE,
            tuple(self._impossible),
            int(sum(count.sum() for count in sums[0].counts)) if sums else 0,
        )

    def _effects(self, batches: Sequence[Ids], remedy: str) -> tuple[RemedyEffect, ...]:
        """What a remedy leaves of each perturbation that it applies to."""
        effects = []
        for perturbation in self._conditions:
            pair = self._repaired.get((remedy, perturbation.name))
            if pair is not None:
                kl = self._divergences.kl
                kls = kl[pair.first].mean(), kl[pair.second].mean()
            elif remedy == ALL_ROUTERS and perturbation.kind == "rounding":
                kls = _zero_kl(batches), _zero_kl(batches)  # all that is rounded is kept
            else:
                continue
            effects.append(
                RemedyEffect(perturbation.name, *kls, self._bytes(remedy, perturbation.name))
            )
        return tuple(effects)

    def _bytes(self, remedy: str, perturbation: str) -> int:
        """Bytes that a remedy takes more under a perturbation."""
        if remedy == ALL_ROUTERS:
            return self._costs.get(perturbation, 0)
        return self._keeps[perturbation].bytes if remedy == LISTED else 0


def _keeping_routers(condition: Condition, routers: Sequence[str]) -> Repaired:
    """The two runs that keep these routers in float32."""
    keeping = replace(condition, kept=tuple(routers))
    return Repaired(keeping, keeping.again(), keeping)


def _zero_kl(batches: Sequence[Ids]) -> Estimate:
    """A KL of zero on every token."""
    sums = SequenceSums()
    for ids in batches:
        sums.add(torch.zeros(ids.shape, device="cpu"))
    return sums.mean()


def replay_bytes_by_weights(routes: Mapping[str, Sequence[LayerTrace]]) -> dict[ChoiceMode, int]:
    """Return the bytes per token that a replay sends, by its weights.

    Args:
        routes: some routing of every router.
    """
    sizes: dict[ChoiceMode, int] = {"live": 0, "recorded": 0}
    for name, layers in routes.items():
        require(
            not layers[0].smoothed,
            f"{layer_label(name)} is smoothed: it uses other numbers of experts than a record has",
        )
        sizes["live"] += replay_bytes(layers[0], weights=False)
        sizes["recorded"] += replay_bytes(layers[0])
    return sizes
