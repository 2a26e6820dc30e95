"""Run pairs through `tieline.diff` and write one line of JSON per pair.

Nothing here reads the statistics of `diff`: only `causes.conclusion`, `causes.alarm` and
`causes.patterns` of its result, and its flip counts.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tieline as tl
from benchmarks.blind.changes import reference_case, run_changed, run_reference
from benchmarks.blind.models import MissingModelError, subject
from benchmarks.blind.pairs import Pair, changes
from benchmarks.blind.precisions import PRECISIONS
from benchmarks.blind.strength import strength_of, text_of
from tieline.trace.record import RoutingTrace

FOLDER = Path(__file__).parent
HASH = FOLDER / "HASH"
RUNS = FOLDER / "RUNS.jsonl"
"""One line per run of the held-out half."""


def source_digest() -> str:
    """Return the SHA-256 of the sources and the split, by name."""
    digest = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.py"), FOLDER / "split.json"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class Runs:
    """The two runs of a pair, as `diff` may see them.

    Attributes:
        model: the model of A in float32.
        tokenizer: its tokenizer.
        a: what A recorded.
        b: what B recorded.
    """

    model: Any
    tokenizer: Any
    a: RoutingTrace
    b: RoutingTrace


def generate(pair: Pair, folder: str | None = None) -> Runs:
    """Run both sides of a pair.

    Args:
        pair: which pair.
        folder: checkpoint of the SmolLM2 mixture.
    """
    model, tokenizer = subject(pair.kind, pair.weights, folder)
    change = changes()[pair.section, pair.change]
    ids = text_of(pair.kind, tokenizer, pair.half, pair.text)
    case = reference_case(change, model, ids, pair.draws)
    case.reference = run_reference(case)
    other = run_changed(change, PRECISIONS[pair.precision], case)
    return Runs(case.model, tokenizer, _anonymous(case.reference), _anonymous(other))


def _anonymous(trace: RoutingTrace) -> RoutingTrace:
    """Drop the provenance: the format is told by `expect` or not at all."""
    return replace(trace, provenance={})


def verdict(pair: Pair, runs: Runs) -> dict[str, Any]:
    """Return what `diff` says of a pair."""
    side = (runs.model, runs.tokenizer) if pair.mode == "model" else runs.a
    expect = None if pair.mode == "unknown" else PRECISIONS[pair.precision].expect
    result: Any = tl.diff(side, runs.b, expect=expect)
    return {
        "conclusion": str(result.causes.conclusion),
        "alarm": bool(result.causes.alarm),
        "patterns": [str(pattern.kind) for pattern in result.causes.patterns],
        "flips": [layer.flip.count for layer in result.layers],
    }


def judge(pair: Pair, folder: str | None = None, ask: bool = True) -> dict[str, Any]:
    """Return the line of one pair: its facts, strength, verdict or error, and CPU seconds.

    Args:
        pair: which pair.
        folder: checkpoint of the SmolLM2 mixture.
        ask: whether `diff` is run; otherwise the pair is only generated.
    """
    line: dict[str, Any] = asdict(pair)
    start = time.process_time()
    if pair.section == "faulty":
        line["strength"] = asdict(strength_of(pair, folder))
    weighed = time.process_time()
    runs = generate(pair, folder)
    generated = time.process_time()
    if ask:
        try:
            line |= verdict(pair, runs)
        except Exception as error:  # whatever diff raises is an outcome of this pair
            line["error"] = f"{type(error).__name__}: {error}"
    ended = time.process_time()
    line["seconds"] = {
        "strength": round(weighed - start, 3),
        "runs": round(generated - weighed, 3),
        "diff": round(ended - generated, 3),
    }
    return line


def run(
    listed: list[Pair], out: Path, header: dict[str, Any], folder: str | None, ask: bool
) -> Iterator[dict[str, Any]]:
    """Judge pairs and append their lines to a file, which may hold earlier lines of the run."""
    lines = read(out)[1] if out.exists() else []
    finished = {json.dumps({key: line[key] for key in asdict(listed[0])}) for line in lines}
    with out.open("a", encoding="utf-8") as file:
        if not lines:
            file.write(json.dumps({"header": header}) + "\n")
        for pair in listed:
            if json.dumps(asdict(pair)) in finished:
                continue
            try:
                line = judge(pair, folder, ask)
            except MissingModelError as reason:
                line = asdict(pair) | {"skipped": str(reason)}
            file.write(json.dumps(line) + "\n")
            file.flush()
            yield line


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return header and lines of a file that `run` wrote."""
    first, *rest = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return first["header"], rest


def earlier_runs() -> list[dict[str, Any]]:
    """Return the runs of the held-out half so far."""
    return [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []


def note_run(header: dict[str, Any]) -> None:
    """Note that the held-out half is about to be run."""
    with RUNS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
