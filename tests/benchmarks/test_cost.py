"""The cost model against counted parameters, published sizes and the measured case."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

from benchmarks.cost import (
    LAPTOP,
    LAYOUTS,
    NODE,
    Layout,
    cost,
    errors,
    grouped_attention,
    latent_attention,
    operations,
)

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 99}
MIXTRAL = MixtralConfig(intermediate_size=48, num_local_experts=8, **SIZES, **HEADS)
QWEN = Qwen3MoeConfig(moe_intermediate_size=24, num_experts=8, head_dim=16, **SIZES, **HEADS)
DEEPSEEK = DeepseekV3Config(
    moe_intermediate_size=24,
    intermediate_size=40,
    n_routed_experts=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=16,
    **SIZES,
)
LATENT = latent_attention(64, 4, 32, 16)
SMALL = [
    (MIXTRAL, Layout(3, 3, 64, 8, 2, 0, 48, 0, grouped_attention(64, 4, 2, 16), 64, 99)),
    (QWEN, Layout(3, 3, 64, 8, 8, 0, 24, 0, grouped_attention(64, 4, 2, 16), 64, 99)),
    (DEEPSEEK, Layout(3, 2, 64, 8, 8, 1, 24, 40, LATENT, 512, 99)),
]


@pytest.mark.parametrize(("config", "layout"), SMALL, ids=["mixtral", "qwen3", "deepseek"])
def test_parameters_are_those_of_the_model_but_for_small_norms(config, layout):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(p.numel() for p in model.parameters())
    assert layout.parameters == pytest.approx(counted, rel=0.01)


def test_the_model_is_near_what_was_measured_and_published():
    model_errors = errors()
    assert {"bytes", "operations", "layer", "seconds", *LAYOUTS} == model_errors.keys()
    assert all(abs(error) < 0.08 for error in model_errors.values()), model_errors


def test_operations_count_every_product_once():
    """By hand: attention matrices, router, chosen experts; scores and values of the sequence."""
    layout = Layout(1, 1, 2, 3, 1, 0, 5, 0, 16, 4, 7)
    products = 16 + 3 * 2 + 3 * 2 * 5
    assert operations(layout, 10, 10) == 2 * 10 * products + 4 * 10 * 10 * 4


def test_more_tokens_cost_time_and_network_but_no_bytes():
    layout = LAYOUTS["Mixtral-8x7B"]
    few, many = (cost(layout, NODE, tokens) for tokens in (4096, 8192))
    assert many.bytes == few.bytes
    assert many.network == 2 * few.network
    assert many.seconds > few.seconds
    assert cost(layout, LAPTOP).network == 0
