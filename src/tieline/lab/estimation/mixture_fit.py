"""Least squares for a mixture of experts, and how many experts to fit.

Cross-validation asks what predicts best and takes as many fits as there are folds and numbers; the
dendrogram asks how many experts there are and takes one fit. Both use at most `MOST_ROWS` rows.

Up to `FIRST` rows are fitted at once from every start. Of more rows a sample is taken: all starts
go `SCREEN` steps on it, the best goes on there, on a larger sample and then on all rows, where it
needs few steps; the others are "set aside". The solver works in rounds of a few steps. A start ends
when the solver has arrived or a round lowers the loss by less than `tol` of it ("converged"), when
no step lowers it ("stalled": a kink of the loss), or when the steps run out ("unfinished").

In the dendrogram the fitted gates G_i stay; the experts are taken as h_i = B_i φ, linear in
features φ, and fitted to the targets by least squares with error e. The dissimilarity of two
experts is what merging them, with the gate G_i + G_j, costs:

    d(i, j) = e(i and j merged) - e

For hard gates and constant experts that is π_i π_j / (π_i + π_j) ‖h_i - h_j‖², π_i = E[G_i], the
dissimilarity of the atoms of a mixing measure (Do, Do, McKinley, Terhorst and Nguyen 2024). The
nearest pair is merged, and so on down to one expert. With e_κ the error of κ experts, the tree is
cut where it is tallest on a logarithmic scale,

    κ* = argmax_{κ >= 2} log(e_{κ-1} / e_κ),

and κ* = 1 if no merger costs as much as the parameters of an expert do in the Bayesian information
criterion, n log(e_{κ-1} / e_κ) < q log n. Gates are added and not compared: two experts that agree
are one expert, wherever their regions lie. All errors come from the second moments of the columns
G_i φ, where a merger adds rows and columns, so the data are read once.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.statistics import mean_estimate
from tieline.lab.estimation.mixture_starts import (
    SharedGate,
    WeightedRows,
    least_residual,
    mixture_starts,
)
from tieline.lab.estimation.model import MoEModel
from tieline.lab.estimation.solvers import LeastSquares, Status, levenberg_marquardt

FIRST, SECOND = 4096, 16384  # rows of the first and the second sample
MOST_ROWS = 4096  # rows that choose the number of experts
SCREEN = 20  # steps after which the starts on a sample are compared
COARSE = 1e-2  # tolerance on samples, which later fits to more rows correct
ROUND = 5  # steps of a round
ANSWERS = ("converged", "set aside")
RIDGE, FEW_ROWS_RIDGE = 1e-10, 1e-3
"""Penalties in standard units: one that only settles ties, and one that replaces missing rows."""
MERGE_RIDGE = 1e-9  # penalty of merged experts beside a mean over rows
BOX = 3e3  # bound on standardised parameters: a wall between two experts may be sharp
LEAST = 1e-12
"""Least mean squared error, in standard units: the logarithm of an exact fit is finite."""

Moments = Float[Tensor, "columns columns"]
Fold = tuple[Int[Tensor, " train"], Int[Tensor, " test"]]


@dataclass(frozen=True)
class FitSettings:
    """Settings of a fit."""

    starts: int = 4  # how many are tried
    max_iter: int = 200  # steps of a start on each sample of rows
    tol: float = 1e-3  # a round that lowers the loss by less than this share of it is the last
    # λ of the penalty λ‖θ‖² beside the mean squared error, in standard units; None for
    # `RIDGE`, or `FEW_ROWS_RIDGE` where there are fewer targets than parameters
    ridge: float | None = None
    seed: int = 0  # of starts and samples

    def penalty(self, regression: SharedGate, rows: WeightedRows) -> float:
        """λ for these rows."""
        if self.ridge is not None:
            return self.ridge
        return FEW_ROWS_RIDGE if rows.y.numel() < regression.size else RIDGE


@dataclass(frozen=True)
class MixtureFit:
    """The best fit, and how all starts ended."""

    theta: Float[Tensor, " p"]  # parameters of `SharedGate`, in standard units
    error: float  # mean squared error over rows and outputs, in standard units, without the penalty
    status: str  # how the best fit ended on all rows
    starts: tuple[str, ...]  # how every start ended on the rows it was fitted to
    iterations: int  # steps of the best fit, on all samples together

    @property
    def failed(self) -> int:
        """Starts that did not converge."""
        return sum(word not in ANSWERS for word in self.starts)

    def failures(self) -> str:
        """Describe the starts that did not converge, as "2 unfinished, 1 stalled"."""
        ends = Counter(word for word in self.starts if word not in ANSWERS)
        return ", ".join(f"{count} {word}" for word, count in ends.items())


@dataclass(frozen=True)
class _RefinedStarts:
    """Parameters, penalised loss per row, status and steps of each start."""

    theta: Float[Tensor, "starts p"]
    loss: Float[Tensor, " starts"]
    status: tuple[str, ...]
    iterations: tuple[int, ...]

    def select(self, index: int) -> "_RefinedStarts":
        """Keep the start with this index."""
        at = slice(index, index + 1)
        return _RefinedStarts(self.theta[at], self.loss[at], self.status[at], self.iterations[at])


def fit_mixture(regression: SharedGate, rows: WeightedRows, settings: FitSettings) -> MixtureFit:
    """The best of several fits to standardised rows."""
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(rows.x), generator=generator)
    few = _first_rows(rows, order, FIRST)
    all_rows = len(few.x) == len(rows.x)
    starts = mixture_starts(regression, few, settings.starts, generator)
    first = settings if all_rows else replace(settings, max_iter=min(SCREEN, settings.max_iter))
    refined = _refine_starts(regression, few, starts, first)
    best = int(refined.loss.nan_to_num(nan=torch.inf).argmin())
    kept = refined.select(best)
    if not all_rows:
        kept = _refine_on_more_rows(regression, rows, order, kept, settings)
    others = refined.status if all_rows else ("set aside",) * len(starts)
    ends = (*others[:best], kept.status[0], *others[best + 1 :])
    problem, which = _least_squares(regression, rows, 0.0, 1), torch.zeros(1, dtype=torch.long)
    error = problem.loss(kept.theta, which).item() / rows.y.numel()
    return MixtureFit(kept.theta[0], error, kept.status[0], ends, kept.iterations[0])


def _refine_on_more_rows(
    regression: SharedGate,
    rows: WeightedRows,
    order: Tensor,
    kept: _RefinedStarts,
    settings: FitSettings,
) -> _RefinedStarts:
    """The start that was kept, refined on samples of growing size and then on all rows."""
    coarse = replace(settings, tol=max(settings.tol, COARSE))
    for size in sorted({FIRST, min(SECOND, len(rows.x)), len(rows.x)}):
        here = settings if size == len(rows.x) else coarse
        done = _refine_starts(regression, _first_rows(rows, order, size), kept.theta, here)
        kept = replace(done, iterations=(kept.iterations[0] + done.iterations[0],))
    return kept


def _first_rows(rows: WeightedRows, order: Tensor, size: int) -> WeightedRows:
    """The first rows of the order, or all."""
    return rows if size >= len(order) else rows.take(order[:size])


def _refine_starts(
    regression: SharedGate,
    rows: WeightedRows,
    theta: Float[Tensor, "starts p"],
    settings: FitSettings,
) -> _RefinedStarts:
    """Rounds of the solver until every start has ended."""
    penalty, running = settings.penalty(regression, rows), list(range(len(theta)))
    status, steps = ["unfinished"] * len(theta), [0] * len(theta)
    theta = theta.clone()
    loss = _least_squares(regression, rows, penalty, len(theta)).loss(theta, torch.tensor(running))
    while running:
        problem = _least_squares(regression, rows, penalty, len(running))
        left = settings.max_iter - max(steps[start] for start in running)
        minimum = levenberg_marquardt(problem, theta[running], iterations=min(ROUND, left), box=BOX)
        for at, start in enumerate(tuple(running)):
            gain = loss[start] - minimum.loss[at]
            theta[start], loss[start] = minimum.theta[at], minimum.loss[at]
            steps[start] += int(minimum.iterations[at])
            ended = Status(int(minimum.status[at]))
            done = ended.answered or gain <= settings.tol * minimum.loss[at]
            status[start] = "converged" if done else ended.name.lower()
            if status[start] != "unfinished" or steps[start] >= settings.max_iter:
                running.remove(start)
    return _RefinedStarts(theta, loss / len(rows.x), tuple(status), tuple(steps))


def _least_squares(
    regression: SharedGate, rows: WeightedRows, ridge: float, starts: int
) -> LeastSquares:
    """The penalised least-squares problem of weighted rows."""
    penalty = ridge * len(rows.x)
    return LeastSquares(
        regression, rows.x[None], rows.y[None], rows.weight[None], ridge=penalty, starts=starts
    )


@dataclass(frozen=True)
class ExpertCurve:
    """Error on held-out rows by the number of experts."""

    experts: tuple[int, ...]  # the numbers tried
    errors: tuple[float, ...]  # mean over folds of the mean squared error, in standard units
    standard_errors: tuple[float, ...]  # of these means, over folds
    chosen: int  # the smallest number within one standard error of the least error


def some_rows(rows: WeightedRows, seed: int) -> WeightedRows:
    """Draw at most `MOST_ROWS` rows."""
    if len(rows.x) <= MOST_ROWS:
        return rows
    order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(seed))
    return rows.take(order[:MOST_ROWS])


def by_cross_validation(
    model: MoEModel, rows: WeightedRows, most: int, folds: Iterable[Fold], settings: FitSettings
) -> ExpertCurve:
    """The curve of errors for 1, ..., `most` experts, over folds (rows to fit, rows to judge by).

    The model's own number of experts is not used; numbers above the rows of a fold are left out.
    """
    folds = list(folds)
    most = min([most, *(len(train) for train, _ in folds)])
    errors = [
        [_held_out_error(model.with_experts(count), rows, fold, settings) for fold in folds]
        for count in range(1, most + 1)
    ]
    estimates = [mean_estimate(torch.tensor(row, dtype=torch.float64)) for row in errors]
    means = tuple(estimate.value or 0.0 for estimate in estimates)
    spreads = tuple(estimate.standard_error or 0.0 for estimate in estimates)
    best = min(range(most), key=means.__getitem__)
    chosen = next(at for at in range(most) if means[at] <= means[best] + spreads[best])
    return ExpertCurve(tuple(range(1, most + 1)), means, spreads, chosen + 1)


def by_dendrogram(
    model: MoEModel, rows: WeightedRows, most: int, settings: FitSettings
) -> "Dendrogram":
    """The dendrogram of a fit with `most` experts."""
    regression = SharedGate(model.with_experts(most), rows.y.shape[1])
    fit = fit_mixture(regression, rows, settings)
    parameters = regression.parameters(fit.theta[None])[0]
    gates = regression.model.weights(parameters, rows.x)[0]
    ones = torch.ones_like(rows.x[:, :1])
    if model.expert == "linear":
        features = torch.cat([rows.x, ones], dim=1)
    else:  # merged experts are combinations of those that were fitted
        outputs = regression.model.expert_outputs(parameters, rows.x)
        features = torch.cat([outputs.transpose(0, 1).flatten(1), ones], dim=1)
    size = model.router_dim + 1 + rows.y.shape[1] * model.expert_dim
    return expert_dendrogram(gates, features, rows.y, rows.weight, size)


def _held_out_error(
    model: MoEModel, rows: WeightedRows, fold: Fold, settings: FitSettings
) -> float:
    """Weighted mean squared error on the rows that were not fitted."""
    train, test = rows.take(fold[0]), rows.take(fold[1])
    regression = SharedGate(model, rows.y.shape[1])
    fit = fit_mixture(regression, train, settings)
    residual = test.y - regression.value(fit.theta[None], test.x[None])[0]
    return (test.weight[:, None] * residual.square()).mean().item()


@dataclass(frozen=True)
class Dendrogram:
    """Levels κ = K, K - 1, ..., 1 of merging."""

    experts: tuple[int, ...]  # κ of each level
    errors: tuple[float, ...]  # mean squared error with κ experts left, in standard units
    heights: tuple[float, ...]  # d of the two experts that are merged after each level but the last
    merged: tuple[tuple[int, int], ...]  # these experts, by their places at that level
    chosen: int  # κ*


def expert_dendrogram(
    gates: Float[Tensor, "rows experts"],
    features: Float[Tensor, "rows features"],
    y: Float[Tensor, "rows outputs"],
    weight: Float[Tensor, " rows"],
    parameters: int,
) -> Dendrogram:
    """The dendrogram of a fitted mixture on its rows, with weights of mean 1.

    Gates are G, features φ, (x, 1) for linear experts; `parameters` is q, those of an expert with
    its row of the gate.
    """
    count, outputs, dim = gates.shape[1], y.shape[1], features.shape[1]
    require(count >= 2, f"two experts or more are needed, got {count}", ShapeError)
    columns = torch.cat([(gates[:, :, None] * features[:, None, :]).flatten(1), y], dim=1)
    moments = (columns * weight[:, None]).mT @ columns / len(y)
    errors, merged = [_merged_error(moments, outputs)], []
    for left in range(count, 1, -1):
        pairs = list(itertools.combinations(range(left), 2))
        after = [_merged_error(_merge_columns(moments, dim, *pair), outputs) for pair in pairs]
        best = min(range(len(pairs)), key=after.__getitem__)
        moments = _merge_columns(moments, dim, *pairs[best])
        errors.append(after[best])
        merged.append(pairs[best])
    heights = tuple(high - low for low, high in itertools.pairwise(errors))
    levels = tuple(range(count, 0, -1))
    logs = [math.log(max(error, LEAST)) for error in errors]
    rises = [high - low for low, high in itertools.pairwise(logs)]
    tallest = max(range(len(rises)), key=lambda level: (rises[level], level))
    worth = rises[tallest] >= parameters * math.log(len(y)) / len(y)
    chosen = levels[tallest] if worth else 1
    return Dendrogram(levels, tuple(errors), heights, tuple(merged), chosen)


def _merged_error(moments: Moments, outputs: int) -> float:
    """Mean squared error over outputs of the experts that fit best."""
    return (least_residual(moments, outputs, MERGE_RIDGE) / outputs).item()


def _merge_columns(
    moments: Moments, dim: int, first: int, second: int
) -> Float[Tensor, "left left"]:
    """Moments with the columns of expert `second` added to those of `first`."""
    at, gone = (slice(expert * dim, (expert + 1) * dim) for expert in (first, second))
    rows = moments.clone()
    rows[at] += moments[gone]
    rows[:, at] += rows[:, gone]
    kept = torch.ones(len(moments), dtype=torch.bool)
    kept[gone] = False
    return rows[kept][:, kept]
