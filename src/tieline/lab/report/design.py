"""The design advisor's numbers as page, figure, terminal view, summary and notebook view."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tieline.lab.tropical.advisor import Advice, Entry
from tieline.lab.tropical.collapse import RouterMeasurement
from tieline.report.drawing import ACCENT, NOTICE, WARN, canvas
from tieline.report.frame import notebook_html
from tieline.report.plain import Section, plain_page
from tieline.report.tables import Grid, short_names, text_table, view
from tieline.report.words.numbers import DASH, percent, significant, with_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MEASURED_HEAD = (
    "layer",
    "switches",
    "per length",
    "per rad",
    "any two",
    "per rad",
    "formula",
    "saturation",
    "centred",
    "offset",
    "sets",
    "meets tie",
)
MEASURED = (
    "switches, per length, per rad: changes of coalition on the line between neighbouring tokens' "
    "router inputs, per unit of length and of angle. any two, per rad: the same between any two "
    "tokens; formula: ρ/π of a Gaussian router of this shape.",
    "saturation: median distance of an input to a tie over the spread of the inputs, as they are "
    "and with their mean taken away; offset: norm of that mean over the spread; sets: coalitions "
    "used, as is / centred; meets tie: chance that a ball of the inputs' size at their mean meets "
    "a tie of a Gaussian router.",
)

SHARES = {"bf16_flips"}
"""Quantities that are written as percentages."""
WHOLE = 10**7
"""Integers below are written with all their digits."""

Curve = tuple[str, str, str, str, str]
"""Quantity, label, colour, line style and marker."""
PIECES: tuple[Curve, ...] = (
    ("paper_bound", "paper's bound C(N, k) Φ(kH, d)", WARN, "--", "o"),
    ("sharp_bound", "rigorous bound B*", NOTICE, "-.", "s"),
    ("expected_regions", "expected, Gaussian layer", ACCENT, "-", "D"),
    ("expected_cells", "expected coalitions alone", ACCENT, ":", "v"),
)
TIES: tuple[Curve, ...] = (
    ("switches", "switches per radian", ACCENT, "-", "D"),
    ("gap_density", "tie density $f_{gap}(0)$", NOTICE, "-.", "s"),
    ("bf16_flips", "flips by bf16 (share of tokens)", WARN, "--", "o"),
)


def page(result: Advice) -> str:
    """The page: numbers by split, figure, and where each number holds."""
    meanings = [(q.heading, q.meaning, q.valid) for q in result.quantities.values()]
    sections = [
        Section("Granularities side by side", _grid(result), notes=_notes(result)),
        Section(
            "Bounds, expectation and ties",
            draw=partial(_draw, result),
            words="Decimal logarithms of bounds, expectation and tie densities by split",
        ),
        Section(
            "What each number is, and where it holds",
            Grid(("quantity", "what it is", "where it holds"), tuple(meanings)),
            prose=True,
        ),
    ]
    if result.measured:
        measured = Section("Measured on the model's own hidden states", measured_grid(result))
        sections.insert(1, replace(measured, notes=MEASURED))
    return plain_page("design", f"Design of {result.source}", _facts_line(result), sections)


def figures(result: Advice) -> "dict[str, Callable[[], Figure]]":
    """Return "design": pieces and ties against the split."""
    return {"design": partial(_draw, result)}


def terminal(result: Advice, width: int) -> RenderableType:
    """Numbers by split, notes on single entries, and where each number holds."""
    grid = _grid(result)
    table = text_table(grid.head, grid.rows, left=1, quantities=grid.quantities)
    table.columns[-1].justify, table.columns[-1].style = "left", "dim"
    meanings = Table.grid(padding=(0, 2))
    meanings.add_column(no_wrap=True)
    for quantity in result.quantities.values():
        sentence = Text.assemble(quantity.meaning, "\n", (f"holds: {quantity.valid}", "dim"))
        meanings.add_row(Text(quantity.heading), sentence)
    notes = Text("\n".join(_notes(result)) + "\n")
    measured: list[RenderableType] = []
    if result.measured:
        rows = measured_grid(result)
        measured = [text_table(rows.head, rows.rows, left=1), Text("\n".join(MEASURED) + "\n")]
    return view(result.source, _facts_line(result), "", table, notes, *measured, meanings)


def summary(result: Advice) -> str:
    """Source, shape and splits in two lines."""
    splits = ", ".join(str(row.split) for row in result.rows)
    return f"Design of {result.source}, splits {splits}\n{_facts_line(result)}"


def notebook(result: Advice) -> str:
    """Numbers by split, and the figure."""
    title = f"Design of {result.source}"
    return notebook_html(title, _facts_line(result), "", _grid(result), figures(result))


def measured_grid(result: Advice) -> Grid:
    """One row per layer of the model: counted along its hidden states, beside the formulas."""
    labels = short_names([layer.name for layer in result.measured])
    return Grid(MEASURED_HEAD, tuple(map(_measured_row, labels, result.measured)))


def _measured_row(label: str, layer: RouterMeasurement) -> tuple[str, ...]:
    near, far, centred = layer.neighbours, layer.any_two, layer.centring
    if near is None or far is None or centred is None:
        return (label, *[DASH] * (len(MEASURED_HEAD) - 2), layer.status)
    return (
        label,
        with_error(near.switches, 2),
        significant(near.per_length),
        significant(near.per_radian),
        with_error(far.switches, 2),
        significant(far.per_radian),
        significant(far.expected_per_radian),
        significant(centred.as_is.relative),
        significant(centred.centred.relative),
        significant(centred.as_is.offset),
        f"{centred.as_is.coalitions:,} / {centred.centred.coalitions:,}",
        percent(layer.meets_tie),
    )


def cell_text(name: str, entry: Entry) -> str:
    """An entry as a percentage, a whole number, or a power of ten where it is long."""
    if entry.value is None:
        return DASH if entry.log10 is None else f"10^{entry.log10:.0f}"
    if name in SHARES:
        return percent(entry.value)
    if isinstance(entry.value, int) and entry.value < WHOLE:
        return f"{entry.value:,}"
    return significant(float(entry.value))


def _facts_line(result: Advice) -> str:
    """The shape in one line."""
    first = result.rows[0]
    shape = first.shape
    facts = [
        f"{shape.k} of {shape.n_experts} experts",
        f"width {shape.width}",
        f"model width {shape.hidden}",
        f"d_eff {result.d_eff}",
    ]
    facts += [f"{shape.shared} shared"] if shape.shared else []
    facts += [f"{shape.k_groups} of {shape.n_groups} groups"] if shape.n_groups > 1 else []
    return " · ".join(facts if first.split == 1 else [*facts, f"at split {first.split}"])


def _grid(result: Advice) -> Grid:
    """One row per quantity, one column per split; entries with a note have a star."""
    shapes = [row.shape for row in result.rows]
    rows = [
        ("experts N", *(f"{shape.n_experts:,}" for shape in shapes), ""),
        ("chosen k", *(f"{shape.k:,}" for shape in shapes), ""),
        ("width H", *(f"{shape.width:,}" for shape in shapes), ""),
    ]
    for name, quantity in result.quantities.items():
        entries = [row.entries[name] for row in result.rows]
        cells = [cell_text(name, entry) + ("*" if entry.note else " ") for entry in entries]
        rows.append((quantity.heading, *cells, quantity.kind))
    head = ("split m", *(str(row.split) for row in result.rows), "kind")
    return Grid(head, tuple(rows), quantities="rows")


def _notes(result: Advice) -> list[str]:
    """The notes behind the stars, each once with its quantities and splits, then the general."""
    about: dict[str, dict[str, list[int]]] = {}
    for row in result.rows:
        for name, entry in row.entries.items():
            if entry.note:
                heading = result.quantities[name].heading
                about.setdefault(entry.note, {}).setdefault(heading, []).append(row.split)
    marks = []
    for note, headings in about.items():
        splits = sorted(
            {split for splits_of_heading in headings.values() for split in splits_of_heading}
        )
        where = f"{', '.join(headings)} at m = {', '.join(map(str, splits))}"
        marks.append(f"* {where}: {note}")
    return [*marks, *result.notes]


def _draw(result: Advice) -> "Figure":
    """Pieces (left) and ties (right) by split, as powers of ten."""

    def draw(left: "Axes", right: "Axes") -> None:
        _draw_curves(left, result, PIECES)
        left.set(ylabel=f"$\\log_{{10}}$ of the number, $d_{{eff}}={result.d_eff}$")
        _draw_curves(right, result, TIES)
        right.set(ylabel="$\\log_{10}$ of the number")

    return canvas(draw, columns=2, height=2.9)


def _draw_curves(axes: "Axes", result: Advice, curves: Sequence[Curve]) -> None:
    positions = range(len(result.rows))
    for name, label, colour, line, marker in curves:
        logs = [row.entries[name].log10 for row in result.rows]
        heights = [math.nan if log10 is None else log10 for log10 in logs]
        style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
        axes.plot(positions, heights, label=label, **style)
    axes.set_xticks(list(positions), labels=[str(row.split) for row in result.rows])
    axes.set_xlabel("split m  (mN experts, mk chosen, width H/m)")
    axes.margins(x=0.08, y=0.08)
    axes.legend(fontsize=6.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=1)
