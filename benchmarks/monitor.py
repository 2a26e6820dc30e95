"""What the routing monitor costs in training, on the second shape of the layer benchmark.

    python benchmarks/monitor.py [--rounds 40] [--layers tieline transformers] [--json FILE]

A step is forward and backward of one MoE layer (4096 tokens, width 256, 64 experts of width 128,
top-8), without an optimizer, which would only hide the cost. A round is a logged step and the one
after it, two plain steps, and two plain steps again, in random order: on a shared machine the speed
drifts by more than the monitor costs within the seconds that ten steps take, so what is compared
must lie close together. With the medians P of plain steps, L of logged ones and A of those after:

    logged step     L / P                     target: at most 10 %
    step after      A / P                     after-effects, which the time inside cannot show
    n = 10          (L + A + 8 (P + q)) / 10 P  target: at most 1 %
    again / plain   a control: what the machine makes of no difference at all
    from inside     time in hooks and `step` over the rest of a logged step

q is the time of `RoutingMonitor.step` on the eight further steps, in which the model has no hook.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness import RESAMPLES, Ratio, Samples, report
from moe_layer import SHAPES, inputs, mixtral, ours, step
from tieline import TopK
from tieline.analysis.monitor import RoutingMonitor
from tieline.models import router_calls as monitor_watch

SHAPE = SHAPES[1]
EVERY = 10


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
    plain = monitor_watch._CallReporter._report

    def report_(self: Any, module: nn.Module, make: Callable[[], Any]) -> None:
        with inside.timed():
            plain(self, module, make)

    monitor_watch._CallReporter._report = report_
    try:
        yield
    finally:
        monitor_watch._CallReporter._report = plain


class Watched:
    """Ten steps of training, one call each, of which the first is logged."""

    def __init__(self, layer: nn.Module, x: Tensor, grad: Tensor, inside: Inside) -> None:
        self._run = (layer, x, grad)
        self._inside = inside
        # armed by hand for the logged steps only: plain steps come between
        self._monitor = RoutingMonitor(layer, every=1 << 62, start=1, check_losses=False)

    def logged(self) -> None:
        """A step that is logged."""
        with self._inside.timed():
            self._monitor.arm()
        step(*self._run)
        with self._inside.timed():
            self._monitor.read(0)
        self._inside.end_round()

    def plain(self) -> None:
        """A step without a monitor."""
        step(*self._run)

    def quiet_seconds(self, calls: int = 10_000) -> float:
        """Seconds of `step` where nothing is logged."""
        before = time.process_time()
        for _ in range(calls):
            self._monitor.step()
        return (time.process_time() - before) / calls


def compare(name: str, layer: nn.Module, rounds: int) -> tuple[list[Ratio], dict[str, object]]:
    x, grad = inputs(SHAPE)
    inside, order = Inside(), np.random.default_rng(0)
    blocks: dict[str, list[Samples]] = {"plain": [], "watched": [], "again": []}
    with hooks_timed(inside):
        watched = Watched(layer, x, grad, inside)
        for turn in range(rounds + 2):  # the first two are a warm-up
            for kind in order.permutation(list(blocks)):
                first = watched.logged if kind == "watched" else watched.plain
                block = timed_block([first, watched.plain])
                if turn >= 2:
                    blocks[kind].append(block)
    quiet = watched.quiet_seconds()
    kinds = {
        "plain": seconds_of(blocks["plain"], slice(None)),
        "again": seconds_of(blocks["again"], slice(None)),
        "logged": seconds_of(blocks["watched"], slice(0, 1)),
        "after": seconds_of(blocks["watched"], slice(1, None)),
    }
    part = np.array(inside.rounds[-rounds:])[:, None]
    seconds = {kind: {c: v.tolist() for c, v in clocks.items()} for kind, clocks in kinds.items()}
    extra = {"inside": part.tolist(), "quiet": quiet}
    return ratios_of(name, kinds, part, quiet), {**seconds, **extra}


def timed_block(steps: list[Callable[[], None]]) -> Samples:
    """Seconds of each step."""
    samples = Samples([], [])
    for run in steps:
        cpu, wall = time.process_time(), time.perf_counter()
        run()
        samples.cpu.append(time.process_time() - cpu)
        samples.wall.append(time.perf_counter() - wall)
    return samples


def seconds_of(blocks: list[Samples], rounds: slice) -> dict[str, np.ndarray]:
    """Seconds (blocks, rounds) of each clock."""
    return {c: np.array([getattr(b, c)[rounds] for b in blocks]) for c in ("cpu", "wall")}


def ratios_of(
    name: str, kinds: dict[str, dict[str, np.ndarray]], part: np.ndarray, quiet: float
) -> list[Ratio]:
    """The ratios of medians, with intervals from resampling whole rounds."""
    ratios = []
    for clock in ("cpu", "wall"):
        plain, again, logged, after = (
            kinds[kind][clock] for kind in ("plain", "again", "logged", "after")
        )
        for what, value, target in estimates(plain, again, logged, after, quiet):
            ratios.append(resampled(f"{name}, {what}", clock, value, len(plain), target))
    logged = kinds["logged"]["cpu"]
    rest = logged - part
    title = f"{name}, logged step, from inside"
    return [
        *ratios,
        resampled(title, "cpu", lambda r: float(np.median(logged[r] / rest[r])), len(rest), None),
    ]


def estimates(
    plain: np.ndarray, again: np.ndarray, logged: np.ndarray, after: np.ndarray, quiet: float
) -> list[tuple[str, Callable[[Any], float], float | None]]:
    """Names, functions of the rounds and targets."""
    both, m = np.concatenate([plain, again], axis=1), np.median

    def every_tenth(r: Any) -> float:
        rest = (EVERY - 2) * (m(both[r]) + quiet)
        return float((m(logged[r]) + m(after[r]) + rest) / (EVERY * m(both[r])))

    return [
        ("n = 10", every_tenth, 1.01),
        ("logged step", lambda r: m(logged[r]) / m(both[r]), 1.10),
        ("step after", lambda r: m(after[r]) / m(both[r]), None),
        ("control, again / plain", lambda r: m(again[r]) / m(plain[r]), None),
    ]


def resampled(
    name: str, clock: str, value: Callable[[Any], float], rounds: int, target: float | None
) -> Ratio:
    draws = np.random.default_rng(0).integers(rounds, size=(RESAMPLES, rounds))
    low, high = np.quantile([value(draw) for draw in draws], [0.025, 0.975])
    return Ratio(name, clock, float(value(np.arange(rounds))), float(low), float(high), target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--layers", nargs="*", default=["tieline", "transformers"])
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = {"tieline": ours(SHAPE, TopK(SHAPE[3])), "transformers": mixtral(SHAPE, "grouped_mm")}
    layers = {name: layers[name] for name in options.layers}
    ratios: list[Ratio] = []
    samples: dict[str, object] = {}
    for name, layer in layers.items():
        rounds = options.rounds if name == "tieline" else max(20, options.rounds // 2)
        compared, samples[name] = compare(name, layer, rounds)
        ratios += compared
    for row in ratios:  # the table rounds to two digits
        low, value, high = (f"{100 * (x - 1):+.2f}" for x in (row.low, row.value, row.high))
        print(f"{row.name} ({row.clock}): {value} % ({low} to {high})")
    report("Routing monitor", ratios, options.json, seconds=samples)


if __name__ == "__main__":
    main()
