"""How the documents of a trace were run: their row of a batch, and where decoding began.

Whoever runs documents knows it and notes it in the provenance, one number per document:

    document_runs.rows       row of the document in its batch; left out for single documents
    document_runs.prompts    its tokens before the first step of a single token; left out where
                             nothing was decoded

document_runs     these numbers of the passes of a capture
batch_rows        row of the batch of each token
decoded_tokens    whether each token was decoded
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int

from tieline.trace.record import RoutingTrace

KEY = "document_runs"
"""Name in the provenance."""


def document_runs(passes: Sequence[RoutingTrace]) -> dict[str, list[int]]:
    """Return what successive forward passes say about their documents; empty if nothing.

    Args:
        passes: the tokens of each pass, rows of a batch in order.
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
    return {name: _by_number(values) for name, values in noted.items() if values}


def _by_number(values: dict[int, int]) -> list[int]:
    """Values of documents 0, 1, ...; -1 where there is none."""
    return [values.get(number, -1) for number in range(max(values) + 1)]


def batch_rows(
    trace: RoutingTrace, tokens: Int[torch.Tensor, " _"]
) -> Int[np.ndarray, " _"] | None:
    """Return the row of its batch of each of these tokens, -1 if unknown; None without a note."""
    return _noted(trace, "rows", trace.documents[tokens].numpy())


def decoded_tokens(
    trace: RoutingTrace, tokens: Int[torch.Tensor, " _"]
) -> Bool[np.ndarray, " _"] | None:
    """Return whether each of these tokens was decoded; None without a note."""
    prompts = _noted(trace, "prompts", trace.documents[tokens].numpy())
    if prompts is None:
        return None
    return (prompts >= 0) & (trace.positions[tokens].numpy() >= prompts)


def _noted(
    trace: RoutingTrace, name: str, documents: Int[np.ndarray, " _"]
) -> Int[np.ndarray, " _"] | None:
    """The number noted for each document, -1 if there is none."""
    note: Any = trace.provenance.get(KEY)
    values = note.get(name) if isinstance(note, dict) else None
    if not isinstance(values, list) or not all(type(x) is int for x in values):
        return None
    table = np.array([*values, -1])
    return table[np.where(documents < len(values), documents, len(values))]
