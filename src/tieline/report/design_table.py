"""The advisor's numbers as text: in the terminal, one row per quantity, one column per split."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tieline.report.numbers import DASH, percent, significant

__all__ = ["cell_text", "design_facts", "design_view"]

SHARES = {"bf16_flips"}
WHOLE = 10**7


def design_view(advice: Mapping[str, Any]) -> RenderableType:
    """Title, table, notes of single entries, and where each quantity holds."""
    title = Text.assemble((str(advice["source"]), "bold"), ("  " + design_facts(advice), "dim"))
    return Group(title, Padding(_table(advice), (1, 0)), _marks(advice), _validity(advice))


def design_facts(advice: Mapping[str, Any]) -> str:
    """The shape in one line."""
    shape = advice["rows"][0]["shape"]
    parts = [
        f"{shape['k']} of {shape['n_experts']} experts",
        f"width {shape['width']}",
        f"model width {shape['hidden']}",
        f"d_eff {advice['d_eff']}",
    ]
    parts += [f"{shape['shared']} shared"] if shape["shared"] else []
    if shape["n_groups"] > 1:
        parts.append(f"{shape['k_groups']} of {shape['n_groups']} groups")
    first = advice["rows"][0]["split"]
    return " · ".join(parts if first == 1 else [*parts, f"at split {first}"])


def cell_text(name: str, entry: Mapping[str, Any]) -> str:
    """An entry as text: a percentage, a whole number, or a power of ten where it is long."""
    value, log10 = entry["value"], entry["log10"]
    if value is None:
        return DASH if log10 is None else f"10^{log10:.0f}"
    if name in SHARES:
        return percent(value)
    if isinstance(value, int) and value < WHOLE:
        return f"{value:,}"
    return significant(float(value))


def _table(advice: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("split m", no_wrap=True)
    for row in advice["rows"]:
        table.add_column(str(row["split"]), justify="right", no_wrap=True)
    table.add_column("kind", style="dim", no_wrap=True)
    shapes = [row["shape"] for row in advice["rows"]]
    for heading, field in (("experts N", "n_experts"), ("chosen k", "k"), ("width H", "width")):
        table.add_row(heading, *(f"{shape[field]:,}" for shape in shapes), "")
    for name, quantity in advice["quantities"].items():
        entries = [row["entries"][name] for row in advice["rows"]]
        cells = [cell_text(name, entry) + ("*" if entry["note"] else " ") for entry in entries]
        table.add_row(Text(quantity["heading"]), *map(Text, cells), quantity["kind"])
    return table


def _marks(advice: Mapping[str, Any]) -> RenderableType:
    """The notes behind the stars, each once, with the quantities and splits it is about."""
    about: dict[str, dict[str, list[str]]] = {}
    for row in advice["rows"]:
        for name, entry in row["entries"].items():
            if entry["note"]:
                heading = advice["quantities"][name]["heading"]
                splits = about.setdefault(entry["note"], {}).setdefault(heading, [])
                splits.append(str(row["split"]))
    marks = []
    for note, headings in about.items():
        splits = sorted({split for found in headings.values() for split in found}, key=int)
        marks.append(f"* {', '.join(headings)} at m = {', '.join(splits)}: {note}")
    return Text("\n".join([*marks, *advice["notes"]]) + "\n")


def _validity(advice: Mapping[str, Any]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    for quantity in advice["quantities"].values():
        words = Text.assemble(quantity["meaning"], "\n", (f"holds: {quantity['valid']}", "dim"))
        grid.add_row(Text(quantity["heading"]), words)
    return grid
