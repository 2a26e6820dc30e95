"""Theorems 1 to 5 of paper 4: bounds of the losses by ‖f - f*‖, and rates of estimation.

Slopes are measured on small well-conditioned designs (`rate_studies.small_study`) by their 95 %
intervals: two experts in the plane with quadratic scores where as many are fitted, one where one is
too many. In the sparse regime the last expert of the truth has no gate, and it is the one that is
split. "Slower than any polynomial" is tested as a slope above -0.15.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from tieline.lab.claims.claim import ClaimRun, Verdict, claim
from tieline.lab.claims.evidence import (
    Check,
    Evidence,
    at_least,
    at_most,
    chart,
    corrected,
    dots,
    line,
    near,
    qualified,
)
from tieline.lab.claims.mixture_splits import (
    FLOOR,
    drawn_mixture,
    largest_gap,
    least_ratio,
    sparse_mixture,
    split_gap,
    split_ratio,
    split_scale,
)
from tieline.lab.claims.paper4.split_rates import (
    best_measure_loss,
    dense_atom,
    repaired_distance,
    split_atoms,
)
from tieline.lab.claims.rate_studies import (
    falling_slope_checks,
    parametric_rate_checks,
    power_law_of,
    printed_slopes_evidence,
    rate_evidence,
    regression_rate_evidence,
    slope_check,
    slow_rate_check,
    small_study,
)
from tieline.lab.estimation import MoEModel, MoEParameters, quadratic_parameters, voronoi_loss
from tieline.lab.estimation.model import GateName
from tieline.lab.estimation.rates import RateStudy
from tieline.lab.power_law import exponent


def split_along_b(truth: MoEParameters, size: float) -> MoEParameters:
    """Split the first atom into two, b = ±εv and A = -ε² (1 - 2σ(c′))/2 vvᵀ, σ(c′) = σ(c)/2.

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


@claim("p4-thm1", "sparse regime, full score: ‖f - f*‖ >= c L_1", expected=Verdict.FAILS)
def full_sparse(run: ClaimRun) -> Evidence:
    """For strongly identifiable experts L_1 is bounded by the distance of the functions.

    Setting: over-specified, sparse, full score, loss L_1. No expert meets Def. 1 (`p4-def1`), so
        that as an implication the theorem is empty; judged is the bound for the experts that the
        paper says meet it, two-layer GELU and ReLU
    Tested: An atom with a zero row as two, b = ±ε and A of order ε²: exponents of the distance and
        of L_1 in ε, for the two-layer GELU and ReLU experts of the paper.
    Overturned by: a loss with ‖Δb‖⁴ in place of ‖Δb‖², or the partial score
    """
    x, steps = run.uniform(2000, 2), [0.1, 0.05, 0.025]
    checks, shown = [], {}
    for expert in ("gelu", "relu"):
        model = MoEModel("quadratic", "sigmoid", "two_layer", 2, 3, activation=expert)
        truth = sparse_mixture(run, model)
        fits = [split_along_b(truth, step) for step in steps]
        gaps = [largest_gap(model, fit, truth, x) for fit in fits]
        losses = [voronoi_loss(fit, truth, "L1", 4).value for fit in fits]
        ratio = gaps[-1] / losses[-1] / (gaps[0] / losses[0])
        shown[expert] = (gaps, losses)
        checks += [
            at_least(f"{expert}: ratio at ε/4 over ratio at ε", ratio, 0.5),
            *corrected(
                near(f"{expert}: exponent of |f - f*|", exponent(steps, gaps), 4, 0.15),
                near(f"{expert}: exponent of L_1", exponent(steps, losses), 2, 0.15),
            ),
        ]
    gaps, losses = shown["gelu"]
    return Evidence.of(
        checks,
        paper="c > 0",
        corrected="the partially quadratic score, or squares of ‖Δb‖² in L_1",
        measured=exponent(steps, gaps),
        figure=chart(
            "ε",
            "GELU experts",
            dots("|f - f*|", steps, gaps),
            dots("L_1", steps, losses),
            line("ε⁴", steps, [gaps[0] * (s / steps[0]) ** 4 for s in steps], dashed=True),
            log="xy",
        ),
        note="By the first equation of (8), which no expert escapes, b can be split against A.",
    )


@claim("p4-thm2", "polynomial experts: the vanishing ratio", number="Thm 2, Lemma 2")
def polynomial_vanishing_ratio(run: ClaimRun) -> Evidence:
    """‖f_G - f_G*‖ / L_{2,r} has no positive lower bound for experts (α·x + β)ᵖ, any r.

    Setting: over-specified, sparse, full score, loss L_{2,r}; powers 1, 2, 3
    Tested: An expert under a zero row split: α and β ± s (p = 1), strengths 1 ± s (p = 2, 3); r =
        1, 2, 3.
    Overturned by: a lower bound on the ratio along splits
    """
    x, ratios, gaps = run.uniform(2000, 2), [], []
    for power in (1, 2, 3):
        model = MoEModel("quadratic", "sigmoid", "polynomial", 2, 3, power=power)
        truth = sparse_mixture(run, model)
        for size in (0.3, 0.1, 0.03):
            split = split_scale(model, truth, size)
            gap = largest_gap(model, split, truth, x)
            gaps.append(gap)
            ratios += [gap / voronoi_loss(split, truth, "L2", 4, r).value for r in (1, 2, 3)]
    return Evidence.of(
        at_most("largest ratio", max(ratios), 1e-6),
        corrected(at_most("largest |f - f*|", max(gaps), 1e-11)),
        paper=0,
        measured=max(ratios),
        note="The functions are equal; r changes only how small the loss is.",
    )


SPLIT_STEPS = [0.1, 0.05, 0.025, 0.0125]
"""Sizes δ of the splits of a gated expert."""


@claim(
    "p4-thm5",
    "dense regime, partial score: ‖f - f̄‖ >= c L_5",
    statement="The same without b.",
    setting="dense, partial score, loss L_5 to the nearest best measure, N = N* + 1; as Thm 3",
    expected=Verdict.FAILS,
    given={"gate": "partial", "loss": "L5"},
)
@claim(
    "p4-thm3",
    "dense regime, full score: ‖f - f̄‖ >= c L_3",
    expected=Verdict.FAILS,
    given={"gate": "quadratic", "loss": "L3"},
)
def dense_regime_bound(run: ClaimRun, gate, loss: str) -> Evidence:
    """For weakly identifiable experts L_3 against the nearest best measure of N > N* atoms is
    bounded by the distance of the functions.

    Setting: the theorem's own, N = N* + 1, dense, L_3 to the nearest best measure; judged for the
        experts that the paper says meet it, λφ with φ GELU, ReLU or linear. Proportional experts
        under one gate break its Def. 2, but no expert meets that (`p4-def2`), so that as an
        implication the theorem is empty; on the line, all parameters in a compact set
    Tested: One expert as (s* + δ, λ₁φ) and (s* - (λ₁/λ₂)δ, λ₂φ), λ₁ + λ₂ = λ*: exponents in δ of
        ‖f - f*‖, of what no first-order change of both atoms undoes, and of L_3 to the nearest
        measure of f*. Beside it tanh without outer scale at N = N*, A symmetric.
    Overturned by: a loss with squares in cells of several atoms, or experts of which no two are
        proportional
    """
    truth = dense_atom(full=gate == "quadratic")
    checks, shown = [], []
    for activation in ("gelu", "relu", "linear"):
        pairs = [split_atoms(truth, size) for size in SPLIT_STEPS]
        gaps = [repaired_distance(activation, truth, pair) for pair in pairs]
        losses = [best_measure_loss(truth)(pair[None]).item() for pair in pairs]
        orders = [exponent(SPLIT_STEPS, values) for values in (*zip(*gaps, strict=True), losses)]
        ratio = gaps[-1][0] / losses[-1] / (gaps[0][0] / losses[0])
        shown.append(f"{activation} {orders[0]:.2f}, {orders[1]:.2f}, {orders[2]:.2f}")
        checks += [
            at_least(f"λ {activation}: ratio at δ/8 over ratio at δ", ratio, 0.5),
            *corrected(
                near(f"λ {activation}: exponent of ‖f - f*‖", orders[0], 2, 0.1),
                near(f"λ {activation}: the same after first-order repair", orders[1], 2, 0.2),
                near(f"λ {activation}: exponent of {loss}", orders[2], 1, 0.01),
            ),
        ]
    model = MoEModel(gate, "sigmoid", "tanh", 2, 2)
    least = least_ratio(run, model, drawn_mixture(run, model), loss, 4)
    checks += corrected(at_least("tanh, N = N*, A symmetric: least ratio", least, FLOOR))
    return Evidence.of(
        checks,
        paper="c > 0",
        corrected="‖f - f̄‖ >= c L² at best: n^-1/4",
        measured="exponents of f, f repaired, L: " + "; ".join(shown),
        note="f - f* = ½ σ″(s*) φ (λ₁λ*/λ₂) δ² + O(δ³): the first order cancels. Experts that can "
        "vanish but not be split, such as tanh without outer scale, keep n^-1/2 (`p4-thm3-rate`).",
    )


@claim("p4-thm4", "sparse regime, partial score: ‖f - f*‖ >= c L_4")
def partial_sparse(run: ClaimRun) -> Evidence:
    """For partial-strongly identifiable experts (two-layer networks, uᵖ by Def. 3) L_4 is bounded
    by the distance of the functions.

    Setting: over-specified, sparse, partial score, loss L_4. The paper's examples do not meet Def.
        3 (`p4-def3`) and break the bound; tanh without outer scale passes the split test
    Tested: An expert under a zero row as two of strengths 1 ± s: distance and L_4, for u², linear
        and two-layer GELU experts; splits of a tanh expert in drawn directions with A symmetric.
    Overturned by: a vanishing ratio for tanh with symmetric A
    Condition: A symmetric, and experts that cannot be split, such as tanh without an outer scale;
        the paper's own examples can
    """
    x, checks, gaps = run.uniform(2000, 2), [], []
    forms = {
        "u²": ({"expert": "polynomial"}, None),
        "linear": ({"expert": "linear"}, None),
        "two-layer GELU": ({"expert": "two_layer", "activation": "gelu"}, -1),
    }
    for name, (form, coordinate) in forms.items():
        model = MoEModel("partial", "sigmoid", d=2, n_experts=3, **form)
        truth = sparse_mixture(run, model)
        split = split_scale(model, truth, 0.3, coordinate)
        gaps.append(largest_gap(model, split, truth, x))
        loss = voronoi_loss(split, truth, "L4", 4).value
        checks.append(at_least(f"{name}: ratio", gaps[-1] / loss, FLOOR))
    checks += corrected(at_most("largest |f - f*|", max(gaps), 1e-12))
    tanh, steps = MoEModel("partial", "sigmoid", "tanh", 2, 3), run.normal(200, 7, stream=23)
    steps[:, 1] = steps[:, 2]  # A stays symmetric
    least = split_ratio(tanh, sparse_mixture(run, tanh), steps, "L4", 4)
    checks += qualified(at_least("tanh: least ratio, quotient L_4", least, FLOOR))
    return Evidence.of(
        checks,
        paper="c > 0",
        corrected="tanh and GELU without outer scale (`p4-def3`), or L_4 up to mass and scale",
        measured=f"{max(gaps):.2g} for the paper's examples; ratio {least:.2g} for tanh",
        note="λ is linear in f under a zero row: λ(1 ± s) with half the mass each is the same.",
    )


OVER = "N = N* + 1"
QUARTIC = {"sizes": (10**6, 10**7, 10**8, 10**9, 10**10), "iterations": 4000}
"""Settings for the full score without gate, a valley of fourth order with slow fits."""


def over_specified_study(run: ClaimRun, gate: GateName) -> RateStudy:
    """Study of a tanh expert without gate, fitted by two, with the same truth for every seed.

    Whether a drawn expert is nearly constant or linear decides the n from which its law shows.
    """
    grid = QUARTIC if gate == "quadratic" else {}
    model = MoEModel(gate, "sigmoid", "tanh", 2, 1)
    return small_study(run, model, extra=1, sparse=True, fixed=True, **grid)


@claim(
    "p4-prop4",
    "regression rate, partially quadratic score, sparse regime",
    statement="With scores xᵀAx + c, ‖f̂ - f*‖ falls like √(log n / n) in the sparse regime.",
    setting="over-specified (N = N* + 1), sparse, partial score, ‖f̂ - f*‖; tanh",
    seconds=10,
    together="p4-sparse-partial",
    given={"gate": "partial"},
)
@claim(
    "p4-prop1",
    "regression rate, sparse regime",
    seconds=20,
    together="p4-sparse-full",
    given={"gate": "quadratic"},
)
def sparse_regression(run: ClaimRun, gate: GateName) -> Evidence:
    """With full quadratic scores and split experts without gate, ‖f̂ - f*‖ falls like √(log n / n).

    Setting: over-specified (N = N* + 1), sparse, full score, ‖f̂ - f*‖; tanh
    Tested: Slope of ‖f̂ - f*‖ with one expert too many, tanh experts, n from 1e6 to 1e12.
    Overturned by: a slope outside -1/2 ± 0.1
    """
    return regression_rate_evidence({OVER: over_specified_study(run, gate)})


@claim(
    "p4-cor2",
    "regression rate, partially quadratic score, dense regime",
    statement="With scores xᵀAx + c, f̂ approaches the best functions with more experts than the "
    "truth like √(log n / n).",
    setting="over-specified, dense, partial score, as Cor. 1",
    seconds=1.5,
    given={"gate": "partial"},
)
@claim("p4-cor1", "regression rate, dense regime", seconds=5, given={"gate": "quadratic"})
def dense_regression(run: ClaimRun, gate: GateName) -> Evidence:
    """In the dense regime f̂ approaches the best functions with more experts than the truth like
    √(log n / n).

    Setting: over-specified, dense, full score, distance to the best functions with more than N*
        experts; tanh, whose best function is f*, and e^{ηx}, whose best is not
    Tested: Slope of ‖f̂ - f*‖ itself, tanh experts, N = N* + 1; and the distance of f* from the
        best function with two experts e^{ηx}, which can neither be split nor vanish.
    Overturned by: experts among the hypotheses that can vanish or be split
    Condition: experts that can be split or can vanish, as all of the paper's examples: then f* is
        itself one of the best functions with more experts
    """
    studies = {OVER: small_study(run, MoEModel(gate, "sigmoid", "tanh", 2, 1), extra=1)}
    remainder = least_distance_of_two(full=gate == "quadratic")
    return rate_evidence(
        [
            at_most("experts e^{ηx}: distance of f* from the best of two", remainder, 1e-8),
            *qualified(*parametric_rate_checks("slope of ‖f - f*‖", studies, "function")),
        ],
        studies,
        ("function",),
        paper=-0.5,
        measured=f"{power_law_of(studies[OVER], 'function')}; {remainder:.2g} is left for e^{{ηx}}",
        note="f* is in the fitted family, so that f̂ → f* in every regime. The paper expects f̂ to "
        "stay away from f*; where its best functions with more experts are not f*, f̂ stays away "
        "from them.",
    )


def least_distance_of_two(*, full: bool, box: float = 4.0, starts: int = 8) -> float:
    """Least distance of σ(x + x²) e^x on [-1, 1] from two experts Σ σ(a x² + b x + c) e^{ηx}.

    Parameters are within ± box; by least squares from random starts, b = 0 unless `full`.
    """
    x = np.linspace(-1, 1, 101)
    target = np.exp(x) / (1 + np.exp(-(x * x + (x if full else 0))))
    free = np.array([1.0, float(full), 1.0, 1.0] * 2)

    def gap(theta: np.ndarray) -> np.ndarray:
        a, b, c, eta = (free * theta).reshape(2, 4).T[:, :, None]
        return (np.exp(eta * x) / (1 + np.exp(-(a * x * x + b * x + c)))).sum(0) - target

    random = np.random.default_rng(0)
    begun = random.uniform(-box / 2, box / 2, size=(starts, 8))
    ends = [least_squares(gap, theta, bounds=(-box, box)) for theta in begun]
    return min(float(np.sqrt(2 * end.cost / len(x))) for end in ends)


@claim(
    "p4-thm2-rate",
    "polynomial experts, sparse regime: what follows",
    number="Thm 2 (i), (ii)",
    seconds=10,
)
def polynomial_sparse(run: ClaimRun) -> Evidence:
    """Linear experts under a full quadratic sigmoid gate are learned more slowly than any power of
    n.

    Setting: over-specified (N = N* + 1), sparse, full score, linear experts after matching
    Tested: Slope of the experts' distance in the theorem's setting: N = N* + 1, the last expert
        without gate, n from 1e6 to 1e12; the same with N = N* beside it.
    Overturned by: an expert error with a slope below -0.15
    """
    fits = {"radii": (0.3,), "repetitions": run.size(8, 32)}
    model = MoEModel("quadratic", "sigmoid", "linear", 2, 2)
    exact = {"N = N*": small_study(run, model)}
    studies = {OVER: small_study(run, model, extra=1, sparse=True, **fits), **exact}
    return rate_evidence(
        [
            slow_rate_check(f"experts, {OVER}", studies[OVER]),
            *corrected(*parametric_rate_checks("experts", exact, "experts")),
        ],
        studies,
        ("experts",),
        paper="slower than any power",
        corrected="with more experts than the truth; n^-1/2 with the right number",
        note="w₁η₁ + w₂η₂ = wη* leaves f as it is: with one linear expert too many the single "
        "experts are not determined, and their error is that of the start.",
    )


TABLE_EXPERTS: dict[str, tuple[dict[str, Any], int | None]] = {
    "GELU": ({"expert": "two_layer", "activation": "gelu"}, -1),
    "powers": ({"expert": "linear"}, None),
}
"""Experts of Table 1, with the coordinate that carries their strength."""


@claim(
    "p4-table1",
    "softmax against sigmoid: samples for an error ε",
    expected=Verdict.FAILS,
    seconds=2,
)
def table_one_softmax_sigmoid(run: ClaimRun) -> Evidence:
    """For an error ε of the experts, ReLU and GELU networks need ε^-4 (sparse) and ε^-2 (dense)
    samples under both links; powers need exp(ε^-1/τ) when sparse, and when dense ε^-2 under the
    sigmoid, exp(ε^-1/τ) under softmax.

    Setting: the eight entries as printed, by the paper's reading: N > N*, experts against the
        truth, in the dense sigmoid regime against the nearest best measure; full score. Section 4.2
        has ε^-4 for softmax, dense, ReLU and GELU, where the table prints ε^-2
    Tested: Splits of one expert. Where the function does not change, no number of samples gives the
        expert: right for exp(ε^-1/τ), wrong for a power. Dense sigmoid: 2 × exponent of ‖f - f*‖
        over that of the loss in the size of the split. N = N* beside it: slopes.
    Overturned by: another reading of the error, under which split experts count as found
    """
    gaps = {
        (link, expert, regime): split_gap(run, model, draw(run, model), 0.4, coordinate)
        for link in ("softmax", "sigmoid")
        for expert, (form, coordinate) in TABLE_EXPERTS.items()
        for model in [MoEModel("quadratic", link, d=2, n_experts=2, **form)]
        for regime, draw in (("sparse", sparse_mixture), ("dense", drawn_mixture))
        if (link, regime) != ("sigmoid", "dense")
    }
    checks = []
    for entry, gap in gaps.items():
        slow_entry = entry[1] == "powers"
        name = f"{', '.join(entry)}: |f - f*| of a split, printed as "
        rule, limit = (at_most, 1e-12) if slow_entry else (at_least, 1e-6)
        printed = "exp(ε^-1/τ)" if slow_entry else "ε^-2" if entry[2] == "dense" else "ε^-4"
        checks.append(rule(name + printed, gap, limit))
    powers = {name: samples_power(name) for name in ("gelu", "relu", "linear")}
    for name, power in powers.items():
        checks.append(at_most(f"sigmoid, {name}, dense: power of 1/ε", power, 2, 0.2))
        checks += corrected(near(f"sigmoid, {name}, dense: ε^-4", power, 4, 0.2))
    studies = {
        f"{link}, {expert}": small_study(run, MoEModel("quadratic", link, expert, 2, 2))
        for link in ("softmax", "sigmoid")
        for expert in ("linear", "relu")
    }
    rates = [study.rate("experts").slope for study in studies.values()]
    return rate_evidence(
        [
            *checks,
            *corrected(*parametric_rate_checks("N = N*: slope of experts", studies, "experts")),
        ],
        studies,
        losses=("experts",),
        paper="ε^-4, ε^-2 twice; exp(ε^-1/τ) three times and ε^-2 for powers",
        corrected="N > N*: not determined six times, ε^-4 for the dense sigmoid; N = N*: ε^-2",
        measured=f"three of eight entries right; |f - f*| <= {max(gaps.values()):.1g} in six, "
        f"ε^-{min(powers.values()):.2f} in two; N = N*: {min(rates):.2f} to {max(rates):.2f}",
        note="λ₁φ and λ₂φ under one gate share the work of λφ for nothing under softmax, and under "
        "a sigmoid without row; under a sigmoid with a row they are best measures themselves, and "
        "noise of size ε² splits the gates by ε (`p4-thm3`).",
    )


def samples_power(activation: str) -> float:
    """Power of 1/ε in the samples needed for an error ε, dense regime, from splits of the gate.

    ‖f - f*‖ ~ n^-1/2 is δ^p and the loss δ^q, so that n ~ ε^(-2p/q).
    """
    truth = dense_atom(full=True)
    pairs = [split_atoms(truth, size) for size in SPLIT_STEPS]
    gaps = [repaired_distance(activation, truth, pair)[0] for pair in pairs]
    losses = [best_measure_loss(truth)(pair[None]).item() for pair in pairs]
    return 2 * exponent(SPLIT_STEPS, gaps) / exponent(SPLIT_STEPS, losses)


RADII = (0.003, 0.1)
"""Start radii compared for the figures."""
FLATTEST = -0.35
"""Raw slopes with one expert too many stay above this, from a start radius of 0.1."""
STATED_START = "the start and the number of fitted experts of the paper's runs"
NOT_STATED = (
    "the figure shows runs of the paper's own, and neither their start nor the number of fitted "
    "experts is stated; the raw loss that it plots is that of the start in directions that the "
    "data do not see. `tieline rates p4-2b-relu --radius 0.01,0.1` and its sisters repeat the "
    "paper's design"
)


def over_specified_slope_checks(
    run: ClaimRun, models: Mapping[str, MoEModel], **truth: Any
) -> list[Check]:
    """Check, as our own statement, raw slopes for N = N* + 1 from a start radius of 0.1.

    Each study has four sizes and a few fits, enough to distinguish a flat slope from -1/2.
    """
    grid = {"sizes": (10**6, 10**8, 10**10, 10**12), "iterations": 800, "radii": (0.1,)}
    checks = []
    for name, model in models.items():
        fits = {**grid, "repetitions": run.size(6, 24), **truth}
        law = small_study(run, model, extra=1, **fits).rate("raw")
        checks.append(slope_check(f"{OVER}: raw slope, {name}", law, least=FLATTEST))
    return corrected(*checks)


@claim(
    "p4-fig1b",
    "softmax data, linear experts: softmax against sigmoid",
    statement="The loss of the softmax model falls like n^-0.07, that of the sigmoid model like "
    "n^-0.46.",
    setting="softmax data, linear; raw losses from two start radii, d = 2, N = N*; softmax also "
    "with N = N* + 1",
    overturned_by=STATED_START,
    undecided=NOT_STATED,
    seconds=5,
    given={"expert": "linear", "paper": (-0.07, -0.46)},
)
@claim(
    "p4-fig1a",
    "softmax data, ReLU experts: softmax against sigmoid",
    overturned_by=STATED_START,
    undecided=NOT_STATED,
    seconds=6,
    given={"expert": "relu", "paper": (-0.24, -0.51)},
)
def softmax_data(run: ClaimRun, expert: str, paper: tuple[float, float]) -> Evidence:
    """The loss of the softmax model falls like n^-0.24, that of the sigmoid model like n^-0.51.

    Setting: softmax data, ReLU; raw losses from two start radii, d = 2, N = N*; softmax with
        N = N* + 1, as the paper assumes, from one
    Tested: Raw slopes of both from two start radii on a small design, the sigmoid's against its
        population minimiser; slopes of ‖f - f_Ḡ‖; the softmax's raw slope with N = N* + 1.
    """
    soft, sigmoid = (MoEModel("quadratic", link, expert, 2, 2) for link in ("softmax", "sigmoid"))
    studies = {
        "softmax": small_study(run, soft, radii=RADII),
        "sigmoid": small_study(run, sigmoid, source=soft, radii=RADII),
    }
    specified = {"softmax": studies["softmax"]}
    others = [
        *parametric_rate_checks("quotient slope", specified, "quotient"),
        *falling_slope_checks("slope of ‖f - f_Ḡ‖", studies, "function"),
        *over_specified_slope_checks(run, {"softmax": soft}),
    ]
    return printed_slopes_evidence(
        dict(zip(studies, paper, strict=True)),
        studies,
        RADII,
        others,
        corrected="the softmax model is not slow: -1/2 up to what f does not see",
        note="The softmax model is well specified here, the sigmoid one is not: its reference is "
        "the population minimiser.",
    )


@claim(
    "p4-fig2a",
    "sigmoid data, sparse regime: ReLU against linear experts",
    statement="The loss of ReLU experts falls like n^-0.54, that of linear experts like n^-0.07.",
    setting="sigmoid data, sparse; raw losses, N = N* from two start radii, N = N* + 1 from one",
    overturned_by=STATED_START,
    tested="Raw slopes from two start radii on a small design whose last expert has no gate, "
    "N = N*; slopes of ‖f - f*‖; raw slopes with N = N* + 1, as the paper assumes.",
    undecided=NOT_STATED,
    seconds=11,
    given={"sparse": True, "paper": (-0.54, -0.07), "judged": "function"},
)
@claim(
    "p4-fig2b",
    "sigmoid data, dense regime: ReLU against linear experts",
    overturned_by=STATED_START,
    undecided=NOT_STATED,
    seconds=2,
    given={"sparse": False, "paper": (-0.53, -0.44), "judged": "quotient"},
)
def sigmoid_data(
    run: ClaimRun, *, sparse: bool, paper: tuple[float, float], judged: str
) -> Evidence:
    """The loss of ReLU experts falls like n^-0.53, that of linear experts like n^-0.44.

    Setting: sigmoid data, dense; raw losses, N = N* from two start radii, N = N* + 1 from one
    Tested: Raw slopes from two start radii on a small design with N = N*; quotient slopes; raw
        slopes with N = N* + 1, as the paper assumes.
    """
    models = {name: MoEModel("quadratic", "sigmoid", name, 2, 2) for name in ("relu", "linear")}
    studies = {
        name: small_study(run, model, sparse=sparse, radii=RADII) for name, model in models.items()
    }
    return printed_slopes_evidence(
        dict(zip(studies, paper, strict=True)),
        studies,
        RADII,
        [
            *parametric_rate_checks(f"slope of {judged}", studies, judged),
            *over_specified_slope_checks(run, models, sparse=sparse),
        ],
        corrected="both alike up to what f does not see",
        note="Mass and scale of an expert without gate trade freely; the antisymmetric part of A "
        "never enters.",
    )
