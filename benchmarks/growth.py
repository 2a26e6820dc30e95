"""How the time of measures, diff, check, write, read and page grows, and what measures cost.

    python benchmarks/growth.py [--json FILE] [--fast]

Traces of independent normal scores grow along one axis at a time, by a factor of 32 (1.5 decades):
tokens, layers, experts, k. The exponent is the slope of a line through log(CPU seconds) over
log(size), the least of a few rounds each; the target is 1.05. `measures` are also timed per token
and layer at 2 of 16 and 8 of 128 experts, the targets being 8 and 16 µs.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import tieline
from harness import machine
from tieline.core.ranking import stable_topk
from tieline.measure.measures import measure
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace
from tieline.trace.store import load_trace, save_trace

EPSILONS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
NOISE = 0.003
TARGET = 1.05


@dataclass(frozen=True)
class Shape:
    """Sizes of a trace."""

    tokens: int = 4096
    layers: int = 2
    experts: int = 64
    k: int = 2


AXES = {
    "tokens": [Shape(tokens=n) for n in (2048, 8192, 65536)],
    "layers": [Shape(tokens=1024, layers=n) for n in (1, 6, 32)],
    "experts": [Shape(tokens=2048, experts=n) for n in (16, 90, 512)],
    "k": [Shape(tokens=2048, experts=128, k=n) for n in (2, 11, 64)],
}
PER_TOKEN = {"2 of 16": (Shape(16384, 2, 16, 2), 8.0), "8 of 128": (Shape(16384, 2, 128, 8), 16.0)}


def random_trace(shape: Shape, noise: float = 0.0) -> RoutingTrace:
    """A trace of normal scores; with noise another one of the same tokens."""
    generator, disturbance = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    layers = []
    for number in range(shape.layers):
        scores = torch.randn(shape.tokens, shape.experts, generator=generator)
        scores += noise * torch.randn(shape.tokens, shape.experts, generator=disturbance)
        ranked = stable_topk(scores, min(shape.experts, shape.k + 4))
        threshold = ranked.values[:, shape.k - 1 : shape.k]
        near = torch.stack([(scores > threshold - e).sum(dim=1) for e in EPSILONS], dim=1)
        layers.append(
            LayerTrace(
                f"model.layers.{number}.mlp.gate",
                LayerFacts(shape.experts, shape.k),
                ranked.indices.to(torch.int16),
                ranked.values,
                ranked.values[:, : shape.k].softmax(dim=1),
                near=near.to(torch.int16),
            )
        )
    ids = torch.arange(shape.tokens)
    facts: dict[str, object] = {"model": "random"}
    return RoutingTrace(tuple(layers), ids % 1000, ids // 512, ids % 512, EPSILONS, facts)


def jobs(shape: Shape, folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed on a trace of this shape."""
    trace, other = random_trace(shape), random_trace(shape, NOISE)
    page = folder / "page.html"
    saved, written = folder / "saved", folder / "written"
    save_trace(trace, saved)
    inspection = tieline.inspect(trace)

    def write() -> None:
        shutil.rmtree(written, ignore_errors=True)
        save_trace(trace, written)

    def read() -> None:
        for layer in load_trace(saved).layers:
            layer.experts.sum()

    return {
        "measures": lambda: measure(trace),
        "diff": lambda: tieline.diff(trace, other),
        "check": lambda: tieline.check(saved),
        "write": write,
        "read": read,
        "page": lambda: inspection.to_html(page),
    }


def cpu_seconds(job: Callable[[], object], rounds: int) -> float:
    """Least process CPU time of a few rounds after one that is not counted."""
    job()
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        job()
        seconds.append(time.process_time() - start)
    return min(seconds)


def axis_times(shapes: list[Shape], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every job at each size of an axis."""
    times: dict[str, list[float]] = {}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            for name, job in jobs(shape, Path(folder)).items():
                times.setdefault(name, []).append(cpu_seconds(job, rounds))
    return times


def exponents(axis: str, shapes: list[Shape], rounds: int) -> dict[str, float]:
    """Slope of log(seconds) over log(size) of every job."""
    sizes = np.log([getattr(shape, axis) for shape in shapes])
    times = axis_times(shapes, rounds)
    return {name: float(np.polyfit(sizes, np.log(row), 1)[0]) for name, row in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fast", action="store_true", help="an eighth of the tokens, one round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 1 if arguments.fast else 3
    result: dict[str, object] = {"machine": machine()}
    for axis, shapes in AXES.items():
        if arguments.fast:
            shapes = [replace(shape, tokens=max(256, shape.tokens // 8)) for shape in shapes]
        slopes = exponents(axis, shapes, rounds)
        result[axis] = slopes
        verdict = "met" if max(slopes.values()) <= TARGET else "MISSED"
        print(f"{axis:8}", *(f"{name} {slope:.2f}" for name, slope in slopes.items()), verdict)
    for name, (shape, target) in PER_TOKEN.items():
        trace = random_trace(shape)
        cost = cpu_seconds(lambda t=trace: measure(t), rounds) / shape.tokens / shape.layers
        result[name] = 1e6 * cost
        verdict = "met" if 1e6 * cost <= target else "MISSED"
        print(f"measures {name}: {1e6 * cost:.1f} µs per token and layer (≤ {target:g}) {verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
