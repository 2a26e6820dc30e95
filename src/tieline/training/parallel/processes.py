"""The processes of a run: joining them, their grid, work of the first one, and lost ones.

    with join_processes(timeout=600):
        mesh = rank_mesh(expert_ranks=2)

A grid has data × expert ranks. Every rank has its own tokens. The experts of a layer are spread
over the ranks of a row of the grid, so tokens travel along rows; the ranks of a column hold the
same experts.

Only one process may make a folder, fetch data or write a checkpoint (`first_rank`). If it fails,
the others raise what it raised instead of waiting for the timeout. Messages are JSON: no pickle.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tieline.core.errors import TielineError, require


class FirstRankError(TielineError):
    """Rank 0 failed and reports the error itself."""


def is_first() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def first_rank(action: Callable[[], Any]) -> Any:
    """Return on every rank what `action` returned on rank 0, or raise what it raised.

    Args:
        action: returns JSON values; called on rank 0 only.
    """
    told, error = {}, None
    if is_first():
        try:
            told = {"result": action()}
        except Exception as problem:
            told, error = {"error": f"{type(problem).__name__}: {problem}"}, problem
    if dist.is_initialized():
        told = json.loads(_broadcast(json.dumps(told).encode()))
    if error is not None:
        raise error
    if "error" in told:
        raise FirstRankError(f"rank 0 failed: {told['error']}")
    return told["result"]


def _broadcast(data: bytes) -> bytes:
    """Return the bytes of rank 0."""
    length = torch.tensor([len(data)])
    dist.broadcast(length, src=0)
    own = bytearray(data) if is_first() else bytearray(int(length))
    content = torch.frombuffer(own, dtype=torch.uint8)
    dist.broadcast(content, src=0)
    return bytes(content.numpy().tobytes())


DATA, EXPERT = "data", "expert"
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
        backend: "gloo" on CPU and "nccl" on CUDA by default.
        init_method: where to meet, if not where torchrun says, for example `file:///tmp/meeting`.
    """
    require(timeout > 0, f"the timeout must be positive, got {timeout}")
    missing = [name for name in TORCHRUN if name not in os.environ]
    require(
        not (set(missing) - ({"MASTER_ADDR", "MASTER_PORT"} if init_method else set())),
        f"{', '.join(missing)} not set: start the processes with torchrun",
    )
    dist.init_process_group(
        backend or ("nccl" if torch.cuda.is_available() else "gloo"),
        init_method=init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_mesh(
    expert_ranks: int | None = None, *, timeout: float = TIMEOUT, device: str = "cpu"
) -> DeviceMesh:
    """Return all ranks as a grid (data, expert); every rank must call this.

    `init_device_mesh` would give the groups a timeout of half an hour instead of that of the run.

    Args:
        expert_ranks: ranks that share the experts of a layer; all by default. It divides the
            number of ranks.
        timeout: seconds after which a message within a row or column is an error.
        device: type of the devices.
    """
    world = dist.get_world_size()
    columns = world if expert_ranks is None else expert_ranks
    check_columns(columns, world)
    grid = torch.arange(world).view(-1, columns)
    groups = [_own_group(lines.tolist(), timeout) for lines in (grid.T, grid)]
    return DeviceMesh.from_group(groups, device, mesh=grid, mesh_dim_names=(DATA, EXPERT))


def check_columns(expert_ranks: int, ranks: int) -> None:
    """Raise if the ranks are not divisible into rows of `expert_ranks`."""
    require(
        1 <= expert_ranks <= ranks and ranks % expert_ranks == 0,
        f"expert_ranks must divide the number of ranks, {ranks}, got {expert_ranks}",
    )


def _own_group(lines: list[list[int]], timeout: float) -> dist.ProcessGroup:
    """Return the group of this rank's line; all ranks make all groups, in the same order."""
    limit = timedelta(seconds=timeout)
    groups = [dist.new_group(line, timeout=limit) for line in lines]
    own = next(g for g, line in zip(groups, lines, strict=True) if dist.get_rank() in line)
    assert isinstance(own, dist.ProcessGroup)
    return own


def world_mesh(device: str = "cpu") -> DeviceMesh:
    """Return all ranks in one line, in the group of `join_processes`."""
    world = dist.group.WORLD
    assert world is not None
    return DeviceMesh.from_group(world, device, mesh_dim_names=("world",))


@contextmanager
def naming_lost_ranks(doing: str) -> Iterator[None]:
    """Raise `LostRankError` for the errors of a collective whose peer is gone.

    Args:
        doing: what the process does in the block, and how to resume.
    """
    try:
        yield
    except RuntimeError as error:
        told = str(error).lower()
        if not isinstance(error, dist.DistError) and not any(w in told for w in LOSS_WORDS):
            raise
        rank = dist.get_rank() if dist.is_initialized() else "?"
        raise LostRankError(
            f"rank {rank}: another rank has died or does not answer ({doing}): {str(error)[:200]}"
        ) from error
