"""Activations of experts, alone or gated, with their slopes for the backward pass.

Activations are plain, h = φ(a) with a of shape (1, n, H), or gated, h = φ(a_1) · a_2 with a of
shape (2, n, H): elementwise operations on strided halves cost five times those on contiguous ones.
A pass that will be differentiated keeps φ and φ' instead of a: the exponential, which costs as much
as four products, is then taken once and not three times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

__all__ = ["ACTIVATIONS", "Activation", "ActivationName"]

ActivationName = Literal["swiglu", "geglu", "relu", "gelu"]
Pre = Float[Tensor, "branches rows hidden"]
Hidden = Float[Tensor, "rows hidden"]

_aten = torch.ops.aten
_ONE_CPU = torch.tensor(1.0, device="cpu")  # 0-d: combines with any device and dtype


@dataclass(frozen=True)
class Activation:
    """An activation φ with its derivative, alone or gated by a second branch.

    Attributes:
        branches: 1 for h = φ(a), 2 for h = φ(a_1) · a_2.
        function: φ, under autograd.
        value: `value(a, out=out)` writes φ(a).
        with_slope_: `with_slope_(a, slope, scratch)` turns a into φ(a) and writes φ'(a).
    """

    branches: int
    function: Callable[[Tensor], Tensor]
    value: Callable[..., object]
    with_slope_: Callable[[Tensor, Tensor, Tensor], object]

    def hidden_rows(self, rows: Float[Tensor, "rows branches_hidden"]) -> Hidden:
        """Return h (n, H) from input rows (n, B·H), branches side by side, under autograd."""
        first, *second = rows.unflatten(1, (self.branches, -1)).unbind(1)
        return self.function(first) * second[0] if second else self.function(first)

    def forward_(self, pre: Pre, hidden: Hidden) -> None:
        """Write h(pre) into `hidden`."""
        self.value(pre[0], out=hidden)
        if self.branches == 2:
            hidden.mul_(pre[1])

    def forward_for_backward_(self, pre: Pre, slope: Hidden, hidden: Hidden) -> None:
        """Write h into `hidden`, φ' into `slope`, and φ over the first branch of `pre`."""
        self.with_slope_(pre[0], slope, hidden)
        self.hidden_from_kept_(pre, hidden)

    def hidden_from_kept_(self, kept: Pre, hidden: Hidden) -> None:
        """Write h into `hidden` from the saved (φ,) or (φ, a_2)."""
        if self.branches == 2:
            torch.mul(kept[0], kept[1], out=hidden)
        else:
            hidden.copy_(kept[0])

    def backward_(self, kept: Pre, slope: Hidden, grad: Hidden, out: Pre) -> None:
        """Write dL/da into `out` from `grad` = dL/dh, which is overwritten."""
        if self.branches == 2:
            torch.mul(grad, kept[0], out=out[1])
            grad.mul_(kept[1])
        torch.mul(grad, slope, out=out[0])


def _silu_with_slope_(a: Tensor, slope: Tensor, scratch: Tensor) -> None:
    """Turn a into φ = a·s, s the sigmoid of a, and write φ' = s + φ·(1 - s).

    The form s - s·φ + φ would lose the digits of s where φ is large, all of them for a = 300 in
    bfloat16; here 1 - s is exactly zero there.
    """
    torch.sigmoid(a, out=slope)
    a.mul_(slope)
    torch.sub(_ONE_CPU, slope, out=scratch)
    slope.addcmul_(a, scratch)


def _gelu_with_slope_(a: Tensor, slope: Tensor, scratch: Tensor) -> None:
    """Turn a into its GELU and write the derivative."""
    _aten.gelu_backward.grad_input(scratch.fill_(1), a, grad_input=slope)
    _aten.gelu.out(a, out=a)


def _relu_with_slope_(a: Tensor, slope: Tensor, scratch: Tensor) -> None:
    """Turn a into max(a, 0) and write 1 where a > 0."""
    torch.gt(a, 0, out=slope)
    a.clamp_min_(0)


ACTIVATIONS = {
    "swiglu": Activation(2, F.silu, _aten.silu.out, _silu_with_slope_),
    "geglu": Activation(2, F.gelu, _aten.gelu.out, _gelu_with_slope_),
    "relu": Activation(1, F.relu, partial(torch.clamp_min, min=0), _relu_with_slope_),
    "gelu": Activation(1, F.gelu, _aten.gelu.out, _gelu_with_slope_),
}
