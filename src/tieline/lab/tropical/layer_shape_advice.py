"""Quantities of a layer shape: costs, bounds, expectations and ties at each granularity.

    QUANTITIES                 what each number means and where it holds

An entry of a row that lies outside the range of its quantity says so itself. The paper's bound, a
rigorous better one and the expectation of a Gaussian layer stand side by side: they differ by
powers of ten, and only the last two describe layers that exist.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import special

from tieline.core.errors import require
from tieline.core.numerics import grid_step
from tieline.core.records import Result
from tieline.lab.geometry import gaussian_gap_density
from tieline.lab.tropical.capacity import (
    Attainability,
    attainability,
    capacity_bound,
    group_coalitions,
    log_binomial,
    log_expected_cells,
    log_expected_regions,
    sharp_bound,
    wall_density,
    zaslavsky,
)
from tieline.lab.tropical.collapse import RouterMeasurement

MOST_EXPERTS, MOST_WIDTH = 1 << 16, 1 << 40
"""Limits beyond which exact counts, with a binary digit per expert, take minutes."""

MIDPOINTS_PER_UNIT = 1024
"""Midpoints per unit of score: the step's jumps, at powers of two, fall between them."""
GROUPED = "as if routing were not group-limited"
ATTAINABILITY_NOTES: dict[Attainability, str] = {
    "by every generic router": "",
    "by some routers": "only special routers on R^{d} have a cell for each",
    "by none": "no router on R^{d} has a cell for each",
    "not decided": "not decided whether a router on R^{d} can have a cell for each",
}
"""Note on the number of coalitions."""


@dataclass(frozen=True)
class LayerShape:
    """Shape of one routed layer.

    Attributes:
        n_experts: routed experts N.
        k: experts chosen per token.
        width: hidden width H of an expert.
        hidden: width of the model, the router's input.
        shared: further experts that every token uses, of the same width H.
        matrices: weight matrices of an expert: 3 with a gate (SwiGLU), 2 without.
        n_groups: groups of experts, 1 where routing is not group-limited.
        k_groups: groups that a token may choose from.
    """

    n_experts: int
    k: int
    width: int
    hidden: int = 2048
    shared: int = 0
    matrices: int = 3
    n_groups: int = 1
    k_groups: int = 1

    def __post_init__(self) -> None:
        n, k = self.n_experts, self.k
        require(1 <= k < n, f"need 1 <= k < N: with k = N nothing is routed, got {k=}, N={n}")
        require(n <= MOST_EXPERTS, f"at most {MOST_EXPERTS:,} experts, splits included, got N={n}")
        for name in ("width", "hidden", "matrices"):
            value = getattr(self, name)
            require(1 <= value <= MOST_WIDTH, f"need 1 <= {name} <= {MOST_WIDTH:,}, got {value}")
        shared = 0 <= self.shared <= MOST_EXPERTS
        require(shared, f"need 0 <= shared <= {MOST_EXPERTS:,}, got {self.shared}")
        groups = f"{self.k_groups} of {self.n_groups} groups"
        fits = 1 <= self.k_groups <= self.n_groups and n % self.n_groups == 0
        require(fits, f"need equal groups and 1 <= chosen <= all, got {groups} for {n} experts")

    def split(self, m: int) -> "LayerShape":
        """Split every expert into m: N, H, k become mN, H/m, mk (sec. 5.1)."""
        require(
            m >= 1 and self.width % m == 0,
            f"a split must divide the expert width {self.width}, got {m}",
        )
        # a shared expert is split as well: its neurons run for every token either way
        fine = {"n_experts": self.n_experts * m, "k": self.k * m, "width": self.width // m}
        return replace(self, **fine, shared=self.shared * m)


PRESETS: dict[str, LayerShape] = {
    "mixtral-8x7b": LayerShape(8, 2, 14336, 4096),
    "mixtral-8x22b": LayerShape(8, 2, 16384, 6144),
    "deepseek-v3": LayerShape(256, 8, 2048, 7168, shared=1, n_groups=8, k_groups=4),
    "olmoe": LayerShape(64, 8, 1024, 2048),
    "qwen3-30b-a3b": LayerShape(128, 8, 768, 2048),
    "qwen3-235b-a22b": LayerShape(128, 8, 1536, 4096),
    "gpt-oss-20b": LayerShape(32, 4, 2880, 2880),
    "gpt-oss-120b": LayerShape(128, 4, 2880, 2880),
}
"""Published shapes, as their configurations give them."""


@dataclass(frozen=True)
class Quantity:
    """A column of the advisor.

    Attributes:
        heading: short, for a table.
        meaning: the number in words, with its formula.
        valid: where it holds, and where not.
        kind: "exact", "bound", "Gaussian" (expectation or law of Gaussian weights) or "paper".
    """

    heading: str
    meaning: str
    valid: str
    kind: str


QUANTITIES: dict[str, Quantity] = {
    "parameters": Quantity(
        "parameters",
        "weights of all experts, shared ones and the router",
        "exact; biases and norms are not counted",
        "exact",
    ),
    "active": Quantity(
        "active",
        "weights that one token uses: k experts, shared ones, the router",
        "exact; biases and norms are not counted; the router grows with the split",
        "exact",
    ),
    "flops": Quantity(
        "FLOPs/token", "2 per active weight, forward pass", "matrix products only", "exact"
    ),
    "coalitions": Quantity(
        "coalitions",
        "C(N, k) sets of experts that could be chosen, fewer under group limits",
        "a count of names: all have a cell only if d >= N - 1, and data on R^d_eff meet far fewer",
        "exact",
    ),
    "paper_bound": Quantity(
        "paper's bound",
        "C(N, k) Φ(kH, d_eff), Thm. 4.17 of paper 3",
        "an upper bound on any flat of dimension d_eff; out of reach for d_eff < N - 1",
        "paper",
    ),
    "sharp_bound": Quantity(
        "B*",
        "Σ_j Σ_a n(j, a) min(C(N-a, k-a), U(N, k, d_eff-j))",
        "a rigorous upper bound for every router and every ReLU experts in general position",
        "bound",
    ),
    "expected_cells": Quantity(
        "E[cells]",
        "C(N, k) P(M <= d_eff+1): coalitions that a d_eff-flat of inputs meets",
        "Gaussian router; a whole flat, so data in a part of it meet fewer",
        "Gaussian",
    ),
    "expected_regions": Quantity(
        "E[pieces]",
        "C(N, k) Σ_j C(kH, j) P(M <= d_eff-j+1): pieces that a d_eff-flat meets",
        "Gaussian router and ReLU experts; a whole flat, so data in a part of it meet fewer",
        "Gaussian",
    ),
    "over_dense": Quantity(
        "E/dense",
        "E[pieces] / Φ(kH, d_eff): times the pieces of a dense layer with as many active neurons",
        "Gaussian weights on a whole d_eff-flat; near 1 where kH is much larger than N",
        "Gaussian",
    ),
    "switches": Quantity(
        "switches/rad",
        "ρ/π: changes of coalition per radian of input direction, Crofton",
        "Gaussian router, any curve; on the trained model in the box 0.88 to 1.04 times this",
        "Gaussian",
    ),
    "kinks": Quantity(
        "kinks/rad",
        "kH/π: zeros of active neurons per radian",
        "Gaussian ReLU experts, any curve",
        "Gaussian",
    ),
    "gap_density": Quantity(
        "f_gap(0)",
        "density of the gap z_[k] - z_[k+1] at zero, per standard deviation of a score",
        "independent normal scores of equal spread; measure a trained router with tieline inspect",
        "Gaussian",
    ),
    "bf16_flips": Quantity(
        "flips bf16",
        "share of tokens whose choice changes when the logits are rounded once to bf16",
        "independent normal logits; first order, below 10 %; errors of the product come on top",
        "Gaussian",
    ),
    "paper_gain": Quantity(
        "law G(m)",
        "(Ne/k)^{(m-1)k} m^{-d_eff-1/2}, Thm. 5.1 of paper 3",
        "as printed: N → ∞ at fixed k, H/m >= d_eff; at fixed k Stirling is off by a constant",
        "paper",
    ),
    "binomial_gain": Quantity(
        "exact G(m)",
        "C(mN, mk) / C(N, k) · m^{-d_eff}, what the law approximates",
        "exact for the paper's principal term C(N, k) H^d_eff",
        "paper",
    ),
    "bound_gain": Quantity(
        "bound ratio",
        "C(mN, mk) / C(N, k): ratio of the paper's bounds themselves",
        "kH does not change under a split, so neither does Φ(kH, d_eff): no width penalty",
        "paper",
    ),
    "expected_gain": Quantity(
        "E ratio",
        "E[pieces] after the split / before",
        "Gaussian router and ReLU experts on a d_eff-flat",
        "Gaussian",
    ),
    "m_max": Quantity(
        "m_max",
        "⌊H/d_eff⌋ of the layer before any split, Cor. 5.3 of paper 3",
        "the paper's limit; the count of pieces needs only kH >= d_eff, which a split keeps",
        "paper",
    ),
}
"""Quantities by name, in the order of the table."""


@dataclass(frozen=True)
class Entry:
    """One number of one granularity.

    Attributes:
        value: the number; None where it is beyond float64.
        log10: its decimal logarithm; None for zero.
        note: why the number does not apply to this row; empty if it does.
    """

    value: float | int | None
    log10: float | None
    note: str = ""


@dataclass(frozen=True)
class Granularity:
    """The layer split by `split`, and its numbers by the names of `QUANTITIES`."""

    split: int
    shape: LayerShape
    entries: dict[str, Entry]


@dataclass(frozen=True, repr=False)
class Advice(Result):
    """All granularities of a layer.

    Attributes:
        source: where the shape comes from.
        d_eff: dimension of the flat of inputs on which pieces are counted.
        notes: what to know before reading any number.
        quantities: heading, meaning and validity of each number.
        rows: one granularity per split, in the order asked for.
        measured: the layers of the model itself on a text, where that was asked for.
    """

    format = "tieline-design"

    source: str
    d_eff: int
    notes: tuple[str, ...]
    quantities: dict[str, Quantity]
    rows: tuple[Granularity, ...]
    measured: tuple[RouterMeasurement, ...] = ()


def advise(
    shape: LayerShape,
    d_eff: int = 16,
    splits: Sequence[int] = (1,),
    source: str = "given",
    progress: Callable[[str, int, int], None] | None = None,
) -> Advice:
    """Compute the `QUANTITIES` of a layer at each granularity (paper 3, sec. 5.1).

    A granularity m turns N, H, k into mN, H/m, mk; d_eff is the effective dimension of the inputs.
    `progress` is called with "splits", how many are done, and of how many.
    """
    require(1 <= d_eff <= shape.hidden, f"need 1 <= d_eff <= hidden={shape.hidden}, got {d_eff}")
    require(len(splits) > 0, "need at least one granularity")
    require(len(set(splits)) == len(splits), f"granularities must differ, got {list(splits)}")
    fine = [shape.split(m) for m in splits]  # refuses any before the first is counted
    rows = []
    for done, (m, layer) in enumerate(zip(splits, fine, strict=True)):
        if progress is not None:
            progress("splits", done, len(splits))
        rows.append(Granularity(m, layer, _granularity_entries(shape, d_eff, m)))
    return Advice(source, d_eff, tuple(_reading_notes(shape)), dict(QUANTITIES), tuple(rows))


def _granularity_entries(base: LayerShape, d_eff: int, m: int) -> dict[str, Entry]:
    """All entries of the layer split m times."""
    shape = base.split(m)
    entries = (
        _cost_entries(shape)
        | _count_entries(shape, d_eff)
        | _tie_quantities(shape)
        | _gain_entries(base, d_eff, m)
    )
    narrow = "" if shape.width >= d_eff else f"H/m = {shape.width} < d_eff: the law is void here"
    entries["m_max"] = _entry_of_number(base.width // d_eff, narrow)
    assert list(entries) == list(QUANTITIES)
    return entries


def _cost_entries(shape: LayerShape) -> dict[str, Entry]:
    """Parameters, active parameters and operations per token."""
    per_expert = shape.matrices * shape.width * shape.hidden
    router = shape.n_experts * shape.hidden
    active = (shape.k + shape.shared) * per_expert + router
    return {
        "parameters": _entry_of_number((shape.n_experts + shape.shared) * per_expert + router),
        "active": _entry_of_number(active),
        "flops": _entry_of_number(2 * active),
    }


def _count_entries(shape: LayerShape, d_eff: int) -> dict[str, Entry]:
    """Coalitions, bounds and expectations of cells and pieces."""
    n, k, width = shape.n_experts, shape.k, shape.width
    reach = attainability(n, k, d_eff)
    unreached = ATTAINABILITY_NOTES[reach].format(d=d_eff)
    grouped = "" if shape.n_groups == 1 else GROUPED
    coalitions = group_coalitions(n, k, shape.n_groups, shape.k_groups)
    regions = log_expected_regions(n, k, width, d_eff)
    dense = math.log(zaslavsky(k * width, d_eff))
    return {
        "coalitions": _entry_of_number(coalitions, unreached),
        "paper_bound": _entry_of_number(capacity_bound(n, k, width, d_eff), grouped),
        "sharp_bound": _entry_of_number(sharp_bound(n, k, width, d_eff), grouped),
        "expected_cells": _entry_from_log(log_expected_cells(n, k, d_eff), grouped),
        "expected_regions": _entry_from_log(regions, grouped),
        "over_dense": _entry_from_log(regions - dense, grouped),
    }


def _tie_quantities(shape: LayerShape) -> dict[str, Entry]:
    """Switches, kinks, gap density and bf16 flips of a Gaussian layer."""
    n, k = shape.n_experts, shape.k
    density, flips = gaussian_gap_density(n, k), gaussian_rounding_flips(n, k)
    grouped = "" if shape.n_groups == 1 else GROUPED
    coarse = grouped or ("" if flips < 0.1 else "above 10 %: first order overstates")
    return {
        "switches": _entry_of_number(wall_density(n, k) / math.pi, grouped),
        "kinks": _entry_of_number(k * shape.width / math.pi),
        "gap_density": _entry_of_number(density, grouped),
        "bf16_flips": _entry_of_number(flips, coarse),
    }


def _gain_entries(base: LayerShape, d_eff: int, m: int) -> dict[str, Entry]:
    """Ratios to granularity 1: the paper's law, its exact form, its bound, the expectation."""
    fine, n, k = base.split(m), base.n_experts, base.k
    law = (m - 1) * k * math.log(n * math.e / k) - (d_eff + 0.5) * math.log(m)
    binomials = log_binomial(fine.n_experts, fine.k) - log_binomial(n, k)
    regions = [log_expected_regions(s.n_experts, s.k, s.width, d_eff) for s in (fine, base)]
    void = "" if fine.width >= d_eff else f"H/m = {fine.width} < d_eff = {d_eff}"
    return {
        "paper_gain": _entry_from_log(law, void),
        "binomial_gain": _entry_from_log(binomials - d_eff * math.log(m), void),
        "bound_gain": _entry_from_log(binomials),
        "expected_gain": _entry_from_log(regions[0] - regions[1]),
    }


def _reading_notes(shape: LayerShape) -> list[str]:
    """Notes on what the numbers assume about experts, weights and groups."""
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


def _entry_of_number(value: float | int, note: str = "") -> Entry:
    """Make the entry of a number that may exceed float64."""
    log10 = math.log10(value) if value > 0 else None
    if isinstance(value, int) and value > 1 << 53:
        return Entry(float(value) if (log10 or 0) < 308 else None, log10, note)
    return Entry(value, log10, note)


def _entry_from_log(log_value: float, note: str = "") -> Entry:
    """Make the entry of the number e^log_value."""
    value = math.exp(log_value) if log_value < 709 else None
    return Entry(value, log_value / math.log(10), note)


def gaussian_rounding_flips(
    n_experts: int, k: int, precision: str = "bf16", spread: float = 1.0
) -> float:
    """Share of tokens that flip when independent N(0, σ²) scores are rounded once to a format.

    P(flip) = ¼ ∫ g(t) q(σt)/σ dt.

    g(t) = E!/((k-1)!(E-k-1)!) φ(t)² Φ̄(t)^(k-1) Φ(t)^(E-k-1) is the density of a zero gap at
    threshold t, which integrates to f_gap(0), and q the format's step there: two scores on one grid
    tie with probability q/2 per unit of gap density, and half of the ties fall to the wrong expert
    (Def. 7.3 of docs/definitions.md). First order in q f_gap(0), which overstates by that much. The
    steps are relative, so the spread σ matters only up to a factor of two.
    """
    require(1 <= k < n_experts, f"need 1 <= k < E, got {k=}, E={n_experts}")
    require(spread > 0 and math.isfinite(spread), f"need a spread > 0, got {spread}")
    require(
        not precision.startswith("int"), f"{precision} has no step of its own: scaled per token"
    )
    t = (np.arange(-12 * MIDPOINTS_PER_UNIT, 12 * MIDPOINTS_PER_UNIT) + 0.5) / MIDPOINTS_PER_UNIT
    log_count = special.gammaln([n_experts + 1, k, n_experts - k]) @ np.array([1.0, -1.0, -1.0])
    below, above = special.log_ndtr(t), special.log_ndtr(-t)
    log_g = log_count - t**2 - math.log(2 * math.pi) + (k - 1) * above + (n_experts - k - 1) * below
    step = grid_step(torch.from_numpy(spread * t)[None], precision)[0].numpy() / spread
    return float((np.exp(log_g) * step).sum() / MIDPOINTS_PER_UNIT / 4)
