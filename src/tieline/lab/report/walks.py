"""Times to the first flip: page, terminal view, summary, notebook view, figure."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from tieline.lab.on_model.walks import FlipWalk, FlipWalks
from tieline.report.charts import MOST_NAMED, Panel, axis, depth_bar, figure, layer_colour
from tieline.report.charts import unmeasured as unmeasured_panels
from tieline.report.drawing import layer_colours, name_layers, percent_axis, small_canvas
from tieline.report.frame import notebook_html, render
from tieline.report.tables import Grid, flat, short_names, text_table, view
from tieline.report.words.numbers import DASH, finite, percent, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Walks = list[tuple[str, FlipWalk]]
"""Short name and walk of the layers that have one."""

WALK = Panel(
    "flip-times",
    "How many roundings until a token changes its experts",
    "Each layer’s hidden states take a random walk whose steps have the size and directions that "
    "rounding the whole model really has. Height is the share of tokens that have changed an "
    "expert at least once after so many steps. Pale dashes are the exact bounds: the nearest wall "
    "alone, and the sum over all walls.",
)
NOTE = (
    "Flipped by t: simulated share of tokens that have changed an expert within t roundings. "
    "Directions: effective number of directions of the noise, at most E - 1."
)


def page(result: FlipWalks) -> str:
    """The page: the chart and one row per layer."""
    walks = _known(result)
    reasons = [layer.walk.status for layer in result.layers] or [result.status]
    panel = WALK.drawn(_chart(walks)) if walks else WALK.missing(reasons)
    return render(
        "walks.html",
        [panel],
        kind="walks to the first flip",
        title=result.model,
        facts=_facts(result),
        verdict=_verdict(result),
        table=walk_table(result),
        note=NOTE,
        unmeasured=unmeasured_panels([panel]),
        provenance=flat(result.provenance),
    )


def terminal(result: FlipWalks, width: int) -> RenderableType:
    """One row per layer."""
    grid = walk_table(result)
    return view(result.model, _facts(result), _verdict(result), text_table(grid.head, grid.rows, 1))


def summary(result: FlipWalks) -> str:
    """Name and verdict in plain lines."""
    return f"Walks of {result.model}\n{_facts(result)}\n{_verdict(result)}"


def notebook(result: FlipWalks) -> str:
    """Verdict, table and figure as a piece of HTML."""
    drawings = figures(result) if _known(result) else {}
    return notebook_html(
        result.model, _facts(result), _verdict(result), walk_table(result), drawings
    )


def figures(result: FlipWalks) -> "dict[str, Callable[[], Figure]]":
    """Figures by name: the share of tokens that have flipped, over time."""
    return {"walks": lambda: small_canvas(partial(_draw, _known(result)))}


def _known(result: FlipWalks) -> Walks:
    labels = short_names([layer.name for layer in result.layers])
    pairs = zip(labels, result.layers, strict=True)
    return [(label, layer.walk.value) for label, layer in pairs if layer.walk.value is not None]


def _facts(result: FlipWalks) -> str:
    return f"{len(result.layers)} routed layers · noise of {result.precision}"


def _verdict(result: FlipWalks) -> str:
    """The layer that flips first."""
    walks = _known(result)
    if not walks:
        return next((layer.walk.status for layer in result.layers), result.status)
    label, first = min(walks, key=lambda pair: pair[1].median)
    return (
        f"Under a random walk with the noise of {result.precision}, half of the tokens of layer "
        f"{label}, the first to flip, change an expert within {significant(first.median, 2)} "
        "roundings."
    )


def walk_table(result: FlipWalks) -> Grid:
    """One row per layer: median time, flips at every time, directions, tokens, or the reason."""
    labels = short_names([layer.name for layer in result.layers])
    times = next((walk.times for _, walk in _known(result)), ())
    head = ("layer", "median", *(f"by {time:g}" for time in times), "directions", "tokens")
    rows = []
    for label, layer in zip(labels, result.layers, strict=True):
        walk = layer.walk.value
        if walk is None:
            rows.append((label, layer.walk.status, *[DASH] * (len(head) - 2)))
            continue
        shares = [percent(share.value) for share in walk.value]
        ends = (significant(walk.directions), str(walk.tokens))
        rows.append((label, significant(walk.median), *shares, *ends))
    return Grid(head, tuple(rows))


def _draw(walks: Walks, axes: "Axes") -> None:
    for (label, walk), colour in zip(walks, layer_colours(len(walks)), strict=True):
        shares = [share.value or 0.0 for share in walk.value]
        axes.plot(walk.times, shares, "o-", color=colour, markersize=3, label=f"layer {label}")
        for bound in (walk.lower, walk.upper):
            axes.plot(walk.times, bound, ":", color=colour, linewidth=0.8)
    axes.set(xscale="log", ylim=(0, 1), xlabel="roundings of the whole model")
    axes.set_ylabel("share of tokens that changed an expert")
    percent_axis(axes.yaxis)
    name_layers(axes, [label for label, _ in walks])


def _chart(walks: Walks) -> dict[str, Any]:
    lines = []
    for place, (label, walk) in enumerate(walks):
        colour = layer_colour(place, len(walks))
        share = [finite(value.value) or None for value in walk.value]
        lines.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"layer {label}",
                "x": list(walk.times),
                "y": share,
                "line": {"color": colour, "width": 1.75},
                "marker": {"size": 5},
                "showlegend": len(walks) <= MOST_NAMED,
                "hovertemplate": "after %{x} roundings %{y:.3~p} have changed an expert"
                "<extra>%{fullData.name}</extra>",
            }
        )
        pale = {"color": colour, "width": 1, "dash": "dot"}
        common = {"type": "scatter", "mode": "lines", "line": pale, "opacity": 0.5}
        common |= {"showlegend": False, "hoverinfo": "skip", "x": list(walk.times)}
        lines += [common | {"y": list(bound)} for bound in (walk.lower, walk.upper)]
    layout = {
        "xaxis": axis("roundings of the whole model", scale="log"),
        "yaxis": axis("share of tokens", tickformat=".0%", range=[0, 1]),
    }
    return figure([*lines, *depth_bar([label for label, _ in walks])], 400, **layout)
