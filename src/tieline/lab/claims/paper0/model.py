"""Section 2 and the definitions: symmetries, boundary masses, ambiguity."""

import itertools
import math

import torch

from tieline.lab.claims.checks import at_least, at_most, corrected, near, none_of, within
from tieline.lab.claims.claim import ClaimRun, Evidence, chart, dots, line
from tieline.lab.claims.problems import affine_scores, drawn_router, mixture
from tieline.lab.claims.registry import claim
from tieline.lab.geometry import (
    ambiguity_mass,
    boundary_mass_pair,
    boundary_mass_top,
    gaussian_gap_density,
    gaussian_pair_density,
    pair_gap,
    top_gap,
)
from tieline.lab.limits.risk import MoESample, soft_predictions

EPSILON, TAU = 0.1, 0.3
KAPPA = math.log((1 - EPSILON) / EPSILON)


@claim("p0-sec2-gauge", "gauge and permutation symmetry")
def gauge(run: ClaimRun) -> Evidence:
    """Adding c(x) to all scores changes no weight; relabelling experts together with their scores
    changes no prediction, so a minimiser has E! copies.

    Setting: any mixture; here 4 experts at τ = 0.3, one shift of all scores and all relabellings
    Tested: All 24 relabellings and a drawn shift of a mixture of 4 experts.
    Overturned by: a prediction that changes by more than rounding
    """
    sample = mixture(run, run.size(2_000, 20_000))
    before = soft_predictions(sample, TAU)
    shift = 5 * run.normal(len(before), stream=9)[:, None]
    moved = MoESample(sample.scores + shift, sample.outputs, sample.target)
    copies = [
        MoESample(sample.scores[:, list(p)], sample.outputs[:, list(p)], sample.target)
        for p in itertools.permutations(range(4))
    ]
    changes = [(soft_predictions(copy, TAU) - before).abs().max().item() for copy in copies]
    alone = MoESample(sample.scores[:, [1, 0, 2, 3]], sample.outputs, sample.target)
    broken = (soft_predictions(alone, TAU) - before).abs().max().item()
    shifted = (soft_predictions(moved, TAU) - before).abs().max().item()
    checks = [
        at_most("change under a shift of all scores", shifted, 1e-12),
        at_most("change under 24 relabellings", max(changes), 1e-12),
        near("distinct relabellings", len(copies), math.factorial(4), 0),
        *corrected(at_least("change when scores alone are relabelled", broken, 0.1)),
    ]
    return Evidence.of(checks, paper="no change", measured=max(*changes, shifted))


@claim("p0-def3.1", "pairwise boundary mass and ambiguity events")
def pair_events(run: ClaimRun) -> Evidence:
    """The chance that some pair's own softmax weight lies in [ε, 1-ε] at temperature τ is
    BM_pair(κ_ε τ), κ_ε = log((1-ε)/ε).

    Setting: the definition and identity (3.6) as written, Gaussian inputs, ε = 0.1, τ = 0.3
    Tested: Both sides counted on the same draws, 6 experts, and the weight formed as written.
    Overturned by: a token that one side counts and the other does not
    """
    scores = affine_scores(run, run.size(20_000, 400_000), *drawn_router(run, 6, 4))
    i, j = torch.triu_indices(6, 6, 1)
    share = torch.sigmoid((scores[:, i] - scores[:, j]) / TAU)
    event = ((share >= EPSILON) & (share <= 1 - EPSILON)).any(dim=1).double().mean().item()
    mass = float(boundary_mass_pair(scores, KAPPA * TAU))
    checks = [near("P(some pair ambiguous) and BM_pair(κτ)", event, mass, 1e-12)]
    return Evidence.of(checks, paper=mass, measured=event)


@claim("p0-rem3.2", "ambiguity is a slab", number="Remark 3.2")
def slab(run: ClaimRun) -> Evidence:
    """A pair is ambiguous exactly where its score difference is at most κ_ε τ.

    Setting: every pair and every ε in (0, 1/2), in exact arithmetic; float64 for ε >= 1e-6
    Tested: Membership pair by pair, for ε from 0.4 to 1e-6; then for ε = 1e-17, where 1 - ε rounds
        to 1 and the weight as written accepts everything.
    Overturned by: a pair for which weight and slab disagree at an ε that float64 resolves
    """
    gap = 30 * run.normal(run.size(100_000, 2_000_000), stream=1)
    differ = 0
    for epsilon in (0.4, 0.1, 1e-3, 1e-6):
        share = torch.sigmoid(gap / TAU)
        event = (share >= epsilon) & (share <= 1 - epsilon)
        differ += (event != (gap.abs() <= TAU * math.log((1 - epsilon) / epsilon))).sum().item()
    tiny = 1e-17
    share = torch.sigmoid(gap / TAU)
    naive = ((share >= tiny) & (share <= 1 - tiny)).double().mean().item()
    slab_mass = (gap.abs() <= TAU * (math.log1p(-tiny) - math.log(tiny))).double().mean().item()
    return Evidence.of(
        none_of("pairs that differ", differ),
        corrected(
            at_least("excess of the weight as written at ε = 1e-17", naive - slab_mass, 0.05)
        ),
        paper="equal",
        measured=f"{differ} differ",
        note="In floating point the slab is the safe form: at ε = 1e-17 the weight as written "
        f"calls {naive:.3f} of the pairs ambiguous, the slab {slab_mass:.3f}.",
    )


@claim("p0-rem3.3", "binary case", number="Remark 3.3")
def binary(run: ClaimRun) -> Evidence:
    """For two experts the ambiguous inputs are those with score difference in [τ log(ε/(1-ε)), τ
    log((1-ε)/ε)].

    Setting: two experts, a curved router, ε = 0.1
    Tested: Counted on a curved router with two experts, by K-way softmax and by the slab, and
        against the quadrature of the slab.
    Overturned by: a mass that quadrature and counts do not share
    """
    from tieline.lab.claims.problems import GraphRouter

    router = GraphRouter()
    gap = router(run.normal(run.size(400_000, 4_000_000), 3, stream=1))
    scores = torch.stack([gap, torch.zeros_like(gap)], dim=1)
    ambiguous, counted = (
        ambiguity_mass(scores, EPSILON, TAU),
        boundary_mass_top(scores, 1, KAPPA * TAU),
    )
    exact = router.mass(KAPPA * TAU)
    checks = [
        near("softmax and slab on the same draws", float(ambiguous), float(counted), 0),
        within("counted against quadrature", float(counted), counted.stderr.item(), exact),
    ]
    return Evidence.of(checks, paper=exact, measured=float(counted))


@claim("p0-sec2-pair", "BM_pair as a proxy of BM_top")
def pair_proxy(run: ClaimRun) -> Evidence:
    """BM_pair bounds BM_top from above and is technically convenient in its place.

    Setting: an inequality for every router; its size for independent normal scores, 2 to 256
        experts
    Tested: Inclusion on draws; the ratio of the two at small widths by quadrature for independent
        normal scores, for 2 to 256 experts.
    Overturned by: an input whose top gap is smaller than its smallest pair gap
    """
    scores = run.normal(run.size(20_000, 200_000), 16, stream=1)
    outside = (pair_gap(scores) > top_gap(scores)).sum().item()
    sizes = [2, 4, 8, 16, 32, 64, 128, 256]
    ratio = [gaussian_pair_density(e) / gaussian_gap_density(e, 1) for e in sizes]
    width = 1e-3
    measured = float(boundary_mass_pair(scores, width)) / 16 / 15 * 2 * math.sqrt(math.pi) / width
    error = math.sqrt(1 / (len(scores) * 120 / math.sqrt(math.pi) * width))
    return Evidence.of(
        none_of("tokens with a smaller top gap than pair gap", outside),
        corrected(
            near("ratio at E = 16", ratio[3], 38.337, 1e-3),
            near("ratio at E = 256", ratio[-1], 6514, 1),
            within("pair density over its formula at E = 16", measured, error, 1.0, bias=0.05),
        ),
        paper="an upper bound",
        corrected="useless for many experts",
        measured=f"{ratio[3]:.2f}× at E=16, {ratio[-1]:.0f}× at E=256",
        figure=chart("experts", "BM_pair / BM_top", line("ratio at w → 0", sizes, ratio), log="xy"),
        note="True, and of no use for many experts: the bound is 6514 times too large at E = 256.",
    )


@claim("p0-eq5.3", "K-way ambiguity region", number="eq. 5.3, 5.4")
def ambiguity(run: ClaimRun) -> Evidence:
    """U_ε is the set of inputs whose largest softmax weight is at most 1 - ε, BM(τ; ε) its mass;
    outside it one expert has weight at least 1 - ε.

    Setting: definition of the K-way region, 8 experts, ε = 0.1
    Tested: The library's mass, decided on log-odds, against the weights as written; and at ε =
        1e-17, where only log-odds still tell.
    Overturned by: a weight above 1 - ε inside the region, or below outside
    """
    scores = affine_scores(run, run.size(50_000, 500_000), *drawn_router(run, 8, 5))
    weight = torch.softmax(scores / TAU, dim=1).amax(dim=1)
    written = (weight <= 1 - EPSILON).double().mean().item()
    odds = float(ambiguity_mass(scores, EPSILON, TAU))
    sure = torch.tensor([[0.0, -45.0]], dtype=torch.float64)
    tiny = float(ambiguity_mass(sure, 1e-17))
    rounded = (torch.softmax(sure, dim=1).amax(dim=1) <= 1 - 1e-17).double().mean().item()
    checks = [
        near("mass by weights and by log-odds", odds, written, 1e-12),
        *corrected(near("a gap of 45 is called ambiguous at ε = 1e-17", rounded - tiny, 1, 0)),
    ]
    return Evidence.of(checks, paper=written, measured=odds)


@claim("p0-rem5.4", "sandwich of the ambiguity mass", number="Remark 5.4")
def sandwich(run: ClaimRun) -> Evidence:
    """BM_top(κ_ε τ) <= BM(τ; ε) <= BM_top(κ_{ε,E} τ) <= BM_pair(κ_{ε,E} τ), with equality of the
    first two for two experts.

    Setting: every router; normal scores of 2 to 64 experts, five temperatures
    Tested: The chain on draws for E = 2, 4, 16, 64 and τ over two decades.
    Overturned by: one violation of the chain
    """
    violations, n, taus = 0, run.size(10_000, 100_000), [0.03, 0.1, 0.3, 1.0, 3.0]
    curves: dict[str, list[float]] = {"lower": [], "mass": [], "upper": []}
    for experts in (2, 4, 16, 64):
        scores = run.normal(n, experts, stream=experts)
        for tau in taus:
            outer = tau * (KAPPA + math.log(experts - 1))
            lower = float(boundary_mass_top(scores, 1, tau * KAPPA * (1 - 1e-12)))
            mass = float(ambiguity_mass(scores, EPSILON, tau))
            upper = float(boundary_mass_top(scores, 1, outer * (1 + 1e-12)))
            violations += (
                not lower <= mass <= upper <= float(boundary_mass_pair(scores, outer + 1e-9))
            )
            violations += experts == 2 and lower != upper
            if experts == 16:
                for name, value in zip(curves, (lower, mass, upper), strict=True):
                    curves[name].append(value)
    checks = [none_of("violations of the chain", violations)]
    figure = chart(
        "τ",
        "mass",
        line("BM_top(κτ)", taus, curves["lower"], dashed=True),
        dots("BM(τ; ε), E = 16", taus, curves["mass"]),
        line("BM_top(κ_E τ)", taus, curves["upper"], dashed=True),
        log="x",
    )
    return Evidence.of(checks, paper="a chain", measured=f"{violations} violations", figure=figure)
