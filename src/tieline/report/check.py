"""Whether files of routes are sound: a verdict, a table of findings, a table of files."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from tieline.analysis.check import CheckedFile, RouteCheck
from tieline.report.frame import notebook_html
from tieline.report.tables import Grid, text_table, view
from tieline.trace.soundness import RouteFinding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD = ("severity", "kind", "what was found", "where", "likely cause")
STYLES = {"unsound": "bold red", "suspicious": "bold yellow", "note": "dim"}


def page(result: RouteCheck) -> str:
    """The page: verdict, findings and files."""
    from tieline.report.plain import Section, plain_page

    sections = [
        Section("Findings", _findings(result), prose=True) if result.findings else _nothing(),
        Section("Files", _files(result), notes=_reader_notes(result)),
    ]
    title = result.files[0].name if len(result.files) == 1 else f"{len(result.files)} files"
    return plain_page("check", title, _subtitle(result), sections, result.verdict)


def figures(result: RouteCheck) -> "dict[str, Callable[[], Figure]]":
    """No figures."""
    return {}


def terminal(result: RouteCheck, width: int) -> RenderableType:
    """Facts, the findings one by one, and the verdict."""
    head, rows = _table(result)
    files = text_table(head, [(Path(name).name, *rest) for name, *rest in rows], left=2)
    lines = [_finding_line(x, len(result.files) > 1) for x in result.findings]
    title = result.files[0].name if len(result.files) == 1 else f"{len(result.files)} files"
    return view(title, _subtitle(result), result.verdict, files, *lines)


def summary(result: RouteCheck) -> str:
    """Verdict and findings in plain lines."""
    lines = [f"{finding.severity} {finding.kind}: {finding.message}" for finding in result.findings]
    return "\n".join([result.verdict, *lines])


def notebook(result: RouteCheck) -> str:
    """Verdict and the table of findings."""
    table = _findings(result) if result.findings else _files(result)
    return notebook_html("check", _subtitle(result), result.verdict, table, {})


def _nothing() -> Any:
    from tieline.report.plain import Section

    return Section("Findings", notes=["Nothing was found."])


def _subtitle(result: RouteCheck) -> str:
    facts = [f"{sum(file.rows for file in result.files):,} rows"]
    if result.model is not None:
        facts.append(f"{result.compared:,} tokens routed by {result.model}")
    if result.reference is not None:
        facts.append(f"compared with {result.reference}")
    return " · ".join(facts)


def _finding_line(finding: RouteFinding, several: bool) -> Text:
    where = f" [{finding.where}]" if finding.where else ""
    file = f"{finding.file}: " if several else ""
    text = Text.assemble(
        (finding.severity, STYLES[finding.severity]),
        f"  {finding.kind}: {file}{finding.message}{where}",
    )
    return text.append(f"\n    {finding.cause}", "dim") if finding.cause else text


def _findings(result: RouteCheck) -> Grid:
    several = len(result.files) > 1
    rows = [
        (x.severity, x.kind, (f"{x.file}: " if several else "") + x.message, x.where, x.cause)
        for x in result.findings
    ]
    return Grid(HEAD, tuple(rows))


def _table(result: RouteCheck) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    head = ("file", "format", "rows", "documents", "layers", "routed", "k", "experts", "type")
    return head, [_row(file) for file in result.files]


def _row(file: CheckedFile) -> tuple[str, ...]:
    numbers = (file.rows, file.documents, file.layers, file.routed, file.k, file.n_experts)
    return (file.name, file.producer, *(f"{number:,}" for number in numbers), file.dtype)


def _files(result: RouteCheck) -> Grid:
    head, rows = _table(result)
    return Grid(head, tuple(rows))


def _reader_notes(result: RouteCheck) -> list[str]:
    several = len(result.files) > 1
    return [
        f"{file.name}: {note}." if several else f"{note[:1].upper()}{note[1:]}."
        for file in result.files
        for note in file.said
    ]
