"""The distance to the nearest best measure: zero on best measures, by hand elsewhere."""

import pytest
import torch

from tieline.lab.claims.mixture_splits import largest_gap
from tieline.lab.claims.rate_studies import nearest_best_losses
from tieline.lab.estimation import MoEModel, MoEParameters

WIDTHS = {"partial": 4, "quadratic": 6}


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=WIDTHS)
def case(request):
    """A model of one expert, its truth, and a best measure of two atoms."""
    width = WIDTHS[request.param]
    truth = MoEParameters(numbers(1, width), numbers(1, seed=1), numbers(1, 3, seed=2))
    spare = numbers(1, width, seed=3)
    twist = torch.zeros(2, width, dtype=torch.float64)
    twist[:, 1], twist[:, 2] = 0.7, -0.7
    best = MoEParameters(
        torch.cat((spare, truth.router)) + twist,
        torch.cat((numbers(1, seed=4), truth.bias)),
        torch.cat((0 * truth.experts, truth.experts)),
    )
    return MoEModel(request.param, "sigmoid", "tanh", 2, 1), truth, best


def test_a_best_measure_has_the_function_of_the_truth_and_no_distance(case):
    model, truth, best = case
    assert largest_gap(model, best, truth, numbers(100, 2, seed=5)) < 1e-12
    for order in ([0, 1], [1, 0]):
        assert nearest_best_losses(best.take(order).expand(1), truth).item() < 1e-12


def test_the_distance_is_that_of_the_true_atom_and_the_length_of_the_spare_expert(case):
    _, truth, best = case
    router, experts = best.router.clone(), best.experts.clone()
    router[1, 0] += 0.3
    experts[0, 2] -= 0.2
    experts[1, 1] += 0.1
    moved = MoEParameters(router, best.bias + 0.05, experts).expand(1)
    distance = nearest_best_losses(moved, truth).item()
    assert distance == pytest.approx(0.3 + 0.2 + 0.1 + 0.05)
