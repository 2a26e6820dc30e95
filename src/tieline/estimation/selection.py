"""How many experts: by cross-validation, or by the dendrogram of a fit that has too many.

    cross-validation    the mean squared error on held-out rows for every number up to the most; the
                        smallest number within one standard error of the least error is taken
    dendrogram          one fit with the most experts, merged step by step (`dendrogram`)

Cross-validation asks what predicts best and takes as many fits as there are folds and numbers; the
dendrogram asks how many experts there are and takes one fit. Both look at `MOST_ROWS` rows at most.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from tieline.estimation.dendrogram import Dendrogram, expert_dendrogram
from tieline.estimation.mixture_fit import FitSettings, fit_mixture
from tieline.estimation.mixture_starts import Rows
from tieline.estimation.model import MoEModel
from tieline.estimation.shared_gate import SharedGate

__all__ = ["ExpertCurve", "by_cross_validation", "by_dendrogram", "some_rows"]

MOST_ROWS = 4096

Fold = tuple[Int[Tensor, " train"], Int[Tensor, " test"]]


@dataclass(frozen=True)
class ExpertCurve:
    """Error on held-out rows by the number of experts.

    Attributes:
        experts: the numbers tried.
        errors: mean over folds of the mean squared error, in standard units.
        standard_errors: of these means, over folds.
        chosen: the smallest number within one standard error of the least error.
    """

    experts: tuple[int, ...]
    errors: tuple[float, ...]
    standard_errors: tuple[float, ...]
    chosen: int


def some_rows(rows: Rows, seed: int) -> Rows:
    """At most `MOST_ROWS` rows, drawn."""
    if len(rows.x) <= MOST_ROWS:
        return rows
    order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(seed))
    return rows.take(order[:MOST_ROWS])


def by_cross_validation(
    model: MoEModel, rows: Rows, most: int, folds: Iterable[Fold], settings: FitSettings
) -> ExpertCurve:
    """The curve of errors for 1, ..., `most` experts.

    Args:
        model: the family; its number of experts is not used.
        rows: standardised rows.
        most: largest number of experts; numbers above the rows of a fold are left out.
        folds: rows to fit and rows to judge by.
        settings: of the fits.
    """
    folds = list(folds)
    most = min([most, *(len(train) for train, _ in folds)])
    errors = [
        [_held_out(model.with_experts(count), rows, fold, settings) for fold in folds]
        for count in range(1, most + 1)
    ]
    means = [sum(row) / len(row) for row in errors]
    spreads = [_standard_error(row) for row in errors]
    best = min(range(most), key=means.__getitem__)
    chosen = next(at for at in range(most) if means[at] <= means[best] + spreads[best])
    return ExpertCurve(tuple(range(1, most + 1)), tuple(means), tuple(spreads), chosen + 1)


def by_dendrogram(model: MoEModel, rows: Rows, most: int, settings: FitSettings) -> Dendrogram:
    """The dendrogram of a fit with `most` experts."""
    regression = SharedGate(model.with_experts(most), rows.y.shape[1])
    found = fit_mixture(regression, rows, settings)
    parameters = regression.parameters(found.theta[None])[0]
    gates = regression.model.weights(parameters, rows.x)[0]
    one = torch.ones_like(rows.x[:, :1])
    if model.expert == "linear":
        features = torch.cat([rows.x, one], dim=1)
    else:  # merged experts are combinations of those that were fitted
        outputs = regression.model.expert_outputs(parameters, rows.x)
        features = torch.cat([outputs.transpose(0, 1).flatten(1), one], dim=1)
    size = model.router_width + 1 + rows.y.shape[1] * model.expert_width
    return expert_dendrogram(gates, features, rows.y, rows.weight, size)


def _held_out(model: MoEModel, rows: Rows, fold: Fold, settings: FitSettings) -> float:
    """Weighted mean squared error on the rows that were not fitted."""
    train, test = rows.take(fold[0]), rows.take(fold[1])
    regression = SharedGate(model, rows.y.shape[1])
    found = fit_mixture(regression, train, settings)
    residual = test.y - regression.value(found.theta[None], test.x[None])[0]
    return (test.weight[:, None] * residual.square()).mean().item()


def _standard_error(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / max(1, len(values) - 1) / len(values))
