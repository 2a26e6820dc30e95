"""Least squares for a mixture of experts from several starts, on few rows first.

Every start is fitted to a sample of rows; the best of them is refined on a larger sample and then
on all rows, where it needs few steps. A table of up to `FIRST` rows is fitted at once.

The solver works in rounds. A start ends when the solver says that it has arrived, when a round
lowers the loss by less than `tol` of it, when no step lowers it ("stalled": a kink of the loss), or
when the steps run out ("unfinished").
"""

from collections import Counter
from dataclasses import dataclass

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

ROUND = 10
"""Steps of a round."""

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
    tol: float = 1e-4
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
        return sum(word != "converged" for word in self.starts)

    def words(self) -> str:
        """How the starts that did not converge ended, as "2 unfinished, 1 stalled"."""
        ends = Counter(word for word in self.starts if word != "converged")
        return ", ".join(f"{count} {word}" for word, count in ends.items())


@dataclass(frozen=True)
class _Refined:
    """Parameters, penalised loss per row, status and steps of each start."""

    theta: Float[Tensor, "starts p"]
    loss: Float[Tensor, " starts"]
    status: tuple[str, ...]
    iterations: tuple[int, ...]


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
    found = _refine(
        regression, few, mixture_starts(regression, few, settings.starts, generator), settings
    )
    best = int(found.loss.argmin())
    theta, ended, steps = found.theta[best], found.status[best], found.iterations[best]
    for size in (SECOND, len(rows.x)):
        if len(few.x) < min(size, len(rows.x)):
            few = _sample(rows, order, size)
            once = _refine(regression, few, theta[None], settings)
            theta, ended, steps = once.theta[0], once.status[0], steps + once.iterations[0]
    starts = (*found.status[:best], ended, *found.status[best + 1 :])
    return MixtureFit(theta, _error(regression, rows, theta), ended, starts, steps)


def _sample(rows: Rows, order: Tensor, size: int) -> Rows:
    """The first rows of the order, or all."""
    return rows if size >= len(order) else rows.take(order[:size])


def _refine(
    regression: SharedGate, rows: Rows, theta: Float[Tensor, "starts p"], settings: FitSettings
) -> _Refined:
    """Rounds of the solver until every start has ended."""
    status, steps = ["unfinished"] * len(theta), [0] * len(theta)
    theta, loss = theta.clone(), theta.new_full((len(theta),), torch.inf)
    running = list(range(len(theta)))
    while running:
        problem = _problem(regression, rows, settings.penalty(regression, rows), len(running))
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
