"""Report of a frontier, repair against cost of smoothing: chart and tables."""

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tieline.core.text import short_names
from tieline.lab.on_model.frontier import Frontier
from tieline.report.charts import Axis, Chart, Guide, Series
from tieline.report.html_page import PagePanel
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.result_views import Report, Section, report_views
from tieline.report.tables import Grid, dotted_rows, grid_table
from tieline.report.words.numbers import finite, percent, significant, with_error

MAX_INSIDE_SHARE = 0.1
"""Largest share of tokens inside the band at which the law, made for pairs, is compared."""

POINT_HEADINGS = ("width", "experts", "moved (KL)", "flips ÷", "least moved", "over it (×)")
FRONTIER_PANEL = PagePanel(
    "frontier",
    "How much repair, at which price",
    "One point per width of the band, from little to much: how many times cheaper flips are, and "
    "the KL to the original. The line is what every continuous gate must move the model by; the "
    "dashed level is what flips cost before.",
    wide=True,
)
POINTS_LEGEND = (
    "width: ε over the noise of each layer's gap, or an equal number of experts in each layer; "
    "flips ÷: how many times lower what flips cost is; least moved: what the law asks of any gate "
    "for that."
)
LAW_HEADINGS = ("layer", "ε / σ", "inside", "D ÷ law", "S ÷ law", "flips ÷", "over frontier (×)")
LAW_LEGEND = (
    "Each layer by itself: D, how far its output moved, and S, its change under noise of the "
    "choice, over what density, jump and noise of the calibration text predict; over frontier: D "
    "over the least that any continuous gate needs for that S."
)
SPREAD_NAMES = {"noise": "ε in proportion to the noise", "budget": "equal experts in all layers"}
"""Name of the widths of each spread."""


def _frontier_report(result: Frontier) -> Report:
    """Build the report: the chart, every width, and the law layer by layer."""
    points, law = frontier_points_table(result), frontier_law_table(result)
    sections = [
        Section("All widths", points, notes=[POINTS_LEGEND]),
        *([Section("The law, layer by layer", law, notes=[LAW_LEGEND])] if law.rows else []),
    ]
    views: list[RenderableType] = [grid_table(points), _with_empty_line(Text(POINTS_LEGEND))]
    if result.layers:
        views += [_with_empty_line(grid_table(law)), _with_empty_line(Text(LAW_LEGEND))]
    return Report(
        kind="frontier",
        name="Frontier",
        title=result.model,
        facts=_frontier_facts(result),
        verdict=_frontier_verdict(result),
        table=lambda: points,
        body=lambda: {
            "style": "",
            "panels": [FRONTIER_PANEL.with_chart(_frontier_chart(result))],
            "sections": sections,
            "provenance": dotted_rows(result.provenance),
        },
        below=lambda width: views,
        figures={"frontier": lambda: chart_figure(_frontier_chart(result))},
    )


page, figures, terminal, summary, notebook = report_views(_frontier_report)


def _with_empty_line(view: RenderableType) -> Padding:
    """Add an empty line below a piece of the terminal view."""
    return Padding(view, (0, 0, 1, 0))


def _frontier_facts(result: Frontier) -> str:
    """Return one line with the gate, the cost of flips and the number of widths."""
    cost = f"flips under {result.noise} cost KL {significant(result.by_flips)}"
    return f"{result.gate} gate · {cost} · {len(result.points)} widths"


def _frontier_verdict(result: Frontier) -> str:
    """State the width that makes flips cheapest, its cost, and what to do."""
    repairing = [point for point in result.points_of("noise") if finite(point.factor)]
    if not repairing:
        return "No width lowers what flips cost by an amount that can be seen."
    best = max(repairing, key=lambda point: point.factor or 0.0)
    return (
        f"At ε = {best.scale:g} times the noise flips are {significant(best.factor)} times cheaper "
        f"and the model moved by KL {significant(best.table.moved.value)}. What to do: take the "
        "narrowest width whose factor is enough, by `tieline smooth --factor`."
    )


def frontier_points_table(frontier: Frontier) -> Grid:
    """Return one row per width: by the noise of each layer, and by an equal budget."""
    widths = {"noise": "ε = {:.3g} σ", "budget": "{:.3g} each"}
    rows = (
        (
            widths[point.spread].format(point.scale),
            significant(point.table.experts_after.value),
            with_error(point.table.moved, 2),
            significant(point.factor),
            significant(point.least, 2),
            significant(point.over, 2),
        )
        for point in frontier.points
    )
    return Grid(POINT_HEADINGS, tuple(rows))


def frontier_law_table(frontier: Frontier) -> Grid:
    """Return one row per layer and width with at most a tenth of the tokens inside the band."""
    labels = short_names([law.name for law in frontier.layers])
    rows = (
        (
            label,
            significant(point.scale),
            percent(point.inside),
            significant(_positive_ratio(point.moved.value, point.predicted_moved), 2),
            significant(_positive_ratio(point.sensitivity.value, point.predicted_sensitivity), 2),
            significant(point.factor, 2),
            with_error(point.over, 2),
        )
        for label, law in zip(labels, frontier.layers, strict=True)
        for point in law.points
        if point.inside <= MAX_INSIDE_SHARE
    )
    return Grid(LAW_HEADINGS, tuple(rows))


def _positive_ratio(numerator: float | None, denominator: float) -> float | None:
    """Return above / below; None if `numerator` is missing or `denominator` is not positive."""
    return numerator / denominator if numerator is not None and denominator > 0 else None


def _frontier_chart(frontier: Frontier) -> Chart:
    """Chart the KL to the original against the factor of flips, with the least possible KL."""
    hover = "%{x:.3~g} times cheaper, moved %{y:.3~g}<extra></extra>"
    series = []
    for spread, colour in (("noise", "@accent"), ("budget", "@warn")):
        kind = "line+points" if spread == "noise" else "points"
        points = [point for point in frontier.points_of(spread) if finite(point.factor)]
        x, y = [point.factor for point in points], [point.table.moved.value for point in points]
        series.append(
            Series(x, y, SPREAD_NAMES[spread], colour, kind, size=9, width=2.0, hover=hover)
        )
    bound = sorted((p.factor, p.least) for p in frontier.points if p.factor and p.least)
    x, y = [factor for factor, _ in bound], [least for _, least in bound]
    return Chart(
        Axis(f"times cheaper flips under {frontier.noise}", "log"),
        Axis("KL to the original (nats per token)", "log"),
        (*series, Series(x, y, "least possible", "@ink", "line", width=2.0)),
        guides=(Guide("y", frontier.by_flips, dash="dash"),),
        height=420,
    )
