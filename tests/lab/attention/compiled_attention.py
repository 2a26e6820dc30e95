"""Compiled attention equals eager; run as a script by its test.

In a process of its own, because run-time axis checks are not traceable.
"""

import sys

import torch

from tieline.lab.attention.softmax_and_sigmoid import SelfAttention, sigmoid_attention


def sigmoid(q, k, v):
    return sigmoid_attention(q, k, v, causal=True, bias="-log n")


def leaf(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def check(run, backend, dynamic, tensors):
    """Outputs and gradients of the compiled call equal those of the eager one."""
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=dynamic)
    eager_out, compiled_out = run(*tensors), compiled(*tensors)
    torch.testing.assert_close(compiled_out, eager_out)
    eager = torch.autograd.grad(eager_out.square().sum(), tensors)
    fused = torch.autograd.grad(compiled_out.square().sum(), tensors)
    torch.testing.assert_close(fused, eager)


def main(backend):
    """Check the function with dynamic lengths and the layer with fixed ones."""
    torch.manual_seed(0)
    for tokens in (300, 20):
        check(sigmoid, backend, True, [leaf(3, 2, tokens, 4) for _ in range(3)])
    for kind in ("softmax", "sigmoid"):
        check(SelfAttention(8, 2, kind=kind).double(), backend, False, [leaf(2, 9, 8)])


if __name__ == "__main__":
    main(sys.argv[1])
