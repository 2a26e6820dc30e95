"""What `upcycle`, `merge`, `convert` and `capture` made: a few lines and one table, no figures."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from tieline.analysis.convert import Converted
from tieline.analysis.merge import Merged
from tieline.engines.capture import EngineCapture
from tieline.lab.on_model.upcycle import Upcycled
from tieline.report.frame import notebook_html
from tieline.report.tables import Grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Made = Upcycled | Merged | Converted | EngineCapture


def page(result: Made) -> str:
    """The page: the lines of the summary and a table of the named numbers."""
    from tieline.report.plain import Section, plain_page

    first, *others = _lines(result)
    sections = [Section("Numbers", _numbers(result), notes=others)]
    title = result.output or first.partition(":")[0]
    return plain_page(result.format.removeprefix("tieline-"), title, first, sections)


def figures(result: Made) -> "dict[str, Callable[[], Figure]]":
    """No figures."""
    return {}


def terminal(result: Made, width: int) -> Group:
    """The lines of the summary."""
    return Group(*map(Text, _lines(result)))


def summary(result: Made) -> str:
    """What was made, from what, and how large it is."""
    return "\n".join(_lines(result))


def notebook(result: Made) -> str:
    """The summary and a table of the named numbers."""
    first, *others = _lines(result)
    return notebook_html(first, " · ".join(others), "", _numbers(result), {})


def _numbers(result: Made) -> Grid:
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
    if isinstance(result, Merged):
        several = "summaries" if result.kind == "summary" else "traces"
        counts = f"{result.tokens:,} tokens of {len(result.folders)} {several}"
        return [f"{result.output}: {counts}, {len(result.layers)} layers"]
    found = [
        f"{len(result.layers)} networks became mixtures of {result.n_experts} experts, "
        f"top-{result.k}",
        f"parameters: {result.parameters_before:,} before, {result.parameters_after:,} after, "
        f"{result.parameters_per_token:,} per token",
        f"largest change of an output, relative: {result.output_change:.1e}",
    ]
    before, after = result.loss_before, result.loss_after
    if before is not None and after is not None:
        error = "" if before.error is None else f" (± {before.error:.4f} over sequences)"
        found.append(
            f"loss on {before.tokens:,} tokens: {before.value:.6f} before, {after.value:.6f} after"
            f"{error}"
        )
    return found
