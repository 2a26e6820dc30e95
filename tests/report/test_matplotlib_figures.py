"""Files of figures: whole, of the format that the name says, the same bytes each time."""

import base64
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.text import Text

from tests.report.zoo import HOSTILE
from tieline.core.errors import ParameterError
from tieline.core.text import printable_line
from tieline.report.charts import Axis, Chart, Guide, Heat, Series
from tieline.report.matplotlib_figures import (
    chart_figure,
    check_figure_path,
    figure_bytes,
    inline_image,
    styled_figure,
)

MAGIC = {".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<?xml"}


def drawn():
    return styled_figure(lambda left, right: (left.plot([1, 2]), right.plot([2, 1])), columns=2)


@pytest.mark.parametrize("suffix", list(MAGIC))
def test_the_file_is_what_its_name_says_and_the_same_each_time(tmp_path, suffix):
    data = figure_bytes(drawn, tmp_path / f"a{suffix}")
    assert data.startswith(MAGIC[suffix])
    assert b"CreationDate" not in data
    assert b"dc:date" not in data
    assert data == figure_bytes(drawn, tmp_path / f"a{suffix}")


def test_other_formats_are_refused_before_anything_is_drawn(tmp_path):
    with pytest.raises(ParameterError, match=r"got .a\.jpg."):
        check_figure_path(tmp_path / "a.jpg")
    with pytest.raises(ParameterError, match=r"got .a\.jpg."):
        figure_bytes(lambda: pytest.fail("drawn"), tmp_path / "a.jpg")


@pytest.mark.parametrize(("kind", "type_"), [("svg", "svg+xml"), ("png", "png")])
def test_an_inline_image_is_the_file_in_an_address(kind, type_):
    head, _, code = inline_image(drawn, kind).partition(",")
    assert head == f"data:image/{type_};base64"
    assert base64.b64decode(code).startswith(MAGIC[f".{kind}"])


def test_text_stays_text():
    svg = figure_bytes(
        lambda: styled_figure(lambda axes: axes.set_title("gap below ε")), _path("a.svg")
    )
    assert "gap below ε".encode() in svg


def _path(name):
    from pathlib import Path

    return Path(name)


@given(st.text(max_size=12) | st.sampled_from(HOSTILE))
@example("$x^{$ \\frac")
@example("\x1b[31m\u202e\n$")
def test_names_from_outside_are_shown_as_text(name):
    values = Series([name, "b"], [1.0, 2.0], name, kind="bar")
    heat = Heat([0, 1], [name, "b"], [[0.0, 1.0], [1.0, 2.0]], "gap", name, {1.0: name})
    lines = Chart(Axis(name, "category"), Axis(name), (values,), guides=(Guide("y", 1.0, name),))
    for chart in (lines, Chart(Axis("x"), Axis("y"), heat=heat)):
        drawn = chart_figure(chart)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph|.*missing from", UserWarning)
            drawn.canvas.draw()
        texts = [text.get_text() for text in drawn.findobj(Text)]
        assert all(text == printable_line(text) for text in texts)


def test_an_axis_of_whole_numbers_has_ticks_at_whole_numbers():
    def ticks(numbers):
        chart = Chart(Axis("step"), Axis("loss"), (Series(numbers, [0.0] * len(numbers)),))
        return chart_figure(chart, width=6.75, height=2.6).axes[0].get_xticks()

    assert all(float(tick).is_integer() for tick in ticks([0, 1, 2]))
    assert not all(float(tick).is_integer() for tick in ticks([0.0, 1.0, 2.0]))
