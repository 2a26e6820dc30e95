"""A rate study as text: one row for each loss and start, with its slope and interval."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tieline.report.numbers import DASH, significant

__all__ = ["rates_view"]

MOST_SIZES = 3
NAMES = {"raw": "raw", "quotient": "quotient", "function": "‖f − f*‖"}


def rates_view(study: Mapping[str, Any]) -> RenderableType:
    """Setting, slopes, and what is worth knowing about the fits.

    Args:
        study: `RateStudy.to_dict()`, with `sample_size` where an error was asked for.
    """
    title = Text.assemble((study["name"], "bold"), ("  " + _facts(study), "dim"))
    return Group(title, Padding(_table(study), (1, 0)), Text("\n".join(_notes(study))))


def _facts(study: Mapping[str, Any]) -> str:
    model = study["model"]
    fitted, true = model["n_experts"], study["true_experts"]
    parts = [
        f"{model['gate']} {model['link']}, {model['expert']} experts",
        f"d {model['d']}",
        f"{fitted} experts" if fitted == true else f"{fitted} experts for {true}",
        f"{model['parameters']} parameters",
        f"{study['repetitions']} repetitions",
        f"noise {study['noise']:g}",
        f"loss {study['loss']} of paper {study['paper']}",
    ]
    if study.get("condition") is not None:
        parts.append(f"condition {study['condition']:,.0f}")
    return " · ".join(parts)


def _table(study: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for heading in ("loss", "start"):
        table.add_column(heading, no_wrap=True)
    for heading in ("slope", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = _some(study["sizes"])
    for n in shown:
        table.add_column(f"n={n:,}", justify="right", no_wrap=True)
    for one in study["series"]:
        means = dict(zip(one["sizes"], one["mean"], strict=True))
        cells = [f"{means[n]:.2g}" if n in means else DASH for n in shown]
        rate = one["rate"]
        slope = DASH if rate is None else f"{rate['slope']:.2f}"
        interval = DASH if rate is None else f"{rate['low']:.2f} to {rate['high']:.2f}"
        table.add_row(NAMES[one["loss"]], one["start"], slope, interval, *cells)
    return table


def _some(sizes: Sequence[int]) -> list[int]:
    """Few enough sample sizes for a terminal: the ends, and some between."""
    last = len(sizes) - 1
    places = sorted({round(last * step / (MOST_SIZES - 1)) for step in range(MOST_SIZES)})
    return [sizes[place] for place in places]


def _notes(study: Mapping[str, Any]) -> list[str]:
    ends = ", ".join(f"{count} {name}" for name, count in study["status"].items())
    notes = [f"{study['problems']} fits: {ends}; {study['cpu_seconds']:.1f} s of CPU time"]
    if study["paper_slope"] is not None:
        notes.append(f"the paper reports a slope of {study['paper_slope']:.2f} for the raw loss")
    if study["failed"]:
        notes.append(f"{study['failed']} of {study['problems']} fits did not converge")
    if study["ridge"]["words"]:
        notes.append(f"warning: {study['ridge']['words']}")
    if study["empty_cells"]:
        notes.append(
            f"in {study['empty_cells']} fits a true expert has an empty cell: it adds nothing but "
            "its mass to the loss"
        )
    if not study["well_specified"]:
        notes.append(
            f"the model does not contain the truth: losses are against the population minimiser, "
            f"‖f − q‖ = {significant(study['misfit'])}"
        )
    if study.get("sample_size"):
        notes.append(f"with this router and these experts, {study['sample_size']['words']}")
    return notes
