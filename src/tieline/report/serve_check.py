"""Report of a check of a running server: verdict, a row per way of sending, first differences."""

from rich.text import Text

from tieline.analysis.serve_check import ServeCheck, ServedWay
from tieline.report.result_views import Report, Section, report_views
from tieline.report.tables import Grid, text_table
from tieline.report.words.numbers import DASH, percent
from tieline.report.words.serve_check import (
    WAY_TEXTS,
    first_flip_sentence,
    invariance_sentence,
    near_tie_sentence,
)

WAY_HEADINGS = ("sent", "flipped", "share", "prompts", "near-ties", "next token")


def _serve_check_report(result: ServeCheck) -> Report:
    """Build the report: verdict, a row per way of sending prompts, flips by layer."""
    notes = _serve_check_notes(result)
    sections = [Section("Ways of sending", _ways_grid(result), notes=notes)]
    if not result.invariant:
        sections.append(Section("Flips by layer", _layers_grid(result)))
    return Report(
        kind="serve-check",
        name="Check",
        title=result.url,
        facts=_serve_check_facts(result),
        verdict=result.verdict,
        table=lambda: _ways_grid(result),
        body=lambda: {"sections": sections},
        below=lambda width: [
            text_table(WAY_HEADINGS, _ways_grid(result).rows, 1),
            *map(Text, notes),
        ],
    )


def _serve_check_notes(result: ServeCheck) -> list[str]:
    """Return the sentences on first differences, near-ties and batch-invariant kernels."""
    firsts = [first_flip_sentence(way) for way in result.ways if way.first is not None]
    notes = (*firsts, near_tie_sentence(result), invariance_sentence(result))
    return [note for note in notes if note]


def _serve_check_facts(result: ServeCheck) -> str:
    """Return one line with the model, the engine, the sizes and k."""
    engine = f"{result.engine} {result.engine_version}".strip()
    size = f"{result.prompts} prompts, {result.tokens:,} tokens, {result.layers} layers"
    return f"{result.model} in {engine} · {size}, k = {result.k}, batches of {result.batch_size}"


def _ways_grid(result: ServeCheck) -> Grid:
    """Return the table with one row per way of sending prompts."""
    return Grid(WAY_HEADINGS, tuple(map(_way_row, result.ways)))


def _way_row(way: ServedWay) -> tuple[str, ...]:
    """Return the cells of one way of sending: flips, their share, near-ties, next tokens."""
    has_near_ties = way.near_ties is not None and way.first_flips > 0
    near_ties = f"{way.near_ties} of {way.first_flips}" if has_near_ties else DASH
    generated = DASH if way.next_tokens is None else f"{way.next_tokens:,}"
    share = percent(way.share, trim=True)
    counts = (f"{way.flipped:,}", share, f"{way.prompts:,}")
    return (WAY_TEXTS[way.way], *counts, near_ties, generated)


def _layers_grid(result: ServeCheck) -> Grid:
    """Return flips by layer (rows) and way of sending (columns), for the layers that have any."""
    rows = [
        (str(layer), *(f"{way.by_layer[layer]:,}" for way in result.ways))
        for layer in range(result.layers)
        if any(way.by_layer[layer] for way in result.ways)
    ]
    return Grid(("layer", *(WAY_TEXTS[way.way] for way in result.ways)), tuple(rows))


page, figures, terminal, summary, notebook = report_views(_serve_check_report)
