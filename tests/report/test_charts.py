"""What all charts share: places on the page, one line about what is missing, colours."""

import pytest

from tieline.report.charts import Panel, axis, depth_bar, figure, layer_colour, unmeasured
from tieline.report.frame import arranged


def panel(key, wide=False, drawn=True):
    made = Panel(key, key.upper(), "How.", wide=wide)
    return made.drawn(figure([], 300)) if drawn else made.missing(["ok", "no scores", "no scores"])


@pytest.mark.parametrize(
    ("kinds", "wide"),
    [
        ("nn", [False, False]),
        ("nnn", [False, False, True]),
        ("nwn", [True, True, True]),
        ("nnwnn", [False, False, True, False, False]),
        ("w", [True]),
        ("", []),
    ],
)
def test_no_chart_stands_alone_beside_an_empty_place(kinds, wide):
    panels = [panel(str(i), kind == "w") for i, kind in enumerate(kinds)]
    assert [one.wide for one in arranged(panels)] == wide


def test_panels_without_a_chart_have_no_place():
    assert [one.key for one in arranged([panel("a"), panel("b", drawn=False)])] == ["a"]


def test_what_is_missing_is_one_line_with_each_reason_once():
    panels = [panel("a", drawn=False), panel("b"), panel("c", drawn=False)]
    other = Panel("d", "D", "How.").missing([])
    assert unmeasured(panels) == "“A”, “C” (no scores)"
    assert unmeasured([*panels, other]) == "“A”, “C” (no scores); “D” (no data)"
    assert unmeasured([panel("b")]) == ""


def test_colours_of_layers_run_from_first_to_last():
    assert [layer_colour(i, 3) for i in range(3)] == ["@ramp:0.000", "@ramp:0.500", "@ramp:1.000"]
    assert layer_colour(0, 1) == "@ramp:0.500"


def test_a_bar_of_colours_replaces_a_long_legend():
    assert depth_bar([str(i) for i in range(10)]) == []
    (bar,) = depth_bar([str(i) for i in range(11)])
    assert bar["marker"]["colorbar"]["ticktext"] == ["0", "5", "10"]


def test_only_logarithmic_axes_have_ticks_at_powers_of_ten():
    assert axis("a", "log")["dtick"] == 1
    assert "dtick" not in axis("a")
