"""What to do about ties: the remedies of an audit side by side, as tables and words.

One table for each perturbation, one row for each remedy: the KL that remains to the clean original,
the KL between two perturbed runs, how far the model itself moved, and the price.
"""

from rich.console import RenderableType
from rich.text import Text

from tieline.analysis.precision_records import Remedy, RemedyEffect, RemedyTable
from tieline.report.tables import DASH, Grid, significant, text_table, with_error

HEADINGS = ("remedy", "KL to the original", "KL of two runs", "model moved by", "price")
SHORT = ("remedy", "to original", "two runs", "moved", "price")

WHEN = (
    "Routers in float32 win where only the routers' own precision is at fault: the model is not "
    "moved, for the bytes named.",
    "Replay wins where one run must follow another: it takes the experts that were recorded, "
    "weighted live or as recorded, and does not move the model; without a run to follow it does "
    "nothing.",
    "Smoothing wins where two independent runs must agree and a model near the original is as good "
    "as the original: the KL of two runs is lower, and the model is moved by the KL named beside "
    "it. `tieline smooth --frontier` measures both for more widths.",
)


def tables(found: RemedyTable) -> list[tuple[str, Grid]]:
    """A table for each perturbation, with its name."""
    return [
        (name, Grid(HEADINGS, tuple(_row(remedy, effect) for remedy, effect in _of(found, name))))
        for name in found.perturbations
    ]


def words(found: RemedyTable) -> list[str]:
    """What was best under each perturbation, then when each remedy wins, and what cannot be."""
    best = [_best(found, name) for name in found.perturbations]
    how = (
        f"KL in nats per token over {found.tokens:,} tokens; σ is the noise of each layer's gap "
        f"under {found.noise}. The second of two runs differs by the draw of the noise, or, under "
        "a rounding, by noise of the size of the format's own errors."
    )
    refused = [f"Not possible: {reason}." for reason in found.impossible]
    return [*filter(None, best), *WHEN, how, *refused]


def terminal(found: RemedyTable) -> list[RenderableType]:
    """The tables and sentences for a terminal."""
    parts: list[RenderableType] = []
    for name in found.perturbations:
        rows = [_short_row(remedy, effect) for remedy, effect in _of(found, name)]
        parts += [
            Text(f"What to do: {name}", style="bold"),
            text_table(SHORT, rows, left=1),
            Text(),
        ]
    return [*parts, *map(Text, words(found)), Text()]


def _of(found: RemedyTable, name: str) -> list[tuple[Remedy, RemedyEffect]]:
    """Remedies that apply to a perturbation."""
    pairs = [(remedy, remedy.effect(name)) for remedy in found.remedies]
    return [(remedy, effect) for remedy, effect in pairs if effect is not None]


def _row(remedy: Remedy, effect: RemedyEffect) -> tuple[str, ...]:
    found = (effect.to_original, effect.two_runs, remedy.moved)
    values = ("0" if one.value == 0 else with_error(one, 2) for one in found)
    return (remedy.name, *values, _price(remedy, effect))


def _short_row(remedy: Remedy, effect: RemedyEffect) -> tuple[str, ...]:
    """The same without standard errors, for a narrow terminal."""
    found = (effect.to_original, effect.two_runs, remedy.moved)
    values = ("0" if one.value == 0 else significant(one.value, 2) for one in found)
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


def _best(found: RemedyTable, name: str) -> str:
    """Which remedy comes nearest to the original, and with which two runs agree best."""
    done = [(remedy, effect) for remedy, effect in _of(found, name) if remedy.kind != "nothing"]
    if not done:
        return ""
    near, left = min(done, key=lambda pair: _value(pair[1].to_original.value))
    said = f"Under {name}, nearest to the original: {near.name} ({_nats(left.to_original.value)})."
    alone = [pair for pair in done if pair[0].kind != "replay"]
    if not alone:
        return said
    agreeing, between = min(alone, key=lambda pair: _value(pair[1].two_runs.value))
    moved = "the model not moved"
    if agreeing.moved.value:
        moved = f"the model moved by {_nats(agreeing.moved.value)}"
    pair = f"two runs of which neither follows the other agree best with {agreeing.name}"
    return f"{said[:-1]}; {pair} ({_nats(between.two_runs.value)}, {moved})."


def _value(kl: float | None) -> float:
    return float("inf") if kl is None else kl


def _nats(kl: float | None) -> str:
    return "KL 0" if kl == 0 else f"KL {significant(kl, 2)}"
