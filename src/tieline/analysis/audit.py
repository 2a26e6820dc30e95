"""Auditing a model: what low precision and noise do to its routing, and what to keep in float32.

    report = audit("org/model")
    report.verdict, report.metrics["kl@router bf16"], report.effect("router bf16").keep

The text is run clean and under every perturbation: each router by itself on clean inputs
(`LocalEffects`), and the whole model (`FullEffects`), where effects add up over depth. The
jump-weighted damage of layers on clean inputs adds up, D = Σ_l D_l, so the routers with the most
damage per byte are kept in float32 until the wanted share of D is gone; the KL of a run that keeps
them shows whether that holds when errors compound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Unpack, get_args

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
    serving_effect,
)
from tieline.analysis.remedies import (
    RemedyRuns,
    chosen_perturbations,
    extra_bytes,
    keep_list,
    with_remaining_kl,
)
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
    served_rounding,
    share_gone,
    tolerated,
)
from tieline.core.errors import UnsupportedModelError, require
from tieline.core.setting_fields import takes_settings
from tieline.core.statistics import SequenceSums
from tieline.core.text import layer_label
from tieline.models.demo import DEMO
from tieline.models.emulate import makes_one_product, modular_routers
from tieline.models.ignore_lists import ignore_lists
from tieline.models.model import Model, ModelSource
from tieline.models.number_formats import FORMATS, format_named
from tieline.models.parallel import check_rounding
from tieline.run.condition import Condition, Perturbation, standard_perturbations
from tieline.run.corpus import Corpus, TokenisedText
from tieline.run.plan import COSTS, Budget, Plan, announce_total, pass_cost, plan_work
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress, Runner, halves_batches
from tieline.run.streamed_passes import HiddenStatesError
from tieline.trace.record import LayerTrace

SPARE = 1.5
"""Flips aimed at, over those asked for: the number of them is random too."""

FOR_RUNS = 0.85
"""Part of the time that the main runs may take; the rest is for runs with kept layers."""


LOCAL_COST = 0.3
"""Clean passes that calling all routers again under one perturbation takes."""

REMEDY_PASSES, FORM_PASSES = 7.0, 6.5
"""Passes of the text that remedies of a perturbation take without and with smoothed routers, those
of every other batch, calibration and timing included."""


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

    The model should run in float32: what its own precision already does is part of the clean run.
    The KL is heavy-tailed: 16,384 tokens are few enough. Weights that are streamed are read once
    for all perturbations; runs with kept layers read them once more, remedies twice.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        settings: the options; keyword arguments change single ones. `text` may also be the text
            itself. `remedies` are names of perturbations, ("all",) for all, () for none. With
            `parallel` ("data" or "ep"), all processes must call, and all get the result.
        progress: called with stage, done and total while the work goes on.
    """
    settings = AuditSettings.of(settings, options)
    check_rounding(settings.parallel, "an audit")
    perturbations, repaired = _perturbations_to_run(settings)
    corpus = Corpus(**settings.corpus)
    model = Model.open(source, "audit takes", dtype=settings.dtype, copies=2, **settings.loading)
    text = corpus.tokenised(model.tokenizer, model.module)
    ranks = Ranks.of(settings.parallel, corpus.batches(text))
    runner = Runner(model, ranks=ranks, memory=settings.memory)
    work = _Audit(runner, corpus, text, settings, perturbations, repaired, progress)
    work.announce()
    work.run()
    effects = work.with_keeps(work.rows())
    return work.result(effects, work.remedies(effects))


def _perturbations_to_run(
    settings: AuditSettings,
) -> tuple[tuple[Perturbation, ...], list[Perturbation]]:
    """The precision served and its neighbours, or what the settings name; those to be repaired."""
    if settings.perturbations or settings.formats or settings.all:
        names = [format_named(name).name for name in settings.formats or FORMATS]
        run = tuple(dict.fromkeys(settings.perturbations or standard_perturbations(names)))
        return run, chosen_perturbations(run, settings.remedies)
    run = served_perturbations(settings.serve)
    if settings.remedies is None:
        return run, [served_rounding(settings.serve)]
    return run, chosen_perturbations(run, settings.remedies)


def served_perturbations(serve: str) -> tuple[Perturbation, ...]:
    """The routers and the model in the precision served, and the model in its two neighbours."""
    order = list(SERVED)
    index = order.index(serve)
    near = order[max(0, index - 1) : index + 2]
    routers = Perturbation("rounding", SERVED[serve])
    return routers, *(served_rounding(precision) for precision in near)


class _Audit:
    """An audit under way."""

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
        self._every = corpus.batches(text)
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
        """Observers of the routers by themselves, and of the whole model."""
        calls = len(self._every) * len(self._routers)
        tokens = sum(batch.numel() for batch in self._every)
        local = LocalEffects(
            self._model,
            self._routers,
            [perturbation.at_router for perturbation in perturbations],
            self._corpus.seed,
            SPARE * self._settings.flips / calls,
            max(1, tokens // SIGMA_TOKENS),
        )
        return local, FullEffects(perturbations)

    def announce(self) -> None:
        """Tell the progress how long the audit will take, if that is long."""
        conditions = list(self._conditions.values())
        tokens = sum(batch.numel() for batch in self._batches.values())
        work = plan_work(Plan((audit_phase("audit", self._batches, conditions),)))
        work += LOCAL_COST * tokens * len(conditions)
        for perturbation, condition in self._conditions.items():
            if perturbation in self._repaired:
                work += REMEDY_PASSES * tokens * pass_cost(condition)
                work += FORM_PASSES * tokens * (pass_cost(condition) + COSTS["smoothed"])
        if self._runner.ranks.parallel in (None, "data"):
            model, limited = self._runner.models[0], self._budget.is_limited
            progress = None if limited else self._progress  # a budget says itself how long
            announce_total(model, self._batches.values(), work, progress)

    def run(self) -> None:
        """Run every batch, clean and perturbed, as long as there is time."""
        phase = audit_phase("audit", self._batches, list(self._conditions.values()))
        observers = [self._local, self._full]
        budget = self._budget.share(FOR_RUNS)
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
            self._every = list(self._batches.values())
        self._seconds["runs"] = self._budget.elapsed()

    def rows(self) -> list[PerturbationEffect]:
        """The rows of what was run."""
        return [
            perturbation_effect(
                perturbation,
                {name: self._local.effects[perturbation.at_router, name] for name in self._routers},
                self._full.effects[perturbation],
            )
            for perturbation in self._conditions
        ]

    def with_keeps(self, rows: list[PerturbationEffect]) -> tuple[PerturbationEffect, ...]:
        """Add the layers to keep to the rows of rounded routers, and run those if there is time."""
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
        """Try remedies on the perturbations asked for, as long as there is time."""
        start = self._budget.elapsed()
        conditions = {p: c for p, c in self._conditions.items() if p in self._repaired}
        if not conditions or start > self._settings.seconds:
            self._left_out += ["remedies"] if conditions else []
            return None
        keeps = {row.name: row.keep for row in effects if row.keep is not None}
        roundings = [x for x in conditions if x.kind == "rounding"]
        costs = {x.name: sum(self._float32_costs(x).values()) for x in roundings}
        runs = RemedyRuns(self._runner, conditions, keeps, costs, self._every[0], self._local.kept)
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
        return runs.table(self._every if shared else [self._batches[n] for n in completed.batches])

    def _float32_costs(self, perturbation: Perturbation) -> dict[str, int]:
        """Bytes that each router takes more in float32 than in the format."""
        level = str(perturbation.level)
        return {name: extra_bytes(router, level) for name, router in self._routers.items()}

    def result(
        self, effects: tuple[PerturbationEffect, ...], remedies: RemedyTable | None
    ) -> PrecisionAudit:
        """Assemble the result, with the noise of 1 % flips and the experts that were never hit."""
        start = self._budget.elapsed()
        one_percent = sigma_for_flips(self._local.kept)
        self._seconds["one percent"] = self._budget.elapsed() - start
        sequences = sum(len(batch) for batch in self._every)
        serving = self._serving()
        recommendation = None if serving is None else recommend(serving)
        return PrecisionAudit(
            judgement=replace(judge_precisions(effects, sequences), recommendation=recommendation),
            serving=serving,
            effects=effects,
            layers=tuple(self._routers),
            tokens=sum(batch.numel() for batch in self._every),
            sequences=sequences,
            loss=self._full.loss.mean(),
            one_percent=one_percent,
            never_hit=_never_hit(self._local.hits),
            left_out=tuple(self._left_out),
            impossible=self._impossible,
            remedies=remedies,
            experts=_experts_per_token(self._local.kept),
            ignore=ignore_lists(self._model),
            provenance=self._provenance(),
            timings={**self._seconds, "total": self._budget.elapsed()},
        )

    def _serving(self) -> Serving | None:
        """What the precision served does to the model; None if it was not run."""
        precision = self._settings.serve
        rounding = served_rounding(precision)
        if rounding not in self._conditions:
            return None
        layers = [traces[0] for traces in self._local.kept.values()]
        return serving_effect(precision, self._full.effects[rounding], layers)

    def _provenance(self) -> dict[str, object]:
        """Model, text, settings, processes and versions."""
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
            "tokens": sum(batch.numel() for batch in self._every),
        }


def _never_hit(hits: Mapping[str, torch.Tensor]) -> tuple[NeverHit, ...]:
    """Experts that no token chose, by layer."""
    missing = {name: (counts == 0).nonzero().squeeze(1).tolist() for name, counts in hits.items()}
    return tuple(
        NeverHit(name, tuple(experts), len(hits[name]))
        for name, experts in missing.items()
        if experts
    )


def _experts_per_token(traces: Mapping[str, list[LayerTrace]]) -> float | None:
    """Experts in use per token, mean over layers; None if no layer is smoothed."""
    means = []
    for layers in traces.values():
        used = [layer.used.double() for layer in layers if layer.used is not None]
        means.append(torch.cat(used).mean().item() if used else float(layers[0].facts.k))
    smoothed = any(layer.smoothed for layers in traces.values() for layer in layers)
    return sum(means) / len(means) if smoothed else None


def _possible_perturbations(
    routers: Mapping[str, nn.Module], perturbations: tuple[Perturbation, ...]
) -> tuple[tuple[Perturbation, ...], str]:
    """The perturbations that these routers allow, and why not the others, in words."""
    unproduced = [name for name, router in routers.items() if not makes_one_product(router)]
    refused = [x.name for x in perturbations if x.kind == "score noise"] if unproduced else []
    if not refused:
        return perturbations, ""
    reason = (
        f"{', '.join(refused)}: noise is added to one product of router and input, and the logits "
        f"of {layer_label(unproduced[0])} are none"
    )
    possible = tuple(x for x in perturbations if x.name not in refused)
    require(bool(possible), f"nothing is left to run without {reason}", UnsupportedModelError)
    return possible, reason


def perturbation_effect(
    perturbation: Perturbation, local: Mapping[str, LocalEffect], full: FullEffect
) -> PerturbationEffect:
    """Assemble the row of one perturbation.

    Args:
        perturbation: what was done.
        local: what it does to each router by itself, by name.
        full: what it does in a full run.
    """
    layers = tuple(_layer_effect(name, effect, full) for name, effect in local.items())
    flips = SequenceSums().joined(*(effect.flips for effect in local.values())).mean()
    everywhere = SequenceSums().joined(*full.flips.values()).mean()
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
        full=everywhere,
        any_layer=full.any_layer.mean(),
        compounding=(
            everywhere.value / flips.value if everywhere.value is not None and flips.value else None
        ),
        moved=full.moved.mean(),
        moved_p99=_upper_p99(full.shares),
        damage=SequenceSums().joined(*(effect.damage for effect in local.values())).mean(),
        loss=full.loss.mean(),
        kl=kl,
        kl_floor=floor,
        by_flips=share_gone(kl, floor),
        layers=layers,
    )


def _upper_p99(pieces: list[torch.Tensor]) -> float | None:
    """The 99 % quantile of all values, the upper one of two; None without any."""
    if not pieces:
        return None
    values = torch.cat(pieces).sort().values
    return values[min(len(values) - 1, int(0.99 * len(values)))].item()


def _layer_effect(name: str, effect: LocalEffect, full: FullEffect) -> LayerEffect:
    """What a perturbation does to one layer, by itself and in a full run."""
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
    """Mean of all values; None if one is missing."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if len(present) == len(values) else None


def judge_precisions(rows: Sequence[PerturbationEffect], sequences: int) -> PrecisionJudgement:
    """Judge which formats the routers tolerate, and which run shows where damage comes from.

    Args:
        rows: what was run.
        sequences: clusters of the standard errors.
    """
    routers = [row for row in rows if row.kind == "rounding" and row.part == "router"]
    if not routers:
        return PrecisionJudgement("not run")
    sorted_rows = {
        tolerance: [row for row in routers if tolerated(row.kl, row.loss, sequences) == tolerance]
        for tolerance in get_args(Tolerance)
    }
    passed, failed, unclear = (sorted_rows[tolerance] for tolerance in ("yes", "no", "unclear"))
    model = [row for row in rows if row.part == "model" and row.kind == "rounding"]
    model.sort(key=lambda row: row.level != "bf16")
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
        whole_model=model[0].name if model and model[0].compounding is not None else None,
        limit=HARMLESS,
    )
