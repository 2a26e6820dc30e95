"""A model's heads as mixtures of experts: page, terminal view, summary, notebook view, figure."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tieline.lab.attention.view import AttentionView, HeadView
from tieline.report.drawing import ACCENT, INK, WARN, name_places, small_canvas
from tieline.report.frame import notebook_html
from tieline.report.tables import Grid, short_names, text_table, view
from tieline.report.words.numbers import percent, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAD = ("layer", "head", "keys", "for 90 %", "top", "gap", "near tie", "σ mass", "σ change")
FEW_KEYS, NEAR_MASS = 4.0, 0.25


def page(result: AttentionView) -> str:
    """The page: verdict, figure and one row per head."""
    from tieline.report.plain import Section, plain_page

    caption = "Keys that carry the mass, and the mass of sigmoid weights, head by head."
    sections = [
        Section("Heads as mixtures", draw=partial(_heads_figure, result), words=caption),
        Section("All heads", _grid(result), notes=attention_facts(result)),
    ]
    return plain_page("attention", result.model, _facts_line(result), sections, _verdict(result))


def terminal(result: AttentionView, width: int) -> RenderableType:
    """One row per head, and what it means."""
    grid = _grid(result)
    table = Padding(text_table(grid.head, grid.rows), (0, 0, 1, 0))
    sentences = map(Text, attention_facts(result))
    return view(result.model, _facts_line(result), _verdict(result), table, *sentences)


def summary(result: AttentionView) -> str:
    """Name and verdict in plain lines."""
    return f"Attention of {result.model}\n{_facts_line(result)}\n{_verdict(result)}"


def notebook(result: AttentionView) -> str:
    """Verdict, table and figure as a piece of HTML."""
    facts, verdict = _facts_line(result), _verdict(result)
    return notebook_html(result.model, facts, verdict, _grid(result), figures(result))


def figures(result: AttentionView) -> "dict[str, Callable[[], Figure]]":
    """Figures by name: keys in use and mass of sigmoid weights, by layer."""
    return {"heads": partial(_heads_figure, result)}


def _heads_figure(result: AttentionView) -> "Figure":
    return small_canvas(partial(_draw, result.heads))


def attention_facts(result: AttentionView) -> list[str]:
    """Sentences: what sigmoid attention would change, and how to read the table."""
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


def _verdict(result: AttentionView) -> str:
    heads = result.heads
    keys, carry, near = (fmean(column) for column in zip(*map(_shares, heads), strict=True))
    few = sum(head.effective < FEW_KEYS for head in heads)
    fits = sum(abs(head.mass - 1) < NEAR_MASS for head in heads)
    change = result.sigmoid_change.value or 0.0
    advice = (
        "What to do: sigmoid attention can replace softmax here with a little training."
        if change < 0.1
        else "What to do: keep softmax on these weights; sigmoid attention has to be trained in."
    )
    return (
        f"Of a query's {significant(keys)} keys {significant(carry)} carry the mass; {few} of "
        f"{len(heads)} heads use fewer than 4. The two best keys nearly tie in {percent(near)} of "
        f"the rows. Sigmoid weights would sum to about 1 in {fits} of {len(heads)} heads. {advice}"
    )


def _shares(head: HeadView) -> tuple[float, float, float]:
    return head.seen, head.effective, head.near


def _facts_line(result: AttentionView) -> str:
    layers = len({head.layer for head in result.heads})
    sample = f"{result.tokens:,} tokens in {result.sequences} sequences"
    return f"{layers} layers, {len(result.heads)} heads · {sample}"


def _grid(result: AttentionView) -> Grid:
    labels = dict(zip(_layers(result.heads), short_names(_layers(result.heads)), strict=True))
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
    return Grid(HEAD, tuple(rows))


def _layers(heads: Sequence[HeadView]) -> list[str]:
    return list(dict.fromkeys(head.layer for head in heads))


def _draw(heads: Sequence[HeadView], axes: "Axes") -> None:
    layers = _layers(heads)
    positions = [layers.index(head.layer) for head in heads]
    left, right = [x - 0.12 for x in positions], [x + 0.12 for x in positions]
    effective = [head.effective for head in heads]
    mass = [head.mass for head in heads]
    axes.plot(left, effective, "o", color=ACCENT, markersize=4, label="keys that carry the mass")
    axes.plot(right, mass, "D", color=WARN, markersize=4, label="mass of sigmoid weights")
    axes.axhline(1, color=INK, linewidth=0.8)
    name_places(axes, short_names(layers))
    axes.set(yscale="log", ylabel="keys, or sum of weights")
    axes.legend(fontsize=6.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
