"""Batched solvers of least-squares problems, for any regression function.

    S_b(θ) = Σ_i w_i (y_i - f(θ, x_i))² + λ‖θ‖²,   b = 1, ..., B

Problems that differ by their start share the data. Sums over samples are made in blocks of rows
whose Jacobian fits into the cache, so memory does not grow with the number of samples.

A step of Levenberg-Marquardt solves (A + μD) δ = g with A = JᵀJ + λI, g = -½∇S and Marquardt's
D = diag A, inside the box |θ| <= 30: a coordinate pressed against the box is left out of the step.
μ falls tenfold where the quadratic model predicts the loss well and grows where it does not. A
problem ends when the remaining gain is negligible against the noise: with s² = S/n,

    converged    gᵀ(A + 1e-9 D)⁻¹g <= (1e-3)² p s²  the estimate is within a thousandth of its own
                                                    standard error (relative offset of Bates, Watts)
    kink         three steps in a row did not lower S and the same is at most (0.05)² p s²: S of
                 ReLU experts is a minimum at the inputs where an expert switches on
    flat         five steps in a row gained less than 1e-3 s² each: a valley without information
    exact        S <= 1e-26 Σ w y²: the data are fitted to rounding
    stalled      no step lowers S, though the quadratic model predicts a gain
    unfinished   the steps ran out
    failed       S or its gradient was not finite at the start

The first four count as answers. Problems that have ended leave the batch.

Paper 2 (App. E.1) runs SGD over 10 epochs at rate 0.1 on the mean squared error; it states neither
the minibatch size nor the distance of the start from the truth. Adam is the usual alternative. Both
stop by count, not by success: a problem has converged if its relative offset is small, and is
unfinished otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import ParameterError, ShapeError, require

BLOCK = 1 << 18  # entries of a block of Jacobians: 2 MiB in float64, so that it stays in the cache

BOX = 30.0  # bound on every parameter
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-3, 1e-12, 1e8
FLOOR = 1e-9
SLOW, SLOW_STEPS = 1e-3, 5
KINK, KINK_STEPS = 0.05, 3
DESCENDED = 0.05  # relative offset up to which a stochastic descent has converged
EXACT = 1e-26

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
        """Compute f of shape (B, n) or (B, n, outputs), for θ (B, p) and x (B, n, d)."""
        ...

    def value_and_jacobian(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute f and its Jacobian, of the shape of f with a last axis p."""
        ...


class NormalEquations(NamedTuple):
    """S, -½∇S = Jᵀr - λθ and JᵀJ + λI of each problem."""

    loss: Float[Tensor, " problems"]
    pull: Theta
    gram: Float[Tensor, "problems parameters parameters"]


@dataclass(frozen=True)
class LeastSquares:
    """Data sets x (R, n, d), y (R, n, ...) with S starts each: problem b has the set b // S."""

    regression: Regression  # the function to fit
    x: Float[Tensor, "sets samples dim"]  # inputs in float64
    y: Float[Tensor, "sets samples *outputs"]  # targets in float64
    weight: Float[Tensor, "sets samples"] | None = None  # of each sample, (R, n); None for ones
    ridge: float = 0.0  # λ
    starts: int = 1  # S
    block: int = BLOCK  # entries of Jacobians that are held at once

    def __post_init__(self) -> None:
        same = self.x.shape[:2] == self.y.shape[:2]
        shapes = f"{tuple(self.x.shape)} and {tuple(self.y.shape)}"
        require(same, f"x and y must agree in sets and samples, got {shapes}", ShapeError)
        require(self.samples > 0, "a fit needs at least one sample, got none", ShapeError)
        finite = bool(self.x.isfinite().all() and self.y.isfinite().all())
        require(finite, "x and y must be finite, got NaN or an infinity")
        require(self.ridge >= 0, f"a ridge is not negative, got {self.ridge}")
        if self.weight is not None:
            shape, weight_shape = tuple(self.x.shape[:2]), tuple(self.weight.shape)
            require(
                weight_shape == shape,
                f"a weight for each sample: {shape}, got {weight_shape}",
                ShapeError,
            )
            good = bool((self.weight.isfinite() & (self.weight >= 0)).all())
            good = good and bool((self.weight.sum(-1) > 0).all())
            require(good, "weights must be finite, not negative, and not all zero", ParameterError)

    @property
    def n_problems(self) -> int:
        """Number B = R·S of problems: repetitions times starts."""
        return self.x.shape[0] * self.starts

    @property
    def samples(self) -> int:
        """Number n of samples of each data set."""
        return self.x.shape[1]

    @property
    def scale(self) -> Float[Tensor, " problems"]:
        """Σ w y² of each problem, against which a loss counts as zero."""
        squares = self.y.square().flatten(2).sum(-1) if self.y.ndim > 2 else self.y.square()
        weighted = squares if self.weight is None else squares * self.weight
        return weighted.sum(-1).repeat_interleave(self.starts)

    def loss(self, theta: Theta, which: Which) -> Float[Tensor, " problems"]:
        """Loss S at θ of the problems `which`."""
        total = self.ridge * theta.square().sum(-1)
        for block, rows, x in self._blocks(which, theta.shape[1]):
            residual = self._target(which[block], rows) - self.regression.value(theta[block], x)
            weighted = self._multiply_by_weights(residual, which[block], rows)
            total[block] += (weighted * residual).flatten(1).sum(-1)
        return total

    def normal_equations(self, theta: Theta, which: Which) -> NormalEquations:
        """Loss S, -½∇S and the Gauss-Newton matrix at θ of the problems `which`."""
        count, size = theta.shape
        loss = self.ridge * theta.square().sum(-1)
        pull, gram = -self.ridge * theta, theta.new_zeros(count, size, size)
        gram.diagonal(dim1=-2, dim2=-1).fill_(self.ridge)
        for block, rows, x in self._blocks(which, size):
            value, jacobian = self.regression.value_and_jacobian(theta[block], x)
            residual = self._target(which[block], rows) - value
            weighted = self._multiply_by_weights(residual, which[block], rows)
            loss[block] += (weighted * residual).flatten(1).sum(-1)
            columns = jacobian.flatten(1, -2)
            pull[block] += (columns.mT @ weighted.flatten(1)[..., None])[..., 0]
            gram[block] += columns.mT @ self._multiply_by_weights(
                jacobian, which[block], rows
            ).flatten(1, -2)
        return NormalEquations(loss, pull, gram)

    def minibatch_pull(self, theta: Theta, which: Which, rows: Int[Tensor, " rows"]) -> Theta:
        """Descent direction -½∇ of the mean loss over some rows, the ridge divided by n."""
        sets = which // self.starts
        value, jacobian = self.regression.value_and_jacobian(theta, self.x[sets[:, None], rows])
        residual = self.y[sets[:, None], rows] - value
        if self.weight is not None:
            weight = self.weight[sets[:, None], rows]
            residual = residual * weight.reshape(*weight.shape, *([1] * (residual.ndim - 2)))
        total = (jacobian.flatten(1, -2).mT @ residual.flatten(1)[..., None])[..., 0]
        return total / len(rows) - self.ridge / self.samples * theta

    def _blocks(self, which: Which, dim: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield blocks of problems and rows with their inputs, `dim` entries per sample."""
        outputs = self.y[0, 0].numel()
        rows = max(1, min(self.samples, max(64, self.block // max(1, dim * outputs * len(which)))))
        group = max(1, min(len(which), self.block // (rows * dim * outputs)))
        for first in range(0, len(which), group):
            block = slice(first, first + group)
            sets = which[block] // self.starts
            for row in range(0, self.samples, rows):
                span = slice(row, row + rows)
                yield block, span, self.x[:, span].index_select(0, sets)

    def _target(self, which: Which, rows: slice) -> Tensor:
        """Select the targets of some problems at some rows."""
        return self.y[:, rows].index_select(0, which // self.starts)

    def _multiply_by_weights(self, values: Tensor, which: Which, rows: slice) -> Tensor:
        """Multiply values by the weights of their rows."""
        if self.weight is None:
            return values
        weight = self.weight[:, rows].index_select(0, which // self.starts)
        return values * weight.reshape(*weight.shape, *([1] * (values.ndim - 2)))


class Status(IntEnum):
    """Status of a problem when the solver ended."""

    RUNNING = 0
    CONVERGED = 1
    KINK = 2
    FLAT = 3
    EXACT = 4
    STALLED = 5
    UNFINISHED = 6
    FAILED = 7

    @property
    def answered(self) -> bool:
        """Whether the minimum was found."""
        return Status.CONVERGED <= self <= Status.EXACT


@dataclass(frozen=True)
class Minimum:
    """Solution of every problem."""

    theta: Theta  # parameters
    loss: Float[Tensor, " problems"]  # S there
    status: Int[Tensor, " problems"]  # a `Status` each
    iterations: Int[Tensor, " problems"]  # steps tried

    @property
    def answered(self) -> Bool[Tensor, " problems"]:
        """Which problems found their minimum."""
        return (self.status >= Status.CONVERGED) & (self.status <= Status.EXACT)


@dataclass
class _RunningProblems:
    """The problems still running: their parameters and normal equations."""

    which: Which
    theta: Theta
    normal: NormalEquations
    damping: Float[Tensor, " problems"]
    slow: Int[Tensor, " problems"]
    refused: Int[Tensor, " problems"]

    def keep(self, running: Bool[Tensor, " problems"]) -> "_RunningProblems":
        """Select the problems that are still running."""
        normal = NormalEquations(*(field[running] for field in self.normal))
        counts = self.damping[running], self.slow[running], self.refused[running]
        return _RunningProblems(self.which[running], self.theta[running], normal, *counts)


def levenberg_marquardt(
    problem: LeastSquares,
    starts: Theta,
    *,
    iterations: int = 200,
    tolerance: float = 1e-3,
    box: float = BOX,
) -> Minimum:
    """Minimise every problem from its start, to a tolerance of the relative offset, |θ| <= box."""
    size = problem.regression.size
    expected, shape = (problem.n_problems, size), tuple(starts.shape)
    require(shape == expected, f"a start for each problem: {expected}, got {shape}", ShapeError)
    require(starts.dtype == torch.float64, f"starts are float64, got {starts.dtype}", ShapeError)
    require(bool(starts.isfinite().all()), "starts must be finite, got NaN or an infinity")
    batch = _start_batch(problem, starts.clamp(-box, box))
    theta, loss = batch.theta.clone(), batch.normal.loss.clone()
    status = torch.full_like(batch.which, Status.UNFINISHED)
    tried = torch.full_like(batch.which, iterations)
    zero, share = EXACT * problem.scale, size / problem.samples
    for turn in range(iterations + 1):
        step, gain = _damped_step(batch, box)
        ended = _end_statuses(batch, gain / (share * batch.normal.loss), zero, tolerance)
        finished = ended != Status.RUNNING
        if turn == iterations or finished.any():
            rows = batch.which
            theta[rows], loss[rows] = batch.theta, batch.normal.loss
            status[rows[finished]], tried[rows[finished]] = ended[finished], turn
            batch, step = batch.keep(~finished), step[~finished]
        if turn == iterations or not len(batch.which):
            break
        _take_steps(problem, batch, step, box)
    return Minimum(theta, loss, status, tried)


def relative_offset(
    problem: LeastSquares, theta: Theta
) -> tuple[Float[Tensor, " problems"], Float[Tensor, " problems"]]:
    """Distance √(gᵀ(A + 1e-9 D)⁻¹g / p s²) of θ from its minimum in standard errors; and S."""
    batch = _start_batch(problem, theta)
    gain, loss = _damped_step(batch, BOX)[1], batch.normal.loss
    return (gain / (theta.shape[1] / problem.samples * loss)).sqrt(), loss


def _start_batch(problem: LeastSquares, theta: Theta) -> _RunningProblems:
    """Evaluate all problems at their starts."""
    which = torch.arange(len(theta))
    damping, none = theta.new_full((len(theta),), FIRST_DAMPING), torch.zeros_like(which)
    return _RunningProblems(
        which, theta, problem.normal_equations(theta, which), damping, none, none.clone()
    )


def _end_statuses(
    batch: _RunningProblems, gain: Tensor, zero: Tensor, tolerance: float
) -> Int[Tensor, " problems"]:
    """Status of each running problem, from its remaining `gain` in units of p s²."""
    loss = batch.normal.loss
    ended = torch.full_like(batch.which, Status.RUNNING)
    ended[batch.damping > MOST_DAMPING] = Status.STALLED
    ended[batch.slow >= SLOW_STEPS] = Status.FLAT
    ended[(batch.refused >= KINK_STEPS) & (gain <= KINK**2)] = Status.KINK
    ended[gain <= tolerance**2] = Status.CONVERGED
    not_finite = ~(loss.isfinite() & batch.normal.pull.isfinite().all(-1))
    ended[not_finite | ~gain.isfinite()] = Status.FAILED
    ended[loss <= zero[batch.which]] = Status.EXACT  # with a loss of zero, gain is 0/0
    return ended


def _damped_step(batch: _RunningProblems, box: float) -> tuple[Theta, Float[Tensor, " problems"]]:
    """Return the damped step δ, and the remaining gain gᵀ(A + 1e-9 D)⁻¹g."""
    _, pull, gram = batch.normal
    pressed = (batch.theta.abs() >= box) & (pull * batch.theta > 0)
    free_mask = (~pressed).to(pull)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    least = 1e-14 * diagonal.amax(-1, keepdim=True) + 1e-300
    scale = free_mask / diagonal.clamp_min(least).sqrt()
    matrix = gram * scale[:, :, None] * scale[:, None, :]
    goal = pull * scale
    step = _solve_damped(matrix, batch.damping[:, None], goal)
    gain = (goal * _solve_damped(matrix, torch.full_like(batch.damping, FLOOR)[:, None], goal)).sum(
        -1
    )
    return step * scale, gain


def _solve_damped(matrix: Tensor, damping: Tensor, goal: Tensor) -> Tensor:
    """Solve (M + μI) δ = g; where rounding makes M indefinite, 1e-6 is added to μ."""
    damped = matrix.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping)
    factor, broken = torch.linalg.cholesky_ex(damped)
    if broken.any():
        indefinite = broken > 0
        damped[indefinite] += 1e-6 * torch.eye(matrix.shape[-1], dtype=matrix.dtype)
        factor[indefinite] = torch.linalg.cholesky_ex(damped[indefinite]).L
    return torch.cholesky_solve(goal[..., None], factor)[..., 0]


def _take_steps(problem: LeastSquares, batch: _RunningProblems, step: Theta, box: float) -> None:
    """Take the steps that lower the loss; adapt the damping to the predicted gain."""
    trial = (batch.theta + step).clamp(-box, box)
    change = trial - batch.theta
    loss, pull, gram = batch.normal
    predicted = 2 * (change * pull).sum(-1) - ((gram @ change[..., None])[..., 0] * change).sum(-1)
    new = problem.normal_equations(trial, batch.which)
    gain = loss - new.loss
    ratio = gain / predicted.clamp_min(1e-300)
    accepted = (gain > 0) & new.pull.isfinite().all(-1)
    factor = torch.where(ratio > 0.75, 0.1, torch.where(ratio > 0.25, 1.0, 4.0)).to(loss)
    factor = torch.where(accepted, factor, torch.full_like(factor, 10.0))
    batch.damping = (batch.damping * factor).clamp_min(LEAST_DAMPING)
    small = accepted & (gain <= SLOW * loss / problem.samples)
    batch.slow = torch.where(accepted, torch.where(small, batch.slow + 1, 0), batch.slow)
    batch.refused = torch.where(accepted, 0, batch.refused + 1)
    for old, update in zip((batch.theta, *batch.normal), (trial, *new), strict=True):
        old[accepted] = update[accepted]


@dataclass(frozen=True)
class Recipe:
    """Settings of `descend`."""

    rule: Literal["sgd", "adam"] = "sgd"
    epochs: int = 10  # passes over the data
    rate: float = 0.1  # step size
    batch: int = 64  # samples in a minibatch
    seed: int = 0  # of the order of samples

    def __post_init__(self) -> None:
        require(self.rule in ("sgd", "adam"), f"rule must be sgd or adam, got {self.rule!r}")
        counts = self.epochs >= 1 and self.batch >= 1 and self.rate > 0
        require(counts, f"epochs, batch and rate are positive, got {self}")


SGD = Recipe()  # the papers' recipe; the minibatch is ours
ADAM = Recipe("adam", epochs=50, rate=0.01)


def descend(problem: LeastSquares, starts: Theta, recipe: Recipe = SGD) -> Minimum:
    """Follow minibatch gradients of the mean squared error from every start, inside the box.

    All problems share the order of samples. A problem has converged at a relative offset <= 0.05.
    """
    theta, which = starts.clamp(-BOX, BOX), torch.arange(len(starts))
    generator = torch.Generator().manual_seed(recipe.seed)
    rules = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    rule, steps = rules[recipe.rule]([theta], lr=recipe.rate), 0
    for _ in range(recipe.epochs):
        order = torch.randperm(problem.samples, generator=generator)
        for rows in order.split(recipe.batch):
            theta.grad = -2 * problem.minibatch_pull(theta, which, rows)
            rule.step()
            theta.clamp_(-BOX, BOX)
            steps += 1
    offset, loss = relative_offset(problem, theta.nan_to_num(nan=BOX))
    status = torch.full((len(theta),), int(Status.UNFINISHED))
    status[offset <= DESCENDED] = Status.CONVERGED
    status[~(loss.isfinite() & theta.isfinite().all(-1))] = Status.FAILED
    theta.grad = None
    return Minimum(theta, loss, status, torch.full_like(status, steps))
