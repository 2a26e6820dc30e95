"""The views of a result: on a page, on a terminal, in a notebook and in plain lines."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tieline.core.text import printable, printable_line
from tieline.report.html_page import notebook_html, render_page
from tieline.report.matplotlib_figures import Drawings, inline_image
from tieline.report.tables import Grid, grid_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


UNBROKEN = "\ue000"
"""Private-use character, one cell wide, that stands for a non-breaking space during layout."""

_UNIT_SPACE = re.compile(r"(?<=\d) (?=[%×±])|(?<=±) (?=\d)")


@dataclass(frozen=True)
class Section:
    """A table, a drawing and notes of a page.

    Attributes:
        heading: its title.
        table: a table; may be None.
        draw: draws its figure; may be None.
        caption: what the figure shows, for readers who cannot see it.
        notes: sentences below.
        prose: whether the cells of the table hold sentences, which wrap.
    """

    heading: str
    table: Grid | None = None
    draw: "Callable[[], Figure] | None" = None
    caption: str = ""
    notes: Sequence[str] = ()
    prose: bool = False

    @property
    def image(self) -> str:
        """Address of the figure as an image inside the page; empty without one."""
        return "" if self.draw is None else inline_image(self.draw)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Content of all views of a result; costly pieces are functions, called on demand.

    Attributes:
        kind: what the page is, "routing report"; shown above its title.
        name: what the result is, "Inspection", for the summary.
        title: what it is about.
        facts: one line below the title.
        verdict: the main result in a sentence; may be empty.
        table: returns the main table.
        body: returns the arguments of `render_page` for the body of the page.
        below: returns the views below the heading of a terminal of a given width, a table first;
            by default the main table.
        figures: figures by name.
        notebook_figures: names of the figures that a notebook shows; by default all.
    """

    kind: str
    name: str = ""
    title: str
    facts: str
    verdict: str = ""
    table: Callable[[], Grid]
    body: Callable[[], dict[str, Any]]
    below: Callable[[int], Sequence[RenderableType]] | None = None
    figures: Drawings = field(default_factory=dict)
    notebook_figures: tuple[str, ...] = ()

    def page(self) -> str:
        """Return the self-contained HTML page."""
        body: dict[str, Any] = {"template": "sections.html", "style": "sections.css"}
        body |= {"kind": self.kind, "title": self.title, "facts": self.facts}
        return render_page(**(body | self.body()), verdict=self.verdict)

    def terminal(self, width: int) -> RenderableType:
        """Return the view for a terminal that is `width` characters wide."""
        views = [grid_table(self.table())] if self.below is None else self.below(width)
        return terminal_view(self.title, self.facts, self.verdict, *views)

    def summary(self) -> str:
        """Return name, facts and verdict in plain lines."""
        return f"{self.name} of {self.title}\n{self.facts}\n{self.verdict}"

    def notebook(self) -> str:
        """Return verdict, table and figures as a piece of HTML."""
        drawings = {name: self.figures[name] for name in self.notebook_figures or self.figures}
        return notebook_html(self.title, self.facts, self.verdict, self.table(), drawings)


class Listing(NamedTuple):
    """A result that is one table: kind of page, title, one line of facts, and the table."""

    kind: str
    title: str
    facts: str
    table: Grid


class ResultViews(NamedTuple):
    """The five views of a result, as `tieline.report` calls them."""

    page: Callable[[Any], str]
    figures: "Callable[[Any], dict[str, Callable[[], Figure]]]"
    terminal: Callable[[Any, int], RenderableType]
    summary: Callable[[Any], str]
    notebook: Callable[[Any], str]


def report_views(report: Callable[[Any], Report]) -> ResultViews:
    """Return the five views of results for which `report` builds the `Report`."""
    return ResultViews(
        lambda result: report(result).page(),
        lambda result: dict(report(result).figures),
        lambda result, width: report(result).terminal(width),
        lambda result: report(result).summary(),
        lambda result: report(result).notebook(),
    )


def listing_views(
    listing: Callable[[Any], Listing], terminal: Callable[[Any], RenderableType]
) -> ResultViews:
    """Return the views of a result that is one table.

    Args:
        listing: returns the `Listing` of a result.
        terminal: returns the view of a result for a terminal.
    """

    def report(result: Any) -> Report:
        kind, title, facts, table = listing(result)
        body = {"sections": [Section("", table, prose=True)]}
        return Report(kind=kind, title=title, facts=facts, table=lambda: table, body=lambda: body)

    def summary(result: Any) -> str:
        return f"{listing(result).title}: {listing(result).facts}"

    return report_views(report)._replace(
        terminal=lambda result, _: terminal(result), summary=summary
    )


def line_views(lines: Callable[[Any], list[str]]) -> ResultViews:
    """Return the views of a result that is a few lines and a table of its named numbers.

    Args:
        lines: returns the lines of a result.
    """

    def report(result: Any) -> Report:
        headline, *notes = lines(result)
        rows = tuple((name, f"{value:,.6g}") for name, value in result.metrics.items())
        table = Grid(("number", "value"), rows)
        return Report(
            kind=result.format.removeprefix("tieline-"),
            title=result.output or headline.partition(":")[0],
            facts=headline,
            table=lambda: table,
            body=lambda: {"sections": [Section("Numbers", table, notes=notes)]},
        )

    def notebook(result: Any) -> str:
        headline, *details = lines(result)
        return notebook_html(headline, " · ".join(details), "", report(result).table(), {})

    return report_views(report)._replace(
        terminal=lambda result, _: Group(*map(Text, lines(result))),
        summary=lambda result: "\n".join(lines(result)),
        notebook=notebook,
    )


def terminal_view(title: str, facts: str, verdict: str, *views: RenderableType) -> RenderableType:
    """Return title, facts and verdict, followed by the given views; the first is a table."""
    title, facts = printable_line(title), printable_line(facts)
    head = Text.assemble((title, "bold"), ("  " + facts, "dim"), *(["\n", verdict] * bool(verdict)))
    main_view, *more_views = views
    return Group(head, Padding(main_view, (1, 0)), *more_views)


def printable_view(view: RenderableType) -> RenderableType:
    """Return a view with printable texts, none of them interpreted as markup.

    Texts may come from models and files. They are replaced before the layout, so that columns stay
    aligned.
    """
    if isinstance(view, str):
        return _printable_text(Text(view))
    if isinstance(view, Text):
        return _printable_text(view)
    if isinstance(view, Group):
        return Group(*map(printable_view, view.renderables))
    if isinstance(view, Padding):
        view.renderable = printable_view(view.renderable)
    elif isinstance(view, Table):
        for column in view.columns:
            column.header = printable_view(column.header)
            column._cells[:] = map(printable_view, column._cells)  # pyright: ignore[reportPrivateUsage]
    return view


def _printable_text(text: Text) -> Text:
    """Return a printable text with its styles, spaces before units marked for `UnbrokenView`."""
    copy = text.blank_copy(_UNIT_SPACE.sub(UNBROKEN, printable(text.plain)))
    for start, end, style in text.spans:
        offsets = [len(printable(text.plain[:offset])) for offset in (start, end)]
        copy.stylize(style, *offsets)
    return copy


@dataclass(frozen=True)
class UnbrokenView:
    """A view in which no line breaks between a number and its unit, as in "4.4 %".

    Rich breaks lines at every kind of space, so `UNBROKEN` replaces these spaces during layout.
    """

    view: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.view, options):
            yield Segment(text.replace(UNBROKEN, " "), style, control)
