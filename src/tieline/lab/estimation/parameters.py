"""The parameters of a mixture-of-experts regression: one row of router, bias and expert per atom.

    softmax link (paper 2)    G = Σ_i exp(β_0i) δ(β_1i, η_i)       mass exp(bias)
    sigmoid link (paper 4)    G = Σ_i σ(c_i) δ(A_i, b_i, η_i)      mass σ(bias)

A router row is β_1 (d numbers) or the flat coefficients of a quadratic score, vec A by rows:
[vec A, b] of d² + d numbers for xᵀAx + b·x (fully quadratic), vec A of d² for xᵀAx (partially
quadratic). Matrices (d, d) or [A | b] of shape (d, d + 1) are accepted and stored flat.

Every tensor may have leading axes (repetitions, starts): (*batch, N, ...).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require

Numbers = Tensor | Sequence[Any] | Any  # a tensor, an array or nested lists of numbers


@dataclass(frozen=True, eq=False, init=False)
class MoEParameters:
    """Parameters of N experts in float64, from tensors, arrays or nested lists.

    Attributes:
        router: rows β_1 or flat quadratic coefficients (*batch, N, w).
        bias: β_0 or c (*batch, N).
        experts: rows η (*batch, N, q).
    """

    router: Float[Tensor, "*batch experts dim"]
    bias: Float[Tensor, "*batch experts"]
    experts: Float[Tensor, "*batch experts q"]

    def __init__(self, router: Numbers, bias: Numbers, experts: Numbers) -> None:
        offsets = _double("bias", bias)
        require(offsets.ndim >= 1, "bias needs an axis of experts, got a single number", ShapeError)
        rows = _flat_rows(_double("router", router), offsets.ndim)
        expert_rows = _double("experts", experts)
        for name, value in (("router", rows), ("experts", expert_rows)):
            require(
                value.ndim == offsets.ndim + 1 and value.shape[:-1] == offsets.shape,
                f"{name} {tuple(value.shape)} must have one row for each bias "
                f"{tuple(offsets.shape)}",
                ShapeError,
            )
        object.__setattr__(self, "router", rows)
        object.__setattr__(self, "bias", offsets)
        object.__setattr__(self, "experts", expert_rows)

    @property
    def n_experts(self) -> int:
        """Number N of atoms."""
        return self.bias.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the leading axes."""
        return self.bias.shape[:-1]

    @property
    def size(self) -> int:
        """Number p of parameters of one problem."""
        return self.n_experts * (self.router.shape[-1] + 1 + self.experts.shape[-1])

    def __getitem__(self, index: Any) -> "MoEParameters":
        """The problems that `index` picks along the leading axes."""
        require(self.bias.ndim > 1, "parameters without leading axes hold one problem", ShapeError)
        return MoEParameters(self.router[index], self.bias[index], self.experts[index])

    def take(self, order: Tensor | Sequence[int]) -> "MoEParameters":
        """The atoms listed in `order`, in that order."""
        index = torch.as_tensor(order)
        return MoEParameters(
            self.router.index_select(-2, index),
            self.bias.index_select(-1, index),
            self.experts.index_select(-2, index),
        )

    def expand(self, *batch: int) -> "MoEParameters":
        """The same parameters for every problem of a batch."""
        return MoEParameters(
            self.router.expand(*batch, *self.router.shape[-2:]),
            self.bias.expand(*batch, self.n_experts),
            self.experts.expand(*batch, *self.experts.shape[-2:]),
        )

    def flatten(self) -> Float[Tensor, "*batch p"]:
        """One vector per problem: all router rows, then all biases, then all expert rows."""
        blocks = (self.router.flatten(-2), self.bias, self.experts.flatten(-2))
        return torch.cat(blocks, dim=-1)

    def like(self, vector: Float[Tensor, "*batch p"]) -> "MoEParameters":
        """Parameters of this shape from vectors: the inverse of `flatten`."""
        n, dim, q = self.n_experts, self.router.shape[-1], self.experts.shape[-1]
        return from_vector(vector, n, dim, q)


def from_vector(vector: Float[Tensor, "*batch p"], n: int, dim: int, q: int) -> MoEParameters:
    """Parameters of n experts, router rows of `dim` numbers and expert rows of q from vectors."""
    require(
        vector.shape[-1] == n * (dim + 1 + q),
        f"{n} experts with rows of {dim} + 1 + {q} need {n * (dim + 1 + q)} numbers, "
        f"got {vector.shape[-1]}",
        ShapeError,
    )
    router, bias, experts = vector.split([n * dim, n, n * q], dim=-1)
    return MoEParameters(router.unflatten(-1, (n, dim)), bias, experts.unflatten(-1, (n, q)))


def quadratic_parameters(
    A: Numbers, c: Numbers, experts: Numbers, b: Numbers | None = None
) -> MoEParameters:
    """A quadratic gate from A (*batch, N, d, d), c, η and b (*batch, N, d); partial without b."""
    rows = _double("A", A).flatten(-2)
    if b is not None:
        rows = torch.cat((rows, _double("b", b)), dim=-1)
    return MoEParameters(rows, c, experts)


def quadratic_blocks(
    router: Float[Tensor, "*batch experts dim"], *, full: bool
) -> tuple[Float[Tensor, "*batch experts d d"], Float[Tensor, "*batch experts _"]]:
    """A and b of flat quadratic rows; b has no columns for the partially quadratic score."""
    d = quadratic_dim(router.shape[-1], full=full)
    return router[..., : d * d].unflatten(-1, (d, d)), router[..., d * d :]


def quadratic_dim(dim: int, *, full: bool) -> int:
    """Return the d for which `dim` is d² + d (full) or d² (partial)."""
    d = (math.isqrt(1 + 4 * dim) - 1) // 2 if full else math.isqrt(dim)
    fits = d >= 1 and dim == d * d + (d if full else 0)
    form = "[vec A, b] of d² + d" if full else "vec A of d²"
    require(fits, f"a quadratic router row is {form} numbers, got {dim}", ShapeError)
    return d


def _double(name: str, value: Numbers) -> Tensor:
    """`value` in float64; lists go there directly, not by way of float32."""
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"{name} must be a regular array of numbers: {error}") from error
    require(not tensor.is_complex(), f"{name} must be real", ShapeError)
    return tensor


def _flat_rows(router: Tensor, bias_axes: int) -> Tensor:
    """Rows (*batch, N, w) from rows, matrices (d, d) or matrices with a column b, (d, d + 1)."""
    if router.ndim != bias_axes + 2:
        return router
    d, columns = router.shape[-2:]
    require(
        columns in (d, d + 1),
        f"a router matrix is (d, d) or [A | b] of shape (d, d + 1), got ({d}, {columns})",
        ShapeError,
    )
    return torch.cat((router[..., :d].flatten(-2), router[..., d:].flatten(-2)), dim=-1)
