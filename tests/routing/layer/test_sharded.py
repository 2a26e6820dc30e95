"""The layer under FSDP2 and activation checkpointing on two processes equals one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.ranks import Ranks
from tieline import auxiliary_loss, collect_routing, moe

pytestmark = pytest.mark.cpu("two processes of their own, which meet by gloo")

SIZES = {"d_model": 8, "n_experts": 4, "k": 2, "d_hidden": 6, "bias": True, "shared_hidden": 4}
TOKENS = 12


class Stack(torch.nn.Module):
    """Two layers, each of them checkpointed if asked."""

    def __init__(self, gate, recompute):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(moe(**SIZES, gate=gate) for _ in range(2))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = x + y
        return x


def step(model, x):
    """Outputs after a backward pass of the task and the auxiliary losses."""
    with collect_routing(model) as records:
        y = model(x)
    (y.square().mean() + auxiliary_loss(records, router_z=0.1, boundary=1.0)).backward()
    return y.detach()


def batch():
    """The tokens of all processes."""
    return torch.randn(2, TOKENS, 8, generator=torch.Generator().manual_seed(1)).double()


def mean_gradient(parameter):
    """The mean over the processes, of a sharded parameter or of one that all hold."""
    if isinstance(parameter, DTensor):
        return parameter.grad.full_tensor()
    dist.all_reduce(parameter.grad)
    return parameter.grad / 2


def sharded_step(gate, recompute):
    """One process: its half of the tokens, its shards of the layers."""
    model = Stack(gate, recompute).double()
    mesh = init_device_mesh("cpu", (2,))
    scalars = {p for p in model.parameters() if p.ndim == 0}  # FSDP2 takes none: a learned ε
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, ignored_params=scalars)
    y = step(model, batch()[dist.get_rank()])
    return y, {name: mean_gradient(p) for name, p in model.named_parameters()}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize(
    "gate", ["smooth", *(pytest.param(g, marks=SLOW) for g in ("topk", "projected"))]
)
def test_two_processes_compute_what_one_does(gate, recompute):
    pair = Ranks(2)
    try:
        ranks = pair.run(sharded_step, gate, recompute)
    finally:
        pair.close()
    model = Stack(gate, recompute=False).double()
    outputs = [step(model, x) for x in batch()]  # gradients of both halves add up
    for (y, grads), expected in zip(ranks, outputs, strict=True):
        torch.testing.assert_close(y, expected)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad / 2, msg=f"gradient of {name}")
