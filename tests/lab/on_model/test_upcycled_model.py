"""Upcycling: the function is unchanged, and the rest of the package sees a mixture."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.models.dense import KINDS, dense_model
from tests.models.tiny import tiny_model
from tieline.core.errors import ParameterError, UnsupportedModelError
from tieline.lab.on_model.upcycle import probe_output
from tieline.lab.on_model.upcycled_model import UpcycledFFN, find_dense_ffns, upcycle_
from tieline.models import capture, find_routers, load_pretrained, load_smoothed, smooth_, unsmooth_

pytestmark = pytest.mark.filterwarnings("ignore")


def numbers(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_numbers(model, before):
    after = model.state_dict()
    return after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_function_is_preserved(kind, k):
    model = dense_model(kind).double()
    before = probe_output(model)
    done = upcycle_(model, n_experts=4, k=k)
    after = probe_output(model)
    assert len(done.layers) == 3
    assert (after - before).abs().max() <= 1e-12 * before.abs().max()
    loads = [(router.weight != 0).all() for router in find_routers(model).values()]
    assert len(loads) == 3
    assert all(loads)


@pytest.mark.parametrize("kind", ["llama", "bert", "vit"])
def test_the_function_is_preserved_to_one_in_a_million_in_single_precision(kind):
    model = dense_model(kind)
    before = probe_output(model)
    upcycle_(model, n_experts=8, k=2, router_init="orthogonal", router_scale=1.0)
    assert (probe_output(model) - before).abs().max() <= 1e-6 * before.abs().max()


def test_experts_start_equal_and_noise_sets_them_apart_by_the_stated_size():
    model = dense_model("llama")
    source = model.model.layers[0].mlp.down_proj.weight.clone()
    upcycle_(model, n_experts=16, k=2, noise=0.1)
    down = model.model.layers[0].mlp.experts.down_proj
    relative = (down - source).square().mean().sqrt() / source.square().mean().sqrt()
    assert relative.item() == pytest.approx(0.1, rel=0.05)
    assert not torch.equal(down[0], down[1])
    plain = dense_model("llama")
    upcycle_(plain, n_experts=3, k=2)
    assert all((w == w[:1]).all() for w in plain.model.layers[1].mlp.experts.parameters())


def test_router_inits_have_the_stated_size_and_shape():
    for how in ("normal", "orthogonal"):
        model = dense_model("llama")
        upcycle_(model, n_experts=16, k=2, router_init=how, router_scale=0.5)
        w = model.model.layers[2].mlp.gate.weight
        assert w.square().mean().sqrt().item() == pytest.approx(0.5, rel=0.1)
        gram = w @ w.T
        off = (gram - gram.diag().diag()).abs().max()
        assert (off < 1e-4) == (how == "orthogonal")


def test_only_the_chosen_layers_change_by_place_or_by_name():
    model = dense_model("bert")
    names = list(find_dense_ffns(model))
    done = upcycle_(model, n_experts=2, k=1, layers=[2, names[0]])
    assert done.layers == (names[0], names[2])
    kinds = [type(layer.intermediate).__name__ for layer in model.bert.encoder.layer]
    assert kinds == ["UpcycledFFN", "BertIntermediate", "UpcycledFFN"]


@pytest.mark.parametrize("kind", ["llama", "bert", "llama+bias"])
def test_parameters_are_counted_as_they_are(kind):
    model = dense_model(kind)
    done = upcycle_(model, n_experts=4, k=2, layers=[0, 1])
    after = sum(p.numel() for p in model.parameters())
    experts = sum(
        p.numel() for m in model.modules() if isinstance(m, UpcycledFFN)
        for p in m.experts.parameters()
    )  # fmt: skip
    assert done.parameters_after == after
    assert done.parameters_per_token == after - experts // 2


def test_the_result_is_captured_like_any_mixture():
    model = dense_model("qwen2")
    upcycle_(model, n_experts=8, k=2, router_scale=0.5)
    ids = torch.arange(3, 27).view(2, 12)
    with torch.inference_mode(), capture(model) as recorder:
        model(input_ids=ids)
    trace = recorder.trace()
    assert [layer.facts.k for layer in trace.layers] == [2, 2, 2]
    assert torch.allclose(trace.layers[0].weights.sum(1), torch.ones(24))
    assert trace.layers[0].distance is not None


def test_training_reaches_router_and_experts_and_sets_experts_apart():
    model = dense_model("llama").train()
    upcycle_(model, n_experts=4, k=2, router_scale=0.5)
    mlp = model.model.layers[0].mlp
    assert mlp.training
    assert mlp.gate.weight.requires_grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(3, 63).view(4, 15)
    for _ in range(2):  # equal experts give the router no gradient in the first step
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert mlp.gate.weight.grad.abs().sum() > 0
    assert not torch.equal(mlp.experts.down_proj[0], mlp.experts.down_proj[1])


@pytest.mark.parametrize("kind", ["llama", "llama+bias", "bert", "vit"])
def test_a_saved_mixture_is_loaded_as_it_was(kind, tmp_path):
    model = dense_model(kind)
    upcycle_(model, n_experts=4, k=2, layers=[1], noise=0.05, router_scale=0.5)
    model.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path)
    assert type(again) is type(model)
    assert same_numbers(again, numbers(model))
    assert torch.equal(probe_output(again.eval()), probe_output(model))
    again.save_pretrained(tmp_path / "twice")
    assert same_numbers(load_pretrained(tmp_path / "twice"), numbers(model))


def test_a_saved_mixture_generates():
    model = dense_model("llama")
    ids = torch.arange(3, 9).view(1, 6)
    before = model.generate(ids, max_new_tokens=6, do_sample=False)
    upcycle_(model, n_experts=4, k=2)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), before)


def test_a_mixture_is_smoothed_saved_and_loaded(tmp_path):
    model = dense_model("llama")
    upcycle_(model, n_experts=4, k=2, noise=0.5, router_scale=0.5)
    plain = probe_output(model)
    smooth_(model, epsilon=0.5)
    smoothed = probe_output(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(probe_output(load_smoothed(tmp_path)), smoothed)
    unsmooth_(model)
    assert torch.equal(probe_output(model), plain)
    assert not torch.allclose(plain, smoothed, atol=1e-6)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (AutoModelForCausalLM, r"changed by Tieline \(upcycle\)"),
        (LlamaForCausalLM, r"no file named model\.safetensors"),
    ],
)
def test_without_tieline_a_saved_mixture_does_not_load(loader, message, tmp_path):
    model = dense_model("llama")
    upcycle_(model, n_experts=4, k=2)
    model.save_pretrained(tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        loader.from_pretrained(tmp_path)


BAD = [
    ({"n_experts": 4, "k": 5}, ParameterError, "k=5 of 4 experts"),
    ({"n_experts": 4, "k": 0}, ParameterError, "k=0 of 4"),
    ({"n_experts": 1, "k": 1}, ParameterError, "at least 2 experts, got 1"),
    ({"n_experts": 4, "k": 2, "layers": [3]}, ParameterError, "no such layer: 3.*0 to 2"),
    ({"n_experts": 4, "k": 2, "layers": [-1]}, ParameterError, "no such layer: -1"),
    ({"n_experts": 4, "k": 2, "layers": ["mlp"]}, ParameterError, "no such layer: 'mlp'"),
    ({"n_experts": 4, "k": 2, "layers": []}, ParameterError, "at least one network"),
    ({"n_experts": 4, "k": 2, "noise": -0.1}, ParameterError, "noise must be"),
    ({"n_experts": 4, "k": 2, "noise": float("nan")}, ParameterError, "noise must be"),
    ({"n_experts": 4, "k": 2, "router_init": "zeros"}, ParameterError, "router_init.*'zeros'"),
    ({"n_experts": 4, "k": 2, "router_scale": 0.0}, ParameterError, "router_scale"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_input_is_refused_and_leaves_the_model_alone(options, error, message):
    model = dense_model("llama")
    before, config = numbers(model), model.config.to_dict()
    with pytest.raises(error, match=message):
        upcycle_(model, **options)
    assert same_numbers(model, before)
    assert model.config.to_dict() == config


def test_a_mixture_is_refused_be_it_ours_or_not():
    for model in (tiny_model("mixtral"), dense_model("llama")):
        if not find_dense_ffns(model):
            before = numbers(model)
        else:
            upcycle_(model, n_experts=2, k=1)
            before = numbers(model)
        with pytest.raises(UnsupportedModelError, match="Mixture of Experts already"):
            upcycle_(model, n_experts=4, k=2)
        assert same_numbers(model, before)


def test_a_model_without_a_known_network_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear has no feed-forward network"):
        upcycle_(torch.nn.Linear(2, 2), n_experts=4, k=2)


def test_a_network_that_does_more_than_its_parts_say_is_refused():
    model = dense_model("llama")
    mlp = model.model.layers[2].mlp
    plain = type(mlp)

    class Scaled(plain):
        def forward(self, x):
            return 2 * super().forward(x)

    mlp.__class__ = Scaled
    model.train()
    before = numbers(model)
    with pytest.raises(UnsupportedModelError, match=r"layers\.2\.mlp.*does more than its parts"):
        upcycle_(model, n_experts=4, k=2)
    assert same_numbers(model, before)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_experts": 10**6, "k": 0}, "k=0"),
        ({"layers": ["model.layers.7.mlp"]}, "no such layer"),
        ({"layers": "all"}, "malformed"),
        ({"n_experts": "4"}, "malformed"),
        ({"n_experts": 6}, "does not fit its configuration"),
    ],
)
def test_a_wrong_configuration_is_refused(change, message, tmp_path):
    model = dense_model("llama")
    upcycle_(model, n_experts=4, k=2)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["tieline"]["changes"]["upcycle"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises((ParameterError, UnsupportedModelError), match=message):
        load_pretrained(tmp_path)


def test_a_frozen_network_becomes_a_frozen_mixture():
    model = dense_model("llama").requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    upcycle_(model, n_experts=4, k=2)
    mixtures = [module for module in model.modules() if isinstance(module, UpcycledFFN)]
    trained = [{p.requires_grad for p in mixture.parameters()} for mixture in mixtures]
    assert trained == [{False}, {True}, {False}]


def test_weights_that_are_not_renormalised_stay_so_when_loaded(tmp_path):
    model = dense_model("llama")
    upcycle_(model, n_experts=4, k=2, renormalise=False)
    model.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path)
    assert not any(router.norm_topk_prob for router in find_routers(again).values())
    assert torch.equal(probe_output(again.eval()), probe_output(model))


def test_scores_are_computed_in_single_precision_at_least():
    model = dense_model("llama").bfloat16()
    upcycle_(model, n_experts=4, k=2, router_scale=0.5)
    gate = model.model.layers[0].mlp.gate
    x = torch.randn(5, gate.weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    logits, weights, _ = gate(x)
    assert logits.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ gate.weight.float().T)
