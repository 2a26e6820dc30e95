"""The tropical semiring (R ∪ {-∞}, ⊕ = max, ⊗ = +) on tensors (paper 3, Def. 3.4).

plus, times, power      a ⊕ b, a ⊗ b, a^{⊗ n}
ZERO, ONE               -∞ and 0, neutral for ⊕ and ⊗
matmul                  (A ⊗ B)_ij = max_l (A_il + B_lj)
elementary_symmetric    e_k(z) = ⊕_{|I| = k} ⊗_{i ∈ I} z_i, the sum of the k largest scores
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require

__all__ = ["ONE", "ZERO", "elementary_symmetric", "matmul", "plus", "power", "times"]

ZERO = -math.inf
ONE = 0.0


def plus(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Tropical sum a ⊕ b = max(a, b)."""
    return torch.maximum(a, b)


def times(a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Tropical product a ⊗ b = a + b."""
    return a + b


def power(a: Float[Tensor, "*shape"], n: int) -> Float[Tensor, "*shape"]:
    """Tropical power a^{⊗ n} = n a for n >= 0; 0 for n = 0, also at -∞."""
    require(n >= 0, f"tropical powers need n >= 0, got {n}")
    return torch.zeros_like(a) if n == 0 else n * a


def matmul(a: Float[Tensor, "n m"], b: Float[Tensor, "m p"]) -> Float[Tensor, "n p"]:
    """(A ⊗ B)_ij = ⊕_l A_il ⊗ B_lj."""
    return (a[:, :, None] + b[None]).amax(dim=1)


def elementary_symmetric(
    scores: Float[Tensor, "*batch experts"], k: int
) -> Float[Tensor, "*batch"]:
    """e_k(z) = max_{|I| = k} Σ_{i ∈ I} z_i, the score of the best coalition (Sec. 3.5).

    By e_k(z_1 … z_n) = e_k(z_1 … z_{n-1}) ⊕ z_n ⊗ e_{k-1}(z_1 … z_{n-1}), which ranks nothing: that
    it is the sum of the k largest scores is a theorem here, not the definition.
    """
    experts = scores.shape[-1]
    require(0 <= k <= experts, f"need 0 <= k <= {experts} experts, got {k=}")
    best = [torch.zeros_like(scores[..., 0])]
    best += [torch.full_like(best[0], ZERO) for _ in range(k)]
    for expert in range(experts):
        for order in range(min(k, expert + 1), 0, -1):
            best[order] = plus(best[order], times(scores[..., expert], best[order - 1]))
    return best[k]
