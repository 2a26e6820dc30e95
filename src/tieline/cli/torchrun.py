"""Commands on several processes: `torchrun --nproc-per-node N -m tieline inspect MODEL`.

with joined_processes(parallel, "inspecting") as way:  # or this one alone
    result = run(source, parallel=way)

Only rank 0 shows progress, writes files and prints. An error is reported by one process, the first
that claims it in torchrun's store (`claims_error_report`). The others wait a moment, since torchrun
ends all processes as soon as one has ended.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

from tieline.core.errors import TielineError, require

GRACE = 2.0
"""Seconds for the process that reports an error: torchrun ends all when one has ended."""

REPORT = "tieline/error report"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def on_ranks() -> bool:
    """Return whether torchrun started this process as one of several."""
    started = all(name in os.environ for name in _TORCHRUN)
    return started and int(os.environ["WORLD_SIZE"]) > 1


def is_first() -> bool:
    """Return whether this process shows progress and writes: rank 0, or the only one."""
    return not on_ranks() or os.environ["RANK"] == "0"


@contextmanager
def joined_processes(parallel: str | None, doing: str) -> Iterator[str | None]:
    """Join the processes of torchrun; yields how they share the work, or None for one process.

    The block ends on all processes or on none, so that what follows it may write.

    Args:
        parallel: the value of --parallel.
        doing: what the block does ("inspecting"), for the message about a lost process.
    """
    if not on_ranks():
        require(
            parallel is None,
            f"--parallel {parallel} needs several processes: start with torchrun "
            "--nproc-per-node N -m tieline ...",
        )
        yield None
        return
    import torch.distributed as dist

    from tieline.core.collectives import join_processes, naming_lost_ranks

    lost = naming_lost_ranks(f"while {doing}; nothing was written")
    with _error_when_ended(), lost, join_processes():
        yield parallel or "data"
        dist.barrier()


@contextmanager
def _error_when_ended() -> Iterator[None]:
    """Turn the signal by which torchrun ends processes, after one has died, into an error."""

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
    """Return whether this process reports an error: the first that asks; others wait a moment."""
    if not on_ranks():
        return True
    is_reporter = _claims_first()
    if not is_reporter:
        time.sleep(GRACE)
    return is_reporter


def _claims_first() -> bool:
    """Claim the report in torchrun's own store; rank 0 is first where there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return is_first()
    import torch.distributed as dist

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    turn = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=10))  # pyright: ignore[reportPrivateImportUsage]
        return store.add(f"{REPORT} {turn}", 1) == 1
    except (RuntimeError, OSError):  # torchrun itself is gone
        return is_first()
