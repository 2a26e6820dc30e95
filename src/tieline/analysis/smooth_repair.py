"""Benefit and cost of smoothing: effects of low precision and time, before and after.

    KL          KL(P ‖ P'), P the model's own predictions in float32, P' the same model perturbed
    floor       KL with the clean choice forced on tokens whose experts change: the part that flips
                do not explain
    factor      KL before / KL after
    moved       KL(P_0 ‖ P_1), P_0 the original and P_1 the smoothed model, both in float32: the
                change by smoothing itself, in addition to the change of the loss
    latency     CPU time of the smoothed model over that of the original; both run in turns

Each model is compared with itself, because smoothing lowers the noise of a precision. The KL of the
perturbed smoothed model to the unperturbed *original* is given too; it includes "moved". Standard
errors are clustered by sequence; those of factors follow the ratio of paired sums.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.analysis.model_effects import FullEffect, FullEffects
from tieline.analysis.served_precision import (
    Recommendation,
    Serving,
    Tolerance,
    served_rounding,
    tolerated,
)
from tieline.core.errors import ShapeError, require
from tieline.core.predictions import next_token_losses
from tieline.core.records import Result, entry_named
from tieline.core.statistics import NOT_MEASURED, Estimate, SequenceSums, clustered_ratio
from tieline.models.emulate import modular_routers
from tieline.models.experts import experts_implementation
from tieline.models.model import Model
from tieline.models.saved_models import save_model
from tieline.models.smoothed_model import Smoothing, recorded_smoothing, with_widths
from tieline.run.condition import Condition, Perturbation
from tieline.run.corpus import stacked_batches
from tieline.run.forward import Ids, forward, only_running
from tieline.run.observers import Outcome
from tieline.run.plan import Pass, Phase, Plan
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress, Runner

REPAIR_PERTURBATIONS = (
    Perturbation("rounding", "bf16"),
    Perturbation("rounding", "bf16", "model"),
    Perturbation("rounding", "int8", "model"),
)
"""bf16 in the routers, bf16 everywhere, 8-bit integers everywhere; all emulated."""


@dataclass(frozen=True)
class RepairRow:
    """Effect of one perturbation before and after smoothing.

    Attributes:
        name: name of the perturbation, such as "router bf16".
        before: KL of the original to itself in float32, nats per token.
        before_floor: KL of the original with clean routes forced.
        after: KL of the smoothed model to itself in float32.
        after_floor: KL of the smoothed model with clean choices forced, on every other batch.
        factor: before / after.
        after_to_original: KL of the perturbed smoothed model to the original in float32.
        flips_before: share of tokens of the original whose experts change in some layer.
        flips_after: the same share of the smoothed model, counting experts with any weight.
        loss_before: change of the original's loss by the perturbation.
        loss_after: change of the smoothed model's loss by the perturbation.
        gain: (before - after_to_original) / (before - before_floor), the share of what flips cost
            the original by which the perturbed smoothed model is nearer to it; negative if it is
            further away. At most .29 in one layer for normal noise (docs/continuity.md).
    """

    name: str
    before: Estimate
    before_floor: Estimate
    after: Estimate
    after_floor: Estimate
    factor: Estimate
    after_to_original: Estimate
    flips_before: Estimate
    flips_after: Estimate
    loss_before: Estimate
    loss_after: Estimate
    gain: Estimate = NOT_MEASURED

    @property
    def by_flips(self) -> float:
        """Part of the original's KL due to flips: KL minus its floor, at least 0."""
        return max(0.0, (self.before.value or 0.0) - (self.before_floor.value or 0.0))

    @property
    def flip_factor(self) -> float | None:
        """Ratio of the KL due to flips before and after; None if none is measurable after.

        (before - floor) / (after - floor), both with the floor of the original: forcing the clean
        choice on a smoothed model does not remove changes that pass through the ramp without a
        flip.
        """
        remaining = (self.after.value or 0.0) - (self.before_floor.value or 0.0)
        return self.by_flips / remaining if remaining > 0 else None


@dataclass(frozen=True)
class RepairTable:
    """A model and its smoothed form under low precision.

    Attributes:
        rows: one per perturbation.
        experts_before: experts with weight per token and layer in the original.
        experts_after: experts with weight per token and layer in the smoothed model.
        experts_by_layer: experts with weight per token in the smoothed model, by router name.
        loss: mean loss of the original, nats per token.
        loss_change: loss of the smoothed model minus that of the original, both in float32.
        moved: KL of the smoothed model to the original, both in float32.
        tokens: number of tokens that were run.
        sequences: number of sequences, the clusters of the standard errors.
    """

    rows: tuple[RepairRow, ...]
    experts_before: Estimate
    experts_after: Estimate
    experts_by_layer: dict[str, float]
    loss: Estimate
    loss_change: Estimate
    moved: Estimate
    tokens: int
    sequences: int

    def row(self, name: str) -> RepairRow:
        """Return the row with this name."""
        return entry_named(self.rows, name)

    def pays(self, row: RepairRow) -> bool:
        """Return whether smoothing lowers the KL and moves the model by less than the KL before."""
        moved, cost = self.moved.value, row.before.value
        is_nearer = (row.factor.value or 0.0) > 1
        return is_nearer and moved is not None and cost is not None and moved < cost

    def tolerances(self, row: RepairRow) -> tuple[Tolerance, Tolerance]:
        """Return whether a perturbation is harmless before and after, judged by its intervals."""
        before = tolerated(row.before, row.loss_before, self.sequences)
        return before, tolerated(row.after, row.loss_after, self.sequences)


@dataclass(frozen=True)
class Latency:
    """Time of a smoothed model over that of the original.

    Attributes:
        ratio: ratio of the median times over all rounds.
        low: lower end of the 95 % interval of the ratio, from resampled rounds.
        high: upper end of the interval.
        rounds: number of timed runs of each model.
        tokens: number of tokens per run.
        original: implementation of the experts that the original ran with.
        implementation: implementation of the experts that the smoothed model ran with.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    tokens: int
    original: str
    implementation: str


@dataclass(frozen=True, repr=False)
class Repair(Result):
    """A smoothed model with its smoothing record, its benefit and its cost.

    Attributes:
        model: name of the model.
        smoothing: the width of each layer's band.
        repair: the model and its smoothed form under low precision.
        latency: time of the smoothed model over that of the original, by experts' implementation.
        serving: effect of the precision served on the original.
        recommendation: recommended action for the precision served.
        provenance: text, seed and batch size.
        near_original: perturbation under which the smoothed model is to be as near to the original
            as possible; None if ε was chosen by another rule.
        smoothed: the smoothed model itself; not part of the JSON.
        tokenizer: its tokenizer; not part of the JSON.
    """

    format: ClassVar[str] = "tieline-smooth"

    model: str
    smoothing: Smoothing
    repair: RepairTable
    latency: tuple[Latency, ...]
    serving: Serving
    recommendation: Recommendation
    provenance: dict[str, object]
    near_original: str | None = None
    smoothed: Any = field(default=None, metadata={"json": False}, compare=False)
    tokenizer: Any = field(default=None, metadata={"json": False}, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return format, version and all fields as JSON values."""
        return super().to_dict() | {"smoothing": self.smoothing.to_dict()}

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Save the smoothed model, its tokenizer and this result in a new folder.

        Args:
            folder: the folder to create.
            overwrite: whether an existing model may be replaced.
        """
        texts = {"tieline_smooth": self.to_json()}
        save_model(folder, self.smoothed, self.tokenizer, overwrite=overwrite, **texts)

    @property
    def metrics(self) -> dict[str, float]:
        """Return "factor@P", "changed@P", "kl@P" and "kl_after@P" of each perturbation P, and more.

        "changed" and "kl" describe the original, as in `inspect` and `audit`. The others are
        "experts", "moved", "loss" and "time@IMPLEMENTATION".
        """
        table = self.repair
        estimates = {
            "experts": table.experts_after,
            "moved": table.moved,
            "loss": table.loss_change,
        }
        for row in table.rows:
            estimates |= {f"factor@{row.name}": row.factor, f"kl_after@{row.name}": row.after}
            estimates |= {f"changed@{row.name}": row.flips_before, f"kl@{row.name}": row.before}
        metrics = {name: estimate.value for name, estimate in estimates.items()}
        metrics |= {f"time@{timed.implementation}": timed.ratio for timed in self.latency}
        return {name: value for name, value in metrics.items() if value is not None}


class ModelForm(NamedTuple):
    """A form of the model: smoothed by a record, or another model of the runner."""

    smoothing: Smoothing | None = None
    model: int = 0

    def clean(self, batch: int) -> Pass:
        """Return the unperturbed pass of a batch, compared with that of the original."""
        original = Pass(batch)
        if self.smoothing is None and self.model == 0:
            return original
        return Pass(batch, Condition(smoothing=self.smoothing), None, (original,), self.model)

    def perturbed(self, condition: Condition, batch: int) -> tuple[Pass, ...]:
        """Return the free and the forced pass of a batch under a perturbation.

        Factors use the floor of the original. The floor of the form itself is only reported, so
        its forced pass runs on every other batch.
        """
        smoothed, clean = replace(condition, smoothing=self.smoothing), self.clean(batch)
        is_original = clean == Pass(batch)
        free = Pass(batch, smoothed, clean, () if is_original else (Pass(batch),), self.model)
        if not is_original and batch % 2:
            return (free,)
        return free, Pass(batch, smoothed.taking("forced"), clean, (), self.model)


ORIGINAL = ModelForm()


class RepairCounts(FullEffects):
    """Counts the effects of perturbations on one form of the model, and its KL to the original.

    Attributes:
        experts: experts with weight, by router.
        moved: KL to the original, both clean.
        loss_change: loss minus that of the original; `loss` is the original's.
    """

    def __init__(
        self, form: ModelForm, routers: Collection[str], perturbations: Sequence[Perturbation]
    ) -> None:
        """Count passes of this form."""
        super().__init__(perturbations)
        self.form = form
        self._key = Condition(smoothing=form.smoothing).smoothing_key
        self.experts = {name: SequenceSums() for name in routers}
        self.moved, self.loss_change = SequenceSums(), SequenceSums()

    def on_pass_done(self, run: Pass, outcome: Outcome) -> None:
        """Count a pass of this form, and store the losses of the clean original."""
        if run == Pass(run.batch):
            assert outcome.logits is not None
            self._losses[run] = next_token_losses(outcome.logits, outcome.ids)
        if (run.model, run.condition.smoothing_key) == (self.form.model, self._key):
            super().on_pass_done(run, outcome)

    def _count_clean(self, run: Pass, outcome: Outcome) -> None:
        """Count experts in use, and the change of loss and predictions by the form itself."""
        assert outcome.logits is not None
        for name, choice in outcome.choices.items():
            used = (choice.weights > 0).double().sum(dim=1).view(tuple(outcome.ids.shape))
            self.experts[name].add(used.cpu())
        for original in run.others:
            self._losses[run] = next_token_losses(outcome.logits, outcome.ids)
            before = self._losses.pop(original)
            self.moved.add(outcome.divergence(original))
            self.loss.add(before)
            self.loss_change.add(self._losses[run] - before)

    def join(self, ranks: Ranks) -> None:
        """Add up the counts of all processes."""
        super().join(ranks)
        ranks.join_sums([*self.experts.values(), self.moved, self.loss_change])

    def table(self, original: "RepairCounts", size: tuple[int, int]) -> RepairTable:
        """Return the table of this form; `size` is its number of tokens and of sequences."""
        return RepairTable(
            tuple(_repair_row(p, original.effects[p], self.effects[p]) for p in self.effects),
            _mean_over_layers(original.experts),
            _mean_over_layers(self.experts),
            {name: sums.mean().value or 0.0 for name, sums in self.experts.items()},
            self.loss.mean(),
            self.loss_change.mean(),
            self.moved.mean(),
            *size,
        )


def repair_phase(
    batches: Mapping[int, Ids],
    forms: Sequence[ModelForm],
    perturbations: Sequence[Perturbation],
    seed: int = 0,
) -> Phase:
    """Plan the original and its forms, each clean and under every perturbation, free and forced.

    The first form runs side by side with the original, so that both use the same rounded weights.

    Args:
        batches: token ids by number.
        forms: smoothed forms of the model, or other models.
        perturbations: perturbations of the original and all forms.
        seed: seed of all noise.
    """
    conditions = [Condition(p, seed=(seed, number)) for number, p in enumerate(perturbations)]
    passes: list[Pass] = []
    for group in ((ORIGINAL, *forms[:1]), *((form,) for form in forms[1:])):
        passes += [form.clean(number) for form in group for number in batches]
        for condition in conditions:
            for form in group:
                for number in batches:
                    passes += form.perturbed(condition, number)
    return Phase("repair", batches, tuple(passes), compares_routes=True)


def original_serving(
    precision: str, table: RepairTable, layers: int, exact_ties: float = 0.0
) -> Serving:
    """Return the effect of a precision on the original, from its row of the table.

    Args:
        precision: a name in `SERVED`.
        table: the model and its smoothed form under low precision.
        layers: number of routed layers of the model.
        exact_ties: largest share of a layer's tokens that tie exactly at the threshold.
    """
    row = table.row(served_rounding(precision).name)
    return Serving(
        precision=precision,
        changed=row.flips_before,
        kl=row.before,
        replayed=row.before_floor,
        loss=row.loss_before,
        tokens=table.tokens,
        sequences=table.sequences,
        layers=layers,
        exact_ties=exact_ties,
    )


def measure_repair(
    runner: Runner,
    forms: Sequence[ModelForm],
    perturbations: Sequence[Perturbation],
    seed: int = 0,
    on_progress: Progress | None = None,
) -> tuple[RepairTable, ...]:
    """Measure low precision in a model and in other forms of it, each against itself in float32.

    Args:
        runner: runs the original, model 0, and other models, on the batches of its ranks.
        forms: forms that the original is compared with.
        perturbations: perturbations of all models.
        seed: seed of all noise.
        on_progress: called with stage, done and total.
    """
    batches = runner.ranks.numbered
    routers = [tuple(modular_routers(model.module)) for model in runner.models]
    counts = [RepairCounts(form, routers[form.model], perturbations) for form in (ORIGINAL, *forms)]
    phase = repair_phase(batches, forms, perturbations, seed)
    runner.run(Plan((phase,)), counts, on_progress)
    sizes = torch.tensor([phase.tokens, sum(len(ids) for ids in batches.values())], device="cpu")
    tokens, sequences = runner.ranks.join_counts({"sizes": sizes})["sizes"].tolist()
    return tuple(form.table(counts[0], (tokens, sequences)) for form in counts[1:])


def repair_table(
    model: nn.Module, smoothed: nn.Module, sequences: Sequence[Int[Tensor, " _"]], **options: Any
) -> RepairTable:
    """Measure low precision in a model and in its smoothed form, each against itself in float32.

    Arguments and options as for `repair_tables`.
    """
    (table,) = repair_tables(model, smoothed, sequences, **options)
    return table


def repair_tables(
    model: nn.Module,
    smoothed: nn.Module,
    sequences: Sequence[Int[Tensor, " _"]],
    widths: Sequence[Mapping[str, float]] = ({},),
    *,
    perturbations: Sequence[Perturbation] = REPAIR_PERTURBATIONS,
    batch_size: int = 8,
    seed: int = 0,
    parallel: str | None = None,
    progress: Progress | None = None,
) -> tuple[RepairTable, ...]:
    """Measure a model smoothed with several widths, with one run of the original.

    Args:
        model: a Mixture-of-Experts language model of transformers in float32.
        smoothed: the model after `smooth_`, or any other model to compare with (a control with more
            experts, one that was trained smooth).
        sequences: token ids of each sequence; at least two tokens in each.
        widths: ε by router name, for each table; empty for the widths of `smoothed`.
        perturbations: perturbations of both models.
        batch_size: sequences per forward pass.
        seed: seed of all noise.
        parallel: how processes share the batches: None or "data".
        progress: called with stage, done and total.
    """
    require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
    short = min((len(sequence) for sequence in sequences), default=0)
    require(short >= 2, f"sequences need two tokens at least, got {short}", ShapeError)
    ranks = Ranks.share_batches(parallel, list(stacked_batches(sequences, batch_size)))
    forms = [
        ModelForm(with_widths(recorded_smoothing(smoothed), width)) if width else ModelForm(model=1)
        for width in widths
    ]
    runner = Runner(Model(model), Model(smoothed), ranks=ranks)
    return measure_repair(runner, forms, perturbations, seed, progress)


def _repair_row(perturbation: Perturbation, before: FullEffect, after: FullEffect) -> RepairRow:
    """Return the row of a perturbation from the counts of the original and of a form."""
    kl_before, kl_after = torch.cat(before.kl.sums), torch.cat(after.kl.sums)
    factor = Estimate(None, None, "no KL after")
    if bool(kl_after.sum() > 0):
        factor = clustered_ratio(kl_before, kl_after)
    nearer = kl_before - torch.cat(after.to_original.sums)
    by_flips = kl_before - torch.cat(before.floor.sums)
    return RepairRow(
        perturbation.name,
        before.kl.mean(),
        before.floor.mean(),
        after.kl.mean(),
        after.floor.mean(),
        factor,
        after.to_original.mean(),
        before.any_layer.mean(),
        after.any_layer.mean(),
        before.loss.mean(),
        after.loss.mean(),
        clustered_ratio(nearer, by_flips),
    )


def _mean_over_layers(sums: dict[str, SequenceSums]) -> Estimate:
    """Return the mean of all layers together."""
    first, *others = sums.values()
    return first.joined(*others).mean()


RESAMPLES = 1000
"""Number of resamples of the rounds for the interval of a time ratio."""


def smoothing_latency(
    model: nn.Module,
    smoothed: nn.Module,
    ids: Int[Tensor, "rows length"],
    rounds: int = 12,
    warmup: int = 2,
) -> Latency:
    """Time forward passes of both models in turns, each first in every other round.

    Args:
        model: the original.
        smoothed: the same, smoothed.
        ids: token ids of a pass.
        rounds: number of timed rounds.
        warmup: number of rounds before these.
    """
    require(rounds >= 2 and warmup >= 0, f"need two rounds at least, got {rounds=}, {warmup=}")
    times = torch.zeros(2, warmup + rounds, dtype=torch.float64, device="cpu")
    with only_running(model), only_running(smoothed):
        for turn in range(warmup + rounds):
            for side in (0, 1) if turn % 2 else (1, 0):
                start = time.process_time()
                forward((model, smoothed)[side], ids)
                times[side, turn] = time.process_time() - start
    ratio, low, high = _median_ratio(times[:, warmup:])
    names = experts_implementation(model), experts_implementation(smoothed)
    return Latency(ratio, low, high, rounds, ids.numel(), *names)


def _median_ratio(times: Float[Tensor, "2 rounds"]) -> tuple[float, float, float]:
    """Return the ratio of the medians, second row over first, and its 95 % interval."""
    generator = torch.Generator().manual_seed(0)
    rounds = times.shape[1]
    resamples = torch.randint(
        rounds, (RESAMPLES, rounds), generator=generator, device=generator.device
    )
    before, after = (row[resamples].median(dim=1).values for row in times)
    levels = torch.tensor([0.025, 0.975], device="cpu").double()
    low, high = (after / before.clamp(min=1e-9)).quantile(levels).tolist()
    ratio = (times[1].median() / times[0].median().clamp(min=1e-9)).item()
    return ratio, low, high
