"""Rates of paper 4: propositions, theorems 1 to 5 by their slopes, table 1, figures 1 and 2.

Each slope is measured on a small well-conditioned design (`small_rates`): two experts in the plane,
quadratic scores. In the sparse regime the last expert of the truth has no gate; with one expert too
many it is the one that is split. "Slower than any polynomial" is tested as a slope above -0.2.
"""

from typing import Any

from tieline.estimation.model import MoEModel
from tieline.studies.checks import at_least
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.rate_evidence import (
    each_falling,
    each_parametric,
    not_slow,
    rate_evidence,
    regression_rate,
    up_to_symmetry,
)
from tieline.studies.registry import claim
from tieline.studies.small_rates import small_study


def family(expert: str = "tanh", gate: Any = "quadratic", link: Any = "sigmoid") -> MoEModel:
    """A mixture of two experts in the plane."""
    return MoEModel(gate, link, expert, 2, 2)


def over_regression(run: Run, gate: str, experts: tuple[str, ...], *, sparse: bool) -> Evidence:
    """Slope of ‖f - f*‖ with one expert too many."""
    found = {name: small_study(run, family(name, gate), extra=1, sparse=sparse) for name in experts}
    dense = (
        "The paper expects f̂ to stay away from f* here; it converges, for the spare expert is "
        "switched off by c → -∞."
    )
    return regression_rate(found, "" if sparse else dense)


@claim(
    "p4-prop1",
    "Prop. 1",
    "regression rate, sparse regime",
    statement="With full quadratic scores and split experts without gate, ‖f̂ - f*‖ falls like "
    "√(log n / n).",
    tested="Slope of ‖f̂ - f*‖ with one expert too many, tanh and ReLU experts.",
    seconds=3,
)
def sparse_regression(run: Run) -> Evidence:
    """Full quadratic score."""
    return over_regression(run, "quadratic", ("tanh", "relu"), sparse=True)


@claim(
    "p4-cor1",
    "Cor. 1",
    "regression rate, dense regime",
    statement="In the dense regime f̂ approaches the best functions with more experts than the "
    "truth like √(log n / n).",
    tested="Slope of ‖f̂ - f*‖ itself, the infimum over such functions being f*.",
    seconds=3,
)
def dense_regression(run: Run) -> Evidence:
    """Full quadratic score."""
    return over_regression(run, "quadratic", ("tanh", "relu"), sparse=False)


@claim(
    "p4-prop4",
    "Prop. 4",
    "regression rate, partially quadratic score, sparse regime",
    statement="With scores xᵀAx + c, ‖f̂ - f*‖ falls like √(log n / n) in the sparse regime.",
    tested="Slope of ‖f̂ - f*‖ with one expert too many, tanh and ReLU experts.",
    seconds=3,
)
def partial_sparse_regression(run: Run) -> Evidence:
    """Partially quadratic score."""
    return over_regression(run, "partial", ("tanh", "relu"), sparse=True)


@claim(
    "p4-cor2",
    "Cor. 2",
    "regression rate, partially quadratic score, dense regime",
    statement="With scores xᵀAx + c, f̂ approaches the best functions with more experts than the "
    "truth like √(log n / n).",
    tested="Slope of ‖f̂ - f*‖ itself, the infimum over such functions being f*.",
    seconds=3,
)
def partial_dense_regression(run: Run) -> Evidence:
    """Partially quadratic score."""
    return over_regression(run, "partial", ("tanh",), sparse=False)


@claim(
    "p4-thm2-rate",
    "Thm 2 (i), (ii)",
    "polynomial experts, sparse regime: what follows",
    statement="Linear experts under a full quadratic sigmoid gate are learned more slowly than any "
    "power of n.",
    tested="Quotient slope with the right number of experts, one of them without gate.",
    expected=Verdict.FAILS,
    seconds=1,
)
def polynomial_sparse(run: Run) -> Evidence:
    """Linear experts, exact."""
    found = {"N = N*": small_study(run, family("linear"))}
    return not_slow(
        "N = N*",
        found,
        each_parametric("quotient slope against -1/2", found, "quotient", "corrected"),
        paper="slower than any power",
        corrected="n^-1/2 with the right number of experts",
    )


def exact_rate(run: Run, gate: str) -> Evidence:
    """L3 or L5 with the right number of experts, where Ḡ is the truth."""
    experts = ("tanh", "relu", "linear")
    return up_to_symmetry(
        {name: small_study(run, family(name, gate)) for name in experts},
        note="The antisymmetric part of A never enters xᵀAx, and keeps the error of the start. "
        "With more experts than the truth the infimum over Ḡ is not attained.",
    )


@claim(
    "p4-thm3-rate",
    "Thm 3",
    "weakly identifiable experts, dense regime",
    statement="L3 falls like √(log n / n) for weakly identifiable experts.",
    tested="Slopes of L3 with N = N*, tanh, ReLU and linear experts, raw and up to the "
    "antisymmetric part of A.",
    expected=Verdict.CONDITION,
    condition="up to the antisymmetric part of A, and N = N*",
    seconds=2,
)
def dense_exact(run: Run) -> Evidence:
    """Full quadratic score."""
    return exact_rate(run, "quadratic")


@claim(
    "p4-thm5-rate",
    "Thm 5",
    "weakly identifiable experts, partially quadratic score",
    statement="L5 falls like √(log n / n) for partial-weakly identifiable experts.",
    tested="Slopes of L5 with N = N*, tanh, ReLU and linear experts, raw and up to the "
    "antisymmetric part of A.",
    expected=Verdict.CONDITION,
    condition="up to the antisymmetric part of A, and N = N*",
    seconds=2,
)
def partial_exact(run: Run) -> Evidence:
    """Partially quadratic score."""
    return exact_rate(run, "partial")


def over_rate(run: Run, gate: str) -> Evidence:
    """L1 or L4 with one expert too many in the sparse regime, tanh experts."""
    study = small_study(run, family("tanh", gate), extra=1, sparse=True)
    found = {"N = N* + 1": study}
    return rate_evidence(
        each_falling("quotient slope", found, limit=-0.36, part="paper"),
        found,
        paper=-0.5,
        note=f"{study.failed} of {len(study.rows)} fits were still moving along the valley of the "
        "split expert when their steps ran out.",
    )


@claim(
    "p4-thm1-rate",
    "Thm 1",
    "strongly identifiable experts, sparse regime: the rate",
    statement="L1 falls like √(log n / n) for strongly identifiable experts.",
    tested="Slope of L1, up to the antisymmetric part of A, with one expert too many, tanh "
    "experts, full quadratic score, at n of some thousands.",
    seconds=2,
)
def sparse_over(run: Run) -> Evidence:
    """Full quadratic score."""
    return over_rate(run, "quadratic")


@claim(
    "p4-thm4-rate",
    "Thm 4",
    "partial-strongly identifiable experts, sparse regime: the rate",
    statement="L4 falls like √(log n / n) for partial-strongly identifiable experts.",
    tested="Slope of L4, up to the antisymmetric part of A, with one expert too many, tanh "
    "experts, partially quadratic score.",
    seconds=2,
)
def partial_over(run: Run) -> Evidence:
    """Partially quadratic score."""
    return over_rate(run, "partial")


@claim(
    "p4-table1",
    "Table 1",
    "softmax against sigmoid: samples for an error ε",
    statement="Linear experts need exp(ε^-1/τ) samples under softmax and ε^-2 under a sigmoid with "
    "dense gates; ReLU experts ε^-4 against ε^-2.",
    tested="Quotient slopes of both links and both experts with the right number of experts, full "
    "quadratic score.",
    expected=Verdict.FAILS,
    seconds=3,
)
def table(run: Run) -> Evidence:
    """Four slopes near -1/2."""
    found = {
        f"{link}, {expert}": small_study(run, family(expert, link=link))
        for link in ("softmax", "sigmoid")
        for expert in ("linear", "relu")
    }
    quarter = found["softmax, relu"].rate("quotient").slope
    return not_slow(
        "softmax, linear",
        found,
        [
            at_least("softmax, relu at -1/4", quarter, -0.34),
            *each_parametric("quotient slope", found, "quotient", "corrected"),
        ],
        losses=("quotient",),
        paper="softmax slow and -1/4, sigmoid -1/2",
        corrected="-1/2 for all four up to what f does not see",
        note="With the right number of experts. The samples an error asks for differ by a "
        "constant: `tieline rates --error`.",
    )


def softmax_data(run: Run, expert: str, paper: tuple[float, float]) -> Evidence:
    """Figure 1: softmax data, both links fitted; the sigmoid against its population minimiser."""
    soft = family(expert, link="softmax")
    found = {
        "softmax": small_study(run, soft),
        "sigmoid": small_study(run, family(expert), source=soft),
    }
    slope, own = found["softmax"].rate("quotient").slope, {"softmax": found["softmax"]}
    return rate_evidence(
        [
            at_least("quotient slope, softmax", slope, paper[0] - 0.1),
            *each_parametric("quotient slope", own, "quotient", "corrected"),
            *each_parametric("slope of ‖f - f_Ḡ‖", found, "function", "corrected"),
        ],
        found,
        paper=f"softmax {paper[0]}, sigmoid {paper[1]}",
        corrected="the softmax model is not slow: -1/2 up to what f does not see",
        note="The softmax model is well specified here, the sigmoid one is not: its reference is "
        "the population minimiser.",
    )


@claim(
    "p4-fig1a",
    "Figure 1a",
    "softmax data, ReLU experts: softmax against sigmoid",
    statement="The loss of the softmax model falls like n^-0.24, that of the sigmoid model like "
    "n^-0.51.",
    tested="Raw and quotient slopes of both on a small design, the sigmoid's against its "
    "population minimiser.",
    expected=Verdict.FAILS,
    seconds=3,
)
def figure_1a(run: Run) -> Evidence:
    """ReLU experts."""
    return softmax_data(run, "relu", (-0.24, -0.51))


@claim(
    "p4-fig1b",
    "Figure 1b",
    "softmax data, linear experts: softmax against sigmoid",
    statement="The loss of the softmax model falls like n^-0.07, that of the sigmoid model like "
    "n^-0.46.",
    tested="Raw and quotient slopes of both on a small design, the sigmoid's against its "
    "population minimiser.",
    expected=Verdict.FAILS,
    seconds=3,
)
def figure_1b(run: Run) -> Evidence:
    """Linear experts."""
    return softmax_data(run, "linear", (-0.07, -0.46))


@claim(
    "p4-fig2a",
    "Figure 2a",
    "sigmoid data, sparse regime: ReLU against linear experts",
    statement="The loss of ReLU experts falls like n^-0.54, that of linear experts like n^-0.07.",
    tested="Raw and quotient slopes on a small design whose last expert has no gate, N = N*.",
    expected=Verdict.FAILS,
    seconds=2,
)
def figure_2a(run: Run) -> Evidence:
    """An expert without gate, as many experts as the truth."""
    found = {name: small_study(run, family(name), sparse=True) for name in ("relu", "linear")}
    return not_slow(
        "linear",
        found,
        each_falling("quotient slope", found),
        paper="ReLU -0.54, linear -0.07",
        corrected="both polynomial up to what f does not see",
        note="Mass and scale of an expert without gate trade freely, so the quotient loss takes "
        "their product.",
    )


@claim(
    "p4-fig2b",
    "Figure 2b",
    "sigmoid data, dense regime: ReLU against linear experts",
    statement="The loss of ReLU experts falls like n^-0.53, that of linear experts like n^-0.44.",
    tested="Raw and quotient slopes on a small design with N = N*.",
    expected=Verdict.CONDITION,
    condition="up to the antisymmetric part of A",
    seconds=2,
)
def figure_2b(run: Run) -> Evidence:
    """Both kinds of experts, exact."""
    return up_to_symmetry(
        {name: small_study(run, family(name)) for name in ("relu", "linear")},
        paper="ReLU -0.53, linear -0.44",
        corrected=-0.5,
    )
