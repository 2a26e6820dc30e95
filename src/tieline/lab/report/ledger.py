"""Reports of the claims ledger and of the catalogue of claims: charts and tables.

Every verdict has a sign besides its colour, and each claim with data has a chart, whose figure is
named after the claim. `CATALOGUE` has the views of the catalogue.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tieline.lab.claims.claim import Claim, ClaimOutcome, Verdict
from tieline.lab.claims.evidence import Check, FigureData
from tieline.lab.claims.ledger import Catalogue, Ledger, PaperTitle
from tieline.report.charts import Axis, Chart, Series, layer_colour
from tieline.report.html_page import PagePanel
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.result_views import Listing, Report, listing_views, report_views
from tieline.report.tables import Grid, text_table
from tieline.report.words.numbers import DASH, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure


VERDICT_SIGNS = dict(zip(Verdict, "●◐○?·", strict=True))
VERDICT_STYLES = dict(zip(Verdict, ("green", "yellow", "red", "cyan", "dim"), strict=True))
VERDICT_CLASSES = dict(
    zip(Verdict, ("holds", "condition", "fails", "undecided", "untestable"), strict=True)
)
"""Sign, style on a terminal and CSS class of each verdict."""

PART_NAMES = {"paper": "as stated", "condition": "under the condition", "corrected": "ours"}
VALUE_HEADINGS = ("the paper", "corrected", "measured")
SERIES_COLOURS = ("@accent", "@warn", "@notice", "@ink", "@muted")
"""Roles of the colours of up to five series."""
MIN_WIDE_WIDTH = 100
"""Narrower terminals, in characters, show verdicts without values."""
MAX_CLAIMS_IN_FULL = 8
"""Largest number of claims that a terminal shows in full."""


def _ledger_report(result: Ledger) -> Report:
    """Build the report: a table of all claims, then each claim with its checks and chart."""
    rows = tuple(
        (o.claim.id, o.claim.title, *_claim_value_cells(o), claim_verdict_text(o))
        for o in result.claims
    )
    return Report(
        kind="reproduction",
        title="Claims ledger",
        facts=_ledger_facts(result),
        verdict=_verdict_counts(result),
        table=lambda: Grid(("claim", "what", *VALUE_HEADINGS, "verdict"), rows),
        body=partial(_ledger_page_body, result),
        figures={
            outcome.claim.id: partial(_claim_figure, outcome.evidence.figure)
            for outcome in result.claims
            if outcome.evidence.figure is not None
        },
    )


def _ledger_page_body(result: Ledger) -> dict[str, Any]:
    """Return the values that the template shows: charts by claim, outcomes by paper."""
    panels = {
        outcome.claim.id: PagePanel(
            f"figure-{outcome.claim.id}", outcome.claim.title, ""
        ).with_chart(_claim_chart(outcome.evidence.figure))
        for outcome in result.claims
        if outcome.evidence.figure is not None
    }
    return {
        "template": "ledger.html",
        "style": "ledger.css",
        "panels": list(panels.values()),
        "papers": [(paper, _outcomes_of_paper(result, paper)) for paper in result.papers],
        "charts": panels,
        "parts": PART_NAMES,
        "value_text": claim_value_text,
        "verdict_text": claim_verdict_text,
        "verdict_class": _verdict_class,
        "check_text": claim_check_text,
    }


def _ledger_terminal(result: Ledger, width: int) -> RenderableType:
    """Return the terminal view: a table per paper, undecided and changed claims, counts."""
    blocks: list[RenderableType] = []
    for paper in result.papers:
        heading = Text(f"Paper {paper.paper}: {paper.title}", style="bold")
        table = _claim_outcome_table(
            _outcomes_of_paper(result, paper), wide=width >= MIN_WIDE_WIDTH
        )
        blocks += [heading, Padding(table, (0, 0, 1, 0))]
    if len(result.claims) <= MAX_CLAIMS_IN_FULL:
        blocks += [claim_text(outcome.claim) for outcome in result.claims]
    blocks += [
        _undecided_claim_text(outcome)
        for outcome in result.claims
        if outcome.verdict is Verdict.UNDECIDED
    ]
    blocks += [_changed_claim_text(outcome) for outcome in result.claims if outcome.changed]
    return Group(*blocks, Text(_verdict_counts(result)))


page, figures, terminal, summary, notebook = report_views(_ledger_report)._replace(
    terminal=_ledger_terminal,
    summary=lambda result: f"Claims ledger ({_ledger_facts(result)})\n{_verdict_counts(result)}",
    notebook=lambda result: replace(_ledger_report(result), figures={}).notebook(),
)


def claim_text(claim: Claim) -> RenderableType:
    """Return a claim in full: statement, setting, test and what would change the verdict."""
    lines = [Text(f"{claim.id} ({claim.number}): {claim.title}", style="bold")]
    texts = {
        "the paper": claim.statement,
        "setting": claim.setting,
        "tested": claim.tested,
        "condition": claim.condition,
        "would change it": claim.overturned_by,
    }
    lines += [Text(f"{name}: {text}") for name, text in texts.items() if text]
    return Padding(Group(lines[0], Padding(Group(*lines[1:]), (0, 0, 0, 2))), (0, 0, 1, 0))


def claim_value_text(value: float | int | str | None) -> str:
    """Return a value of a claim as text: strings unchanged, numbers with six digits."""
    if value is None or value == "":
        return DASH
    if isinstance(value, float) and not math.isfinite(value):
        value = str(value)
    if isinstance(value, str | bool):
        return {"inf": "∞", "-inf": "-∞"}.get(str(value), str(value))
    return f"{value:,}" if isinstance(value, int) else significant(value, 6)


def claim_verdict_text(outcome: ClaimOutcome) -> str:
    """Return sign and verdict, with the expected verdict or the error if it changed."""
    sign = "!" if outcome.verdict is None else VERDICT_SIGNS[outcome.verdict]
    if outcome.verdict is None:
        return f"{sign} broken: {outcome.error}"
    if not outcome.changed:
        return f"{sign} {outcome.verdict}"
    if outcome.verdict != outcome.claim.expected:
        return f"{sign} {outcome.verdict} (expected: {outcome.claim.expected})"
    return f"{sign} {outcome.verdict} (but a check failed)"


def claim_check_text(check: Check) -> str:
    """Return a check in one line: mark, name, measured value, rule and reference."""
    mark = "✓" if check.passed else "?" if check.open else "✗"
    slack = f" ± {claim_value_text(check.tolerance)}" if check.tolerance else ""
    measured = (
        "not measured"
        if check.open and math.isnan(check.measured)
        else _claim_measurement_text(check)
    )
    reason = f" ({check.open})" if check.open else ""
    reference = claim_value_text(check.reference)
    return f"{mark} {check.name}: {measured} {check.rule} {reference}{slack}{reason}"


def _claim_measurement_text(check: Check) -> str:
    """Return the measured value of a check, with its interval."""
    if check.low is None or check.high is None:
        return claim_value_text(check.measured)
    return f"{claim_value_text(check.measured)} [{check.low:.3g}, {check.high:.3g}]"


def _ledger_facts(result: Ledger) -> str:
    """Return one line with version, mode and seed."""
    run = result.provenance
    return f"tieline {run.tieline} · {run.mode} mode · seed {run.seed}"


def _verdict_counts(result: Ledger) -> str:
    """Return the number of claims with each verdict, and how many changed."""
    counts = [f"{verdict}: {count}" for verdict, count in result.verdicts.items() if count]
    changed = len(result.changed)
    news = f"{changed} verdict{'s' * (changed != 1)} changed" if changed else "None changed"
    count = "1 claim" if len(result.claims) == 1 else f"{len(result.claims)} claims"
    return f"{count}. {' · '.join(counts).capitalize()}. {news}."


def _outcomes_of_paper(result: Ledger, paper: PaperTitle) -> list[ClaimOutcome]:
    """Return the outcomes of one paper's claims."""
    return [outcome for outcome in result.claims if outcome.claim.paper == paper.paper]


def _claim_value_cells(outcome: ClaimOutcome) -> list[str]:
    """Return the cells of the columns `VALUE_HEADINGS`."""
    evidence = outcome.evidence
    return [
        claim_value_text(value) for value in (evidence.paper, evidence.corrected, evidence.measured)
    ]


def _verdict_class(outcome: ClaimOutcome) -> str:
    """Return the CSS class of an outcome's verdict."""
    if outcome.changed or outcome.verdict is None:
        return "changed"
    return VERDICT_CLASSES[outcome.verdict]


def _claim_outcome_table(outcomes: Sequence[ClaimOutcome], *, wide: bool) -> Table:
    """Return a table with one row per claim, coloured by verdict; `wide` adds the values."""
    table = text_table(
        ("claim", "what", *(VALUE_HEADINGS if wide else ()), "verdict"), (), 9, fold=True
    )
    table.columns[0].no_wrap = True
    for outcome in outcomes:
        claim = outcome.claim
        style = (
            "bold red"
            if outcome.verdict is None or outcome.changed
            else VERDICT_STYLES[outcome.verdict]
        )
        cells = [claim.id, claim.title, *(_claim_value_cells(outcome) if wide else [])]
        table.add_row(*map(Text, cells), Text(claim_verdict_text(outcome), style=style))
    return table


def _undecided_claim_text(outcome: ClaimOutcome) -> Text:
    """Return an undecided claim with the reason and what this run could not measure."""
    claim, checks = outcome.claim, outcome.evidence.checks
    absent = dict.fromkeys(c.open for c in checks if c.open and math.isnan(c.measured))
    reasons = [claim.undecided or outcome.reason]
    reasons += [f"Not measured: {'; '.join(absent)}"] if claim.undecided and absent else []
    sentence = f"{claim.id}: undecided: {'. '.join(reasons)}"
    return Text(sentence, style=VERDICT_STYLES[Verdict.UNDECIDED])


def _changed_claim_text(outcome: ClaimOutcome) -> Text:
    """Return a changed claim with the checks that failed."""
    lines = [f"{outcome.claim.id}: {claim_verdict_text(outcome)[2:]}"]
    lines += [
        f"    {claim_check_text(check)}" for check in outcome.evidence.checks if not check.passed
    ]
    return Text("\n".join(lines), style="bold red")


def _claim_chart(figure: FigureData) -> Chart:
    """Return a claim's chart; more than five series are coloured by a ramp."""
    count = len(figure.series)
    ramp = [layer_colour(index, count) for index in range(count)]
    series = tuple(
        Series(
            series.x,
            series.y,
            series.name,
            colour,
            "points" if series.kind == "dots" else "line",
            size=7,
            dash="dash" if series.kind == "dashed" else "",
            errors=None if series.errors is None else (series.errors, series.errors),
            hover="%{x:.4~g}, %{y:.4~g}<extra>%{fullData.name}</extra>",
        )
        for series, colour in zip(
            figure.series, SERIES_COLOURS if count <= 5 else ramp, strict=False
        )
    )
    x, y = (
        Axis(axis.title, "log" if axis.scale == "log" else "linear")
        for axis in (figure.x, figure.y)
    )
    return Chart(x, y, series, height=300 + 20 * count, margin_below=60 + 20 * count)


def _claim_figure(figure: FigureData) -> "Figure":
    """Draw a claim's chart by matplotlib."""
    return chart_figure(_claim_chart(figure), height=3.2)


def _catalogue_listing(result: Catalogue) -> Listing:
    """Return the listing of all claims with their expected verdicts."""
    rows = (
        (c.id, c.number, c.title, f"{VERDICT_SIGNS[c.expected]} {c.expected}")
        for c in result.claims
    )
    facts = f"{len(result.claims)} claims of {len(result.papers)} papers"
    table = Grid(("claim", "number", "what", "expected"), tuple(rows))
    return Listing("reproduction", "Catalogue of claims", facts, table)


def _catalogue_terminal_view(result: Catalogue) -> RenderableType:
    """Return one row per claim, or per paper if there are several; few claims are in full."""
    listing = _catalogue_listing(result).table
    if len(result.papers) > 1 and len(result.claims) > MAX_CLAIMS_IN_FULL and not result.in_full:
        return _claims_by_paper_view(result)
    table = text_table(listing.head, (), len(listing.head), fold=True)
    table.columns[0].no_wrap = True
    for claim, cells in zip(result.claims, listing.rows, strict=True):
        table.add_row(*map(Text, cells[:-1]), Text(cells[-1], style=VERDICT_STYLES[claim.expected]))
    in_full = map(claim_text, result.claims) if len(result.claims) <= MAX_CLAIMS_IN_FULL else ()
    return Group(table, *in_full)


def _claims_by_paper_view(result: Catalogue) -> RenderableType:
    """Return the number of claims of each paper by expected verdict."""
    counts = Counter((claim.paper, claim.expected) for claim in result.claims)
    verdicts = [verdict for verdict in Verdict if verdict in {v for _, v in counts}]
    rows = [
        (
            f"{title.paper} {title.name}",
            *(str(counts[title.paper, verdict] or DASH) for verdict in verdicts),
        )
        for title in result.papers
    ]
    table = text_table(("paper", *map(str, verdicts)), rows, 1, fold=True)
    table.columns[0].no_wrap = True
    hint = (
        f"`tieline reproduce {result.papers[0].paper} --list` shows the claims of one paper, "
        f"`tieline reproduce --list --all` all {len(result.claims)}."
    )
    return Group(table, Text(hint))


CATALOGUE = listing_views(_catalogue_listing, _catalogue_terminal_view)
