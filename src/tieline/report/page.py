"""A result as one page that needs nothing else: no network, no server, no other file.

The page carries Plotly's own script (about 4.8 MB), so it opens from a mail, offline, years later.
A content policy forbids every request and every script but the three that are written here, whose
hashes it names; text from the model can therefore be shown but never run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tieline.errors import require
from tieline.report import sections
from tieline.report.files import write_whole
from tieline.report.markup import embed_json, escape, fill, script_hash, template
from tieline.report.numbers import compact, facts
from tieline.report.panels import Panel, draw_panels
from tieline.report.text_panel import text_data, text_html

__all__ = ["LARGEST_PAGE", "page_bytes", "render_page", "write_page"]

LARGEST_PAGE = 6_000_000
"""Bytes; a page that would be larger is refused rather than written."""


def render_page(result: Mapping[str, Any]) -> str:
    """The page of an inspection.

    Args:
        result: `Inspection.to_dict()`.
    """
    panels = draw_panels(result)
    scripts = {"watch": template("watch.js"), "plotly": _plotly(), "script": template("page.js")}
    parts = {
        **scripts,
        "policy": _policy(list(scripts.values())),
        "style": template("page.css"),
        "title": escape(_name(result)),
        "facts": escape(facts(result)),
        "verdict": escape(result["verdict"]),
        "numbers": sections.key_numbers(result),
        "findings": sections.findings(result),
        "panels": "\n".join(map(sections.panel_html, panels)),
        "text": text_html(result),
        "table": sections.layer_table(result),
        "meanings": sections.column_meanings(),
        "metrics": sections.metrics(result),
        "provenance": sections.provenance(result),
        "data": embed_json(compact(_data(result, panels))),
    }
    return fill(template("page.html"), parts)


def page_bytes(result: Mapping[str, Any]) -> bytes:
    """The page as it is written to a file, refused if it is too large to be mailed."""
    page = render_page(result).encode("utf-8")
    require(len(page) <= LARGEST_PAGE, f"the page has {len(page)} bytes, at most {LARGEST_PAGE}")
    return page


def write_page(result: Mapping[str, Any], path: Path) -> None:
    """Write the page whole or not at all."""
    write_whole(path, page_bytes(result))


def _data(result: Mapping[str, Any], panels: list[Panel]) -> dict[str, Any]:
    figures = {panel.key: panel.figure for panel in panels if panel.figure is not None}
    return {"figures": figures, "text": text_data(result)}


def _policy(scripts: list[str]) -> str:
    allowed = " ".join(map(script_hash, scripts))
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _plotly() -> str:
    # imported here: plotly is an extra, and reading its script is all that is asked of it
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _name(result: Mapping[str, Any]) -> str:
    return str(result["provenance"].get("model") or "unnamed model")
