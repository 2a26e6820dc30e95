"""Mutated files for every reader and loader: each must be read, or be refused by a short message.

    python -m tools.fuzz 100000 [seed]     mutated files, in this process
    python -m tools.fuzz --memory          peak memory of refusing hostile configs and archives

Files of every kind that Tieline reads are made, and copies with flipped, cut, doubled and inserted
bytes, with other numbers, or with other values where a JSON value, a line, a member of an archive
or the text in a gzip stood, are given to their readers. Counted are

    escaped        exceptions that are no `TielineError`: the command line would call them a bug
    long message   messages over 2 kB
    acting text    characters in a message or on a page that act instead of showing
    half-written   a conversion that was refused and left something behind
    slow, memory   readers that take longer than 20 s, or more memory than the limit

The peak of the memory is that of the whole process, torch and transformers included.
"""

import functools
import gzip
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import tieline
from tieline.analysis.route_files import convert
from tieline.core.errors import TielineError
from tieline.core.records import read_result
from tieline.core.text import printable
from tieline.lab.estimation.rates import RateRow, RateStore
from tieline.lab.training.checkpoint import read_json
from tieline.lab.tropical.layer_shape_advice import LayerShape, advise
from tieline.models.demo import load_demo_tokenizer
from tieline.models.model import Model, load_dense
from tieline.run.corpus import text_and_origin
from tieline.trace import RoutingTrace, save_summary, save_trace, summarise
from tieline.trace.readers import imatrix_load, import_trace
from tieline.trace.writers import export
from tools.hostile import (
    Mutation,
    hostile_archive,
    hostile_gzip,
    hostile_json,
    hostile_lines,
    mutated,
)

LONGEST_MESSAGE, SLOWEST = 2000, 20
MOST_MEMORY = 24 << 30
"""Address space of the process; a reader that wants more fails with `MemoryError`."""
FIXTURES = Path(__file__).parents[1] / "tests" / "trace" / "fixtures"
BAD_ENDINGS = {"escaped", "long message", "acting text", "half-written", "slow", "memory"}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 0,
        "q_lora_rank": 4,
        "kv_lora_rank": 4,
        "qk_rope_head_dim": 2,
        "qk_nope_head_dim": 2,
        "v_head_dim": 4,
    },
}
"""Families whose configs are made hostile, with the sizes of a tiny model."""


class HalfWrittenError(Exception):
    """A refused conversion left something behind."""


class ActingTextError(Exception):
    """A page holds characters that act instead of showing."""


@dataclass(frozen=True)
class Target:
    """A file to mutate and how it is read.

    Attributes:
        name: of the kind of file.
        file: the file; the others of its folder stay as they are.
        read: reads it.
        weight: how often it is drawn.
        signed: index of the folder in which size and digest of the file are put right.
        mutate: how its bytes are changed.
    """

    name: str
    file: Path
    read: Callable[[], object]
    weight: float = 1.0
    signed: Path | None = None
    mutate: Mutation = mutated


def make_targets(folder: Path) -> list[Target]:
    """Every kind of file, with its reader."""
    makers = (_traces, _routes, _forms, _logs, _torch_files, _archives, _models, _others)
    return [target for maker in makers for target in maker(folder)] + _fixture_targets(folder)


def _fixture_targets(folder: Path) -> list[Target]:
    """Files of engines that the tests keep."""
    targets = []
    for fixture in sorted(FIXTURES.rglob("*")) if FIXTURES.is_dir() else ():
        if fixture.is_file() and fixture.suffix not in (".py", ".md"):
            file = folder / "fixtures" / fixture.relative_to(FIXTURES)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(fixture.read_bytes())
            in_folder = (fixture.parent / "tieline.json").exists()
            read = functools.partial(_load_and_touch, file.parent if in_folder else file)
            targets.append(Target(f"fixture {fixture.name}", file, read))
    return targets


def _touch(loaded: object) -> None:
    """Read what is read when it is touched."""
    if isinstance(loaded, RoutingTrace):
        for layer in loaded.layers:
            layer.experts.sum()


def _load_and_touch(path: Path) -> None:
    _touch(tieline.load(path))


def _import_and_touch(path: Path, **options: Any) -> None:
    _touch(import_trace(path, **options))


def _convert(source: Path, form: str) -> None:
    """Convert a file; what is refused must leave nothing behind, what is written must be read."""
    suffix = {"npz": "out.npz", "verl": "out.safetensors", "vllm": "out.jsonl"}.get(form, "out")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / suffix
        try:
            convert(source, output, to=form)
        except TielineError:
            if os.listdir(folder):
                raise HalfWrittenError(str(os.listdir(folder))) from None
            raise
        if os.listdir(folder) != [suffix]:
            raise HalfWrittenError(str(os.listdir(folder)))
        _load_and_touch(output) if form == "trace" else _import_and_touch(output)


def _show_result(path: Path) -> None:
    """Read a result and draw its page, which must hold nothing that acts."""
    page = read_result(path).to_html()
    if printable(page) != page:
        raise ActingTextError(f"the page of {path.name}")


def _traces(folder: Path) -> list[Target]:
    """Folders of a trace and of a summary, each file of them."""
    ids = torch.arange(40, dtype=torch.int16)
    chosen = np.stack([ids % 8, (ids + 1) % 8], 1).reshape(40, 1, 2).repeat(2, 1)
    np.save(folder / "seed.npy", chosen)
    trace = import_trace(folder / "seed.npy")
    save_trace(trace, folder / "trace")
    save_summary(summarise(trace), folder / "summary")
    targets = []
    for kind in ("trace", "summary"):
        for file in sorted((folder / kind).iterdir()):
            is_index = file.suffix != ".safetensors"
            read = functools.partial(_load_and_touch, folder / kind)
            targets.append(Target(f"{kind} {file.name}", file, read, 2.0))
            if is_index:
                name = f"{kind} {file.name} hostile"
                targets.append(Target(name, file, read, 2.0, mutate=hostile_json))
            else:
                index = folder / kind / "tieline.json"
                targets.append(Target(f"{kind} {file.name} signed", file, read, 2.0, index))
    return targets


def _routes(folder: Path) -> list[Target]:
    """Arrays and tables of routes."""
    experts = np.random.default_rng(0).integers(0, 8, (30, 2, 2)).astype(np.int32)
    experts[:, :, 1] = (experts[:, :, 0] + 1) % 8
    np.save(folder / "routes.npy", experts)
    np.savez(folder / "routes.npz", routed_experts=experts)
    np.savez_compressed(folder / "small.npz", routed_experts=experts)
    save_file({"routed_experts": experts}, folder / "routes.safetensors")
    rows = [(la, t, [int(e) for e in experts[t, la]]) for la in range(2) for t in range(30)]
    lines = [f"{la},{t},{a} {b},0.9 0.5" for la, t, (a, b) in rows]
    (folder / "routes.csv").write_text("layer,token,experts,scores\n" + "\n".join(lines) + "\n")
    tables = [json.dumps({"layer": la, "token": t, "experts": e}) for la, t, e in rows]
    (folder / "routes.jsonl").write_text("\n".join(tables) + "\n")
    names = ("routes.npy", "routes.npz", "small.npz", "routes.safetensors")
    targets = [_route_target(folder / name, 4.0) for name in names]
    for name in ("routes.csv", "routes.jsonl"):
        targets += [
            _route_target(folder / name, 2.0, mutate) for mutate in (mutated, hostile_lines)
        ]
    return targets


def _route_target(file: Path, weight: float, mutate: Mutation = mutated, **options: Any) -> Target:
    """A file that `import_trace` reads."""
    read = functools.partial(_import_and_touch, file, **options)
    name = file.name if mutate is mutated else f"{file.name} {mutate.__name__}"
    return Target(name, file, read, weight, mutate=mutate)


def _forms(folder: Path) -> list[Target]:
    """Routes as engines and trainers write them, some also checked and converted."""
    forms = folder / "forms"
    forms.mkdir()
    trace = import_trace(folder / "seed.npy")
    options = {"vllm": {}, "sglang": {"layers": 2, "k": 2}, "verl": {}, "nemo": {}, "megatron": {}}
    suffixes = {"vllm": "jsonl", "sglang": "jsonl", "nemo": "safetensors"}
    targets = []
    for form, chosen in options.items():
        file = export(trace, forms / f"{form}.{suffixes.get(form, 'npz')}", form)
        mutate = hostile_lines if file.suffix == ".jsonl" else mutated
        targets += [_route_target(file, 2.0, kind, **chosen) for kind in {mutated, mutate}]
    for file in (folder / "routes.npz", forms / "vllm.jsonl"):
        targets.append(Target(f"check {file.name}", file, functools.partial(tieline.check, file)))
    for form in ("trace", "npz", "verl", "vllm"):
        source = folder / "routes.npy"
        read = functools.partial(_convert, source, form)
        targets.append(Target(f"convert to {form}", source, read, 2.0))
    (forms / "moe_trace.csv").write_text("layer,expert\n" + "0,1\n0,2\n1,3\n1,0\n" * 9)
    counts = forms / "counts.gguf"
    counts.write_bytes(_imatrix({"blk.0.ffn_down_exps.weight.counts": [3.0, 0.0, 2.0, 9.0]}))
    steps = _megatron_steps(forms / "steps")
    read_steps = functools.partial(_import_and_touch, steps[0].parent)
    return [
        *targets,
        _route_target(forms / "moe_trace.csv", 2.0, hostile_lines, k=2),
        Target("imatrix", counts, functools.partial(imatrix_load, counts), 2.0),
        *(Target(file.name, file, read_steps, 2.0) for file in steps),
        Target("megatron steps hostile", steps[0], read_steps, 2.0, mutate=hostile_lines),
    ]


def _megatron_steps(folder: Path) -> list[Path]:
    """A trace of Megatron-Core: the records of a rank and its logits."""
    folder.mkdir()
    logits = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    lines = [
        {"step": 0, "rank": 0, "layer": layer, "block": "decoder", "num_tokens": 12, "topk": 2}
        | {"top_indices": logits[layer].topk(2).indices.tolist(), "logit_shape": [12, 8]}
        | {"logit_offset": 192 * layer, "logit_bytes": 192}
        for layer in range(2)
    ]
    records, numbers = folder / "router_trace_rank0.jsonl", folder / "logits_rank0.bin"
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    numbers.write_bytes(logits.view(torch.int16).numpy().tobytes())
    return [records, numbers]


def _imatrix(tensors: dict[str, list[float]]) -> bytes:
    """A GGUF file of float32 vectors, without metadata."""
    head, data = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0), b""
    for name, values in tensors.items():
        text = name.encode()
        head += struct.pack(f"<Q{len(text)}s", len(text), text)
        head += struct.pack("<IQIQ", 1, len(values), 0, len(data))
        data += np.array(values, "<f4").tobytes().ljust(-(-4 * len(values) // 32) * 32, b"\0")
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + data


def _logs(folder: Path) -> list[Target]:
    """Logs of routes in JSON lines and CSV, plain and gzip, and the JSON of MoE-Atlas."""
    logs = folder / "logs"
    logs.mkdir()
    rows = [(la, t, [(t + la) % 8, (t + 3) % 8]) for t in range(20) for la in range(2)]
    lines = [{"type": "meta", "num_experts": 8}] + [
        {"type": "route", "req_id": "r0", "token_idx": t, "layer": la}
        | {"topk_ids": ids, "topk_weights": [0.6, 0.4]}
        for la, t, ids in rows
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (logs / "log.jsonl").write_text(text)
    (logs / "log.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    cells = [f"{la},{t},{a},{b}" for la, t, (a, b) in rows]
    (logs / "log.csv").write_text("layer_id,token_id,expert_0,expert_1\n" + "\n".join(cells) + "\n")
    choices = [
        {"layer": la, "token_idx": t, "expert_idx": expert, "gate_weight": 0.5}
        for la, t, ids in rows
        for expert in ids
    ]
    (logs / "atlas.json").write_text(json.dumps({"num_experts": 8, "activations": choices}))
    return [
        _route_target(logs / "log.jsonl", 4.0, hostile_lines),
        _route_target(logs / "log.jsonl", 2.0),
        _route_target(logs / "log.jsonl.gz", 4.0, hostile_gzip),
        _route_target(logs / "log.csv", 4.0, hostile_lines),
        _route_target(logs / "log.csv", 2.0),
        _route_target(logs / "atlas.json", 2.0, hostile_json),
        _route_target(logs / "atlas.json", 2.0),
    ]


def _torch_files(folder: Path) -> list[Target]:
    """A .pt of a tensor, of a mapping of layers, and a folder of one per layer."""
    layers = folder / "layers"
    layers.mkdir()
    ids = torch.stack([torch.arange(30) % 8, (torch.arange(30) + 1) % 8], 1)
    torch.save(ids, folder / "tensor.pt")
    torch.save({f"layer_{n}": ids for n in range(2)}, folder / "mapping.pt")
    for number in range(2):
        value = {"topk_ids": ids, "topk_weights": torch.full((30, 2), 0.5)}
        torch.save(value, layers / f"layer_{number}.pt")
    read = functools.partial(_import_and_touch, layers)
    files = (folder / "tensor.pt", folder / "mapping.pt")
    return [
        *(_route_target(f, 2.0, mutate) for f in files for mutate in (mutated, hostile_archive)),
        Target("layer_0.pt", layers / "layer_0.pt", read, 2.0, mutate=hostile_archive),
    ]


def _archives(folder: Path) -> list[Target]:
    """The .npz archives of routes, made hostile member by member."""
    names = ("routes.npz", "small.npz", "forms/verl.npz", "forms/megatron.npz")
    return [_route_target(folder / name, 3.0, hostile_archive) for name in names]


def _models(folder: Path) -> list[Target]:
    """Folders of tiny models whose configs or weights are changed."""
    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    }
    targets = []
    for family, more in FAMILIES.items():
        model_folder = folder / family
        config = getattr(transformers, f"{family}Config")(**sizes, **more)
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(model_folder)
        load_demo_tokenizer().save_pretrained(model_folder)
        read = functools.partial(Model.open, model_folder)
        name, file = f"config of {family}", model_folder / "config.json"
        targets.append(Target(f"{name} hostile", file, read, 2.0, mutate=hostile_json))
        if family == "Mixtral":
            targets.append(Target(name, file, read, 1.0))
    dense = folder / "dense"
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(dense)
    read = functools.partial(load_dense, dense)
    return [
        *targets,
        Target("weights", dense / "model.safetensors", read, 0.5),
        Target("config of weights", dense / "config.json", read, 0.5),
        Target("config of weights hostile", dense / "config.json", read, 1.0, mutate=hostile_json),
    ]


def _others(folder: Path) -> list[Target]:
    """Results, rows of a study, texts and states of a run."""
    result, checked = folder / "result.json", folder / "checked.json"
    advise(LayerShape(8, 2, 16, 32), 4, (1, 2)).to_json(result)
    tieline.check(np.full((40, 2, 2), 3)).to_json(checked)
    rows, text, state = folder / "rows", folder / "text.txt", folder / "state.json"
    RateStore(rows).add(
        RateRow("x", 10, 0.1, i, 0, 5, 0.2, 0.3, 0.3, 0.1, 0, 1.0) for i in range(3)
    )
    text.write_text("Once upon a time, ε and ties. " * 8)
    state.write_text(json.dumps({"groups": [], "scheduler": {}, "gates": {}}))
    read = functools.partial(read_result, result)
    return [
        Target("result", result, read, 4.0),
        Target("result hostile", result, read, 4.0, mutate=hostile_json),
        Target(
            "page of a result",
            checked,
            functools.partial(_show_result, checked),
            2.0,
            None,
            hostile_json,
        ),
        Target("rows of a study", rows, lambda: RateStore(rows).load("x"), 2.0),
        Target("text", text, lambda: text_and_origin(text), 1.0),
        Target("state of a run", state, lambda: read_json(state), 1.0),
    ]


class SlowError(Exception):
    """A reader took too long."""


def _raise_slow(number: int, frame: object) -> None:
    raise SlowError


def attempt(target: Target) -> tuple[str, str]:
    """How reading ended, and its message."""
    signal.alarm(SLOWEST)
    try:
        target.read()
    except TielineError as problem:
        return _refusal(str(problem)), str(problem)
    except SlowError:
        return "slow", ""
    except MemoryError as problem:
        return "memory", str(problem)
    except HalfWrittenError as problem:
        return "half-written", str(problem)
    except ActingTextError as problem:
        return "acting text", str(problem)
    except Exception as problem:
        return "escaped", f"{type(problem).__name__}: {problem}"
    finally:
        signal.alarm(0)
    return "read", ""


def _refusal(message: str) -> str:
    """Whether a message of ours is short and printable."""
    if len(message.encode(errors="replace")) > LONGEST_MESSAGE:
        return "long message"
    return "refused" if printable(message) == message else "acting text"


def sign(target: Target, index_text: bytes) -> None:
    """Put size and digest of a mutated file into its index, so that it is read further."""
    assert target.signed is not None
    index = json.loads(index_text)
    data = target.file.read_bytes()
    stated = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    index["files"][target.file.stem] = stated
    target.signed.write_text(json.dumps(index, separators=(",", ":")))


def run(count: int, seed: int = 0, show: bool = True) -> dict[str, Counter[str]]:
    """Mutate and read `count` files; returns how often each kind of file ended in each way."""
    draw = random.Random(seed)  # noqa: S311
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    signal.signal(signal.SIGALRM, _raise_slow)
    endings: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        targets = make_targets(Path(folder))
        for target in targets:
            ending, message = attempt(target)
            if ending != "read" and show and not target.name.startswith("fixture"):
                print("as made:", target.name, ending, message[:200])
        for target in draw.choices(targets, [target.weight for target in targets], k=count):
            ending, message = _attempt_mutated(target, draw)
            counts = endings.setdefault(target.name, Counter())
            counts[ending] += 1
            if show and ending in BAD_ENDINGS and counts[ending] < 4:
                print(f"{ending}: {target.name}: {message[:300]!r}", flush=True)
    return endings


def _attempt_mutated(target: Target, draw: random.Random) -> tuple[str, str]:
    """Change a file, read it, and put it back."""
    data = target.file.read_bytes()
    index = target.signed.read_bytes() if target.signed else b""
    target.file.write_bytes(target.mutate(data, draw))
    if target.signed:
        sign(target, index)
    try:
        return attempt(target)
    finally:
        target.file.write_bytes(data)
        if target.signed:
            target.signed.write_bytes(index)


def _hostile_inputs(folder: Path) -> dict[str, list[str]]:
    """Hostile inputs by name, each with the arguments of the command that must refuse it."""
    _models(folder)
    inputs: dict[str, list[str]] = {}
    for field, value in (
        ("intermediate_size", 3_000_000),
        ("vocab_size", 1 << 30),
        ("hidden_size", 1 << 20),
        ("num_local_experts", 1 << 20),
        ("num_hidden_layers", 1 << 20),
        ("attn_implementation", "org/repo"),
    ):
        hostile = folder / f"hostile-{field}"
        shutil.copytree(folder / "Mixtral", hostile)
        config = json.loads((hostile / "config.json").read_bytes()) | {field: value}
        (hostile / "config.json").write_text(json.dumps(config))
        inputs[f"config.json, {field} {value}"] = ["inspect", str(hostile)]
    inputs["npz of zeros, 4 GiB unpacked"] = ["check", str(_bomb(folder / "bomb.npz", 1 << 32))]
    inputs["npz of zeros, 60 MiB unpacked"] = ["check", str(_bomb(folder / "60.npz", 60 << 20))]
    text = gzip.compress(b'{"routed_experts": [' + b" " * (1 << 28) + b"]}", 9)
    (folder / "bomb.json.gz").write_bytes(text)
    inputs["gzip of JSON, 256 MiB unpacked"] = ["check", str(folder / "bomb.json.gz")]
    return inputs


def _bomb(file: Path, size: int) -> Path:
    """An .npz with an array of zeros of another shape than routes have."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (size,)}
    )
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("routed_experts.npy", "w", force_zip64=True) as member,
    ):
        member.write(header.getvalue())
        for _ in range(size >> 20):
            member.write(bytes(1 << 20))
    return file


LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""
"""A small process that measures another: a child inherits the peak of the process that forks it."""


def _peak_memory(arguments: list[str]) -> tuple[int, float, str]:
    """Exit code, peak memory in MiB and last line of a command in a process of its own."""
    command = [sys.executable, "-I", "-S", "-c", LAUNCHER, sys.executable, "-m", "tieline"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    code, peak = map(int, done.stdout.split())
    lines = done.stderr.strip().splitlines() or [""]
    return code, peak / 1024, lines[-1][:160]


def measure_memory() -> bool:
    """Print the peak memory of refusing hostile inputs; whether all are within 1.2 × --version."""
    _, version, _ = _peak_memory(["--version"])
    print(f"{'--version':40} {version:5.0f} MiB")
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in _hostile_inputs(Path(folder)).items():
            code, peak, message = _peak_memory(arguments)
            fine &= code == 2 and peak <= 1.2 * version
            ratio = f"{peak / version:.2f} of --version"
            print(f"{name:40} {peak:5.0f} MiB, {ratio}, exit {code}: {message[:60]}")
    return fine


def main() -> None:
    """Run and report."""
    if sys.argv[1] == "--memory":
        raise SystemExit(0 if measure_memory() else 1)
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, resource.RLIM_INFINITY))
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    endings = run(count, seed)
    for name, counts in sorted(endings.items()):
        print(f"{name:34}", dict(counts))
    totals = sum(endings.values(), Counter())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("all", dict(totals), f"{time.monotonic() - began:.0f} s")
    print(f"peak memory {peak >> 10} MiB, {before >> 10} MiB before the first file")
    raise SystemExit(1 if BAD_ENDINGS & set(totals) else 0)


if __name__ == "__main__":
    main()
