"""The smallest mixture that has a wall: two affine functions on the two sides of a hyperplane.

    S(x) = normal·x + offset        score difference a_1 - a_2
    f_i(x) = experts_i·(x, 1)       expert 1 rules where S > 0, expert 2 where S < 0

Student and teacher of paper 0 are both of this form in the Gaussian case, X ~ N(0, Σ), where every
risk is a one-dimensional integral (`tieline.limits.slices`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import ShapeError, require

__all__ = ["TwoCells", "check_covariance", "gaussian_inputs", "two_cells"]

Numbers = Sequence[float] | Float[Tensor, " width"]


@dataclass(frozen=True, eq=False)
class TwoCells:
    """A wall and the affine function on each of its sides, in float64.

    Attributes:
        normal: (D,) gradient of the score difference S; its length is the router's scale.
        offset: S at the origin.
        experts: (2, D + 1) slopes and intercept of the function where S > 0, then where S < 0.
    """

    normal: Float[Tensor, " width"]
    offset: Float[Tensor, ""]
    experts: Float[Tensor, "2 columns"]

    @property
    def width(self) -> int:
        """D."""
        return self.normal.shape[0]

    def flat(self) -> Float[Tensor, " parameters"]:
        """All parameters in a row: normal, offset, expert 1, expert 2."""
        return torch.cat([self.normal, self.offset[None], self.experts.flatten()])

    def with_flat(self, parameters: Float[Tensor, " parameters"]) -> "TwoCells":
        """The mixture of this width that has the parameters of `flat`."""
        d = self.width
        return TwoCells(parameters[:d], parameters[d], parameters[d + 1 :].reshape(2, d + 1))

    def with_experts(self, experts: Float[Tensor, "2 columns"]) -> "TwoCells":
        """The same wall with other experts."""
        return TwoCells(self.normal, self.offset, experts)

    def swapped(self) -> "TwoCells":
        """The same function with the labels of the two experts exchanged."""
        return TwoCells(-self.normal, -self.offset, self.experts.flip(0))

    def scores(self, x: Float[Tensor, "n width"]) -> Float[Tensor, "n 2"]:
        """(S/2, -S/2), so that softmax at temperature τ gives expert 1 the weight σ(S/τ)."""
        s = x @ self.normal + self.offset
        return torch.stack([s / 2, -s / 2], dim=1)

    def outputs(self, x: Float[Tensor, "n width"]) -> Float[Tensor, "n 2"]:
        """Values of both experts."""
        return x @ self.experts[:, :-1].T + self.experts[:, -1]

    def cell(self, x: Float[Tensor, "n width"]) -> Int[Tensor, " n"]:
        """0 where S >= 0 and 1 elsewhere: the tie rule of the package, lower index first."""
        return (x @ self.normal + self.offset < 0).long()

    def value(self, x: Float[Tensor, "n width"]) -> Float[Tensor, " n"]:
        """The piecewise function itself: the expert of the cell."""
        return self.outputs(x).gather(1, self.cell(x)[:, None]).squeeze(1)


def two_cells(
    *,
    normal: Numbers,
    offset: float = 0.0,
    slopes: Sequence[Sequence[float]] | Float[Tensor, "2 width"],
    intercepts: Sequence[float] | Float[Tensor, "2"] = (0.0, 0.0),
) -> TwoCells:
    """`TwoCells` from plain numbers.

    Args:
        normal: (D,) gradient of S, not zero.
        offset: S at the origin.
        slopes: (2, D) of the functions where S > 0 and where S < 0.
        intercepts: of the same.
    """
    v = torch.as_tensor(normal, dtype=torch.float64)
    require(bool(torch.isfinite(v).all() and v.norm() > 0), f"need a normal that is not 0, got {v}")
    slope = torch.as_tensor(slopes, dtype=torch.float64)
    require(
        slope.shape == (2, len(v)), f"slopes must be (2, {len(v)}), got {slope.shape}", ShapeError
    )
    level = torch.as_tensor(intercepts, dtype=torch.float64)
    require(level.shape == (2,), f"need two intercepts, got {level.shape}", ShapeError)
    experts = torch.cat([slope, level[:, None]], dim=1)
    require(bool(torch.isfinite(experts).all()), f"experts must be finite, got {experts.tolist()}")
    return TwoCells(v, torch.as_tensor(offset, dtype=torch.float64), experts)


def check_covariance(
    covariance: Float[Tensor, "width width"] | None, width: int
) -> Float[Tensor, "width width"]:
    """Σ in float64 (the identity for None), or an error that names its smallest eigenvalue."""
    if covariance is None:
        return torch.eye(width, dtype=torch.float64)
    sigma = covariance.double()
    require(
        sigma.shape == (width, width),
        f"covariance must be ({width}, {width}), got {tuple(sigma.shape)}",
        ShapeError,
    )
    require(torch.allclose(sigma, sigma.T), "covariance must be symmetric")
    least = torch.linalg.eigvalsh(sigma)[0].item()
    require(least > 0, f"covariance must be positive definite, its least eigenvalue is {least:.3g}")
    return sigma


def gaussian_inputs(
    n: int, width: int, seed: int, covariance: Float[Tensor, "width width"] | None = None
) -> Float[Tensor, "n width"]:
    """Independent draws of N(0, Σ) in float64, the same for the same seed."""
    require(n > 0 and width > 0, f"need n > 0 and width > 0, got {n=}, {width=}")
    root = torch.linalg.cholesky(check_covariance(covariance, width))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator, dtype=torch.float64) @ root.T
