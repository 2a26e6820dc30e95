"""The claims ledger as one page that needs nothing else, with a figure per claim that has one."""

from collections.abc import Mapping
from typing import Any

from tieline.report.ledger_words import (
    KINDS,
    SIGNS,
    check_words,
    shown,
    summary_words,
    verdict_words,
)
from tieline.report.markup import escape, template
from tieline.report.panels.panel import axis, figure
from tieline.report.shell import check_size, render_shell

__all__ = ["ledger_bytes", "render_ledger"]

PARTS = {"paper": "as stated", "condition": "under the condition", "corrected": "ours"}


def render_ledger(ledger: Mapping[str, Any]) -> str:
    """The page.

    Args:
        ledger: `studies.ledger.ledger_record`.
    """
    run = ledger["provenance"]
    words = f"tieline {run['tieline']} · {run['mode']} mode · seed {run['seed']}"
    parts = {
        "title": "Claims ledger",
        "facts": escape(words),
        "verdict": escape(summary_words(ledger)),
        "contents": _contents(ledger),
        "claims": "\n".join(_paper(paper, ledger) for paper in ledger["papers"]),
    }
    return render_shell(
        "ledger.html", "reproduction", parts, {"figures": _figures(ledger)}, template("ledger.css")
    )


def ledger_bytes(ledger: Mapping[str, Any]) -> bytes:
    """The page as it is written to a file, refused if it is too large to be mailed."""
    return check_size(render_ledger(ledger).encode("utf-8"))


def _contents(ledger: Mapping[str, Any]) -> str:
    rows = "".join(_content_row(outcome) for outcome in ledger["claims"])
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("claim", "what", "the paper", "corrected", "measured", "verdict")
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _content_row(outcome: Mapping[str, Any]) -> str:
    claim, evidence = outcome["claim"], outcome["evidence"]
    values = "".join(
        f"<td>{escape(shown(evidence.get(name)))}</td>"
        for name in ("paper", "corrected", "measured")
    )
    name = escape(claim["id"])
    return (
        f'<tr><td><a href="#{name}">{name}</a></td><td>{escape(claim["title"])}</td>{values}'
        f"<td>{_tag(outcome)}</td></tr>"
    )


def _tag(outcome: Mapping[str, Any]) -> str:
    verdict = outcome["verdict"]
    kind = "changed" if outcome["changed"] else KINDS[verdict]
    words = f"{SIGNS.get(verdict, '!')} {verdict_words(outcome)}"
    return f'<span class="claim-tag {kind}">{escape(words)}</span>'


def _paper(paper: Mapping[str, Any], ledger: Mapping[str, Any]) -> str:
    claims = [o for o in ledger["claims"] if o["claim"]["paper"] == paper["paper"]]
    title = escape(f"Paper {paper['paper']}: {paper['title']}")
    return f'<h2 class="wide">{title}</h2>' + "\n".join(map(_claim, claims))


def _claim(outcome: Mapping[str, Any]) -> str:
    claim, evidence = outcome["claim"], outcome["evidence"]
    facts = [("How it is tested", claim["tested"])]
    facts += [("Condition", claim["condition"])] if claim["condition"] else []
    facts += [("Why not here", claim["untestable"])] if claim["untestable"] else []
    names = {"paper": "The paper", "corrected": "Corrected", "measured": "Measured"}
    facts += [(label, shown(evidence.get(name))) for name, label in names.items()]
    facts += [("Note", evidence["note"])] if evidence.get("note") else []
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts)
    chart = f'<div class="chart" id="{_key(claim)}"></div>' if evidence.get("figure") else ""
    return (
        f'<section class="panel" id="{escape(claim["id"])}">'
        f"<h3>{escape(claim['number'])}: {escape(claim['title'])}</h3>"
        f"<p>{_tag(outcome)}</p><p>{escape(claim['statement'])}</p>{chart}<dl>{rows}</dl>"
        f"{_checks(evidence.get('checks', []))}</section>"
    )


def _checks(checks: list[Mapping[str, Any]]) -> str:
    items = "".join(
        f"<li>{escape(check_words(check))} <em>{PARTS[check['part']]}</em></li>" for check in checks
    )
    count = f"{len(checks)} check{'s' * (len(checks) != 1)}"
    return f"<details><summary>{count}</summary><ul>{items}</ul></details>"


def _key(claim: Mapping[str, Any]) -> str:
    return escape(f"figure-{claim['id']}")


def _figures(ledger: Mapping[str, Any]) -> dict[str, Any]:
    drawn = (o for o in ledger["claims"] if o["evidence"].get("figure"))
    return {_key(o["claim"]): _drawing(o["evidence"]["figure"]) for o in drawn}


def _drawing(data: Mapping[str, Any]) -> dict[str, Any]:
    """A Plotly figure of the data of a chart."""
    count = len(data["series"])
    series = [_series(item, place, count) for place, item in enumerate(data["series"])]
    x, y = (axis(data[name]["title"], type=data[name]["scale"]) for name in "xy")
    margin = {"t": 12, "r": 16, "b": 60 + 20 * count, "l": 60}
    return figure(series, 300 + 20 * count, xaxis=x, yaxis=y, showlegend=True, margin=margin)


def _series(item: Mapping[str, Any], place: int, count: int) -> dict[str, Any]:
    colour = f"@ramp:{place / max(1, count - 1):.3f}"
    points = [(x, y) for x, y in zip(item["x"], item["y"], strict=True)]
    drawn: dict[str, Any] = {
        "type": "scatter",
        "name": item["name"],
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "mode": "markers" if item["kind"] == "dots" else "lines",
        "line": {"color": colour, "dash": "dash" if item["kind"] == "dashed" else "solid"},
        "marker": {"color": colour, "size": 7},
    }
    if item.get("errors") is not None:
        drawn["error_y"] = {"type": "data", "array": item["errors"], "color": colour}
    return drawn
