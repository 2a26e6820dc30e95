"""The frame of every result: its views, and Jinja2 templates, scripts and policy of its page.

A page is one file that opens from a mail, offline, years later. One with charts carries Plotly's
own script (about 4.8 MB), without the addresses in it. A content policy forbids every request and
every script except the three written here, whose hashes it names: text from a model or a file can
be shown but never run, follows no link and turns no words around.

    Report            what the five views of a result show; `views` makes them
    listing_views     the views of a result that is one table; `line_views` of a few lines
    Section           a table, a drawing and notes of a page
    render            a template of `templates/` as a whole page
    notebook_html     title, verdict, table and figures as a piece of HTML without script
    embed_json        JSON that cannot end the script element which holds it
"""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Group, RenderableType
from rich.text import Text

from tieline.core.errors import TraceError, require
from tieline.core.printable import printable
from tieline.report.charts import Panel, unmeasured
from tieline.report.drawing import inline_image
from tieline.report.tables import Grid, compact, grid_table, view, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawings = Mapping[str, Callable[[], "Figure"]]
"""Figures by name, each drawn when called; the main one first."""

LARGEST_PAGE = 6_000_000
"""Bytes; a larger page is refused rather than written."""

PLAIN_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"


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
    """What the views of a result show; what is costly is made when a view asks for it.

    Attributes:
        kind: what the page is, "routing report"; shown above its title.
        name: what the result is, "Inspection", for the summary.
        title: what it is about.
        facts: one line below the title.
        verdict: the main result in a sentence; may be empty.
        table: makes the main table.
        body: makes the arguments of `render` for the body of the page.
        below: makes what a terminal of a given width shows below the head, a table first; by
            default the main table.
        figures: figures by name.
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

    def page(self) -> str:
        """Return the self-contained HTML page."""
        body: dict[str, Any] = {"template": "sections.html", "style": "sections.css"}
        body |= {"kind": self.kind, "title": self.title, "facts": self.facts}
        return render(**(body | self.body()), verdict=self.verdict)

    def terminal(self, width: int) -> RenderableType:
        """Return the view for a terminal that is `width` characters wide."""
        below = [grid_table(self.table())] if self.below is None else self.below(width)
        return view(self.title, self.facts, self.verdict, *below)

    def summary(self) -> str:
        """Return name, facts and verdict in plain lines."""
        return f"{self.name} of {self.title}\n{self.facts}\n{self.verdict}"

    def notebook(self) -> str:
        """Return verdict, table and figures as a piece of HTML."""
        return notebook_html(self.title, self.facts, self.verdict, self.table(), self.figures)


class Listing(NamedTuple):
    """A result that is one table: what its page is, title, facts below it, and the table."""

    kind: str
    title: str
    facts: str
    table: Grid


class Views(NamedTuple):
    """The five views of a result, as `tieline.report` calls them."""

    page: Callable[[Any], str]
    figures: "Callable[[Any], dict[str, Callable[[], Figure]]]"
    terminal: Callable[[Any, int], RenderableType]
    summary: Callable[[Any], str]
    notebook: Callable[[Any], str]


def views(report: Callable[[Any], Report]) -> Views:
    """Return the views of the results that a function makes a report of."""
    return Views(
        lambda result: report(result).page(),
        lambda result: dict(report(result).figures),
        lambda result, width: report(result).terminal(width),
        lambda result: report(result).summary(),
        lambda result: report(result).notebook(),
    )


def listing_views(
    listing: Callable[[Any], Listing], terminal: Callable[[Any], RenderableType]
) -> Views:
    """Return the views of a result that is one table.

    Args:
        listing: makes the table of a result.
        terminal: draws it for a terminal.
    """

    def report(result: Any) -> Report:
        kind, title, facts, table = listing(result)
        body = {"sections": [Section("", table, prose=True)]}
        return Report(kind=kind, title=title, facts=facts, table=lambda: table, body=lambda: body)

    def summary(result: Any) -> str:
        return f"{listing(result).title}: {listing(result).facts}"

    return views(report)._replace(terminal=lambda result, _: terminal(result), summary=summary)


def line_views(lines: Callable[[Any], list[str]]) -> Views:
    """Return the views of a result that is a few lines and a table of its named numbers.

    Args:
        lines: makes the lines of a result.
    """

    def report(result: Any) -> Report:
        first, *others = lines(result)
        rows = tuple((name, f"{value:,.6g}") for name, value in result.metrics.items())
        table = Grid(("number", "value"), rows)
        return Report(
            kind=result.format.removeprefix("tieline-"),
            title=result.output or first.partition(":")[0],
            facts=first,
            table=lambda: table,
            body=lambda: {"sections": [Section("Numbers", table, notes=others)]},
        )

    def notebook(result: Any) -> str:
        first, *others = lines(result)
        return notebook_html(first, " · ".join(others), "", report(result).table(), {})

    return views(report)._replace(
        terminal=lambda result, _: Group(*map(Text, lines(result))),
        summary=lambda result: "\n".join(lines(result)),
        notebook=notebook,
    )


_ADDRESS = re.compile(r"https?://(?=\w)(?!www\.w3\.org/)")
_LINK = re.compile(r"\\u003c(?=[aA]\b)")
_UNSAFE = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def render(
    template: str,
    panels: Sequence[Panel] = (),
    data: Mapping[str, Any] | None = None,
    style: str = "",
    **content: Any,
) -> str:
    """Render a template as a page that needs nothing else; text is escaped.

    Args:
        template: file of `templates/` that extends `frame.html`.
        panels: charts; those without a figure are left out.
        data: JSON values for `page.js` beside the figures; scripts are left out of a page that
            has neither.
        style: file of `templates/` with more style.
        content: what the template shows: `kind`, `title`, `facts`, `verdict` and, at its end,
            `provenance` and `metrics` of the frame, and its own names.
    """
    figures = {panel.key: panel.figure for panel in panels if panel.figure is not None}
    styles = _source("page.css") + (_source(style) if style else "")
    scripts = _scripts() if figures or data else None
    page = (
        environment()
        .get_template(template)
        .render(
            panels=arranged(panels),
            style=styles,
            scripts=scripts,
            policy=_policy(list(scripts.values())) if scripts else PLAIN_POLICY,
            data=_without_links(embed_json(compact({"figures": figures, **(data or {})}))),
            unmeasured=unmeasured(panels),
            **({"provenance": (), "metrics": (), "sections": ()} | content),
        )
    )
    size = len(page.encode())
    require(size <= LARGEST_PAGE, f"the page has {size} bytes, at most {LARGEST_PAGE}")
    return page


def notebook_html(
    title: str,
    facts: str,
    verdict: str,
    table: Grid,
    drawings: Drawings,
) -> str:
    """Title, verdict, table and figures as a piece of HTML without script.

    Args:
        title: name of the result.
        facts: one line below it.
        verdict: what it comes to; may be empty.
        table: its main table.
        drawings: figures by name; those that the result cannot give are left out.
    """
    images = []
    for name, draw in drawings.items():
        with suppress(TraceError):
            images.append((name, inline_image(draw, "png")))
    content = {"title": title, "facts": facts, "verdict": verdict, "table": table}
    return environment().get_template("notebook.html").render(content, images=images)


def embed_json(value: object) -> str:
    r"""JSON in which <, >, & and the two line separators are written as \uXXXX."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE)


def _without_links(data: str) -> str:
    """Embedded JSON in which no label holds a link: Plotly makes one of <a href=...>."""
    return _LINK.sub("‹", data)


def script_hash(source: str) -> str:
    """'sha256-...' of an inline script, as a content policy names it."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@functools.cache
def environment() -> Environment:
    """The templates: texts are escaped and printable, and a name that is not given is an error."""
    templates = Environment(
        loader=PackageLoader("tieline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    templates.filters |= {
        "unbroken": lambda text: text.replace(" %", "\u00a0%"),
        "visible": visible,
    }
    templates.globals["zip"] = zip
    return templates


def _shown(value: object) -> object:
    """Make what a template shows printable; what is marked safe was written in this room."""
    return value if hasattr(value, "__html__") else printable(str(value))


def _source(name: str) -> str:
    loader = environment().loader
    assert loader is not None
    return loader.get_source(environment(), name)[0]


def _scripts() -> dict[str, str]:
    return {"watch": _source("watch.js"), "plotly": _plotly_script(), "page": _source("page.js")}


@functools.cache
def _plotly_script() -> str:
    """Plotly's script without addresses of its makers, of map services and of other sites.

    They lose "https://": what stays names the authors in its licences and leads nowhere. Names of
    XML languages, which look like addresses, are needed.
    """
    # imported here: plotly is an extra, and only its script is read
    from plotly.offline import get_plotlyjs

    return _ADDRESS.sub("", get_plotlyjs())


def _policy(scripts: Sequence[str]) -> str:
    allowed = " ".join(map(script_hash, scripts))
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def arranged(panels: Sequence[Panel]) -> list[Panel]:
    """The panels that have a chart; one that would stand alone in its row takes the whole width."""
    drawn = [panel for panel in panels if panel.figure is not None]
    beside = 0
    for index, panel in enumerate(drawn):
        beside = 0 if panel.wide else beside + 1
        last = index + 1 == len(drawn) or drawn[index + 1].wide
        if last and beside % 2:
            drawn[index] = replace(panel, wide=True)
    return drawn
