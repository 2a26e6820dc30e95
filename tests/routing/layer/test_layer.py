"""The layer composes: it equals its parts, saves, loads, and refuses parts that do not fit."""

import copy

import pytest
import torch
from safetensors.torch import load, save

from tests.reference import mixture
from tieline import Experts, Hard, LinearRouter, MoE, SmoothTopK, TielineError, TopK, moe


@pytest.mark.parametrize("gate", ["topk", "smooth", "softmax", "sigmoid", "relu", "hard"])
@pytest.mark.parametrize("router", ["linear", "cosine", "quadratic"])
def test_the_layer_is_the_mixture_of_its_parts(gate, router):
    layer = moe(
        d_model=6, n_experts=4, k=2, d_hidden=5, gate=gate, router=router, shared_hidden=3
    ).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    routing, flat = layer.route(x), x.flatten(0, 1)
    expected = mixture(flat, routing.weights.flatten(0, 1), layer.experts)
    shared = mixture(flat, torch.ones(6, 1).double(), layer.shared.expert)
    torch.testing.assert_close(layer(x), (expected + shared).view_as(x))
    assert torch.equal(routing.active, (routing.weights != 0).sum(-1))


def test_no_output_depends_on_the_other_tokens():
    layer = moe(d_model=6, n_experts=4, k=2, d_hidden=5, gate="smooth").double()
    x = torch.randn(9, 6, dtype=torch.float64)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(9)])
    torch.testing.assert_close(layer(x), alone, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6), (1, 6), (6,)])
def test_empty_and_single_tokens_pass(shape):
    layer = moe(d_model=6, n_experts=4, k=2, d_hidden=5)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == shape
    y.sum().backward()


@pytest.mark.parametrize(("experts", "k"), [(1, 1), (4, 4)])
@pytest.mark.parametrize("gate", ["topk", "smooth"])
def test_one_expert_and_all_experts_are_fine(experts, k, gate):
    layer = moe(d_model=6, n_experts=experts, k=k, d_hidden=5, gate=gate)
    assert layer(torch.randn(3, 6)).isfinite().all()
    assert (layer.route(torch.randn(3, 6)).active == k).all()


def test_a_layer_survives_saving_copying_and_both_dtypes():
    layer = moe(d_model=6, n_experts=4, k=2, d_hidden=5, gate="smooth", router="cosine")
    other = moe(d_model=6, n_experts=4, k=2, d_hidden=5, gate="smooth", router="cosine")
    other.load_state_dict(load(save(layer.state_dict())))
    x = torch.randn(3, 6)
    assert torch.equal(layer(x), other(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_training_moves_every_parameter():
    layer = moe(
        d_model=6, n_experts=4, k=2, d_hidden=5, gate="smooth", bias=True,
        gate_options={"detach_ramp": False},
    )  # fmt: skip
    layer.gate.theta.data.fill_(1.0)
    layer(torch.randn(64, 6)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


BAD = [
    (lambda: moe(d_model=4, n_experts=4, k=5, d_hidden=2), "k=5, n_experts=4"),
    (lambda: moe(d_model=4, n_experts=4, k=2, d_hidden=2, gate="best"), "gate='best'"),
    (lambda: moe(d_model=4, n_experts=4, k=2, d_hidden=2, router="mlp"), "router='mlp'"),
    (lambda: MoE(LinearRouter(4, 3), TopK(1), Experts(4, 4, 2)), "do not fit"),
    (lambda: MoE(LinearRouter(4, 4), TopK(5), Experts(4, 4, 2)), "k = 5 of only 4"),
]


@pytest.mark.parametrize(("build", "message"), BAD, ids=[m for _, m in BAD])
def test_parts_that_do_not_fit_are_refused(build, message):
    with pytest.raises(TielineError, match=message):
        build()


def test_the_layer_describes_itself():
    text = str(MoE(LinearRouter(4, 4), SmoothTopK(2, epsilon=0.1), Experts(4, 4, 2)))
    for part in ("LinearRouter", "epsilon=0.1", "activation='swiglu'"):
        assert part in text
    assert "Hard" in str(MoE(LinearRouter(4, 4), Hard(), Experts(4, 4, 2)))
