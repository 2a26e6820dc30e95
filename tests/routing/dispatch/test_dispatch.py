"""The dispatch kernel against a token-by-token reference, in values and in gradients."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import mixture
from tests.strategies import seeds
from tieline import Experts, TielineError
from tieline.routing import dispatch

ACTIVATIONS = ["swiglu", "geglu", "relu", "gelu"]


def sparse_weights(tokens, experts, density):
    weights = torch.rand(tokens, experts, dtype=torch.float64) + 0.1
    return weights * (torch.rand(tokens, experts) < density)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@given(seeds, st.integers(0, 9), st.integers(1, 5), st.sampled_from([0.0, 0.3, 0.7, 1.0]))
def test_output_and_gradients_match_the_definition(
    activation, bias, seed, tokens, experts, density
):
    torch.manual_seed(seed)
    module = Experts(experts, 4, 3, activation=activation, bias=bias).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(tokens, 4, dtype=torch.float64, requires_grad=True)
    weights = sparse_weights(tokens, experts, density).requires_grad_()
    leaves = [x, weights, *module.parameters()]
    ours = module(x, weights)
    expected = mixture(x, weights, module) if tokens else torch.zeros_like(x)
    torch.testing.assert_close(ours, expected)
    if (weights != 0).any():
        probe = torch.randn_like(ours)
        gradients = torch.autograd.grad((ours * probe).sum(), leaves)
        expected_gradients = torch.autograd.grad(
            (expected * probe).sum(), leaves, allow_unused=True
        )
        used = (weights != 0).double()
        for mine, theirs in zip(gradients, expected_gradients, strict=True):
            theirs = torch.zeros_like(mine) if theirs is None else theirs
            # an unused expert could inform the gate by its bias alone, which is skipped
            mask = used if mine.shape == weights.shape and mine is gradients[1] else 1
            torch.testing.assert_close(mine * mask, theirs * mask)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_first_derivatives_pass_gradcheck(activation):
    module = Experts(3, 4, 2, activation=activation, bias=True).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weights = sparse_weights(5, 3, 1.0).requires_grad_()
    parameters = (module.w_in, module.w_out, module.b_in)
    assert torch.autograd.gradcheck(
        lambda *args: dispatch(*args, activation=activation), (x, weights, *parameters)
    )


@given(seeds)
def test_no_token_depends_on_the_others(seed):
    torch.manual_seed(seed)
    module, x = Experts(4, 6, 5).double(), torch.randn(7, 6, dtype=torch.float64)
    weights = sparse_weights(7, 4, 0.5)
    alone = torch.cat([module(x[i : i + 1], weights[i : i + 1]) for i in range(7)])
    # a product of another height may sum in another order
    torch.testing.assert_close(alone, module(x, weights), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_lower_precision_agrees_within_its_rounding(dtype, tolerance):
    module, x = Experts(4, 16, 8).double(), torch.randn(9, 16, dtype=torch.float64)
    weights = sparse_weights(9, 4, 0.6)
    exact = module(x, weights)
    rounded = module.to(dtype)(x.to(dtype), weights)
    assert rounded.dtype == dtype
    assert (rounded.double() - exact).norm() <= tolerance * exact.norm()


def test_autocast_computes_in_its_dtype_and_returns_float32_gradients():
    module, x = Experts(4, 16, 8), torch.randn(9, 16, requires_grad=True)
    weights = sparse_weights(9, 4, 0.6).float()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = module(x, weights)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert module.w_in.grad.dtype == x.grad.dtype == torch.float32


def test_a_weight_that_is_not_a_number_shows_in_the_output():
    weights = torch.zeros(2, 3)
    weights[0, 1] = torch.nan
    y = Experts(3, 4, 2)(torch.randn(2, 4), weights)
    assert y[0].isnan().all()
    assert (y[1] == 0).all()


def test_strided_inputs_are_fine():
    module, x = Experts(3, 4, 2), torch.randn(4, 10).T[:6].requires_grad_()
    weights = torch.rand(3, 6).T
    torch.testing.assert_close(module(x, weights), module(x.contiguous(), weights.contiguous()))
    module(x, weights).sum().backward()  # the gradient of a sum is an expanded scalar


def test_inference_keeps_no_pre_activations():
    module, x, weights = Experts(3, 4, 2), torch.randn(5, 4), torch.rand(5, 3)
    with torch.no_grad():
        y = module(x, weights)
    assert not y.requires_grad
    torch.testing.assert_close(y, module(x, weights).detach())


BAD = {
    "tokens have dimension 5, the experts 4": {"x": (6, 5)},
    r"weights must be \(tokens, experts\) = \(6, 3\), got \(6, 2\)": {"weights": (6, 2)},
    r"w_in must be \(3, 4, 4\) for 'swiglu', got \(3, 2, 4\)": {"w_in": (3, 2, 4)},
    r"b_in must be \(3, 4\), got \(3, 2\)": {"b_in": (3, 2)},
}


@pytest.mark.usefixtures("no_axis_checks")
@pytest.mark.parametrize("message", BAD)
def test_shapes_that_do_not_fit_are_refused(message):
    shapes = {"x": (6, 4), "weights": (6, 3), "w_in": (3, 4, 4), "w_out": (3, 4, 2), **BAD[message]}
    with pytest.raises(TielineError, match=message):
        dispatch(**{name: torch.zeros(shape) for name, shape in shapes.items()})


@pytest.mark.usefixtures("no_axis_checks")
def test_an_unknown_activation_or_an_empty_size_is_refused():
    with pytest.raises(TielineError, match="activation='tanh' is not one of"):
        Experts(2, 3, 4, activation="tanh")
    with pytest.raises(TielineError, match="n_experts=0"):
        Experts(0, 3, 4)


@pytest.mark.parametrize("run", [1, 6, 14, 10**6])
def test_sums_do_not_depend_on_how_many_tokens_are_summed_at_a_time(run, monkeypatch):
    torch.manual_seed(0)
    x, weights = torch.randn(9, 2), torch.rand(9, 3)
    weights[torch.rand(9, 3) < 0.5] = 0
    weights[2:5] = 0  # a run of tokens without an expert
    w_in, w_out = torch.randn(3, 8, 2), torch.randn(3, 2, 4)
    at_once = dispatch(x, weights, w_in, w_out)
    monkeypatch.setattr(sys.modules["tieline.routing.dispatch"], "RUN_ELEMENTS", run)
    assert torch.equal(dispatch(x, weights, w_in, w_out), at_once)
    assert not at_once[2:5].any()
