"""What every benchmark shares: interleaved rounds, intervals of ratios, peak memory, a report.

Timings on a shared machine are noisy, so contestants take turns within one process and only ratios
of medians are claimed, each with a 95 % interval from resampling whole rounds.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

RESAMPLES = 2000


@dataclass(frozen=True)
class Samples:
    """Seconds per round: process CPU time and wall time."""

    cpu: list[float]
    wall: list[float]


@dataclass(frozen=True)
class Ratio:
    """Ratio of two medians with its 95 % interval and the target it is held against."""

    name: str
    clock: str
    value: float
    low: float
    high: float
    target: float | None

    @property
    def met(self) -> bool | None:
        """Whether the ratio is within its target; None where there is none."""
        return None if self.target is None else self.value <= self.target


def interleave(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, Samples]:
    """Run every contestant once per round, in turn."""
    samples = {name: Samples([], []) for name in contestants}
    for turn in range(warmup + rounds):
        for name, run in contestants.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            if turn >= warmup:
                samples[name].cpu.append(time.process_time() - cpu)
                samples[name].wall.append(time.perf_counter() - wall)
    return samples


def ratio(
    name: str, ours: Samples, rival: Samples, target: float | None = None, clock: str = "cpu"
) -> Ratio:
    """median(ours) / median(rival), with an interval from resampling rounds in pairs."""
    a, b = np.array(getattr(ours, clock)), np.array(getattr(rival, clock))
    rounds = np.random.default_rng(0).integers(len(a), size=(RESAMPLES, len(a)))
    spread = np.median(a[rounds], axis=1) / np.median(b[rounds], axis=1)
    low, high = np.quantile(spread, [0.025, 0.975])
    return Ratio(name, clock, float(np.median(a) / np.median(b)), float(low), float(high), target)


def peak_memory(script: str, *arguments: str) -> int:
    """Bytes by which `script`, run with `arguments` in a process of its own, says its peak grew.

    The child prints the growth as the last line of its output (see `peak_growth`).
    """
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def peak_growth(run: Callable[[], object]) -> int:
    """Growth of the process's peak resident memory over what it had before `run`, in bytes."""
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restart the peak from the current size
    run()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def report(title: str, ratios: list[Ratio], path: str | None, **extra: object) -> None:
    """Print the ratios as a table, targets beside them, and write everything as JSON to `path`."""
    table = Table(title=title)
    for column in ("what", "clock", "ratio", "95 % interval", "target", ""):
        table.add_column(column)
    for row in ratios:
        target = "" if row.target is None else f"≤ {row.target:.2f}"
        verdict = {None: "", True: "met", False: "MISSED"}[row.met]
        interval = f"{row.low:.2f} - {row.high:.2f}"
        table.add_row(row.name, row.clock, f"{row.value:.2f}", interval, target, verdict)
    Console(width=120).print(table)
    if path is not None:
        result = {"machine": machine(), "ratios": [asdict(r) for r in ratios], **extra}
        Path(path).write_text(json.dumps(result, indent=1))
