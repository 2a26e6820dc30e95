"""The softening of an inspection: chart, tables and sentences."""

from collections.abc import Sequence
from typing import Any

from tieline.analysis.inspection import Inspection
from tieline.lab.on_model.soften_records import Softening, SoftLayer, SoftLevel
from tieline.report.charts import MOST_NAMED, Panel, axis, depth_bar, figure, layer_colour
from tieline.report.tables import Grid, short_names, visible
from tieline.report.words.numbers import DASH, finite, significant, with_error

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
NOT_ASKED = "not measured: the option --soften asks for it"
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


def soften_panel(result: Inspection) -> Panel:
    """The chart, or the reason why there is none."""
    softening = result.softening
    return SOFTEN.missing([NOT_ASKED]) if softening is None else SOFTEN.drawn(_chart(softening))


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
