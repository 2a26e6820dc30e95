"""One row of an attention head as a regression function, and the same row as a mixture.

    f(X) = Σ_j G(s(X))_j x_j·v,   s_j = x_i B x_j,   G = softmax or σ       P4 eq. 1, 2, section 2

X = (x_1, ..., x_N) are the tokens, i the row that asks. Of queries and keys only B = s W_Q W_Kᵀ
can be learnt, so B and v are the parameters: those of all N experts are tied to them. Untied, each
token has a quadratic score and a linear expert of its own, which is the mixture that paper 4
studies; `as_mixture` gives its parameters through `routing.attention_as_moe`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters, quadratic_parameters
from tieline.routing.attention import AttentionKind, check_kind
from tieline.routing.attention_moe import attention_as_moe

__all__ = ["AttentionHead"]

Theta = Float[Tensor, "problems p"]
Inputs = Float[Tensor, "problems n tokens_width"]


@dataclass(frozen=True)
class AttentionHead:
    """A row of a head with one value dimension; parameter vectors are [vec B, v].

    Attributes:
        kind: "softmax" or "sigmoid".
        tokens: N.
        width: D of a token.
        row: i, counted from 0.
    """

    kind: AttentionKind
    tokens: int
    width: int
    row: int = 0

    def __post_init__(self) -> None:
        check_kind(self.kind, None)
        require(
            self.tokens >= 2 and self.width >= 1 and 0 <= self.row < self.tokens,
            f"need 2 tokens or more, a width and a row among them, got {self}",
        )

    @property
    def size(self) -> int:
        """D² + D."""
        return self.width * (self.width + 1)

    def split(self, theta: Float[Tensor, "*batch p"]) -> tuple[Tensor, Tensor]:
        """B (..., D, D) and v (..., D)."""
        require(
            theta.shape[-1] == self.size,
            f"B and v are {self.size} numbers, got {theta.shape[-1]}",
            ShapeError,
        )
        square = self.width**2
        return theta[..., :square].unflatten(-1, (self.width, self.width)), theta[..., square:]

    def value(self, theta: Theta, x: Inputs) -> Float[Tensor, "problems n"]:
        """F of every problem and sequence; a sequence is its tokens in one vector."""
        weights, values, _ = self._run(theta, x)
        return (weights * values).sum(dim=-1)

    def value_and_jacobian(
        self, theta: Theta, x: Inputs
    ) -> tuple[Float[Tensor, "problems n"], Float[Tensor, "problems n p"]]:
        """F and its Jacobian: ∂f/∂B = x_i ⊗ Σ_j s_j x_j, ∂f/∂v = Σ_j G_j x_j."""
        weights, values, tokens = self._run(theta, x)
        total = (weights * values).sum(dim=-1)
        if self.kind == "softmax":
            slopes = weights * (values - total[..., None])
        else:
            slopes = weights * (1 - weights) * values
        moved, mixed = ((part[..., None] * tokens).sum(dim=-2) for part in (slopes, weights))
        outer = tokens[..., self.row, :, None] * moved[..., None, :]
        return total, torch.cat([outer.flatten(-2), mixed], dim=-1)

    def mixture(self) -> MoEModel:
        """The family of mixtures that has this head among its members."""
        return MoEModel("partial", self.kind, "linear", self.tokens * self.width, self.tokens)

    def as_mixture(self, theta: Float[Tensor, " p"]) -> MoEParameters:
        """The head in the parameters of `mixture`, by `attention_as_moe`."""
        bilinear, value = self.split(theta)
        x = theta.new_zeros(self.tokens, self.width)
        eye = torch.eye(self.width, dtype=theta.dtype)
        seen = attention_as_moe(
            x, bilinear, eye, value[:, None], row=self.row, kind=self.kind, scale=1.0
        )
        rows = seen.experts.maps[..., 0]
        experts = torch.cat([rows, torch.zeros_like(rows[:, :1])], dim=1)
        return quadratic_parameters(seen.router.matrices, seen.router.constant, experts)

    def _run(self, theta: Theta, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and values (problems, n, N), and the tokens."""
        bilinear, value = self.split(theta)
        tokens = x.unflatten(-1, (self.tokens, self.width))
        asked = tokens[..., self.row, :] @ bilinear
        scores = (tokens @ asked[..., None])[..., 0]
        weights = scores.softmax(dim=-1) if self.kind == "softmax" else scores.sigmoid()
        return weights, (tokens * value[:, None, None, :]).sum(dim=-1), tokens
