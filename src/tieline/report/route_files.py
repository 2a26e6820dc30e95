"""Views of the results of `capture`, `convert` and `merge`, and of the list of engines."""

from collections.abc import Iterable

from rich.console import Group
from rich.text import Text

from tieline.analysis.route_files import Converted, Merged
from tieline.engines.engine_capture import EngineCapture
from tieline.engines.engine_registry import EngineEntry, EngineList
from tieline.report.result_views import Listing, line_views, listing_views
from tieline.report.tables import Grid, text_table

ENGINE_HEADINGS = ("engine", "takes", "found in", "versions")


def _merged_lines(result: Merged) -> list[str]:
    """Return one line on the folder that `merge` wrote."""
    inputs = "summaries" if result.kind == "summary" else "traces"
    counts = f"{result.tokens:,} tokens of {len(result.folders)} {inputs}"
    return [f"{result.output}: {counts}, {len(result.layers)} layers"]


def _converted_lines(result: Converted) -> list[str]:
    """Return lines on what `convert` wrote, which rows it dropped, and what it assumed."""
    size = f"{result.tokens:,} tokens of {result.documents:,} documents"
    shape = f"{len(result.layers)} routed layers, k = {result.k}"
    first = f"{result.output}: {size}, {shape}, {result.producer} → {result.form}"
    total = result.tokens + result.dropped
    dropped = [f"dropped {result.dropped:,} of {total:,} rows: warm-up and exact ties"]
    return [first, *(dropped if result.dropped else []), *result.said]


def _captured_lines(result: EngineCapture) -> list[str]:
    """Return lines on a capture's size, number format, versions and verified choices."""
    size = f"{result.tokens:,} tokens of {result.documents:,} documents"
    shape = f"{len(result.layers)} routed layers, top-{result.k} of {result.n_experts}"
    weights = "" if result.bits is None else f", {result.bits:.3g} bits per weight"
    lines = [
        f"{result.output or result.model}: {size}, {shape}, by {result.engine} "
        f"({result.dtype}{weights})",
        _versions_text(result.versions.items()),
    ]
    if not result.has_scores:
        return [*lines, "ids only: no scores to verify the choice with"]
    choices = result.tokens * len(result.layers)
    if result.off_scores:
        return [*lines, f"{result.off_scores:,} of {choices:,} choices are not the largest scores"]
    return [*lines, f"all {choices:,} choices are the largest scores, {result.tied:,} by a tie"]


def _versions_text(versions: Iterable[tuple[str, str]]) -> str:
    """Return "name version, name version, …"."""
    return ", ".join(f"{name} {version}" for name, version in versions)


def _engines_listing(result: EngineList) -> Listing:
    """Return the listing with one row per engine."""
    rows = ((*_engine_row(engine), "; ".join(engine.install)) for engine in result.engines)
    installed = sum(bool(engine.python) for engine in result.engines)
    facts = f"{installed} of {len(result.engines)} found"
    table = Grid((*ENGINE_HEADINGS, "to install"), tuple(rows))
    return Listing("engines", "Inference engines", facts, table)


def _engine_row(engine: EngineEntry) -> tuple[str, ...]:
    """Return an engine's name, accepted inputs, Python interpreter and versions."""
    python = engine.python or "not found"
    return engine.name, engine.takes, python, _versions_text(engine.versions.items())


def _engines_terminal_view(result: EngineList) -> Group:
    """Return the table of engines and the shell commands that install each, for a terminal."""
    rows = [_engine_row(engine) for engine in result.engines]
    table = text_table(ENGINE_HEADINGS, rows, len(ENGINE_HEADINGS), fold=True)
    table.columns[0].no_wrap = True
    steps = [
        line
        for engine in result.engines
        if engine.folder
        for line in (
            "",
            f"# {engine.name}, {engine.size}",
            f"VENV={engine.folder}",
            *engine.install,
        )
    ]
    return Group(table, Text("\n".join(steps), no_wrap=True, overflow="ignore"))


MERGED = line_views(_merged_lines)
CONVERTED = line_views(_converted_lines)
CAPTURED = line_views(_captured_lines)
ENGINES = listing_views(_engines_listing, _engines_terminal_view)
