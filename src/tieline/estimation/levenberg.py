"""Levenberg-Marquardt for many problems at once, each with a damping of its own.

A step solves (A + μD) δ = g with A = JᵀJ + λI, g = -½∇S and Marquardt's D = diag A, and is kept
inside the box |θ| <= 30: a coordinate that is pressed against the box is left out of the step.
μ falls tenfold where the quadratic model predicts the loss well and grows where it does not.

A problem ends when what is left to gain is nothing beside the noise: with s² = S/n,

    converged    gᵀ(A + 1e-9 D)⁻¹g <= (1e-3)² p s²  the estimate is within a thousandth of its own
                                                    standard error (relative offset of Bates, Watts)
    kink         three steps in a row did not lower S and the same is at most (0.05)² p s²: S of
                 ReLU experts is a minimum at the inputs where an expert switches on
    flat         five steps in a row gained less than 1e-3 s² each: a valley the data do not see
    exact        S <= 1e-26 Σ w y²: the data are fitted to rounding
    stalled      no step lowers S, though the model promises more than that
    unfinished   the steps ran out
    failed       S or its gradient was not finite at the start

The first four are answers, the others are not. Problems that have ended leave the batch.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.estimation.problem import LeastSquares, Normal, Theta, Which

__all__ = ["BOX", "Minimum", "Status", "levenberg_marquardt", "relative_offset"]

BOX = 30.0
FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-3, 1e-12, 1e8
FLOOR = 1e-9
SLOW, SLOW_STEPS = 1e-3, 5
KINK, KINK_STEPS = 0.05, 3
EXACT = 1e-26


class Status(IntEnum):
    """How a problem ended."""

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
    """Where every problem ended.

    Attributes:
        theta: parameters.
        loss: S there.
        status: a `Status` each.
        iterations: steps tried.
    """

    theta: Theta
    loss: Float[Tensor, " problems"]
    status: Int[Tensor, " problems"]
    iterations: Int[Tensor, " problems"]

    @property
    def answered(self) -> Bool[Tensor, " problems"]:
        """Which problems found their minimum."""
        return (self.status >= Status.CONVERGED) & (self.status <= Status.EXACT)


@dataclass
class _Batch:
    """The problems still running: where they are and what they know there."""

    which: Which
    theta: Theta
    normal: Normal
    damping: Float[Tensor, " problems"]
    slow: Int[Tensor, " problems"]
    refused: Int[Tensor, " problems"]

    def keep(self, left: Bool[Tensor, " problems"]) -> "_Batch":
        normal = Normal(*(part[left] for part in self.normal))
        counts = self.damping[left], self.slow[left], self.refused[left]
        return _Batch(self.which[left], self.theta[left], normal, *counts)


def levenberg_marquardt(
    problem: LeastSquares,
    starts: Theta,
    *,
    iterations: int = 200,
    tolerance: float = 1e-3,
    box: float = BOX,
) -> Minimum:
    """Minimise every problem from its start.

    Args:
        problem: data and regression function of B problems.
        starts: first parameters of each, float64.
        iterations: steps that a problem may try.
        tolerance: of the relative offset.
        box: bound on every |θ|.
    """
    size = problem.regression.size
    wanted, found = (problem.problems, size), tuple(starts.shape)
    require(found == wanted, f"a start for each problem: {wanted}, got {found}", ShapeError)
    require(starts.dtype == torch.float64, f"starts are float64, got {starts.dtype}", ShapeError)
    require(bool(starts.isfinite().all()), "starts must be finite, got NaN or an infinity")
    return _run(problem, _begin(problem, starts.clamp(-box, box)), iterations, tolerance, box)


def relative_offset(
    problem: LeastSquares, theta: Theta, box: float = BOX
) -> tuple[Float[Tensor, " problems"], Float[Tensor, " problems"]]:
    """√(gᵀ(A + 1e-9 D)⁻¹g / p s²), how far θ is from its minimum in standard errors; and S."""
    batch = _begin(problem, theta)
    left, loss = _step(batch, box)[1], batch.normal.loss
    return (left / (theta.shape[1] / problem.samples * loss)).sqrt(), loss


def _begin(problem: LeastSquares, theta: Theta) -> _Batch:
    which = torch.arange(len(theta))
    damping, none = theta.new_full((len(theta),), FIRST_DAMPING), torch.zeros_like(which)
    return _Batch(which, theta, problem.normal(theta, which), damping, none, none.clone())


def _run(
    problem: LeastSquares, batch: _Batch, iterations: int, tolerance: float, box: float
) -> Minimum:
    theta, loss = batch.theta.clone(), batch.normal.loss.clone()
    status = torch.full_like(batch.which, Status.UNFINISHED)
    tried = torch.full_like(batch.which, iterations)
    zero, share = EXACT * problem.scale, theta.shape[1] / problem.samples
    for turn in range(iterations + 1):
        step, left = _step(batch, box)
        ended = _ended(batch, left / (share * batch.normal.loss), zero, tolerance)
        gone = ended != Status.RUNNING
        if turn == iterations or gone.any():
            at = batch.which
            theta[at], loss[at] = batch.theta, batch.normal.loss
            status[at[gone]], tried[at[gone]] = ended[gone], turn
            batch, step = batch.keep(~gone), step[~gone]
        if turn == iterations or not len(batch.which):
            break
        _try(problem, batch, step, box)
    return Minimum(theta, loss, status, tried)


def _ended(batch: _Batch, left: Tensor, zero: Tensor, tolerance: float) -> Int[Tensor, " problems"]:
    """The status of each running problem, `left` being what it may gain in units of p s²."""
    loss = batch.normal.loss
    ended = torch.full_like(batch.which, Status.RUNNING)
    ended[batch.damping > MOST_DAMPING] = Status.STALLED
    ended[batch.slow >= SLOW_STEPS] = Status.FLAT
    ended[(batch.refused >= KINK_STEPS) & (left <= KINK**2)] = Status.KINK
    ended[left <= tolerance**2] = Status.CONVERGED
    lost = ~(loss.isfinite() & batch.normal.pull.isfinite().all(-1))
    ended[lost | ~left.isfinite()] = Status.FAILED
    ended[loss <= zero[batch.which]] = Status.EXACT  # 0/0 is left of a loss of zero
    return ended


def _step(batch: _Batch, box: float) -> tuple[Theta, Float[Tensor, " problems"]]:
    """The damped step δ, and gᵀ(A + 1e-9 D)⁻¹g, what is left to gain."""
    _, pull, gram = batch.normal
    pressed = (batch.theta.abs() >= box) & (pull * batch.theta > 0)
    free = (~pressed).to(pull)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    least = 1e-14 * diagonal.amax(-1, keepdim=True) + 1e-300
    scale = free / diagonal.clamp_min(least).sqrt()
    matrix = gram * scale[:, :, None] * scale[:, None, :]
    goal = pull * scale
    step = _solve(matrix, batch.damping[:, None], goal)
    left = (goal * _solve(matrix, torch.full_like(batch.damping, FLOOR)[:, None], goal)).sum(-1)
    return step * scale, left


def _solve(matrix: Tensor, damping: Tensor, goal: Tensor) -> Tensor:
    """(M + μI)⁻¹ g; rounding may cost M its positive roots, then μ is taken tenfold once."""
    damped = matrix.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping)
    factor, broken = torch.linalg.cholesky_ex(damped)
    if broken.any():
        bad = broken > 0
        damped[bad] += 1e-6 * torch.eye(matrix.shape[-1], dtype=matrix.dtype)
        factor[bad] = torch.linalg.cholesky_ex(damped[bad]).L
    return torch.cholesky_solve(goal[..., None], factor)[..., 0]


def _try(problem: LeastSquares, batch: _Batch, step: Theta, box: float) -> None:
    """Move where the loss falls; set damping by how well the model foretold it."""
    trial = (batch.theta + step).clamp(-box, box)
    moved = trial - batch.theta
    loss, pull, gram = batch.normal
    foretold = 2 * (moved * pull).sum(-1) - ((gram @ moved[..., None])[..., 0] * moved).sum(-1)
    new = problem.normal(trial, batch.which)
    gain = loss - new.loss
    ratio = gain / foretold.clamp_min(1e-300)
    taken = (gain > 0) & new.pull.isfinite().all(-1)
    factor = torch.where(ratio > 0.75, 0.1, torch.where(ratio > 0.25, 1.0, 4.0)).to(loss)
    factor = torch.where(taken, factor, torch.full_like(factor, 10.0))
    batch.damping = (batch.damping * factor).clamp_min(LEAST_DAMPING)
    small = taken & (gain <= SLOW * loss / problem.samples)
    batch.slow = torch.where(taken, torch.where(small, batch.slow + 1, 0), batch.slow)
    batch.refused = torch.where(taken, 0, batch.refused + 1)
    for old, fresh in zip((batch.theta, *batch.normal), (trial, *new), strict=True):
        old[taken] = fresh[taken]
