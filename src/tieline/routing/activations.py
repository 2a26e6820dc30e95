"""Activations of an expert and their derivatives, written into buffers that the caller owns.

    plain    h = φ(a)             a of shape (1, n, H)
    gated    h = φ(a_1) · a_2     a of shape (2, n, H), the halves contiguous

A strided half costs five times a contiguous one in elementwise operations, hence the leading axis.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["ACTIVATIONS", "Activation"]

Pre = Float[Tensor, "branches rows hidden"]
Hidden = Float[Tensor, "rows hidden"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """φ with its derivative, alone or gated by a second branch.

    Attributes:
        branches: 1 for h = φ(a), 2 for h = φ(a_1) · a_2.
        value: `value(a, out)` writes φ(a).
        backward: `backward(grad, a, out)` writes grad · φ'(a); `out` may be `grad`.
    """

    branches: int
    value: Callable[[Tensor, Tensor], object]
    backward: Callable[[Tensor, Tensor, Tensor], object]

    def forward_(self, pre: Pre, hidden: Hidden) -> None:
        """Write h(pre) into `hidden`."""
        self.value(pre[0], hidden)
        if self.branches == 2:
            hidden.mul_(pre[1])

    def forward_with_gate_(self, pre: Pre, hidden: Hidden, gate: Hidden) -> None:
        """Write h(pre) into `hidden` and, where gated, φ(a_1) into `gate` for `backward_`."""
        if self.branches == 1:
            self.value(pre[0], hidden)
        else:
            self.value(pre[0], gate)
            torch.mul(gate, pre[1], out=hidden)

    def backward_(self, pre: Pre, gate: Hidden, grad: Hidden, out: Pre) -> None:
        """Write dL/d(pre) into `out` from `grad` = dL/dh, which is used up."""
        if self.branches == 2:
            torch.mul(grad, gate, out=out[1])
            grad.mul_(pre[1])
        self.backward(grad, pre[0], out[0])


def _silu_backward(grad: Tensor, a: Tensor, out: Tensor) -> None:
    _aten.silu_backward.grad_input(grad, a, grad_input=out)


def _gelu_backward(grad: Tensor, a: Tensor, out: Tensor) -> None:
    _aten.gelu_backward.grad_input(grad, a, grad_input=out)


def _relu_backward(grad: Tensor, a: Tensor, out: Tensor) -> None:
    _aten.threshold_backward.grad_input(grad, a, 0, grad_input=out)


def _silu(a: Tensor, out: Tensor) -> None:
    _aten.silu.out(a, out=out)


def _gelu(a: Tensor, out: Tensor) -> None:
    _aten.gelu.out(a, out=out)


def _relu(a: Tensor, out: Tensor) -> None:
    torch.clamp_min(a, 0, out=out)


ACTIVATIONS = {
    "swiglu": Activation(2, _silu, _silu_backward),
    "geglu": Activation(2, _gelu, _gelu_backward),
    "relu": Activation(1, _relu, _relu_backward),
    "gelu": Activation(1, _gelu, _gelu_backward),
}
