"""Commands on several processes: `torchrun --nproc-per-node N -m tieline inspect MODEL`.

with joined_processes(parallel, "inspecting") as mode:  # None for a single process
    result = run(source, parallel=mode)

Only rank 0 shows progress, writes files and prints. An error is reported by one process, the first
that claims it in torchrun's store (`claims_error_report`). The others wait two seconds, since
torchrun ends all processes as soon as one has ended.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

from tieline.core.errors import TielineError, require

REPORT_WAIT = 2.0
"""Seconds that other processes leave to the one that reports an error."""

REPORT = "tieline/error report"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_by_torchrun() -> bool:
    """Return whether torchrun started this process as one of several."""
    started = all(name in os.environ for name in _TORCHRUN)
    return started and int(os.environ["WORLD_SIZE"]) > 1


def is_main_process() -> bool:
    """Return whether this is rank 0 or the only process, which prints and writes files."""
    return not started_by_torchrun() or os.environ["RANK"] == "0"


@contextmanager
def joined_processes(parallel: str | None, activity: str) -> Iterator[str | None]:
    """Join the processes of torchrun; yields how they share the work, or None for one process.

    The block ends on all processes or on none, so that outputs may be written after it.

    Args:
        parallel: the value of --parallel.
        activity: what the block does ("inspecting"), for the message about a lost process.
    """
    if not started_by_torchrun():
        require(
            parallel is None,
            f"--parallel {parallel} needs several processes: start with torchrun "
            "--nproc-per-node N -m tieline ...",
        )
        yield None
        return
    import torch.distributed as dist

    from tieline.core.collectives import join_processes, naming_lost_ranks

    lost = naming_lost_ranks(f"while {activity}; nothing was written")
    with _error_on_sigterm(), lost, join_processes():
        yield parallel or "data"
        dist.barrier()


@contextmanager
def _error_on_sigterm() -> Iterator[None]:
    """Raise an error on SIGTERM, which torchrun sends to all processes after one has died."""

    def ended(number: int, frame: FrameType | None) -> None:
        raise TielineError(
            f"rank {os.environ['RANK']} was ended: another process of the run has died (torchrun "
            "says which); nothing was written"
        )

    handler = signal.signal(signal.SIGTERM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def claims_error_report() -> bool:
    """Return whether this process is the first to report an error; waits 2 s if it is not."""
    if not started_by_torchrun():
        return True
    is_reporter = _claims_report_first()
    if not is_reporter:
        time.sleep(REPORT_WAIT)
    return is_reporter


def _claims_report_first() -> bool:
    """Return whether this process claims the report first in torchrun's store, else rank 0."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return is_main_process()
    import torch.distributed as dist

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    turn = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=10))  # pyright: ignore[reportPrivateImportUsage]
        return store.add(f"{REPORT} {turn}", 1) == 1
    except (RuntimeError, OSError):  # torchrun itself is gone
        return is_main_process()
