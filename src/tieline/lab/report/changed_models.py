"""Reports of a rerouted and of an upcycled model: chart and table.

UPCYCLED    views of an upcycled model; those of a rerouted one are names of the module
"""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from tieline.core.text import short_names
from tieline.lab.on_model.reroute import Rerouted, ReroutedLayer
from tieline.lab.on_model.upcycle import Upcycled
from tieline.report.charts import Axis, Chart, Series, layer_axis
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.result_views import Report, Section, line_views, report_views
from tieline.report.tables import Grid, grid_table
from tieline.report.words.numbers import percent, signed, significant

REROUTED_HEADINGS = ("layer", "kept", "fit", "t", "gap", "new gap", "flips", "new flips")
MAX_CONTINUOUS_JUMP = 1e-3
"""Jump of a score at the zero vector below which it counts as continuous there."""

ROUTER_NAMES = {
    "cosine": "plain cosine router",
    "perturbed": "perturbed cosine router",
    "linear": "linear router",
    "quadratic": "quadratic router",
}


def _reroute_report(result: Rerouted) -> Report:
    """Build the report of a rerouting: choices kept, loss and flips, layer by layer."""
    table, sentences = _rerouted_layer_table(result), reroute_sentences(result)
    caption = "Share of experts kept in each layer, and tokens that bf16 flips before and after."

    def draw() -> Any:
        return chart_figure(_reroute_chart(result.layers))

    return Report(
        kind="rerouting",
        name="Rerouting",
        title=result.model,
        facts=_reroute_facts(result),
        verdict=_reroute_verdict(result),
        table=lambda: table,
        body=lambda: {
            "sections": [
                Section("Layers", table, notes=sentences),
                Section("Choices kept and bf16 flips", draw=draw, caption=caption),
            ]
        },
        below=lambda width: [grid_table(table), *map(Text, sentences)],
        figures={"layers": draw},
    )


page, figures, terminal, summary, notebook = report_views(_reroute_report)


def reroute_sentences(result: Rerouted) -> list[str]:
    """Write sentences on loss, KL, the zero vector, the fit and the columns of the table."""
    zero = max((layer.at_zero for layer in result.layers), default=0.0)
    jump = (
        f"Scores are continuous at the zero vector (largest change {significant(zero, 2)} at a "
        "distance of 1e-6)."
        if zero < MAX_CONTINUOUS_JUMP
        else f"Scores jump by up to {significant(zero)} at the zero vector, whose direction is not "
        "defined."
    )
    moved = [layer for layer in result.layers if layer.fit.steps]
    unfitted = len(moved) < len(result.layers)
    return [
        f"Loss: {significant(result.loss.value, 5)} before, changed by "
        f"{signed(result.loss_change, '.5f', '.5f')} nats per token.",
        f"The predictions moved by KL {significant(result.moved.value)}.",
        jump,
        f"Rows were fitted in {len(moved)} of {len(result.layers)} layers"
        + ("; in the others the start already ranks all experts as before." if unfitted else "."),
        f"kept: share of a token's experts that both models choose; fit: divergence of the new "
        f"weights from the old on {result.fit_tokens:,} tokens, in nats; t: temperature; gap: "
        f"median; flips: tokens whose experts change if bf16 rounds the scores; measured on "
        f"{result.tokens:,} tokens in {result.sequences} sequences; ± is the standard error.",
    ]


def _reroute_verdict(result: Rerouted) -> str:
    """State how many choices the new router keeps, the change of the loss, and what to do."""
    kept = percent(result.kept.value, 4)
    change = signed(result.loss_change, ".5f", ".5f")
    router = ROUTER_NAMES[result.router]
    small = abs(result.loss_change.value or 0.0) < 0.01
    advice = (
        "What to do: use it as it is, or train on from it."
        if small
        else "What to do: train it on before use, or fit to more of your own text (--fit, --steps)."
    )
    return f"The {router} keeps {kept} of the choices; the loss changes by {change} nats. {advice}"


def _reroute_facts(result: Rerouted) -> str:
    """Return one line with the router, its options and the number of layers."""
    options = ", ".join(f"{name} {value}" for name, value in result.options.items())
    router = ROUTER_NAMES[result.router]
    return f"{router}{f' ({options})' if options else ''}, {len(result.layers)} layers"


def _rerouted_layer_table(result: Rerouted) -> Grid:
    """Return one row per layer: choices kept, fit, gaps and bf16 flips before and after."""
    labels = short_names([layer.name for layer in result.layers])
    rows = (
        (
            label,
            percent(layer.kept.value, 4),
            significant(layer.fit.loss, 2),
            significant(layer.fit.temperature),
            significant(layer.gap_before),
            significant(layer.gap_after),
            percent(layer.flips_before),
            percent(layer.flips_after),
        )
        for label, layer in zip(labels, result.layers, strict=True)
    )
    return Grid(REROUTED_HEADINGS, tuple(rows))


def _reroute_chart(layers: Sequence[ReroutedLayer]) -> Chart:
    """Chart choices lost and bf16 flips before and after, layer by layer."""
    positions = range(len(layers))
    series = (
        Series(
            positions,
            [1 - (layer.kept.value or 0.0) for layer in layers],
            "choices lost",
            "@ink",
            symbol="square",
        ),
        Series(positions, [layer.flips_before for layer in layers], "bf16 flips before", "@warn"),
        Series(
            positions, [layer.flips_after for layer in layers], "bf16 flips after", symbol="diamond"
        ),
    )
    shares = Axis("share of tokens", percent=True, from_zero=True)
    return Chart(layer_axis(short_names([layer.name for layer in layers])), shares, series)


def _upcycled_lines(result: Upcycled) -> list[str]:
    """Return lines on the mixtures, parameters, change of outputs and loss of an upcycled model."""
    lines = [
        f"{len(result.layers)} networks became mixtures of {result.n_experts} experts, "
        f"top-{result.k}",
        f"parameters: {result.parameters_before:,} before, {result.parameters_after:,} after, "
        f"{result.parameters_per_token:,} per token",
        f"largest change of an output, relative: {result.output_change:.1e}",
    ]
    before, after = result.loss_before, result.loss_after
    if before is not None and after is not None:
        error = "" if before.error is None else f" (± {before.error:.4f} over sequences)"
        lines.append(
            f"loss on {before.tokens:,} tokens: {before.value:.6f} before, {after.value:.6f} after"
            f"{error}"
        )
    return lines


UPCYCLED = line_views(_upcycled_lines)
