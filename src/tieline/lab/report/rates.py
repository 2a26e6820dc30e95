"""Report of a rate study: figure and table.

The figure shows the loss as the paper defines it, the same without the directions that the data
cannot determine, and the distance of the functions, against the sample size, one colour per start
radius. Bars are two standard errors of the mean. Sample sizes below the number of parameters, where
a ridge picks the fit, are points without a line.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from tieline.lab.estimation.rates import LossSeries, RateStudy
from tieline.report.matplotlib_figures import styled_figure
from tieline.report.result_views import Report, Section, report_views
from tieline.report.tables import Grid, grid_table, uniform_numbers
from tieline.report.words.numbers import DASH, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_TERMINAL_SIZES = 3
"""Largest number of sample sizes that a terminal shows."""
LOSS_NAMES = {"raw": "raw", "quotient": "quotient", "function": "‖f − f*‖", "experts": "experts"}
LOSS_PANELS = (
    ("raw", "raw loss"),
    ("quotient", "quotient loss"),
    ("function", "$\\|f-f^*\\|$ in $L^2(\\mu)$"),
)
MARKERS = "oDsv^P"


def _rates_report(result: RateStudy) -> Report:
    """Build the report: figure, slopes with all sample sizes, and notes on the fits."""
    table = _slope_table(result, result.sizes)
    draw = partial(_rates_figure, result)
    caption = "Mean losses with fitted power laws, one panel per loss, one colour per start"
    return Report(
        kind="rates",
        name="Rates",
        title=result.name,
        facts=_rates_facts(result),
        verdict=_rates_verdict(result),
        table=lambda: table,
        body=lambda: {
            "sections": [
                Section("Losses against the sample size", draw=draw, caption=caption),
                Section("Slopes", table, notes=_fit_notes(result)),
            ]
        },
        below=partial(_rates_terminal, result),
        figures={"rates": draw},
    )


def _rates_terminal(result: RateStudy, width: int) -> list[RenderableType]:
    """Return the slopes with a few sample sizes, and the notes on the fits, for a terminal."""
    last = len(result.sizes) - 1
    indices = sorted(
        {round(last * step / (MAX_TERMINAL_SIZES - 1)) for step in range(MAX_TERMINAL_SIZES)}
    )
    table = _slope_table(result, [result.sizes[index] for index in indices])
    return [grid_table(table, left_aligned=2), Text("\n".join(_fit_notes(result)))]


page, figures, terminal, summary, notebook = report_views(_rates_report)


def _rates_facts(result: RateStudy) -> str:
    """Return one line with model, sizes, repetitions, noise and loss."""
    model = result.model
    fitted, true = model.n_experts, result.true_experts
    facts = [
        f"{model.gate} {model.link}, {model.expert} experts",
        f"d {model.d}",
        f"{fitted} experts" if fitted == true else f"{fitted} experts for {true}",
        f"{model.parameters} parameters",
        f"{result.repetitions} repetitions",
        f"noise {result.noise:g}",
        f"loss {result.loss} of paper {result.paper}",
    ]
    if result.condition is not None:
        facts.append(f"condition {result.condition:,.0f}")
    return " · ".join(facts)


def _rates_verdict(result: RateStudy) -> str:
    """State the slope of the quotient loss from the first start, and the required sample size."""
    rated = ((s.start, s.rate) for s in result.series if s.loss == "quotient" and s.rate)
    start, rate = next(rated, ("", None))
    verdict = "No slope: fewer than two sample sizes determine the fit."
    if rate is not None:
        verdict = (
            f"From starts with {start} the quotient loss falls like n^{rate.slope:.2f} "
            f"(95 % interval {rate.low:.2f} to {rate.high:.2f}); the parametric rate is n^-0.50."
        )
    if result.sample_size is not None:
        verdict += f" With this router and these experts, {result.sample_size.words}."
    return verdict


def _slope_table(result: RateStudy, sizes: Sequence[int]) -> Grid:
    """Return one row per loss and start, with the mean losses at the given sample sizes."""
    head = ("loss", "start", "slope", "95 % interval", *(f"n={n:,}" for n in sizes))
    rows = tuple(_slope_row(series, sizes) for series in result.series)
    return Grid(head, rows, quantities="rows")  # the losses are of different sizes


def _slope_row(series: LossSeries, sizes: Sequence[int]) -> tuple[str, ...]:
    """Return loss, start, slope, interval and the mean losses at the given sample sizes."""
    means = dict(zip(series.sizes, series.mean, strict=True))
    cells = uniform_numbers([significant(means[n], 2) if n in means else DASH for n in sizes])
    rate = series.rate
    slope = DASH if rate is None else f"{rate.slope:.2f}"
    interval = DASH if rate is None else f"{rate.low:.2f} to {rate.high:.2f}"
    return LOSS_NAMES[series.loss], series.start, slope, interval, *cells


def _fit_notes(result: RateStudy) -> list[str]:
    """Return notes on the fits by outcome, the paper's slope, failures and warnings."""
    outcomes = ", ".join(f"{count} {name}" for name, count in result.status.items())
    notes = [f"{result.problems} fits: {outcomes}; {result.cpu_seconds:.1f} s of CPU time"]
    notes += _experts_advice_notes(result)
    if result.paper_slope is not None:
        notes.append(f"the paper reports a slope of {result.paper_slope:.2f} for the raw loss")
    if result.failed:
        notes.append(f"{result.failed} of {result.problems} fits did not converge")
    if result.ridge.words:
        notes.append(f"warning: {result.ridge.words}")
    if result.empty_cells:
        notes.append(
            f"in {result.empty_cells} fits a true expert has an empty cell: it adds only its mass "
            "to the loss"
        )
    if not result.well_specified:
        notes.append(
            "the model does not contain the truth: losses are against the population minimiser, "
            f"‖f − q‖ = {significant(result.misfit)}"
        )
    return notes


SEPARABLE = ("tanh", "gelu")
"""Experts whose sums are not experts of the same kind: a spare expert can be identified."""


def _experts_advice_notes(result: RateStudy) -> list[str]:
    """State what the number of fitted experts means for predictions and for single experts."""
    spare = result.model.n_experts - result.true_experts
    if not result.well_specified or spare < 0:
        return []
    if spare == 0:
        return [
            "as many experts as the truth: predictions and every expert improve like n^(-1/2), so "
            "half the error takes four times the samples"
        ]
    single = "are not determined by any number of samples: two of them can make one"
    if result.model.expert in SEPARABLE:
        single = (
            "improve like n^(-1/4) at best, so half their error takes sixteen times the samples"
        )
    return [
        f"{spare} spare expert{'s' * (spare > 1)}: predictions still improve like n^(-1/2); the "
        f"single experts {single}. To read them, fit as many as there are: compare numbers of "
        "experts by a held-out loss"
    ]


def _rates_figure(result: RateStudy) -> "Figure":
    """Draw mean losses with error bars and fitted lines on log-log axes."""

    def draw(*panels: "Axes") -> None:
        for axes, (loss, title) in zip(panels, LOSS_PANELS, strict=True):
            _draw_loss_panel(axes, [s for s in result.series if s.loss == loss and s.mean], result)
            heading = title if loss == "function" else f"{title} {result.loss}"
            axes.set_title(heading, fontsize=8)

    figure = styled_figure(draw, columns=3, height=3.2)
    headline = f"{result.name}: {result.repetitions} repetitions, noise {result.noise:g}"
    headline += f", {result.failed} of {result.problems} not converged" if result.failed else ""
    ridge_sizes = ", ".join(f"{n:,}" for n in result.ridge.sizes)
    figure.suptitle(
        headline + (f", a ridge at n = {ridge_sizes}" if ridge_sizes else ""), fontsize=8
    )
    # more room below: the layout underestimates that of the legends
    figure.set_layout_engine("constrained", rect=(0, 0.04, 1, 0.96))
    return figure


def _draw_loss_panel(axes: "Axes", series: Sequence[LossSeries], result: RateStudy) -> None:
    """Draw the curves of one loss, guides of its slopes, and a legend."""
    for curve, colour, marker in zip(
        series, _start_colours(len(series)), MARKERS * 9, strict=False
    ):
        _draw_loss_series(axes, curve, result.ridge.sizes, colour, marker)
    _draw_guides(axes, series, result.paper_slope)
    axes.set(xscale="log", yscale="log", xlabel="sample size n")
    _write_decimal_ticks(axes)
    axes.legend(fontsize=5.8, loc="upper center", bbox_to_anchor=(0.5, -0.24), handlelength=1.4)


def _draw_loss_series(
    axes: "Axes", series: LossSeries, ridge: Sequence[int], colour: Any, marker: str
) -> None:
    """Draw points with bars, and the fitted line over the sizes without a ridge."""
    bars = [2 * error for error in series.stderr]
    below = [min(bar, 0.9 * mean) for bar, mean in zip(bars, series.mean, strict=True)]
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3.5}
    axes.errorbar(
        series.sizes,
        series.mean,
        [below, bars],
        capsize=2,
        linewidth=0.8,
        linestyle="none",
        **style,
    )
    label, rate, line_style = f"start {series.start}", series.rate, "none"
    if rate is not None:
        fair = [n for n in series.sizes if n not in ridge]
        line = [math.exp(rate.intercept) * n**rate.slope for n in fair]
        axes.plot(fair, line, color=colour, linewidth=0.9)
        label += f": {rate}"
        line_style = "-"
    axes.plot([], [], label=label.replace("-", "−"), linewidth=0.9, linestyle=line_style, **style)


def _draw_guides(axes: "Axes", series: Sequence[LossSeries], paper_slope: float | None) -> None:
    """Draw the parametric slope, and the slope that the paper reports."""
    if not series:
        return
    n, top = series[0].sizes, max(curve.mean[0] for curve in series)
    guides = [("$n^{-1/2}$", -0.5, "--")]
    if paper_slope is not None and series[0].loss == "raw":
        guides.append((f"paper: {paper_slope:.2f}".replace("-", "−"), paper_slope, ":"))
    for label, slope, style in guides:
        line = [1.5 * top * (x / n[0]) ** slope for x in n]
        axes.plot(n, line, color="0.45", linestyle=style, linewidth=0.8, label=label)


def _write_decimal_ticks(axes: "Axes") -> None:
    """Write ticks as decimals at 1, 2 and 5, since a panel may span less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for axis, text in ((axes.xaxis, "{x:,.0f}"), (axes.yaxis, "{x:g}")):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter(text))
        axis.set_minor_formatter(NullFormatter())


def _start_colours(count: int) -> list[Any]:
    """Return one colour per start radius."""
    from matplotlib import colormaps

    steps = [index / (count - 1) if count > 1 else 0.0 for index in range(count)]
    return [colormaps.get_cmap("plasma")(0.05 + 0.75 * step) for step in steps]
