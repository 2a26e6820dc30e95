"""The remedies of an audit side by side, as tables.

One table for each perturbation, one row for each remedy: the KL that remains to the clean original,
the KL between two perturbed runs, how far the model itself moved, and the price.
"""

from rich.console import RenderableType
from rich.text import Text

from tieline.analysis.audit_records import Remedy, RemedyEffect, RemedyTable
from tieline.report.tables import Grid, text_table
from tieline.report.words.audit import remedies_of, remedy_sentences
from tieline.report.words.numbers import DASH, significant, with_error

HEADINGS = ("remedy", "KL to the original", "KL of two runs", "model moved by", "price")
SHORT = ("remedy", "to original", "two runs", "moved", "price")


def tables(table: RemedyTable) -> list[tuple[str, Grid]]:
    """A table for each perturbation, with its name."""
    return [
        (
            name,
            Grid(
                HEADINGS, tuple(_row(remedy, effect) for remedy, effect in remedies_of(table, name))
            ),
        )
        for name in table.perturbations
    ]


def terminal(table: RemedyTable) -> list[RenderableType]:
    """The tables and sentences for a terminal."""
    views: list[RenderableType] = []
    for name in table.perturbations:
        rows = [_short_row(remedy, effect) for remedy, effect in remedies_of(table, name)]
        views += [
            Text(f"What to do: {name}", style="bold"),
            text_table(SHORT, rows, left=1),
            Text(),
        ]
    return [*views, *map(Text, remedy_sentences(table)), Text()]


def _row(remedy: Remedy, effect: RemedyEffect) -> tuple[str, ...]:
    estimates = (effect.to_original, effect.two_runs, remedy.moved)
    values = ("0" if x.value == 0 else with_error(x, 2) for x in estimates)
    return (remedy.name, *values, _price(remedy, effect))


def _short_row(remedy: Remedy, effect: RemedyEffect) -> tuple[str, ...]:
    """The same without standard errors, for a narrow terminal."""
    estimates = (effect.to_original, effect.two_runs, remedy.moved)
    values = ("0" if x.value == 0 else significant(x.value, 2) for x in estimates)
    return (remedy.name, *values, _price(remedy, effect).removesuffix(" time"))


def _price(remedy: Remedy, effect: RemedyEffect) -> str:
    if remedy.kind == "nothing":
        return DASH
    if remedy.kind == "float32":
        return f"{effect.bytes:,} bytes"
    spent = "" if remedy.time is None else f", {remedy.time:.2f} × time"
    if remedy.kind == "replay":
        return f"{remedy.bytes_per_token} B a token{spent}"
    return f"{remedy.experts:.2f} experts{spent}"
