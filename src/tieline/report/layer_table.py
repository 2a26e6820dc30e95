"""One row per layer, for the page and the terminal alike.

`COLUMNS` is the table: heading, meaning, and the text of a cell. A cell whose section the trace
cannot answer is a dash.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tieline.report.numbers import DASH, answer, percent, short_names, significant, value_of

__all__ = ["COLUMNS", "Column", "layer_rows"]

Layer = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        heading: a word or two.
        meaning: what it says.
        cell: the text of a layer's cell.
        rank: how soon a terminal gives it room, 0 first; None for the page alone.
    """

    heading: str
    meaning: str
    cell: Callable[[Layer], str]
    rank: int | None = None


def layer_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measures of each layer with its jumps beside them and its short name."""
    layers, jumps = result["measures"]["layers"], result["jumps"]
    labels = short_names([layer["name"] for layer in layers])
    return [
        {**layer, "label": label, "jump": jump["value"]}
        for layer, label, jump in zip(layers, labels, jumps, strict=True)
    ]


def _gap_quantile(probability: float) -> Callable[[Layer], str]:
    def cell(layer: Layer) -> str:
        gaps = answer(layer["gap"])
        return DASH if gaps is None else significant(_at(gaps["quantiles"], probability))

    return cell


def _flips(precision: str) -> Callable[[Layer], str]:
    def cell(layer: Layer) -> str:
        rows = answer(layer["precision"]) or []
        found = [row for row in rows if row["precision"] == precision]
        return percent(value_of(found[0]["flip_emulated"])) if found else DASH

    return cell


def _ties(layer: Layer) -> str:
    gaps = answer(layer["gap"])
    return DASH if gaps is None else f"{gaps['ties']:,}"


def _density(layer: Layer) -> str:
    gaps = answer(layer["gap"])
    return DASH if gaps is None else significant(value_of(gaps["density"]))


def _half(layer: Layer) -> str:
    near = answer(layer["near"])
    return DASH if near is None else significant(value_of(near["epsilon_half"]))


def _distance(layer: Layer) -> str:
    distance = answer(layer["distance"])
    return DASH if distance is None else significant(_at(distance["quantiles"], 0.5))


def _product(layer: Layer) -> str:
    product = answer(layer["product"])
    return DASH if product is None else percent(value_of(product["flip_emulated"]))


def _jump(layer: Layer) -> str:
    return DASH if layer["jump"] is None else percent(_at(layer["jump"]["near_quantiles"], 0.5))


def _dangerous(layer: Layer) -> str:
    return DASH if layer["jump"] is None else percent(value_of(layer["jump"]["dangerous"]))


def _at(quantiles: Mapping[str, Any], probability: float) -> float | None:
    """Quantile of that level, None if it was not taken."""
    levels = dict(zip(quantiles["probabilities"], quantiles["value"], strict=True))
    return levels.get(probability)


COLUMNS = (
    Column("layer", "place of the router in the model", lambda x: x["label"], 0),
    Column("k of E", "experts chosen, of how many", lambda x: f"{x['k']} of {x['n_experts']}", 8),
    Column("gap 1 %", "gap below which 1 % of tokens lie", _gap_quantile(0.01), 4),
    Column("gap 50 %", "gap below which half of the tokens lie", _gap_quantile(0.5), 3),
    Column("exact ties", "tokens whose k-th and next score are equal", _ties, 10),
    Column("f(0)", "density of the gap at zero, per unit of score", _density),
    Column("flip bf16", "tokens that flip when the logits are rounded to bf16", _flips("bf16"), 1),
    Column("flip fp16", "the same for fp16", _flips("fp16")),
    Column("flip fp8", "the same for fp8 (e4m3)", _flips("fp8_e4m3"), 5),
    Column("flip int8", "the same for int8, one scale per token", _flips("int8"), 6),
    Column("flip int4", "the same for int4, one scale per token", _flips("int4"), 11),
    Column("flip bf16 product", "tokens that flip when the router multiplies in bf16", _product),
    Column("ε of k + ½", "band that costs half an expert per token", _half, 12),
    Column("distance", "median Euclidean distance of the input to a tie", _distance),
    Column("jump", "median change of the output when a near-tie flips", _jump, 2),
    Column("dangerous", "near-ties whose jump is large", _dangerous, 13),
    Column("evenness", "entropy of the load / log E", lambda x: f"{x['load']['evenness']:.2f}", 9),
    Column("busiest", "largest load / even load", lambda x: f"{x['load']['busiest']:.1f} ×"),
    Column("dead", "experts that no token chose", lambda x: str(len(x["load"]["dead"])), 7),
    Column("cold", "experts below a tenth of an even load", lambda x: str(len(x["load"]["cold"]))),
    Column("sets", "distinct sets of experts seen", lambda x: f"{x['coalitions']['seen']:,}"),
)
