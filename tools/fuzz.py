"""Mutated files for every reader and loader: each must be read, or be refused by a short message.

    python -m tools.fuzz 100000 [seed]

Files of every kind that Tieline reads are made, and copies with flipped, cut, doubled and inserted
bytes, or with other numbers, are given to their readers. Counted are exceptions that are no
`TielineError`, messages over 2 kB, and readers that take longer than 20 s. The peak of the memory
is that of the whole process, torch and transformers included.
"""

import hashlib
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.utils import logging

import tieline
from tieline.core.errors import TielineError
from tieline.core.records import read_result
from tieline.lab.estimation.rates import RateRow, RateStore
from tieline.lab.training.checkpoint import read_json
from tieline.lab.tropical.advisor import LayerShape, advise
from tieline.models.demo import load_demo_tokenizer
from tieline.models.model import Model, load_dense
from tieline.run.corpus import as_text
from tieline.trace import RoutingTrace, save_summary, save_trace, summarise
from tieline.trace.readers import imatrix_load, import_trace
from tieline.trace.writers import export

LONGEST_MESSAGE, SLOWEST = 2000, 20
NUMBERS = [b"-1", b"0", b"1e400", b"NaN", b"99999999999999999999", b"2147483648", b"null", b'"x"']
FIXTURES = Path(__file__).parents[1] / "tests" / "trace" / "fixtures"


@dataclass(frozen=True)
class Target:
    """A file to mutate and how it is read.

    Attributes:
        name: of the kind of file.
        file: the file; the others of its folder stay as they are.
        read: reads it.
        weight: how often it is drawn.
        signed: index of the folder in which size and digest of the file are put right.
    """

    name: str
    file: Path
    read: Callable[[], object]
    weight: float = 1.0
    signed: Path | None = None


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one to four changes."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        place = draw.randrange(len(found) + 1)
        kind = draw.randrange(7)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del found[place:]
        elif kind == 2:
            del found[place : place + draw.randrange(1, 40)]
        elif kind == 3:
            found[place:place] = draw.randbytes(draw.randrange(1, 16))
        elif kind == 4:
            found[place:place] = found[place : place + draw.randrange(1, 200)]
        elif kind == 5 and place < len(found):
            found[place : place + 8] = draw.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" * 8))
        else:
            _change_number(found, draw)
    return bytes(found)


def _change_number(data: bytearray, draw: random.Random) -> None:
    digits = [i for i in range(min(len(data), 20_000)) if 48 <= data[i] <= 57]
    if digits:
        first = last = draw.choice(digits)
        while last < len(data) and 48 <= data[last] <= 57:
            last += 1
        data[first:last] = draw.choice(NUMBERS)


def make_targets(folder: Path) -> list[Target]:
    """Every kind of file, with its reader."""
    targets = [*_traces(folder), *_routes(folder), *_forms(folder), *_models(folder)]
    targets += _others(folder)
    for fixture in sorted(FIXTURES.rglob("*")) if FIXTURES.is_dir() else ():
        if fixture.is_file() and fixture.suffix not in (".py", ".md"):
            file = folder / "fixtures" / fixture.relative_to(FIXTURES)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(fixture.read_bytes())
            whole = (fixture.parent / "tieline.json").exists()
            source = file.parent if whole else file
            read = lambda f=source: _touched(tieline.load(f))  # noqa: E731
            targets.append(Target(f"fixture {fixture.name}", file, read))
    return targets


def _touched(loaded: object) -> None:
    """Read what is read when it is touched."""
    if isinstance(loaded, RoutingTrace):
        for layer in loaded.layers:
            layer.experts.sum()


def _traces(folder: Path) -> list[Target]:
    ids = torch.arange(40, dtype=torch.int16)
    chosen = np.stack([ids % 8, (ids + 1) % 8], 1).reshape(40, 1, 2).repeat(2, 1)
    np.save(folder / "seed.npy", chosen)
    trace = import_trace(folder / "seed.npy")
    save_trace(trace, folder / "trace")
    save_summary(summarise(trace), folder / "summary")
    found = []
    for kind in ("trace", "summary"):
        place = folder / kind
        for file in sorted(place.iterdir()):
            index = place / "tieline.json" if file.suffix == ".safetensors" else None
            for signed in {None, index}:
                read = lambda place=place: _touched(tieline.load(place))  # noqa: E731
                name = f"{kind} {file.name}" + " signed" * (signed is not None)
                found.append(Target(name, file, read, 2.0, signed))
    return found


def _routes(folder: Path) -> list[Target]:
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
    files = [folder / name for name in (*names, "routes.csv", "routes.jsonl")]
    return [Target(f.name, f, lambda f=f: _touched(import_trace(f)), 4.0) for f in files]


def _forms(folder: Path) -> list[Target]:
    """Routes as engines and trainers write them, each also checked for soundness."""
    place = folder / "forms"
    place.mkdir()
    trace = import_trace(folder / "seed.npy")
    sizes = {"layers": 2, "k": 2}
    forms = {"vllm": {}, "sglang": sizes, "verl": {}, "nemo": {}, "megatron": {}}
    suffixes = {"vllm": "jsonl", "sglang": "jsonl", "nemo": "safetensors"}
    found = []
    for form, options in forms.items():
        file = export(trace, place / f"{form}.{suffixes.get(form, 'npz')}", form)
        read = lambda f=file, o=options: _touched(import_trace(f, **o))  # noqa: E731
        found.append(Target(f"{form} {file.name}", file, read, 3.0))
    for file in (folder / "routes.npz", place / "vllm.jsonl"):
        found.append(Target(f"check {file.name}", file, lambda f=file: tieline.check(f), 1.0))
    (place / "moe_trace.csv").write_text("layer,expert\n" + "0,1\n0,2\n1,3\n1,0\n" * 9)
    counts = place / "counts.gguf"
    counts.write_bytes(_imatrix({"blk.0.ffn_down_exps.weight.counts": [3.0, 0.0, 2.0, 9.0]}))
    moe, steps = place / "moe_trace.csv", _megatron_steps(place / "steps")
    return [
        *found,
        Target("moe-trace", moe, lambda: _touched(import_trace(moe, k=2)), 2.0),
        Target("imatrix", counts, lambda: imatrix_load(counts), 2.0),
        *(Target(f.name, f, lambda: _touched(import_trace(steps[0].parent)), 2.0) for f in steps),
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
        words = name.encode()
        head += struct.pack(f"<Q{len(words)}s", len(words), words)
        head += struct.pack("<IQIQ", 1, len(values), 0, len(data))
        data += np.array(values, "<f4").tobytes().ljust(-(-4 * len(values) // 32) * 32, b"\0")
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + data


def _models(folder: Path) -> list[Target]:
    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
    }
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(folder / "moe")
    load_demo_tokenizer().save_pretrained(folder / "moe")
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "dense")
    config, weights = folder / "moe" / "config.json", folder / "dense" / "model.safetensors"
    return [
        Target("config.json", config, lambda: Model.open(folder / "moe"), 2.0),
        Target("weights", weights, lambda: load_dense(folder / "dense"), 0.5),
        Target(
            "config of weights",
            folder / "dense" / "config.json",
            lambda: load_dense(folder / "dense"),
            0.5,
        ),
    ]


def _others(folder: Path) -> list[Target]:
    result = folder / "result.json"
    advise(LayerShape(8, 2, 16, 32), 4, (1, 2)).to_json(result)
    rows, text, state = folder / "rows", folder / "text.txt", folder / "state.json"
    RateStore(rows).add(
        RateRow("x", 10, 0.1, i, 0, 5, 0.2, 0.3, 0.3, 0.1, 0, 1.0) for i in range(3)
    )
    text.write_text("Once upon a time, ε and ties. " * 8)
    state.write_text(json.dumps({"groups": [], "scheduler": {}, "gates": {}}))
    return [
        Target("result", result, lambda: read_result(result), 4.0),
        Target("rows of a study", rows, lambda: RateStore(rows).load("x"), 2.0),
        Target("text", text, lambda: as_text(text), 1.0),
        Target("state of a run", state, lambda: read_json(state), 1.0),
    ]


class SlowError(Exception):
    """A reader took too long."""


def _too_slow(number: int, frame: object) -> None:
    raise SlowError


def attempt(target: Target) -> tuple[str, str]:
    """How reading ended, and what it said."""
    signal.alarm(SLOWEST)
    try:
        target.read()
    except TielineError as problem:
        size = len(str(problem).encode(errors="replace"))
        return ("refused" if size <= LONGEST_MESSAGE else "long message"), str(problem)
    except SlowError:
        return "slow", ""
    except MemoryError as problem:
        return "memory", str(problem)
    except Exception as problem:
        return "escaped", f"{type(problem).__name__}: {problem}"
    finally:
        signal.alarm(0)
    return "read", ""


def sign(target: Target, whole: bytes) -> None:
    """Put size and digest of a mutated file into its index, so that it is read further."""
    assert target.signed is not None
    index = json.loads(whole)
    data = target.file.read_bytes()
    stated = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    index["files"][target.file.stem] = stated
    target.signed.write_text(json.dumps(index, separators=(",", ":")))


def run(count: int, seed: int = 0, show: bool = True) -> dict[str, Counter[str]]:
    """Mutate and read `count` files; returns how often each kind of file ended in each way."""
    draw = random.Random(seed)  # noqa: S311
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    signal.signal(signal.SIGALRM, _too_slow)
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        targets = make_targets(Path(place))
        for target in targets:
            ending, words = attempt(target)
            if ending != "read" and show and not target.name.startswith("fixture"):
                print("as made:", target.name, ending, words[:200])
        for target in draw.choices(targets, [target.weight for target in targets], k=count):
            whole = target.file.read_bytes()
            index = target.signed.read_bytes() if target.signed else b""
            target.file.write_bytes(mutated(whole, draw))
            if target.signed:
                sign(target, index)
            ending, words = attempt(target)
            counts = found.setdefault(target.name, Counter())
            counts[ending] += 1
            if (
                show
                and ending in ("escaped", "slow", "long message", "memory")
                and counts[ending] < 4
            ):
                print(f"{ending}: {target.name}: {words[:300]}", flush=True)
            target.file.write_bytes(whole)
            if target.signed:
                target.signed.write_bytes(index)
    return found


def main() -> None:
    """Run and report."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = run(count, seed)
    for name, counts in sorted(found.items()):
        print(f"{name:34}", dict(counts))
    whole = sum(found.values(), Counter())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("all", dict(whole), f"{time.monotonic() - began:.0f} s")
    print(f"peak memory {peak >> 10} MiB, {before >> 10} MiB before the first file")
    bad = {"escaped", "slow", "long message", "memory"} & set(whole)
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
