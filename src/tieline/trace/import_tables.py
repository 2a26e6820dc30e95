"""Traces from CSV and JSONL tables of (layer, token, experts[, scores])."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.trace.checks import check_trace
from tieline.trace.layerfile import MOST_LAYERS
from tieline.trace.layout import MOST_EXPERTS
from tieline.trace.limits import unanswered
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace, Units
from tieline.trace.table_rows import TableRow, read_rows

__all__ = ["import_table"]

Table = dict[str, dict[int, TableRow]]


def import_table(
    path: str | Path,
    n_experts: int | None = None,
    k: int | None = None,
    units: Units = "logits",
) -> RoutingTrace:
    """The trace in a CSV or JSONL file of one line per layer and token.

    Every layer must have the same tokens, every line as many experts. Layers are ordered by number
    if all are numbers, else as they come first; tokens by number.

    Args:
        path: a file that ends in .csv or .jsonl.
        n_experts: number of experts E; by default one more than the largest one in the file.
        k: how many experts of each line were chosen, the others being further ranks; by default
            all of them, in which case the scores tell no gaps.
        units: what the scores are.
    """
    table = _table(path)
    lines = [row for rows in table.values() for row in rows.values()]
    ranks = _same([(len(row.experts), row) for row in lines], "experts", path)
    scored = _same([(_n_scores(row), row) for row in lines], "scores", path)
    require(scored in (0, ranks), f"{path}: {scored} scores for {ranks} experts", TraceError)
    tokens = _same_tokens(table, path)
    largest = max(max(row.experts) for row in lines)
    experts = max(largest + 1, ranks) if n_experts is None else n_experts
    require(
        largest < min(experts, MOST_EXPERTS),
        f"{path}: experts must lie in 0 ... {min(experts, MOST_EXPERTS) - 1}, got {largest}",
        TraceError,
    )
    facts = LayerFacts(experts, ranks if k is None else k, units, affine=False)
    layers = tuple(_layer(name, facts, table[name], tokens) for name in _order(table))
    documents, positions, identities = _token_ids(table, tokens, path)
    provenance = {
        "source": "table",
        "file": Path(path).name,
        "n_experts": "inferred from the largest id" if n_experts is None else "given",
        "cannot_answer": unanswered(layers),
    }
    trace = RoutingTrace(layers, identities, documents, positions, provenance=provenance)
    check_trace(trace)
    return trace


def _table(path: str | Path) -> Table:
    table: Table = {}
    for row in read_rows(path):
        rows = table.setdefault(row.layer, {})
        require(len(table) <= MOST_LAYERS, f"{path}: more than {MOST_LAYERS} layers", TraceError)
        first = rows.setdefault(row.token, row)
        if first is not row:
            raise TraceError(
                f"{path}: line {row.line}: layer {row.layer!r} and token {row.token} were on line "
                f"{first.line} already"
            )
    require(bool(table), f"{path}: has no rows", TraceError)
    return table


def _same(counts: Sequence[tuple[int, TableRow]], what: str, path: str | Path) -> int:
    """The number that all rows have of something."""
    first = counts[0][0]
    for count, row in counts:
        if count != first:
            raise TraceError(f"{path}: line {row.line}: {count} {what}, other lines have {first}")
    return first


def _n_scores(row: TableRow) -> int:
    return 0 if row.scores is None else len(row.scores)


def _same_tokens(table: Table, path: str | Path) -> list[int]:
    """The tokens, which every layer must have, in order."""
    first_name, first = next(iter(table.items()))
    for name, rows in table.items():
        different = sorted(rows.keys() ^ first.keys())
        if different:
            raise TraceError(
                f"{path}: token {different[0]} is in only one of layers {first_name!r:.80} and "
                f"{name!r:.80}: every layer must have the same tokens"
            )
    return sorted(first)


def _order(table: Table) -> list[str]:
    if all(name.isascii() and name.isdecimal() and len(name) < 19 for name in table):
        return sorted(table, key=int)
    return list(table)


def _layer(
    name: str, facts: LayerFacts, rows: dict[int, TableRow], tokens: list[int]
) -> LayerTrace:
    ordered = [rows[token] for token in tokens]
    small = torch.int16 if facts.n_experts <= 1 << 15 else torch.int32
    experts = torch.tensor([row.experts for row in ordered], dtype=small)
    scores = None
    if ordered[0].scores is not None:
        scores = torch.tensor([row.scores for row in ordered], dtype=torch.float64)
    return LayerTrace(name, facts, experts, scores)


def _token_ids(table: Table, tokens: list[int], path: str | Path) -> tuple[Tensor, ...]:
    """Documents, positions and ids: by default document 0, the token's number and -1."""
    found: dict[int, tuple[int | None, ...]] = {}
    for rows in table.values():
        for token, row in rows.items():
            known = found.setdefault(token, row.ids)
            require(
                known == row.ids,
                f"{path}: line {row.line}: token {token} has {row.ids} as document, position and "
                f"id, and {known} elsewhere",
                TraceError,
            )
    ids = [
        tuple(
            own if own is not None else other
            for own, other in zip(found[token], (0, token, -1), strict=True)
        )
        for token in tokens
    ]
    return torch.tensor(ids, dtype=torch.int64).unbind(dim=1)
