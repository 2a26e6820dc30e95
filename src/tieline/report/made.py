"""What `merge`, `convert` and `capture` made: a few lines and one table, no figures."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from tieline.analysis.convert import Converted, Merged
from tieline.engines.capture import EngineCapture
from tieline.report.frame import notebook_html
from tieline.report.tables import Grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Made = Merged | Converted | EngineCapture


class MadeViews:
    """The five views of a result that is a few lines and a table of its named numbers.

    Args:
        lines: gives the lines of a result.
    """

    def __init__(self, lines: Callable[[Any], list[str]]) -> None:
        self._lines = lines

    def page(self, result: Any) -> str:
        """The page: the lines of the summary and a table of the named numbers."""
        from tieline.report.plain import Section, plain_page

        first, *others = self._lines(result)
        sections = [Section("Numbers", _numbers(result), notes=others)]
        title = result.output or first.partition(":")[0]
        return plain_page(result.format.removeprefix("tieline-"), title, first, sections)

    def figures(self, result: Any) -> "dict[str, Callable[[], Figure]]":
        """No figures."""
        return {}

    def terminal(self, result: Any, width: int) -> Group:
        """The lines of the summary."""
        return Group(*map(Text, self._lines(result)))

    def summary(self, result: Any) -> str:
        """What was made, from what, and how large it is."""
        return "\n".join(self._lines(result))

    def notebook(self, result: Any) -> str:
        """The summary and a table of the named numbers."""
        first, *others = self._lines(result)
        return notebook_html(first, " · ".join(others), "", _numbers(result), {})


def _numbers(result: Any) -> Grid:
    rows = [(name, f"{value:,.6g}") for name, value in result.metrics.items()]
    return Grid(("number", "value"), tuple(rows))


def _captured(result: EngineCapture) -> list[str]:
    """Size, number format, versions and what the verification found."""
    size = f"{result.tokens:,} tokens of {result.documents:,} documents"
    shape = f"{len(result.layers)} routed layers, top-{result.k} of {result.n_experts}"
    versions = ", ".join(f"{name} {value}" for name, value in result.versions.items())
    weights = "" if result.bits is None else f", {result.bits:.3g} bits per weight"
    lines = [
        f"{result.output or result.model}: {size}, {shape}, by {result.engine} "
        f"({result.dtype}{weights})",
        versions,
    ]
    if not result.has_scores:
        return [*lines, "ids only: no scores to verify the choice with"]
    choices = result.tokens * len(result.layers)
    if result.off_scores:
        lines.append(f"{result.off_scores:,} of {choices:,} choices are not the largest scores")
    else:
        lines.append(f"all {choices:,} choices are the largest scores, {result.tied:,} by a tie")
    return lines


def _lines(result: Made) -> list[str]:
    if isinstance(result, EngineCapture):
        return _captured(result)
    if isinstance(result, Converted):
        size = f"{result.tokens:,} tokens of {result.documents:,} documents"
        shape = f"{len(result.layers)} routed layers, k = {result.k}"
        return [
            f"{result.output}: {size}, {shape}, {result.producer} → {result.form}",
            *result.said,
        ]
    several = "summaries" if result.kind == "summary" else "traces"
    counts = f"{result.tokens:,} tokens of {len(result.folders)} {several}"
    return [f"{result.output}: {counts}, {len(result.layers)} layers"]


_VIEWS = MadeViews(_lines)
page, figures, terminal = _VIEWS.page, _VIEWS.figures, _VIEWS.terminal
summary, notebook = _VIEWS.summary, _VIEWS.notebook
