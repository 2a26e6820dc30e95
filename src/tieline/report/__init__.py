"""Results as pages, tables and figures: draws records and computes nothing.

    page        a self-contained HTML page
    figures     matplotlib figures by name, each drawn when called; the first is the main one
    terminal    a Rich renderable
    summary     a few plain lines
    notebook    a piece of HTML with table and figures, without script
    sentence    a sentence of a record: the verdict of a result, the text of an answer

`tieline.core.plugins` maps the format of a result to the module or object that has the first five
functions (`tieline.report.result_views`). `SENTENCES` maps class and property to the function that
writes the sentence.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tieline.core.errors import ParameterError
from tieline.core.plugins import result_formats
from tieline.core.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

__all__ = ["SENTENCES", "figures", "notebook", "page", "sentence", "summary", "terminal"]

SENTENCES = {
    "Inspection.verdict": "tieline.report.words.inspect:inspection_verdict",
    "Inspection.findings": "tieline.report.words.inspect:inspection_findings",
    "RoutingDiff.verdict": "tieline.report.words.diff:diff_verdict",
    "RoutingDiff.findings": "tieline.report.words.diff:diff_findings",
    "Alignment.notes": "tieline.report.words.diff:alignment_notes",
    "Pattern.text": "tieline.report.words.diff:pattern_sentence",
    "ChoiceAnswer.text": "tieline.report.words.diff:choice_answer",
    "FlipAnswer.text": "tieline.report.words.diff:flips_answer",
    "OutputAnswer.text": "tieline.report.words.diff:outputs_answer",
    "SizeAnswer.text": "tieline.report.words.diff:noise_size_answer",
    "ShapeAnswer.text": "tieline.report.words.diff:pattern_answer",
    "PrecisionAudit.verdict": "tieline.report.words.audit:audit_verdict",
    "RouteCheck.verdict": "tieline.report.words.check:check_verdict",
    "ServeCheck.verdict": "tieline.report.words.serve_check:serve_check_verdict",
    "RouteFinding.message": "tieline.report.words.check:route_finding_message",
    "RouteFinding.where": "tieline.report.words.check:route_finding_place",
    "RouteFinding.cause": "tieline.report.words.check:route_finding_cause",
}
"""Function that writes each sentence, as "module:function", by class and property of a record."""


def sentence(record: Any, name: str) -> Any:
    """Return a sentence of a record, such as its verdict.

    Args:
        record: a record with sentences.
        name: the property that holds the sentence.
    """
    module, _, function = SENTENCES[f"{type(record).__name__}.{name}"].partition(":")
    return getattr(importlib.import_module(module), function)(record)


def page(result: Any) -> str:
    """Return the self-contained HTML page of a result."""
    return _views_of_result(result).page(result)


def figures(result: Any) -> "dict[str, Callable[[], Figure]]":
    """Return matplotlib figures by name, each drawn when called; the main one first."""
    return _views_of_result(result).figures(result)


def terminal(result: Any, width: int) -> "RenderableType":
    """Return a result for a terminal that is `width` characters wide; its texts are printable."""
    from tieline.report.result_views import UnbrokenView, printable_view

    return UnbrokenView(printable_view(_views_of_result(result).terminal(result, width)))


def summary(result: Any) -> str:
    """Return a result in a few plain lines; its texts are printable."""
    return printable(_views_of_result(result).summary(result))


def notebook(result: Any) -> str:
    """Return a piece of HTML with table and figures, without script."""
    return _views_of_result(result).notebook(result)


def _views_of_result(result: Any) -> Any:
    """Return the module or object that draws results of this format."""
    formats = result_formats()
    if result.format not in formats:
        raise ParameterError(f"no report draws {result.format!r}, only {', '.join(formats)}")
    module, _, name = formats[result.format].drawing.partition(":")
    drawing = importlib.import_module(module)
    return getattr(drawing, name) if name else drawing
