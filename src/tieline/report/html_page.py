"""Pages of HTML: panels with charts, Jinja2 templates, scripts and content policy.

A page is one file that opens from a mail, offline, years later. One with charts carries Plotly's
own script (about 4.8 MB), without the addresses in it. A content policy forbids every request and
every script except the three written here, whose hashes it names: text from a model or a file can
be shown but never run, follows no link and turns no words around.
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

MAX_PAGE_BYTES = 6_000_000
"""Bytes; a larger page is refused rather than written."""

PLAIN_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"

_ADDRESS = re.compile(r"https?://(?=\w)(?!www\.w3\.org/)")

_LINK_TAG = re.compile(r"\\u003c(?=[aA]\b)")

_UNSAFE_IN_SCRIPT = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


@dataclass(frozen=True)
class PagePanel:
    """A chart on a page, with its title and an explanation of how to read it.

    Attributes:
        key: identifier of the panel in the page.
        title: heading.
        how: how to read the chart.
        figure: Plotly figure, as JSON values; None if there is nothing to draw.
        reason: why there is no figure.
        wide: whether it takes the whole width of the page.
    """

    key: str
    title: str
    how: str
    figure: dict[str, Any] | None = None
    reason: str = ""
    wide: bool = False

    def with_chart(self, chart: Chart) -> "PagePanel":
        """Return the panel with this chart."""
        return replace(self, figure=plotly_figure(chart))

    def without_chart(self, statuses: Sequence[str]) -> "PagePanel":
        """Return the panel without a chart; its reason joins the distinct statuses but "ok"."""
        return replace(self, reason="; ".join(dict.fromkeys(s for s in statuses if s != "ok")))


def missing_charts_line(panels: Sequence[PagePanel]) -> str:
    """Return one line that names the panels without a chart and why; empty if all have one."""
    titles: dict[str, list[str]] = {}
    for panel in panels:
        if panel.figure is None:
            titles.setdefault(panel.reason or "no data", []).append(f"“{panel.title}”")
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in titles.items())


def render_page(
    template: str,
    panels: Sequence[PagePanel] = (),
    data: Mapping[str, Any] | None = None,
    style: str = "",
    **content: Any,
) -> str:
    """Render a template as a self-contained page; text is escaped.

    Args:
        template: file of `templates/` that extends `frame.html`.
        panels: charts; those without a figure are left out.
        data: JSON values for `page.js` beside the figures; scripts are left out of a page that
            has neither.
        style: file of `templates/` with more style.
        content: values of the template: `kind`, `title`, `facts`, `verdict`, optionally the
            `provenance` and `metrics` at the end of the page, and the template's own names.
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
            data=_LINK_TAG.sub("‹", embedded),  # Plotly makes a link of a label with <a href=...>
            unmeasured=missing_charts_line(panels),
            **({"provenance": (), "metrics": (), "sections": ()} | content),
        )
    )
    size = len(page.encode())
    require(size <= MAX_PAGE_BYTES, f"the page has {size} bytes, at most {MAX_PAGE_BYTES}")
    return page


def notebook_html(
    title: str,
    facts: str,
    verdict: str,
    table: Grid,
    drawings: Drawings,
) -> str:
    """Return title, verdict, table and figures as HTML without script.

    Args:
        title: name of the result.
        facts: one line below it.
        verdict: the main result in a sentence; may be empty.
        table: its main table.
        drawings: figures by name; those that raise `TraceError` are left out.
    """
    images = []
    for name, draw in drawings.items():
        with suppress(TraceError):
            images.append((name, inline_image(draw, "png")))
    content = {"title": title, "facts": facts, "verdict": verdict, "table": table}
    return template_environment().get_template("notebook.html").render(content, images=images)


def arranged_panels(panels: Sequence[PagePanel]) -> list[PagePanel]:
    """Return the panels that have a chart; one alone in its row is made wide."""
    panels_with_chart = [panel for panel in panels if panel.figure is not None]
    row_length = 0
    for index, panel in enumerate(panels_with_chart):
        row_length = 0 if panel.wide else row_length + 1
        ends_row = index + 1 == len(panels_with_chart) or panels_with_chart[index + 1].wide
        if ends_row and row_length % 2:
            panels_with_chart[index] = replace(panel, wide=True)
    return panels_with_chart


def compact_json(value: Any, digits: int = 4) -> Any:
    """Return a JSON value with printable texts and numbers of `digits` significant digits.

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
    r"""Return JSON with <, >, & and the two line separators as \uXXXX, safe inside a script."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE_IN_SCRIPT)


def script_hash(source: str) -> str:
    """Return 'sha256-...' of an inline script, the form that a content policy uses."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@functools.cache
def template_environment() -> Environment:
    """Return the Jinja environment: text is escaped and printable, undefined names are errors."""
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
    """Return a template value as printable text; values marked safe come from this room as is."""
    return value if hasattr(value, "__html__") else printable(str(value))


def _template_source(name: str) -> str:
    """Return the text of a file of `templates/`."""
    loader = template_environment().loader
    assert loader is not None
    return loader.get_source(template_environment(), name)[0]


@functools.cache
def _plotly_script() -> str:
    """Return Plotly's script with "https://" removed from every web address.

    Licences still name their authors, and no address can be followed. XML namespaces, which look
    like addresses, are needed and stay.
    """
    # imported here: plotly is an extra, and only its script is read
    from plotly.offline import get_plotlyjs

    return _ADDRESS.sub("", get_plotlyjs())


def _content_policy(scripts: Sequence[str]) -> str:
    """Return the content policy that allows these inline scripts and no request."""
    hashes = " ".join(map(script_hash, scripts))
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


_DIRECTION_MARKS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def visible_characters(text: str) -> str:
    """Return the text with a visible sign for every control character and before every line end.

    Marks of writing direction would rearrange the text around them, so they are shown by code
    point; halves of surrogate pairs, which no file can hold, become U+FFFD.
    """
    return "".join(map(_visible_character, text))


def _visible_character(sign: str) -> str:
    """Return the visible replacement of one character."""
    if sign == "\n":
        return "↵\n"
    if sign == "\t":
        return "⇥\t"
    if ord(sign) < 0x20:
        return chr(0x2400 + ord(sign))
    if sign in _DIRECTION_MARKS or unicodedata.category(sign) in ("Cc", "Zl", "Zp"):
        return f"⟨{ord(sign):04X}⟩"
    return "\ufffd" if unicodedata.category(sign) == "Cs" else sign
