"""Report of a smoothed model.

Shows ε by layer, then what smoothing repairs under low precision and what it costs.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tieline.analysis.smooth_repair import Repair, RepairRow
from tieline.core.statistics import mean_limits
from tieline.core.text import short_names
from tieline.report.charts import Axis, Chart, Series, Symbol, above_zero
from tieline.report.html_page import PagePanel
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.result_views import Report, report_views
from tieline.report.tables import Grid, dotted_rows, grid_table, text_table
from tieline.report.words.numbers import finite, significant
from tieline.report.words.served_precision import TOLERANCE_TEXT
from tieline.report.words.smooth import smoothing_details, smoothing_facts, smoothing_verdict

EPSILON_HEADINGS = ("layer", "ε", "in units of", "k", "experts per token", "at most")
REPAIR_HEADINGS = (
    *("precision", "KL before", "floor", "verdict", "KL after", "floor", "verdict"),
    *("times lower", "95 % interval"),
)
TERMINAL_REPAIR_COLUMNS = (0, 1, 2, 3, 4, 6, 7)
"""Columns of `REPAIR_HEADINGS` that fit into a terminal of 80 characters."""
KL_PANEL = PagePanel(
    "smooth-kl",
    "What low precision does to the predictions, before and after",
    "KL of each model to itself in float32, with two standard errors. Dashes are the floor: the KL "
    "that remains with clean routes forced, which flips cannot explain.",
    wide=True,
)
SIDES: tuple[tuple[str, str, Symbol], ...] = (
    ("before", "@warn", "circle"),
    ("after", "@accent", "diamond"),
)
"""Name, colour and symbol of the model before and after smoothing."""


def _smoothing_report(result: Repair) -> Report:
    """Build the report: verdict, repair by precision, facts and ε by layer."""
    chart = partial(_repair_kl_chart, result.repair.rows)
    return Report(
        kind="smoothing report",
        name="Smoothing",
        title=result.model,
        facts=result.smoothing.how,
        verdict=smoothing_verdict(result),
        table=partial(_repair_table, result),
        body=lambda: {
            "template": "smooth.html",
            "style": "",
            "panels": [KL_PANEL.with_chart(chart())],
            "repairs": _repair_table(result),
            "sentences": [*smoothing_facts(result), *smoothing_details(result)],
            "layers": _epsilon_table(result),
            "provenance": dotted_rows(result.provenance),
        },
        below=partial(_smoothing_terminal_views, result),
        figures={"repair": lambda: chart_figure(chart())},
    )


def _smoothing_terminal_views(result: Repair, width: int) -> list[RenderableType]:
    """Return the tables of ε by layer and of KL by precision, and the facts, for a terminal."""
    table = [
        [row[i] for i in TERMINAL_REPAIR_COLUMNS]
        for row in (REPAIR_HEADINGS, *_repair_table(result).rows)
    ]
    repairs = Padding(text_table(table[0], table[1:], left_aligned=1), (0, 0, 1, 0))
    return [grid_table(_epsilon_table(result)), repairs, *map(Text, smoothing_facts(result))]


page, figures, terminal, summary, notebook = report_views(_smoothing_report)


def _epsilon_table(result: Repair) -> Grid:
    """Return ε, k and the mean and largest number of experts per token of each layer."""
    layers, experts = result.smoothing.layers, result.repair.experts_by_layer
    labels = short_names([layer.name for layer in layers])
    rows = (
        (
            label,
            significant(layer.epsilon) if layer.epsilon else "0, as it was",
            layer.units,
            str(layer.k),
            significant(experts.get(layer.name)),
            str(layer.k_max),
        )
        for label, layer in zip(labels, layers, strict=True)
    )
    return Grid(EPSILON_HEADINGS, tuple(rows))


def _repair_table(result: Repair) -> Grid:
    """Return KL, floor and verdict before and after smoothing, by precision."""
    repair, rows = result.repair, []
    for row in repair.rows:
        sides = ((row.before, row.before_floor), (row.after, row.after_floor))
        cells = [
            text
            for (kl, floor), tolerance in zip(sides, repair.tolerances(row), strict=True)
            for text in (
                significant(kl.value, 2),
                significant(floor.value, 2),
                TOLERANCE_TEXT[tolerance],
            )
        ]
        low, high = mean_limits(row.factor, repair.sequences, positive=True)
        interval = f"{significant(low, 2)} to {significant(high, 2)}"
        rows.append((row.name, *cells, significant(row.factor.value, 2), interval))
    return Grid(REPAIR_HEADINGS, tuple(rows))


def _repair_kl_chart(rows: Sequence[RepairRow]) -> Chart:
    """Chart KL and its floor before and after smoothing, by precision."""
    names, series = [row.name for row in rows], []
    for name, colour, symbol in SIDES:
        before = name == "before"
        both = [(x.before, x.before_floor) if before else (x.after, x.after_floor) for x in rows]
        spread = [2 * (finite(kl.standard_error) or 0.0) for kl, _ in both]
        hover = "%{x}: %{y:.3~g} %{fullData.name}<extra></extra>"
        dots = Series(names, above_zero(kl.value for kl, _ in both), f"KL {name}", colour)
        dots = replace(dots, symbol=symbol, size=9, errors=(spread, spread))
        floors = above_zero(floor.value for _, floor in both)
        dashes = Series(names, floors, f"floor {name}", colour, symbol="dash", size=20)
        series += [replace(dots, hover=hover), replace(dashes, hover=hover)]
    nats = Axis("KL to itself in float32 (nats per token)", "log")
    return Chart(Axis("precision", "category"), nats, tuple(series), height=420)
