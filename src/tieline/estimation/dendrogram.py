"""How many experts a mixture that has too many really uses: the dendrogram of its experts.

The fitted gates G_i stay; the experts are taken as h_i = B_i φ, linear in features φ, and fitted to
the targets by least squares with error e. The dissimilarity of two experts is what merging them,
with the gate G_i + G_j, costs:

    d(i, j) = e(i and j merged) - e

For hard gates and constant experts that is π_i π_j / (π_i + π_j) ‖h_i - h_j‖², π_i = E[G_i], the
dissimilarity of the atoms of a mixing measure (Do, Do, McKinley, Terhorst and Nguyen 2024). The
nearest pair is merged, and so on down to one expert. With e_κ the error of κ experts, the tree is
cut where it is tallest on a logarithmic scale,

    κ* = argmax_{κ >= 2} log(e_{κ-1} / e_κ),

and κ* = 1 where no merger costs as much as the parameters of an expert do in the Bayesian
information criterion, n log(e_{κ-1} / e_κ) < q log n. Gates are added and not compared: two experts
that agree are one expert, wherever their regions lie. All errors come from the second moments of
the columns G_i φ, where a merger adds rows and columns, so the data are read once.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require

__all__ = ["Dendrogram", "expert_dendrogram"]

LEAST = 1e-12
"""Least mean squared error, in standard units: the logarithm of an exact fit is finite."""

RIDGE = 1e-9
"""Penalty of the experts beside a mean over rows."""

Moments = Float[Tensor, "columns columns"]


@dataclass(frozen=True)
class Dendrogram:
    """Levels κ = K, K - 1, ..., 1 of merging.

    Attributes:
        experts: κ of each level.
        errors: mean squared error with κ experts left, in standard units.
        heights: d of the two experts that are merged after each level but the last.
        merged: these experts, by their places at that level.
        chosen: κ*.
    """

    experts: tuple[int, ...]
    errors: tuple[float, ...]
    heights: tuple[float, ...]
    merged: tuple[tuple[int, int], ...]
    chosen: int


def expert_dendrogram(
    gates: Float[Tensor, "rows experts"],
    features: Float[Tensor, "rows features"],
    y: Float[Tensor, "rows outputs"],
    weight: Float[Tensor, " rows"],
    parameters: int,
) -> Dendrogram:
    """The dendrogram of a fitted mixture on its rows.

    Args:
        gates: G (n, K) of every row.
        features: φ (n, q): (x, 1) for linear experts.
        y: standardised targets (n, C).
        weight: weights (n) of mean 1.
        parameters: q, parameters of an expert with its row of the gate.
    """
    count, outputs, width = gates.shape[1], y.shape[1], features.shape[1]
    require(count >= 2, f"two experts or more are needed, got {count}", ShapeError)
    moments = _moments(gates, features, y, weight)
    errors, merged = [_error(moments, outputs)], []
    for left in range(count, 1, -1):
        pairs = list(itertools.combinations(range(left), 2))
        after = [_error(_merged(moments, width, *pair), outputs) for pair in pairs]
        best = min(range(len(pairs)), key=after.__getitem__)
        moments = _merged(moments, width, *pairs[best])
        errors.append(after[best])
        merged.append(pairs[best])
    heights = tuple(high - low for low, high in itertools.pairwise(errors))
    levels = tuple(range(count, 0, -1))
    cut = _cut(errors, parameters * math.log(len(y)) / len(y))
    return Dendrogram(levels, tuple(errors), heights, tuple(merged), levels[cut])


def _cut(errors: list[float], least: float) -> int:
    """The level after which a merger costs most, or the last if none costs `least`."""
    logs = [math.log(max(error, LEAST)) for error in errors]
    rises = [high - low for low, high in itertools.pairwise(logs)]
    tallest = max(range(len(rises)), key=lambda place: (rises[place], place))
    return tallest if rises[tallest] >= least else len(rises)


def _moments(gates: Tensor, features: Tensor, y: Tensor, weight: Tensor) -> Moments:
    """Weighted second moments of (G_1 φ, ..., G_K φ, y)."""
    columns = torch.cat([(gates[:, :, None] * features[:, None, :]).flatten(1), y], dim=1)
    return (columns * weight[:, None]).mT @ columns / len(y)


def _error(moments: Moments, outputs: int) -> float:
    """Mean squared error over outputs of the experts that fit best."""
    gram, cross = moments[:-outputs, :-outputs], moments[:-outputs, -outputs:]
    eye = torch.eye(len(gram), dtype=gram.dtype)
    solved = torch.linalg.solve(gram + RIDGE * eye, cross)
    squares = moments[-outputs:, -outputs:].diagonal().sum()
    return ((squares - (solved * cross).sum()) / outputs).item()


def _merged(moments: Moments, width: int, first: int, second: int) -> Float[Tensor, "left left"]:
    """Moments with the columns of expert `second` added to those of `first`."""
    at, gone = (
        slice(first * width, (first + 1) * width),
        slice(second * width, (second + 1) * width),
    )
    rows = moments.clone()
    rows[at] += moments[gone]
    rows[:, at] += rows[:, gone]
    kept = torch.ones(len(moments), dtype=torch.bool)
    kept[gone] = False
    return rows[kept][:, kept]
