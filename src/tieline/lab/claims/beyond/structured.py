"""Structured perturbations: the case that paper 1 names as open, on real hidden states.

The proofs are in docs/boundary-geometry.md.
"""

import math

import torch
from torch import Tensor

from tieline.core.ranking import topk_mask
from tieline.lab.claims.checks import at_least, none_of, within
from tieline.lab.claims.claim import Check, ClaimRun, Evidence, chart, dots, line
from tieline.lab.claims.registry import claim
from tieline.lab.claims.trained import RouterStates, router_states
from tieline.lab.geometry.exit_time import exit_curve, top_k_cell
from tieline.lab.geometry.structured import (
    PerturbationLaw,
    drifting_exit,
    flip_rate,
    pair_noise,
    perturbation_law,
    structured_bounds,
    whitened,
    worst_step,
)

FORM = "fp8_e4m3"
"""The perturbation: the model in eight bits, which changes the experts of a few tokens in 100."""


def moved(run: ClaimRun) -> list[tuple[RouterStates, Tensor]]:
    """Every router of the model in the box, and how far its inputs move in eight bits."""
    tokens = run.size(2_048, 16_384)
    pairs = zip(router_states(tokens), router_states(tokens, FORM), strict=True)
    return [(clean, other.inputs - clean.inputs) for clean, other in pairs]


@claim(
    "p5-structured",
    "exit of a cell under structured perturbations",
    number="structured",
    seconds=3,
    together="trained-states",
)
def structured_exit(run: ClaimRun) -> Evidence:
    """Let x move by m t + Σ^½ B_t, Σ of any rank. The wall of experts i, j is met by t with the
    inverse Gaussian law of gap z_i - z_j, drift (w_i - w_j)·m and deviation s_ij = √((w_i -
    w_j)ᵀΣ(w_i - w_j)); the exit time lies between the likeliest wall and their sum; and min (z_i -
    z_j)/s_ij is the exact length, in the metric of Σ, of the smallest step that changes the set.

    Setting: affine routers, top k, any drift and any covariance; the trained model in the box, its
        first router, with m and Σ of fp8
    Tested: The model in the box, m and Σ of the perturbations that its router inputs have in fp8:
        simulated paths of its tokens against the bounds and, for two experts, the law; steps of the
        stated length in the stated direction, and shorter ones in drawn directions.
    Overturned by: a path law outside the bounds, or a shorter step that changes the set
    """
    states, steps = moved(run)[0]
    law = perturbation_law(steps)
    scores = states.scores()
    every = torch.arange(0, len(scores), len(scores) // run.size(12, 60))
    checks = [
        none_of(
            "simulated paths outside the bounds", _tokens_outside_bounds(run, states, law, every)
        )
    ]
    checks += [*_one_wall_checks(run), *_worst_step_checks(run, states, law)]
    return Evidence.of(
        checks,
        paper="m = 0, Σ invertible",
        corrected="any m, any Σ ⪰ 0",
        measured=f"rank {law.root().shape[1]} of {len(law.mean)}, tr(Σ)²/tr(Σ²) = "
        f"{(law.covariance.trace() ** 2 / law.covariance.square().sum()).item():.0f}",
    )


def _tokens_outside_bounds(
    run: ClaimRun, states: RouterStates, law: PerturbationLaw, tokens: Tensor
) -> int:
    """Tokens whose simulated exit probability is outside the bounds by four standard errors.

    Time is in units in which the typical token is one deviation away from its nearest wall.
    """
    scores = states.scores()[tokens]
    horizon = worst_step(scores, states.k, states.weight, law).length.median().item() ** 2
    times = torch.tensor([horizon], dtype=torch.float64)
    bounds = structured_bounds(scores, states.k, states.weight, law, times)
    deviation, drift = pair_noise(states.weight, law)
    rows, outside = whitened(states.weight, law), 0
    for index, token in enumerate(scores):
        cell = top_k_cell(token, states.k, rows)
        pair = cell.faces[:, 0], cell.faces[:, 1]
        speed = drift[pair] / deviation[pair]
        curve = exit_curve(cell, horizon, 16, run.size(1_000, 20_000), run.seed, drift=speed)
        slack = 4 * curve.stderr[-1] + 2e-3  # of the bridges of walls that are nearly parallel
        low, high = bounds.lower[index, 0] - slack, bounds.upper[index, 0] + slack
        outside += not bool(low <= curve.value[-1] <= high)
    return outside


def _one_wall_checks(run: ClaimRun) -> list[Check]:
    """Simulated paths with a drift against the law of one wall."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    cell = top_k_cell(torch.tensor([1.0, 0.0]).double(), 1, weight)
    unit, checks = torch.ones(1, dtype=torch.float64), []
    for speed in (-0.8, 0.8):
        drift = speed * unit
        curve = exit_curve(cell, 1.0, 4, run.size(20_000, 400_000), run.seed, drift=drift)
        share, error = curve.value[-1].item(), curve.stderr[-1].item()
        law = drifting_exit(unit, unit, drift).item()
        checks.append(within(f"one wall, drift {speed:+g}", share, error, law))
    return checks


def _worst_step_checks(run: ClaimRun, states: RouterStates, law: PerturbationLaw) -> list[Check]:
    """The stated step reaches a tie, and no shorter one of those drawn does."""
    some = slice(0, run.size(200, 2_000))
    x, scores = states.inputs[some], states.scores()[some]
    worst = worst_step(scores, states.k, states.weight, law)
    before = topk_mask(scores, states.k)

    def changed(steps: Tensor) -> Tensor:
        return (topk_mask((x + steps) @ states.weight.T, states.k) != before).any(dim=1)

    root, shorter = law.root(), 0
    for stream in range(20):
        drawn = run.normal(len(x), root.shape[1], stream=50 + stream)
        drawn *= 0.999 * worst.length[:, None] / drawn.norm(dim=1, keepdim=True)
        shorter += int(changed(drawn @ root.T).sum())
    beyond, before_it = changed(1.000001 * worst.step), changed(0.999999 * worst.step)
    return [
        none_of("tokens kept by 1.000001 of the stated step", int((~beyond).sum())),
        none_of("tokens changed by 0.999999 of it", int(before_it.sum())),
        none_of("tokens changed by shorter steps in drawn directions", shorter),
    ]


@claim(
    "p5-real-noise",
    "flips of real perturbations follow their covariance",
    number="real noise",
    seconds=2,
    together="trained-states",
)
def real_noise(run: ClaimRun) -> Evidence:
    """Flips of a trained router under the perturbations of low precision are those of N(m, Σ), m
    and Σ measured on other tokens; isotropic noise of the same power flips the first router too
    rarely.

    Setting: the trained model in the box, the whole of it in fp8 (e4m3), perturbations of each
        router's input; tokens of the law and of the test apart
    Tested: The model in the box in fp8, router by router: m and Σ from every other token, share of
        flips of the tokens between them, measured and drawn; isotropic noise of the same power.
    Overturned by: a router whose flips differ from those of N(m, Σ) by more than a tenth and four
        standard errors
    """
    rows = [_flip_shares(run, states, steps) for states, steps in moved(run)]
    checks = [
        within(
            f"router {index}: share of flips against N(m, Σ)",
            row["measured"],
            row["error"],
            row["N(m, Σ)"],
            resolution=0.25,
            bias=0.1 * row["N(m, Σ)"],
        )
        for index, row in enumerate(rows)
    ]
    low = rows[0]["N(m, Σ)"] / rows[0]["isotropic"]
    checks.append(at_least("router 0: flips of N(m, Σ) over isotropic ones", low, 1.25))
    indices = [float(index) for index in range(len(rows))]
    shares = {name: [row[name] for row in rows] for name in rows[0]}
    laws = ("N(m, Σ)", "isotropic")
    return Evidence.of(
        checks,
        paper="isotropic diffusion",
        corrected="the covariance that the perturbations have",
        measured="; ".join(
            f"{name} {', '.join(f'{share:.3f}' for share in shares[name])}"
            for name in ("measured", *laws)
        ),
        figure=chart(
            "router",
            "share of tokens that change experts in fp8",
            dots("measured", indices, shares["measured"], shares["error"]),
            *(line(name, indices, shares[name], dashed=name == laws[1]) for name in laws),
        ),
    )


def _flip_shares(run: ClaimRun, states: RouterStates, steps: Tensor) -> dict[str, float]:
    """Share of odd tokens that flip, and that a law of the even tokens' steps makes flip."""
    law, scores = perturbation_law(steps[::2]), states.scores()[1::2]
    after = scores + steps[1::2] @ states.weight.T
    flips = (topk_mask(after, states.k) != topk_mask(scores, states.k)).any(dim=1).double()
    error = flips.std().item() / math.sqrt(len(flips))
    shares = {"measured": flips.mean().item(), "error": error}
    for name, noise in (("N(m, Σ)", law), ("isotropic", law.isotropic())):
        rate = flip_rate(scores, states.k, states.weight, noise, 8, run.seed)
        shares[name] = rate.value if rate.value is not None else math.nan
    return shares
