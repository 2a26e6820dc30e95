"""Dispatch on an accelerator, where no number is read back: a fixed number of rows.

    y_t = Σ_{j < m} w_tj · g(W_out[e] h(W_in[e] x_t + b_in[e]) + b_out[e]),    e = e_tj

e_t1 < e_t2 < ... are the experts of token t whose weight is not zero, and m ("most") is how many of
them a token can have: k for top-k, k_max for smooth top-k, E without a bound. All T·m rows exist
whatever the data are; those beyond the experts of a token are padding, which stands behind the rows
of the last expert, is left out of the grouped products and masked wherever it would meet a result.
So the host never waits for a count, as it does for `nonzero` in `Slots`.

Without a bound the rows would fill the memory where T·E is large (`MOST_ELEMENTS`); there their
number is read once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["StaticRows", "can_group", "grouped_experts"]

MOST_ELEMENTS = 1 << 28
"""Elements of the widest rows without a bound beyond which their number is read back."""

Rows = Callable[[Tensor], Tensor]


class StaticRows(NamedTuple):
    """Rows of all tokens in order of expert, then token, with the padding last.

    Attributes:
        token: token of each row (R,).
        expert: expert of each row (R,).
        used: whether a row is no padding (R, 1).
        offsets: number of rows up to and including those of each expert (E,), int32.
        position: row of the j-th expert of each token (T, m); empty if the rows were counted.
        of_token: rows in order of token (R,); empty unless they were counted.
        starts: where the rows of each token start in `of_token` (T,); empty unless counted.
    """

    token: Int[Tensor, " rows"]
    expert: Int[Tensor, " rows"]
    used: Bool[Tensor, "rows 1"]
    offsets: Int[Tensor, " experts"]
    position: Int[Tensor, "tokens most"]
    of_token: Int[Tensor, " rows"]
    starts: Int[Tensor, " tokens"]

    @classmethod
    def of(cls, weights: Tensor, most: int | None, width: int) -> "StaticRows":
        """The rows of weights (T, E) for rows of at most `width` elements."""
        tokens, experts = weights.shape
        used = weights.detach() != 0
        if most is None or most >= experts:
            if tokens * experts * width > MOST_ELEMENTS:
                return cls._counted(used)
            columns = torch.arange(experts, device=used.device).expand(tokens, experts)
        else:
            unused = used.logical_not().to(torch.uint8)
            columns = unused.argsort(dim=1, stable=True)[:, :most]
        return cls._padded(used, columns)

    @classmethod
    def _padded(cls, used: Tensor, columns: Tensor) -> "StaticRows":
        """T·m rows, the j-th expert of token t being `columns[t, j]` or padding."""
        tokens, most = columns.shape
        n_experts = used.shape[1]
        key = torch.where(used.gather(1, columns), columns, n_experts).flatten()
        order = key.argsort(stable=True)
        numbers = torch.arange(tokens * most, device=used.device)
        position = torch.empty_like(order).scatter_(0, order, numbers).view(tokens, most)
        expert = columns.flatten().index_select(0, order)
        is_row = (key.index_select(0, order) < n_experts).unsqueeze(1)
        token = torch.div(order, most, rounding_mode="floor")
        counts = key.new_zeros(n_experts + 1).scatter_add_(0, key, torch.ones_like(key))
        offsets = counts[:-1].cumsum(0).to(torch.int32)
        none = order.new_empty(0)
        return cls(token, expert, is_row, offsets, position, none, none)

    @classmethod
    def _counted(cls, used: Tensor) -> "StaticRows":
        """As many rows as there are weights, which the host waits for once."""
        expert, token = used.T.nonzero().unbind(1)
        per_token = used.sum(dim=1)
        offsets = used.sum(dim=0).cumsum(0).to(torch.int32)
        is_row = torch.ones_like(token, dtype=torch.bool).unsqueeze(1)
        position = token.new_empty(len(used), 0)
        starts = per_token.cumsum(0) - per_token
        return cls(token, expert, is_row, offsets, position, token.argsort(stable=True), starts)

    def take(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "rows dim"]:
        """X of the token of each row."""
        if self.of_token.numel():
            return x.index_select(0, self.token)
        rows: Any = _TakeRows.apply(x, self.token, self.position, self.used)
        return rows

    def sum_by_token(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "tokens dim"]:
        """Σ over the rows of each token, in order of expert."""
        if self.of_token.numel():
            return F.embedding_bag(self.of_token, rows, self.starts, mode="sum")
        total: Any = _SumRows.apply(rows, self.token, self.position, self.used)
        return total

    def gate(self, weights: Float[Tensor, "tokens experts"]) -> Float[Tensor, "rows 1"]:
        """Weight of each row; 0 for padding."""
        flat = self.token * weights.shape[1] + self.expert
        return torch.where(self.used, weights.flatten().index_select(0, flat).unsqueeze(1), 0)

    def linear(
        self, rows: Float[Tensor, "rows inputs"], w: Tensor, b: Tensor | None
    ) -> Float[Tensor, "rows outputs"]:
        """W[e] r (+ b[e]) of each row, W of shape (E, outputs, inputs); padding is undefined."""
        out = F.grouped_mm(rows, w.mT, offs=self.offsets)
        if b is None:
            return out
        return out + torch.where(self.used, b.index_select(0, self.expert), 0)


class _TakeRows(torch.autograd.Function):
    """Gather tokens to rows; the gradient of a token sums its rows in order, without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, position: Tensor, used: Tensor) -> Tensor:
        """The rows."""
        ctx.save_for_backward(position, used)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the tokens."""
        return _sum_positions(grads[0], *ctx.saved_tensors), None, None, None


class _SumRows(torch.autograd.Function):
    """Sum rows by token; the gradient of a row is that of its token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, position: Tensor, used: Tensor) -> Tensor:
        """The sums."""
        ctx.save_for_backward(token)
        return _sum_positions(rows, position, used)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the rows."""
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None, None


def _sum_positions(rows: Tensor, position: Tensor, used: Tensor) -> Tensor:
    """Σ_j rows[position[t, j]], with padding, which may be no number, set to 0 first."""
    kept = torch.where(used, rows, 0)
    return kept.index_select(0, position.flatten()).unflatten(0, position.shape).sum(dim=1)


def can_group(x: Tensor, *maps: Tensor) -> bool:
    """Whether torch's grouped products take tensors of this device, dtype and alignment."""
    if x.device.type == "cpu" or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    aligned = 16 // x.dtype.itemsize
    return all(size % aligned == 0 for w in maps for size in w.shape[1:]) and x.shape[0] > 0


def grouped_experts(
    x: Float[Tensor, "tokens dim"],
    weights: Float[Tensor, "tokens experts"],
    w_in: Float[Tensor, "experts inner dim"],
    w_out: Float[Tensor, "experts dim hidden"],
    b_in: Float[Tensor, "experts inner"] | None,
    b_out: Float[Tensor, "experts dim"] | None = None,
    *,
    hidden: Rows,
    finish: Rows | None = None,
    most: int | None = None,
) -> Float[Tensor, "tokens dim"]:
    """Mixture output y (T, D); arguments as for `grouped_dispatch`, all of one dtype.

    `hidden` and `finish` work row by row and get padding too. `most` is the largest number of
    experts of a token, None for no bound; of a token with more the first ones are used.
    """
    rows = StaticRows.of(weights, most, max(w_in.shape[1], x.shape[1]))
    inner = hidden(rows.linear(rows.take(x), w_in, b_in)).to(x.dtype)
    gate = rows.gate(weights).to(x.dtype)
    if finish is None and b_out is None:  # the hidden row is narrower than the output
        return rows.sum_by_token(rows.linear(inner * gate, w_out, None))
    out = rows.linear(inner, w_out, b_out)
    return rows.sum_by_token((out if finish is None else finish(out)).to(x.dtype) * gate)
