"""How many different coalitions were seen, in bounded memory.

The n smallest different hashes are kept (n = 4096). Fewer than n are all there were; otherwise the
n-th smallest of D uniform hashes sits near n / D, and (n - 1) / h_n estimates D with a relative
standard error of about 1 / sqrt(n - 2), 1.6 %. The n smallest hashes of a union are the n smallest
of the parts' n smallest, so sketches merge exactly.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from tieline.trace.hashing import SPAN

__all__ = ["CAPACITY", "DistinctCount", "DistinctSketch", "distinct_count"]

CAPACITY = 4096


class DistinctCount(NamedTuple):
    """A number of different things: the count itself, or an estimate and what is certain.

    Attributes:
        value: the count, or its estimate.
        at_least: certain lower limit (two things with one 63-bit hash would count as one).
        standard_error: 0 where the count is exact.
    """

    value: float
    at_least: int
    standard_error: float


@dataclass(frozen=True, eq=False)
class DistinctSketch:
    """The smallest different hashes.

    Attributes:
        hashes: at most `CAPACITY` hashes, ascending.
    """

    hashes: Int[Tensor, " kept"]

    @classmethod
    def empty(cls) -> "DistinctSketch":
        """The sketch of nothing."""
        return cls(torch.zeros(0, dtype=torch.int64))

    def with_hashes(self, hashes: Int64[np.ndarray, " count"]) -> "DistinctSketch":
        """The sketch of what was seen before and of these hashes, in any order."""
        kept, hashes = self.hashes.numpy(), hashes[hashes < self.ceiling]
        if len(hashes) == 0:
            return self
        ordered = np.sort(np.concatenate((kept, hashes)))
        first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        return DistinctSketch(torch.from_numpy(ordered[first][:CAPACITY].copy()))

    def __add__(self, other: "DistinctSketch") -> "DistinctSketch":
        return self.with_hashes(other.hashes.numpy())

    @property
    def full(self) -> bool:
        """Whether there may be more than the hashes that are kept."""
        return len(self.hashes) >= CAPACITY

    @property
    def ceiling(self) -> int:
        """Hashes from here on change nothing."""
        return int(self.hashes[-1]) if self.full else SPAN

    def count(self) -> DistinctCount:
        """How many different things were seen."""
        return distinct_count(self.hashes.numpy(), CAPACITY)


def distinct_count(hashes: Int64[np.ndarray, " kept"], capacity: int) -> DistinctCount:
    """How many different things there are of which these are the `capacity` smallest hashes."""
    kept = len(hashes)
    if kept < capacity:
        return DistinctCount(kept, kept, 0.0)
    estimate = max(kept, (kept - 1) * SPAN / (int(hashes.max()) + 1))
    return DistinctCount(estimate, kept, estimate / math.sqrt(max(kept - 2, 1)))
