"""Charts are drawn alike by Plotly and by matplotlib."""

from dataclasses import replace

import pytest

from tieline.report.charts import Axis, Chart, Guide, Series, layer_colour
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.plotly_figures import plotly_depth_bar, plotly_figure


def test_colours_of_layers_run_from_first_to_last():
    assert [layer_colour(i, 3) for i in range(3)] == ["@ramp:0.000", "@ramp:0.500", "@ramp:1.000"]
    assert layer_colour(0, 1) == "@ramp:0.500"


def test_a_bar_of_colours_replaces_a_long_legend():
    assert plotly_depth_bar([str(i) for i in range(10)]) == []
    (bar,) = plotly_depth_bar([str(i) for i in range(11)])
    assert bar["marker"]["colorbar"]["ticktext"] == ["0", "5", "10"]


def test_only_logarithmic_axes_have_ticks_at_powers_of_ten():
    layout = plotly_figure(Chart(Axis("a", "log"), Axis("b")))["layout"]
    assert layout["xaxis"]["dtick"] == 1
    assert "dtick" not in layout["yaxis"]


POINTS = Series([1.0, 10.0], [0.5, None], "a", symbol="dash", hover="%{x}", details=["p", "q"])
ERRORS = Series([1.0, 10.0], [0.5, 0.25], "b", "@warn", errors=([0.1, 0.2], [0.3, 0.4]))
LINE = Series([1.0, 10.0], [0.1, 0.2], "layer 0", "@ramp:0.000", "line", dash="dot")
CHART = Chart(
    Axis("x", "log", limits=(1.0, 100.0)),
    Axis("y", percent=True, from_zero=True),
    (POINTS, ERRORS, LINE),
    guides=(Guide("x", 10.0, "ten", span=(5.0, 20.0)), Guide("y", 0.5, "half", colour="@warn")),
)


def test_a_chart_is_the_same_numbers_in_plotly_and_matplotlib():
    page, (axes,) = plotly_figure(CHART), chart_figure(CHART).axes
    # The page has shares in percent, paper as they are.
    assert [trace["y"] for trace in page["data"]] == [[50, None], [50, 25], [10, 20]]
    curves = [line for line in axes.lines if len(line.get_xdata()) == 2]
    heights = [list(line.get_ydata()) for line in curves]
    assert [0.1, 0.2] in heights
    assert [0.5, 0.25] in heights
    assert page["layout"]["xaxis"]["range"] == [0.0, 2.0]
    assert axes.get_xlim() == (1.0, 100.0)
    assert (axes.get_xscale(), page["layout"]["xaxis"]["type"]) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y")
    names = {note["text"] for note in page["layout"]["annotations"]}
    assert names == {text.get_text() for text in axes.texts} == {"ten", "half"}


def test_error_bars_reach_as_far_below_and_above_on_paper_as_on_the_page():
    trace = plotly_figure(CHART)["data"][1]
    assert (trace["error_y"]["array"], trace["error_y"]["arrayminus"]) == ([10, 20], [30, 40])
    (axes,) = chart_figure(CHART).axes
    (bars,) = axes.containers[0].lines[2]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [pytest.approx([0.2, 0.6]), pytest.approx([-0.15, 0.45])]


def test_many_layers_lose_their_names_on_the_page_and_others_keep_theirs():
    many = replace(CHART, layers=tuple(map(str, range(11))))
    shown = [trace["showlegend"] for trace in plotly_figure(many)["data"]]
    assert shown == [True, True, False, False]
    assert [trace["showlegend"] for trace in plotly_figure(CHART)["data"]] == [True] * 3


def test_bars_are_stacked_on_paper_as_on_the_page():
    bars = tuple(Series(["a", "b"], [1, None], str(i), kind="bar") for i in range(2))
    chart = Chart(Axis("x", "category"), Axis("y"), bars, stacked=True)
    assert plotly_figure(chart)["layout"]["barmode"] == "stack"
    (axes,) = chart_figure(chart).axes
    assert [bar.get_y() for bar in axes.patches] == [0.0, 0.0, 1.0, 0.0]
