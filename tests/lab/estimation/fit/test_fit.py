"""Fits of models: the truth is found, failures are reported, the best starts are chosen."""

import warnings

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.lab.estimation.fit import FitResult, FitWarning, fit, near_truth
from tieline.lab.estimation.model import MoEModel, MoEParameters, repetition_seeds
from tieline.lab.estimation.solvers import Recipe, Status

MODEL = MoEModel("linear", "softmax", "tanh", d=2, n_experts=2)
TRUTH = MoEParameters([[2.0, -1.0], [0.0, 0.0]], [0.3, 0.0], [[1.5, 0.5, 0.2], [-1.0, 1.0, -0.4]])


def data(sets=3, n=400, noise=0.02, seed=0):
    return MODEL.simulate(TRUTH, n, repetition_seeds(seed, n, sets), noise=noise)


@pytest.mark.parametrize("gate", ["linear", "cosine", "perturbed", "quadratic", "partial"])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_every_gate_fits_its_own_data_to_the_noise(gate, link):
    model = MoEModel(gate, link, "tanh", d=2, n_experts=2)
    generator = torch.Generator().manual_seed(3)
    flat = torch.randn(model.n_parameters, dtype=torch.float64, generator=generator)
    truth = model.unflatten(flat)
    sample = model.simulate(truth, 500, [1, 2], noise=0.05)
    starts = near_truth(truth, 0.1, [5, 6], 2)
    result = fit(model, sample.x, sample.y, starts, quiet=True).best()
    excess = result.loss / 0.05**2
    assert (excess < 1.1).all()
    assert result.converged.all()
    at_truth = (sample.y - model.regression(truth, sample.x)).square().mean(-1)
    assert (result.loss <= at_truth).all()


def test_data_without_noise_give_back_the_function():
    sample = data(noise=0.0)
    result = fit(MODEL, sample.x, sample.y, near_truth(TRUTH, 0.2, [1, 2, 3]))
    predictions = MODEL.regression(result.best().params, sample.x)
    torch.testing.assert_close(predictions, sample.y, atol=1e-9, rtol=0)
    assert set(result.status.flatten().tolist()) == {Status.EXACT}


def test_one_data_set_is_as_one_of_several():
    sample = data()
    starts = near_truth(TRUTH, 0.2, [1, 2, 3], 2)
    every = fit(MODEL, sample.x, sample.y, starts)
    single_fit = fit(MODEL, sample.x[1], sample.y[1], starts[1])
    assert every.loss.shape == (3, 2)
    torch.testing.assert_close(single_fit.loss, every.loss[1])
    torch.testing.assert_close(single_fit.params.flatten(), every.params.flatten()[1])


def test_weights_of_zero_are_samples_left_out_and_of_two_samples_twice():
    sample = data(sets=1)
    x, y, starts = sample.x[0], sample.y[0], near_truth(TRUTH, 0.1, [1])[0]
    weights = torch.ones(400).double()
    weights[:100] = 0
    weights[100:200] = 2
    heavy = fit(MODEL, x, y, starts, weights=weights, tolerance=1e-8)
    rows = torch.cat([torch.arange(100, 400), torch.arange(100, 200)])
    plain = fit(MODEL, x[rows], y[rows], starts, tolerance=1e-8)
    torch.testing.assert_close(heavy.loss, plain.loss, atol=0, rtol=1e-8)
    same = [MODEL.regression(result.params, x) for result in (heavy, plain)]
    torch.testing.assert_close(*same, atol=1e-5, rtol=0)


def test_the_best_start_has_the_least_loss_and_nan_never_wins():
    flat = torch.arange(24.0).reshape(2, 1, 12)
    params = MODEL.unflatten(flat.expand(2, 3, 12).double() + torch.arange(3)[None, :, None])
    loss = torch.tensor([[3.0, 1.0, 2.0], [torch.nan, 5.0, 4.0]]).double()
    codes = torch.arange(6).reshape(2, 3)
    best = FitResult(params, loss, codes, codes).best()
    assert best.loss.tolist() == [1.0, 4.0]
    assert best.status.tolist() == [1, 5]
    torch.testing.assert_close(best.params.flatten()[:, 0], torch.tensor([1.0, 14.0]).double())


def test_failures_are_counted_in_one_warning():
    sample = data()
    starts = near_truth(TRUTH, 2.0, [1, 2, 3], 2)
    with pytest.warns(FitWarning, match="6 of 6 problems did not converge"):
        result = fit(MODEL, sample.x, sample.y, starts, iterations=1)
    assert result.endings() == {"unfinished": 6}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(MODEL, sample.x, sample.y, starts, iterations=1, quiet=True)


def test_fewer_samples_than_parameters_are_a_warning_and_a_ridge():
    sample = data(sets=1, n=8)
    starts = near_truth(TRUTH, 0.1, [1])
    with pytest.warns(FitWarning, match="8 samples for 12 parameters: fitted with a ridge of"):
        result = fit(MODEL, sample.x, sample.y, starts)
    assert result.ridge > 0
    assert result.params.flatten().norm() < 30
    assert fit(MODEL, sample.x, sample.y, starts, ridge=0.5, quiet=True).ridge == 0.5


def test_sgd_and_adam_come_near_what_levenberg_finds():
    sample = data(n=1000)
    starts = near_truth(TRUTH, 0.1, [1, 2, 3])
    best = fit(MODEL, sample.x, sample.y, starts).loss
    for recipe in (Recipe(epochs=15, rate=0.3, batch=32), Recipe("adam", 15, 0.01, 32)):
        descent = fit(MODEL, sample.x, sample.y, starts, method=recipe, quiet=True)
        assert (descent.loss >= best - 1e-12).all()
        assert (descent.loss < 1.5 * best).all()


def test_the_papers_recipe_ends_unfinished_and_says_so():
    sample = data(n=500)
    starts = near_truth(TRUTH, 0.5, [1, 2, 3])
    with pytest.warns(FitWarning, match="3 of 3 problems"):
        result = fit(MODEL, sample.x, sample.y, starts, method="sgd")
    assert result.iterations.flatten().tolist() == [80] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "newton"}, "method must be one of"),
        ({"ridge": -1.0}, "a ridge is not negative"),
        ({"x": torch.full((3, 400, 2), torch.nan).double()}, "must be finite"),
        ({"starts": near_truth(TRUTH, 0.1, [1, 2])}, "starts are"),
    ],
)
@pytest.mark.usefixtures("no_axis_checks")
def test_bad_input_is_refused(change, message):
    sample = data()
    good = {"x": sample.x, "y": sample.y, "starts": near_truth(TRUTH, 0.1, [1, 2, 3])}
    with pytest.raises(TielineError, match=message):
        fit(MODEL, **{**good, **change})
