"""Commands on several gloo processes against one, and the memory that a process takes to load.

    python -m benchmarks.processes equal [--counts 2,4] [--ways data,tp,ep,pp,fsdp] [--tokens 4096]
    python -m benchmarks.processes commands [--counts 2]
    python -m benchmarks.processes memory [--counts 2,4] [--layers 16] [--folder CHECKPOINT]

`equal` runs `tieline inspect` of the model in the box under torchrun and prints the largest
differences of metrics and scores, and the choices that flip. `commands` does the same with capture,
diff, audit and smooth, number by number of their JSON. `memory` makes a random OLMoE and prints
what a process holds at the peak of loading it, beyond the same load of a model of small layers,
over its share of the weights; the target is 1.2. One thread per process everywhere.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEEDS_ALL = ("tp", "ep", "pp", "fsdp")
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "capture": (("demo", "--tokens", "4096", "--no-scores"), ("data", "tp", "ep", "pp", "fsdp")),
    "diff": (
        ("demo", "demo", "--dtype-b", "bf16", "--tokens", "4096", "--batch-size", "1"),
        ("data", "tp", "ep", "pp", "fsdp"),
    ),
    "audit": (
        ("--tokens", "2048", "--batch-size", "1", "--formats", "bf16,int8"),
        ("data", "ep"),
    ),
    "smooth": (("--tokens", "2048", "--calibration", "512", "--batch-size", "1"), ("data",)),
}
TARGET = 1.2
"""Largest peak of loading over the share of a process."""

CLOCK = {"timings", "latency", "time", "provenance", "seconds"}


def started(count: int, *words: object) -> None:
    """Run `python -m ...` alone or, for more than one process, under torchrun."""
    alone, many = [sys.executable], [str(Path(sys.executable).with_name("torchrun"))]
    command = alone if count == 1 else [*many, "--nproc-per-node", str(count)]
    options = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "stdout": subprocess.DEVNULL}
    done = subprocess.run(
        [*command, "-m", *map(str, words)],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    if done.returncode:
        raise SystemExit(done.stderr)


def numbers(plain: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of JSON values with its path, but for times and provenance."""
    if isinstance(plain, dict):
        for key, value in plain.items():
            if key not in CLOCK:
                yield from numbers(value, f"{path}.{key}")
    elif isinstance(plain, list):
        for index, value in enumerate(plain):
            yield from numbers(value, f"{path}[{index}]")
    else:
        yield path, plain


def differences(plain: Path, many: Path) -> str:
    """How many leaves of two JSON files differ, and the largest relative difference."""
    first, second = (dict(numbers(json.loads(path.read_bytes()))) for path in (plain, many))
    changed = [key for key in first.keys() | second.keys() if first.get(key) != second.get(key)]
    sizes = [
        abs(first[key] - second[key]) / max(abs(first[key]), 1e-12)
        for key in changed
        if isinstance(first.get(key), float) and isinstance(second.get(key), float)
    ]
    most = f", at most {max(sizes):.1e} of a number" if sizes else ""
    return f"{len(changed)} of {len(first)} values differ{most}"


def equal(counts: list[int], modes: list[str], tokens: int, folder: Path) -> None:
    """Compare inspections."""
    from tieline.trace.store import load_trace

    common = ["inspect", "--tokens", tokens, "--batch-size", 1]

    def run(count: int, way: str) -> tuple[dict[str, float], Any]:
        output = folder / f"{way}-{count}"
        chosen = [] if count == 1 else ["--parallel", way]
        outputs = ["--json", f"{output}.json", "--save-trace", output]
        started(count, "tieline", *common, *chosen, *outputs)
        return json.loads(Path(f"{output}.json").read_bytes())["metrics"], load_trace(output)

    metrics, trace = run(1, "alone")
    print("| processes | way | metrics | scores | choices that flip |\n|---|---|---|---|---|")
    for count in counts:
        for way in modes:
            try:
                output, other = run(count, way)
            except SystemExit as problem:
                errors = [line for line in str(problem).splitlines() if line.startswith("error")]
                print(f"| {count} | {way} | refused: {(errors or [str(problem)[-300:]])[0]} | | |")
                continue
            apart = max(abs(output[name] - metrics[name]) for name in metrics)
            scores, flips = [], 0
            for a, b in zip(trace.layers, other.layers, strict=True):
                k = a.facts.k
                scores.append(float((a.scores[:, :k] - b.scores[:, :k]).abs().max()))
                same = a.experts[:, :k].sort().values == b.experts[:, :k].sort().values
                flips += int((~same.all(dim=1)).sum())
            print(f"| {count} | {way} | {apart:.1e} | {max(scores):.1e} | {flips} |", flush=True)


def commands(counts: list[int], folder: Path) -> None:
    """Compare the other commands."""
    print("| command | processes | way | against one process |\n|---|---|---|---|")
    for name, (arguments, modes) in COMMANDS.items():
        output_option = ["-o", folder / name] if name in ("capture", "smooth") else []
        alone = folder / f"{name}.json"
        started(1, "tieline", name, *arguments, *output_option, "--json", alone)
        for count in counts:
            for way in modes:
                output = folder / f"{name}-{way}-{count}.json"
                outputs = ["-o", folder / f"{name}-{way}-{count}"] if output_option else []
                options = [*arguments, *outputs, "--parallel", way, "--json", output]
                started(count, "tieline", name, *options)
                print(f"| {name} | {count} | {way} | {differences(alone, output)} |", flush=True)


def memory(counts: list[int], layers: int, folder: Path, kept: Path | None) -> None:
    """Compare peaks of loading with the share of the weights."""
    large, small = kept or folder / "large", folder / "small"
    if not large.is_dir():
        _random_model(large, layers, 512)
    _random_model(small, max(counts), 64)
    size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    print(f"weights {size / 1e6:,.0f} MB")
    title = "| processes | way | share | peaks beyond the small model | over the share"
    print(f"{title} (target {TARGET}) |")
    print("|---|---|---|---|---|")
    for count in [1, *counts]:
        for way in ("data",) if count == 1 else NEEDS_ALL:
            peaks = [
                _peaks(count, way, folder_of_model, folder) for folder_of_model in (large, small)
            ]
            beyond = [a - b for a, b in zip(*peaks, strict=True)]
            figures = " ".join(f"{peak / 1e6:,.0f}" for peak in beyond)
            share = size / count
            over = f"{max(beyond) / share:.2f}"
            print(
                f"| {count} | {way} | {share / 1e6:,.0f} MB | {figures} MB | {over} |", flush=True
            )


def _random_model(folder: Path, layers: int, width: int) -> None:
    """Save a random OLMoE in bfloat16 with the tokenizer in the box."""
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    from tieline.models.demo import load_demo_tokenizer

    config = OlmoeConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_experts=16,
        eos_token_id=0,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model: Any = OlmoeForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    load_demo_tokenizer().save_pretrained(folder)


def _peaks(count: int, way: str, model: Path, folder: Path) -> list[int]:
    """Peak of the memory that each process wrote to while it loaded a model."""
    workspace = Path(tempfile.mkdtemp(dir=folder))
    started(
        count, "benchmarks.processes", "load", "--folder", model, "--ways", way, "--to", workspace
    )
    return [int((workspace / str(rank)).read_text()) for rank in range(count)]


def load(model: Path, way: str, folder: Path) -> None:
    """Load a model in this process, and write the peak of its memory to a file."""
    from contextlib import nullcontext

    from tieline.core.collectives import is_parallel, join_processes
    from tieline.models.model import Model

    with join_processes() if is_parallel() else nullcontext():
        with _Peak() as peak:
            kept = Model.open(model, dtype="bf16", parallel=way if is_parallel() else None)
        assert kept
        (folder / os.environ.get("RANK", "0")).write_text(str(peak.most))


class _Peak:
    """Follows the anonymous memory of this process: what files are mapped to does not count."""

    def __enter__(self) -> "_Peak":
        self.most, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._done.set()
        self._thread.join()

    def _follow(self) -> None:
        while True:
            last = self._done.is_set()
            lines = Path("/proc/self/status").read_text().splitlines()
            now = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            self.most = max(self.most, 1024 * now)
            if last:
                return
            time.sleep(0.002)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["equal", "commands", "memory", "load"])
    parser.add_argument("--counts", default="2,4")
    parser.add_argument("--ways", default="data,tp,ep,pp,fsdp")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--to", type=Path)
    given = parser.parse_args()
    counts = [int(number) for number in given.counts.split(",")]
    if given.what == "load":
        load(given.folder, given.ways, given.to)
        return
    with tempfile.TemporaryDirectory() as name:
        if given.what == "equal":
            equal(counts, given.ways.split(","), given.tokens, Path(name))
        elif given.what == "commands":
            commands(counts, Path(name))
        else:
            memory(counts, given.layers, Path(name), given.folder)


if __name__ == "__main__":
    main()
