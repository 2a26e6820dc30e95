"""The small Mixture-of-Experts models of the blind protocol, by kind.

A kind is a family of transformers with sizes, a way to fill its weights (random, briefly trained on
the text in the box, outlier channels) and what its routers have: groups, a selection bias, shared
experts. Random weights are spread so that attention, experts and norms all move the router inputs.
"""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.blind import parts
from benchmarks.blind.texts import VOCABULARY, tokenizer_in_box, training_rows
from tieline.lab.on_model.upcycled_model import upcycle_
from tieline.models.demo import load_demo_model

LONGEST = 512
"""Positions that every model is configured for."""


@dataclass(frozen=True)
class ModelKind:
    """A family with sizes and a way to fill its weights.

    Attributes:
        name: name of the kind in the split.
        family: `model_type` of transformers, or where the model comes from.
        sizes: arguments of its configuration beside `COMMON`.
        trained: training steps on the text in the box; 0 leaves random weights.
        outliers: factor c of outlier channels (norm × c, consumers ÷ c); 1 for none.
        traits: what faults ask for: "bias", "groups", "shared", "shared_gate", "sinks", "latent",
            "outliers", "post_norm" (norms after attention and experts, none before).
    """

    name: str
    family: str
    sizes: dict[str, Any] = field(default_factory=dict)
    trained: int = 0
    outliers: float = 1.0
    traits: frozenset[str] = frozenset()


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "first_k_dense_replace": 1,
}
"""Multi-head latent attention, with a dense first layer."""


def _kind(name: str, family: str, traits: str = "", **options: Any) -> ModelKind:
    """Return a kind; `options` are its sizes, and `trained` and `outliers` of the record."""
    trained, outliers = options.pop("trained", 0), options.pop("outliers", 1.0)
    return ModelKind(name, family, options, trained, outliers, frozenset(traits.split()))


KINDS: tuple[ModelKind, ...] = (
    _kind(
        "mixtral 2 of 8",
        "mixtral",
        num_hidden_layers=4,
        intermediate_size=96,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    _kind(
        "qwen3_moe 8 of 128",
        "qwen3_moe",
        num_hidden_layers=3,
        moe_intermediate_size=32,
        intermediate_size=96,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    _kind(
        "granitemoe 8 of 40",
        "granitemoe",
        num_hidden_layers=3,
        intermediate_size=48,
        num_local_experts=40,
        num_experts_per_tok=8,
        embedding_multiplier=1.5,
        residual_multiplier=0.7,
        attention_multiplier=0.25,
        logits_scaling=1.0,
    ),
    _kind(
        "deepseek_v3 6 of 64, groups",
        "deepseek_v3",
        "bias groups shared latent",
        num_hidden_layers=4,
        moe_intermediate_size=32,
        intermediate_size=96,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=1.5,
        **LATENT,
    ),
    _kind(
        "qwen2_moe 4 of 32, shared, trained",
        "qwen2_moe",
        "shared shared_gate",
        num_hidden_layers=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        intermediate_size=96,
        num_experts=32,
        num_experts_per_tok=4,
        trained=120,
    ),
    _kind(
        "gpt_oss 4 of 32",
        "gpt_oss",
        "sinks",
        num_hidden_layers=4,
        intermediate_size=48,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    _kind("demo", "demo"),
    _kind("upcycled llama 2 of 8", "upcycled-llama"),
    _kind(
        "mixtral 2 of 8, outliers × 30",
        "mixtral",
        "outliers",
        num_hidden_layers=3,
        intermediate_size=96,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
        outliers=30.0,
    ),
    _kind(
        "olmoe 8 of 64, trained",
        "olmoe",
        num_hidden_layers=3,
        intermediate_size=32,
        num_experts=64,
        num_experts_per_tok=8,
        trained=120,
    ),
    # Held out: no kind of the same family stands above.
    _kind(
        "glm4_moe 4 of 32, groups, shared",
        "glm4_moe",
        "bias groups shared",
        num_hidden_layers=4,
        moe_intermediate_size=32,
        intermediate_size=96,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        use_qk_norm=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    _kind(
        "dots1 8 of 256",
        "dots1",
        "bias shared",
        num_hidden_layers=3,
        moe_intermediate_size=24,
        intermediate_size=96,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        routed_scaling_factor=2.0,
        norm_topk_prob=True,
        sliding_window=None,
    ),
    _kind(
        "ernie4_5_moe 6 of 48, shared, trained",
        "ernie4_5_moe",
        "bias shared",
        num_hidden_layers=4,
        moe_intermediate_size=32,
        intermediate_size=96,
        moe_num_experts=48,
        moe_k=6,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=3,
        moe_layer_interval=1,
        trained=120,
    ),
    _kind(
        "hunyuan_v1_moe 4 of 16, shared",
        "hunyuan_v1_moe",
        "shared",
        num_hidden_layers=4,
        intermediate_size=48,
        num_experts=16,
        moe_topk=4,
        num_shared_expert=1,
    ),
    _kind(
        "granitemoeshared 4 of 24, shared",
        "granitemoeshared",
        "shared",
        num_hidden_layers=3,
        intermediate_size=48,
        shared_intermediate_size=64,
        num_local_experts=24,
        num_experts_per_tok=4,
        embedding_multiplier=1.5,
        residual_multiplier=0.7,
        attention_multiplier=0.25,
        logits_scaling=1.0,
    ),
    _kind(
        "flex_olmo 5 of 20, trained",
        "flex_olmo",
        "post_norm",
        num_hidden_layers=4,
        intermediate_size=48,
        num_experts=20,
        num_experts_per_tok=5,
        trained=120,
    ),
    _kind(
        "minimax_m2 8 of 128",
        "minimax_m2",
        "bias",
        num_hidden_layers=3,
        intermediate_size=32,
        num_local_experts=128,
        num_experts_per_tok=8,
    ),
    _kind(
        "phimoe 2 of 16",
        "phimoe",
        num_hidden_layers=4,
        intermediate_size=64,
        num_local_experts=16,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    _kind(
        "solar_open 8 of 64, outliers × 100",
        "solar_open",
        "bias shared outliers",
        num_hidden_layers=3,
        moe_intermediate_size=32,
        intermediate_size=96,
        n_routed_experts=64,
        num_experts_per_tok=8,
        n_shared_experts=1,
        outliers=100.0,
    ),
    _kind("upcycled qwen2 3 of 12", "upcycled-qwen2"),
    _kind("smollm2 mixture", "smollm2"),
)
"""All kinds; `split.json` says which half each belongs to."""


class Subject(NamedTuple):
    """A model in float32 and the tokenizer beside it."""

    model: nn.Module
    tokenizer: Any


class MissingModelError(RuntimeError):
    """A kind that cannot be built here, with the reason."""


def kind_named(name: str) -> ModelKind:
    """Return the kind of that name."""
    return next(kind for kind in KINDS if kind.name == name)


@cache
def subject(name: str, seed: int, folder: str | None = None) -> Subject:
    """Build the model of a kind, in float32 and evaluation mode.

    Args:
        name: name of a kind.
        seed: seed of its weights.
        folder: checkpoint of the SmolLM2 mixture; without it that kind raises.
    """
    kind = kind_named(name)
    if kind.family == "smollm2":
        return _from_folder(folder)
    torch.manual_seed(seed)
    model = _built(kind, seed).float().eval()
    model.requires_grad_(False)
    return Subject(model, tokenizer_in_box())


def _from_folder(folder: str | None) -> Subject:
    if folder is None:
        raise MissingModelError("no folder of the SmolLM2 mixture was given (--smollm2)")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Subject(model.requires_grad_(False), AutoTokenizer.from_pretrained(folder))


def _built(kind: ModelKind, seed: int) -> Any:
    if kind.family == "demo":
        return load_demo_model()
    if kind.family.startswith("upcycled-"):
        return _upcycled(kind.family.removeprefix("upcycled-"), seed)
    config = AutoConfig.for_model(kind.family, **COMMON | kind.sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spread(model, seed)
    if kind.trained:
        train(model, kind.trained, seed)
    if kind.outliers != 1.0:
        channels = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:3]
        parts.scale_channels(model, channels, kind.outliers)
    return model


UPCYCLED = {"llama": (8, 2), "qwen2": (12, 3)}
"""Experts and k of the mixtures made of dense models."""


def _upcycled(dense: str, seed: int) -> Any:
    """A dense model, trained briefly, cut into a mixture, and trained on."""
    sizes = {"intermediate_size": 96, "num_hidden_layers": 3}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(dense, **COMMON | sizes), dtype=torch.float32
    )
    spread_dense(model, seed)
    train(model, 60, seed)
    experts, k = UPCYCLED[dense]
    upcycle_(model.eval(), n_experts=experts, k=k, noise=0.3, router_scale=0.1, seed=seed)
    train(model, 40, seed + 1)
    return model


@torch.no_grad()
def spread(model: nn.Module, seed: int) -> None:
    """Fill a mixture with weights whose products keep the size of their inputs, in place."""
    spread_dense(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for block in parts.blocks(model):
        bias = parts.selection_bias(block)
        if bias is not None:
            bias.copy_(0.05 * torch.randn(bias.shape, generator=generator))


@torch.no_grad()
def spread_dense(model: nn.Module, seed: int) -> None:
    """Fill any model: matrices N(0, 1 / inputs), embeddings N(0, 1), norms 1 ± 0.3, in place."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "e_score_correction" in name:
            continue
        if "norm" in name and name.endswith("weight"):
            weight.copy_(1 + 0.3 * noise.clamp(-2, 2))
        elif weight.ndim == 1 or name.endswith("_bias"):
            weight.copy_(0.1 * noise)
        elif "embed_tokens" in name:
            weight.copy_(noise)
        else:
            weight.copy_(_gain(name) * noise / math.sqrt(_inputs(model, name, weight)))


def _gain(name: str) -> float:
    """Standard deviation of a product for inputs of unit size."""
    return 1.5 if ".q_" in name or ".k_" in name or "gate_up" in name else 1.0


def _inputs(model: nn.Module, name: str, weight: Tensor) -> int:
    owner = model.get_submodule(name.rsplit(".", 1)[0])
    return weight.shape[-2 if weight.ndim == 3 and parts.transposed(owner) else -1]


def train(model: Any, steps: int, seed: int) -> None:
    """Train on the text in the box by AdamW, in place."""
    model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        for _ in range(steps):
            rows = training_rows(8, 96, generator)
            loss = model(input_ids=rows, labels=rows).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
