"""The decoder and its stock form."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.lab.training.tiny import tiny
from tieline.core.errors import UnsupportedModelError
from tieline.lab.training.language_tasks import (
    hard_stock_form,
    moe_layers,
    new_decoder,
    stock_form,
    stock_form_obstacle,
    trained_smoothing,
)
from tieline.lab.training.soft_to_hard import hard_gates
from tieline.models import capture, find_routers, load_pretrained

IDS = torch.arange(2 * 24).view(2, 24) * 7 % 256


def model_of(gate):
    torch.manual_seed(0)
    config = tiny(gate)
    return new_decoder(config.model, config.gate).eval()


@torch.no_grad()
@pytest.mark.parametrize("gate", ["smoe", "top3"])
def test_the_stock_form_computes_the_same(gate):
    model = model_of(gate)
    stock = hard_stock_form(model)
    torch.testing.assert_close(stock(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)
    assert stock.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    ids = torch.zeros(1, 2, dtype=torch.long)
    assert stock.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 5)


@torch.no_grad()
def test_either_attention_starts_from_the_same_weights_and_is_saved(tmp_path):
    config, decoders = tiny("smoe"), {}
    for kind in ("softmax", "sigmoid"):
        torch.manual_seed(0)
        shape = config.replace(model__attention=kind).model
        decoders[kind] = new_decoder(shape, config.gate).eval()
    ours, plain = (decoders[kind].state_dict() for kind in ("sigmoid", "softmax"))
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    logits = {kind: model(IDS).logits for kind, model in decoders.items()}
    assert (logits["sigmoid"] - logits["softmax"]).abs().max() > 1e-4
    model = decoders["sigmoid"]
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    torch.testing.assert_close(loaded(IDS).logits, logits["sigmoid"])
    stock_form(model).save_pretrained(tmp_path / "stock")
    stock = load_pretrained(tmp_path / "stock").eval()
    torch.testing.assert_close(stock(IDS).logits, logits["sigmoid"], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_stock_form_of_a_smooth_gate_is_its_hard_form():
    model = model_of("smooth1")
    with torch.no_grad():
        next(iter(moe_layers(model).values())).gate.theta.fill_(1.0)
    smooth, stock = model(IDS).logits, hard_stock_form(model)(IDS).logits
    with hard_gates(model):
        torch.testing.assert_close(stock, model(IDS).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(smooth, stock, atol=1e-4)
    torch.testing.assert_close(model(IDS).logits, smooth, atol=0, rtol=0)
    ramp = trained_smoothing(model)
    assert (ramp["k"], ramp["a"], ramp["b"], ramp["budget"]) == (2, 1.0, 1.0, 2.5)
    assert ramp["epsilon"] == pytest.approx([1.3132617], abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("gate", ["smooth1", "smooth50", "projected"])
def test_a_smooth_model_has_a_smoothed_stock_form(gate):
    model = model_of(gate)
    for layer in moe_layers(model).values():
        layer.gate.theta.fill_(0.0)
    smooth = model(IDS).logits
    torch.testing.assert_close(stock_form(model)(IDS).logits, smooth, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(hard_stock_form(model)(IDS).logits, smooth, atol=1e-4)
    for layer in moe_layers(model).values():
        layer.gate.budget = 2.0  # annealed
    assert torch.equal(stock_form(model)(IDS).logits, hard_stock_form(model)(IDS).logits)


def test_the_stock_form_is_captured_like_any_model():
    stock = hard_stock_form(model_of("smoe"))
    assert len(find_routers(stock)) == 1
    with torch.no_grad(), capture(stock) as captured:
        stock(input_ids=IDS)
    assert captured.trace().layers[0].facts.k == 2


@pytest.mark.parametrize("gate", ["remoe", "cosine", "perturbed", "sigmoid"])
def test_what_no_family_routes_like_has_no_stock_form(gate):
    model = model_of(gate)
    assert stock_form_obstacle(model)
    with pytest.raises(UnsupportedModelError, match=r"no stock form: model.layers.0.mlp.moe"):
        hard_stock_form(model)
    assert trained_smoothing(model) is None


@torch.no_grad()
@pytest.mark.parametrize("gate", ["smooth50", "remoe", "perturbed"])
def test_a_saved_model_is_loaded_with_its_routing(gate, tmp_path):
    model = model_of(gate)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    gates = [layer.gate for layer in moe_layers(loaded).values()]
    assert repr(gates) == repr([layer.gate for layer in moe_layers(model).values()])


def test_paired_seeds_begin_with_the_same_weights():
    weights, other = (model_of(gate).state_dict() for gate in ("smoe", "smooth1"))
    for name, tensor in weights.items():
        assert torch.equal(tensor, other[name]), name
