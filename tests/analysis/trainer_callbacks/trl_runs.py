"""Runs of TRL's trainers on a small DeepSeek-V3 with selection biases."""

import warnings

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tieline.models.demo import load_demo_tokenizer

PROMPTS = ("def f(x):", "import os", "class A:\n    pass", "for i in range(10):", "return x + 1")


def small_model(seed: int = 0) -> DeepseekV3ForCausalLM:
    """Three layers of 16 experts, top-2, with scores of order one and biases that matter."""
    torch.manual_seed(seed)
    tokenizer = load_demo_tokenizer()
    config = DeepseekV3Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        first_k_dense_replace=0,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        max_position_embeddings=256,
        initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = DeepseekV3ForCausalLM(config)
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.1 * torch.randn(tensor.shape))
    return model


def tokenizer_with_padding():
    """The tokenizer in the box, padded by its end of text."""
    tokenizer = load_demo_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def reward(completions, **_):
    """The length of each completion."""
    return [float(len(text)) for text in completions]


def grpo_trainer(trainer_class, folder, model=None, prompts=PROMPTS, **options):
    """A `GRPOTrainer` of two steps of 8 rows, two completions to a prompt, by default."""
    import datasets
    import trl

    trainer_options = {
        name: options.pop(name) for name in ("peft_config", "rollout_func") if name in options
    }
    arguments = trl.GRPOConfig(
        str(folder),
        **{
            "max_steps": 2,
            "logging_steps": 1,
            "per_device_train_batch_size": 8,
            "num_generations": 2,
            "max_completion_length": 8,
            "learning_rate": 1e-5,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
        }
        | options,
    )
    return trainer_class(
        model=small_model() if model is None else model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": list(prompts) * 4}),
        processing_class=tokenizer_with_padding(),
        **trainer_options,
    )


def sft_trainer(trainer_class, folder, documents, model=None, **options):
    """An `SFTTrainer` of one step over tokenised documents, all in one batch."""
    import datasets
    import trl

    trainer_options = {"peft_config": options.pop("peft_config", None)}
    arguments = trl.SFTConfig(
        str(folder),
        **{
            "max_steps": 1,
            "logging_steps": 1,
            "per_device_train_batch_size": len(documents),
            "max_length": 64,
            "learning_rate": 0.0,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
        }
        | options,
    )
    rows = {"input_ids": [row.tolist() for row in documents]}
    return trainer_class(
        model=small_model() if model is None else model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer_with_padding(),
        **trainer_options,
    )


def rollout_logs(trainer) -> list[dict[str, float]]:
    """The logs of a run with numbers of the rollout in them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return [log for log in trainer.state.log_history if "rollout/flip_rate" in log]
