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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.analysis.perturbations import Perturbation, noise_generator
from tieline.analysis.precision_runs import FullRuns, model_logits
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
from tieline.hf.emulate import modular_routers
from tieline.hf.router_call import Choice, RouterOutput, override_choice
from tieline.hf.running import batches, forward, only_running
from tieline.hf.smooth import Smoothing

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


class _Side:
    """The counts of one of the two models."""

    def __init__(self, model: nn.Module, perturbations: Sequence[Perturbation]) -> None:
        self.model, self.routers = model, modular_routers(model)
        self.effects = {one: _Effect() for one in perturbations}
        self.experts = {name: SequenceSums() for name in self.routers}

    def clean(self, ids: Int[Tensor, "rows length"]) -> tuple[Tensor, FullRuns]:
        """Return the logits of the clean run, and the runs that compare with it."""
        choices: dict[str, Choice] = {}
        with ExitStack() as stack:
            for name, router in self.routers.items():
                stack.enter_context(override_choice(router, partial(_kept, choices, name)))
            logits = model_logits(forward(self.model, ids), ids)
        for name, choice in choices.items():
            used = (choice.weights > 0).double().sum(dim=1).view(tuple(ids.shape))
            self.experts[name].add(used.cpu())
        return logits, FullRuns(self.model, self.routers, ids, choices, logits)

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
        effect, state = self.effects[one], source.get_state()
        logits, seen = runs.run(one, source, forced=False)
        flipped = torch.stack([share >= 0 for share in seen.values()]).any(dim=0)
        effect.flips.add(flipped.double().view(tuple(ids.shape)))
        effect.kl.add(kl_divergence(clean, logits))
        effect.to_original.add(kl_divergence(original, logits))
        effect.loss.add(next_token_losses(logits, ids) - next_token_losses(clean, ids))
        forced, _ = runs.run(one, source.set_state(state), forced=True)
        effect.floor.add(kl_divergence(clean, forced))


def repair_table(
    model: nn.Module,
    smoothed: nn.Module,
    sequences: Sequence[Int[Tensor, " _"]],
    *,
    perturbations: Sequence[Perturbation] = REPAIR_PERTURBATIONS,
    batch_size: int = 8,
    seed: int = 0,
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
        progress: called with stage, done and total.
    """
    require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
    short = min((len(sequence) for sequence in sequences), default=0)
    require(short >= 2, f"sequences need two tokens at least, got {short}", ShapeError)
    sides = _Side(model, perturbations), _Side(smoothed, perturbations)
    moved, loss, change = SequenceSums(), SequenceSums(), SequenceSums()
    parts = list(batches(sequences, batch_size))
    ticks = _ticks(progress, len(parts) * (1 + 2 * len(perturbations)))
    with only_running(model), only_running(smoothed):
        for number, ids in enumerate(parts):
            (original, before), (new, after) = sides[0].clean(ids), sides[1].clean(ids)
            moved.add(kl_divergence(original, new))
            loss.add(next_token_losses(original, ids))
            change.add(next_token_losses(new, ids) - next_token_losses(original, ids))
            next(ticks)
            for place, one in enumerate(perturbations):
                for side, runs, clean in zip(sides, (before, after), (original, new), strict=True):
                    source = noise_generator(seed, place, number)
                    side.perturbed(runs, one, source, ids, clean, original)
                    next(ticks)
    rows = tuple(_row(one, sides[0].effects[one], sides[1].effects[one]) for one in perturbations)
    return RepairTable(
        rows,
        _over_layers(sides[0].experts),
        _over_layers(sides[1].experts),
        {name: sums.mean().value or 0.0 for name, sums in sides[1].experts.items()},
        loss.mean(),
        change.mean(),
        moved.mean(),
        sum(ids.numel() for ids in parts),
        sum(len(ids) for ids in parts),
    )


def _kept(choices: dict[str, Choice], name: str, found: RouterOutput) -> Choice:
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
