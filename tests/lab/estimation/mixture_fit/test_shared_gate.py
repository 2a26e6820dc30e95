"""Several outputs with one gate: value and Jacobian against the model and autograd."""

import pytest
import torch

from tieline.lab.estimation.mixture_fit import SharedGate
from tieline.lab.estimation.model import MoEModel


def problems(gate="linear", link="softmax", expert="linear", outputs=1):
    shared = SharedGate(MoEModel(gate, link, expert, 3, 2), outputs)
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(2, shared.size, dtype=torch.float64, generator=generator)
    x = torch.randn(2, 5, 3, dtype=torch.float64, generator=generator)
    return shared, theta, x


def test_one_output_is_the_model_itself():
    shared, theta, x = problems()
    assert shared.size == shared.model.n_parameters
    expected = shared.model.value_and_jacobian(shared.model.unflatten(theta), x)
    value, jacobian = shared.value_and_jacobian(theta, x)
    assert torch.equal(value[..., 0], expected[0])
    assert torch.equal(jacobian[:, :, 0], expected[1])
    assert torch.equal(shared.value(theta, x), value)


@pytest.mark.parametrize("gate", ["linear", "perturbed", "quadratic"])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_the_jacobian_of_three_outputs_is_that_of_autograd(gate, link):
    shared, theta, x = problems(gate, link, "two_layer", outputs=3)
    value, jacobian = shared.value_and_jacobian(theta, x)
    assert value.shape == (2, 5, 3)
    for index in range(2):
        expected = torch.autograd.functional.jacobian(
            lambda vector, index=index: shared.value(vector[None], x[index : index + 1])[0],
            theta[index],
        )
        assert torch.allclose(jacobian[index], expected, atol=1e-12)


def test_outputs_share_the_gate_and_nothing_else():
    shared, theta, x = problems(outputs=2)
    params = shared.parameters(theta)
    assert torch.equal(params.router[:, 0], params.router[:, 1])
    assert not torch.equal(params.experts[:, 0], params.experts[:, 1])
    moved = theta.clone()
    moved[:, shared.gate_size :][:, : (shared.size - shared.gate_size) // 2] += 1
    before, after = shared.value(theta, x), shared.value(moved, x)
    assert torch.equal(before[..., 1], after[..., 1])
    assert (before[..., 0] != after[..., 0]).all()
