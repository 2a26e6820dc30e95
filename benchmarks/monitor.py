"""What the routing monitor costs in training, on the second shape of the layer benchmark.

    python benchmarks/monitor.py [--rounds 10] [--json FILE]

A step is forward and backward of one MoE layer (4096 tokens, width 256, 64 experts of width 128,
top-8), without an optimizer, which would only hide the cost. Contestants take turns:

    10 steps    plain against watched at n = 10, which logs one of them     target: at most 1 %
    one step    plain against logged                                       target: at most 10 %

Each is also timed from inside, as the share of the time that hooks and `step` take: a ratio of two
noisy totals resolves a percent only with many rounds. The transformers block is there beside ours.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness import Ratio, Samples, interleave, ratio, report
from moe_layer import SHAPES, inputs, mixtral, ours, step
from tieline import TopK
from tieline.audit import monitor_watch
from tieline.audit.monitor import RoutingMonitor

SHAPE = SHAPES[1]
EVERY = 10
TARGETS = {"10 steps": 1.01, "one step": 1.10}


class Inside:
    """CPU seconds that hooks and `RoutingMonitor.step` have taken, per round."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.rounds: list[float] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block."""
        before = time.process_time()
        yield
        self.seconds += time.process_time() - before

    def end_round(self) -> None:
        """Keep the sum and start anew."""
        self.rounds.append(self.seconds)
        self.seconds = 0.0


@contextmanager
def hooks_timed(inside: Inside) -> Iterator[None]:
    """Time every report of a router while the block lasts."""
    plain = monitor_watch._Reader._report

    def report_(self: Any, module: nn.Module, make: Callable[[], Any]) -> None:
        with inside.timed():
            plain(self, module, make)

    monitor_watch._Reader._report = report_
    try:
        yield
    finally:
        monitor_watch._Reader._report = plain


def watched(
    layer: nn.Module, x: Tensor, grad: Tensor, steps: int, inside: Inside
) -> Callable[[], None]:
    """`steps` steps of training of which the first is logged."""

    def run() -> None:
        with RoutingMonitor(layer, every=steps, check_losses=False) as monitor:
            for _ in range(steps):
                step(layer, x, grad)
                with inside.timed():
                    monitor.step()
        inside.end_round()

    return run


def compare(name: str, layer: nn.Module, rounds: int) -> tuple[list[Ratio], dict[str, object]]:
    x, grad = inputs(SHAPE)
    ratios, medians = [], {}
    for title, steps in (("10 steps", EVERY), ("one step", 1)):
        inside = Inside()

        def plain(steps: int = steps) -> None:
            for _ in range(steps):
                step(layer, x, grad)

        turns = rounds if steps == EVERY else 2 * rounds
        with hooks_timed(inside):
            run = {"plain": plain, "watched": watched(layer, x, grad, steps, inside)}
            samples = interleave(run, turns)
        target = TARGETS[title]
        for clock in ("cpu", "wall"):
            label = f"{name}, {title}: watched / plain"
            ratios.append(ratio(label, samples["watched"], samples["plain"], None, clock))
        part = inside.rounds[-turns:]
        rest = Samples([a - b for a, b in zip(samples["watched"].cpu, part, strict=True)], [])
        ratios.append(ratio(f"{name}, {title}: from inside", samples["watched"], rest, target))
        medians[title] = {"plain": samples["plain"].cpu, "watched": samples["watched"].cpu}
        medians[title]["inside"] = part
    return ratios, medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = {"tieline": ours(SHAPE, TopK(SHAPE[3])), "transformers": mixtral(SHAPE, "grouped_mm")}
    ratios: list[Ratio] = []
    samples: dict[str, object] = {}
    for name, layer in layers.items():
        rounds = options.rounds if name == "tieline" else max(3, options.rounds // 3)
        found, samples[name] = compare(name, layer, rounds)
        ratios += found
    for row in ratios:  # the table rounds to two digits
        print(f"{row.name} ({row.clock}): {100 * (row.value - 1):+.2f} %")
    report("Routing monitor", ratios, options.json, seconds=samples)


if __name__ == "__main__":
    main()
