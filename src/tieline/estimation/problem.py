"""Many least-squares problems at once, whatever the regression function is.

    S_b(θ) = Σ_i w_i (y_i - f(θ, x_i))² + λ‖θ‖²,   b = 1, ..., B

A problem is one data set with one start; problems that differ by their start share the data. The
regression function enters by a small protocol, so that the solvers know nothing of experts. Sums
over samples are made in blocks of rows whose Jacobian fits into the cache: memory does not grow
with the number of samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import ParameterError, ShapeError, require

__all__ = ["LeastSquares", "Normal", "Regression"]

BLOCK = 1 << 18
"""Entries of a block of Jacobians: 2 MiB in float64, so that it stays in the cache."""

Theta = Float[Tensor, "problems parameters"]
Which = Int[Tensor, " problems"]


@runtime_checkable
class Regression(Protocol):
    """f(θ, x) and ∂f/∂θ for a batch of flat parameter vectors, each with its own inputs."""

    @property
    def size(self) -> int:
        """Length p of a parameter vector."""
        ...

    def value(self, theta: Tensor, x: Tensor) -> Tensor:
        """F of shape (B, n) or (B, n, outputs), for θ (B, p) and x (B, n, d)."""
        ...

    def value_and_jacobian(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """F and its Jacobian, of the shape of f with a last axis p."""
        ...


class Normal(NamedTuple):
    """S, -½∇S = Jᵀr - λθ and JᵀJ + λI of each problem."""

    loss: Float[Tensor, " problems"]
    pull: Theta
    gram: Float[Tensor, "problems parameters parameters"]


@dataclass(frozen=True)
class LeastSquares:
    """Problems over data sets x (R, n, d), y (R, n) or (R, n, outputs), S starts for each.

    Problem b has the data set b // S.

    Attributes:
        regression: the function to fit.
        x: inputs in float64.
        y: targets in float64.
        weight: of each sample, (R, n); None for ones.
        ridge: λ.
        starts: S.
        block: entries of Jacobians that are held at once.
    """

    regression: Regression
    x: Float[Tensor, "sets samples width"]
    y: Float[Tensor, "sets samples *outputs"]
    weight: Float[Tensor, "sets samples"] | None = None
    ridge: float = 0.0
    starts: int = 1
    block: int = BLOCK

    def __post_init__(self) -> None:
        same = self.x.shape[:2] == self.y.shape[:2]
        shapes = f"{tuple(self.x.shape)} and {tuple(self.y.shape)}"
        require(same, f"x and y must agree in sets and samples, got {shapes}", ShapeError)
        require(self.samples > 0, "a fit needs at least one sample, got none", ShapeError)
        finite = bool(self.x.isfinite().all() and self.y.isfinite().all())
        require(finite, "x and y must be finite, got NaN or an infinity")
        require(self.ridge >= 0, f"a ridge is not negative, got {self.ridge}")
        if self.weight is not None:
            _check_weight(self.weight, tuple(self.x.shape[:2]))

    @property
    def problems(self) -> int:
        """B = R·S."""
        return self.x.shape[0] * self.starts

    @property
    def samples(self) -> int:
        """Samples n of each data set."""
        return self.x.shape[1]

    @property
    def scale(self) -> Float[Tensor, " problems"]:
        """Σ w y² of each problem, against which a loss counts as zero."""
        squares = self.y.square().flatten(2).sum(-1) if self.y.ndim > 2 else self.y.square()
        weighted = squares if self.weight is None else squares * self.weight
        return weighted.sum(-1).repeat_interleave(self.starts)

    def loss(self, theta: Theta, which: Which) -> Float[Tensor, " problems"]:
        """S at θ of the problems `which`."""
        total = self.ridge * theta.square().sum(-1)
        for at, rows, x in self._blocks(which, theta.shape[1]):
            residual = self._target(which[at], rows) - self.regression.value(theta[at], x)
            weighted = self._weigh(residual, which[at], rows)
            total[at] += (weighted * residual).flatten(1).sum(-1)
        return total

    def normal(self, theta: Theta, which: Which) -> Normal:
        """S, -½∇S and the Gauss-Newton matrix at θ of the problems `which`."""
        count, size = theta.shape
        loss = self.ridge * theta.square().sum(-1)
        pull, gram = -self.ridge * theta, theta.new_zeros(count, size, size)
        gram.diagonal(dim1=-2, dim2=-1).fill_(self.ridge)
        for at, rows, x in self._blocks(which, size):
            value, jacobian = self.regression.value_and_jacobian(theta[at], x)
            residual = self._target(which[at], rows) - value
            weighted = self._weigh(residual, which[at], rows)
            loss[at] += (weighted * residual).flatten(1).sum(-1)
            columns = jacobian.flatten(1, -2)
            pull[at] += (columns.mT @ weighted.flatten(1)[..., None])[..., 0]
            gram[at] += columns.mT @ self._weigh(jacobian, which[at], rows).flatten(1, -2)
        return Normal(loss, pull, gram)

    def pull(self, theta: Theta, which: Which, rows: Int[Tensor, " rows"]) -> Theta:
        """-½∇ of the mean loss over some rows, the ridge shared out over all samples."""
        sets = which // self.starts
        value, jacobian = self.regression.value_and_jacobian(theta, self.x[sets[:, None], rows])
        residual = self.y[sets[:, None], rows] - value
        if self.weight is not None:
            weight = self.weight[sets[:, None], rows]
            residual = residual * weight.reshape(*weight.shape, *([1] * (residual.ndim - 2)))
        total = (jacobian.flatten(1, -2).mT @ residual.flatten(1)[..., None])[..., 0]
        return total / len(rows) - self.ridge / self.samples * theta

    def _blocks(self, which: Which, width: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """Blocks of problems and rows with their inputs, `width` entries to each sample."""
        outputs = self.y[0, 0].numel()
        rows = max(
            1, min(self.samples, max(64, self.block // max(1, width * outputs * len(which))))
        )
        group = max(1, min(len(which), self.block // (rows * width * outputs)))
        for first in range(0, len(which), group):
            at = slice(first, first + group)
            sets = which[at] // self.starts
            for row in range(0, self.samples, rows):
                span = slice(row, row + rows)
                yield at, span, self.x[:, span].index_select(0, sets)

    def _target(self, which: Which, rows: slice) -> Tensor:
        return self.y[:, rows].index_select(0, which // self.starts)

    def _weigh(self, values: Tensor, which: Which, rows: slice) -> Tensor:
        if self.weight is None:
            return values
        weight = self.weight[:, rows].index_select(0, which // self.starts)
        return values * weight.reshape(*weight.shape, *([1] * (values.ndim - 2)))


def _check_weight(weight: Tensor, shape: tuple[int, ...]) -> None:
    found = tuple(weight.shape)
    require(found == shape, f"a weight for each sample: {shape}, got {found}", ShapeError)
    good = bool((weight.isfinite() & (weight >= 0)).all()) and bool((weight.sum(-1) > 0).all())
    require(good, "weights must be finite, not negative, and not all zero", ParameterError)
