"""Sigmoid attention in tiles against torch's fused softmax attention.

Contestants, causal and not, forward and forward + backward:

    softmax    torch's scaled_dot_product_attention
    sigmoid    ours, with the -log n bias
    matrix     sigmoid attention that holds the N x N matrix; its memory only, for scale

    python benchmarks/attention.py [--rounds 24] [--json PATH]
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from harness import RESAMPLES, Ratio, Samples, interleave, peak_growth, peak_memory, ratio, report
from tieline.lab.attention.softmax_and_sigmoid import (
    score_bias,
    sigmoid_attention,
    softmax_attention,
)

SHAPE = (1, 8, 2048, 64)  # sequences, heads, tokens, width of a head
TIME_TARGET = 1.2  # forward + backward against softmax
MEMORY_TARGET = 2.0  # "of the same order"; holding the matrix takes more than five times as much
CLOCKS = ("cpu", "wall")
Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return softmax_attention(q, k, v, causal=causal)


def sigmoid(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return sigmoid_attention(q, k, v, causal=causal, bias="-log n")


def matrix(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    weights = (q @ k.mT / q.shape[-1] ** 0.5 + score_bias("-log n", k.shape[-2])).sigmoid()
    return (weights.tril() if causal else weights) @ v


CONTESTANTS: dict[str, Attention] = {"softmax": softmax, "sigmoid": sigmoid, "matrix": matrix}


@dataclass(frozen=True)
class Median:
    """A median in milliseconds with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Median":
        """Median of seconds, its interval from resampling rounds."""
        times = 1e3 * np.array(seconds)
        drawn = np.random.default_rng(0).integers(len(times), size=(RESAMPLES, len(times)))
        low, high = np.quantile(np.median(times[drawn], axis=1), [0.025, 0.975])
        return cls(float(np.median(times)), float(low), float(high))


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(SHAPE, requires_grad=True) for _ in range(3))
    return q, k, v, torch.randn(SHAPE)


def step(attention: Attention, causal: bool, backward: bool) -> Callable[[], None]:
    """One forward, or one forward and backward whose gradients are dropped afterwards."""
    q, k, v, grad = inputs()

    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = attention(q, k, v, causal)
        if backward:
            out.backward(grad)
            q.grad = k.grad = v.grad = None

    return run


def key(name: str, causal: bool, backward: bool) -> str:
    return f"{name}{' causal' if causal else ''} {'fwd+bwd' if backward else 'fwd'}"


CASES = [(causal, backward) for causal in (False, True) for backward in (False, True)]


def measure(rounds: int) -> dict[str, Samples]:
    """All cases of softmax and sigmoid in turn, the two of a pair next to each other."""
    return interleave(
        {
            key(name, *case): step(CONTESTANTS[name], *case)
            for case in CASES
            for name in ("softmax", "sigmoid")
        },
        rounds,
    )


def time_ratios(samples: dict[str, Samples]) -> list[Ratio]:
    return [
        ratio(
            key("sigmoid / softmax", causal, backward),
            samples[key("sigmoid", causal, backward)],
            samples[key("softmax", causal, backward)],
            TIME_TARGET if backward else None,
            clock,
        )
        for causal, backward in CASES
        for clock in CLOCKS
    ]


def memory(causal: bool) -> tuple[list[Ratio], dict[str, int]]:
    peaks = {
        name: peak_memory(__file__, "--child", name, *(["--causal"] if causal else []))
        for name in CONTESTANTS
    }
    rows = []
    for name, target in (("sigmoid", MEMORY_TARGET), ("matrix", None)):
        value = peaks[name] / peaks["softmax"]
        title = f"{name} / softmax{' causal' if causal else ''} peak memory"
        rows.append(Ratio(title, "bytes", value, value, value, target))
    return rows, {key(name, causal, True): peak for name, peak in peaks.items()}


def child(name: str, causal: bool) -> None:
    run = step(CONTESTANTS[name], causal, backward=True)
    q = torch.randn(1, 1, 8, SHAPE[-1], requires_grad=True)
    CONTESTANTS[name](q, q, q, causal).sum().backward()  # load kernels before the peak is counted
    print(peak_growth(lambda: [run() for _ in range(3)]))


def print_medians(medians: dict[str, dict[str, Median]]) -> None:
    table = Table(title=f"medians in ms, shape {SHAPE}")
    for column in ("what", *CLOCKS):
        table.add_column(column)
    for name, row in medians.items():
        cells = [f"{m.value:.1f}  ({m.low:.1f} - {m.high:.1f})" for m in row.values()]
        table.add_row(name, *cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--causal", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.causal)
        return
    load = [os.getloadavg()[0]]
    samples = measure(options.rounds)
    load.append(os.getloadavg()[0])
    medians = {n: {c: Median.of(getattr(s, c)) for c in CLOCKS} for n, s in samples.items()}
    peaks = [memory(causal) for causal in (False, True)]
    print_medians(medians)
    report(
        f"sigmoid against softmax attention, {options.rounds} rounds",
        [*time_ratios(samples), *(row for rows, _ in peaks for row in rows)],
        options.json,
        shape=SHAPE,
        medians_ms={n: {c: asdict(m) for c, m in row.items()} for n, row in medians.items()},
        peak_bytes=peaks[0][1] | peaks[1][1],
        load_average=load,
    )


if __name__ == "__main__":
    main()
