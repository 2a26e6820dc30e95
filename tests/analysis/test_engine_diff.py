"""Sides that are engines, with an engine that computes as transformers does or a little apart."""

import numpy as np
import pytest
import torch

import tieline as tl
from tests.engines.fakes import fake_engine
from tieline.core.errors import TielineError
from tieline.hf.demo import DEMO_FOLDER, load_demo_model
from tieline.trace import save_trace

TWIN = """
import numpy as np, os, sys

def run(request, documents, tell):
    sys.path[:0] = {path!r}
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import OlmoeForCausalLM
    torch.set_num_threads(1)
    model = OlmoeForCausalLM.from_pretrained({folder!r}, dtype=torch.float32).eval()
    if request["job"] == "weights":
        from safetensors.numpy import load_file
        from safetensors.torch import load_file as load
        own = load(os.path.join({folder!r}, "model.safetensors"))
        return {{n: ROUND(own[n].float().numpy()) for n in request["names"]}}, {{"bits": 8.5}}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.from_numpy(ROUND(parameter.numpy().copy())))
    picks, logits, final = [], [], []
    for ids in documents:
        with torch.no_grad():
            out = model(torch.from_numpy(ids)[None], output_router_logits=True)
        scores = torch.stack(out.router_logits, 1)
        logits.append(scores.numpy())
        picks.append(scores.topk(2).indices.numpy().astype(np.int32))
        final.append(out.logits[0].log_softmax(-1).numpy())
        tell(len(picks))
    arrays = {{"picks": np.concatenate(picks), "logits": np.concatenate(logits)}}
    if request["logprobs"]:
        arrays["logprobs"] = np.concatenate(final)
    names = [f"model.layers.{{n}}.mlp.gate" for n in range(4)]
    facts = {{"layers": names, "dtype": {dtype!r}, "bits": 8.5, "versions": {{}}}}
    return arrays, facts

def ROUND(w):
    return {rounding}
"""
SIZE = {"tokens": 512, "sequence_length": 128}


def twin(tmp_path, monkeypatch, dtype="fp32", rounding="w", **facts):
    """An engine that is transformers in another process, its weights rounded in some way."""
    import sys

    code = TWIN.format(
        path=[x for x in sys.path if x], folder=str(DEMO_FOLDER), dtype=dtype, rounding=rounding
    )
    fake_engine(tmp_path, monkeypatch, code, "twin", **facts)


def test_an_engine_that_computes_alike_routes_and_predicts_alike(tmp_path, monkeypatch):
    twin(tmp_path, monkeypatch)
    found = tl.diff("demo", "twin:demo", **SIZE)
    assert found.metrics["flip:any"] == 0
    assert found.logits is not None
    assert found.logits.kl < 1e-9
    assert found.logits.tokens == 512 - 4
    assert found.dequantised is None
    assert found.provenance["b"]["engine"] == "twin"
    assert found.provenance["b"]["model"] == "twin:demo"


COARSE = "w if w.ndim < 2 else np.round(w * 64) / np.float32(64)"


def test_a_quantised_side_is_split_by_its_dequantised_weights(tmp_path, monkeypatch):
    twin(tmp_path, monkeypatch, "int8_group", COARSE)
    found = tl.diff("demo", "twin:demo", **SIZE)
    split = found.dequantised
    assert split is not None
    assert (split.side, split.bits) == ("B", 8.5)
    flips = [layer.flip.count for layer in found.layers]
    assert sum(flips) > 20
    assert [x.count for x in split.format_flips] == flips
    assert split.engine_any.count == 0
    assert split.engine_kl < 1e-9 < split.format_kl
    assert "the engine adds 0 tokens" in split.words
    assert found.metrics["flip:engine"] == 0
    assert not found.causes.alarm
    assert any(finding.kind == "dequantised" for finding in found.findings)
    turned = tl.diff("twin:demo", "demo", **SIZE)
    assert turned.dequantised.side == "A"
    assert turned.dequantised.format_any == split.format_any
    assert tl.diff("demo", "twin:demo", dequantise=False, **SIZE).dequantised is None


def test_an_engine_with_a_fault_of_its_own_is_told_from_its_format(tmp_path, monkeypatch):
    faulty = f"({COARSE}) if w.shape != (16, 128) else np.roll({COARSE}, 1, 0)"
    twin(tmp_path, monkeypatch, "int8_group", faulty)
    own = (tmp_path / "twin.py").read_text()
    head, _, tail = own.partition("return {n: ROUND(own[n].float().numpy())")
    fixed = "return {n: HONEST(own[n].float().numpy())"
    (tmp_path / "twin.py").write_text(
        head + fixed + tail + f"\n\ndef HONEST(w):\n    return {COARSE}\n"
    )
    found = tl.diff("demo", "twin:demo", **SIZE)
    assert found.causes.alarm
    assert found.dequantised.engine_any.value > 0.9 > found.dequantised.format_any.value


def test_an_engine_runs_the_tokens_of_a_trace(tmp_path, monkeypatch):
    twin(tmp_path, monkeypatch)
    model = load_demo_model()
    with tl.capture(model) as recorder, torch.no_grad():
        model(input_ids=torch.randint(3, 512, (3, 40)))
    save_trace(recorder.trace(), tmp_path / "trace")
    found = tl.diff(tmp_path / "trace", "twin:demo")
    assert found.metrics["flip:any"] == 0
    assert found.logits is None
    with pytest.raises(TielineError, match="runs its tokens"):
        tl.diff(tmp_path / "trace", "twin:demo", text="words")


def test_what_engines_cannot_do_is_refused_first(tmp_path, monkeypatch):
    twin(tmp_path, monkeypatch)
    for options, words in (
        ({"replay": True}, "replay"),
        ({"batch_b": 2}, "batch_b"),
        ({"experts_impl_b": "eager"}, "experts and revision"),
        ({"dtype_b": "bf16"}, "not computed by twin"),
        ({"engine_python": tmp_path / "none"}, "no such file"),
    ):
        with pytest.raises(TielineError, match=words):
            tl.diff("demo", "twin:demo", **SIZE, **options)
    with pytest.raises(TielineError, match="names no model"):
        tl.diff("demo", "twin:")
    with pytest.raises(TielineError, match="are for sides such as"):
        tl.diff("demo", "demo", tokenizer="demo")


def test_two_files_without_a_tokenizer_need_one(tmp_path, monkeypatch):
    twin(tmp_path, monkeypatch, gguf=True)
    with pytest.raises(TielineError, match="--tokenizer"):
        tl.diff("twin:a.gguf", "twin:b.gguf", **SIZE)
    found = tl.diff("twin:a.gguf", "twin:b.gguf", tokenizer="demo", **SIZE)
    assert found.metrics["flip:any"] == 0
    assert np.isfinite(found.logits.kl)
