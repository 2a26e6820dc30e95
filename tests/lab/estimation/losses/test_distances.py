"""Function distances against closed forms, matched errors against all matchings."""

import itertools
import math

import pytest
import torch

from tests.lab.estimation.problems import MODELS, random_parameters
from tieline.core.errors import TielineError
from tieline.lab.estimation.losses import expert_distance, matched_errors, regression_distance
from tieline.lab.estimation.model import MoEModel, MoEParameters


def test_the_distance_of_two_linear_functions_is_the_closed_form_within_its_error():
    model = MoEModel("linear", "softmax", "linear", 2, 1)
    fit, truth = (MoEParameters([[0, 0]], [0], [row]) for row in ([1.0, 2.0, 0.5], [0.0, 0.0, 0.0]))
    distance = regression_distance(model, fit, model, truth, n=40_000)
    exact = math.sqrt((1 + 4) / 3 + 0.25)
    error = distance.standard_error.item()
    assert abs(distance.value.item() - exact) < 4 * error
    assert 0.2 < error * math.sqrt(40_000) < 2


def test_equal_functions_are_at_distance_zero_and_batches_agree():
    model = MODELS[0]
    fits, truth = random_parameters(model, 3), random_parameters(model, seed=9)
    batch = regression_distance(model, fits, model, truth, n=500)
    for i in range(3):
        single = regression_distance(model, fits[i], model, truth, n=500)
        assert batch.value[i].item() == pytest.approx(single.value.item(), rel=1e-12)
    zero = regression_distance(model, truth, model, truth, n=500)
    assert (zero.value.item(), zero.standard_error.item()) == (0, 0)


def test_matched_errors_take_the_best_of_all_matchings():
    model = MODELS[0]
    truth, fits = random_parameters(model), random_parameters(model.with_experts(4), 5, seed=2)
    errors = matched_errors(fits, truth)
    for f in range(5):
        rows = torch.cat((fits.router[f], fits.experts[f]), -1)
        true_rows = torch.cat((truth.router, truth.experts), -1)
        costs = {
            order: sum((rows[i] - true_rows[j]).norm().item() for j, i in enumerate(order))
            for order in itertools.permutations(range(4), 3)
        }
        assert tuple(errors.partner[f].tolist()) == min(costs, key=costs.get)
    moved = matched_errors(truth.take([2, 0, 1]), truth)
    assert moved.partner.tolist() == [1, 2, 0]
    assert not moved.experts.any()
    assert not moved.bias.any()
    assert not moved.router.any()


def test_a_fit_with_too_few_atoms_is_refused():
    with pytest.raises(TielineError, match="partner"):
        matched_errors(random_parameters(MODELS[0].with_experts(2)), random_parameters(MODELS[0]))


def test_the_nearest_expert_is_found_as_a_function_and_spare_ones_do_not_count():
    model = MoEModel("linear", "softmax", "polynomial", 1, 2)
    truth = MoEParameters([[1.0], [0.0]], [0, 0], [[1.0, 0.5], [0.0, 2.0]])
    fit = MoEParameters([[5.0]] * 3, [0] * 3, [[0.0, -2.0], [9.0, 9.0], [-1.0, -0.5]])
    assert expert_distance(model, fit, truth).item() == 0  # ±η is one square
    moved = MoEParameters(fit.router, fit.bias, [[0.0, 2.5], [9.0, 9.0], [1.0, 0.5]])
    assert expert_distance(model, moved, truth).item() == pytest.approx(2.25 / math.sqrt(2))
