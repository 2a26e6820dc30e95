"""Dispatch to experts with any function between and after their two maps, under autograd.

    y_t = Σ_{e : w_te ≠ 0} w_te · g(W_out[e] h(W_in[e] x_t + b_in[e]) + b_out[e])

`dispatch` knows h and its slope and is faster; here h and g are callables that get the rows of all
slots at once. As in `dispatch`, each map is one product per expert into one result, and the
gradient of all experts is one tensor.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.routing.buffers import take_buffer
from tieline.routing.dispatch import Slots, compute_dtype
from tieline.routing.static_rows import can_group, grouped_experts

__all__ = ["grouped_dispatch", "grouped_linear", "sum_by_token"]

Rows = Callable[[Tensor], Tensor]


def grouped_dispatch(
    x: Float[Tensor, "tokens dim"],
    weights: Float[Tensor, "tokens experts"],
    w_in: Float[Tensor, "experts inner dim"],
    w_out: Float[Tensor, "experts dim hidden"],
    b_in: Float[Tensor, "experts inner"] | None = None,
    b_out: Float[Tensor, "experts dim"] | None = None,
    *,
    hidden: Rows,
    finish: Rows | None = None,
    most: int | None = None,
) -> Float[Tensor, "tokens dim"]:
    """Mixture output y (T, D) of the experts with non-zero weight, exact zeros for the others.

    The maps may have any strides. `hidden` is h, from rows of the input map (S, inner) to rows
    (S, hidden); `finish` is g, applied to the rows of the output map, such as a norm. `most` is the
    largest number of experts of a token, None for no bound; only accelerators use it.
    """
    dtype = compute_dtype(x)
    x, w_in, w_out = x.to(dtype), w_in.to(dtype), w_out.to(dtype)
    b_in, b_out = (None if b is None else b.to(dtype) for b in (b_in, b_out))
    if can_group(x, w_in, w_out):
        return grouped_experts(
            x, weights, w_in, w_out, b_in, b_out, hidden=hidden, finish=finish, most=most
        )
    index_s = Slots.of(weights.detach()).index_s
    expert_s, token_s = index_s[0], index_s[1]
    rows = grouped_linear(x.index_select(0, token_s), w_in, b_in, expert_s)
    rows = grouped_linear(hidden(rows).to(dtype), w_out, b_out, expert_s)
    rows = rows if finish is None else finish(rows)
    rows = (rows * weights[token_s, expert_s].unsqueeze(1)).to(dtype)
    return sum_by_token(rows, index_s, x.shape[0])


def grouped_linear(
    rows: Float[Tensor, "slots inputs"],
    w: Float[Tensor, "experts outputs inputs"],
    b: Float[Tensor, "experts outputs"] | None,
    expert_s: Int[Tensor, " slots"],
) -> Float[Tensor, "slots outputs"]:
    """W[e_s] r_s (+ b[e_s]) for every slot s, where slots are in order of expert."""
    return torch.ops.tieline.grouped_linear(rows, w, b, expert_s)


def sum_by_token(
    rows: Float[Tensor, "slots dim"], index_s: Int[Tensor, "3 slots"], n_tokens: int
) -> Float[Tensor, "tokens dim"]:
    """Σ over the slots of each token, in order of expert; `index_s` is that of `Slots`."""
    return torch.ops.tieline.sum_by_token(rows, index_s, n_tokens)


def _slots_per_expert(expert_s: Tensor, n_experts: int) -> list[int]:
    """Number of slots of each expert."""
    return torch.bincount(expert_s, minlength=n_experts).tolist()


@torch.library.custom_op("tieline::grouped_linear", mutates_args=())
def _grouped_linear_op(rows: Tensor, w: Tensor, b: Tensor | None, expert_s: Tensor) -> Tensor:
    counts, out = _slots_per_expert(expert_s, len(w)), take_buffer((len(rows), w.shape[1]), rows)
    biases = [None] * len(w) if b is None else b.unbind(0)
    for n, x_e, y_e, w_e, b_e in zip(
        counts, rows.split(counts), out.split(counts), w.unbind(0), biases, strict=True
    ):
        if not n:
            continue
        if b_e is None:
            torch.mm(x_e, w_e.T, out=y_e)
        else:
            torch.addmm(b_e, x_e, w_e.T, out=y_e)
    return out


@_grouped_linear_op.register_fake
def _fake_linear(rows, w, b, expert_s):
    return rows.new_empty(rows.shape[0], w.shape[1])


@torch.library.custom_op("tieline::grouped_linear_backward", mutates_args=())
def _linear_backward(
    grad: Tensor, rows: Tensor, w: Tensor, expert_s: Tensor, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in the rows, the maps, and the biases (empty without)."""
    counts = _slots_per_expert(expert_s, len(w))
    grad_rows, grad_w = take_buffer(tuple(rows.shape), rows), take_buffer(tuple(w.shape), rows)
    grad_b = rows.new_zeros(w.shape[:2] if bias else 0)
    slices = [tensor.split(counts) for tensor in (grad, rows, grad_rows)]
    for e, (n, grad_e, x_e, grad_x_e) in enumerate(zip(counts, *slices, strict=True)):
        if not n:
            grad_w[e].zero_()
            continue
        torch.mm(grad_e, w[e], out=grad_x_e)
        torch.mm(grad_e.T, x_e, out=grad_w[e])
        if bias:
            torch.sum(grad_e, dim=0, out=grad_b[e])
    return grad_rows, grad_w, grad_b


@_linear_backward.register_fake
def _linear_backward_fake(grad, rows, w, expert_s, bias):
    grad_b = rows.new_empty(w.shape[:2] if bias else 0)
    return rows.new_empty(rows.shape), rows.new_empty(w.shape), grad_b


def _save_linear(ctx, inputs, output) -> None:
    rows, w, b, expert_s = inputs
    ctx.bias = b is not None
    ctx.save_for_backward(rows, w, expert_s)


def _backward_of_linear(ctx, grad):
    grads = torch.ops.tieline.grouped_linear_backward(
        grad.contiguous(), *ctx.saved_tensors, ctx.bias
    )
    return grads[0], grads[1], grads[2] if ctx.bias else None, None


_grouped_linear_op.register_autograd(_backward_of_linear, setup_context=_save_linear)


@torch.library.custom_op("tieline::sum_by_token", mutates_args=())
def _sum_by_token_op(rows: Tensor, index_s: Tensor, n_tokens: int) -> Tensor:
    return Slots(index_s, []).sum_by_token(rows.contiguous(), n_tokens)


@_sum_by_token_op.register_fake
def _fake_sum(rows, index_s, n_tokens):
    return rows.new_empty(n_tokens, rows.shape[1])


def _save_sum(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])


def _backward_of_sum(ctx, grad):
    return grad.index_select(0, ctx.saved_tensors[0][1]), None, None


_sum_by_token_op.register_autograd(_backward_of_sum, setup_context=_save_sum)
