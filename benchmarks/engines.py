"""What three inference engines route, against transformers in float32: the tables of the docs.

    python -m benchmarks.engines formats --json engines.json    # the demo model in every format
    python -m benchmarks.engines faults                         # planted faults
    python -m benchmarks.engines formats --model FOLDER         # another OLMoE or Mixtral
    python -m benchmarks.engines family                         # a random qwen3_moe, K-quants too
    python -m benchmarks.engines family --family qwen2_moe      # shared experts, biases of q, k, v
    python -m benchmarks.engines overhead                       # what capture costs in each engine

Needs the engines of `tieline capture --list-engines`; those that are missing are left out, and
`--engines` names some. Flips come from `tieline.diff` on 4096 tokens in documents of 256, or of
the model's context. The overhead is a ratio of processor time within one process that runs the
same tokens with and without capture in turns.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tieline as tl
from benchmarks.harness import Samples, ratio
from tieline.engines import ENGINES, find_python, installed_engine
from tieline.engines.engine_run import run_worker
from tieline.models.demo import DEMO_FOLDER, demo_text, load_demo_tokenizer
from tieline.run.corpus import tokenise

TOKENS, LENGTH = 4096, 256
TIMED_TOKENS, ROUNDS = 512, 12
KINDS = ("f32", "f16", "q8_0", "q4_0")
KQUANTS = {"q4_k_m": 15, "q6_k": 18, "q8_0": 7, "f16": 1}
"""File types of llama.cpp's own quantisation."""


WANTED = set(ENGINES)
"""Engines that run; `--engines` takes some away."""


def has(engine: str) -> bool:
    return engine in WANTED and bool(installed_engine(ENGINES[engine]).python)


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
        "L, _ = llamacpp.load_libraries(); q = L.llama_model_quantize_default_params();"
        "q.ftype, q.nthread = int(sys.argv[4]), 1;"
        "a = [x.encode() for x in sys.argv[2:4]];"
        "sys.exit(L.llama_model_quantize(*a, ctypes.byref(q)))"
    )
    workers = str(ENGINES["llama.cpp"].worker.parent)
    run_in("llama.cpp", code, workers, str(source), str(out), str(kind))


def run_in(engine: str, code: str, *words: str) -> None:
    from tieline.engines.engine_registry import environment_of

    python = find_python(ENGINES[engine])
    done = subprocess.run(
        [str(python), "-c", code, *words],
        env=environment_of(ENGINES[engine], python),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stderr[-800:]}")


def compared(model: Path, b: str, **options: Any) -> dict[str, Any]:
    """Flips by layer, tokens, KL, verdict and split of one comparison with transformers."""
    started = time.perf_counter()
    size: dict[str, Any] = {"tokens": TOKENS, "sequence_length": LENGTH}
    comparison = tl.diff(str(model), b, dtype_a="fp32", **size, **options)
    facts = comparison.provenance["b"]
    split = comparison.dequantised
    assert isinstance(facts, dict)
    assert comparison.causes is not None
    return {
        "b": b,
        "options": {key: str(value) for key, value in options.items()},
        "flips": [layer.flip.count for layer in comparison.layers],
        "choices": comparison.layers[0].flip.total * len(comparison.layers),
        "tokens": comparison.tokens.anywhere.value,
        "kl": comparison.metrics.get("kl"),
        "losses": None
        if comparison.logits is None
        else [comparison.logits.loss_a, comparison.logits.loss_b],
        "conclusion": comparison.causes.conclusion,
        "patterns": [x.text for x in comparison.causes.patterns],
        "bits": facts.get("bits"),
        "ties": facts.get("ties"),
        "format": None if split is None else [x.count for x in split.format_flips],
        "engine": None if split is None else [x.count for x in split.engine_flips],
        "kl_format": None if split is None else split.format_kl,
        "kl_engine": None if split is None else split.engine_kl,
        "seconds": time.perf_counter() - started,
    }


def formats(work: Path, model: Path = DEMO_FOLDER, **own: Any) -> list[dict[str, Any]]:
    """A model through every engine and format."""
    rows = []
    if has("llama.cpp"):
        with_gguf()
        from tools.demo_gguf import write_gguf

        for kind in KINDS:
            write_gguf(work / f"{kind}.gguf", kind, model)
            rows.append(shown(compared(model, f"llama.cpp:{work / f'{kind}.gguf'}", **own)))
        exact = f"llama.cpp:{work / 'f32.gguf'}"
        rows.append(shown(compared(model, exact, engine_defaults=True, **own)))
    if has("mlx"):
        rows.append(shown(compared(model, f"mlx:{model}", **own)))
        for bits in (8, 4):
            quantise_mlx(model, work / f"mlx-{bits}", bits)
            rows.append(shown(compared(model, f"mlx:{work / f'mlx-{bits}'}", **own)))
    if has("vllm"):
        for dtype in ("fp32", "bf16"):
            rows.append(shown(compared(model, f"vllm:{model}", dtype_b=dtype, **own)))
    return rows


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 64, "norm_topk_prob": True},
    "qwen2_moe": {"shared_expert_intermediate_size": 256, "qkv_bias": True},
}
"""Families with random weights, with the settings that are theirs alone."""


def random_model(work: Path, family: str) -> Path:
    """A model with random weights whose widths every engine and K-quants take."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.06,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(family, **sizes | FAMILIES[family])
    torch.manual_seed(0)
    folder, model = work / family, AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for bias in (value for name, value in model.named_parameters() if name.endswith(".bias")):
        bias.data.normal_(0, sizes["initializer_range"])  # which are zero in a new model
    model.save_pretrained(folder)
    plain = json.loads((folder / "config.json").read_text())
    plain["rope_theta"] = plain["rope_parameters"]["rope_theta"]  # engines read older names
    plain["num_experts"] = sizes["num_experts"]
    (folder / "config.json").write_text(json.dumps(plain))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
    return folder


def family(work: Path, name: str = "qwen3_moe", **own: Any) -> list[dict[str, Any]]:
    """Another family through every engine that knows it, with K-quants."""
    folder, rows = random_model(work, name), []
    if has("llama.cpp"):
        with_gguf()
        from tools.demo_gguf import write_gguf

        exact = work / "family-f32.gguf"
        write_gguf(exact, "f32", folder)
        rows.append(shown(compared(folder, f"llama.cpp:{exact}", **own)))
        for kind, number in KQUANTS.items():
            out = work / f"family-{kind}.gguf"
            quantise_gguf(exact, out, number)
            rows.append(shown(compared(folder, f"llama.cpp:{out}", **own)))
    if has("mlx"):
        rows.append(shown(compared(folder, f"mlx:{folder}", **own)))
        quantise_mlx(folder, work / "family-mlx-4", 4)
        rows.append(shown(compared(folder, f"mlx:{work / 'family-mlx-4'}", **own)))
    if has("vllm"):
        for dtype in ("fp32", "bf16"):
            rows.append(shown(compared(folder, f"vllm:{folder}", dtype_b=dtype, **own)))
    return rows


def changed(
    work: Path, name: str, change: Callable[[dict[str, Any]], object], model: Path = DEMO_FOLDER
) -> Path:
    """A copy of a model with another configuration."""
    folder = work / name
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


OTHER_BASE = 500_000.0


def hidden_base(config: dict[str, Any]) -> None:
    """Another rope base where transformers 5 looks for it, and nowhere else."""
    config["rope_parameters"]["rope_theta"] = OTHER_BASE
    config.pop("rope_theta", None)


def other_base(config: dict[str, Any]) -> None:
    """Another rope base wherever an engine may look for it."""
    config["rope_parameters"]["rope_theta"] = config["rope_theta"] = OTHER_BASE


def swapped_experts(folder: Path) -> None:
    """Exchange two experts of the second layer in the weights, not in its router."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in [x for x in weights if re.search(r"layers\.1\..*\.experts\.3\.", x)]:
        other = name.replace(".experts.3.", ".experts.11.")
        weights[name], weights[other] = weights[other], weights[name]
    save_file(weights, path, metadata={"format": "pt"})


def other_router(folder: Path) -> None:
    """Reverse the columns of the third layer's router in the weights."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    (name,) = [x for x in weights if re.search(r"layers\.2\..*\.gate\.weight", x)]
    save_file(weights | {name: weights[name].flip(1).contiguous()}, path, metadata={"format": "pt"})


def faults(work: Path, model: Path = DEMO_FOLDER, **own: Any) -> list[dict[str, Any]]:
    """A wrong rope base and exchanged experts in each engine; transformers has them right."""
    rope = changed(work, "rope", other_base, model)
    experts = changed(work, "experts", lambda _: None, model)
    swapped_experts(experts)
    rows = []
    if has("mlx"):
        rows.append(shown(compared(model, f"mlx:{rope}", **own)))
        rows.append(shown(compared(model, f"mlx:{experts}", **own)))
        quantise_mlx(experts, work / "experts-mlx-4", 4)
        rows.append(shown(compared(model, f"mlx:{work / 'experts-mlx-4'}", **own)))
    if has("llama.cpp"):
        with_gguf()
        from tools.demo_gguf import write_gguf

        for name, folder in (("rope", rope), ("experts", experts)):
            for kind in ("f32", "q8_0"):
                out = work / f"{name}-{kind}.gguf"
                write_gguf(out, kind, folder)
                rows.append(shown(compared(model, f"llama.cpp:{out}", **own)))
        rows.append(shown(stored_router(work, model, **own)))
    if has("vllm"):
        rows.append(shown(compared(model, f"vllm:{rope}", **own)))
        rows.append(shown(compared(model, f"vllm:{experts}", **own)))
        rows.append(shown(compared(model, f"vllm:{rope}", dtype_b="bf16", **own)))
    return rows + (bugs(work, model) if model == DEMO_FOLDER else [])


def stored_router(work: Path, model: Path = DEMO_FOLDER, **own: Any) -> dict[str, Any]:
    """A Q4_0 file of llama.cpp with another router, which it stores in float32."""
    from tools.demo_gguf import write_gguf

    folder, out = changed(work, "router", lambda _: None, model), work / "router-q4_0.gguf"
    other_router(folder)
    write_gguf(out, "q4_0", folder)
    return compared(model, f"llama.cpp:{out}", **own)


def bugs(work: Path, model: Path) -> list[dict[str, Any]]:
    """What engines themselves get wrong of an OLMoE."""
    rows = []
    if has("mlx"):  # mlx-lm does not read `rope_parameters`
        base = changed(work, "base", hidden_base, model)
        rows.append(shown(compared(base, f"mlx:{base}")))
    if has("vllm"):  # vLLM assumes 1e-5
        eps = changed(work, "eps", lambda config: config.update(rms_norm_eps=1e-2), model)
        rows.append(shown(compared(eps, f"vllm:{eps}")))
    return rows


def overhead(work: Path, model: Path = DEMO_FOLDER) -> list[dict[str, Any]]:
    """Processor time of the same documents with capture over that without."""
    tokenizer = load_demo_tokenizer()
    ids = [x.numpy() for x in tokenise(tokenizer, demo_text(), TIMED_TOKENS, LENGTH).sequences]
    rows = []
    for engine in filter(has, ENGINES):
        source = model
        if engine == "llama.cpp":
            with_gguf()
            from tools.demo_gguf import write_gguf

            source = work / "overhead.gguf"
            write_gguf(source, "f32", model)
        rows.append(shown(timed(engine, source, ids)))
    return rows


def timed(engine: str, model: Path, ids: list[Any]) -> dict[str, Any]:
    """Median processor seconds without capture, and the ratio with its 95 % interval."""
    request = {
        "job": "time",
        "model": str(model),
        "dtype": "fp32",
        "defaults": False,
        "threads": 1,
        "rounds": ROUNDS,
    }
    with tempfile.TemporaryDirectory() as folder:
        python = find_python(ENGINES[engine])
        path = run_worker(ENGINES[engine], python, Path(folder), request, ids)
        with np.load(path) as stored:
            samples = {name: Samples(stored[name].tolist(), []) for name in ("plain", "captured")}
    seconds = float(np.median(samples["plain"].cpu))
    done = asdict(ratio(engine, samples["captured"], samples["plain"]))
    return {"tokens": sum(map(len, ids)), "rounds": ROUNDS, "plain": seconds} | done


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row and return it."""
    print(json.dumps(row), flush=True)
    return row


JOBS = {"formats": formats, "family": family, "faults": faults, "overhead": overhead}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", nargs="?", choices=list(JOBS), default="formats")
    parser.add_argument("--model", type=Path, help="an OLMoE or Mixtral instead of the demo model")
    parser.add_argument("--text", type=Path, help="instead of the text in the box")
    parser.add_argument("--family", dest="name", choices=list(FAMILIES), help="for `family`")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    WANTED.intersection_update(options.engines)
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of engines that wait for each other by spinning
    given = {
        key: getattr(options, key) for key in ("model", "text", "name") if getattr(options, key)
    }
    with tempfile.TemporaryDirectory(prefix="engines-") as work:
        rows = JOBS[options.job](Path(work), **given)
    if options.json:
        options.json.write_text(json.dumps({options.job: rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
