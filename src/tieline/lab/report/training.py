"""A training run as page, figures, terminal view, summary and notebook view."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from tieline.report.drawing import ACCENT, NOTICE, WARN, canvas, percent_axis
from tieline.report.frame import notebook_html
from tieline.report.plain import Section, plain_page
from tieline.report.tables import Grid, flat
from tieline.report.words.numbers import duration, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tieline.lab.training.engine import TrainingResult


LOSSES = (("loss", "with the router's losses", ACCENT), ("task_loss", "of the task", WARN))
GAPS = (
    ("routing/gap_p50", "median", ACCENT),
    ("routing/gap_p10", "10 %", NOTICE),
    ("routing/gap_p1", "1 %", WARN),
)
FLIPS = (
    ("routing/flip_bf16", "flip in bf16", WARN),
    ("routing/near_bf16", "within a bf16 step of a tie", ACCENT),
)
"""Logged value, label and colour of each curve."""


def page(result: "TrainingResult") -> str:
    """The page: scores, curves of losses and routing, configuration."""
    drawn = {"loss": "Training loss", "routing": "Gaps and flips of the routing during training"}
    sections = [
        Section("Scores", pairs("score", result.scores)),
        *(
            Section(drawn[name], draw=draw, words=f"{drawn[name]} against the step")
            for name, draw in figures(result).items()
        ),
        Section("Configuration", pairs("setting", result.config), prose=True),
    ]
    return plain_page("training", result.recipe, _facts_line(result), sections)


def figures(result: "TrainingResult") -> "dict[str, Callable[[], Figure]]":
    """Return "loss", and "routing" if the run was monitored, against the step."""
    logged = {name for entry in result.history for name in entry}
    curves = {"loss": LOSSES, "routing": (*GAPS, *FLIPS)}
    draw = {"loss": _draw_losses, "routing": _draw_routing}
    return {
        name: partial(draw[name], result)
        for name, drawn_curves in curves.items()
        if logged & {field for field, _, _ in drawn_curves}
    }


def terminal(result: "TrainingResult", width: int) -> RenderableType:
    """Size, time, data, scores and folder, a line each."""
    head = [f"{result.recipe}, {_size_text(result)}", f"data  {result.data}"]
    where = [f"in    {result.folder}"] if result.folder else []
    return Text("\n".join([*head, *indented(result.scores), *where]))


def summary(result: "TrainingResult") -> str:
    """Recipe, size, time and data in a line."""
    return f"Training of {result.recipe}, {_facts_line(result)}"


def notebook(result: "TrainingResult") -> str:
    """Scores and curves."""
    scores = pairs("score", result.scores)
    return notebook_html(result.recipe, _facts_line(result), "", scores, figures(result))


def indented(record: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Nested fields as lines, each level indented; empty fields are left out."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}"
            yield from indented(value, indent + "  ")
        elif not _is_empty(value):
            yield f"{indent}{name}  {_text(value)}"


def pairs(heading: str, record: Mapping[str, Any]) -> Grid:
    """Nested fields as a table of dotted names and values; empty fields are left out."""
    rows = [(name, _text(value)) for name, value in flat(record) if not _is_empty(value)]
    return Grid((heading, "value"), tuple(rows))


def _facts_line(result: "TrainingResult") -> str:
    return f"{_size_text(result)} · {result.data}"


def _size_text(result: "TrainingResult") -> str:
    return (
        f"seed {result.seed}: {result.parameters:,} parameters, {result.steps} steps in "
        f"{duration(result.seconds)}"
    )


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], ())


def _text(value: Any) -> str:
    if isinstance(value, float):
        return significant(value, 5)
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return str(value)


def _draw_losses(result: "TrainingResult") -> "Figure":
    def draw(axes: "Axes") -> None:
        _draw_curves(axes, result, LOSSES)
        axes.set(xlabel="step", ylabel="loss")

    return canvas(draw)


def _draw_routing(result: "TrainingResult") -> "Figure":
    def draw(left: "Axes", right: "Axes") -> None:
        _draw_curves(left, result, GAPS)
        left.set(xlabel="step", ylabel="quantile of the gap", yscale="log")
        _draw_curves(right, result, FLIPS)
        right.set(xlabel="step", ylabel="share of tokens")
        percent_axis(right.yaxis)

    return canvas(draw, columns=2)


def _draw_curves(
    axes: "Axes", result: "TrainingResult", curves: tuple[tuple[str, str, str], ...]
) -> None:
    for name, label, colour in curves:
        if points := result.curve(name):
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, color=colour, marker="o", markersize=2.5, label=label)
    if axes.lines:
        axes.legend(fontsize=6.5)
