"""Theorems 2, 4, 5, 6 of paper 2: which loss is bounded by the distance of the functions?"""

import math

import torch

from tieline.estimation import (
    MoEModel,
    MoEParameters,
    quotient_losses,
    regression_distance,
    voronoi_loss,
)
from tieline.studies.checks import at_least, at_most
from tieline.studies.claim import Check, Evidence, Run, Verdict
from tieline.studies.mixture_checks import FLOOR, flat_bound, least_ratio
from tieline.studies.mixtures import drawn, inputs, largest_gap, shift_rows, split_scale
from tieline.studies.registry import claim


def vanishing(run: Run, over: int) -> tuple[list[Check], float]:
    """‖f - f*‖ / L_{1,r} when rows of a vanilla cosine are lengthened."""
    model = MoEModel("cosine", "softmax", "tanh", 3, 3)
    truth = drawn(run, model)
    x, ratios = inputs(run, 2000, 3), []
    for r in (1, 2, 3):
        for step in (0.3, 0.1, 0.03):
            order = [0] * over + [0, 1, 2]
            bias = truth.bias[order].clone()
            bias[: over + 1] -= math.log(over + 1)
            rows = truth.router[order] * (1 + step)
            fit = MoEParameters(rows, bias, truth.experts[order])
            loss = voronoi_loss(fit, truth, "L1", 2, r).value
            ratios.append(largest_gap(model, fit, truth, x) / loss)
    least = least_ratio(run, model, truth, "L3", 2)
    return [
        at_most("largest ratio along longer rows", max(ratios), 1e-10),
        at_least("least ratio, rows up to length", least, FLOOR, part="corrected"),
    ], max(ratios)


@claim(
    "p2-thm2",
    "Thm 2",
    "vanilla cosine, over-specified: the vanishing ratio",
    statement="‖f_G - f_G*‖ / L_{1,r}(G, G*) has no positive lower bound, for every r.",
    tested="Longer rows and a duplicated atom, r = 1, 2, 3: the ratio; the same with lengths "
    "quotiented, over the flattest directions.",
    seconds=2,
)
def vanilla_over(run: Run) -> Evidence:
    """The ratio with one atom too many."""
    checks, ratio = vanishing(run, 1)
    return Evidence(
        checks,
        paper=0,
        corrected="positive once the length of a row is quotiented",
        measured=ratio,
        note="What cannot be estimated is the length of a row, on which the function does not "
        "depend; nothing follows for experts.",
    )


@claim(
    "p2-thm5",
    "Thm 5",
    "vanilla cosine, exactly specified: the vanishing ratio",
    statement="The same with as many atoms as the truth.",
    tested="Longer rows, r = 1, 2, 3; the same with lengths quotiented.",
    seconds=2,
)
def vanilla_exact(run: Run) -> Evidence:
    """The ratio with the right number of atoms."""
    checks, ratio = vanishing(run, 0)
    return Evidence(checks, paper=0, corrected="positive up to length", measured=ratio)


@claim(
    "p2-thm4",
    "Thm 4",
    "perturbed cosine, over-specified: ‖g - g*‖ >= c L_2",
    statement="For strongly identifiable experts (ReLU, tanh, uᵖ by Def. 1) L_2 is bounded by the "
    "distance of the functions.",
    tested="One expert as two of strength 1 ± s: distance and L_2 (ReLU, u²); rows moved together "
    "(tanh); splits of a tanh expert in drawn directions with the quotient loss.",
    expected=Verdict.FAILS,
    seconds=2,
)
def perturbed_over(run: Run) -> Evidence:
    """The ratio along splits."""
    x, checks, gaps = inputs(run, 2000, 2), [], []
    for expert in ("relu", "polynomial"):
        model = MoEModel("perturbed", "softmax", expert, 2, 3)
        truth = drawn(run, model, stream=2)
        for size in (0.4, 0.1):
            split = split_scale(model, truth, size)
            loss = voronoi_loss(split, truth, "L2", 2).value
            gaps.append(largest_gap(model, split, truth, x))
            checks.append(at_least(f"{expert}, s = {size}: ratio", gaps[-1] / loss, FLOOR))
    checks.append(at_most("largest |g - g*|", max(gaps), 1e-12, part="corrected"))
    ratio = split_ratio(run)
    checks.append(at_least("tanh: least ratio, quotient L_2", ratio, FLOOR, part="corrected"))
    return Evidence(
        checks,
        paper="c > 0",
        corrected="tanh and GELU, rows up to a common shift",
        measured=max(gaps),
        note="A homogeneous expert may be split into a weaker and a stronger one for nothing.",
    )


def split_ratio(run: Run) -> float:
    """Least ‖g - g*‖ / quotient L_2 over drawn splits of a tanh expert of size 0.05."""
    model = MoEModel("perturbed", "softmax", "tanh", 2, 3)
    truth = drawn(run, model, stream=3, router=0.2)
    steps = run.normal(200, 5, stream=23)
    steps = 0.05 * steps / steps.norm(dim=1, keepdim=True)
    pair = truth.take([0, 0, 1, 2]).expand(200)
    router, bias, experts = pair.router.clone(), pair.bias.clone(), pair.experts.clone()
    bias[:, :2] -= math.log(2)
    for i, sign in ((0, 1), (1, -1)):
        router[:, i] += sign * steps[:, :2]
        experts[:, i] += sign * steps[:, 2:]
    fits = MoEParameters(router, bias, experts)
    distance = regression_distance(model.with_experts(4), fits, model, truth, n=2000).value
    return float((distance / quotient_losses(model, fits, truth, "L2", 2).values).min())


@claim(
    "p2-thm6",
    "Thm 6",
    "perturbed cosine, exactly specified: ‖g - g*‖ >= c L_3",
    statement="For weakly identifiable experts L_3 is bounded by the distance of the functions.",
    tested="All rows v(β) moved by one vector: distance and L_3; the quotient loss over the "
    "flattest directions of the information matrix (tanh).",
    expected=Verdict.CONDITION,
    condition="rows up to a common shift of v = β/(‖β‖ + τ1)",
    seconds=2,
)
def perturbed_exact(run: Run) -> Evidence:
    """The ratio along a common shift, and without it."""
    model = MoEModel("perturbed", "softmax", "tanh", 2, 3)
    truth = drawn(run, model, router=0.05)
    moved = shift_rows(model, truth, torch.tensor([0.2, -0.1], dtype=torch.float64))
    gap = largest_gap(model, moved, truth, inputs(run, 2000, 2))
    loss = voronoi_loss(moved, truth, "L3", 2).value
    least = least_ratio(run, model, truth, "L3", 2)
    return flat_bound(gap, loss, least, "a common shift", "quotient L_3")
