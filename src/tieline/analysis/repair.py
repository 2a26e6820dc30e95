"""What smoothing repairs and costs: low precision and time, before and after.

    KL          KL(P ‖ P'), P the model's own predictions in float32, P' the same model perturbed
    floor       the same with the clean choice forced on tokens whose experts change: what flips
                cannot explain
    factor      KL before / KL after
    moved       KL(P_0 ‖ P_1), P_0 the original and P_1 the smoothed model, both in float32: what
                smoothing itself changes, beside the change of the loss
    latency     CPU time of the smoothed model over that of the original; both run in turns

Each model is compared with itself, because the noise of a precision is what smoothing lowers. The
KL of the perturbed smoothed model to the unperturbed *original* is given too; it contains "moved".
Standard errors are clustered by sequence; those of factors follow the ratio of paired sums.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.analysis.perturbations import Perturbation, noise_generator
from tieline.analysis.precision_runs import FullRuns, clean_logits
from tieline.analysis.sources import save_model
from tieline.core.errors import ShapeError, require
from tieline.core.records import Result
from tieline.core.statistics import (
    Estimate,
    SequenceSums,
    clustered_mean,
    kl_divergence,
    next_token_losses,
)
from tieline.models.emulate import modular_routers
from tieline.models.router_call import Choice, RouterOutput, override_choice
from tieline.models.running import batches, forward, only_running
from tieline.models.smooth import Smoothing
from tieline.models.smooth_router import set_widths
from tieline.run.processes import Ranks

REPAIR_PERTURBATIONS = (
    Perturbation("rounding", "bf16"),
    Perturbation("rounding", "bf16", "model"),
    Perturbation("rounding", "int8", "model"),
)
"""bf16 in the routers, bf16 everywhere, 8-bit integers everywhere; all emulated."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RepairRow:
    """What one perturbation does before and after.

    Attributes:
        name: such as "router bf16".
        before: KL of the original to itself in float32, nats per token.
        before_floor: the same with clean routes forced.
        after: KL of the smoothed model to itself in float32.
        after_floor: the same with clean choices forced.
        factor: before / after.
        after_to_original: KL of the perturbed smoothed model to the original in float32.
        flips_before: share of tokens whose experts change in some layer.
        flips_after: the same, experts with any weight counting.
        loss_before: change of the original's loss by the perturbation.
        loss_after: change of the smoothed model's loss by it.
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

    @property
    def by_flips(self) -> float:
        """KL of the original that goes away with the flips: KL minus its floor, at least 0."""
        return max(0.0, (self.before.value or 0.0) - (self.before_floor.value or 0.0))

    @property
    def flip_factor(self) -> float | None:
        """How many times lower that part is after; None where nothing of it can be seen.

        (before - floor) / (after - floor), both with the floor of the original: forcing the clean
        choice on a smoothed model would not take back what the ramp lets through without a flip.
        """
        left = (self.after.value or 0.0) - (self.before_floor.value or 0.0)
        return self.by_flips / left if left > 0 else None


@dataclass(frozen=True)
class RepairTable:
    """A model and its smoothed form under low precision.

    Attributes:
        rows: one per perturbation.
        experts_before: experts with weight per token and layer, of the original.
        experts_after: the same of the smoothed model.
        experts_by_layer: of the smoothed model, by router name.
        loss: mean loss of the original, nats per token.
        loss_change: loss of the smoothed model minus that of the original, both in float32.
        moved: KL of the smoothed model to the original, both in float32.
        tokens: tokens that were run.
        sequences: sequences that they are in, the clusters of the standard errors.
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
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True)
class Latency:
    """Time of a smoothed model over that of the original.

    Attributes:
        ratio: of the medians over all rounds.
        low: lower end of its 95 % interval, from resampling rounds.
        high: upper end.
        rounds: how often both ran.
        tokens: tokens per run.
        original: which implementation of the experts the original ran with.
        implementation: which one the smoothed model ran with.
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
    """A smoothed model: how it was smoothed, what that repairs and what it costs.

    Attributes:
        model: name of the model.
        smoothing: the width of each layer's band.
        repair: the model and its smoothed form under low precision.
        latency: time of the smoothed model over that of the original, by experts' implementation.
        provenance: text, seed and batch size.
        smoothed: the smoothed model itself; not part of the JSON.
        tokenizer: its tokenizer; not part of the JSON.
    """

    format: ClassVar[str] = "tieline-smooth"

    model: str
    smoothing: Smoothing
    repair: RepairTable
    latency: tuple[Latency, ...]
    provenance: dict[str, object]
    smoothed: Any = field(default=None, metadata={"json": False}, compare=False)
    tokenizer: Any = field(default=None, metadata={"json": False}, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return format, version and all fields as JSON values."""
        return super().to_dict() | {"smoothing": self.smoothing.to_dict()}

    def save(self, folder: Any) -> None:
        """Save the smoothed model, its tokenizer and this result in a new folder."""
        save_model(folder, self.smoothed, self.tokenizer, tieline_smooth=self.to_json())

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers: "factor@P", "kl@P" for each perturbation P, "experts", "moved", …."""
        table = self.repair
        named = {"experts": table.experts_after, "moved": table.moved, "loss": table.loss_change}
        for row in table.rows:
            named |= {f"factor@{row.name}": row.factor, f"kl@{row.name}": row.after}
        found = {name: one.value for name, one in named.items()}
        found |= {f"time@{one.implementation}": one.ratio for one in self.latency}
        return {name: value for name, value in found.items() if value is not None}


@dataclass
class _Effect:
    """What is counted of one perturbation of one model."""

    kl: SequenceSums = field(default_factory=SequenceSums)
    floor: SequenceSums = field(default_factory=SequenceSums)
    to_original: SequenceSums = field(default_factory=SequenceSums)
    flips: SequenceSums = field(default_factory=SequenceSums)
    loss: SequenceSums = field(default_factory=SequenceSums)


class RepairSide:
    """The counts of one model."""

    def __init__(self, model: nn.Module, perturbations: Sequence[Perturbation]) -> None:
        self.model, self.routers = model, modular_routers(model)
        self.effects = {one: _Effect() for one in perturbations}
        self.experts = {name: SequenceSums() for name in self.routers}

    def clean(self, ids: Int[Tensor, "rows length"]) -> tuple[Tensor, FullRuns]:
        """Return the logits of the clean run, and the runs that compare with it."""
        choices: dict[str, Choice] = {}
        with ExitStack() as stack:
            for name, router in self.routers.items():
                stack.enter_context(override_choice(router, partial(kept_choice, choices, name)))
            logits = clean_logits(forward(self.model, ids), ids)
        self.count_experts(choices, ids)
        return logits, FullRuns(self.model, self.routers, ids, choices, logits)

    def count_experts(self, choices: Mapping[str, Choice], ids: Int[Tensor, "rows length"]) -> None:
        """Count the experts that each token used in the clean run of a batch."""
        for name, choice in choices.items():
            used = (choice.weights > 0).double().sum(dim=1).view(tuple(ids.shape))
            self.experts[name].add(used.cpu())

    def perturbed(
        self,
        runs: FullRuns,
        one: Perturbation,
        source: torch.Generator,
        ids: Int[Tensor, "rows length"],
        clean: Float[Tensor, "rows length words"],
        original: Float[Tensor, "rows length words"],
    ) -> None:
        """Count the effects of a perturbation on a batch."""
        state = source.get_state()
        self.count(one, *runs.run(one, source, forced=False), ids, clean, original)
        forced, _ = runs.run(one, source.set_state(state), forced=True)
        self.count_floor(one, forced, clean)

    def count(
        self,
        one: Perturbation,
        logits: Float[Tensor, "rows length words"],
        seen: Mapping[str, Tensor],
        ids: Int[Tensor, "rows length"],
        clean: Float[Tensor, "rows length words"],
        original: Float[Tensor, "rows length words"],
    ) -> None:
        """Count a perturbed run of a batch: its logits, and what tokens lost in each layer."""
        effect = self.effects[one]
        flipped = torch.stack([share >= 0 for share in seen.values()]).any(dim=0)
        effect.flips.add(flipped.double().view(tuple(ids.shape)))
        effect.kl.add(kl_divergence(clean, logits))
        effect.to_original.add(kl_divergence(original, logits))
        effect.loss.add(next_token_losses(logits, ids) - next_token_losses(clean, ids))

    def count_floor(
        self,
        one: Perturbation,
        logits: Float[Tensor, "rows length words"],
        clean: Float[Tensor, "rows length words"],
    ) -> None:
        """Count a perturbed run of a batch with clean choices."""
        self.effects[one].floor.add(kl_divergence(clean, logits))

    def counted(self) -> list[SequenceSums]:
        """Everything that was counted."""
        effects = [
            sums
            for one in self.effects.values()
            for sums in (one.kl, one.floor, one.to_original, one.flips, one.loss)
        ]
        return [*effects, *self.experts.values()]

    def batch(
        self,
        ids: Int[Tensor, "rows length"],
        sources: Sequence[Callable[[], torch.Generator]],
        original: Tensor | None,
        ticks: Iterator[None],
    ) -> Float[Tensor, "rows length words"]:
        """Run a batch clean and under every perturbation; returns the clean logits."""
        clean, runs = self.clean(ids)
        next(ticks)
        base = clean if original is None else original
        for one, source in zip(self.effects, sources, strict=True):
            self.perturbed(runs, one, source(), ids, clean, base)
            next(ticks)
        return clean


class RepairForm(RepairSide):
    """The counts of a smoothed form, and its distance from the original."""

    def __init__(self, model: nn.Module, perturbations: Sequence[Perturbation]) -> None:
        super().__init__(model, perturbations)
        self.moved, self.loss, self.change = SequenceSums(), SequenceSums(), SequenceSums()

    def counted(self) -> list[SequenceSums]:
        """Everything that was counted."""
        return [*super().counted(), self.moved, self.loss, self.change]

    def compare(self, original: Tensor, new: Tensor, ids: Int[Tensor, "rows length"]) -> None:
        """Count what smoothing itself changes on a batch."""
        self.moved.add(kl_divergence(original, new))
        self.loss.add(next_token_losses(original, ids))
        self.change.add(next_token_losses(new, ids) - next_token_losses(original, ids))

    def table(
        self, before: RepairSide, perturbations: Sequence[Perturbation], size: tuple[int, int]
    ) -> RepairTable:
        """The table of this form, of so many tokens and sequences."""
        return RepairTable(
            tuple(_row(one, before.effects[one], self.effects[one]) for one in perturbations),
            _over_layers(before.experts),
            _over_layers(self.experts),
            {name: sums.mean().value or 0.0 for name, sums in self.experts.items()},
            self.loss.mean(),
            self.change.mean(),
            self.moved.mean(),
            *size,
        )


def repair_table(
    model: nn.Module,
    smoothed: nn.Module,
    sequences: Sequence[Int[Tensor, " _"]],
    *,
    perturbations: Sequence[Perturbation] = REPAIR_PERTURBATIONS,
    batch_size: int = 8,
    seed: int = 0,
    parallel: str | None = None,
    progress: Progress | None = None,
) -> RepairTable:
    """Measure low precision in a model and in its smoothed form, each against itself in float32.

    Args:
        model: a Mixture-of-Experts language model of transformers in float32.
        smoothed: the same after `smooth_`, or any other model to compare with (a control with more
            experts, one that was trained smooth).
        sequences: token ids of each sequence; at least two tokens in each.
        perturbations: what to do.
        batch_size: sequences per forward pass.
        seed: seed of all noise.
        parallel: how processes share the batches: None or "data".
        progress: called with stage, done and total.
    """
    (table,) = repair_tables(
        model,
        smoothed,
        sequences,
        perturbations=perturbations,
        batch_size=batch_size,
        seed=seed,
        parallel=parallel,
        progress=progress,
    )
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
    """The same for several widths ε by router name, with one run of the original for all of them.

    The smoothed model is left with the last widths. Other arguments as for `repair_table`.
    """
    require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
    short = min((len(sequence) for sequence in sequences), default=0)
    require(short >= 2, f"sequences need two tokens at least, got {short}", ShapeError)
    parts = list(batches(sequences, batch_size))
    share = Ranks.of(parallel, parts)
    before = RepairSide(model, perturbations)
    after = [RepairForm(smoothed, perturbations) for _ in widths]
    ticks = _ticks(progress, len(share.batches) * (1 + len(after)) * (1 + len(perturbations)))
    with only_running(model), only_running(smoothed):
        for number, ids in enumerate(share.batches, share.number):
            sources = [partial(noise_generator, seed, n, number) for n in range(len(perturbations))]
            original = before.batch(ids, sources, None, ticks)
            for form, width in zip(after, widths, strict=True):
                set_widths(smoothed, width)
                new = form.batch(ids, sources, original, ticks)
                form.compare(original, new, ids)
    share.join_sums([sums for one in (before, *after) for sums in one.counted()])
    size = sum(ids.numel() for ids in parts), sum(len(ids) for ids in parts)
    return tuple(form.table(before, perturbations, size) for form in after)


def kept_choice(choices: dict[str, Choice], name: str, found: RouterOutput) -> Choice:
    """Record a router's choice without changing it."""
    choices[name] = Choice(found.weights, found.ids)
    return choices[name]


def _row(one: Perturbation, before: _Effect, after: _Effect) -> RepairRow:
    top, bottom = torch.cat(before.kl.sums), torch.cat(after.kl.sums)
    nothing = Estimate(None, None, "no KL after")
    factor = clustered_mean(top, bottom) if bool(bottom.sum() > 0) else nothing
    return RepairRow(
        one.name,
        before.kl.mean(),
        before.floor.mean(),
        after.kl.mean(),
        after.floor.mean(),
        factor,
        after.to_original.mean(),
        before.flips.mean(),
        after.flips.mean(),
        before.loss.mean(),
        after.loss.mean(),
    )


def _over_layers(sums: dict[str, SequenceSums]) -> Estimate:
    first, *others = sums.values()
    return first.joined(*others).mean()


def _ticks(progress: Progress | None, total: int) -> Iterator[None]:
    """Report progress, once per item."""
    for done in range(1, total + 1):
        if progress is not None:
            progress("repair", done, total)
        yield
    while True:
        yield


RESAMPLES = 1000


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
        ids: tokens of a pass.
        rounds: how often to run both.
        warmup: rounds before that.
    """
    require(rounds >= 2 and warmup >= 0, f"need two rounds at least, got {rounds=}, {warmup=}")
    times = torch.zeros(2, warmup + rounds, dtype=torch.float64)
    with only_running(model), only_running(smoothed):
        for turn in range(warmup + rounds):
            for place in (0, 1) if turn % 2 else (1, 0):
                start = time.process_time()
                forward((model, smoothed)[place], ids)
                times[place, turn] = time.process_time() - start
    ratio, low, high = _ratio(times[:, warmup:])
    names = _implementation(model), _implementation(smoothed)
    return Latency(ratio, low, high, rounds, ids.numel(), *names)


def _ratio(times: Float[Tensor, "2 rounds"]) -> tuple[float, float, float]:
    """Second row over first, of the medians, with the ends of its 95 % interval."""
    generator = torch.Generator().manual_seed(0)
    rounds = times.shape[1]
    drawn = torch.randint(rounds, (RESAMPLES, rounds), generator=generator)
    before, after = times[0][drawn].median(dim=1).values, times[1][drawn].median(dim=1).values
    spread = (after / before.clamp(min=1e-9)).quantile(torch.tensor([0.025, 0.975]).double())
    ratio = (times[1].median() / times[0].median().clamp(min=1e-9)).item()
    low, high = spread.tolist()
    return ratio, low, high


def _implementation(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    return str(getattr(config, "_experts_implementation", None) or "eager")
