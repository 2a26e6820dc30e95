"""The processes that torchrun started: joining them, work of the first one, messages, lost ones.

    with join_processes(timeout=600):
        folder = run_on_first_rank(make_folder)   # on rank 0 alone; all get what it returned
        by_rank = gathered_bytes(data)            # the bytes of every rank, on every rank

Only one process may make a folder, fetch data or write a file (`run_on_first_rank`). If it fails,
the others raise what it raised instead of waiting for the timeout. Messages are JSON, safetensors
or plain bytes: no pickle.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from tieline.core.errors import TielineError, require


class FirstRankError(TielineError):
    """Rank 0 failed and reports the error itself."""


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def run_on_first_rank(action: Callable[[], Any]) -> Any:
    """Return on every rank what `action` returned on rank 0, or raise what it raised.

    Args:
        action: returns JSON values; called on rank 0 only.
    """
    outcome, error = {}, None
    if is_first_rank():
        try:
            outcome = {"result": action()}
        except Exception as problem:
            outcome, error = {"error": f"{type(problem).__name__}: {problem}"}, problem
    if dist.is_initialized():
        outcome = gathered_plain(outcome)[0]
    if error is not None:
        raise error
    if "error" in outcome:
        raise FirstRankError(f"rank 0 failed: {outcome['error']}")
    return outcome["result"]


def gathered_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of every rank; gloo gathers equal lengths, so shorter ones are padded."""
    if not dist.is_initialized():
        return [data]
    ranks, device = dist.get_world_size(), message_device()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device))
    sizes = [int(length) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    if data:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        padded[: len(data)] = content.to(device)
    rows = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(rows, padded)
    return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def message_device() -> torch.device:
    """Return where messages travel from: the accelerator if NCCL alone joins the processes."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def gathered_tensors(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the named tensors of every rank, on the CPU; ranks may have other names and shapes."""
    local = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return [load(data) for data in gathered_bytes(save(local))]


def gathered_plain(value: Any) -> list[Any]:
    """Return a JSON value of every rank; NaN and infinities are allowed."""
    return [json.loads(data) for data in gathered_bytes(json.dumps(value).encode())]


TIMEOUT = 600.0
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOSS_WORDS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "broken pipe", "peer")


class LostRankError(TielineError):
    """Another process of the run has died or does not answer."""


def is_parallel() -> bool:
    """Return whether torchrun started this process as one of several."""
    return all(name in os.environ for name in TORCHRUN) and int(os.environ["WORLD_SIZE"]) > 1


@contextmanager
def join_processes(
    *, timeout: float = TIMEOUT, backend: str | None = None, init_method: str | None = None
) -> Iterator[None]:
    """Join the processes that torchrun started, until the block ends.

    Args:
        timeout: seconds after which an unanswered message is an error.
        backend: gloo, and nccl beside it for CUDA, by default.
        init_method: where to meet, if not where torchrun says, for example `file:///tmp/meeting`.
    """
    require(timeout > 0, f"the timeout must be positive, got {timeout}")
    missing = [name for name in TORCHRUN if name not in os.environ]
    require(
        not (set(missing) - ({"MASTER_ADDR", "MASTER_PORT"} if init_method else set())),
        f"{', '.join(missing)} not set: start the processes with torchrun",
    )
    dist.init_process_group(
        # records travel from the memory of the host also where weights are on accelerators
        backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"),
        init_method=init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def naming_lost_ranks(doing: str) -> Iterator[None]:
    """Raise `LostRankError` for the errors of a collective whose peer is gone.

    Args:
        doing: what the process does in the block, and how to resume.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error).lower()
        if not isinstance(error, dist.DistError) and not any(w in message for w in LOSS_WORDS):
            raise
        rank = dist.get_rank() if dist.is_initialized() else "?"
        raise LostRankError(
            f"rank {rank}: another rank has died or does not answer ({doing}): {str(error)[:200]}"
        ) from error
