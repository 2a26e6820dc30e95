"""Rows of a table as the fit wants them: weighted, distinct, standardised.

    x ↦ (x - mean) / sd         by weighted mean and standard deviation; a constant column is 0
    y ↦ (y - offset) / scale    by what the experts can reach:

    experts                                 offset      scale
    linear, two-layer, odd powers           mean        sd
    tanh                                    mid-range   half the range
    relu, gelu, even powers                 minimum     sd

Equal rows become one row with the sum of their weights, and rows are put in order. So the order of
the rows does not matter at all, and a row of weight 2 is the same as two rows.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tieline.estimation.mixture_starts import Rows
from tieline.estimation.model import MoEModel

__all__ = ["Scales", "distinct_rows", "standardised"]

Array = NDArray[np.float64]


class Scales(NamedTuple):
    """Units of inputs and targets."""

    x_offset: Float[Tensor, " width"]
    x_scale: Float[Tensor, " width"]
    y_offset: Float[Tensor, " outputs"]
    y_scale: Float[Tensor, " outputs"]

    def inputs(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Standardised inputs."""
        return (x - self.x_offset) / self.x_scale

    def targets(self, y: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows outputs"]:
        """Standardised targets."""
        return (y - self.y_offset) / self.y_scale

    def outputs(self, y: Float[Tensor, "*rows outputs"]) -> Float[Tensor, "*rows outputs"]:
        """Targets in their own units."""
        return self.y_offset + self.y_scale * y


def distinct_rows(x: Array, y: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Distinct rows (x, y) of positive weight, in order, with their weights."""
    kept = weight > 0
    table, mass = np.hstack([x[kept], y[kept]]), weight[kept]
    order = np.lexsort(table.T)
    table, mass = table[order], mass[order]
    fresh = np.ones(len(table), dtype=bool)
    fresh[1:] = (table[1:] != table[:-1]).any(axis=1)
    first = np.flatnonzero(fresh)
    return table[first, : x.shape[1]], table[first, x.shape[1] :], np.add.reduceat(mass, first)


def standardised(x: Array, y: Array, weight: Array, model: MoEModel) -> tuple[Rows, Scales]:
    """Rows with weights of mean 1 in standard units, and the units.

    Args:
        x: inputs (n, D).
        y: targets (n, C).
        weight: weights (n) > 0.
        model: its experts decide the units of the targets.
    """
    inputs, targets, mass = (torch.tensor(part, dtype=torch.float64) for part in (x, y, weight))
    mass = mass / mass.mean()
    scales = Scales(*_moments(inputs, mass), *_reach(targets, mass, model))
    return Rows(scales.inputs(inputs), scales.targets(targets), mass), scales


def _moments(values: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation of each column, 1 for a constant one."""
    share = (mass / mass.sum())[:, None]
    mean = (share * values).sum(dim=0)
    deviation = (share * (values - mean).square()).sum(dim=0).sqrt()
    rounding = 1e-14 * values.abs().amax(dim=0)
    return mean, torch.where(deviation > rounding, deviation, 1.0)


def _reach(targets: Tensor, mass: Tensor, model: MoEModel) -> tuple[Tensor, Tensor]:
    """Offset and scale by the table above."""
    mean, deviation = _moments(targets, mass)
    low, high = targets.amin(dim=0), targets.amax(dim=0)
    if model.expert == "tanh":
        return (low + high) / 2, torch.where(high > low, (high - low) / 2, 1.0)
    even = model.expert == "polynomial" and model.power % 2 == 0
    return (low if model.expert in ("relu", "gelu") or even else mean), deviation
