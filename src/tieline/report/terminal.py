"""A result in the terminal, as Rich renderables; whoever asked for them prints them."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tieline.report.layer_table import COLUMNS, Column, layer_rows
from tieline.report.numbers import MOST_FINDINGS, facts, finding_text, short_names

__all__ = ["findings_text", "fitting", "inspection_view", "layer_table"]

STYLES = {"warning": "bold yellow", "notice": "cyan", "info": "dim"}
Cells = tuple[Column, list[str]]
SIGNS = {"warning": "▲", "notice": "◆", "info": "●"}


def inspection_view(result: Mapping[str, Any], width: int) -> RenderableType:
    """Verdict, one row per layer, findings, for a terminal of so many characters."""
    name = str(result["provenance"].get("model") or "unnamed model")
    title = Text.assemble((name, "bold"), ("  " + facts(result), "dim"), "\n", result["verdict"])
    table = Padding(layer_table(result, width), (1, 0))
    return Group(title, table, findings_text(result))


def layer_table(result: Mapping[str, Any], width: int) -> Table:
    """As many columns of `layer_table.COLUMNS` as there is room for, one row per layer."""
    layers = layer_rows(result)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    shown = fitting([(c, [c.cell(layer) for layer in layers]) for c in COLUMNS], width)
    for column, _ in shown:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row in zip(*(cells for _, cells in shown), strict=True):
        table.add_row(*map(Text, row))
    return table


def fitting(columns: list[Cells], width: int) -> list[Cells]:
    """The columns of lowest rank that fit side by side, in the order of the table."""
    ranked = sorted((c for c in columns if c[0].rank is not None), key=lambda c: c[0].rank or 0)
    left, kept = width, []
    for column, cells in ranked:
        left -= max(map(len, (column.heading, *cells))) + 3
        if left >= 0 or not kept:
            kept.append(column)
    return [c for c in columns if c[0] in kept]


def findings_text(result: Mapping[str, Any]) -> RenderableType:
    """One line per finding, with a sign that does not need colour."""
    names = [layer["name"] for layer in result["measures"]["layers"]]
    short = dict(zip(names, short_names(names), strict=True))
    grid, findings = Table.grid(padding=(0, 1)), result["findings"]
    for finding in findings[:MOST_FINDINGS]:
        kind = finding["severity"]
        sign = Text(SIGNS.get(kind, "●"), style=STYLES.get(kind, ""))
        grid.add_row(sign, Text(finding_text(finding, short)))
    if len(findings) > MOST_FINDINGS:
        grid.add_row("", Text(f"{len(findings) - MOST_FINDINGS} more in the page and the JSON"))
    return grid
