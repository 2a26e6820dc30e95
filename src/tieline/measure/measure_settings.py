"""Settings of the measures of a trace, and `Measurement`, which holds one of them.

A `Measurement` is a record, or None with the reason why the trace cannot answer. Standard errors
assume independent tokens.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from tieline.core.numerics import PRECISIONS, log_grid

Value = TypeVar("Value")


@dataclass(frozen=True)
class MeasureSettings:
    """Grids, levels and formats at which a trace is measured.

    Attributes:
        probabilities: levels of the gap and distance quantiles.
        widths: grid of BM_top, in units of the selection score.
        epsilons: grid of K(ε) for traces without their own grid.
        sigmas: standard deviations of the noise, in units of the logits.
        precisions: formats that the logits are rounded to.
        product_precision: format of the low-precision matrix product.
        confidence: confidence level of bands and intervals.
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
class Measurement(Generic[Value]):
    """One measure: a value, or None with `status` "not answerable: ..." instead of "ok"."""

    value: Value | None
    status: str = "ok"
