"""An audit as one page that needs nothing else."""

from collections.abc import Mapping
from typing import Any

from tieline.report.audit_panels import audit_panels
from tieline.report.audit_table import COLUMNS, KEEP_HEADINGS, audit_facts, audit_notes, keep_rows
from tieline.report.markup import escape
from tieline.report.numbers import percent, short_names, significant, value_of
from tieline.report.plain_page import table_html
from tieline.report.sections import panel_html, provenance
from tieline.report.shell import check_size, figures_of, render_shell

__all__ = ["audit_page_bytes", "render_audit"]

LAYER_HEADINGS = ("layer", "perturbation", "local flips", "predicted", "full flips", "damage")


def render_audit(result: Mapping[str, Any]) -> str:
    """The page.

    Args:
        result: `PrecisionAudit.to_dict()`.
    """
    panels = audit_panels(result)
    parts = {
        "title": escape(result["provenance"].get("model") or "unnamed model"),
        "facts": escape(audit_facts(result)),
        "verdict": escape(result["verdict"]),
        "notes": _notes(result),
        "table": _table(result),
        "meanings": _meanings(),
        "panels": "\n".join(map(panel_html, panels)),
        "keeps": _keeps(result),
        "layers": _layers(result),
        "provenance": provenance(result),
    }
    return render_shell("old_audit.html", "precision audit", parts, {"figures": figures_of(panels)})


def audit_page_bytes(result: Mapping[str, Any]) -> bytes:
    """The page as it is written to a file, refused if it is too large to be mailed."""
    return check_size(render_audit(result).encode("utf-8"))


def _notes(result: Mapping[str, Any]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in audit_notes(result))
    return f"<ul>{items}</ul>" if items else "<p>Nothing else stands out.</p>"


def _table(result: Mapping[str, Any]) -> str:
    head = [column.heading for column in COLUMNS]
    return table_html(head, [[c.cell(row) for c in COLUMNS] for row in result["effects"]])


def _meanings() -> str:
    return "".join(f"<dt>{escape(c.heading)}</dt><dd>{escape(c.meaning)}</dd>" for c in COLUMNS)


def _keeps(result: Mapping[str, Any]) -> str:
    rows = keep_rows(result)
    if not rows:
        return '<p class="missing">No damage by rounded routers was seen.</p>'
    return table_html(KEEP_HEADINGS, rows)


def _layers(result: Mapping[str, Any]) -> str:
    labels = short_names(result["layers"])
    rows = [
        [
            label,
            row["name"],
            percent(value_of(layer["local"])),
            percent(layer["predicted"]),
            percent(value_of(layer["full"])),
            significant(value_of(layer["damage"]), 2),
        ]
        for row in result["effects"]
        for label, layer in zip(labels, row["layers"], strict=True)
    ]
    return table_html(LAYER_HEADINGS, rows)
