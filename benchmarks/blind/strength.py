"""How strong a fault is, from flip counts alone, before `diff` is asked.

Over five texts, flips against float32 of the faulty run (f) and of a plain run in the same
precision (p) are counted in every layer. In the layer with the largest Σ f / Σ p, the upper 95 %
limit of the mean of log((f + ½)/(p + ½)) over texts (Student, one-sided) must be below log 1.2 for
the fault to be exempt. In float32, where plain runs hardly flip, a fault is exempt only if it flips
no token.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import stats

from benchmarks.blind.changes import Change, reference_case, run_changed, run_reference
from benchmarks.blind.models import kind_named, subject
from benchmarks.blind.pairs import Pair, changes
from benchmarks.blind.precisions import PRECISIONS
from benchmarks.blind.texts import Half, documents
from tieline.trace.record import RoutingTrace

TEXTS = 5
LIMIT = 1.2
LENGTH = 128
"""Tokens per document."""


@dataclass(frozen=True)
class Strength:
    """Flips of a fault beside those of its precision.

    Attributes:
        flips: flips of the faulty run, by text and layer.
        plain: flips of the plain run, by text and layer.
        layer: the layer with the largest ratio.
        ratio: geometric mean of the ratio in that layer.
        upper: its upper 95 % limit.
        exempt: whether the fault is too weak to be asked for.
    """

    flips: tuple[tuple[int, ...], ...]
    plain: tuple[tuple[int, ...], ...]
    layer: int
    ratio: float
    upper: float
    exempt: bool


def flips(a: RoutingTrace, b: RoutingTrace) -> tuple[int, ...]:
    """Return the number of tokens with another set of experts, by layer."""
    counts = []
    for ours, other in zip(a.layers, b.layers, strict=True):
        sets = [x.experts[:, : x.facts.k].long().sort(dim=1).values for x in (ours, other)]
        counts.append(int((sets[0] != sets[1]).any(dim=1).sum()))
    return tuple(counts)


@cache
def strength(
    half: Half,
    section: str,
    name: str,
    kind: str,
    precision: str,
    weights: int,
    draws: int,
    folder: str | None = None,
) -> Strength:
    """Measure a fault on five texts; see `Pair` for the arguments."""
    change = changes()[section, name]
    plain = Change("plain", both=change.both)
    case = (half, kind, precision, weights, draws, folder)
    faulty = [_flips_on(change, *case, text) for text in range(TEXTS)]
    sound = [_plain_flips(plain, *case, text) for text in range(TEXTS)]
    return judged(tuple(faulty), tuple(sound), precision == "float32")


def strength_of(pair: Pair, folder: str | None = None) -> Strength:
    """Measure the fault of a pair."""
    facts = (pair.half, pair.section, pair.change, pair.kind, pair.precision)
    return strength(*facts, pair.weights, pair.draws, folder)


def judged(
    faulty: tuple[tuple[int, ...], ...], plain: tuple[tuple[int, ...], ...], exact: bool
) -> Strength:
    """Apply the rule to counts (texts, layers).

    Args:
        faulty: flips of the faulty run.
        plain: flips of the plain run.
        exact: whether the runs are in float32.
    """
    f, p = np.array(faulty), np.array(plain)
    layer = int(((f.sum(0) + 0.5) / (p.sum(0) + 0.5)).argmax())
    logs = np.log((f[:, layer] + 0.5) / (p[:, layer] + 0.5))
    error = logs.std(ddof=1) / np.sqrt(len(logs))
    upper = float(np.exp(logs.mean() + stats.t.ppf(0.95, len(logs) - 1) * error))
    exempt = not f.any() if exact else upper < LIMIT
    return Strength(faulty, plain, layer, float(np.exp(logs.mean())), upper, bool(exempt))


def text_of(kind: str, tokenizer: object, half: Half, seed: int):
    """Return the documents of a pair: 16 of 128 tokens, or 4 for the SmolLM2 mixture."""
    count = 4 if kind_named(kind).family == "smollm2" else 16
    return documents(tokenizer, half, count, LENGTH, seed)


def _flips_on(
    change: Change,
    half: Half,
    kind: str,
    precision: str,
    weights: int,
    draws: int,
    folder: str | None,
    text: int,
) -> tuple[int, ...]:
    model, tokenizer = subject(kind, weights, folder)
    case = reference_case(change, model, text_of(kind, tokenizer, half, 500 + text), draws)
    case.reference = run_reference(case)
    return flips(case.reference, run_changed(change, PRECISIONS[precision], case))


@cache
def _shared_plain(
    half: Half, kind: str, precision: str, weights: int, folder: str | None, text: int
) -> tuple[int, ...]:
    return _flips_on(Change("plain"), half, kind, precision, weights, 0, folder, text)


def _plain_flips(
    plain: Change,
    half: Half,
    kind: str,
    precision: str,
    weights: int,
    draws: int,
    folder: str | None,
    text: int,
) -> tuple[int, ...]:
    if plain == Change("plain"):  # what both runs share is nothing: one run serves all faults
        return _shared_plain(half, kind, precision, weights, folder, text)
    return _flips_on(plain, half, kind, precision, weights, draws, folder, text)
