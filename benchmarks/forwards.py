"""What each analysis costs, in units of one bare forward pass of the same tokens.

    python benchmarks/forwards.py [--tokens 16384] [--rounds 5] [--threads 1 2] [--json FILE]
    python benchmarks/forwards.py --only inspect diff --tokens 2048

Library calls on the model in the box, which is loaded once: the bare passes and the analyses take
turns within one process, and a ratio is that of medians with a 95 % interval from resampling
rounds. CPU time of the process is what targets are for; wall time stands beside it. Threads wait by
spinning, so that figures for two threads mean something on a quiet machine only: the load average
before and after is part of the result.
"""

import argparse
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

import tieline
from harness import Ratio, interleave, ratio, report
from tieline.models.model import Model
from tieline.run.corpus import Corpus
from tieline.run.forward import forward, only_running

TARGETS = {
    "inspect, not served": 2.7,
    "inspect": 3.4,
    "diff": 4.0,
    "smooth": 28.0,
    "audit": 60.0,
    "audit --all": 140.0,
}
BARE = "bare"


def contestants(tokens: int, only: list[str]) -> dict[str, Callable[[], Any]]:
    """The bare pass over the tokens, and the analyses of the same tokens."""
    loaded = Model.open("demo", dtype="fp32")
    source, corpus = (loaded.module, loaded.tokenizer), Corpus(tokens=tokens)
    batches = corpus.batches(corpus.tokenised(loaded.tokenizer, loaded.module))

    def bare() -> None:
        with only_running(loaded.module):
            for ids in batches:
                forward(loaded.module, ids)

    jobs: dict[str, Callable[[], Any]] = {
        "inspect, not served": lambda: tieline.inspect(source, tokens=tokens, serve="none"),
        "inspect": lambda: tieline.inspect(source, tokens=tokens),
        "diff": lambda: tieline.diff(source, source, tokens=tokens, dtype_b="bf16-emulated"),
        "smooth": lambda: tieline.smooth(source, tokens=tokens),
        "audit": lambda: tieline.audit(source, tokens=tokens),
        "audit --all": lambda: tieline.audit(source, tokens=tokens, all=True),
    }
    unknown = sorted(set(only) - set(jobs))
    if unknown:
        raise SystemExit(f"--only: none of {', '.join(jobs)}: {', '.join(unknown)}")
    return {BARE: bare} | {name: job for name, job in jobs.items() if not only or name in only}


def measured(jobs: dict[str, Callable[[], Any]], threads: int, rounds: int) -> list[Ratio]:
    """Ratios to the bare pass, all jobs in turns."""
    torch.set_num_threads(threads)
    samples = interleave(jobs, rounds, warmup=1)
    return [
        ratio(f"{name}, {threads} thread{'s' * (threads > 1)}", spent, samples[BARE], target, clock)
        for name, spent in samples.items()
        if name != BARE
        for clock, target in (("cpu", TARGETS[name]), ("wall", None))
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Commands in units of a bare forward pass.")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", default=[], metavar="ANALYSIS")
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    jobs, before = contestants(options.tokens, options.only), os.getloadavg()
    ratios = [row for threads in options.threads for row in measured(jobs, threads, options.rounds)]
    title = f"forward passes of {options.tokens:,} tokens"
    load = {"before": before, "after": os.getloadavg()}
    report(title, ratios, options.json, tokens=options.tokens, load=load)


if __name__ == "__main__":
    main()
