"""Ties or a bug: how often `diff` raises an alarm on sound runs, and what it finds of planted bugs.

    python -m benchmarks.attribution                    # the study: sizes and power
    python -m benchmarks.attribution --calibrate        # effects of sound runs of other families
    python -m benchmarks.attribution --cost OLD         # CPU time against the package in OLD/src

Limits were set on five families that the study does not show, and on other windows of the text.
Sound pairs: the model in the box and five families, several seeds, 1,024 to 16,384 tokens. Bugs:
4,096 tokens, in float32 and in bf16. Each pair is judged three times: from the traces alone, from
the traces with the format that is expected, and with the model at hand, which runs five times more
in that format.
"""

import argparse
import collections
import copy
import itertools
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.planted import BUGS, CALIBRATION, SHOWN, SOUND, broken, model_of, sequences, sound
from tieline.analysis.alignment import align
from tieline.analysis.attribution import attribute_causes
from tieline.analysis.compared_sides import ModelSide, trace_model
from tieline.analysis.comparison import ComparedRuns
from tieline.analysis.noise_shapes import find_noise_patterns
from tieline.analysis.noise_size import (
    ExpectedFormat,
    allowed_noise,
    judge_noise_size,
    noise_tolerance,
)
from tieline.analysis.sound_runs import sound_runs
from tieline.core.errors import TraceError
from tieline.core.numerics import one_thread
from tieline.core.statistics import binomial_band

LENGTHS = (128, 256, 512)
SIZES = (1024, 2048, 4096, 2048, 1024, 4096, 2048, 16384)
WAYS = ("traces", "traces, --expect", "model, --expect")


class Case:
    """A model with its clean run, and its runs in a format, each made once."""

    def __init__(self, name, seed, tokens):
        """Run a model on so many tokens."""
        self.name, self.seed = name, seed
        self.model = model_of(name, seed)
        self.documents = sequences(tokens, LENGTHS[seed % 3], seed)
        self.clean = trace_model(ModelSide(self.model), self.documents)
        self._references = {}

    def references(self, name):
        """Sound runs of the model in a format, aligned with the clean run."""
        if name not in self._references:
            runs = sound_runs(
                [ModelSide(self.model)],
                [self.clean],
                self.documents,
                ExpectedFormat(name, "as asked"),
                8,
            )
            self._references[name] = [align(self.clean, run, partial=True) for run in runs]
        return self._references[name]

    def judged(self, trace, expected):
        """What is concluded in each of the ways; the reason where the runs are refused."""
        try:
            aligned = align(self.clean, trace)
        except TraceError as problem:
            return dict.fromkeys(WAYS, str(problem))
        plain = ComparedRuns(aligned)
        causes_by_way = {"traces": causes(plain, None)}
        if expected is not None:
            causes_by_way["traces, --expect"] = causes(plain, expected)
            tolerance = noise_tolerance(ExpectedFormat(expected, "as asked"))
            better = ComparedRuns(
                aligned, references=self.references(expected), tolerance=tolerance
            )
            causes_by_way["model, --expect"] = causes(better, expected)
        return causes_by_way


def causes(compared, expected):
    """The conclusion from compared layers."""
    aligned = compared.aligned
    expected_format = None if expected is None else ExpectedFormat(expected, "as asked")
    evidence = (
        aligned.alignment,
        aligned.unranked,
        compared.layers,
        compared.shapes,
        compared.smaller_gaps,
    )
    return attribute_causes(*evidence, expected_format, excess=compared.excess)


def kinds(causes):
    """What a conclusion names: kinds of patterns, "size", "flips", "choice" or "k"."""
    if isinstance(causes, str):
        return {"k"} if "different k" in causes else {"refused"}
    if not causes.alarm:
        return set()
    named = {pattern.kind for pattern in causes.patterns}
    labels = {"noise larger than expected": "size", "flips wider than their noise": "flips"}
    labels["choice against scores"] = "choice"
    return named or {labels.get(causes.conclusion, causes.conclusion)}


def right(causes, bug, layer):
    """Whether the words name the bug and, where it sits in one layer, that layer."""
    named = kinds(causes) & BUGS[bug]
    if isinstance(causes, str) or "layer" not in BUGS[bug] or "permutation" in named:
        return bool(named)
    layers = [pattern.layer for pattern in causes.patterns if pattern.kind == "layer"]
    if causes.conclusion == "noise larger than expected":
        return f"{layer!r}" in causes.size.text.partition(";")[0]
    return layer in layers


def study_sizes(seeds):
    """Print the alarms of sound pairs."""
    alarms, totals, tallies = collections.Counter(), collections.Counter(), collections.Counter()
    for name, seed in seeds:
        case = Case(name, seed, SIZES[seed % len(SIZES)])
        for how, expected in SOUND.items():
            trace = sound(case.model, case.documents, how, seed)
            for way, causes in case.judged(trace, expected).items():
                totals[how, way] += 1
                alarms[how, way] += bool(kinds(causes))
                if kinds(causes):
                    tallies[way, name, seed, how, tuple(sorted(kinds(causes)))] += 1
        print(f"... {name} {seed}: {sum(totals.values())} judged", file=sys.stderr, flush=True)
    print("\n## Sound pairs: alarms\n")
    print(f"| sound pair | {' | '.join(WAYS)} |\n|---|---|---|---|")
    for how in [*SOUND, None]:
        cells = [_alarm_cell(alarms, totals, how, way) for way in WAYS]
        print(f"| {how or 'all'} | {' | '.join(cells)} |")
    for key in tallies:
        print("alarm:", *key)


def _alarm_cell(alarms, totals, how, way):
    keys = [key for key in totals if key[1] == way and how in (None, key[0])]
    count, total = sum(alarms[key] for key in keys), sum(totals[key] for key in keys)
    if total == 0:
        return ""
    band = binomial_band(torch.tensor(count), total)
    rate = f"{count} of {total}"
    return rate if how else f"{rate}: {100 * count / total:.1f} % (to {100 * band.high:.1f} %)"


def study_power(seeds):
    """Print what is found of planted bugs."""
    outcomes = collections.defaultdict(list)
    for name, seed in seeds:
        case = Case(name, seed, 4096)
        for bug in BUGS:
            for precision in (None, "bf16"):
                faulty = broken(copy.deepcopy(case.model), case.documents, bug, precision, seed)
                if faulty is None:
                    continue
                trace, layer = faulty
                for way, causes in case.judged(trace, precision or "fp32").items():
                    row = (bool(kinds(causes)), right(causes, bug, layer))
                    outcomes[bug, precision or "fp32", way].append(row)
                    if not all(row):
                        miss = (name, seed, bug, precision, way, sorted(kinds(causes)))
                        print("miss:", *miss, file=sys.stderr, flush=True)
        print(f"... {name} {seed}", file=sys.stderr, flush=True)
    print("\n## Planted bugs: found, and named rightly\n")
    print(f"| bug | run | {' | '.join(WAYS)} |\n|---|---|---|---|---|")
    for bug in [*BUGS, None]:
        for precision in ("fp32", "bf16"):
            cells = [_power_cell(outcomes, bug, precision, way) for way in WAYS]
            print(f"| {bug or 'all'} | {precision} | {' | '.join(cells)} |")


def _power_cell(outcomes, bug, precision, way):
    rows = [
        row
        for (fault, run, how), detected in outcomes.items()
        if bug in (None, fault) and (run, how) == (precision, way)
        for row in detected
    ]
    detected, named = (sum(column) for column in zip(*rows, strict=True)) if rows else (0, 0)
    shares = (
        f" ({100 * detected / len(rows):.0f} %, {100 * named / len(rows):.0f} %)" if rows else ""
    )
    return f"{detected}, {named} of {len(rows)}" + ("" if bug else shares)


def calibrate(seeds):
    """Print the largest effects of sound pairs of the families that limits are set on."""
    effects = collections.defaultdict(list)
    for name, seed in seeds:
        case = Case(name, seed, SIZES[seed % 3])
        for how, expected in SOUND.items():
            trace = sound(case.model, case.documents, how, seed)
            aligned = align(case.clean, trace)
            for effect, size in _effects(ComparedRuns(aligned), expected):
                effects[effect].append((round(size, 3), name, seed, how))
        print(f"... {name} {seed}", file=sys.stderr, flush=True)
    for effect, sizes in sorted(effects.items()):
        sizes.sort(key=lambda row: -row[0])
        print(f"{effect:24s} n={len(sizes):4d} ", *sizes[:4])


def _effects(compared, expected):
    """Every effect of a comparison that has a limit, by name."""
    shapes = compared.shapes
    loud = [x for x in shapes if x.relative]
    for shape in loud[:1]:
        if shape.rise:
            yield "positions", abs(shape.rise[0])
        if shape.document:
            yield "document", shape.document.excess
    for shape in loud:
        for kind in ("expert", "row"):
            if getattr(shape, kind):
                yield kind, getattr(shape, kind).excess
        if shape.offset is not None:
            yield "offset", shape.offset
        if shape.lag:
            yield "lag", shape.lag[1]
    sizes = [x.relative or np.nan for x in shapes]
    for earlier, other in itertools.pairwise(sizes):
        yield "spike", np.nan_to_num(earlier / other)
    if expected is not None and shapes[0].relative:
        yield "c of the first layer", 6 * shapes[0].relative / allowed_noise(expected, 0)
        ratios = [(x.relative or 0) / allowed_noise(expected, i) for i, x in enumerate(shapes)]
        yield "size over limit", max(ratios)
    attributed = [x.attribution for x in compared.layers if x.attribution]
    first = sum(x.explained + x.unexplained for x in attributed)
    yield "unexplained share", sum(x.unexplained for x in attributed) / max(first, 1)
    yield "patterns", float(bool(find_noise_patterns(shapes)))
    yield "sizes", float(judge_noise_size(shapes, None).answer == "no")


TIMED = """
import sys, time
from tieline.analysis.diff import diff
from tieline.trace import load_trace
a, b = (load_trace(path) for path in sys.argv[1:3])
diff(a, b)
for line in sys.stdin:
    started = time.process_time()
    diff(a, b)
    print(time.process_time() - started, flush=True)
"""


def cost(old, folder, rounds=15):
    """Print the CPU time of `diff` on saved traces over that of the package in `old`, in turn."""
    from tieline.trace import save_trace

    case = Case("demo", 2, 16384)
    save_trace(case.clean, folder / "a")
    save_trace(sound(case.model, case.documents, "bf16", 2), folder / "b")
    script = folder / "timed.py"
    script.write_text(TIMED)
    here = Path(__file__).parents[1]
    runs = [_timed(path / "src", script, folder) for path in (Path(old), here)]
    times = [[_one_round(run) for run in runs] for _ in range(rounds)]
    for run in runs:
        run.kill()
    ratios = sorted(new / before for before, new in times)
    low, middle, high = (ratios[int(q * (rounds - 1))] for q in (0.1, 0.5, 0.9))
    print(f"CPU time of diff on 16,384 tokens: {middle:.2f} x ({low:.2f} to {high:.2f}) the old")


def _timed(source, script, folder):
    command = [sys.executable, str(script), str(folder / "a"), str(folder / "b")]
    pipe = subprocess.PIPE
    environment = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def _one_round(run):
    run.stdin.write("go\n")
    run.stdin.flush()
    return float(run.stdout.readline())


def main():
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--cost", metavar="OLD", help="checkout of an earlier version")
    parser.add_argument("--only", choices=["sizes", "power"])
    parser.add_argument("--seeds", type=int, default=7, help="seeds per family")
    parser.add_argument("--cache", type=Path, default=Path("attribution-cache"))
    options = parser.parse_args()
    started = time.process_time()
    with one_thread():
        if options.cost:
            options.cache.mkdir(parents=True, exist_ok=True)
            cost(options.cost, options.cache)
        elif options.calibrate:
            calibrate([(n, 100 + s) for s in range(options.seeds) for n in ("demo", *CALIBRATION)])
        else:
            pairs = [(n, s) for s in range(1, options.seeds + 1) for n in ("demo", *SHOWN)]
            if options.only != "power":
                study_sizes(pairs)
            if options.only != "sizes":
                study_power(pairs[: 6 * 4])
    print(f"{time.process_time() - started:.0f} s of CPU", file=sys.stderr)


if __name__ == "__main__":
    main()
