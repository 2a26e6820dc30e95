"""Comparisons with engines, using a fake engine that returns what transformers computed."""

import json
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import tieline as tl
from tests.engines.fakes import fake_engine
from tieline.analysis import engine_diff
from tieline.core.errors import TielineError
from tieline.models.demo import DEMO_FOLDER, demo_text, load_demo_model, load_demo_tokenizer
from tieline.run.corpus import tokenise
from tieline.trace import save_trace

TWIN = """
import json, numpy as np
from pathlib import Path

def run(request, documents, tell):
    if request["job"] == "weights":
        weights = np.load({weights!r})
        unquantised = {{name: "F32" for name in {exact!r}}}
        arrays = {{name: weights[name] for name in request["names"]}}
        return arrays, {{"bits": 8.5, "unquantised": unquantised}}
    stored = dict(np.load({arrays!r}))
    assert np.array_equal(np.concatenate(documents), stored.pop("tokens"))
    if not request["logprobs"]:
        stored.pop("logprobs")
    tell(len(documents))
    return stored, json.loads(Path({facts!r}).read_text())
"""
SIZE = {"tokens": 512, "sequence_length": 128}


def coarse(weight):
    """Weights on a grid, as a quantised model has them; vectors stay as they are."""
    return weight if weight.ndim < 2 else (weight * 64).round() / 64


def computed(model, documents):
    """What an engine would return for these documents."""
    picks, logits, final = [], [], []
    with torch.no_grad():
        for ids in documents:
            out = model(input_ids=ids[None].to(model.device), output_router_logits=True)
            logits.append(torch.stack(out.router_logits, 1).cpu())
            picks.append(logits[-1].topk(2).indices.int())
            final.append(out.logits[0].log_softmax(-1).cpu())
    tokens = [ids.cpu() for ids in documents]
    per_document = {"picks": picks, "logits": logits, "logprobs": final, "tokens": tokens}
    return {name: torch.cat(list(values)).numpy() for name, values in per_document.items()}


@pytest.fixture(scope="module")
def documents():
    return tokenise(load_demo_tokenizer(), demo_text(), 512, 128).sequences


@pytest.fixture(scope="module")
def plain(documents):
    return computed(load_demo_model(), documents)


@pytest.fixture(scope="module")
def rounded(documents):
    """Answers of the model with coarse weights, without and with a fault (rotated router rows)."""
    model = load_demo_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(coarse(parameter))
    honest = computed(model, documents)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.roll(1, 0))
    return honest, computed(model, documents)


def twin(tmp_path, monkeypatch, arrays, dtype="fp32", exact=(), **facts):
    """An engine that returns these arrays, and the demo model's coarse weights if asked."""
    files = {name: tmp_path / f"{name}.npz" for name in ("weights", "arrays")}
    np.savez(files["arrays"], **arrays)
    weights = load_file(DEMO_FOLDER / "model.safetensors")
    np.savez(files["weights"], **{name: coarse(x.float()).numpy() for name, x in weights.items()})
    facts_file = tmp_path / "facts.json"
    names = [f"model.layers.{layer}.mlp.gate" for layer in range(4)]
    facts_file.write_text(
        json.dumps({"layers": names, "dtype": dtype, "bits": 8.5, "versions": {}})
    )
    fields = {name: str(path) for name, path in (files | {"facts": facts_file}).items()}
    fake_engine(tmp_path, monkeypatch, TWIN.format(**fields, exact=list(exact)), "twin", **facts)


def test_an_engine_that_computes_alike_routes_and_predicts_alike(tmp_path, monkeypatch, plain):
    twin(tmp_path, monkeypatch, plain)
    comparison = tl.diff("demo", "twin:demo", **SIZE)
    assert comparison.metrics["flip:any"] == 0
    assert comparison.logits is not None
    assert comparison.logits.kl < 1e-9
    assert comparison.logits.tokens == 512 - 4
    assert comparison.dequantised is None
    assert comparison.provenance["b"]["engine"] == "twin"
    assert comparison.provenance["b"]["model"] == "twin:demo"


def test_a_quantised_side_is_split_by_its_dequantised_weights(tmp_path, monkeypatch, rounded):
    twin(tmp_path, monkeypatch, rounded[0], "int8_group")
    comparison = tl.diff("demo", "twin:demo", **SIZE)
    split = comparison.dequantised
    assert split is not None
    assert (split.side, split.bits) == ("B", 8.5)
    flips = [layer.flip.count for layer in comparison.layers]
    assert sum(flips) > 20
    assert [x.count for x in split.format_flips] == flips
    assert split.engine_any.count == 0
    assert split.engine_kl < 1e-9 < split.format_kl
    assert comparison.metrics["flip:engine"] == 0
    assert not comparison.causes.alarm
    assert any(fact.kind == "dequantised" for fact in comparison.observations)
    turned = tl.diff("twin:demo", "demo", **SIZE)
    assert turned.dequantised.side == "A"
    assert turned.dequantised.format_any == split.format_any
    assert tl.diff("demo", "twin:demo", dequantise=False, **SIZE).dequantised is None


def test_an_engine_with_a_fault_is_told_from_its_format(tmp_path, monkeypatch, rounded):
    twin(tmp_path, monkeypatch, rounded[1], "int8_group")
    comparison = tl.diff("demo", "twin:demo", **SIZE)
    assert comparison.causes.alarm
    assert comparison.dequantised.engine_any.value > 0.9 > comparison.dequantised.format_any.value


def test_weights_that_are_not_those_of_the_original_are_named(tmp_path, monkeypatch, rounded):
    twin(tmp_path, monkeypatch, rounded[0], "int8_group")
    stored = dict(np.load(tmp_path / "weights.npz"))
    expert_weight, other_weight = (
        f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in (3, 11)
    )
    stored[expert_weight], stored[other_weight] = stored[other_weight], stored[expert_weight]
    np.savez(tmp_path / "weights.npz", **stored)
    comparison = tl.diff("demo", "twin:demo", **SIZE)
    assert comparison.causes.alarm
    assert comparison.causes.patterns[0].kind == "weights"
    assert comparison.causes.patterns[0].layer in (expert_weight, other_weight)
    (pattern,) = [x for x in comparison.causes.patterns if x.kind == "weights"]
    assert (pattern.number, pattern.detail) == (2, "B")
    assert comparison.observations[0].case == "weights:pattern"


def test_a_router_that_is_stored_unquantised_and_differs_is_named(tmp_path, monkeypatch, rounded):
    router, norm = "model.layers.2.mlp.gate.weight", "model.layers.2.input_layernorm.weight"
    twin(tmp_path, monkeypatch, rounded[0], "int8_group", exact=(router, norm))
    stored = dict(np.load(tmp_path / "weights.npz"))
    original = load_demo_model().get_parameter(router).detach().cpu().numpy()
    np.savez(tmp_path / "weights.npz", **stored | {router: original, norm: stored[norm] + 0.1})
    same = tl.diff("demo", "twin:demo", **SIZE)
    assert not [x for x in same.causes.patterns if x.kind == "weights"]
    np.savez(tmp_path / "weights.npz", **stored | {router: original * (1 + 1e-4)})
    comparison = tl.diff("demo", "twin:demo", **SIZE)
    (pattern,) = [x for x in comparison.causes.patterns if x.kind == "weights"]
    assert (pattern.layer, pattern.number, pattern.detail) == (router, 1, "B")
    assert pattern.effect == pytest.approx(1e-4, rel=0.01)
    assert comparison.causes.alarm


def test_weights_whose_axes_of_one_were_left_out_are_those_of_the_model(monkeypatch):
    config = Qwen2MoeConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
    )
    model, gate = Qwen2MoeForCausalLM(config), "model.layers.0.mlp.shared_expert_gate.weight"
    stored = checkpoint_arrays(model)
    assert stored[gate].shape == (1, 8)
    monkeypatch.setattr(engine_diff, "dequantised_weights", lambda *_: (stored, {"bits": 8}))
    stored[gate] = stored[gate][0]  # as every GGUF has it that llama.cpp wrote
    rebuilt = engine_diff.dequantised_model(model, "llama.cpp", "a.gguf")
    assert rebuilt.mismatched == ()
    assert torch.equal(rebuilt.model.get_parameter(gate), model.get_parameter(gate))
    stored[gate] = stored[gate][:4]
    with pytest.raises(TielineError, match=r"a.gguf: .* is \(4,\), the model has \(1, 8\)"):
        engine_diff.dequantised_model(model, "llama.cpp", "a.gguf")


def checkpoint_arrays(model):
    """The tensors of a model as its checkpoint has them."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {k: v.numpy() for k, v in load_file(f"{folder}/model.safetensors").items()}


def test_an_engine_runs_the_tokens_of_a_trace(tmp_path, monkeypatch):
    model, ids = load_demo_model(), torch.randint(3, 512, (3, 40))
    twin(tmp_path, monkeypatch, computed(model, ids))
    with tl.capture(model) as recorder, torch.no_grad():
        model(input_ids=ids)
    save_trace(recorder.trace(), tmp_path / "trace")
    comparison = tl.diff(tmp_path / "trace", "twin:demo")
    assert comparison.metrics["flip:any"] == 0
    assert comparison.logits is None
    with pytest.raises(TielineError, match="runs its tokens"):
        tl.diff(tmp_path / "trace", "twin:demo", text="words")


def test_what_engines_cannot_do_is_refused_first(tmp_path, monkeypatch, plain):
    twin(tmp_path, monkeypatch, plain)
    for options, message in (
        ({"replay": True}, "replay"),
        ({"batch_size_b": 2}, "batch_size_b"),
        ({"experts_impl_b": "eager"}, "experts_impl_b and revision_b"),
        ({"dtype_b": "bf16"}, "not computed by twin"),
        ({"engine_python": tmp_path / "none"}, "no such file"),
    ):
        with pytest.raises(TielineError, match=message):
            tl.diff("demo", "twin:demo", **SIZE, **options)
    with pytest.raises(TielineError, match="names no model"):
        tl.diff("demo", "twin:")
    with pytest.raises(TielineError, match="are for sides such as"):
        tl.diff("demo", "demo", tokenizer="demo")


def test_two_files_without_a_tokenizer_need_one(tmp_path, monkeypatch, plain):
    twin(tmp_path, monkeypatch, plain, gguf=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TielineError, match=r"twin: no such file: a\.gguf"):
        tl.diff("demo", "twin:a.gguf", **SIZE)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(TielineError, match="that has one by tokenizer"):
        tl.diff("twin:a.gguf", "twin:b.gguf", **SIZE)
    comparison = tl.diff("twin:a.gguf", "twin:b.gguf", tokenizer="demo", **SIZE)
    assert comparison.metrics["flip:any"] == 0
    assert np.isfinite(comparison.logits.kl)
