"""Dense networks become mixtures without a change of the model's function."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from tieline.core.errors import TielineError, UnsupportedModelError
from tieline.lab.training.config import GateConfig, gate_config
from tieline.lab.training.routed_networks import route_networks_
from tieline.routing import CosineRouter, MoE, SmoothTopK, SoftMoE

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "initializer_range": 0.5,
}
COSINE = GateConfig(name="cosine", k=2, router="cosine", router_options={"d_proj": 4})


def bert(**options):
    config = BertConfig(vocab_size=40, **(SIZES | options))
    return BertForSequenceClassification(config).eval(), {"input_ids": torch.arange(10).view(2, 5)}


def vit(**options):
    config = ViTConfig(image_size=8, patch_size=4, num_labels=3, **(SIZES | options))
    return ViTForImageClassification(config).eval(), {"pixel_values": torch.randn(2, 3, 8, 8)}


@pytest.mark.parametrize("gate", [gate_config("smoe"), gate_config("smooth50"), COSINE], ids=str)
@pytest.mark.parametrize("make", [bert, vit])
def test_the_function_is_kept_and_only_the_chosen_networks_route(make, gate):
    model, batch = make()
    with torch.no_grad():
        before = model(**batch).logits
        names = route_networks_(model, [1, -1], gate, 4)
        after = model(**batch).logits
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MoE)}
    assert list(layers) == names
    assert len(names) == 2
    assert not any(".0." in name for name in names)


def test_the_mixture_is_what_computes_and_its_experts_are_copies():
    model, batch = bert(hidden_act="relu")
    dense = model.bert.encoder.layer[2]
    w_in, b_out = dense.intermediate.dense.weight.clone(), dense.output.dense.bias.clone()
    before = model(**batch).logits
    (name,) = route_networks_(model, [2], gate_config("smooth1"), 4)
    layer = model.get_submodule(name)
    assert torch.equal(layer.experts.w_in, w_in.expand(4, -1, -1))
    assert torch.equal(layer.experts.b_out, b_out.expand(4, -1))
    assert isinstance(layer.gate, SmoothTopK)
    with torch.no_grad():
        layer.experts.w_out += torch.randn_like(layer.experts.w_out)
    assert (model(**batch).logits - before).abs().max() > 1e-3
    model(**batch).logits.sum().backward()
    assert layer.router.weight.grad.abs().sum() > 0


def test_soft_slots_take_the_place_of_a_network_and_start_from_its_copies():
    model, batch = vit()
    w_in = model.vit.layers[2].mlp.fc1.weight.clone()
    soft = GateConfig(name="soft", gate="soft_moe", gate_options={"slots": 3})
    (name,) = route_networks_(model, [2], soft, 4)
    layer = model.get_submodule(name)
    assert isinstance(layer, SoftMoE)
    assert torch.equal(layer.experts.w_in, w_in.expand(4, -1, -1))
    model(**batch).logits.sum().backward()
    assert layer.phi.grad.abs().sum() > 0


def test_any_router_can_be_asked_for():
    model, _ = vit()
    (name,) = route_networks_(model, [0], COSINE, 6)
    assert isinstance(model.get_submodule(name).router, CosineRouter)


def test_other_activations_gated_networks_and_places_are_refused_untouched():
    model, _ = bert(hidden_act="tanh")
    with pytest.raises(UnsupportedModelError, match="Tanh is not one of"):
        route_networks_(model, [0, 1], gate_config("smoe"), 4)
    model, _ = bert()
    with pytest.raises(TielineError, match=r"3 networks, got places \[0, 3\]"):
        route_networks_(model, [0, 3], gate_config("smoe"), 4)
    assert not any(isinstance(module, MoE) for module in model.modules())
    gated = LlamaForCausalLM(LlamaConfig(vocab_size=20, num_key_value_heads=2, **SIZES))
    with pytest.raises(UnsupportedModelError, match="gated SiLU"):
        route_networks_(gated, [0], gate_config("smoe"), 4)
