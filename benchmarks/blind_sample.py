"""A part of the held-out half of the blind protocol in random order: any prefix is a fair sample.

    python -m benchmarks.blind_sample OUT --seed 4 --until 21:40 [--sections sound faulty]
    python -m benchmarks.blind_sample OUT --seed 4 --kinds "smollm2 mixture" --smollm2 FOLDER

A run that time will stop is worth its pairs only if these are drawn at random. The order is fixed
by the seed; the run is noted as any other (`benchmarks/blind/RUNS.jsonl`), refused where the
sources are not those that HASH records, and goes on where its file stops.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.blind.pairs import Pair, pairs
from benchmarks.blind.protocol import HASH, note_run, read, run, source_digest
from benchmarks.blind.tables import show
from benchmarks.harness import machine

SMOLLM2 = "smollm2 mixture"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="one line of JSON per pair")
    parser.add_argument("--seed", type=int, required=True, help="texts, draws and order")
    parser.add_argument("--sections", nargs="+", default=["sound", "faulty"])
    parser.add_argument("--kinds", nargs="+", help="these kinds only")
    parser.add_argument("--until", help="no pair begins after this time of the day, as 21:40")
    parser.add_argument("--smollm2", metavar="FOLDER", help="the SmolLM2 mixture")
    return parser.parse_args()


def drawn(options: argparse.Namespace) -> list[Pair]:
    """Return the pairs that are asked for, in random order."""
    listed = [
        pair
        for pair in pairs("held-out", options.seed)
        if pair.section in options.sections
        and (pair.kind in options.kinds if options.kinds else pair.kind != SMOLLM2)
    ]
    random.Random(options.seed).shuffle(listed)  # noqa: S311
    return listed


def header_of(options: argparse.Namespace, count: int) -> dict[str, Any]:
    """Return what RUNS.jsonl and the first line of the file say about the run."""
    kinds = ", ".join(options.kinds) if options.kinds else f"all but {SMOLLM2}"
    return {
        "half": "held-out",
        "hash": source_digest(),
        "seed": options.seed,
        "limit": None,
        "section": f"{' and '.join(options.sections)} of {kinds}, random order, by time",
        "pairs": count,
        "again": True,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": machine(),
    }


def main() -> None:
    """Run the pairs in their order and print the tables."""
    options = arguments()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    if source_digest() != HASH.read_text().strip():
        raise SystemExit("the sources are not those that HASH records")
    listed = drawn(options)
    header = header_of(options, len(listed))
    if not options.out.exists():
        note_run(header)
    for number, _ in enumerate(run(listed, options.out, header, options.smollm2, ask=True), 1):
        if options.until and time.strftime("%H:%M") >= options.until:
            print(f"stopped by time after {number} further pairs of {len(listed)}")
            break
    show(*read(options.out))


if __name__ == "__main__":
    main()
