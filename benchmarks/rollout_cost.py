"""What `RolloutMismatch` costs in training: time of a step with and without the comparison.

    python benchmarks/rollout_cost.py [--rounds 12] [--json FILE]

4 layers, d = 512, 64 experts of width 256, top-8; a step is forward and backward of 8 documents of
256 tokens in float32, without a rollout and without an optimizer, which would only hide the cost.
Plain steps, steps that compare their routes with a record in which one token of 50 has other
experts, and plain steps again as a control take turns; so do rollouts of 8 x 32 tokens with and
without capture, which records them. Target: a step takes at most 2 % more.

The speed of a machine in use drifts by more than that, so the time inside the comparison (routers
observed, rows found and compared, numbers of the step) is measured too, over the rest of the step.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from capture import olmoe
from harness import interleave, ratio, report
from replay import other
from tieline.analysis.rollout import RolloutMismatch
from tieline.models.capture import Recorder, capture

TARGET = 1.02


class InsideTime:
    """CPU seconds spent in the comparison."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - before

        return run

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the calls of routers and of the comparison while the block lasts."""
        sites = [(Recorder, name) for name in ("begin", "observe", "finish")]
        sites += [(RolloutMismatch, name) for name in ("add", "step")]
        originals = [getattr(owner, name) for owner, name in sites]
        for (owner, name), function in zip(sites, originals, strict=True):
            setattr(owner, name, self.timed(function))
        try:
            yield
        finally:
            for (owner, name), function in zip(sites, originals, strict=True):
                setattr(owner, name, function)


def main() -> None:
    """Run the benchmark and report it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = olmoe(layers=4, width=512, expert_width=256).train()
    model.requires_grad_(True)
    ids = torch.randint(2, 512, (8, 256))
    with torch.no_grad(), capture(model, distances=False, epsilons=()) as recorder:
        model(input_ids=ids, use_cache=False)
    routes = other(recorder.trace(), 0.02)
    mismatch, inside = RolloutMismatch(model, limits=None), InsideTime()
    shares: list[float] = []

    def plain() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    def watched() -> None:
        inside.seconds, before = 0.0, time.process_time()
        with inside.watching():
            with mismatch.watch(routes):
                plain()
            mismatch.step()
        rest = time.process_time() - before - inside.seconds
        shares.append(inside.seconds / rest)

    def generate() -> None:
        with torch.no_grad():
            model.generate(input_ids=ids[:, :32], max_new_tokens=32, min_new_tokens=32)

    def recorded() -> None:
        with capture(model, ranks=1, epsilons=(), distances=False):
            generate()

    contestants = {"plain": plain, "watched": watched, "again": plain}
    contestants |= {"generate": generate, "recorded": recorded}
    samples = interleave(contestants, options.rounds)
    ratios = [
        ratio("step with RolloutMismatch / without", samples["watched"], samples["plain"], TARGET),
        ratio("control: without / without", samples["again"], samples["plain"]),
        ratio("rollout with capture / without", samples["recorded"], samples["generate"]),
    ]
    low, share, high = np.quantile(shares[-options.rounds :], [0, 0.5, 1])
    print(f"time inside over the rest of a step: {share:.2%} ({low:.2%} to {high:.2%})")
    for row in ratios:  # the table rounds to two digits
        print(f"{row.name}: {row.value:.4f} ({row.low:.4f} to {row.high:.4f})")
    report("rollout mismatch", ratios, options.json, inside=shares[-options.rounds :])


if __name__ == "__main__":
    main()
