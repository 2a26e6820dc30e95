"""Compiled equals eager, for every gate, router and the layer; run as a script by its test.

    python -m tests.routing.compiled BACKEND [--some]

`--some` takes each class of gates and routers once and one layer.
One graph without a break for tokens of any number (`fullgraph`, `dynamic`), forward and backward.
In a process of its own, because run-time axis checks are not traceable.
"""

import sys
from functools import partial

import torch

from tests.routing.zoo import EXPERTS, all_gates, all_routers
from tieline import TopK, moe


def check(name, module, x, backend, rows):
    """Outputs and all gradients of the compiled module equal those of the eager one."""
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for count in rows:
        eager, fused = (results(run, module, x[:count]) for run in (module, compiled))
        label = f"{name}, {count} rows"
        for ours, theirs in zip(fused, eager, strict=True):
            torch.testing.assert_close(ours, theirs, msg=partial("{}: {}".format, label))
    torch.compiler.reset()


def results(run, module, x):
    """Output and gradients of the input and the parameters, without those that are None."""
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    if not y.requires_grad:
        return [y]
    leaves = [leaf, *(p for p in module.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def check_export(some=False):
    """An exported gate gives the weights of the gate for another number of tokens."""
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    gates = (TopK(2), all_gates()["smooth mixtral"], all_gates()["projected mixtral"])
    for gate in gates[:1] if some else gates:
        gate = gate.double().eval()
        example = torch.randn(6, EXPERTS, dtype=torch.float64)
        program = torch.export.export(gate, (example,), dynamic_shapes={"scores": {0: tokens}})
        other = torch.randn(11, EXPERTS, dtype=torch.float64)
        torch.testing.assert_close(program.module()(other), gate(other))


SOME = {
    *("softmax", "hard", "sigmoid", "relu", "laplace"),
    *("topk deepseek-v3", "smooth deepseek-v3", "projected learnable"),
    *("linear+bias", "projected cosine", "low-rank quadratic"),
}
"""One of each class of gates and routers, with most options."""


def chosen_modules(modules, some):
    """The modules by name, or one of each class."""
    kept = {name: module for name, module in modules.items() if not some or name in SOME}
    assert {type(m) for m in kept.values()} == {type(m) for m in modules.values()}
    return kept.items()


def main(backend, some=False):
    """Check everything with one backend, or each class once."""
    torch.manual_seed(0)
    rows = (9, 6) if backend == "inductor" else (9,)
    layers = ("smooth", "topk", "projected")
    for name, gate in chosen_modules(all_gates(), some):
        check(name, gate, torch.randn(9, EXPERTS, dtype=torch.float64), backend, rows)
    for name, router in chosen_modules(all_routers(), some):
        check(name, router.double(), torch.randn(9, 5, dtype=torch.float64), backend, rows)
    for gate in layers[:1] if some else layers:
        layer = moe(d_model=8, n_experts=4, k=2, d_hidden=6, gate=gate, bias=True).double()
        check(gate, layer, torch.randn(4, 5, 8, dtype=torch.float64), backend, (4, 3))
    check_export(some)


if __name__ == "__main__":
    main(sys.argv[1], "--some" in sys.argv)
