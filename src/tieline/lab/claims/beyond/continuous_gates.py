"""Cost of continuity: a bound for every gate, the cost of particular gates, trained layers.

`hardening_bound`: how far the weights of a soft gate are from those of top-k.
"""

import math
from statistics import fmean, geometric_mean

import torch
from torch import Tensor

from tieline.analysis.smooth import DEFAULT_NOISE, SmoothingCalibration
from tieline.core.ranking import gap
from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import Check, Evidence, at_least, at_most, chart, line, near
from tieline.lab.limits.continuity_cost import (
    added_cost,
    continuity_bound,
    hard_sensitivity,
    least_moved,
    projected_cost,
    ramp_cost,
    segment_share,
    token_noise_bounds,
)
from tieline.lab.on_model.layer_law import LawPoint, LayerLaw, layer_laws
from tieline.lab.power_law import exponent
from tieline.models.demo import demo_text, load_demo_model, load_demo_tokenizer
from tieline.routing import ProjectedTopK, SmoothTopK, TopK, seat_projection
from tieline.run.corpus import stacked_batches
from tieline.run.forward import only_running

LINEAR = continuity_bound(1.0, 1.0, 1.0)
"""The bound of D·S in units of f² J⁴ σ²."""


def laplace_ramp(reach: float = 12.0, points: int = 4001) -> tuple[Tensor, Tensor]:
    """Points of the Laplace ramp, ½e^s below 0 and 1 - ½e^{-s} above, within e^-12 of 0 and 1."""
    s = torch.linspace(-reach, reach, points, dtype=torch.float64)
    r = torch.where(s < 0, s.exp() / 2, 1 - (-s).exp() / 2)
    r[0], r[-1] = 0, 1
    return s, r


def random_ramps(run: ClaimRun, count: int) -> list[tuple[Tensor, Tensor]]:
    """Draw piecewise linear ramps through random points, monotone or not."""
    ramps = []
    for number in range(count):
        points = 3 + number % 6
        s = run.normal(points, stream=2 * number).sort().values + 1e-3 * torch.arange(points)
        r = run.normal(points, stream=2 * number + 1).mul(0.5).add(0.5)
        r = r.sort().values if number % 3 else r
        r[0], r[-1] = 0, 1
        ramps.append((s, r))
    return ramps


@claim("p5-law", "moved times sensitivity", number="law")
def moved_times_sensitivity(run: ClaimRun) -> Evidence:
    """D·S >= f²J⁴σ²/16 for every ramp between two experts, S linearised in σ; the Laplace ramp
    attains it and a straight ramp has 4/3 of it.

    Setting: two experts, a score density that is flat over the ramp, noise small against it
    Tested: Products of random ramps, monotone and not; of the Laplace ramp; of straight ramps.
    Overturned by: a ramp below the bound
    """
    products = [ramp_cost(*ramp).product for ramp in random_ramps(run, run.size(300, 3000))]
    straight = ramp_cost(torch.tensor([-0.7, 0.7]).double(), torch.tensor([0.0, 1.0]).double())
    laplace = ramp_cost(*laplace_ramp())
    return Evidence.of(
        at_least("least D·S of random ramps over the bound", min(products) / LINEAR, 1),
        near("D·S of the Laplace ramp over the bound", laplace.product / LINEAR, 1, 1e-3),
        near("D·S of a straight ramp over the bound", straight.product / LINEAR, 4 / 3, 1e-9),
        paper="bound 1/16",
        measured=f"at least {min(products) / LINEAR:.3f} of {len(products)} ramps",
    )


@claim("p5-frontier", "the frontier at finite noise", number="frontier", seconds=0.5)
def finite_noise_frontier(run: ClaimRun) -> Evidence:
    """To make flips R times cheaper a gate must move the model by at least π/32·R times their cost
    for large R, and by the Fourier frontier for every R.

    Setting: two experts, a flat density, normal noise of any size
    Tested: Random ramps under normal noise of several sizes against the frontier; the frontier
        against π/32·R; the least of moved plus remaining.
    Overturned by: a ramp below the frontier
    """
    hard = hard_sensitivity(1.0, 1.0, 1.0)
    excess = []
    for number, ramp in enumerate(random_ramps(run, run.size(40, 400))):
        sigma = (0.1, 0.3, 1.0)[number % 3]
        cost = ramp_cost(*ramp, sigma)
        if cost.sensitivity < 0.98 * hard * sigma:
            least = least_moved(hard * sigma / cost.sensitivity) * hard * sigma
            excess.append(cost.moved / least)
    factors = torch.logspace(0.05, 2, 30, dtype=torch.float64)
    least = torch.tensor([least_moved(r) for r in factors.tolist()], dtype=torch.float64)
    cheapest = (least + 1 / factors).min().item()
    slope = math.pi / 32 * factors
    return Evidence.of(
        at_least("least D of random ramps over the frontier", min(excess), 1, 5e-3),
        near("frontier over π/32·R at R = 100", (least[-1] / slope[-1]).item(), 1, 5e-3),
        at_most("frontier over π/32·R, largest", (least / slope).max().item(), 1),
        near("least of moved plus remaining", cheapest, 0.54, 0.01),
        paper="π/32·R",
        measured=f"{min(excess):.3f} of {len(excess)} ramps; {cheapest:.3f} moved plus remaining",
        figure=chart(
            "times cheaper",
            "moved, over the cost of flips before",
            line("least possible", factors, least),
            line("π/32·R", factors, slope),
            log="xy",
        ),
    )


@claim("p5-gates", "two gates and the bound", number="gates")
def gates_against_bound(run: ClaimRun) -> Evidence:
    """Projected top-k has 4/3 of the bound, at equal ε half the D and half the S of paper 1's ramp;
    that has 16/3 of the bound for b = 1 and more for b = 50.

    Setting: orthogonal experts of equal size, k = 1, a flat density
    Tested: D and S of layers with orthogonal experts by sampling scores near a tie, against the
        integrals; paper 1's ramp by quadrature.
    Overturned by: a product outside the stated share of the bound
    """
    epsilon, sigma = 0.4, 0.01
    gates = {
        "projected": ProjectedTopK(1, epsilon=epsilon),
        "ramp": SmoothTopK(1, epsilon=epsilon),
    }
    sampled = {name: _sampled_cost(run, gate, sigma) for name, gate in gates.items()}
    predicted = projected_cost(0.5, math.sqrt(2), sigma, epsilon)
    bound = continuity_bound(0.5, math.sqrt(2), sigma)
    linear, steep = added_cost(), added_cost(1.0, 50.0)
    moved, sensitivity = sampled["projected"]
    return Evidence.of(
        near("D of the projection over f J² ε/6", moved / predicted.moved, 1, 0.02),
        near("S over its prediction", sensitivity / predicted.sensitivity, 1, 0.05),
        near("D·S over the bound", moved * sensitivity / bound, 4 / 3, 0.1),
        near("D of the ramp over that", sampled["ramp"][0] / moved, 2, 0.05),
        near("S of the ramp over that", sampled["ramp"][1] / sensitivity, 2, 0.1),
        near("D·S of b = 1 over the bound", linear.product / LINEAR, 16 / 3, 1e-6),
        at_least("D·S of b = 50 over the bound", steep.product / LINEAR, 100),
        paper="4/3; 16/3",
        measured=f"{moved * sensitivity / bound:.3f}; {linear.product / LINEAR:.3f}; b = 50: "
        f"{steep.product / LINEAR:.0f}",
    )


def _sampled_cost(
    run: ClaimRun, gate: ProjectedTopK | SmoothTopK, sigma: float
) -> tuple[float, float]:
    """Sampled D and S for margins uniform in (-1, 1), of density ½, and orthonormal outputs."""
    count = run.size(100_000, 1_000_000)
    margin = torch.linspace(-1, 1, count, dtype=torch.float64)
    scores = torch.stack((margin, torch.zeros_like(margin), torch.full_like(margin, -9.0)), dim=1)
    noise = torch.zeros_like(scores)
    noise[:, 0] = sigma * run.normal(count, stream=5)
    clean, hard = gate.share(scores), TopK(1).share(scores)
    noisy = gate.share(scores + noise)
    squared_distances = (clean - hard).square().sum(dim=1), (noisy - clean).square().sum(dim=1)
    return squared_distances[0].mean().item(), squared_distances[1].mean().item()


@claim("p5-lipschitz", "continuity at ties of every order", number="Lipschitz")
def continuity_at_ties(run: ClaimRun) -> Evidence:
    """Projected top-k is Lipschitz with constant 1/ε in ℓ2 at ties of every order, and no bound on
    the experts of a token below the number of tied ones is continuous.

    Setting: 16 experts, k = 2, ties of order 1 to 7
    Tested: Steps of the shares along random lines through ties of order 1 to 7 of 16 experts; the
        jump of paper 1's ramp with k_max below the number of tied experts.
    Overturned by: a slope above 1/ε
    """
    epsilon, steepest, jump = 0.3, 0.0, 0.0
    step = 1e-6
    for order in range(1, 8):
        tie = torch.cat(
            (torch.tensor([2.0]), torch.zeros(order + 1), -3 - torch.arange(14.0 - order))
        )
        lines = run.normal(200, 16, stream=order)
        ends = tie.double() + step * lines
        moved = (
            seat_projection(ends, 2, epsilon)
            - seat_projection(tie.double().expand_as(ends), 2, epsilon)
        ).norm(dim=1)
        steepest = max(steepest, (moved / (step * lines.norm(dim=1))).max().item() * epsilon)
        bounded = SmoothTopK(2, epsilon=epsilon, k_max=3).share(ends)
        if order >= 3:
            jump = max(jump, (bounded[1:] - bounded[:-1]).norm(dim=1).max().item())
    checks = [
        at_most("largest slope times ε", steepest, 1, 1e-6),
        at_least("the same, attained", steepest, 0.5),
        at_least("jump with at most 3 experts", jump, 0.5),
    ]
    return Evidence.of(checks, paper="1/ε", measured=f"{steepest:.3f}/ε")


LENGTH, TURNS = 512, 3
"""Tokens of a sequence; every third sequence estimates f, J and σ, the others D and S."""

SCALES, INSIDE, ERROR = (4.0, 8.0), 0.1, 0.25
"""ε/σ, the largest share of tokens inside the band, and the allowed error of predictions."""


def measure_demo_layer_laws(run: ClaimRun) -> tuple[LayerLaw, ...]:
    """Measure the layers of the demo model: f, J and σ on every third sequence, else D and S."""
    model, tokenizer = load_demo_model(), load_demo_tokenizer()
    ids = tokenizer(demo_text(), return_tensors="pt")["input_ids"][0]
    count = min(run.size(48, 120), len(ids) // LENGTH)
    sequences = list(ids[: count * LENGTH].view(count, LENGTH))
    first = sequences[run.seed % TURNS :: TURNS]
    others = [sequence for number, sequence in enumerate(sequences) if (number - run.seed) % TURNS]
    with only_running(model):
        halves = [list(stacked_batches(group, 8)) for group in (first, others)]
        calibration = SmoothingCalibration.on_batches(model, halves[0], DEFAULT_NOISE)
        return layer_laws(model, calibration, *halves, scales=SCALES, seed=run.seed)


def prediction_ratios(law: LayerLaw, point: LawPoint) -> tuple[float, float]:
    """Predicted D and S of a layer over the measured ones."""
    cost = projected_cost(law.density, law.jump, law.sigma, point.epsilon, law.slope)
    moved, sensitivity = point.moved.value or math.nan, point.sensitivity.value or math.nan
    return cost.moved / moved, cost.sensitivity / sensitivity


@claim(
    "p5-layers", "moved and sensitivity of a trained layer, predicted", number="layers", seconds=4
)
def trained_layer_predictions(run: ClaimRun) -> Evidence:
    """D and S of projected top-k in a layer of a trained model follow from density, jump and noise
    at ties of other text, within 25 % where at most a tenth of the tokens is inside the band, and D
    is 1 to 2 times the frontier at its S.

    Setting: the demo model, k = 2 of 16, nothing renormalised, noise of the choice alone; a tenth
        of the tokens inside the band at most
    Tested: The four layers of the demo model, each by itself, at ε = 4 and 8 times the noise of
        bf16 routers; every third sequence predicts, the others are measured. Fast: mean over
        layers.
    Overturned by: a mean prediction (in full, any) more than 25 % off, or D outside 1 to 2
        frontiers
    """
    laws = measure_demo_layer_laws(run)
    rows = [(law, point) for law in laws for point in law.points if point.inside <= INSIDE]
    ratios = [prediction_ratios(*row) for row in rows]
    frontier_ratios = [point.over.value or math.nan for _, point in rows]
    checks = [
        near(f"{name} predicted over measured, mean", geometric_mean(values), 1, ERROR)
        for name, values in zip("DS", zip(*ratios, strict=True), strict=True)
    ]
    checks += [
        at_least("D over the frontier, mean", fmean(frontier_ratios), 1),
        at_most("D over the frontier, mean", fmean(frontier_ratios), 2),
    ]
    if not run.fast:
        checks += [
            check
            for row, pair in zip(rows, ratios, strict=True)
            for check in _layer_checks(row, pair)
        ]
    least, most = min(map(min, ratios)), max(map(max, ratios))
    return Evidence.of(
        checks,
        paper="1; 1 to 2",
        measured=f"predicted over measured {least:.2f} to {most:.2f} in {len(rows)} cases; "
        f"over the frontier {min(frontier_ratios):.2f} to {max(frontier_ratios):.2f}",
    )


def _layer_checks(row: tuple[LayerLaw, LawPoint], pair: tuple[float, float]) -> list[Check]:
    """Check the predictions of one layer at one width."""
    law, point = row
    where = f"layer {law.name.split('.')[2]}, ε = {point.scale:g} σ"
    return [
        near(f"{name}, {where}", value, 1, ERROR) for name, value in zip("DS", pair, strict=True)
    ]


@claim("p5-token-noise", "the law where the noise varies by token", number="token noise")
def token_noise_law(run: ClaimRun) -> Evidence:
    """Where σ varies by token, D · S >= f² E[J²] E[J² σ²]/16 for one gate for all tokens, and
    f² (E[J² σ])²/16, never more, for a gate that knows the σ of its token; Laplace ramps attain
    both.

    Setting: J and σ drawn per token, dependent or not; density 1 at the tie; S linearised
    Tested: D and S of Laplace ramps, common or scaled by σ, against the bounds; common ramps of
        random shapes and random scales by token against them.
    Overturned by: a gate below its bound
    """
    jumps, sigmas = run.normal(2000, stream=51).exp(), (0.7 * run.normal(2000, stream=52)).exp()
    sigmas = sigmas * jumps.sqrt()  # tokens that jump further are noisier
    bounds = token_noise_bounds(1.0, jumps, sigmas)
    common = scaled_product(laplace_ramp(), jumps, sigmas, torch.ones(2000))
    knowing = scaled_product(laplace_ramp(), jumps, sigmas, sigmas)
    others = [
        scaled_product(ramp, jumps, sigmas, torch.ones(2000)) / bounds.common
        for ramp in random_ramps(run, 60)
    ]
    scales = [run.normal(2000, stream=60 + i).exp() for i in range(20)]
    guesses = [scaled_product(laplace_ramp(), jumps, sigmas, s) / bounds.knowing for s in scales]
    return Evidence.of(
        near("common Laplace ramp over the bound", common / bounds.common, 1, 1e-3),
        near("ramps scaled by σ over their bound", knowing / bounds.knowing, 1, 1e-3),
        at_most(
            "bound of a gate that knows σ over the common one", bounds.knowing / bounds.common, 1
        ),
        at_least("least of 60 common ramps", min(others), 1),
        at_least("least of 20 scalings by token", min(guesses), 1),
        paper=bounds.common,
        measured=common,
    )


def scaled_product(
    ramp: tuple[Tensor, Tensor], jumps: Tensor, sigmas: Tensor, scales: Tensor
) -> float:
    """Product D · S of a ramp with a scale for each token; density 1, S linearised."""
    cost, square = ramp_cost(*ramp), jumps.double().square()
    moved = cost.moved * (square * scales).mean()
    return (moved * cost.sensitivity * (square * sigmas.square() / scales).mean()).item()


@claim("p5-off-segment", "outputs off the segment between two experts", number="off the segment")
def off_segment_law(run: ClaimRun) -> Evidence:
    """An output that is a function of the noisy margin and not between the outputs of the two
    experts is at least as far from top-k as its projection on their segment, so that the least
    distance ½ f J² E|n - n'| bounds it too.

    Setting: outputs in R⁵, normal noise of the margin, density ½ on margins in [-8, 8]; random
        smooth outputs with parts along the segment and across it
    Tested: Distances of 20 random outputs and of their projections to those of top-k on the same
        draws; the least share of the cost of flips.
    Overturned by: an output nearer than its projection, or below the bound
    """
    n = run.size(100_000, 1_000_000)
    margin = 8 * run.uniform(n, stream=80)
    noisy = margin + run.normal(n, stream=81)
    lower, upper = (run.normal(1, 5, stream=s).expand(n, 5) for s in (82, 83))
    hard = torch.where(margin[:, None] > 0, upper, lower)
    flips = (torch.where(noisy[:, None] > 0, upper, lower) - hard).square().sum(dim=1).mean()
    shares, excess = [], []
    for number in range(20):
        width, across = (
            (0.3 + 0.2 * number),
            0.05 * (number % 4) * run.normal(5, stream=90 + number),
        )
        rise = torch.special.ndtr(noisy / width)[:, None]
        outputs = lower + rise * (upper - lower) + (4 * rise * (1 - rise)) * across
        share, _ = segment_share(outputs, lower, upper)
        projected = lower + share[:, None] * (upper - lower)
        distances = [(y - hard).square().sum(dim=1).mean().item() for y in (outputs, projected)]
        shares.append(distances[0] / flips.item())
        excess.append(distances[1] - distances[0])
    error = 4 * flips_error(n)
    return Evidence.of(
        at_most("projection less output, largest", max(excess), 0, 1e-9),
        at_least("least share of the cost of flips", min(shares), math.sqrt(0.5), error),
        paper=math.sqrt(0.5),
        measured=min(shares),
    )


def flips_error(n: int) -> float:
    """Relative standard error of the cost of flips on n draws of the margin in [-8, 8]."""
    share = math.sqrt(2 / math.pi) / 16
    return math.sqrt((1 - share) / (share * n))


EXPERTS = 8


def distance_to_top_k_weights(scores: Tensor, k: int, tau: float) -> Tensor:
    """Total variation distance between weights at temperature τ and of top-k, by token."""
    from tieline.lab.training.soft_to_hard import TemperatureTopK  # loads transformers

    gate = TemperatureTopK(k, temperature=tau)
    return (gate(scores) - gate.hard()(scores)).abs().sum(dim=1) / 2


@claim("p5-hardening", "the soft-to-hard bound for top-k", number="hardening", seconds=1)
def hardening_bound(run: ClaimRun) -> Evidence:
    """With P_τ(S) ∝ exp(Σ_{i∈S} c_i/τ) over sets of k experts and w_i ∝ score(z_i) P_τ(i ∈ S), the
    weights differ from those of top-k by a total variation of at most min(1, c M e^{-Δ/τ}), with
    M = C(E, k) - 1, c = 1 for k = 1 and 2 beyond: Theorem 4.5 holds for top-k with M in place of
    E - 1, and the mean difference is O(τ) under a linear margin tail.

    Setting: normal scores of 8 experts, k from 1 to 4, τ from 0.003 to 3; the best sets have ties
    Tested: Every token against the bound; the power of τ in the mean difference; for k = 1 the
        weights against softmax(z(1 + 1/τ)).
    Overturned by: a token whose weights move by more than the bound
    """
    from tieline.lab.training.soft_to_hard import TemperatureTopK, moved_weight_bound

    scores, excess = run.normal(run.size(4_000, 40_000), EXPERTS, stream=1), -math.inf
    taus, slopes = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003), {}
    for k in (1, 2, 3, 4):
        means = []
        for tau in taus:
            moved = distance_to_top_k_weights(scores, k, tau)
            bound = moved_weight_bound(gap(scores, k), tau, k, EXPERTS)
            excess = max(excess, (moved - bound).max().item())
            means.append(moved.mean().item())
        slopes[k] = exponent(taus[3:], means[3:])
    soft = TemperatureTopK(1, temperature=0.2)(scores)
    distance = (soft - (6 * scores).softmax(dim=1)).abs().max().item()
    return Evidence.of(
        at_most("largest excess over the bound", excess, 0, 1e-6),
        near("k = 1: distance to softmax(z(1 + 1/τ))", distance, 0, 1e-6),
        *(near(f"power of τ, k = {k}", slope, 1, 0.2) for k, slope in slopes.items()),
        at_least("largest mean difference at τ = 3, which is soft", means[0], 0.1),
        paper="at most 0",
        measured=excess,
    )
