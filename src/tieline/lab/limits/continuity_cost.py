r"""Cost of making the choice between two experts continuous: a bound for every gate.

Near a tie let s = c_a - c_b be the signed margin of the two experts, f the density of s at 0, J the
jump of the layer's output, σ the standard deviation of the noise of s. A gate gives the output
y_- + r(s)(y_+ - y_-) for some ramp r from 0 to 1; top-k has r = H, the step. Then

    moved         D = E‖y_gate - y_top-k‖²       = f J² ∫ (r - H)² ds
    sensitivity   S = E‖y(s + noise) - y(s)‖²    = f J² E_n ∫ (r(s + n) - r(s))² ds
                                                 → f J² σ² ∫ r'² ds   for σ small against the ramp
    top-k         S_hard = f J² σ √(2/π)

**D · S >= f² J⁴ σ² / 16 for every r** with the linearised S (`continuity_bound`); the proof is in
docs/continuity.md. The Laplace ramp attains it, a straight ramp has 4/3 of it. At finite σ the
exact frontier has the Fourier transform of H over 1 + λm, m(ω) = 2(1 - e^{-σ²ω²/2}):

    D = f J²/π ∫ (λm/(1 + λm))² ω^-2 dω,      S = f J²/π ∫ m/(1 + λm)² ω^-2 dω,      0 < ω < ∞

and for other noise the same with m = 2(1 - Re φ(ω)), φ its characteristic function.

Where σ varies by token, D · S >= f² E[J²] E[J² σ²]/16 for a gate that all tokens share, and
f² (E[J² σ])²/16 for one that knows σ (`token_noise_bounds`). An output that leaves the segment
between the two experts is nowhere nearer to top-k than its projection (`segment_share`).
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from jaxtyping import Float
from scipy.integrate import quad, simpson
from scipy.optimize import brentq
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import top_values
from tieline.measure.nearest_ramp import MEAN_ABSOLUTE, RAMP_REACH, squared_ramp_change
from tieline.routing.gates import ChoiceOptions, Scores, Share
from tieline.routing.smooth_gates import BandGate

__all__ = [
    "ContinuityCost",
    "LaplaceTopK",
    "added_cost",
    "continuity_bound",
    "hard_sensitivity",
    "least_moved",
    "projected_cost",
    "ramp_cost",
    "segment_share",
    "token_noise_bounds",
]

NODES, POINTS, END = 64, 4096, 12.0
"""Noise levels, points and largest frequency of the quadratures."""

QUANTILES, SAMPLE_END = 1024, 100.0
"""Quantiles that represent a sample of noise, and the largest frequency of its spectrum."""


class ContinuityCost(NamedTuple):
    """Cost of a continuous gate at ties: change of the output, and sensitivity to noise."""

    moved: float  # D, the mean square distance to the output of top-k
    sensitivity: float  # S, the mean square change of the output under noise

    @property
    def product(self) -> float:
        """D · S."""
        return self.moved * self.sensitivity


def continuity_bound(density: float, jump: float, sigma: float) -> float:
    """Lower bound f² J⁴ σ² / 16 of D·S for gates continuous at the tie, S linearised in σ.

    Args:
        density: f of the signed margin at 0, half of the density of the gap |s|.
        jump: J, root mean square over tokens at the tie.
        sigma: standard deviation of the noise of the margin, √2 times that of independent scores.
    """
    _check_tie_numbers(density, jump, sigma)
    return density**2 * jump**4 * sigma**2 / 16


def hard_sensitivity(density: float, jump: float, sigma: float) -> float:
    """Sensitivity f J² σ √(2/π) of top-k to noise; arguments as for `continuity_bound`."""
    _check_tie_numbers(density, jump, sigma)
    return density * jump**2 * sigma * MEAN_ABSOLUTE


def projected_cost(
    density: float, jump: float, sigma: float, epsilon: float, slope: float = 0.0
) -> ContinuityCost:
    """D and S of `ProjectedTopK`, whose two competitors share a seat over a margin of ±ε.

    D = f J² ε/6; S = f J² E_n[n²/w² (w - |n|/3) for |n| <= w = 2ε, |n| - w/3 beyond], which is
    f J² σ²/(2ε) for small σ and that of top-k for small ε. Where f J² at the margin s is
    (1 + a|s|) times that at 0, D has the factor 1 + aε/4 and S for small σ 1 + aε/2.

    ε is that of the gate and `slope` is a; the other arguments are those of `continuity_bound`.
    """
    _check_tie_numbers(density, jump, sigma)
    require(0 <= epsilon < math.inf, f"epsilon must be finite and not negative, got {epsilon}")
    require(math.isfinite(slope), f"slope must be finite, got {slope}")
    unit, width = density * jump**2, 2 * epsilon

    def weighted_change(x: float) -> float:
        noise = sigma * x
        moment = _straight_change_moment(noise, width)
        change = squared_ramp_change(noise, width) + slope * moment
        return change * MEAN_ABSOLUTE * math.exp(-x * x / 2)

    knee = min(RAMP_REACH, width / sigma) if sigma > 0 else 0.0
    integrals = [
        quad(weighted_change, low, high)[0] for low, high in ((0, knee), (knee, RAMP_REACH))
    ]
    moved = unit * epsilon / 6 * (1 + slope * epsilon / 4)
    return ContinuityCost(max(0.0, moved), max(0.0, unit * sum(integrals)))


def _straight_change_moment(noise: float, width: float) -> float:
    """∫ |s| (r(s + n) - r(s))² ds of a straight ramp, averaged over the sign of n.

    With t = s + n/2 the difference is flat for |t| < p and falls to 0 at |t| = q; the mean of |s|
    over the signs is max(|t|, n/2). Each piece is a cubic, for which Gauss's rule is exact.
    """
    p, q = abs(width - noise) / 2, (width + noise) / 2
    if q <= p:
        return 0.0
    height = min(1.0, noise / width) if width > 0 else 1.0
    nodes, weights = np.polynomial.legendre.leggauss(3)
    ends = sorted((0.0, p, noise / 2, q))
    total = 0.0
    for low, high in itertools.pairwise(ends):
        t = (low + high) / 2 + (high - low) / 2 * nodes
        change = height * np.minimum(1.0, (q - t) / (q - p))
        total += float(np.dot(weights, np.maximum(t, noise / 2) * change**2)) * (high - low)
    return total


def ramp_cost(
    margins: Float[Tensor, " points"], shares: Float[Tensor, " points"], sigma: float | None = None
) -> ContinuityCost:
    """D/(f J²) and S/(f J²) of the ramp that is straight between points (margin, share).

    Without `sigma`, S is ∫ r'² ds, to be multiplied by σ²; both are exact. With it, S is the
    expectation over normal noise, by quadrature.

    Args:
        margins: in ascending order; the share is 0 below the first and 1 above the last.
        shares: r at these margins, from 0 to 1.
        sigma: standard deviation of the noise of the margin.
    """
    s, r = margins.double().numpy(), shares.double().numpy()
    rising = s.ndim == 1 and len(s) >= 2 and bool((np.diff(s) > 0).all())
    require(
        rising and r.shape == s.shape, "margins must be ascending, one share for each", ShapeError
    )
    require(bool(r[0] == 0 and r[-1] == 1), f"a ramp goes from 0 to 1, got {r[0]:g} and {r[-1]:g}")
    middle = np.union1d(s, [0.0])
    value = np.interp(middle, s, r)
    below, above = (
        _integrate_squared_polyline(middle, value, middle <= 0),
        _integrate_squared_polyline(middle, 1 - value, middle >= 0),
    )
    if sigma is None:
        return ContinuityCost(below + above, float((np.diff(r) ** 2 / np.diff(s)).sum()))
    return ContinuityCost(below + above, _mean_square_change(s, r, sigma))


def _integrate_squared_polyline(
    points: np.ndarray, values: np.ndarray, inside: np.ndarray
) -> float:
    """Integrate the square of a function that is linear between the points inside."""
    x, y = points[inside], values[inside]
    if len(x) < 2:
        return 0.0
    return float((np.diff(x) * (y[:-1] ** 2 + y[:-1] * y[1:] + y[1:] ** 2) / 3).sum())


def _mean_square_change(s: np.ndarray, r: np.ndarray, sigma: float) -> float:
    """E_n ∫ (r(s + n) - r(s))² ds of a ramp for normal noise n, by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    reach = RAMP_REACH * sigma
    grid = np.linspace(s[0] - reach, s[-1] + reach, POINTS)
    clean = np.interp(grid, s, r)
    moved = [np.trapezoid((np.interp(grid + sigma * n, s, r) - clean) ** 2, grid) for n in nodes]
    return float(np.dot(weights, moved) / weights.sum())


def added_cost(a: float = 1.0, b: float = 1.0) -> ContinuityCost:
    """D/(f J² ε) and S ε/(f J² σ²) of paper 1's ramp s(u) = u^a/(u^a + (1-u)^b), S linearised.

    The better expert keeps its full weight and the other is added with the share s, so both sides
    of a tie count: D = ∫ s² du and S = ∫ s'² du, for outputs of the two experts that are orthogonal
    and of equal size, nothing renormalised. (1/3, 1) for a = b = 1: twice `projected_cost`.
    """
    require(min(a, b) >= 1, f"s' has no square integral for exponents below 1, got {a=}, {b=}")

    def smoothstep_share(u: float) -> float:
        return u**a / (u**a + (1 - u) ** b)

    def smoothstep_slope(u: float) -> float:
        if u <= 0 or u >= 1:
            return 1.0 if a == b == 1 else (1.0 if u <= 0 and a == 1 else 0.0)
        return smoothstep_share(u) * (1 - smoothstep_share(u)) * (a / u + b / (1 - u))

    knee = [1 / max(b, 2), 5 / max(b, 10)]
    moved = quad(lambda u: smoothstep_share(u) ** 2, 0, 1, points=knee, limit=200)[0]
    return ContinuityCost(
        moved, quad(lambda u: smoothstep_slope(u) ** 2, 0, 1, points=knee, limit=200)[0]
    )


class ContinuityCostBounds(NamedTuple):
    """Least D·S where σ varies by token: of one gate for all tokens, and of one scaled by σ."""

    common: float  # f² E[J²] E[J² σ²] / 16
    knowing: float  # f² (E[J² σ])² / 16


def token_noise_bounds(
    density: float, jumps: Float[Tensor, " tokens"], sigmas: Float[Tensor, " tokens"]
) -> ContinuityCostBounds:
    """Smallest product D·S of distortion and sensitivity of a continuous gate, by its ramp.

    Tokens at the tie have their own jumps J and deviations σ of the noise; S is linearised. A
    common ramp r, against the step H of top-k, has D = f E[J²] ∫(r - H)², S = f E[J² σ²] ∫r'², and
    the product of the integrals is at least 1/16; a ramp that is scaled by σ has f E[J² σ] in both.
    The second bound is never larger, by Cauchy and Schwarz.

    Args:
        density: f of the signed margin at 0.
        jumps: J of each token.
        sigmas: standard deviation of the noise of its margin.
    """
    require(jumps.shape == sigmas.shape, "need a σ for each jump", ShapeError)
    square, sigma = jumps.double().square(), sigmas.double()
    common = (square.mean() * (square * sigma.square()).mean()).item()
    knowing = (square * sigma).mean().square().item()
    return ContinuityCostBounds(density**2 * common / 16, density**2 * knowing / 16)


def segment_share(
    outputs: Float[Tensor, "tokens dim"],
    lower: Float[Tensor, "tokens dim"],
    upper: Float[Tensor, "tokens dim"],
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Project outputs on y_- + r (y_+ - y_-): the shares r, and the squared distances.

    Squared distances to y_- and y_+ are J² r² and J² (1 - r)² plus the second number, so the laws
    of a ramp hold for the projection, and a distance from the segment only adds to both.
    """
    side = upper - lower
    share = ((outputs - lower) * side).sum(dim=1) / side.square().sum(dim=1)
    return share, (outputs - lower - share[:, None] * side).square().sum(dim=1)


def least_moved(factor: float, noise: Float[Tensor, " sample"] | None = None) -> float:
    """Least D/S_hard of a ramp whose sensitivity S is S_hard over `factor`.

    The finite-σ frontier: 0 for a factor of 1; for normal noise towards π/32 · factor for large
    ones, for other noise towards factor · E[n²] / (16 E|n|²).

    Args:
        factor: S_hard / S, at least 1.
        noise: a sample of the margin's noise, by whose characteristic function the frontier is
            computed, to about 1 %; None for normal noise.
    """
    m = _normal_spectrum if noise is None else _sample_spectrum(noise)
    require(1 <= factor < math.inf, f"factor must be at least 1 and finite, got {factor}")
    if factor <= 1 + 1e-9:
        return 0.0

    def log_factor_excess(log_price: float) -> float:
        sensitivity = _frontier_cost(math.exp(log_price), m).sensitivity
        return math.log(MEAN_ABSOLUTE / sensitivity / factor)

    price: Any = brentq(log_factor_excess, -30.0, 4 * math.log(factor) + 10, xtol=1e-12)
    return _frontier_cost(math.exp(price), m).moved / MEAN_ABSOLUTE


class _Spectrum(NamedTuple):
    """m(ω) = 2(1 - Re φ(ω)) of noise with E|n| = √(2/π); beyond `end` it is taken as 2."""

    at: Callable[[np.ndarray], np.ndarray]
    end: float


_normal_spectrum = _Spectrum(lambda x: -2 * np.expm1(-x * x / 2), END)


def _sample_spectrum(noise: Tensor) -> _Spectrum:
    """Spectrum of a sample from its quantiles, scaled to E|n| = √(2/π)."""
    values = noise.detach().double().flatten().numpy()
    size = float(np.abs(values).mean()) if len(values) else 0.0
    require(0 < size < math.inf, f"need noise that is finite and not zero, got a mean of {size}")
    points = np.quantile(values, (np.arange(QUANTILES) + 0.5) / QUANTILES) * MEAN_ABSOLUTE / size
    return _Spectrum(lambda x: 2 * (1 - np.cos(np.outer(x, points)).mean(axis=1)), SAMPLE_END)


def _frontier_cost(price: float, spectrum: _Spectrum) -> ContinuityCost:
    """D/(f J² σ) and S/(f J² σ) of the ramp that minimises D + price · S.

    With x = σω both integrands are smooth in log x; beyond x = 12, m is 2 to all digits.
    """
    start = 1e-5 * min(1.0, 1 / math.sqrt(price))
    x = np.geomspace(start, spectrum.end, POINTS + 1)
    m = spectrum.at(x)
    kept, tail_kept = 1 / (1 + price * m), 1 / (1 + 2 * price)
    integrands = (price * m * kept) ** 2, m * kept**2
    tails = (2 * price * tail_kept) ** 2, 2 * tail_kept**2  # both where m is 2
    moved, sensitivity = (
        simpson(integrand / x, x=np.log(x)) + tail / spectrum.end
        for integrand, tail in zip(integrands, tails, strict=True)
    )
    return ContinuityCost(float(moved) / math.pi, float(sensitivity + start) / math.pi)


def _check_tie_numbers(density: float, jump: float, sigma: float) -> None:
    """Raise unless density, jump and σ are finite and not negative."""
    for name, value in {"density": density, "jump": jump, "sigma": sigma}.items():
        require(0 <= value < math.inf, f"{name} must be finite and not negative, got {value!r}")


class LaplaceTopK(BandGate):
    r"""Gate with shares L(c_i/ε - τ) of sum k, L the Laplace distribution function; not sparse.

        L(s) = ½ e^s for s < 0,  1 - ½ e^{-s} for s >= 0

    Of all ramps between two experts this one has the least product of E(change of the output)² and
    sensitivity to small noise; a straight ramp has 4/3 of it. It uses every expert for every token,
    so it is here to compare with, not to serve. With m scores above τ and the others below, u = e^τ
    solves a u² + 2(k - m) u - b = 0, a = Σ_{above} e^{-x_i}, b = Σ_{below} e^{x_i}, x = c/ε;
    sorting gives m.

    Args:
        k: seats, 1 <= k < E.
        epsilon: scale ε > 0 of the distribution, in units of the selection scores.
        detach_ramp: block the gradient through the shares.
        options: see `SelectiveGate`; groups are not supported.
    """

    def __init__(
        self, k: int, *, epsilon: float, detach_ramp: bool = True, **options: Unpack[ChoiceOptions]
    ) -> None:
        super().__init__(k, epsilon=epsilon, detach_ramp=detach_ramp, **options)
        require(self.groups is None, "LaplaceTopK has no groups: use ProjectedTopK")

    def share(self, selection: Scores) -> Share:
        """Shares L(x - τ) of the experts."""
        if self.detach_ramp:
            selection = selection.detach()
        x = selection / self.epsilon.to(selection)
        with torch.no_grad():
            level = _laplace_level(x, self.k)
            share, slope = _laplace_distribution(x - level)
            total = slope.sum(dim=-1, keepdim=True)
        if not x.requires_grad:
            return share
        # one Newton step, which is zero, carries the derivative of τ
        level = (
            level + (_laplace_distribution(x - level)[0].sum(dim=-1, keepdim=True) - self.k) / total
        )
        return _laplace_distribution(x - level)[0]


def _laplace_distribution(s: Tensor) -> tuple[Tensor, Tensor]:
    """Distribution function and density of the Laplace distribution."""
    tail = 0.5 * (-s.abs()).exp()
    return torch.where(s < 0, tail, 1 - tail), tail


def _laplace_level(x: Tensor, k: int) -> Float[Tensor, "*batch 1"]:
    """The level τ at which the Laplace shares sum to k."""
    experts = x.shape[-1]
    require(1 <= k < experts, f"need 1 <= k < experts, got {k=}, {experts=}", ShapeError)
    ranked = top_values(x, experts)
    centre = ranked[..., k - 1 : k]
    ranked = ranked - centre
    above = (-ranked).logcumsumexp(dim=-1)  # log Σ_{i <= m} e^{-x_i}
    from_below = ranked.flip(-1).logcumsumexp(dim=-1).flip(-1)  # log Σ_{i >= m} e^{x_i}
    ranks = torch.arange(1, experts + 1, dtype=x.dtype, device=x.device)
    # the sum of the shares at τ = x_[m], which is itself in both sums: hence the last ½
    height = ranks - 0.5 * (above + ranked).exp() + 0.5 * (from_below - ranked).exp() - 0.5
    m = (height < k).sum(dim=-1, keepdim=True)
    log_a = above.gather(-1, (m - 1).clamp(min=0)).masked_fill(m == 0, -torch.inf)
    log_b = from_below.gather(-1, m.clamp(max=experts - 1)).masked_fill(m == experts, -torch.inf)
    open_seats = (k - m).to(x)
    root = (open_seats.square() + (log_a + log_b).exp()).sqrt()
    rising = log_b - (root + open_seats).log()  # u = b / (root + k - m), for k > m
    falling = (root - open_seats).log() - log_a  # u = (root - (k - m)) / a, for k < m
    even = (log_b - log_a) / 2  # for k = m, where both may divide by a root that underflows
    level = torch.where(open_seats > 0, rising, falling)
    return torch.where(open_seats == 0, even, level) + centre
