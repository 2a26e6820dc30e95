"""Send every token to the experts whose weight is not zero, and add up their outputs.

    y_t = Σ_{e : w_te ≠ 0} w_te · W_out[e] h(W_in[e] x_t + b_in[e])

Any weights matrix (T, E) is accepted, so a token may have any number of experts; none is dropped,
and the sum of a token runs over its own experts in order of their index, whatever else is in the
batch. `Slots` are the S = #{(t, e) : w_te ≠ 0} token copies in order of expert (suffix `_s`).

Each expert is a few products into buffers that are reused for the next one. The gate weight scales
the hidden activation, which is narrower than the output. The gradient of all experts is one tensor:
indexing `W[e]` under autograd would allocate one of full size per expert.

`dispatch` knows h and its slope (`activations`). `grouped_dispatch` takes any function between and
after the two maps, under autograd, and is slower:

    y_t = Σ_{e : w_te ≠ 0} w_te · g(W_out[e] h(W_in[e] x_t + b_in[e]) + b_out[e])

On an accelerator no number is read back (`StaticRows`): a token has at most m ("most") experts, k
for top-k, k_max for smooth top-k, E without a bound, and all T·m rows exist whatever the data are.
Those beyond the experts of a token are padding, which stands behind the rows of the last expert, is
left out of the grouped products and masked wherever it would meet a result. Without a bound the
rows would fill the memory where T·E is large (`MAX_STATIC_ELEMENTS`); then the host reads their
number once.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.routing.activations import ACTIVATIONS, Activation
from tieline.routing.buffer_pool import take_buffer

__all__ = ["Slots", "dispatch", "grouped_dispatch", "grouped_linear"]

RUN_ELEMENTS = 1 << 17
"""Elements of a result that are summed in one run: half a megabyte of float32."""

Rows = Callable[[Tensor], Tensor]


class Slots(NamedTuple):
    """The S non-zero entries of the weights in order of expert, then token.

    Attributes:
        index_s: (3, S): expert and token of each slot, and the slots in order of token.
        counts: slots of each expert.
    """

    index_s: Tensor
    counts: list[int]

    @classmethod
    def from_weights(cls, weights: Tensor) -> "Slots":
        """Return the slots of a weights matrix (T, E)."""
        # nonzero reads a transposed mask three times as fast as transposed floats, and a sort of
        # int32 keys is a third cheaper than one of int64
        expert_s, token_s = (weights != 0).T.nonzero().unbind(1)
        index_s = torch.stack([expert_s, token_s, token_s.int().argsort(stable=True)])
        return cls.from_index(index_s, weights.shape[1])

    @classmethod
    def from_index(cls, index_s: Tensor, n_experts: int) -> "Slots":
        """Return the slots of an index (3, S); used in the backward pass."""
        return cls(index_s, torch.bincount(index_s[0], minlength=n_experts).tolist())

    def gate(self, weights: Tensor) -> Tensor:
        """Return the weight of each slot (S, 1)."""
        return weights[self.index_s[1], self.index_s[0]].unsqueeze(1)

    def sum_by_token(self, rows_s: Tensor, n_tokens: int) -> Tensor:
        """Return the sum over the slots of each token, in order of expert (T, D).

        Many tokens are summed in runs, so that the result of each `embedding_bag` stays in the
        cache and the full output comes from the buffer pool.
        """
        dim = rows_s.shape[1]
        if not rows_s.shape[0]:
            return rows_s.new_zeros(n_tokens, dim)
        per_token = torch.bincount(self.index_s[1], minlength=n_tokens)
        starts = per_token.cumsum(0) - per_token
        if n_tokens * dim <= RUN_ELEMENTS:
            return F.embedding_bag(self.index_s[2], rows_s, starts, mode="sum")
        out, run = take_buffer((n_tokens, dim), rows_s), max(1, RUN_ELEMENTS // dim)
        lows = [*starts[::run].tolist(), rows_s.shape[0]]
        for block, (low, high) in enumerate(pairwise(lows)):
            tokens = slice(block * run, (block + 1) * run)
            slots, bags = self.index_s[2, low:high], starts[tokens] - low
            out[tokens] = F.embedding_bag(slots, rows_s, bags, mode="sum")
        return out


def dispatch(
    x: Float[Tensor, "tokens dim"],
    weights: Float[Tensor, "tokens experts"],
    w_in: Float[Tensor, "experts branches_hidden dim"],
    w_out: Float[Tensor, "experts dim hidden"],
    b_in: Float[Tensor, "experts branches_hidden"] | None = None,
    *,
    activation: str = "swiglu",
    most: int | None = None,
) -> Float[Tensor, "tokens dim"]:
    """Return the mixture output y (T, D) of the experts with non-zero weight.

    Differentiable once in every tensor argument; a zero weight has a zero gradient, since its
    expert is not evaluated. Under autocast the products run in the autocast dtype.

    Args:
        x: tokens (T, D).
        weights: combine weights (T, E), exact zeros where an expert is not used.
        w_in: input maps (E, B·H, D), B = 2 branches for gated activations, else 1.
        w_out: output maps (E, D, H).
        b_in: optional biases (E, B·H) of the input maps.
        activation: a key of `ACTIVATIONS`.
        most: largest number of experts per token, None for no bound; saves memory on accelerators
            (`StaticRows`) and is not used on the CPU.
    """
    _check_dispatch_shapes(x, weights, w_in, w_out, b_in, activation)
    dtype = _product_dtype(x)
    x, w_in, w_out = x.to(dtype), w_in.to(dtype), w_out.to(dtype)
    b_in = None if b_in is None else b_in.to(dtype)
    if can_group(x, w_in, w_out):
        hidden = ACTIVATIONS[activation].hidden_rows
        return grouped_experts(x, weights, w_in, w_out, b_in, hidden=hidden, most=most)
    keep = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weights, w_in, w_out, b_in)
    )
    return torch.ops.tieline.experts(x, weights.to(dtype), w_in, w_out, b_in, activation, keep)[0]


def _product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the products: that of autocast if enabled, else that of the tokens."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _check_dispatch_shapes(
    x: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None, activation: str
) -> None:
    """Raise unless tokens, weights and maps fit each other and the activation."""
    require(activation in ACTIVATIONS, f"{activation=} is not one of {sorted(ACTIVATIONS)}")
    experts, dim, hidden = w_out.shape
    rows = ACTIVATIONS[activation].branches * hidden
    require(x.shape[1] == dim, f"tokens have dimension {x.shape[1]}, the experts {dim}", ShapeError)
    require(
        tuple(weights.shape) == (x.shape[0], experts),
        f"weights must be (tokens, experts) = {(x.shape[0], experts)}, got {tuple(weights.shape)}",
        ShapeError,
    )
    require(
        tuple(w_in.shape) == (experts, rows, dim),
        f"w_in must be {(experts, rows, dim)} for {activation!r}, got {tuple(w_in.shape)}",
        ShapeError,
    )
    require(
        b_in is None or tuple(b_in.shape) == (experts, rows),
        f"b_in must be {(experts, rows)}, got {None if b_in is None else tuple(b_in.shape)}",
        ShapeError,
    )


def _split_by_expert(w: Tensor | None, branches: int, n_experts: int) -> tuple[Tensor | None, ...]:
    """Split maps into one (B, H, D), or biases into one (B, H), per expert; None without w."""
    return (None,) * n_experts if w is None else w.unflatten(1, (branches, -1)).unbind(0)


def _apply_input_map_(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
    """Write x w[j]ᵀ (+ b[j]) into out[j], for every branch j."""
    batched = x.expand(out.shape[0], -1, -1)
    if b is None:
        torch.bmm(batched, w.mT, out=out)
    else:
        torch.baddbmm(b.unsqueeze(1), batched, w.mT, out=out)


@torch.library.custom_op("tieline::experts", mutates_args=())
def _experts_op(
    x: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (T, D) and, if `keep`, the saved activations and slots (3, S) for the backward."""
    act, slots = ACTIVATIONS[activation], Slots.from_weights(weights)
    counts, n_slots, largest = slots.counts, slots.index_s.shape[1], max(slots.counts)
    y_s = take_buffer((n_slots, x.shape[1]), x)
    planes = (act.branches + 1) * w_out.shape[2]
    kept_s = take_buffer((n_slots if keep else largest, planes), x)
    kept = kept_s.split(counts) if keep else [kept_s[:n] for n in counts]
    columns = [c.split(counts) for c in (slots.index_s[1], slots.gate(weights), y_s)]
    x_e, h_e = x.new_empty(largest, x.shape[1]), x.new_empty(largest, w_out.shape[2])
    maps = [_split_by_expert(w, act.branches, len(counts)) for w in (w_in, b_in)]
    experts = zip(counts, kept, *columns, *maps, w_out.mT.unbind(0), strict=True)
    for n, kept_e, token, gate, y_e, w, b, w_out_t in experts:
        if n:
            rows, h, a = x_e[:n], h_e[:n], kept_e.view(-1, n, w_out.shape[2])
            pre, slope = a[:-1], a[-1]
            torch.index_select(x, 0, token, out=rows)
            _apply_input_map_(rows, w, b, pre)  # type: ignore[arg-type]
            act.forward_for_backward_(pre, slope, h) if keep else act.forward_(pre, h)
            torch.mm(h.mul_(gate), w_out_t, out=y_e)
    y = slots.sum_by_token(y_s, x.shape[0])
    if keep:
        return y, kept_s, slots.index_s
    return y, x.new_empty(0, planes), slots.index_s.new_empty(3, 0)


@_experts_op.register_fake
def _experts_fake(x, weights, w_in, w_out, b_in, activation, keep):
    """Return the shapes of the results of `_experts_op`, for compilers."""
    n_slots = torch.library.get_ctx().new_dynamic_size() if keep else 0
    index_s = weights.new_empty((3, n_slots), dtype=torch.int64)
    kept_s = x.new_empty(n_slots, w_in.shape[1] + w_out.shape[2])
    return torch.empty_like(x), kept_s, index_s


@torch.library.custom_op("tieline::experts_backward", mutates_args=())
def _experts_backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    kept_s: Tensor,
    index_s: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients in x, weights, w_in, w_out and b_in (empty without a bias)."""
    act, slots = ACTIVATIONS[activation], Slots.from_index(index_s, w_in.shape[0])
    counts, gate_s = slots.counts, slots.gate(weights)
    grads = _ExpertGradients.allocate(x, gate_s, w_in, w_out, b_in)
    work = _ExpertScratch.allocate(max(counts), x.shape[1], w_out.shape[2], act.branches, x)
    columns = [c.split(counts) for c in (index_s[1], gate_s, kept_s, grads.gate_s, grads.x_s)]
    biases = grads.b_in if b_in is not None else None
    maps = [_split_by_expert(w, act.branches, len(counts)) for w in (w_in, grads.w_in, biases)]
    experts = zip(counts, *columns, *maps, w_out.unbind(0), grads.w_out.unbind(0), strict=True)
    for e, expert in enumerate(experts):
        n, token, gate, kept, grad_gate, grad_x, w, grad_w, grad_b, w_o, grad_w_o = expert
        if n:
            rows, kept = work.rows(n), kept.view(-1, n, w_out.shape[2])
            torch.index_select(grad, 0, token, out=rows.grad)
            torch.index_select(x, 0, token, out=rows.x)
            _output_backward(act, rows, kept, gate, w_o, grad_w_o, grad_gate)
            _input_backward(rows, w, grad_w, grad_b, grad_x)  # type: ignore[arg-type]
        else:
            grads.zero_expert(e)
    grad_weights = torch.zeros_like(weights)
    grad_weights[index_s[1], index_s[0]] = grads.gate_s.squeeze(1)
    grad_x = slots.sum_by_token(grads.x_s, x.shape[0])
    return grad_x, grad_weights, grads.w_in, grads.w_out, grads.b_in


class _ExpertGradients(NamedTuple):
    """Gradients of the backward pass: per slot for tokens and gate, per expert for parameters."""

    x_s: Tensor
    gate_s: Tensor
    w_in: Tensor
    w_out: Tensor
    b_in: Tensor  # empty without a bias

    @classmethod
    def allocate(
        cls, x: Tensor, gate_s: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None
    ) -> "_ExpertGradients":
        """Allocate uninitialised gradients of these tensors."""
        x_s = take_buffer((gate_s.shape[0], x.shape[1]), x)
        grad_in, grad_out = (take_buffer(tuple(w.shape), x) for w in (w_in, w_out))
        bias = x.new_empty(0) if b_in is None else torch.empty_like(b_in)
        return cls(x_s, torch.empty_like(gate_s), grad_in, grad_out, bias)

    def zero_expert(self, e: int) -> None:
        """Zero the gradients of an expert without a slot."""
        for per_expert in (self.w_in, self.w_out, self.b_in):
            if per_expert.numel():
                per_expert[e].zero_()


class _ExpertScratch(NamedTuple):
    """Buffers of one expert's rows, reused for the next expert."""

    x: Tensor
    grad: Tensor
    hidden: Tensor
    grad_hidden: Tensor
    grad_pre: Tensor  # (B, n, H), contiguous

    @classmethod
    def allocate(
        cls, n: int, dim: int, hidden: int, branches: int, like: Tensor
    ) -> "_ExpertScratch":
        """Allocate buffers for up to n rows, of the dtype and device of `like`."""
        sizes = (dim, dim, hidden, hidden, branches * hidden)
        return cls(*(like.new_empty(n, columns) for columns in sizes))

    def rows(self, n: int) -> "_ExpertScratch":
        """Return the first n rows of each buffer."""
        x, grad, hidden, grad_hidden, grad_pre = self
        planes = grad_pre[:n].view(-1, n, hidden.shape[1])
        return _ExpertScratch(x[:n], grad[:n], hidden[:n], grad_hidden[:n], planes)


def _output_backward(
    act: Activation,
    rows: _ExpertScratch,
    kept: Tensor,
    gate: Tensor,
    w_out: Tensor,
    grad_w_out: Tensor,
    grad_gate: Tensor,
) -> None:
    """Write the gradients in the pre-activation, the gate and the output map of one expert."""
    hidden, grad_hidden, pre = rows.hidden, rows.grad_hidden, kept[:-1]
    torch.mm(rows.grad, w_out, out=grad_hidden)
    act.hidden_from_kept_(pre, hidden)
    product = torch.mul(grad_hidden, hidden, out=rows.grad_pre[0])  # free until backward_
    torch.sum(product, dim=1, keepdim=True, out=grad_gate)
    torch.mm(rows.grad.T, hidden.mul_(gate), out=grad_w_out)
    act.backward_(pre, kept[-1], grad_hidden.mul_(gate), rows.grad_pre)


def _input_backward(
    rows: _ExpertScratch, w: Tensor, grad_w: Tensor, grad_b: Tensor | None, grad_x: Tensor
) -> None:
    """Write the gradients in the input map, its bias and the rows of x from dL/d(pre)."""
    branches = w.shape[0]
    torch.bmm(rows.grad_pre.mT, rows.x.expand(branches, -1, -1), out=grad_w)
    if grad_b is not None:
        torch.sum(rows.grad_pre, dim=1, out=grad_b)
    torch.mm(rows.grad_pre[0], w[0], out=grad_x)
    for j in range(1, branches):
        grad_x.addmm_(rows.grad_pre[j], w[j])


@_experts_backward.register_fake
def _experts_backward_fake(grad, x, weights, w_in, w_out, b_in, kept_s, index_s, activation):
    """Return the shapes of the gradients of the experts, for compilers."""
    grads = [torch.empty_like(t) for t in (x, weights, w_in, w_out)]
    return (*grads, x.new_empty(0) if b_in is None else torch.empty_like(b_in))


def _save_experts(ctx, inputs, output) -> None:
    """Save the inputs of `_experts_op` and its outputs for the backward pass."""
    *tensors, ctx.activation, _ = inputs
    ctx.set_materialize_grads(False)  # else saved outputs would get full-size zero gradients
    ctx.save_for_backward(*tensors, *output[1:])


def _backward_of_experts(ctx, grad, *_):
    """Return the gradients of the inputs of `_experts_op`; None for non-tensors."""
    if grad is None:  # y was not used
        return (None,) * 7
    inputs = ctx.saved_tensors
    grads = torch.ops.tieline.experts_backward(grad.contiguous(), *inputs, ctx.activation)
    return (*grads[:4], None if inputs[4] is None else grads[4], None, None)


_experts_op.register_autograd(_backward_of_experts, setup_context=_save_experts)


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
    """Return y (T, D) of the experts with non-zero weight, with any functions h and g.

    The maps may have any strides. `hidden` is h, which maps rows of the input map (S, inner) to
    rows (S, hidden); `finish` is g, applied to the rows of the output map, such as a norm. `most`
    is the largest number of experts per token, None for no bound; only accelerators use it.
    """
    dtype = _product_dtype(x)
    x, w_in, w_out = x.to(dtype), w_in.to(dtype), w_out.to(dtype)
    b_in, b_out = (None if b is None else b.to(dtype) for b in (b_in, b_out))
    if can_group(x, w_in, w_out):
        return grouped_experts(
            x, weights, w_in, w_out, b_in, b_out, hidden=hidden, finish=finish, most=most
        )
    index_s = Slots.from_weights(weights.detach()).index_s
    expert_s, token_s = index_s[0], index_s[1]
    rows = grouped_linear(x.index_select(0, token_s), w_in, b_in, expert_s)
    rows = grouped_linear(hidden(rows).to(dtype), w_out, b_out, expert_s)
    rows = rows if finish is None else finish(rows)
    rows = (rows * weights[token_s, expert_s].unsqueeze(1)).to(dtype)
    return torch.ops.tieline.sum_by_token(rows, index_s, x.shape[0])


def grouped_linear(
    rows: Float[Tensor, "slots inputs"],
    w: Float[Tensor, "experts outputs inputs"],
    b: Float[Tensor, "experts outputs"] | None,
    expert_s: Int[Tensor, " slots"],
) -> Float[Tensor, "slots outputs"]:
    """Return W[e_s] r_s (+ b[e_s]) for every slot s; slots must be in order of expert."""
    return torch.ops.tieline.grouped_linear(rows, w, b, expert_s)


@torch.library.custom_op("tieline::grouped_linear", mutates_args=())
def _grouped_linear_op(rows: Tensor, w: Tensor, b: Tensor | None, expert_s: Tensor) -> Tensor:
    """Compute `grouped_linear` with one product per expert, opaque to compilers."""
    counts = torch.bincount(expert_s, minlength=len(w)).tolist()
    out = take_buffer((len(rows), w.shape[1]), rows)
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
def _grouped_linear_fake(rows, w, b, expert_s):
    """Return the shape of the result of `grouped_linear`, for compilers."""
    return rows.new_empty(rows.shape[0], w.shape[1])


@torch.library.custom_op("tieline::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad: Tensor, rows: Tensor, w: Tensor, expert_s: Tensor, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in the rows, the maps and the biases (empty without biases)."""
    counts = torch.bincount(expert_s, minlength=len(w)).tolist()
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


@_grouped_linear_backward.register_fake
def _grouped_linear_backward_fake(grad, rows, w, expert_s, bias):
    """Return the shapes of the gradients of `grouped_linear`, for compilers."""
    grad_b = rows.new_empty(w.shape[:2] if bias else 0)
    return rows.new_empty(rows.shape), rows.new_empty(w.shape), grad_b


def _save_grouped_linear(ctx, inputs, output) -> None:
    """Save rows, maps and experts of the slots for the backward pass."""
    rows, w, b, expert_s = inputs
    ctx.bias = b is not None
    ctx.save_for_backward(rows, w, expert_s)


def _backward_of_grouped_linear(ctx, grad):
    """Return the gradients of rows, maps and biases of `grouped_linear`."""
    grads = torch.ops.tieline.grouped_linear_backward(
        grad.contiguous(), *ctx.saved_tensors, ctx.bias
    )
    return grads[0], grads[1], grads[2] if ctx.bias else None, None


_grouped_linear_op.register_autograd(
    _backward_of_grouped_linear, setup_context=_save_grouped_linear
)


@torch.library.custom_op("tieline::sum_by_token", mutates_args=())
def _sum_by_token_op(rows: Tensor, index_s: Tensor, n_tokens: int) -> Tensor:
    """Sum the slots of each token, in order of expert; `index_s` as in `Slots`."""
    return Slots(index_s, []).sum_by_token(rows.contiguous(), n_tokens)


@_sum_by_token_op.register_fake
def _sum_by_token_fake(rows, index_s, n_tokens):
    """Return the shape of the sums, for compilers."""
    return rows.new_empty(n_tokens, rows.shape[1])


def _save_sum_by_token(ctx, inputs, output) -> None:
    """Save the token of each slot for the backward pass."""
    ctx.save_for_backward(inputs[1])


def _backward_of_sum_by_token(ctx, grad):
    """Return the gradient of each slot: that of its token."""
    return grad.index_select(0, ctx.saved_tensors[0][1]), None, None


_sum_by_token_op.register_autograd(_backward_of_sum_by_token, setup_context=_save_sum_by_token)

MAX_STATIC_ELEMENTS = 1 << 28
"""Largest T·E·width for unbounded rows; for more, the number of rows is read back once."""


class StaticRows(NamedTuple):
    """Rows (token copies) in order of expert, then token, with the padding last.

    Attributes:
        token: token of each row (R,).
        expert: expert of each row (R,).
        used: False for padding rows (R, 1).
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
    def from_weights(cls, weights: Tensor, most: int | None, width: int) -> "StaticRows":
        """Return the rows of weights (T, E); rows have at most `width` elements."""
        tokens, experts = weights.shape
        used = weights.detach() != 0
        if most is None or most >= experts:
            if tokens * experts * width > MAX_STATIC_ELEMENTS:
                return cls._counted(used)
            columns = torch.arange(experts, device=used.device).expand(tokens, experts)
        else:
            unused = used.logical_not().to(torch.uint8)
            columns = unused.argsort(dim=1, stable=True)[:, :most]
        return cls._padded(used, columns)

    @classmethod
    def _padded(cls, used: Tensor, columns: Tensor) -> "StaticRows":
        """Return T·m rows, the j-th expert of token t being `columns[t, j]` or padding."""
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
        """Return one row per non-zero weight; the host waits for their number once."""
        expert, token = used.T.nonzero().unbind(1)
        per_token = used.sum(dim=1)
        offsets = used.sum(dim=0).cumsum(0).to(torch.int32)
        is_row = torch.ones_like(token, dtype=torch.bool).unsqueeze(1)
        position = token.new_empty(len(used), 0)
        starts = per_token.cumsum(0) - per_token
        return cls(token, expert, is_row, offsets, position, token.argsort(stable=True), starts)

    def take(self, x: Float[Tensor, "tokens dim"]) -> Float[Tensor, "rows dim"]:
        """Return x of the token of each row."""
        if self.of_token.numel():
            return x.index_select(0, self.token)
        rows: Any = _TakeRows.apply(x, self.token, self.position, self.used)
        return rows

    def sum_by_token(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "tokens dim"]:
        """Return the sum over the rows of each token, in order of expert."""
        if self.of_token.numel():
            return F.embedding_bag(self.of_token, rows, self.starts, mode="sum")
        total: Any = _SumRows.apply(rows, self.token, self.position, self.used)
        return total

    def gate(self, weights: Float[Tensor, "tokens experts"]) -> Float[Tensor, "rows 1"]:
        """Return the weight of each row; 0 for padding."""
        flat = self.token * weights.shape[1] + self.expert
        return torch.where(self.used, weights.flatten().index_select(0, flat).unsqueeze(1), 0)

    def linear(
        self, rows: Float[Tensor, "rows inputs"], w: Tensor, b: Tensor | None
    ) -> Float[Tensor, "rows outputs"]:
        """Return W[e] r (+ b[e]) of each row, W (E, outputs, inputs); padding is undefined."""
        out = F.grouped_mm(rows, w.mT, offs=self.offsets)
        if b is None:
            return out
        return out + torch.where(self.used, b.index_select(0, self.expert), 0)


class _TakeRows(torch.autograd.Function):
    """Gather tokens into rows; the gradient of a token sums its rows in order, without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, position: Tensor, used: Tensor) -> Tensor:
        """Return x of the token of each row."""
        ctx.save_for_backward(position, used)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the tokens."""
        return _sum_positions(grads[0], *ctx.saved_tensors), None, None, None


class _SumRows(torch.autograd.Function):
    """Sum rows by token; the gradient of a row is that of its token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, position: Tensor, used: Tensor) -> Tensor:
        """Return the sum over the rows of each token."""
        ctx.save_for_backward(token)
        return _sum_positions(rows, position, used)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the rows."""
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None, None


def _sum_positions(rows: Tensor, position: Tensor, used: Tensor) -> Tensor:
    """Return Σ_j rows[position[t, j]]; padding rows, which may be NaN, count as 0."""
    kept = torch.where(used, rows, 0)
    return kept.index_select(0, position.flatten()).unflatten(0, position.shape).sum(dim=1)


def can_group(x: Tensor, *maps: Tensor) -> bool:
    """Return whether torch's grouped products support this device, dtype and alignment."""
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
    """Return y (T, D) by torch's grouped products; arguments as for `grouped_dispatch`.

    All tensors have one dtype. `hidden` and `finish` work row by row and receive padding rows too.
    `most` is the largest number of experts per token, None for no bound; if a token has more, the
    first ones are used.
    """
    rows = StaticRows.from_weights(weights, most, max(w_in.shape[1], x.shape[1]))
    inner = hidden(rows.linear(rows.take(x), w_in, b_in)).to(x.dtype)
    gate = rows.gate(weights).to(x.dtype)
    if finish is None and b_out is None:  # the hidden row is narrower than the output
        return rows.sum_by_token(rows.linear(inner * gate, w_out, None))
    out = rows.linear(inner, w_out, b_out)
    return rows.sum_by_token((out if finish is None else finish(out)).to(x.dtype) * gate)
