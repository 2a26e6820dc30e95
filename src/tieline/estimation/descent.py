"""Stochastic gradient descent and Adam for many problems at once, as the papers fit.

Paper 2 (App. E.1) runs SGD over 10 epochs at rate 0.1 on the mean squared error; it states neither
the size of a minibatch nor how near to the truth it starts. Adam is the usual other choice. Both
stop by count, not by success, so that their end is judged as that of every solver: a problem has
converged if its relative offset (`levenberg`) is small, and is unfinished otherwise.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tieline.errors import require
from tieline.estimation.levenberg import BOX, Minimum, Status, relative_offset
from tieline.estimation.problem import LeastSquares, Theta

__all__ = ["ADAM", "SGD", "Recipe", "descend"]


@dataclass(frozen=True)
class Recipe:
    """How to descend.

    Attributes:
        rule: "sgd" or "adam".
        epochs: passes over the data.
        rate: step size.
        batch: samples in a minibatch.
        decay: Adam's two factors of forgetting.
    """

    rule: Literal["sgd", "adam"] = "sgd"
    epochs: int = 10
    rate: float = 0.1
    batch: int = 64
    decay: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        require(self.rule in ("sgd", "adam"), f"rule must be sgd or adam, got {self.rule!r}")
        counts = self.epochs >= 1 and self.batch >= 1 and self.rate > 0
        require(counts, f"epochs, batch and rate are positive, got {self}")


SGD = Recipe()
"""The papers' recipe; the minibatch is ours."""
ADAM = Recipe("adam", epochs=50, rate=0.01)


def descend(
    problem: LeastSquares,
    starts: Theta,
    recipe: Recipe = SGD,
    *,
    seed: int = 0,
    tolerance: float = 0.05,
    box: float = BOX,
) -> Minimum:
    """Follow minibatch gradients of the mean squared error from every start.

    Args:
        problem: data and regression function of B problems.
        starts: first parameters of each.
        recipe: rule, epochs, rate and minibatch.
        seed: of the order of samples, which all problems share.
        tolerance: relative offset up to which the end counts as converged.
        box: bound on every |θ|.
    """
    theta, which = starts.clamp(-box, box), torch.arange(len(starts))
    generator = torch.Generator().manual_seed(seed)
    memory = torch.zeros_like(theta), torch.zeros_like(theta)
    steps = 0
    for _ in range(recipe.epochs):
        order = torch.randperm(problem.samples, generator=generator)
        for rows in order.split(recipe.batch):
            steps += 1
            slope = -2 * problem.pull(theta, which, rows)
            theta = (theta - _move(slope, memory, steps, recipe)).clamp(-box, box)
    return _judged(problem, theta, steps, tolerance, box)


def _move(slope: Tensor, memory: tuple[Tensor, Tensor], steps: int, recipe: Recipe) -> Tensor:
    """The step that the rule takes for a gradient."""
    if recipe.rule == "sgd":
        return recipe.rate * slope
    mean, square = memory
    first, second = recipe.decay
    mean.lerp_(slope, 1 - first)
    square.lerp_(slope.square(), 1 - second)
    spread = (square / (1 - second**steps)).sqrt() + 1e-8
    return recipe.rate * (mean / (1 - first**steps)) / spread


def _judged(
    problem: LeastSquares, theta: Theta, steps: int, tolerance: float, box: float
) -> Minimum:
    """The end of a descent, with the status that its offset gives."""
    offset, loss = relative_offset(problem, theta.nan_to_num(nan=box), box)
    status = torch.full((len(theta),), int(Status.UNFINISHED))
    status[offset <= tolerance] = Status.CONVERGED
    status[~(loss.isfinite() & theta.isfinite().all(-1))] = Status.FAILED
    return Minimum(theta, loss, status, torch.full_like(status, steps))
