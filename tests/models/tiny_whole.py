"""Small whole models of the families whose text model has no head of its own.

Their language model generates inside a model that sees and hears as well; the towers are shrunk as
the text is, and stay idle while only text is read.
"""

import importlib
import inspect

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from tests.models.tiny import SMALL, SPECIAL, WIDTH

WHOLE = {
    "deepseek_ocr2": "DeepseekOcr2ForConditionalGeneration",
    "diffusion_gemma": "DiffusionGemmaForBlockDiffusion",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
    "muse_spark": "MuseSparkForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "step3p7": "Step3p7ForConditionalGeneration",
    "unlimited_ocr": "UnlimitedOcrForConditionalGeneration",
}
"""The class that generates, by family."""

TOWER = {
    **dict.fromkeys(["hidden_size", "out_hidden_size", "intermediate_size", "d_model"], WIDTH),
    **dict.fromkeys(["output_dim", "output_channels", "projector_hidden_size", "mlp_dim"], WIDTH),
    **dict.fromkeys(["encoder_ffn_dim", "downsample_hidden_size"], WIDTH),
    **dict.fromkeys(["projection_intermediate_size"], WIDTH),
    **dict.fromkeys(["depth", "num_hidden_layers", "encoder_layers"], 1),
    **dict.fromkeys(["num_heads", "num_attention_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads"], 4),
    **dict.fromkeys(["head_dim", "global_head_dim"], 8),
    **dict.fromkeys(["num_position_embeddings", "max_position_embeddings"], 64),
    **dict.fromkeys(["position_embedding_size", "vocab_size"], 64),
    "image_size": 56,
    "deepstack_visual_indexes": [0],
    "global_attn_indexes": [0],
    "downsample_channels": [WIDTH, WIDTH],
    "hidden_sizes": (WIDTH,),
    "patch_sizes": (16,),
    "depths": (1,),
    "canvas_length": 8,
}
"""Sizes of towers, and of what joins them to the text, by the names of their fields."""

TOWERS = {"diffusion_gemma": "gemma4_vision", "mistral_large4": "pixtral"}
"""Kind of the tower where a configuration leaves it open."""

UNDECLARED = {"qwen3_omni_moe": {"vision_start_token_id": 63}}
"""What a model reads from its configuration although that has no such field."""


def tiny_whole(family: str) -> PreTrainedModel:
    """The small model of a family that generates text and might be shown images."""
    config_class = CONFIG_MAPPING[family]
    config_class = config_class.sub_configs.get("thinker_config", config_class)
    config = _shrunk(config_class, "", family)
    for name, value in UNDECLARED.get(family, {}).items():
        setattr(config, name, value)
    module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    torch.manual_seed(0)
    model = getattr(module, WHOLE[family])(config).eval()
    model.requires_grad_(False)
    return model


def _shrunk(config_class: type, name: str, family: str) -> object:
    if name == "text_config":
        return config_class(**(_fitting(config_class, SMALL) | SPECIAL.get(family, {})))
    if name and family in TOWERS:
        config_class = CONFIG_MAPPING[TOWERS[family]]
    inner = {n: _shrunk(part, n, family) for n, part in config_class.sub_configs.items()}
    return config_class(**_fitting(config_class, TOWER), **inner)


def _fitting(config_class: type, sizes: dict) -> dict:
    fields = set(inspect.signature(config_class.__init__).parameters)
    fields |= set(getattr(config_class, "attribute_map", {}))
    return {name: value for name, value in sizes.items() if name in fields}
