r"""Repair against cost: smoothed models of many widths, and the continuity law of every layer.

    moved       KL of the smoothed model to the original, both in float32
    factor      flip part of the KL before / after, flip part = KL - the original's floor with
                clean routes
    least       least KL that any continuous gate must move for that factor (docs/continuity.md):
                least_moved(factor) · flip part before

Both sides of the law are quadratic in the same jumps of the same layers, and so is a small KL, so
the ratio D / S_hard of a layer is that of "moved" to the flip part of the KL of the model.

The widths of a frontier are ε_l = c σ_l, σ_l the noise of layer l's gap under the precision that is
to be repaired: at the optimum D_l/S_l is equal in all layers, which for straight ramps is ε_l ∝
σ_l. Beside them are widths with equal numbers of experts in all layers.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, Unpack

from jaxtyping import Int
from torch import Tensor, nn

from tieline.analysis.smooth import SCALES, SmoothingCalibration, TextSplit, split_text
from tieline.analysis.smooth_repair import (
    REPAIR_PERTURBATIONS,
    RepairRow,
    RepairTable,
    repair_tables,
)
from tieline.core.errors import UnsupportedModelError
from tieline.core.records import Result
from tieline.core.setting_fields import takes_settings
from tieline.lab.command_settings import FrontierOptions, FrontierSettings
from tieline.lab.limits.continuity_cost import least_moved
from tieline.lab.on_model.layer_law import LayerLaw, layer_laws
from tieline.lab.on_model.subject import Progress
from tieline.models.demo import DEMO
from tieline.models.model import Model, ModelSource
from tieline.models.smoothed_model import smooth_
from tieline.run.corpus import Corpus, stacked_batches
from tieline.run.forward import only_running

BUDGET_SCALES = (2.0, 8.0, 32.0)
"""c = ε/σ whose mean expert count is also measured with an equal count in every layer."""


@dataclass(frozen=True)
class FrontierPoint:
    """A smoothed model with one set of widths.

    Attributes:
        spread: how ε differs between layers: "noise", proportional to the noise of each, or
            "budget", with an equal number of experts in each.
        scale: c = ε/σ for "noise"; mean experts per token for "budget".
        epsilons: ε by router name.
        table: repair and cost of the smoothed model.
        factor: how many times lower the flip part of the KL is under the noise; None if too low
            to be seen.
        least: KL that every continuous gate must move the model by for that factor.
        over: moved / least, 1 for an optimal gate.
    """

    spread: Literal["noise", "budget"]
    scale: float
    epsilons: dict[str, float]
    table: RepairTable
    factor: float | None
    least: float | None
    over: float | None


@dataclass(frozen=True, repr=False)
class Frontier(Result):
    """Smoothed models of increasing width, measured on held-out text.

    Attributes:
        model: name of the model.
        noise: the precision whose flips are repaired, such as "router bf16".
        gate: gate of all points.
        by_flips: part of the original's KL under the noise that is due to flips.
        sigmas: noise of the gap by router name, on the calibration text.
        points: in order of their widths, for each spread.
        layers: the law of each layer by itself; empty if it was not measured.
        provenance: text, seed and batch size.
    """

    format: ClassVar[str] = "tieline-frontier"

    model: str
    noise: str
    gate: str
    by_flips: float
    sigmas: dict[str, float]
    points: tuple[FrontierPoint, ...]
    layers: tuple[LayerLaw, ...]
    provenance: dict[str, object]

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers: "by_flips", and "factor@c", "moved@c" for each ε = c σ."""
        numbers = {"by_flips": self.by_flips}
        for point in self.points_of("noise"):
            values = {"factor": point.factor, "moved": point.table.moved.value}
            numbers |= {f"{n}@{point.scale:g}": v for n, v in values.items() if v is not None}
        return numbers

    def points_of(self, spread: str) -> tuple[FrontierPoint, ...]:
        """Return the points of one spread."""
        return tuple(point for point in self.points if point.spread == spread)


@takes_settings(FrontierSettings)
def frontier(
    source: ModelSource = DEMO,
    *,
    settings: FrontierSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[FrontierOptions],
) -> Frontier:
    """Measure smoothed models of many widths, and compare every layer with the law.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        settings: the options; keyword arguments change single ones. A named model is loaded in
            float32, and all its layers are smoothed.
        progress: called with stage, done and total.
    """
    settings = FrontierSettings.of(settings, options)
    corpus = Corpus(**settings.corpus)
    names = ("device", "revision", "trust_remote_code")
    loading = {name: getattr(settings, name) for name in names}
    opened = Model.open(source, "frontier takes", dtype="fp32", **loading)
    model = opened.module
    split = split_text(corpus, opened, settings.calibration)
    ids = corpus.stacked(split.calibration)
    calibration = SmoothingCalibration.on_batches(model, ids, settings.noise, progress)
    smoothed = copy.deepcopy(model)
    gate = settings.gate_name
    smooth_(smoothed, epsilon=calibration.by_noise(1.0), gate=gate)
    widths = [calibration.experts(calibration.by_noise(scale), gate) for scale in BUDGET_SCALES]
    least_experts = max(plan.k for plan in calibration.plans) + 0.01
    budgets = [count for count in widths if count > least_experts]
    points = measure_frontier(
        (model, smoothed), calibration, split.measured, settings, budgets, progress
    )
    laws = _laws_by_layer(model, calibration, split, settings, progress)
    provenance = {"text": corpus.origin, "seed": settings.seed, "batch_size": settings.batch_size}
    return replace(
        points, model=opened.name or type(model).__name__, layers=laws, provenance=provenance
    )


def _laws_by_layer(
    model: nn.Module,
    calibration: SmoothingCalibration,
    split: TextSplit,
    settings: FrontierSettings,
    progress: Progress | None,
) -> tuple[LayerLaw, ...]:
    """Return the law of every layer; empty if a layer cannot be run by itself."""
    runs = [list(stacked_batches(sequences, settings.batch_size)) for sequences in split]
    with only_running(model), suppress(UnsupportedModelError):
        return layer_laws(model, calibration, *runs, seed=settings.seed, progress=progress)
    return ()


class _FrontierWidths(NamedTuple):
    """Widths of a point to measure: spread, scale, and ε by router name."""

    spread: Literal["noise", "budget"]
    scale: float
    widths: dict[str, float]


def measure_frontier(
    models: tuple[nn.Module, nn.Module],
    calibration: SmoothingCalibration,
    sequences: Sequence[Int[Tensor, " _"]],
    settings: FrontierSettings,
    budgets: Sequence[float] = (),
    progress: Progress | None = None,
) -> Frontier:
    """Measure smoothed models of many widths.

    Args:
        models: the original and a smoothed copy, whose widths are replaced for each point.
        calibration: scores and noise on the calibration text.
        sequences: held-out token ids.
        settings: gate, widths by noise, batch size and seed.
        budgets: mean experts per token of the widths by budget.
        progress: called with stage, done and total.
    """
    model, smoothed = models
    gate, noise = settings.gate_name, calibration.noise
    targets = [
        _FrontierWidths("noise", c, calibration.by_noise(c)) for c in settings.scales or SCALES
    ]
    targets += [_FrontierWidths("budget", n, calibration.by_budget(n, gate)) for n in budgets]
    tables = repair_tables(
        model,
        smoothed,
        sequences,
        [target.widths for target in targets],
        perturbations=list(dict.fromkeys([*REPAIR_PERTURBATIONS, noise])),
        batch_size=settings.batch_size,
        seed=settings.seed,
        progress=progress,
    )
    points = tuple(
        _frontier_point(target, table, noise.name)
        for target, table in zip(targets, tables, strict=True)
    )
    by_flips = tables[0].row(noise.name).by_flips
    return Frontier("", noise.name, gate, by_flips, calibration.sigmas, points, (), {})


def _frontier_point(target: _FrontierWidths, table: RepairTable, noise: str) -> FrontierPoint:
    """Return the point of one set of widths, with the least KL that the law allows."""
    row = table.row(noise)
    least = least_kl(row)
    ratio = table.moved.value / least if least and table.moved.value is not None else None
    return FrontierPoint(*target, table, row.flip_factor, least, ratio)


def least_kl(row: RepairRow) -> float | None:
    """Return the least KL by which any continuous gate must move the model for a row's factor."""
    factor = row.flip_factor
    if factor is None or factor < 1:
        return None
    return least_moved(factor) * row.by_flips
