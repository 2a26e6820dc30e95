"""A comparison layer by layer, for the page and the terminal alike, and its names and facts."""

from collections.abc import Mapping
from typing import Any

from tieline.report.layer_table import Column
from tieline.report.numbers import DASH, percent, short_names, significant

__all__ = ["DIFF_COLUMNS", "diff_facts", "diff_findings", "diff_labels", "diff_rows", "diff_title"]

Layer = Mapping[str, Any]


def diff_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The layers with their short names and steps of depth beside them."""
    return [
        {**layer, "label": label, "step": step}
        for layer, label, step in zip(
            result["layers"], diff_labels(result), result["tokens"]["depth"], strict=True
        )
    ]


def diff_labels(result: Mapping[str, Any]) -> list[str]:
    """Short name of each layer, as in A."""
    return short_names([layer["name"] for layer in result["layers"]])


def diff_title(result: Mapping[str, Any]) -> str:
    """A against B by name."""
    return " against ".join(_name(result["provenance"].get(side) or {}) for side in ("a", "b"))


def diff_facts(result: Mapping[str, Any]) -> str:
    """What was compared, in one line."""
    alignment, layers = result["alignment"], result["layers"]
    routing = dict.fromkeys(f"{layer['k']} of {layer['n_experts']} experts" for layer in layers)
    parts = [f"{alignment['tokens']:,} tokens of {alignment['documents']:,} documents"]
    return " · ".join([*parts, f"{len(layers)} routed layers", " or ".join(routing)])


def diff_findings(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The findings with a capital, a full stop and the short name of their layer."""
    names = [layer["name"] for layer in result["layers"]]
    short = dict(zip(names, diff_labels(result), strict=True))
    return [{**x, "text": _sentence(x, short)} for x in result["findings"]]


def _sentence(finding: Mapping[str, Any], short: Mapping[str, str]) -> str:
    text, name = str(finding["text"]).rstrip("."), finding["layer"]
    where = "" if name is None else f"Layer {short.get(name, name)}: "
    return f"{where}{text}." if where else f"{text[:1].upper()}{text[1:]}."


def _name(provenance: Mapping[str, Any]) -> str:
    name = str(provenance.get("model") or provenance.get("file") or "unnamed run")
    emulated = provenance.get("emulated")
    precision = f"{emulated} emulated" if emulated else provenance.get("dtype")
    told = [str(x) for x in (precision, provenance.get("experts_implementation")) if x]
    return f"{name} ({', '.join(told)})" if told else name


def _interval(layer: Layer) -> str:
    flip = layer["flip"]
    return DASH if flip["low"] is None else f"{percent(flip['low'])} – {percent(flip['high'])}"


def _cause(field: str) -> Any:
    def cell(layer: Layer) -> str:
        found = layer["attribution"]
        return DASH if found is None else f"{found[field]:,}"

    return cell


def _scale(field: str) -> Any:
    def cell(layer: Layer) -> str:
        return DASH if layer["attribution"] is None else significant(layer["attribution"][field])

    return cell


def _weight(field: str) -> Any:
    def cell(layer: Layer) -> str:
        return DASH if layer["weight"] is None else percent(layer["weight"][field])

    return cell


DIFF_COLUMNS = (
    Column("layer", "place of the router in A", lambda x: x["label"], 0),
    Column("in B", "name of its partner in B", lambda x: x["name_b"]),
    Column("flips", "tokens whose set of experts differs", lambda x: f"{x['flip']['count']:,}", 2),
    Column("flip rate", "their share", lambda x: percent(x["flip"]["value"]), 1),
    Column("95 % interval", "of the share, clustered by document", _interval, 5),
    Column("inside band", "flips that near-ties explain", _cause("inside"), 4),
    Column("unexplained", "flips whose margin is wider than the band", _cause("unexplained"), 3),
    Column(
        "first there", "those in tokens without an earlier flip", _cause("unexplained_first"), 9
    ),
    Column("noise", "median absolute difference of the scores", _scale("noise"), 8),
    Column("tie band", "six times that", _scale("band"), 10),
    Column("weight moved", "mean share of the weight on other experts", _weight("mean"), 6),
    Column("p99", "its 99th percentile over tokens", _weight("p99"), 7),
    Column("first flips", "tokens that flip here first", lambda x: f"{x['step']['first']:,}"),
    Column("so far", "tokens flipped here or before", lambda x: percent(x["step"]["cumulative"])),
)
