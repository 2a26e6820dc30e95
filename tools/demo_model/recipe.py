"""What the demo model is: its recipe, its tokenizer and its architecture."""

import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

__all__ = ["END", "Recipe", "build_model", "train_tokenizer"]

END = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """Shape of the model and of its training; the defaults made the files that ship."""

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


def build_model(recipe: Recipe) -> OlmoeForCausalLM:
    """A randomly initialised OLMoE: softmax scores, top-k, no bias, groups or jitter.

    Output weights of its own, as every OLMoE has: llama.cpp reads none without them.
    """
    torch.manual_seed(recipe.seed)
    config = OlmoeConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.width,
        intermediate_size=recipe.expert_width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_experts=recipe.experts,
        num_experts_per_tok=recipe.top_k,
        max_position_embeddings=recipe.context,
        router_aux_loss_coef=recipe.balance,
        initializer_range=0.04,
        tie_word_embeddings=False,
        eos_token_id=0,
        pad_token_id=0,
    )
    return OlmoeForCausalLM(config).float()
