"""Expected numbers of cells and pieces of Gaussian routers, in closed form.

    expected_cells, log_expected_cells      C(N, k) P(M <= d+1); without bias 2 C(N, k) Σ P(M = d,
                                            d-2, ...)
    expected_regions, log_expected_regions  C(N, k) Σ_j C(kH, j) P(M <= d-j+1)
    wall_density                            ρ = C(N, k) P(M = 2) = √π f_gap(0)
    pooled_block                            log P(M = m), m = 1 ... d+1
    log_pools                               logarithm of the chance that a scores from above and b
                                            from below pool as one block

M is the size of the block that pools when g ~ N(0, I_N) is projected on the cone of scores that
rank a fixed coalition of k above the rest: 1 if g lies in the cone, else the a chosen and b other
scores that the projection makes equal. The number of faces of a random flat that meet the cone
depends on nothing else, so the law of M answers for every dimension at once.
"""

import math
from functools import lru_cache
from typing import cast

import numpy as np
from jaxtyping import Float
from scipy import optimize, special

from tieline.core.errors import require
from tieline.lab.tropical.capacity import check_shape

LARGEST_DIM = 512
"""Largest dimension; the law of M costs about min(k, d) d quadratures, a second at d = 64."""


def expected_cells(n_experts: int, k: int, dim: int, *, bias: bool = True) -> float:
    """E[cells] of a top-k router with iid N(0, 1) weights (N, d), and biases if `bias`.

    C(N, k) P(M <= d+1) with biases; 2 C(N, k) Σ P(M = m) over m <= d, m ≡ d (mod 2) without. Any
    other variance of weights or biases gives the same, and so does any flat of dimension `dim` in a
    larger space. N = 16, k = 4: 47.7, 158.8, 725, 1655 at d = 2, 3, 5, 8.
    """
    return _checked_exp(log_expected_cells(n_experts, k, dim, bias=bias))


def expected_regions(n_experts: int, k: int, hidden: int, dim: int) -> float:
    """E[pieces] of a top-k layer of ReLU experts: C(N, k) Σ_{j<=d} C(kH, j) P(M <= d-j+1).

    Router and neurons have iid N(0, 1) weights and biases; d is the dimension of the inputs or of a
    flat among them. Pieces are (coalition, activation pattern) pairs; the layer is affine on each
    under constant gates or k = 1, and one analytic formula under softmax gates.
    """
    return _checked_exp(log_expected_regions(n_experts, k, hidden, dim))


def log_expected_cells(n_experts: int, k: int, dim: int, *, bias: bool = True) -> float:
    """Natural logarithm of `expected_cells`, for counts beyond the range of float64."""
    check_shape(n_experts, k, dim)
    if k in (0, n_experts):
        return 0.0
    require(bias or dim >= 1, "a router without bias on R^0 has no cells, got dim=0")
    log_p = pooled_block(n_experts, k, dim + 1)
    if bias:
        terms = log_p[: dim + 1]
    else:
        terms = log_p[dim - 1 :: -2] if dim <= n_experts else log_p[n_experts - 1 :: -1]
        terms = terms + (math.log(2) if dim <= n_experts else 0.0)
    return log_binomial(n_experts, k) + float(np.logaddexp.reduce(terms))


def log_expected_regions(n_experts: int, k: int, hidden: int, dim: int) -> float:
    """Natural logarithm of `expected_regions`."""
    check_shape(n_experts, k, dim, hidden)
    require(k >= 1, f"a layer has 1 <= k <= N, got {k=}")
    log_p = pooled_block(n_experts, k, dim + 1)
    log_below = np.logaddexp.accumulate(log_p)  # log P(M <= m)
    j = np.arange(min(dim, k * hidden) + 1)
    sets = np.array([log_binomial(k * hidden, int(i)) for i in j])
    reached = log_below[np.minimum(dim - j, len(log_below) - 1)]
    return log_binomial(n_experts, k) + float(np.logaddexp.reduce(sets + reached))


def wall_density(n_experts: int, k: int) -> float:
    """ρ = C(N, k) P(M = 2): a great half-circle of inputs crosses ρ walls on average.

    Equal to √π f_gap(0) of independent standard normal scores, and near √π N φ(Φ⁻¹(1 - k/N)).
    """
    require(1 <= k < n_experts, f"need 1 <= k < N: else nothing switches, got {k=}, N={n_experts}")
    return _checked_exp(log_binomial(n_experts, k) + float(pooled_block(n_experts, k, 2)[1]))


@lru_cache(maxsize=64)
def pooled_block(n_experts: int, k: int, largest: int) -> Float[np.ndarray, " sizes"]:
    """Logarithm of P(M = m) for m = 1 ... min(largest, N).

    P(M = 1) = 1 / C(N, k); for m >= 2 the sum over a + b = m, a, b >= 1, of

        C(k, a) C(N-k, b) O(a, b) E[(1 - Φ(t))^(k-a) Φ(t)^(N-k-b)],   t ~ N(0, 1/m),

    O(a, b) = 2^-m √(2πm) f(0), f the density of S_a - S_b, S_n a sum of n half-normals: the chance
    that the block pools as one. All in logarithms, since C(512, 256) is 10^152, with every factor
    positive: nothing cancels. Σ_m P(M = m) = 1 holds within 1e-12 up to N = 512.
    """
    check_shape(n_experts, k, 0)
    require(1 <= largest <= LARGEST_DIM + 1, f"need 1 <= d <= {LARGEST_DIM}, got {largest - 1}")
    sizes = min(largest, n_experts)
    log_p = np.full(sizes, -np.inf)
    log_p[0] = -log_binomial(n_experts, k)
    rest = n_experts - k
    for m in range(2, sizes + 1):
        a = np.arange(max(1, m - rest), min(k, m - 1) + 1)
        b = m - a
        if len(a):
            log_choices = _log_binomials(k, a) + _log_binomials(rest, b)
            pools = np.array([log_pools(int(i), m - int(i)) for i in a])
            terms = log_choices + pools + _log_split(m, k - a, rest - b)
            log_p[m - 1] = np.logaddexp.reduce(terms)
    log_p.flags.writeable = False
    return log_p


def _log_split(m: int, above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Logarithm of E[(1 - Φ(t))^above Φ(t)^below], t ~ N(0, 1/m), by the trapezoidal rule.

    The integrand is log-concave with curvature of at most m + above + below, so that a step of
    0.2 standard deviations leaves an error below 1e-50 of the value.
    """
    step = 0.2 / math.sqrt(m + float((above + below).max()))
    reach = 9.0 + 40.0 / math.sqrt(m)
    t = np.arange(-reach, reach + step, step)
    low, high = special.log_ndtr(t), special.log_ndtr(-t)
    weight = 0.5 * math.log(m / (2 * math.pi)) - m * t**2 / 2 + math.log(step)
    return np.logaddexp.reduce(weight + above[:, None] * high + below[:, None] * low, axis=1)


@lru_cache(maxsize=1 << 15)
def log_pools(a: int, b: int) -> float:
    """Logarithm of O(a, b) = 2^-m √(2πm) f(0), f the density of S_a - S_b, m = a + b.

    f(0) = 1/2πi ∫ M(θ)^a M(-θ)^b dθ along a vertical line, M(θ) = 2 e^{θ²/2} Φ(θ) = E exp(θ|Z|).
    Through the saddle point of the real axis nothing cancels; along the imaginary axis f(0) would
    drown in rounding as soon as a and b differ much. On the line the integrand falls like u^-m, and
    u = s sinh v makes that exponential, for which the trapezoidal rule is exact but for rounding.
    """
    m = a + b
    end, step = 2.0 * math.sqrt(m) + 2, 1e-3
    saddle = cast(
        "float",
        optimize.brentq(lambda x: a * _log_mgf_slope(x) - b * _log_mgf_slope(-x), -end, end),
    )
    rise = a * (_log_mgf_slope(saddle + step) - _log_mgf_slope(saddle - step))
    rise = rise + b * (_log_mgf_slope(-saddle + step) - _log_mgf_slope(-saddle - step))
    scale = 1 / math.sqrt(rise / (2 * step))  # by the second derivative of a log M(θ) + b log M(-θ)
    v = np.arange(0, 5 + 40 / (m - 1), 1 / 64)
    u = scale * np.sinh(v)
    log_height = _log_transform(a, b, np.array([complex(saddle)]))[0].real
    ratio = np.exp(_log_transform(a, b, saddle + 1j * u) - log_height).real
    values = ratio * np.cosh(v)
    area = 2 * scale / 64 * (values.sum() - values[0] / 2)
    log_density = log_height + math.log(area / (2 * math.pi))
    return log_density - m * math.log(2) + 0.5 * math.log(2 * math.pi * m)


def _log_transform(a: int, b: int, theta: np.ndarray) -> np.ndarray:
    """Compute a log M(θ) + b log M(-θ) on any branch: a and b are integers."""
    return a * _log_mgf(theta) + b * _log_mgf(-theta)


def _log_mgf(theta: np.ndarray) -> np.ndarray:
    """Logarithm of M(θ) = w(-iθ/√2), w the Faddeeva function; for Re θ > 0 by reflection.

    w overflows where Re θ is large and positive: M(θ) = 2 e^{θ²/2} - M(-θ) is taken as
    θ²/2 + log(2 - e^{-θ²/2} M(-θ)).
    """
    right = np.real(theta) > 0
    left = np.where(right, -theta, theta)
    mirrored = special.wofz(-1j * left / math.sqrt(2))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        reflected = theta**2 / 2 + np.log(2 - np.exp(-(theta**2) / 2) * mirrored)
    # far up the line e^{θ²/2} dies and M(-θ) alone is left, with the opposite sign
    lost = np.real(theta**2) / 2 < -40
    return np.where(right & ~lost, reflected, np.log(np.where(right, -mirrored, mirrored)))


def _log_mgf_slope(theta: float) -> float:
    """(log M)'(θ) = θ + φ(θ)/Φ(θ), the mean of |Z| under the tilt; stable on both sides."""
    mills = math.sqrt(2 / math.pi) / float(special.erfcx(-theta / math.sqrt(2)))
    return theta + mills


def log_binomial(n: int, k: int) -> float:
    """Logarithm of C(n, k), from the integer itself where it is not too long, which is exact."""
    if n <= 2000:
        return math.log(math.comb(n, k))
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_binomials(n: int, k: np.ndarray) -> np.ndarray:
    return special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)


def _checked_exp(log_value: float) -> float:
    require(log_value < 709, f"the number is e^{log_value:.0f}: ask for its logarithm")
    return math.exp(log_value)
