"""Theorems 1 to 5 of paper 4: bounds of the losses by ‖f - f*‖, and rates of estimation.

Slopes are measured on a small well-conditioned design (`rate_evidence.small_study`): two experts in
the plane, quadratic scores. In the sparse regime the last expert of the truth has no gate; with one
expert too many it is the one that is split. "Slower than any polynomial" is tested as a slope above
-0.2.
"""

from typing import Any

import torch

from tieline.core.statistics import exponent
from tieline.estimation import MoEModel, MoEParameters, quadratic_parameters, voronoi_loss
from tieline.papers.claim import Evidence, Run, Verdict, at_least, at_most, chart, dots, line, near
from tieline.papers.mixtures import (
    FLOOR,
    drawn,
    flat_bound,
    inputs,
    largest_gap,
    least_ratio,
    split_scale,
    twisted,
    without_row,
)
from tieline.papers.rate_evidence import (
    each_falling,
    each_parametric,
    not_slow,
    rate_evidence,
    regression_rate,
    small_study,
    up_to_symmetry,
)
from tieline.papers.registry import claim


def sparse_truth(run: Run, model: MoEModel) -> MoEParameters:
    """Parameters whose first router row is zero."""
    return without_row(drawn(run, model))


def split_of_b(truth: MoEParameters, size: float) -> MoEParameters:
    """The first atom as two with b = ±εv and A = -ε² (1 - 2σ(c′))/2 vvᵀ, σ(c′) = σ(c)/2.

    Σ σ(c′ + s) over s = ±ε v·x + xᵀAx has no term of order ε² then.
    """
    order = [0, *range(truth.n_experts)]
    A, b = (
        truth.router[order][:, :4].reshape(-1, 2, 2).clone(),
        truth.router[order][:, 4:].clone(),
    )
    bias = truth.bias[order].clone()
    half = truth.bias[0].sigmoid() / 2
    v = torch.tensor([0.6, 0.8], dtype=torch.float64)
    bias[:2] = torch.logit(half)
    b[0], b[1] = size * v, -size * v
    A[:2] = -(size**2) * (1 - 2 * half) / 2 * torch.outer(v, v)
    return quadratic_parameters(A, bias, truth.experts[order], b)


@claim(
    "p4-thm1",
    "sparse regime, full score: ‖f - f*‖ >= c L_1",
    statement="For strongly identifiable experts L_1 is bounded by the distance of the functions.",
    tested="An atom with a zero row as two, b = ±ε and A of order ε²: exponents of the distance "
    "and of L_1 in ε, for GELU and ReLU experts.",
    expected=Verdict.FAILS,
)
def full_sparse(run: Run) -> Evidence:
    """Exponents of distance and loss."""
    x, steps = inputs(run, 2000, 2), [0.4, 0.2, 0.1]
    checks, shown = [], {}
    for expert in ("gelu", "relu"):
        model = MoEModel("quadratic", "sigmoid", expert, 2, 3)
        truth = sparse_truth(run, model)
        fits = [split_of_b(truth, step) for step in steps]
        gaps = [largest_gap(model, fit, truth, x) for fit in fits]
        losses = [voronoi_loss(fit, truth, "L1", 4).value for fit in fits]
        ratio = gaps[-1] / losses[-1] / (gaps[0] / losses[0])
        shown[expert] = (gaps, losses)
        checks += [
            at_least(f"{expert}: ratio at ε/4 over ratio at ε", ratio, 0.5),
            near(f"{expert}: exponent of |f - f*|", exponent(steps, gaps), 4, 0.15,
                 part="corrected"),
            near(f"{expert}: exponent of L_1", exponent(steps, losses), 2, 0.15, part="corrected"),
        ]  # fmt: skip
    gaps, losses = shown["gelu"]
    return Evidence(
        checks,
        paper="c > 0",
        corrected="the partially quadratic score, or squares of ‖Δb‖² in L_1",
        measured=exponent(steps, gaps),
        figure=chart("ε", "GELU experts",
            dots("|f - f*|", steps, gaps),
            dots("L_1", steps, losses),
            line("ε⁴", steps, [gaps[0] * (s / steps[0]) ** 4 for s in steps], dashed=True),
            log="xy"),
        note="By the first equation of (8), which no expert escapes, b can be split against A.",
    )  # fmt: skip


@claim(
    "p4-thm2",
    "polynomial experts: the vanishing ratio",
    number="Thm 2, Lemma 2",
    statement="‖f_G - f_G*‖ / L_{2,r} has no positive lower bound for experts (α·x + β)ᵖ, any r.",
    tested="An expert under a zero row split: α and β ± s (p = 1), strengths 1 ± s (p = 2, 3); r = "
    "1, 2, 3.",
)
def polynomial(run: Run) -> Evidence:
    """Ratios along splits that the function does not see."""
    x, ratios, gaps = inputs(run, 2000, 2), [], []
    for power in (1, 2, 3):
        model = MoEModel("quadratic", "sigmoid", "polynomial", 2, 3, power=power)
        truth = sparse_truth(run, model)
        for size in (0.3, 0.1, 0.03):
            split = split_scale(model, truth, size)
            gap = largest_gap(model, split, truth, x)
            gaps.append(gap)
            ratios += [gap / voronoi_loss(split, truth, "L2", 4, r).value for r in (1, 2, 3)]
    return Evidence(
        [
            at_most("largest ratio", max(ratios), 1e-6),
            at_most("largest |f - f*|", max(gaps), 1e-11, part="corrected"),
        ],
        paper=0,
        measured=max(ratios),
        note="The functions are equal; r changes only how small the loss is.",
    )


@claim(
    "p4-thm5",
    "dense regime, partial score: ‖f - f̄‖ >= c L_5",
    statement="The same without b.",
    tested="The same without b.",
    expected=Verdict.CONDITION,
    condition="A symmetric",
    seconds=1,
    given={"gate": "partial", "loss": "L5"},
)
@claim(
    "p4-thm3",
    "dense regime, full score: ‖f - f̄‖ >= c L_3",
    statement="For weakly identifiable experts L_3 against the nearest mixture of N atoms is "
    "bounded by the distance of the functions.",
    tested="Antisymmetric parts of A: distance and L_3; symmetric A over the flattest directions "
    "of the information matrix (tanh, two experts), near the truth.",
    expected=Verdict.CONDITION,
    condition="A symmetric",
    seconds=1,
    given={"gate": "quadratic", "loss": "L3"},
)
def dense_bound(run: Run, gate, loss: str) -> Evidence:
    """The ratio along antisymmetric parts, and over the flattest directions without them."""
    model = MoEModel(gate, "sigmoid", "tanh", 2, 2)
    truth = drawn(run, model)
    gap = largest_gap(model, twisted(truth), truth, inputs(run, 2000, 2))
    raw = voronoi_loss(twisted(truth), truth, loss, 4).value
    least = least_ratio(run, model, truth, loss, 4)
    return flat_bound(gap, raw, least, "antisymmetric parts", "A symmetric")


@claim(
    "p4-thm4",
    "sparse regime, partial score: ‖f - f*‖ >= c L_4",
    statement="For partial-strongly identifiable experts (two-layer networks, uᵖ by Def. 3) L_4 is "
    "bounded by the distance of the functions.",
    tested="An expert under a zero row as two of strengths 1 ± s: distance and L_4, for u², linear "
    "and two-layer GELU experts.",
    expected=Verdict.FAILS,
)
def partial_sparse(run: Run) -> Evidence:
    """Ratios along splits of strength."""
    x, checks, gaps = inputs(run, 2000, 2), [], []
    forms = {"u²": ({"expert": "polynomial"}, None), "linear": ({"expert": "linear"}, None),
             "two-layer GELU": ({"expert": "two_layer", "activation": "gelu"}, -1)}  # fmt: skip
    for name, (form, place) in forms.items():
        model = MoEModel("partial", "sigmoid", d=2, n_experts=3, **form)
        truth = sparse_truth(run, model)
        split = split_scale(model, truth, 0.3, place)
        gaps.append(largest_gap(model, split, truth, x))
        loss = voronoi_loss(split, truth, "L4", 4).value
        checks.append(at_least(f"{name}: ratio", gaps[-1] / loss, FLOOR))
    checks.append(at_most("largest |f - f*|", max(gaps), 1e-12, part="corrected"))
    return Evidence(
        checks,
        paper="c > 0",
        corrected="tanh and GELU without outer scale (`p4-def3`), or L_4 up to mass and scale",
        measured=max(gaps),
        note="λ is linear in f under a zero row: λ(1 ± s) with half the mass each is the same.",
    )


def family(expert: str = "tanh", gate: Any = "quadratic", link: Any = "sigmoid") -> MoEModel:
    """A mixture of two experts in the plane."""
    return MoEModel(gate, link, expert, 2, 2)


@claim(
    "p4-cor2",
    "regression rate, partially quadratic score, dense regime",
    statement="With scores xᵀAx + c, f̂ approaches the best functions with more experts than the "
    "truth like √(log n / n).",
    tested="Slope of ‖f̂ - f*‖ itself, the infimum over such functions being f*.",
    seconds=3,
    given={"gate": "partial", "experts": ("tanh",), "sparse": False},
)
@claim(
    "p4-prop4",
    "regression rate, partially quadratic score, sparse regime",
    statement="With scores xᵀAx + c, ‖f̂ - f*‖ falls like √(log n / n) in the sparse regime.",
    tested="Slope of ‖f̂ - f*‖ with one expert too many, tanh and ReLU experts.",
    seconds=3,
    given={"gate": "partial", "experts": ("tanh", "relu"), "sparse": True},
)
@claim(
    "p4-cor1",
    "regression rate, dense regime",
    statement="In the dense regime f̂ approaches the best functions with more experts than the "
    "truth like √(log n / n).",
    tested="Slope of ‖f̂ - f*‖ itself, the infimum over such functions being f*.",
    seconds=3,
    given={"gate": "quadratic", "experts": ("tanh", "relu"), "sparse": False},
)
@claim(
    "p4-prop1",
    "regression rate, sparse regime",
    statement="With full quadratic scores and split experts without gate, ‖f̂ - f*‖ falls like "
    "√(log n / n).",
    tested="Slope of ‖f̂ - f*‖ with one expert too many, tanh and ReLU experts.",
    seconds=3,
    given={"gate": "quadratic", "experts": ("tanh", "relu"), "sparse": True},
)
def over_regression(run: Run, gate: str, experts: tuple[str, ...], *, sparse: bool) -> Evidence:
    """Slope of ‖f - f*‖ with one expert too many."""
    found = {name: small_study(run, family(name, gate), extra=1, sparse=sparse) for name in experts}
    dense = (
        "The paper expects f̂ to stay away from f* here; it converges, for the spare expert is "
        "switched off by c → -∞."
    )
    return regression_rate(found, "" if sparse else dense)


@claim(
    "p4-thm2-rate",
    "polynomial experts, sparse regime: what follows",
    number="Thm 2 (i), (ii)",
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


@claim(
    "p4-thm5-rate",
    "weakly identifiable experts, partially quadratic score",
    statement="L5 falls like √(log n / n) for partial-weakly identifiable experts.",
    tested="Slopes of L5 with N = N*, tanh, ReLU and linear experts, raw and up to the "
    "antisymmetric part of A.",
    expected=Verdict.CONDITION,
    condition="up to the antisymmetric part of A, and N = N*",
    seconds=2,
    given={"gate": "partial"},
)
@claim(
    "p4-thm3-rate",
    "weakly identifiable experts, dense regime",
    statement="L3 falls like √(log n / n) for weakly identifiable experts.",
    tested="Slopes of L3 with N = N*, tanh, ReLU and linear experts, raw and up to the "
    "antisymmetric part of A.",
    expected=Verdict.CONDITION,
    condition="up to the antisymmetric part of A, and N = N*",
    seconds=2,
    given={"gate": "quadratic"},
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
    "p4-thm4-rate",
    "partial-strongly identifiable experts, sparse regime: the rate",
    statement="L4 falls like √(log n / n) for partial-strongly identifiable experts.",
    tested="Slope of L4, up to the antisymmetric part of A, with one expert too many, tanh "
    "experts, partially quadratic score.",
    seconds=2,
    given={"gate": "partial"},
)
@claim(
    "p4-thm1-rate",
    "strongly identifiable experts, sparse regime: the rate",
    statement="L1 falls like √(log n / n) for strongly identifiable experts.",
    tested="Slope of L1, up to the antisymmetric part of A, with one expert too many, tanh "
    "experts, full quadratic score, at n of some thousands.",
    seconds=2,
    given={"gate": "quadratic"},
)
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
    "p4-table1",
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


@claim(
    "p4-fig1b",
    "softmax data, linear experts: softmax against sigmoid",
    statement="The loss of the softmax model falls like n^-0.07, that of the sigmoid model like "
    "n^-0.46.",
    tested="Raw and quotient slopes of both on a small design, the sigmoid's against its "
    "population minimiser.",
    expected=Verdict.FAILS,
    seconds=3,
    given={"expert": "linear", "paper": (-0.07, -0.46)},
)
@claim(
    "p4-fig1a",
    "softmax data, ReLU experts: softmax against sigmoid",
    statement="The loss of the softmax model falls like n^-0.24, that of the sigmoid model like "
    "n^-0.51.",
    tested="Raw and quotient slopes of both on a small design, the sigmoid's against its "
    "population minimiser.",
    expected=Verdict.FAILS,
    seconds=3,
    given={"expert": "relu", "paper": (-0.24, -0.51)},
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
    "p4-fig2a",
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
