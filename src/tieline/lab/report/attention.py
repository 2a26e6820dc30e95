"""Report of a model's attention heads as mixtures of keys: chart and table."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.text import Text

from tieline.core.text import short_names
from tieline.lab.attention.head_view import AttentionView, HeadView
from tieline.report.charts import Axis, Chart, Guide, Series, layer_axis
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.result_views import Report, Section, report_views
from tieline.report.tables import Grid, grid_table
from tieline.report.words.numbers import percent, significant

HEADINGS = ("layer", "head", "keys", "for 90 %", "top", "gap", "near tie", "σ mass", "σ change")
FEW_KEYS, MASS_TOLERANCE = 4.0, 0.25


def _attention_report(result: AttentionView) -> Report:
    """Build the report: verdict, figure and one row per head."""
    table, sentences = _head_table(result), attention_sentences(result)
    caption = "Keys that carry the mass, and the mass of sigmoid weights, head by head."
    layers = len({head.layer for head in result.heads})
    sample = f"{result.tokens:,} tokens in {result.sequences} sequences"

    def draw() -> Any:
        return chart_figure(_attention_chart(result.heads))

    return Report(
        kind="attention",
        name="Attention",
        title=result.model,
        facts=f"{layers} layers, {len(result.heads)} heads · {sample}",
        verdict=_attention_verdict(result),
        table=lambda: table,
        body=lambda: {
            "sections": [
                Section("Heads as mixtures", draw=draw, caption=caption),
                Section("All heads", table, notes=sentences),
            ]
        },
        below=lambda width: [grid_table(table), *map(Text, sentences)],
        figures={"heads": draw},
    )


page, figures, terminal, summary, notebook = report_views(_attention_report)


def attention_sentences(result: AttentionView) -> list[str]:
    """Write what sigmoid attention would change, and how to read figure and table."""
    change = result.sigmoid_change
    error = "" if change.standard_error is None else f" ± {change.standard_error:.4f}"
    return [
        f"With sigmoid attention and the same weights the loss would change from "
        f"{result.loss.value:.4f} by {(change.value or 0.0):+.4f}{error} nats per token.",
        "Dots are heads: how many keys carry the mass of a query by softmax, and what sigmoid "
        "weights would sum to; the line is 1, the mass that softmax hands out.",
        "keys: exp of the entropy of a query's weights, the keys that carry its mass; for 90 %: "
        "keys that hold 90 % of it; top: the largest weight; gap: median distance of the two best "
        "scores; near tie: queries whose gap is below 0.1; σ mass: sum of the weights by sigmoid; "
        "σ change: how far sigmoid would move the head's output, relative.",
    ]


def _attention_verdict(result: AttentionView) -> str:
    """State how many keys carry a query's mass, whether sigmoid weights fit, and what to do."""
    heads = result.heads
    keys, carry = fmean(head.seen for head in heads), fmean(head.effective for head in heads)
    near = fmean(head.near for head in heads)
    few_key_heads = sum(head.effective < FEW_KEYS for head in heads)
    fits = sum(abs(head.mass - 1) < MASS_TOLERANCE for head in heads)
    change = result.sigmoid_change.value or 0.0
    advice = (
        "What to do: sigmoid attention can replace softmax here with a little training."
        if change < 0.1
        else "What to do: keep softmax on these weights; sigmoid attention has to be trained in."
    )
    return (
        f"Of a query's {keys:.0f} keys {carry:.3g} carry the mass; {few_key_heads} of "
        f"{len(heads)} heads use fewer than 4. The two best keys nearly tie in {percent(near)} of "
        f"the rows. Sigmoid weights would sum to about 1 in {fits} of {len(heads)} heads. {advice}"
    )


def _head_table(result: AttentionView) -> Grid:
    """Return one row per head: effective keys, largest weight, gap, mass and change."""
    labels = dict(
        zip(_head_layers(result.heads), short_names(_head_layers(result.heads)), strict=True)
    )
    rows = (
        (
            labels[head.layer],
            str(head.head),
            significant(head.effective),
            significant(head.for90),
            percent(head.top),
            significant(head.gap),
            percent(head.near),
            significant(head.mass),
            percent(head.change),
        )
        for head in result.heads
    )
    return Grid(HEADINGS, tuple(rows))


def _head_layers(heads: Sequence[HeadView]) -> list[str]:
    """Return the distinct layers of the heads, in order."""
    return list(dict.fromkeys(head.layer for head in heads))


def _attention_chart(heads: Sequence[HeadView]) -> Chart:
    """Chart effective keys and the mass of sigmoid weights of every head, by layer."""
    layers = _head_layers(heads)
    positions = [layers.index(head.layer) for head in heads]
    keys_x, mass_x = [x - 0.12 for x in positions], [x + 0.12 for x in positions]
    effective, weights = [head.effective for head in heads], [head.mass for head in heads]
    keys = Series(keys_x, effective, "keys that carry the mass")
    mass = Series(mass_x, weights, "mass of sigmoid weights", "@warn", symbol="diamond")
    y = Axis("keys, or sum of weights", "log")
    guides = (Guide("y", 1.0, colour="@ink", dash="dash"),)
    return Chart(layer_axis(short_names(layers)), y, (keys, mass), guides=guides)
