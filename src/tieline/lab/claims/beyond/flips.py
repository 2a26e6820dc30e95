"""Laws of flips, least distance to the original, the certificate, and Łojasiewicz's exponent.

Proofs are in docs/continuity.md and docs/estimation.md.
"""

import itertools
import math

import numpy as np
import torch
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import kstest
from torch import Tensor

from tieline.core.ranking import topk_mask
from tieline.lab.claims.beyond.estimation_laws import least_split, two_atom_gap
from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import Evidence, at_least, at_most, near, none_of, within
from tieline.lab.power_law import exponent
from tieline.measure.rounding_flips import UNIT_ROUNDOFF, certified_choices


def noise_draws(run: ClaimRun, law: str, n: int) -> Tensor:
    """Draw independent noise of a named distribution, with a mean absolute value of about 1."""
    generator = np.random.default_rng([run.seed, 71])
    draws = {
        "normal": lambda: generator.standard_normal(n),
        "uniform": lambda: generator.uniform(-1, 1, n),
        "Laplace": lambda: generator.laplace(size=n),
        "t3": lambda: generator.standard_t(3, n),
        "two values": lambda: generator.choice([-1.0, 1.0], n),
    }
    return torch.from_numpy(draws[law]())


def least_distance_share(noise: Tensor) -> float:
    """Ratio E|n - n'| / (2 E|n|) of a sample, from ∫ F(1 - F) over its sorted values."""
    ordered = noise.sort().values
    n = len(ordered)
    below = torch.arange(1, n, dtype=torch.float64) / n
    spread = (below * (1 - below) * ordered.diff()).sum()  # ∫ F(1 - F) = E|n - n'|/2
    return (spread / noise.abs().mean()).item()


def ramp_distance_share(epsilon: float) -> float:
    """Mean square distance of a straight ramp over ±ε from the clean gate, over that of top-k."""

    def integrand(u: float) -> float:
        ramp = min(1.0, max(0.0, 0.5 + u / (2 * epsilon)))
        return (ramp - ndtr(u)) ** 2 + ndtr(u) * (1 - ndtr(u))

    reach = max(9.0, epsilon)
    ends = (-reach, -epsilon, epsilon, reach)
    total = sum(quad(integrand, low, high)[0] for low, high in itertools.pairwise(ends))
    return total / math.sqrt(2 / math.pi)


@claim("p5-nearest", "how near a repaired model can come to the original", number="least distance")
def least_flip_distance(run: ClaimRun) -> Evidence:
    """E‖y_r(s + n) - y_topk(s)‖² >= ½ f J² E|n - n'| for every gate r, attained by r = F_n; against
    the flips f J² E|n| the gain is 1 - E|n - n'|/(2 E|n|): 29 % for normal noise, 33 % for uniform,
    25 % for Laplace, at most 50 % for symmetric noise.

    Setting: two competitors, density flat over noise and ramp, noise of the margin independent of
        the margin and the jump, outputs of experts without noise, r a function of the noisy margin
    Tested: The share E|n - n'|/(2 E|n|) of samples against closed forms; by quadrature the distance
        of straight ramps over ±ε, normal noise: the least over ε, and at 1.5 σ; a margin simulated
        with r = Φ.
    Overturned by: a gate below the bound
    """
    n = run.size(200_000, 2_000_000)
    shares = {law: least_distance_share(noise_draws(run, law, n)) for law in CLOSED_FORM_SHARES}
    ramps = {e: ramp_distance_share(e) for e in (0.5, 1.0, 1.3, 1.5, 1.545, 1.6, 2.0, 3.0)}
    share, error = simulated_distance_share(run, n)
    return Evidence.of(
        *(
            near(f"{law}: share", shares[law], CLOSED_FORM_SHARES[law], 0.01)
            for law in CLOSED_FORM_SHARES
        ),
        near("straight ramp at ε = 1.5 σ", ramps[1.5], 0.7120, 5e-4),
        at_least("least of the straight ramps", min(ramps.values()), 1 / math.sqrt(2)),
        within("simulated with r = Φ", share, error, 1 / math.sqrt(2)),
        paper=1 / math.sqrt(2),
        measured=f"{share:.4f} ± {error:.4f} with r = Φ; {ramps[1.5]:.4f} for a straight ramp",
    )


CLOSED_FORM_SHARES = {
    "normal": 1 / math.sqrt(2),
    "uniform": 2 / 3,
    "Laplace": 3 / 4,
    "two values": 0.5,
}
"""E|n - n'| / (2 E|n|)."""


def simulated_distance_share(run: ClaimRun, n: int) -> tuple[float, float]:
    """Simulated mean of (Φ(s + n) - H(s))², uniform s, over that of the hard gate; and error."""
    noise = noise_draws(run, "normal", n)
    s = 8 * run.uniform(n, stream=72)
    step = (s > 0).double()
    soft = (torch.special.ndtr(s + noise) - step).square()
    exact = math.sqrt(2 / math.pi) / 16
    return (soft.mean() / exact).item(), (soft.std() / math.sqrt(n) / exact).item()


@claim("p5-flips", "three laws of flips", number="laws of flips")
def flip_laws(run: ClaimRun) -> Evidence:
    """Of single swaps between two runs whose margins differ by n, U = margin_A/D is uniform and
    independent of D = margin_A + margin_B, which has the size-biased law of |n|; T f E|n| swaps are
    expected, f the density of the signed margin at 0.

    Setting: density of the margin flat over |n|, n independent of it, two competitors. What breaks
        them: scores on a grid, D beyond the flat range, several swaps at once
    Tested: A uniform margin with normal and t₃ noise: Kolmogorov's distance of U from uniform,
        correlation of U and D, mean D against E n²/E|n|, number of swaps. Then margins rounded to a
        grid, and noise as wide as the density.
    Overturned by: a sound noise for which U is not uniform
    """
    n, checks, shown = run.size(400_000, 4_000_000), [], []
    for law in ("normal", "t3"):
        noise = 0.02 * noise_draws(run, law, n)
        u, d = flipped_margins(run, noise)
        critical = 1.95 / math.sqrt(len(u))
        biased = (noise.square().mean() / noise.abs().mean()).item()
        expected = 0.5 * noise.abs().sum().item()
        error = d.std().item() / math.sqrt(len(d))
        shown.append(f"{law}: {len(u)} swaps of {expected:.0f}")
        checks += [
            at_most(f"{law}: distance of U from uniform", uniform_distance(u), critical),
            at_most(
                f"{law}: |correlation| of U and D", abs(rank_correlation(u, d)), 4 / len(u) ** 0.5
            ),
            within(
                f"{law}: mean D", d.mean().item(), error, biased, resolution=0.1, bias=0.02 * biased
            ),
            within(f"{law}: number of swaps", len(u), math.sqrt(expected), expected),
        ]
    grid, _ = flipped_margins(run, 0.02 * noise_draws(run, "normal", n), grid=0.02)
    margins, _ = flipped_margins(run, noise_draws(run, "normal", n))
    return Evidence.of(
        checks,
        at_least("scores on a grid: distance of U from uniform", uniform_distance(grid), 0.05),
        at_least("noise as wide as the density: distance", uniform_distance(margins), 0.02),
        paper="U uniform, D size-biased",
        measured="; ".join(shown),
    )


def flipped_margins(run: ClaimRun, noise: Tensor, grid: float = 0.0) -> tuple[Tensor, Tensor]:
    """U and D of tokens whose margin changes sign; optionally round the margins of run B."""
    s = run.uniform(len(noise), stream=73)
    other = s + noise
    flipped = (s > 0) != (other > 0)
    first, second = s[flipped].abs(), other[flipped].abs()
    if grid:
        second = (second / grid).round() * grid
    if (noise.abs() > 1).any():  # the density ends at ±1 for run B as well
        inside = second <= 1
        first, second = first[inside], second[inside]
    return first / (first + second), first + second


def uniform_distance(u: Tensor) -> float:
    """Kolmogorov-Smirnov distance of a sample from the uniform distribution."""
    return float(kstest(u.numpy(), "uniform").statistic)


def rank_correlation(u: Tensor, d: Tensor) -> float:
    """Rank correlation of two samples."""
    ranks = [t.argsort().argsort().double() for t in (u, d)]
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()


@claim("p5-certificate", "choices that no order of summation changes", number="certificate")
def certified_against_summation_order(run: ClaimRun) -> Evidence:
    """If z_i - z_j > B_i + B_j for every chosen i and other j, every evaluation of the router's
    product with roundings |δ| <= u chooses the same experts; the share that is not certified bounds
    the flips of that product from above.

    Setting: bf16 inputs and weights, sums in float32, scores stored in float32 or bf16; D = 256,
        32 experts, top 4. Not TF32, fp8, truncating adds, nor selection on softmax values
    Tested: Twelve evaluations in different orders (backward, shuffled, in blocks): certified tokens
        whose choice changes; the share that flips against the share not certified.
    Overturned by: a certified token that flips
    """
    x = run.normal(run.size(4_000, 40_000), 256, stream=74).bfloat16()
    weight = (run.normal(32, 256, stream=75) / 16).bfloat16()
    checks, shown = [], []
    for stored, unit in (("float32", 0.0), ("bfloat16", UNIT_ROUNDOFF["bfloat16"])):
        sure = certified_choices(x, weight, 4, output_unit=unit, exact_products=True)
        changed = changed_choices(run, x, weight, stored)
        shown.append(f"{stored}: {100 * (~sure).double().mean().item():.2f} % not certified, "
                     f"{100 * changed.double().mean().item():.2f} % flip")  # fmt: skip
        checks += [
            none_of(f"{stored}: certified tokens that flip", (sure & changed).sum().item()),
            at_most(f"{stored}: flips over tokens that are not certified",
                    changed.sum().item() / max(1, int((~sure).sum())), 1),
        ]  # fmt: skip
    checks.append(at_least("bfloat16: tokens that flip", int(changed.sum()), 1))
    return Evidence.of(checks, paper="none", measured="; ".join(shown))


def changed_choices(run: ClaimRun, x: Tensor, weight: Tensor, stored: str) -> Tensor:
    """Mark tokens whose top-4 differs from that of exact scores in one of twelve evaluations."""
    exact = topk_mask(x.double() @ weight.double().T, 4)
    changed = torch.zeros(len(x), dtype=torch.bool)
    a, b = x.float(), weight.float()
    for index in range(12):
        order = torch.randperm(256, generator=run.generator(80 + index))
        order = torch.arange(256).flip(0) if index == 0 else order
        blocks = order.split(16 if index % 2 else 256)
        scores = torch.stack([a[:, rows] @ b[:, rows].T for rows in blocks])
        total = scores[0]
        for block in scores[1:]:
            total = total + block
        stored_sum = total.bfloat16().float() if stored == "bfloat16" else total
        changed |= (topk_mask(stored_sum, 4) != exact).any(dim=-1)
    return changed


@claim("p5-lojasiewicz", "no analytic expert is slower than every power", number="Łojasiewicz")
def analytic_exponent(_run: ClaimRun) -> Evidence:
    """For experts analytic near a compact set, at a fixed truth, ‖f - f*‖ >= c dist(G, fibre)^p for
    some p, the fibre being the measures of f*, so that least squares reach it at a power of n.

    Setting: pointwise in the truth, analytic experts (tanh), not ReLU; nothing follows for the
        minimax statements, where the fibre jumps with the truth
    Tested: Two atoms near a tanh expert without gate, full score: least distance of the functions,
        radii .4, .2, .1, its exponent; beside it e^(-1/δ²), smooth and not analytic, which no
        power bounds.
    Overturned by: an exponent that grows as the radius falls
    """
    radii = [0.4, 0.2, 0.1]
    masses = 0.31 * np.array([0.5, 0.5])
    gaps = [least_gap_at_radius(masses, radius) for radius in radii]
    local = [math.log(gaps[i] / gaps[i + 1]) / math.log(2) for i in (0, 1)]
    flat = [math.exp(-1 / radius**2) for radius in radii]
    steep = [math.log(flat[i] / flat[i + 1]) / math.log(2) for i in (0, 1)]
    return Evidence.of(
        at_most("exponent of ‖f - f*‖ in the radius", exponent(radii, gaps), 6),
        at_most("how much the local exponent rises", local[1] - local[0], 1),
        at_least("the same for e^(-1/δ²)", steep[1] - steep[0], 20),
        paper="a power",
        measured=f"δ^{exponent(radii, gaps):.2f}, so n^-{0.5 / exponent(radii, gaps):.3f} at least",
    )


def least_gap_at_radius(masses: np.ndarray, radius: float) -> float:
    """Least ‖f - f*‖ of two atoms whose b is held at the radius."""
    point = least_split(masses, radius, 0)
    return math.sqrt(float((two_atom_gap(point, masses) ** 2).mean()))
