"""Theorems 1 to 5 of paper 4: bounds of the losses by ‖f - f*‖, and rates of estimation.

Slopes are measured on small well-conditioned designs (`rate_evidence.small_study`) by their 95 %
intervals: two experts in the plane with quadratic scores where as many are fitted, one where one is
too many. In the sparse regime the last expert of the truth has no gate, and it is the one that is
split. "Slower than any polynomial" is tested as a slope above -0.15.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from tieline.lab.claims.checks import (
    at_least,
    at_most,
    corrected,
    estimated,
    near,
    qualified,
    unmeasured,
)
from tieline.lab.claims.claim import ClaimRun, Evidence, Fits, Verdict, chart, dots, line
from tieline.lab.claims.mixtures import (
    FLOOR,
    drawn,
    flat_bound,
    inputs,
    largest_gap,
    least_ratio,
    split_ratio,
    split_scale,
    twisted,
    without_row,
)
from tieline.lab.claims.rate_evidence import (
    WINDOW,
    counted,
    each_falling,
    each_parametric,
    law_of,
    nearest_best,
    printed_slopes,
    rate_evidence,
    regression_rate,
    slow,
    small_study,
)
from tieline.lab.claims.registry import claim
from tieline.lab.estimation import MoEModel, MoEParameters, quadratic_parameters, voronoi_loss
from tieline.lab.estimation.rates import RateStudy
from tieline.lab.power_law import exponent


def sparse_truth(run: ClaimRun, model: MoEModel) -> MoEParameters:
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
    x, steps = inputs(run, 2000, 2), [0.1, 0.05, 0.025]
    checks, shown = [], {}
    for expert in ("gelu", "relu"):
        model = MoEModel("quadratic", "sigmoid", "two_layer", 2, 3, activation=expert)
        truth = sparse_truth(run, model)
        fits = [split_of_b(truth, step) for step in steps]
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
def polynomial(run: ClaimRun) -> Evidence:
    """‖f_G - f_G*‖ / L_{2,r} has no positive lower bound for experts (α·x + β)ᵖ, any r.

    Setting: over-specified, sparse, full score, loss L_{2,r}; powers 1, 2, 3
    Tested: An expert under a zero row split: α and β ± s (p = 1), strengths 1 ± s (p = 2, 3); r =
        1, 2, 3.
    Overturned by: a lower bound on the ratio along splits
    """
    x, ratios, gaps = inputs(run, 2000, 2), [], []
    for power in (1, 2, 3):
        model = MoEModel("quadratic", "sigmoid", "polynomial", 2, 3, power=power)
        truth = sparse_truth(run, model)
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


@claim(
    "p4-thm5",
    "dense regime, partial score: ‖f - f̄‖ >= c L_5",
    statement="The same without b.",
    setting="dense, partial score, loss L_5, at N = N*; tanh, bounded parameters",
    tested="The same without b.",
    seconds=1,
    given={"gate": "partial", "loss": "L5"},
)
@claim(
    "p4-thm3",
    "dense regime, full score: ‖f - f̄‖ >= c L_3",
    seconds=1,
    given={"gate": "quadratic", "loss": "L3"},
)
def dense_bound(run: ClaimRun, gate, loss: str) -> Evidence:
    """For weakly identifiable experts L_3 against the nearest mixture of N atoms is bounded by the
    distance of the functions.

    Setting: dense, full score, loss L_3; at N = N*, where the nearest best measure is the truth (N
        > N* in `p4-thm3-rate`); tanh, bounded parameters
    Tested: Antisymmetric parts of A: distance and L_3; symmetric A over the flattest directions of
        the information matrix (tanh, two experts), near the truth.
    Overturned by: a vanishing ratio with symmetric A
    Condition: A symmetric
    """
    model = MoEModel(gate, "sigmoid", "tanh", 2, 2)
    truth = drawn(run, model)
    gap = largest_gap(model, twisted(truth), truth, inputs(run, 2000, 2))
    raw = voronoi_loss(twisted(truth), truth, loss, 4).value
    least = least_ratio(run, model, truth, loss, 4)
    return flat_bound(gap, raw, least, "antisymmetric parts", "A symmetric")


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
    x, checks, gaps = inputs(run, 2000, 2), [], []
    forms = {
        "u²": ({"expert": "polynomial"}, None),
        "linear": ({"expert": "linear"}, None),
        "two-layer GELU": ({"expert": "two_layer", "activation": "gelu"}, -1),
    }
    for name, (form, coordinate) in forms.items():
        model = MoEModel("partial", "sigmoid", d=2, n_experts=3, **form)
        truth = sparse_truth(run, model)
        split = split_scale(model, truth, 0.3, coordinate)
        gaps.append(largest_gap(model, split, truth, x))
        loss = voronoi_loss(split, truth, "L4", 4).value
        checks.append(at_least(f"{name}: ratio", gaps[-1] / loss, FLOOR))
    checks += corrected(at_most("largest |f - f*|", max(gaps), 1e-12))
    tanh, steps = MoEModel("partial", "sigmoid", "tanh", 2, 3), run.normal(200, 7, stream=23)
    steps[:, 1] = steps[:, 2]  # A stays symmetric
    least = split_ratio(tanh, sparse_truth(run, tanh), steps, "L4", 4)
    checks += qualified(at_least("tanh: least ratio, quotient L_4", least, FLOOR))
    return Evidence.of(
        checks,
        paper="c > 0",
        corrected="tanh and GELU without outer scale (`p4-def3`), or L_4 up to mass and scale",
        measured=f"{max(gaps):.2g} for the paper's examples; ratio {least:.2g} for tanh",
        note="λ is linear in f under a zero row: λ(1 ± s) with half the mass each is the same.",
    )


def family(expert: str = "tanh", gate: Any = "quadratic", link: Any = "sigmoid") -> MoEModel:
    """A mixture of two experts in the plane."""
    return MoEModel(gate, link, expert, 2, 2)


def single(expert: str = "tanh", gate: Any = "quadratic") -> MoEModel:
    """One expert in the plane under a sigmoid gate, for fits with one too many."""
    return MoEModel(gate, "sigmoid", expert, 2, 1)


OVER = "N = N* + 1"
QUARTIC = {"sizes": (10**6, 10**7, 10**8, 10**9, 10**10), "iterations": 4000}
"""Sizes of the full score without gate: a valley of fourth order, which fits leave slowly."""


def one_too_many(run: ClaimRun, gate: str) -> RateStudy:
    """A tanh expert without gate, fitted by two; the truth is the same for every seed.

    What a drawn expert is near (a constant, a line) decides from which n on its law shows.
    """
    grid = QUARTIC if gate == "quadratic" else {}
    return small_study(run, single("tanh", gate), extra=1, sparse=True, fixed=True, **grid)


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
    seconds=9,
    together="p4-sparse-full",
    given={"gate": "quadratic"},
)
def sparse_regression(run: ClaimRun, gate: str) -> Evidence:
    """With full quadratic scores and split experts without gate, ‖f̂ - f*‖ falls like √(log n / n).

    Setting: over-specified (N = N* + 1), sparse, full score, ‖f̂ - f*‖; tanh
    Tested: Slope of ‖f̂ - f*‖ with one expert too many, tanh experts, n from 1e6 to 1e12.
    Overturned by: a slope outside -1/2 ± 0.1
    """
    return regression_rate({OVER: one_too_many(run, gate)})


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
def dense_regression(run: ClaimRun, gate: str) -> Evidence:
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
    studies = {OVER: small_study(run, single("tanh", gate), extra=1)}
    left = best_of_two(full=gate == "quadratic")
    return rate_evidence(
        [
            at_most("experts e^{ηx}: distance of f* from the best of two", left, 1e-8),
            *qualified(*each_parametric("slope of ‖f - f*‖", studies, "function")),
        ],
        studies,
        ("function",),
        paper=-0.5,
        measured=f"{law_of(studies[OVER], 'function')}; {left:.2g} is left for e^{{ηx}}",
        note="f* is in the fitted family, so that f̂ → f* in every regime. The paper expects f̂ to "
        "stay away from f*; where its best functions with more experts are not f*, f̂ stays away "
        "from them.",
    )


def best_of_two(*, full: bool, box: float = 4.0, starts: int = 8) -> float:
    """Least distance of σ(x + x²) e^{x} on [-1, 1] to Σ σ(a x² + b x + c) e^{ηx} of two experts.

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
    over = small_study(run, family("linear"), extra=1, sparse=True, **fits)
    studies = {OVER: over, "N = N*": small_study(run, family("linear"))}
    exact = {"N = N*": studies["N = N*"]}
    return rate_evidence(
        [
            slow(f"experts, {OVER}", studies[OVER]),
            *corrected(*each_parametric("experts", exact, "experts")),
        ],
        studies,
        ("experts",),
        paper="slower than any power",
        corrected="with more experts than the truth; n^-1/2 with the right number",
        note="w₁η₁ + w₂η₂ = wη* leaves f as it is: with one linear expert too many the single "
        "experts are not determined, and their error is that of the start.",
    )


@claim(
    "p4-thm5-rate",
    "weakly identifiable experts, partially quadratic score",
    statement="L5 to the nearest measure of the best function falls like √(log n / n), in "
    "probability, for partial-weakly identifiable experts.",
    setting="as Thm 3, partial score",
    tested="As Thm 3 (`p4-thm3-rate`), without b.",
    seconds=4,
    given={"gate": "partial"},
)
@claim(
    "p4-thm3-rate",
    "weakly identifiable experts, dense regime",
    seconds=5,
    given={"gate": "quadratic"},
)
def dense_rate(run: ClaimRun, gate: str) -> Evidence:
    """L3 to the nearest measure of the best function falls like √(log n / n), in probability, for
    weakly identifiable experts.

    Setting: the theorem's own: N > N* (one too many), the infimum over measures of the best
        function, a bound in probability; tanh, full score, one truth for all seeds; N = N* beside
        it
    Tested: N = N* + 1, tanh experts, n from 1e6 to 1e12: slope of the median distance to the true
        atom beside one with a zero expert, which is a best measure under any gate. Slopes of L3
        with N = N*, tanh, ReLU and linear experts, up to the antisymmetric part of A.
    Overturned by: a slope of the median outside -1/2 ± 0.14, or experts that cannot vanish
    """
    nearest = nearest_best(run, single("tanh", gate))
    experts = ("tanh", "relu", "linear")
    studies = {name: small_study(run, family(name, gate)) for name in experts}
    exact = counted(studies)
    fits = Fits(exact.converged + nearest.fits.converged, exact.total + nearest.fits.total)
    law, width = nearest.law, WINDOW["quotient"]
    evidence = rate_evidence(
        [
            estimated(
                f"{OVER}: slope of the median distance to the nearest best measure",
                law.slope,
                (law.low, law.high),
                least=-0.5 - width,
                most=-0.5 + width,
            ),
            *corrected(*each_parametric("N = N*: quotient slope", studies, "quotient")),
        ],
        studies,
        paper=-0.5,
        measured=f"{OVER}: {law}; {', '.join(f'{m:.2g}' for m in nearest.medians)}",
        note="The spare expert ends at zero, under any gate. In the mean a few fits decide: they "
        "end at a measure that is not best, whose function is so to rounding (`p5-reflection`).",
    )
    return replace(evidence, fits=fits)


FEW_DECIDE = (
    "the mean loss is that of a few fits, and its slope that of the seed: {slopes} for seeds 0, 1 "
    "and 2, with intervals that reach across a limit. One reason: an expert tanh(0) is zero under "
    "any gate, so that fits with one too many may end at a measure of the same function far away"
)


@claim(
    "p4-thm4-rate",
    "partial-strongly identifiable experts, sparse regime: the rate",
    statement="L4 falls like √(log n / n) for partial-strongly identifiable experts.",
    setting="over-specified (N = N* + 1), sparse, partial score, L_4 raw and with A symmetric; "
    "tanh; one truth for all seeds",
    overturned_by="a loss against the nearest measure of the same function, or experts that cannot "
    "vanish",
    tested="Slopes of L4, raw and up to the antisymmetric part of A, with one expert too many, "
    "tanh experts, partially quadratic score, n from 1e6 to 1e12.",
    undecided=FEW_DECIDE.format(slopes="-.52 [-.58, -.43], -.40 [-.48, -.34], -.43 [-.49, -.37]"),
    together="p4-sparse-partial",
    given={"gate": "partial"},
)
@claim(
    "p4-thm1-rate",
    "strongly identifiable experts, sparse regime: the rate",
    undecided=FEW_DECIDE.format(slopes="-.26 [-.33, -.20], -.59 [-.71, -.29], -.33 [-.41, -.23]")
    + ". That the bound behind it fails is `p4-thm1`",
    together="p4-sparse-full",
    given={"gate": "quadratic"},
)
def sparse_rate(run: ClaimRun, gate: str) -> Evidence:
    """L1 falls like √(log n / n) for strongly identifiable experts.

    Setting: over-specified (N = N* + 1), sparse, full score, L_1 with A symmetric; tanh; one truth
        for all seeds
    Tested: Slope of L1, up to the antisymmetric part of A, with one expert too many, tanh experts,
        full quadratic score, n from 1e6 to 1e10.
    Overturned by: slopes of three seeds on one side of a limit
    """
    studies = {OVER: one_too_many(run, gate)}
    return rate_evidence(
        [
            unmeasured("quotient slope", -0.5, "the mean loss is that of a few fits"),
            *corrected(*each_parametric("slope of ‖f - f*‖", studies, "function")),
        ],
        studies,
        paper=-0.5,
        corrected="f itself at n^-1/2; full score: L1 at n^-1/4 at best, for b ± ε with A of order "
        "ε² moves f by ε⁴ and L1 by ε² (`p4-thm1`, `p5-contact`)",
    )


@claim(
    "p4-table1",
    "softmax against sigmoid: samples for an error ε",
    expected=Verdict.FAILS,
    seconds=2,
)
def table(run: ClaimRun) -> Evidence:
    """Linear experts need exp(ε^-1/τ) samples under softmax and ε^-2 under a sigmoid with dense
    gates; ReLU experts ε^-4 against ε^-2.

    Setting: N > N* and dense gates, as the table; N = N* beside it; full score, linear and ReLU
    Tested: Both links and both experts twice. N > N*, the paper's setting, dense gates: one expert
        as two under the same gate, and the distance of the functions. N = N*: slopes of the
        experts' distance. Full quadratic score.
    Overturned by: an expert error against the nearest measure of the best function, which the paper
        means
    """
    links, experts = ("softmax", "sigmoid"), ("linear", "relu")
    entries = [(link, expert) for link in links for expert in experts]
    over = {entry: same_gate_gap(run, family(entry[1], link=entry[0])) for entry in entries}
    studies = {
        f"{link}, {expert}": small_study(run, family(expert, link=link)) for link, expert in entries
    }
    rates = [study.rate("experts").slope for study in studies.values()]
    return rate_evidence(
        [
            *(
                at_least(
                    f"sigmoid, {expert} at ε^-2, N > N*: |f - f*| of the split",
                    over["sigmoid", expert],
                    1e-6,
                )
                for expert in experts
            ),
            at_most(
                "softmax, linear is slow, N > N*: |f - f*| of the split",
                over["softmax", "linear"],
                1e-12,
            ),
            *corrected(*each_parametric("N = N*: slope of experts", studies, "experts")),
        ],
        studies,
        losses=("experts",),
        paper="softmax slow and ε^-4, sigmoid ε^-2",
        corrected="N > N*: not determined, four times; N = N*: ε^-2, four times",
        measured=f"N > N*: |f - f*| <= {max(over.values()):.1g} for all four; N = N*: "
        f"{min(rates):.2f} to {max(rates):.2f}",
        note="In the sparse regime the table itself has both links alike. In the dense one the "
        "paper's ε^-2 is the distance to the nearest measure with the same function, of which "
        "there are many; the true experts are not determined under either link. With the right "
        "number the links differ by a constant: `tieline rates --error`.",
    )


def same_gate_gap(run: ClaimRun, model: MoEModel) -> float:
    """Largest |f - f*| of the truth with its first expert as two under its own gate.

    The strengths are 0.7 and 0.3 under a sigmoid, whose gates add, and 1 ± 0.4 with half the mass
    each under softmax.
    """
    truth, x = drawn(run, model), inputs(run, 2000, model.d)
    if model.link == "softmax":
        return largest_gap(model, split_scale(model, truth, 0.4), truth, x)
    pair = truth.take([0, *range(truth.n_experts)])
    experts = pair.experts.clone()
    experts[0], experts[1] = 0.7 * experts[0], 0.3 * experts[1]
    return largest_gap(model, MoEParameters(pair.router, pair.bias, experts), truth, x)


RADII = (0.003, 0.1)
"""Start radii between which the figures are compared."""
STATED_START = "the start and the number of fitted experts of the paper's runs"
NOT_STATED = (
    "the figure shows runs of the paper's own, and neither their start nor the number of fitted "
    "experts is stated; the raw loss that it plots is that of the start in directions that the "
    "data do not see. `tieline rates p4-2b-relu --radius 0.01,0.1` and its sisters repeat the "
    "paper's design"
)


@claim(
    "p4-fig1b",
    "softmax data, linear experts: softmax against sigmoid",
    statement="The loss of the softmax model falls like n^-0.07, that of the sigmoid model like "
    "n^-0.46.",
    setting="softmax data, linear; raw losses from two start radii, d = 2",
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
    seconds=3,
    given={"expert": "relu", "paper": (-0.24, -0.51)},
)
def softmax_data(run: ClaimRun, expert: str, paper: tuple[float, float]) -> Evidence:
    """The loss of the softmax model falls like n^-0.24, that of the sigmoid model like n^-0.51.

    Setting: softmax data, ReLU; raw losses from two start radii, d = 2
    Tested: Raw slopes of both from two start radii on a small design, the sigmoid's against its
        population minimiser; slopes of ‖f - f_Ḡ‖.
    """
    soft = family(expert, link="softmax")
    studies = {
        "softmax": small_study(run, soft, radii=RADII),
        "sigmoid": small_study(run, family(expert), source=soft, radii=RADII),
    }
    specified = {"softmax": studies["softmax"]}
    others = [
        *each_parametric("quotient slope", specified, "quotient"),
        *each_falling("slope of ‖f - f_Ḡ‖", studies, "function"),
    ]
    return printed_slopes(
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
    setting="sigmoid data, sparse, N = N*; raw losses from two start radii",
    overturned_by=STATED_START,
    tested="Raw slopes from two start radii on a small design whose last expert has no gate, "
    "N = N*; slopes of ‖f - f*‖.",
    undecided=NOT_STATED,
    seconds=2,
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

    Setting: sigmoid data, dense, N = N*; raw losses from two start radii
    Tested: Raw slopes from two start radii on a small design with N = N*; quotient slopes.
    """
    studies = {
        name: small_study(run, family(name), sparse=sparse, radii=RADII)
        for name in ("relu", "linear")
    }
    return printed_slopes(
        dict(zip(studies, paper, strict=True)),
        studies,
        RADII,
        each_parametric(f"slope of {judged}", studies, judged),
        corrected="both alike up to what f does not see",
        note="Mass and scale of an expert without gate trade freely; the antisymmetric part of A "
        "never enters.",
    )
