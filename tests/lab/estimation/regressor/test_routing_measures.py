"""A gate measured as a router: against the geometry's own functions on the same scores."""

import pytest
import torch

from tieline.lab.estimation.model import MoEModel
from tieline.lab.estimation.regressor import routing_measures
from tieline.lab.geometry import boundary_mass_top, top_gap


def drawn(gate, n=300):
    model = MoEModel(gate, "softmax", "linear", 3, 5)
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(model.n_parameters, dtype=torch.float64, generator=generator)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    return model, model.unflatten(flat), x


@pytest.mark.parametrize("gate", ["linear", "quadratic"])
@pytest.mark.parametrize("k", [1, 2])
def test_gaps_and_boundary_mass_are_those_of_the_scores(gate, k):
    model, params, x = drawn(gate)
    measures = routing_measures(model, params, x, k=k)
    scores = model.scores(params, x)
    profile = measures.gap.value.profile
    expected = boundary_mass_top(scores, k, torch.tensor(profile.widths).double())
    assert torch.allclose(torch.tensor(profile.mass).double(), expected.value, atol=1e-12)
    median = measures.gap.value.quantiles.value[
        measures.gap.value.quantiles.probabilities.index(0.5)
    ]
    assert median == pytest.approx(top_gap(scores, k).sort().values[149].item())
    assert measures.k == k
    assert measures.tokens == 300


def test_distances_of_a_linear_gate_are_exact():
    model, params, x = drawn("linear", n=20)
    quantiles = routing_measures(model, params, x).distance.value.quantiles
    scores = model.scores(params, x)
    walls = (scores.max(dim=1, keepdim=True).values - scores) / (
        params.router[scores.argmax(dim=1)][:, None] - params.router
    ).norm(dim=2)
    nearest = walls.masked_fill(torch.nn.functional.one_hot(scores.argmax(dim=1), 5) > 0, 1e9)
    ordered = nearest.amin(dim=1).sort().values
    assert quantiles.value[quantiles.probabilities.index(0.5)] == pytest.approx(ordered[9].item())


def test_other_gates_say_that_distances_are_not_exact():
    model, params, x = drawn("quadratic", n=20)
    assert routing_measures(model, params, x).distance.status.startswith("not answerable")


def test_a_single_expert_has_no_ties():
    model = MoEModel("linear", "softmax", "linear", 3, 1)
    params = model.unflatten(torch.ones(model.n_parameters).double())
    measures = routing_measures(model, params, torch.randn(9, 3).double())
    assert "no tie is possible" in measures.gap.status


def test_a_table_of_one_feature_has_margins_and_no_directions():
    model = MoEModel("linear", "softmax", "linear", 1, 2)
    flat = torch.linspace(-1, 1, model.n_parameters, dtype=torch.float64)
    x = torch.linspace(-2, 2, 50, dtype=torch.float64)[:, None]
    measures = routing_measures(model, model.unflatten(flat), x)
    assert measures.gap.value is not None
    assert measures.angular.value is None
    assert "one dimension" in measures.angular.status
