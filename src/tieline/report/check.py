"""Report of a check of route files: a verdict, a table of findings, a table of files."""

from functools import partial
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from tieline.analysis.check import RouteCheck
from tieline.report.result_views import Report, Section, report_views
from tieline.report.tables import Grid, text_table
from tieline.report.words.check import checks_sentences
from tieline.trace.soundness import RouteFinding

FILE_HEADINGS = ("file", "format", "rows", "documents", "layers", "routed", "k", "experts", "type")
FINDING_HEADINGS = ("severity", "kind", "what was found", "where", "likely cause")
SEVERITY_STYLES = {"unsound": "bold red", "suspicious": "bold yellow", "note": "dim"}


def _check_report(result: RouteCheck) -> Report:
    """Build the report: verdict, findings and files."""
    several = len(result.files) > 1
    notes = [*([] if result.findings else ["Nothing was found."]), *checks_sentences(result)]
    table = _route_findings_grid(result) if result.findings else None
    findings = Section("Findings", table, notes=notes, prose=True)
    files = Section("Files", _route_files_grid(result), notes=_route_reader_notes(result))
    return Report(
        kind="check",
        title=f"{len(result.files)} files" if several else result.files[0].name,
        facts=_check_facts(result),
        verdict=result.verdict,
        table=lambda: table or _route_files_grid(result),
        body=lambda: {"sections": [findings, files]},
        below=partial(_check_terminal_views, result),
    )


def _check_terminal_views(result: RouteCheck, width: int) -> list[RenderableType]:
    """Return the table of files, the readers' notes and one line per finding, for a terminal."""
    rows = [(Path(name).name, *cells) for name, *cells in _route_files_grid(result).rows]
    lines = [_route_finding_line(finding, len(result.files) > 1) for finding in result.findings]
    notes = [Text(note, "dim") for note in _route_reader_notes(result)]
    checks = map(Text, checks_sentences(result))
    return [text_table(FILE_HEADINGS, rows, left_aligned=2), *notes, *lines, *checks]


def _check_summary(result: RouteCheck) -> str:
    """Return the verdict and one plain line per finding."""
    lines = [f"{finding.severity} {finding.kind}: {finding.message}" for finding in result.findings]
    return "\n".join([result.verdict, *lines])


page, figures, terminal, summary, notebook = report_views(_check_report)._replace(
    summary=_check_summary
)


def _check_facts(result: RouteCheck) -> str:
    """Return one line with the number of rows, the model and the reference."""
    facts = [f"{sum(file.rows for file in result.files):,} rows"]
    if result.model is not None:
        facts.append(f"{result.compared:,} tokens routed by {result.model}")
    if result.reference is not None:
        facts.append(f"compared with {result.reference}")
    return " · ".join(facts)


def _route_finding_line(finding: RouteFinding, several: bool) -> Text:
    """Return a finding's severity, kind, message and place, with its likely cause below."""
    where = f" [{finding.where}]" if finding.where else ""
    file = f"{finding.file}: " if several else ""
    text = Text.assemble(
        (finding.severity, SEVERITY_STYLES[finding.severity]),
        f"  {finding.kind}: {file}{finding.message}{where}",
    )
    return text.append(f"\n    {finding.cause}", "dim") if finding.cause else text


def _route_findings_grid(result: RouteCheck) -> Grid:
    """Return the table with one row per finding."""
    several = len(result.files) > 1
    rows = [
        (x.severity, x.kind, (f"{x.file}: " if several else "") + x.message, x.where, x.cause)
        for x in result.findings
    ]
    return Grid(FINDING_HEADINGS, tuple(rows))


def _route_files_grid(result: RouteCheck) -> Grid:
    """Return the table with one row per file: name, format, sizes and integer type."""
    rows = []
    for x in result.files:
        sizes = (x.rows, x.documents, x.layers, x.routed, x.k, x.n_experts)
        rows.append((x.name, x.producer, *(f"{size:,}" for size in sizes), x.dtype))
    return Grid(FILE_HEADINGS, tuple(rows))


def _route_reader_notes(result: RouteCheck) -> list[str]:
    """Return what the readers reported and assumed about each file, one sentence each."""
    several = len(result.files) > 1
    return [
        f"{file.name}: {note}." if several else f"{note[:1].upper()}{note[1:]}."
        for file in result.files
        for note in file.said
    ]
