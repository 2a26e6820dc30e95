"""Small random dense models, one of each layout of feed-forward network."""

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA_LIKE = SIZES | {"num_key_value_heads": 2}
IMAGES = {"image_size": 16, "patch_size": 8, "num_channels": 3}
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, LLAMA_LIKE),
    "llama+bias": (LlamaForCausalLM, LlamaConfig, LLAMA_LIKE | {"mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, LLAMA_LIKE | {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, LLAMA_LIKE),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, LLAMA_LIKE | {"head_dim": 8}),
    "phi3": (Phi3ForCausalLM, Phi3Config, LLAMA_LIKE),
    "bert": (BertForMaskedLM, BertConfig, SIZES),
    "vit": (ViTForImageClassification, ViTConfig, SIZES | IMAGES),
}


def dense_model(kind):
    """A model of that kind in evaluation mode, with biases that matter."""
    model_class, config_class, options = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**options)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model
