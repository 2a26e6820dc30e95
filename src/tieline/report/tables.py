"""Tables of results, for pages and terminals alike.

Column         heading, meaning and text of the cells of one column
Grid           a table of plain text: what templates draw
grid           the table of some columns and rows
uniform_numbers       the cells of a column with one form of numbers
rich_table     the same for a terminal, with the columns that fit
text_table     a table of given texts for a terminal; grid_table of a `Grid`
finding_text   a finding as a sentence
finding_rows   severity and sentence of each finding
findings_view  findings for a terminal
provenance_rows  provenance and timings, for the end of a page; metric_rows the named numbers
provenance_text  one entry of a provenance, which anybody may have written
precision_text   what a model computed in, and what its weights were stored in
"""

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

MOST_FINDINGS = 6
"""Findings that are shown at once; a page folds the others away, a terminal counts them."""

STYLES = {"warning": "bold yellow", "notice": "cyan", "info": "dim"}

SIGNS = {"warning": "▲", "notice": "◆", "info": "●"}

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table.

    Attributes:
        heading: a word or two.
        meaning: what it says.
        cell: the text of a row's cell.
        rank: how soon a terminal gives it room, 0 first; None for the page alone.
        optional: whether a terminal leaves it out where no row can fill it.
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
        meanings: what each column says; empty where the headings say it.
        quantities: where one quantity stands; the numbers of a column that is one have one form.
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
    """The cells of a column with one form of numbers: if one has an exponent, all decimals have.

    Counts and percentages stay as they are.
    """
    if not any(_EXPONENT.match(cell) for cell in cells):
        return list(cells)

    def with_exponent(match: re.Match[str]) -> str:
        number = Decimal(match[2].replace(",", ""))  # keeps its digits
        return match[1] + short_exponent(f"{number:.{len(number.as_tuple().digits) - 1}e}")

    return [_DECIMAL.sub(with_exponent, cell) for cell in cells]


def _uniform_columns(rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Rows whose columns have one form of numbers each."""
    return tuple(zip(*(uniform_numbers(cells) for cells in zip(*rows, strict=True)), strict=True))


def grid(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> Grid:
    """The table of some columns and rows, without the columns that no row can fill."""
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
    columns: Sequence[Column[Row]], rows: Sequence[Row], width: int, left: int = 0
) -> Table:
    """As many columns as fit into `width` characters, those of lowest rank first.

    Args:
        columns: in the order of the table.
        rows: one row of the table each.
        width: characters of the terminal.
        left: number of columns, from the first, whose text is at the left of its cell.
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
        justify = "left" if column in columns[:left] else "right"
        table.add_column(column.heading, justify=justify, no_wrap=True)
    for cells in zip(*(cells for _, cells in fitting_columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


def text_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 0,
    fold: bool = False,
    quantities: Literal["columns", "rows"] = "columns",
) -> Table:
    """A table of these texts; long cells are folded where asked for."""
    table = _empty_terminal_table()
    for index, heading in enumerate(head):
        justify = "left" if index < left else "right"
        table.add_column(heading, justify=justify, no_wrap=not fold, overflow="fold")
    for row in rows if quantities == "rows" else _uniform_columns(rows):
        table.add_row(*map(Text, row))
    return table


def grid_table(table: Grid, left: int = 0) -> Table:
    """A table for a terminal; the texts of the first `left` columns are at the left."""
    return text_table(table.head, table.rows, left, quantities=table.quantities)


def finding_text(finding: "Finding", labels: Mapping[str, str]) -> str:
    """A finding as a sentence, with its layer where the words do not name it.

    Args:
        finding: a finding of the result.
        labels: short name of each layer.
    """
    text, name = finding.text, finding.layer
    label = "" if name is None else f"layer {labels.get(name, name)}"
    where = f" ({label})" if label and label not in text else ""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}{where}."


def finding_rows(findings: "Sequence[Finding]", names: Sequence[str]) -> list[tuple[str, str]]:
    """Severity and sentence of each finding; `names` are those of the layers."""
    labels = dict(zip(names, short_names(names), strict=True))
    return [(finding.severity, finding_text(finding, labels)) for finding in findings]


def findings_view(findings: "Sequence[Finding]", names: Sequence[str]) -> Table:
    """One line per finding, with a sign that does not need colour.

    Args:
        findings: the gravest first.
        names: names of the layers.
    """
    table = Table.grid(padding=(0, 1))
    for severity, text in finding_rows(findings[:MOST_FINDINGS], names):
        sign = Text(SIGNS.get(severity, "●"), style=STYLES.get(severity, ""))
        table.add_row(sign, Text(text))
    if len(findings) > MOST_FINDINGS:
        table.add_row("", Text(f"{len(findings) - MOST_FINDINGS} more in the page and the JSON"))
    return table


def _fitting_columns(
    columns: list[tuple[Column[Row], list[str]]], width: int
) -> list[tuple[Column[Row], list[str]]]:
    """The columns of lowest rank that fit side by side, in the order of the table."""
    ranked = sorted((c for c in columns if c[0].rank is not None), key=lambda c: c[0].rank or 0)
    room, fitting = width, []
    for column, cells in ranked:
        room -= max(map(len, (column.heading, *cells))) + 3
        if room >= 0 or not fitting:
            fitting.append(column)
    return [c for c in columns if c[0] in fitting]


class _WholeCells(Table):
    """A table that never cuts a cell: where it is too wide, rows become blocks of lines."""

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
    """Letters that a column needs: its longest cell, or word where cells may be folded."""
    texts = [str(cell) for cell in (column.header, *column.cells)]
    pieces = texts if column.no_wrap else [word for text in texts for word in text.split()]
    return max(map(cell_len, pieces), default=0) + 3


def _empty_terminal_table() -> Table:
    """A table without outer edges that never cuts a cell."""
    return _WholeCells(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)


def dotted_rows(value: Mapping[str, Any], above: str = "") -> list[tuple[str, object]]:
    """Nested mappings as pairs of dotted names and values; None and empty values are left out."""
    rows: list[tuple[str, object]] = []
    for key, item in value.items():
        name = f"{above}{key}"
        if isinstance(item, Mapping):
            rows += dotted_rows(item, f"{name}.")
        elif item not in (None, "", [], ()):
            rows.append((name, item))
    return rows


def provenance_text(provenance: object, *names: str) -> str:
    """The first of these entries that a provenance has, as text; empty if it has none."""
    entries = provenance if isinstance(provenance, Mapping) else {}
    return next((str(entries[name]) for name in names if entries.get(name)), "")


def precision_text(provenance: object) -> str:
    """What the model computed in and, where it differs, what its weights were stored in."""
    computed, stored = (
        provenance_text(provenance, "dtype"),
        provenance_text(provenance, "stored_dtype"),
    )
    return f"{computed} (stored in {stored})" if stored not in ("", computed) else computed


def provenance_rows(
    provenance: Mapping[str, Any], timings: Mapping[str, float]
) -> list[tuple[str, object]]:
    """Where the numbers of a page come from: its provenance, then its timings."""
    facts = [
        (n, significant(v, 4) if isinstance(v, float) else v) for n, v in dotted_rows(provenance)
    ]
    return [*facts, *timing_rows(timings)]


def metric_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The named numbers of a result in the order of their names."""
    return [(name, significant(number, 4)) for name, number in sorted(metrics.items())]


def timing_rows(timings: Mapping[str, float]) -> list[tuple[str, str]]:
    """Seconds per stage, then rates."""
    rates = {name: value for name, value in timings.items() if name.endswith("per_second")}
    stages = [(f"time.{n}", f"{significant(v)} s") for n, v in timings.items() if n not in rates]
    return stages + [(name.replace("_", " "), significant(v)) for name, v in rates.items()]
