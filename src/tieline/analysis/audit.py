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
from dataclasses import dataclass, replace
from typing import Unpack, get_args

import torch
from torch import nn

from tieline.analysis.audit_records import (
    KeepList,
    LayerEffect,
    NeverHit,
    PerturbationEffect,
    PrecisionAudit,
    PrecisionJudgement,
    RemedyTable,
)
from tieline.analysis.job_settings import SERVED, AuditOptions, AuditSettings
from tieline.analysis.perturbation_effects import (
    SIGMA_TOKENS,
    Divergences,
    FullEffect,
    FullEffects,
    LocalEffect,
    LocalEffects,
    audit_phase,
    compared_phase,
    serving_effect,
    sigma_for_flips,
)
from tieline.analysis.remedies import RemedyRuns, chosen_perturbations
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
from tieline.core.statistics import Estimate, SequenceSums
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
    plan = _audit_plan(settings)
    corpus = Corpus(**settings.corpus)
    model = Model.open(source, "audit takes", dtype=settings.dtype, copies=2, **settings.loading)
    text = corpus.tokenised(model.tokenizer, model.module)
    ranks = Ranks.of(settings.parallel, corpus.batches(text))
    runner = Runner(model, ranks=ranks, memory=settings.memory)
    return audit_model(runner, corpus, text, plan, progress)


@dataclass(frozen=True)
class AuditPlan:
    """What an audit runs: perturbations, those to repair, and sizes.

    Attributes:
        perturbations: what is done to the model.
        repaired: those of them that remedies are tried on.
        serve: the precision that the model is served in.
        flips: layer-local flips that Gaussian noise of the scores is drawn for.
        recover: share of the damage that the routers kept in float32 shall recover.
        seconds: time after which nothing more is begun.
    """

    perturbations: tuple[Perturbation, ...]
    repaired: Sequence[Perturbation] = ()
    serve: str = "bf16"
    flips: int = 3000
    recover: float = 0.9
    seconds: float = float("inf")


def _audit_plan(settings: AuditSettings) -> AuditPlan:
    """What the settings ask for: the precision served and its neighbours, or what they name."""
    if settings.perturbations or settings.formats or settings.all:
        names = [format_named(name).name for name in settings.formats or FORMATS]
        run = tuple(dict.fromkeys(settings.perturbations or standard_perturbations(names)))
        repaired = chosen_perturbations(run, settings.remedies)
    else:
        run, served = served_perturbations(settings.serve), served_rounding(settings.serve)
        names_remedies = settings.remedies is not None
        repaired = chosen_perturbations(run, settings.remedies) if names_remedies else [served]
    sizes = (settings.flips, settings.recover, settings.seconds)
    return AuditPlan(run, repaired, settings.serve, *sizes)


def served_perturbations(serve: str) -> tuple[Perturbation, ...]:
    """The routers and the model in the precision served, and the model in its two neighbours."""
    order = list(SERVED)
    index = order.index(serve)
    near = order[max(0, index - 1) : index + 2]
    routers = Perturbation("rounding", SERVED[serve])
    return routers, *(served_rounding(precision) for precision in near)


def audit_model(
    runner: Runner,
    corpus: Corpus,
    text: TokenisedText,
    options: AuditPlan,
    progress: Progress | None = None,
) -> PrecisionAudit:
    """Audit a model that is open.

    Args:
        runner: runs the model on the batches of this process.
        corpus: what is run.
        text: the same as tokens of the model.
        options: what is done to the model.
        progress: called with stage, done and total while the work goes on.
    """
    work = _Audit(runner, corpus, text, options, progress)
    work.announce()
    work.run()
    effects = work.with_keeps(work.rows())
    remedies = work.remedies(effects)
    return replace(work.result(effects), remedies=remedies)


class _Audit:
    """An audit under way."""

    def __init__(
        self,
        runner: Runner,
        corpus: Corpus,
        text: TokenisedText,
        options: AuditPlan,
        progress: Progress | None,
    ) -> None:
        self._runner, self._corpus, self._text = runner, corpus, text
        self._options, self._progress = options, progress
        self._model = runner.models[0].module
        self._routers = modular_routers(self._model)
        self._every = corpus.batches(text)
        self._batches = runner.ranks.numbered
        possible, self._impossible = _possible_perturbations(self._routers, options.perturbations)
        self._conditions = {
            perturbation: Condition(perturbation, seed=(corpus.seed, number))
            for number, perturbation in enumerate(possible)
        }
        self._local, self._full = self._observers(possible)
        self._budget = Budget(options.seconds)
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
            SPARE * self._options.flips / calls,
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
            if perturbation in self._options.repaired:
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
            row.name: self._keep_list(perturbation, row)
            for perturbation, row in zip(self._conditions, rows, strict=True)
            if perturbation.kind == "rounding" and perturbation.part == "router"
        }
        keeping = {
            perturbation.name: replace(condition, kept=lists[perturbation.name].layers)
            for perturbation, condition in self._conditions.items()
            if perturbation.name in lists and self._worth_a_run(lists[perturbation.name])
        }
        seconds = self._options.seconds - start
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
            replace(row, keep=_with_kl(lists[row.name], kls.get(row.name), row))
            if row.name in lists
            else row
            for row in rows
        )

    def remedies(self, effects: Sequence[PerturbationEffect]) -> RemedyTable | None:
        """Try remedies on the perturbations asked for, as long as there is time."""
        start = self._budget.elapsed()
        conditions = {p: c for p, c in self._conditions.items() if p in self._options.repaired}
        if not conditions or start > self._options.seconds:
            self._left_out += ["remedies"] if conditions else []
            return None
        keeps = {row.name: row.keep for row in effects if row.keep is not None}
        costs = {p.name: self._all_bytes(p) for p in conditions if p.kind == "rounding"}
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

    def _all_bytes(self, perturbation: Perturbation) -> int:
        """Bytes that all routers take more in float32 than in the format."""
        level = str(perturbation.level)
        return sum(extra_bytes(router, level) for router in self._routers.values())

    def _keep_list(self, perturbation: Perturbation, row: PerturbationEffect) -> KeepList:
        """Routers to keep in float32 under a perturbation, by their measured damage."""
        level = str(perturbation.level)
        damages = {layer.name: layer.damage.value or 0.0 for layer in row.layers}
        costs = {name: extra_bytes(router, level) for name, router in self._routers.items()}
        return keep_list(damages, costs, self._options.recover)

    def _worth_a_run(self, keep: KeepList) -> bool:
        """Whether a list keeps some routers, not none and not all."""
        return 0 < len(keep.layers) < len(self._routers)

    def result(self, effects: tuple[PerturbationEffect, ...]) -> PrecisionAudit:
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
            experts=_experts_per_token(self._local.kept),
            ignore=ignore_lists(self._model),
            provenance=self._provenance(),
            timings={**self._seconds, "total": self._budget.elapsed()},
        )

    def _serving(self) -> Serving | None:
        """What the precision served does to the model; None if it was not run."""
        precision = self._options.serve
        if served_rounding(precision) not in self._conditions:
            return None
        layers = [traces[0] for traces in self._local.kept.values()]
        return serving_effect(precision, self._full.effects[served_rounding(precision)], layers)

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
            "flips": self._options.flips,
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


def _with_kl(keep: KeepList, sums: SequenceSums | None, row: PerturbationEffect) -> KeepList:
    """Add the KL that remains; it is zero where every router is kept."""
    keeps_all = len(keep.layers) == len(row.layers)
    kl = Estimate(0.0, 0.0) if keeps_all else None if sums is None else sums.mean()
    if kl is None or kl.value is None or not row.kl.value:
        return replace(keep, kl=kl)
    return replace(keep, kl=kl, recovered_kl=1 - kl.value / row.kl.value)


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
        compounding=_full_over_local_flips(everywhere, flips),
        moved=full.moved.mean(),
        moved_p99=_quantile_of_shares(torch.cat(full.shares), 0.99) if full.shares else None,
        damage=SequenceSums().joined(*(effect.damage for effect in local.values())).mean(),
        loss=full.loss.mean(),
        kl=kl,
        kl_floor=floor,
        by_flips=share_gone(kl, floor),
        layers=layers,
    )


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


def _full_over_local_flips(above: Estimate, below: Estimate) -> float | None:
    """Full-forward flips over layer-local ones; None where one is missing or zero."""
    if above.value is None or not below.value:
        return None
    return above.value / below.value


def _quantile_of_shares(values: torch.Tensor, level: float) -> float:
    """The quantile of a level in (0, 1), the upper one of two."""
    rank = min(len(values) - 1, int(level * len(values)))
    return values.sort().values[rank].item()


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
    gone = 0.0
    for name in order:
        if gone >= wanted * total * (1 - 1e-12) or damages[name] <= 0:
            break
        routers.append(name)
        gone += damages[name]
    return KeepList(
        wanted=wanted,
        layers=tuple(routers),
        recovered=gone / total if total > 0 else 0.0,
        bytes=sum(costs[name] for name in routers),
        bytes_all=sum(costs.values()),
    )


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
