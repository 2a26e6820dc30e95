"""Whole commands, each in a process of its own: CPU time and peak memory.

    python benchmarks/commands.py [--rounds 5] [--threads 1] [--json FILE]
    python benchmarks/commands.py --against ../other --rounds 2     # and those of another checkout

`inspect` is held against the least that a script needs for the routes of the same tokens (PLAIN):
imports of the class of the model, opening the model, its forward passes. `--version` is held
against `import torch`. With `--against` the main commands of this checkout and of the other one
take turns. Commands take turns within a round; ratios are of medians over rounds.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from harness import Ratio, Samples, ratio, report

ROOT = Path(__file__).parents[1]
PLAIN = """
import torch
from transformers import AutoTokenizer, OlmoeForCausalLM
from tieline.models.demo import DEMO_FOLDER
from tieline.run.corpus import Corpus

torch.set_num_threads(int(__import__("os").environ["OMP_NUM_THREADS"]))
model = OlmoeForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32).eval()
corpus = Corpus(tokens=16384)
tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
with torch.inference_mode():
    for ids in corpus.batches(corpus.tokenised(tokenizer, model)):
        model(input_ids=ids, use_cache=False)
"""
MAIN = {
    "inspect": "inspect",
    "diff": "diff demo demo --dtype-b bf16-emulated",
    "audit": "audit",
    "smooth": "smooth -o {folder}/smoothed --overwrite",
}
START = {"import torch": ["-c", "import torch"], "--version": ["-m", "tieline", "--version"]}
WHOLE_LIMIT, START_LIMIT = 1.3, 0.1


def run_process(arguments: list[str], root: Path, threads: int) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and peak MB of a run of Python on the sources below `root`."""
    environment = os.environ | {
        "PYTHONPATH": str(root / "src"),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    start = time.perf_counter()
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    command = [sys.executable, *arguments]
    process = os.posix_spawn(sys.executable, command, environment, file_actions=quiet)
    _, status, usage = os.wait4(process, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{' '.join(arguments)} exited with {os.waitstatus_to_exitcode(status)}")
    peak = usage.ru_maxrss * 1024 / 1e6
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start, peak


def contestants(folder: str, against: Path | None) -> dict[str, tuple[list[str], Path]]:
    """Arguments of Python and the checkout of every contestant."""
    commands = {
        name: ["-m", "tieline", *line.format(folder=folder).split()] for name, line in MAIN.items()
    }
    if against is not None:
        sides = {"now": ROOT, "before": against.resolve()}
        return {
            f"{n}, {side}": (c, root) for n, c in commands.items() for side, root in sides.items()
        }
    rows = START | {"plain": ["-c", PLAIN], "inspect": commands["inspect"]}
    rows["inspect --serve none"] = [*commands["inspect"], "--serve", "none"]
    return {name: (arguments, ROOT) for name, arguments in rows.items()}


def ratios(samples: dict[str, Samples], clock: str) -> list[Ratio]:
    """The ratios that were asked for."""
    if "plain" not in samples:
        names = dict.fromkeys(name.rsplit(", ", 1)[0] for name in samples)
        pairs = [(f"{n}, now", f"{n}, before", 1.0) for n in names]
    else:
        pairs = [("--version", "import torch", START_LIMIT)]
        pairs += [(n, "plain", WHOLE_LIMIT) for n in ("inspect --serve none", "inspect")]
    return [ratio(f"{a} / {b}", samples[a], samples[b], limit, clock) for a, b, limit in pairs]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        runs = contestants(folder, options.against)
        samples = {name: Samples([], []) for name in runs}
        peaks: dict[str, float] = dict.fromkeys(runs, 0.0)
        for turn in range(options.rounds + 1):  # the first one fills the caches of files
            for name, (arguments, root) in runs.items():
                cpu, wall, peak = run_process(arguments, root, options.threads)
                if turn:
                    samples[name].cpu.append(cpu)
                    samples[name].wall.append(wall)
                    peaks[name] = max(peaks[name], peak)
    for name, sample in samples.items():
        print(f"{name}: {sorted(sample.cpu)[len(sample.cpu) // 2]:.2f} CPU s, {peaks[name]:.0f} MB")
    rows = [row for clock in ("cpu", "wall") for row in ratios(samples, clock)]
    title = f"whole commands, {options.threads} threads, load before {load:.2f}"
    report(title, rows, options.json, peaks=peaks, load=load)


if __name__ == "__main__":
    main()
