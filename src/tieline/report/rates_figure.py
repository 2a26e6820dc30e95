"""A rate study as a figure: losses against sample size, one colour for each start radius.

Three panels: the loss as the paper defines it, the same without the directions that the data cannot
see, and the distance of the functions. Bars are two standard errors of the mean. Fewer samples than
parameters, where a ridge picks the fit, are points without a line.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieline.report.figures import STYLE, drawn_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["rates_figure", "rates_figure_bytes"]

PANELS = (
    ("raw", "raw loss"),
    ("quotient", "quotient loss"),
    ("function", "$\\|f-f^*\\|$ in $L^2(\\mu)$"),
)
MARKERS = "oDsv^P"


def rates_figure(study: Mapping[str, Any]) -> "Figure":
    """Means with bars and fitted lines, log-log, 6.75 inches wide.

    Args:
        study: `RateStudy.to_dict()`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.75, 3.1), layout="constrained")
        for axes, (loss, title) in zip(figure.subplots(1, 3), PANELS, strict=True):
            series = [one for one in study["series"] if one["loss"] == loss and one["mean"]]
            _draw(axes, series, study)
            axes.set_title(_named(title, loss, study), fontsize=8)
        figure.suptitle(_headline(study), fontsize=8)
    return figure


def rates_figure_bytes(study: Mapping[str, Any], path: Path) -> bytes:
    """The figure in the format that the path's suffix names; the same bytes for the same study."""
    return drawn_bytes(lambda: rates_figure(study), path, dpi=200)


def _named(title: str, loss: str, study: Mapping[str, Any]) -> str:
    return f"{title} {study['loss']}" if loss != "function" else title


def _headline(study: Mapping[str, Any]) -> str:
    failed = study["failed"]
    words = f"{study['name']}: {study['repetitions']} repetitions, noise {study['noise']:g}"
    words += f", {failed} of {study['problems']} not converged" if failed else ""
    few = ", ".join(f"{n:,}" for n in study["ridge"]["sizes"])
    return words + (f", a ridge at n = {few}" if few else "")


def _draw(axes: "Axes", series: Sequence[Mapping[str, Any]], study: Mapping[str, Any]) -> None:
    for one, colour, marker in zip(series, _colours(len(series)), MARKERS * 9, strict=False):
        n, mean = one["sizes"], one["mean"]
        bars = [2 * error for error in one["stderr"]]
        below = [min(bar, 0.9 * m) for bar, m in zip(bars, mean, strict=True)]
        style = {"color": colour, "marker": marker, "markersize": 3.5, "linestyle": "none"}
        axes.errorbar(n, mean, [below, bars], capsize=2, linewidth=0.8, **style)
        rate, label = one["rate"], f"start {one['start']}"
        if rate is not None:
            fair = [x for x in n if x not in study["ridge"]["sizes"]]
            line = [math.exp(rate["intercept"]) * x ** rate["slope"] for x in fair]
            label += f": {rate['slope']:.2f} [{rate['low']:.2f}, {rate['high']:.2f}]"
            axes.plot(fair, line, color=colour, linewidth=0.9)
        dots = style | {"linestyle": "-" if rate is not None else "none", "linewidth": 0.9}
        axes.plot([], [], label=label.replace("-", "−"), **dots)
    _guides(axes, series, study)
    axes.set(xscale="log", yscale="log", xlabel="sample size n")
    _name_ticks(axes)
    axes.legend(fontsize=5.8, loc="upper center", bbox_to_anchor=(0.5, -0.24), handlelength=1.4)


def _guides(axes: "Axes", series: Sequence[Mapping[str, Any]], study: Mapping[str, Any]) -> None:
    """The parametric slope, and the slope that the paper reports."""
    if not series:
        return
    n, top = series[0]["sizes"], max(one["mean"][0] for one in series)
    guides = [("$n^{-1/2}$", -0.5, "--")]
    if study["paper_slope"] is not None and series[0]["loss"] == "raw":
        words = f"paper: {study['paper_slope']:.2f}".replace("-", "−")
        guides.append((words, study["paper_slope"], ":"))
    for label, slope, style in guides:
        line = [1.5 * top * (x / n[0]) ** slope for x in n]
        axes.plot(n, line, color="0.45", linestyle=style, linewidth=0.8, label=label)


def _name_ticks(axes: "Axes") -> None:
    """Losses as plain decimals at 1, 2 and 5: a panel may span less than a power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    steps = [place / (count - 1) if count > 1 else 0.0 for place in range(count)]
    return [colormaps["plasma"](0.05 + 0.75 * step) for step in steps]
