"""Traces from CSV and JSONL tables of (layer, token, experts[, scores]).

    layer       number or name of the layer
    token       index of the token, >= 0
    experts     experts in order of rank; in CSV separated by spaces
    scores      optional: their selection scores, descending; in CSV separated by spaces
    document, position, id      optional integers: document, position and vocabulary id of the token

`docs/trace-format.md` has examples. Every error names the line.
"""

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tieline.core.errors import TraceError, naming_unparsable_file, require
from tieline.core.untrusted_input import require_readable
from tieline.trace.readers.array_files import read_csv_lines, read_json_lines
from tieline.trace.record import (
    MOST_EXPERTS,
    MOST_LAYERS,
    LayerFacts,
    LayerTrace,
    RoutingTrace,
    Units,
    check_trace,
    questions_without_data,
    smallest_id_dtype,
)

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl")
_REQUIRED = ("layer", "token", "experts")
_OPTIONAL = ("scores", "document", "position", "id")
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_BOUND = 1 << 53


class TableRow(NamedTuple):
    """One line of a table; `ids` are document, position and id of the token, None if absent."""

    label: str
    layer: str
    token: int
    experts: tuple[int, ...]
    scores: tuple[float, ...] | None
    ids: tuple[int | None, int | None, int | None]


def read_table_rows(path: str | Path) -> Iterator[TableRow]:
    """Read the rows of a CSV file with a header line, or of a JSONL file of objects."""
    file = Path(path)
    require_readable(file)
    kind = file.suffix.lower()
    named = kind in TABLE_SUFFIXES
    require(named, f"{file}: must end in {', '.join(TABLE_SUFFIXES)}", TraceError)
    with naming_unparsable_file(file):
        if kind != ".jsonl":
            for label, cells in read_csv_lines(file, _check_column_names):
                yield _table_row(_typed_csv_values(cells, label), label)
            return
        for label, values in read_json_lines(file):
            _check_column_names(list(values), label)
            yield _table_row(values, label)


def _typed_csv_values(cells: Mapping[str, str], label: str) -> dict[str, object]:
    """Convert the cells of a CSV line to the values that a JSON line holds."""
    values: dict[str, object] = {
        name: text if name == "layer" else _integer_of_text(text, name, label)
        for name, text in cells.items()
        if name not in ("experts", "scores")
    }
    experts = cells["experts"].split()
    values["experts"] = [_integer_of_text(text, "experts", label) for text in experts]
    if "scores" in cells:
        values["scores"] = [_real_of_text(text, label) for text in cells["scores"].split()]
    return values


def _table_row(values: Mapping[str, object], label: str) -> TableRow:
    """Return the row of a line of a table; raises if a value is invalid."""
    layer, token, experts = (values[name] for name in _REQUIRED)
    named = isinstance(layer, int | str) and not isinstance(layer, bool)
    if not named or not 0 < len(str(layer)) <= 256:
        raise TraceError(f"{label}: layer must be a number or a name, got {layer!r:.40}")
    scores = values.get("scores")
    if scores is not None:
        scores = _descending_row_scores(_list_cell(scores, "scores", label), label)
    document, position, token_id = (
        None if values.get(name) is None else _whole_number_cell(values[name], name, label, -_BOUND)
        for name in ("document", "position", "id")
    )
    return TableRow(
        label,
        str(layer),
        _whole_number_cell(token, "token", label, 0),
        tuple(
            _whole_number_cell(expert, "experts", label, 0)
            for expert in _list_cell(experts, "experts", label)
        ),
        scores,
        (document, position, token_id),
    )


def has_table_columns(names: Collection[str]) -> bool:
    """Return whether these are the columns of a table, not of a log that calls some alike."""
    known = {*_REQUIRED, *_OPTIONAL}
    return set(_REQUIRED) <= set(names) and ("scores" in names or set(names) <= known)


def _check_column_names(names: list[str], label: str) -> None:
    """Raise if columns of a table are missing or unknown."""
    missing = [name for name in _REQUIRED if name not in names]
    unknown = [name for name in names if name not in (*_REQUIRED, *_OPTIONAL)]
    if missing or unknown:
        raise TraceError(f"{label}: columns {missing} missing, {unknown[:5]!r:.200} unknown")


def _list_cell(value: object, name: str, label: str) -> list[object]:
    """Return a value if it is a list with at least one entry, else raise."""
    if not isinstance(value, list) or not value:
        raise TraceError(f"{label}: {name} must be a list of at least one, got {value!r:.40}")
    return value


def _whole_number_cell(value: object, name: str, label: str, least: int) -> int:
    """Return a value if it is an integer in least ... 2^53 - 1, else raise."""
    if type(value) is not int or not least <= value < _BOUND:
        raise TraceError(f"{label}: {name} must be integers >= {least}, got {value!r:.40}")
    return value


def _descending_row_scores(values: list[object], label: str) -> tuple[float, ...]:
    """Return the scores of a line; raises unless they are finite and descend."""
    scores: list[float] = []
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, int | float) or not is_number or not math.isfinite(value):
            raise TraceError(f"{label}: scores must be finite numbers, got {value!r:.40}")
        scores.append(float(value))
    ordered = all(a >= b for a, b in itertools.pairwise(scores))
    require(ordered, f"{label}: scores must descend, in the order of the experts", TraceError)
    return tuple(scores)


def _integer_of_text(text: str, name: str, label: str) -> int:
    """Return the integer in a CSV cell, else raise."""
    if _INTEGER.fullmatch(text) is None:
        raise TraceError(f"{label}: {name} must be integers, got {text!r:.40}")
    return int(text)


def _real_of_text(text: str, label: str) -> float:
    """Return the real number in a CSV cell, else raise."""
    try:
        return float(text)
    except ValueError as error:
        raise TraceError(f"{label}: scores must be numbers, got {text!r:.40}") from error


Table = dict[str, dict[int, TableRow]]


def import_table(
    path: str | Path,
    n_experts: int | None = None,
    k: int | None = None,
    units: Units = "logits",
) -> RoutingTrace:
    """Read a trace from a CSV or JSONL file with one line per layer and token.

    All layers must have the same tokens, and all lines the same number of experts. Layers are
    ordered by number if all are numbers, else by first occurrence; tokens by index.

    Args:
        path: a file that ends in .csv, .tsv or .jsonl.
        n_experts: number of experts E; by default one more than the largest id in the file.
        k: number of experts of each line that were chosen, the others being further ranks; by
            default all, which gives no gaps.
        units: units of the scores.
    """
    table = _read_table(path)
    lines = [row for rows in table.values() for row in rows.values()]
    ranks = _common_count([(len(row.experts), row) for row in lines], "experts")
    scored = _common_count([(len(row.scores or ()), row) for row in lines], "scores")
    require(scored in (0, ranks), f"{path}: {scored} scores for {ranks} experts", TraceError)
    tokens = _common_tokens(table, path)
    largest = max(max(row.experts) for row in lines)
    experts = max(largest + 1, ranks) if n_experts is None else n_experts
    if largest >= min(experts, MOST_EXPERTS):
        raise TraceError(
            f"{path}: experts must lie in 0 ... {min(experts, MOST_EXPERTS) - 1}, got {largest}"
        )
    facts = LayerFacts(experts, ranks if k is None else k, units, affine=False)
    layers = tuple(
        _table_layer(name, facts, table[name], tokens) for name in _ordered_layers(table)
    )
    documents, positions, token_ids = _table_token_ids(table, tokens)
    provenance = {
        "source": "table",
        "file": Path(path).name,
        "n_experts": "inferred from the largest id" if n_experts is None else "given",
        "cannot_answer": questions_without_data(layers),
    }
    trace = RoutingTrace(layers, token_ids, documents, positions, provenance=provenance)
    check_trace(trace)
    return trace


def _read_table(path: str | Path) -> Table:
    """Read the rows by layer and token; raises if a pair occurs twice."""
    table: Table = {}
    for row in read_table_rows(path):
        rows = table.setdefault(row.layer, {})
        require(len(table) <= MOST_LAYERS, f"{path}: more than {MOST_LAYERS} layers", TraceError)
        first = rows.setdefault(row.token, row)
        if first is not row:
            raise TraceError(
                f"{row.label}: layer {row.layer!r} and token {row.token} were on "
                f"{first.label.rpartition(': ')[2]} already"
            )
    require(bool(table), f"{path}: has no rows", TraceError)
    return table


def _common_count(counts: Sequence[tuple[int, TableRow]], what: str) -> int:
    """Return the count that all rows share; raises at the first row that differs."""
    first = counts[0][0]
    for count, row in counts:
        if count != first:
            raise TraceError(f"{row.label}: {count} {what}, other lines have {first}")
    return first


def _common_tokens(table: Table, path: str | Path) -> list[int]:
    """Return the tokens in ascending order; raises unless all layers have the same."""
    first_name, first = next(iter(table.items()))
    for name, rows in table.items():
        different = sorted(rows.keys() ^ first.keys())
        if different:
            raise TraceError(
                f"{path}: token {different[0]} is in only one of layers {first_name!r:.80} and "
                f"{name!r:.80}: every layer must have the same tokens"
            )
    return sorted(first)


def _ordered_layers(table: Table) -> list[str]:
    """Return the names of the layers by number if all are numbers, else as they occur."""
    if all(name.isascii() and name.isdecimal() and len(name) < 19 for name in table):
        return sorted(table, key=int)
    return list(table)


def _table_layer(
    name: str, facts: LayerFacts, rows: dict[int, TableRow], tokens: list[int]
) -> LayerTrace:
    """Return the trace of one layer of a table."""
    ordered = [rows[token] for token in tokens]
    dtype = smallest_id_dtype(facts.n_experts)
    experts = torch.tensor([row.experts for row in ordered], dtype=dtype, device="cpu")
    scores = None
    if ordered[0].scores is not None:
        scores = torch.tensor([row.scores for row in ordered], dtype=torch.float64, device="cpu")
    return LayerTrace(name, facts, experts, scores)


def _table_token_ids(table: Table, tokens: list[int]) -> tuple[Tensor, ...]:
    """Return documents, positions and ids: by default document 0, the token's index and -1."""
    ids_of_token: dict[int, tuple[int | None, ...]] = {}
    for rows in table.values():
        for token, row in rows.items():
            first = ids_of_token.setdefault(token, row.ids)
            require(
                first == row.ids,
                f"{row.label}: token {token} has {row.ids} as document, position and id, and "
                f"{first} elsewhere",
                TraceError,
            )
    ids = [
        tuple(
            given if given is not None else other
            for given, other in zip(ids_of_token[token], (0, token, -1), strict=True)
        )
        for token in tokens
    ]
    return torch.tensor(ids, dtype=torch.int64, device="cpu").unbind(dim=1)
