"""The claims ledger in the terminal, as Rich renderables; whoever asked for them prints them."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tieline.report.ledger_words import SIGNS, check_words, shown, summary_words, verdict_words

__all__ = ["catalogue_view", "ledger_view"]

STYLES = {
    "holds": "green",
    "holds with a condition": "yellow",
    "does not hold": "red",
    "not testable here": "dim",
}
NARROW = 100
"""Below so many characters the values leave the table, and only verdicts stay."""


def ledger_view(ledger: Mapping[str, Any], width: int) -> RenderableType:
    """One row per claim, paper by paper, then what changed, then the sums."""
    parts: list[RenderableType] = []
    for paper in ledger["papers"]:
        heading = Text(f"Paper {paper['paper']}: {paper['title']}", style="bold")
        rows = [o for o in ledger["claims"] if o["claim"]["paper"] == paper["paper"]]
        parts += [heading, Padding(_outcomes(rows, width), (0, 0, 1, 0))]
    for outcome in ledger["claims"]:
        if outcome["changed"]:
            parts.append(_news(outcome))
    return Group(*parts, Text(summary_words(ledger)))


def catalogue_view(catalogue: Mapping[str, Any]) -> RenderableType:
    """The claims without results."""
    table = _table("claim", "number", "what", "expected")
    for claim in catalogue["claims"]:
        expected = claim["expected"]
        verdict = Text(f"{SIGNS[expected]} {expected}", style=STYLES[expected])
        table.add_row(Text(claim["id"]), Text(claim["number"]), Text(claim["title"]), verdict)
    return table


def _outcomes(rows: list[Mapping[str, Any]], width: int) -> Table:
    wide = width >= NARROW
    values = ("the paper", "corrected", "measured") if wide else ()
    table = _table("claim", "what", *values, "verdict")
    for outcome in rows:
        claim, evidence = outcome["claim"], outcome["evidence"]
        found = [shown(evidence.get(name)) for name in ("paper", "corrected", "measured")]
        cells = [claim["id"], claim["title"], *(found if wide else [])]
        table.add_row(*map(Text, cells), _verdict(outcome))
    return table


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, no_wrap=place == 0, overflow="fold")
    return table


def _verdict(outcome: Mapping[str, Any]) -> Text:
    words, verdict = verdict_words(outcome), outcome["verdict"]
    style = "bold red" if outcome["changed"] else STYLES[verdict]
    return Text(f"{SIGNS.get(verdict, '!')} {words}", style=style)


def _news(outcome: Mapping[str, Any]) -> RenderableType:
    """A claim that changed, with the checks that failed."""
    lines = [f"{outcome['claim']['id']}: {verdict_words(outcome)}"]
    checks = outcome["evidence"].get("checks", [])
    lines += [f"    {check_words(check)}" for check in checks if not check["passed"]]
    return Text("\n".join(lines), style="bold red")
