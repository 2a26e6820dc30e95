"""Tokens travel to the ranks that own their experts, and the outputs travel back.

    y_t = Σ_r y_t^(r),    y_t^(r) = Σ_{e on rank r, w_te ≠ 0} w_te f_e(x_t)

A token is sent to a rank once, with its weights for the experts there, if any of these is not zero.
So the weights may be any matrix: a token may go to any number of ranks, a rank may send or receive
nothing, and no token is dropped or depends on another. Suffix `_s` is the order of sending (by
rank, then token), `_r` that of receiving (by sender, then its token).

`all_to_all_single` of gloo takes uneven and empty parts (torch 2.13), so there is one path for CPU
and accelerators. Its gradient is the same exchange the other way round.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["all_to_all", "spread_dispatch"]

Rows = Float[Tensor, "rows width"]


def spread_dispatch(
    x: Float[Tensor, "tokens width"],
    weights: Float[Tensor, "tokens experts"],
    own_experts: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
) -> Float[Tensor, "tokens width"]:
    """Mixture output (T, D) of this rank's tokens, with experts on all ranks of a group.

    Rank r owns experts r·c to r·c + c - 1, c = ⌈E / ranks⌉, as far as there are so many. Every rank
    of the group must call this, with as many tokens as it has.

    Args:
        x: tokens (T, D) of this rank.
        weights: their weights (T, E) for all experts.
        own_experts: (rows (N, D), weights (N, c)) → outputs (N, D) of the experts of this rank;
            columns of experts that it does not have are zero.
        group: the ranks that share the experts.
    """
    ranks = group.size()
    share = -(-weights.shape[1] // ranks)
    padded = F.pad(weights, (0, ranks * share - weights.shape[1])).unflatten(1, (ranks, share))
    wanted = (padded != 0).any(dim=2)
    rank_s, token_s = wanted.T.nonzero().unbind(1)
    sent = wanted.sum(dim=0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    there, back = (sent.tolist(), received.tolist()), (received.tolist(), sent.tolist())
    x_r = all_to_all(x[token_s], *there, group)
    weights_r = all_to_all(padded[token_s, rank_s], *there, group)
    y_s = all_to_all(own_experts(x_r, weights_r), *back, group)
    return y_s.new_zeros(x.shape).index_add(0, token_s, y_s)


def all_to_all(
    rows: Rows, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Float[Tensor, "received width"]:
    """Rows for each rank, in order of rank, become the rows from each rank; differentiable.

    Args:
        rows: `sum(sent)` rows.
        sent: how many of them go to each rank.
        received: how many come from each rank.
        group: the ranks; all of them must call this.
    """
    return _AllToAll.apply(rows, sent, received, group)  # type: ignore[return-value]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received, group):  # type: ignore[override]
        ctx.back = (received, sent, group)
        return _exchanged(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        return _exchanged(grad, *ctx.back), None, None, None


def _exchanged(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
