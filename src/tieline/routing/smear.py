"""SMEAR: one expert per sequence, the average of all experts' parameters.

    θ̄ = Σ_e w_e θ_e,  w = softmax(router(mean of the sequence's tokens)),  y_t = f(x_t; θ̄)

Muqeeth et al. (2024). Smooth and as cheap as one expert per token, but the whole sequence is routed
at once, on tokens that come later too: it does not suit causal models (paper 1, B.2).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tieline.errors import ShapeError, require
from tieline.routing.dispatch import dispatch
from tieline.routing.experts import Experts
from tieline.routing.gates import Softmax
from tieline.routing.routers import Router

__all__ = ["Smear"]


class Smear(nn.Module):
    """The layer of the module docstring over the last two axes, tokens and width.

    Args:
        router: scores of a sequence from the mean of its tokens.
        experts: whose parameters are averaged.
        temperature: of the softmax.
    """

    batch_dependent = True

    def __init__(self, router: Router, experts: Experts, *, temperature: float = 1.0) -> None:
        super().__init__()
        require(
            (router.d_model, router.n_experts) == (experts.d_model, experts.n_experts),
            f"router ({router.d_model} wide, {router.n_experts} experts) and experts "
            f"({experts.d_model} wide, {experts.n_experts}) do not fit",
        )
        self.router, self.gate, self.experts = router, Softmax(temperature), experts

    def weights(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch experts"]:
        """The weights w of each sequence."""
        return self.gate(self.router(x.mean(dim=-2)))

    def forward(
        self, x: Float[Tensor, "*batch tokens width"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """f(x; θ̄)."""
        require(x.ndim >= 2, f"tokens must be (..., T, D), got {tuple(x.shape)}", ShapeError)
        if not x.numel():
            return x
        weights = self.weights(x).reshape(-1, self.experts.n_experts)
        merged = [_merge(weights, tensor) for tensor in self._parameters_of_experts()]
        w_in, w_out, b_in, b_out = merged
        assert w_in is not None
        assert w_out is not None
        sequence = torch.arange(len(weights), device=x.device).repeat_interleave(x.shape[-2])
        mine = F.one_hot(sequence, len(weights)).to(x)
        flat = x.reshape(-1, x.shape[-1])
        y = dispatch(flat, mine, w_in, w_out, b_in, activation=self.experts.activation)
        y = y if b_out is None else y + mine.to(y) @ b_out.to(y)
        return y.view_as(x)

    def _parameters_of_experts(self) -> tuple[Tensor | None, ...]:
        experts = self.experts
        return experts.w_in, experts.w_out, experts.b_in, experts.b_out


def _merge(weights: Tensor, stacked: Tensor | None) -> Tensor | None:
    """Σ_e w_be θ_e for every sequence b, in the dtype of the parameters."""
    if stacked is None:
        return None
    return torch.einsum("be,e...->b...", weights.to(stacked), stacked)
