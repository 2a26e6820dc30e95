"""Where the numbers of a result come from, as rows of a page and facts of a title.

provenance_text    one entry of a provenance, which anybody may have written
precision_text     what a model computed in, and what its weights were stored in
origin_rows        provenance and timings, for the end of a page; metric_rows named numbers
dotted_rows        nested provenance as pairs of dotted names and values
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tieline.report.words.numbers import significant

if TYPE_CHECKING:  # tables of plain words are drawn without torch
    pass


def dotted_rows(value: Mapping[str, Any], above: str = "") -> list[tuple[str, object]]:
    """Nested mappings as pairs of dotted names and values; None and empty values are left out."""
    rows: list[tuple[str, object]] = []
    for key, item in value.items():
        name = f"{above}{key}"
        if isinstance(item, Mapping):
            rows += dotted_rows(item, f"{name}.")
        elif item not in (None, "", [], ()):
            rows.append((name, item))
    return rows


def provenance_text(provenance: object, *names: str) -> str:
    """The first of these entries that a provenance has, as text; empty if it has none."""
    entries = provenance if isinstance(provenance, Mapping) else {}
    return next((str(entries[name]) for name in names if entries.get(name)), "")


def precision_text(provenance: object) -> str:
    """What the model computed in and, where it differs, what its weights were stored in."""
    computed, stored = (
        provenance_text(provenance, "dtype"),
        provenance_text(provenance, "stored_dtype"),
    )
    return f"{computed} (stored in {stored})" if stored not in ("", computed) else computed


def origin_rows(
    provenance: Mapping[str, Any], timings: Mapping[str, float]
) -> list[tuple[str, object]]:
    """Where the numbers of a page come from: its provenance, then its timings."""
    facts = [
        (n, significant(v, 4) if isinstance(v, float) else v) for n, v in dotted_rows(provenance)
    ]
    return [*facts, *timing_rows(timings)]


def metric_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The named numbers of a result in the order of their names."""
    return [(name, significant(number, 4)) for name, number in sorted(metrics.items())]


def timing_rows(timings: Mapping[str, float]) -> list[tuple[str, str]]:
    """Seconds per stage, then rates."""
    rates = {name: value for name, value in timings.items() if name.endswith("per_second")}
    stages = [(f"time.{n}", f"{significant(v)} s") for n, v in timings.items() if n not in rates]
    return stages + [(name.replace("_", " "), significant(v)) for name, v in rates.items()]
