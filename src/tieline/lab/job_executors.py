"""Run many independent jobs: in processes on this machine, on a Dask cluster, or in turn.

`joblib` distributes them, so that the same call serves both. Jobs are importable functions of plain
values; results are yielded in the order of completion.
"""

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar
from unittest.mock import patch

from tieline.core.errors import ParameterError, require

__all__ = ["EXECUTORS", "check_executor", "run_jobs"]

EXECUTORS = ("loky", "dask", "serial")
Result = TypeVar("Result")


def check_executor(executor: str, address: str | None = None, jobs: int = -1) -> None:
    """Raise for an unknown executor, an address without dask, or a number of jobs below 1."""
    require(
        executor in EXECUTORS, f"executor must be one of {', '.join(EXECUTORS)}, got {executor!r}"
    )
    require(
        address is None or executor == "dask", f"an address is for executor dask, not {executor}"
    )
    require(jobs == -1 or jobs >= 1, f"need jobs >= 1, or -1 for one per core, got {jobs}")


def run_jobs(
    work: Callable[..., Result],
    jobs_of: Sequence[tuple[Any, ...]],
    *,
    executor: str = "loky",
    address: str | None = None,
    jobs: int = -1,
) -> Iterator[Result]:
    """Yield `work(*arguments)` for each tuple of arguments, in the order of completion.

    Args:
        work: a function that workers can import.
        jobs_of: arguments of each job, the longest jobs first.
        executor: "loky" for processes here, "dask" for a cluster, "serial" for this process.
            Without joblib, or with a single job, loky is serial.
        address: of the Dask scheduler; None starts a cluster on this machine.
        jobs: processes at once; -1 for one per core.
    """
    check_executor(executor, address, jobs)
    if not jobs_of:
        return
    if executor == "serial" or (executor == "loky" and (find_spec("joblib") is None or jobs == 1)):
        yield from (work(*arguments) for arguments in jobs_of)
        return
    from joblib import Parallel, delayed

    with _dask_backend(address, jobs) if executor == "dask" else _loky_backend():
        options: dict[str, Any] = {"batch_size": 1, "return_as": "generator_unordered"}
        parallel: Any = Parallel(n_jobs=jobs, **options)
        with _interrupts_kept_from_workers():
            results = parallel(delayed(work)(*arguments) for arguments in jobs_of)
        yield from results


@contextmanager
def _interrupts_kept_from_workers() -> Iterator[None]:
    """Start worker processes that ignore Ctrl-C; the parent process ends them.

    A blocked signal is inherited by threads and processes that start in the block.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _loky_backend() -> Iterator[None]:
    """Use single-threaded loky workers; silence restarts of workers and the clean-up after Ctrl-C.

    Resource trackers are separate processes, which remove the leftovers of a stopped run and warn
    about it.
    """
    from multiprocessing import resource_tracker as multiprocessing_tracker

    from joblib import parallel_config
    from joblib.externals.loky.backend import resource_tracker

    filters = filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"))
    with patch.dict(os.environ, PYTHONWARNINGS=",".join(filters)):
        for tracker in (resource_tracker, multiprocessing_tracker):
            tracker.ensure_running()  # its start unblocks Ctrl-C again
    with warnings.catch_warnings(), parallel_config(backend="loky", inner_max_num_threads=1):
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs")
        yield


@contextmanager
def _dask_backend(address: str | None, jobs: int) -> Iterator[None]:
    """Use the Dask backend of joblib, on the cluster at `address` or on a local one."""
    from joblib import parallel_config

    try:
        from distributed import Client
    except ModuleNotFoundError as problem:
        raise ModuleNotFoundError(
            "executor dask needs distributed", name="distributed"
        ) from problem
    cluster: dict[str, Any] = {
        "n_workers": None if jobs == -1 else jobs,
        "threads_per_worker": 1,
        "processes": True,
    }
    options: dict[str, Any] = (
        {"address": address} if address else {**cluster, "dashboard_address": None}
    )
    try:
        with _interrupts_kept_from_workers():
            client = Client(**options)
    except (OSError, ValueError) as problem:
        raise ParameterError(f"no Dask scheduler answers at {address}: {problem}") from problem
    with client, parallel_config(backend="dask"):
        yield
