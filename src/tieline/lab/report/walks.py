"""Report of the times to the first flip: chart and table."""

from dataclasses import replace

from tieline.core.text import short_names
from tieline.lab.on_model.walks import FlipWalk, FlipWalks
from tieline.report.charts import Axis, Chart, Series, above_zero, layer_colour
from tieline.report.html_page import PagePanel
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.result_views import Report, Section, report_views
from tieline.report.tables import Grid, dotted_rows, grid_table
from tieline.report.words.numbers import DASH, percent, significant

Walks = list[tuple[str, FlipWalk]]
"""Short name and walk of each simulated layer."""

WALK_PANEL = PagePanel(
    "flip-times",
    "How many roundings until a token changes its experts",
    "Each layer’s hidden states take a random walk whose steps have the size and directions that "
    "rounding the whole model really has. Height is the share of tokens that have changed an "
    "expert at least once after so many steps. Pale dashes are the exact bounds: the nearest wall "
    "alone, and the sum over all walls.",
)
TABLE_NOTE = (
    "Flipped by t: simulated share of tokens that have changed an expert within t roundings. "
    "Directions: effective number of directions of the noise, at most E - 1."
)


def _walks_report(result: FlipWalks) -> Report:
    """Build the report: the chart and one row per layer."""
    walks, table = _measured_walks(result), walk_table(result)
    reasons = [layer.walk.status for layer in result.layers] or [result.status]
    return Report(
        kind="walks to the first flip",
        name="Walks",
        title=result.model,
        facts=f"{len(result.layers)} routed layers · noise of {result.precision}",
        verdict=_walks_verdict(result),
        table=lambda: table,
        body=lambda: {
            "style": "",
            "panels": [
                WALK_PANEL.with_chart(_walks_chart(walks))
                if walks
                else WALK_PANEL.without_chart(reasons)
            ],
            "sections": [Section("All layers", table, notes=[TABLE_NOTE])],
            "provenance": dotted_rows(result.provenance),
        },
        below=lambda width: [grid_table(table, left_aligned=1)],
        figures={"walks": lambda: chart_figure(_walks_chart(walks))} if walks else {},
    )


page, figures, terminal, summary, notebook = report_views(_walks_report)


def _measured_walks(result: FlipWalks) -> Walks:
    """Return short name and walk of the layers that were simulated."""
    labels = short_names([layer.name for layer in result.layers])
    pairs = zip(labels, result.layers, strict=True)
    return [(label, layer.walk.value) for label, layer in pairs if layer.walk.value is not None]


def _walks_verdict(result: FlipWalks) -> str:
    """State which layer flips first; the reason if no layer was simulated."""
    walks = _measured_walks(result)
    if not walks:
        return next((layer.walk.status for layer in result.layers), result.status)
    label, first = min(walks, key=lambda pair: pair[1].median)
    return (
        f"Under a random walk with the noise of {result.precision}, half of the tokens of layer "
        f"{label}, the first to flip, change an expert within {significant(first.median, 2)} "
        "roundings."
    )


def walk_table(result: FlipWalks) -> Grid:
    """Return one row per layer: median time, flips by each time, directions and tokens."""
    labels = short_names([layer.name for layer in result.layers])
    times = next((walk.times for _, walk in _measured_walks(result)), ())
    head = ("layer", "median", *(f"by {time:g}" for time in times), "directions", "tokens")
    rows = []
    for label, layer in zip(labels, result.layers, strict=True):
        walk = layer.walk.value
        if walk is None:
            rows.append((label, layer.walk.status, *[DASH] * (len(head) - 2)))
            continue
        shares = [percent(share.value) for share in walk.value]
        last_cells = (significant(walk.directions), str(walk.tokens))
        rows.append((label, significant(walk.median), *shares, *last_cells))
    return Grid(head, tuple(rows))


def _walks_chart(walks: Walks) -> Chart:
    """Chart the share of tokens that changed an expert against roundings, with bounds."""
    series = []
    for index, (label, walk) in enumerate(walks):
        colour = layer_colour(index, len(walks))
        shares = above_zero(share.value for share in walk.value)
        line = Series(walk.times, shares, f"layer {label}", colour, "line+points", size=5)
        hover = "after %{x} roundings %{y:percent} have changed an expert"
        pale = Series(walk.times, (), "", colour, "line", width=1.0, dash="dot", opacity=0.5)
        bounds = [replace(pale, y=y, in_legend=False) for y in (walk.lower, walk.upper)]
        series += [replace(line, hover=f"{hover}<extra>%{{fullData.name}}</extra>"), *bounds]
    return Chart(
        Axis("roundings of the whole model", "log"),
        Axis("share of tokens that changed an expert", percent=True, limits=(0.0, 1.0)),
        tuple(series),
        layers=tuple(label for label, _ in walks),
    )
