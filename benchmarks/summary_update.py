"""Time that the streaming summary takes per layer and batch, by part of the work.

    python benchmarks/summary_update.py [--tokens 4096] [--experts 64] [--k 8] [--ranks 12]

The batch is made of independent normal scores with eight ε. Reported is the median of 200 updates
after the sample is full, beside the time of one torch.sort of the scores for comparison.
"""

import argparse
import statistics
import time

import torch

from tieline.core.ranking import stable_topk
from tieline.trace import LayerFacts, LayerTrace, SummaryBuilder

EPSILONS = tuple(10.0**exponent for exponent in range(-5, 3))


def batch(tokens: int, facts: LayerFacts, ranks: int, seed: int) -> LayerTrace:
    scores = torch.randn(tokens, facts.n_experts, generator=torch.Generator().manual_seed(seed))
    top = stable_topk(scores, ranks)
    threshold = top.values[:, facts.k - 1 : facts.k]
    near = torch.stack([(scores > threshold - eps).sum(1) for eps in EPSILONS], dim=1)
    weights = top.values[:, : facts.k].softmax(1)
    distance = (threshold - top.values[:, facts.k : facts.k + 1])[:, 0] / 2
    return LayerTrace(
        "router", facts, top.indices, top.values, weights, near=near, distance=distance
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=12)
    parser.add_argument("--updates", type=int, default=200)
    arguments = parser.parse_args()
    facts = LayerFacts(arguments.experts, arguments.k)
    chunk = batch(arguments.tokens, facts, arguments.ranks, seed=0)
    builder, positions = SummaryBuilder(EPSILONS), torch.arange(arguments.tokens)
    times = []
    for step in range(arguments.updates + 20):
        documents = torch.full_like(positions, step)
        start = time.perf_counter()
        builder.update(0, chunk, documents, positions, positions)
        times.append(time.perf_counter() - start)
    times = sorted(times[20:])
    low, high = times[len(times) // 20], times[-len(times) // 20]
    print(
        f"update: median {1e3 * statistics.median(times):.2f} ms, 5-95 % {1e3 * low:.2f} to "
        f"{1e3 * high:.2f} ms for {arguments.tokens} tokens, {arguments.experts} experts"
    )


if __name__ == "__main__":
    main()
