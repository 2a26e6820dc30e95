"""Read logs of routes: JSON lines and CSV with columns that are recognised by name.

A line holds the choice of one token in one layer (a list of experts, a mapping of experts to
weights, or numbered columns), one expert of it, or lists of the choices of all tokens of a layer or
of all layers for a token. Columns are recognised by the names in `COLUMNS`, also in camel case, and
the type of their first value; the notes of the routes say what was taken for what, and what was
left out:

    {"type": "route", "req_id": "r0", "token_idx": 7, "layer": 0,
     "topk_ids": [4, 19], "topk_weights": [0.31, 0.22]}
    layer_id,token_id,expert_0,expert_1
    {"num_experts": 64, "activations": [{"layer": 0, "token_idx": 0, "expert_idx": 15, ...}]}

The last form is that of MoE-Atlas: an object per text, its choices in `activations`. Lines of
another `type` without experts (a header) are left out, but may state the number of experts. Every
layer must have the same tokens. Files are plain or gzip; every error names the line and the field.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tieline.core.errors import TraceError, naming_unparsable_file, require
from tieline.core.records import parse_json
from tieline.core.untrusted_input import open_unpacked, require_readable
from tieline.trace.readers.array_files import (
    csv_head,
    is_json_text,
    read_csv_lines,
    read_json_lines,
    read_json_values,
)
from tieline.trace.readers.routes import Routes
from tieline.trace.record import MOST_EXPERTS, MOST_LAYERS

COLUMNS = {
    "experts": [
        "topk_ids",
        "topk_indices",
        "topk_idx",
        "topk_experts",
        "top_k_ids",
        "top_k_indices",
        "top_k_index",
        "top_k_experts",
        "topk_index",
        "top_experts",
        "experts",
        "expert_ids",
        "expert_indices",
        "selected_experts",
        "chosen_experts",
        "routed_experts",
        "routing_indices",
        "routing",
        "indices",
        "topk",
        "top_k",
    ],
    "expert": ["expert", "expert_id", "expert_idx", "expert_index"],
    "weights": [
        "topk_weights",
        "topk_weight",
        "weights",
        "expert_weights",
        "routing_weights",
        "gate_weights",
        "gate_weight",
        "combine_weights",
        "top_k_weights",
        "topk_probs",
        "topk_scores",
        "probs",
        "probabilities",
        "weight",
        "prob",
        "gate_prob",
        "gate",
    ],
    "layer": [
        "layer",
        "layer_id",
        "layer_idx",
        "layer_index",
        "layer_number",
        "layer_no",
        "moe_layer",
        "layer_name",
        "block",
        "module",
        "module_name",
        "router",
    ],
    "token": [
        "token_idx",
        "token_index",
        "token_pos",
        "token_position",
        "position",
        "pos",
        "token",
        "tok",
        "token_no",
        "row",
        "token_id",
        "tok_id",
    ],
    "document": [
        "document",
        "doc",
        "doc_id",
        "document_id",
        "req_id",
        "request_id",
        "request",
        "seq_id",
        "sequence_id",
        "sequence",
        "seq",
        "sample_id",
        "sample",
        "prompt_id",
        "prompt_idx",
        "batch_idx",
    ],
    "id": ["input_id", "input_ids", "vocab_id", "token_id", "id"],
}
"""Names of columns by role, the least ambiguous first."""
MEANINGS = {
    "experts": "the chosen experts",
    "expert": "one chosen expert per line",
    "weights": "their combine weights",
    "layer": "the layer",
    "token": "the token",
    "document": "the document",
    "id": "the token id",
}
EXPERT_COUNT_FIELDS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts")
ACTIVATIONS = "activations"
_NUMBERED_COLUMN = re.compile(
    r"(expert|expert_id|topk_id|topk|top|id|e|weight|prob|w|(?:topk|expert|gate)_weight)_?(\d{1,3})"
    r"(?:_(expert|id|idx|index|weight|prob|gate))?"
)
_WEIGHT_WORDS = ("weight", "prob", "w", "gate", "topk_weight", "expert_weight", "gate_weight")
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|-|\s+")
_SAMPLED_LINES = 64
_INTEGER = re.compile(r"(-?[0-9]{1,18})(\.0+)?")


class LogColumns(NamedTuple):
    """The roles of a log's fields.

    Attributes:
        fields: name of the field by its role; names of numbered columns are joined by spaces.
        others: fields without a role.
    """

    fields: dict[str, str]
    others: tuple[str, ...]


class RowChoice(NamedTuple):
    """The experts of one token in one layer, or one of them.

    Attributes:
        label: file and line.
        document: name of the document.
        token: index of the token; -1 if unknown.
        layer: name of the layer.
        experts: expert ids.
        weights: combine weights; empty if unknown.
        token_id: id of the token in the vocabulary; -1 if unknown.
    """

    label: str
    document: str
    token: int
    layer: str
    experts: tuple[int, ...]
    weights: tuple[float, ...]
    token_id: int


def recognised_columns(value: Any) -> LogColumns | None:
    """Return the roles of the fields of a log's line; None if no field holds experts."""
    if not isinstance(value, Mapping):
        return None
    lower = {_plain_name(str(name)): str(name) for name in value}
    fields = _numbered_columns(lower)
    for role, names in COLUMNS.items():
        taken = set(" ".join(fields.values()).split())
        free = [lower[name] for name in names if name in lower and lower[name] not in taken]
        fitting = [name for name in free if _value_fits_role(value[name], role)]
        if role not in fields and fitting and not (role == "expert" and "experts" in fields):
            fields[role] = fitting[0]
    if not {"experts", "expert"} & set(fields) or not {"layer", "token"} & set(fields):
        return None
    taken = set(" ".join(fields.values()).split())
    return LogColumns(fields, tuple(str(name) for name in value if str(name) not in taken))


def _plain_name(name: str) -> str:
    """Return the name of a column in lower case, its words joined by underscores."""
    lower = name.strip().lower()
    known = any(lower in names for names in COLUMNS.values())
    return lower if known else _WORD_START.sub("_", name.strip()).lower()


def _numbered_columns(lower: Mapping[str, str]) -> dict[str, str]:
    """Return columns expert_0, expert_1, ... and weight_0, ... by role, joined in number order."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for name, column in lower.items():
        match = _NUMBERED_COLUMN.fullmatch(name)
        if match:
            role = "weights" if {match[1], match[3]} & {*_WEIGHT_WORDS} else "experts"
            groups.setdefault(role, []).append((int(match[2]), column))
    return {role: " ".join(name for _, name in sorted(group)) for role, group in groups.items()}


def _value_fits_role(value: Any, role: str) -> bool:
    """Return whether a value is valid for a column of this role."""
    if role == "experts":
        held = list(value) if isinstance(value, Mapping) else _cell_numbers(value)
        return len(held) > 0 and not isinstance(value, int | float)
    if role == "weights":
        return len(_cell_numbers(value)) > 0
    if role in ("layer", "document"):
        return isinstance(value, int | str) and not isinstance(value, bool)
    return type(value) is int or (isinstance(value, str) and bool(_INTEGER.fullmatch(value)))


def _cell_numbers(value: Any) -> list[Any]:
    """Return the numbers of a list or cell, divided by spaces, commas, semicolons or bars."""
    if isinstance(value, list):
        return value
    if isinstance(value, int | float):
        return [value]
    if not isinstance(value, str):
        return []
    cells = re.split(r"[\s;,|]+", value.strip().strip("[]()").strip()) if value else []
    try:
        return [_number_of_text(cell) for cell in cells]
    except ValueError:
        return []


def _number_of_text(text: str) -> int | float:
    """Return the number in a text; whole numbers may be written as 3.0, as pandas writes them."""
    whole = _INTEGER.fullmatch(text)
    return int(whole[1]) if whole else float(text)


def log_format(head: bytes, name: str) -> str | None:
    """Return "log" or "moe-atlas" if the first bytes of a text file hold such lines, else None."""
    lines = [line for line in head.split(b"\n") if line.strip()][:_SAMPLED_LINES]
    if not lines or lines[0].lstrip()[:1] not in (b"{", b"["):
        names, cells = csv_head(head)
        return "log" if recognised_columns(dict(zip(names, cells, strict=False))) else None
    if re.search(rb'"activations"\s*:\s*\[', head):
        return "moe-atlas"
    for line in lines:
        try:
            value = parse_json(line, name)
        except TraceError:
            return None
        if recognised_columns(value):
            return "log"
    return None


def log_routes(path: str | Path) -> Routes:
    """Read the routes in a log of JSON lines, a JSON list or CSV, plain or gzip."""
    file = Path(path)
    require_readable(file)
    log = _LogReader(str(file))
    with naming_unparsable_file(file):
        choices = list(log.choices(_log_lines(file)))
    require(bool(choices), f"{file}: no line holds experts", TraceError)
    return _routes_of_choices(choices, "log", log)


def _log_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield label and value of each line, or of each entry of a JSON list."""
    if not is_json_text(file):
        yield from read_csv_lines(file)
        return
    with open_unpacked(file) as stream:
        is_list = stream.read(64).lstrip()[:1] == b"["
    if not is_list:
        yield from read_json_lines(file)
        return
    for label, values in read_json_values(file):
        yield from ((f"{label}: [{number}]", value) for number, value in enumerate(values))


def atlas_routes(path: str | Path) -> Routes:
    """Read the routes of MoE-Atlas from JSON, or an object per line; each text is a document."""
    values = read_json_values(path)
    texts = [
        (label, text)
        for label, value in values
        for text in (value if isinstance(value, list) else [value])
    ]
    log, choices = _LogReader(str(path)), []
    for number, (label, text) in enumerate(texts):
        rows = text.get(ACTIVATIONS) if isinstance(text, Mapping) else None
        if not isinstance(rows, list):
            raise TraceError(f"{label}: field {ACTIVATIONS} is missing, or is no list")
        log.read_expert_count(text)
        lines = ((f"{label}: {ACTIVATIONS}[{i}]", row) for i, row in enumerate(rows))
        choices += [choice._replace(document=str(number)) for choice in log.choices(lines)]
    require(bool(choices), f"{path}: no text has {ACTIVATIONS}", TraceError)
    return _routes_of_choices(_atlas_order(choices), "moe-atlas", log)


def _atlas_order(choices: list[RowChoice]) -> list[RowChoice]:
    """Sort choices by document, layer and token, the largest weight first."""
    return sorted(
        choices, key=lambda x: (int(x.document), x.layer, x.token, *(-w for w in x.weights))
    )


class _LogReader:
    """Reads the choices of a log's lines, and keeps what they state of the whole file.

    Attributes:
        name: the file.
        columns: roles of the fields, from the first line with experts.
        kind: `type` of the lines with experts.
        n_experts: number of experts that a line states.
        skipped: number of lines without experts, by their type.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.columns: LogColumns | None = None
        self.kind: Any = None
        self.n_experts: int | None = None
        self.skipped: dict[str, int] = {}

    def read_expert_count(self, value: Mapping[str, Any]) -> None:
        """Store the number of experts, if this line states it."""
        stated = next((value[name] for name in EXPERT_COUNT_FIELDS if name in value), None)
        if type(stated) is int and 0 < stated <= MOST_EXPERTS:
            self.n_experts = stated

    def choices(self, lines: Iterable[tuple[str, Any]]) -> Iterator[RowChoice]:
        """Yield the choice of each line; lines of another type are counted and skipped."""
        for label, value in lines:
            if not isinstance(value, Mapping):
                raise TraceError(f"{label}: must hold a JSON object")
            kind = value.get("type")
            if self.columns is None:
                self.columns, self.kind = recognised_columns(value), kind
            if self.columns is None or kind != self.kind:
                self._skip_line(label, value)
                continue
            for line in _plain_lines(label, value, self.columns.fields):
                yield self._line_choice(label, *line)

    def _skip_line(self, label: str, value: Mapping[str, Any]) -> None:
        """Count a line without experts; raises if it has no type."""
        kind = value.get("type")
        if kind is None:
            raise TraceError(
                f"{label}: no field of experts was recognised, got {list(value)[:8]!r:.200}; "
                f"experts are called {', '.join(COLUMNS['experts'][:5])}, ..."
            )
        self.read_expert_count(value)
        self.skipped[str(kind)] = self.skipped.get(str(kind), 0) + 1

    def _line_choice(
        self, label: str, value: Mapping[str, Any], fields: Mapping[str, str]
    ) -> RowChoice:
        """Return the choice in a line; raises for invalid fields."""
        single = "experts" not in fields
        experts = _number_list_field(
            value, fields["expert" if single else "experts"], label, integers=True
        )
        weights = _number_list_field(value, fields["weights"], label) if "weights" in fields else ()
        require(
            len(weights) in (0, len(experts)),
            f"{label}: {len(weights)} {fields.get('weights')} for {len(experts)} experts",
            TraceError,
        )
        return RowChoice(
            label,
            str(_required_field(value, fields["document"], label)) if "document" in fields else "",
            _whole_number_field(value, fields["token"], label) if "token" in fields else -1,
            _layer_field(_required_field(value, fields["layer"], label), label)
            if "layer" in fields
            else "0",
            tuple(experts),
            tuple(map(float, weights)),
            _whole_number_field(value, fields["id"], label) if "id" in fields else -1,
        )

    def notes(self) -> list[str]:
        """Return sentences about the roles of the fields, and about fields and lines left out."""
        if self.columns is None:
            return []
        taken = [f"{name} for {MEANINGS[role]}" for role, name in self.columns.fields.items()]
        notes = [f"took {', '.join(taken)}"]
        others = [name for name in self.columns.others if name not in ("type", "")]
        if others:
            notes.append(f"left out the fields {', '.join(others[:8])}")
        for kind, count in islice(self.skipped.items(), 4):
            notes.append(f"{count} lines of type {kind!r:.40} hold no routes")
        return notes


class _PlainLine(NamedTuple):
    """A line that holds one choice, and the roles of its fields."""

    value: Mapping[str, Any]
    fields: Mapping[str, str]


_OWN_WEIGHTS, _OWN_LAYER = "(weights)", "(layer)"
"""Fields that a line gets where its experts come with weights, or by layer."""


def _plain_lines(
    label: str, value: Mapping[str, Any], fields: Mapping[str, str]
) -> Iterator[_PlainLine]:
    """Yield a line for every choice of a line.

    A mapping has the weights of its experts. A list of lists holds the tokens of a layer in a pass,
    or the layers of a token.
    """
    name = fields.get("experts", "")
    experts, weights = value.get(name), value.get(fields.get("weights", ""))
    if isinstance(experts, Mapping):
        own = {name: _numbered_keys(experts, name, label), _OWN_WEIGHTS: list(experts.values())}
        yield _PlainLine({**value, **own}, {**fields, "weights": _OWN_WEIGHTS})
        return
    if not isinstance(experts, list) or not any(isinstance(ids, list) for ids in experts):
        yield _PlainLine(value, fields)
        return
    message = f"{label}: field {name} holds lists, though the line is of one token in one layer"
    require(("layer" in fields) != ("token" in fields), message, TraceError)
    paired = weights is None or (isinstance(weights, list) and len(weights) == len(experts))
    lists = f"{label}: field {fields.get('weights')} must hold {len(experts)} lists as {name} does"
    require(paired, lists, TraceError)
    for number, ids in enumerate(experts):
        own = {name: ids, **({} if weights is None else {fields["weights"]: weights[number]})}
        if "layer" in fields:
            yield _PlainLine({**value, **own}, fields)
        else:
            yield _PlainLine({**value, **own, _OWN_LAYER: number}, {**fields, "layer": _OWN_LAYER})


def _numbered_keys(experts: Mapping[Any, Any], name: str, label: str) -> list[int]:
    """Return the experts of a mapping to weights; raises unless both are numbers."""
    keys = [match and int(match[1]) for match in (_INTEGER.fullmatch(str(key)) for key in experts)]
    fits = all(type(weight) in (int, float) for weight in experts.values())
    numbers = [key for key in keys if key is not None]
    message = f"{label}: field {name} must map experts to weights, got {dict(experts)!r:.60}"
    require(fits and len(numbers) == len(keys), message, TraceError)
    return numbers


def _required_field(value: Mapping[str, Any], name: str, label: str) -> Any:
    """Return the value of a field; raises if it is missing."""
    if value.get(name) is None:
        raise TraceError(f"{label}: field {name} is missing")
    return value[name]


def _whole_number_field(value: Mapping[str, Any], name: str, label: str) -> int:
    """Return the integer >= 0 in a field; raises for other values."""
    number = _required_field(value, name, label)
    if isinstance(number, str) and _INTEGER.fullmatch(number):
        number = _number_of_text(number)
    if type(number) is not int or not 0 <= number < 1 << 40:
        raise TraceError(f"{label}: field {name} must be a whole number >= 0, got {number!r:.40}")
    return number


def _layer_field(layer: Any, label: str) -> str:
    """Return the name of a layer that is given by number or name."""
    numeral = isinstance(layer, int | str) and not isinstance(layer, bool)
    fits = numeral and 0 < len(str(layer)) <= 256
    require(fits, f"{label}: field layer must be a number or a name, got {layer!r:.40}", TraceError)
    return str(layer)


def _number_list_field(
    value: Mapping[str, Any], names: str, label: str, *, integers: bool = False
) -> Sequence[Any]:
    """Return the numbers of a field, or of numbered columns."""
    cells = [_required_field(value, name, label) for name in names.split()]
    cell = cells[0] if len(cells) == 1 else " ".join(map(str, cells))
    numbers = _cell_numbers(cell) if isinstance(cell, list | int | float | str) else []
    kinds = (int,) if integers else (int, float)
    fits = bool(numbers) and all(type(x) in kinds and abs(x) < 1 << 31 for x in numbers)
    need = "whole numbers" if integers else "numbers"
    require(fits, f"{label}: field {names} must hold {need}, got {cell!r:.60}", TraceError)
    return numbers


class _LogRow(NamedTuple):
    """All experts of a token in one layer; `key` is (document, token)."""

    key: tuple[str, int]
    label: str
    experts: tuple[int, ...]
    weights: tuple[float, ...]
    token_id: int


def _rows_by_layer(choices: Sequence[RowChoice]) -> dict[str, list[_LogRow]]:
    """Return the rows of each layer in file order; joins lines that hold one expert each."""
    layers: dict[str, list[_LogRow]] = {}
    for (document, layer, token), lines in groupby(
        choices, lambda x: (x.document, x.layer, x.token)
    ):
        group = list(lines)
        joined = group if token < 0 or len(group[0].experts) > 1 else [_joined_choice(group)]
        rows = layers.setdefault(layer, [])
        require(
            len(layers) <= MOST_LAYERS,
            f"{group[0].label}: more than {MOST_LAYERS} layers",
            TraceError,
        )
        for x in joined:
            number = len(rows) if token < 0 else token
            rows.append(_LogRow((document, number), x.label, x.experts, x.weights, x.token_id))
    return layers


def _joined_choice(group: list[RowChoice]) -> RowChoice:
    """Join lines that hold one expert each to one choice."""
    experts = tuple(expert for x in group for expert in x.experts)
    weights = tuple(weight for x in group for weight in x.weights)
    return group[0]._replace(experts=experts, weights=weights)


def _routes_of_choices(choices: Sequence[RowChoice], producer: str, log: _LogReader) -> Routes:
    """Return the routes of all choices, with layers aligned by token."""
    layers = _rows_by_layer(choices)
    numbered = all(name.isascii() and name.isdecimal() and len(name) < 10 for name in layers)
    names = sorted(layers, key=int) if numbered else list(layers)
    first = layers[names[0]]
    _check_equal_k(layers)
    unique = len({row.key for row in first}) == len(first)
    columns = [
        first,
        *(_aligned_rows(layers[name], first, name, names[0], unique) for name in names[1:]),
    ]
    _check_named_layers(first, log)
    documents, positions, note = _documents_and_positions(first, unique)
    order = np.argsort(documents, kind="stable")
    weighted = all(row.weights for column in columns for row in column)
    token_ids = np.array([row.token_id for row in first])
    experts = np.stack([np.array([row.experts for row in column]) for column in columns], 1)
    weights = None
    if weighted:
        weights = np.stack([np.array([row.weights for row in column]) for column in columns], 1)
    return Routes(
        experts[order],
        producer,
        log.name,
        token_ids[order] if (token_ids >= 0).all() else None,
        documents[order],
        positions[order],
        None if weights is None else weights[order].astype(np.float64),
        layer_names=tuple(f"layers.{name}" if numbered else name for name in names),
        n_experts=log.n_experts,
        notes=(*log.notes(), *note),
    )


def _check_named_layers(rows: Sequence[_LogRow], log: _LogReader) -> None:
    """Raise if each token has several lines in a row though no field names their layer."""
    fields = log.columns.fields if log.columns else {}
    if "layer" in fields or "token" not in fields:
        return
    lengths = [len(list(group)) for _, group in groupby(rows, lambda row: row.key)]
    if len(lengths) > 1 and lengths[0] > 1 and len(set(lengths)) == 1:
        others = log.columns.others if log.columns else ()
        raise TraceError(
            f"{rows[1].label}: token {rows[1].key[1]} comes {lengths[0]} times in a row and no "
            f"field names its layer: {', '.join(COLUMNS['layer'][:3])}, ...; left out were "
            f"{list(others)[:6]!r:.120}"
        )


def _check_equal_k(layers: Mapping[str, list[_LogRow]]) -> None:
    """Raise if a line has another number of experts than the first."""
    width = len(next(iter(layers.values()))[0].experts)
    for name, rows in layers.items():
        for row in rows:
            if len(row.experts) != width:
                raise TraceError(
                    f"{row.label}: {len(row.experts)} experts in layer {name!r:.40}, the first "
                    f"line has {width}"
                )


def _aligned_rows(
    rows: list[_LogRow], first: list[_LogRow], name: str, first_name: str, unique: bool
) -> list[_LogRow]:
    """Return the rows of a layer in the first layer's order; raises if their tokens differ."""
    if unique and len({row.key for row in rows}) == len(rows):
        by_key = {row.key: row for row in rows}
        first_keys = {row.key for row in first}
        for missing, where in (
            (next((row for row in first if row.key not in by_key), None), name),
            (next((row for row in rows if row.key not in first_keys), None), first_name),
        ):
            if missing is not None:
                raise TraceError(_missing_token_text(missing, where))
        return [by_key[row.key] for row in first]
    for row, first_row in zip(rows, first, strict=False):
        if row.key != first_row.key:
            raise TraceError(
                f"{row.label}: layer {name!r:.40} has token {row.key[1]} where layer "
                f"{first_name!r:.40} has token {first_row.key[1]}: layers are mixed"
            )
    if len(rows) != len(first):
        longer, where = (rows, first_name) if len(rows) > len(first) else (first, name)
        raise TraceError(_missing_token_text(longer[min(len(rows), len(first))], where))
    return rows


def _missing_token_text(row: _LogRow, layer: str) -> str:
    """Return the error message for a token that a layer lacks."""
    document = f" of document {row.key[0]!r:.40}" if row.key[0] else ""
    return (
        f"{row.label}: token {row.key[1]}{document} is missing in layer {layer!r:.40}: every layer "
        "must have the same tokens"
    )


def _documents_and_positions(
    rows: list[_LogRow], unique: bool
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return documents, positions and notes; token indices that restart begin a new document."""
    positions = np.array([row.key[1] for row in rows])
    names: dict[str, int] = {}
    numbers = np.array([names.setdefault(row.key[0], len(names)) for row in rows])
    if unique:
        return numbers, positions, []
    document_starts = (np.diff(numbers) != 0) | (np.diff(positions) <= 0)
    documents = np.concatenate([[0], np.cumsum(document_starts)])
    note = (
        f"the numbers of tokens begin anew {int(document_starts.sum())} times: each stretch, a "
        "pass of the engine, is a document of its own"
    )
    return documents, positions, [note]
