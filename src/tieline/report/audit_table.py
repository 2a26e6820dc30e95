"""The rows of an audit, for the page and the terminal alike; one row per perturbation."""

from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tieline.report.layer_table import Column
from tieline.report.numbers import DASH, percent, short_names, significant, value_of
from tieline.report.terminal import fitting

__all__ = ["COLUMNS", "audit_facts", "audit_notes", "audit_view", "keep_rows"]

Row = Mapping[str, Any]


def audit_view(result: Mapping[str, Any], width: int) -> RenderableType:
    """Verdict, one row per perturbation, what to keep, what was left out, for a terminal."""
    name = str(result["provenance"].get("model") or "unnamed model")
    head = (name, "bold"), ("  " + audit_facts(result), "dim"), "\n", result["verdict"]
    parts: list[RenderableType] = [Text.assemble(*head), Padding(_table(result, width), (1, 0))]
    keeps = keep_rows(result)
    if keeps:
        parts += [Text("Routers to keep in float32", style="bold"), _keep_table(keeps), Text()]
    return Group(*parts, *map(Text, audit_notes(result)))


def audit_facts(result: Mapping[str, Any]) -> str:
    """What was run, in one line."""
    words = [
        f"{len(result['layers'])} routed layers",
        f"{result['tokens']:,} tokens in {result['sequences']} sequences",
        f"{len(result['effects'])} perturbations",
        str(result["provenance"].get("dtype")),
    ]
    return " · ".join(words)


def audit_notes(result: Mapping[str, Any]) -> list[str]:
    """Sentences below the table: noise of 1 % flips, experts never hit, what was left out."""
    sigma, short = result["one_percent"], dict(zip(result["layers"], _short(result), strict=True))
    notes = []
    if sigma["model"] is not None:
        share = percent(sigma["share"])
        notes.append(
            f"Noise of σ = {significant(sigma['model'])} on the logits flips {share} of tokens."
        )
    for never in result["never_hit"]:
        experts, label = never["experts"], short.get(never["layer"], never["layer"])
        named = ", ".join(map(str, experts[:8])) + (", …" if len(experts) > 8 else "")
        notes.append(
            f"Layer {label}: {len(experts)} of {never['n_experts']} experts were never hit by the "
            f"text ({named}), so it says nothing about them."
        )
    notes += [f"Left out for lack of time: {words}." for words in result["left_out"]]
    return notes


def keep_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """For each rounding of the routers: format, layers to keep, what that recovers and costs."""
    short = dict(zip(result["layers"], _short(result), strict=True))
    rows = []
    for row in result["effects"]:
        keep = row["keep"]
        if keep is None or not keep["layers"]:
            continue
        names = ", ".join(short[name] for name in keep["layers"])
        recovered = keep["recovered_kl"]
        rows.append(
            [
                str(row["level"]),
                names if len(keep["layers"]) < len(result["layers"]) else f"all ({names})",
                percent(keep["recovered"]),
                DASH if recovered is None else percent(recovered),
                f"{keep['bytes']:,}",
            ]
        )
    return rows


KEEP_HEADINGS = ("format", "layers", "of the damage", "of the KL", "bytes more")


def _keep_table(rows: list[list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for place, heading in enumerate(KEEP_HEADINGS):
        table.add_column(heading, justify="left" if place < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _table(result: Mapping[str, Any], width: int) -> Table:
    rows = result["effects"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    shown = fitting([(c, [c.cell(row) for row in rows]) for c in COLUMNS], width)
    for column, _ in shown:
        justify = "left" if column is COLUMNS[0] else "right"
        table.add_column(column.heading, justify=justify, no_wrap=True)
    for cells in zip(*(cells for _, cells in shown), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _short(result: Mapping[str, Any]) -> list[str]:
    return short_names(result["layers"])


def _share(field: str) -> Callable[[Row], str]:
    return lambda row: percent(value_of(row[field]))


def _number(field: str) -> Callable[[Row], str]:
    return lambda row: significant(value_of(row[field]), 2)


def _predicted(row: Row) -> str:
    low, high = row["predicted_low"], row["predicted"]
    if high is None:
        return DASH
    same = low is None or high - low <= 0.005 * high
    return percent(high) if same else f"{percent(low)} – {percent(high)}"


def _compounding(row: Row) -> str:
    ratio = row["compounding"]
    return DASH if ratio is None else f"{ratio:.1f} ×"


def _loss(row: Row) -> str:
    value, error = row["loss"]["value"], row["loss"]["standard_error"]
    if value is None:
        return DASH
    spread = "" if error is None else f" ± {error:.1g}"
    return f"{value:+.2g}{spread}"


COLUMNS = (
    Column("perturbation", "what is rounded or noisy, and how", lambda row: row["name"], 0),
    Column(
        "local flips",
        "tokens whose experts change when this router alone is perturbed, inputs clean",
        _share("local"),
        1,
    ),
    Column("predicted", "the same, predicted from the clean scores alone", _predicted, 2),
    Column("full flips", "tokens whose experts change per layer in a full run", _share("full"), 3),
    Column("×", "full flips over local flips: what depth adds", _compounding, 7),
    Column("any layer", "tokens that change experts in a layer at least", _share("any_layer"), 8),
    Column("moved", "share of routed weight that goes to other experts", _share("moved"), 9),
    Column("moved 99 %", "its 99 % quantile", lambda row: percent(row["moved_p99"]), None),
    Column("damage", "mean relative change of a layer’s output by flips", _share("damage"), 6),
    Column("Δ loss", "change of the loss per token, nats, with its standard error", _loss, 5),
    Column("KL", "KL to the clean run, nats per token", _number("kl"), 4),
    Column("floor", "KL that remains with clean routes forced", _number("kl_floor"), 10),
    Column(
        "by flips", "share of the KL that goes with the flips", lambda r: percent(r["by_flips"]), 11
    ),
)
