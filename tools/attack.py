"""Kill commands at random moments: what is there is whole, and the next run is not blocked.

    python -m tools.attack 8 [seed] [command ...]        # so many times each command

Half of the kills come at a random moment of the run, the others a few milliseconds after
something was written. After each kill the output must be absent or
complete; a last run must succeed, and leave nothing hidden beside its output.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from tieline.lab.estimation.rates import RateStore
from tieline.lab.training import language  # noqa: F401, registers the decoder that is trained
from tieline.lab.training.checkpoint import last_checkpoint
from tieline.models import load_pretrained
from tieline.trace import load_trace, save_trace
from tieline.trace.readers import import_trace

LONGEST = 300


@dataclass
class Victim:
    """A command, what it makes, and how that is found to be whole.

    Attributes:
        words: of the command; `{out}` stands for the output.
        whole: raises if the output is there and not whole.
        more: words of a run whose output is there already.
        seconds: how long an undisturbed run takes.
    """

    words: list[str]
    whole: Callable[[Path], object]
    more: list[str] = field(default_factory=list)
    seconds: float = 0.0


def _run_is_whole(out: Path) -> None:
    for path in out.glob("*.json"):
        json.loads(path.read_bytes())
    last_checkpoint(out)
    if (out / "model").exists():
        AutoModelForCausalLM.from_pretrained(out / "model")
    if (out / "stock").exists():
        load_pretrained(out / "stock")


def _rows_are_whole(out: Path) -> None:
    """All lines but the last, which may be cut off and is then written again."""
    RateStore(out).load("x")


def _results_are_whole(out: Path) -> None:
    for path in out.glob("[!.]*.json"):
        json.loads(path.read_bytes())


def victims(folder: Path) -> dict[str, Victim]:
    """Every command that makes something."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(folder / "dense")
    experts = np.random.default_rng(0).integers(0, 8, (20_000, 4, 1))
    np.save(folder / "routes.npy", np.concatenate([experts, (experts + 1) % 8], 2))
    save_trace(import_trace(folder / "routes.npy"), folder / "part")
    few = ["--tokens", "512", "--calibration", "512", "--rounds", "2", "--batch-size", "2"]
    grid = ["--gate", "linear", "--link", "softmax", "--expert", "linear", "--sizes", "500,1000"]
    part, replaced = str(folder / "part"), ["-o", "{out}", "--overwrite"]
    return {
        "merge": Victim(["merge", part, part, "--renumber", *replaced], load_trace),
        "upcycle": Victim(["upcycle", str(folder / "dense"), *replaced], load_pretrained),
        "inspect": Victim(
            ["inspect", "--tokens", "2048", "--save-trace", "{out}", "--overwrite"], load_trace
        ),
        "rates": Victim(
            ["rates", *grid, "--repetitions", "40", "--jobs", "2", "--results", "{out}"],
            _rows_are_whole,
        ),
        "reproduce": Victim(
            ["reproduce", "1", "--fast", "--jobs", "2", "--results", "{out}"], _results_are_whole
        ),
        "train": Victim(
            ["train", "demo-smoke-smooth1", "-o", "{out}"], _run_is_whole, ["--resume"]
        ),
        "smooth": Victim(["smooth", *few, *replaced], load_pretrained),
    }


def start(victim: Victim, out: Path, again: bool) -> subprocess.Popen[Any]:
    """Start the command in a session of its own, so that its workers can be killed with it."""
    words = [word.replace("{out}", str(out)) for word in victim.words]
    command = [sys.executable, "-m", "tieline", *words, *(victim.more if again else [])]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, start_new_session=True, **quiet)


def hidden(out: Path) -> list[Path]:
    """Names of halves beside and in an output."""
    return [*out.parent.glob(".*.partial"), *out.glob(".*.partial")]


def state(out: Path) -> set[tuple[str, int]]:
    """Hidden names and sizes of what a run writes."""
    files = [out, *out.rglob("*")] if out.exists() else []
    found = set()
    for path in (*files, *hidden(out)):
        with suppress(OSError):  # gone meanwhile
            found.add((str(path), path.stat().st_size))
    return found


def kill(victim: Victim, out: Path, draw: random.Random) -> tuple[bool, bool]:
    """Kill one run; returns whether it still ran, and whether it had begun to write."""
    known = state(out)
    process = start(victim, out, (out / "config.json").exists())
    until = time.monotonic() + victim.seconds * draw.random()
    wait_for_write = draw.random() < 0.5
    while process.poll() is None:
        if state(out) - known if wait_for_write else time.monotonic() > until:
            break
        time.sleep(0.002)
    time.sleep(draw.random() * 0.02)
    ran, writing = process.poll() is None, bool(state(out) - known)
    if ran:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return ran, ran and writing


def attack(name: str, victim: Victim, folder: Path, times: int, draw: random.Random) -> int:
    """Kill a command several times, then let it finish; returns how often it had begun to write."""
    victim.seconds = finish(victim, folder / f"{name}-first")
    out, killed, wrote = folder / f"{name}-out", 0, 0
    while killed < times:
        ran, writing = kill(victim, out, draw)
        killed, wrote = killed + ran, wrote + writing
        if out.exists():
            victim.whole(out)
        if not ran:  # it has ended: the next one begins anew
            out = folder / f"{name}-out-{killed}-{draw.random()}"
    finish(victim, out)
    victim.whole(out)
    left = hidden(out)
    assert not left, f"{name} left {left}"
    return wrote


def finish(victim: Victim, out: Path) -> float:
    """Let a run end; returns how long it took."""
    began = time.monotonic()
    process = start(victim, out, (out / "config.json").exists())
    _, said = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, said.decode()
    return time.monotonic() - began


def main() -> None:
    """Attack every command and report."""
    logging.disable_progress_bar()
    times, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    draw = random.Random(seed)  # noqa: S311
    total = 0
    with tempfile.TemporaryDirectory() as place:
        known = victims(Path(place))
        for name in sys.argv[3:] or known:
            victim, folder = known[name], Path(place) / name
            folder.mkdir()
            writing = attack(name, victim, folder, times, draw)
            total += times
            print(
                f"{name:10} {times} kills, {writing} of them after it began to write: whole",
                flush=True,
            )
    print(f"{total} kills: nothing half, no run blocked")


if __name__ == "__main__":
    main()
