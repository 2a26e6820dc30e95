r"""Remedies side by side: remaining effect of a perturbation, change of the model itself, and cost.

    to the original   KL(P ‖ Q), P the original in float32, Q the repaired model, perturbed
    two runs          KL(Q ‖ Q'), Q' a second run of the repaired model under the perturbation
    moved             KL(P ‖ P'), P' the repaired model in float32

    nothing           the model as it is
    float32           routers kept in float32: all of them, or the list of the audit
    replay            Q uses the experts that P chose, and Q' those that Q chose, with live or with
                      recorded weights
    smooth            projected top-k, ε = c σ with σ the noise of each layer's gap
    ramp              the ramp of paper 1, with as many experts per token as the middle of the
                      smooth forms

Q and Q' are the two draws of a condition (`run.condition`).
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
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
from tieline.analysis.smooth import DEFAULT_NOISE, SmoothingCalibration
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
"""Ratios c = ε/σ of the smoothed forms."""

DEFAULT_PERTURBATIONS = ("router bf16", "model bf16", "model int8")
"""Perturbations that remedies are tried on by default."""

TIMING_ROUNDS, TIMED_SEQUENCES = 3, 2
"""Number of timed passes of each form, and of sequences in each pass."""

ZERO_KL = Estimate(0.0, 0.0)


def perturbations_to_repair(
    perturbations: Sequence[Perturbation], names: Sequence[str] | None
) -> list[Perturbation]:
    """Return the perturbations of an audit that remedies are tried on.

    Args:
        perturbations: all perturbations of the audit.
        names: names of those to repair; ("all",) for all, () for none, None for the default ones,
            or all roundings if the audit has none of these.
    """
    by_name = {perturbation.name: perturbation for perturbation in perturbations}
    if names is None:
        default = [by_name[name] for name in DEFAULT_PERTURBATIONS if name in by_name]
        return default or [x for x in perturbations if x.kind == "rounding"]
    if tuple(names) == ("all",):
        return list(perturbations)
    unknown = [name for name in names if name not in by_name]
    require(
        not unknown,
        f"remedies are tried on perturbations of the audit: {', '.join(unknown)} is none of "
        f"{', '.join(by_name)}, all, none",
    )
    return [by_name[name] for name in names]


def float32_extra_bytes(router: nn.Module, number_format: str) -> int:
    """Return the bytes that the router's weights take in float32 beyond those of the format."""
    bits = 32 - format_named(number_format).bits
    return sum(weight.numel() for weight in router.parameters()) * bits // 8


def keep_list(damages: Mapping[str, float], costs: Mapping[str, int], wanted: float) -> KeepList:
    """Choose routers by damage per byte until they cause at least a share `wanted` of the damage.

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
    """Return the keep list with the KL that remains under a perturbation: 0 if it has all routers.

    Args:
        keep: the routers to keep in float32.
        sums: KL of the run that keeps them; None if there was none.
        row: effect of the perturbation without kept routers.
    """
    keeps_all = len(keep.layers) == len(row.layers)
    kl = ZERO_KL if keeps_all else None if sums is None else sums.mean()
    if kl is None or kl.value is None or not row.kl.value:
        return replace(keep, kl=kl)
    return replace(keep, kl=kl, recovered_kl=1 - kl.value / row.kl.value)


class SmoothedForm(NamedTuple):
    """A smoothing of the model and the number of experts per token that it uses."""

    name: str
    gate: GateName
    experts: float
    record: Smoothing


def smoothed_forms(runner: Runner, batch: Ids) -> list[SmoothedForm]:
    """Return projected top-k of three widths, and the ramp with as many experts as the middle one.

    Args:
        runner: runs the model.
        batch: token ids to measure the noise σ and the number of experts on.
    """
    model = runner.models[0].module
    scores = measure_scores(runner, [batch], DEFAULT_NOISE)
    calibration = SmoothingCalibration(model, scores, DEFAULT_NOISE)
    forms = []
    for scale in SCALES:
        widths = calibration.by_noise(scale)
        experts = calibration.experts(widths, "projected")
        record = smoothing_record(model, epsilon=widths, gate="projected")
        forms.append(SmoothedForm(f"smoothed, ε = {scale:g} σ", "projected", experts, record))
    budget, slots = forms[1].experts, min(plan.n_experts for plan in calibration.plans)
    if budget > max(plan.k for plan in calibration.plans):
        widths = calibration.by_budget(budget, "ramp")
        record = smoothing_record(model, epsilon=widths, gate="ramp", k_max=slots)
        forms.append(SmoothedForm("smoothed by a ramp", "ramp", budget, record))
    return forms


REPLAYS: dict[str, Literal["live", "recorded"]] = {
    "replay of experts": "live",
    "replay, weights too": "recorded",
}
NOTHING, ALL_ROUTERS, LISTED_ROUTERS = "nothing", "float32 routers", "float32 routers, listed"


class RunPair(NamedTuple):
    """Conditions of two runs of a repaired model under a perturbation.

    Attributes:
        first: condition of the run that is compared with the clean original.
        second: condition with a second draw of the perturbation.
        reference: condition of the run that the second is compared with.
    """

    first: Condition
    second: Condition
    reference: Condition


class RemedyRuns:
    """Runs the remedies on batches of text and assembles their table."""

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
            conditions: conditions to repair, by perturbation.
            keeps: routers to keep in float32, by name of the perturbation.
            costs: additional bytes of all routers in float32, by name of the perturbation.
            calibration: token ids to measure the noise σ and the number of experts on.
            routes: clean routing of some tokens for every router, by name.
        """
        self._runner, self._model = runner, runner.models[0].module
        self._conditions, self._keeps, self._costs = conditions, keeps, costs
        self._impossible: list[str] = []
        forms = self._try_remedy("smoothing", lambda: smoothed_forms(runner, calibration))
        self._forms: list[SmoothedForm] = forms or []
        sizes = self._try_remedy("replay", lambda: replay_bytes_by_weights(routes))
        self._replay_bytes: dict[ChoiceMode, int] = sizes or {}
        self._pairs = {
            (remedy, perturbation.name): pair
            for perturbation, condition in conditions.items()
            for remedy, pair in self._run_pairs(perturbation, condition).items()
        }
        self._moved = {form.name: Condition(smoothing=form.record) for form in self._forms}
        self._divergences = Divergences(())
        self._times: dict[str, float] = {}
        if not runner.streamed:
            with only_running(self._model):
                self._times = self._relative_times(calibration[:TIMED_SEQUENCES])

    def _try_remedy(self, remedy: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`; if the model does not allow it, note why and return None."""
        try:
            return make()
        except TielineError as problem:
            self._impossible.append(f"{remedy}: {problem}")
            return None

    def _run_pairs(self, perturbation: Perturbation, condition: Condition) -> dict[str, RunPair]:
        """Return the runs of every remedy under a perturbation, grouped by equal weights."""
        first, second = condition, condition.again()
        pairs = {NOTHING: RunPair(first, second, first)}
        for name, weights in REPLAYS.items() if self._replay_bytes else ():
            pairs[name] = RunPair(first.taking(weights), second.taking(weights), first)
        for form in self._forms:
            pairs[form.name] = _pair_of_draws(replace(condition, smoothing=form.record))
        if perturbation.kind != "rounding":
            return pairs
        routers = tuple(modular_routers(self._model))
        keep = self._keeps.get(perturbation.name)
        if perturbation.part != "router":
            pairs[ALL_ROUTERS] = _pair_of_draws(replace(condition, kept=routers))
        if keep is not None and 0 < len(keep.layers) < len(routers):
            pairs[LISTED_ROUTERS] = _pair_of_draws(replace(condition, kept=keep.layers))
        return pairs

    def run(
        self, batches: Mapping[int, Ids], budget: Budget, on_progress: Progress | None
    ) -> CompletedRun:
        """Run every remedy on these batches within the time budget.

        Second runs take every other batch, so their standard errors are larger. Runs that are
        compared with the original take every batch, so that remedies are compared on the same
        tokens.

        Args:
            batches: token ids by number.
            budget: time budget.
            on_progress: called with stage, done and total.
        """
        half = [number for number in batches if number % 2 == 0]
        passes = [Pass(number) for number in batches]
        passes += [Pass(n, moved, Pass(n)) for moved in self._moved.values() for n in batches]
        for pair in self._pairs.values():
            for number in batches:
                clean = Pass(number)
                passes.append(Pass(number, pair.first, clean))
                if number in half:
                    passes.append(Pass(number, pair.second, Pass(number, pair.reference, clean)))
        phase = Phase("remedies", batches, tuple(passes))
        repaired = [x for pair in self._pairs.values() for x in (pair.first, pair.second)]
        self._divergences = Divergences([*self._moved.values(), *repaired])
        limits = None if self._runner.streamed else budget
        return self._runner.run(Plan((phase,)), [self._divergences], on_progress, budget=limits)

    def _relative_times(self, ids: Ids) -> dict[str, float]:
        """Return the median time of a forward pass over the original's, by remedy, all in turns.

        As in `smooth`, the original runs with its own experts, and smoothed forms with our kernel
        if it supports the model.
        """
        forms: dict[str, Callable[[], AbstractContextManager[Any]]] = {NOTHING: nullcontext}
        if self._replay_bytes:
            with capture(self._model, distances=False, epsilons=()) as recorder:
                forward(self._model, ids)
            for name, weights in REPLAYS.items():
                forms[name] = partial(replay, self._model, recorder.trace(), weights)
        experts = self._usable_kernel(ids)
        for form in self._forms:
            forms[form.name] = partial(self._smoothed, form.record, experts)
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(1 + TIMING_ROUNDS):
            for name, form in forms.items():
                with form():
                    start = time.process_time()
                    forward(self._model, ids)
                    seconds[name].append(time.process_time() - start)
        medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        return {name: value / max(medians[NOTHING], 1e-9) for name, value in medians.items()}

    def _usable_kernel(self, ids: Ids) -> str | None:
        """Return the name of our kernel of the experts; None if the model cannot run with it."""
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
        """Context manager that smooths the model and sets its implementation of experts."""
        routers = smoothed_routers(self._model, record, modular_routers(self._model))
        with routers, using_experts(self._model, experts):
            yield

    def table(self, batches: Sequence[Ids]) -> RemedyTable:
        """Assemble the table of the remedies that were run.

        Args:
            batches: all batches that were run, by any process.
        """
        counts = []
        for router in modular_routers(self._model).values():
            family = family_of(router)
            assert family is not None
            counts.append(family.chosen_count(router))
        k = sum(counts) / len(counts)
        effects = partial(self._effects, batches)
        time_ratio = None if self._runner.streamed else 1.0
        rows = [Remedy(NOTHING, "nothing", ZERO_KL, k, time_ratio, 0, {}, effects(NOTHING))]
        for name in (ALL_ROUTERS, LISTED_ROUTERS):
            rows.append(Remedy(name, "float32", ZERO_KL, k, None, 0, {}, effects(name)))
        for name, weights in REPLAYS.items():
            size, time_ratio = self._replay_bytes.get(weights, 0), self._times.get(name)
            rows.append(Remedy(name, "replay", ZERO_KL, k, time_ratio, size, {}, effects(name)))
        for form in self._forms:
            name = form.name
            kind = "smooth" if form.gate == "projected" else "ramp"
            moved = self._divergences.kl[self._moved[name]].mean()
            widths, time_ratio = form.record.epsilons, self._times.get(name)
            row = Remedy(name, kind, moved, form.experts, time_ratio, 0, widths, effects(name))
            rows.append(row)
        sums = [self._divergences.kl[pair.second] for pair in self._pairs.values()]
        return RemedyTable(
            tuple(row for row in rows if row.effects),
            tuple(perturbation.name for perturbation in self._conditions),
            sum(ids.numel() for ids in batches),
            DEFAULT_NOISE,
            tuple(self._impossible),
            int(sum(count.sum() for count in sums[0].counts)) if sums else 0,
        )

    def _effects(self, batches: Sequence[Ids], remedy: str) -> tuple[RemedyEffect, ...]:
        """Return the remaining effect of each perturbation that a remedy applies to."""
        effects = []
        for perturbation in self._conditions:
            pair = self._pairs.get((remedy, perturbation.name))
            if pair is not None:
                kl = self._divergences.kl
                kls = kl[pair.first].mean(), kl[pair.second].mean()
            elif remedy == ALL_ROUTERS and perturbation.kind == "rounding":
                kls = (
                    _exactly_zero_kl(batches),
                    _exactly_zero_kl(batches),
                )  # only routers are rounded: nothing left
            else:
                continue
            size = self._extra_bytes(remedy, perturbation.name)
            effects.append(RemedyEffect(perturbation.name, *kls, size))
        return tuple(effects)

    def _extra_bytes(self, remedy: str, perturbation: str) -> int:
        """Return the additional bytes that a remedy takes under a perturbation."""
        if remedy == ALL_ROUTERS:
            return self._costs.get(perturbation, 0)
        return self._keeps[perturbation].bytes if remedy == LISTED_ROUTERS else 0


def _pair_of_draws(condition: Condition) -> RunPair:
    """Return two draws of a condition, the second compared with the first."""
    return RunPair(condition, condition.again(), condition)


def _exactly_zero_kl(batches: Sequence[Ids]) -> Estimate:
    """Return the estimate for a KL of zero on every token."""
    sums = SequenceSums()
    for ids in batches:
        sums.add(torch.zeros(ids.shape, device="cpu"))
    return sums.mean()


def replay_bytes_by_weights(routes: Mapping[str, Sequence[LayerTrace]]) -> dict[ChoiceMode, int]:
    """Return the bytes per token that a replay sends, with live and with recorded weights.

    Args:
        routes: routing of some tokens for every router.
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
