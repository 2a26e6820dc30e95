"""Results that are one table: the engines, and the frame of every other listing.

A drawing module of listings is `Listings(makers)` with one maker per format, whose five methods are
those of `tieline.report`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from tieline.report.frame import notebook_html
from tieline.report.plain import Section, plain_page
from tieline.report.tables import Grid, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tieline.engines.registry import EngineEntry, EngineList


@dataclass(frozen=True)
class Listing:
    """What all views of a listing show; `view` is that for a terminal."""

    kind: str
    title: str
    facts: str
    table: Grid
    view: RenderableType


class Listings:
    """The five views of results that are one table.

    Args:
        makers: what makes the listing of a result, by the name of its format.
    """

    def __init__(self, makers: Mapping[str, Callable[[Any], Listing]]) -> None:
        self._makers = makers

    def _of(self, result: Any) -> Listing:
        return self._makers[result.format](result)

    def page(self, result: Any) -> str:
        """The page: the table."""
        listing = self._of(result)
        sections = [Section("", listing.table, prose=True)]
        return plain_page(listing.kind, listing.title, listing.facts, sections)

    def figures(self, result: Any) -> "dict[str, Callable[[], Figure]]":
        """None: a listing has no figures."""
        return {}

    def terminal(self, result: Any, width: int) -> RenderableType:
        """The table for a terminal."""
        return self._of(result).view

    def summary(self, result: Any) -> str:
        """Title and facts."""
        listing = self._of(result)
        return f"{listing.title}: {listing.facts}"

    def notebook(self, result: Any) -> str:
        """The table."""
        listing = self._of(result)
        return notebook_html(listing.title, listing.facts, "", listing.table, {})


def _list_engines(result: "EngineList") -> Listing:
    head = ("engine", "takes", "found in", "versions")
    rows = [
        (
            engine.name,
            engine.takes,
            engine.python or "not found",
            ", ".join(f"{name} {value}" for name, value in engine.versions.items()),
        )
        for engine in result.engines
    ]
    table = text_table(head, rows, len(head), fold=True)
    table.columns[0].no_wrap = True
    steps = [line for engine in result.engines if engine.folder for line in _install(engine)]
    installed = sum(bool(engine.python) for engine in result.engines)
    facts = f"{installed} of {len(rows)} found"
    shown = Group(table, Text("\n".join(steps), no_wrap=True, overflow="ignore"))
    full_rows = tuple(
        (*row, "; ".join(engine.install)) for row, engine in zip(rows, result.engines, strict=True)
    )
    grid = Grid((*head, "to install"), full_rows)
    return Listing("engines", "Inference engines", facts, grid, shown)


def _install(engine: "EngineEntry") -> list[str]:
    """The commands that install an engine, for a shell."""
    return ["", f"# {engine.name}, {engine.size}", f"VENV={engine.folder}", *engine.install]


_VIEWS = Listings({"tieline-engines": _list_engines})
page, figures, terminal = _VIEWS.page, _VIEWS.figures, _VIEWS.terminal
summary, notebook = _VIEWS.summary, _VIEWS.notebook
