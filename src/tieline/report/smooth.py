"""A smoothed model as page, terminal view, summary, notebook view and figures.

Shows ε by layer, then what smoothing repairs under low precision and what it costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tieline.analysis.repair import Repair, RepairRow
from tieline.core.statistics import Estimate
from tieline.report.charts import Axis, Chart, Panel, Series, Symbol, above_zero
from tieline.report.drawing import chart_figure
from tieline.report.frame import notebook_html, render
from tieline.report.tables import Grid, flat, short_names, text_table, view
from tieline.report.words.numbers import finite, significant, with_error
from tieline.report.words.smooth import facts, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LAYERS = ("layer", "ε", "in units of", "k", "slots", "experts per token")
REPAIRS = ("precision", "KL before", "floor", "KL after", "floor", "lower by (×)")
KL = Panel(
    "smooth-kl",
    "What low precision does to the predictions, before and after",
    "KL of each model to itself in float32, with two standard errors. Dashes are the floor: the KL "
    "that remains with clean routes forced, which flips cannot explain.",
    wide=True,
)
SIDES: tuple[tuple[int, str, str, Symbol], ...] = (
    (0, "before", "@warn", "circle"),
    (1, "after", "@accent", "diamond"),
)
"""Index, name, colour and symbol of both sides of a repair."""


def page(result: Repair) -> str:
    """The page: what was smoothed, repaired and paid, layer by layer."""
    return render(
        "smooth.html",
        _panels(result),
        kind="smoothing report",
        title=result.model,
        facts=result.smoothing.how,
        verdict=verdict(result),
        repairs=_repairs(result),
        sentences=facts(result),
        layers=_layers(result),
        provenance=flat(result.provenance),
    )


def terminal(result: Repair, width: int) -> RenderableType:
    """Facts, one row per layer and one row per precision."""
    layers, repairs = _layers(result), _repairs(result)
    below = Padding(text_table(repairs.head, repairs.rows), (0, 0, 1, 0))
    sentences = map(Text, facts(result))
    table = text_table(layers.head, layers.rows)
    return view(result.model, result.smoothing.how, "", table, below, *sentences)


def summary(result: Repair) -> str:
    """Name, choice of ε and verdict in plain lines."""
    return f"Smoothing of {result.model}\n{result.smoothing.how}\n{verdict(result)}"


def notebook(result: Repair) -> str:
    """Verdict, table and figure as a piece of HTML."""
    how, outcome = result.smoothing.how, verdict(result)
    return notebook_html(result.model, how, outcome, _repairs(result), figures(result))


def figures(result: Repair) -> "dict[str, Callable[[], Figure]]":
    """Figures by name: KL before and after, by precision."""
    rows = result.repair.rows
    return {"repair": lambda: chart_figure(_kl_chart(rows))}


def _panels(result: Repair) -> list[Panel]:
    return [KL.drawn(_kl_chart(result.repair.rows))]


def _layers(result: Repair) -> Grid:
    layers, experts = result.smoothing.layers, result.repair.experts_by_layer
    labels = short_names([layer.name for layer in layers])
    rows = (
        (
            label,
            significant(layer.epsilon) if layer.epsilon else "0, as it was",
            layer.units,
            str(layer.k),
            "as needed" if result.smoothing.gate == "projected" else str(layer.k_max),
            significant(experts.get(layer.name)),
        )
        for label, layer in zip(labels, layers, strict=True)
    )
    return Grid(LAYERS, tuple(rows))


def _repairs(result: Repair) -> Grid:
    rows = (
        (
            row.name,
            with_error(row.before, 2),
            significant(row.before_floor.value, 2),
            with_error(row.after, 2),
            significant(row.after_floor.value, 2),
            with_error(row.factor, 3),
        )
        for row in result.repair.rows
    )
    return Grid(REPAIRS, tuple(rows))


def _sides(row: RepairRow) -> tuple[tuple[Estimate, Estimate], tuple[Estimate, Estimate]]:
    """KL and floor before, then after."""
    return (row.before, row.before_floor), (row.after, row.after_floor)


def _kl_chart(rows: Sequence[RepairRow]) -> Chart:
    names, series = [row.name for row in rows], []
    for side, name, colour, symbol in SIDES:
        both = [_sides(row)[side] for row in rows]
        spread = [2 * (finite(kl.standard_error) or 0.0) for kl, _ in both]
        hover = "%{x}: %{y:.3~g} %{fullData.name}<extra></extra>"
        dots = Series(names, above_zero(kl.value for kl, _ in both), f"KL {name}", colour)
        dots = replace(dots, symbol=symbol, size=9, errors=(spread, spread))
        floors = above_zero(floor.value for _, floor in both)
        dashes = Series(names, floors, f"floor {name}", colour, symbol="dash", size=20)
        series += [replace(dots, hover=hover), replace(dashes, hover=hover)]
    nats = Axis("KL to itself in float32 (nats per token)", "log")
    return Chart(Axis("precision", "category"), nats, tuple(series), height=420)
