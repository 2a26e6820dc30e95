"""Different measures of one function: what theorems on estimation must leave out.

doubling     a softmax mixture times an exponential sum in numerator and denominator
reflection   σ(s)h = h - σ(-s)h, exactly with two spare experts

Proofs are in docs/estimation.md.
"""

import math

import torch
from torch import Tensor

from tieline.lab.claims.checks import at_least, at_most, near
from tieline.lab.claims.claim import ClaimRun, Evidence, chart, line
from tieline.lab.claims.mixtures import FLOOR, drawn, inputs, largest_gap
from tieline.lab.claims.registry import claim
from tieline.lab.estimation import (
    MoEModel,
    MoEParameters,
    quotient_losses,
    regression_distance,
    voronoi_loss,
)
from tieline.lab.estimation.model import router_directions


def doubled(model: MoEModel, truth: MoEParameters, step: Tensor, keep: int = 0) -> MoEParameters:
    """Every atom but the last `keep` as two of half the mass, rows v ± step."""
    tau, rows = model.tau[0], router_directions("perturbed", truth.router, model.tau[0])
    n = truth.n_experts
    split = list(range(n - keep))
    order = [*split, *split, *range(n - keep, n)]
    signs = torch.tensor([1.0] * len(split) + [-1.0] * len(split) + [0.0] * keep).double()
    v = rows[order] + signs[:, None] * step
    bias = truth.bias[order] - math.log(2) * signs.abs()
    router = tau * v / (1 - torch.linalg.vector_norm(v, dim=-1, keepdim=True))
    return MoEParameters(router, bias, truth.experts[order])


@claim(
    "p5-doubling",
    "all atoms of a softmax mixture can be doubled",
    number="doubling",
    statement="f of G and of Q·G, Q = Σ q_j e^{u_j·z}, are the same for every softmax router that "
    "is linear in some z(x) and every expert; with tanh experts no other measure with "
    "nonnegative masses has the same function. So ‖f - f*‖ >= c L_2 needs k < 2k*.",
    setting="softmax routers linear in z(x), any number of atoms; perturbed cosine and tanh here",
    overturned_by="a vanishing ratio at k = 2k* - 1 with the rows centred",
    tested="Perturbed cosine, three tanh experts: all atoms doubled (k = 2k*), all but one "
    "(k = 2k* - 1): distance and quotient L_2.",
)
def doubling(run: ClaimRun) -> Evidence:
    """Distance over loss when all atoms are doubled, and when all but one are."""
    model = MoEModel("perturbed", "softmax", "tanh", 2, 3)
    truth, x = drawn(run, model, stream=3, router=0.2), inputs(run, 2000, 2)
    all_doubled = doubled(model, truth, torch.tensor([0.1, -0.05]).double())
    gap = largest_gap(model, all_doubled, truth, x)
    loss = quotient_losses(model, all_doubled.expand(1), truth, "L2", 2).values.item()
    ratios = []
    for angle in torch.linspace(0, math.pi, 24, dtype=torch.float64):
        step = 0.05 * torch.stack((angle.cos(), angle.sin()))
        all_but_one = doubled(model, truth, step, keep=1).expand(1)
        away = regression_distance(model.with_experts(5), all_but_one, model, truth, n=2000).value
        ratios.append((away / quotient_losses(model, all_but_one, truth, "L2", 2).values).item())
    return Evidence(
        [
            at_most("k = 2k*: |f - f*|", gap, 1e-12),
            at_least("k = 2k*: quotient L_2", loss, 1e-4),
            at_least("k = 2k* - 1: least ratio", min(ratios), FLOOR),
        ],
        paper="k < 2k*",
        measured=f"{gap / loss:.1g} at k = 2k*, {min(ratios):.2g} at 2k* - 1",
    )


def reflected(truth: MoEParameters, spare: Tensor) -> MoEParameters:
    """The first atom (s, η) as (t, η), (-t, η), (-s, -η); `spare` has row and constant of t."""
    router = torch.stack((spare[:-1], -spare[:-1], -truth.router[0]))
    bias = torch.stack((spare[-1], -spare[-1], -truth.bias[0]))
    experts = torch.stack((truth.experts[0], truth.experts[0], -truth.experts[0]))
    pairs = zip((router, bias, experts), (truth.router, truth.bias, truth.experts), strict=True)
    return MoEParameters(*(torch.cat((new, old[1:])) for new, old in pairs))


def with_open_gate(truth: MoEParameters, constant: float) -> MoEParameters:
    """The first atom (s, η) as (c, η), whose gate is nearly one, and (-s, -η)."""
    router = torch.stack((0 * truth.router[0], -truth.router[0]))
    bias = torch.stack((torch.tensor(constant).double(), -truth.bias[0]))
    experts = torch.stack((truth.experts[0], -truth.experts[0]))
    pairs = zip((router, bias, experts), (truth.router, truth.bias, truth.experts), strict=True)
    return MoEParameters(*(torch.cat((new, old[1:])) for new, old in pairs))


@claim(
    "p5-reflection",
    "sigmoid gates can be reflected",
    number="reflection",
    statement="For odd experts (tanh, linear, odd powers, two-layer) σ(s)h = σ(t)h + σ(-t)h + "
    "σ(-s)(-h) for every t: with N >= N* + 2 the best measures of paper 4's Thm 3 and Cor. 1 "
    "include ones without any gate of the truth, on every parameter set. With N = N* + 1 and gates "
    "of |c| <= C the reflection is σ(-C) sup|h| away: the constant of Thm 3 is at most that small.",
    setting="sigmoid gates, odd experts, N > N*, dense or sparse; on every parameter set that "
    "holds the reflected atoms",
    overturned_by="experts of one sign, or a parameter set without negatives",
    tested="Full quadratic scores, two tanh experts in the plane: largest |f - f*|, L_3 to the "
    "truth, distance of gates and of experts; with one spare expert the distance at C = 5 to 30.",
)
def reflection(run: ClaimRun) -> Evidence:
    """Exact reflections with two spare experts, near ones with one."""
    model = MoEModel("quadratic", "sigmoid", "tanh", 2, 2)
    truth, x = drawn(run, model), inputs(run, 2000, 2)
    exact = reflected(truth, run.normal(7, stream=31))
    gap = largest_gap(model, exact, truth, x)
    rows = torch.cat((exact.router, exact.bias[:, None]), dim=1)
    gate = torch.cat((truth.router[0], truth.bias[:1]))
    gates = (rows - gate).norm(dim=1).min().item()
    experts = (exact.experts - truth.experts[0]).norm(dim=1).min().item()
    constants = [5.0, 10.0, 20.0, 30.0]
    gaps = [largest_gap(model, with_open_gate(truth, c), truth, x) for c in constants]
    losses = [voronoi_loss(with_open_gate(truth, c), truth, "L3", 4).value for c in constants]
    falls = [-math.log(g) / c for g, c in zip(gaps, constants, strict=True)]
    return Evidence(
        [
            at_most("N* + 2: |f - f*|", gap, 1e-12),
            at_least("N* + 2: L_3 to the truth", voronoi_loss(exact, truth, "L3", 4).value, 0.5),
            at_least("N* + 2: distance of every gate from the first of the truth", gates, 0.1),
            at_most("N* + 2: distance of the nearest expert", experts, 1e-12),
            near("N* + 1: -log|f - f*| / C at C = 20", falls[2], 1, 0.1),
            at_least("N* + 1: least L_3 to the truth", min(losses), 0.5),
        ],
        paper="exact with two spare experts",
        measured=f"{gap:.1g} with two, {gaps[1]:.1g} with one at C = 10",
        figure=chart(
            "C",
            "|f - f*|, one spare expert",
            line("reflected", constants, gaps),
            line("e^-C", constants, [math.exp(-c) for c in constants], dashed=True),
            log="y",
        ),
        note="Experts are found all the same, for h is among the atoms; the gates are not.",
    )
