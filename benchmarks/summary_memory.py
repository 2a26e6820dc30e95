"""Memory that a streaming summary takes: 1 M tokens, 48 layers, 64 experts by default.

    python benchmarks/summary_memory.py [--tokens 1000000] [--layers 48] [--json]

Batches of independent normal scores are made once and fed again and again under new positions, so
that what grows is the summary alone. Reported is the growth of the peak resident size over the size
before the first update; the limit is 500 MB.
"""

import argparse
import json
import resource
import time
from dataclasses import replace
from pathlib import Path

import torch

from summary_update import EPSILONS, batch
from tieline.trace import LayerFacts, SummaryBuilder

LIMIT_MB = 500


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    facts = LayerFacts(arguments.experts, arguments.k)
    chunks = [batch(arguments.batch, facts, arguments.k + 4, seed) for seed in range(4)]
    position = torch.arange(arguments.batch)
    before, start = resident_mb(), time.perf_counter()
    builder = SummaryBuilder(EPSILONS)
    batches = -(-arguments.tokens // arguments.batch)
    for document in range(batches):
        documents = torch.full_like(position, document)
        for layer in range(arguments.layers):
            chunk = replace(chunks[(document + layer) % 4], name=f"layers.{layer}")
            builder.update(layer, chunk, documents, position, position)
    summary = builder.summary()
    seconds = time.perf_counter() - start
    result = {
        "tokens": summary.tokens,
        "layers": len(summary.layers),
        "growth_mb": round(peak_mb() - before, 1),
        "limit_mb": LIMIT_MB,
        "seconds": round(seconds, 1),
        "ms_per_update": round(1e3 * seconds / batches / arguments.layers, 2),
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:14} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
