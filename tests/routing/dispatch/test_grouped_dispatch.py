"""Grouped dispatch: gradients by finite differences, and equality with the closed kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import seeds
from tieline import Experts
from tieline.routing.dispatch import grouped_dispatch, grouped_linear


def swiglu(rows):
    first, second = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


def case(seed, tokens, experts, density, bias=True):
    torch.manual_seed(seed)
    module = Experts(experts, 4, 3, bias=bias).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(tokens, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, experts, dtype=torch.float64) + 0.1
    weights = (weights * (torch.rand(tokens, experts) < density)).requires_grad_()
    return module, x, weights


@pytest.mark.parametrize("bias", [False, True])
@given(seeds, st.integers(0, 9), st.integers(1, 5), st.sampled_from([0.0, 0.3, 1.0]))
def test_it_equals_dispatch_in_values_and_gradients(bias, seed, tokens, experts, density):
    module, x, weights = case(seed, tokens, experts, density, bias)
    maps = (module.w_in, module.w_out, module.b_in, module.b_out)
    ours, closed = grouped_dispatch(x, weights, *maps, hidden=swiglu), module(x, weights)
    torch.testing.assert_close(ours, closed)
    used, probe = weights != 0, torch.randn_like(ours)
    leaves = [x, weights, *module.parameters()]
    gradients = torch.autograd.grad((ours * probe).sum(), leaves)
    expected = list(torch.autograd.grad((closed * probe).sum(), leaves))
    expected[1] = expected[1].masked_fill(~used, 0)  # the bias of an unused expert is skipped too
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_first_derivatives_pass_gradcheck_with_a_norm_at_the_end():
    module, x, weights = case(0, 5, 3, 0.7)

    def layer(x, w_in, w_out, b_in, b_out):
        return grouped_dispatch(
            x, weights.detach(), w_in, w_out, b_in, b_out, hidden=swiglu, finish=torch.tanh
        )

    maps = (module.w_in, module.w_out, module.b_in, module.b_out)
    assert torch.autograd.gradcheck(layer, (x, *maps))


def test_transposed_maps_are_views_and_agree():
    module, x, weights = case(1, 6, 3, 0.7)
    w_in, w_out = (w.detach().mT.contiguous() for w in (module.w_in, module.w_out))
    y = grouped_dispatch(x, weights, w_in.mT, w_out.mT, module.b_in, module.b_out, hidden=swiglu)
    torch.testing.assert_close(y, module(x, weights))


def test_no_output_depends_on_the_other_tokens():
    module, x, weights = case(2, 9, 4, 0.6)
    maps = (module.w_in, module.w_out)
    alone = [
        grouped_dispatch(x[i : i + 1], weights[i : i + 1], *maps, hidden=swiglu) for i in range(9)
    ]
    together = grouped_dispatch(x, weights, *maps, hidden=swiglu)
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-13)


def test_experts_without_slots_have_no_gradient():
    rows = torch.randn(4, 3, dtype=torch.float64)
    w = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y = grouped_linear(rows, w, b, torch.tensor([0, 0, 2, 2]))
    torch.testing.assert_close(y[:2], rows[:2] @ w[0].T + b[0])
    y.sum().backward()
    assert (w.grad[1] == 0).all()
    assert (b.grad[1] == 0).all()
    assert (w.grad[2] != 0).any()
