"""Slots: the S = #{(t, e) : w_te ≠ 0} token copies that experts compute, in order of expert.

Slots run through the experts one after the other (suffix `_s`); their results go back to the tokens
as a sum over each token's own slots, in order of expert, whatever else is in the batch.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tieline.routing.buffers import take_buffer

__all__ = ["Slots"]

RUN_ELEMENTS = 1 << 17  # of a result that is summed at a time: half a megabyte of float32


class Slots(NamedTuple):
    """The S non-zero entries of the weights in order of expert, then token.

    Attributes:
        index_s: (3, S): expert and token of each slot, and the slots in order of token.
        counts: slots of each expert.
    """

    index_s: Tensor
    counts: list[int]

    @classmethod
    def of(cls, weights: Tensor) -> "Slots":
        """The slots of a weights matrix (T, E)."""
        # nonzero reads a transposed mask three times as fast as transposed floats, and a sort of
        # int32 keys is a third cheaper than one of int64
        expert_s, token_s = (weights != 0).T.nonzero().unbind(1)
        index_s = torch.stack([expert_s, token_s, token_s.int().argsort(stable=True)])
        return cls.again(index_s, weights.shape[1])

    @classmethod
    def again(cls, index_s: Tensor, n_experts: int) -> "Slots":
        """The same slots in the backward pass."""
        return cls(index_s, torch.bincount(index_s[0], minlength=n_experts).tolist())

    def gate(self, weights: Tensor) -> Tensor:
        """Weight of each slot (S, 1)."""
        return weights[self.index_s[1], self.index_s[0]].unsqueeze(1)

    def sum_by_token(self, rows_s: Tensor, n_tokens: int) -> Tensor:
        """Σ over the slots of each token, in order of expert (T, D).

        A run of tokens at a time where there are many: the fresh result of `embedding_bag` then
        stays in the cache, and the pages of the whole are those of the pool, not new ones.
        """
        width = rows_s.shape[1]
        if not rows_s.shape[0]:
            return rows_s.new_zeros(n_tokens, width)
        per_token = torch.bincount(self.index_s[1], minlength=n_tokens)
        starts = per_token.cumsum(0) - per_token
        if n_tokens * width <= RUN_ELEMENTS:
            return F.embedding_bag(self.index_s[2], rows_s, starts, mode="sum")
        out, run = take_buffer((n_tokens, width), rows_s), max(1, RUN_ELEMENTS // width)
        lows = [*starts[::run].tolist(), rows_s.shape[0]]
        for place, (low, high) in enumerate(pairwise(lows)):
            tokens = slice(place * run, (place + 1) * run)
            slots, bags = self.index_s[2, low:high], starts[tokens] - low
            out[tokens] = F.embedding_bag(slots, rows_s, bags, mode="sum")
        return out
