"""The room's five functions find the module of a result by its format."""

import importlib
import io
import json

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tests.report.zoo import make_inspection
from tieline import report
from tieline.core.errors import ParameterError
from tieline.core.plugins import result_formats
from tieline.report.result_views import UnbrokenView, printable_view
from tieline.report.tables import text_table


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


EVIL = "m\x1b[31m\x1b]52;c;QUFB\x07\r\u202e\u2066\x9b[bold]b[/bold]\nwrote secrets"


def acting(text):
    """Characters that act on a terminal or turn words around."""
    return [sign for sign in text if sign != "\n" and not sign.isprintable()]


def test_no_name_of_a_model_acts_in_any_view():
    result = make_inspection(model=EVIL)
    console = Console(file=io.StringIO(), width=80)
    console.print(report.terminal(result, 80))
    shown = console.file.getvalue()
    assert acting(shown) == []
    assert "[bold]b[/bold]\\nwrote" in shown.replace("\n", "")
    assert max(map(cell_len, shown.splitlines())) <= 80
    assert acting(report.summary(result)) == []
    for view in (report.page(result), report.notebook(result)):
        assert not set(view) & set("\x1b\x07\r\u202e\u2066\x9b")


def test_no_name_of_a_layer_acts_in_any_view():
    plain = make_inspection().to_json()
    hostile = plain.replace("model.layers.0.mlp", "model.layers.\\u001b[31m\\u202e[dim].mlp")
    result = type(make_inspection()).from_dict(json.loads(hostile))
    console = Console(file=io.StringIO(), width=80)
    console.print(report.terminal(result, 80))
    assert acting(console.file.getvalue()) == []
    assert "[dim]" in console.file.getvalue()
    assert not set(report.page(result)) & set("\x1b\u202e")


def test_markup_in_a_heading_is_text():
    console = Console(file=io.StringIO(), width=80)
    console.print(printable_view(text_table(("[link=x]a[/link]",), (("[red]",),))))
    assert "[link=x]a[/link]" in console.file.getvalue()
    assert "[red]" in console.file.getvalue()


def test_styles_stay_where_they_were():
    text = Text.assemble(("a\x1b", "bold"), ("b", "dim"))
    shown = printable_view(text)
    assert shown.plain == "a\\x1bb"
    assert [(span.start, span.end, span.style) for span in shown.spans] == [
        (0, 5, "bold"),
        (5, 6, "dim"),
    ]


@pytest.mark.parametrize("width", range(12, 40))
def test_no_line_ends_between_a_number_and_its_unit(width):
    text = "up to 4.4 % of tokens, 3.1 × as many, 0.21 ± 0.03 nats"
    console = Console(file=io.StringIO(), width=width)
    console.print(UnbrokenView(printable_view(Text(text))))
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    assert " ".join(lines) == text
    assert not any(line.startswith(("%", "×", "±", "0.03")) for line in lines)


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
