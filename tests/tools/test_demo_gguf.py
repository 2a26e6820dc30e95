"""The demo model as GGUF: what is written reads back as the checkpoint, to the step of its type."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file

from tieline.core.errors import TielineError
from tieline.models.demo import DEMO_FOLDER, load_demo_tokenizer
from tools import demo_gguf
from tools.demo_gguf import TYPES, check_gguf, write_gguf

gguf = pytest.importorskip("gguf", reason="the package gguf is opt-in: pip install gguf")

LARGEST_ERROR = {"f32": 0.0, "f16": 1.0, "q8_0": 0.5 + 127 * 2**-11, "q4_0": 1.0}
"""In steps: a half for rounding, and 127 times what float16 rounds off the scale of a block of
q8_0; q4_0 has one value fewer above zero than below, so its largest weight may be a step off."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    for kind in TYPES:
        write_gguf(folder / f"{kind}.gguf", kind)
    return folder


def value(reader, name):
    return reader.get_field(name).contents()


@pytest.mark.parametrize("kind", TYPES)
def test_weights_read_back_within_a_step_of_their_type(written, kind):
    error = check_gguf(written / f"{kind}.gguf", kind)
    assert error <= LARGEST_ERROR[kind]
    assert (error > 0) == (kind != "f32")


def test_the_smaller_the_type_the_smaller_the_file(written):
    sizes = [(written / f"{kind}.gguf").stat().st_size for kind in TYPES]
    assert sizes == sorted(sizes, reverse=True)
    assert {path.name for path in written.iterdir()} == {f"{kind}.gguf" for kind in TYPES}


@pytest.mark.parametrize("kind", TYPES)
def test_routers_and_vectors_stay_in_float32(written, kind):
    reader = gguf.GGUFReader(written / f"{kind}.gguf")
    for tensor in reader.tensors:
        kept = "ffn_gate_inp" in tensor.name or len(tensor.shape) == 1
        assert tensor.tensor_type.name == ("F32" if kept else kind.upper())


def test_experts_are_stacked_in_their_order(written):
    weights = load_file(DEMO_FOLDER / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(written / "f32.gguf").tensors}
    for expert in (0, 15):
        plain = weights[f"model.layers.3.mlp.experts.{expert}.up_proj.weight"].float().numpy()
        assert np.array_equal(tensors["blk.3.ffn_up_exps.weight"].data[expert], plain)


def test_the_header_is_that_of_the_configuration(written):
    reader = gguf.GGUFReader(written / "q8_0.gguf")
    config = json.loads((DEMO_FOLDER / "config.json").read_bytes())
    assert value(reader, "general.architecture") == "olmoe"
    for name, key in {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "embedding_length": "hidden_size",
        "context_length": "max_position_embeddings",
        "attention.head_count": "num_attention_heads",
    }.items():
        assert value(reader, f"olmoe.{name}") == config[key]
    assert value(reader, "olmoe.rope.freq_base") == config["rope_theta"]
    epsilon = value(reader, "olmoe.attention.layer_norm_rms_epsilon")
    assert epsilon == pytest.approx(config["rms_norm_eps"], rel=1e-6)


def test_the_tokens_are_those_of_the_tokenizer(written):
    reader, tokenizer = gguf.GGUFReader(written / "f32.gguf"), load_demo_tokenizer()
    tokens = value(reader, "tokenizer.ggml.tokens")
    assert tokens == tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert value(reader, "tokenizer.ggml.eos_token_id") == tokenizer.eos_token_id
    kinds = value(reader, "tokenizer.ggml.token_type")
    assert [number for number, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL] == [0]


def test_a_weight_off_by_more_than_a_step_is_refused_and_nothing_is_left(monkeypatch, tmp_path):
    right = demo_gguf.check_gguf

    def after_damage(path, kind, folder):
        data = bytearray(path.read_bytes())
        data[-1] ^= 0x40
        path.write_bytes(data)
        return right(path, kind, folder)

    monkeypatch.setattr(demo_gguf, "check_gguf", after_damage)
    with pytest.raises(TielineError, match="off by"):
        write_gguf(tmp_path / "model.gguf", "f32")
    assert not any(tmp_path.iterdir())


def test_a_file_of_another_type_is_refused(written):
    with pytest.raises(TielineError, match="is F16"):
        check_gguf(written / "f16.gguf", "q8_0")


def test_an_unknown_type_is_refused(tmp_path):
    with pytest.raises(TielineError, match="--type is one of f32, f16, q8_0, q4_0"):
        write_gguf(tmp_path / "model.gguf", "q2_k")
