"""False alarms and power of `tieline.check` on files of routes, development and held out.

    python benchmarks/check_corpus.py dev|held-out [--each 20] [--seed 0] [--json FILE]

Kinds of routes and kinds of faults are split by name, and seeds by half: the held-out half shares
neither a kind nor a seed with the one that thresholds were chosen on. A sound file that is called
unsound is a false alarm; a faulty one is found if an unsound or suspicious finding has its kind.
Synthetic documents differ in nearly all tokens.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tieline as tl
from tieline.trace.readers import Routes

FIRST_SEED = {"dev": 0, "held-out": 10_000}


class Run(NamedTuple):
    """Routes of a sound run: ids (rows, layers, k), weights, tokens and documents."""

    ids: np.ndarray
    weights: np.ndarray
    tokens: np.ndarray
    documents: np.ndarray
    experts: int


class Shape(NamedTuple):
    """What a run looks like: sizes, how much the token decides, how much the row before does."""

    layers: int
    k: int
    experts: int
    documents: int
    length: int
    token: float
    sticky: float


SHAPES = {
    "dev": {
        "one layer, top-4 of 60": Shape(1, 4, 60, 6, 80, 1.5, 0.0),
        "four layers, top-2 of 16": Shape(4, 2, 16, 6, 60, 1.5, 0.0),
        "one layer, top-1 of 8": Shape(1, 1, 8, 6, 120, 1.0, 0.5),
    },
    "held-out": {
        "one layer, top-8 of 64": Shape(1, 8, 64, 6, 70, 1.2, 0.3),
        "two layers, top-1 of 16": Shape(2, 1, 16, 8, 100, 2.0, 0.0),
        "eight layers, top-6 of 128": Shape(8, 6, 128, 5, 48, 1.0, 0.2),
    },
}


def sound_run(shape: Shape, rng: np.random.Generator) -> Run:
    """Choices by token, the row before, and noise."""
    rows, vocabulary = shape.documents * shape.length, 200
    tokens = rng.zipf(1.3, rows) % vocabulary
    loads = 0.5 * rng.normal(size=(shape.layers, 1, shape.experts))
    scores = shape.token * rng.normal(size=(shape.layers, vocabulary, shape.experts))[:, tokens]
    noise = rng.normal(size=scores.shape)
    for row in range(1, rows):
        noise[:, row] = shape.sticky * noise[:, row - 1] + noise[:, row]
    scores = (scores + noise + loads).transpose(1, 0, 2)
    ids = np.argsort(-scores, axis=2)[..., : shape.k]
    chances = np.exp(scores) / np.exp(scores).sum(2, keepdims=True)
    weights = np.take_along_axis(chances, ids, 2)
    documents = np.repeat(np.arange(shape.documents), shape.length)
    return Run(ids, weights, tokens, documents, shape.experts)


def positions(run: Run) -> np.ndarray:
    """Position of each row in its document."""
    begins = np.flatnonzero(np.diff(run.documents, prepend=-1))
    return np.arange(len(run.ids)) - np.repeat(begins, np.diff(begins, append=len(run.ids)))


def other_precision(run: Run, rng: np.random.Generator) -> np.ndarray:
    """The same run with 5 % of its last choices changed."""
    ids = run.ids.copy()
    for row, layer in np.argwhere(rng.random(ids.shape[:2]) < 0.05):
        ids[row, layer, -1] = rng.choice(np.setdiff1d(np.arange(run.experts), ids[row, layer]))
    return ids


def in_front(run: Run, rows: int, weights: Any) -> Run:
    """The run after rows of one choice."""
    dummy = np.broadcast_to(run.ids[:1], (rows, *run.ids.shape[1:]))
    equal = np.broadcast_to(weights, (rows, *run.weights.shape[1:]))
    return run._replace(
        ids=np.concatenate([dummy, run.ids]), weights=np.concatenate([equal, run.weights])
    )


def exchanged(run: Run, rng: np.random.Generator) -> np.ndarray:
    """Rows of two documents change places."""
    ids = other_precision(run, rng)
    first, second = rng.choice(np.unique(run.documents), 2, replace=False)
    swapped = ids.copy()
    swapped[run.documents == first] = ids[run.documents == second]
    swapped[run.documents == second] = ids[run.documents == first]
    return swapped


def shifted(run: Run, rng: np.random.Generator, count: int, shift: int) -> np.ndarray:
    """Rows of some documents are those of other tokens."""
    ids = other_precision(run, rng)
    for number in rng.choice(np.unique(run.documents), count, replace=False):
        rows = run.documents == number
        ids[rows] = np.roll(ids[rows], shift, axis=0)
    return ids


Fault = tuple[str, Callable[[Run, np.random.Generator], Routes | None], bool]


def plain(run: Run, ids: np.ndarray | None = None) -> Routes:
    """Routes with documents and positions, of these ids or of the run's own."""
    ids = run.ids if ids is None else ids
    return Routes(ids, "array", "a", None, run.documents, positions(run), n_experts=run.experts)


def bare(run: Run) -> Routes:
    """Routes with weights, without documents."""
    return Routes(run.ids, "array", "a", weights=run.weights, n_experts=run.experts)


def copied(run: Run, rng: np.random.Generator) -> Routes | None:
    """One layer has the rows of another."""
    if run.ids.shape[1] < 2:
        return None
    ids = run.ids.copy()
    ids[:, -1] = ids[:, 0]
    return plain(run, ids)


def stale_layer(run: Run, rng: np.random.Generator) -> Routes | None:
    """One layer repeats a choice in a third of the rows."""
    if run.ids.shape[1] < 2:
        return None
    ids, third = run.ids.copy(), len(run.ids) // 3
    ids[third : 2 * third, 0] = ids[third, 0]
    return plain(run, ids)


def tied(run: Run, rows: int) -> Routes | None:
    """Exact ties of all experts in front."""
    return None if run.ids.shape[2] == 1 else bare(in_front(run, rows, 1 / run.experts))


FAULTS: dict[str, dict[str, Fault]] = {
    "dev": {
        "warm-up of 300 rows": (
            "repeated-rows",
            lambda run, rng: bare(in_front(run, 300, run.weights[:1])),
            False,
        ),
        "exact ties, 64 rows": ("repeated-rows", lambda run, rng: tied(run, 64), False),
        "2 requests exchanged": (
            "token-shift",
            lambda run, rng: plain(run, exchanged(run, rng)),
            True,
        ),
        "1 request shifted by a row": (
            "token-shift",
            lambda run, rng: plain(run, shifted(run, rng, 1, 1)),
            True,
        ),
        "a layer copied": ("copied-layers", copied, False),
    },
    "held-out": {
        "warm-up of 2,000 rows, ids alone": (
            "repeated-rows",
            lambda run, rng: plain_ids(in_front(run, 2000, run.weights[:1]).ids, run),
            False,
        ),
        "exact ties, 20 rows": ("repeated-rows", lambda run, rng: tied(run, 20), False),
        "3 requests shifted by -2 rows": (
            "token-shift",
            lambda run, rng: plain(run, shifted(run, rng, 3, -2)),
            True,
        ),
        "1 request of another text": (
            "token-shift",
            lambda run, rng: plain(run, foreign(run, rng)),
            True,
        ),
        "a layer stale in a third of the rows": ("repeated-rows", stale_layer, False),
    },
}


def plain_ids(ids: np.ndarray, run: Run) -> Routes:
    """Routes of ids alone."""
    return Routes(ids, "array", "a", n_experts=run.experts)


def foreign(run: Run, rng: np.random.Generator) -> np.ndarray:
    """Rows of a document are those of another text."""
    ids = other_precision(run, rng)
    rows = np.flatnonzero(run.documents == rng.choice(np.unique(run.documents)))
    ids[rows] = np.argsort(rng.random((len(rows), ids.shape[1], run.experts)), axis=2)[
        ..., : ids.shape[2]
    ]
    return ids


def study(half: str, each: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows of the table: sound files, then faults, by kind; each file with its own seed."""
    table = []
    for name, shape in SHAPES[half].items():
        runs = []
        for seed in range(each):
            rng = np.random.default_rng(FIRST_SEED[half] + first + seed)
            runs.append((sound_run(shape, rng), rng))
        alone = [tl.check(bare(run)) for run, _ in runs]
        beside = [
            tl.check(plain(run, other_precision(run, rng)), against=plain(run)) for run, rng in runs
        ]
        alarms = sum(not result.sound for result in (*alone, *beside))
        table.append({"routes": name, "fault": "none", "files": 2 * each, "unsound": alarms})
        for fault, (kind, make, reference) in FAULTS[half].items():
            row = {"routes": name, "fault": fault, "files": 0, "found": 0, "unsound": 0}
            for run, rng in runs:
                routes = make(run, rng)
                if routes is None:
                    continue
                result = tl.check(routes, **({"against": plain(run)} if reference else {}))
                kinds = {x.severity: x.kind for x in result.findings if x.kind == kind}
                row["files"] += 1
                row["found"] += bool({"unsound", "suspicious"} & set(kinds))
                row["unsound"] += "unsound" in kinds
            if row["files"]:
                table.append(row)
    return table


def main() -> None:
    """Print the table of one half."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("half", choices=list(FIRST_SEED))
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="another number: other files")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    table = study(given.half, given.each, 1_000_000 * given.seed)
    for row in table:
        finding = row.get("found", "")
        line = (
            f"| {row['routes']} | {row['fault']} | {row['files']} | {finding} | {row['unsound']} |"
        )
        sys.stdout.write(line + "\n")
    if given.json:
        given.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
