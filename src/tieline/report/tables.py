"""Tables of results, for pages and terminals alike.

Column         heading, meaning and text of the cells of one column
Grid           a table of plain text: what templates draw
grid           the table of some columns and rows
rich_table     the same for a terminal, with the columns that fit
text_table     a table of given texts for a terminal
view           title, facts and verdict of a result for a terminal, then its parts
finding_text   a finding as a sentence
finding_rows   severity and sentence of each finding
findings_view  findings for a terminal
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tieline.analysis.inspection import Finding
from tieline.report.numbers import DASH, short_names

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
    """

    heading: str
    meaning: str
    cell: Callable[[Row], str]
    rank: int | None = None


@dataclass(frozen=True)
class Grid:
    """A table of plain text.

    Attributes:
        head: headings.
        rows: cells, one row per entry.
        meanings: what each column says; empty where the headings say it.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    meanings: tuple[str, ...] = ()


def grid(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> Grid:
    """The table of some columns and rows, without the columns that no row can fill."""
    made = [(column, [column.cell(row) for row in rows]) for column in columns]
    known = [(c, cells) for c, cells in made if any(cell != DASH for cell in cells)]
    return Grid(
        head=tuple(column.heading for column, _ in known),
        rows=tuple(zip(*(cells for _, cells in known), strict=True)),
        meanings=tuple(column.meaning for column, _ in known),
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
    made = [(column, [column.cell(row) for row in rows]) for column in columns]
    shown = _fitting(made, width)
    table = _empty_table()
    for column, _ in shown:
        justify = "left" if column in columns[:left] else "right"
        table.add_column(column.heading, justify=justify, no_wrap=True)
    for cells in zip(*(cells for _, cells in shown), strict=True):
        table.add_row(*map(Text, cells))
    return table


def text_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0, fold: bool = False
) -> Table:
    """A table of these texts; long cells are folded where asked for."""
    table = _empty_table()
    for place, heading in enumerate(head):
        justify = "left" if place < left else "right"
        table.add_column(heading, justify=justify, no_wrap=not fold, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def view(title: str, facts: str, verdict: str, *parts: RenderableType) -> RenderableType:
    """Title, facts and verdict for a terminal, then a result's own parts; the first is a table."""
    head = Text.assemble((title, "bold"), ("  " + facts, "dim"), *(["\n", verdict] * bool(verdict)))
    first, *rest = parts
    return Group(head, Padding(first, (1, 0)), *rest)


def finding_text(finding: Finding, short: Mapping[str, str]) -> str:
    """A finding as a sentence, with its layer where the words do not name it.

    Args:
        finding: a finding of the result.
        short: short name of each layer.
    """
    text, name = finding.text, finding.layer
    label = "" if name is None else f"layer {short.get(name, name)}"
    where = f" ({label})" if label and label not in text else ""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}{where}."


def finding_rows(findings: Sequence[Finding], names: Sequence[str]) -> list[tuple[str, str]]:
    """Severity and sentence of each finding; `names` are those of the layers."""
    short = dict(zip(names, short_names(names), strict=True))
    return [(finding.severity, finding_text(finding, short)) for finding in findings]


def findings_view(findings: Sequence[Finding], names: Sequence[str]) -> Table:
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


def _fitting(
    columns: list[tuple[Column[Row], list[str]]], width: int
) -> list[tuple[Column[Row], list[str]]]:
    """The columns of lowest rank that fit side by side, in the order of the table."""
    ranked = sorted((c for c in columns if c[0].rank is not None), key=lambda c: c[0].rank or 0)
    left, kept = width, []
    for column, cells in ranked:
        left -= max(map(len, (column.heading, *cells))) + 3
        if left >= 0 or not kept:
            kept.append(column)
    return [c for c in columns if c[0] in kept]


def _empty_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
