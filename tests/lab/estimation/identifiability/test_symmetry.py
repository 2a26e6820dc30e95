"""Symmetries leave the function unchanged, and `canonical` removes exactly them."""

import pytest
import torch

from tests.lab.estimation.problems import MODELS, model_id, random_inputs, random_parameters
from tieline.lab.estimation.identifiability import (
    canonical,
    information,
    null_dimension,
    symmetries,
)
from tieline.lab.estimation.model import MoEModel, MoEParameters, gate_weights, input_features


def changed(params, router=None, bias=None, experts=None):
    return MoEParameters(
        params.router if router is None else router,
        params.bias if bias is None else bias,
        params.experts if experts is None else experts,
    )


def small(params):
    """Rows short enough that a shift keeps the perturbed rows inside the unit ball."""
    return changed(params, router=0.1 * params.router)


def shifted_rows(model, router):
    shift = torch.linspace(-0.2, 0.1, router.shape[-1], dtype=torch.float64)
    if model.gate != "perturbed":
        return router + shift
    length = torch.linalg.vector_norm(router, dim=-1, keepdim=True)
    v = router / (length + model.tau[0]) + shift
    return model.tau[0] * v / (1 - torch.linalg.vector_norm(v, dim=-1, keepdim=True))


def act(model, params, name):
    """Parameters moved by the symmetry called `name`."""
    n, d = model.n_experts, model.d
    t = 0.5 + torch.arange(n, dtype=torch.float64).unsqueeze(-1)
    if name == "bias shift":
        return changed(params, bias=params.bias + 0.7)
    if name == "row shift":
        return changed(params, router=shifted_rows(model, params.router))
    if name == "row scale":
        return changed(params, router=params.router * t)
    if name == "matrix part":
        twist = torch.zeros(d, d, dtype=torch.float64)
        twist[0, 1], twist[1, 0] = 1, -1
        router = params.router.clone()
        router[..., : d * d] += t * twist.flatten()
        return changed(params, router=router)
    experts = params.experts.clone()
    if name == "hidden scale":
        experts[..., : d + 1] *= t
        experts[..., d + 1 :] /= t**model.ridge.degree
    if name == "sign":
        experts[..., 1:, :] *= -1
    return changed(params, experts=experts)


HOMOGENEOUS = [
    MoEModel(gate="linear", link=link, expert="two_layer", activation=phi, d=2, n_experts=3)
    for link in ("softmax", "sigmoid")
    for phi in ("relu", "linear")
]
EVEN = [MoEModel(gate="linear", link="softmax", expert="polynomial", power=2, d=2, n_experts=3)]


@pytest.mark.parametrize("model", [*MODELS, *HOMOGENEOUS, *EVEN], ids=model_id)
def test_each_symmetry_leaves_the_function_and_the_canonical_form_alone(model):
    params, x = small(random_parameters(model)), random_inputs(9, 2)
    f, form = model.regression(params, x), canonical(model, params)
    for group in symmetries(model):
        if (
            group.condition
            or group.name == "order"
            or (group.kind == "shift" and not group.dimension)
        ):
            continue
        moved = act(model, params, group.name)
        assert not torch.equal(moved.flatten(), params.flatten())
        torch.testing.assert_close(model.regression(moved, x), f, rtol=1e-11, atol=1e-12)
        same = canonical(model, moved)
        torch.testing.assert_close(same.flatten(), form.flatten(), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("model", MODELS[::3], ids=model_id)
def test_the_canonical_form_keeps_the_function(model):
    params, x = random_parameters(model), random_inputs(9, 2)
    for pin in ("mean", "last"):
        form = canonical(model, params, pin)
        tau2 = model.tau[1] if model.gate == "perturbed" else 0.0
        scores = form.router @ input_features(model.gate, x, tau2) + form.bias.unsqueeze(-1)
        outputs = model.expert_outputs(changed(params, experts=form.experts), x)
        f = (gate_weights(model.link, scores).mT * outputs).sum(-1)
        torch.testing.assert_close(f, model.regression(params, x), rtol=1e-11, atol=1e-12)


def test_pins_are_what_they_say():
    model = MODELS[0]
    params = random_parameters(model)
    last = canonical(model, params, "last")
    assert last.bias[-1] == 0
    assert not last.router[-1].any()
    mean = canonical(model, params, "mean")
    assert mean.bias.exp().sum().item() == pytest.approx(1, rel=1e-14)
    assert (mean.bias.exp() @ mean.router).abs().max() < 1e-15


@pytest.mark.parametrize("gate", ["linear", "perturbed", "cosine"])
@pytest.mark.parametrize(("d", "k"), [(2, 2), (2, 4), (3, 2), (4, 3), (3, 3), (5, 2)])
def test_nullity_with_the_biases_pinned_is_d_d_and_max_d_k(gate, d, k):
    model = MoEModel(gate=gate, link="softmax", expert="tanh", d=d, n_experts=k)
    nullity = max(d, k) if gate == "cosine" else d
    bias = range(k * d, k * d + k)
    fisher_information = information(
        model, random_parameters(model, seed=d + k), pinned=tuple(bias), n=600
    )
    assert fisher_information.nullity == nullity
    assert fisher_information.gap > 1e6
    assert null_dimension(model, bias_pinned=True) == nullity


@pytest.mark.parametrize(
    "model", [m for m in MODELS if m.expert in ("tanh", "two_layer")], ids=model_id
)
def test_the_symmetries_are_all_the_flat_directions_of_generic_parameters(model):
    fisher_information = information(model, random_parameters(model, seed=4), n=600)
    assert fisher_information.nullity == null_dimension(model)
