"""A page without any script: words, tables and drawings, in one file that needs nothing else."""

import base64
from collections.abc import Sequence

from tieline.report.markup import escape, fill, template

__all__ = ["image", "plain_page", "table_html"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"


def plain_page(title: str, facts: str, sections: Sequence[tuple[str, str]], style: str = "") -> str:
    """The page.

    Args:
        title: heading of the page, plain text.
        facts: one line below it, plain text.
        sections: heading (plain text) and contents (safe HTML) of each panel.
        style: more style than that of all pages.
    """
    panels = "\n".join(
        f'<section class="panel wide"><h2>{escape(heading)}</h2>{html}</section>'
        for heading, html in sections
    )
    parts = {
        "policy": POLICY,
        "title": escape(title),
        "facts": escape(facts),
        "style": template("page.css") + style,
        "panels": panels,
    }
    return fill(template("plain.html"), parts)


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def image(svg: bytes, words: str) -> str:
    """A drawing inside the page, with words for those who cannot see it."""
    code = base64.b64encode(svg).decode()
    style = "width:100%;max-width:60rem;background:#fff;border-radius:.4rem"
    return f'<img alt="{escape(words)}" style="{style}" src="data:image/svg+xml;base64,{code}">'
