"""A comparison of two runs as page, terminal view, summary, notebook view and figures."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from tieline.analysis.diff_records import (
    Alignment,
    Attribution,
    DepthStep,
    LayerDiff,
    LayerPair,
    RoutingDiff,
    WeightMoved,
)
from tieline.core.errors import TraceError, require
from tieline.core.statistics import Share
from tieline.report.charts import Panel, axis, figure, unmeasured
from tieline.report.drawing import ACCENT, MUTED, NOTICE, WARN, percent_axis, small_canvas
from tieline.report.frame import notebook_html, render
from tieline.report.tables import (
    MOST_FINDINGS,
    Column,
    finding_rows,
    findings_view,
    grid,
    origin_rows,
    rich_table,
    short_names,
    told,
    view,
)
from tieline.report.words.numbers import DASH, percent, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def page(result: RoutingDiff) -> str:
    """The page: verdict, findings, charts, all layers, alignment, provenance."""
    panels = diff_panels(result)
    return render(
        "diff.html",
        panels,
        kind="routing comparison",
        title=_title(result),
        facts=_facts(result),
        verdict=result.verdict,
        findings=finding_rows(result.findings, _names(result)),
        shown=MOST_FINDINGS,
        table=grid(COLUMNS, _rows(result)),
        alignment=_alignment(result.alignment),
        unmeasured=unmeasured(panels),
        provenance=origin_rows(result.provenance, result.timings),
        metrics=[(name, significant(number, 4)) for name, number in sorted(result.metrics.items())],
    )


def terminal(result: RoutingDiff, width: int) -> RenderableType:
    """Verdict, one row per layer and findings for a terminal of so many characters."""
    table = rich_table(COLUMNS, _rows(result), width)
    findings = findings_view(result.findings, _names(result))
    return view(_title(result), _facts(result), result.verdict, table, findings)


def summary(result: RoutingDiff) -> str:
    """Names, facts and verdict in plain lines."""
    return f"Comparison of {_title(result)}\n{_facts(result)}\n{result.verdict}"


def notebook(result: RoutingDiff) -> str:
    """Verdict, table and figures as a piece of HTML."""
    table = grid([column for column in COLUMNS if column.rank is not None], _rows(result))
    return notebook_html(_title(result), _facts(result), result.verdict, table, figures(result))


def figures(result: RoutingDiff) -> "dict[str, Callable[[], Figure]]":
    """Figures by name: flip rates by layer, their causes, and their growth with depth."""
    return {
        "layers": lambda: small_canvas(partial(_draw_layers, result)),
        "causes": lambda: small_canvas(partial(_draw_causes, result)),
        "depth": lambda: small_canvas(partial(_draw_depth, result)),
    }


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
    return [p.drawn(made) if made else p.missing(statuses) for p, made, statuses in drawn]


def _names(result: RoutingDiff) -> list[str]:
    return [layer.name for layer in result.layers]


def _labels(result: RoutingDiff) -> list[str]:
    return short_names(_names(result))


def _rows(result: RoutingDiff) -> list[DiffRow]:
    parts = zip(_labels(result), result.layers, result.tokens.depth, strict=True)
    rows = [DiffRow(label, layer, step) for label, layer, step in parts]
    split = result.dequantised
    if split is None or len(split.format_flips) != len(rows):
        return rows
    flips = zip(rows, split.format_flips, split.engine_flips, strict=True)
    return [replace(row, by_format=own, by_engine=added) for row, own, added in flips]


def _title(result: RoutingDiff) -> str:
    return " against ".join(_side(result.provenance.get(side)) for side in ("a", "b"))


def _side(provenance: object) -> str:
    name, engine = told(provenance, "model", "file") or "unnamed run", told(provenance, "engine")
    if engine and not name.startswith(f"{engine}:"):  # a trace that an engine wrote
        name = f"{engine}:{name}"
    emulated = told(provenance, "emulated")
    precision = f"{emulated} emulated" if emulated else told(provenance, "dtype")
    more = list(filter(None, (precision, told(provenance, "experts_implementation"))))
    return f"{name} ({', '.join(more)})" if more else name


def _facts(result: RoutingDiff) -> str:
    found, layers = result.alignment, result.layers
    routing = dict.fromkeys(f"{layer.k} of {layer.n_experts} experts" for layer in layers)
    tokens = f"{found.tokens:,} tokens of {found.documents:,} documents"
    return " · ".join([tokens, f"{len(layers)} routed layers", " or ".join(routing)])


def _alignment(found: Alignment) -> list[tuple[str, str]]:
    """How B was laid on A; what is empty on both sides is left out."""
    shift = found.layer_shift
    rows = {
        "tokens compared": f"{found.tokens:,}, of which {found.ids_checked:,} by equal ids",
        "tokens in A only, in B only": _both(found.tokens_only_a, found.tokens_only_b),
        "tokens not routed (-1) in A, in B": _both(found.unrouted_a, found.unrouted_b),
        "shift of tokens": f"{found.token_shift:+d}" if found.token_shift else "",
        "shift of layers": "paired by order" if shift is None else f"{shift:+d}" if shift else "",
        "layers in A only": ", ".join(found.only_a),
        "layers in B only": ", ".join(found.only_b),
        "dense layers of A": ", ".join(found.dense_a),
        "dense layers of B": ", ".join(found.dense_b),
        "experts numbered otherwise": "; ".join(map(_renumbered, found.permuted)),
    }
    return [(name, words) for name, words in rows.items() if words]


def _both(a: int, b: int) -> str:
    return f"{a:,}, {b:,}" if a or b else ""


def _renumbered(pair: LayerPair) -> str:
    both = zip(pair.moved_experts, pair.moved_to, strict=True)
    return f"{pair.name_a}: " + ", ".join(f"{i} → {j}" for i, j in both)


def _rates_chart(result: RoutingDiff) -> dict[str, Any]:
    rates = [layer.flip for layer in result.layers]
    above, below = _errors(rates)
    errors = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    dots = _points(result, "flip rate", rates, "@accent")
    dots |= {"error_y": errors | {"thickness": 1.5, "color": "@accent"}, "showlegend": False}
    return figure([dots], 380, **_layout("share of tokens"))


def _errors(rates: Sequence[Share]) -> tuple[list[float], list[float]]:
    """Lengths of the intervals above and below the values; zero where one is not known."""
    above = [(rate.high or 0.0) - (rate.value or 0.0) for rate in rates]
    below = [(rate.value or 0.0) - (rate.low or 0.0) for rate in rates]
    return above, below


def _causes_chart(result: RoutingDiff) -> dict[str, Any] | None:
    causes = [layer.attribution for layer in result.layers]
    if not any(causes):
        return None
    bars = [
        {
            "type": "bar",
            "name": name,
            "x": _labels(result),
            "y": [None if cause is None else count(cause) for cause in causes],
            "marker": {"color": colour},
            "hovertemplate": f"layer %{{x}}: %{{y:,}} flips {name}<extra></extra>",
        }
        for name, count, colour in CAUSE_KINDS
    ]
    layout = {"xaxis": _layer_axis(), "yaxis": axis("flips", rangemode="tozero")}
    return figure(bars, 400, **layout, barmode="stack")


def _depth_chart(result: RoutingDiff) -> dict[str, Any]:
    steps, labels = result.tokens.depth, _labels(result)
    dashed = {"line": {"color": "@muted", "width": 1.75, "dash": "dash"}}
    lines = [
        _line(labels, [step.cumulative for step in steps], "flipped so far", "@accent"),
        _line(labels, [step.independent for step in steps], "if layers were independent", "@muted")
        | dashed,
    ]
    return figure(lines, 400, **_layout("share of tokens"))


def _after_chart(result: RoutingDiff) -> dict[str, Any] | None:
    steps = result.tokens.depth
    if not any(step.after.total for step in steps):
        return None
    dots = [
        _points(result, "without an earlier flip", [step.fresh for step in steps], "@accent"),
        _points(result, "after an earlier flip", [step.after for step in steps], "@warn")
        | {"marker": {"symbol": "diamond", "size": 9, "color": "@warn"}},
    ]
    return figure(dots, 400, **_layout("flip rate"))


def _weight_chart(result: RoutingDiff) -> dict[str, Any] | None:
    weights, labels = [layer.weight for layer in result.layers], _labels(result)
    if not any(weights):
        return None
    means, worst = ([x and x.mean for x in weights], [x and x.p99 for x in weights])
    lines = [
        _line(labels, means, "mean over tokens", "@accent"),
        _line(labels, worst, "99th percentile", "@warn"),
    ]
    return figure(lines, 380, **_layout("share of the weight"))


def _points(result: RoutingDiff, name: str, rates: Sequence[Share], colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": _labels(result),
        "y": [rate.value for rate in rates],
        "customdata": [f"{rate.count:,} of {rate.total:,}" for rate in rates],
        "marker": {"size": 8, "color": colour},
        "hovertemplate": f"layer %{{x}}: %{{y:.3~p}}, %{{customdata}}, {name}<extra></extra>",
    }


def _line(
    labels: list[str], values: Sequence[float | None], name: str, colour: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": labels,
        "y": list(values),
        "line": {"color": colour, "width": 1.75},
        "marker": {"size": 6, "color": colour},
        "hovertemplate": f"layer %{{x}}: %{{y:.3~p}} {name}<extra></extra>",
    }


def _layer_axis() -> dict[str, Any]:
    return axis("layer of A", scale="category")


def _layout(title: str) -> dict[str, Any]:
    return {"xaxis": _layer_axis(), "yaxis": axis(title, tickformat=".2~p", rangemode="tozero")}


def _draw_layers(result: RoutingDiff, axes: "Axes") -> None:
    rates = [layer.flip for layer in result.layers]
    values = [math.nan if rate.value is None else rate.value for rate in rates]
    style = {"fmt": "o", "color": ACCENT, "markersize": 4, "capsize": 2}
    axes.errorbar(_labels(result), values, yerr=_errors(rates), **style)
    axes.set(xlabel="layer of A", ylabel="tokens that choose other experts (95 %)")
    axes.set_ylim(bottom=0)
    percent_axis(axes)


def _draw_causes(result: RoutingDiff, axes: "Axes") -> None:
    causes = [layer.attribution for layer in result.layers]
    status = result.layers[0].attribution_status
    require(any(causes), f"no figure of the causes: {status}", TraceError)
    bottom, labels = [0] * len(causes), _labels(result)
    colours = (ACCENT, NOTICE, WARN)
    for (name, count, _), colour in zip(CAUSE_KINDS, colours, strict=True):
        heights = [0 if cause is None else count(cause) for cause in causes]
        axes.bar(labels, heights, bottom=bottom, color=colour, label=name)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set(xlabel="layer of A", ylabel="flips")
    axes.margins(y=0.3)
    axes.legend(fontsize=6.5, loc="upper left")


def _draw_depth(result: RoutingDiff, axes: "Axes") -> None:
    steps, labels = result.tokens.depth, _labels(result)
    axes.plot(labels, [s.cumulative for s in steps], "o-", color=ACCENT, label="flipped so far")
    independent = [step.independent for step in steps]
    axes.plot(labels, independent, "--", color=MUTED, label="if layers were independent")
    axes.set(xlabel="layer of A", ylabel="share of tokens")
    axes.set_ylim(bottom=0)
    percent_axis(axes)
    axes.legend(fontsize=6.5)


def _interval(row: DiffRow) -> str:
    low, high = row.layer.flip.low, row.layer.flip.high
    return DASH if low is None else f"{percent(low)} – {percent(high)}"


def _cause(count: Callable[[Attribution], str]) -> Callable[[DiffRow], str]:
    """Cell of what an attribution tells; a dash where there is none."""
    return lambda row: DASH if row.layer.attribution is None else count(row.layer.attribution)


def _weight(number: Callable[[WeightMoved], float]) -> Callable[[DiffRow], str]:
    return lambda row: percent(row.layer.weight and number(row.layer.weight))


def _part(share: Callable[[DiffRow], Share | None]) -> Callable[[DiffRow], str]:
    def cell(row: DiffRow) -> str:
        found = share(row)
        return DASH if found is None else f"{found.count:,}"

    return cell


def _other_name(row: DiffRow) -> str:
    return DASH if row.layer.name_b == row.layer.name else row.layer.name_b


COLUMNS: tuple[Column[DiffRow], ...] = (
    Column("layer", "place of the router in A", lambda x: x.label, 0),
    Column("in B", "its name there, where it is another", _other_name),
    Column("flips", "tokens whose set of experts differs", lambda x: f"{x.layer.flip.count:,}", 2),
    Column("flip rate", "their share", lambda x: percent(x.layer.flip.value), 1),
    Column("95 % interval", "of the share, clustered by document", _interval, 5),
    Column("by format", "of the dequantised weights", _part(lambda x: x.by_format), 2, True),
    Column("by engine", "between those and the engine", _part(lambda x: x.by_engine), 2, True),
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
