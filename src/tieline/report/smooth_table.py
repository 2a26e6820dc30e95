"""What smoothing did to a model, for a terminal: ε by layer, then what it repairs and costs."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tieline.report.numbers import DASH, percent, short_names, significant, value_of

__all__ = ["smooth_facts", "smooth_view"]

HEADINGS = ("precision", "KL before", "floor", "KL after", "floor", "lower by (×)")


def smooth_view(result: Mapping[str, Any]) -> RenderableType:
    """Facts, one row per layer, one row per precision."""
    name = str(result["model"])
    title = Text.assemble((name, "bold"), ("  " + str(result["smoothing"]["how"]), "dim"))
    parts: list[RenderableType] = [title, Padding(_layers(result), (1, 0))]
    parts += [Padding(_repairs(result["repair"]), (0, 0, 1, 0))]
    return Group(*parts, *map(Text, smooth_facts(result)))


def smooth_facts(result: Mapping[str, Any]) -> list[str]:
    """Sentences: experts, loss, distance, time, and what was refused."""
    repair = result["repair"]
    before, after = value_of(repair["experts_before"]), value_of(repair["experts_after"])
    words = [
        f"Experts per token: {significant(before)} before, {significant(after)} after.",
        f"Loss: {significant(value_of(repair['loss']), 5)} before, changed by "
        f"{_signed(repair['loss_change'])} nats per token.",
        f"Smoothing itself moves the predictions by KL {significant(value_of(repair['moved']))}.",
        "Tokens whose experts change in some layer: "
        + "; ".join(map(_flips, repair["rows"]))
        + ".",
        "Time of a forward pass: " + "; ".join(map(_time, result["latency"])) + ".",
        f"KL in nats per token of each model to itself in float32, {repair['tokens']:,} tokens in "
        f"{repair['sequences']} sequences; ± is the standard error, clustered by sequence.",
    ]
    refused = result["smoothing"]["refused"]
    return words + [f"Not smoothed: {name}: {why}." for name, why in refused.items()]


def _time(latency: Mapping[str, Any]) -> str:
    ran, before = latency["implementation"], latency["original"]
    how = f"{ran} experts" if ran == before else f"{ran} experts, {before} before"
    interval = f"{latency['low']:.2f} to {latency['high']:.2f}"
    return f"{latency['ratio']:.2f} times the original ({interval}, {how})"


def _flips(row: Mapping[str, Any]) -> str:
    before, after = value_of(row["flips_before"]), value_of(row["flips_after"])
    return f"{row['name']} {percent(before)} before, {percent(after)} after"


def _layers(result: Mapping[str, Any]) -> Table:
    layers = result["smoothing"]["layers"]
    experts = result["repair"]["experts_by_layer"]
    table = _table(("layer", "ε", "in units of", "k", "k_max", "experts per token"))
    for short, layer in zip(short_names([row["name"] for row in layers]), layers, strict=True):
        table.add_row(
            short,
            significant(layer["epsilon"]) if layer["epsilon"] else "0, as it was",
            str(layer["units"]),
            str(layer["k"]),
            str(layer["k_max"]),
            significant(experts.get(layer["name"])),
        )
    return table


def _repairs(repair: Mapping[str, Any]) -> Table:
    table = _table(HEADINGS)
    for row in repair["rows"]:
        table.add_row(
            str(row["name"]),
            _with_error(row["before"], 2),
            significant(value_of(row["before_floor"]), 2),
            _with_error(row["after"], 2),
            significant(value_of(row["after_floor"]), 2),
            _with_error(row["factor"], 3),
        )
    return table


def _table(headings: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _with_error(estimate: Mapping[str, Any], digits: int) -> str:
    error = estimate["standard_error"]
    value = significant(value_of(estimate), digits)
    return value if error is None else f"{value} ± {significant(error, 2)}"


def _signed(estimate: Mapping[str, Any]) -> str:
    value, error = value_of(estimate), estimate["standard_error"]
    text = DASH if value is None else f"{value:+.5f}"
    return text if error is None else f"{text} ± {error:.5f}"
