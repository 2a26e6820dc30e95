"""A comparison of two runs: its report, charts and table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tieline.analysis.diff_records import (
    Alignment,
    Attribution,
    DepthStep,
    LayerDiff,
    LayerPair,
    RoutingDiff,
    WeightMoved,
)
from tieline.core.errors import TraceError
from tieline.core.statistics import Share
from tieline.core.text import short_names
from tieline.report.charts import Axis, Chart, Series
from tieline.report.html_page import Panel
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.provenance import metric_rows, origin_rows, provenance_text
from tieline.report.tables import (
    MOST_FINDINGS,
    Column,
    finding_rows,
    findings_view,
    grid,
    rich_table,
)
from tieline.report.views import Report, views
from tieline.report.words.numbers import DASH, percent, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure


RATES = Panel(
    "diff-rates",
    "Tokens that choose other experts, layer by layer",
    "Each dot is the share of tokens whose set of experts differs between A and B, with its 95 % "
    "interval, clustered by document.",
)
CAUSES = Panel(
    "diff-causes",
    "Near-ties, or something else?",
    "A first flip is a near-tie if the noise of its own token explains it: the experts that "
    "changed places stood no further apart than the differences of that token's other scores make "
    "likely. "
    "Flips of tokens that had flipped in an earlier layer are consequences of that.",
)
DEPTH = Panel(
    "diff-depth",
    "How the difference grows with depth",
    "The share of tokens that have flipped in this layer or before, beside what it would be if "
    "layers flipped independently of each other.",
)
AFTER = Panel(
    "diff-after",
    "Does a flip bring others?",
    "Flip rate of tokens that have flipped in an earlier layer, and of those that have not. Where "
    "the first is higher, flips compound.",
)
WEIGHT = Panel(
    "diff-weight",
    "Combine weight that goes to other experts",
    "0 % means that both combine the same experts alike, 100 % that no weight stays where it was.",
    wide=True,
)
CAUSE_KINDS: tuple[tuple[str, Callable[[Attribution], int], str], ...] = (
    ("first flip, a near-tie", lambda x: x.explained, "@accent"),
    ("after an earlier flip", lambda x: x.later, "@notice"),
    ("first flip, unexplained", lambda x: x.unexplained, "@warn"),
)


@dataclass(frozen=True)
class DiffRow:
    """One layer: its short name in A, the comparison, and how far the runs are apart there.

    Where a side is quantised, `by_format` and `by_engine` split its flips.
    """

    label: str
    layer: LayerDiff
    step: DepthStep
    by_format: Share | None = None
    by_engine: Share | None = None


def _report(result: RoutingDiff) -> Report:
    """Verdict, findings, charts, all layers, alignment, provenance."""
    shown = [column for column in COLUMNS if column.rank is not None]
    return Report(
        kind="routing comparison",
        name="Comparison",
        title=_title(result),
        facts=_subtitle(result),
        verdict=result.verdict,
        table=lambda: grid(shown, _rows(result)),
        body=partial(_page_body, result),
        below=lambda width: (
            rich_table(COLUMNS, _rows(result), width),
            findings_view(result.findings, _layer_names(result)),
        ),
        figures={
            "layers": lambda: chart_figure(_rates_chart(result)),
            "causes": partial(_causes_figure, result),
            "depth": lambda: chart_figure(_depth_chart(result)),
        },
    )


def _page_body(result: RoutingDiff) -> dict[str, Any]:
    return {
        "template": "diff.html",
        "style": "",
        "panels": diff_panels(result),
        "findings": finding_rows(result.findings, _layer_names(result)),
        "shown": MOST_FINDINGS,
        "table": grid(COLUMNS, _rows(result)),
        "alignment": _alignment_rows(result.alignment),
        "provenance": origin_rows(result.provenance, result.timings),
        "metrics": metric_rows(result.metrics),
    }


page, figures, terminal, summary, notebook = views(_report)


def _causes_figure(result: RoutingDiff) -> "Figure":
    chart = _causes_chart(result)
    if chart is None:
        raise TraceError(f"no figure of the causes: {result.layers[0].attribution_status}")
    return chart_figure(chart)


def diff_panels(result: RoutingDiff) -> list[Panel]:
    """Every chart, or the reason why it cannot be drawn."""
    layers = result.layers
    drawn = (
        (RATES, _rates_chart(result), []),
        (CAUSES, _causes_chart(result), [layer.attribution_status for layer in layers]),
        (DEPTH, _depth_chart(result), []),
        (AFTER, _after_chart(result), ["no token flips before the last layer"]),
        (WEIGHT, _weight_chart(result), [layer.weight_status for layer in layers]),
    )
    return [p.drawn(chart) if chart else p.missing(statuses) for p, chart, statuses in drawn]


def _layer_names(result: RoutingDiff) -> list[str]:
    return [layer.name for layer in result.layers]


def _labels(result: RoutingDiff) -> list[str]:
    return short_names(_layer_names(result))


def _rows(result: RoutingDiff) -> list[DiffRow]:
    rows = [
        DiffRow(*row)
        for row in zip(_labels(result), result.layers, result.tokens.depth, strict=True)
    ]
    split = result.dequantised
    if split is None or len(split.format_flips) != len(rows):
        return rows
    flips = zip(rows, split.format_flips, split.engine_flips, strict=True)
    return [replace(row, by_format=by_format, by_engine=added) for row, by_format, added in flips]


def _title(result: RoutingDiff) -> str:
    return " against ".join(_side_name(result.provenance.get(side)) for side in ("a", "b"))


def _side_name(provenance: object) -> str:
    name, engine = (
        provenance_text(provenance, "model", "file") or "unnamed run",
        provenance_text(provenance, "engine"),
    )
    if engine and not name.startswith(f"{engine}:"):  # a trace that an engine wrote
        name = f"{engine}:{name}"
    emulated = provenance_text(provenance, "emulated")
    precision = f"{emulated} emulated" if emulated else provenance_text(provenance, "dtype")
    more = list(filter(None, (precision, provenance_text(provenance, "experts_implementation"))))
    return f"{name} ({', '.join(more)})" if more else name


def _subtitle(result: RoutingDiff) -> str:
    alignment, layers = result.alignment, result.layers
    routing = dict.fromkeys(f"{layer.k} of {layer.n_experts} experts" for layer in layers)
    tokens = f"{alignment.tokens:,} tokens of {alignment.documents:,} documents"
    return " · ".join([tokens, f"{len(layers)} routed layers", " or ".join(routing)])


def _alignment_rows(alignment: Alignment) -> list[tuple[str, str]]:
    """How B was aligned with A; what is empty on both sides is left out."""
    shift = alignment.layer_shift
    rows = {
        "tokens compared": f"{alignment.tokens:,}, of which {alignment.ids_checked:,} by equal ids",
        "tokens in A only, in B only": _both(alignment.tokens_only_a, alignment.tokens_only_b),
        "tokens not routed (-1) in A, in B": _both(alignment.unrouted_a, alignment.unrouted_b),
        "shift of tokens": f"{alignment.token_shift:+d}" if alignment.token_shift else "",
        "shift of layers": "paired by order" if shift is None else f"{shift:+d}" if shift else "",
        "layers in A only": ", ".join(alignment.only_a),
        "layers in B only": ", ".join(alignment.only_b),
        "dense layers of A": ", ".join(alignment.dense_a),
        "dense layers of B": ", ".join(alignment.dense_b),
        "experts numbered otherwise": "; ".join(map(_renumbering, alignment.permuted)),
    }
    return [(name, text) for name, text in rows.items() if text]


def _both(a: int, b: int) -> str:
    return f"{a:,}, {b:,}" if a or b else ""


def _renumbering(pair: LayerPair) -> str:
    both = zip(pair.moved_experts, pair.moved_to, strict=True)
    return f"{pair.name_a}: " + ", ".join(f"{i} → {j}" for i, j in both)


LAYER = Axis("layer of A", "category")


def _share_axis(title: str) -> Axis:
    return Axis(title, percent=True, from_zero=True)


def _rates_chart(result: RoutingDiff) -> Chart:
    rates = [layer.flip for layer in result.layers]
    above = [(rate.high or 0.0) - (rate.value or 0.0) for rate in rates]
    below = [(rate.value or 0.0) - (rate.low or 0.0) for rate in rates]
    dots = _points(result, "flip rate", rates, "@accent")
    dots = replace(dots, errors=(above, below), in_legend=False)
    return Chart(LAYER, _share_axis("tokens that choose other experts"), (dots,), height=380)


def _causes_chart(result: RoutingDiff) -> Chart | None:
    causes = [layer.attribution for layer in result.layers]
    if not any(causes):
        return None
    bars = tuple(
        Series(
            _labels(result),
            [None if cause is None else count(cause) for cause in causes],
            name,
            colour,
            "bar",
            hover=f"layer %{{x}}: %{{y:,}} flips {name}<extra></extra>",
        )
        for name, count, colour in CAUSE_KINDS
    )
    return Chart(LAYER, Axis("flips", from_zero=True), bars, stacked=True)


def _depth_chart(result: RoutingDiff) -> Chart:
    steps, labels = result.tokens.depth, _labels(result)
    so_far = _line(labels, [step.cumulative for step in steps], "flipped so far", "@accent")
    independent = [step.independent for step in steps]
    alone = _line(labels, independent, "if layers were independent", "@muted")
    return Chart(LAYER, _share_axis("share of tokens"), (so_far, replace(alone, dash="dash")))


def _after_chart(result: RoutingDiff) -> Chart | None:
    steps = result.tokens.depth
    if not any(step.after.total for step in steps):
        return None
    fresh = _points(result, "without an earlier flip", [step.fresh for step in steps], "@accent")
    after = _points(result, "after an earlier flip", [step.after for step in steps], "@warn")
    dots = (fresh, replace(after, symbol="diamond", size=9))
    return Chart(LAYER, _share_axis("flip rate"), dots)


def _weight_chart(result: RoutingDiff) -> Chart | None:
    weights, labels = [layer.weight for layer in result.layers], _labels(result)
    if not any(weights):
        return None
    mean = _line(labels, [x and x.mean for x in weights], "mean over tokens", "@accent")
    worst = _line(labels, [x and x.p99 for x in weights], "99th percentile", "@warn")
    return Chart(LAYER, _share_axis("share of the weight"), (mean, worst), height=380)


def _points(result: RoutingDiff, name: str, rates: Sequence[Share], colour: str) -> Series:
    return Series(
        _labels(result),
        [rate.value for rate in rates],
        name,
        colour,
        details=[f"{rate.count:,} of {rate.total:,}" for rate in rates],
        hover=f"layer %{{x}}: %{{y:.3~p}}, %{{customdata}}, {name}<extra></extra>",
    )


def _line(labels: list[str], values: Sequence[float | None], name: str, colour: str) -> Series:
    hover = f"layer %{{x}}: %{{y:.3~p}} {name}<extra></extra>"
    return Series(labels, values, name, colour, "line+points", size=6, hover=hover)


def _interval(row: DiffRow) -> str:
    low, high = row.layer.flip.low, row.layer.flip.high
    return DASH if low is None else f"{percent(low)} – {percent(high)}"


def _cause(count: Callable[[Attribution], str]) -> Callable[[DiffRow], str]:
    """A cell of the attribution; a dash where there is none."""
    return lambda row: DASH if row.layer.attribution is None else count(row.layer.attribution)


def _weight(number: Callable[[WeightMoved], float]) -> Callable[[DiffRow], str]:
    return lambda row: percent(row.layer.weight and number(row.layer.weight))


def _count(share: Callable[[DiffRow], Share | None]) -> Callable[[DiffRow], str]:
    def cell(row: DiffRow) -> str:
        flips = share(row)
        return DASH if flips is None else f"{flips.count:,}"

    return cell


def _other_name(row: DiffRow) -> str:
    return DASH if row.layer.name_b == row.layer.name else row.layer.name_b


COLUMNS: tuple[Column[DiffRow], ...] = (
    Column("layer", "place of the router in A", lambda x: x.label, 0),
    Column("in B", "its name there, where it is another", _other_name),
    Column("flips", "tokens whose set of experts differs", lambda x: f"{x.layer.flip.count:,}", 2),
    Column("flip rate", "their share", lambda x: percent(x.layer.flip.value), 1),
    Column("95 % interval", "of the share, clustered by document", _interval, 5),
    Column("by format", "of the dequantised weights", _count(lambda x: x.by_format), 2, True),
    Column("by engine", "between those and the engine", _count(lambda x: x.by_engine), 2, True),
    Column("near-ties", "first flips that noise explains", _cause(lambda x: f"{x.explained:,}"), 4),
    Column("unexplained", "first flips wider than that", _cause(lambda x: f"{x.unexplained:,}"), 3),
    Column("later", "flips after an earlier one", _cause(lambda x: f"{x.later:,}"), 9),
    Column("noise", "difference of a token's scores", _cause(lambda x: significant(x.noise)), 8),
    Column("relative", "to the spread of scores", _cause(lambda x: percent(x.relative)), 10),
    Column("weight moved", "mean share on other experts", _weight(lambda weight: weight.mean), 6),
    Column("p99", "its 99th percentile over tokens", _weight(lambda weight: weight.p99), 7),
    Column("first flips", "tokens that flip here first", lambda x: f"{x.step.first:,}"),
    Column("so far", "tokens flipped here or before", lambda x: percent(x.step.cumulative)),
)
