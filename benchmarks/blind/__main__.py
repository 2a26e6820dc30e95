"""Run one half of the blind protocol; see the package."""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.blind.pairs import Pair, evenly, pairs
from benchmarks.blind.protocol import HASH, earlier_runs, note_run, read, run, source_digest
from benchmarks.blind.tables import show
from benchmarks.harness import machine

HALVES = ("development", "held-out")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blind", description=__doc__)
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--json", type=Path, metavar="OUT", help="one line of JSON per pair")
    parser.add_argument("--limit", type=int, help="that many pairs, evenly spread over the list")
    parser.add_argument("--section", choices=("sound", "faulty", "stress"), help="these pairs only")
    parser.add_argument("--seed", type=int, default=0, help="other texts and draws")
    parser.add_argument("--smollm2", metavar="FOLDER", help="the SmolLM2 mixture, else skipped")
    parser.add_argument("--list", action="store_true", help="count the pairs of both halves")
    parser.add_argument("--tables", type=Path, metavar="OUT", help="print the tables of a file")
    parser.add_argument("--generate", action="store_true", help="make the pairs without diff")
    parser.add_argument("--again", action="store_true", help="run the held-out half once more")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--write-hash", action="store_true", help="record the sources in HASH")
    return parser.parse_args()


def count() -> None:
    """Print how many pairs each half has."""
    for half in HALVES:
        listed = pairs(half)
        sections = Counter(pair.section for pair in listed)
        print(f"{half}: {len(listed)} pairs, {dict(sections)}")
        for field in ("kind", "change", "precision", "mode"):
            for section in sections:
                counts = Counter(getattr(p, field) for p in listed if p.section == section)
                print(f"  {section} by {field} ({len(counts)}): {dict(counts)}")


def refusal(options: argparse.Namespace) -> str | None:
    """Return why the run must not start; None if it may."""
    if options.json.exists() and not options.resume:
        return f"{options.json} exists: name another file, or go on with --resume"
    if options.half != "held-out" or options.generate:
        return None
    if source_digest() != HASH.read_text().strip():
        return "the sources are not those that HASH records"
    if earlier_runs() and not (options.again or options.resume):
        return "the held-out half has been run: --again runs it once more and marks the tables"
    return None


def selection(options: argparse.Namespace) -> list[Pair]:
    """Return the pairs that the options ask for."""
    listed = pairs(options.half, options.seed)
    if options.section:
        listed = [pair for pair in listed if pair.section == options.section]
    return evenly(listed, options.limit)


def header_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the first line of the file says about the run."""
    again = options.half == "held-out" and bool(earlier_runs()) and not options.resume
    return {
        "half": options.half,
        "hash": source_digest(),
        "seed": options.seed,
        "limit": options.limit,
        "section": options.section,
        "again": again,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": machine(),
    }


def main() -> None:
    """Do what the command line asks for."""
    options = arguments()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    print(f"sources {source_digest()}")
    if options.write_hash:
        HASH.write_text(source_digest() + "\n")
    elif options.list:
        count()
    elif options.tables:
        show(*read(options.tables))
    elif options.half and options.json:
        execute(options)
    else:
        sys.exit("nothing to do: --list, --tables OUT, or --half HALF --json OUT")


def execute(options: argparse.Namespace) -> None:
    """Run the pairs and print the tables."""
    reason = refusal(options)
    if reason is not None:
        sys.exit(reason)
    listed, header = selection(options), header_of(options)
    if options.half == "held-out" and not options.generate and not options.resume:
        note_run(header)
    spent: list[float] = []
    for line in run(listed, options.json, header, options.smollm2, ask=not options.generate):
        spent.append(sum(line.get("seconds", {}).values()))
        if len(spent) in (10, 50) or len(spent) % 100 == 0:
            mean = sum(spent) / len(spent)
            left = mean * (len(listed) - len(spent)) / 60
            print(f"{len(spent)} of {len(listed)}: {mean:.2f} CPU s per pair, {left:.0f} min left")
    show(*read(options.json))


if __name__ == "__main__":
    main()
