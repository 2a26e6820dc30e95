"""Rows of CSV and JSONL files that say which experts a token chose in a layer.

    layer       number or name of the layer
    token       number of the token, 0 or more
    experts     experts in order of rank; in CSV separated by spaces
    scores      optional: their selection scores, descending; in CSV separated by spaces
    document, position, id      optional integers of the token

`docs/trace-format.md` has examples. Every refusal names the line.
"""

import csv
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tieline.errors import TraceError, require
from tieline.trace.folder_reader import parsing
from tieline.trace.jsonio import parse_json

__all__ = ["TableRow", "read_rows"]

MOST_BYTES = 4 << 30
_REQUIRED = ("layer", "token", "experts")
_OPTIONAL = ("scores", "document", "position", "id")
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_MOST = 1 << 53


class TableRow(NamedTuple):
    """What one line says; `ids` are document, position and id of the token, None where absent."""

    line: int
    layer: str
    token: int
    experts: tuple[int, ...]
    scores: tuple[float, ...] | None
    ids: tuple[int | None, int | None, int | None]


def read_rows(path: str | Path) -> Iterator[TableRow]:
    """The rows of a CSV file with a header line, or of a JSONL file of objects, by its suffix."""
    file = Path(path)
    require(file.is_file(), f"{file}: no such file", TraceError)
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows}
    known = file.suffix.lower() in readers
    require(known, f"{file}: must end in {' or '.join(readers)}", TraceError)
    size = file.stat().st_size
    require(size <= MOST_BYTES, f"{file}: {size} bytes, at most {MOST_BYTES} are read", TraceError)
    with parsing(file):
        yield from readers[file.suffix.lower()](file)


def _csv_rows(file: Path) -> Iterator[TableRow]:
    with file.open(encoding="utf-8", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        names = next(reader, [])
        _check_names(names, f"{file}: line 1")
        require(len(set(names)) == len(names), f"{file}: a column comes twice", TraceError)
        for cells in reader:
            where = f"{file}: line {reader.line_num}"
            full = len(cells) == len(names)
            require(full, f"{where}: {len(cells)} cells, the header has {len(names)}", TraceError)
            cell = dict(zip(names, cells, strict=True))
            values: dict[str, object] = {
                name: text if name == "layer" else _integer(text, name, where)
                for name, text in cell.items()
                if name not in ("experts", "scores")
            }
            values["experts"] = [
                _integer(text, "experts", where) for text in cell["experts"].split()
            ]
            if "scores" in cell:
                values["scores"] = [_real(text, where) for text in cell["scores"].split()]
            yield _row(values, reader.line_num, where)


def _jsonl_rows(file: Path) -> Iterator[TableRow]:
    with file.open("rb") as stream:
        for number, data in enumerate(stream, start=1):
            if data.strip():
                where = f"{file}: line {number}"
                values = parse_json(data, where)
                if not isinstance(values, dict):
                    raise TraceError(f"{where}: must hold a JSON object")
                _check_names(list(values), where)
                yield _row(values, number, where)


def _row(values: Mapping[str, object], line: int, where: str) -> TableRow:
    layer, token, experts = (values[name] for name in _REQUIRED)
    if (
        isinstance(layer, bool)
        or not isinstance(layer, int | str)
        or not 0 < len(str(layer)) <= 256
    ):
        raise TraceError(f"{where}: layer must be a number or a name, got {layer!r:.40}")
    scores = values.get("scores")
    document, position, identity = (
        None if values.get(name) is None else _whole(values[name], name, where, -_MOST)
        for name in ("document", "position", "id")
    )
    return TableRow(
        line,
        str(layer),
        _whole(token, "token", where, 0),
        tuple(_whole(expert, "experts", where, 0) for expert in _list(experts, "experts", where)),
        None if scores is None else _descending(_list(scores, "scores", where), where),
        (document, position, identity),
    )


def _check_names(names: list[str], where: str) -> None:
    missing = [name for name in _REQUIRED if name not in names]
    unknown = [name for name in names if name not in (*_REQUIRED, *_OPTIONAL)]
    require(
        not missing and not unknown,
        f"{where}: columns {missing} missing, {unknown[:5]!r:.200} unknown",
        TraceError,
    )


def _list(value: object, name: str, where: str) -> list[object]:
    if not isinstance(value, list) or not value:
        raise TraceError(f"{where}: {name} must be a list of at least one, got {value!r:.40}")
    return value


def _whole(value: object, name: str, where: str, least: int) -> int:
    if type(value) is not int or not least <= value < _MOST:
        raise TraceError(f"{where}: {name} must be integers >= {least}, got {value!r:.40}")
    return value


def _descending(values: list[object], where: str) -> tuple[float, ...]:
    scores: list[float] = []
    for value in values:
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, int | float) or not plain or not math.isfinite(value):
            raise TraceError(f"{where}: scores must be finite numbers, got {value!r:.40}")
        scores.append(float(value))
    ordered = all(a >= b for a, b in itertools.pairwise(scores))
    require(ordered, f"{where}: scores must descend, in the order of the experts", TraceError)
    return tuple(scores)


def _integer(text: str, name: str, where: str) -> int:
    require(
        _INTEGER.fullmatch(text) is not None,
        f"{where}: {name} must be integers, got {text!r:.40}",
        TraceError,
    )
    return int(text)


def _real(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise TraceError(f"{where}: scores must be numbers, got {text!r:.40}") from error
