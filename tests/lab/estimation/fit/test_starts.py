"""Starts: near, random, from clusters; and truths with more atoms than they need."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.lab.estimation.fit import (
    fit,
    kmeans_start,
    lift_truth,
    near_truth,
    random_start,
    start_radius_at,
)
from tieline.lab.estimation.model import MoEModel, MoEParameters


def model(gate="linear", link="softmax", expert="linear", n_experts=3):
    return MoEModel(gate, link, expert, d=2, n_experts=n_experts)


def truth(family, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return family.unflatten(
        torch.randn(family.n_parameters, dtype=torch.float64, generator=generator)
    )


def test_near_starts_have_the_radius_and_belong_to_their_seed():
    family = model()
    centre = truth(family)
    starts = near_truth(centre, 0.2, list(range(200)), 4)
    assert starts.batch_shape == (200, 4)
    spread = starts.flatten() - centre.flatten()
    assert spread.std().item() == pytest.approx(0.2, rel=0.02)
    torch.testing.assert_close(near_truth(centre, 0.2, [7], 4).flatten()[0], starts.flatten()[7])
    torch.testing.assert_close(near_truth(centre, 0.0, [7]).flatten()[0, 0], centre.flatten())


def test_a_shrinking_radius_halves_at_four_times_the_samples():
    assert start_radius_at(0.4, 1000, shrink=True) == 0.4
    assert start_radius_at(0.4, 4000, shrink=True) == pytest.approx(0.2)
    assert start_radius_at(0.4, 4000) == 0.4
    with pytest.raises(TielineError, match="not negative"):
        start_radius_at(-1.0, 10)


def test_random_starts_have_the_scale():
    starts = random_start(model(), list(range(100)), 3, scale=2.0)
    assert starts.batch_shape == (100, 3)
    assert starts.flatten().std().item() == pytest.approx(2.0, rel=0.05)


def test_a_split_truth_keeps_its_masses_and_its_function():
    family = model()
    centre = truth(family)
    lifted = lift_truth(family.with_experts(5), centre)
    assert lifted.n_experts == 5
    torch.testing.assert_close(lifted.bias.exp().sum(), centre.bias.exp().sum())
    torch.testing.assert_close(lifted.bias[0], centre.bias[0])
    x = torch.rand(50, 2).double()
    values = [family.regression(centre, x), family.with_experts(5).regression(lifted, x)]
    torch.testing.assert_close(*values)
    with pytest.raises(TielineError, match="5 atoms do not fit into 3"):
        lift_truth(family, lifted)
    torch.testing.assert_close(lift_truth(family, centre).flatten(), centre.flatten())


def test_a_copy_of_a_sigmoid_atom_with_a_gate_is_switched_off():
    family = model(link="sigmoid")
    centre = truth(family)
    lifted = lift_truth(family.with_experts(4), centre)
    torch.testing.assert_close(lifted.bias[:3], centre.bias)
    assert lifted.bias[3] == -6.0
    x = torch.rand(50, 2).double()
    values = [family.regression(centre, x), family.with_experts(4).regression(lifted, x)]
    torch.testing.assert_close(*values, atol=0.2, rtol=0)


@pytest.mark.parametrize("gate", ["linear", "cosine", "perturbed", "quadratic", "partial"])
@pytest.mark.parametrize("expert", ["linear", "relu", "two_layer"])
def test_clusters_give_a_start_of_every_family(gate, expert):
    family = model(gate, "softmax", expert)
    x = torch.rand(300, 2).double() * 2 - 1
    y = x[:, 0].abs()
    starts = kmeans_start(family, x, y, seed=1, starts=2)
    family.check(starts)
    assert starts.batch_shape == (2,)
    assert starts.flatten().isfinite().all()


def test_clusters_begin_better_than_chance_on_pieces():
    family = model()
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(600, 2, dtype=torch.float64, generator=generator) * 2 - 1
    y = torch.where(x[:, 0] > 0.3, 3 * x[:, 1], torch.where(x[:, 0] > -0.3, 1.0, -2 * x[:, 1]))
    clusters = kmeans_start(family, x, y, starts=4)
    chance = random_start(family, [0], 4)[0]
    start = [(y - family.regression(s, x)).square().mean(-1).min() for s in (clusters, chance)]
    assert start[0] < start[1]
    assert fit(family, x, y, clusters, quiet=True).best().loss < 0.3 * y.var()


def test_more_experts_than_samples_are_refused():
    with pytest.raises(TielineError, match="3 experts need as many samples"):
        kmeans_start(model(), torch.zeros(2, 2).double(), torch.zeros(2).double())


def test_identical_samples_do_not_break_the_clusters():
    starts = kmeans_start(model(), torch.zeros(9, 2).double(), torch.ones(9).double())
    assert starts.flatten().isfinite().all()


def test_a_lifted_sigmoid_truth_has_the_same_parameters_otherwise():
    family = model(link="sigmoid")
    centre = MoEParameters([[1.0, 0], [0, 0], [0, 0]], [0.5, -0.2, 0.1], torch.ones(3, 3))
    lifted = lift_truth(family.with_experts(4), centre)
    torch.testing.assert_close(lifted.router[3], centre.router[2])
    assert lifted.bias[2] == lifted.bias[3]
    torch.testing.assert_close(2 * lifted.bias[3].sigmoid(), centre.bias[2].sigmoid())
    assert lifted.bias[1] == centre.bias[1]
