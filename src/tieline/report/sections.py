"""The parts of the page that need no script: findings, key numbers, table, provenance."""

from collections.abc import Mapping, Sequence
from typing import Any

from tieline.report.layer_table import COLUMNS, layer_rows
from tieline.report.markup import escape
from tieline.report.numbers import MOST_FINDINGS, finding_text, percent, short_names, significant
from tieline.report.panels import Panel

__all__ = ["findings", "key_numbers", "layer_table", "metrics", "panel_html", "provenance"]

IN_BF16 = "tokens change an expert per layer when its logits are rounded to bf16"
IN_NOISE = "tokens change an expert per layer under noise of 0.01 on its logits"
ANYWHERE = "tokens do so in at least one layer"
KEY_NUMBERS = (
    ((("flip@bf16", IN_BF16), ("flip@0.01", IN_NOISE)), percent),
    ((("flip@bf16:any", ANYWHERE), ("flip@0.01:any", ANYWHERE)), percent),
    ((("jump", "median change of a layer’s output when a near-tie flips"),), percent),
    ((("gap@0.5", "median gap between the last chosen score and the next"),), significant),
    ((("dead", "experts were never chosen"),), lambda number: f"{number:.0f}"),
)
"""Names and meanings of the numbers in large type; the first that is known of each group."""


def key_numbers(result: Mapping[str, Any]) -> str:
    """Up to five numbers in large type."""
    known, tiles = result["metrics"], []
    for choices, show in KEY_NUMBERS:
        found = [(name, words) for name, words in choices if known.get(name) is not None]
        for name, words in found[:1]:
            tiles.append(f"<li><strong>{escape(show(known[name]))}</strong> {escape(words)}</li>")
    return f'<ul class="numbers">{"".join(tiles)}</ul>' if tiles else ""


def findings(result: Mapping[str, Any]) -> str:
    """The findings in the order in which they come: the gravest first."""
    names = [layer["name"] for layer in result["measures"]["layers"]]
    short = dict(zip(names, short_names(names), strict=True))
    items = [_finding(finding, short) for finding in result["findings"]]
    first, rest = "".join(items[:MOST_FINDINGS]), "".join(items[MOST_FINDINGS:])
    if not rest:
        return f'<ul class="findings">{first}</ul>' if first else "<p>Nothing stands out.</p>"
    more = f"<summary>{len(items) - MOST_FINDINGS} more</summary>"
    return (
        f'<ul class="findings">{first}</ul>'
        f'<details>{more}<ul class="findings">{rest}</ul></details>'
    )


def layer_table(result: Mapping[str, Any]) -> str:
    """All numbers of every layer, one row each."""
    head = "".join(
        f'<th scope="col" title="{escape(c.meaning)}">{escape(c.heading)}</th>' for c in COLUMNS
    )
    rows = "".join(_row([c.cell(layer) for c in COLUMNS]) for layer in layer_rows(result))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def column_meanings() -> str:
    """What the columns of the table mean."""
    return "".join(f"<dt>{escape(c.heading)}</dt><dd>{escape(c.meaning)}</dd>" for c in COLUMNS)


def provenance(result: Mapping[str, Any]) -> str:
    """Where the numbers come from and how long they took."""
    rows = [*_flat(result["provenance"]), *_flat(_timings(result["timings"]))]
    cells = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in rows)
    return f"<dl>{cells}</dl>"


def metrics(result: Mapping[str, Any]) -> str:
    """The named numbers that conditions can be put on."""
    rows = sorted(result["metrics"].items())
    cells = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(significant(number, 4))}</dd>" for name, number in rows
    )
    return f"<dl>{cells}</dl>"


def panel_html(panel: Panel) -> str:
    """Heading, place of the chart (or why there is none) and how to read it."""
    size = " wide" if panel.wide else ""
    if panel.figure is None:
        body = f'<p class="missing">{escape(_sentence(panel.reason))}</p>'
    else:
        height = panel.figure["layout"]["height"]
        label = f'role="img" aria-label="{escape(panel.title)}"'
        body = (
            f'<div class="chart" id="{panel.key}" style="height:{height}px" {label}></div>'
            f'<p class="how">{escape(panel.how)}</p>'
        )
    return f'<section class="panel{size}"><h2>{escape(panel.title)}</h2>{body}</section>'


def _finding(finding: Mapping[str, Any], short: Mapping[str, str]) -> str:
    kind, text = escape(finding["severity"]), escape(finding_text(finding, short))
    return f'<li class="{kind}"><span class="tag">{kind}</span> <span>{text}</span></li>'


def _row(cells: Sequence[str]) -> str:
    first, *rest = map(escape, cells)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'


def _flat(value: Mapping[str, Any], above: str = "") -> list[tuple[str, object]]:
    """Nested objects as dotted names."""
    rows: list[tuple[str, object]] = []
    for key, item in value.items():
        name = f"{above}{key}"
        rows += _flat(item, f"{name}.") if isinstance(item, Mapping) else [(name, item)]
    return rows


def _timings(timings: Mapping[str, float]) -> dict[str, str]:
    rates = {name: value for name, value in timings.items() if name.endswith("per_second")}
    seconds = {f"time.{n}": f"{significant(v)} s" for n, v in timings.items() if n not in rates}
    return seconds | {name.replace("_", " "): significant(v) for name, v in rates.items()}


def _sentence(reason: str) -> str:
    return f"Not drawn – {reason}." if reason else "Not drawn."
