"""How much repair at which price: page, terminal view, summary, notebook view, figure."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tieline.lab.on_model.frontier_records import Frontier
from tieline.report.charts import Panel, axis, figure
from tieline.report.drawing import ACCENT, INK, WARN, small_canvas
from tieline.report.frame import notebook_html, render
from tieline.report.tables import Grid, flat, short_names, text_table, view
from tieline.report.words.numbers import finite, percent, significant, with_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TENTH = 0.1
"""Share of tokens inside the band up to which the law of pairs is held against a layer."""

POINTS = ("width", "experts", "moved (KL)", "flips ÷", "least moved", "over it (×)")
FRONTIER = Panel(
    "frontier",
    "How much repair, at which price",
    "One point per width of the band, from little to much: how many times cheaper flips are, and "
    "the KL to the original. The line is what every continuous gate must move the model by; the "
    "dashed level is what flips cost before.",
    wide=True,
)
HOW_TO_READ = (
    "width: ε over the noise of each layer's gap, or an equal number of experts in each layer; "
    "flips ÷: how many times lower what flips cost is; least moved: what the law asks of any gate "
    "for that."
)
LAW = ("layer", "ε / σ", "inside", "D ÷ law", "S ÷ law", "flips ÷", "over frontier (×)")
HOW_LAW = (
    "Each layer by itself: D, how far its output moved, and S, its change under noise of the "
    "choice, over what density, jump and noise of the calibration text predict; over frontier: D "
    "over the least that any continuous gate needs for that S."
)
SPREADS = {"noise": "ε in proportion to the noise", "budget": "equal experts in all layers"}
"""What the widths of each spread are."""


def page(result: Frontier) -> str:
    """The page: the chart, every width, and the law layer by layer."""
    return render(
        "frontier.html",
        [FRONTIER.drawn(_frontier_chart(result))],
        kind="frontier",
        title=result.model,
        facts=_facts(result),
        verdict=_verdict(result),
        points=points_table(result),
        how_to_read=HOW_TO_READ,
        law=law_table(result),
        how_law=HOW_LAW,
        provenance=flat(result.provenance),
    )


def terminal(result: Frontier, width: int) -> RenderableType:
    """One row per width, and one per layer and width."""
    table = text_table(POINTS, points_table(result).rows)
    below: list[RenderableType] = [Padding(Text(HOW_TO_READ), (0, 0, 1, 0))]
    if result.layers:
        below.append(Padding(text_table(LAW, law_table(result).rows), (0, 0, 1, 0)))
        below.append(Padding(Text(HOW_LAW), (0, 0, 1, 0)))
    return view(result.model, _facts(result), _verdict(result), table, *below)


def summary(result: Frontier) -> str:
    """Name, noise and verdict in plain lines."""
    return f"Frontier of {result.model}\n{_facts(result)}\n{_verdict(result)}"


def notebook(result: Frontier) -> str:
    """Verdict, table and figure as a piece of HTML."""
    facts, verdict = _facts(result), _verdict(result)
    return notebook_html(result.model, facts, verdict, points_table(result), figures(result))


def figures(result: Frontier) -> "dict[str, Callable[[], Figure]]":
    """Figures by name: KL to the original against the factor."""
    return {"frontier": lambda: small_canvas(partial(_draw, result))}


def _facts(result: Frontier) -> str:
    cost = f"flips under {result.noise} cost KL {significant(result.by_flips)}"
    return f"{result.gate} gate · {cost} · {len(result.points)} widths"


def _verdict(result: Frontier) -> str:
    known = [point for point in result.of("noise") if finite(point.factor)]
    if not known:
        return "No width lowers what flips cost by an amount that can be seen."
    best = max(known, key=lambda point: point.factor or 0.0)
    return (
        f"At ε = {best.scale:g} times the noise flips are {significant(best.factor)} times cheaper "
        f"and the model moved by KL {significant(best.table.moved.value)}. What to do: take the "
        "narrowest width whose factor is enough, by `tieline smooth --factor`."
    )


def _draw(result: Frontier, axes: "Axes") -> None:
    for spread, colour, marker in (("noise", ACCENT, "o-"), ("budget", WARN, "D")):
        points = [point for point in result.of(spread) if finite(point.factor)]
        x, y = [p.factor or 0.0 for p in points], [p.table.moved.value or 0.0 for p in points]
        axes.plot(x, y, marker, color=colour, markersize=4, label=SPREADS[spread])
    law = sorted((p.factor, p.least) for p in result.points if p.factor and p.least)
    axes.plot(*zip(*law, strict=True), color=INK, linewidth=0.8, label="least possible")
    axes.set(xscale="log", yscale="log", ylabel="KL to the original (nats per token)")
    axes.set_xlabel(f"times cheaper flips under {result.noise}")
    axes.legend(fontsize=6.5)


def points_table(frontier: Frontier) -> Grid:
    """One row per width: by the noise of each layer, and by an equal budget in all layers."""
    words = {"noise": "ε = {:.3g} σ", "budget": "{:.3g} each"}
    rows = (
        (
            words[point.spread].format(point.scale),
            significant(point.table.experts_after.value),
            with_error(point.table.moved, 2),
            significant(point.factor),
            significant(point.least, 2),
            significant(point.over, 2),
        )
        for point in frontier.points
    )
    return Grid(POINTS, tuple(rows))


def law_table(frontier: Frontier) -> Grid:
    """One row per layer and width of which at most a tenth of the tokens is inside the band."""
    labels = short_names([law.name for law in frontier.layers])
    rows = (
        (
            label,
            significant(point.scale),
            percent(point.inside),
            significant(_ratio(point.moved.value, point.predicted_moved), 2),
            significant(_ratio(point.sensitivity.value, point.predicted_sensitivity), 2),
            significant(point.factor, 2),
            with_error(point.over, 2),
        )
        for label, law in zip(labels, frontier.layers, strict=True)
        for point in law.points
        if point.inside <= TENTH
    )
    return Grid(LAW, tuple(rows))


def _ratio(above: float | None, below: float) -> float | None:
    return above / below if above is not None and below > 0 else None


def _frontier_chart(frontier: Frontier) -> dict[str, Any]:
    marks = []
    for spread, role in (("noise", "@accent"), ("budget", "@warn")):
        points = [point for point in frontier.of(spread) if finite(point.factor)]
        marks.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if spread == "noise" else "markers",
                "name": SPREADS[spread],
                "x": [point.factor for point in points],
                "y": [point.table.moved.value for point in points],
                "marker": {"size": 9, "color": role},
                "line": {"color": role},
                "hovertemplate": "%{x:.3~g} times cheaper, moved %{y:.3~g}<extra></extra>",
            }
        )
    law = sorted((p.factor, p.least) for p in frontier.points if p.factor and p.least)
    bound = {
        "type": "scatter",
        "mode": "lines",
        "name": "least possible",
        "line": {"color": "@ink"},
    }
    marks.append(bound | {"x": [x for x, _ in law], "y": [y for _, y in law]})
    level = {"type": "line", "xref": "paper", "x0": 0, "x1": 1}
    level |= {"y0": frontier.by_flips, "y1": frontier.by_flips}
    level |= {"line": {"color": "@muted", "dash": "dash", "width": 1}}
    x = axis(f"times cheaper flips under {frontier.noise}", scale="log")
    y = axis("KL to the original (nats per token)", scale="log")
    return figure(marks, 420, xaxis=x, yaxis=y, shapes=[level])
