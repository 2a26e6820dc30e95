"""What the ranks of the tests do. Imported once, by the server that they are forked from."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tieline import auxiliary_loss, collect_routing, moe
from tieline.core.errors import TielineError
from tieline.lab.training.parallel.experts import (
    EXPERT,
    SpreadExperts,
    parallelize_,
    rank_mesh,
)
from tieline.lab.training.parallel.gradients import (
    batch_counts,
    clip_gradients_,
    finish_gradients_,
    gradient_norm,
    summed,
)
from tieline.routing import Experts

LOSSES = {"balance": 0.1, "router_z": 0.01, "boundary": 0.5, "sparsity": 0.01}
WORDS, LENGTH = 11, 7


class Decoder(nn.Module):
    """Two routed layers, one of them smooth with a learnable band, between embedding and head."""

    def __init__(self, n_experts=4, bias=True, width=8):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        sizes = {"d_model": width, "n_experts": n_experts, "k": 2, "d_hidden": 6, "bias": bias}
        self.blocks = nn.ModuleList(moe(**sizes, gate=gate) for gate in ("smooth", "topk"))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def fresh_model(n_experts=4):
    torch.manual_seed(0)
    return Decoder(n_experts)


def batch(step, rows):
    """The same rows on every rank."""
    return torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(step))


def whole(tensor):
    """A tensor with the parts of all ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def optimiser(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def training_step(model, adam, ids, rows):
    """One step on this rank's share of a batch of `rows` rows; loss, norm and whole gradient."""
    adam.zero_grad()
    with collect_routing(model) as records:
        logits = model(ids[:, :-1])
    task = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    part = task / (rows * (LENGTH - 1))
    part = part + auxiliary_loss(records, **LOSSES, counts=batch_counts(records))
    part.backward()
    finish_gradients_(model)
    norm = clip_gradients_(model.parameters(), 0.5)
    gradient = {name: whole(p.grad) for name, p in model.named_parameters()}
    adam.step()
    return summed(part).item(), norm.item(), gradient


def train(steps, expert_ranks, n_experts, rows):
    """Losses, norms and gradients of some steps, and the final parameters, on a grid of ranks."""
    torch.manual_seed(dist.get_rank())  # all begin with the weights of rank 0
    model = parallelize_(Decoder(n_experts), rank_mesh(expert_ranks))
    adam, told = optimiser(model), []
    for step in range(steps):
        own = batch(step, rows).tensor_split(dist.get_world_size())[dist.get_rank()]
        told.append(training_step(model, adam, own, rows))
    return told, {name: whole(p) for name, p in model.named_parameters()}


def integers(*shape, low=-3, high=4, seed=0):
    """Small integers in float64: sums and products of them are exact in any order."""
    drawn = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.double()


def integer_experts(n_experts, bias):
    experts = Experts(n_experts, 3, 2, activation="relu", bias=bias).double()
    with torch.no_grad():
        for seed, parameter in enumerate(experts.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=seed))
    return experts


def evaluate_experts(experts, x, weights):
    """Output and gradients in tokens, weights and parameters of a loss that weighs all outputs."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = experts(x, weights)
    (y * (1 + x.detach())).sum().backward()
    parameters = {name: whole(p.grad) for name, p in experts.named_parameters()}
    return y.detach(), x.grad, weights.grad, parameters


def spread_experts(n_experts, bias, x, weights, tokens):
    """`evaluate_experts` with the experts spread, each rank having the next `tokens[rank]` rows."""
    experts = SpreadExperts(integer_experts(n_experts, bias), rank_mesh()[EXPERT])
    rank = dist.get_rank()
    return evaluate_experts(experts, x.split(tokens)[rank], weights.split(tokens)[rank])


def norm_of_parts(expert_ranks):
    """Norm of a gradient that is equal to the parameters."""
    model = parallelize_(fresh_model(), rank_mesh(expert_ranks))
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    return gradient_norm(model.parameters()).item()


def sum_of_used(rank_that_uses):
    """Gradient of two whole parameters, one of which a single rank uses and one nobody."""
    model = nn.Module()
    model.used, model.idle = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    if dist.get_rank() == rank_that_uses:
        (3 * model.used).backward()
    finish_gradients_(model)
    return model.used.grad.item(), model.idle.grad


def refusal(expert_ranks, n_experts, twice):
    """What `rank_mesh` or `parallelize_` says."""
    try:
        mesh = rank_mesh(expert_ranks)
        model = parallelize_(fresh_model(n_experts), mesh)
        if twice:
            parallelize_(model, mesh)
    except TielineError as error:
        return str(error)
    return ""


def empty_counts():
    """What `batch_counts` says of a batch without a token."""
    model = fresh_model()
    try:
        with collect_routing(model) as records:
            model(torch.zeros(0, LENGTH, dtype=torch.int64))
        batch_counts(records)
    except TielineError as error:
        return str(error)
    return ""
