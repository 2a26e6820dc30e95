"""How much repair at which price, as frozen records: widths of a frontier, the law in layers."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from tieline.analysis.repair import RepairTable
from tieline.core.records import Result
from tieline.core.statistics import Estimate


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


@dataclass(frozen=True)
class LawPoint:
    """A layer by itself with a band of one width; squares in units of the output's mean square.

    Attributes:
        scale: c = ε/σ.
        epsilon: ε.
        inside: share of tokens whose gap is below ε.
        moved: D, the mean square change of the layer's output by smoothing.
        predicted_moved: the same from density, jump, their slope and ε.
        sensitivity: S, its mean square change under noise of the choice.
        predicted_sensitivity: the same from density, jump, their slope, σ and ε.
        factor: S of top-k over S.
        over: D over the least that any continuous gate needs for that factor, at finite σ.
    """

    scale: float
    epsilon: float
    inside: float
    moved: Estimate
    predicted_moved: float
    sensitivity: Estimate
    predicted_sensitivity: float
    factor: float | None
    over: Estimate


@dataclass(frozen=True)
class LayerLaw:
    """What the law says of a layer, and what was measured.

    Attributes:
        name: its router.
        density: f of the signed margin at 0, from the calibration text.
        jump: J over the root mean square of the output, likewise.
        sigma: noise of the margin.
        slope: relative slope of f J² with the gap, likewise from the calibration text.
        hard: S of top-k.
        predicted_hard: the same from density, jump and σ.
        points: one per width.
    """

    name: str
    density: float
    jump: float
    sigma: float
    slope: float
    hard: Estimate
    predicted_hard: float
    points: tuple[LawPoint, ...]


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
            named = {"factor": point.factor, "moved": point.table.moved.value}
            numbers |= {f"{n}@{point.scale:g}": v for n, v in named.items() if v is not None}
        return numbers

    def of(self, spread: str) -> tuple[FrontierPoint, ...]:
        """The points of one spread."""
        return tuple(point for point in self.points if point.spread == spread)
