"""Send every token to the experts whose weight is not zero, and add up their outputs.

    y_t = Σ_{e : w_te ≠ 0} w_te · W_out[e] h(W_in[e] x_t + b_in[e])

Any weights matrix (T, E) is accepted, so a token may have any number of experts; none is dropped,
and the sum of a token runs over its own experts in order of their index, whatever else is in the
batch. `Slots` are the S = #{(t, e) : w_te ≠ 0} token copies in order of expert (suffix `_s`).

Each expert is a few products into buffers that are reused for the next one. The gate weight scales
the hidden activation, which is narrower than the output. The gradient of all experts is one tensor:
indexing `W[e]` under autograd would allocate one of full size per expert.

Activations are plain, h = φ(a) with a of shape (1, n, H), or gated, h = φ(a_1) · a_2 with a of
shape (2, n, H): elementwise operations on strided halves cost five times those on contiguous ones.
A pass that will be differentiated keeps φ and φ' instead of a: the exponential, which costs as much
as four products, is then taken once and not three times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.routing.buffers import take_buffer
from tieline.routing.static_rows import can_group, grouped_experts

__all__ = ["ACTIVATIONS", "Activation", "ActivationName", "Slots", "compute_dtype", "dispatch"]

RUN_ELEMENTS = 1 << 17
"""Elements of a result that are summed at a time: half a megabyte of float32."""

ActivationName = Literal["swiglu", "geglu", "relu", "gelu"]
Pre = Float[Tensor, "branches rows hidden"]
Hidden = Float[Tensor, "rows hidden"]

_aten = torch.ops.aten
_ONE = torch.tensor(1.0)  # a tensor without axes is a number to every device and dtype


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

        Many tokens are summed in runs: the fresh result of `embedding_bag` then stays in the cache,
        and the pages of the whole are those of the pool.
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


@dataclass(frozen=True)
class Activation:
    """φ with its derivative, alone or gated by a second branch.

    Attributes:
        branches: 1 for h = φ(a), 2 for h = φ(a_1) · a_2.
        function: φ, under autograd.
        value: `value(a, out)` writes φ(a).
        with_slope_: `with_slope_(a, slope, scratch)` turns a into φ(a) and writes φ'(a).
    """

    branches: int
    function: Callable[[Tensor], Tensor]
    value: Callable[[Tensor, Tensor], object]
    with_slope_: Callable[[Tensor, Tensor, Tensor], object]

    def hidden_rows(self, rows: Float[Tensor, "rows branches_hidden"]) -> Hidden:
        """The hidden rows h of input maps whose branches stand side by side, under autograd."""
        first, *second = rows.unflatten(1, (self.branches, -1)).unbind(1)
        return self.function(first) * second[0] if second else self.function(first)

    def forward_(self, pre: Pre, hidden: Hidden) -> None:
        """Write h(pre) into `hidden`."""
        self.value(pre[0], hidden)
        if self.branches == 2:
            hidden.mul_(pre[1])

    def forward_for_backward_(self, pre: Pre, slope: Hidden, hidden: Hidden) -> None:
        """Write h into `hidden`, φ' into `slope`, and φ over the first branch of `pre`."""
        self.with_slope_(pre[0], slope, hidden)
        self.again_(pre, hidden)

    def again_(self, kept: Pre, hidden: Hidden) -> None:
        """Write h into `hidden` from (φ,) or (φ, a_2)."""
        if self.branches == 2:
            torch.mul(kept[0], kept[1], out=hidden)
        else:
            hidden.copy_(kept[0])

    def backward_(self, kept: Pre, slope: Hidden, grad: Hidden, out: Pre) -> None:
        """Write dL/da into `out` from `grad` = dL/dh, which is used up."""
        if self.branches == 2:
            torch.mul(grad, kept[0], out=out[1])
            grad.mul_(kept[1])
        torch.mul(grad, slope, out=out[0])


def _silu(a: Tensor, out: Tensor) -> None:
    """Write a · sigmoid(a)."""
    _aten.silu.out(a, out=out)


def _silu_with_slope_(a: Tensor, slope: Tensor, scratch: Tensor) -> None:
    """With s the sigmoid of a and φ = a·s: φ' = s + φ·(1 - s).

    Not s - s·φ + φ, which loses the digits of s where φ is large: all of them for a = 300 in
    bfloat16. Here 1 - s is an exact zero there.
    """
    torch.sigmoid(a, out=slope)
    a.mul_(slope)
    torch.sub(_ONE, slope, out=scratch)
    slope.addcmul_(a, scratch)


def _gelu(a: Tensor, out: Tensor) -> None:
    """Write a · Φ(a)."""
    _aten.gelu.out(a, out=out)


def _gelu_with_slope_(a: Tensor, slope: Tensor, scratch: Tensor) -> None:
    """Turn a into its GELU and write the derivative."""
    _aten.gelu_backward.grad_input(scratch.fill_(1), a, grad_input=slope)
    _aten.gelu.out(a, out=a)


def _relu(a: Tensor, out: Tensor) -> None:
    """Write max(a, 0)."""
    torch.clamp_min(a, 0, out=out)


def _relu_with_slope_(a: Tensor, slope: Tensor, scratch: Tensor) -> None:
    """Turn a into max(a, 0) and write 1 where a > 0."""
    torch.gt(a, 0, out=slope)
    a.clamp_min_(0)


ACTIVATIONS = {
    "swiglu": Activation(2, F.silu, _silu, _silu_with_slope_),
    "geglu": Activation(2, F.gelu, _gelu, _gelu_with_slope_),
    "relu": Activation(1, F.relu, _relu, _relu_with_slope_),
    "gelu": Activation(1, F.gelu, _gelu, _gelu_with_slope_),
}


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
        most: largest number of experts of a token, None for no bound; it saves accelerators memory
            (`static_rows`) and is not used on the CPU.
    """
    _check_shapes(x, weights, w_in, w_out, b_in, activation)
    dtype = compute_dtype(x)
    x, w_in, w_out = x.to(dtype), w_in.to(dtype), w_out.to(dtype)
    b_in = None if b_in is None else b_in.to(dtype)
    if can_group(x, w_in, w_out):
        hidden = ACTIVATIONS[activation].hidden_rows
        return grouped_experts(x, weights, w_in, w_out, b_in, hidden=hidden, most=most)
    keep = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weights, w_in, w_out, b_in)
    )
    return torch.ops.tieline.experts(x, weights.to(dtype), w_in, w_out, b_in, activation, keep)[0]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the products: that of autocast if enabled, else that of the tokens."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _check_shapes(
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


def _by_expert(w: Tensor | None, branches: int, n_experts: int) -> tuple[Tensor | None, ...]:
    """Per expert its input map (B, H, D) or bias (B, H); None where there is none."""
    return (None,) * n_experts if w is None else w.unflatten(1, (branches, -1)).unbind(0)


def _project_in_(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> None:
    """out[j] = x w[j]ᵀ (+ b[j]) for every branch j at once."""
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
    """Y (T, D) and, for the backward pass if `keep`, what `Activation` keeps and slots (3, S)."""
    act, slots = ACTIVATIONS[activation], Slots.of(weights)
    counts, n_slots, largest = slots.counts, slots.index_s.shape[1], max(slots.counts)
    y_s = take_buffer((n_slots, x.shape[1]), x)
    planes = (act.branches + 1) * w_out.shape[2]
    kept_s = take_buffer((n_slots if keep else largest, planes), x)
    kept = kept_s.split(counts) if keep else [kept_s[:n] for n in counts]
    columns = [c.split(counts) for c in (slots.index_s[1], slots.gate(weights), y_s)]
    x_e, h_e = x.new_empty(largest, x.shape[1]), x.new_empty(largest, w_out.shape[2])
    maps = [_by_expert(w, act.branches, len(counts)) for w in (w_in, b_in)]
    experts = zip(counts, kept, *columns, *maps, w_out.mT.unbind(0), strict=True)
    for n, kept_e, token, gate, y_e, w, b, w_out_t in experts:
        if n:
            rows, h, a = x_e[:n], h_e[:n], kept_e.view(-1, n, w_out.shape[2])
            pre, slope = a[:-1], a[-1]
            torch.index_select(x, 0, token, out=rows)
            _project_in_(rows, w, b, pre)  # type: ignore[arg-type]
            act.forward_for_backward_(pre, slope, h) if keep else act.forward_(pre, h)
            torch.mm(h.mul_(gate), w_out_t, out=y_e)
    y = slots.sum_by_token(y_s, x.shape[0])
    if keep:
        return y, kept_s, slots.index_s
    return y, x.new_empty(0, planes), slots.index_s.new_empty(3, 0)


@_experts_op.register_fake
def _experts_fake(x, weights, w_in, w_out, b_in, activation, keep):
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
    """Gradients in x, weights, w_in, w_out and b_in (empty without a bias)."""
    act, slots = ACTIVATIONS[activation], Slots.again(index_s, w_in.shape[0])
    counts, gate_s = slots.counts, slots.gate(weights)
    grads = _Gradients.of(x, gate_s, w_in, w_out, b_in)
    work = _ExpertScratch.of(max(counts), x.shape[1], w_out.shape[2], act.branches, x)
    columns = [c.split(counts) for c in (index_s[1], gate_s, kept_s, grads.gate_s, grads.x_s)]
    biases = grads.b_in if b_in is not None else None
    maps = [_by_expert(w, act.branches, len(counts)) for w in (w_in, grads.w_in, biases)]
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


class _Gradients(NamedTuple):
    """Results of the backward pass: per slot for tokens and gate, per expert for parameters."""

    x_s: Tensor
    gate_s: Tensor
    w_in: Tensor
    w_out: Tensor
    b_in: Tensor  # empty without a bias

    @classmethod
    def of(
        cls, x: Tensor, gate_s: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None
    ) -> "_Gradients":
        x_s = take_buffer((gate_s.shape[0], x.shape[1]), x)
        grad_in, grad_out = (take_buffer(tuple(w.shape), x) for w in (w_in, w_out))
        bias = x.new_empty(0) if b_in is None else torch.empty_like(b_in)
        return cls(x_s, torch.empty_like(gate_s), grad_in, grad_out, bias)

    def zero_expert(self, e: int) -> None:
        """An expert without a slot has no gradient."""
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
    def of(cls, n: int, dim: int, hidden: int, branches: int, like: Tensor) -> "_ExpertScratch":
        sizes = (dim, dim, hidden, hidden, branches * hidden)
        return cls(*(like.new_empty(n, columns) for columns in sizes))

    def rows(self, n: int) -> "_ExpertScratch":
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
    """From dL/dy of one expert's rows to dL/d(pre), with the gradients of gate and output map."""
    hidden, grad_hidden, pre = rows.hidden, rows.grad_hidden, kept[:-1]
    torch.mm(rows.grad, w_out, out=grad_hidden)
    act.again_(pre, hidden)
    product = torch.mul(grad_hidden, hidden, out=rows.grad_pre[0])  # free until backward_
    torch.sum(product, dim=1, keepdim=True, out=grad_gate)
    torch.mm(rows.grad.T, hidden.mul_(gate), out=grad_w_out)
    act.backward_(pre, kept[-1], grad_hidden.mul_(gate), rows.grad_pre)


def _input_backward(
    rows: _ExpertScratch, w: Tensor, grad_w: Tensor, grad_b: Tensor | None, grad_x: Tensor
) -> None:
    """Gradients of the input map, its bias and the rows of x from dL/d(pre)."""
    branches = w.shape[0]
    torch.bmm(rows.grad_pre.mT, rows.x.expand(branches, -1, -1), out=grad_w)
    if grad_b is not None:
        torch.sum(rows.grad_pre, dim=1, out=grad_b)
    torch.mm(rows.grad_pre[0], w[0], out=grad_x)
    for j in range(1, branches):
        grad_x.addmm_(rows.grad_pre[j], w[j])


@_experts_backward.register_fake
def _experts_backward_fake(grad, x, weights, w_in, w_out, b_in, kept_s, index_s, activation):
    grads = [torch.empty_like(t) for t in (x, weights, w_in, w_out)]
    return (*grads, x.new_empty(0) if b_in is None else torch.empty_like(b_in))


def _save_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.activation, _ = inputs
    ctx.set_materialize_grads(False)  # or what is saved gets a gradient of zeros of its own size
    ctx.save_for_backward(*tensors, *output[1:])


def _backward_of_experts(ctx, grad, *_):
    if grad is None:  # nobody used y
        return (None,) * 7
    inputs = ctx.saved_tensors
    grads = torch.ops.tieline.experts_backward(grad.contiguous(), *inputs, ctx.activation)
    return (*grads[:4], None if inputs[4] is None else grads[4], None, None)


_experts_op.register_autograd(_backward_of_experts, setup_context=_save_for_backward)
