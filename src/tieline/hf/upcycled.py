"""The Mixture of Experts that a dense feed-forward network becomes.

    y = Σ_{e ∈ top-k} w_e f_e(x),   w = softmax(Wx) on the k largest, divided by its sum

Router and experts have the interface of transformers' own blocks, (logits, weights, indices) and
stacked maps, so capture, audits, smoothing and rerouting work on an upcycled model as on any other.
Where all f_e are equal, as they are at first, weights of sum 1 give back the network itself.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.hf.families import RouterFamily, register_family
from tieline.hf.kernel import experts_forward
from tieline.ranking import stable_topk

__all__ = ["UpcycledExperts", "UpcycledFFN", "UpcycledRouter"]

Tokens = Float[Tensor, "tokens width"]
Chosen = Float[Tensor, "tokens k"]

register_family(
    RouterFamily(
        "upcycled",
        ("UpcycledRouter",),
        renormalise="norm_topk_prob",
        note="made by `tieline upcycle` from a dense network",
    )
)


class UpcycledRouter(nn.Module):
    """Softmax of a linear map, in at least float32, and its k largest, divided by their sum.

    Args:
        width: D.
        n_experts: E.
        k: experts per token.
        renormalise: whether weights sum to 1.
    """

    def __init__(self, width: int, n_experts: int, k: int, *, renormalise: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_experts, width))
        self.top_k, self.num_experts, self.norm_topk_prob = k, n_experts, renormalise

    def forward(
        self, hidden_states: Tokens
    ) -> tuple[Float[Tensor, "tokens experts"], Chosen, Int[Tensor, "tokens k"]]:
        """Logits, weights and experts of each token."""
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        logits = F.linear(hidden_states.to(wide), self.weight.to(wide))
        chosen = stable_topk(logits.detach(), self.top_k).indices
        weights = logits.softmax(dim=-1).gather(1, chosen)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights, chosen


class UpcycledExperts(nn.Module):
    """E networks in stacked tensors of the names and layout that transformers uses.

    Args:
        n_experts: E.
        width: D.
        hidden: H.
        activation: φ.
        gated: whether h(a) = φ(a_1) · a_2.
        bias: whether both maps have biases.
    """

    is_transposed, is_concatenated, has_post_expert_norm = False, True, False

    def __init__(
        self,
        n_experts: int,
        width: int,
        hidden: int,
        activation: nn.Module,
        *,
        gated: bool,
        bias: bool,
    ) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias = n_experts, gated, bias
        self.act_fn = activation
        self.first = "gate_up_proj" if gated else "up_proj"
        inner = 2 * hidden if gated else hidden
        self.register_parameter(self.first, nn.Parameter(torch.empty(n_experts, inner, width)))
        self.down_proj = nn.Parameter(torch.empty(n_experts, width, hidden))
        if bias:
            self.register_parameter(
                f"{self.first}_bias", nn.Parameter(torch.empty(n_experts, inner))
            )
            self.down_proj_bias = nn.Parameter(torch.empty(n_experts, width))

    def forward(
        self, hidden_states: Tokens, top_k_index: Int[Tensor, "tokens k"], top_k_weights: Chosen
    ) -> Tokens:
        """Σ_j w_j f_{i_j}(x)."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class UpcycledFFN(nn.Module):
    """Router and experts in the place of a dense network."""

    def __init__(self, gate: UpcycledRouter, experts: UpcycledExperts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(
        self, hidden_states: Float[Tensor, "*batch width"]
    ) -> Float[Tensor, "*batch width"]:
        """The mixture's output."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, chosen = self.gate(flat)
        return self.experts(flat, chosen, weights).view_as(hidden_states)
