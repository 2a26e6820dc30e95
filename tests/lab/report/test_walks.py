"""Walks to the first flip on the page and in words."""

from dataclasses import replace

import pytest

from tests.lab.report.zoo import make_walks
from tieline.lab.report.walks import figures, notebook, page, summary, terminal, walk_table


@pytest.fixture(scope="module")
def result():
    return make_walks()


def test_the_verdict_names_the_layer_that_flips_first(result):
    assert "within 420 roundings" in summary(result)
    assert "within 420" in page(result)
    assert terminal(result, 80)


def test_walks_stand_between_their_bounds(result):
    (axes,) = figures(result)["walks"]().axes
    lines = [list(line.get_ydata()) for line in axes.lines]
    assert len(lines) == 6  # two layers with flat walls: value and two bounds
    for value, lower, upper in (lines[:3], lines[3:]):
        rows = zip(lower, value, upper, strict=True)
        assert all(low <= share <= high for low, share, high in rows)
    assert notebook(result).count("<img") == 1


def test_a_layer_without_flat_walls_says_why(result):
    assert "chosen within groups" in walk_table(result).rows[-1][1]
    nothing = replace(result, layers=(), status="not measured: the model runs in bfloat16")
    assert "runs in bfloat16" in page(nothing)
    assert "runs in bfloat16" in summary(nothing)
    assert notebook(nothing)
