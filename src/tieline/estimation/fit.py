"""Least squares for mixtures of experts, over repetitions and starts at once.

    Ĝ = argmin_G Σ_i w_i (y_i - f_G(x_i))² + λ‖G‖²        P2 eq. 3 and 9, P4 eq. 6

fit          from given starts, by Levenberg-Marquardt ("lm"), the papers' SGD ("sgd") or "adam"
FitResult    parameters, loss and status of every problem; `best()` takes the best start of each
             data set

A problem that did not converge says so in its status, and one warning says how many of how many.
"""

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.errors import ParameterError, ShapeError, require
from tieline.estimation.descent import ADAM, SGD, Recipe, descend
from tieline.estimation.levenberg import Minimum, Status, levenberg_marquardt
from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters
from tieline.estimation.problem import LeastSquares

__all__ = ["METHODS", "FitResult", "FitWarning", "ModelRegression", "fit", "tell_failures"]

Method = Literal["lm", "sgd", "adam"]
METHODS = ("lm", "sgd", "adam")
LITTLE = 1e-3
"""Share of the data's sum of squares that unit parameters cost where samples are too few."""


class FitWarning(UserWarning):
    """A fit that did not converge, or that needed a ridge."""


@dataclass(frozen=True)
class ModelRegression:
    """A model as a function of flat parameter vectors, as the solvers want it."""

    model: MoEModel

    @property
    def size(self) -> int:
        """Length of a parameter vector."""
        return self.model.n_parameters

    def value(self, theta: Tensor, x: Tensor) -> Tensor:
        """F(x)."""
        return self.model.regression(self.model.unflatten(theta), x)

    def value_and_jacobian(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """F(x) and ∂f/∂θ."""
        return self.model.value_and_jacobian(self.model.unflatten(theta), x)


@dataclass(frozen=True, eq=False)
class FitResult:
    """Fits of one data set from S starts, (S,), or of R data sets, (R, S).

    Attributes:
        params: parameters, with those leading axes.
        loss: weighted mean of squared residuals (with the ridge's share).
        status: a `Status` each.
        iterations: steps tried.
        ridge: λ that was used.
    """

    params: MoEParameters
    loss: Float[Tensor, "*problems"]
    status: Int[Tensor, "*problems"]
    iterations: Int[Tensor, "*problems"]
    ridge: float = 0.0

    @property
    def converged(self) -> Bool[Tensor, "*problems"]:
        """Which problems found a minimum."""
        return (self.status >= Status.CONVERGED) & (self.status <= Status.EXACT)

    def words(self) -> dict[str, int]:
        """How many problems ended in which way."""
        found = self.status.flatten().tolist()
        return {s.name.lower(): found.count(s) for s in Status if s in found}

    def best(self) -> "FitResult":
        """The start of least loss of each data set; a loss that is no number never wins."""
        at = self.loss.nan_to_num(nan=torch.inf).argmin(-1, keepdim=True)
        flat = self.params.flatten()
        chosen = flat.gather(-2, at[..., None].expand(*at.shape, flat.shape[-1]))[..., 0, :]
        loss, status, steps = (
            part.gather(-1, at)[..., 0] for part in (self.loss, self.status, self.iterations)
        )
        return FitResult(self.params.like(chosen), loss, status, steps, self.ridge)


def fit(
    model: MoEModel,
    x: Float[Tensor, "*sets n d"],
    y: Float[Tensor, "*sets n"],
    starts: MoEParameters,
    *,
    method: Method = "lm",
    weights: Float[Tensor, "*sets n"] | None = None,
    ridge: float | None = None,
    seed: int = 0,
    recipe: Recipe | None = None,
    quiet: bool = False,
    **options: Any,
) -> FitResult:
    """Fit the model to every data set from every start.

    Args:
        model: the family.
        x: inputs of one data set (n, d) or of R of them (R, n, d).
        y: targets (n,) or (R, n).
        starts: (S, ...) for one data set, (R, S, ...) for R.
        method: "lm", "sgd" or "adam".
        weights: of the samples.
        ridge: λ; None for zero, or a little where samples are fewer than parameters.
        seed: of the order of samples, for sgd and adam.
        recipe: for sgd and adam, instead of the default.
        quiet: no warning; the statuses say it all.
        options: for `levenberg_marquardt`: iterations, tolerance, box.
    """
    require(method in METHODS, f"method must be one of {METHODS}, got {method!r}")
    model.check(starts)
    sets = tuple(x.shape[:-2])
    shape = tuple(starts.batch_shape)
    require(
        len(sets) <= 1 and len(shape) == len(sets) + 1 and shape[:-1] == sets,
        f"starts are {(*sets, 'S')} for data sets {sets}, got {shape}",
        ShapeError,
    )
    inputs, targets = _stacked(x, sets), _stacked(y, sets)
    weight = None if weights is None else _stacked(weights, sets)
    penalty = _ridge(model, inputs, targets, ridge, quiet)
    regression = ModelRegression(model)
    problem = LeastSquares(regression, inputs, targets, weight, penalty, shape[-1])
    flat = starts.flatten().reshape(-1, model.n_parameters)
    if method == "lm":
        found = levenberg_marquardt(problem, flat, **options)
    else:
        found = descend(problem, flat, recipe or (SGD if method == "sgd" else ADAM), seed=seed)
    result = _result(model, problem, found, shape)
    if not quiet:
        tell_failures(result.converged)
    return result


def tell_failures(converged: Bool[Tensor, "*problems"]) -> None:
    """Warn of the problems that did not converge, if there are any."""
    failed, total = int((~converged).sum()), converged.numel()
    if failed:
        words = f"{failed} of {total} problems did not converge; their status says how they ended"
        warnings.warn(words, FitWarning, stacklevel=3)


def _stacked(part: Tensor, sets: tuple[int, ...]) -> Tensor:
    """The data in float64 with an axis of data sets."""
    return (part if sets else part[None]).double()


def _ridge(model: MoEModel, x: Tensor, y: Tensor, ridge: float | None, quiet: bool) -> float:
    """The λ asked for, or one for a problem that has fewer samples than parameters."""
    require(x.ndim == 3 and y.shape == x.shape[:2], f"x {x.shape} and y {y.shape}", ShapeError)
    if ridge is not None:
        require(ridge >= 0, f"a ridge is not negative, got {ridge}", ParameterError)
        return ridge
    n, p = x.shape[1], model.n_parameters
    if n >= p:
        return 0.0
    chosen = LITTLE * y.square().sum(-1).mean().item() / p
    if not quiet:
        words = f"{n} samples for {p} parameters: fitted with a ridge of {chosen:.3g}"
        warnings.warn(words, FitWarning, stacklevel=3)
    return chosen


def _result(
    model: MoEModel, problem: LeastSquares, found: Minimum, shape: tuple[int, ...]
) -> FitResult:
    total = torch.full((problem.x.shape[0],), float(problem.samples)).double()
    if problem.weight is not None:
        total = problem.weight.sum(-1)
    loss = found.loss / total.repeat_interleave(problem.starts)
    params = model.unflatten(found.theta.reshape(*shape, model.n_parameters))
    status, steps = found.status.reshape(shape), found.iterations.reshape(shape)
    return FitResult(params, loss.reshape(shape), status, steps, problem.ridge)
