"""Report of the design advisor: figure and tables."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tieline.core.text import short_names
from tieline.lab.tropical.collapse import RouterMeasurement
from tieline.lab.tropical.layer_shape_advice import Advice, Entry, Granularity
from tieline.report.charts import Axis, Chart, Series
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.result_views import Report, Section, report_views, terminal_view
from tieline.report.tables import Grid, grid_table
from tieline.report.words.numbers import DASH, percent, significant, with_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MEASURED_HEADINGS = (
    "layer",
    "switches",
    "per length",
    "per rad",
    "any two",
    "per rad",
    "formula",
    "saturation",
    "centred",
    "offset",
    "sets",
    "meets tie",
)
MEASURED_NOTES = (
    "switches, per length, per rad: changes of coalition on the line between neighbouring tokens' "
    "router inputs, per unit of length and of angle. any two, per rad: the same between any two "
    "tokens; formula: ρ/π of a Gaussian router of this shape.",
    "saturation: median distance of an input to a tie over the spread of the inputs, as they are "
    "and with their mean taken away; offset: norm of that mean over the spread; sets: coalitions "
    "used, as is / centred; meets tie: chance that a ball of the inputs' size at their mean meets "
    "a tie of a Gaussian router.",
)

FLIPS_QUANTITY = "bf16_flips"
PERCENT_QUANTITIES = {FLIPS_QUANTITY}
"""Quantities that are written as percentages."""
MAX_FULL_INTEGER = 10**7
"""Integers below this are written with all their digits."""

CURVE = Series((), (), kind="line+points", size=7, symbol="diamond")
PIECES_CURVES = {
    "paper_bound": replace(
        CURVE, name="paper's bound C(N, k) Φ(kH, d)", colour="@warn", dash="dash", symbol="circle"
    ),
    "sharp_bound": replace(
        CURVE, name="rigorous bound B*", colour="@notice", dash="dashdot", symbol="square"
    ),
    "expected_regions": replace(CURVE, name="expected, Gaussian layer"),
    "expected_cells": replace(
        CURVE, name="expected coalitions alone", dash="dot", symbol="triangle-down"
    ),
}
TIES_CURVES = {
    "switches": replace(CURVE, name="switches per radian"),
    "gap_density": replace(
        CURVE, name="tie density f_gap(0)", colour="@notice", dash="dashdot", symbol="square"
    ),
    FLIPS_QUANTITY: replace(
        CURVE, name="flips by bf16 (share of tokens)", colour="@warn", dash="dash", symbol="circle"
    ),
}
"""Style of the curve of each quantity."""


MAX_BF16_FLIPS = 0.05
"""Largest share of tokens that bf16 may flip with the recommended split."""


def design_recommendation(result: Advice) -> str:
    """Recommend the finest split at which bf16 flips at most `MAX_BF16_FLIPS` of tokens.

    The gain of a split is the expected number of linear pieces; its cost, the flips, vanishes
    if the router computes in float32.
    """
    rows = sorted(result.rows, key=lambda row: row.split)
    stable = [row for row in rows if _entry_value(row, FLIPS_QUANTITY) <= MAX_BF16_FLIPS]
    finest = rows[-1]
    if not stable:
        return f"Keep the router in float32: {_bf16_flips_text(rows[0], finest)}."
    if stable[-1] is finest:
        shape, flips = _k_of_n_text(finest), _bf16_flips_text(finest)
        return f"{shape} are fine, also with a router in bf16: {flips}."
    gain = _entry_value(finest, "expected_gain") / _entry_value(stable[-1], "expected_gain")
    return (
        f"Do not go beyond {_k_of_n_text(stable[-1])} unless the router computes in float32: "
        f"{_bf16_flips_text(stable[-1], finest)}, for {significant(gain, 2)} times the expected "
        "linear pieces."
    )


def _entry_value(row: Granularity, name: str) -> float:
    """Return a granularity's value of a quantity; infinite if it has none."""
    value = row.entries[name].value
    return math.inf if value is None else float(value)


def _bf16_flips_text(*rows: Granularity) -> str:
    """State the share of tokens that bf16 flips at each of the given granularities."""
    flips = [design_cell_text(FLIPS_QUANTITY, row.entries[FLIPS_QUANTITY]) for row in rows]
    shares = dict.fromkeys(
        f"{share} of tokens with {_k_of_n_text(row)}"
        for share, row in zip(flips, rows, strict=True)
    )
    return f"rounding its scores to bf16 changes the choice of {' and '.join(shares)}"


def _k_of_n_text(row: Granularity) -> str:
    """Return "k of N experts"."""
    return f"{row.shape.k} of {row.shape.n_experts} experts"


def _design_report(result: Advice) -> Report:
    """Build the report: numbers by split, figure, and where each number holds."""
    table = _split_table(result)
    draw = partial(_design_figure, result)
    return Report(
        kind="design",
        title=f"Design of {result.source}",
        facts=_design_facts(result),
        verdict=design_recommendation(result),
        table=lambda: table,
        body=lambda: {"sections": _design_sections(result, table, draw)},
        figures={"design": draw},
    )


def _design_sections(
    result: Advice, table: Grid, draw_figure: "Callable[[], Figure]"
) -> list[Section]:
    """Return the page's sections: table, measured layers, figure and meanings."""
    meanings = [
        (quantity.heading, quantity.meaning, quantity.valid)
        for quantity in result.quantities.values()
    ]
    measured_section = Section(
        "Measured on the model's own hidden states", measured_layers_grid(result)
    )
    caption = "Decimal logarithms of bounds, expectation and tie densities by split"
    return [
        Section("Granularities side by side", table, notes=_star_notes(result)),
        *([replace(measured_section, notes=MEASURED_NOTES)] if result.measured else []),
        Section("Bounds, expectation and ties", draw=draw_figure, caption=caption),
        Section(
            "What each number is, and where it holds",
            Grid(("quantity", "what it is", "where it holds"), tuple(meanings)),
            prose=True,
        ),
    ]


def _design_terminal(result: Advice, width: int) -> RenderableType:
    """Return the terminal view: numbers by split, notes, and where each number holds."""
    table = grid_table(_split_table(result), left_aligned=1)
    table.columns[-1].justify, table.columns[-1].style = "left", "dim"
    meanings = Table.grid(padding=(0, 2))
    meanings.add_column(no_wrap=True)
    for quantity in result.quantities.values():
        sentence = Text.assemble(quantity.meaning, "\n", (f"holds: {quantity.valid}", "dim"))
        meanings.add_row(Text(quantity.heading), sentence)
    notes = Text("\n".join(_star_notes(result)) + "\n")
    measured: list[RenderableType] = []
    if result.measured:
        measured = [
            grid_table(measured_layers_grid(result), left_aligned=1),
            Text("\n".join(MEASURED_NOTES) + "\n"),
        ]
    return terminal_view(
        result.source,
        _design_facts(result),
        design_recommendation(result),
        table,
        notes,
        *measured,
        meanings,
    )


def _design_summary(result: Advice) -> str:
    """Return source and splits, shape, and the recommendation, one line each."""
    splits = ", ".join(str(row.split) for row in result.rows)
    headline = f"Design of {result.source}, splits {splits}"
    return "\n".join([headline, _design_facts(result), design_recommendation(result)])


page, figures, terminal, summary, notebook = report_views(_design_report)._replace(
    terminal=_design_terminal, summary=_design_summary
)


def measured_layers_grid(result: Advice) -> Grid:
    """Return one row per measured layer, with the Gaussian formula beside the counts."""
    labels = short_names([layer.name for layer in result.measured])
    return Grid(MEASURED_HEADINGS, tuple(map(_measured_layer_row, labels, result.measured)))


def _measured_layer_row(label: str, layer: RouterMeasurement) -> tuple[str, ...]:
    """Return switches, angles and centring of one measured layer, or the reason for none."""
    near, far, centred = layer.neighbours, layer.any_two, layer.centring
    if near is None or far is None or centred is None:
        return (label, *[DASH] * (len(MEASURED_HEADINGS) - 2), layer.status)
    return (
        label,
        with_error(near.switches, 2),
        significant(near.per_length),
        significant(near.per_radian),
        with_error(far.switches, 2),
        significant(far.per_radian),
        significant(far.expected_per_radian),
        significant(centred.as_is.relative),
        significant(centred.centred.relative),
        significant(centred.as_is.offset),
        f"{centred.as_is.coalitions:,} / {centred.centred.coalitions:,}",
        percent(layer.meets_tie),
    )


def design_cell_text(name: str, entry: Entry) -> str:
    """Return an entry as a percentage, a number, or a power of ten if it is too large."""
    if entry.value is None:
        return DASH if entry.log10 is None else f"10^{entry.log10:.0f}"
    if name in PERCENT_QUANTITIES:
        return percent(entry.value)
    if isinstance(entry.value, int) and entry.value < MAX_FULL_INTEGER:
        return f"{entry.value:,}"
    return significant(float(entry.value))


def _design_facts(result: Advice) -> str:
    """Return the shape of the layer in one line."""
    first = result.rows[0]
    shape = first.shape
    facts = [
        f"{shape.k} of {shape.n_experts} experts",
        f"width {shape.width}",
        f"model width {shape.hidden}",
        f"d_eff {result.d_eff}",
    ]
    facts += [f"{shape.shared} shared"] if shape.shared else []
    facts += [f"{shape.k_groups} of {shape.n_groups} groups"] if shape.n_groups > 1 else []
    return " · ".join(facts if first.split == 1 else [*facts, f"at split {first.split}"])


def _split_table(result: Advice) -> Grid:
    """Return one row per quantity, one column per split; entries with a note have a star."""
    shapes = [row.shape for row in result.rows]
    rows = [
        ("experts N", *(f"{shape.n_experts:,}" for shape in shapes), ""),
        ("chosen k", *(f"{shape.k:,}" for shape in shapes), ""),
        ("width H", *(f"{shape.width:,}" for shape in shapes), ""),
    ]
    for name, quantity in result.quantities.items():
        entries = [row.entries[name] for row in result.rows]
        cells = [design_cell_text(name, entry) + ("*" if entry.note else " ") for entry in entries]
        rows.append((quantity.heading, *cells, quantity.kind))
    head = ("split m", *(str(row.split) for row in result.rows), "kind")
    return Grid(head, tuple(rows), quantities="rows")


def _star_notes(result: Advice) -> list[str]:
    """Return each starred note once with its quantities and splits, then the general notes."""
    about: dict[str, dict[str, list[int]]] = {}
    for row in result.rows:
        for name, entry in row.entries.items():
            if entry.note:
                heading = result.quantities[name].heading
                about.setdefault(entry.note, {}).setdefault(heading, []).append(row.split)
    marks = []
    for note, headings in about.items():
        splits = sorted(
            {split for splits_of_heading in headings.values() for split in splits_of_heading}
        )
        where = f"{', '.join(headings)} at m = {', '.join(map(str, splits))}"
        marks.append(f"* {where}: {note}")
    return [*marks, *result.notes]


def _design_figure(result: Advice) -> "Figure":
    """Draw log10 of pieces (left) and ties (right) by split."""
    pieces = _log10_chart(result, PIECES_CURVES, f"log₁₀ of the number, d_eff = {result.d_eff}")
    ties = _log10_chart(result, TIES_CURVES, "log₁₀ of the number")
    return chart_figure(pieces, ties, width=6.75, height=2.9)


def _log10_chart(result: Advice, curves: Mapping[str, Series], title: str) -> Chart:
    """Chart log10 of the quantities of `curves` by split."""
    splits = [str(row.split) for row in result.rows]
    logs = {name: [row.entries[name].log10 for row in result.rows] for name in curves}
    series = tuple(replace(curve, x=splits, y=logs[name]) for name, curve in curves.items())
    return Chart(
        Axis("split m  (mN experts, mk chosen, width H/m)", "category"), Axis(title), series
    )
