"""A sample of tokens that does not depend on the order in which they came.

Kept are the n tokens whose (document, position) has the smallest hash, with all that a layer
recorded of them. Which tokens these are follows from the set of tokens alone: every layer keeps the
same ones, and the sample of a union is the sample of the parts' samples.

A token that comes twice (the same document and position) is kept once. If the two records differ,
the one that is smaller byte by byte wins, whichever came first; token ids are compared first, so
that all layers agree on them.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tieline.errors import TraceError
from tieline.trace.hashing import SPAN, token_hash
from tieline.trace.layout import LAYER_TENSORS
from tieline.trace.record import LayerTrace

__all__ = ["KEYS", "ROW_FIELDS", "Rows", "SampleBuffer", "rows_of", "smallest_rows"]

Rows = Mapping[str, Tensor]
KEYS = ("tokens", "documents", "positions")
ROW_FIELDS = tuple(name for name, layout in LAYER_TENSORS.items() if layout.axes[0] == "tokens")


def rows_of(chunk: LayerTrace, keys: Rows, keep_inputs: bool = True) -> Rows:
    """Everything recorded per token, with the ids that tell tokens apart."""
    fields = {name: getattr(chunk, name) for name in ROW_FIELDS if keep_inputs or name != "inputs"}
    return {**keys, **{name: value for name, value in fields.items() if value is not None}}


class SampleBuffer:
    """Collects rows and now and then throws away those that cannot be in the sample any more."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: list[Rows] = []
        self._pending = 0
        self._limit = SPAN

    def add(self, rows: Rows, hashes: np.ndarray) -> None:
        """Take the rows whose hash does not exceed the largest one of a full sample."""
        chosen = torch.from_numpy(np.flatnonzero(hashes <= self._limit))
        if len(chosen) == 0 and self._parts:
            return
        self._parts.append({name: _row_copy(value, chosen) for name, value in rows.items()})
        self._pending += len(chosen)
        if self._pending >= 2 * self._size:
            self.rows()

    def rows(self) -> Rows:
        """The sample so far, in the order of documents and positions."""
        kept = smallest_rows(self._parts, self._size)
        self._parts, self._pending = [kept], len(kept["documents"])
        if self._pending == self._size:
            hashes = token_hash(kept["documents"], kept["positions"])
            self._limit = int(hashes.max(initial=-1))
        return kept


def smallest_rows(parts: list[Rows], size: int) -> Rows:
    """The `size` tokens of smallest hash among all parts, by document and position."""
    rows = {name: _joined(name, [part[name] for part in parts]) for name in _common_names(parts)}
    rows = _without_repeats(rows)
    hashes = token_hash(rows["documents"], rows["positions"])
    order = np.lexsort((rows["positions"], rows["documents"], hashes))[:size]
    kept = {name: value[torch.from_numpy(order)] for name, value in rows.items()}
    order = np.lexsort((kept["positions"], kept["documents"]))
    return {name: value[torch.from_numpy(order)] for name, value in kept.items()}


def _without_repeats(rows: Rows) -> Rows:
    """Each (document, position) once, with the smallest of its records."""
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
    """Rank of each row among all when compared byte by byte, token ids first."""
    names = [*KEYS, *(name for name in ROW_FIELDS if name in rows)]
    columns = [rows[name] if rows[name].ndim == 2 else rows[name][:, None] for name in names]
    words = torch.cat([part.contiguous().view(torch.uint8) for part in columns], dim=1).numpy()
    return np.unique(words, axis=0, return_inverse=True)[1].reshape(-1)


def _row_copy(value: Tensor, chosen: Tensor) -> Tensor:
    """Rows of their own memory, integers as int64, so that no batch is kept alive by its sample."""
    rows = value.detach().index_select(0, chosen)
    return rows if rows.is_floating_point() else rows.long()


def _common_names(parts: list[Rows]) -> tuple[str, ...]:
    names = {tuple(part) for part in parts}
    if len(names) != 1:
        raise TraceError(f"samples must hold the same fields, got {sorted(names)}")
    return names.pop()


def _joined(name: str, values: list[Tensor]) -> Tensor:
    kinds = {(value.dtype, tuple(value.shape[1:])) for value in values}
    if len(kinds) != 1:
        raise TraceError(f"{name} must have one type and width in all parts, got {kinds}")
    return torch.cat(values)
