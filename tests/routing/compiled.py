"""Compiled equals eager, for every gate, router and the layer; run as a script by its test.

    python -m tests.routing.compiled BACKEND [--some | NAME ...]

`--some` takes each class of gates and routers once and one layer; names take these modules alone.
One graph without a break for tokens of any number (`fullgraph`, `dynamic`, no second compilation),
forward and backward. In a process of its own, because run-time axis checks are not traceable.
"""

import sys
import time
from functools import partial

import torch
from torch._dynamo import config

from tests.routing.zoo import EXPERTS, all_gates, all_routers
from tieline import TopK, moe
from tieline.routing.gates import ExpertChoice, GShardTopK
from tieline.routing.layer import GATES


def check(name, module, x, backend):
    """Outputs and all gradients of the compiled module equal those of the eager one."""
    start = time.monotonic()
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for count in (len(x), len(x) * 2 // 3):
        eager = results(module, module, x[:count])
        with config.patch(error_on_recompile=True):
            fused = results(compiled, module, x[:count])
        label = f"{name}, {count} rows"
        for ours, theirs in zip(fused, eager, strict=True):
            torch.testing.assert_close(ours, theirs, msg=partial("{}: {}".format, label))
    torch.compiler.reset()
    sys.stdout.write(f"{name}: equal, {time.monotonic() - start:.1f} s\n")
    sys.stdout.flush()


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
    *("softmax", "hard", "sigmoid", "relu", "laplace", "gshard", "expert choice"),
    *("topk deepseek-v3", "smooth deepseek-v3", "projected learnable"),
    *("linear+bias", "projected cosine", "low-rank quadratic", "layer smooth"),
}
"""One of each class of gates and routers, with most options, and a layer."""


def all_modules():
    """Every gate, router and layer by name, with an input of its shape."""
    scores, x = torch.randn(9, EXPERTS).double(), torch.randn(9, 5).double()
    gates = all_gates() | {"gshard": GShardTopK(2, noise=0.0), "expert choice": ExpertChoice(2)}
    modules = {name: (gate, scores) for name, gate in gates.items()}
    modules |= {name: (router.double(), x) for name, router in all_routers().items()}
    for gate in GATES:
        options = {"noise": 0.0} if gate == "gshard" else {}
        sizes = {"d_model": 8, "n_experts": 4, "k": 2, "d_hidden": 6}
        layer = moe(**sizes, gate=gate, bias=True, gate_options=options).double()
        modules[f"layer {gate}"] = layer, torch.randn(6, 5, 8).double()
    return modules


def main(backend, *chosen):
    """Check everything with one backend, each class once, or the modules of these names."""
    torch.manual_seed(0)
    modules, some = all_modules(), chosen == ("--some",)
    names = sorted(SOME) if some else chosen or tuple(modules)
    classes = {type(module) for module, _ in modules.values()}
    assert not some or {type(modules[name][0]) for name in names} == classes
    for name in names:
        check(name, *modules[name], backend)
    if some or not chosen:
        check_export(some)
    sys.stdout.write(f"{len(names)} modules without a graph break, by {backend}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
