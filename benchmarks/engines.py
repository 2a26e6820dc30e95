"""What three inference engines route, against transformers in float32: the tables of the docs.

    python -m benchmarks.engines --json engines.json            # the demo model in every format
    python -m benchmarks.engines --family                       # a random qwen3_moe, K-quants too
    python -m benchmarks.engines --faults                       # planted faults
    python -m benchmarks.engines --overhead                     # what capture costs in each engine

Needs the engines of `tieline capture --list-engines`; those that are missing are left out. Every
number comes from `tieline.diff` on 16 documents of 256 tokens.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tieline as tl
from tieline.analysis.text import tokenise
from tieline.engines import ENGINES, find_python, installed
from tieline.engines.process import run_worker
from tieline.hf.demo import DEMO_FOLDER, demo_text, load_demo_tokenizer

TOKENS, LENGTH = 4096, 256
KINDS = ("f32", "f16", "q8_0", "q4_0")
KQUANTS = {"q4_k_m": 15, "q6_k": 18, "q8_0": 7, "f16": 1}
"""File types of llama.cpp's own quantisation."""


def has(engine: str) -> bool:
    return installed(ENGINES[engine]).python is not None


def python_of(engine: str) -> str:
    return str(find_python(ENGINES[engine]))


def with_gguf() -> None:
    """Make the package gguf of llama.cpp's environment importable here, behind our own."""
    venv = Path(python_of("llama.cpp")).parent.parent
    sys.path.extend(str(x) for x in venv.glob("lib/python3*/site-packages"))


def quantise_mlx(folder: Path, out: Path, bits: int) -> None:
    code = (
        "import sys, mlx.core as mx; mx.set_default_device(mx.cpu); from mlx_lm import convert;"
        "convert(sys.argv[1], sys.argv[2], quantize=True, q_bits=int(sys.argv[3]), q_group_size=64)"
    )
    run_in("mlx", code, str(folder), str(out), str(bits))


def quantise_gguf(source: Path, out: Path, kind: int) -> None:
    code = (
        "import sys, ctypes; sys.path.insert(0, sys.argv[1]); import llamacpp;"
        "L, _ = llamacpp.libraries(); q = L.llama_model_quantize_default_params();"
        "q.ftype, q.nthread = int(sys.argv[4]), 1;"
        "a = [x.encode() for x in sys.argv[2:4]];"
        "sys.exit(L.llama_model_quantize(*a, ctypes.byref(q)))"
    )
    workers = str(ENGINES["llama.cpp"].worker.parent)
    run_in("llama.cpp", code, workers, str(source), str(out), str(kind))


def run_in(engine: str, code: str, *words: str) -> None:
    from tieline.engines.registry import environment_of

    python = find_python(ENGINES[engine])
    done = subprocess.run(
        [str(python), "-c", code, *words],
        env=environment_of(ENGINES[engine], python),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stderr[-800:]}")


def compared(a: str, b: str, **options: Any) -> dict[str, Any]:
    """Flips by layer, tokens, KL, verdict and split of one comparison."""
    started = time.perf_counter()
    found = tl.diff(a, b, tokens=TOKENS, sequence_length=LENGTH, **options)
    told = found.provenance["b"]
    split = found.dequantised
    assert isinstance(told, dict)
    assert found.causes is not None
    return {
        "b": b,
        "options": {key: str(value) for key, value in options.items()},
        "flips": [layer.flip.count for layer in found.layers],
        "choices": found.layers[0].flip.total * len(found.layers),
        "tokens": found.tokens.anywhere.value,
        "kl": found.metrics.get("kl"),
        "losses": None if found.logits is None else [found.logits.loss_a, found.logits.loss_b],
        "conclusion": found.causes.conclusion,
        "patterns": [x.text for x in found.causes.patterns],
        "bits": told.get("bits"),
        "ties": told.get("ties"),
        "format": None if split is None else [x.count for x in split.format_flips],
        "engine": None if split is None else [x.count for x in split.engine_flips],
        "kl_format": None if split is None else split.format_kl,
        "kl_engine": None if split is None else split.engine_kl,
        "seconds": time.perf_counter() - started,
    }


def formats(work: Path) -> list[dict[str, Any]]:
    """The demo model through every engine and format."""
    rows = []
    if has("llama.cpp"):
        with_gguf()
        from tools.demo_gguf import write_gguf

        for kind in KINDS:
            write_gguf(work / f"demo-{kind}.gguf", kind)
            rows.append(shown(compared("demo", f"llama.cpp:{work / f'demo-{kind}.gguf'}")))
        name = f"llama.cpp:{work / 'demo-f32.gguf'}"
        rows.append(shown(compared("demo", name, engine_defaults=True)))
    if has("mlx"):
        rows.append(shown(compared("demo", "mlx:demo")))
        for bits in (8, 4):
            quantise_mlx(DEMO_FOLDER, work / f"mlx-{bits}", bits)
            rows.append(shown(compared("demo", f"mlx:{work / f'mlx-{bits}'}")))
    if has("vllm"):
        rows.extend(shown(compared("demo", "vllm:demo", dtype_b=x)) for x in ("fp32", "bf16"))
    return rows


def random_model(work: Path) -> Path:
    """A qwen3_moe with random weights whose widths every engine and K-quants take."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.06,
        "tie_word_embeddings": False,
    }
    config = Qwen3MoeConfig(**sizes)
    torch.manual_seed(0)
    folder = work / "qwen3_moe"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    plain = json.loads((folder / "config.json").read_text())
    plain["rope_theta"] = plain["rope_parameters"]["rope_theta"]  # engines read older names
    plain["num_experts"] = sizes["num_experts"]
    (folder / "config.json").write_text(json.dumps(plain))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
    return folder


def write_qwen3_moe(folder: Path, out: Path) -> None:
    """A float32 GGUF of the random model."""
    import gguf  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    weights, layers = load_file(folder / "model.safetensors"), config["num_hidden_layers"]
    writer = gguf.GGUFWriter(out, "qwen3moe")
    writer.add_name("random qwen3_moe")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    from tools.demo_gguf import _add_tokenizer

    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    for layer in range(layers):
        place = f"model.layers.{layer}.mlp.experts."
        for part in ("gate_proj", "up_proj", "down_proj"):
            own = [weights.pop(f"{place}{e}.{part}.weight") for e in range(config["num_experts"])]
            weights[f"{place}{part}.weight"] = np.stack(own)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, layers)
    for name, values in weights.items():
        known = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(known, np.ascontiguousarray(values.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def family(work: Path) -> list[dict[str, Any]]:
    """A second family through every engine that knows it, with K-quants."""
    folder, rows = random_model(work), []
    own: dict[str, Any] = {"dtype_a": "fp32"}
    if has("llama.cpp"):
        with_gguf()
        exact = work / "qwen-f32.gguf"
        write_qwen3_moe(folder, exact)
        rows.append(shown(compared(str(folder), f"llama.cpp:{exact}", **own)))
        for name, kind in KQUANTS.items():
            out = work / f"qwen-{name}.gguf"
            quantise_gguf(exact, out, kind)
            rows.append(shown(compared(str(folder), f"llama.cpp:{out}", **own)))
    if has("mlx"):
        rows.append(shown(compared(str(folder), f"mlx:{folder}", **own)))
        quantise_mlx(folder, work / "qwen-mlx-4", 4)
        rows.append(shown(compared(str(folder), f"mlx:{work / 'qwen-mlx-4'}", **own)))
    if has("vllm"):
        for dtype in ("fp32", "bf16"):
            rows.append(shown(compared(str(folder), f"vllm:{folder}", dtype_b=dtype, **own)))
    return rows


def changed(work: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the demo model with another configuration."""
    folder = work / name
    shutil.copytree(DEMO_FOLDER, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def other_base(config: dict[str, Any]) -> None:
    """A rope base where transformers 5 looks for it, and nowhere else."""
    config["rope_parameters"]["rope_theta"] = 500_000.0
    config.pop("rope_theta", None)


def swapped_experts(folder: Path) -> None:
    """Exchange two experts of the second layer in the weights, not in its router."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    for part in ("gate_proj", "up_proj", "down_proj"):
        one, other = (f"model.layers.1.mlp.experts.{e}.{part}.weight" for e in (3, 11))
        weights[one], weights[other] = weights[other], weights[one]
    save_file(weights, path, metadata={"format": "pt"})


def faults(work: Path) -> list[dict[str, Any]]:
    """A wrong rope base and exchanged experts in each engine; transformers has them right."""
    own: dict[str, Any] = {"dtype_a": "fp32"}
    rope = changed(work, "rope", other_base)
    experts = changed(work, "experts", lambda _: None)
    swapped_experts(experts)
    eps = changed(work, "eps", lambda config: config.update(rms_norm_eps=1e-2))
    rows = []
    if has("mlx"):
        rows.append(shown(compared(str(rope), f"mlx:{rope}", **own)))  # the bug of mlx-lm itself
        rows.append(shown(compared("demo", f"mlx:{experts}")))
        quantise_mlx(experts, work / "experts-mlx-4", 4)
        rows.append(shown(compared("demo", f"mlx:{work / 'experts-mlx-4'}")))
    if has("llama.cpp"):
        with_gguf()
        from tools.demo_gguf import write_gguf

        for name, folder in (("rope", rope), ("experts", experts)):
            for kind in ("f32", "q8_0"):
                out = work / f"{name}-{kind}.gguf"
                write_gguf(out, kind, folder)
                rows.append(shown(compared("demo", f"llama.cpp:{out}")))
    if has("vllm"):
        rows.append(shown(compared("demo", f"vllm:{rope}")))
        rows.append(shown(compared("demo", f"vllm:{experts}")))
        rows.append(shown(compared(str(eps), f"vllm:{eps}", **own)))  # vLLM assumes 1e-5
        rows.append(shown(compared("demo", f"vllm:{rope}", dtype_b="bf16")))
    return rows


def overhead(work: Path, rounds: int = 5) -> list[dict[str, Any]]:
    """Seconds of the documents with and without capture, in one process each, interleaved."""
    tokenizer = load_demo_tokenizer()
    ids = [x.numpy() for x in tokenise(tokenizer, demo_text(), TOKENS, LENGTH).sequences]
    models = {"mlx": str(DEMO_FOLDER), "vllm": str(DEMO_FOLDER)}
    if has("llama.cpp"):
        with_gguf()
        from tools.demo_gguf import write_gguf

        models["llama.cpp"] = str(work / "overhead.gguf")
        write_gguf(Path(models["llama.cpp"]), "f32")
    rows = []
    for engine, model in models.items():
        if not has(engine):
            continue
        request = {
            "job": "time",
            "model": model,
            "dtype": "fp32",
            "defaults": False,
            "logprobs": False,
            "threads": 1,
            "words": [],
            "rounds": rounds,
        }
        with tempfile.TemporaryDirectory() as folder:
            python = find_python(ENGINES[engine])
            path = run_worker(ENGINES[engine], python, Path(folder), request, ids)
            with np.load(path) as stored:
                plain, captured = stored["plain"].tolist(), stored["captured"].tolist()
        ratios = [b / a for a, b in zip(plain, captured, strict=True)]
        rows.append({"engine": engine, "ratio": statistics.median(ratios), "ratios": ratios})
        rows[-1] |= {"plain": statistics.median(plain), "captured": statistics.median(captured)}
        print(json.dumps(rows[-1]), flush=True)
    return rows


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row and return it."""
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("family", "faults", "overhead"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    job = next((x for x in ("family", "faults", "overhead") if getattr(options, x)), "formats")
    with tempfile.TemporaryDirectory(prefix="engines-") as work:
        rows = globals()[job](Path(work))
    if options.json:
        options.json.write_text(json.dumps({job: rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
