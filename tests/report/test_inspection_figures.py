"""The figures of an inspection: curves of the right numbers, and refusals of what is not known."""

import pytest

from tests.report.zoo import make_inspection
from tieline.core.errors import TraceError
from tieline.report.inspection import figures


def test_curves_are_the_profiles_and_counts_of_the_layers(result):
    left, right = figures(result)["routing"]().axes
    curves = [line for line in left.lines if line.get_linestyle() == "-"]
    assert len(left.lines) == len(curves) + 6  # one line for each format
    for place, layer in enumerate(result.measures.layers):
        profile = layer.gap.value.profile
        assert tuple(curves[place].get_xdata()) == profile.widths
        kept = [mass for mass in profile.mass if mass]
        drawn = curves[place].get_ydata()
        assert drawn[drawn == drawn].tolist() == kept
        counts = [count.value for count in layer.near.value.experts]
        assert right.lines[place].get_ydata().tolist() == counts
    assert left.get_xscale() == left.get_yscale() == right.get_xscale() == "log"
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in (left, right))
    assert right.get_legend().get_texts()[0].get_text() == "layer 0"


def test_flips_are_those_of_the_formats_fine_to_coarse(result):
    (axes,) = figures(result)["flips"]().axes
    for place, layer in enumerate(result.measures.layers):
        rows = sorted(layer.precision.value, key=lambda row: row.step)
        counted, predicted = axes.lines[2 * place : 2 * place + 2]
        known = [row.flip_emulated.value for row in rows]
        assert [y for y in counted.get_ydata() if y == y] == [y for y in known if y]
        known = [row.flip.value for row in rows]
        assert [y for y in predicted.get_ydata() if y == y] == [y for y in known if y]


def test_points_are_the_jumps_of_both_samples(result):
    (axes,) = figures(result)["jumps"]().axes
    for place, layer in enumerate(result.jumps):
        others, near = axes.collections[2 * place : 2 * place + 2]
        assert near.get_offsets()[:, 1].tolist() == pytest.approx(layer.value.near.jumps)
        assert others.get_offsets()[:, 1].tolist() == pytest.approx(layer.value.random.jumps)
        assert near.get_offsets()[:, 0].min() > 0  # exact ties have a place too


def test_the_load_is_relative_to_an_even_one_and_the_dead_are_crossed(result):
    axes, _ = figures(result)["load"]().axes
    cells = axes.images[0].get_array()
    for row, layer in zip(cells, result.measures.layers, strict=True):
        for shown, share in zip(row, layer.load.share, strict=True):
            assert 2**shown == pytest.approx(share * 8, rel=0.004) if share else shown == -3
    crosses = axes.collections[0].get_offsets().tolist()
    assert crosses == [[e, y] for y, x in enumerate(result.measures.layers) for e in x.load.dead]


def test_many_layers_get_a_bar_of_colours_and_few_a_legend():
    drawn = figures(make_inspection(layers=9, tokens=40))
    for name in ("routing", "gaps", "near", "flips", "jumps"):
        many = drawn[name]()
        assert [axes.get_ylabel() for axes in many.axes][-1] == "layer"
        assert all(axes.get_legend() is None for axes in many.axes)


@pytest.mark.parametrize("name", ["routing", "gaps", "near", "flips", "jumps"])
def test_what_the_result_does_not_hold_is_refused_with_the_reason(ids_only, name):
    with pytest.raises(TraceError, match=r"no figure without .*: not answerable"):
        figures(ids_only)[name]()


def test_every_figure_has_a_name_and_can_be_asked_for_by_it(result):
    assert list(figures(result)) == ["routing", "gaps", "near", "flips", "jumps", "load"]
    assert result.plot("gaps").axes[0].get_xlabel() == "gap (logits)"
    with pytest.raises(ValueError, match="no figure 'gap'; the figures are: routing, gaps, near"):
        result.plot("gap")
