"""Auditing a model: effects of low precision and noise on its routing, and remedies.

    report = audit("org/model")
    report.verdict, report.metrics["kl@router bf16"], report.effect("router bf16").keep

The text is run clean and under every perturbation: each router by itself on clean inputs
(`LocalEffects`), and the whole model (`FullEffects`), where effects compound over depth. The
jump-weighted damage of layers on clean inputs adds up, D = Σ_l D_l, so the routers with the most
damage per byte are kept in float32 until the requested share of D is removed. The KL of a run with
these routers in float32 shows whether that still holds when errors compound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import nn

from tieline.analysis.audit_records import (
    LayerEffect,
    NeverHit,
    PerturbationEffect,
    PrecisionAudit,
    PrecisionJudgement,
    RemedyTable,
)
from tieline.analysis.job_settings import SERVED, AuditOptions, AuditSettings
from tieline.analysis.model_effects import (
    Divergences,
    FullEffect,
    FullEffects,
    audit_phase,
    compared_phase,
)
from tieline.analysis.remedies import (
    RemedyRuns,
    float32_extra_bytes,
    keep_list,
    perturbations_to_repair,
    with_remaining_kl,
)
from tieline.analysis.rounded_runs import serving_effect
from tieline.analysis.router_effects import (
    SIGMA_TOKENS,
    LocalEffect,
    LocalEffects,
    sigma_for_flips,
)
from tieline.analysis.served_precision import (
    HARMLESS,
    Serving,
    Tolerance,
    recommend,
    removed_share,
    served_rounding,
    tolerated,
)
from tieline.core.errors import UnsupportedModelError, require
from tieline.core.setting_fields import takes_settings
from tieline.core.statistics import Estimate, SequenceSums
from tieline.core.text import layer_label
from tieline.models.demo import DEMO
from tieline.models.emulate import modular_routers
from tieline.models.ignore_lists import ignore_lists
from tieline.models.linear_routers import makes_one_product
from tieline.models.model import Model, ModelSource
from tieline.models.number_formats import FORMATS, format_named
from tieline.models.parallel import check_rounding
from tieline.run.batch_size import halves_batches
from tieline.run.condition import Condition, Perturbation, standard_perturbations
from tieline.run.corpus import Corpus, TokenisedText
from tieline.run.plan import COSTS, Budget, Plan, announce_total, pass_cost, plan_work
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress, Runner
from tieline.run.streamed_passes import HiddenStatesError
from tieline.trace.record import LayerTrace

FLIPS_FACTOR = 1.5
"""Expected number of flips over the requested number, because the drawn number is random."""

MAIN_RUN_SHARE = 0.85
"""Share of the time budget for the main runs; the rest is for runs with kept layers."""

LOCAL_COST = 0.3
"""Cost of calling all routers again under one perturbation, in clean passes."""

REMEDY_COST, SMOOTHED_REMEDY_COST = 7.0, 6.5
"""Cost of the remedies of one perturbation without and with smoothed routers, in passes of the
text; includes calibration, timing and second runs on every other batch."""


@takes_settings(AuditSettings)
@halves_batches(AuditSettings)
def audit(
    source: ModelSource = DEMO,
    *,
    settings: AuditSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[AuditOptions],
) -> PrecisionAudit:
    """Measure what low precision and noise do to a model's routing, and what that costs.

    The model should run in float32, because effects of its own precision are part of the clean run.
    The KL is heavy-tailed, so fewer than 16,384 tokens are too few. Streamed weights are read once
    for all perturbations, once more for runs with kept layers and twice for remedies.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        settings: the options; keyword arguments change single ones. `text` may also be the text
            itself. `remedies` are names of perturbations, ("all",) for all, () for none. With
            `parallel` ("data" or "ep"), all processes must call it, and all get the result.
        progress: called with stage, done and total during the work.
    """
    settings = AuditSettings.of(settings, options)
    check_rounding(settings.parallel, "an audit")
    perturbations, repaired = _perturbations_to_run(settings)
    corpus = Corpus(**settings.corpus)
    model = Model.open(source, "audit takes", dtype=settings.dtype, copies=2, **settings.loading)
    text = corpus.tokenised(model.tokenizer, model.module)
    ranks = Ranks.share_batches(settings.parallel, corpus.batches(text))
    runner = Runner(model, ranks=ranks, memory=settings.memory)
    job = _Audit(runner, corpus, text, settings, perturbations, repaired, progress)
    job.announce_duration()
    job.run()
    effects = job.with_keep_lists(job.effects())
    return job.result(effects, job.remedies(effects))


def _perturbations_to_run(
    settings: AuditSettings,
) -> tuple[tuple[Perturbation, ...], list[Perturbation]]:
    """Return the perturbations that the settings ask for, and those to try remedies on.

    By default these are the precision served with its neighbours, and the precision served.
    """
    if settings.perturbations or settings.formats or settings.all:
        names = [format_named(name).name for name in settings.formats or FORMATS]
        chosen = tuple(dict.fromkeys(settings.perturbations or standard_perturbations(names)))
        return chosen, perturbations_to_repair(chosen, settings.remedies)
    served = served_perturbations(settings.serve)
    if settings.remedies is None:
        return served, [served_rounding(settings.serve)]
    return served, perturbations_to_repair(served, settings.remedies)


def served_perturbations(serve: str) -> tuple[Perturbation, ...]:
    """Return the routers and the model in a precision, and the model in the two next to it."""
    precisions = list(SERVED)
    index = precisions.index(serve)
    routers = Perturbation("rounding", SERVED[serve])
    return routers, *(served_rounding(name) for name in precisions[max(0, index - 1) : index + 2])


class _Audit:
    """Runs an audit: the main runs, those with kept layers and the remedies."""

    def __init__(
        self,
        runner: Runner,
        corpus: Corpus,
        text: TokenisedText,
        settings: AuditSettings,
        perturbations: tuple[Perturbation, ...],
        repaired: Sequence[Perturbation],
        progress: Progress | None,
    ) -> None:
        self._runner, self._corpus, self._text = runner, corpus, text
        self._settings, self._repaired, self._progress = settings, repaired, progress
        self._model = runner.models[0].module
        self._routers = modular_routers(self._model)
        self._all_batches = corpus.batches(text)
        self._batches = runner.ranks.numbered
        possible, self._impossible = _possible_perturbations(self._routers, perturbations)
        self._conditions = {
            perturbation: Condition(perturbation, seed=(corpus.seed, number))
            for number, perturbation in enumerate(possible)
        }
        self._local, self._full = self._observers(possible)
        self._budget = Budget(settings.seconds)
        self._left_out: list[str] = []
        self._seconds: dict[str, float] = {}

    def _observers(self, perturbations: Sequence[Perturbation]) -> tuple[LocalEffects, FullEffects]:
        """Return the observers of single routers and of the whole model."""
        calls = len(self._all_batches) * len(self._routers)
        tokens = sum(batch.numel() for batch in self._all_batches)
        local = LocalEffects(
            self._model,
            self._routers,
            [perturbation.at_router for perturbation in perturbations],
            self._corpus.seed,
            FLIPS_FACTOR * self._settings.flips / calls,
            max(1, tokens // SIGMA_TOKENS),
        )
        return local, FullEffects(perturbations)

    def announce_duration(self) -> None:
        """Report the expected duration of the audit to the progress callback if it is long."""
        conditions = list(self._conditions.values())
        tokens = sum(batch.numel() for batch in self._batches.values())
        work = plan_work(Plan((audit_phase("audit", self._batches, conditions),)))
        work += LOCAL_COST * tokens * len(conditions)
        for perturbation, condition in self._conditions.items():
            if perturbation in self._repaired:
                work += REMEDY_COST * tokens * pass_cost(condition)
                work += SMOOTHED_REMEDY_COST * tokens * (pass_cost(condition) + COSTS["smoothed"])
        if self._runner.ranks.parallel in (None, "data"):
            model, limited = self._runner.models[0], self._budget.is_limited
            progress = None if limited else self._progress  # a budget limits the duration itself
            announce_total(model, self._batches.values(), work, progress)

    def run(self) -> None:
        """Run every batch, clean and perturbed, within the time budget."""
        phase = audit_phase("audit", self._batches, list(self._conditions.values()))
        observers = [self._local, self._full]
        budget = self._budget.share(MAIN_RUN_SHARE)
        completed = self._runner.run(Plan((phase,)), observers, self._progress, budget=budget)
        if completed.dropped:
            names = ", ".join(perturbation.name for perturbation in completed.dropped)
            self._left_out.append(f"perturbations {names}")
            for perturbation in completed.dropped:
                del self._conditions[perturbation]
        if len(completed.batches) < len(self._batches):
            skipped = [
                ids.numel() for n, ids in self._batches.items() if n not in completed.batches
            ]
            self._left_out.append(f"{sum(skipped):,} of {phase.tokens:,} tokens")
            self._batches = {number: self._batches[number] for number in completed.batches}
            self._all_batches = list(self._batches.values())
        self._seconds["runs"] = self._budget.elapsed()

    def effects(self) -> list[PerturbationEffect]:
        """Return the effects of the perturbations that were run."""
        return [
            perturbation_effect(
                perturbation,
                {name: self._local.effects[perturbation.at_router, name] for name in self._routers},
                self._full.effects[perturbation],
            )
            for perturbation in self._conditions
        ]

    def with_keep_lists(self, rows: list[PerturbationEffect]) -> tuple[PerturbationEffect, ...]:
        """Add the layers to keep to the rows of rounded routers, and run them if time allows."""
        start = self._budget.elapsed()
        lists = {
            row.name: keep_list(
                {layer.name: layer.damage.value or 0.0 for layer in row.layers},
                self._float32_costs(perturbation),
                self._settings.recover,
            )
            for perturbation, row in zip(self._conditions, rows, strict=True)
            if perturbation.kind == "rounding" and perturbation.part == "router"
        }
        keeping = {
            perturbation.name: replace(condition, kept=lists[perturbation.name].layers)
            for perturbation, condition in self._conditions.items()
            if perturbation.name in lists
            and 0 < len(lists[perturbation.name].layers) < len(self._routers)
        }
        seconds = self._settings.seconds - start
        n_effects = len(self._full.effects)
        if keeping and self._seconds["runs"] * len(keeping) / (2 * n_effects) >= seconds:
            self._left_out.append("runs with the kept layers in float32")
            keeping = {}
        conditions = list(keeping.values())
        divergences = Divergences(conditions)
        if conditions:
            phase = compared_phase("kept layers", self._batches, conditions)
            self._runner.run(Plan((phase,)), [divergences], self._progress)
        self._seconds["kept layers"] = self._budget.elapsed() - start
        kls = {name: divergences.kl[condition] for name, condition in keeping.items()}
        return tuple(
            replace(row, keep=with_remaining_kl(lists[row.name], kls.get(row.name), row))
            if row.name in lists
            else row
            for row in rows
        )

    def remedies(self, effects: Sequence[PerturbationEffect]) -> RemedyTable | None:
        """Try remedies on the requested perturbations within the time budget."""
        start = self._budget.elapsed()
        conditions = {p: c for p, c in self._conditions.items() if p in self._repaired}
        if not conditions or start > self._settings.seconds:
            self._left_out += ["remedies"] if conditions else []
            return None
        keeps = {row.name: row.keep for row in effects if row.keep is not None}
        roundings = [x for x in conditions if x.kind == "rounding"]
        costs = {x.name: sum(self._float32_costs(x).values()) for x in roundings}
        runs = RemedyRuns(
            self._runner, conditions, keeps, costs, self._all_batches[0], self._local.samples
        )
        try:
            completed = runs.run(self._batches, self._budget, self._progress)
        except HiddenStatesError as problem:
            self._left_out.append(f"remedies: {problem}")
            return None
        if len(completed.batches) < len(self._batches):
            n_skipped = len(self._batches) - len(completed.batches)
            self._left_out.append(f"remedies for {n_skipped} batches")
        self._seconds["remedies"] = self._budget.elapsed() - start
        shared = self._runner.ranks.share_text
        return runs.table(
            self._all_batches if shared else [self._batches[n] for n in completed.batches]
        )

    def _float32_costs(self, perturbation: Perturbation) -> dict[str, int]:
        """Return the bytes that each router takes in float32 beyond those of the format."""
        level = str(perturbation.level)
        return {name: float32_extra_bytes(router, level) for name, router in self._routers.items()}

    def result(
        self, effects: tuple[PerturbationEffect, ...], remedies: RemedyTable | None
    ) -> PrecisionAudit:
        """Assemble the result, with the noise that flips 1 % of tokens and experts never hit."""
        start = self._budget.elapsed()
        one_percent = sigma_for_flips(self._local.samples)
        self._seconds["one percent"] = self._budget.elapsed() - start
        sequences = sum(len(batch) for batch in self._all_batches)
        serving = self._serving()
        recommendation = None if serving is None else recommend(serving)
        return PrecisionAudit(
            judgement=replace(judge_precisions(effects, sequences), recommendation=recommendation),
            serving=serving,
            effects=effects,
            layers=tuple(self._routers),
            tokens=sum(batch.numel() for batch in self._all_batches),
            sequences=sequences,
            loss=self._full.loss.mean(),
            one_percent=one_percent,
            never_hit=_never_hit(self._local.hits),
            left_out=tuple(self._left_out),
            impossible=self._impossible,
            remedies=remedies,
            experts=_experts_per_token_if_smoothed(self._local.samples),
            ignore=ignore_lists(self._model),
            uncertified=self._uncertified(),
            provenance=self._provenance(),
            timings={**self._seconds, "total": self._budget.elapsed()},
        )

    def _serving(self) -> Serving | None:
        """Return the effect of the precision served on the model; None if it was not run."""
        precision = self._settings.serve
        rounding = served_rounding(precision)
        if rounding not in self._conditions:
            return None
        layers = [traces[0] for traces in self._local.samples.values()]
        return serving_effect(precision, self._full.effects[rounding], layers)

    def _uncertified(self) -> dict[str, Estimate]:
        """Return the share of tokens without a certified choice, by router."""
        status, counts = self._local.uncertified_status, self._local.uncertified
        return {
            name: Estimate(None, None, status[name]) if name in status else sums.mean()
            for name, sums in counts.items()
        }

    def _provenance(self) -> dict[str, object]:
        """Return model, text, settings, processes and versions."""
        model, corpus, text = self._runner.models[0], self._corpus, self._text
        source = {"source": corpus.origin, "characters": text.characters, "sha256": text.digest}
        return {
            **model.provenance.to_dict(),
            **({"model": model.name} if model.name else {}),
            "text": source,
            "batch_size": corpus.batch_size,
            "sequence_length": corpus.length(self._model),
            "seed": corpus.seed,
            "flips": self._settings.flips,
            **self._runner.ranks.provenance(),
            "tokens": sum(batch.numel() for batch in self._all_batches),
        }


def _never_hit(hits: Mapping[str, torch.Tensor]) -> tuple[NeverHit, ...]:
    """Return the experts that no token chose, by layer."""
    missing = {name: (counts == 0).nonzero().squeeze(1).tolist() for name, counts in hits.items()}
    return tuple(
        NeverHit(name, tuple(experts), len(hits[name]))
        for name, experts in missing.items()
        if experts
    )


def _experts_per_token_if_smoothed(pieces_by_layer: Mapping[str, list[LayerTrace]]) -> float | None:
    """Return the mean number of experts in use per token; None if no layer is smoothed."""
    means = []
    for pieces in pieces_by_layer.values():
        used = [piece.used.double() for piece in pieces if piece.used is not None]
        means.append(torch.cat(used).mean().item() if used else float(pieces[0].facts.k))
    smoothed = any(piece.smoothed for pieces in pieces_by_layer.values() for piece in pieces)
    return sum(means) / len(means) if smoothed else None


def _possible_perturbations(
    routers: Mapping[str, nn.Module], perturbations: tuple[Perturbation, ...]
) -> tuple[tuple[Perturbation, ...], str]:
    """Return the perturbations that these routers allow, and the reason against the others."""
    unsuitable = [name for name, router in routers.items() if not makes_one_product(router)]
    refused = [x.name for x in perturbations if x.kind == "score noise"] if unsuitable else []
    if not refused:
        return perturbations, ""
    reason = (
        f"{', '.join(refused)}: noise is added to one product of router and input, and the logits "
        f"of {layer_label(unsuitable[0])} are none"
    )
    possible = tuple(x for x in perturbations if x.name not in refused)
    require(bool(possible), f"nothing is left to run without {reason}", UnsupportedModelError)
    return possible, reason


def perturbation_effect(
    perturbation: Perturbation, local: Mapping[str, LocalEffect], full: FullEffect
) -> PerturbationEffect:
    """Assemble the row of one perturbation.

    Args:
        perturbation: the perturbation.
        local: its effect on each router by itself, by name.
        full: its effect on the whole model.
    """
    layers = tuple(_layer_effect(name, effect, full) for name, effect in local.items())
    flips = SequenceSums().joined(*(effect.flips for effect in local.values())).mean()
    full_flips = SequenceSums().joined(*full.flips.values()).mean()
    compounding = None
    if full_flips.value is not None and flips.value:
        compounding = full_flips.value / flips.value
    kl, floor = full.kl.mean(), full.floor.mean()
    return PerturbationEffect(
        name=perturbation.name,
        kind=perturbation.kind,
        level=perturbation.level,
        part=perturbation.part,
        local=flips,
        local_flips=sum(effect.flip_count for effect in local.values()),
        predicted=_complete_mean([layer.predicted for layer in layers]),
        predicted_low=_complete_mean([layer.predicted_low for layer in layers]),
        full=full_flips,
        any_layer=full.any_layer.mean(),
        compounding=compounding,
        moved=full.moved.mean(),
        moved_p99=_upper_p99(full.shares),
        damage=SequenceSums().joined(*(effect.damage for effect in local.values())).mean(),
        loss=full.loss.mean(),
        kl=kl,
        kl_floor=floor,
        by_flips=removed_share(kl, floor),
        layers=layers,
    )


def _upper_p99(pieces: list[torch.Tensor]) -> float | None:
    """Return the 99 % quantile of all values, rounded up to a value; None without values."""
    if not pieces:
        return None
    values = torch.cat(pieces).sort().values
    return values[min(len(values) - 1, int(0.99 * len(values)))].item()


def _layer_effect(name: str, effect: LocalEffect, full: FullEffect) -> LayerEffect:
    """Return the effect of a perturbation on one layer, by itself and in a full run."""
    tokens = sum(int(count.sum()) for count in effect.flips.counts)
    return LayerEffect(
        name=name,
        local=effect.flips.mean(),
        local_flips=effect.flip_count,
        repeats=effect.trials / tokens,
        predicted=effect.high.mean().value,
        predicted_low=effect.low.mean().value,
        full=full.flips.get(name, SequenceSums()).mean(),
        damage=effect.damage.mean(),
    )


def _complete_mean(values: list[float | None]) -> float | None:
    """Return the mean of all values; None if one is missing."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if len(present) == len(values) else None


def judge_precisions(rows: Sequence[PerturbationEffect], sequences: int) -> PrecisionJudgement:
    """Judge which formats the routers tolerate, and which run stands for the whole model.

    Args:
        rows: effects of the perturbations that were run.
        sequences: number of clusters of the standard errors.
    """
    routers = [row for row in rows if row.kind == "rounding" and row.part == "router"]
    if not routers:
        return PrecisionJudgement("not run")
    by_tolerance: dict[Tolerance, list[PerturbationEffect]] = {"yes": [], "no": [], "unclear": []}
    for row in routers:
        by_tolerance[tolerated(row.kl, row.loss, sequences)].append(row)
    passed, failed, unclear = by_tolerance.values()
    whole_model = [row for row in rows if row.part == "model" and row.kind == "rounding"]
    whole_model.sort(key=lambda row: row.level != "bf16")
    first = whole_model[0] if whole_model else None
    smallest = min(
        passed,
        key=lambda row: (FORMATS[str(row.level)].bits, row.kl.value or 0.0),
        default=None,
    )
    worst = max(failed, key=lambda row: row.kl.value or 0.0, default=None)
    return PrecisionJudgement(
        kind="none" if not passed else "some" if failed or unclear else "all",
        tolerated=tuple(row.name for row in passed),
        refused=tuple(row.name for row in failed),
        unclear=tuple(row.name for row in unclear),
        smallest=smallest and smallest.name,
        worst=worst and worst.name,
        whole_model=first.name if first and first.compounding is not None else None,
        limit=HARMLESS,
    )
