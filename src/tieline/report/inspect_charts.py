"""The charts of an inspection: gaps, flips, jumps, experts near the threshold, load.

inspection_panels     every chart on the page, or the reason why it cannot be drawn
inspection_figures    the same charts by matplotlib, by name
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tieline.analysis.inspect_records import Inspection, JumpMeasures, JumpSample, OwnNoise
from tieline.core.errors import TraceError
from tieline.core.statistics import Quantiles
from tieline.core.text import short_names
from tieline.measure.boundary import GapMeasures, MassProfile
from tieline.measure.expert_load import ExpertLoad
from tieline.measure.measures import LayerMeasures
from tieline.measure.rounding_flips import PrecisionFlips, ProductFlips
from tieline.report.charts import Axis, Chart, Guide, Heat, Series, above_zero, layer_colour
from tieline.report.html_page import PagePanel
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.words.numbers import finite, percent, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Value = TypeVar("Value")
FormatSteps = tuple[str, float, float]
"""Name of a format, its smallest and its largest rounding step over the layers."""

QUANTILES_PANEL = PagePanel(
    "gap-quantiles",
    "How wide the gaps are, layer by layer",
    "A cell is the gap below which that share of the layer’s tokens lies: how far the last chosen "
    "expert’s score stands above the first one left out. The strongest colours are the tokens "
    "nearest to a tie.",
)
GAP_CDF_PANEL = PagePanel(
    "gap-cdf",
    "Share of tokens within a given gap",
    "Follow a curve up from a gap: the height is the share of tokens whose choice would change if "
    "the two scores moved towards each other by that much.",
)
FORMAT_LINES_NOTE = (
    " Dotted lines mark the spacing of each number format at the threshold, bars its range over "
    "the layers; where a curve is high at a line, that format makes ties."
)
NO_FORMAT_LINES_NOTE = (
    " The spacing of number formats is not shown: it is known in units of the logits, and these "
    "routers rank other scores."
)
FORMATS_PANEL = PagePanel(
    "flips-by-format",
    "Tokens that change an expert, by number format",
    "Each dot is a layer: the share of its tokens whose experts change when the router’s logits "
    "are rounded to that format, counted on these tokens. Dashes are the rates predicted from the "
    "gaps alone. Rounding acts on one layer at a time, with clean inputs.",
)
NOISE_PANEL = PagePanel(
    "flips-by-noise",
    "Tokens that change an expert, by noise of the logits",
    "If you know how far two of your engines, kernels or checkpoints differ in the router’s logits "
    "(their standard deviation σ), read off how many tokens will choose other experts.",
)
JUMP_PANEL = PagePanel(
    "gap-jump",
    "Which ties matter: gap against jump",
    "Each point is a token whose last chosen expert was swapped with the first one left out. Left "
    "is near a tie, high is a large change of the layer’s output: flips in the upper left corner "
    "happen and hurt. Filled circles are the tokens nearest to a tie, open squares a random sample "
    "of the others; exact ties stand on the left edge.",
)
LOSS_PANEL = PagePanel(
    "jump-loss",
    "What a flip does to the loss",
    "Each point is one swap at a near-tie in one layer: how far the layer’s output moved, and by "
    "how much the loss of the whole sequence changed. Points above zero made the model worse.",
)
NO_LOSS_REASON = "not measured: loss_jumps asks for it"
NEAR_PANEL = PagePanel(
    "near-threshold",
    "Experts within ε of the threshold",
    "K(ε) is the mean number of experts per token that score above the k-th score minus ε. It "
    "starts at k; its height above k is the price in extra experts of smoothing the choice over a "
    "band of width ε. A diamond marks the ε that costs half an expert.",
)
ORDERS_PANEL = PagePanel(
    "tie-orders",
    "How many experts the noise of {} can mix",
    "A token has tie order n at tolerance ε if n + 1 experts score within ε of the threshold, on "
    "both sides of it. Here ε is the noise of the layer’s own gap when the whole model is rounded. "
    "Order 1 is a plain tie of two experts; higher orders are left to chance among more.",
)
ORDER_COLOURS = ("@accent", "@warn", "@ink")
"""Colours of tie orders 1, 2, and 3 or more."""
LOAD_PANEL = PagePanel(
    "load",
    "Load of every expert",
    "Colour is an expert’s load relative to an even one: 1 is its fair share, 2 is twice that. "
    "A cross marks an expert that no token of this text chose.",
    wide=True,
)
MAX_LOG2_LOAD = 3.0
"""Loads beyond 2^±3 times an even one have the colour of the scale's end."""
LOAD_TICKS: dict[float, str] = {
    -3.0: "⅛ or less",
    -2.0: "¼",
    -1.0: "½",
    0.0: "1 (even)",
    1.0: "2",
    2.0: "4",
    3.0: "8 or more",
}
MAX_JUMP_POINTS = 3000
"""Largest number of points of all layers together; more make the page slow."""
MAX_NUMBERED_LAYERS = 24
"""Largest number of layers for which every cell shows its number."""


@dataclass(frozen=True)
class LayerRow:
    """One layer: its short name, its measures, its jumps (None if not measured), its colour."""

    label: str
    measures: LayerMeasures
    jumps: JumpMeasures | None
    colour: str

    @property
    def gaps(self) -> GapMeasures | None:
        """Distribution of the gaps; None if the trace has no scores."""
        return self.measures.gap.value

    @property
    def product(self) -> ProductFlips | None:
        """Flips by rounding the matrix product of the logits; None if not measured."""
        return self.measures.product.value

    @property
    def load(self) -> ExpertLoad:
        """Load of the experts."""
        return self.measures.load

    def flip_rate(self, precision: str) -> float | None:
        """Return the share of tokens that flip with logits rounded to a format; None if unknown."""
        formats = self.measures.precision.value or ()
        return next((x.flip_emulated.value for x in formats if x.precision == precision), None)

    def series(self, x: Sequence[Any], y: Sequence[Any], **look: Any) -> Series:
        """Return a series with the name and the colour of the layer; `look` goes to `Series`."""
        return Series(x, y, f"layer {self.label}", self.colour, **look)


def quantile_at(quantiles: Quantiles, level: float) -> float | None:
    """Return the quantile at a probability, None if it was not computed."""
    return dict(zip(quantiles.probabilities, quantiles.value, strict=True)).get(level)


def inspected_layer_rows(result: Inspection) -> list[LayerRow]:
    """Return one row per layer, in order of depth."""
    layers = result.measures.layers
    labels = short_names([layer.name for layer in layers])
    colours = [layer_colour(index, len(layers)) for index in range(len(layers))]
    rows = zip(labels, layers, result.jumps, colours, strict=True)
    return [LayerRow(label, layer, jumps.value, colour) for label, layer, jumps, colour in rows]


def _layers_with(
    result: Inspection, value: Callable[[LayerRow], Value | None]
) -> list[tuple[LayerRow, Value]]:
    """Return (layer, value) for the layers whose value is neither None nor empty."""
    pairs = [(row, value(row)) for row in inspected_layer_rows(result)]
    return [(row, number) for row, number in pairs if number]


def _inspected_labels(result: Inspection) -> tuple[str, ...]:
    """Return the short names of the layers, in order of depth."""
    return tuple(row.label for row in inspected_layer_rows(result))


def inspection_panels(result: Inspection) -> list[PagePanel]:
    """Return every panel in reading order, with its chart or the reason why it has none."""
    layers = result.measures.layers
    gap_statuses = [layer.gap.status for layer in layers]
    jump_statuses = [jumps.status for jumps in result.jumps]
    charts = (
        (QUANTILES_PANEL, _gap_quantiles_chart(result), gap_statuses),
        (GAP_CDF_PANEL, _gap_distribution_chart(result), gap_statuses),
        (FORMATS_PANEL, _format_flips_chart(result), [layer.precision.status for layer in layers]),
        (NOISE_PANEL, _noise_flips_chart(result), [layer.noise.status for layer in layers]),
        (JUMP_PANEL, _gap_jump_chart(result), jump_statuses),
        (
            LOSS_PANEL,
            _jump_loss_chart(result),
            [NO_LOSS_REASON] if "ok" in jump_statuses else jump_statuses,
        ),
        (NEAR_PANEL, _near_threshold_chart(result), [layer.near.status for layer in layers]),
        (LOAD_PANEL, _expert_load_chart(result), []),
    )
    panels = [
        p.with_chart(chart) if chart else p.without_chart(statuses) for p, chart, statuses in charts
    ]
    has_steps = bool(format_steps(layers))
    return [
        replace(p, how=p.how + (FORMAT_LINES_NOTE if has_steps else NO_FORMAT_LINES_NOTE))
        if p.key == GAP_CDF_PANEL.key
        else p
        for p in [*panels[:-1], tie_orders_panel(result), panels[-1]]
    ]


def tie_orders_panel(result: Inspection) -> PagePanel:
    """Return the panel of tie orders at the model's own noise, or of the reason for none."""
    labels = {row.measures.name: row.label for row in inspected_layer_rows(result)}
    layers = [(labels[x.name], x) for x in result.noise.layers if x.name in labels]
    precision = layers[0][1].precision if layers else "rounding"
    panel = replace(ORDERS_PANEL, title=ORDERS_PANEL.title.format(precision))
    return (
        panel.with_chart(_tie_orders_chart(layers))
        if layers
        else panel.without_chart([result.noise.status])
    )


def _tie_orders_chart(layers: list[tuple[str, OwnNoise]]) -> Chart:
    """Chart the stacked shares of tie orders 1, 2, …, by layer."""
    n_orders = max(len(layer.orders) for _, layer in layers)
    bars = tuple(
        Series(
            [label for label, _ in layers],
            [layer.orders[order] for _, layer in layers],
            f"order {order}" + (" or more" if order == n_orders - 1 else ""),
            ORDER_COLOURS[min(order, len(ORDER_COLOURS)) - 1],
            "bar",
            details=[significant(layer.epsilon) for _, layer in layers],
            hover=f"layer %{{x}}: %{{y:percent}} of tokens have order {order} at "
            "ε = %{customdata}<extra></extra>",
        )
        for order in range(1, n_orders)
        if any(layer.orders[order] for _, layer in layers)
    )
    shares = Axis("share of tokens", percent=True, from_zero=True)
    return Chart(Axis("layer", "category"), shares, bars, stacked=True)


def format_steps(layers: Iterable[LayerMeasures]) -> list[FormatSteps]:
    """Return the steps of each format over the layers whose gaps are in units of logits."""
    steps: dict[str, list[float]] = {}
    for layer in layers:
        rows = (layer.precision.value or ()) if layer.units == "logits" and layer.gap.value else ()
        for row in rows:
            if finite(row.step):
                steps.setdefault(row.precision, []).append(row.step)
    return [(name, min(sizes), max(sizes)) for name, sizes in steps.items()]


def format_names(
    spans: Sequence[FormatSteps], low: float, high: float
) -> list[tuple[str, float, float]]:
    """Return name, log10 step and height of each format's label; close labels are stacked."""
    names, last, lift = [], -math.inf, 0.0
    for name, first, end in sorted(spans, key=lambda span: span[1] * span[2]):
        step = math.log10(first * end) / 2
        lift = (lift + 0.2) % 0.6 if step - last < (high - low) / 20 else 0.0
        last = step
        names.append((name.replace("_", " "), step, lift))
    return names


def gap_log_range(
    profiles: Iterable[MassProfile], spans: Sequence[FormatSteps]
) -> tuple[float, float]:
    """Return log10 of the smallest and the largest gap that the axis must show."""
    inner = [
        gap
        for profile in profiles
        for gap, mass in zip(profile.widths, profile.mass, strict=True)
        if 0 < mass < 1
    ]
    ends = [*inner, *(step for span in spans for step in span[1:])] or [1e-3, 1.0]
    return math.log10(min(ends) / 1.6), math.log10(max(ends) * 1.6)


def gap_units(layers: Iterable[LayerMeasures]) -> str:
    """Return the units of these layers' gaps as text."""
    units = " or ".join(dict.fromkeys(layer.units for layer in layers))
    return units if "logits" in units else f"{units} score"


def relative_load(layer: LayerMeasures) -> list[float]:
    """Return log2 of each expert's load over an even one; `-MAX_LOG2_LOAD` if never chosen.

    Rounded to two decimals: these numbers are most of the data in the page of a large model.
    """
    return [
        round(math.log2(share * layer.n_experts), 2) if share else -MAX_LOG2_LOAD
        for share in layer.load.share
    ]


def _gap_quantiles_chart(result: Inspection) -> Chart | None:
    """Chart a heat map of log gap quantiles, layers by probabilities; None without scores."""
    rows = [(row.label, gaps.quantiles) for row, gaps in _layers_with(result, lambda x: x.gaps)]
    if not rows:
        return None
    values = [[finite(value) for value in quantiles.value] for _, quantiles in rows]
    floor = min((math.log10(v) for row in values for v in row if v), default=0.0) - 0.5
    logs = [[None if v is None else math.log10(v) if v > 0 else floor for v in r] for r in values]
    has_numbers = len(rows) <= MAX_NUMBERED_LAYERS
    heat = Heat(
        x=[percent(p, 3, trim=True) for p in rows[0][1].probabilities],
        y=[label for label, _ in rows],
        values=logs,
        colours="gap",
        title=f"gap ({gap_units(result.measures.layers)})",
        ticks=_log10_ticks(logs),
        texts=[[significant(value, 2) for value in row] for row in values] if has_numbers else (),
        details=[
            [
                f"{significant(value)} ({significant(low)} to {significant(high)})"
                for value, low, high in zip(x.value, x.low, x.high, strict=True)
            ]
            for _, x in rows
        ],
        hover="layer %{y}<br>%{x} of tokens have a gap below %{customdata}<extra></extra>",
        spaces=(1, 1 if has_numbers else 0),
    )
    return Chart(
        Axis("share of tokens with a smaller gap", "category"),
        Axis("layer", "category", reverse=True),
        heat=heat,
        height=max(430, 110 + 20 * len(rows)),
    )


def _log10_ticks(rows: Sequence[Sequence[float | None]]) -> dict[float, str]:
    """Return ticks at powers of ten for values that are logarithms."""
    logs = [value for row in rows for value in row if value is not None] or [0.0]
    ticks = range(math.floor(min(logs)), math.ceil(max(logs)) + 1)
    return {float(tick): f"10<sup>{tick}</sup>" if tick else "1" for tick in ticks}


def _gap_distribution_chart(result: Inspection) -> Chart | None:
    """Chart BM_top, the share of tokens below a gap, of every layer, with each format's step."""
    rows = [(row, gaps.profile) for row, gaps in _layers_with(result, lambda row: row.gaps)]
    if not rows:
        return None
    measures = [row.measures for row, _ in rows]
    hover = "gap up to %{x:.3g}: %{y:percent} of tokens<extra>%{fullData.name}</extra>"
    series = [
        row.series(profile.widths, above_zero(profile.mass), kind="line", hover=hover)
        for row, profile in rows
    ]
    pooled = result.measures.model.gap.value
    if pooled is not None and len(rows) > 1:
        mass = above_zero(pooled.profile.mass)
        look = {"width": 3.0, "dash": "dot", "hover": hover}
        series.append(Series(pooled.profile.widths, mass, "all", "@ink", "line", **look))
    spans = format_steps(measures)
    low, high = gap_log_range((profile for _, profile in rows), spans)
    least_share = 0.5 / max(layer.tokens for layer in measures)
    ends = {name.replace("_", " "): (first, last) for name, first, last in spans}
    guides = tuple(
        Guide("x", 10**step, name, span=ends[name], lift=lift)
        for name, step, lift in format_names(spans, low, high)
    )
    return Chart(
        Axis(f"gap ({gap_units(measures)})", "log", limits=(10**low, 10**high)),
        Axis(
            "share of tokens with a smaller gap",
            "log",
            percent=True,
            limits=(least_share, 10**0.05),
        ),
        tuple(series),
        guides=guides,
        layers=_inspected_labels(result),
        height=460,
    )


def _format_flips_chart(result: Inspection) -> Chart | None:
    """Chart counted and predicted flip rates of every layer, by format."""
    rows = _layers_with(result, lambda row: row.measures.precision.value)
    if not rows:
        return None
    order = [x.precision for x in sorted(rows[0][1], key=lambda x: finite(x.step) or 0)]
    dots, dashes = [], []
    for row, formats in rows:
        by_name = {x.precision: x for x in formats}
        flips = [by_name[name] for name in order if name in by_name]
        counted, predicted = _format_hover(flips, "counted"), _format_hover(flips, "predicted")
        names = [x.precision.replace("_", " ") for x in flips]
        dots.append(row.series(names, above_zero(x.flip_emulated.value for x in flips), **counted))
        look = {"symbol": "dash", "size": 14, "in_legend": False, **predicted}
        dashes.append(row.series(names, above_zero(x.flip.value for x in flips), **look))
    return Chart(
        Axis("number format (dots counted, dashes predicted)", "category"),
        Axis("share of tokens that change an expert", "log", percent=True),
        (*dots, *dashes),
        layers=_inspected_labels(result),
    )


def _format_hover(flips: Sequence[PrecisionFlips], label: str) -> dict[str, Any]:
    """Return hover text and details for flip rates; `label` is "counted" or "predicted"."""
    hover = f"%{{x}} (%{{customdata}}): %{{y:percent}} {label}<extra>%{{fullData.name}}</extra>"
    return {"details": [f"step {significant(x.step)}" for x in flips], "hover": hover}


def _noise_flips_chart(result: Inspection) -> Chart | None:
    """Chart the exact flip probability of these tokens against σ, layer by layer."""
    rows = _layers_with(result, lambda row: row.measures.noise.value)
    if not rows:
        return None
    hover = "σ = %{x:.3g}: %{y:percent} flip<extra>%{fullData.name}</extra>"
    lines = tuple(
        row.series(
            [level.sigma for level in levels],
            above_zero(level.flip.value for level in levels),
            kind="line+points",
            size=5,
            hover=hover,
        )
        for row, levels in rows
    )
    return Chart(
        Axis("σ of the noise (logits)", "log"),
        Axis("share of tokens", "log", percent=True),
        lines,
        layers=_inspected_labels(result),
    )


def _gap_jump_chart(result: Inspection) -> Chart | None:
    """Chart jump against gap, one point per swapped token, with the limit of dangerous ties."""
    rows = _layers_with(result, lambda row: row.jumps)
    if not rows:
        return None
    gaps = [gap for _, x in rows for sample in (x.near, x.random) for gap in sample.gaps]
    floor = min((gap for gap in gaps if gap), default=1e-3) / 2
    points_per_layer = max(1, MAX_JUMP_POINTS // len(rows) // 2)
    series = []
    for row, jumps in rows:
        random_points, near_points = (
            _jump_series(row, x, floor, points_per_layer) for x in (jumps.random, jumps.near)
        )
        series += [replace(random_points, symbol="square-open", in_legend=False), near_points]
    limit = rows[0][1].dangerous_above
    name = f"dangerous from {percent(limit)}"
    return Chart(
        Axis("gap (filled: nearest to a tie; open: others)", "log"),
        Axis("relative change of the layer’s output", "log", percent=True),
        tuple(series),
        guides=(Guide("y", limit, name, colour="@warn", dash="dash"),),
        layers=_inspected_labels(result),
        height=440,
    )


def _jump_series(row: LayerRow, sample: JumpSample, gap_floor: float, max_points: int) -> Series:
    """Return up to `max_points` evenly spread tokens; gaps of 0 at the floor, no zero jumps."""
    details = (sample.gaps, sample.documents, sample.positions, sample.leaving, sample.entering)
    step = max(1, math.ceil(len(sample.gaps) / max_points))
    return row.series(
        [gap or gap_floor for gap in sample.gaps[::step]],
        above_zero(sample.jumps[::step]),
        size=6,
        opacity=0.6,
        details=[list(token) for token in zip(*details, strict=True)][::step],
        hover="gap %{customdata[0]:.3~g}, output moves by %{y:percent}<br>expert %{customdata[3]} "
        "out, %{customdata[4]} in<br>document %{customdata[1]}, position %{customdata[2]}"
        "<extra>%{fullData.name}</extra>",
    )


def _jump_loss_chart(result: Inspection) -> Chart | None:
    """Chart the change of the loss against the jump; None if losses were not measured."""
    rows = [
        (row, jumps.near)
        for row, jumps in _layers_with(result, lambda row: row.jumps)
        if any(loss is not None for loss in jumps.near.losses or ())
    ]
    if not rows:
        return None
    hover = "output moved %{x:percent}, loss %{y:+.3g} nats<extra>%{fullData.name}</extra>"
    points = tuple(
        row.series(near.jumps, near.losses or (), size=6, opacity=0.6, hover=hover)
        for row, near in rows
    )
    return Chart(
        Axis("relative change of the layer’s output", percent=True),
        Axis("change of the sequence’s loss (nats)"),
        points,
        layers=_inspected_labels(result),
    )


def _near_threshold_chart(result: Inspection) -> Chart | None:
    """Chart K(ε) of every layer, with a diamond at the ε of k + 1/2 experts."""
    rows = _layers_with(result, lambda row: row.measures.near.value)
    if not rows:
        return None
    series = []
    for row, near in rows:
        experts = [finite(count.value) for count in near.experts]
        hover = "%{y:.4~g} experts within %{x:.3g}<extra>%{fullData.name}</extra>"
        series.append(row.series(near.epsilons, experts, kind="line", hover=hover))
        half = finite(near.epsilon_half.value)
        if half:
            hover = "ε = %{x:.3g} costs half an expert<extra></extra>"
            look = {"symbol": "diamond", "size": 9, "in_legend": False, "hover": hover}
            series.append(row.series([half], [row.measures.k + 0.5], **look))
    return Chart(
        Axis("ε (units of the selection score)", "log"),
        Axis("experts within ε of the threshold"),
        tuple(series),
        layers=_inspected_labels(result),
    )


def _expert_load_chart(result: Inspection) -> Chart:
    """Chart a heat map of log2 relative load, layers by experts; crosses mark dead experts."""
    rows = inspected_layer_rows(result)
    widest = max(row.measures.n_experts for row in rows)
    loads = [relative_load(row.measures) for row in rows]
    heat = Heat(
        x=range(widest),
        y=[row.label for row in rows],
        values=[[*load, *[None] * (widest - len(load))] for load in loads],
        colours="load",
        title="load / even load",
        ticks=LOAD_TICKS,
        limits=(-MAX_LOG2_LOAD, MAX_LOG2_LOAD),
        hover="layer %{y}, expert %{x}: 2<sup>%{z:.2f}</sup> of an even load<extra></extra>",
        spaces=(1 if widest <= 128 else 0, 1),
    )
    dead = [(expert, row.label) for row in rows for expert in row.measures.load.dead]
    crosses = Series(
        [expert for expert, _ in dead],
        [label for _, label in dead],
        colour="@on-load",
        symbol="cross",
        in_legend=False,
    )
    return Chart(
        Axis("expert (crosses: never chosen)", limits=(-0.5, widest - 0.5)),
        Axis("layer", "category", reverse=True),
        (crosses,),
        heat,
        height=max(260, 110 + 20 * len(rows)),
    )


def inspection_figures(result: Inspection) -> "dict[str, Callable[[], Figure]]":
    """Return every figure by name; one that lacks its data raises `TraceError` when drawn.

    "routing" shows "gaps" and "near" side by side, for papers.
    """
    layers = result.measures.layers

    def required_chart(
        make: Callable[[Inspection], Chart | None], needed: str, status: str
    ) -> Callable[[], Chart]:
        """Return a function that makes the chart, or raises `TraceError` without its data."""

        def chart_or_error() -> Chart:
            if (chart := make(result)) is None:
                raise TraceError(f"no figure without {needed}: {status}")
            return chart

        return chart_or_error

    gaps = required_chart(_gap_distribution_chart, "gaps", layers[0].gap.status)
    near = required_chart(_near_threshold_chart, "gaps", layers[0].gap.status)
    flips = required_chart(_format_flips_chart, "flips by format", layers[0].precision.status)
    jumps = required_chart(_gap_jump_chart, "jumps", result.jumps[0].status)

    height = min(9.0, 1.2 + 0.2 * len(layers))
    return {
        "routing": lambda: chart_figure(gaps(), near(), width=6.75, height=2.6),
        "gaps": lambda: chart_figure(gaps()),
        "near": lambda: chart_figure(near()),
        "flips": lambda: chart_figure(flips()),
        "jumps": lambda: chart_figure(jumps()),
        "load": lambda: chart_figure(_expert_load_chart(result), width=6.75, height=height),
    }
