"""Activations of an expert and their derivatives, written into buffers that the caller owns.

    plain    h = φ(a)             a of shape (1, n, H)
    gated    h = φ(a_1) · a_2     a of shape (2, n, H), the halves contiguous

A strided half costs five times a contiguous one in elementwise operations, hence the leading axis.
The pass that will be differentiated keeps φ and φ' instead of a: the exponential, which costs as
much as four products, is then taken once and not three times.
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
_ONE = torch.tensor(1.0)  # a tensor of no axes is a number to every device and dtype


@dataclass(frozen=True)
class Activation:
    """φ with its derivative, alone or gated by a second branch.

    Attributes:
        branches: 1 for h = φ(a), 2 for h = φ(a_1) · a_2.
        value: `value(a, out)` writes φ(a).
        with_slope_: `with_slope_(a, slope, scratch)` turns a into φ(a) and writes φ'(a).
    """

    branches: int
    value: Callable[[Tensor, Tensor], object]
    with_slope_: Callable[[Tensor, Tensor, Tensor], object]

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
    _aten.gelu.out(a, out=out)


def _gelu_with_slope_(a: Tensor, slope: Tensor, scratch: Tensor) -> None:
    _aten.gelu_backward.grad_input(scratch.fill_(1), a, grad_input=slope)
    _aten.gelu.out(a, out=a)


def _relu(a: Tensor, out: Tensor) -> None:
    torch.clamp_min(a, 0, out=out)


def _relu_with_slope_(a: Tensor, slope: Tensor, scratch: Tensor) -> None:
    torch.gt(a, 0, out=slope)
    a.clamp_min_(0)


ACTIVATIONS = {
    "swiglu": Activation(2, _silu, _silu_with_slope_),
    "geglu": Activation(2, _gelu, _gelu_with_slope_),
    "relu": Activation(1, _relu, _relu_with_slope_),
    "gelu": Activation(1, _gelu, _gelu_with_slope_),
}
