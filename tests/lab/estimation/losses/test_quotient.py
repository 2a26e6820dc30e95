"""Quotient losses vanish on orbits, and only there."""

import pytest
import torch

from tests.lab.estimation.identifiability.test_symmetry import act, changed, small
from tests.lab.estimation.problems import MODELS, model_id, random_parameters
from tieline.lab.estimation.identifiability import symmetries
from tieline.lab.estimation.losses import quotient_loss, quotient_losses, voronoi_loss
from tieline.lab.estimation.model import MoEModel, MoEParameters


def loss_of(model):
    if model.gate == "partial" and model.link == "sigmoid":
        return ("L4", 4)
    return ("L1", 4) if model.gate == "quadratic" and model.link == "sigmoid" else ("L3", 2)


@pytest.mark.parametrize("model", MODELS, ids=model_id)
def test_an_orbit_is_at_distance_zero_and_its_neighbour_is_not(model):
    truth = small(random_parameters(model))
    kind, paper = loss_of(model)
    moved = truth
    for group in symmetries(model):
        if (
            group.name != "order"
            and not group.condition
            and (group.dimension or group.kind == "flip")
        ):
            moved = act(model, moved, group.name)
    moved = moved.take([2, 0, 1])
    assert quotient_loss(model, moved, truth, kind, paper).value < 1e-11
    far = changed(truth, experts=truth.experts + 0.01)
    assert quotient_loss(model, far, truth, kind, paper).value > 1e-3


def test_a_split_of_a_homogeneous_expert_is_invisible_to_the_quotient_alone():
    for expert, power in (("relu", 1), ("polynomial", 2), ("polynomial", 3)):
        model = MoEModel("perturbed", "softmax", expert, 2, 3, power=power)
        truth = random_parameters(model)
        degree = model.ridge.degree
        pair = truth.take([0, 0, 1, 2])
        scale = torch.tensor([1.25, 0.75]) ** (1 / degree)  # equal masses: the mean of scaleᵖ is 1
        experts = pair.experts.clone()
        experts[:2] *= scale.double().unsqueeze(-1)
        bias = pair.bias.clone()
        bias[:2] -= torch.tensor(2.0).double().log()
        split = MoEParameters(pair.router, bias, experts)
        x = torch.rand(20, 2, dtype=torch.float64) * 2 - 1
        f = model.with_experts(4).regression(split, x)
        torch.testing.assert_close(f, model.regression(truth, x), rtol=1e-6, atol=1e-7)
        assert quotient_loss(model, split, truth, "L2", 2).value < 1e-6
        assert quotient_loss(model, split, truth, "L2", 2, cone=False).value > 1e-3
        assert voronoi_loss(split, truth, "L2", 2).value > 1e-3


def test_mass_and_scale_trade_under_a_zero_row_of_the_sigmoid():
    model = MoEModel("quadratic", "sigmoid", "relu", 2, 2)
    truth = random_parameters(model)
    truth = changed(truth, router=torch.stack((torch.zeros(6).double(), truth.router[1])))
    mass = truth.bias[0].sigmoid()
    bias = truth.bias.clone()
    bias[0] = torch.logit(mass / 2)
    traded = changed(truth, bias=bias, experts=truth.experts * torch.tensor([[2.0], [1.0]]))
    assert quotient_loss(model, traded, truth, "L1", 4).value < 1e-12
    assert voronoi_loss(traded, truth, "L1", 4).value > 0.1


def test_sigmoid_losses_without_symmetries_are_the_raw_ones():
    model = MoEModel("partial", "sigmoid", "tanh", 1, 3)
    truth, fit = random_parameters(model), random_parameters(model, seed=8)
    for kind in ("L4", "L5"):
        raw = voronoi_loss(fit, truth, kind, 4).value
        assert quotient_loss(model, fit, truth, kind, 4).value == pytest.approx(raw, rel=1e-13)


def test_a_batch_holds_the_quotient_loss_of_each_of_its_fits():
    model = MODELS[2]
    truth, fits = random_parameters(model), random_parameters(model, 4, seed=3)
    batch = quotient_losses(model, fits, truth, "L2", 2).values
    single_losses = [quotient_loss(model, fits[i], truth, "L2", 2).value for i in range(4)]
    assert batch.tolist() == pytest.approx(single_losses, rel=1e-12)
