"""What the demo model is: its recipe, its tokenizer and its architecture."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from tieline.core.errors import require

__all__ = ["END", "FAMILIES", "Recipe", "build_model", "train_tokenizer"]

END = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """Shape of the model and of its training; the defaults made the files that ship."""

    family: str = "olmoe"
    seed: int = 0
    steps: int = 6000
    vocabulary: int = 512
    width: int = 128
    layers: int = 4
    heads: int = 4
    experts: int = 16
    top_k: int = 2
    expert_width: int = 64
    context: int = 512
    batch: int = 4
    peak_rate: float = 4e-3
    warmup: int = 200
    weight_decay: float = 0.1
    balance: float = 0.02
    clip: float = 1.0
    evaluations: int = 20

    def rate(self, step: int) -> float:
        """Learning rate after `step` updates: linear warm-up, then half a cosine down to zero."""
        if step < self.warmup:
            return self.peak_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup)
        return self.peak_rate * (1 + math.cos(math.pi * done)) / 2


def train_tokenizer(documents: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: all 256 bytes are tokens, so every string survives the round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
    )


def build_model(recipe: Recipe) -> PreTrainedModel:
    """A randomly initialised model without groups or jitter; the family that ships is OLMoE.

    Output weights of its own, as every OLMoE has: llama.cpp reads none without them.
    """
    require(
        recipe.family in FAMILIES, f"no family {recipe.family!r} here; known: {', '.join(FAMILIES)}"
    )
    torch.manual_seed(recipe.seed)
    return AutoModelForCausalLM.from_config(FAMILIES[recipe.family](recipe)).float()


def _shape(recipe: Recipe) -> dict[str, Any]:
    """What the configurations of all families call by the same name."""
    return {
        "vocab_size": recipe.vocabulary,
        "hidden_size": recipe.width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_experts_per_tok": recipe.top_k,
        "max_position_embeddings": recipe.context,
        "initializer_range": 0.04,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def _olmoe(recipe: Recipe) -> OlmoeConfig:
    """Softmax over all experts, top-k, no bias."""
    return OlmoeConfig(
        **_shape(recipe),
        intermediate_size=recipe.expert_width,
        num_experts=recipe.experts,
        router_aux_loss_coef=recipe.balance,
    )


def _mixtral(recipe: Recipe) -> MixtralConfig:
    """Softmax over the chosen experts."""
    return MixtralConfig(
        **_shape(recipe),
        intermediate_size=recipe.expert_width,
        num_local_experts=recipe.experts,
        num_key_value_heads=recipe.heads,
    )


def _qwen3_moe(recipe: Recipe) -> Qwen3MoeConfig:
    """Softmax over all experts, divided by the sum of the chosen; two query heads to a key."""
    return Qwen3MoeConfig(
        **_shape(recipe),
        moe_intermediate_size=recipe.expert_width,
        num_experts=recipe.experts,
        norm_topk_prob=True,
        num_key_value_heads=max(1, recipe.heads // 2),
    )


def _deepseek_v3(recipe: Recipe) -> DeepseekV3Config:
    """Sigmoid scores, a shared expert beside the routed ones, latent attention; one group."""
    head = recipe.width // recipe.heads
    return DeepseekV3Config(
        **_shape(recipe),
        num_key_value_heads=recipe.heads,
        moe_intermediate_size=recipe.expert_width,
        intermediate_size=recipe.expert_width,
        n_routed_experts=recipe.experts,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        routed_scaling_factor=1.0,
        q_lora_rank=None,
        kv_lora_rank=recipe.width // 2,
        qk_nope_head_dim=head // 2,
        qk_rope_head_dim=head // 2,
        v_head_dim=head,
    )


FAMILIES: dict[str, Callable[[Recipe], PreTrainedConfig]] = {
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
}
"""Configurations by model type."""
