"""A comparison as one page that needs nothing else."""

from collections.abc import Mapping
from typing import Any

from tieline.report import sections
from tieline.report.diff_panels import draw_diff_panels
from tieline.report.diff_table import DIFF_COLUMNS, diff_facts, diff_findings, diff_rows, diff_title
from tieline.report.markup import escape
from tieline.report.numbers import MOST_FINDINGS, percent, significant
from tieline.report.shell import check_size, figures_of, render_shell

__all__ = ["diff_page_bytes", "render_diff_page"]

KEY_NUMBERS = (
    ("flip", "of the tokens choose other experts in the worst layer", percent),
    ("flip:any", "do so in at least one layer", percent),
    ("unexplained:count", "flips are not explained by the margin", lambda x: f"{x:,.0f}"),
    ("weight", "of the combine weight moves in the worst layer, on average", percent),
    ("kl", "nats per token between the final distributions", significant),
)


def render_diff_page(result: Mapping[str, Any]) -> str:
    """The page of a comparison.

    Args:
        result: `RoutingDiff.to_dict()`.
    """
    panels = draw_diff_panels(result)
    parts = {
        "title": escape(diff_title(result)),
        "facts": escape(diff_facts(result)),
        "verdict": escape(result["verdict"]),
        "numbers": _numbers(result),
        "findings": _findings(result),
        "panels": "\n".join(map(sections.panel_html, panels)),
        "table": _table(result),
        "meanings": "".join(
            f"<dt>{escape(c.heading)}</dt><dd>{escape(c.meaning)}</dd>" for c in DIFF_COLUMNS
        ),
        "alignment": _alignment(result["alignment"]),
        "provenance": sections.provenance(result),
        "metrics": sections.metrics(result),
    }
    return render_shell(
        "old_diff.html", "routing comparison", parts, {"figures": figures_of(panels)}
    )


def diff_page_bytes(result: Mapping[str, Any]) -> bytes:
    """The page as it is written to a file."""
    return check_size(render_diff_page(result).encode("utf-8"))


def _numbers(result: Mapping[str, Any]) -> str:
    known = result["metrics"]
    tiles = [
        f"<li><strong>{escape(show(known[name]))}</strong> {escape(words)}</li>"
        for name, words, show in KEY_NUMBERS
        if known.get(name) is not None
    ]
    return f'<ul class="numbers">{"".join(tiles)}</ul>'


def _findings(result: Mapping[str, Any]) -> str:
    items = [
        f'<li class="{escape(x["severity"])}"><span class="tag">{escape(x["severity"])}</span> '
        f"<span>{escape(x['text'])}</span></li>"
        for x in diff_findings(result)
    ]
    first, rest = "".join(items[:MOST_FINDINGS]), "".join(items[MOST_FINDINGS:])
    if not items:
        return "<p>Nothing stands out.</p>"
    more = f"<summary>{len(items) - MOST_FINDINGS} more</summary>"
    folded = f'<details>{more}<ul class="findings">{rest}</ul></details>' if rest else ""
    return f'<ul class="findings">{first}</ul>{folded}'


def _table(result: Mapping[str, Any]) -> str:
    head = "".join(
        f'<th scope="col" title="{escape(c.meaning)}">{escape(c.heading)}</th>'
        for c in DIFF_COLUMNS
    )
    rows = "".join(_row([c.cell(layer) for c in DIFF_COLUMNS]) for layer in diff_rows(result))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(cells: list[str]) -> str:
    first, *rest = map(escape, cells)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'


def _alignment(found: Mapping[str, Any]) -> str:
    shift = found["layer_shift"]
    rows = {
        "tokens compared": f"{found['tokens']:,}, of which {found['ids_checked']:,} by equal ids",
        "tokens in A only, in B only": f"{found['tokens_only_a']:,}, {found['tokens_only_b']:,}",
        "tokens not routed (-1) in A, in B": f"{found['unrouted_a']:,}, {found['unrouted_b']:,}",
        "shift of tokens": f"{found['token_shift']:+d}",
        "shift of layers": "paired by order" if shift is None else f"{shift:+d}",
        "layers in A only": ", ".join(found["only_a"]) or "none",
        "layers in B only": ", ".join(found["only_b"]) or "none",
        "dense layers of A": ", ".join(found["dense_a"]) or "none told",
        "dense layers of B": ", ".join(found["dense_b"]) or "none told",
        "experts numbered otherwise": _renumbered(found["pairs"]),
    }
    cells = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in rows.items()
    )
    return f"<dl>{cells}</dl>"


def _renumbered(pairs: list[Mapping[str, Any]]) -> str:
    moved = [pair for pair in pairs if pair["moved_experts"]]
    words = []
    for pair in moved:
        both = zip(pair["moved_experts"], pair["moved_to"], strict=True)
        words.append(f"{pair['name_a']}: " + ", ".join(f"{i} → {j}" for i, j in both))
    return "; ".join(words) or "none"
