"""The small trained Mixture of Experts in the box: weights, tokenizer, held-out text, log.

An OLMoE of 4 layers, 16 experts, top-2, trained on the text that Python itself ships by
`python -m tools.shipped_model`, as `docs/shipped-model.md` describes. Everything is read from the
installed package, without downloads.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import OlmoeForCausalLM, PreTrainedTokenizerFast

SHIPPED_FOLDER = Path(__file__).parents[1] / "shipped"
"""A local checkpoint that `AutoModelForCausalLM` and `AutoTokenizer` load like any other."""


def load_shipped_model() -> OlmoeForCausalLM:
    """Load the model in float32, as it was trained, on the CPU, in evaluation mode."""
    model = OlmoeForCausalLM.from_pretrained(
        SHIPPED_FOLDER, dtype=torch.float32, use_safetensors=True, local_files_only=True
    )
    return model.eval()


def load_shipped_tokenizer() -> PreTrainedTokenizerFast:
    """Load its byte-level BPE of 512 tokens, which encodes any string without loss."""
    return PreTrainedTokenizerFast.from_pretrained(SHIPPED_FOLDER, local_files_only=True)


def shipped_text() -> str:
    """Return the held-out text of the validation loss: 26 topics of the Python reference."""
    return (SHIPPED_FOLDER / "text.txt").read_bytes().decode()


def shipped_training_log() -> dict[str, Any]:
    """Return recipe, versions, text digests, loss curve and expert load of the training run."""
    return json.loads((SHIPPED_FOLDER / "training.json").read_bytes())
