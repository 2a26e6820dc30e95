"""The advisor's numbers as one page: table, figure, and where each number holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tieline.report.design_figure import design_figure_bytes
from tieline.report.design_table import cell_text, design_facts
from tieline.report.markup import escape
from tieline.report.plain_page import image, plain_page, table_html

__all__ = ["design_page_bytes"]

STYLE = """
td, th { white-space: normal; } td:first-child { white-space: nowrap; }
.words td { text-align: left; min-width: 12rem; } .words th { text-align: left; }
"""


def design_page_bytes(advice: Mapping[str, Any]) -> bytes:
    """The page as it is written to a file.

    Args:
        advice: `Advice.to_dict()`.
    """
    drawing = design_figure_bytes(advice, Path("figure.svg"))
    words = "Decimal logarithms of bounds, expectation and tie densities by split"
    notes = "".join(f'<p class="how">{escape(note)}</p>' for note in advice["notes"])
    sections = [
        ("Granularities side by side", _numbers(advice) + notes),
        ("Bounds, expectation and ties", image(drawing, words)),
        (
            "What each number is, and where it holds",
            f'<div class="words">{_meanings(advice)}</div>',
        ),
    ]
    title = f"Design of {advice['source']}"
    return plain_page(title, design_facts(advice), sections, STYLE).encode()


def _numbers(advice: Mapping[str, Any]) -> str:
    rows = advice["rows"]
    head = ["split m", *(str(row["split"]) for row in rows), "kind", "outside its range"]
    shapes = [
        [heading, *(f"{row['shape'][field]:,}" for row in rows), "", ""]
        for heading, field in (("experts N", "n_experts"), ("chosen k", "k"), ("width H", "width"))
    ]
    return table_html(head, shapes + [_row(name, advice) for name in advice["quantities"]])


def _row(name: str, advice: Mapping[str, Any]) -> list[str]:
    quantity = advice["quantities"][name]
    entries = [(row["split"], row["entries"][name]) for row in advice["rows"]]
    about: dict[str, list[str]] = {}
    for split, entry in entries:
        if entry["note"]:
            about.setdefault(entry["note"], []).append(str(split))
    notes = "; ".join(f"m = {', '.join(splits)}: {note}" for note, splits in about.items())
    cells = [cell_text(name, entry) for _, entry in entries]
    return [quantity["heading"], *cells, quantity["kind"], notes]


def _meanings(advice: Mapping[str, Any]) -> str:
    rows = [[q["heading"], q["meaning"], q["valid"]] for q in advice["quantities"].values()]
    return table_html(["quantity", "what it is", "where it holds"], rows)
