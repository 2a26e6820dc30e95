"""Report of an inspection, with its table of layers and the coloured text."""

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tieline.analysis.inspect_records import Inspection, TextPiece, TextSample
from tieline.core.text import short_names
from tieline.report.html_page import PagePanel
from tieline.report.inspect_charts import (
    LayerRow,
    inspected_layer_rows,
    inspection_figures,
    inspection_panels,
    quantile_at,
)
from tieline.report.result_views import Report, report_views
from tieline.report.tables import (
    MAX_FINDINGS_SHOWN,
    Column,
    Grid,
    finding_rows,
    findings_view,
    grid,
    metric_rows,
    precision_text,
    provenance_rows,
    provenance_text,
    rich_table,
)
from tieline.report.words.inspect import calibration_sentence
from tieline.report.words.numbers import DASH, finite, percent, significant, tokens_needed

BF16_FLIPS_MEANING = "tokens change an expert per layer when its logits are rounded to bf16"
NOISE_FLIPS_MEANING = "tokens change an expert per layer under noise of 0.01 on its logits"
KEY_NUMBERS: tuple[tuple[tuple[tuple[str, str], ...], Callable[[float], str]], ...] = (
    ((("flip@bf16", BF16_FLIPS_MEANING), ("flip@0.01", NOISE_FLIPS_MEANING)), percent),
    ((("gap@0.5", "median gap between the last chosen score and the next"),), significant),
    ((("evenness", "evenness of the load over the experts, mean over layers"),), percent),
    ((("dead", "experts were never chosen"),), lambda number: f"{number:.0f}"),
)
"""Metrics shown in large type and how they are formatted; of each group, the first available one.
The verdict states none of them."""

PAGE_ONLY_FINDINGS = ("epsilon",)
"""Kinds of findings that only the page shows."""

COLUMN_LEGEND = (
    "A gap is that of the last chosen score to the next: 1 % of tokens are below “gap 1 %”. "
    "“flip” rounds the logits alone; “jump” is the median change of a layer's output when a "
    "near-tie flips; “dead” experts were never chosen."
)
"""Explanation of the terminal table's columns."""

GAP_LIMITS = (0.01, 0.03, 0.1, 0.3)
"""Relative gaps at which a token's background fades by one level; none above the last."""
MAX_TEXT_GAPS = 40_000
"""Largest number of gaps (tokens × layers) in a page; longer texts are cut."""
TEXT_PANEL = PagePanel("text", "A stretch of the text, coloured by gap", "")
NO_TEXT_REASON = "not answerable: the text of these tokens is not known"


def _inspection_report(result: Inspection) -> Report:
    """Build the report: verdict, findings, charts, coloured text, all layers, provenance."""
    columns = [column for column in _inspection_page_columns(result) if column.rank is not None]
    return Report(
        kind="routing report",
        name="Inspection",
        title=provenance_text(result.provenance, "model") or "unnamed model",
        facts=_inspection_facts(result),
        verdict=result.verdict,
        table=lambda: grid(columns, inspected_layer_rows(result)),
        body=partial(_inspection_page_body, result),
        below=partial(_inspection_terminal_views, result),
        figures=inspection_figures(result),
        notebook_figures=("routing", "flips", "jumps"),
    )


def _inspection_page_body(result: Inspection) -> dict[str, Any]:
    """Return the values that the template of the page shows."""
    return {
        "template": "inspect.html",
        "style": "",
        "panels": [*inspection_panels(result), *_missing_text_panel(result)],
        "data": {"text": _text_gaps_data(result.sample)},
        "numbers": _inspection_key_numbers(result),
        "findings": finding_rows(result.findings, _inspected_layer_names(result)),
        "shown": MAX_FINDINGS_SHOWN,
        "text": _coloured_text(result),
        "calibration": calibration_grid(result),
        "calibration_words": calibration_sentence(result),
        "text_title": TEXT_PANEL.title,
        "table": grid(_inspection_page_columns(result), inspected_layer_rows(result)),
        "provenance": provenance_rows(result.provenance, result.timings),
        "metrics": metric_rows(result.metrics),
    }


def _inspection_terminal_views(result: Inspection, width: int) -> list[RenderableType]:
    """Return the table of layers, the findings and the calibration sentence, for a terminal."""
    table = rich_table(COLUMNS, inspected_layer_rows(result), width)
    sentence = calibration_sentence(result)
    findings = [finding for finding in result.findings if finding.kind not in PAGE_ONLY_FINDINGS]
    findings_table = findings_view(tuple(findings), _inspected_layer_names(result))
    legend = Padding(Text(COLUMN_LEGEND), (0, 0, 1, 0))
    return [table, legend, findings_table, *([Text(sentence)] if sentence else [])]


page, figures, terminal, summary, notebook = report_views(_inspection_report)


def _inspection_facts(result: Inspection) -> str:
    """Return one line with layers, experts, tokens and precision."""
    layers = result.measures.layers
    routing = dict.fromkeys(
        f"{layer.k} of {layer.n_experts} experts" + (", smoothed" if layer.used else "")
        for layer in layers
    )
    tokens = max(layer.tokens for layer in layers)
    facts = [f"{len(layers)} routed layers", " or ".join(routing), f"{tokens:,} tokens"]
    return " · ".join(filter(None, [*facts, precision_text(result.provenance)]))


def calibration_grid(result: Inspection) -> Grid:
    """Return per layer the rarest expert and the calibration tokens needed, with an interval."""
    names = _inspected_layer_names(result)
    labels = dict(zip(names, short_names(names), strict=True))
    rows = tuple(
        (
            labels.get(need.name, need.name),
            str(need.expert),
            f"{need.load:,}",
            tokens_needed(need.needed),
            tokens_needed(need.low),
            tokens_needed(need.high),
        )
        for need in result.calibration
    )
    return Grid(("layer", "rarest expert", "its tokens", "needed", "at least", "at most"), rows)


def _inspected_layer_names(result: Inspection) -> list[str]:
    """Return the names of the layers, in order of depth."""
    return [layer.name for layer in result.measures.layers]


def _inspection_page_columns(result: Inspection) -> list[Column[LayerRow]]:
    """Return the columns, without "k of E" if all layers agree (the facts line states it then)."""
    is_one_choice = len({(layer.k, layer.n_experts) for layer in result.measures.layers}) == 1
    return [column for column in COLUMNS if not (is_one_choice and column is COLUMNS[1])]


def _inspection_key_numbers(result: Inspection) -> list[tuple[str, str]]:
    """Return the numbers in large type, each with its meaning."""
    tiles = []
    for choices, show in KEY_NUMBERS:
        measured = [(name, meaning) for name, meaning in choices if name in result.metrics]
        tiles += [(show(result.metrics[name]), meaning) for name, meaning in measured[:1]]
    return tiles


def _missing_text_panel(result: Inspection) -> list[PagePanel]:
    """Return the text panel with a reason if the text cannot be shown; else no panel."""
    sample = result.sample
    if sample is None:
        return [TEXT_PANEL.without_chart([NO_TEXT_REASON])]
    has_gaps = any(piece.gap is not None for piece in sample.pieces)
    return [] if has_gaps else [TEXT_PANEL.without_chart([result.measures.layers[0].gap.status])]


def _coloured_text(result: Inspection) -> dict[str, Any] | None:
    """Return document, layers, coloured tokens and limits for the template; None without text."""
    sample = result.sample
    if sample is None or _missing_text_panel(result):
        return None
    return {
        "document": sample.document,
        "layers": short_names(sample.layers),
        "tokens": [_coloured_token(piece) for piece in _text_pieces_on_page(sample)],
        "limits": GAP_LIMITS,
    }


def _coloured_token(piece: TextPiece) -> tuple[int, str, str]:
    """Return background level, hint and text of a token."""
    gap = finite(piece.gap)
    level = sum(gap >= limit for limit in GAP_LIMITS) if gap is not None else len(GAP_LIMITS)
    hint = DASH if gap is None else f"{significant(gap, 2)} of the median gap"
    return level, hint, piece.text


def _text_gaps_data(sample: TextSample | None) -> dict[str, Any]:
    """Return limits, layers and gaps by token and layer, for the script that recolours the text."""
    if sample is None:
        return {"limits": GAP_LIMITS, "layers": [], "gaps": []}
    gaps = [
        [None if finite(gap) is None else float(f"{gap:.2g}") for gap in piece.gaps]
        for piece in _text_pieces_on_page(sample)
    ]
    return {"limits": GAP_LIMITS, "layers": short_names(sample.layers), "gaps": gaps}


def _text_pieces_on_page(sample: TextSample) -> tuple[TextPiece, ...]:
    """Return the tokens of the text that fit within `MAX_TEXT_GAPS`."""
    return sample.pieces[: MAX_TEXT_GAPS // max(1, len(sample.layers))]


COLUMNS: tuple[Column[LayerRow], ...] = (
    Column("layer", "place of the router in the model", lambda x: x.label, 0),
    Column(
        "k of E",
        "experts chosen, of how many",
        lambda x: f"{x.measures.k} of {x.measures.n_experts}",
        8,
    ),
    Column(
        "experts",
        "experts in use per token, of a smoothed router",
        lambda x: DASH if x.measures.used is None else f"{x.measures.used:.2f}",
        3,
        True,
    ),
    Column(
        "gap 1 %",
        "gap below which 1 % of tokens lie",
        lambda x: significant(x.gaps and quantile_at(x.gaps.quantiles, 0.01)),
        4,
    ),
    Column(
        "gap 50 %",
        "gap below which half of the tokens lie",
        lambda x: significant(x.gaps and quantile_at(x.gaps.quantiles, 0.5)),
        3,
    ),
    Column(
        "exact ties",
        "tokens with equal scores",
        lambda x: DASH if x.gaps is None else f"{x.gaps.ties:,}",
        10,
    ),
    Column(
        "f(0)",
        "density of the gap at zero, per unit of score",
        lambda x: significant(x.gaps and x.gaps.density.value),
    ),
    Column(
        "flip bf16",
        "tokens that flip with the logits in bf16",
        lambda x: percent(x.flip_rate("bf16")),
        1,
    ),
    Column("flip fp16", "the same for fp16", lambda x: percent(x.flip_rate("fp16"))),
    Column("flip fp8", "the same for fp8 (e4m3)", lambda x: percent(x.flip_rate("fp8_e4m3")), 5),
    Column(
        "flip int8",
        "the same for int8, one scale per token",
        lambda x: percent(x.flip_rate("int8")),
        6,
    ),
    Column(
        "flip int4",
        "the same for int4, one scale per token",
        lambda x: percent(x.flip_rate("int4")),
        11,
    ),
    Column(
        "flip bf16 product",
        "tokens that flip when the router multiplies in bf16",
        lambda x: percent(x.product and x.product.flip_emulated.value),
    ),
    Column(
        "uncertified",
        "tokens that another summation order of the float32 product may flip, at most",
        lambda x: percent(x.product and x.product.uncertified.value),
    ),
    Column(
        "ε of k + ½",
        "band that costs half an expert per token",
        lambda x: significant((near := x.measures.near.value) and near.epsilon_half.value),
        12,
    ),
    Column(
        "distance",
        "median Euclidean distance of the input to a tie",
        lambda x: significant(
            (distance := x.measures.distance.value) and quantile_at(distance.quantiles, 0.5)
        ),
    ),
    Column(
        "jump",
        "median change of the output when a near-tie flips",
        lambda x: percent(x.jumps and quantile_at(x.jumps.near_quantiles, 0.5)),
        2,
    ),
    Column(
        "dangerous",
        "near-ties whose jump is large",
        lambda x: percent(x.jumps and x.jumps.dangerous.value),
        13,
    ),
    Column("evenness", "entropy of the load / log E", lambda x: f"{x.load.evenness:.2f}", 9),
    Column("busiest", "largest load / even load", lambda x: f"{x.load.busiest:.1f} ×"),
    Column("dead", "experts that no token chose", lambda x: str(len(x.load.dead)), 7),
    Column("cold", "experts below a tenth of an even load", lambda x: str(len(x.load.cold))),
    Column("sets", "distinct sets of experts seen", lambda x: f"{x.measures.coalitions.seen:,}"),
)
