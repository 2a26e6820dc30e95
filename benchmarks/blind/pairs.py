"""The pairs of runs of each half: which change, on which model, in which precision, seen how.

section    pairs
sound      every sound change on every kind, with the model and from traces
faulty     every fault on half of the kinds (all that have what it needs): float32 and bf16 with the
           model, 8 or 4 bits with the model, one from traces, one from traces of unknown format
stress     spikes, t noise and outlier channels, 200 of each

mode       what `diff` is given
model      the model in float32 and what B recorded, and the format
traces     what A and B recorded, and the format
unknown    what A and B recorded
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

from benchmarks.blind.changes import Change
from benchmarks.blind.faults import FAULTS
from benchmarks.blind.models import ModelKind, kind_named
from benchmarks.blind.sound import SOUND, STRESS
from benchmarks.blind.texts import Half

Section = Literal["sound", "faulty", "stress"]
Mode = Literal["model", "traces", "unknown"]

SPLIT = Path(__file__).with_name("split.json")
MODES: tuple[Mode, ...] = ("model", "traces", "unknown")
STRESSES = 200
"""Pairs of each change of the section "stress"."""


@dataclass(frozen=True)
class Pair:
    """One pair of runs.

    Attributes:
        half: the half of the split.
        section: whether B is sound, faulty, or sound under stress.
        change: name of what differs.
        kind: name of the model kind.
        precision: name of B's precision.
        mode: what `diff` is given.
        weights: seed of the model's weights.
        draws: seed of what the change draws, the same in every precision and mode.
        text: seed of the documents.
    """

    half: Half
    section: Section
    change: str
    kind: str
    precision: str
    mode: Mode
    weights: int
    draws: int
    text: int


@cache
def split() -> dict[str, Any]:
    """Return the committed split."""
    return json.loads(SPLIT.read_text())


@cache
def changes() -> dict[tuple[str, str], Change]:
    """Return every change by section and name."""
    sections = {"sound": SOUND, "faulty": FAULTS, "stress": STRESS}
    return {(section, x.name): x for section, group in sections.items() for x in group}


def pairs(half: Half, seed: int = 0) -> list[Pair]:
    """Return all pairs of a half, models together so that each is built once.

    Args:
        half: which half.
        seed: another number gives other texts and draws.
    """
    listed = [*_sound(half, seed), *_faulty(half, seed), *_stress(half, seed)]
    order = {name: index for index, name in enumerate(split()[half]["kinds"])}
    return sorted(listed, key=lambda pair: (order[pair.kind], pair.weights))


def _kinds(half: Half) -> list[ModelKind]:
    return [kind_named(name) for name in split()[half]["kinds"]]


def _sound(half: Half, seed: int) -> Iterator[Pair]:
    for i, kind in enumerate(_kinds(half)):
        for j, change in enumerate(SOUND):
            if not change.fits(kind.traits):
                continue
            for m, mode in enumerate(("model", MODES[1 + (i + j) % 2])):
                precision = change.precisions[(i + j + m) % len(change.precisions)]
                yield _pair(half, "sound", change, kind, precision, mode, seed)


def _faulty(half: Half, seed: int) -> Iterator[Pair]:
    names = split()[half]["faults"]
    faults = [fault for fault in FAULTS if fault.name in names]
    for j, fault in enumerate(faults):
        for i, kind in enumerate(_kinds(half)):
            if fault.fits(kind.traits) and (fault.needs or (i + j) % 2 == 0):
                for precision, mode in _seen(kind, i // 2 + j):
                    yield _pair(half, "faulty", fault, kind, precision, mode, seed)


def _seen(kind: ModelKind, turn: int) -> Iterator[tuple[str, Mode]]:
    """Precisions and modes of one fault on one kind."""
    few_bits = "fp16" if "outliers" in kind.traits else ("int8", "int4")[turn % 2]
    wide, narrow = ("float32", "bf16") if turn % 2 else ("bf16", "float32")
    yield "float32", "model"
    yield "bf16", "model"
    yield few_bits, "model"
    yield wide, "traces"
    yield narrow, "unknown"


def _stress(half: Half, seed: int) -> Iterator[Pair]:
    kinds = [kind for kind in _kinds(half) if kind.family != "smollm2"]
    for change in STRESS:
        for turn, kind in enumerate(islice(cycle(kinds), STRESSES)):
            mode = MODES[turn // len(kinds) % 3]
            precision = change.precisions[0]
            yield _pair(half, "stress", change, kind, precision, mode, seed, turn)


def _pair(
    half: Half,
    section: Section,
    change: Change,
    kind: ModelKind,
    precision: str,
    mode: Mode,
    seed: int,
    turn: int = 0,
) -> Pair:
    first = split()[half]["seed"] + 1_000_000 * seed
    draws = first + _digest(section, change.name, kind.name, turn) % 1_000_000
    text = first + _digest(section, change.name, kind.name, turn, precision, mode) % 1_000_000
    seeds = split()[half]["weight_seeds"]
    weights = seeds[0] if kind.trained or not kind.sizes else seeds[draws % len(seeds)]
    return Pair(half, section, change.name, kind.name, precision, mode, weights, draws, text)


def _digest(*facts: object) -> int:
    return zlib.crc32("|".join(map(str, facts)).encode())


def evenly(listed: list[Pair], limit: int | None) -> list[Pair]:
    """Return at most `limit` pairs, evenly spread over the list."""
    if limit is None or limit >= len(listed):
        return listed
    return [listed[index * len(listed) // limit] for index in range(limit)]
