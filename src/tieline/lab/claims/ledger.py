"""The ledger: claims tested in many processes, their results on disk, and `reproduce`.

A claim's result is one file, written as soon as its test ends, so that a run that was stopped
continues where it was. A result is valid until one of its inputs changes: the sources of the
package (without the rooms that only present results) or the versions of the numerical libraries.

`joblib` distributes the tests: over loky processes on this machine, or over the workers of a Dask
cluster. A worker gets the id of a claim and looks it up. Without joblib the claims are tested one
after another.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Unpack

from tieline._version import __version__
from tieline.core.errors import require
from tieline.core.files import cache_folder, write_whole
from tieline.core.numerics import one_thread
from tieline.core.records import Result, from_plain, to_plain
from tieline.core.setting_fields import takes_settings
from tieline.lab.claims.claim import (
    PAPERS,
    Claim,
    ClaimOutcome,
    ClaimRun,
    Verdict,
    all_claims,
    select,
)
from tieline.lab.command_settings import ReproduceOptions, ReproduceSettings
from tieline.lab.job_executors import check_executor, run_jobs

__all__ = [
    "Catalogue",
    "Ledger",
    "LedgerProvenance",
    "PaperTitle",
    "ResultStore",
    "fingerprint",
    "reproduce",
    "result_key",
    "run_claim",
    "run_claims",
]

FORMAT, VERSION = "tieline-claim", 1
PRESENTATION_ROOMS = {"cli", "report", "commands"}
LIBRARIES = ("torch", "numpy", "scipy")


@lru_cache
def fingerprint(root: Path = Path(__file__).parents[2]) -> str:
    """Sixteen hexadecimal digits of a SHA-256 over the sources of `root` and library versions."""
    digest = hashlib.sha256()
    for name in LIBRARIES:
        digest.update(f"{name} {version(name)}\n".encode())
    for path in sorted(root.rglob("*.py")):
        names = path.relative_to(root).parts
        if not PRESENTATION_ROOMS.intersection(names):
            digest.update("/".join(names).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def result_key(claim: Claim, run: ClaimRun) -> dict[str, Any]:
    """Key of a stored result: the claim, the mode, the seed and the code."""
    return {"claim": claim.id, "mode": run.mode, "seed": run.seed, "code": fingerprint()}


@dataclass(frozen=True)
class ResultStore:
    """A folder of results.

    Attributes:
        folder: created when the first result is saved.
    """

    folder: Path

    def check(self) -> None:
        """Raise if the folder cannot be created or written to, before any work."""
        existing = next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())
        require(existing.is_dir(), f"cannot keep results in {self.folder}: {existing} is no folder")
        require(os.access(existing, os.W_OK), f"cannot keep results in {existing}: it is read-only")

    def load(self, claim: Claim, run: ClaimRun) -> ClaimOutcome | None:
        """Return the result of this claim, mode, seed and code; None if there is none."""
        try:
            record = json.loads(self._path(claim, run).read_bytes())
            if record["key"] != result_key(claim, run) or record["version"] != VERSION:
                return None
            return from_plain(ClaimOutcome, record["outcome"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def save(self, claim: Claim, run: ClaimRun, outcome: ClaimOutcome) -> None:
        """Write the result atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT, "version": VERSION, "key": result_key(claim, run)}
        record = head | {"outcome": to_plain(outcome, nonfinite_as_text=True)}
        text = json.dumps(record, allow_nan=False, indent=1) + "\n"
        write_whole(self._path(claim, run), text.encode())

    def _path(self, claim: Claim, run: ClaimRun) -> Path:
        """Path of the result of a claim."""
        return self.folder / f"{claim.id}.{run.mode}.seed{run.seed}.json"


Progress = Callable[[ClaimOutcome, int, int], None]


def run_claim(claim: Claim, run: ClaimRun) -> ClaimOutcome:
    """Test one claim; the outcome of a test that raises an exception holds its message."""
    begun = time.perf_counter()
    try:
        with one_thread():
            evidence = claim.test(run)
        return ClaimOutcome.of(claim, evidence, run, time.perf_counter() - begun)
    except Exception as problem:
        message = f"{type(problem).__name__}: {problem}"
        took = time.perf_counter() - begun
        return ClaimOutcome(
            claim, None, True, seconds=took, fast=run.fast, seed=run.seed, error=message
        )


def run_claims(
    claims: Sequence[Claim],
    run: ClaimRun,
    store: ResultStore | None = None,
    *,
    executor: str = "loky",
    address: str | None = None,
    jobs: int = -1,
    progress: Progress | None = None,
) -> list[ClaimOutcome]:
    """Test claims, except those whose results are stored, and store the new results.

    Args:
        claims: from `claim.select`.
        run: mode and seed.
        store: where results are kept; None to keep none.
        executor: "loky" for processes on this machine, "dask" for a cluster, "serial" for none.
        address: of the Dask scheduler; None starts a cluster on this machine.
        jobs: processes at once; -1 for one per core.
        progress: called with each outcome, the number of outcomes so far, and their total.
    """
    check_executor(executor, address, jobs)
    done: dict[str, ClaimOutcome] = {}
    for outcome in _stored_and_new_outcomes(claims, run, store, executor, address, jobs):
        done[outcome.claim.id] = outcome
        if progress is not None:
            progress(outcome, len(done), len(claims))
    return [done[claim.id] for claim in claims]


def _stored_and_new_outcomes(
    claims: Sequence[Claim],
    run: ClaimRun,
    store: ResultStore | None,
    executor: str,
    address: str | None,
    jobs: int,
) -> Iterator[ClaimOutcome]:
    """Yield stored outcomes, then new ones in the order in which their tests end."""
    todo = []
    for claim in claims:
        stored = store.load(claim, run) if store is not None else None
        if stored is None:
            todo.append(claim)
        else:
            yield stored
    with closing(_new_outcomes(todo, run, executor, address, jobs)) as tested:
        for outcome in tested:
            if store is not None and not outcome.error:
                store.save(outcome.claim, run, outcome)
            yield outcome


def _new_outcomes(
    todo: Sequence[Claim], run: ClaimRun, executor: str, address: str | None, jobs: int
) -> Generator[ClaimOutcome, None, None]:
    """Yield outcomes in the order in which the tests end; the longest tests start first."""
    groups = _claim_groups(todo, run.fast)
    if not groups:
        return
    if executor == "serial" or (executor == "loky" and find_spec("joblib") is None):
        yield from (run_claim(claim, run) for group in groups for claim in group)
        return
    arguments = [(tuple(claim.id for claim in group), run) for group in groups]
    for outcomes in run_jobs(
        _run_claims_in_worker, arguments, executor=executor, address=address, jobs=jobs
    ):
        yield from (from_plain(ClaimOutcome, values) for values in outcomes)


def _claim_groups(todo: Sequence[Claim], fast: bool) -> list[list[Claim]]:
    """Group claims that share a study, to be tested in one process; the longest first."""
    groups: dict[str, list[Claim]] = {}
    for claim in todo:
        groups.setdefault(claim.together or claim.id, []).append(claim)
    return sorted(groups.values(), key=lambda group: -sum(c.duration(fast) for c in group))


def _run_claims_in_worker(names: Sequence[str], run: ClaimRun) -> list[Any]:
    """Test claims in a worker and return plain values."""
    return [to_plain(run_claim(all_claims()[name], run), nonfinite_as_text=True) for name in names]


@dataclass(frozen=True)
class LedgerProvenance:
    """The version, mode ("fast" or "full") and seed of a run."""

    tieline: str
    mode: str
    seed: int


@dataclass(frozen=True)
class PaperTitle:
    """Number, short name and title of a paper."""

    paper: int
    name: str
    title: str


@dataclass(frozen=True, repr=False)
class Ledger(Result):
    """Outcomes of claims.

    Attributes:
        provenance: how the claims were tested.
        papers: the papers of the claims.
        verdicts: number of claims by verdict, in the order of `Verdict`.
        changed: ids of the claims whose verdict changed or whose own check failed.
        broken: ids of the claims whose test raised an exception.
        claims: the outcomes, in the order of the papers.
    """

    format: ClassVar[str] = "tieline-ledger"
    nonfinite_as_text: ClassVar[bool] = True

    provenance: LedgerProvenance
    papers: tuple[PaperTitle, ...]
    verdicts: dict[str, int]
    changed: tuple[str, ...]
    broken: tuple[str, ...]
    claims: tuple[ClaimOutcome, ...]

    @classmethod
    def of(cls, outcomes: Sequence[ClaimOutcome], run: ClaimRun) -> "Ledger":
        """Collect outcomes with their papers and a count of the verdicts."""
        counts = Counter(outcome.verdict for outcome in outcomes)
        return cls(
            LedgerProvenance(__version__, run.mode, run.seed),
            _paper_titles([outcome.claim for outcome in outcomes]),
            {verdict.value: counts[verdict] for verdict in Verdict},
            tuple(outcome.claim.id for outcome in outcomes if outcome.changed),
            tuple(outcome.claim.id for outcome in outcomes if outcome.error),
            tuple(outcomes),
        )


@dataclass(frozen=True, repr=False)
class Catalogue(Result):
    """Claims without results.

    Attributes:
        papers: the papers of the claims.
        claims: the claims, in the order of the papers.
        in_full: whether a terminal shows every claim rather than their number by paper.
    """

    format: ClassVar[str] = "tieline-claims"

    papers: tuple[PaperTitle, ...]
    claims: tuple[Claim, ...]
    in_full: bool = field(default=True, metadata={"json": False})

    @classmethod
    def of(cls, claims: Sequence[Claim], in_full: bool = True) -> "Catalogue":
        """Collect claims with their papers."""
        return cls(_paper_titles(claims), tuple(claims), in_full)


@takes_settings(ReproduceSettings)
def reproduce(
    names: Sequence[str] = ("all",),
    *,
    settings: ReproduceSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[ReproduceOptions],
) -> Ledger:
    """Test claims of the papers, except those whose results are stored.

    Args:
        names: "all", papers by number or name, or ids of claims.
        settings: the options; keyword arguments change single ones. Results are kept in the
            user's cache by default.
        progress: called with the number of claims that are done, and of all.
    """
    settings = ReproduceSettings.of(settings, options)
    claims, run = select(names), ClaimRun(settings.fast, settings.seed)
    store = ResultStore(settings.results or cache_folder("claims"))
    store.check()
    on_progress = progress or (lambda done, total: None)
    on_progress(0, len(claims))
    outcomes = run_claims(
        claims,
        run,
        store,
        executor=settings.executor,
        address=settings.address,
        jobs=settings.jobs,
        progress=lambda _, done, total: on_progress(done, total),
    )
    return Ledger.of(outcomes, run)


def _paper_titles(claims: Sequence[Claim]) -> tuple[PaperTitle, ...]:
    """Titles of the papers that some claims are from."""
    numbers = sorted({claim.paper for claim in claims})
    return tuple(PaperTitle(n, PAPERS[n].name, PAPERS[n].title) for n in numbers)
