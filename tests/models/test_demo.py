"""The model in the box is small, plain, trained, balanced and offline, as its log says."""

import hashlib
import json
import math
import socket
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tieline.core.ranking import stable_topk
from tieline.models.demo import (
    DEMO_FOLDER,
    demo_text,
    load_demo_model,
    load_demo_tokenizer,
)

pytestmark = pytest.mark.usefixtures("single_thread")

EXPECTED_FILES = {
    "NOTICE",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "text.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}


@pytest.fixture(scope="module")
def model():
    return load_demo_model()


@pytest.fixture(scope="module")
def tokenizer():
    return load_demo_tokenizer()


@pytest.fixture(scope="module")
def log():
    return json.loads((DEMO_FOLDER / "training.json").read_bytes())


@pytest.fixture(scope="module")
def windows(tokenizer, log):
    """The first 32 windows of context + 1 tokens, some 16,384 tokens of the held-out text."""
    length = log["recipe"]["context"] + 1
    ids = torch.tensor(tokenizer(demo_text(), verbose=False)["input_ids"])
    return ids[: 32 * length].view(32, length)


@pytest.fixture(scope="module")
def validation(model, windows):
    """Loss of each window in nats per token, and the choices per (layer, expert)."""
    losses, load = [], torch.zeros(4, 16, dtype=torch.long)
    with torch.no_grad():
        for row in windows.split(1):
            output = model(input_ids=row[:, :-1], output_router_logits=True, use_cache=False)
            losses.append(cross_entropy(output.logits[0].double(), row[0, 1:]))
            for layer, scores in enumerate(output.router_logits):
                load[layer] += stable_topk(scores, 2).indices.flatten().bincount(minlength=16)
    return torch.stack(losses), load


def unigram_entropy(tokens):
    """Entropy of the token counts: no model without context can have a smaller loss on them."""
    share = tokens.flatten().bincount().double() / tokens.numel()
    return torch.special.entr(share).sum().item()


def test_folder_holds_exactly_the_named_files_and_no_pickle():
    assert {path.name for path in DEMO_FOLDER.iterdir()} == EXPECTED_FILES


def test_folder_is_small():
    assert sum(path.stat().st_size for path in DEMO_FOLDER.iterdir()) <= 4_500_000


def test_weights_are_stored_in_bfloat16_and_compute_in_float32(model):
    stored = load_file(DEMO_FOLDER / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert sum(weight.numel() for weight in stored.values()) == 1_976_448
    assert not model.training


def test_architecture_is_a_plain_softmax_top_2_of_16_experts_in_4_layers(model):
    config = model.config
    assert config.architectures == ["OlmoeForCausalLM"]
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (4, 16, 2)
    assert not config.norm_topk_prob
    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == (
        128,
        4,
        64,
    )
    assert len(model.model.layers) == 4


def test_old_and_new_readers_find_what_engines_need():
    """vLLM takes rms_norm_eps as 1e-5 whatever is stored; mlx-lm reads the outer rope_theta."""
    config = json.loads((DEMO_FOLDER / "config.json").read_bytes())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000
    assert config["rms_norm_eps"] == 1e-5
    assert not config["tie_word_embeddings"]
    assert (config["dtype"], config["hidden_size"] // config["num_attention_heads"]) == (
        "bfloat16",
        32,
    )
    assert config["hidden_size"] % 64 == config["intermediate_size"] % 64 == 0


def test_router_weights_are_the_two_largest_softmax_probabilities(model):
    inputs = torch.randn(64, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer in model.model.layers:
        with torch.no_grad():
            logits, weights, chosen = layer.mlp.gate(inputs)
        expected = stable_topk(logits.softmax(dim=-1), 2)
        torch.testing.assert_close(weights, expected.values)
        assert torch.equal(chosen, expected.indices)


def test_weights_are_finite(model):
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_losses_on_the_demo_text_are_those_of_the_log(validation, log):
    # 1e-3: other matrix kernels round the logits differently and move the few tokens near a tie.
    expected = torch.tensor(log["window_losses"][:32], dtype=torch.float64)
    torch.testing.assert_close(validation[0], expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(validation[0].mean(), expected.mean(), rtol=1e-4, atol=0)


def test_loss_after_rounding_is_the_mean_over_all_windows_and_that_before_ends_the_curve(log):
    every, loss = log["window_losses"], log["validation_loss"]
    assert len(every) == log["tokens"]["held_out"] // (log["recipe"]["context"] + 1)
    assert sum(every) / len(every) == pytest.approx(loss["bfloat16"], rel=1e-6)
    assert log["curve"][-1]["validation_loss"] == pytest.approx(loss["float32"], rel=1e-6)
    assert loss["bfloat16"] < 2.193  # that of the model before it, in float32


def test_loss_is_well_below_the_unigram_entropy(validation, windows):
    assert validation[0].mean() < unigram_entropy(windows) / 2


def normalised_entropy(load):
    """Entropy of the share of choices of each expert, over its largest value log 16."""
    share = load.double() / load.sum(dim=-1, keepdim=True)
    return torch.special.entr(share).sum(dim=-1) / math.log(16)


def test_every_expert_has_a_quarter_to_four_times_its_even_share(validation, log):
    for load in (validation[1], torch.tensor(log["validation_load"])):
        even = load.sum(dim=-1, keepdim=True) / 16
        assert (load > even / 4).all()
        assert (load < 4 * even).all()
        assert normalised_entropy(load).min() > 0.98


def test_load_entropy_of_the_log_is_that_of_its_load(log):
    load = torch.tensor(log["validation_load"])
    windows = len(log["window_losses"])
    assert load.sum(dim=-1).tolist() == [2 * windows * log["recipe"]["context"]] * 4
    logged = torch.tensor(log["load_entropy"], dtype=torch.float64)
    torch.testing.assert_close(logged, normalised_entropy(load))


def test_validation_loss_moves_less_than_half_a_percent_over_the_last_tenth_of_the_steps(log):
    loss = {point["step"]: point["validation_loss"] for point in log["curve"]}
    last = log["recipe"]["steps"]
    assert last == max(loss)
    before, after = loss[last * 9 // 10], loss[last]
    assert abs(before - after) < 0.005 * before


def test_log_tells_steps_time_and_losses_in_order(log):
    curve = log["curve"]
    for name in ("step", "seconds"):
        values = [point[name] for point in curve]
        assert values == sorted(set(values))
    assert curve[-1]["seconds"] == log["seconds"]
    assert curve[-1]["validation_loss"] < 0.75 * curve[0]["validation_loss"]


def test_page_about_the_model_gives_the_figures_of_the_log(log):
    page = (Path(__file__).parents[2] / "docs" / "demo-model.md").read_text(encoding="utf-8")
    for point in log["curve"]:
        if point["step"] in (300, 1500, 3000, 4500, 5400, 6000):
            losses = f"{point['training_loss']:.3f} | {point['validation_loss']:.3f}"
            assert f"| {point['step']} | {losses} |" in page
    for loss in log["validation_loss"].values():
        assert f"{loss:.4f}" in page
    assert f"{log['cpu_seconds'] / 60:.0f} minutes" in page
    for layer, load in enumerate(log["validation_load"]):
        uniform = sum(load) / 16
        extremes = f"{min(load) / uniform:.2f} | {max(load) / uniform:.2f}"
        assert f"| {layer} | {log['load_entropy'][layer]:.3f} | {extremes} |" in page


def test_text_is_the_one_of_the_log_and_suffices_for_the_default_inspection(tokenizer, log):
    text = demo_text()
    assert hashlib.sha256(text.encode()).hexdigest() == log["sha256"]["held_out"]
    assert 100_000 <= len(text.encode()) <= 200_000
    assert "\r" not in text
    count = len(tokenizer(text, verbose=False)["input_ids"])
    assert count == log["tokens"]["held_out"] >= 16_384


def test_notice_names_the_licence_of_the_text():
    notice = (DEMO_FOLDER / "NOTICE").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in notice
    assert "Python Software Foundation; All Rights Reserved" in notice


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=80))
def test_tokenizer_round_trip_is_lossless(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_has_every_byte_and_the_vocabulary_of_the_model(tokenizer, model):
    assert len(tokenizer) == model.config.vocab_size == 512
    every_byte_of_utf8 = "".join(map(chr, range(0x800))) + "\u20ac\uffff\U0001f600\U0010ffff"
    assert tokenizer.decode(tokenizer(every_byte_of_utf8)["input_ids"]) == every_byte_of_utf8


def test_text_survives_the_tokenizer(tokenizer):
    text = demo_text()
    assert tokenizer.decode(tokenizer(text, verbose=False)["input_ids"]) == text


def test_auto_classes_load_the_same_model_and_tokenizer(model, tokenizer):
    again = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER)
    assert type(again) is type(model)
    assert again.dtype == torch.bfloat16
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.float(), b)
    text = "with open(path) as file:\n    pass"
    assert AutoTokenizer.from_pretrained(DEMO_FOLDER)(text) == tokenizer(text)


def test_generation_runs_and_continues_the_prompt(model, tokenizer):
    prompt = tokenizer("The following ", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(output[0]).startswith("The following ")


def test_loading_opens_no_connection_while_the_hub_is_offline(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"a connection was asked for: {arguments}")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("create_connection", "getaddrinfo", "socket"):
        monkeypatch.setattr(socket, name, refuse)
    assert load_demo_model().config.vocab_size == len(load_demo_tokenizer())
