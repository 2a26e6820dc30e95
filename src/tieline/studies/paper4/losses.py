"""The losses of paper 4 by hand arithmetic."""

import math

from tieline.estimation import MoEParameters, quadratic_parameters, voronoi_loss
from tieline.studies.checks import at_least, near
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.registry import claim


def sigma(c: float) -> float:
    """The logistic function."""
    return 1 / (1 + math.exp(-c))


def example(*, full: bool = True) -> tuple[MoEParameters, MoEParameters]:
    """A fit of three atoms and a truth of two; two atoms fall into the first cell."""
    truth = quadratic_parameters(
        [[[0, 0], [0, 0]], [[1, 0], [0, -1]]],
        [0.3, -0.2],
        [[1, 0, 0], [0, 1, 0.5]],
        [[0, 0], [0.5, 0]] if full else None,
    )
    fit = quadratic_parameters(
        [[[0.1, 0], [0, 0.2]], [[0, -0.1], [0, 0]], [[1.1, 0], [0.2, -1]]],
        [-0.5, -0.7, -0.1],
        [[1.1, 0, 0.2], [0.9, 0.1, 0], [0, 1, 0.3]],
        [[0, 0.3], [0.1, 0], [0.5, 0.1]] if full else None,
    )
    return fit, truth


MASS = abs(sigma(-0.5) + sigma(-0.7) - sigma(0.3))
ROOT = math.sqrt(0.05)


def check(kind: str, by_hand: float, r: int = 1, *, full: bool = True) -> Evidence:
    """The loss against the sum of its terms."""
    fit, truth = example(full=full)
    value = voronoi_loss(fit, truth, kind, 4, r).value
    return Evidence([near(kind, value, by_hand, 1e-12)], paper=by_hand, measured=value)


@claim(
    "p4-L1",
    "section 4.1.1",
    "L_1",
    statement="Masses and squares in cells of several atoms, first powers and |Δc| in the others.",
    tested="Hand arithmetic on a fit of three atoms against a truth of two.",
)
def first(run: Run) -> Evidence:
    """L_1 by hand."""
    return check("L1", MASS + 0.19 + 0.04 + ROOT + 0.1 + 0.1 + 0.2)


@claim(
    "p4-eq11",
    "(11)",
    "L_{2,r}",
    statement="The same with exponent r, α and β apart.",
    tested="Hand arithmetic on the same example, r = 2.",
)
def second(run: Run) -> Evidence:
    """L_{2,2} by hand."""
    return check("L2", MASS + 0.19 + 0.04 + 0.05 + 0.01 + 0.01 + 0.04, 2)


@claim(
    "p4-L3",
    "section 4.2",
    "L_3 and its index",
    statement="Σ_j Σ_{i ∈ A_j} ‖A_i - Ā_i‖ + …: every atom against the atom of the same number.",
    tested="A truth with its atoms renumbered: the printed sum against zero; hand arithmetic with "
    "the index of the cell.",
    expected=Verdict.CONDITION,
    condition="the second index is that of the cell, A_i - Ā_j",
)
def third(run: Run) -> Evidence:
    """L_3 with both indices."""
    fit, truth = example()
    other = truth.take([1, 0])
    printed = float(
        (other.router - truth.router).norm(dim=1).sum()
        + (other.bias - truth.bias).abs().sum()
        + (other.experts - truth.experts).norm(dim=1).sum()
    )
    weak = (ROOT + 0.3 + 0.8 + ROOT) + (0.1 + 0.1 + 1.0 + math.sqrt(0.02)) + ROOT + 0.1 + 0.1 + 0.2
    value = voronoi_loss(fit, truth, "L3", 4).value
    return Evidence(
        [
            near("printed loss of a renumbered truth", printed, 0, 1e-12),
            near("the same by cells", voronoi_loss(other, truth, "L3", 4).value, 0, 1e-12,
                 part="condition"),
            near("hand arithmetic by cells", value, weak, 1e-12, part="condition"),
            at_least("printed sum", printed, 0.1, part="corrected"),
        ],
        paper=printed,
        corrected=0,
        measured=value,
    )  # fmt: skip


@claim(
    "p4-eq52",
    "(52)",
    "L_4",
    statement="L_1 without b.",
    tested="Hand arithmetic on the same example without b.",
)
def fourth(run: Run) -> Evidence:
    """L_4 by hand."""
    return check("L4", MASS + 0.10 + 0.03 + ROOT + 0.1 + 0.2, full=False)


@claim(
    "p4-eq53",
    "(53)",
    "L_5",
    statement="L_3 without b, index of the cell.",
    tested="Hand arithmetic on the same example without b.",
)
def fifth(run: Run) -> Evidence:
    """L_5 by hand."""
    terms = (ROOT + 0.8 + ROOT) + (0.1 + 1.0 + math.sqrt(0.02)) + ROOT + 0.1 + 0.2
    return check("L5", terms, full=False)
