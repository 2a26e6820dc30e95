"""The frame of every page: Jinja2 templates, scripts, style, content policy and size limit.

A page is one file that opens from a mail, offline, years later. One with charts carries Plotly's
own script (about 4.8 MB). A content policy forbids every request and every script except the three
written here, whose hashes it names: text from a model or a file can be shown but never run.

    render            a template of `templates/` as a whole page
    notebook_html     title, verdict, table and figures as a piece of HTML without script
    embed_json        JSON that cannot end the script element which holds it
"""

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tieline.core.errors import TraceError, require
from tieline.report.charts import Panel
from tieline.report.drawing import inline_image
from tieline.report.tables import Grid, compact, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST_PAGE = 6_000_000
"""Bytes; a larger page is refused rather than written."""

PLAIN_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"

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
        content: what the template shows: `kind`, `title`, `facts` and `verdict` of the frame, and
            its own names.
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
            data=embed_json(compact({"figures": figures, **(data or {})})),
            **content,
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
    drawings: "Mapping[str, Callable[[], Figure]]",
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


def script_hash(source: str) -> str:
    """'sha256-...' of an inline script, as a content policy names it."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@functools.cache
def environment() -> Environment:
    """The templates: everything is escaped, and a name that is not given is an error."""
    templates = Environment(
        loader=PackageLoader("tieline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "unbroken": lambda text: text.replace(" %", "\u00a0%"),
        "visible": visible,
    }
    templates.globals["zip"] = zip
    return templates


def _source(name: str) -> str:
    loader = environment().loader
    assert loader is not None
    return loader.get_source(environment(), name)[0]


def _scripts() -> dict[str, str]:
    # imported here: plotly is an extra, and only its script is read
    from plotly.offline import get_plotlyjs

    return {"watch": _source("watch.js"), "plotly": get_plotlyjs(), "page": _source("page.js")}


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
