"""A comparison in the terminal, as Rich renderables; whoever asked for them prints them."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tieline.report.diff_table import DIFF_COLUMNS, diff_facts, diff_findings, diff_rows, diff_title
from tieline.report.numbers import MOST_FINDINGS
from tieline.report.terminal import SIGNS, STYLES

__all__ = ["diff_view"]


def diff_view(result: Mapping[str, Any], width: int) -> RenderableType:
    """Verdict, one row per layer, findings, for a terminal of so many characters."""
    title = Text.assemble(
        (diff_title(result), "bold"), ("  " + diff_facts(result), "dim"), "\n", result["verdict"]
    )
    return Group(title, Padding(_table(result, width), (1, 0)), _findings(result))


def _table(result: Mapping[str, Any], width: int) -> Table:
    """As many columns as there is room for, those of lowest rank first."""
    layers, left, kept = diff_rows(result), width, []
    ranked = sorted(
        (c for c in DIFF_COLUMNS if c.rank is not None), key=lambda column: column.rank or 0
    )
    for column in ranked:
        left -= max(map(len, (column.heading, *(column.cell(layer) for layer in layers)))) + 3
        if left >= 0 or not kept:
            kept.append(column)
    shown = [column for column in DIFF_COLUMNS if column in kept]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for column in shown:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for layer in layers:
        table.add_row(*(Text(column.cell(layer)) for column in shown))
    return table


def _findings(result: Mapping[str, Any]) -> Table:
    grid, found = Table.grid(padding=(0, 1)), diff_findings(result)
    for finding in found[:MOST_FINDINGS]:
        kind = finding["severity"]
        sign = Text(SIGNS.get(kind, "●"), style=STYLES.get(kind, ""))
        grid.add_row(sign, Text(finding["text"]))
    if len(found) > MOST_FINDINGS:
        grid.add_row("", Text(f"{len(found) - MOST_FINDINGS} more in the page and the JSON"))
    return grid
