"""Writes the demo model as GGUF, for tests and examples of engines that read that format.

    python -m tools.demo_gguf demo-q8_0.gguf --type q8_0            # or f32, f16, q4_0
    python -m tools.demo_gguf other.gguf --model runs/smoe/stock  # Mixtral, Qwen-MoE, …

Needs the package `gguf` (pip install gguf), which nothing else of Tieline does. Matrices are stored
in the type asked for; vectors and the routers' weights stay in float32, as llama.cpp's converter
has it. The file is read back and compared with the checkpoint before it gets its name.
"""

import argparse
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from tieline.core.errors import TielineError, require
from tieline.core.files import check_target, write_whole
from tieline.models.demo import DEMO_FOLDER

__all__ = ["TYPES", "check_gguf", "write_gguf"]

TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
"""Types of the matrices, with the name that GGUF has for a file of each."""

FAMILIES = {
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "dots1": "dots1",
    "glm4_moe": "glm4moe",
}
"""Architectures of GGUF by the type of a model."""

NO_MERGE = f"{chr(0x120)} {chr(0x120)}"
"""llama.cpp takes no list without merges, so a tokenizer of bytes has one that makes no token."""

ROUTER = "ffn_gate_inp"
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.weight)")

Array = np.ndarray


def write_gguf(path: Path, kind: str, folder: Path = DEMO_FOLDER) -> None:
    """Write the checkpoint in `folder` to one GGUF file, whole and checked or not at all.

    Args:
        path: the file to write.
        kind: a name in `TYPES`.
        folder: config.json, model.safetensors and tokenizer.json.
    """
    require(kind in TYPES, f"--type is one of {', '.join(TYPES)}, got {kind!r}")
    check_target(path)
    gguf, draft = import_module("gguf"), path.with_name(f".{path.name}.partial")
    try:
        config = _read_json(folder / "config.json")
        writer = gguf.GGUFWriter(draft, _architecture(config))
        _describe(writer, config, kind)
        _add_tokenizer(writer, _read_json(folder / "tokenizer.json"))
        for name, values in _tensors(folder):
            stored = _type_of(name, values, kind)
            writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        check_gguf(draft, kind, folder)
        write_whole(path, draft.read_bytes())
    finally:
        draft.unlink(missing_ok=True)


def check_gguf(path: Path, kind: str, folder: Path = DEMO_FOLDER) -> float:
    """Read a file back and return the largest error of a weight, in steps of its block.

    The step is that of the type: none for f32 (the error must be zero), the unit in the last place
    for f16, max |w| / 127 and max |w| / 8 over the 32 weights of a block for q8_0 and q4_0. Raises
    if a tensor is missing, has another shape or type, or a weight is off by more than one step.
    """
    gguf = import_module("gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    worst = 0.0
    for name, values in _tensors(folder):
        tensor = tensors.pop(name, None)
        require(tensor is not None, f"{path}: {name} is missing", TielineError)
        assert tensor is not None
        stored = _type_of(name, values, kind)
        shape = tuple(reversed(tensor.shape.tolist()))
        fits = shape == values.shape and tensor.tensor_type == stored
        require(fits, f"{path}: {name} is {tensor.tensor_type.name} {shape}", TielineError)
        read = gguf.quants.dequantize(tensor.data, stored).reshape(values.shape)
        worst = max(worst, _error_in_steps(values, read, stored.name))
    require(not tensors and worst <= 1, f"{path}: {sorted(tensors)} more, off by {worst:g} steps")
    return worst


def _architecture(config: dict[str, Any]) -> str:
    supported, model_type = ", ".join(FAMILIES), config["model_type"]
    require(
        model_type in FAMILIES,
        f"this tool writes {supported}, not {model_type!r:.40}",
        TielineError,
    )
    return FAMILIES[model_type]


def _experts(config: dict[str, Any]) -> int:
    fields = ("num_experts", "num_local_experts", "n_routed_experts")
    return next(config[field] for field in fields if field in config)


def _describe(writer: Any, config: dict[str, Any], kind: str) -> None:
    gguf = import_module("gguf")
    writer.add_name(f"tieline-{config['model_type']}")
    writer.add_file_type(gguf.LlamaFileType[TYPES[kind]])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_expert_count(_experts(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "first_k_dense_replace" in config:
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if share := config["rope_parameters"].get("partial_rotary_factor"):
        writer.add_rope_dimension_count(int(share * config["head_dim"]))


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any]) -> None:
    """The byte-level BPE; its only special token, if it has one, ends a text."""
    gguf, model = import_module("gguf"), tokenizer["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {token["id"] for token in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL, gguf.TokenType.NORMAL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([kinds[number not in special] for number in range(len(vocabulary))])
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_token_merges(merges or [NO_MERGE])
    if special:
        writer.add_eos_token_id(min(special))
    writer.add_add_bos_token(False)


def _tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    """Name in GGUF and float32 values of every tensor; the experts of a layer are stacked."""
    gguf, config = import_module("gguf"), _read_json(folder / "config.json")
    architecture = _architecture(config)
    arches = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(arches[architecture], config["num_hidden_layers"])
    weights = {k: v.float().numpy() for k, v in load_file(folder / "model.safetensors").items()}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in _stacked(weights).items():
        plain_name = name.replace("correction_bias", "correction.bias")
        gguf_name = names.get_name(plain_name, try_suffixes=(".weight", ".bias"))
        require(gguf_name is not None, f"GGUF has no name for {name}", TielineError)
        projection = name.split(".")[-2]
        turned = architecture == "llama" and projection in heads
        permuted = _interleaved(values, heads[projection]) if turned else values
        yield gguf_name, np.ascontiguousarray(permuted)


def _stacked(weights: dict[str, Array]) -> dict[str, Array]:
    """The weights with the matrices of a layer's experts in one tensor each."""
    parts: dict[str, dict[int, Array]] = {}
    stacked = {}
    for name, values in weights.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            stacked[name] = values
        else:
            parts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
    stacks = {
        name: np.stack([expert_tensors[e] for e in range(len(expert_tensors))])
        for name, expert_tensors in parts.items()
    }
    return stacked | stacks


def _interleaved(weight: Array, heads: int) -> Array:
    """Rows of a query or key matrix as llama's GGUF has them: the halves of a head in turns."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, -1)


def _type_of(name: str, values: Array, kind: str) -> Any:
    """The type that a tensor is stored in."""
    gguf = import_module("gguf")
    kept = values.ndim == 1 or ROUTER in name
    return gguf.GGMLQuantizationType["F32" if kept else kind.upper()]


def _error_in_steps(values: Array, read: Array, kind: str) -> float:
    error = np.abs(values.astype(np.float64) - read)
    if kind == "F32":
        return 0.0 if not error.any() else np.inf
    if kind == "F16":
        step: Array = np.maximum(np.abs(values) * 2.0**-11, 2.0**-25)
    else:
        # the scale is in float16; q4_0 stores a weight of 8 steps as 7 of them, each 2**-11 short
        blocks = np.abs(values).reshape(-1, 32).max(axis=1, keepdims=True)
        scale = blocks / 127 * (1 + 2.0**-9) if kind == "Q8_0" else blocks / 8 * (1 + 7 * 2.0**-11)
        step = np.broadcast_to(np.maximum(scale, 2.0**-24), (blocks.size, 32)).reshape(values.shape)
    return float((error / step).max())


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the GGUF file to write")
    parser.add_argument("--type", dest="kind", choices=sorted(TYPES), default="f32")
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER, help="folder of a checkpoint")
    options = parser.parse_args()
    write_gguf(options.out, options.kind, options.model)


if __name__ == "__main__":
    main()
