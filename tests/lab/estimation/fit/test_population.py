"""The population minimiser is the truth if the model contains it, and beats the truth if not."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.lab.estimation.fit import population_minimiser
from tieline.lab.estimation.model import MoEModel, MoEParameters

LINEAR = MoEModel("linear", "softmax", "tanh", d=2, n_experts=2)
TRUTH = MoEParameters([[2.0, -1.0], [0.0, 0.0]], [0.3, 0.0], [[1.5, 0.5, 0.2], [-1.0, 1.0, -0.4]])


def target(x):
    return LINEAR.regression(TRUTH, x)


def test_a_model_with_the_truth_has_no_misfit():
    minimiser = population_minimiser(LINEAR, target, near=TRUTH, radius=0.3, n=2000, starts=3)
    assert minimiser.misfit < 1e-9
    assert minimiser.agree == 3


def test_a_model_without_the_truth_has_a_misfit_that_no_other_start_beats():
    model = MoEModel("cosine", "softmax", "tanh", d=2, n_experts=2)
    minimiser = population_minimiser(model, target, near=TRUTH, radius=0.1, n=2000, starts=4)
    x = torch.rand(4000, 2, dtype=torch.float64) * 2 - 1
    at_truth = (model.regression(TRUTH, x) - target(x)).square().mean().sqrt().item()
    fresh = (model.regression(minimiser.params, x) - target(x)).square().mean().sqrt().item()
    assert 1e-3 < minimiser.misfit < 0.5 * at_truth
    assert fresh == pytest.approx(minimiser.misfit, rel=0.1)
    assert minimiser.starts.loss.min().sqrt().item() == pytest.approx(minimiser.misfit)
    assert 1 <= minimiser.agree <= 4


def test_without_a_guess_starts_are_random_and_the_best_counts():
    minimiser = population_minimiser(LINEAR, target, n=1000, starts=6, seed=1)
    assert minimiser.starts.loss.shape == (6,)
    assert minimiser.misfit < 0.05


def test_a_second_fit_to_more_samples_comes_nearer():
    model = MoEModel("cosine", "softmax", "tanh", d=2, n_experts=2)
    options = {"near": TRUTH, "radius": 0.1, "n": 500, "starts": 2}
    x = torch.rand(40_000, 2, dtype=torch.float64) * 2 - 1
    misfits = []
    for refine in (0, 20_000):
        minimiser = population_minimiser(model, target, **options, refine=refine)
        misfits.append((model.regression(minimiser.params, x) - target(x)).square().mean())
    assert misfits[1] < misfits[0]


def test_too_small_a_sample_is_refused():
    with pytest.raises(TielineError, match="parameters"):
        population_minimiser(LINEAR, target, n=5)
