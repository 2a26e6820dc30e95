"""The chance that a scores from above and b from below pool as one block.

    log_pools    ln O(a, b), O(a, b) = 2^-m √(2πm) f(0), m = a + b

f is the density of S_a - S_b, where S_n is a sum of n independent half-normals |Z|.
"""

import math
from functools import lru_cache

import numpy as np
from scipy import special

__all__ = ["log_pools"]


@lru_cache(maxsize=1 << 15)
def log_pools(a: int, b: int) -> float:
    """Logarithm of O(a, b) = 2^-m √(2πm) f(0), f the density of S_a - S_b, m = a + b.

    f(0) = 1/2πi ∫ M(θ)^a M(-θ)^b dθ along a vertical line, M(θ) = 2 e^{θ²/2} Φ(θ) = E exp(θ|Z|).
    Through the saddle point of the real axis nothing cancels; along the imaginary axis f(0) would
    drown in rounding as soon as a and b differ much. On the line the integrand falls like u^-m, and
    u = s sinh v makes that exponential, for which the trapezoidal rule is exact but for rounding.
    """
    m, saddle = a + b, _saddle(a, b)
    scale = 1 / math.sqrt(_curvature(a, b, saddle))
    v = np.arange(0, 5 + 40 / (m - 1), 1 / 64)
    u = scale * np.sinh(v)
    log_height = _log_transform(a, b, np.array([complex(saddle)]))[0].real
    ratio = np.exp(_log_transform(a, b, saddle + 1j * u) - log_height).real
    values = ratio * np.cosh(v)
    area = 2 * scale / 64 * (values.sum() - values[0] / 2)
    log_density = log_height + math.log(area / (2 * math.pi))
    return log_density - m * math.log(2) + 0.5 * math.log(2 * math.pi * m)


def _log_transform(a: int, b: int, theta: np.ndarray) -> np.ndarray:
    """Value of a log M(θ) + b log M(-θ), any branch: a and b are integers."""
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


def _slope(theta: float) -> float:
    """(log M)'(θ) = θ + φ(θ)/Φ(θ), the mean of |Z| under the tilt; stable on both sides."""
    mills = math.sqrt(2 / math.pi) / float(special.erfcx(-theta / math.sqrt(2)))
    return theta + mills


def _saddle(a: int, b: int) -> float:
    """The real θ where a (log M)'(θ) = b (log M)'(-θ), by bisection: the left side rises in θ."""
    low, high = -2.0 * math.sqrt(a + b) - 2, 2.0 * math.sqrt(a + b) + 2
    for _ in range(60):
        middle = (low + high) / 2
        if a * _slope(middle) < b * _slope(-middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _curvature(a: int, b: int, theta: float) -> float:
    """Second derivative of a log M(θ) + b log M(-θ), by a difference of slopes."""
    step = 1e-3
    rise = a * (_slope(theta + step) - _slope(theta - step))
    return (rise + b * (_slope(-theta + step) - _slope(-theta - step))) / (2 * step)
