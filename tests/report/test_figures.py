"""The figure for papers: curves of the right numbers, whole files, and the same bytes each time."""

import pytest

from tests.report.zoo import make_inspection
from tieline.core.errors import ParameterError, TraceError
from tieline.report.figures import check_figure_path, routing_figure, write_figure

MAGIC = {".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<?xml"}


def test_curves_are_the_profiles_and_counts_of_the_layers(result):
    left, right = routing_figure(result).axes
    curves = [line for line in left.lines if line.get_linestyle() == "-"]
    assert len(left.lines) == len(curves) + 6  # one line for each format
    for place, layer in enumerate(result["measures"]["layers"]):
        profile = layer["gap"]["value"]["profile"]
        assert curves[place].get_xdata().tolist() == profile["widths"]
        kept = [mass for mass in profile["mass"] if mass]
        drawn = curves[place].get_ydata()
        assert drawn[drawn == drawn].tolist() == kept
        near = layer["near"]["value"]
        counts = [count["value"] for count in near["experts"]]
        assert right.lines[place].get_ydata().tolist() == counts
    assert left.get_xscale() == left.get_yscale() == right.get_xscale() == "log"
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in (left, right))
    assert right.get_legend().get_texts()[0].get_text() == "layer 0"


def test_many_layers_get_a_bar_of_colours_and_few_a_legend():
    many = routing_figure(make_inspection(layers=9, tokens=40).to_dict())
    assert [axes.get_ylabel() for axes in many.axes][-1] == "layer"
    assert many.axes[1].get_legend() is None


@pytest.mark.parametrize("suffix", list(MAGIC))
def test_the_file_is_what_its_name_says(result, tmp_path, suffix):
    write_figure(result, tmp_path / f"a{suffix}")
    data = (tmp_path / f"a{suffix}").read_bytes()
    assert data.startswith(MAGIC[suffix])
    assert b"CreationDate" not in data  # the same result gives the same bytes
    assert b"dc:date" not in data


def test_other_formats_and_results_without_gaps_are_refused(ids_only, result, tmp_path):
    with pytest.raises(ParameterError, match=r"got .a\.jpg."):
        check_figure_path(tmp_path / "a.jpg")
    with pytest.raises(TraceError, match="no figure without gaps: not answerable"):
        write_figure(ids_only, tmp_path / "a.pdf")
    assert list(tmp_path.iterdir()) == []
