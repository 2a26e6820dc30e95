"""Activations with their slopes, against autograd and at the ends of their range."""

import pytest
import torch
import torch.nn.functional as F

from tieline.routing.activations import ACTIVATIONS

REFERENCE = {
    "swiglu": lambda a: F.silu(a[0]) * a[1],
    "geglu": lambda a: F.gelu(a[0]) * a[1],
    "relu": lambda a: F.relu(a[0]),
    "gelu": lambda a: F.gelu(a[0]),
}


def run(name, pre, grad):
    act = ACTIVATIONS[name]
    kept, slope, hidden = pre.clone(), torch.empty_like(grad), torch.empty_like(grad)
    act.forward_for_backward_(kept, slope, hidden)
    again, out = torch.empty_like(hidden), torch.empty_like(pre)
    act.hidden_from_kept_(kept, again)
    act.backward_(kept, slope, grad.clone(), out)
    return hidden, again, out


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_value_and_gradient_are_those_of_autograd(name):
    torch.manual_seed(0)
    pre = (3 * torch.randn(ACTIVATIONS[name].branches, 5, 7, dtype=torch.float64)).requires_grad_()
    grad = torch.randn(5, 7, dtype=torch.float64)
    expected = REFERENCE[name](pre)
    expected.backward(grad)
    hidden, again, out = run(name, pre.detach(), grad)
    plain = torch.empty_like(hidden)
    ACTIVATIONS[name].forward_(pre.detach(), plain)
    for value in (hidden, again, plain):
        torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(out, pre.grad)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_the_slope_keeps_its_digits_where_the_activation_is_large(name):
    pre = torch.full((ACTIVATIONS[name].branches, 1, 3), 1.0, dtype=torch.bfloat16)
    pre[0] = torch.tensor([[300.0, 7.0, -300.0]])
    _, _, out = run(name, pre, torch.ones(1, 3, dtype=torch.bfloat16))
    exact = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.bfloat16)
    torch.testing.assert_close(out[0], exact, atol=0.02, rtol=0)
