"""Samples and distinct counts that depend on the set of tokens alone, not on order or sharding.

A sample keeps the n tokens with the smallest `token_hash`, with everything a layer recorded of
them: every layer keeps the same tokens, and the sample of a union is the sample of the parts'
samples. A token that comes twice is kept once; if its two records differ, the one that is smaller
byte by byte wins, token ids first, so that all layers agree.

`DistinctSketch` keeps the n = 4096 smallest different hashes. Fewer than n are all there were; else
(n - 1) / h_n, with h_n the n-th smallest on [0, 1), estimates their number with a relative standard
error of about 1 / sqrt(n - 2), 1.6 %. Sketches merge exactly.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from tieline.core.errors import TraceError
from tieline.trace.record import LAYER_TENSORS, SPAN, TOKEN_KEYS, LayerTrace, token_hash

Rows = Mapping[str, Tensor]


def rows_of(chunk: LayerTrace, keys: Rows, keep_inputs: bool = True) -> Rows:
    """Return everything recorded per token, with the ids of the tokens."""
    rows = {name: value for name, value in chunk.rows().items() if keep_inputs or name != "inputs"}
    return {**keys, **rows}


class SampleBuffer:
    """Collects rows and drops those that can no longer be in the sample."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: list[Rows] = []
        self._pending = 0
        self._limit = SPAN

    def add(self, rows: Rows, hashes: np.ndarray) -> None:
        """Add the rows whose hash does not exceed the largest one of a full sample."""
        chosen = torch.from_numpy(np.flatnonzero(hashes <= self._limit))
        if len(chosen) == 0 and self._parts:
            return
        self._parts.append({name: _row_copy(value, chosen) for name, value in rows.items()})
        self._pending += len(chosen)
        if self._pending >= 2 * self._size:
            self.rows()

    def rows(self) -> Rows:
        """Return the sample so far, ordered by document and position."""
        kept = smallest_rows(self._parts, self._size)
        self._parts, self._pending = [kept], len(kept["documents"])
        if self._pending == self._size:
            hashes = token_hash(kept["documents"], kept["positions"])
            self._limit = int(hashes.max(initial=-1))
        return kept


def smallest_rows(samples: list[Rows], size: int) -> Rows:
    """Return the `size` tokens with the smallest hash, ordered by document and position."""
    names = {tuple(sample) for sample in samples}
    if len(names) != 1:
        raise TraceError(f"samples must hold the same fields, got {sorted(names)}")
    joined = {name: _joined(name, [sample[name] for sample in samples]) for name in names.pop()}
    rows = _without_repeats(joined)
    hashes = token_hash(rows["documents"], rows["positions"])
    order = np.lexsort((rows["positions"], rows["documents"], hashes))[:size]
    kept = {name: value[torch.from_numpy(order)] for name, value in rows.items()}
    order = np.lexsort((kept["positions"], kept["documents"]))
    return {name: value[torch.from_numpy(order)] for name, value in kept.items()}


def _without_repeats(rows: Rows) -> Rows:
    """Keep each (document, position) once, with the smallest of its records."""
    documents, positions = rows["documents"].numpy(), rows["positions"].numpy()
    order = np.lexsort((positions, documents))
    same = (np.diff(documents[order]) == 0) & (np.diff(positions[order]) == 0)
    if not same.any():
        return rows
    order = np.lexsort((_bytes(rows), positions, documents))
    same = (np.diff(documents[order]) == 0) & (np.diff(positions[order]) == 0)
    first = torch.from_numpy(order[np.concatenate(([True], ~same))])
    return {name: value[first] for name, value in rows.items()}


def _bytes(rows: Rows) -> np.ndarray:
    """Rank of each row, compared byte by byte, token ids first."""
    names = [*TOKEN_KEYS, *(name for name in LAYER_TENSORS if name in rows)]
    columns = [rows[name] if rows[name].ndim == 2 else rows[name][:, None] for name in names]
    row_bytes = torch.cat(
        [column.contiguous().view(torch.uint8) for column in columns], dim=1
    ).numpy()
    return np.unique(row_bytes, axis=0, return_inverse=True)[1].reshape(-1)


def _row_copy(value: Tensor, chosen: Tensor) -> Tensor:
    """A copy of rows, integers as int64, so that a sample keeps no batch alive."""
    rows = value.detach().index_select(0, chosen)
    return rows if rows.is_floating_point() else rows.long()


def _joined(name: str, values: list[Tensor]) -> Tensor:
    kinds = {(value.dtype, tuple(value.shape[1:])) for value in values}
    if len(kinds) != 1:
        raise TraceError(f"{name} must have one type and width in all parts, got {kinds}")
    return torch.cat(values)


CAPACITY = 4096


class DistinctCount(NamedTuple):
    """Number of distinct elements: exact, or an estimate with a certain lower bound.

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
    """The smallest different hashes seen.

    Attributes:
        hashes: at most `CAPACITY` hashes, ascending.
    """

    hashes: Int[Tensor, " kept"]

    @classmethod
    def empty(cls) -> "DistinctSketch":
        """Return the sketch of nothing."""
        return cls(torch.zeros(0, dtype=torch.int64))

    def with_hashes(self, hashes: Int64[np.ndarray, " count"]) -> "DistinctSketch":
        """Return the sketch with these hashes added, in any order."""
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
        """Whether there may be more hashes than are kept."""
        return len(self.hashes) >= CAPACITY

    @property
    def ceiling(self) -> int:
        """Hashes from here on do not change the sketch."""
        return int(self.hashes[-1]) if self.full else SPAN

    def count(self) -> DistinctCount:
        """Return the number of different hashes seen."""
        return distinct_count(self.hashes.numpy(), CAPACITY)


def distinct_count(hashes: Int64[np.ndarray, " kept"], capacity: int) -> DistinctCount:
    """Estimate the number of distinct elements from their `capacity` smallest hashes."""
    kept = len(hashes)
    if kept < capacity:
        return DistinctCount(kept, kept, 0.0)
    estimate = max(kept, (kept - 1) * SPAN / (int(hashes.max()) + 1))
    return DistinctCount(estimate, kept, estimate / math.sqrt(max(kept - 2, 1)))
