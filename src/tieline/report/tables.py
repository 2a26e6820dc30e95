"""Tables of results, for pages and terminals alike."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.padding import Padding
from rich.table import Column as RichColumn
from rich.table import Table
from rich.text import Text

from tieline.core.text import short_names
from tieline.report.words.numbers import DASH, short_exponent, significant

if TYPE_CHECKING:  # tables of plain words are drawn without torch
    from tieline.analysis.inspect_records import Finding

MAX_FINDINGS_SHOWN = 6
"""Findings shown at once; a page folds the others, a terminal counts them."""

SEVERITY_STYLES = {"warning": "bold yellow", "notice": "cyan", "info": "dim"}

SEVERITY_SIGNS = {"warning": "▲", "notice": "◆", "info": "●"}

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table.

    Attributes:
        heading: a word or two.
        meaning: what the column shows.
        cell: returns the text of a row's cell.
        rank: priority in a terminal, 0 first; None to show it on the page alone.
        optional: whether a terminal omits the column if every cell is a dash.
    """

    heading: str
    meaning: str
    cell: Callable[[Row], str]
    rank: int | None = None
    optional: bool = False


@dataclass(frozen=True)
class Grid:
    """A table of plain text.

    Attributes:
        head: headings.
        rows: cells, one row per entry.
        meanings: what each column shows; empty if the headings suffice.
        quantities: whether a column or a row holds one quantity; columns then use one notation.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    meanings: tuple[str, ...] = ()
    quantities: Literal["columns", "rows"] = "columns"

    def __post_init__(self) -> None:
        if self.quantities == "columns":
            object.__setattr__(self, "rows", _uniform_columns(self.rows))


_EXPONENT = re.compile(r"^[+-]?\d(\.\d+)?e-?\d+\b")

_DECIMAL = re.compile(r"(?<![\w.,])([+-]?)(\d[\d,]*\.\d+)(?![\w.,]|\s?[%×])")


def uniform_numbers(cells: Sequence[str]) -> list[str]:
    """Return the cells of a column in one notation: if one has an exponent, all decimals get one.

    Counts and percentages stay as they are.
    """
    if not any(_EXPONENT.match(cell) for cell in cells):
        return list(cells)

    def with_exponent(match: re.Match[str]) -> str:
        number = Decimal(match[2].replace(",", ""))  # keeps its digits
        return match[1] + short_exponent(f"{number:.{len(number.as_tuple().digits) - 1}e}")

    return [_DECIMAL.sub(with_exponent, cell) for cell in cells]


def _uniform_columns(rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the rows with one number notation per column."""
    return tuple(zip(*(uniform_numbers(cells) for cells in zip(*rows, strict=True)), strict=True))


def grid(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> Grid:
    """Return the table of columns and rows, without columns in which every cell is a dash."""
    columns_and_cells = [(column, [column.cell(row) for row in rows]) for column in columns]
    columns_and_cells = [
        (c, cells) for c, cells in columns_and_cells if any(cell != DASH for cell in cells)
    ]
    return Grid(
        head=tuple(column.heading for column, _ in columns_and_cells),
        rows=tuple(zip(*(cells for _, cells in columns_and_cells), strict=True)),
        meanings=tuple(column.meaning for column, _ in columns_and_cells),
    )


def rich_table(
    columns: Sequence[Column[Row]], rows: Sequence[Row], width: int, left_aligned: int = 0
) -> Table:
    """Return a terminal table with the columns that fit into `width` characters, by rank.

    Args:
        columns: in the order of the table.
        rows: the objects that the columns' `cell` functions take.
        width: characters of the terminal.
        left_aligned: number of leading columns whose text is left-aligned.
    """
    columns_and_cells = [
        (column, uniform_numbers([column.cell(row) for row in rows])) for column in columns
    ]
    columns_and_cells = [
        (c, cells)
        for c, cells in columns_and_cells
        if not c.optional or any(x != DASH for x in cells)
    ]
    fitting_columns = _fitting_columns(columns_and_cells, width)
    table = _empty_terminal_table()
    for column, _ in fitting_columns:
        justify = "left" if column in columns[:left_aligned] else "right"
        table.add_column(column.heading, justify=justify, no_wrap=True)
    for cells in zip(*(cells for _, cells in fitting_columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


def text_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    left_aligned: int = 0,
    fold: bool = False,
    quantities: Literal["columns", "rows"] = "columns",
) -> Table:
    """Return a terminal table of texts; `fold` wraps long cells."""
    table = _empty_terminal_table()
    for index, heading in enumerate(head):
        justify = "left" if index < left_aligned else "right"
        table.add_column(heading, justify=justify, no_wrap=not fold, overflow="fold")
    for row in rows if quantities == "rows" else _uniform_columns(rows):
        table.add_row(*map(Text, row))
    return table


def grid_table(table: Grid, left_aligned: int = 0) -> Table:
    """Return a grid as a terminal table, its first `left_aligned` columns left-aligned."""
    return text_table(table.head, table.rows, left_aligned, quantities=table.quantities)


def finding_sentence(finding: "Finding", labels: Mapping[str, str]) -> str:
    """Return a finding as a sentence that names its layer.

    Args:
        finding: a finding of the result.
        labels: short name of each layer.
    """
    text, name = finding.text, finding.layer
    label = "" if name is None else f"layer {labels.get(name, name)}"
    where = f" ({label})" if label and label not in text else ""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}{where}."


def finding_rows(findings: "Sequence[Finding]", names: Sequence[str]) -> list[tuple[str, str]]:
    """Return severity and sentence of each finding; `names` are the names of all layers."""
    labels = dict(zip(names, short_names(names), strict=True))
    return [(finding.severity, finding_sentence(finding, labels)) for finding in findings]


def findings_view(findings: "Sequence[Finding]", names: Sequence[str]) -> Table:
    """Return a terminal table with one line per finding and a sign for its severity.

    Args:
        findings: in descending severity.
        names: names of the layers.
    """
    table = Table.grid(padding=(0, 1))
    for severity, text in finding_rows(findings[:MAX_FINDINGS_SHOWN], names):
        sign = Text(SEVERITY_SIGNS.get(severity, "●"), style=SEVERITY_STYLES.get(severity, ""))
        table.add_row(sign, Text(text))
    if len(findings) > MAX_FINDINGS_SHOWN:
        table.add_row(
            "", Text(f"{len(findings) - MAX_FINDINGS_SHOWN} more in the page and the JSON")
        )
    return table


def _fitting_columns(
    columns: list[tuple[Column[Row], list[str]]], width: int
) -> list[tuple[Column[Row], list[str]]]:
    """Return the columns of lowest rank that fit into the width, in the order of the table."""
    ranked = sorted((c for c in columns if c[0].rank is not None), key=lambda c: c[0].rank or 0)
    room, fitting = width, []
    for column, cells in ranked:
        room -= max(map(len, (column.heading, *cells))) + 3
        if room >= 0 or not fitting:
            fitting.append(column)
    return [c for c in columns if c[0] in fitting]


class _UncutTable(Table):
    """A table that never cuts a cell: if it is too wide, each row becomes a block of lines."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        if (
            self.row_count == 0
            or sum(map(_least_column_width, self.columns)) - 3 <= options.max_width
        ):
            yield from super().__rich_console__(console, options)
            return
        rows = zip(*(column.cells for column in self.columns), strict=True)
        for cells in rows:
            block = Table.grid(padding=(0, 2))
            block.add_column(style="dim", overflow="fold")
            block.add_column(overflow="fold")
            for column, cell in zip(self.columns, cells, strict=True):
                block.add_row(str(column.header), cell)
            yield Padding(block, (0, 0, 1, 0))


def _least_column_width(column: RichColumn) -> int:
    """Return the least width of a column: its longest cell, or longest word if cells may wrap."""
    texts = [str(cell) for cell in (column.header, *column.cells)]
    pieces = texts if column.no_wrap else [word for text in texts for word in text.split()]
    return max(map(cell_len, pieces), default=0) + 3


def _empty_terminal_table() -> Table:
    """Return an empty table without outer edges that never cuts a cell."""
    return _UncutTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)


def dotted_rows(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """Return dotted name and value of each entry of nested mappings, without empty values."""
    rows: list[tuple[str, object]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            rows += dotted_rows(item, f"{name}.")
        elif item not in (None, "", [], ()):
            rows.append((name, item))
    return rows


def provenance_text(provenance: object, *names: str) -> str:
    """Return the first of the named entries that a provenance has, as text; empty if none."""
    entries = provenance if isinstance(provenance, Mapping) else {}
    return next((str(entries[name]) for name in names if entries.get(name)), "")


def precision_text(provenance: object) -> str:
    """Return the dtype of the computation and, where it differs, that of the stored weights."""
    computed, stored = (
        provenance_text(provenance, "dtype"),
        provenance_text(provenance, "stored_dtype"),
    )
    return f"{computed} (stored in {stored})" if stored not in ("", computed) else computed


def provenance_rows(
    provenance: Mapping[str, Any], timings: Mapping[str, float]
) -> list[tuple[str, object]]:
    """Return name and value of each provenance entry, then of the timings."""
    facts = [
        (n, significant(v, 4) if isinstance(v, float) else v) for n, v in dotted_rows(provenance)
    ]
    return [*facts, *timing_rows(timings)]


def metric_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return name and value of each metric, sorted by name."""
    return [(name, significant(number, 4)) for name, number in sorted(metrics.items())]


def timing_rows(timings: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the seconds of each stage, then the rates per second."""
    rates = {name: value for name, value in timings.items() if name.endswith("per_second")}
    stages = [(f"time.{n}", f"{significant(v)} s") for n, v in timings.items() if n not in rates]
    return stages + [(name.replace("_", " "), significant(v)) for name, v in rates.items()]
