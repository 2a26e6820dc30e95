"""Every command reads the folders that other commands make, or says in a sentence why not."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.tiny import lively, tiny_model
from tieline.lab.on_model.rerouted_model import reroute_
from tieline.lab.on_model.upcycled_model import upcycle_
from tieline.models import smooth_
from tieline.models.demo import load_demo_tokenizer

WORDS = 512
FEW = ("--tokens", 128, "--batch-size", 1)


def _dense():
    torch.manual_seed(0)
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, hidden_size=16, intermediate_size=24, **sizes)
    )


def _smoothed():
    model = lively(tiny_model("olmoe", vocab_size=WORDS))
    smooth_(model, epsilon=0.5)
    return model


def _rerouted():
    model = lively(tiny_model("olmoe", vocab_size=WORDS))
    reroute_(model, router="cosine")
    return model


def _upcycled():
    model = _dense()
    upcycle_(model, n_experts=4, k=2, router_scale=0.5)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    makers = {"smoothed": _smoothed, "rerouted": _rerouted, "upcycled": _upcycled}
    paths = {}
    for name, make in makers.items():
        paths[name] = tmp_path_factory.mktemp(name)
        make().eval().save_pretrained(paths[name])
        load_demo_tokenizer().save_pretrained(paths[name])
    return paths


@pytest.fixture(scope="module")
def runs():
    """Exit code, screen, messages and JSON of the commands run so far, by their arguments."""
    return {}


@pytest.fixture
def run(tieline, runs, tmp_path):
    """Run a command once; later calls return the stored result."""

    def once(*arguments):
        if arguments not in runs:
            file = tmp_path / "result.json"
            ended = tieline(*arguments, *FEW, "--json", file)
            runs[arguments] = (*ended, json.loads(file.read_text()))
        return runs[arguments]

    return once


@pytest.mark.parametrize("name", ["smoothed", "rerouted", "upcycled"])
def test_every_command_reads_a_changed_model(tieline, run, folders, name):
    folder = folders[name]
    code, _, message, result = run("inspect", folder)
    assert (code, len(message.splitlines())) == (0, 1)
    assert message.startswith("wrote ")
    assert all(layer["gap"]["value"] for layer in result["measures"]["layers"])
    used = [layer["used"] for layer in result["measures"]["layers"]]
    assert all(2 < experts < 8 for experts in used) if name == "smoothed" else used == [None, None]
    code, _, _, result = run("audit", folder, "--formats", "bf16")
    assert code == 0
    assert any(row["name"] == "router bf16" for row in result["effects"])
    code, _, _, result = run("diff", folder, folder, "--dtype-b", "fp8_e4m3-emulated")
    assert code == 0
    assert result["tokens"]["anywhere"]["count"] > 0
    code, shown, _ = tieline("design", "--model", folder, "--json")
    assert code == 0
    assert json.loads(shown)["rows"][0]["shape"]["k"] == 2
    code, _, message = tieline("upcycle", folder, "-o", folder / "up")
    assert code == 2
    assert "is a Mixture of Experts already" in message


def test_an_inspection_says_what_is_left_to_flip(run, folders):
    code, shown, _, _ = run("inspect", folders["smoothed"])
    text = " ".join(shown.split())
    assert code == 0
    assert "Routing is smoothed: tokens use " in text
    assert "of tokens exchange two experts" in text
    assert "2 of 8 experts, smoothed" in text
    assert any(line.split()[:2] == ["layer", "experts"] for line in shown.splitlines())


def test_what_a_changed_model_cannot_answer_is_said(run, folders):
    _, shown, _, _ = run("audit", folders["smoothed"], "--formats", "bf16")
    assert "a flip is a change of the experts with any weight" in " ".join(shown.split())
    _, shown, _, _ = run("audit", folders["rerouted"], "--formats", "bf16")
    assert "Not possible: score noise" in " ".join(shown.split())
    _, shown, _, _ = run("diff", *[folders["smoothed"]] * 2, "--dtype-b", "fp8_e4m3-emulated")
    assert "A and B are smoothed: compared are the k experts" in " ".join(shown.split())


def test_a_gate_that_is_no_top_k_is_refused_in_a_sentence(tieline, tmp_path):
    model = lively(tiny_model("olmoe", vocab_size=WORDS))
    reroute_(model, gate="sigmoid")
    model.save_pretrained(tmp_path)
    load_demo_tokenizer().save_pretrained(tmp_path)
    for command in ("inspect", "audit", "smooth"):
        code, _, message = tieline(command, tmp_path)
        assert code == 2
        assert "replaced by one that is no top-k of its scores" in message


def test_the_folders_of_a_training_run_name_the_one_that_is_read(tieline, tmp_path):
    run = tmp_path / "run"
    code, _, _ = tieline("train", "demo-smoke-smooth1", "--out", run)
    assert code == 0
    code, shown, _ = tieline("inspect", run / "stock", *FEW, "--json")
    assert code == 0
    assert json.loads(shown)["measures"]["layers"][0]["used"] > 2
    for folder in (run, run / "model"):
        code, _, message = tieline("inspect", folder)
        assert code == 2
        assert f"its form for transformers is '{run / 'stock'}'" in message
