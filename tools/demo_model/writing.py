"""How the trained model is stored: weights in bfloat16, as real checkpoints have them."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["round_weights", "write_model"]


@torch.no_grad()
def round_weights(model: PreTrainedModel) -> None:
    """Round every weight to the nearest bfloat16, in place; the model still computes in float32.

    Weights alone: the frequencies of the rotary embedding are not stored, and every reader computes
    them in float32.
    """
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model in bfloat16, with the base of its rotary embedding where all readers look.

    transformers 5 keeps the base in `rope_parameters`; readers of the older form, such as mlx-lm,
    look for `rope_theta` beside the other numbers and silently use their own default without it.

    Args:
        model: whose weights are bfloat16 numbers; it is converted.
        tokenizer: written beside it.
        out: the folder.
    """
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_bytes())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
