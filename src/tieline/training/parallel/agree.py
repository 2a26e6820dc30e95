"""One rank does, all know: results and refusals of the first rank reach the others.

Only one process may make a folder, fetch data or write a checkpoint. If it fails, the others must
not wait for it until the timeout, so they raise what it raised. Messages are JSON: no pickle.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tieline.errors import TielineError

__all__ = ["FirstRankError", "first_rank", "is_first"]


class FirstRankError(TielineError):
    """Rank 0 has refused or failed, and tells of it itself."""


def is_first() -> bool:
    """Whether this process is rank 0, or alone."""
    return not dist.is_initialized() or dist.get_rank() == 0


def first_rank(action: Callable[[], Any]) -> Any:
    """What `action` returned on rank 0, on every rank; what it raised there is raised on all.

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
    """The bytes of rank 0."""
    length = torch.tensor([len(data)])
    dist.broadcast(length, src=0)
    own = bytearray(data) if is_first() else bytearray(int(length))
    content = torch.frombuffer(own, dtype=torch.uint8)
    dist.broadcast(content, src=0)
    return bytes(content.numpy().tobytes())
