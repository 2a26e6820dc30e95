"""In how narrow a cone the router's inputs lie.

    angular_spread    ‖mean‖ / radius, mean cosine, cap fraction, expected ties     Def. 9.1 - 9.3
    log_cap_fraction  log of ½ I_{sin²θ}((d-1)/2, ½)                                Def. 9.2

Paper 3, Prop. 5.6: inputs in a ball of radius R around μ point into a cap of half-angle
θ = arcsin(R / ‖μ‖), which shrinks like (R / ‖μ‖)^(d-1). The paper concludes that routing collapses
at that rate; it does not. A linear router without bias is cut by walls through the origin, and the
expected number of these that meet the ball falls only like R / ‖μ‖ (`expected_ties`).
"""

import math
from dataclasses import dataclass

from jaxtyping import Float
from scipy import special
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.geometry.density import iid_normal_density

__all__ = ["AngularSpread", "angular_spread", "log_cap_fraction"]


@dataclass(frozen=True)
class AngularSpread:
    """Where the router's inputs point.

    Attributes:
        mean_norm: ‖μ‖, μ the mean input.
        radius: root mean square of ‖x - μ‖.
        largest_radius: maximum of ‖x - μ‖, the R of Paper 3, Prop. 5.6.
        mean_over_radius: ‖μ‖ / radius; infinite where all inputs are equal.
        mean_cosine: ‖mean of x / ‖x‖‖: 1 where all inputs point the same way, 0 where they balance.
        cap_fraction: share of the sphere in the cap that the ball of `largest_radius` fills; 1
            where the ball holds the origin.
        log10_cap_fraction: its logarithm, which does not underflow.
        expected_ties: expected number of walls through the ball of root mean square radius, for a
            router of isotropic weights without bias.
    """

    mean_norm: float
    radius: float
    largest_radius: float
    mean_over_radius: float
    mean_cosine: float
    cap_fraction: float
    log10_cap_fraction: float
    expected_ties: float


def angular_spread(inputs: Float[Tensor, "tokens width"], n_experts: int, k: int) -> AngularSpread:
    """Mean, radius, cap and expected ties of the router's inputs (Def. 9.1 - 9.3)."""
    tokens, width = inputs.shape
    require(tokens > 0 and width > 1, f"need a token and width > 1, got {inputs.shape}", ShapeError)
    x = inputs.double()
    mean = x.mean(dim=0)
    away = (x - mean).norm(dim=1)
    mean_norm, radius = mean.norm().item(), away.square().mean().sqrt().item()
    largest = away.max().item()
    directions = x / x.norm(dim=1, keepdim=True).clamp(min=1e-300)
    log_cap = log_cap_fraction(largest / mean_norm if mean_norm > 0 else math.inf, width)
    return AngularSpread(
        mean_norm=mean_norm,
        radius=radius,
        largest_radius=largest,
        mean_over_radius=mean_norm / radius if radius > 0 else math.inf,
        mean_cosine=directions.mean(dim=0).norm().item(),
        cap_fraction=math.exp(log_cap),
        log10_cap_fraction=log_cap / math.log(10),
        expected_ties=_expected_ties(radius, mean_norm, width, n_experts, k),
    )


def log_cap_fraction(sine: float, width: int) -> float:
    """Logarithm of ½ I_{sin²θ}((d-1)/2, ½), the share of the sphere within angle θ (Def. 9.2).

    As x^a (1-x)^½ / (2 a B(a, ½)) · F(a + ½, 1; a + 1; x) with x = sin²θ, a = (d-1)/2, since the
    incomplete beta function itself underflows for the widths of language models. 0 for sin θ >= 1,
    where the ball holds the origin and every direction is met.
    """
    require(sine >= 0 and width > 1, f"need sine >= 0 and width > 1, got {sine=}, {width=}")
    if sine >= 1:
        return 0.0
    if sine == 0:
        return -math.inf
    a, x = (width - 1) / 2, sine**2
    series = float(special.hyp2f1(a + 0.5, 1.0, a + 1, x))
    head = a * math.log(x) + math.log1p(-x) / 2 - math.log(2 * a) - float(special.betaln(a, 0.5))
    return head + math.log(series)


def _expected_ties(radius: float, mean_norm: float, width: int, n_experts: int, k: int) -> float:
    """ρ I_{s²}(½, (d-1)/2), s = R / ‖μ‖, ρ = √π f_gap(0) of iid normal scores (Def. 9.3)."""
    if k >= n_experts:
        return 0.0
    rho = math.sqrt(math.pi) * iid_normal_density(n_experts, k)
    s = min(1.0, radius / mean_norm) if mean_norm > 0 else 1.0
    return rho * float(special.betainc(0.5, (width - 1) / 2, s**2))
