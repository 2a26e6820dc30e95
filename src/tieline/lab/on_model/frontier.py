r"""How much repair, at which price: smoothed models of many widths, and the law in every layer.

    moved       KL of the smoothed model to the original, both in float32
    factor      flip part of the KL before / after, flip part = KL - the original's floor with
                clean routes
    least       what the law of docs/continuity.md says must be moved for that factor:
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

COMPARED = (2.0, 8.0, 32.0)
"""c = ε/σ beside which an equal number of experts in every layer is measured."""


@dataclass(frozen=True)
class FrontierPoint:
    """A smoothed form of the model.

    Attributes:
        spread: how ε differs between layers: "noise", in proportion to the noise of each, or
            "budget", with an equal number of experts in each.
        scale: c = ε/σ of the first; mean experts per token of the second.
        epsilons: ε by router name.
        table: what it repairs and costs.
        factor: how many times lower the flip part of the KL is under the noise; None if none is
            left to be seen.
        least: KL that every continuous gate must move the model by for that factor.
        over: moved / least: how near the gate comes.
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
    """Smoothed forms of a model from little to much repair, measured on held-out text.

    Attributes:
        model: name of the model.
        noise: the precision whose flips are repaired, such as "router bf16".
        gate: of all points.
        by_flips: KL of the original under the noise that goes away with the flips.
        sigmas: noise of the gap by router name, on the calibration text.
        points: in order of their widths, for each spread.
        layers: what the law says of each layer by itself; empty where it was not measured.
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
        for point in self.of("noise"):
            values = {"factor": point.factor, "moved": point.table.moved.value}
            numbers |= {f"{n}@{point.scale:g}": v for n, v in values.items() if v is not None}
        return numbers

    def of(self, spread: str) -> tuple[FrontierPoint, ...]:
        """The points of one spread."""
        return tuple(point for point in self.points if point.spread == spread)


@takes_settings(FrontierSettings)
def frontier(
    source: ModelSource = DEMO,
    *,
    settings: FrontierSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[FrontierOptions],
) -> Frontier:
    """Measure smoothed forms of a model of many widths, and hold the law against its layers.

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
    widths = [calibration.experts(calibration.by_noise(scale), gate) for scale in COMPARED]
    least = max(plan.k for plan in calibration.plans) + 0.01
    budgets = [count for count in widths if count > least]
    points = measure_points(
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
    """The law in every layer; none where a layer cannot be run by itself."""
    runs = [list(stacked_batches(sequences, settings.batch_size)) for sequences in split]
    with only_running(model), suppress(UnsupportedModelError):
        return layer_laws(model, calibration, *runs, seed=settings.seed, progress=progress)
    return ()


class _Mark(NamedTuple):
    """A point to measure."""

    spread: Literal["noise", "budget"]
    scale: float
    widths: dict[str, float]


def measure_points(
    models: tuple[nn.Module, nn.Module],
    calibration: SmoothingCalibration,
    sequences: Sequence[Int[Tensor, " _"]],
    settings: FrontierSettings,
    budgets: Sequence[float] = (),
    progress: Progress | None = None,
) -> Frontier:
    """Measure smoothed forms of a model of many widths.

    Args:
        models: the original and a smoothed copy, of which widths alone are replaced.
        calibration: from the calibration text.
        sequences: held-out token ids.
        settings: gate, widths by noise, batch size and seed.
        budgets: mean experts per token of the widths by budget.
        progress: called with stage, done and total.
    """
    model, smoothed = models
    gate, noise = settings.gate_name, calibration.noise
    marks = [_Mark("noise", c, calibration.by_noise(c)) for c in settings.scales or SCALES]
    marks += [_Mark("budget", n, calibration.by_budget(n, gate)) for n in budgets]
    tables = repair_tables(
        model,
        smoothed,
        sequences,
        [mark.widths for mark in marks],
        perturbations=list(dict.fromkeys([*REPAIR_PERTURBATIONS, noise])),
        batch_size=settings.batch_size,
        seed=settings.seed,
        progress=progress,
    )
    points = tuple(
        _frontier_point(mark, table, noise.name) for mark, table in zip(marks, tables, strict=True)
    )
    by_flips = tables[0].row(noise.name).by_flips
    return Frontier("", noise.name, gate, by_flips, calibration.sigmas, points, (), {})


def _frontier_point(mark: _Mark, table: RepairTable, noise: str) -> FrontierPoint:
    """One width's measured factor and moved KL, beside the least KL that the law allows."""
    row = table.row(noise)
    least = least_kl(row)
    ratio = table.moved.value / least if least and table.moved.value is not None else None
    return FrontierPoint(*mark, table, row.flip_factor, least, ratio)


def least_kl(row: RepairRow) -> float | None:
    """The KL that any continuous gate must move the model by for the factor of this row."""
    factor = row.flip_factor
    if factor is None or factor < 1:
        return None
    return least_moved(factor) * row.by_flips
