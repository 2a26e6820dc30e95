"""Numbers of cells and pieces of a top-k layer: bounds in exact integers, Gaussian expectations.

Numbers of definitions are those of paper 3. Its bound multiplies the cells C(N, k), which exist
only for d >= N - 1, by the pieces of a whole arrangement in each of them.

M is the size of the block that pools when g ~ N(0, I_N) is projected on the cone of scores that
rank a fixed coalition of k above the rest: 1 if g lies in the cone, else the a chosen and b other
scores that the projection makes equal. The number of faces of a random flat that meet the cone
depends only on the law of M, which therefore gives the expectation in every dimension.
"""

import math
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import numpy as np
from jaxtyping import Float
from scipy import optimize, special

from tieline.core.errors import require

comb = lru_cache(maxsize=256)(math.comb)
"""Cached binomials: with many experts they have tens of thousands of digits."""

Attainability = Literal["by every generic router", "by some routers", "by none", "not decided"]


class PaperCapacities(NamedTuple):
    """The bounds of Table 1 for one shape; in `normalised` a coalition runs H neurons in all."""

    dense: int
    top_1: int
    top_k: int
    normalised: int


def zaslavsky(n: int, dim: int) -> int:
    """Regions of n generic hyperplanes in R^d: Φ(n, d) = Σ_{j=0}^{d} C(n, j) (Def. 3.2)."""
    require(n >= 0 and dim >= 0, f"need n >= 0 and dim >= 0, got {n=}, {dim=}")
    return sum(comb(n, j) for j in range(min(n, dim) + 1))


def capacity_bound(n_experts: int, k: int, hidden: int, dim: int) -> int:
    """Paper's bound C(N, k) Φ(kH, d) on the linear regions of a top-k layer (Thm. 4.17)."""
    check_shape(n_experts, k, dim, hidden)
    return comb(n_experts, k) * zaslavsky(k * hidden, dim)


def paper_capacities(n_experts: int, k: int, hidden: int, dim: int) -> PaperCapacities:
    """Columns of Table 1: Φ(kH, d), N Φ(kH, d), C(N, k) Φ(kH, d), C(N, k) Φ(H, d).

    Dense and top-1 get the width kH, so that the first three run the same number of neurons per
    input, as in Example 4.21: (16, 4, 5, 5) gives 21,700, 347,200 and 39,494,000.
    """
    top_k, active = capacity_bound(n_experts, k, hidden, dim), zaslavsky(k * hidden, dim)
    per_coalition = zaslavsky(hidden, dim)
    return PaperCapacities(active, n_experts * active, top_k, comb(n_experts, k) * per_coalition)


def sharp_bound(n_experts: int, k: int, hidden: int, dim: int) -> int:
    """Bound B* on pieces of a top-k layer, never above `capacity_bound`.

    B* = Σ_{j<=d} Σ_a n(j, a) min(C(N-a, k-a), U(N, k, d-j)).

    Every piece is counted on a flat where j neurons vanish: n(j, a) sets of j neurons touch exactly
    a experts, and on their flat, of dimension d - j, at most C(N-a, k-a) coalitions hold these
    experts and at most U(N, k, d-j) cells exist at all (`cell_bound`).
    """
    check_shape(n_experts, k, dim, hidden)
    total = 0
    for j in range(dim + 1):
        cells = cell_bound(n_experts, k, dim - j)
        for a in range(min(j, k) + 1):
            owners = comb(n_experts, a) * _choices_touching_all(a, hidden, j)
            total += owners * min(comb(n_experts - a, k - a), cells)
    return total


def cell_bound(n_experts: int, k: int, dim: int) -> int:
    """Bound on cells of a router: min(C(N, k), Φ(N, d+1) - N) for d >= 1, and 1 for d = 0.

    Cells over all k = 0 ... N number Φ(N, d+1), and each of the N other k has one at least.
    """
    check_shape(n_experts, k, dim)
    if dim == 0:
        return 1
    return min(comb(n_experts, k), zaslavsky(n_experts, dim + 1) - n_experts)


def attainability(n_experts: int, k: int, dim: int) -> Attainability:
    """Whether an affine router on R^d can have all C(N, k) cells, as Lemma 4.18 assumes.

    d >= N - 1: every generic one has. k or N - k at most (d+1)/2: some have, with weights on the
    moment curve. k >= ⌊(d+3)/2⌋ and N - k >= d + 2, or the same with k and N - k exchanged: none,
    since a Radon partition of d + 3 experts names a coalition that no input chooses.
    """
    check_shape(n_experts, k, dim)
    rest = n_experts - k
    if dim >= n_experts - 1 or min(k, rest) == 0:
        return "by every generic router"
    if 2 * min(k, rest) <= dim + 1:
        return "by some routers"
    # here k and N - k are both at least ⌊(d+3)/2⌋
    if max(k, rest) >= dim + 2:
        return "by none"
    return "not decided"


def group_coalitions(n_experts: int, k: int, n_groups: int, k_groups: int) -> int:
    """Number of sets of k experts from at most k_groups of n_groups equal groups (DeepSeek-V3)."""
    check_shape(n_experts, k, 1)
    require(
        1 <= k_groups <= n_groups and n_experts % n_groups == 0,
        f"need equal groups and 1 <= k_groups <= n_groups, got {k_groups} of {n_groups} groups "
        f"for {n_experts} experts",
    )
    size = n_experts // n_groups
    return sum(
        comb(n_groups, a) * _choices_touching_all(a, size, k) for a in range(min(k, k_groups) + 1)
    )


def check_shape(n_experts: int, k: int, dim: int, hidden: int = 1) -> None:
    """Raise for N, k, H or d out of range."""
    require(
        n_experts >= 1 and 0 <= k <= n_experts, f"need 0 <= k <= N, N >= 1, got {k=}, N={n_experts}"
    )
    require(dim >= 0, f"need a dimension d >= 0, got {dim}")
    require(hidden >= 1, f"need experts of width H >= 1, got {hidden}")


def _choices_touching_all(blocks: int, size: int, chosen: int) -> int:
    """Number of ways to choose from `blocks` blocks of `size` at least one of each block."""
    return sum(
        (-1) ** i * comb(blocks, i) * comb((blocks - i) * size, chosen) for i in range(blocks + 1)
    )


LARGEST_DIM = 512
"""Largest dimension; the law of M costs about min(k, d) d quadratures, a second at d = 64."""


def expected_cells(n_experts: int, k: int, dim: int, *, bias: bool = True) -> float:
    """Expected cells of a top-k router with iid N(0, 1) weights (N, d), and biases if `bias`.

    C(N, k) P(M <= d+1) with biases; 2 C(N, k) Σ P(M = m) over m <= d, m ≡ d (mod 2) without. Any
    other variance of weights or biases gives the same, and so does any flat of dimension `dim` in a
    larger space. N = 16, k = 4: 47.7, 158.8, 725, 1655 at d = 2, 3, 5, 8.
    """
    return _checked_exp(log_expected_cells(n_experts, k, dim, bias=bias))


def expected_regions(n_experts: int, k: int, hidden: int, dim: int) -> float:
    """Expected pieces of a top-k layer of ReLU experts: C(N, k) Σ_{j<=d} C(kH, j) P(M <= d-j+1).

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
    """Mean number ρ = C(N, k) P(M = 2) of walls that a great half-circle of inputs crosses.

    Equal to √π f_gap(0) of independent standard normal scores, and near √π N φ(Φ⁻¹(1 - k/N)).
    """
    require(1 <= k < n_experts, f"need 1 <= k < N: else nothing switches, got {k=}, N={n_experts}")
    return _checked_exp(log_binomial(n_experts, k) + float(pooled_block(n_experts, k, 2)[1]))


@lru_cache(maxsize=64)
def pooled_block(n_experts: int, k: int, largest: int) -> Float[np.ndarray, " sizes"]:
    """Log-probabilities of M = m for m = 1 ... min(largest, N).

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
            pools = np.array([log_pooling_chance(int(i), m - int(i)) for i in a])
            terms = log_choices + pools + _log_split_chance(m, k - a, rest - b)
            log_p[m - 1] = np.logaddexp.reduce(terms)
    log_p.flags.writeable = False
    return log_p


def _log_split_chance(m: int, above: np.ndarray, below: np.ndarray) -> np.ndarray:
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
def log_pooling_chance(a: int, b: int) -> float:
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
    log_height = _log_joint_mgf(a, b, np.array([complex(saddle)]))[0].real
    ratio = np.exp(_log_joint_mgf(a, b, saddle + 1j * u) - log_height).real
    values = ratio * np.cosh(v)
    area = 2 * scale / 64 * (values.sum() - values[0] / 2)
    log_density = log_height + math.log(area / (2 * math.pi))
    return log_density - m * math.log(2) + 0.5 * math.log(2 * math.pi * m)


def _log_joint_mgf(a: int, b: int, theta: np.ndarray) -> np.ndarray:
    """Compute a log M(θ) + b log M(-θ) on any branch: a and b are integers."""
    return a * _log_mgf(theta) + b * _log_mgf(-theta)


def _log_mgf(theta: np.ndarray) -> np.ndarray:
    """Logarithm of M(θ) = w(-iθ/√2), w the Faddeeva function; for Re θ > 0 by reflection.

    w overflows where Re θ is large and positive: M(θ) = 2 e^{θ²/2} - M(-θ) is taken as
    θ²/2 + log(2 - e^{-θ²/2} M(-θ)).
    """
    positive = np.real(theta) > 0
    reflected_theta = np.where(positive, -theta, theta)
    mirrored = special.wofz(-1j * reflected_theta / math.sqrt(2))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        reflected = theta**2 / 2 + np.log(2 - np.exp(-(theta**2) / 2) * mirrored)
    # far up the line e^{θ²/2} vanishes and only M(-θ) remains, with the opposite sign
    negligible = np.real(theta**2) / 2 < -40
    return np.where(
        positive & ~negligible, reflected, np.log(np.where(positive, -mirrored, mirrored))
    )


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
    """Logarithm of C(n, k) for an array of k."""
    return special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)


def _checked_exp(log_value: float) -> float:
    """Return e^log_value; raises beyond float64."""
    require(log_value < 709, f"the number is e^{log_value:.0f}: ask for its logarithm")
    return math.exp(log_value)
