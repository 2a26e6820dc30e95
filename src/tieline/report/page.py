"""A result as one page that needs nothing else: no network, no server, no other file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tieline.core.files import write_whole
from tieline.report import sections
from tieline.report.markup import escape
from tieline.report.numbers import facts
from tieline.report.panels import draw_panels
from tieline.report.shell import LARGEST_PAGE, check_size, figures_of, render_shell
from tieline.report.text_panel import text_data, text_html

__all__ = ["LARGEST_PAGE", "page_bytes", "render_page", "write_page"]


def render_page(result: Mapping[str, Any]) -> str:
    """The page of an inspection.

    Args:
        result: `Inspection.to_dict()`.
    """
    panels = draw_panels(result)
    parts = {
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
    }
    data = {"figures": figures_of(panels), "text": text_data(result)}
    return render_shell("page.html", "routing report", parts, data)


def page_bytes(result: Mapping[str, Any]) -> bytes:
    """The page as it is written to a file, refused if it is too large to be mailed."""
    return check_size(render_page(result).encode("utf-8"), LARGEST_PAGE)


def write_page(result: Mapping[str, Any], path: Path) -> None:
    """Write the page whole or not at all."""
    write_whole(path, page_bytes(result))


def _name(result: Mapping[str, Any]) -> str:
    return str(result["provenance"].get("model") or "unnamed model")
