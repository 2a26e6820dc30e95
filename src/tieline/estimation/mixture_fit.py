"""Least squares for a mixture of experts from several starts, on few rows first.

Up to `FIRST` rows are fitted at once from every start. Of more rows a sample is taken: all starts
go `SCREEN` steps on it, the best goes on there, on a larger sample and then on all rows, where it
needs few steps; the others are "set aside".

The solver works in rounds of a few steps. A start ends when the solver says that it has arrived or
when a round lowers the loss by less than `tol` of it ("converged"), when no step lowers it
("stalled": a kink of the loss), or when the steps run out ("unfinished").
"""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.estimation.levenberg import Status, levenberg_marquardt
from tieline.estimation.mixture_starts import Rows, mixture_starts
from tieline.estimation.problem import LeastSquares
from tieline.estimation.shared_gate import SharedGate

__all__ = ["FitSettings", "MixtureFit", "fit_mixture"]

FIRST, SECOND = 4096, 16384
"""Rows of the first and the second sample."""

SCREEN = 20
"""Steps after which the starts on a sample are compared."""

COARSE = 1e-2
"""Tolerance on samples, which the rows that follow correct anyway."""

ROUND = 5
"""Steps of a round."""

ANSWERS = ("converged", "set aside")

RIDGE, FEW_ROWS_RIDGE = 1e-10, 1e-3
"""Penalties in standard units: one that only settles ties, and one that replaces missing rows."""

BOX = 3e3
"""Bound on standardised parameters: a wall between two experts may be sharp."""


@dataclass(frozen=True)
class FitSettings:
    """How a mixture is fitted.

    Attributes:
        starts: how many are tried.
        max_iter: steps of a start on each sample of rows.
        tol: a round that lowers the loss by less than this share of it is the last.
        ridge: λ of the penalty λ‖θ‖² beside the mean squared error, in standard units; None for
            `RIDGE`, or `FEW_ROWS_RIDGE` where there are fewer targets than parameters.
        seed: of starts and samples.
    """

    starts: int = 4
    max_iter: int = 200
    tol: float = 1e-3
    ridge: float | None = None
    seed: int = 0

    def penalty(self, regression: SharedGate, rows: Rows) -> float:
        """λ for these rows."""
        if self.ridge is not None:
            return self.ridge
        return FEW_ROWS_RIDGE if rows.y.numel() < regression.size else RIDGE


@dataclass(frozen=True)
class MixtureFit:
    """The best fit, and how all starts ended.

    Attributes:
        theta: parameters of `SharedGate`, in standard units.
        error: mean squared error over rows and outputs, in standard units, without the penalty.
        status: how the best fit ended on all rows.
        starts: how every start ended on the rows it was fitted to.
        iterations: steps of the best fit, on all samples together.
    """

    theta: Float[Tensor, " p"]
    error: float
    status: str
    starts: tuple[str, ...]
    iterations: int

    @property
    def failed(self) -> int:
        """Starts that did not converge."""
        return sum(word not in ANSWERS for word in self.starts)

    def words(self) -> str:
        """How the starts that did not converge ended, as "2 unfinished, 1 stalled"."""
        ends = Counter(word for word in self.starts if word not in ANSWERS)
        return ", ".join(f"{count} {word}" for word, count in ends.items())


@dataclass(frozen=True)
class _Refined:
    """Parameters, penalised loss per row, status and steps of each start."""

    theta: Float[Tensor, "starts p"]
    loss: Float[Tensor, " starts"]
    status: tuple[str, ...]
    iterations: tuple[int, ...]

    def one(self, place: int) -> "_Refined":
        """One of the starts."""
        at = slice(place, place + 1)
        return _Refined(self.theta[at], self.loss[at], self.status[at], self.iterations[at])


def fit_mixture(regression: SharedGate, rows: Rows, settings: FitSettings) -> MixtureFit:
    """The best of several fits.

    Args:
        regression: the mixture.
        rows: standardised rows.
        settings: starts, steps, tolerance, penalty, seed.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(rows.x), generator=generator)
    few = _sample(rows, order, FIRST)
    whole = len(few.x) == len(rows.x)
    starts = mixture_starts(regression, few, settings.starts, generator)
    first = settings if whole else replace(settings, max_iter=min(SCREEN, settings.max_iter))
    found = _refine(regression, few, starts, first)
    best = int(found.loss.nan_to_num(nan=torch.inf).argmin())
    kept = found.one(best)
    if not whole:
        kept = _grown(regression, rows, order, kept, settings)
    others = found.status if whole else ("set aside",) * len(starts)
    ends = (*others[:best], kept.status[0], *others[best + 1 :])
    error = _error(regression, rows, kept.theta[0])
    return MixtureFit(kept.theta[0], error, kept.status[0], ends, kept.iterations[0])


def _grown(
    regression: SharedGate, rows: Rows, order: Tensor, kept: _Refined, settings: FitSettings
) -> _Refined:
    """The start that was kept, refined on samples of growing size and then on all rows."""
    coarse = replace(settings, tol=max(settings.tol, COARSE))
    for size in sorted({FIRST, min(SECOND, len(rows.x)), len(rows.x)}):
        here = settings if size == len(rows.x) else coarse
        done = _refine(regression, _sample(rows, order, size), kept.theta, here)
        kept = replace(done, iterations=(kept.iterations[0] + done.iterations[0],))
    return kept


def _sample(rows: Rows, order: Tensor, size: int) -> Rows:
    """The first rows of the order, or all."""
    return rows if size >= len(order) else rows.take(order[:size])


def _refine(
    regression: SharedGate, rows: Rows, theta: Float[Tensor, "starts p"], settings: FitSettings
) -> _Refined:
    """Rounds of the solver until every start has ended."""
    penalty, running = settings.penalty(regression, rows), list(range(len(theta)))
    status, steps = ["unfinished"] * len(theta), [0] * len(theta)
    theta = theta.clone()
    loss = _problem(regression, rows, penalty, len(theta)).loss(theta, torch.tensor(running))
    while running:
        problem = _problem(regression, rows, penalty, len(running))
        left = settings.max_iter - max(steps[place] for place in running)
        found = levenberg_marquardt(problem, theta[running], iterations=min(ROUND, left), box=BOX)
        for at, place in enumerate(tuple(running)):
            gain = loss[place] - found.loss[at]
            theta[place], loss[place] = found.theta[at], found.loss[at]
            steps[place] += int(found.iterations[at])
            status[place] = _word(Status(int(found.status[at])), gain, found.loss[at], settings)
            if status[place] != "unfinished" or steps[place] >= settings.max_iter:
                running.remove(place)
    return _Refined(theta, loss / len(rows.x), tuple(status), tuple(steps))


def _word(status: Status, gain: Tensor, loss: Tensor, settings: FitSettings) -> str:
    """How a round ended, in a word."""
    if status.answered or gain <= settings.tol * loss:
        return "converged"
    return "unfinished" if status is Status.UNFINISHED else status.name.lower()


def _problem(regression: SharedGate, rows: Rows, ridge: float, starts: int) -> LeastSquares:
    penalty = ridge * len(rows.x)
    return LeastSquares(
        regression, rows.x[None], rows.y[None], rows.weight[None], ridge=penalty, starts=starts
    )


def _error(regression: SharedGate, rows: Rows, theta: Tensor) -> float:
    problem = _problem(regression, rows, 0.0, 1)
    return problem.loss(theta[None], torch.zeros(1, dtype=torch.long)).item() / rows.y.numel()
