"""Report of a precision audit: charts, tables, routers to keep and remedies side by side."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from tieline.analysis.audit_records import (
    PerturbationEffect,
    PrecisionAudit,
    Remedy,
    RemedyEffect,
    RemedyTable,
)
from tieline.analysis.served_precision import HARMLESS
from tieline.core.statistics import Estimate, mean_limits
from tieline.core.text import short_names
from tieline.report.charts import Axis, Chart, Series, Symbol, above_zero, layer_colour
from tieline.report.html_page import PagePanel
from tieline.report.matplotlib_figures import chart_figure
from tieline.report.result_views import Report, report_views
from tieline.report.tables import (
    Column,
    Grid,
    grid,
    precision_text,
    provenance_rows,
    provenance_text,
    rich_table,
    text_table,
)
from tieline.report.words.audit import (
    audit_caveats,
    audit_notes,
    remedies_under,
    remedy_sentences,
    served_table_sentence,
)
from tieline.report.words.numbers import DASH, finite, percent, significant, with_error
from tieline.report.words.served_precision import TOLERANCE_TEXT

FLIPS_PANEL = PagePanel(
    "audit-flips",
    "Tokens that change experts",
    "Filled dots: every router perturbed by itself, on inputs of the clean run. Dashes: the same, "
    "predicted from the clean scores alone. Open diamonds: full runs, where a flip in one layer "
    "disturbs the next. Bars are two standard errors, clustered by sequence.",
    wide=True,
)
KL_PANEL = PagePanel(
    "audit-kl",
    "Damage to the predictions",
    "Dots: KL to the clean run per token, with two standard errors. Dashes: its floor, the KL that "
    "remains when tokens that would flip get the experts of the clean run. The space between is "
    "what flips cost.",
    wide=True,
)
LAYER_DAMAGE_PANEL = PagePanel(
    "audit-layers",
    "Where rounded routers do their damage",
    "Mean relative change of each layer’s output by flips of its own router, inputs clean. Layers "
    "at the top are the first to keep in float32.",
    wide=True,
)
KEEP_HEADINGS = ("format", "layers", "of the damage", "of the KL", "bytes more")
LAYER_HEADINGS = ("layer", "perturbation", "local flips", "predicted", "full flips", "damage")
CERTIFICATE_HEADINGS = ("layer", "tokens not certified")
REMEDY_HEADINGS = ("remedy", "KL to the original", "KL of two runs", "model moved by", "price")
SHORT_REMEDY_HEADINGS = ("remedy", "to original", "two runs", "moved", "price")
EffectNumber = Callable[[PerturbationEffect], float | None]
EffectEstimate = Callable[[PerturbationEffect], Estimate]


MAX_LEVEL_NAMES = 8
"""Largest number of perturbations whose names are written level below a chart."""

RUN_ALL_HINT = Text("--all runs every format, noise and remedy; page and JSON have every number.")
IGNORE_HEADINGS = ("library", "argument")
IGNORE_TITLE = "Keeping the routers out of quantisation"


def _audit_report(result: PrecisionAudit) -> Report:
    """Build the report: verdict, perturbations, charts, routers to keep, remedies, layers."""
    columns = [column for column in COLUMNS if (column.rank or 0) < 7]
    size = {"width": 6.75, "height": 3.4}
    return Report(
        kind="precision audit",
        name="Precision audit",
        title=provenance_text(result.provenance, "model") or "unnamed model",
        facts=_audit_facts(result),
        verdict=result.verdict,
        table=lambda: grid(columns, result.effects),
        body=partial(_audit_page_body, result),
        below=partial(_audit_terminal_views, result),
        figures={
            "flips": lambda: chart_figure(_audit_flips_chart(result.effects), **size),
            "kl": lambda: chart_figure(_audit_kl_chart(result.effects), **size),
        },
    )


def _audit_page_body(result: PrecisionAudit) -> dict[str, Any]:
    """Return the values that the template of the page shows."""
    table = result.remedies
    return {
        "template": "audit.html",
        "style": "",
        "panels": audit_panels(result),
        "table": grid(_all_columns(result), result.effects),
        "notes": audit_notes(result, _audited_layer_labels(result)),
        "keeps": Grid(KEEP_HEADINGS, kept_router_rows(result)),
        "remedies": [] if table is None else remedy_grids(table),
        "choices": [] if table is None else remedy_sentences(table),
        "ignore": ignored_router_rows(result),
        "ignore_title": IGNORE_TITLE,
        "layers": Grid(LAYER_HEADINGS, _effects_by_layer(result)),
        "certificates": Grid(CERTIFICATE_HEADINGS, _uncertified_by_layer(result)),
        "provenance": provenance_rows(result.provenance, result.timings),
    }


def _audit_terminal_views(result: PrecisionAudit, width: int) -> list[RenderableType]:
    """Return the terminal's tables and sentences; fewer unless the full audit was run."""
    columns = _all_columns(result) if result.is_full else _served_columns(result)
    views: list[RenderableType] = [rich_table(columns, result.effects, width, left_aligned=1)]
    keeps, ignored, table = kept_router_rows(result), ignored_router_rows(result), result.remedies
    if not result.is_full:
        views += [Text(served_table_sentence(result)), Text()]
        views += [] if table is None else remedies_terminal_view(table, brief=True)
        return [*views, *map(Text, audit_caveats(result)), RUN_ALL_HINT]
    if keeps:
        views += _titled_table("Routers to keep in float32", KEEP_HEADINGS, keeps)
    if table is not None:
        views += remedies_terminal_view(table)
    if ignored:
        views += _titled_table(IGNORE_TITLE, IGNORE_HEADINGS, ignored)
    return [*views, *map(Text, audit_notes(result, _audited_layer_labels(result)))]


def _titled_table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[RenderableType, ...]:
    """Return a bold title, a table and an empty line, for a terminal."""
    table = text_table(head, rows, left_aligned=2, fold=True)
    return Text(title, style="bold"), table, Text()


page, figures, terminal, summary, notebook = report_views(_audit_report)


def audit_panels(result: PrecisionAudit) -> list[PagePanel]:
    """Return every panel with its chart, or with the reason why it has none."""
    layers = _layer_damage_chart(result)
    reason = ["no rounding of the routers was run"]
    return [
        FLIPS_PANEL.with_chart(_audit_flips_chart(result.effects)),
        KL_PANEL.with_chart(_audit_kl_chart(result.effects)),
        LAYER_DAMAGE_PANEL.with_chart(layers)
        if layers
        else LAYER_DAMAGE_PANEL.without_chart(reason),
    ]


def ignored_router_rows(result: PrecisionAudit) -> tuple[tuple[str, str], ...]:
    """Return each quantisation library and the Python argument that excludes all routers."""
    return tuple(
        (library, ", ".join(f"{name}={value!r}" for name, value in arguments.items()))
        for library, arguments in result.ignore.items()
    )


def kept_router_rows(result: PrecisionAudit) -> tuple[tuple[str, ...], ...]:
    """Return per router format the layers to keep in float32, what that recovers and costs."""
    labels = _audited_layer_labels(result)
    keep_lists = [(row.level, row.keep) for row in result.effects if row.keep and row.keep.layers]
    return tuple(
        (
            str(level),
            ("{}" if len(keep.layers) < len(result.layers) else "all ({})").format(
                ", ".join(labels[name] for name in keep.layers)
            ),
            percent(keep.recovered),
            percent(keep.recovered_kl),
            f"{keep.bytes:,}",
        )
        for level, keep in keep_lists
    )


def _effects_by_layer(result: PrecisionAudit) -> tuple[tuple[str, ...], ...]:
    """Return flips and damage, one row per perturbation and layer."""
    labels = short_names(result.layers)
    return tuple(
        (
            label,
            row.name,
            percent(layer.local.value),
            percent(layer.predicted),
            percent(layer.full.value),
            significant(layer.damage.value, 2),
        )
        for row in result.effects
        for label, layer in zip(labels, row.layers, strict=True)
    )


def _uncertified_by_layer(result: PrecisionAudit) -> tuple[tuple[str, ...], ...]:
    """Return the share of tokens that another order of summation may flip, by layer."""
    labels = _audited_layer_labels(result)
    return tuple(
        (labels[name], share.status if share.value is None else percent(share.value))
        for name, share in result.uncertified.items()
    )


def _audit_facts(result: PrecisionAudit) -> str:
    """Return one line with layers, tokens, perturbations and precision."""
    facts = [
        f"{len(result.layers)} routed layers",
        f"{result.tokens:,} tokens in {result.sequences} sequences",
        f"{len(result.effects)} perturbations",
        precision_text(result.provenance),
    ]
    return " · ".join(filter(None, facts))


def remedy_grids(table: RemedyTable) -> list[tuple[str, Grid]]:
    """Return the name of each perturbation and a table with one row per remedy.

    The columns are the KL that remains to the clean original, the KL between two perturbed runs,
    the KL by which the remedy moves the model itself, and the price.
    """
    return [
        (name, Grid(REMEDY_HEADINGS, tuple(_remedy_rows(table, name, lambda x: with_error(x, 2)))))
        for name in table.perturbations
    ]


def remedies_terminal_view(table: RemedyTable, brief: bool = False) -> list[RenderableType]:
    """Return the tables of the remedies for a terminal; `brief` shortens the sentences below."""
    views: list[RenderableType] = []
    for name in table.perturbations:
        rows = [
            (*cells, price.removesuffix(" time"))
            for *cells, price in _remedy_rows(table, name, lambda x: significant(x.value, 2))
        ]
        title = Text(f"Remedies under {name}", style="bold")
        views += [title, text_table(SHORT_REMEDY_HEADINGS, rows, left_aligned=1), Text()]
    return [*views, *map(Text, remedy_sentences(table, brief)), *([] if brief else [Text()])]


def _remedy_rows(
    table: RemedyTable, name: str, text: Callable[[Estimate], str]
) -> list[tuple[str, ...]]:
    """Return name, three KLs and price of each remedy; `text` formats a KL."""
    rows = []
    for remedy, effect in remedies_under(table, name):
        kls = (effect.to_original, effect.two_runs, remedy.moved)
        values = ("0" if kl.value == 0 else text(kl) for kl in kls)
        rows.append((remedy.name, *values, _remedy_price(remedy, effect)))
    return rows


def _remedy_price(remedy: Remedy, effect: RemedyEffect) -> str:
    """Return the price of a remedy: bytes, bytes per token or experts, and time."""
    if remedy.kind == "nothing":
        return DASH
    if remedy.kind == "float32":
        return f"{effect.bytes:,} bytes"
    time = "" if remedy.time is None else f", {remedy.time:.2f} × time"
    if remedy.kind == "replay":
        return f"{remedy.bytes_per_token} B a token{time}"
    return f"{remedy.experts:.2f} experts{time}"


def _audited_layer_labels(result: PrecisionAudit) -> dict[str, str]:
    """Return the short name of each layer."""
    return dict(zip(result.layers, short_names(result.layers), strict=True))


def _audit_flips_chart(rows: Sequence[PerturbationEffect]) -> Chart:
    """Chart local, predicted and full flip rates, by perturbation."""
    series = (
        _perturbation_estimates(rows, "local, counted", lambda row: row.local, "circle", "@accent"),
        _perturbation_points(rows, "local, predicted", lambda row: row.predicted, "dash", "@ink"),
        _perturbation_estimates(rows, "full run", lambda row: row.full, "diamond-open", "@warn"),
    )
    shares = Axis("tokens that change experts, mean over layers", "log", percent=True)
    return _perturbations_chart(shares, series)


def _audit_kl_chart(rows: Sequence[PerturbationEffect]) -> Chart:
    """Chart the KL to the clean run and its floor, by perturbation."""
    series = (
        _perturbation_estimates(rows, "KL", lambda row: row.kl, "circle", "@warn"),
        _perturbation_points(rows, "floor", lambda row: row.kl_floor.value, "dash", "@ink"),
    )
    nats = Axis("KL to the clean run (nats per token)", "log")
    return _perturbations_chart(nats, series)


def _perturbations_chart(y: Axis, series: tuple[Series, ...]) -> Chart:
    """Return a chart over perturbations, with slanted names if there are many."""
    if len(series[0].x) <= MAX_LEVEL_NAMES:
        return Chart(Axis("", "category"), y, series, height=420)
    return Chart(Axis("", "category", angle=-40), y, series, height=520, margin_below=150)


def _layer_damage_chart(result: PrecisionAudit) -> Chart | None:
    """Chart the damage of each layer, by router format; None if no router was rounded."""
    rows, labels = [row for row in result.effects if row.keep], short_names(result.layers)
    if not rows:
        return None
    series = tuple(
        Series(
            [str(row.level) for row in rows],
            above_zero(row.layers[index].damage.value for row in rows),
            f"layer {label}",
            layer_colour(index, len(labels)),
            size=9,
            hover="%{x}: %{y:percent}<extra>%{fullData.name}</extra>",
        )
        for index, label in enumerate(labels)
    )
    damage = Axis("change of the layer’s output", "log", percent=True)
    formats = Axis("format of the routers", "category")
    return Chart(formats, damage, series, layers=tuple(labels))


def _perturbation_points(
    rows: Sequence[PerturbationEffect], name: str, value: EffectNumber, symbol: Symbol, colour: str
) -> Series:
    """Return one point per perturbation, on a logarithmic axis: None in place of zero."""
    return Series(
        [row.name for row in rows],
        above_zero(map(value, rows)),
        name,
        colour,
        symbol=symbol,
        size=16 if symbol == "dash" else 9,
        hover=f"%{{x}}: %{{y:.3~g}} {name}<extra></extra>",
    )


def _perturbation_estimates(
    rows: Sequence[PerturbationEffect],
    name: str,
    estimate: EffectEstimate,
    symbol: Symbol,
    colour: str,
) -> Series:
    """Return one point per perturbation with bars of two standard errors."""
    spread = [2 * (finite(estimate(row).standard_error) or 0.0) for row in rows]
    series = _perturbation_points(rows, name, lambda row: estimate(row).value, symbol, colour)
    return replace(series, errors=(spread, spread))


def _predicted_flips_cell(row: PerturbationEffect) -> str:
    """Return the range of the predicted flip rate as text."""
    low, high = row.predicted_low, row.predicted
    if high is None:
        return DASH
    is_point = low is None or high - low <= 0.005 * high
    return percent(high) if is_point else f"{percent(low)} – {percent(high)}"


def _loss_change_cell(row: PerturbationEffect) -> str:
    """Return the change of the loss with its standard error as text."""
    if row.loss.value is None:
        return DASH
    error = row.loss.standard_error
    sign = "+" if row.loss.value >= 0 else ""
    change = f"{sign}{significant(row.loss.value, 2)}"
    return change if error is None else f"{change} ± {significant(error, 1)}"


COLUMNS: tuple[Column[PerturbationEffect], ...] = (
    Column("perturbation", "what is rounded or noisy, and how", lambda x: x.name, 0),
    Column(
        "local flips",
        "tokens whose experts change when this router alone is perturbed, inputs clean",
        lambda x: percent(x.local.value),
        1,
    ),
    Column(
        "predicted", "the same, predicted from the clean scores alone", _predicted_flips_cell, 2
    ),
    Column("full flips", "the same per layer in a full run", lambda x: percent(x.full.value), 3),
    Column(
        "×",
        "full flips over local flips: what depth adds",
        lambda x: DASH if finite(x.compounding) is None else f"{x.compounding:.1f} ×",
        7,
    ),
    Column(
        "any layer",
        "tokens that flip in a layer at least",
        lambda x: percent(x.any_layer.value),
        8,
    ),
    Column(
        "moved", "routed weight that goes to other experts", lambda x: percent(x.moved.value), 9
    ),
    Column("moved 99 %", "its 99 % quantile", lambda x: percent(x.moved_p99), None),
    Column(
        "damage",
        "mean change of a layer’s output by flips",
        lambda x: percent(x.damage.value),
        6,
    ),
    Column("Δ loss", "change of the loss, nats per token", _loss_change_cell, 5),
    Column("KL", "KL to the clean run, nats per token", lambda x: significant(x.kl.value, 2), 4),
    Column("floor", "KL with clean routes forced", lambda x: significant(x.kl_floor.value, 2), 10),
    Column("by flips", "share of the KL due to flips", lambda x: percent(x.by_flips), 11),
)


def _all_columns(result: PrecisionAudit) -> tuple[Column[PerturbationEffect], ...]:
    """Return all columns, the verdict last."""
    return (*COLUMNS, _verdict_column(result))


def _served_columns(result: PrecisionAudit) -> tuple[Column[PerturbationEffect], ...]:
    """Return the columns for an audit of the precision served; all fit into a terminal."""

    def loss_interval(row: PerturbationEffect) -> str:
        low, high = mean_limits(row.loss, result.sequences)
        ends = f"{significant(low, 2)} to {significant(high, 2)}"
        return ends if math.isfinite(high) else significant(row.loss.value, 2)

    kl, floor = (column for column in COLUMNS if column.heading in ("KL", "floor"))
    return (
        COLUMNS[0],
        Column("changed", "in a layer at least", lambda row: percent(row.any_layer.value), 0),
        replace(kl, rank=0),
        replace(floor, rank=0),
        Column("Δ loss (95 %)", "interval of the change of the loss", loss_interval, 0),
        _verdict_column(result),
    )


def _verdict_column(result: PrecisionAudit) -> Column[PerturbationEffect]:
    """Return the column that states, by its interval, whether a perturbation is harmless."""
    meaning = f"whether the KL is below {HARMLESS:g} nats, by its 95 % interval"
    return Column("verdict", meaning, lambda row: TOLERANCE_TEXT[result.tolerance(row)], 2)
