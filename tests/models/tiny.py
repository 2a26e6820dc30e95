"""A small random model of every family: configurations are shrunk by the names of their fields."""

import copy
import importlib
import inspect

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from tieline.models import find_routers
from tieline.models.family_table import TRANSFORMERS_FAMILIES

VOCABULARY, WIDTH, LAYERS, EXPERTS, CHOSEN = 64, 32, 2, 8, 2

SMALL = {
    **dict.fromkeys(["hidden_size", "d_model", "intermediate_size", "ffn_hidden_size"], WIDTH),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layers"], LAYERS),
    **dict.fromkeys(["num_attention_heads", "n_heads", "num_heads", "num_key_value_heads"], 4),
    **dict.fromkeys(["swa_num_attention_heads", "swa_num_key_value_heads"], 4),
    **dict.fromkeys(["head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"], 8),
    **dict.fromkeys(["swa_head_dim", "swa_v_head_dim", "index_head_dim", "linear_head_dim"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_heads", "index_n_heads"], 2),
    **dict.fromkeys(["linear_num_value_heads", "mamba_num_heads", "index_topk"], 4),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["expert_ffn_hidden_size", "share_expert_dim", "router_hidden_size"], 16),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "mamba_head_dim"], 16),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], EXPERTS),
    **dict.fromkeys(["moe_num_experts"], EXPERTS),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk"], CHOSEN),
    **dict.fromkeys(["moe_top_k", "moe_k", "top_k_experts", "topk_group"], CHOSEN),
    **dict.fromkeys(["n_group", "num_expert_group"], 4),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "o_lora_rank", "ssm_state_size"], 8),
    **dict.fromkeys(["mamba_d_state", "mamba_n_heads", "mamba_d_head"], 8),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "n_groups"], 1),
    **dict.fromkeys(["mamba_n_groups"], 1),
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers", "pad_token_id"], 0),
    "vocab_size": VOCABULARY,
    "sliding_window": 16,
    "max_position_embeddings": 128,
    "mlp_layer_types": ["sparse"] * LAYERS,
    "mlp_only_layers": [],
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}
GEMMA = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
GROUP_LIMITED = {"topk_method": "group_limited_greedy"}
SPECIAL = {
    "bailing_hybrid": LINEAR_THEN_FULL,
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 16, "moe_num_experts": EXPERTS}
        | {"moe_top_k": CHOSEN},
    },
    "deepseek_ocr2": GROUP_LIMITED,
    "deepseek_v2": GROUP_LIMITED,
    "deepseek_v4": {"mlp_layer_types": ["moe"] * LAYERS, "o_groups": 2},
    "diffusion_gemma": GEMMA,
    "doge": {"is_moe": True, "num_experts": 16},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 16], "rope_parameters": MROPE},
    "gemma4": GEMMA | {"enable_moe_block": True},
    "glm4v_moe": {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
    "glm5_next": {"layer_types": ["linear_attention", "indexed_attention"], "index_kpool": 4}
    | {"qk_rope_head_dim": 0, "head_dim": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    | {"expert_layer_period": 1, "expert_layer_offset": 0},
    "kimi_linear": LINEAR_THEN_FULL,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "minimax_m3_vl": dict.fromkeys(["shared_intermediate_size", "dense_intermediate_size"], 16),
    "muse_spark": {"moe_hidden_size": 16},
    "nemotron_h": {"layers_block_type": ["moe", "full_attention"]},
    "nllb_moe": {"encoder_sparse_step": 1, "decoder_sparse_step": 1}
    | dict.fromkeys(["encoder_layers", "decoder_layers"], 1)
    | dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2)
    | dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 16),
    "qwen3_5_moe": LINEAR_THEN_FULL,
    "qwen3_next": LINEAR_THEN_FULL,
    "qwen4_exp": LINEAR_THEN_FULL
    | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {"indexer_budget": 8, "indexer_compress_ratio": 4},
    "switch_transformers": {"d_ff": 16, "d_kv": 8, "num_decoder_layers": 1}
    | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "unlimited_ocr": GROUP_LIMITED,
    "vitpose_backbone": {"image_size": [16, 16], "patch_size": [8, 8], "part_features": 8}
    | {"num_experts": 2},
    "zaya": {"num_experts_per_tok": 1},
}
CONFIG_NAMES = {
    "glm5_next": "glm5_next_text",
    "inkling": "inkling_text",
    "nllb_moe": "nllb-moe",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
}
NO_GROUPED_MM = {"dbrx", "jetmoe", "llama4", "longcat_flash", "step3p7"}
CORRECTIONS = ("expert_bias", "e_score_correction_bias")  # some stand in the block
SUPPORTED = sorted({family.name for family in TRANSFORMERS_FAMILIES if family.refused is None})


BUILT: dict[str, tuple[PreTrainedModel, torch.Tensor]] = {}
"""Models on the CPU by family and changes, each with torch's random state after it was built."""


def tiny_model(family: str, **changes) -> PreTrainedModel:
    """A model of two layers whose routers have scores of order one and biases that matter.

    A model that was built before is copied, which takes a fraction of the time.
    """
    if torch.get_default_device().type != "cpu":
        return _built_model(family, changes)
    key = f"{family} {torch.get_default_dtype()} {sorted(changes.items())}"
    if key not in BUILT:
        BUILT[key] = _built_model(family, changes), torch.get_rng_state()
    model, random_state = BUILT[key]
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)


def _built_model(family: str, changes: dict) -> PreTrainedModel:
    config_class = _config_class(family)
    fields = set(inspect.signature(config_class.__init__).parameters)
    fields |= set(getattr(config_class, "attribute_map", {}))
    small = {name: value for name, value in SMALL.items() if name in fields}
    config = config_class(**(small | SPECIAL.get(family, {}) | changes))
    torch.manual_seed(0)
    model = _model_class(config_class)(config).eval()
    model.requires_grad_(False)
    return model


def lively(model: PreTrainedModel) -> PreTrainedModel:
    """The model with spread-out router weights and non-zero correction biases."""
    torch.manual_seed(1)
    for router in find_routers(model).values():
        for name, tensor in [*router.named_parameters(), *router.named_buffers()]:
            if "bias" in name and tensor.is_floating_point():
                tensor.copy_(0.2 * torch.randn(tensor.shape))
            elif tensor.ndim == 2 and len(tensor) >= EXPERTS:
                tensor.copy_(torch.randn(tensor.shape) / 6)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(CORRECTIONS):
            tensor.copy_(0.2 * torch.randn(tensor.shape))
    return model


def batch(rows: int = 2, length: int = 12) -> torch.Tensor:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(2)
    device = torch.get_default_device()
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator, device=device)


def _config_class(family: str) -> type:
    config_class = CONFIG_MAPPING[CONFIG_NAMES.get(family, family)]
    return config_class.sub_configs.get("text_config", config_class)


def _model_class(config_class: type) -> type[PreTrainedModel]:
    """The causal language model of a configuration, or its text model if there is none."""
    name = config_class.__module__.replace("configuration_", "modeling_")
    module = importlib.import_module(name)
    models = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == name
        and not value.__name__.endswith("PreTrainedModel")
        and _takes(value, config_class)
    ]
    endings = ("ForCausalLM", "TextModel", "Model", "ForConditionalGeneration", "Backbone")
    return min(models, key=lambda m: [not m.__name__.endswith(end) for end in endings])


def _takes(model_class: type, config_class: type) -> bool:
    config = inspect.signature(model_class.__init__).parameters.get("config")
    return config is not None and config.annotation in (config_class, inspect.Parameter.empty)
