"""Results on disk, one file per claim, whole or not at all.

A run that is killed loses only the claims that were being tested; the next one reads the rest.

Many claims at once: each is tested in a process of its own and kept as soon as it is done.

`joblib` does the sending: its loky processes on this machine, or the workers of a Dask cluster by
the same call. A worker gets a claim's id and looks it up itself, so nothing but names and results
travels. Without joblib the claims are tested one after another.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tieline.core.errors import require
from tieline.core.numerics import one_thread
from tieline.core.parallel import ENGINES, check_engine, run_jobs
from tieline.papers.claim import Claim, Outcome, Run
from tieline.papers.registry import all_claims, fingerprint

__all__ = ["ENGINES", "ResultStore", "result_key", "run_claim", "run_claims"]

FORMAT, VERSION = "tieline-claim", 1


def result_key(claim: Claim, run: Run) -> dict[str, Any]:
    """What a result depends on: the claim, the mode, the seed and the code."""
    mode = "fast" if run.fast else "full"
    return {"claim": claim.id, "mode": mode, "seed": run.seed, "code": fingerprint(claim.paper)}


@dataclass(frozen=True)
class ResultStore:
    """A folder of results.

    Attributes:
        folder: made when the first result is saved.
    """

    folder: Path

    def check(self) -> None:
        """Refuse a place that is no folder, or that cannot be written to, before any work."""
        known = next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())
        require(known.is_dir(), f"cannot keep results in {self.folder}: {known} is no folder")
        require(os.access(known, os.W_OK), f"cannot keep results in {known}: it is read-only")

    def load(self, claim: Claim, run: Run) -> Outcome | None:
        """The result of this very claim, mode, seed and code; None if there is none."""
        try:
            record = json.loads(self._path(claim, run).read_bytes())
            if record["key"] != result_key(claim, run) or record["version"] != VERSION:
                return None
            return Outcome.from_dict(record["outcome"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def save(self, claim: Claim, run: Run, outcome: Outcome) -> None:
        """Write the result beside its place, then move it there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT, "version": VERSION, "key": result_key(claim, run)}
        text = json.dumps(head | {"outcome": outcome.to_dict()}, allow_nan=False, indent=1)
        path = self._path(claim, run)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _path(self, claim: Claim, run: Run) -> Path:
        mode = "fast" if run.fast else "full"
        return self.folder / f"{claim.id}.{mode}.seed{run.seed}.json"


Progress = Callable[[Outcome, int, int], None]


def run_claim(claim: Claim, run: Run) -> Outcome:
    """Test one claim; a test that breaks gives an outcome that says how."""
    begun = time.perf_counter()
    try:
        with one_thread():
            evidence = claim.test(run)
        return Outcome.of(claim, evidence, run, time.perf_counter() - begun)
    except Exception as problem:
        words = f"{type(problem).__name__}: {problem}"
        took = time.perf_counter() - begun
        return Outcome(claim.describe(), None, True, {}, took, run.fast, run.seed, words)


def run_claims(
    claims: Sequence[Claim],
    run: Run,
    store: ResultStore | None = None,
    *,
    engine: str = "loky",
    address: str | None = None,
    jobs: int = -1,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Test the claims, taking from the store what it has and adding the rest as it comes.

    Args:
        claims: from `registry.select`.
        run: mode and seed.
        store: where results are kept; None to keep none.
        engine: "loky" for processes on this machine, "dask" for a cluster, "serial" for none.
        address: of the Dask scheduler; None starts a cluster on this machine.
        jobs: processes at once; -1 for one per core.
        progress: told each outcome, how many are done, and of how many.
    """
    check_engine(engine, address, jobs)
    done: dict[str, Outcome] = {}
    for outcome in _all(claims, run, store, engine, address, jobs):
        done[outcome.claim["id"]] = outcome
        if progress is not None:
            progress(outcome, len(done), len(claims))
    return [done[claim.id] for claim in claims]


def _all(
    claims: Sequence[Claim],
    run: Run,
    store: ResultStore | None,
    engine: str,
    address: str | None,
    jobs: int,
) -> Iterator[Outcome]:
    """Outcomes as they come: those in the store first."""
    todo = []
    for claim in claims:
        known = store.load(claim, run) if store is not None else None
        if known is None:
            todo.append(claim)
        else:
            yield known
    with closing(_fresh(todo, run, engine, address, jobs)) as fresh:
        for claim, outcome in fresh:
            if store is not None and not outcome.error:
                store.save(claim, run, outcome)
            yield outcome


def _fresh(
    todo: Sequence[Claim], run: Run, engine: str, address: str | None, jobs: int
) -> Generator[tuple[Claim, Outcome], None, None]:
    """Outcomes of the tests in the order in which they end; the longest tests begin first."""
    order = sorted(todo, key=lambda claim: -claim.seconds)
    if not order:
        return
    if engine == "serial" or (engine == "loky" and find_spec("joblib") is None):
        yield from ((claim, run_claim(claim, run)) for claim in order)
        return
    by_id = {claim.id: claim for claim in order}
    named = [(claim.id, run) for claim in order]
    for values in run_jobs(_remote, named, engine=engine, address=address, jobs=jobs):
        outcome = Outcome.from_dict(values)
        yield by_id[outcome.claim["id"]], outcome


def _remote(claim: str, run: Run) -> dict[str, Any]:
    """What a worker does: look the claim up, test it, send plain values back."""
    return run_claim(all_claims()[claim], run).to_dict()
