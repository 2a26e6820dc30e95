"""The pretended device computes as the CPU does, refuses what CUDA refuses, and counts waiting."""

import pytest
import torch
import torch.nn.functional as F

from tests.device.pretended import counting


def test_results_are_those_of_the_cpu(fake):
    x, w = torch.randn(5, 8), torch.randn(8, 8)
    leaf, weight = (t.to(fake).requires_grad_() for t in (x, w))
    (leaf @ weight).softmax(1)[:, 2:].square().sum().backward()
    plain, matrix = x.clone().requires_grad_(), w.clone().requires_grad_()
    (plain @ matrix).softmax(1)[:, 2:].square().sum().backward()
    assert weight.grad.device.type == fake
    assert torch.equal(weight.grad.cpu(), matrix.grad)
    assert torch.equal(leaf.grad.cpu(), plain.grad)


def test_views_share_memory(fake):
    x = torch.zeros(3, 4, device=fake)
    x[1:].T[2].fill_(1)
    assert x.cpu().tolist() == [[0] * 4, [0, 0, 1, 0], [0, 0, 1, 0]]


REFUSED = {
    "a sum": lambda here, x: x + torch.ones(3),
    "a product": lambda here, x: torch.outer(x, x) @ torch.ones(3, 2),
    "cat": lambda here, x: torch.cat([x, torch.ones(1)]),
    "an output": lambda here, x: torch.add(x, x, out=torch.empty(3)),
    "gather": lambda here, x: x.gather(0, torch.tensor([0])),
    "index_select": lambda here, x: x.index_select(0, torch.tensor([0])),
    "a CPU tensor indexed by the device": lambda here, x: torch.ones(3)[x.long()],
    "a generator of the CPU": lambda here, x: x.uniform_(generator=torch.Generator()),
    "randn with a generator of the CPU": lambda here, x: torch.randn(
        3, device=here, generator=torch.Generator()
    ),
    "numpy": lambda here, x: x.numpy(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cuda_refuses_is_refused(fake, case):
    with pytest.raises((RuntimeError, TypeError), match=r"device|generator|numpy"):
        REFUSED[case](fake, torch.ones(3, device=fake))


TAKEN = {
    "a number of the CPU": lambda here, x: x * torch.tensor(2.0),
    "indices of the CPU": lambda here, x: x[torch.tensor([0, 2])],
    "its own generator": lambda here, x: x.uniform_(
        generator=torch.Generator(device=here).manual_seed(0)
    ),
    "autocast": lambda here, x: _under_autocast(here, x),
}


def _under_autocast(here, x):
    with torch.autocast(here, dtype=torch.bfloat16):
        y = torch.outer(x, x) @ torch.outer(x, x)
    assert y.dtype == torch.bfloat16
    return y


@pytest.mark.parametrize("case", TAKEN)
def test_what_cuda_takes_is_taken(fake, case):
    assert TAKEN[case](fake, torch.ones(3, device=fake)).device.type == fake


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a mask written to": lambda x: x.__setitem__(x > 0, torch.ones_like(x[:2])),
    "bincount": lambda x: x.long().bincount(),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "a tensor of numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "indices of the CPU": lambda x: x[torch.tensor([0])],
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "grouped_mm in float32": lambda x: F.grouped_mm(
        x.new_ones(4, 8), x.new_ones(1, 8, 8), offs=x.new_full((1,), 4, dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("case", WAITS)
def test_waiting_is_counted(fake, case):
    x = torch.tensor([0.0, 1.0, 2.0]).to(fake)
    with counting() as traffic:
        WAITS[case](x)
    assert traffic.waits >= 1, traffic


FREE = {
    "arithmetic": lambda x: (x * 2 + x.sum()).softmax(0).cumsum(0),
    "ranking": lambda x: x.sort(stable=True).indices + x.topk(2).indices[0],
    "where": lambda x: torch.where(x > 0, x, 0).masked_fill(x > 1, 0),
    "scatter": lambda x: x.new_zeros(3).scatter_add_(0, x.long(), x),
    "a filled tensor": lambda x: torch.full((3,), 2.5, device=x.device),
    "repeat_interleave of known size": lambda x: x.repeat_interleave(x.long(), output_size=3),
    "a copy that does not block": lambda x: x.to("cpu", non_blocking=True),
    "grouped_mm in bfloat16": lambda x: F.grouped_mm(
        x.new_ones(4, 8).bfloat16(),
        x.new_ones(1, 8, 8).bfloat16(),
        offs=x.new_full((1,), 4, dtype=torch.int32),
    ),
}


@pytest.mark.parametrize("case", FREE)
def test_what_runs_without_waiting_counts_nothing(fake, case):
    x = torch.tensor([0.0, 1.0, 2.0]).to(fake)
    with counting() as traffic:
        FREE[case](x)
    assert traffic.waits == 0, traffic
    assert traffic.launches.total() + traffic.asynchronous.total() > 0
