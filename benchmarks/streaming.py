"""Streaming a random checkpoint of a real layout: memory, time against the physical limit, bytes.

    python benchmarks/streaming.py make qwen3-30b-a3b /tmp/big --layers 24
    python benchmarks/streaming.py make deepseek-v3 /tmp/big
    python benchmarks/streaming.py inspect /tmp/big --tokens 4096 [--memory 8G] [--no-jumps]
    python benchmarks/streaming.py audit /tmp/big --tokens 4096
    python benchmarks/streaming.py compare /tmp/big --tokens 2048 --batch-size 1 --rounds 3
    python benchmarks/streaming.py whole qwen3-30b-a3b /tmp/big --layers 24    make, compare, delete
    python benchmarks/streaming.py whole tiny /tmp/tiny --tokens 128 --length 32   to try it

The limit is one read of the file at the speed of the disk, measured on a part that is not cached,
plus the operations of the forward passes at the measured speed of a matrix product of the shape of
an expert. For an audit with eight perturbations these are 17 passes with their output head (one
clean, two under each perturbation), plus the rounding of the weights at the measured speed of each
format. A second limit of the audit takes the time of a plain streamed pass instead, measured before
it: reading once, what its forward passes took 17 times, and the rounding. All are measured first,
in the same process. Files have the tensors of the published checkpoint, one per expert; values are
random.

`compare` records the routes of the same batches by streaming and with accelerate's disk offload,
its decoder layers on disk and all else in memory: in turns, each in a process of its own with cold
files. Both compute in float32 without the output head, and their experts must be equal. Opening
stands apart: accelerate writes a second copy of the layers then, in float32, and is left out where
the disk has no room for it.
The limit is one read and the operations. Peaks, the largest layer and what was read are in GB.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from tieline.analysis.audit import audit
from tieline.analysis.inspect import inspect
from tieline.core.setting_fields import read_memory
from tieline.models import capture
from tieline.models.demo import load_demo_tokenizer
from tieline.models.model import Model, read_shape
from tieline.models.number_formats import format_named
from tieline.models.rounding_buffers import RoundingBuffers, rounded_in_pieces
from tieline.models.shards import open_shards
from tieline.run.condition import Perturbation
from tieline.run.forward import forward, only_running
from tieline.run.ranks import Ranks
from tieline.run.runner import recorded_routes
from tieline.run.streamed_passes import ParkedPass, PassJob, run_in_lockstep
from tieline.trace.record import RoutingTrace

Tensors = Iterator[tuple[str, tuple[int, ...], str]]

SHARD = 4e9
WIDTH = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
BLOCK = 128


class Qwen3Sizes(NamedTuple):
    """Sizes of a Qwen3-MoE, by default those of Qwen3-30B-A3B."""

    vocabulary: int = 151936
    width: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_width: int = 128
    experts: int = 128
    expert_width: int = 768


PUBLISHED = Qwen3Sizes()
TINY = Qwen3Sizes(1024, 256, 4, 2, 64, 16, 96)


def qwen3(layers: int, sizes: Qwen3Sizes = PUBLISHED) -> tuple[Any, Tensors]:
    """Configuration and tensors of Qwen3-30B-A3B with this many of its 48 layers."""
    vocabulary, width, heads, kv_heads, head_width, experts, expert_width = sizes
    own: Any = {"head_dim": head_width}
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_experts=experts,
        num_experts_per_tok=8,
        moe_intermediate_size=expert_width,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        max_position_embeddings=40960,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
        **own,
    )
    queries, keys = heads * head_width, kv_heads * head_width

    def tensors() -> Tensors:
        yield "model.embed_tokens.weight", (vocabulary, width), "BF16"
        for layer in range(layers):
            at = f"model.layers.{layer}."
            attention = {"q_proj": (queries, width), "k_proj": (keys, width)}
            attention |= {"v_proj": (keys, width), "o_proj": (width, queries)}
            attention |= {"q_norm": (head_width,), "k_norm": (head_width,)}
            for name, shape in attention.items():
                yield f"{at}self_attn.{name}.weight", shape, "BF16"
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{at}{name}.weight", (width,), "BF16"
            yield f"{at}mlp.gate.weight", (experts, width), "BF16"
            for expert in range(experts):
                of = f"{at}mlp.experts.{expert}."
                yield f"{of}gate_proj.weight", (expert_width, width), "BF16"
                yield f"{of}up_proj.weight", (expert_width, width), "BF16"
                yield f"{of}down_proj.weight", (width, expert_width), "BF16"
        yield "model.norm.weight", (width,), "BF16"
        yield "lm_head.weight", (vocabulary, width), "BF16"

    return config, tensors()


def deepseek(layers: int) -> tuple[Any, Tensors]:
    """DeepSeek-V3 with one dense layer and routed ones, in blocks of fp8 as published."""
    blocks = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    own: Any = {"quantization_config": blocks | {"weight_block_size": [BLOCK, BLOCK]}}
    config = DeepseekV3Config(
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        max_position_embeddings=4096,
        dtype="bfloat16",
        architectures=["DeepseekV3ForCausalLM"],
        **own,
    )

    def scaled(name: str, rows: int, columns: int) -> Tensors:
        yield f"{name}.weight", (rows, columns), "F8_E4M3"
        yield f"{name}.weight_scale_inv", (-(-rows // BLOCK), -(-columns // BLOCK)), "F32"

    def mlp(at: str, width: int) -> Tensors:
        for name in ("gate_proj", "up_proj"):
            yield from scaled(f"{at}.{name}", width, 7168)
        yield from scaled(f"{at}.down_proj", 7168, width)

    def tensors() -> Tensors:
        yield "model.embed_tokens.weight", (129280, 7168), "BF16"
        for layer in range(layers):
            at = f"model.layers.{layer}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{at}{name}.weight", (7168,), "BF16"
            yield from scaled(f"{at}self_attn.q_a_proj", 1536, 7168)
            yield f"{at}self_attn.q_a_layernorm.weight", (1536,), "BF16"
            yield from scaled(f"{at}self_attn.q_b_proj", 24576, 1536)
            yield from scaled(f"{at}self_attn.kv_a_proj_with_mqa", 576, 7168)
            yield f"{at}self_attn.kv_a_layernorm.weight", (512,), "BF16"
            yield from scaled(f"{at}self_attn.kv_b_proj", 32768, 512)
            yield from scaled(f"{at}self_attn.o_proj", 7168, 16384)
            if layer == 0:
                yield from mlp(f"{at}mlp", 18432)
                continue
            yield f"{at}mlp.gate.weight", (256, 7168), "BF16"
            yield f"{at}mlp.gate.e_score_correction_bias", (256,), "F32"
            yield from mlp(f"{at}mlp.shared_experts", 2048)
            for expert in range(256):
                yield from mlp(f"{at}mlp.experts.{expert}", 2048)
        yield "model.norm.weight", (7168,), "BF16"
        yield "lm_head.weight", (129280, 7168), "BF16"

    return config, tensors()


LAYOUTS: dict[str, tuple[Callable[[int], tuple[Any, Tensors]], int]] = {
    "qwen3-30b-a3b": (qwen3, 24),
    "deepseek-v3": (deepseek, 3),
    "tiny": (partial(qwen3, sizes=TINY), 4),
}


class Values:
    """Random bytes of each kind of tensor, drawn once and used from random places."""

    def __init__(self) -> None:
        """Draw them."""
        some = torch.randn(1 << 25, generator=torch.Generator().manual_seed(0))
        self._pools = {
            "BF16": (some * 0.02).bfloat16().view(torch.int16).numpy().view(np.uint8),
            "F8_E4M3": (some * 0.5).to(torch.float8_e4m3fn).view(torch.uint8).numpy(),
        }
        self._places = np.random.default_rng(0)

    def write(self, stream: Any, name: str, shape: tuple[int, ...], kind: str) -> None:
        """Write the bytes of one tensor."""
        count = int(np.prod(shape))
        if name.endswith("norm.weight"):
            stream.write(torch.ones(count).bfloat16().view(torch.int16).numpy().tobytes())
        elif kind == "F32":
            size = 0.0 if name.endswith("bias") else 0.04
            stream.write(np.full(count, size, dtype=np.float32).tobytes())
        else:
            pool, left = self._pools[kind], count * WIDTH[kind]
            while left:
                start = 2 * int(self._places.integers(0, len(pool) // 4))
                part = pool[start : start + left]
                stream.write(part.data)
                left -= len(part)


def make(layout: str, folder: Path, layers: int | None) -> None:
    """Write a checkpoint in files of at most 4 GB."""
    build, usual = LAYOUTS[layout]
    config, tensors = build(layers or usual)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    load_demo_tokenizer().save_pretrained(folder)
    shards: list[list[tuple[str, tuple[int, ...], str]]] = [[]]
    size = 0.0
    for tensor in tensors:
        count = float(np.prod(tensor[1])) * WIDTH[tensor[2]]
        if size + count > SHARD:
            shards.append([])
            size = 0.0
        shards[-1].append(tensor)
        size += count
    values, offsets, total = Values(), {}, 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += write_shard(folder / name, shard, values)
        offsets |= {tensor: name for tensor, *_ in shard}
    index = {"metadata": {"total_size": total}, "weight_map": offsets}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    print(f"{folder}: {total / 1e9:.2f} GB in {len(shards)} files")


def write_shard(path: Path, shard: list[tuple[str, tuple[int, ...], str]], values: Values) -> int:
    """Write one file; returns the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, kind in shard:
        stop = offset + int(np.prod(shape)) * WIDTH[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, shape, kind in shard:
            values.write(stream, name, shape, kind)
    return offset


class Watched:
    """Largest memory of this process and bytes that it had read from disk, inside the block."""

    def __enter__(self) -> "Watched":
        self.peak, self._stop = 0.0, threading.Event()
        self._before, self._began = _disk_bytes(), time.perf_counter()
        threading.Thread(target=self._sample, daemon=True).start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            self.peak = max(self.peak, _status("VmRSS"))

    def __exit__(self, *problem: object) -> None:
        self._stop.set()
        self.seconds = time.perf_counter() - self._began
        self.read = (_disk_bytes() - self._before) / 1e9


def _status(name: str) -> float:
    """A size in the status of this process, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith(name))


def _disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def forget(folder: Path, files: str = "*.safetensors") -> None:
    """Have the operating system drop the files from its cache."""
    os.sync()
    for file in folder.glob(files):
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def disk_speed(folder: Path) -> float:
    """Bytes per second of one cold read of 2 GB."""
    file = sorted(folder.glob("*.safetensors"))[-1]
    size, buffer = min(2 << 30, file.stat().st_size), bytearray(8 << 20)
    with file.open("rb", buffering=0) as stream:
        began, left = time.perf_counter(), size
        while left > 0:
            left -= stream.readinto(buffer) or left
        return size / (time.perf_counter() - began)


def product_speed(rows: int, inner: int, columns: int) -> float:
    """Operations per second of the best of a few matrix products of one shape."""
    a, b = torch.randn(rows, inner), torch.randn(columns, inner)
    times = []
    for _ in range(12):
        began = time.perf_counter()
        torch.nn.functional.linear(a, b)
        times.append(time.perf_counter() - began)
    return 2 * rows * inner * columns / min(times[2:])


def operations(folder: Path, tokens: int, length: int) -> float:
    """Operations of a forward pass without the head, one multiplication and addition as two."""
    config = json.loads((folder / "config.json").read_text())
    shards, total, shape = open_shards(folder), 0.0, read_shape(folder)
    share = shape.k / shape.n_experts
    for name, stored in shards.tensors.items():
        if name.endswith("weight") and ".layers." in name and len(stored.shape) == 2:
            total += np.prod(stored.shape) * (share if ".experts." in name else 1.0)
    heads = config["num_attention_heads"] * (config.get("head_dim") or 160)
    attention = config["num_hidden_layers"] * 2 * length * heads
    return 2.0 * tokens * (total + attention)


EIGHT = (
    Perturbation("rounding", "bf16"),
    Perturbation("rounding", "int8"),
    Perturbation("score noise", 0.01),
    Perturbation("state noise", 0.01),
    Perturbation("rounding", "bf16", "model"),
    Perturbation("rounding", "int8", "model"),
    Perturbation("rounding", "int4_group", "model"),
    Perturbation("state noise", 0.01, "model"),
)


def rounding_speed(name: str, rows: int, columns: int) -> float:
    """Numbers per second of rounding the weights of 16 experts in a format."""
    weight, rooms, times = torch.randn(16, rows, columns), RoundingBuffers(), []
    for _ in range(4):
        with rooms.borrow() as room:
            began = time.perf_counter()
            rounded_in_pieces(weight, format_named(name).weights, -1, room)
            times.append(time.perf_counter() - began)
    return weight.numel() / min(times[1:])


def rounding_seconds(folder: Path, batches: int) -> float:
    """Seconds that rounding the weights takes, each once and those of the head once per batch."""
    shape, total = read_shape(folder), 0.0
    tensors = open_shards(folder).tensors
    inside = sum(np.prod(t.shape) for name, t in tensors.items() if ".layers." in name)
    ends = np.prod(tensors["lm_head.weight"].shape)
    for precision in EIGHT:
        if precision.kind == "rounding" and precision.part == "model":
            count = inside + (
                ends * (1 + batches) if format_named(str(precision.level)).plain else 0
            )
            total += count / rounding_speed(str(precision.level), 2 * shape.width, shape.hidden)
    return float(total)


class Timed:
    """Seconds that forward passes take inside the block, without reading."""

    def __enter__(self) -> "Timed":
        self.seconds, self._plain = 0.0, ParkedPass.go

        def go(parked: ParkedPass) -> Any:
            began = time.perf_counter()
            try:
                return self._plain(parked)
            finally:
                self.seconds += time.perf_counter() - began

        ParkedPass.go = go  # type: ignore[method-assign]
        return self

    def __exit__(self, *problem: object) -> None:
        ParkedPass.go = self._plain


def plain_pass(folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a streamed pass with its head and nothing else, and those of reading in it."""
    loaded = Model.open(folder, dtype="fp32", stream=True, memory=options.memory)
    assert loaded.stream is not None
    rows = options.tokens // options.length
    ids = torch.arange(rows * options.length).view(rows, options.length) % 500

    def job(part: torch.Tensor) -> None:
        forward(loaded.module, part)

    jobs = [PassJob(partial(job, part)) for part in ids.split(options.batch_size)]
    with only_running(loaded.module), Timed() as timed:
        began = time.perf_counter()
        run_in_lockstep(loaded.stream, jobs)
        seconds = time.perf_counter() - began
    return timed.seconds, seconds - timed.seconds


def run_inspect(folder: Path, options: argparse.Namespace, shared: dict[str, Any]) -> Any:
    """Inspect the checkpoint."""
    return inspect(folder, jumps=not options.no_jumps, **shared)


def run_audit(folder: Path, options: argparse.Namespace, shared: dict[str, Any]) -> Any:
    """Audit the checkpoint under eight perturbations."""
    return audit(folder, perturbations=EIGHT, **shared)


def measure(command: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a command on the checkpoint and compare it with the physical limit."""
    forget(folder)
    disk = disk_speed(folder)
    shape, shards = read_shape(folder), open_shards(folder)
    rows = options.batch_size * options.length * shape.k // shape.n_experts
    speed = product_speed(max(1, rows), shape.hidden, 2 * shape.width)
    ops, rounding = operations(folder, options.tokens, options.length), 0.0
    plain = forwards = reading = 0.0
    if command == "audit":
        head = 2.0 * options.tokens * float(np.prod(shards.tensors["lm_head.weight"].shape))
        batches = -(-options.tokens // (options.batch_size * options.length))
        ops = (1 + 2 * len(EIGHT)) * (ops + head)
        rounding = rounding_seconds(folder, batches)
        forget(folder)
        forwards, reading = plain_pass(folder, options)
        plain = reading + (1 + 2 * len(EIGHT)) * forwards + rounding
    forget(folder)
    told: list[tuple[int, int]] = []
    shared: dict[str, Any] = {
        "text": "the quick brown fox jumps over the lazy dog, " * options.tokens,
        "tokens": options.tokens,
        "sequence_length": options.length,
        "batch_size": options.batch_size,
        "dtype": "fp32",
        "stream": True,
        "memory": options.memory,
        "progress": lambda stage, done, total: told.append((done, total)),
    }
    with Watched() as watched:
        result = (run_audit if command == "audit" else run_inspect)(folder, options, shared)
    limit = shards.size / disk + ops / speed + rounding
    return {
        "command": command,
        "seconds": round(watched.seconds, 1),
        "limit": round(limit, 1),
        "ratio": round(watched.seconds / limit, 3),
        "ratio without the read": round(watched.seconds / (limit - shards.size / disk), 3),
        "ratio to plain passes": round(watched.seconds / plain, 3) if plain else None,
        "plain pass s": [round(forwards, 1), round(reading, 1)],
        "disk MB/s": round(disk / 1e6),
        "GFLOP/s": round(speed / 1e9),
        "TFLOP": round(ops / 1e12, 2),
        "rounding s": round(rounding, 1),
        "peak GB": round(watched.peak, 2),
        "max rss GB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "file GB": round(shards.size / 1e9, 2),
        "tensors read GB": round(told[-1][0] / 1e9, 2),
        "disk read GB": round(watched.read, 2),
        "tokens": result.provenance["tokens"],
        "threads": torch.get_num_threads(),
        "jumps": [layer.status for layer in getattr(result, "jumps", ())][:2],
        "left out": list(getattr(result, "left_out", ())),
        "timings": result.timings,
    }


def offloaded_model(folder: Path, copy: Path) -> nn.Module:
    """The model with its layers offloaded to disk by accelerate, without its head."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    places: dict[str, Any] = {f"model.layers.{layer}": "disk" for layer in range(layers)}
    names = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        device_map=places | dict.fromkeys(names, "cpu"),
        offload_folder=copy,
    )
    return model.eval().model


def offloaded_routes(model: nn.Module, batches: list[torch.Tensor]) -> RoutingTrace:
    """Routes of batches, for each of which accelerate reads every layer."""
    with only_running(model), capture(model) as recorder:
        for ids in batches:
            model(input_ids=ids, use_cache=False)
    return recorder.trace()


def measure_routes(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Record the routes of random batches by streaming or by accelerate, in this process."""
    rows, generator = options.tokens // options.length, torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (rows, options.length), generator=generator)
    batches = list(ids.split(options.batch_size))
    with tempfile.TemporaryDirectory(dir=folder.parent) as copy:
        with Watched() as opening:
            largest = 0
            if options.side != "accelerate":
                loaded = Model.open(folder, dtype="fp32", stream=True)
                assert loaded.stream is not None
                largest = loaded.stream.largest
                run = partial(recorded_routes, loaded, Ranks.share_batches(None, batches))
            else:
                run = partial(offloaded_routes, offloaded_model(folder, Path(copy)), batches)
        forget(folder)
        forget(Path(copy), "*")
        with Watched() as watch:
            trace = run()
    experts = torch.stack([layer.experts for layer in trace.layers])
    return {
        "seconds": watch.seconds,
        "opening": opening.seconds,
        "peak": watch.peak,
        "largest": largest / 1e9,
        "read": watch.read,
        "digest": hashlib.sha256(experts.long().numpy().tobytes()).hexdigest(),
        "batches": len(batches),
    }


SIDES = ("streamed", "accelerate")


def sides_with_room(folder: Path) -> tuple[str, ...]:
    """What can be compared: accelerate needs room on disk for the layers in float32."""
    tensors = open_shards(folder).tensors.items()
    copy = 4 * sum(np.prod(x.shape) for name, x in tensors if ".layers." in name)
    return SIDES if shutil.disk_usage(folder.parent).free > 1.05 * copy else SIDES[:-1]


def physical_limit(folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of one cold read of the layers and embeddings, and of the operations."""
    forget(folder)
    disk, shape, shards = disk_speed(folder), read_shape(folder), open_shards(folder)
    head = shards.tensors["lm_head.weight"]
    read = shards.size - np.prod(head.shape) * head.dtype.itemsize
    rows = options.batch_size * options.length * shape.k // shape.n_experts
    speed = product_speed(max(1, rows), shape.hidden, 2 * shape.width)
    return float(read / disk), operations(folder, options.tokens, options.length) / speed


def compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Ways to record routes of a model on disk, in turns and in processes of their own."""
    sides: dict[str, list[dict[str, Any]]] = {side: [] for side in sides_with_room(folder)}
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "length")]
    sizes.append(f"--batch-size={options.batch_size}")
    limits = []
    for _ in range(options.rounds):
        limits.append(physical_limit(folder, options))
        for side, runs in sides.items():
            command = [sys.executable, __file__, "routes", str(folder), f"--side={side}", *sizes]
            runs.append(json.loads(subprocess.check_output(command, text=True)))
    digests = {run["digest"] for runs in sides.values() for run in runs}
    assert len(digests) == 1, "the routes differ"
    streamed = sides["streamed"]
    seconds = {side: [run["seconds"] for run in runs] for side, runs in sides.items()}
    seconds |= {"limit": [sum(limit) for limit in limits]}
    ratios = {
        f"{side} / streamed": [x / y for x, y in zip(spent, seconds["streamed"], strict=True)]
        for side, spent in seconds.items()
        if side != "streamed"
    }
    ratios["streamed / limit"] = [1 / x for x in ratios.pop("limit / streamed")]
    return {
        **{name: [round(x, 2) for x in sorted(values)] for name, values in ratios.items()},
        "median": {name: round(statistics.median(x), 2) for name, x in ratios.items()},
        "peak / largest layer": [round(run["peak"] / run["largest"], 2) for run in streamed],
        "largest": round(streamed[0]["largest"], 2),
        "limit: read, operations": [[round(x, 2) for x in limit] for limit in limits],
        **{
            f"{name} {side}": [round(run[name], 2) for run in runs]
            for side, runs in sides.items()
            for name in ("seconds", "opening", "peak", "read")
        },
        "file GB": round(open_shards(folder).size / 1e9, 2),
        "batches": streamed[0]["batches"],
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
    }


def make_and_compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make a checkpoint, compare the ways to record its routes, and delete it."""
    try:
        make(options.layout, folder, options.layers)
        return compare(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Make a checkpoint or measure one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("make", "whole", "inspect", "audit", "compare", "routes"):
        running = commands.add_parser(command)
        if command in ("make", "whole"):
            running.add_argument("layout", choices=LAYOUTS)
            running.add_argument("--layers", type=int)
        running.add_argument("folder", type=Path)
        running.add_argument("--tokens", type=int, default=4096)
        running.add_argument("--length", type=int, default=512)
        running.add_argument("--batch-size", type=int, default=8)
        running.add_argument("--memory", type=read_memory)
        if command == "inspect":
            running.add_argument("--no-jumps", action="store_true")
        if command in ("compare", "whole"):
            running.add_argument("--rounds", type=int, default=3)
        if command == "routes":
            running.add_argument("--side", choices=SIDES, required=True)
    options = parser.parse_args()
    if options.command == "make":
        make(options.layout, options.folder, options.layers)
    elif options.command == "routes":
        print(json.dumps(measure_routes(options.folder, options)))
    elif options.command in ("compare", "whole"):
        run = make_and_compare if options.command == "whole" else compare
        print(json.dumps(run(options.folder, options), indent=1))
    else:
        print(json.dumps(measure(options.command, options.folder, options), indent=1))


if __name__ == "__main__":
    main()
