"""How well `tieline.check` tells sound files of routes from faulty ones.

    python benchmarks/routes_check.py [--sound 1000] [--each 12] [--json FILE]

Sound: synthetic routes of random size and load, whose choices follow from the token or from
nothing, and captures of the demo model on texts with repeated tokens and documents. Faulty: the
same with one fault of the table, at several severities, each on `each` fresh files. A fault counts
as found if a finding of its kind is unsound or suspicious, its cause as named if it is the gravest
finding; a sound file counts as a false alarm if it is called unsound. Also (`--large`): time and
memory of 10^6 tokens x 48 layers x 8 ids (uint8, .npy), read and checked.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import tieline as tl
from tieline.models.demo import demo_text, load_demo_model, load_demo_tokenizer
from tieline.run.forward import forward

Routes = np.ndarray


class File(NamedTuple):
    """Routes of a sound run, with their tokens and the number of experts."""

    ids: Routes
    tokens: np.ndarray
    experts: int


def synthetic(rng: np.random.Generator) -> File:
    """Routes of random size and load; the choice follows from token, context and noise."""
    experts = int(rng.choice([8, 16, 60, 64, 128, 256]))
    k = int(rng.integers(1, min(8, experts // 4) + 1))
    layers = int(rng.integers(2, 13))
    rows = int(rng.choice([48, 130, 400, 1000, 3000]))
    vocabulary = int(rng.integers(20, 2000))
    zipf = 1 / np.arange(1, vocabulary + 1) ** rng.uniform(0.5, 1.2)
    tokens = rng.choice(vocabulary, rows, p=zipf / zipf.sum())
    load = rng.normal(0, rng.uniform(0, 1.5), (layers, experts))
    scale = rng.uniform(0, 2)
    ids = np.empty((rows, layers, k), np.int64)
    for layer in range(layers):
        router_scores = rng.normal(size=(vocabulary, experts)) * scale * 0.9**layer
        scores = router_scores[tokens] + rng.normal(size=(rows, experts)) + load[layer]
        ids[:, layer] = np.argsort(-scores, axis=1)[:, :k]
    return File(ids.astype(np.uint8), tokens, experts)


def captures(rng: np.random.Generator, count: int) -> Iterator[File]:
    """Captures of the demo model: plain text, repeated tokens, phrases and documents."""
    model, tokenizer = load_demo_model(), load_demo_tokenizer()
    text = torch.tensor(tokenizer(demo_text())["input_ids"])
    for number in range(count):
        start = int(rng.integers(0, len(text) - 600))
        ids = text[start : start + int(rng.integers(64, 512))].clone()
        if number % 4 == 1:  # a run of one token inside of the text
            first = int(rng.integers(0, len(ids) // 2))
            ids[first : first + int(rng.integers(8, len(ids) // 4))] = ids[first]
        if number % 4 == 2:  # a phrase that comes again and again
            phrase = ids[: int(rng.integers(3, 20))]
            ids = phrase.repeat(len(ids) // len(phrase) + 1)[: len(ids)]
        rows = 1 + 3 * (number % 4 == 3)  # four copies of one document
        with torch.no_grad(), tl.capture(model, distances=False, epsilons=()) as recorder:
            forward(model, ids.expand(rows, -1))
        trace = recorder.trace()
        routes = np.stack([x.experts[:, : x.facts.k].numpy() for x in trace.layers], 1)
        yield File(routes, trace.tokens.numpy(), trace.layers[0].facts.n_experts)


class Fault(NamedTuple):
    """A fault: the kind that must be found, and what it makes of a file: (ids, options)."""

    name: str
    kind: str
    make: Callable[[File, np.random.Generator], tuple[Routes, dict[str, Any]] | None]


def zero_rows(share: float, start: str) -> Callable[..., Any]:
    """Rows that nothing was written to."""

    def make(file: File, rng: np.random.Generator) -> Any:
        ids, count = file.ids.copy(), max(2, int(share * len(file.ids)))
        if ids.shape[2] == 1:
            return None
        first = {"head": 0, "middle": len(ids) // 3, "tail": len(ids) - count}[start]
        ids[first : first + count] = 0
        return ids, {}

    return make


def stale(share: float, with_tokens: bool) -> Callable[..., Any]:
    """One row in all of a stretch."""

    def make(file: File, rng: np.random.Generator) -> Any:
        ids, count = file.ids.copy(), max(12, int(share * len(file.ids)))
        if ids.shape[1] * ids.shape[2] < 6 or count > 0.9 * len(ids):
            return None  # coincidences of so few ids are no rarity
        ids[len(ids) - count :] = ids[len(ids) - count]
        return ids, {"tokens": file.tokens} if with_tokens else {}

    return make


def twice(share: float) -> Callable[..., Any]:
    """Tokens with an expert twice."""

    def make(file: File, rng: np.random.Generator) -> Any:
        ids = file.ids.copy()
        if ids.shape[2] == 1:
            return None
        rows = rng.choice(len(ids), max(1, int(share * len(ids))), replace=False)
        layer = int(rng.integers(ids.shape[1]))
        ids[rows, layer, 1] = ids[rows, layer, 0]
        return ids, {}

    return make


def draft(kind: str) -> Callable[..., Any]:
    """Another model's choices in one layer."""

    def make(file: File, rng: np.random.Generator) -> Any:
        ids, experts = file.ids.astype(np.int32), file.experts
        layer, k = int(rng.integers(ids.shape[1])), ids.shape[2]
        size = experts * 4 if kind == "larger" else max(2 * k, experts // 8)
        if kind == "fewer" and (ids.shape[1] < 3 or experts < 60 or len(ids) * k < 12 * experts):
            return None
        scores = rng.random((len(ids), size))
        ids[:, layer] = np.argsort(scores, axis=1)[:, :k]
        return ids, {"n_experts": experts}

    return make


def physical(file: File, rng: np.random.Generator) -> Any:
    """Copies of loaded experts have numbers of their own."""
    ids = file.ids.astype(np.int32)
    extra = max(2, file.experts // 8)
    hot = np.argsort(-np.bincount(ids.ravel(), minlength=file.experts))[:extra]
    for slot, expert in enumerate(hot):
        chosen = (ids == expert) & (rng.random(ids.shape) < 0.5)
        ids[chosen] = file.experts + slot
    return ids, {"n_experts": file.experts}


def holes(file: File, rng: np.random.Generator) -> Any:
    """Some of a token's ids are -1."""
    ids = file.ids.astype(np.int32)
    if ids.shape[2] == 1:
        return None
    ids[rng.choice(len(ids), 5, replace=False), 0, -1] = -1
    return ids, {}


def constant(file: File, rng: np.random.Generator) -> Any:
    """One layer has one choice."""
    ids = file.ids.copy()
    layer = int(rng.integers(ids.shape[1]))
    ids[:, layer] = ids[0, layer]
    if not ids[0, layer].any():
        return None  # a layer of zeros is a dense one
    return ids, {}


def rows(change: int | float) -> Callable[..., Any]:
    """Fewer or more rows than tokens."""

    def make(file: File, rng: np.random.Generator) -> Any:
        count = int(change * len(file.ids)) if isinstance(change, float) else change
        if count < 0:
            return file.ids[-count:], {"tokens": file.tokens}
        return np.concatenate([file.ids, file.ids[:count]]), {"tokens": file.tokens}

    return make


def noisy(file: File, rng: np.random.Generator, share: float = 0.05) -> Routes:
    """The same run in another precision: some choices differ."""
    ids = file.ids.astype(np.int32)
    for layer in range(ids.shape[1]):
        for row in np.flatnonzero(rng.random(len(ids)) < share):
            free = np.setdiff1d(np.arange(file.experts), ids[row, layer])
            ids[row, layer, -1] = rng.choice(free)
    return ids


def against(change: Callable[[Routes, np.random.Generator], Routes]) -> Callable[..., Any]:
    """A fault that shows against a reference of the same tokens."""

    def make(file: File, rng: np.random.Generator) -> Any:
        if file.ids.shape[1] < 3 or len(file.ids) < 130 or lazy(file):
            return None
        if periodic(file):
            return None  # a text of repeated phrases looks the same when it is moved
        return change(noisy(file, rng), rng), {"against": file.ids, "n_experts": file.experts}

    return make


def periodic(file: File) -> bool:
    """Whether the routes repeat themselves after some rows."""
    lags = range(1, min(64, len(file.ids) // 2))
    return any(float((file.ids[lag:] == file.ids[:-lag]).all((1, 2)).mean()) > 0.25 for lag in lags)


def lazy(file: File) -> bool:
    """Whether half of all choices are one and the same, so that no place tells them apart."""
    shares = [
        np.unique(file.ids[:, layer], axis=0, return_counts=True)[1].max() / len(file.ids)
        for layer in range(file.ids.shape[1])
    ]
    return max(shares) > 0.25


def moved(lag: int) -> Callable[[Routes, np.random.Generator], Routes]:
    """Rows of other tokens."""
    return lambda ids, rng: np.roll(ids, lag, axis=0)


def restarted(ids: Routes, rng: np.random.Generator) -> Routes:
    """From one place on, the rows of the beginning."""
    first = len(ids) // 3
    return np.concatenate([ids[:first], ids[: len(ids) - first]])


def renumbered(ids: Routes, rng: np.random.Generator) -> Routes:
    """Other numbers for the experts of each layer."""
    size = int(ids.max()) + 1
    changed = ids.copy()
    for layer in range(ids.shape[1]):
        changed[:, layer] = rng.permutation(size)[ids[:, layer]]
    return changed


def told_shift(lag: int) -> Callable[..., Any]:
    """Rows of other tokens, told by the tokens alone."""

    def make(file: File, rng: np.random.Generator) -> Any:
        if len(file.ids) < 400 or dependence(file) < 0.15:
            return None
        ids = np.roll(file.ids, lag, axis=0)
        if dependence(file._replace(ids=ids)) > 0.4 * dependence(file):
            return None  # a text of repeated phrases looks the same when it is moved
        return ids, {"tokens": file.tokens}

    return make


def dependence(file: File) -> float:
    """How much more often equal tokens choose alike in the first layer than others."""
    ids = np.sort(file.ids[:, 0], axis=1)
    codes = np.unique(ids, axis=0, return_inverse=True)[1].ravel()
    chance = float(((np.bincount(codes) / len(codes)) ** 2).sum())
    alike, total = 0.0, 0
    for token in np.unique(file.tokens):
        counts = np.bincount(codes[file.tokens == token]).astype(float)
        number = counts.sum()
        if number > 1:
            alike += (counts * (counts - 1)).sum() / (number - 1)
            total += int(number)
    return alike / max(total, 1) - chance


def lost_rank(file: File, rng: np.random.Generator) -> Any:
    """The experts of one rank are chosen by nobody."""
    experts, k = file.experts, file.ids.shape[2]
    width = experts // 4
    if experts - width < 2 * k or len(file.ids) * k < 40 * experts:
        return None
    scores = rng.random((len(file.ids), file.ids.shape[1], experts))
    scores[..., width : 2 * width] = -1
    return np.argsort(-scores, axis=2)[..., :k], {"n_experts": experts}


FAULTS = [
    Fault("all ids zero", "all-zero", lambda file, rng: (file.ids * 0, {})),
    Fault("first 5 % of rows zero", "all-zero", zero_rows(0.05, "head")),
    Fault("rows inside zero, 1 %", "all-zero", zero_rows(0.01, "middle")),
    Fault("rows inside zero, 30 %", "all-zero", zero_rows(0.3, "middle")),
    Fault("last 20 % of rows zero", "all-zero", zero_rows(0.2, "tail")),
    Fault("stale row, 5 %", "repeated-rows", stale(0.05, with_tokens=False)),
    Fault("stale row, 30 %", "repeated-rows", stale(0.3, with_tokens=False)),
    Fault("stale row, 5 %, tokens known", "repeated-rows", stale(0.05, with_tokens=True)),
    Fault("stale row, 60 %, tokens known", "repeated-rows", stale(0.6, with_tokens=True)),
    Fault("an expert twice, one token", "duplicate-expert", twice(0.0)),
    Fault("an expert twice, 1 %", "duplicate-expert", twice(0.01)),
    Fault("an expert twice, 20 %", "duplicate-expert", twice(0.2)),
    Fault("draft model, more experts", "out-of-range", draft("larger")),
    Fault("draft model, fewer experts", "constant-layer", draft("fewer")),
    Fault("physical ids with copies", "out-of-range", physical),
    Fault("-1 among ids", "out-of-range", holes),
    Fault("one layer constant", "constant-layer", constant),
    Fault("five rows missing", "row-count", rows(-5)),
    Fault("rows of one turn (30 %)", "row-count", rows(-0.7)),
    Fault("three rows too many", "row-count", rows(3)),
    Fault("layers moved by one", "layer-shift", against(lambda x, rng: np.roll(x, 1, axis=1))),
    Fault("one layer missing", "layer-shift", against(lambda x, rng: x[:, 1:])),
    Fault("layers in reverse", "layer-shift", against(lambda x, rng: x[:, ::-1])),
    Fault("two layers exchanged", "layer-shift", against(lambda x, rng: exchanged(x))),
    Fault("rows moved by 1, reference", "token-shift", against(moved(1))),
    Fault("rows moved by -3, reference", "token-shift", against(moved(-3))),
    Fault("rows moved by 40, reference", "token-shift", against(moved(40))),
    Fault("rows begin anew, reference", "token-shift", against(restarted)),
    Fault("rows moved by 1, tokens", "token-shift", told_shift(1)),
    Fault("rows moved by -2, tokens", "token-shift", told_shift(-2)),
    Fault("physical ids, renumbered", "out-of-range", against(renumbered)),
    Fault("one rank's choices lost", "dead-experts", lost_rank),
]


def exchanged(ids: Routes) -> Routes:
    """The first two layers change places."""
    order = [1, 0, *range(2, ids.shape[1])]
    return ids[:, order]


def study(sound: int, each: int) -> dict[str, Any]:
    """Check the corpus; returns counts per fault and of false alarms."""
    rng = np.random.default_rng(0)
    files = [*captures(rng, max(sound // 5, 8))]
    files += [synthetic(rng) for _ in range(sound - len(files))]
    alarms, noise = [], 0
    for number, file in enumerate(files):
        known: dict[str, Any] = {"n_experts": file.experts} if number % 2 else {}
        known |= {"tokens": file.tokens} if number % 3 == 0 else {}
        result = tl.check(file.ids, **known)
        noise += result.metrics["suspicious"] > 0
        if not result.sound:
            alarms.append((number, [x.message for x in result.findings if x.severity == "unsound"]))
    table = [judged(fault, files, each, rng) for fault in FAULTS]
    files_made = sum(row["files"] for row in table)
    return {
        "sound": len(files),
        "captures": max(sound // 5, 8),
        "false alarms": len(alarms),
        "suspicious": int(noise),
        "alarms": alarms[:5],
        "faulty": files_made,
        "found": sum(row["found"] for row in table),
        "unsound": sum(row["unsound"] for row in table),
        "named": sum(row["named"] for row in table),
        "faults": table,
    }


def judged(fault: Fault, files: list[File], each: int, rng: np.random.Generator) -> dict[str, Any]:
    """One fault on fresh sound files, synthetic ones and captures in turn."""
    counts = {"files": 0, "found": 0, "unsound": 0, "named": 0}
    missed = []
    order = rng.permutation(len(files))
    for number in order:
        faulty = fault.make(files[number], rng)
        if faulty is None:
            continue
        result = tl.check(faulty[0], **faulty[1])
        grave = [x for x in result.findings if x.severity != "note"]
        named = any(x.kind == fault.kind for x in grave)
        counts["files"] += 1
        counts["found"] += named
        counts["unsound"] += not result.sound
        counts["named"] += bool(grave) and grave[0].kind == fault.kind
        if not named:
            missed.append((int(number), files[number].ids.shape, [x.message for x in grave]))
        if counts["files"] == each:
            break
    return {"fault": fault.name, "kind": fault.kind, **counts, "missed": missed[:3]}


def large() -> dict[str, float]:
    """Time and memory of a million tokens, in a process of its own by the caller."""
    with tempfile.TemporaryDirectory() as folder:
        path, rows = Path(folder) / "routes.npy", 10**6
        rng = np.random.default_rng(0)
        array = np.lib.format.open_memmap(path, "w+", np.uint8, (rows, 48, 8))
        start = rng.integers(0, 128, (rows, 48), np.uint8)
        step = rng.integers(0, 8, (rows, 48), np.uint8)
        for rank in range(8):  # eight ids that differ: odd steps modulo 128
            array[:, :, rank] = (start + rank * (2 * step + 1)) % 128
        array.flush()
        del array, start, step
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cpu, wall = time.process_time(), time.perf_counter()
        result = tl.check(path)
        return {
            "cpu seconds": time.process_time() - cpu,
            "wall seconds": time.perf_counter() - wall,
            "peak MB before": before / 1024,
            "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "sound": float(result.sound),
        }


def main() -> None:
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sound", type=int, default=1000)
    parser.add_argument("--each", type=int, default=12)
    parser.add_argument("--large", action="store_true", help="time a million tokens alone")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = large() if given.large else study(given.sound, given.each)
    text = json.dumps(rows, indent=1)
    if given.json:
        given.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
