"""What a choice of experts, active experts and width buys: many numbers, no single answer.

`advise` lays the granularities of one layer side by side. Every quantity says where it holds
(`QUANTITIES`), and every entry of a row that lies outside says so itself. The paper's bound, a
rigorous better one and the expectation of a Gaussian layer stand next to each other: they differ by
powers of ten, and only the last two say something about a layer that exists.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tieline.errors import require
from tieline.geometry import gaussian_gap_density
from tieline.tropical.capacity import (
    Attainability,
    attainability,
    capacity_bound,
    group_coalitions,
    sharp_bound,
    zaslavsky,
)
from tieline.tropical.expectation import (
    log_binomial,
    log_expected_cells,
    log_expected_regions,
    wall_density,
)
from tieline.tropical.presets import LayerShape
from tieline.tropical.quantities import QUANTITIES
from tieline.tropical.score_rounding import gaussian_rounding_flips

__all__ = ["Advice", "Entry", "Row", "advise"]


REACH: dict[Attainability, str] = {
    "by every generic router": "",
    "by some routers": "only special routers on R^{d} have a cell for each",
    "by none": "no router on R^{d} has a cell for each",
    "not decided": "not decided whether a router on R^{d} can have a cell for each",
}


class Entry(NamedTuple):
    """One number of one row.

    Attributes:
        value: the number; None where it is beyond float64.
        log10: its decimal logarithm; None for zero.
        note: why the number does not apply to this row; empty if it does.
    """

    value: float | int | None
    log10: float | None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One granularity: the layer split by `split`, and its numbers by the names of `QUANTITIES`."""

    split: int
    shape: LayerShape
    entries: dict[str, Entry]


@dataclass(frozen=True)
class Advice:
    """All granularities of a layer.

    Attributes:
        source: where the shape comes from.
        d_eff: dimension of the flat of inputs that pieces are counted on.
        rows: one per split, in the order asked for.
        notes: what to know before reading any number.
    """

    source: str
    d_eff: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: rows, and for each quantity its heading, meaning and validity."""
        rows = [
            {
                "split": row.split,
                "shape": asdict(row.shape),
                "entries": {name: entry._asdict() for name, entry in row.entries.items()},
            }
            for row in self.rows
        ]
        quantities = {name: asdict(quantity) for name, quantity in QUANTITIES.items()}
        head = {"source": self.source, "d_eff": self.d_eff, "notes": list(self.notes)}
        return head | {"quantities": quantities, "rows": rows}


def advise(
    shape: LayerShape, d_eff: int = 16, splits: Sequence[int] = (1,), source: str = "given"
) -> Advice:
    """The numbers of `QUANTITIES` for a layer at each granularity (paper 3, sec. 5.1).

    Args:
        shape: the layer at granularity 1.
        d_eff: effective dimension of its inputs.
        splits: granularities m: N, H, k become mN, H/m, mk.
        source: where the shape comes from, for the record.
    """
    require(1 <= d_eff <= shape.hidden, f"need 1 <= d_eff <= hidden={shape.hidden}, got {d_eff}")
    require(len(splits) > 0, "need at least one granularity")
    require(len(set(splits)) == len(splits), f"granularities must differ, got {list(splits)}")
    rows = tuple(Row(m, shape.split(m), _entries(shape, d_eff, m)) for m in splits)
    return Advice(source, d_eff, rows, tuple(_notes(shape)))


def _entries(base: LayerShape, d_eff: int, m: int) -> dict[str, Entry]:
    shape = base.split(m)
    found = _costs(shape) | _counts(shape, d_eff) | _ties(shape) | _gains(base, d_eff, m)
    narrow = "" if shape.width >= d_eff else f"H/m = {shape.width} < d_eff: the law is void here"
    found["m_max"] = _entry(base.width // d_eff, narrow)
    assert list(found) == list(QUANTITIES)
    return found


def _costs(shape: LayerShape) -> dict[str, Entry]:
    per_expert = shape.matrices * shape.width * shape.hidden
    router = shape.n_experts * shape.hidden
    active = (shape.k + shape.shared) * per_expert + router
    return {
        "parameters": _entry((shape.n_experts + shape.shared) * per_expert + router),
        "active": _entry(active),
        "flops": _entry(2 * active),
    }


def _counts(shape: LayerShape, d_eff: int) -> dict[str, Entry]:
    n, k, width = shape.n_experts, shape.k, shape.width
    reach = attainability(n, k, d_eff)
    unreached = REACH[reach].format(d=d_eff)
    grouped = "" if shape.n_groups == 1 else "as if routing were not group-limited"
    coalitions = group_coalitions(n, k, shape.n_groups, shape.k_groups)
    regions = log_expected_regions(n, k, width, d_eff)
    dense = math.log(zaslavsky(k * width, d_eff))
    return {
        "coalitions": _entry(coalitions, unreached),
        "paper_bound": _entry(capacity_bound(n, k, width, d_eff), grouped),
        "sharp_bound": _entry(sharp_bound(n, k, width, d_eff), grouped),
        "expected_cells": _from_log(log_expected_cells(n, k, d_eff), grouped),
        "expected_regions": _from_log(regions, grouped),
        "over_dense": _from_log(regions - dense, grouped),
    }


def _ties(shape: LayerShape) -> dict[str, Entry]:
    n, k = shape.n_experts, shape.k
    density, flips = gaussian_gap_density(n, k), gaussian_rounding_flips(n, k)
    grouped = "" if shape.n_groups == 1 else "as if routing were not group-limited"
    coarse = grouped or ("" if flips < 0.1 else "above 10 %: first order overstates")
    return {
        "switches": _entry(wall_density(n, k) / math.pi, grouped),
        "kinks": _entry(k * shape.width / math.pi),
        "gap_density": _entry(density, grouped),
        "bf16_flips": _entry(flips, coarse),
    }


def _gains(base: LayerShape, d_eff: int, m: int) -> dict[str, Entry]:
    """Ratios to granularity 1: the paper's law, what it stands for, its bound, the expectation."""
    fine, n, k = base.split(m), base.n_experts, base.k
    law = (m - 1) * k * math.log(n * math.e / k) - (d_eff + 0.5) * math.log(m)
    binomials = log_binomial(fine.n_experts, fine.k) - log_binomial(n, k)
    regions = [log_expected_regions(s.n_experts, s.k, s.width, d_eff) for s in (fine, base)]
    void = "" if fine.width >= d_eff else f"H/m = {fine.width} < d_eff = {d_eff}"
    return {
        "paper_gain": _from_log(law, void),
        "binomial_gain": _from_log(binomials - d_eff * math.log(m), void),
        "bound_gain": _from_log(binomials),
        "expected_gain": _from_log(regions[0] - regions[1]),
    }


def _notes(shape: LayerShape) -> list[str]:
    notes = [
        "Experts are taken as one hidden layer of ReLU neurons; a gated expert (SwiGLU) has no "
        "linear pieces, and its counts stand for kinks of the same number of neurons.",
        "Expectations are those of Gaussian weights, as at the start of training.",
    ]
    if shape.n_groups > 1:
        notes.append(
            f"Routing is limited to {shape.k_groups} of {shape.n_groups} groups: only the number "
            "of coalitions knows it."
        )
    return notes


def _entry(value: float | int, note: str = "") -> Entry:
    log10 = math.log10(value) if value > 0 else None
    if isinstance(value, int) and value > 1 << 53:
        return Entry(float(value) if (log10 or 0) < 308 else None, log10, note)
    return Entry(value, log10, note)


def _from_log(log_value: float, note: str = "") -> Entry:
    value = math.exp(log_value) if log_value < 709 else None
    return Entry(value, log_value / math.log(10), note)
