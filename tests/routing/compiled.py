"""Compiled equals eager, for every gate, router and the layer; run as a script by its test.

In a process of its own, because run-time axis checks are not traceable.
"""

import sys

import torch

from tests.routing.zoo import EXPERTS, all_gates, all_routers
from tieline import moe


def check(name, module, x, backend):
    """Outputs and input gradients of the compiled module equal those of the eager one."""
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    results = []
    for run in (module, compiled):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        grad = torch.autograd.grad(y.square().sum(), leaf) if y.requires_grad else ()
        results.append((y.detach(), *grad))
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, msg=lambda m: f"{name}: {m}")
    torch.compiler.reset()


def main(backend):
    """Check everything with one backend."""
    torch.manual_seed(0)
    for name, gate in all_gates().items():
        check(name, gate, torch.randn(6, EXPERTS, dtype=torch.float64), backend)
    for name, router in all_routers().items():
        check(name, router.double(), torch.randn(6, 5, dtype=torch.float64), backend)
    for gate in ("topk", "smooth", "projected"):
        layer = moe(d_model=8, n_experts=4, k=2, d_hidden=6, gate=gate, bias=True).double()
        check(gate, layer, torch.randn(3, 5, 8, dtype=torch.float64), backend)


if __name__ == "__main__":
    main(sys.argv[1])
