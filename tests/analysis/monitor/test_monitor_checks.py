"""Losses and settings that are silently off cause a warning; active ones do not."""

import warnings

import pytest
import torch
from torch import nn

from tests.models.tiny import batch, tiny_model
from tieline import auxiliary_loss, collect_routing, moe
from tieline.analysis.monitor import RoutingMonitor
from tieline.core.errors import RoutingWarning
from tieline.routing.routers import LinearRouter


def watched(model, run):
    """Warnings of one watched step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with RoutingMonitor(model, every=1) as monitor:
            run()
            monitor.step()
    return [str(warning.message) for warning in caught if warning.category is RoutingWarning]


def training(family="mixtral", **changes):
    model = tiny_model(family, **changes).train()
    return model.requires_grad_(True)


def step(model, **options):
    ids = batch()
    return lambda: model(input_ids=ids, labels=ids, **options).loss.backward()


def test_a_coefficient_without_router_logits_is_off():
    model = training(router_aux_loss_coef=0.02)
    (message,) = watched(model, step(model))
    assert "silently off" in message
    assert "router_aux_loss_coef = 0.02" in message
    assert "output_router_logits" in message


def test_with_router_logits_it_is_on():
    model = training(router_aux_loss_coef=0.02, output_router_logits=True)
    assert watched(model, step(model)) == []


def test_a_coefficient_of_zero_is_off():
    model = training(router_aux_loss_coef=0.0, output_router_logits=True)
    (message,) = watched(model, step(model))
    assert "router_aux_loss_coef = 0" in message


def test_a_loss_without_gradient_is_off():
    model = training(router_aux_loss_coef=0.02, output_router_logits=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    (message,) = watched(model, step(model))
    assert "carries no gradient" in message


def test_evaluation_is_not_judged():
    model = training(router_aux_loss_coef=0.02).eval()
    assert watched(model, step(model)) == []


def test_a_family_without_the_loss_is_not_judged():
    model = training("deepseek_v3")
    assert watched(model, step(model)) == []


def test_router_logits_that_are_probabilities_are_told():
    model = training("gemma4")
    (message,) = watched(model, step(model))
    assert "probabilities already" in message
    assert "router" in message


class SoftmaxRouter(LinearRouter):
    """A router that applies the softmax itself, which is a mistake."""

    def score(self, x):
        return super().score(x).softmax(dim=-1)


def test_probabilities_of_our_own_layers_are_told():
    layer = moe(d_model=8, n_experts=4, k=2, d_hidden=4)
    layer.router = SoftmaxRouter(8, 4)
    x = torch.randn(9, 8)

    def run():
        with collect_routing(layer):
            layer(x)

    (message,) = watched(layer, run)
    assert "probabilities already" in message


def test_our_own_layers_are_off_unless_collected_or_biased():
    layer, x = nn.Sequential(moe(d_model=8, n_experts=4, k=2, d_hidden=4)), torch.randn(9, 8)
    (message,) = watched(layer, lambda: layer(x))
    assert "no auxiliary loss can reach layer 0" in message

    def collected():
        with collect_routing(layer) as routing:
            y = layer(x)
        (y.sum() + auxiliary_loss(routing, balance=0.1)).backward()

    assert watched(layer, collected) == []
    options = {"selection_bias": torch.zeros(4)}
    biased = moe(d_model=8, n_experts=4, k=2, d_hidden=4, gate_options=options)
    assert watched(biased, lambda: biased(x)) == []
    dense = moe(d_model=8, n_experts=4, k=2, d_hidden=4, gate="softmax")
    assert watched(dense, lambda: dense(x)) == []


@pytest.mark.parametrize("grad", [True, False])
def test_without_gradients_no_loss_is_missed(grad):
    layer, x = moe(d_model=8, n_experts=4, k=2, d_hidden=4), torch.randn(9, 8)

    def run():
        with torch.set_grad_enabled(grad):
            layer(x)

    assert len(watched(layer, run)) == int(grad)
