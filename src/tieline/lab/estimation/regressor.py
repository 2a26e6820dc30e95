"""`MoERegressor`: a mixture of experts as a scikit-learn estimator.

    f(x) = Σ_i G_i(x) h(x, η_i)

Gates and experts are those of papers 2 and 4 (`MoEModel`); the fit is least squares from several
starts (`mixture_fit`). Needs scikit-learn: `pip install 'tieline[estimation]'`.

Rows are made distinct and standardised before the fit:

    x ↦ (x - mean) / sd         by weighted mean and standard deviation; a constant column is 0
    y ↦ (y - offset) / scale    by the range of the experts:

    experts                                 offset      scale
    linear, two-layer, odd powers           mean        sd
    tanh                                    mid-range   half the range
    relu, gelu, even powers                 minimum     sd

Equal rows become one row with the sum of their weights, and rows are sorted. So the fit does not
depend on the order of the rows, and a row of weight 2 is the same as two rows.

`routing_measures` treats a fitted mixture as a router whose logits are the scores of its gate and
which chooses the expert with the largest score, so a regression has the margins, boundary mass and
flip rates that `tieline inspect` reports for the layers of a model.
"""

import math
import warnings
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import check_cv
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from tieline.core.ranking import stable_topk
from tieline.lab.estimation.mixture_fit import (
    FEW_ROWS_RIDGE,
    FitSettings,
    MixtureFit,
    SharedGate,
    WeightedRows,
    cross_validation_curve,
    fit_dendrogram,
    fit_mixture,
    sample_rows,
)
from tieline.lab.estimation.model import EXPERTS, GATES, LINKS, RIDGES, MoEModel, MoEParameters
from tieline.measure.distance import expert_distances, nearest_tie
from tieline.measure.measures import LayerMeasures, measure_layer
from tieline.trace.record import LayerFacts, LayerTrace

CHOICES = {
    "gating": GATES,
    "link": LINKS,
    "expert": EXPERTS,
    "activation": tuple(RIDGES),
    "selection": ("cv", "dendrogram"),
}
COUNTS = ("power", "n_init", "max_iter", "max_experts")
MOST_KEPT_ROWS = 16384  # training rows kept for `inspect`

Array = NDArray[np.float64]


class MoERegressor(RegressorMixin, MultiOutputMixin, BaseEstimator):
    """Mixture-of-experts regression by least squares.

    Inputs and targets are standardised inside; parameters are in standard units, predictions in
    those of y. Several outputs share the gate and have experts of their own. `fit` validates the
    settings.

    Args:
        n_experts: number of experts, or "auto".
        gating: "linear", "cosine", "perturbed", "quadratic" or "partial" scores.
        link: "softmax" (weights sum to 1) or "sigmoid" (independent weights).
        expert: "linear", "polynomial", "relu", "gelu", "tanh" or "two_layer".
        power: p of polynomial experts.
        activation: "linear", "relu", "gelu" or "tanh", of two-layer experts.
        tau: (τ1, τ2) of the perturbed cosine.
        n_init: starts; the first begins at a tree of linear models, the others at random.
        max_iter: steps of a start; those on samples of a large table are counted apart.
        tol: a start ends when five steps lower its loss by less than this share of it.
        ridge: λ of the penalty λ‖θ‖² beside the mean squared error, in standard units; "auto" is
            1e-10, or 1e-3 with a warning where there are fewer distinct targets than parameters.
        selection: how "auto" counts experts: "cv" or "dendrogram" (see `mixture_fit`).
        max_experts: the most that "auto" tries.
        cv: folds of selection "cv", as everywhere in scikit-learn.
        random_state: seed of starts, samples of rows and folds.

    Attributes:
        n_experts_: number of experts.
        gating_: `MoEParameters` of the gate and of the experts of the first output.
        experts_: expert rows (E, q), or (C, E, q) if y had two axes; a, b (and λ) in this order.
        loss_: mean squared error on the training rows, in standard units.
        status_: "converged", "unfinished", "stalled" or "failed".
        n_iter_: steps of the fit that was kept.
        fit_: `MixtureFit`, with the status of every start.
        scales_: units of inputs and targets.
        selection_: `ExpertCurve` or `Dendrogram` where the number was chosen, else None.
        n_features_in_: dimension of an input.
        feature_names_in_: names of the inputs, where they had any.
    """

    n_features_in_: int

    def __init__(
        self,
        n_experts: Any = 4,
        *,
        gating: Any = "linear",
        link: Any = "softmax",
        expert: Any = "linear",
        power: Any = 2,
        activation: Any = "relu",
        tau: Any = (0.1, 0.1),
        n_init: Any = 4,
        max_iter: Any = 200,
        tol: Any = 1e-3,
        ridge: Any = "auto",
        selection: Any = "cv",
        max_experts: Any = 8,
        cv: Any = 5,
        random_state: Any = None,
    ) -> None:
        self.n_experts = n_experts
        self.gating = gating
        self.link = link
        self.expert = expert
        self.power = power
        self.activation = activation
        self.tau = tau
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.ridge = ridge
        self.selection = selection
        self.max_experts = max_experts
        self.cv = cv
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "MoERegressor":
        """Fit to inputs (n, D), targets (n) or (n, C); a row of weight 2 counts as two rows."""
        check_settings(self)
        checked: Any = validate_data(
            self, X, y, multi_output=True, y_numeric=True, dtype=np.float64
        )
        inputs, targets = checked
        weight = _check_sample_weight(
            sample_weight, inputs, dtype=np.float64, ensure_non_negative=True
        )
        self._flat = targets.ndim == 1
        table = distinct_rows(inputs, targets.reshape(len(inputs), -1).astype(np.float64), weight)
        seed = int(check_random_state(self.random_state).randint(2**31))
        count = 1 if self.n_experts == "auto" else int(self.n_experts)
        if len(inputs) < count:
            raise ValueError(
                f"n_experts={count} must not exceed the number of samples, "
                f"got n_samples={len(inputs)}"
            )
        family = self._model_family(count)
        rows, self.scales_ = standardised(*table, family)
        ridge = None if self.ridge == "auto" else float(self.ridge)
        counts = int(self.n_init), int(self.max_iter)
        settings = FitSettings(*counts, float(self.tol), ridge, seed)
        self.n_experts_ = self._choose_count(family, rows, settings)
        regression = SharedGate(family.with_experts(self.n_experts_), rows.y.shape[1])
        self._store_fit(regression, rows, fit_mixture(regression, rows, settings))
        self._warn_about_fit(regression, rows)
        return self

    def predict(self, X: Any) -> Array:
        """Predict f(x), of the shape of y."""
        x = self._standardised_inputs(X)
        predicted = self.scales_.in_target_units(
            self._regression.value(self.fit_.theta[None], x[None])[0]
        )
        return predicted[:, 0].numpy() if self._flat else predicted.numpy()

    def predict_gates(self, X: Any) -> Array:
        """Return G (n, E), the weight of every expert in every row; softmax weights sum to 1."""
        return self._regression.model.weights(self.gating_, self._standardised_inputs(X)).numpy()

    def predict_experts(self, X: Any) -> Array:
        """Predict by each expert alone, (n, E) or (n, E, C), in the units of y."""
        x = self._standardised_inputs(X)
        outputs = self._regression.model.expert_outputs(self._parameters, x).permute(1, 2, 0)
        inside = self.scales_.in_target_units(outputs)
        return inside[:, :, 0].numpy() if self._flat else inside.numpy()

    def inspect(self, X: Any = None, *, k: int = 1) -> LayerMeasures:
        """Measure a gate of the k largest scores on X, or on up to 16,384 rows of the fit."""
        check_is_fitted(self)
        x = self._training_inputs if X is None else self._standardised_inputs(X)
        return routing_measures(self._regression.model, self.gating_, x, k=k)

    def _model_family(self, n_experts: int) -> MoEModel:
        """Build the model family of the settings."""
        return MoEModel(
            gate=self.gating,
            link=self.link,
            expert=self.expert,
            d=self.n_features_in_,
            n_experts=n_experts,
            tau=(float(self.tau[0]), float(self.tau[1])),
            power=int(self.power),
            activation=self.activation,
        )

    def _choose_count(self, family: MoEModel, rows: WeightedRows, settings: FitSettings) -> int:
        """Return the number of experts, chosen from the data for "auto"."""
        self.selection_ = None
        if self.n_experts != "auto":
            return family.n_experts
        sample = sample_rows(rows, settings.seed)
        most = min(int(self.max_experts), len(sample.x))
        if self.selection == "dendrogram" and most >= 2:
            self.selection_ = fit_dendrogram(family, sample, most, settings)
        else:
            order = np.random.RandomState(settings.seed).permutation(len(sample.x))
            splitter: Any = check_cv(self.cv, None)
            folds = [
                (torch.tensor(order[train]), torch.tensor(order[test]))
                for train, test in splitter.split(sample.x[order])
            ]
            self.selection_ = cross_validation_curve(family, sample, most, folds, settings)
        return self.selection_.chosen

    def _store_fit(self, regression: SharedGate, rows: WeightedRows, fit: MixtureFit) -> None:
        """Set the attributes that a fit gives."""
        self._regression, self.fit_ = regression, fit
        self._training_inputs = rows.x[:: max(1, -(-len(rows.x) // MOST_KEPT_ROWS))]
        self.gating_ = self._parameters[0]
        experts = self._parameters.experts.numpy()
        self.experts_ = experts[0] if self._flat else experts
        self.loss_, self.status_ = fit.error, fit.status
        self.n_iter_ = max(1, fit.iterations)

    @property
    def _parameters(self) -> MoEParameters:
        """Parameters of every output (C, ...)."""
        return self._regression.parameters(self.fit_.theta[None])[0]

    def _standardised_inputs(self, X: Any) -> torch.Tensor:
        """Validated inputs in standard units."""
        check_is_fitted(self)
        array = validate_data(self, X, reset=False, dtype=np.float64)
        return self.scales_.inputs(torch.tensor(array))

    def _warn_about_fit(self, regression: SharedGate, rows: WeightedRows) -> None:
        """Warn about too few rows and about starts that did not converge."""
        targets = rows.y.numel()
        if targets < regression.size and self.ridge == "auto":
            warnings.warn(
                f"{targets} distinct targets for {regression.size} parameters: fitted with a ridge "
                f"of {FEW_ROWS_RIDGE:g} in standard units; fewer experts, a simpler gate or a "
                "ridge of your own are better",
                UserWarning,
                stacklevel=3,
            )
        fit = self.fit_
        if fit.failed:
            verb = "was" if fit.status == "converged" else "was not"
            warnings.warn(
                f"{fit.failed} of {len(fit.starts)} starts did not converge "
                f"({fit.failures()}); the one that is kept {verb} among those that did. "
                f"max_iter={self.max_iter} and tol={self.tol} decide",
                ConvergenceWarning,
                stacklevel=3,
            )


def check_settings(estimator: Any) -> None:
    """Raise for a setting out of range, naming its value and its rule."""
    for name, allowed in CHOICES.items():
        value = getattr(estimator, name)
        choices = ", ".join(repr(word) for word in allowed)
        _require_setting(
            isinstance(value, str) and value in allowed, estimator, name, f"among {{{choices}}}"
        )
    for name in COUNTS:
        _require_setting(_is_count(getattr(estimator, name)), estimator, name, "an int >= 1")
    count = estimator.n_experts
    _require_setting(
        _is_count(count) or count == "auto", estimator, "n_experts", "an int >= 1 or 'auto'"
    )
    _require_setting(_is_real(estimator.tol), estimator, "tol", "a finite number >= 0")
    ridge = estimator.ridge
    fine = ridge == "auto" if isinstance(ridge, str) else _is_real(ridge)
    _require_setting(fine, estimator, "ridge", "a finite number >= 0 or 'auto'")
    tau = estimator.tau
    pair = isinstance(tau, tuple | list) and len(tau) == 2 and all(_is_real(t) for t in tau)
    _require_setting(pair, estimator, "tau", "two finite numbers >= 0")


def _is_count(value: Any) -> bool:
    """Whether a setting is an integer of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_real(value: Any) -> bool:
    """Whether a setting is finite and not negative."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and 0 <= float(value) < math.inf


def _require_setting(fine: bool, estimator: Any, name: str, rule: str) -> None:
    """Raise the error of scikit-learn for a setting that breaks its rule."""
    if not fine:
        raise ValueError(
            f"The {name!r} parameter of {type(estimator).__name__} must be {rule}. "
            f"Got {getattr(estimator, name)!r} instead."
        )


class Scales(NamedTuple):
    """Units of inputs and targets."""

    x_offset: Float[Tensor, " dim"]
    x_scale: Float[Tensor, " dim"]
    y_offset: Float[Tensor, " outputs"]
    y_scale: Float[Tensor, " outputs"]

    def inputs(self, x: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """Standardise inputs."""
        return (x - self.x_offset) / self.x_scale

    def targets(self, y: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows outputs"]:
        """Standardise targets."""
        return (y - self.y_offset) / self.y_scale

    def in_target_units(self, y: Float[Tensor, "*rows outputs"]) -> Float[Tensor, "*rows outputs"]:
        """Convert standardised targets to their own units."""
        return self.y_offset + self.y_scale * y


def distinct_rows(x: Array, y: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Merge equal rows (x, y) of positive weight, adding their weights; rows are sorted."""
    kept = weight > 0
    table, mass = np.hstack([x[kept], y[kept]]), weight[kept]
    order = np.lexsort(table.T)
    table, mass = table[order], mass[order]
    fresh = np.ones(len(table), dtype=bool)
    fresh[1:] = (table[1:] != table[:-1]).any(axis=1)
    first = np.flatnonzero(fresh)
    return table[first, : x.shape[1]], table[first, x.shape[1] :], np.add.reduceat(mass, first)


def standardised(x: Array, y: Array, weight: Array, model: MoEModel) -> tuple[WeightedRows, Scales]:
    """Standardise rows, with weights of mean 1; return them with their units."""
    inputs, targets, mass = (torch.tensor(array, dtype=torch.float64) for array in (x, y, weight))
    mass = mass / mass.mean()
    scales = Scales(*_column_moments(inputs, mass), *_target_units(targets, mass, model))
    return WeightedRows(scales.inputs(inputs), scales.targets(targets), mass), scales


def _column_moments(values: Tensor, sample_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation of each column, 1 for a constant one."""
    share = (sample_weight / sample_weight.sum())[:, None]
    mean = (share * values).sum(dim=0)
    deviation = (share * (values - mean).square()).sum(dim=0).sqrt()
    rounding_error = 1e-14 * values.abs().amax(dim=0)
    return mean, torch.where(deviation > rounding_error, deviation, 1.0)


def _target_units(targets: Tensor, mass: Tensor, model: MoEModel) -> tuple[Tensor, Tensor]:
    """Offset and scale of the targets, by the table above."""
    mean, deviation = _column_moments(targets, mass)
    low, high = targets.amin(dim=0), targets.amax(dim=0)
    if model.expert == "tanh":
        return (low + high) / 2, torch.where(high > low, (high - low) / 2, 1.0)
    even = model.expert == "polynomial" and model.power % 2 == 0
    return (low if model.expert in ("relu", "gelu") or even else mean), deviation


def routing_measures(
    model: MoEModel, params: MoEParameters, x: Float[Tensor, "rows d"], *, k: int = 1
) -> LayerMeasures:
    """Measure top-k routing by the gate of a mixture on rows x, in the units of the parameters.

    Distances to the nearest tie are exact for linear gates and missing for the others.
    """
    scores = model.scores(params, x)
    ranked = stable_topk(scores, model.n_experts)
    linear = model.gate == "linear"
    distance = nearest_tie(scores, k, expert_distances(params.router), ranked).distance
    trace = LayerTrace(
        name="gate",
        facts=LayerFacts(model.n_experts, k, affine=linear),
        experts=ranked.indices,
        scores=ranked.values,
        weights=model.weights(params, x).gather(1, ranked.indices[:, :k]),
        distance=distance if linear else None,
        inputs=x,
    )
    return measure_layer(trace, weight=params.router if linear else None)
