"""An inspection: its report and its table of layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tieline.analysis.inspect_records import Inspection, TextPiece, TextSample
from tieline.core.text import short_names
from tieline.report.html_page import Panel
from tieline.report.inspect_charts import (
    LayerRow,
    inspected_layer_rows,
    inspection_figures,
    inspection_panels,
    quantile_at,
)
from tieline.report.result_views import Report, report_views
from tieline.report.tables import (
    MOST_FINDINGS,
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

IN_BF16 = "tokens change an expert per layer when its logits are rounded to bf16"
IN_NOISE = "tokens change an expert per layer under noise of 0.01 on its logits"
KEY_NUMBERS: tuple[tuple[tuple[tuple[str, str], ...], Callable[[float], str]], ...] = (
    ((("flip@bf16", IN_BF16), ("flip@0.01", IN_NOISE)), percent),
    ((("gap@0.5", "median gap between the last chosen score and the next"),), significant),
    ((("evenness", "evenness of the load over the experts, mean over layers"),), percent),
    ((("dead", "experts were never chosen"),), lambda number: f"{number:.0f}"),
)
"""Names and meanings of the numbers in large type, none of which the verdict says; the first that
is known of each group."""

ON_PAGE_ONLY = ("epsilon",)
"""Kinds of findings that the terminal leaves to the page."""

LEGEND = (
    "A gap is that of the last chosen score to the next: 1 % of tokens are below “gap 1 %”. "
    "“flip” rounds the logits alone; “jump” is the median change of a layer's output when a "
    "near-tie flips; “dead” experts were never chosen."
)
"""How to read the columns of the terminal."""

LIMITS = (0.01, 0.03, 0.1, 0.3)
"""Relative gaps at which the ground of a token becomes weaker; above the last there is none."""
MOST_GAPS = 40_000
"""Gaps of tokens in layers that the page holds; longer stretches of text are cut."""
TEXT = Panel("text", "A stretch of the text, coloured by gap", "")
NO_TEXT = "not answerable: the text of these tokens is not known"


def _inspection_report(result: Inspection) -> Report:
    """Verdict, findings, charts, text by nearness to a tie, all layers, provenance."""
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
    """What the template of the page shows."""
    return {
        "template": "inspect.html",
        "style": "",
        "panels": [*inspection_panels(result), *_missing_text_panel(result)],
        "data": {"text": _text_gaps_data(result.sample)},
        "numbers": _inspection_key_numbers(result),
        "findings": finding_rows(result.findings, _inspected_layer_names(result)),
        "shown": MOST_FINDINGS,
        "text": _coloured_text(result),
        "calibration": calibration_grid(result),
        "calibration_words": calibration_sentence(result),
        "text_title": TEXT.title,
        "table": grid(_inspection_page_columns(result), inspected_layer_rows(result)),
        "provenance": provenance_rows(result.provenance, result.timings),
        "metrics": metric_rows(result.metrics),
    }


def _inspection_terminal_views(result: Inspection, width: int) -> list[RenderableType]:
    """One row per layer, findings, and how many tokens calibration needs."""
    table = rich_table(COLUMNS, inspected_layer_rows(result), width)
    sentence = calibration_sentence(result)
    findings = [finding for finding in result.findings if finding.kind not in ON_PAGE_ONLY]
    findings_table = findings_view(tuple(findings), _inspected_layer_names(result))
    legend = Padding(Text(LEGEND), (0, 0, 1, 0))
    return [table, legend, findings_table, *([Text(sentence)] if sentence else [])]


page, figures, terminal, summary, notebook = report_views(_inspection_report)


def _inspection_facts(result: Inspection) -> str:
    """Layers, experts, tokens and precision, in one line."""
    layers = result.measures.layers
    routing = dict.fromkeys(
        f"{layer.k} of {layer.n_experts} experts" + (", smoothed" if layer.used else "")
        for layer in layers
    )
    tokens = max(layer.tokens for layer in layers)
    facts = [f"{len(layers)} routed layers", " or ".join(routing), f"{tokens:,} tokens"]
    return " · ".join(filter(None, [*facts, precision_text(result.provenance)]))


def calibration_grid(result: Inspection) -> Grid:
    """Layer, expert with the fewest tokens, and tokens needed with their interval."""
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
    """Names of the layers, in order of depth."""
    return [layer.name for layer in result.measures.layers]


def _inspection_page_columns(result: Inspection) -> list[Column[LayerRow]]:
    """All columns; the choice of k among E is left out where the facts tell it for all layers."""
    is_one_choice = len({(layer.k, layer.n_experts) for layer in result.measures.layers}) == 1
    return [column for column in COLUMNS if not (is_one_choice and column is COLUMNS[1])]


def _inspection_key_numbers(result: Inspection) -> list[tuple[str, str]]:
    """Up to five numbers with their meanings."""
    tiles = []
    for choices, show in KEY_NUMBERS:
        measured = [(name, meaning) for name, meaning in choices if name in result.metrics]
        tiles += [(show(result.metrics[name]), meaning) for name, meaning in measured[:1]]
    return tiles


def _missing_text_panel(result: Inspection) -> list[Panel]:
    """The panel of the text where it cannot be shown, with the reason."""
    sample = result.sample
    if sample is None:
        return [TEXT.without_chart([NO_TEXT])]
    has_gaps = any(piece.gap is not None for piece in sample.pieces)
    return [] if has_gaps else [TEXT.without_chart([result.measures.layers[0].gap.status])]


def _coloured_text(result: Inspection) -> dict[str, Any] | None:
    """What the template needs to colour the text: options, tokens with level and hint, legend."""
    sample = result.sample
    if sample is None or _missing_text_panel(result):
        return None
    return {
        "document": sample.document,
        "layers": short_names(sample.layers),
        "tokens": [_coloured_token(piece) for piece in _text_pieces_on_page(sample)],
        "limits": LIMITS,
    }


def _coloured_token(piece: TextPiece) -> tuple[int, str, str]:
    """Strength of the ground, hint and text of a token."""
    gap = finite(piece.gap)
    level = sum(gap >= limit for limit in LIMITS) if gap is not None else len(LIMITS)
    hint = DASH if gap is None else f"{significant(gap, 2)} of the median gap"
    return level, hint, piece.text


def _text_gaps_data(sample: TextSample | None) -> dict[str, Any]:
    """What the script of the page needs to colour the text by another layer."""
    if sample is None:
        return {"limits": LIMITS, "layers": [], "gaps": []}
    gaps = [
        [None if finite(gap) is None else float(f"{gap:.2g}") for gap in piece.gaps]
        for piece in _text_pieces_on_page(sample)
    ]
    return {"limits": LIMITS, "layers": short_names(sample.layers), "gaps": gaps}


def _text_pieces_on_page(sample: TextSample) -> tuple[TextPiece, ...]:
    """The tokens of the text that the page has room for."""
    return sample.pieces[: MOST_GAPS // max(1, len(sample.layers))]


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
