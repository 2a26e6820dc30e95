"""`MoERegressor`: scikit-learn's own checks, then what a mixture adds to them."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import tieline.lab.estimation
from tests.lab.estimation.tables import piecewise, steps
from tieline.lab.estimation.regressor import MoERegressor
from tieline.lab.geometry import boundary_mass_top

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*distinct targets for:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*starts did not converge"),
]
QUICK = {"n_experts": 2, "n_init": 1, "max_iter": 20, "random_state": 0}


@parametrize_with_checks([MoERegressor(n_experts=2, n_init=1, max_iter=10)])
def test_scikit_learn_checks(estimator, check, no_axis_checks):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [MoERegressor(), MoERegressor(link="sigmoid"), MoERegressor(expert="gelu", gating="perturbed")]
)
def test_scikit_learn_checks_of_other_settings(estimator, check, no_axis_checks):
    check(estimator)


def test_a_mixture_reaches_the_noise_where_a_line_cannot(no_axis_checks):
    x, y, _ = piecewise(4000, 4, 3, 0.2)
    model = MoERegressor(3, n_init=2, random_state=0).fit(x[:2000], y[:2000])
    line = LinearRegression().fit(x[:2000], y[:2000])
    error = np.mean((model.predict(x[2000:]) - y[2000:]) ** 2)
    assert error < 1.5 * 0.2**2
    assert error < 0.1 * np.mean((line.predict(x[2000:]) - y[2000:]) ** 2)
    assert model.score(x[2000:], y[2000:]) > 0.97
    assert model.status_ == "converged"
    assert model.loss_ * y[:2000].var() == pytest.approx(
        np.mean((model.predict(x[:2000]) - y[:2000]) ** 2)
    )


def test_predictions_are_gates_times_experts():
    x, y, _ = piecewise(300, 2, 2, 0.1)
    model = MoERegressor(**QUICK).fit(x, y)
    gates, experts = model.predict_gates(x), model.predict_experts(x)
    assert gates.shape == experts.shape == (300, 2)
    assert np.allclose(gates.sum(axis=1), 1)
    assert np.allclose((gates * experts).sum(axis=1), model.predict(x))


def test_learnt_attributes():
    x, y, _ = piecewise(300, 2, 2, 0.1)
    model = MoERegressor(**QUICK).fit(x, y)
    assert model.n_experts_ == 2
    assert model.n_features_in_ == 2
    assert model.experts_.shape == (2, 3)
    assert tuple(model.gating_.router.shape) == (2, 2)
    assert model.selection_ is None
    assert model.fit_.starts == (model.status_,)
    assert 1 <= model.n_iter_ <= 20
    linear = model.scales_.inputs(torch.tensor(x)).numpy() @ model.experts_[:, :2].T
    inside = model.scales_.y_offset.item() + model.scales_.y_scale.item() * (
        linear + model.experts_[:, 2]
    )
    assert np.allclose(inside, model.predict_experts(x))


def test_outputs_share_a_gate_and_units_do_not_matter():
    x, y, _ = piecewise(500, 2, 2, 0.1, outputs=2)
    y = y * [1.0, 1e4] + [0.0, -3e5]
    model = MoERegressor(**QUICK).fit(x * 1e3, y)
    assert model.predict(x * 1e3).shape == (500, 2)
    assert model.predict_experts(x * 1e3).shape == (500, 2, 2)
    assert model.experts_.shape == (2, 2, 3)
    assert model.score(x * 1e3, y) > 0.95


def test_weights_choose_the_rows_that_count():
    x, y, _ = steps(400, 0.0)
    left = x[:, 0] < 0
    model = MoERegressor(**{**QUICK, "n_experts": 1}).fit(x, y, sample_weight=left.astype(float))
    assert np.allclose(model.predict(x[left]), 2 * x[left, 0], atol=1e-6)
    again = MoERegressor(**{**QUICK, "n_experts": 1}).fit(x, y, sample_weight=9.0 * left)
    assert np.allclose(again.predict(x), model.predict(x))


def test_a_seed_repeats_a_fit():
    x, y, _ = piecewise(200, 3, 3, 0.5)
    settings = {**QUICK, "n_experts": 3, "n_init": 3, "max_iter": 5}
    first, second = (MoERegressor(**settings).fit(x, y).predict(x) for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("selection", ["cv", "dendrogram"])
def test_the_number_of_experts_is_found(selection, no_axis_checks):
    x, y, _ = piecewise(500, 2, 2, 0.1)
    model = MoERegressor("auto", selection=selection, max_experts=3, n_init=1, max_iter=30, cv=3,
                         random_state=0).fit(x, y)  # fmt: skip
    assert model.n_experts_ == model.selection_.chosen == 2
    assert model.predict_gates(x).shape == (500, 2)


def test_inspect_measures_the_gate_as_a_router():
    x, y, _ = piecewise(400, 2, 2, 0.1)
    model = MoERegressor(**{**QUICK, "n_experts": 3}).fit(x, y)
    inspection = model.inspect(x)
    scores = model._regression.model.scores(model.gating_, model._standardised_inputs(x))
    profile = inspection.gap.value.profile
    expected = boundary_mass_top(scores, 1, torch.tensor(profile.widths))
    assert profile.mass == pytest.approx(expected.value.tolist())
    assert inspection.gap.value.density.value > 0
    assert (inspection.n_experts, inspection.k, inspection.tokens) == (3, 1, 400)
    same = model.inspect()
    assert same.gap.value.quantiles == inspection.gap.value.quantiles  # order does not matter
    assert model.inspect(x, k=2).k == 2


def test_it_works_in_pipelines_and_searches():
    x, y, _ = piecewise(200, 2, 2, 0.1)
    pipe = make_pipeline(StandardScaler(), MoERegressor(**QUICK))
    assert cross_val_score(pipe, x, y, cv=2).mean() > 0.8
    search = GridSearchCV(MoERegressor(**QUICK), {"n_experts": [1, 2]}, cv=2).fit(x, y)
    assert search.best_params_ == {"n_experts": 2}


def test_what_is_wrong_is_said_as_scikit_learn_does():
    x, y, _ = piecewise(20, 2, 2, 0.1)
    with pytest.raises(NotFittedError):
        MoERegressor().predict(x)
    with pytest.raises(ValueError, match="NaN"):
        MoERegressor().fit(np.where(x > 1, np.nan, x), y)
    with pytest.raises(ValueError, match=r"n_experts=21 must not exceed.*n_samples=20"):
        MoERegressor(21).fit(x, y)
    with pytest.raises(ValueError, match="at least one non-zero"):
        MoERegressor(2).fit(x, y, sample_weight=np.zeros(20))
    with pytest.raises(ValueError, match="Negative values"):
        MoERegressor(2).fit(x, y, sample_weight=-np.ones(20))


@pytest.mark.parametrize(("name", "value", "rule"), [
    ("gating", "topk", "among {'linear', 'cosine'"), ("link", "relu", "among {'softmax'"),
    ("expert", None, "among {'linear'"), ("activation", "swish", "among"),
    ("selection", "aic", "among {'cv', 'dendrogram'}"), ("n_experts", 0, "an int >= 1 or 'auto'"),
    ("n_experts", 2.0, "an int"), ("n_experts", True, "an int"), ("n_init", 0, "an int >= 1"),
    ("max_iter", "many", "an int >= 1"), ("tol", -1e-3, "number >= 0"), ("tol", np.nan, "finite"),
    ("ridge", "some", "or 'auto'"), ("ridge", -1, "number >= 0"), ("tau", (0.1,), "two finite"),
    ("tau", (0.1, -1), "two finite"), ("power", 0, "an int >= 1"), ("max_experts", 1.5, "an int"),
])  # fmt: skip
def test_settings_that_are_none_are_refused_by_fit(name, value, rule):
    x, y, _ = steps(20, 0.1)
    with pytest.raises(
        ValueError, match=rf"The '{name}' parameter of MoERegressor must be.*{rule}"
    ):
        MoERegressor(**{name: value}).fit(x, y)


def test_few_rows_are_fitted_with_a_ridge_and_a_warning():
    x, y, _ = piecewise(20, 5, 2, 0.1)
    with pytest.warns(UserWarning, match="20 distinct targets for 48 parameters"):
        MoERegressor(4, n_init=1, max_iter=5, tol=1.0).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MoERegressor(4, n_init=1, max_iter=30, tol=1.0, ridge=0.1).fit(x, y)


def test_starts_that_do_not_converge_are_counted():
    x, y, _ = piecewise(200, 3, 3, 0.5)
    with pytest.warns(ConvergenceWarning, match="3 of 3 starts did not converge .3 unfinished"):
        MoERegressor(3, n_init=3, max_iter=1, tol=0, random_state=0).fit(x, y)


def test_the_package_does_without_scikit_learn_until_it_is_asked():
    code = (
        "import sys; sys.modules['sklearn'] = None; import tieline.lab.estimation as e\n"
        "try: e.MoERegressor\n"
        "except ModuleNotFoundError as error: assert 'tieline[estimation]' in str(error), error\n"
        "else: raise SystemExit('it should have said what is missing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert tieline.lab.estimation.MoERegressor is MoERegressor
    assert "MoERegressor" in tieline.lab.estimation.__all__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        tieline.lab.estimation.Nothing  # noqa: B018
