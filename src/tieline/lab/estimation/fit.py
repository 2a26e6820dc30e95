"""Least squares for mixtures of experts, over repetitions and starts at once.

    Ĝ = argmin_G Σ_i w_i (y_i - f_G(x_i))² + λ‖G‖²        P2 eq. 3 and 9, P4 eq. 6

Every problem has a status, and one warning counts those that did not converge. Starts at a radius
that shrinks like n^-1/2 make every loss fall like n^-1/2, whether or not the fit moves.

Least squares of a misspecified model converge to Ḡ and not to the truth: against the truth a loss
of parameters has a floor. Ḡ is found by fitting a large sample without noise from several starts.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import ParameterError, ShapeError, require
from tieline.lab.estimation.model import MoEModel, MoEParameters, draw_inputs
from tieline.lab.estimation.solvers import (
    ADAM,
    SGD,
    LeastSquares,
    Minimum,
    Recipe,
    Status,
    descend,
    levenberg_marquardt,
)

Method = Literal["lm", "sgd", "adam"]
METHODS = ("lm", "sgd", "adam")
FEW_SAMPLES_RIDGE = 1e-3
"""Penalty of unit parameters, as a share of Σ y², where samples are fewer than parameters."""
REFERENCE_SIZE = 1000  # sample size at which a shrinking start has its radius
CLOSED_GATE_BIAS = -6.0  # bias under which a sigmoid gate is off, σ = .0025, and can still be moved


class FitWarning(UserWarning):
    """A fit that did not converge, or that needed a ridge."""


@dataclass(frozen=True)
class ModelRegression:
    """A model as a function of flat parameter vectors, the `Regression` of the solvers."""

    model: MoEModel

    @property
    def size(self) -> int:
        """Length of a parameter vector."""
        return self.model.n_parameters

    def value(self, theta: Tensor, x: Tensor) -> Tensor:
        """Compute f(x)."""
        return self.model.regression(self.model.unflatten(theta), x)

    def value_and_jacobian(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute f(x) and ∂f/∂θ."""
        return self.model.value_and_jacobian(self.model.unflatten(theta), x)


@dataclass(frozen=True, eq=False)
class FitResult:
    """Fits of one data set from S starts, (S,), or of R data sets, (R, S)."""

    params: MoEParameters  # parameters, with those leading axes
    loss: Float[Tensor, "*problems"]  # weighted mean of squared residuals (with the ridge's share)
    status: Int[Tensor, "*problems"]  # a `Status` each
    iterations: Int[Tensor, "*problems"]  # steps tried
    ridge: float = 0.0  # λ that was used

    @property
    def converged(self) -> Bool[Tensor, "*problems"]:
        """Which problems found their minimum."""
        return (self.status >= Status.CONVERGED) & (self.status <= Status.EXACT)

    def endings(self) -> dict[str, int]:
        """Number of problems by status."""
        statuses = self.status.flatten().tolist()
        return {s.name.lower(): statuses.count(s) for s in Status if s in statuses}

    def best(self) -> "FitResult":
        """Select the start of least loss for each data set; NaN counts as infinite."""
        index = self.loss.nan_to_num(nan=torch.inf).argmin(-1, keepdim=True)
        flat = self.params.flatten()
        best_vectors = flat.gather(-2, index[..., None].expand(*index.shape, flat.shape[-1]))[
            ..., 0, :
        ]
        loss, status, steps = (
            values.gather(-1, index)[..., 0] for values in (self.loss, self.status, self.iterations)
        )
        return FitResult(self.params.like(best_vectors), loss, status, steps, self.ridge)


def fit(
    model: MoEModel,
    x: Float[Tensor, "*sets n d"],
    y: Float[Tensor, "*sets n"],
    starts: MoEParameters,
    *,
    method: Method | Recipe = "lm",
    weights: Float[Tensor, "*sets n"] | None = None,
    ridge: float | None = None,
    quiet: bool = False,
    **options: Any,
) -> FitResult:
    """Fit the model to every data set from every start.

    Args:
        model: the family.
        x: inputs of one data set (n, d) or of R of them (R, n, d).
        y: targets (n,) or (R, n).
        starts: (S, ...) for one data set, (R, S, ...) for R.
        method: "lm", "sgd" or "adam", or the recipe of a stochastic descent.
        weights: of the samples.
        ridge: λ; None for zero, or a little where samples are fewer than parameters.
        quiet: suppress the warnings, which only count statuses.
        options: for `levenberg_marquardt`: iterations, tolerance, box.
    """
    if not isinstance(method, Recipe):
        require(method in METHODS, f"method must be one of {METHODS}, got {method!r}")
    model.check(starts)
    sets = tuple(x.shape[:-2])
    shape = tuple(starts.batch_shape)
    require(
        len(sets) <= 1 and len(shape) == len(sets) + 1 and shape[:-1] == sets,
        f"starts are {(*sets, 'S')} for data sets {sets}, got {shape}",
        ShapeError,
    )
    inputs, targets = ((data if sets else data[None]).double() for data in (x, y))
    weight = None if weights is None else (weights if sets else weights[None]).double()
    penalty = _ridge_or_default(model, inputs, targets, ridge, quiet)
    regression = ModelRegression(model)
    problem = LeastSquares(regression, inputs, targets, weight, penalty, shape[-1])
    flat = starts.flatten().reshape(-1, model.n_parameters)
    if method == "lm":
        minimum = levenberg_marquardt(problem, flat, **options)
    else:
        recipe = method if isinstance(method, Recipe) else {"sgd": SGD, "adam": ADAM}[method]
        minimum = descend(problem, flat, recipe)
    result = _fit_result(model, problem, minimum, shape)
    if not quiet:
        warn_unconverged(result.converged)
    return result


def warn_unconverged(converged: Bool[Tensor, "*problems"]) -> None:
    """Warn with the number of problems that did not converge, if any."""
    failed, total = int((~converged).sum()), converged.numel()
    if failed:
        message = f"{failed} of {total} problems did not converge; their status says how they ended"
        warnings.warn(message, FitWarning, stacklevel=3)


def _ridge_or_default(
    model: MoEModel, x: Tensor, y: Tensor, ridge: float | None, quiet: bool
) -> float:
    """The given λ, or a default: zero, or a small one with fewer samples than parameters."""
    require(x.ndim == 3 and y.shape == x.shape[:2], f"x {x.shape} and y {y.shape}", ShapeError)
    if ridge is not None:
        require(ridge >= 0, f"a ridge is not negative, got {ridge}", ParameterError)
        return ridge
    n, p = x.shape[1], model.n_parameters
    if n >= p:
        return 0.0
    penalty = FEW_SAMPLES_RIDGE * y.square().sum(-1).mean().item() / p
    if not quiet:
        message = f"{n} samples for {p} parameters: fitted with a ridge of {penalty:.3g}"
        warnings.warn(message, FitWarning, stacklevel=3)
    return penalty


def _fit_result(
    model: MoEModel, problem: LeastSquares, minimum: Minimum, shape: tuple[int, ...]
) -> FitResult:
    """Reshape the solver's minima to the fits of a batch of data sets."""
    weight = problem.weight
    total = torch.ones_like(problem.x[..., 0]).sum(-1) if weight is None else weight.sum(-1)
    loss = minimum.loss / total.repeat_interleave(problem.starts)
    params = model.unflatten(minimum.theta.reshape(*shape, model.n_parameters))
    status, steps = minimum.status.reshape(shape), minimum.iterations.reshape(shape)
    return FitResult(params, loss.reshape(shape), status, steps, problem.ridge)


@dataclass(frozen=True, eq=False)
class PopulationFit:
    """The population minimiser Ḡ and the number of starts that agree on it."""

    params: MoEParameters  # Ḡ
    misfit: float  # ‖f_Ḡ - q‖ on the sample; zero where the model contains the truth
    starts: FitResult  # the end of every start, that of least loss being Ḡ
    agree: int  # starts whose misfit is within 1 % of the least


def population_minimiser(
    model: MoEModel,
    target: Callable[[Tensor], Tensor],
    *,
    near: MoEParameters | None = None,
    radius: float = 0.1,
    n: int = 50_000,
    starts: int = 8,
    refine: int = 0,
    seed: int = 0,
) -> PopulationFit:
    """Find Ḡ = argmin_G ‖f_G - q‖_{L²(μ)} for q = `target` (P2 section 4, P4 Cor. 1).

    Args:
        model: the family that is fitted.
        target: q, from inputs (n, d) to (n,).
        near: the first start, the others being within `radius` of it; random starts without.
        radius: of the starts near them.
        n: samples without noise.
        starts: how many.
        refine: samples of a second fit, from the best of the first; 0 for none. Ḡ has the sampling
            error of a fit to that many samples, which must exceed the samples of any study.
        seed: of sample and starts.
    """
    require(starts >= 1 and n >= model.n_parameters, f"need {starts=} >= 1 and {n=} >= parameters")
    x = draw_inputs("uniform", n, model.d, seed)
    if near is None:
        first_starts = random_start(model, [seed], starts)[0]
    else:
        flat = near_truth(near, radius, [seed], starts).flatten()[0]
        flat[0] = near.flatten()
        first_starts = near.like(flat)
    fits = fit(model, x, target(x), first_starts, quiet=True)
    best = fits.best()
    least = best.loss.clamp_min(0).sqrt()
    agree = int((fits.loss.clamp_min(0).sqrt() <= 1.01 * least + 1e-12).sum())
    if refine:
        x = draw_inputs("uniform", refine, model.d, seed + 1)
        best = fit(model, x, target(x), best.params.expand(1), quiet=True).best()
    return PopulationFit(best.params, math.sqrt(max(best.loss.item(), 0.0)), fits, agree)


def start_radius_at(radius: float, n: int, *, shrink: bool = False) -> float:
    """Start radius at sample size n: r, or r √(1000/n) if starts shrink like the estimate."""
    require(radius >= 0, f"a start radius is not negative, got {radius}")
    return radius * math.sqrt(REFERENCE_SIZE / n) if shrink else radius


def near_truth(
    truth: MoEParameters, radius: float, seeds: list[int], starts: int = 1
) -> MoEParameters:
    """Starts θ* + r ξ for each seed, (seeds, starts, ...); the papers do not state their r."""
    centre = truth.flatten()
    draws = [_normal_draws((starts, len(centre)), seed) for seed in seeds]
    return truth.like(centre + radius * torch.stack(draws))


def random_start(
    model: MoEModel, seeds: list[int], starts: int = 1, scale: float = 1.0
) -> MoEParameters:
    """Starts with every coordinate from N(0, scale²), (seeds, starts, ...)."""
    draws = [_normal_draws((starts, model.n_parameters), seed) for seed in seeds]
    return model.unflatten(scale * torch.stack(draws))


def kmeans_start(
    model: MoEModel, x: Float[Tensor, "n d"], y: Float[Tensor, " n"], seed: int = 0, starts: int = 1
) -> MoEParameters:
    """Starts from runs of k-means, (starts, ...); needs scikit-learn.

    With κ = 1/(2 mean squared distance to the centre per coordinate), a linear router with rows
    2κc and bias -κ‖c‖² gives the posterior of spherical clusters; cosine rows are the centres;
    a matrix A begins at zero.
    """
    require(len(x) >= model.n_experts, f"{model.n_experts} experts need as many samples: {len(x)}")
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    vectors = []
    for start in range(starts):
        n_init: Any = 1  # scikit-learn's annotation of `n_init` allows "auto" only
        kmeans = KMeans(model.n_experts, n_init=n_init, random_state=seed + start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct samples: allowed
            clusters = kmeans.fit(x.numpy())
        centres = torch.from_numpy(clusters.cluster_centers_)
        label = torch.from_numpy(clusters.labels_).long()
        vectors.append(_parameters_from_clusters(model, x, y, centres, label).flatten())
    return model.unflatten(torch.stack(vectors))


def lift_truth(model: MoEModel, truth: MoEParameters) -> MoEParameters:
    """Express the truth with the model's number of atoms by repeating the last ones.

    Under softmax, copies share the mass exp β_0 equally and f does not change. Under the sigmoid
    the same holds for σ(c) of an atom with a zero row, which the papers put last; other atoms
    cannot be split, and their copies are switched off (c = -6).
    """
    n_true, n = truth.n_experts, model.n_experts
    require(n_true <= n, f"{n_true} atoms do not fit into {n}")
    index = torch.cat([torch.arange(n_true), n_true - 1 - torch.arange(n - n_true) % n_true])
    shares = torch.bincount(index, minlength=n_true)[index].to(truth.bias)
    lifted = truth.take(index)
    if model.link == "softmax":
        return MoEParameters(lifted.router, lifted.bias - shares.log(), lifted.experts)
    gated, copy = (lifted.router != 0).any(-1), torch.arange(n) >= n_true
    split = torch.where(shares > 1, torch.logit(lifted.bias.sigmoid() / shares), lifted.bias)
    copy_bias = torch.where(copy, CLOSED_GATE_BIAS, lifted.bias)
    return MoEParameters(lifted.router, torch.where(gated, copy_bias, split), lifted.experts)


def _normal_draws(shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw standard normal numbers from a seed, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _parameters_from_clusters(
    model: MoEModel, x: Tensor, y: Tensor, centres: Tensor, label: Tensor
) -> MoEParameters:
    """Router rows and biases from cluster centres, experts from a regression per cluster."""
    sharp = 1 / (2 * (x - centres[label]).square().mean().clamp_min(1e-12))
    rows, bias = x.new_zeros(len(centres), model.router_dim), x.new_zeros(len(centres))
    if model.gate in ("cosine", "perturbed"):
        rows[:] = centres
    elif model.gate != "partial":
        rows[:, -model.d :] = 2 * sharp * centres
        bias = -sharp * centres.square().sum(-1)
    clusters = [label == i for i in range(len(centres))]
    experts = torch.stack([_ridge_regression(x[inside], y[inside]) for inside in clusters])
    if model.expert == "two_layer":
        experts = torch.cat([experts, x.new_ones(len(centres), 1)], dim=-1)
    return MoEParameters(rows, bias - bias.mean(), experts)


def _ridge_regression(x: Tensor, y: Tensor) -> Tensor:
    """(a, b) of y ≈ a·x + b by ridge regression, zeros without data."""
    design = torch.cat([x, x.new_ones(len(x), 1)], dim=-1)
    gram = design.T @ design + 1e-3 * (1 + len(x)) * torch.eye(design.shape[1]).to(x)
    return torch.linalg.solve(gram, design.T @ y)
