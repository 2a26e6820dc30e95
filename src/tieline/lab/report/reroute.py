"""A rerouted model as page, terminal view, summary, notebook view and figure."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tieline.core.statistics import Estimate
from tieline.lab.on_model.reroute import Rerouted, ReroutedLayer
from tieline.report.drawing import ACCENT, INK, WARN, name_places, percent_axis, small_canvas
from tieline.report.frame import notebook_html
from tieline.report.tables import Grid, short_names, text_table, view
from tieline.report.words.numbers import DASH, finite, percent, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAD = ("layer", "kept", "fit", "t", "gap", "new gap", "flips", "new flips")
CONTINUOUS = 1e-3
"""Jump of a score at the zero vector below which it is called continuous there."""

NAMES = {
    "cosine": "plain cosine router",
    "perturbed": "perturbed cosine router",
    "linear": "linear router",
    "quadratic": "quadratic router",
}


def page(result: Rerouted) -> str:
    """The page: what was kept and paid, layer by layer."""
    from tieline.report.plain import Section, plain_page

    caption = "Share of experts kept in each layer, and tokens that bf16 flips before and after."
    sections = [
        Section("Layers", _layers(result), notes=reroute_facts(result)),
        Section("Choices kept and bf16 flips", draw=partial(_layers_figure, result), words=caption),
    ]
    return plain_page("rerouting", result.model, _facts_line(result), sections, _verdict(result))


def terminal(result: Rerouted, width: int) -> RenderableType:
    """Facts, one row per layer, and what it means."""
    grid = _layers(result)
    table = Padding(text_table(grid.head, grid.rows), (0, 0, 1, 0))
    sentences = map(Text, reroute_facts(result))
    return view(result.model, _facts_line(result), _verdict(result), table, *sentences)


def summary(result: Rerouted) -> str:
    """Name, router and verdict in plain lines."""
    return f"Rerouting of {result.model}\n{_facts_line(result)}\n{_verdict(result)}"


def notebook(result: Rerouted) -> str:
    """Verdict, table and figure as a piece of HTML."""
    return notebook_html(
        result.model, _facts_line(result), _verdict(result), _layers(result), figures(result)
    )


def figures(result: Rerouted) -> "dict[str, Callable[[], Figure]]":
    """Figures by name: choices kept and flips, layer by layer."""
    return {"layers": partial(_layers_figure, result)}


def _layers_figure(result: Rerouted) -> "Figure":
    return small_canvas(partial(_draw, result.layers))


def reroute_facts(result: Rerouted) -> list[str]:
    """Sentences: choices, loss, distance, the zero vector, and the sample."""
    zero = max((layer.at_zero for layer in result.layers), default=0.0)
    jump = (
        f"Scores are continuous at the zero vector (largest change {significant(zero, 2)} at a "
        "distance of 1e-6)."
        if zero < CONTINUOUS
        else f"Scores jump by up to {significant(zero)} at the zero vector, whose direction is not "
        "defined."
    )
    moved = [layer for layer in result.layers if layer.fit.steps]
    rest = len(moved) < len(result.layers)
    return [
        f"Loss: {significant(result.loss.value, 5)} before, changed by "
        f"{_signed_text(result.loss_change)} nats per token.",
        f"The predictions moved by KL {significant(result.moved.value)}.",
        jump,
        f"Rows were fitted in {len(moved)} of {len(result.layers)} layers"
        + ("; in the others the start already ranks all experts as before." if rest else "."),
        f"kept: share of a token's experts that both models choose; fit: divergence of the new "
        f"weights from the old on {result.fit_tokens:,} tokens, in nats; t: temperature; gap: "
        f"median; flips: tokens whose experts change if bf16 rounds the scores; measured on "
        f"{result.tokens:,} tokens in {result.sequences} sequences; ± is the standard error.",
    ]


def _verdict(result: Rerouted) -> str:
    kept = _share_text(result.kept.value)
    change = _signed_text(result.loss_change)
    start = f"The {NAMES[result.router]} keeps {kept} of the choices; the loss changes by {change}"
    small = abs(result.loss_change.value or 0.0) < 0.01
    advice = (
        "What to do: use it as it is, or train on from it."
        if small
        else "What to do: train it on before use, or fit to more of your own text (--fit, --steps)."
    )
    return f"{start} nats. {advice}"


def _facts_line(result: Rerouted) -> str:
    options = ", ".join(f"{name} {value}" for name, value in result.options.items())
    return (
        f"{NAMES[result.router]}{f' ({options})' if options else ''}, {len(result.layers)} layers"
    )


def _layers(result: Rerouted) -> Grid:
    labels = short_names([layer.name for layer in result.layers])
    rows = (
        (
            label,
            _share_text(layer.kept.value),
            significant(layer.fit.loss, 2),
            significant(layer.fit.temperature),
            significant(layer.gap_before),
            significant(layer.gap_after),
            percent(layer.flips_before),
            percent(layer.flips_after),
        )
        for label, layer in zip(labels, result.layers, strict=True)
    )
    return Grid(HEAD, tuple(rows))


def _share_text(share: float | None) -> str:
    """A share near 1, whose distance to 1 counts."""
    return DASH if finite(share) is None else f"{share:.2%}".replace("%", " %")


def _signed_text(estimate: Estimate) -> str:
    text = DASH if finite(estimate.value) is None else f"{estimate.value:+.5f}"
    error = finite(estimate.standard_error)
    return text if error is None else f"{text} ± {error:.5f}"


def _draw(layers: Sequence[ReroutedLayer], axes: "Axes") -> None:
    positions = range(len(layers))
    series = (
        ("choices lost", [1 - (layer.kept.value or 0.0) for layer in layers], INK, "s"),
        ("bf16 flips before", [layer.flips_before for layer in layers], WARN, "o"),
        ("bf16 flips after", [layer.flips_after for layer in layers], ACCENT, "D"),
    )
    for name, values, colour, marker in series:
        points = [(x, y) for x, y in zip(positions, values, strict=True) if y is not None]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, marker, color=colour, markersize=4, label=name, clip_on=False)
    name_places(axes, short_names([layer.name for layer in layers]))
    axes.set_ylabel("share of tokens")
    axes.set_ylim(bottom=0)
    percent_axis(axes.yaxis)
    axes.legend(fontsize=6.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
