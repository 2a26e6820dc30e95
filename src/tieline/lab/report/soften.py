"""What a soft choice does to the loss: page, terminal view, summary, notebook view, figure."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from tieline.lab.on_model.soften_records import Softening, SoftLayer, SoftLevel
from tieline.report.charts import MOST_NAMED, Panel, axis, depth_bar, figure, layer_colour
from tieline.report.drawing import INK, layer_colours, name_layers, small_canvas
from tieline.report.frame import notebook_html, render
from tieline.report.tables import Grid, flat, short_names, text_table, view, visible
from tieline.report.words.numbers import DASH, finite, significant, with_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SOFTEN = Panel(
    "soften",
    "What a soft choice does to the loss",
    "The hard choice of a layer is replaced by its soft form, wider from left to right: a softmax "
    "at temperature τ where one expert is chosen, shared seats within ε where several are. "
    "Dots are the measured change of the loss with two standard errors, below zero where softness "
    "helps; dashed lines are the first-order prediction from the tokens at the walls.",
    wide=True,
)
FINE = 8
"""Points of a line per doubling: on a logarithmic axis it is bent."""
HEAD = (
    "layer",
    "form",
    "first width",
    "change",
    "slope there",
    "predicted",
    "measured / expected",
    "by gradient",
    "f(0)",
    "C",
    "α",
    "C_sh",
    "half by",
)
TOKENS = ("layer", "token", "where", "out", "in", "gap", "effect (nats)")


def page(result: Softening) -> str:
    """The page: the chart, slopes layer by layer, the tokens that decide."""
    return render(
        "soften.html",
        [SOFTEN.drawn(_chart(result))],
        kind="softening report",
        title=result.model,
        facts=_facts(result),
        verdict=result.conclusions[0],
        sentences=result.conclusions[1:],
        table=soften_table(result),
        deciding=deciding_table(result),
        provenance=flat(result.provenance),
    )


def terminal(result: Softening, width: int) -> RenderableType:
    """Slopes layer by layer, and what they come to."""
    rows = soften_table(result)
    head, *shown = [(row[0], row[2], row[4], row[5]) for row in (rows.head, *rows.rows)]
    table = text_table(head, shown)
    return view(
        result.model,
        _facts(result),
        result.conclusions[0],
        table,
        *map(Text, result.conclusions[1:]),
    )


def summary(result: Softening) -> str:
    """Name and sentences in plain lines."""
    return "\n".join([f"Softening of {result.model}", _facts(result), *result.conclusions])


def notebook(result: Softening) -> str:
    """Verdict, table and figure as a piece of HTML."""
    facts, verdict = _facts(result), " ".join(result.conclusions)
    return notebook_html(result.model, facts, verdict, soften_table(result), figures(result))


def figures(result: Softening) -> "dict[str, Callable[[], Figure]]":
    """Figures by name: change of the loss against the width of the soft choice."""
    return {"soften": lambda: small_canvas(partial(_draw, result))}


def _facts(result: Softening) -> str:
    sample = f"{result.tokens:,} tokens in {result.sequences} sequences"
    return f"{len(result.layers)} routed layers · {sample} · loss {significant(result.loss.value)}"


def _draw(result: Softening, axes: "Axes") -> None:
    labels = short_names([layer.name for layer in result.layers])
    colours = layer_colours(len(labels))
    rows = [
        (label, layer.levels, colour)
        for label, layer, colour in zip(labels, result.layers, colours, strict=True)
    ]
    for label, levels, colour in [*rows, ("all", result.together, INK)]:
        x = [2.0**step for step in range(len(levels))]
        y = [level.change.value or 0.0 for level in levels]
        errors = [2 * (finite(level.change.standard_error) or 0.0) for level in levels]
        style = {"fmt": "o-", "color": colour, "markersize": 3, "capsize": 2}
        axes.errorbar(x, y, yerr=errors, label=f"layer {label}", **style)
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.set(xscale="log", xlabel="width of the soft choice / its first width")
    axes.set_ylabel("change of the loss (nats per token)")
    name_layers(axes, labels)


def _chart(softening: Softening) -> dict[str, Any]:
    labels = short_names([layer.name for layer in softening.layers])
    count, data = len(softening.layers), []
    for index, (label, layer) in enumerate(zip(labels, softening.layers, strict=True)):
        slope = finite(layer.predicted.value)
        first = layer.levels[0].width
        line = None if slope is None else slope * first
        aside = 1.02 ** (index - count)  # points of one width stand side by side
        how = (layer_colour(index, count), count, aside)
        data += _curve(f"layer {label}", layer.levels, line, *how)
    data += _curve("all layers", softening.together, finite(softening.predicted.value), "@ink", 1)
    ticks = [2.0**level for level in range(len(softening.together))]
    layout = {
        "xaxis": axis("width of the soft choice / its first width", scale="log")
        | {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks], "dtick": None},
        "yaxis": axis("change of the loss (nats per token)", exponentformat="power"),
    }
    return figure([*data, *depth_bar(labels)], 460, **layout)


def _curve(
    name: str,
    levels: Sequence[SoftLevel],
    slope: float | None,
    colour: str,
    count: int,
    aside: float = 1.0,
) -> list[dict[str, Any]]:
    """Dots with errors, and the line of the prediction per first width."""
    x = [2.0**level for level in range(len(levels))]
    spread = [2 * (finite(level.change.standard_error) or 0.0) for level in levels]
    dots = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [aside * at for at in x],
        "y": [finite(level.change.value) for level in levels],
        "error_y": {"type": "data", "array": spread, "color": colour, "width": 3},
        "marker": {"size": 8, "color": colour},
        "showlegend": count <= MOST_NAMED,
        "customdata": [significant(level.width) for level in levels],
        "hovertemplate": "width %{customdata}: %{y:+.2~g} nats<extra>%{fullData.name}</extra>",
    }
    if slope is None:
        return [dots]
    line = {"color": colour, "width": 1.5, "dash": "dash"}
    fine = [2.0 ** (step / FINE) for step in range(FINE * (len(levels) - 1) + 1)]
    straight = {"type": "scatter", "mode": "lines", "x": fine, "y": [slope * at for at in fine]}
    return [dots, straight | {"line": line, "showlegend": False, "hoverinfo": "skip"}]


def soften_table(softening: Softening) -> Grid:
    """One row per layer, and one for all together."""
    labels = short_names([layer.name for layer in softening.layers])
    rows = [_row(label, layer) for label, layer in zip(labels, softening.layers, strict=True)]
    first = softening.together[0]
    ends = ("all", "", "×1", with_error(first.change, 2), with_error(first.slope, 2))
    ends = (*ends, with_error(softening.predicted, 2), _ratio(first))
    rows.append((*ends, *[""] * (len(HEAD) - len(ends))))
    return Grid(HEAD, tuple(rows))


def _row(label: str, layer: SoftLayer) -> tuple[str, ...]:
    first, tail = layer.levels[0], layer.tail
    return (
        label,
        layer.form,
        significant(first.width),
        with_error(first.change, 2),
        with_error(first.slope, 2),
        with_error(layer.predicted, 2) if layer.status == "ok" else DASH,
        _ratio(first),
        significant(layer.by_gradient, 2),
        significant(layer.density.value),
        significant(tail.constant.value),
        significant(tail.exponent.value),
        significant(layer.constant),
        f"{layer.half} of {layer.near}",
    )


def _ratio(level: SoftLevel) -> str:
    return DASH if level.ratio is None else with_error(level.ratio, 2)


def deciding_table(softening: Softening) -> Grid:
    """The tokens that decide, layer by layer."""
    labels = short_names([layer.name for layer in softening.layers])
    rows = (
        (
            label,
            visible(token.text) or "◦",
            f"{token.document}:{token.position}",
            str(token.leaving),
            str(token.entering),
            significant(token.gap),
            f"{token.effect:+.2g}",
        )
        for label, layer in zip(labels, softening.layers, strict=True)
        for token in layer.deciding
    )
    return Grid(TOKENS, tuple(rows))
