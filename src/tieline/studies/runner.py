"""Many claims at once: each is tested in a process of its own and kept as soon as it is done.

`joblib` does the sending: its loky processes on this machine, or the workers of a Dask cluster by
the same call. A worker gets a claim's id and looks it up itself, so nothing but names and results
travels. Without joblib the claims are tested one after another.
"""

import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from importlib.util import find_spec
from typing import Any

from tieline.errors import ParameterError, require
from tieline.numerics import one_thread
from tieline.studies.claim import Claim, Outcome, Run
from tieline.studies.registry import all_claims
from tieline.studies.store import ResultStore

__all__ = ["ENGINES", "run_claim", "run_claims"]

ENGINES = ("loky", "dask", "serial")
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
    require(engine in ENGINES, f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    require(address is None or engine == "dask", f"an address is for engine dask, not {engine}")
    require(jobs == -1 or jobs >= 1, f"need jobs >= 1, or -1 for one per core, got {jobs}")
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
    from joblib import Parallel, delayed

    by_id = {claim.id: claim for claim in order}
    with _backend(engine, address, jobs):
        options: dict[str, Any] = {"batch_size": 1, "return_as": "generator_unordered"}
        parallel = Parallel(n_jobs=jobs, **options)
        for values in parallel(delayed(_remote)(claim.id, run) for claim in order):
            assert values is not None
            outcome = Outcome.from_dict(values)
            yield by_id[outcome.claim["id"]], outcome


def _remote(claim: str, run: Run) -> dict[str, Any]:
    """What a worker does: look the claim up, test it, send plain values back."""
    return run_claim(all_claims()[claim], run).to_dict()


def _backend(engine: str, address: str | None, jobs: int) -> AbstractContextManager[None]:
    return _dask(address, jobs) if engine == "dask" else _loky()


@contextmanager
def _loky() -> Iterator[None]:
    """Processes of one thread each; that one is replaced when it has grown is no news."""
    from joblib import parallel_config

    with warnings.catch_warnings(), parallel_config(backend="loky", inner_max_num_threads=1):
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs")
        yield


@contextmanager
def _dask(address: str | None, jobs: int) -> Iterator[None]:
    """The Dask backend of joblib, on the cluster at the address or on one of this machine."""
    from joblib import parallel_config

    try:
        from distributed import Client
    except ModuleNotFoundError as problem:
        raise ModuleNotFoundError("engine dask needs distributed", name="distributed") from problem
    own: dict[str, Any] = {
        "n_workers": None if jobs == -1 else jobs,
        "threads_per_worker": 1,
        "processes": True,
    }
    options: dict[str, Any] = (
        {"address": address} if address else {**own, "dashboard_address": None}
    )
    try:
        client = Client(**options)
    except (OSError, ValueError) as problem:
        raise ParameterError(f"no Dask scheduler answers at {address}: {problem}") from problem
    with client, parallel_config(backend="dask"):
        yield
