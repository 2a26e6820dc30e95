"""The room's five functions find the module of a result by its format."""

import importlib

import pytest

from tieline import report
from tieline.core.errors import ParameterError
from tieline.core.plugins import result_formats


@pytest.mark.parametrize("name", sorted({entry.drawing for entry in result_formats().values()}))
def test_every_drawing_of_the_table_draws_in_five_ways(name):
    module, _, views = name.partition(":")
    drawing = importlib.import_module(module)
    for ability in ("page", "figures", "terminal", "summary", "notebook"):
        assert callable(getattr(getattr(drawing, views) if views else drawing, ability))


def test_a_result_is_drawn_by_the_module_of_its_format(result):
    assert report.summary(result) == repr(result)
    assert report.page(result) == result.to_html()
    assert report.notebook(result) == result._repr_html_()
    assert next(iter(report.figures(result))) == "routing"


def test_an_unknown_format_is_refused_with_the_known_ones():
    class Other:
        format = "other"

    with pytest.raises(ParameterError, match="no report draws 'other', only tieline-inspection"):
        report.page(Other())


def test_no_module_of_the_room_hides_a_function_of_the_room():
    """A submodule that is imported becomes an attribute of the package."""
    for ability in ("page", "figures", "terminal", "summary", "notebook"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"tieline.report.{ability}")
