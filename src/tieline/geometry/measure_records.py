"""Records of the measures of a trace, and the settings they are taken at.

Each section is an `Answer`: the record, or None with the reason why the trace does not contain it.
Standard errors assume independent tokens.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from tieline.core.numerics import log_grid
from tieline.core.records import to_plain
from tieline.core.statistics import Estimate
from tieline.geometry.boundary import MassProfile
from tieline.geometry.density import MarginTail
from tieline.geometry.distance import AngularSpread
from tieline.geometry.load import Coalitions, ExpertLoad
from tieline.geometry.rounding import PRECISIONS

__all__ = [
    "Answer",
    "DistanceMeasures",
    "GapMeasures",
    "LayerMeasures",
    "MeasureSettings",
    "ModelMeasures",
    "ModelRate",
    "NearMeasures",
    "NoiseFlips",
    "PrecisionFlips",
    "ProductFlips",
    "Quantiles",
    "RoutingMeasures",
]

Value = TypeVar("Value")


@dataclass(frozen=True)
class MeasureSettings:
    """Grids, levels and formats at which a trace is measured.

    Attributes:
        probabilities: levels of the gap and distance quantiles.
        widths: grid of BM_top, in units of the selection score.
        epsilons: grid of K(ε) for traces that carry none of their own.
        sigmas: standard deviations of the noise, in units of the logits.
        precisions: formats that the logits are rounded to.
        product_precision: format of the low-precision matrix product.
        confidence: of bands and intervals.
        cold_below: fraction of an even load below which an expert is cold.
        most_orders: tie orders from this one on are counted together.
    """

    probabilities: tuple[float, ...] = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
    widths: tuple[float, ...] = tuple(log_grid(1e-6, 1e2, 10).tolist())
    epsilons: tuple[float, ...] = tuple(log_grid(1e-3, 1e1, 5).tolist())
    sigmas: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    product_precision: str = "bf16"
    confidence: float = 0.95
    cold_below: float = 0.1
    most_orders: int = 6


@dataclass(frozen=True)
class Answer(Generic[Value]):
    """A section of the results; `status` is "ok" or "not answerable: ..." with the reason."""

    value: Value | None
    status: str = "ok"


@dataclass(frozen=True)
class Quantiles:
    """Quantiles with their intervals of order statistics (Def. 2.4)."""

    probabilities: tuple[float, ...]
    value: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class GapMeasures:
    """Distribution of the gap, in units of the selection score.

    Attributes:
        quantiles: of the gap (Def. 2.4).
        profile: BM_top, the gap's distribution function, on a logarithmic grid (Def. 2.1).
        density: f_gap(0) (Def. 3.2).
        tail: (C, α) of the margin tail (Def. 3.3).
        ties: tokens whose gap is exactly zero.
        tokens: number of tokens.
    """

    quantiles: Quantiles
    profile: MassProfile
    density: Estimate
    tail: MarginTail
    ties: int
    tokens: int


@dataclass(frozen=True)
class NearMeasures:
    """Experts near the threshold as a function of ε, in units of the selection score.

    Attributes:
        epsilons: the grid.
        experts: mean number K(ε) of experts within it, with standard error (Def. 4.1).
        orders: for each ε the share of tokens of tie order 0, 1, ...; the last entry includes all
            higher orders (Def. 4.2).
        censored: for each ε the share of tokens for which ranks past the last kept one may count.
        epsilon_half: the ε that gives k + 1/2 experts on average (Def. 4.3).
    """

    epsilons: tuple[float, ...]
    experts: tuple[Estimate, ...]
    orders: tuple[tuple[float, ...], ...]
    censored: tuple[float, ...]
    epsilon_half: Estimate


@dataclass(frozen=True)
class DistanceMeasures:
    """Euclidean distance of the router's input to the nearest tie (Def. 5.2).

    Attributes:
        quantiles: of the distance.
        density: its density at zero, per unit of the input.
    """

    quantiles: Quantiles
    density: Estimate


@dataclass(frozen=True)
class NoiseFlips:
    """Flips under independent N(0, σ²) noise of the logits.

    Attributes:
        sigma: σ, in units of the logits.
        flip: mean over these tokens of the exact probability; its standard error is that of a
            sample of tokens (Def. 6.2).
        upper: upper limit for these tokens, with all experts past the last kept rank at that rank.
        population: first-order rate of the population (Def. 6.3).
        two_runs: the same between two noisy runs.
    """

    sigma: float
    flip: Estimate
    upper: float
    population: Estimate
    two_runs: Estimate


@dataclass(frozen=True)
class PrecisionFlips:
    """Ties and flips when the logits are rounded to a format.

    Attributes:
        precision: name of the format.
        step: mean step of the grid at the threshold, in units of the logits.
        tie: expected share of tied tokens for a random offset of the grid (Def. 7.2).
        flip: expected share of flipped tokens (Def. 7.2, 7.3).
        tie_population: f_gap(0) q / 2.
        flip_population: f_gap(0) q / 4, or its equivalent on two grids.
        tie_emulated: share of these tokens that tie when rounded (Def. 7.4).
        flip_emulated: share of these tokens that flip when rounded, within the chosen groups.
        status: "ok", or what the numbers leave out.
    """

    precision: str
    step: float
    tie: Estimate
    flip: Estimate
    tie_population: Estimate
    flip_population: Estimate
    tie_emulated: Estimate
    flip_emulated: Estimate
    status: str = "ok"


@dataclass(frozen=True)
class ProductFlips:
    """Flips when the logits are computed by a low-precision matrix product (Def. 7.5).

    Attributes:
        precision: name of the format.
        noise: mean standard deviation of the product's error at the threshold.
        flip: expected share of flipped tokens.
        flip_emulated: share of these tokens that flip.
    """

    precision: str
    noise: float
    flip: Estimate
    flip_emulated: Estimate


@dataclass(frozen=True)
class LayerMeasures:
    """All measures of one layer."""

    name: str
    tokens: int
    n_experts: int
    k: int
    units: str
    load: ExpertLoad
    coalitions: Coalitions
    gap: Answer[GapMeasures]
    near: Answer[NearMeasures]
    distance: Answer[DistanceMeasures]
    noise: Answer[tuple[NoiseFlips, ...]]
    precision: Answer[tuple[PrecisionFlips, ...]]
    product: Answer[ProductFlips]
    angular: Answer[AngularSpread]

    def to_dict(self) -> dict[str, object]:
        """JSON values; numbers that are not finite become None."""
        return to_plain(self)


@dataclass(frozen=True)
class ModelRate:
    """A flip rate over the layers that can be measured.

    Attributes:
        name: the noise, "0.01" for σ or "bf16" for a format.
        mean: mean over layers.
        any_layer: share of tokens that flip in at least one layer, each layer with clean inputs.
        worst_layer: name of the layer with the highest rate.
        worst: the rate of that layer.
        layers: number of these layers.
    """

    name: str
    mean: Estimate
    any_layer: Estimate
    worst_layer: str
    worst: float
    layers: int


@dataclass(frozen=True)
class ModelMeasures:
    """Measures of the model as a whole.

    Attributes:
        gap: distribution of the gaps of all layers together.
        smallest_gap: quantiles of each token's smallest gap over the layers.
        noise: flips under noise of each σ.
        precision: flips by rounding to each format, emulated.
        dead: number of dead experts over all layers.
        cold: number of cold experts over all layers.
        evenness: mean evenness of the load.
    """

    gap: Answer[GapMeasures]
    smallest_gap: Answer[Quantiles]
    noise: tuple[ModelRate, ...]
    precision: tuple[ModelRate, ...]
    dead: int
    cold: int
    evenness: float


@dataclass(frozen=True)
class RoutingMeasures:
    """Measures of every layer and of the model."""

    layers: tuple[LayerMeasures, ...]
    model: ModelMeasures
    provenance: dict[str, object]

    def to_dict(self) -> dict[str, object]:
        """JSON values; numbers that are not finite become None."""
        return to_plain(self)
