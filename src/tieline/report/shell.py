"""The frame of every page: scripts, style and the policy that lets nothing else run.

A page carries Plotly's own script (about 4.8 MB), so it opens from a mail, offline, years later.
A content policy forbids every request and every script but the three that are written here, whose
hashes it names; text from a model or a file can therefore be shown but never run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tieline.core.errors import require
from tieline.report.markup import embed_json, fill, script_hash, template
from tieline.report.numbers import compact
from tieline.report.panels.panel import Panel

__all__ = ["LARGEST_PAGE", "check_size", "figures_of", "render_shell"]

LARGEST_PAGE = 6_000_000
"""Bytes; a page that would be larger is refused rather than written."""


NOTICE = (
    '<noscript><p class="missing wide">The charts need JavaScript, which is off; the numbers are '
    'in the tables.</p></noscript>\n<p class="missing wide" id="trouble" hidden></p>'
)
"""Before the charts: what is said where none can be drawn."""


def render_shell(
    name: str, kind: str, parts: Mapping[str, str], data: Mapping[str, Any], style: str = ""
) -> str:
    """The frame of all pages, with the scripts, the style and the data of the figures.

    Args:
        name: file of the template for what is below the head of the page.
        kind: what the page is, "routing report"; stands above its title and in the window's.
        parts: title, facts and verdict for the head, optionally its numbers, and what belongs in
            the places of the template; safe HTML.
        data: JSON values for `page.js`, "figures" by the key of their panel among them.
        style: more style than that of all pages.
    """
    scripts = {"watch": template("watch.js"), "plotly": _plotly(), "script": template("page.js")}
    frame = {
        "numbers": "",
        **parts,
        **scripts,
        "kicker": f"Tieline {kind}",
        "document": f"{parts['title']}: {kind}",
        "body": fill(template(name), {"notice": NOTICE, **parts}),
        "policy": _policy(list(scripts.values())),
        "style": template("page.css") + style,
        "data": embed_json(compact(data)),
    }
    return fill(template("old_frame.html"), frame)


def figures_of(panels: Sequence[Panel]) -> dict[str, Any]:
    """The figures of the panels that have one, by key."""
    return {panel.key: panel.figure for panel in panels if panel.figure is not None}


def check_size(page: bytes, most: int = LARGEST_PAGE) -> bytes:
    """The page, refused if it is too large to be mailed."""
    require(len(page) <= most, f"the page has {len(page)} bytes, at most {most}")
    return page


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
