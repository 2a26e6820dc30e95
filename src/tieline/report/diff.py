"""Report of a comparison of two runs: charts, table and alignment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tieline.analysis.diff_records import (
    Alignment,
    Attribution,
    DepthStep,
    LayerDiff,
    RoutingDiff,
)
from tieline.core.errors import TraceError
from tieline.core.statistics import Share
from tieline.core.text import short_names
from tieline.report.charts import Axis, Chart, Series
from tieline.report.html_page import PagePanel
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.result_views import Report, report_views
from tieline.report.tables import (
    MAX_FINDINGS_SHOWN,
    Column,
    finding_rows,
    findings_view,
    grid,
    metric_rows,
    provenance_rows,
    provenance_text,
    rich_table,
)
from tieline.report.words.numbers import DASH, percent, significant

FLIP_RATES_PANEL = PagePanel(
    "diff-rates",
    "Tokens that choose other experts, layer by layer",
    "Each dot is the share of tokens whose set of experts differs between A and B, with its 95 % "
    "interval, clustered by document.",
)
CAUSES_PANEL = PagePanel(
    "diff-causes",
    "Near-ties, or something else?",
    "A first flip is a near-tie if the noise of its own token explains it: the experts that "
    "changed places stood no further apart than the differences of that token's other scores make "
    "likely. "
    "Flips of tokens that had flipped in an earlier layer are consequences of that.",
)
DEPTH_PANEL = PagePanel(
    "diff-depth",
    "How the difference grows with depth",
    "The share of tokens that have flipped in this layer or before, beside what it would be if "
    "layers flipped independently of each other.",
)
LATER_FLIPS_PANEL = PagePanel(
    "diff-after",
    "Does a flip bring others?",
    "Flip rate of tokens that have flipped in an earlier layer, and of those that have not. Where "
    "the first is higher, flips compound.",
)
WEIGHT_PANEL = PagePanel(
    "diff-weight",
    "Combine weight that goes to other experts",
    "0 % means that both combine the same experts alike, 100 % that no weight stays where it was.",
    wide=True,
)
CAUSE_SERIES: tuple[tuple[str, Callable[[Attribution], int], str], ...] = (
    ("first flip, a near-tie", lambda x: x.explained, "@accent"),
    ("after an earlier flip", lambda x: x.later, "@notice"),
    ("first flip, unexplained", lambda x: x.unexplained, "@warn"),
)


@dataclass(frozen=True)
class DiffRow:
    """One layer: its short name in A, its comparison, and its share of flipped tokens by depth.

    Where a side is quantised, `by_format` and `by_engine` split its flips.
    """

    label: str
    layer: LayerDiff
    step: DepthStep
    by_format: Share | None = None
    by_engine: Share | None = None


def _diff_report(result: RoutingDiff) -> Report:
    """Build the report: verdict, findings, charts, all layers, alignment, provenance."""
    columns = [column for column in COLUMNS if column.rank is not None]
    return Report(
        kind="routing comparison",
        name="Comparison",
        title=" against ".join(_diff_side_name(result.provenance.get(x)) for x in ("a", "b")),
        facts=_diff_facts(result),
        verdict=result.verdict,
        table=lambda: grid(columns, _diff_rows(result)),
        body=partial(_diff_page_body, result),
        below=lambda width: (
            rich_table(COLUMNS, _diff_rows(result), width),
            findings_view(result.findings, _compared_layer_names(result)),
        ),
        figures={
            "layers": lambda: chart_figure(_flip_rates_chart(result)),
            "causes": lambda: chart_figure(_required_causes_chart(result)),
            "depth": lambda: chart_figure(_flips_by_depth_chart(result)),
        },
    )


def _diff_page_body(result: RoutingDiff) -> dict[str, Any]:
    """Return the values that the template of the page shows."""
    return {
        "template": "diff.html",
        "style": "",
        "panels": diff_panels(result),
        "findings": finding_rows(result.findings, _compared_layer_names(result)),
        "shown": MAX_FINDINGS_SHOWN,
        "table": grid(COLUMNS, _diff_rows(result)),
        "alignment": _alignment_rows(result.alignment),
        "provenance": provenance_rows(result.provenance, result.timings),
        "metrics": metric_rows(result.metrics),
    }


page, figures, terminal, summary, notebook = report_views(_diff_report)


def _required_causes_chart(result: RoutingDiff) -> Chart:
    """Return the chart of causes; raises `TraceError` if no cause was attributed."""
    if (chart := _flip_causes_chart(result)) is None:
        raise TraceError(f"no figure of the causes: {result.layers[0].attribution_status}")
    return chart


def diff_panels(result: RoutingDiff) -> list[PagePanel]:
    """Return every panel with its chart, or with the reason why it has none."""
    layers = result.layers
    charts = (
        (FLIP_RATES_PANEL, _flip_rates_chart(result), []),
        (CAUSES_PANEL, _flip_causes_chart(result), [layer.attribution_status for layer in layers]),
        (DEPTH_PANEL, _flips_by_depth_chart(result), []),
        (
            LATER_FLIPS_PANEL,
            _flips_after_flips_chart(result),
            ["no token flips before the last layer"],
        ),
        (WEIGHT_PANEL, _weight_moved_chart(result), [layer.weight_status for layer in layers]),
    )
    return [
        p.with_chart(chart) if chart else p.without_chart(statuses) for p, chart, statuses in charts
    ]


def _compared_layer_names(result: RoutingDiff) -> list[str]:
    """Return the names of the layers in A."""
    return [layer.name for layer in result.layers]


def _compared_layer_labels(result: RoutingDiff) -> list[str]:
    """Return the short names of the layers in A."""
    return short_names(_compared_layer_names(result))


def _diff_rows(result: RoutingDiff) -> list[DiffRow]:
    """Return one row per layer; flips of a quantised side are split by format and engine."""
    rows = [
        DiffRow(*row)
        for row in zip(
            _compared_layer_labels(result), result.layers, result.tokens.depth, strict=True
        )
    ]
    split = result.dequantised
    if split is None or len(split.format_flips) != len(rows):
        return rows
    flips = zip(rows, split.format_flips, split.engine_flips, strict=True)
    return [replace(row, by_format=by_format, by_engine=added) for row, by_format, added in flips]


def _diff_side_name(provenance: object) -> str:
    """Return model or file, engine, precision and kernel of one side as text."""
    name, engine = (
        provenance_text(provenance, "model", "file") or "unnamed run",
        provenance_text(provenance, "engine"),
    )
    if engine and not name.startswith(f"{engine}:"):  # a trace that an engine wrote
        name = f"{engine}:{name}"
    emulated = provenance_text(provenance, "emulated")
    precision = f"{emulated} emulated" if emulated else provenance_text(provenance, "dtype")
    details = list(filter(None, (precision, provenance_text(provenance, "experts_implementation"))))
    return f"{name} ({', '.join(details)})" if details else name


def _diff_facts(result: RoutingDiff) -> str:
    """Return one line with the numbers of compared tokens, layers and experts."""
    alignment, layers = result.alignment, result.layers
    routing = dict.fromkeys(f"{layer.k} of {layer.n_experts} experts" for layer in layers)
    tokens = f"{alignment.tokens:,} tokens of {alignment.documents:,} documents"
    return " · ".join([tokens, f"{len(layers)} routed layers", " or ".join(routing)])


def _alignment_rows(alignment: Alignment) -> list[tuple[str, str]]:
    """Return name and text of each alignment fact, without the empty ones."""
    shift = alignment.layer_shift
    rows = {
        "tokens compared": f"{alignment.tokens:,}, of which {alignment.ids_checked:,} by equal ids",
        "tokens in A only, in B only": _counts_of_both_sides(
            alignment.tokens_only_a, alignment.tokens_only_b
        ),
        "tokens not routed (-1) in A, in B": _counts_of_both_sides(
            alignment.unrouted_a, alignment.unrouted_b
        ),
        "shift of tokens": f"{alignment.token_shift:+d}" if alignment.token_shift else "",
        "shift of layers": "paired by order" if shift is None else f"{shift:+d}" if shift else "",
        "layers in A only": ", ".join(alignment.only_a),
        "layers in B only": ", ".join(alignment.only_b),
        "dense layers of A": ", ".join(alignment.dense_a),
        "dense layers of B": ", ".join(alignment.dense_b),
        "experts numbered otherwise": "; ".join(
            f"{x.name_a}: "
            + ", ".join(f"{i} → {j}" for i, j in zip(x.moved_experts, x.moved_to, strict=True))
            for x in alignment.permuted
        ),
    }
    return [(name, text) for name, text in rows.items() if text]


def _counts_of_both_sides(a: int, b: int) -> str:
    """Return "a, b"; empty if both are zero."""
    return f"{a:,}, {b:,}" if a or b else ""


LAYER_AXIS = Axis("layer of A", "category")


def _token_share_axis(title: str) -> Axis:
    """Return a percent axis that starts at zero."""
    return Axis(title, percent=True, from_zero=True)


def _flip_rates_chart(result: RoutingDiff) -> Chart:
    """Chart the flip rate of every layer with its 95 % interval."""
    rates = [layer.flip for layer in result.layers]
    above = [(rate.high or 0.0) - (rate.value or 0.0) for rate in rates]
    below = [(rate.value or 0.0) - (rate.low or 0.0) for rate in rates]
    dots = _flip_rate_points(result, "flip rate", rates, "@accent")
    dots = replace(dots, errors=(above, below), in_legend=False)
    return Chart(
        LAYER_AXIS, _token_share_axis("tokens that choose other experts"), (dots,), height=380
    )


def _flip_causes_chart(result: RoutingDiff) -> Chart | None:
    """Chart stacked flips by cause and layer; None if no layer has an attribution."""
    causes = [layer.attribution for layer in result.layers]
    if not any(causes):
        return None
    bars = tuple(
        Series(
            _compared_layer_labels(result),
            [None if cause is None else count(cause) for cause in causes],
            name,
            colour,
            "bar",
            hover=f"layer %{{x}}: %{{y:,}} flips {name}<extra></extra>",
        )
        for name, count, colour in CAUSE_SERIES
    )
    return Chart(LAYER_AXIS, Axis("flips", from_zero=True), bars, stacked=True)


def _flips_by_depth_chart(result: RoutingDiff) -> Chart:
    """Chart the share of tokens flipped so far, and its value for independent layers."""
    steps, labels = result.tokens.depth, _compared_layer_labels(result)
    cumulative_line = _layer_share_line(
        labels, [step.cumulative for step in steps], "flipped so far", "@accent"
    )
    independent = [step.independent for step in steps]
    independent_line = _layer_share_line(
        labels, independent, "if layers were independent", "@muted"
    )
    return Chart(
        LAYER_AXIS,
        _token_share_axis("share of tokens"),
        (cumulative_line, replace(independent_line, dash="dash")),
    )


def _flips_after_flips_chart(result: RoutingDiff) -> Chart | None:
    """Chart flip rates with and without an earlier flip; None if no token flipped earlier."""
    steps = result.tokens.depth
    if not any(step.after.total for step in steps):
        return None
    fresh_points = _flip_rate_points(
        result, "without an earlier flip", [step.fresh for step in steps], "@accent"
    )
    later_points = _flip_rate_points(
        result, "after an earlier flip", [step.after for step in steps], "@warn"
    )
    dots = (fresh_points, replace(later_points, symbol="diamond", size=9))
    return Chart(LAYER_AXIS, _token_share_axis("flip rate"), dots)


def _weight_moved_chart(result: RoutingDiff) -> Chart | None:
    """Chart the weight moved to other experts, mean and 99th percentile; None without weights."""
    weights, labels = [layer.weight for layer in result.layers], _compared_layer_labels(result)
    if not any(weights):
        return None
    mean = _layer_share_line(labels, [x and x.mean for x in weights], "mean over tokens", "@accent")
    worst = _layer_share_line(labels, [x and x.p99 for x in weights], "99th percentile", "@warn")
    return Chart(LAYER_AXIS, _token_share_axis("share of the weight"), (mean, worst), height=380)


def _flip_rate_points(
    result: RoutingDiff, name: str, rates: Sequence[Share], colour: str
) -> Series:
    """Return one dot per layer, with its counts in the hover text."""
    return Series(
        _compared_layer_labels(result),
        [rate.value for rate in rates],
        name,
        colour,
        details=[f"{rate.count:,} of {rate.total:,}" for rate in rates],
        hover=f"layer %{{x}}: %{{y:percent}}, %{{customdata}}, {name}<extra></extra>",
    )


def _layer_share_line(
    labels: list[str], values: Sequence[float | None], name: str, colour: str
) -> Series:
    """Return a line of one share per layer."""
    hover = f"layer %{{x}}: %{{y:percent}} {name}<extra></extra>"
    return Series(labels, values, name, colour, "line+points", size=6, hover=hover)


def _flip_interval_cell(row: DiffRow) -> str:
    """Return the 95 % interval of a layer's flip rate as text."""
    low, high = row.layer.flip.low, row.layer.flip.high
    return DASH if low is None else f"{percent(low)} – {percent(high)}"


def _attribution_cell(count: Callable[[Attribution], str]) -> Callable[[DiffRow], str]:
    """Return a function that writes a cell from a row's attribution, or a dash without one."""
    return lambda row: DASH if row.layer.attribution is None else count(row.layer.attribution)


COLUMNS: tuple[Column[DiffRow], ...] = (
    Column("layer", "place of the router in A", lambda x: x.label, 0),
    Column(
        "in B",
        "its name there, where it is another",
        lambda x: DASH if x.layer.name_b == x.layer.name else x.layer.name_b,
    ),
    Column("flips", "tokens whose set of experts differs", lambda x: f"{x.layer.flip.count:,}", 2),
    Column("flip rate", "their share", lambda x: percent(x.layer.flip.value), 1),
    Column("95 % interval", "of the share, clustered by document", _flip_interval_cell, 5),
    Column(
        "by format",
        "of the dequantised weights",
        lambda x: DASH if x.by_format is None else f"{x.by_format.count:,}",
        2,
        True,
    ),
    Column(
        "by engine",
        "between those and the engine",
        lambda x: DASH if x.by_engine is None else f"{x.by_engine.count:,}",
        2,
        True,
    ),
    Column(
        "near-ties",
        "first flips that noise explains",
        _attribution_cell(lambda x: f"{x.explained:,}"),
        4,
    ),
    Column(
        "unexplained",
        "first flips wider than that",
        _attribution_cell(lambda x: f"{x.unexplained:,}"),
        3,
    ),
    Column(
        "later",
        "flips that follow from one in an earlier layer",
        _attribution_cell(lambda x: f"{x.later:,}"),
        4,
    ),
    Column(
        "noise",
        "difference of a token's scores",
        _attribution_cell(lambda x: significant(x.noise)),
        8,
    ),
    Column(
        "relative", "to the spread of scores", _attribution_cell(lambda x: percent(x.relative)), 10
    ),
    Column(
        "weight moved",
        "mean share on other experts",
        lambda x: percent(x.layer.weight and x.layer.weight.mean),
        6,
    ),
    Column(
        "p99",
        "its 99th percentile over tokens",
        lambda x: percent(x.layer.weight and x.layer.weight.p99),
        7,
    ),
    Column("first flips", "tokens that flip here first", lambda x: f"{x.step.first:,}"),
    Column("so far", "tokens flipped here or before", lambda x: percent(x.step.cumulative)),
)
