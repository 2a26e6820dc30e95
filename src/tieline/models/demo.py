"""The small trained Mixture of Experts in the box: weights, tokenizer, held-out text, log.

An OLMoE of 4 layers, 16 experts, top-2, trained on the text that Python itself ships by
`python -m tools.demo_model`, as `docs/demo-model.md` describes. Everything is read from the
installed package, without downloads.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import OlmoeForCausalLM, PreTrainedTokenizerFast

from tieline.models.number_formats import note_stored_precision
from tieline.models.saved_models import no_loading_bars

DEMO = "demo"
"""The name of this model in every command."""

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
"""A local checkpoint that `AutoModelForCausalLM` and `AutoTokenizer` load like any other."""


def is_demo(name: str | Path) -> bool:
    """Whether a name means the model in the box, unless a checkpoint in a folder is called so."""
    return str(name) == DEMO and not (Path(name) / "config.json").is_file()


def load_demo_model(dtype: torch.dtype = torch.float32, **options: Any) -> OlmoeForCausalLM:
    """Load the model on the CPU in evaluation mode, by default in float32, as it was trained.

    Args:
        dtype: precision that it computes in.
        options: further ones of `from_pretrained`, such as `distributed_config`.
    """
    options |= {"dtype": dtype, "use_safetensors": True, "local_files_only": True}
    with no_loading_bars():
        model = OlmoeForCausalLM.from_pretrained(DEMO_FOLDER, **options)
    stored = json.loads((DEMO_FOLDER / "config.json").read_bytes())["dtype"]
    note_stored_precision(model, getattr(torch, stored))
    return model.eval()


def load_demo_tokenizer() -> PreTrainedTokenizerFast:
    """Load its byte-level BPE of 512 tokens, which encodes any string without loss."""
    return PreTrainedTokenizerFast.from_pretrained(DEMO_FOLDER, local_files_only=True)


def demo_text() -> str:
    """Return the held-out text of the validation loss: 26 topics of the Python reference."""
    return (DEMO_FOLDER / "text.txt").read_bytes().decode()
