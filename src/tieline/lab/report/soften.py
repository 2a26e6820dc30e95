"""Report of softening, the loss under a soft choice: chart and tables."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from tieline.core.statistics import Estimate
from tieline.core.text import layer_label, short_names
from tieline.lab.on_model.soften import Softening, SoftLayer, SoftLevel
from tieline.report.charts import Axis, Chart, Guide, Series, layer_colour
from tieline.report.html_page import PagePanel, visible_characters
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.result_views import Report, report_views
from tieline.report.tables import Grid, dotted_rows, text_table
from tieline.report.words.numbers import DASH, finite, signed, significant, with_error

SOFTEN_PANEL = PagePanel(
    "soften",
    "What a soft choice does to the loss",
    "The hard choice of a layer is replaced by its soft form, wider from left to right: a softmax "
    "at temperature τ where one expert is chosen, shared seats within ε where several are. "
    "Dots are the measured change of the loss with two standard errors, below zero where softness "
    "helps; dashed lines are the first-order prediction from the tokens at the walls.",
    wide=True,
)
POINTS_PER_DOUBLING = 8
"""Points of a straight line per doubling, since it is curved on a logarithmic axis."""
SOFTEN_HEADINGS = (
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
MAX_RATIO_ERROR = 0.2
"""Largest standard error of a ratio that is reported in a sentence."""
TOKEN_HEADINGS = ("layer", "token", "where", "out", "in", "gap", "effect (nats)")


def _soften_report(result: Softening) -> Report:
    """Build the report: the chart, slopes layer by layer, and the deciding tokens."""
    rows, (verdict, *sentences) = partial(soften_table, result), soften_sentences(result)
    return Report(
        kind="softening report",
        title=result.model,
        facts=_soften_facts(result),
        verdict=verdict,
        table=rows,
        body=lambda: {
            "template": "soften.html",
            "style": "",
            "panels": [SOFTEN_PANEL.with_chart(_soften_chart(result))],
            "sentences": sentences,
            "table": rows(),
            "deciding": deciding_table(result),
            "provenance": dotted_rows(result.provenance),
        },
        below=partial(_soften_terminal, result),
        figures={"soften": lambda: chart_figure(_soften_chart(result))},
    )


def _soften_terminal(result: Softening, width: int) -> list[RenderableType]:
    """Return width and slopes of each layer, and the sentences, for a terminal."""
    rows = soften_table(result)
    head, *cells = [(row[0], row[2], row[4], row[5]) for row in (rows.head, *rows.rows)]
    return [text_table(head, cells), *map(Text, soften_sentences(result)[1:])]


page, figures, terminal, summary, notebook = report_views(_soften_report)._replace(
    summary=lambda result: "\n".join(
        [f"Softening of {result.model}", _soften_facts(result), *soften_sentences(result)]
    ),
    notebook=lambda result: replace(
        _soften_report(result), verdict=" ".join(soften_sentences(result))
    ).notebook(),
)


def _soften_facts(result: Softening) -> str:
    """Return one line with layers, sample and loss."""
    sample = f"{result.tokens:,} tokens in {result.sequences} sequences"
    return f"{len(result.layers)} routed layers · {sample} · loss {significant(result.loss.value)}"


def _soften_chart(softening: Softening) -> Chart:
    """Chart the change of the loss by width, for each layer and for all together."""
    labels = short_names([layer.name for layer in softening.layers])
    count, series = len(softening.layers), []
    for index, (label, layer) in enumerate(zip(labels, softening.layers, strict=True)):
        slope = finite(layer.predicted.value)
        line = None if slope is None else slope * layer.levels[0].width
        x_factor = 1.02 ** (index - count)  # sets points of one width side by side
        series += _width_curve(
            f"layer {label}", layer.levels, line, layer_colour(index, count), x_factor
        )
    series += _width_curve(
        "all layers", softening.together, finite(softening.predicted.value), "@ink"
    )
    ticks = {2.0**level: f"{2**level}" for level in range(len(softening.together))}
    return Chart(
        Axis("width of the soft choice / its first width", "log", ticks=ticks),
        Axis("change of the loss (nats per token)"),
        tuple(series),
        guides=(Guide("y", 0.0),),
        layers=tuple(labels),
        height=460,
    )


def _width_curve(
    name: str, levels: Sequence[SoftLevel], slope: float | None, colour: str, x_factor: float = 1.0
) -> list[Series]:
    """Return dots with error bars, and the predicted line; `slope` is per smallest width."""
    spread = [2 * (finite(level.change.standard_error) or 0.0) for level in levels]
    dots = Series(
        [x_factor * 2.0**step for step in range(len(levels))],
        [finite(level.change.value) for level in levels],
        name,
        colour,
        errors=(spread, spread),
        details=[significant(level.width) for level in levels],
        hover="width %{customdata}: %{y:+.2~g} nats<extra>%{fullData.name}</extra>",
    )
    if slope is None:
        return [dots]
    x = [
        2.0 ** (step / POINTS_PER_DOUBLING)
        for step in range(POINTS_PER_DOUBLING * (len(levels) - 1) + 1)
    ]
    line = Series(x, [slope * width for width in x], "", colour, "line", dash="dash")
    return [dots, replace(line, width=1.5, in_legend=False)]


def soften_table(softening: Softening) -> Grid:
    """Return one row per layer, and one for all layers together."""
    labels = short_names([layer.name for layer in softening.layers])
    rows = [
        _soften_layer_row(label, layer)
        for label, layer in zip(labels, softening.layers, strict=True)
    ]
    first = softening.together[0]
    cells = ("all", "", "×1", with_error(first.change, 2), with_error(first.slope, 2))
    cells = (*cells, with_error(softening.predicted, 2), _slope_ratio_text(first))
    rows.append((*cells, *[""] * (len(SOFTEN_HEADINGS) - len(cells))))
    return Grid(SOFTEN_HEADINGS, tuple(rows))


def _soften_layer_row(label: str, layer: SoftLayer) -> tuple[str, ...]:
    """Return form, width, measured and predicted slope, density and tail of one layer."""
    first, tail = layer.levels[0], layer.tail
    return (
        label,
        layer.form,
        significant(first.width),
        with_error(first.change, 2),
        with_error(first.slope, 2),
        with_error(layer.predicted, 2) if layer.status == "ok" else DASH,
        _slope_ratio_text(first),
        significant(layer.by_gradient, 2),
        significant(layer.density.value),
        significant(tail.constant.value),
        significant(tail.exponent.value),
        significant(layer.constant),
        f"{layer.half} of {layer.near}",
    )


def _slope_ratio_text(level: SoftLevel) -> str:
    """Return measured over expected slope with its error; a dash if unknown."""
    return DASH if level.ratio is None else with_error(level.ratio, 2)


def deciding_table(softening: Softening) -> Grid:
    """Return the table of deciding tokens, layer by layer."""
    labels = short_names([layer.name for layer in softening.layers])
    rows = (
        (
            label,
            visible_characters(token.text) or "◦",
            f"{token.document}:{token.position}",
            str(token.leaving),
            str(token.entering),
            significant(token.gap),
            f"{token.effect:+.2g}",
        )
        for label, layer in zip(labels, softening.layers, strict=True)
        for token in layer.deciding
    )
    return Grid(TOKEN_HEADINGS, tuple(rows))


def soften_sentences(softening: Softening) -> list[str]:
    """Write whether softening would help or hurt, by how much, and which tokens decide it."""
    sentences = [_soften_verdict(softening), _best_width_text(softening)]
    decided = [layer for layer in softening.layers if layer.deciding]
    if decided:
        sentences += [_deciding_tokens_text(decided), _slope_agreement_text(softening)]
    if softening.rounded_formats:
        formats = " and ".join(softening.rounded_formats)
        sentences.append(
            f"The model runs in {formats}, whose rounding changes losses by as much: --dtype fp32."
        )
    return sentences


def slope_direction(slope: Estimate) -> str:
    """Return "help" or "hurt" if the slope is below or above zero by two errors, else "tell"."""
    value, error = slope.value, slope.standard_error
    if value is None or error is None or abs(value) <= 2 * error:
        return "tell"
    return "help" if value < 0 else "hurt"


def _soften_verdict(softening: Softening) -> str:
    """State whether a soft choice would help or hurt, and by how much at the first width."""
    first = softening.together[0]
    slope = softening.predicted if softening.predicted.value is not None else first.slope
    sentence = {
        "help": "A soft choice would help this model",
        "hurt": "A soft choice would hurt this model",
        "tell": "Whether a soft choice would help or hurt cannot be told from this sample",
    }[slope_direction(slope)]
    change = f"{_signed_estimate(first.change)} nats per token at the first width"
    predicted = (
        f", predicted {_signed_estimate(slope)}" if softening.predicted.value is not None else ""
    )
    return f"{sentence}: all layers together change the loss by {change}{predicted}."


def _best_width_text(softening: Softening) -> str:
    """State the width of the lowest loss and what to do."""
    best = min(softening.together, key=lambda level: level.change.value or 0.0)
    last = softening.together[-1]
    if slope_direction(best.change) == "help":
        wider = f"at {last.width:g} times them it is {_signed_estimate(last.change)}"
        wider_text = "the widest that was tried" if best is last else wider
        return (
            f"The loss is lowest at {best.width:g} times the first widths "
            f"({_signed_estimate(best.change)} nats per token); {wider_text}. What to do: train or "
            "fine-tune with a soft choice of about that width, or smooth the model after training "
            "(`tieline smooth`)."
        )
    return (
        f"No width lowers the loss for sure; at {last.width:g} times the first widths it changes "
        f"by {_signed_estimate(last.change)} nats per token. What to do: keep the hard choice, or "
        "smooth only for stability."
    )


def _deciding_tokens_text(layers: list[SoftLayer]) -> str:
    """State how many tokens carry half of the predicted slope, and name the largest."""
    tokens = [token for layer in layers for token in layer.deciding]
    first = max(tokens, key=lambda token: abs(token.effect))
    half, near = sum(x.half for x in layers), sum(x.near for x in layers)
    way = "gains" if first.effect < 0 else "loses"
    return (
        f"{half} of the {near} tokens nearest to a wall carry half of it; the first among them is "
        f"{first.text!r} (document {first.document}, position {first.position}), whose sequence "
        f"{way} {abs(first.effect):.2g} nats as expert {first.entering} shares the seat of "
        f"{first.leaving} in {layer_label(first.layer)}."
    )


def _slope_agreement_text(softening: Softening) -> str:
    """State in how many cases the predicted slope agrees with the measured one."""
    rows = [*(layer.levels for layer in softening.layers), softening.together]
    judged = [level.agrees for levels in rows for level in levels[:3] if level.missed is not None]
    sentence = (
        f"The slope predicted from the walls is within 15 % or 3 standard errors of the measured "
        f"one in {sum(map(bool, judged))} of {len(judged)} cases at the three smallest widths."
    )
    return " ".join([sentence, *_paired_change_sentences(softening.together[0])])


def _paired_change_sentences(first: SoftLevel) -> list[str]:
    """State measured over expected change of all layers together, if the error is small."""
    if first.ratio is None or first.ratio.value is None:
        return []
    error = first.ratio.standard_error
    if error is None or error > MAX_RATIO_ERROR:
        return []
    ratio = f"{first.ratio.value:.2f} ± {error:.1g}"
    return [
        f"On the tokens of this sample alone the loss changes by {ratio} times what their "
        "gradients and curvatures give at the first width."
    ]


def _signed_estimate(estimate: Estimate) -> str:
    """Return an estimate with its sign and standard error, or words for an unknown one."""
    return "an unknown amount" if estimate.value is None else signed(estimate)
