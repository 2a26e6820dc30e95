"""Send every token to the experts whose weight is not zero, and add their outputs up.

    y_t = Σ_{e : w_te ≠ 0} w_te · W_out[e] h(W_in[e] x_t + b_in[e])

Any weights matrix (T, E) will do, so a token may have any number of experts; none is dropped, and
the sum of a token runs over its own experts in order of their index whatever else is in the batch.

Two orders of the same S = #{(t, e) : w_te ≠ 0} token copies coexist: *slots* run through the
experts one after the other (suffix `_s`), tokens through the batch (suffix `_t`).

Each expert is a few products into buffers that are used again for the next; the gate weight scales
the hidden activation, which is narrower than the output; only the pre-activations are saved. The
gradient of all experts is one tensor: indexing `W[e]` under autograd would allocate one of full
size per expert.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.routing.activations import ACTIVATIONS, Activation
from tieline.routing.buffers import take_buffer

__all__ = ["dispatch"]


def dispatch(
    x: Float[Tensor, "tokens width"],
    weights: Float[Tensor, "tokens experts"],
    w_in: Float[Tensor, "experts branches_hidden width"],
    w_out: Float[Tensor, "experts width hidden"],
    b_in: Float[Tensor, "experts branches_hidden"] | None = None,
    *,
    activation: str = "swiglu",
) -> Float[Tensor, "tokens width"]:
    """Mixture output y (T, D) of the experts with non-zero weight; first derivatives only.

    Differentiable in every tensor argument; where a weight is zero its gradient is zero too, since
    that expert is not evaluated. Under autocast the products run in the autocast dtype.

    Args:
        x: tokens (T, D).
        weights: combine weights (T, E), exact zeros where an expert is not used.
        w_in: input maps (E, B·H, D), B = 2 branches for gated activations, else 1.
        w_out: output maps (E, D, H).
        b_in: optional biases (E, B·H) of the input maps.
        activation: a key of `ACTIVATIONS`.
    """
    _check(x, weights, w_in, w_out, b_in, activation)
    dtype = _compute_dtype(x)
    x, w_in, w_out = x.to(dtype), w_in.to(dtype), w_out.to(dtype)
    b_in = None if b_in is None else b_in.to(dtype)
    keep = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weights, w_in, w_out, b_in)
    )
    y, _ = torch.ops.tieline.experts(x, weights.to(dtype), w_in, w_out, b_in, activation, keep)
    return y


def _compute_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _check(
    x: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None, activation: str
) -> None:
    require(activation in ACTIVATIONS, f"{activation=} is not one of {sorted(ACTIVATIONS)}")
    experts, width, hidden = w_out.shape
    rows = ACTIVATIONS[activation].branches * hidden
    require(x.shape[1] == width, f"tokens have width {x.shape[1]}, the experts {width}", ShapeError)
    require(
        tuple(weights.shape) == (x.shape[0], experts),
        f"weights must be (tokens, experts) = {(x.shape[0], experts)}, got {tuple(weights.shape)}",
        ShapeError,
    )
    require(
        tuple(w_in.shape) == (experts, rows, width),
        f"w_in must be {(experts, rows, width)} for {activation!r}, got {tuple(w_in.shape)}",
        ShapeError,
    )
    require(
        b_in is None or tuple(b_in.shape) == (experts, rows),
        f"b_in must be {(experts, rows)}, got {None if b_in is None else tuple(b_in.shape)}",
        ShapeError,
    )


class _Slots(NamedTuple):
    """The non-zero entries of the weights in order of expert, then token."""

    expert_s: Tensor
    token_s: Tensor
    counts: list[int]

    @classmethod
    def of(cls, weights: Tensor) -> "_Slots":
        expert_s, token_s = weights.detach().T.nonzero().unbind(1)
        return cls(expert_s, token_s, torch.bincount(expert_s, minlength=weights.shape[1]).tolist())

    def split(self, *columns: Tensor) -> list[tuple[Tensor, ...]]:
        return [column.split(self.counts) for column in columns]

    def sum_by_token(self, rows_s: Tensor, n_tokens: int) -> Tensor:
        """Σ over the slots of each token, in order of expert (T, D)."""
        if not len(self.token_s):
            return rows_s.new_zeros(n_tokens, rows_s.shape[1])
        order = self.token_s.argsort(stable=True)
        per_token = torch.bincount(self.token_s, minlength=n_tokens)
        return F.embedding_bag(order, rows_s, per_token.cumsum(0) - per_token, mode="sum")


def _by_branch(rows: Tensor, branches: int) -> Tensor:
    """One expert's block (n, B·H) of a slot buffer, laid out as B contiguous planes (B, n, H)."""
    return rows.view(branches, len(rows), -1)


def _project_in_(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
    """out[j] = x w[j]ᵀ (+ b[j]) for every branch j at once."""
    batched = x.expand(len(out), *x.shape)
    if b is None:
        torch.bmm(batched, w.mT, out=out)
    else:
        torch.baddbmm(b.unsqueeze(1), batched, w.mT, out=out)


def _planes(w: Tensor | None, branches: int, n: int) -> Iterator[Tensor | None]:
    """Per expert its input map (B, H, D) or bias (B, H); None for each where there is none."""
    if w is None:
        return iter([None] * n)
    return iter(w.unflatten(1, (branches, -1)).unbind(0))


@torch.library.custom_op("tieline::experts", mutates_args=())
def _experts(
    x: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Y (T, D), and the pre-activations (S, B·H) if `keep`, else an empty tensor."""
    act, slots = ACTIVATIONS[activation], _Slots.of(weights)
    largest, rows, hidden = max(slots.counts), w_in.shape[1], w_out.shape[2]
    n_slots = len(slots.token_s)
    pre_s = take_buffer((n_slots if keep else largest, rows), x)
    y_s = take_buffer((n_slots, x.shape[1]), x)
    x_e, h_e = x.new_empty(largest, x.shape[1]), x.new_empty(largest, hidden)
    gate_s = weights[slots.token_s, slots.expert_s].unsqueeze(1)
    token, gate, y_e = slots.split(slots.token_s, gate_s, y_s)
    pre = pre_s.split(slots.counts) if keep else [pre_s[:n] for n in slots.counts]
    maps, biases = _planes(w_in, act.branches, len(w_in)), _planes(b_in, act.branches, len(w_in))
    for e, (n, w, b) in enumerate(zip(slots.counts, maps, biases, strict=True)):
        if n:
            a, h = _by_branch(pre[e], act.branches), h_e[:n]
            torch.index_select(x, 0, token[e], out=x_e[:n])
            _project_in_(x_e[:n], w, b, a)  # type: ignore[arg-type]
            act.forward_(a, h)
            torch.mm(h.mul_(gate[e]), w_out[e].T, out=y_e[e])
    return slots.sum_by_token(y_s, len(x)), pre_s if keep else x.new_empty(0, rows)


@_experts.register_fake
def _experts_fake(x, weights, w_in, w_out, b_in, activation, keep):
    n_slots = torch.library.get_ctx().new_dynamic_size() if keep else 0
    return torch.empty_like(x), x.new_empty(n_slots, w_in.shape[1])


@torch.library.custom_op("tieline::experts_backward", mutates_args=())
def _experts_backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    pre_s: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients in x, weights, w_in, w_out and b_in (empty without a bias)."""
    act, slots = ACTIVATIONS[activation], _Slots.of(weights)
    grad_in, grad_out = take_buffer(tuple(w_in.shape), x), take_buffer(tuple(w_out.shape), x)
    grad_bias = x.new_empty(0) if b_in is None else torch.empty_like(b_in)
    grad_x_s = take_buffer((len(slots.token_s), x.shape[1]), x)
    gate_s = weights[slots.token_s, slots.expert_s].unsqueeze(1)
    grad_gate_s = torch.empty_like(gate_s)
    work = _Scratch.of(max(slots.counts), x.shape[1], w_out.shape[2], act.branches, x)
    columns = slots.split(slots.token_s, gate_s, pre_s, grad_gate_s, grad_x_s)
    maps, grad_maps = (_planes(w, act.branches, len(w_in)) for w in (w_in, grad_in))
    grad_biases = _planes(None if b_in is None else grad_bias, act.branches, len(w_in))
    per_expert = zip(slots.counts, maps, grad_maps, grad_biases, strict=True)
    for e, (n, w, grad_w, grad_b) in enumerate(per_expert):
        if n:
            token, gate, pre, grad_gate, grad_x = (column[e] for column in columns)
            rows = work.rows(n)
            torch.index_select(grad, 0, token, out=rows.grad)
            torch.index_select(x, 0, token, out=rows.x)
            _expert_backward(
                act, rows, _by_branch(pre, act.branches), gate, w_out[e], grad_out[e], grad_gate
            )
            _map_backward(rows, w, grad_w, grad_b, grad_x)  # type: ignore[arg-type]
        else:
            for unused in (grad_out[e], grad_w, grad_b):
                if unused is not None:
                    unused.zero_()
    grad_weights = torch.zeros_like(weights)
    grad_weights[slots.token_s, slots.expert_s] = grad_gate_s.squeeze(1)
    return slots.sum_by_token(grad_x_s, len(x)), grad_weights, grad_in, grad_out, grad_bias


class _Scratch(NamedTuple):
    """Buffers of one expert's rows, used again for the next expert."""

    x: Tensor
    grad: Tensor
    hidden: Tensor
    gate: Tensor
    grad_hidden: Tensor
    grad_pre: Tensor  # flat, so that its first n rows are B contiguous planes

    @classmethod
    def of(cls, n: int, width: int, hidden: int, branches: int, like: Tensor) -> "_Scratch":
        wide, narrow = (n, width), (n, hidden)
        shapes = (wide, wide, narrow, narrow, narrow, (n, branches * hidden))
        return cls(*(like.new_empty(shape) for shape in shapes))

    def rows(self, n: int) -> "_Scratch":
        return _Scratch(*(buffer[:n] for buffer in self))


def _expert_backward(
    act: Activation,
    rows: _Scratch,
    pre: Tensor,
    gate: Tensor,
    w_out: Tensor,
    grad_w_out: Tensor,
    grad_gate: Tensor,
) -> None:
    """From dL/dy of one expert's rows to dL/d(pre), with the gradients of gate and output map."""
    torch.mm(rows.grad, w_out, out=rows.grad_hidden)
    act.forward_with_gate_(pre, rows.hidden, rows.gate)
    grad_pre = _by_branch(rows.grad_pre, act.branches)
    product = torch.mul(rows.grad_hidden, rows.hidden, out=grad_pre[0])  # free until backward_
    torch.sum(product, dim=1, keepdim=True, out=grad_gate)
    torch.mm(rows.grad.T, rows.hidden.mul_(gate), out=grad_w_out)
    act.backward_(pre, rows.gate, rows.grad_hidden.mul_(gate), grad_pre)


def _map_backward(
    rows: _Scratch, w: Tensor, grad_w: Tensor, grad_b: Tensor | None, grad_x: Tensor
) -> None:
    """Gradients of the input map, its bias and the rows of x from dL/d(pre)."""
    grad_pre = _by_branch(rows.grad_pre, len(w))
    torch.bmm(grad_pre.mT, rows.x.expand(len(w), *rows.x.shape), out=grad_w)
    if grad_b is not None:
        torch.sum(grad_pre, dim=1, out=grad_b)
    torch.mm(grad_pre[0], w[0], out=grad_x)
    for plane, branch in zip(grad_pre[1:], w[1:], strict=True):
        grad_x.addmm_(plane, branch)


@_experts_backward.register_fake
def _experts_backward_fake(grad, x, weights, w_in, w_out, b_in, pre_s, activation):
    grads = [torch.empty_like(t) for t in (x, weights, w_in, w_out)]
    return (*grads, x.new_empty(0) if b_in is None else torch.empty_like(b_in))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.activation, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx, grad, _):
    *inputs, pre_s = ctx.saved_tensors
    grads = torch.ops.tieline.experts_backward(grad.contiguous(), *inputs, pre_s, ctx.activation)
    return (*grads[:4], grads[4] if inputs[4] is not None else None, None, None)


_experts.register_autograd(_backward, setup_context=_save)
