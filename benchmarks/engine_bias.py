"""Families with a selection bias in engines, in float32, with the bias and with it dropped.

    python -m benchmarks.engine_bias [--engines vllm mlx llama.cpp] [--families glm4_moe dots1]

Random models of four layers, 32 experts and top-4, sigmoid scores; 4,096 tokens in documents of
256, against transformers in float32. Engines of `tieline capture --list-engines` that are missing
are left out; a GGUF file of deepseek_v3 cannot be written here.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import tieline as tl
from benchmarks.engines import has, with_gguf
from tieline.engines import ENGINES
from tieline.models.demo import load_demo_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"use_qk_norm": True},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "topk_method": "noaux_tc",  # vLLM reads these two, which transformers 5 no longer writes
        "scoring_func": "sigmoid",
    },
    "dots1": {"num_key_value_heads": 4},  # llama.cpp takes no fewer than there are heads
}


@torch.no_grad()
def random_model(family: str) -> Any:
    """A model whose products keep the size of their inputs, selection biases N(0, 0.05²)."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.ndim >= 2:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    for bias in selection_biases(model):
        bias.normal_(0, 0.05)
    return model


def selection_biases(model: Any) -> list[torch.Tensor]:
    """The selection bias of every router."""
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return [tensor for name, tensor in tensors.items() if "correction_bias" in name]


def save(model: Any, folder: Path) -> str:
    """Write a checkpoint with the rotary settings where mlx-lm reads them."""
    model.save_pretrained(folder)
    load_demo_tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rotary = config["rope_parameters"]
    share = rotary.get("partial_rotary_factor", 1.0)
    config |= {"rope_theta": rotary["rope_theta"], "rope_scaling": None}
    path.write_text(json.dumps(config | {"partial_rotary_factor": share}))
    return str(folder)


def engine_side(engine: str, folder: str) -> str | None:
    """Return what `diff` calls a checkpoint in an engine; None where no file can be written."""
    if engine != "llama.cpp":
        return f"{engine}:{folder}"
    with_gguf()
    from tools.demo_gguf import FAMILIES as WRITABLE
    from tools.demo_gguf import write_gguf

    if json.loads((Path(folder) / "config.json").read_text())["model_type"] not in WRITABLE:
        return None
    write_gguf(Path(f"{folder}.gguf"), "f32", Path(folder))
    return f"llama.cpp:{folder}.gguf"


def compare(family: str, work: Path, engines: list[str]) -> None:
    """Print flips by layer and the verdict in each engine, with the bias and without it."""
    model = random_model(family)
    folders = {"as it is": save(model, work / "a")}
    for bias in selection_biases(model):
        bias.data.zero_()
    folders["bias dropped"] = save(model, work / "b")
    for engine in engines:
        for change, folder in folders.items():
            side = engine_side(engine, folder)
            if side is None:
                continue
            result: Any = tl.diff(folders["as it is"], side, tokens=4096, sequence_length=256)
            flips = [layer.flip.count for layer in result.layers]
            tokens, conclusion = result.layers[0].flip.total, result.causes.conclusion
            print(engine, family, change, flips, tokens, conclusion, flush=True)


def main() -> None:
    """Compare every family in every engine that is installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of engines that wait for each other by spinning
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for family in options.families:
        with tempfile.TemporaryDirectory() as work:
            compare(family, Path(work), [x for x in options.engines if has(x)])


if __name__ == "__main__":
    main()
