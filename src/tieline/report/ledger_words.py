"""How the values and verdicts of the claims ledger are written."""

from collections.abc import Mapping
from typing import Any

from tieline.report.numbers import DASH, significant

__all__ = ["KINDS", "SIGNS", "check_words", "shown", "summary_words", "verdict_words"]

SIGNS = {
    "holds": "●",
    "holds with a condition": "◐",
    "does not hold": "○",
    "not testable here": "·",
}
"""A sign per verdict that needs no colour."""

KINDS = {
    "holds": "holds",
    "holds with a condition": "condition",
    "does not hold": "fails",
    "not testable here": "untestable",
}
"""Class of a verdict in the page."""


def shown(value: Any) -> str:
    """A value of the ledger: words as they are, numbers with six digits."""
    if value is None or value == "":
        return DASH
    if isinstance(value, str | bool):
        return {"inf": "∞", "-inf": "-∞"}.get(str(value), str(value))
    return f"{value:,}" if isinstance(value, int) else significant(value, 6)


def verdict_words(outcome: Mapping[str, Any]) -> str:
    """The verdict; with what was expected where it changed."""
    claim, verdict = outcome["claim"], outcome["verdict"]
    if verdict is None:
        return f"broken: {outcome['error']}"
    if not outcome["changed"]:
        return str(verdict)
    if verdict != claim["expected"]:
        return f"{verdict} (expected: {claim['expected']})"
    return f"{verdict} (but a check failed)"


def check_words(check: Mapping[str, Any]) -> str:
    """A comparison in one line."""
    mark = "✓" if check["passed"] else "✗"
    slack = f" ± {shown(check['tolerance'])}" if check["tolerance"] else ""
    sides = f"{shown(check['measured'])} {check['rule']} {shown(check['reference'])}{slack}"
    return f"{mark} {check['name']}: {sides}"


def summary_words(ledger: Mapping[str, Any]) -> str:
    """How many claims got which verdict, and whether any is news."""
    counts = [f"{count} {verdict}" for verdict, count in ledger["verdicts"].items() if count]
    changed = len(ledger["changed"])
    news = f"{changed} verdict{'s' * (changed != 1)} changed" if changed else "none changed"
    return f"{len(ledger['claims'])} claims: {', '.join(counts)}; {news}."
