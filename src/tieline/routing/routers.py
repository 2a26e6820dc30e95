"""Routers: tokens x (..., D) → scores z (..., E).

    LinearRouter      z_e = w_e·x (+ b_e)
    CosineRouter      z_e = w_e·Px / ((‖w_e‖ + τ1)(‖Px‖ + τ2) t)       (paper 2, eq. 2 and 7)
    QuadraticRouter   z_e = xᵀA_e x + b_e·x + c_e, or xᵀA_e x + c_e    (paper 4, section 2)

Scores are float32 or wider. A new router overrides `score`.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tieline.core.errors import ShapeError, require

__all__ = ["CosineRouter", "LinearRouter", "QuadraticRouter", "Router"]

Tokens = Float[Tensor, "*batch dim"]
Scores = Float[Tensor, "*batch experts"]


class Router(nn.Module):
    """Base of all routers: checks the dimension, then calls `score`.

    Args:
        d_model: dimension D of a token.
        n_experts: number of experts E.
    """

    def __init__(self, d_model: int, n_experts: int) -> None:
        super().__init__()
        require(d_model >= 1 and n_experts >= 1, f"need widths >= 1, got {d_model=}, {n_experts=}")
        self.d_model, self.n_experts = d_model, n_experts

    def forward(self, x: Tokens) -> Scores:
        """Return the score of each expert, float32 or wider."""
        require(
            x.ndim >= 1 and x.shape[-1] == self.d_model and x.is_floating_point(),
            f"tokens must be floating (..., {self.d_model}), got {tuple(x.shape)} {x.dtype}",
            ShapeError,
        )
        scores = self.score(x)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def score(self, x: Tokens) -> Scores:
        """Return scores of tokens of the right dimension; override this in a new router."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Dimensions."""
        return f"d_model={self.d_model}, n_experts={self.n_experts}"


class LinearRouter(Router):
    """z = Wx (+ b): walls between experts are hyperplanes, through the origin without `bias`."""

    def __init__(self, d_model: int, n_experts: int, *, bias: bool = False) -> None:
        super().__init__(d_model, n_experts)
        self.weight = _normal_parameter(n_experts, d_model, fan_in=d_model)
        self.bias = nn.Parameter(torch.zeros(n_experts)) if bias else None

    def score(self, x: Tokens) -> Scores:
        """Return Wx (+ b)."""
        return F.linear(x, self.weight, self.bias)


class CosineRouter(Router):
    """Cosine of expert and token embedding, plain (τ = 0) or perturbed (τ > 0).

    The perturbation keeps the norms away from zero and makes the score depend on the scale of the
    expert vector, which removes the slow directions of the estimate (paper 2). A zero vector
    scores 0.

    Args:
        d_model: dimension D of a token.
        n_experts: number of experts E.
        d_proj: dimension of an optional learnt projection P; None compares tokens as they are.
        temperature: t > 0, divides the cosine.
        tau: (τ1, τ2) >= 0, added to the norms of expert and token.
    """

    def __init__(
        self,
        d_model: int,
        n_experts: int,
        *,
        d_proj: int | None = None,
        temperature: float = 1.0,
        tau: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__(d_model, n_experts)
        require(
            0 < temperature < math.inf, f"temperature must be positive and finite: {temperature=}"
        )
        require(
            len(tau) == 2 and all(0 <= t < math.inf for t in tau),
            f"tau must be two finite numbers >= 0, got {tau}",
        )
        require(d_proj is None or d_proj >= 1, f"d_proj must be >= 1, got {d_proj}")
        dim = d_model if d_proj is None else d_proj
        self.projection = (
            None if d_proj is None else _normal_parameter(d_proj, d_model, fan_in=d_model)
        )
        self.weight = _normal_parameter(n_experts, dim, fan_in=dim)
        self.temperature, self.tau = temperature, tau

    def score(self, x: Tokens) -> Scores:
        """Return the perturbed cosine of expert and token, divided by the temperature."""
        embedded = x if self.projection is None else F.linear(x, self.projection)
        expert = _divide_by_norm(self.weight, self.tau[0])
        return F.linear(_divide_by_norm(embedded, self.tau[1]), expert) / self.temperature

    def extra_repr(self) -> str:
        """Dimensions, temperature and perturbation."""
        return f"{super().extra_repr()}, temperature={self.temperature}, tau={self.tau}"


class QuadraticRouter(Router):
    """z_e = xᵀA_e x (+ b_e·x) + c_e with symmetric A_e: the affinity of an attention row.

    Only the symmetric part of a stored matrix enters xᵀAx; `matrices` returns it. At rank r,
    A_e = (U_e V_eᵀ + V_e U_eᵀ)/2 and the score costs O(rD) instead of O(D²).

    Args:
        d_model: dimension D of a token.
        n_experts: number of experts E.
        kind: "full" includes the linear term b, "partial" omits it.
        rank: r of the factors, None for full matrices.
    """

    def __init__(
        self,
        d_model: int,
        n_experts: int,
        *,
        kind: Literal["full", "partial"] = "full",
        rank: int | None = None,
    ) -> None:
        super().__init__(d_model, n_experts)
        require(kind in ("full", "partial"), f"kind must be 'full' or 'partial', got {kind!r}")
        require(rank is None or 1 <= rank <= d_model, f"need 1 <= rank <= D, got {rank=}")
        shape = (n_experts, d_model, d_model if rank is None else rank)
        self.left = _normal_parameter(*shape, fan_in=d_model)
        self.right = None if rank is None else _normal_parameter(*shape, fan_in=d_model)
        self.linear = (
            _normal_parameter(n_experts, d_model, fan_in=d_model) if kind == "full" else None
        )
        self.constant = nn.Parameter(torch.zeros(n_experts))

    @property
    def matrices(self) -> Float[Tensor, "experts dim dim"]:
        """The symmetric A_e."""
        full = self.left if self.right is None else self.left @ self.right.mT
        return (full + full.mT) / 2

    def score(self, x: Tokens) -> Scores:
        """Return xᵀAx (+ b·x) + c."""
        image = torch.einsum("...d,edr->...er", x, self.left)
        if self.right is None:
            quadratic = torch.einsum("...er,...r->...e", image, x)
        else:
            quadratic = (image * torch.einsum("...d,edr->...er", x, self.right)).sum(dim=-1)
        linear = x.new_zeros(self.n_experts, self.d_model) if self.linear is None else self.linear
        return quadratic + F.linear(x, linear, self.constant)


def _normal_parameter(*shape: int, fan_in: int) -> nn.Parameter:
    """Return a parameter with entries from N(0, 1 / fan_in)."""
    return nn.Parameter(torch.randn(*shape) / math.sqrt(fan_in))


def _divide_by_norm(v: Float[Tensor, "*batch dim"], tau: float) -> Float[Tensor, "*batch dim"]:
    """Return v / (‖v‖ + τ), 0 for v = 0; the norm's derivative at 0 is defined as 0."""
    zero = (v == 0).all(dim=-1, keepdim=True)
    norm = torch.linalg.vector_norm(v.masked_fill(zero, 1), dim=-1, keepdim=True)
    return v / (norm.masked_fill(zero, 1 if tau == 0 else 0) + tau)
