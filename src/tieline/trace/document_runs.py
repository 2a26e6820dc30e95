"""How the documents of a trace were run: their row in the batch, and where decoding began.

A capture stores both in the provenance of its trace, as one number per document:

    document_runs.rows       row of the document in its batch; omitted for single documents
    document_runs.prompts    number of its tokens before the first single-token step; omitted if
                             nothing was decoded
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int

from tieline.core.errors import TraceError, require
from tieline.trace.record import RoutingTrace

PROVENANCE_KEY = "document_runs"
"""Key of these numbers in the provenance."""


def document_runs(passes: Sequence[RoutingTrace]) -> dict[str, list[int]]:
    """Return batch rows and prompt lengths of the documents of successive forward passes.

    Args:
        passes: the tokens of each pass, with the rows of its batch in order.
    """
    rows: dict[int, int] = {}
    prompts: dict[int, int] = {}
    decoding: set[int] = set()
    for tokens in passes:
        numbers, counts = torch.unique_consecutive(tokens.documents, return_counts=True)
        for row, (number, count) in enumerate(zip(numbers.tolist(), counts.tolist(), strict=True)):
            rows.setdefault(number, row)
            if number in prompts and count == 1:
                decoding.add(number)
            if number not in decoding:
                prompts[number] = prompts.get(number, 0) + count
    noted = {"rows": rows if any(rows.values()) else {}, "prompts": prompts if decoding else {}}
    return {name: _list_by_document(values) for name, values in noted.items() if values}


def _list_by_document(values: dict[int, int]) -> list[int]:
    """Return the values of documents 0, 1, ... as a list, with -1 for missing ones."""
    return [values.get(number, -1) for number in range(max(values) + 1)]


def batch_rows(
    trace: RoutingTrace, tokens: Int[torch.Tensor, " _"]
) -> Int[np.ndarray, " _"] | None:
    """Return each token's row in its batch, -1 if unknown; None if rows were not recorded."""
    return _recorded_numbers(trace, "rows", trace.documents[tokens].numpy())


def decoded_tokens(
    trace: RoutingTrace, tokens: Int[torch.Tensor, " _"]
) -> Bool[np.ndarray, " _"] | None:
    """Return whether each of these tokens was decoded; None if that was not recorded."""
    prompts = _recorded_numbers(trace, "prompts", trace.documents[tokens].numpy())
    if prompts is None:
        return None
    return (prompts >= 0) & (trace.positions[tokens].numpy() >= prompts)


def _recorded_numbers(
    trace: RoutingTrace, name: str, documents: Int[np.ndarray, " _"]
) -> Int[np.ndarray, " _"] | None:
    """Return the number recorded for each document, -1 if missing; None if none were recorded."""
    note: Any = trace.provenance.get(PROVENANCE_KEY)
    values = note.get(name) if isinstance(note, dict) else None
    if not isinstance(values, list) or not all(type(x) is int for x in values):
        return None
    table = np.array([*values, -1])
    return table[np.where(documents < len(values), documents, len(values))]


def document_rows(trace: RoutingTrace) -> list[np.ndarray]:
    """Return the row indices of each document, in order of position."""
    documents, positions = trace.documents.numpy(), trace.positions.numpy()
    order = np.lexsort((positions, documents))
    cuts = np.flatnonzero(np.diff(documents[order])) + 1
    per_document = np.split(order, cuts)
    for rows in per_document:
        twice = np.diff(positions[rows]) == 0
        require(
            not bool(twice.any()) and int(positions[rows[0]]) >= 0,
            f"document {int(documents[rows[0]])} has a position twice, or a negative one",
            TraceError,
        )
    return per_document
