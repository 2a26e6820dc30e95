"""Theorems 1 to 5 of paper 4: which loss is bounded by the distance of the functions?"""

import torch

from tieline.estimation import MoEModel, MoEParameters, quadratic_parameters, voronoi_loss
from tieline.studies.checks import at_least, at_most, near
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.figure import chart, dots, line
from tieline.studies.fits import exponent
from tieline.studies.mixture_checks import FLOOR, flat_bound, least_ratio
from tieline.studies.mixtures import (
    drawn,
    inputs,
    largest_gap,
    split_scale,
    twisted,
    without_row,
)
from tieline.studies.registry import claim


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
    "Thm 1",
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
        figure=chart("ε", "GELU experts", [
            dots("|f - f*|", steps, gaps),
            dots("L_1", steps, losses),
            line("ε⁴", steps, [gaps[0] * (s / steps[0]) ** 4 for s in steps], dashed=True),
        ], x_scale="log", y_scale="log"),
        note="By the first equation of (8), which no expert escapes, b can be split against A.",
    )  # fmt: skip


@claim(
    "p4-thm2",
    "Thm 2, Lemma 2",
    "polynomial experts: the vanishing ratio",
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


def dense_bound(run: Run, gate, loss: str) -> Evidence:
    """The ratio along antisymmetric parts, and over the flattest directions without them."""
    model = MoEModel(gate, "sigmoid", "tanh", 2, 2)
    truth = drawn(run, model)
    gap = largest_gap(model, twisted(truth), truth, inputs(run, 2000, 2))
    raw = voronoi_loss(twisted(truth), truth, loss, 4).value
    least = least_ratio(run, model, truth, loss, 4)
    return flat_bound(gap, raw, least, "antisymmetric parts", "A symmetric")


@claim(
    "p4-thm3",
    "Thm 3",
    "dense regime, full score: ‖f - f̄‖ >= c L_3",
    statement="For weakly identifiable experts L_3 against the nearest mixture of N atoms is "
    "bounded by the distance of the functions.",
    tested="Antisymmetric parts of A: distance and L_3; symmetric A over the flattest directions "
    "of the information matrix (tanh, two experts), near the truth.",
    expected=Verdict.CONDITION,
    condition="A symmetric",
    seconds=1,
)
def full_dense(run: Run) -> Evidence:
    """Fully quadratic."""
    return dense_bound(run, "quadratic", "L3")


@claim(
    "p4-thm5",
    "Thm 5",
    "dense regime, partial score: ‖f - f̄‖ >= c L_5",
    statement="The same without b.",
    tested="The same without b.",
    expected=Verdict.CONDITION,
    condition="A symmetric",
    seconds=1,
)
def partial_dense(run: Run) -> Evidence:
    """Partially quadratic."""
    return dense_bound(run, "partial", "L5")


@claim(
    "p4-thm4",
    "Thm 4",
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
