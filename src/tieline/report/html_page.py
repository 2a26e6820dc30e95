"""Pages of HTML: panels with charts, Jinja2 templates, scripts and content policy.

A page is one file that opens from a mail, offline, years later. One with charts carries Plotly's
own script (about 4.8 MB), without the addresses in it. A content policy forbids every request and
every script except the three written here, whose hashes it names: text from a model or a file can
be shown but never run, follows no link and turns no words around.

    Panel             a chart on a page, with its title and how to read it
    render            a template of `templates/` as a whole page
    notebook_html     title, verdict, table and figures without script
    embed_json        JSON that cannot end the script element which holds it
"""

import base64
import functools
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tieline.core.errors import TraceError, require
from tieline.core.text import printable
from tieline.report.charts import Chart
from tieline.report.matplotlib_figures import Drawings, inline_image
from tieline.report.plotly_figures import plotly_figure
from tieline.report.tables import Grid

LARGEST_PAGE = 6_000_000
"""Bytes; a larger page is refused rather than written."""

PLAIN_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"

_ADDRESS = re.compile(r"https?://(?=\w)(?!www\.w3\.org/)")

_LINK = re.compile(r"\\u003c(?=[aA]\b)")

_UNSAFE = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


@dataclass(frozen=True)
class Panel:
    """A chart on a page with the sentence that says how to read it.

    Attributes:
        key: name of the panel in the page.
        title: heading.
        how: how to read it.
        figure: Plotly figure, as JSON values; None if there is nothing to draw.
        reason: why not.
        wide: whether it takes the whole width of the page.
    """

    key: str
    title: str
    how: str
    figure: dict[str, Any] | None = None
    reason: str = ""
    wide: bool = False

    def with_chart(self, chart: Chart) -> "Panel":
        """Return the panel with this chart."""
        return replace(self, figure=plotly_figure(chart))

    def without_chart(self, statuses: Sequence[str]) -> "Panel":
        """Return the panel without a chart, with each reason of the sections that it needs once."""
        return replace(self, reason="; ".join(dict.fromkeys(s for s in statuses if s != "ok")))


def missing_charts_line(panels: Sequence[Panel]) -> str:
    """Return one line that names the panels without a chart and why; empty if all have one."""
    titles: dict[str, list[str]] = {}
    for panel in panels:
        if panel.figure is None:
            titles.setdefault(panel.reason or "no data", []).append(f"“{panel.title}”")
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in titles.items())


def render_page(
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
    styles = _template_source("page.css") + (_template_source(style) if style else "")
    scripts = None
    if figures or data:
        watch, script = (_template_source(name) for name in ("watch.js", "page.js"))
        scripts = {"watch": watch, "plotly": _plotly_script(), "page": script}
    embedded = embed_json(compact_json({"figures": figures, **(data or {})}))
    page = (
        template_environment()
        .get_template(template)
        .render(
            panels=arranged_panels(panels),
            style=styles,
            scripts=scripts,
            policy=_content_policy(list(scripts.values())) if scripts else PLAIN_POLICY,
            data=_LINK.sub("‹", embedded),  # Plotly makes a link of a label with <a href=...>
            unmeasured=missing_charts_line(panels),
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
    return template_environment().get_template("notebook.html").render(content, images=images)


def arranged_panels(panels: Sequence[Panel]) -> list[Panel]:
    """The panels that have a chart; one that would stand alone in its row takes the whole width."""
    panels_with_chart = [panel for panel in panels if panel.figure is not None]
    row_length = 0
    for index, panel in enumerate(panels_with_chart):
        row_length = 0 if panel.wide else row_length + 1
        ends_row = index + 1 == len(panels_with_chart) or panels_with_chart[index + 1].wide
        if ends_row and row_length % 2:
            panels_with_chart[index] = replace(panel, wide=True)
    return panels_with_chart


def compact_json(value: Any, digits: int = 4) -> Any:
    """The JSON value with printable texts and floating-point numbers of `digits` digits.

    Numbers that are not finite become None.
    """
    if isinstance(value, float):
        rounded = float(f"{value:.{digits}g}")
        # the largest numbers would round to infinity
        return (rounded if math.isfinite(rounded) else value) if math.isfinite(value) else None
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {key: compact_json(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [compact_json(item, digits) for item in value]
    return value


def embed_json(value: object) -> str:
    r"""JSON in which <, >, & and the two line separators are written as \uXXXX."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE)


def script_hash(source: str) -> str:
    """'sha256-...' of an inline script, as a content policy names it."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@functools.cache
def template_environment() -> Environment:
    """The templates: texts are escaped and printable, and a name that is not given is an error."""
    templates = Environment(
        loader=PackageLoader("tieline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable_value,
    )
    templates.filters |= {
        "unbroken": lambda text: text.replace(" %", "\u00a0%"),
        "visible": visible_characters,
    }
    templates.globals["zip"] = zip
    return templates


def _printable_value(value: object) -> object:
    """Make what a template shows printable; what is marked safe was written in this room."""
    return value if hasattr(value, "__html__") else printable(str(value))


def _template_source(name: str) -> str:
    """The text of a file of `templates/`."""
    loader = template_environment().loader
    assert loader is not None
    return loader.get_source(template_environment(), name)[0]


@functools.cache
def _plotly_script() -> str:
    """Plotly's script without addresses of its makers, of map services and of other sites.

    They lose "https://": what stays names the authors in its licences and leads nowhere. Names of
    XML languages, which look like addresses, are needed.
    """
    # imported here: plotly is an extra, and only its script is read
    from plotly.offline import get_plotlyjs

    return _ADDRESS.sub("", get_plotlyjs())


def _content_policy(scripts: Sequence[str]) -> str:
    """The content policy that allows these inline scripts and no request."""
    hashes = " ".join(map(script_hash, scripts))
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def visible_characters(text: str) -> str:
    """The text with a sign for every control character; line ends get a sign before them.

    Marks that turn the direction of writing would rearrange the text around them, so they are
    shown by number; halves of surrogate pairs cannot be written to a file at all.
    """
    return "".join(map(_visible_character, text))


def _visible_character(sign: str) -> str:
    """What stands for one character."""
    if sign == "\n":
        return "↵\n"
    if sign == "\t":
        return "⇥\t"
    if ord(sign) < 0x20:
        return chr(0x2400 + ord(sign))
    if sign in _DIRECTIONS or unicodedata.category(sign) in ("Cc", "Zl", "Zp"):
        return f"⟨{ord(sign):04X}⟩"
    return "\ufffd" if unicodedata.category(sign) == "Cs" else sign
