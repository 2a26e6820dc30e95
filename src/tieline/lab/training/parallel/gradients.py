"""Losses and gradients of one batch whose rows are on many ranks.

    L = Σ_r L_r,   L_r = (Σ_{t on r} ℓ_t) / N + auxiliary parts,   ∇L = Σ_r ∇L_r

N and the assignments of every expert are counted over all ranks (`batch_counts`), so that the
auxiliary losses are those of the whole batch and not the mean of those of its parts: the product of
means in the balance loss is not the mean of products.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tieline.core.errors import require
from tieline.lab.training.parallel.experts import replicated_parameters
from tieline.routing.losses import Counts, LayerRouting


def summed(value: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the sum over all ranks, detached; the value itself with one process."""
    value = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def batch_counts(records: Sequence[LayerRouting]) -> list[Counts]:
    """Return per record the assignments and tokens of all ranks, in one message.

    With `auxiliary_loss(records, ..., counts=...)` they give this rank's part of the loss.
    """
    local = [Counts.of(record.routing.weights) for record in records]
    flat = [torch.cat([c.assigned, c.tokens.view(1)]) for c in local]
    if not flat:
        return []
    everywhere = summed(torch.cat(flat)).split([len(c) for c in flat])
    counts = [Counts(c[:-1], c[-1]) for c in everywhere]
    require(all(c.tokens > 0 for c in counts), "no rank has a token: the batch is empty")
    return counts


def finish_gradients_(model: nn.Module) -> None:
    """Sum over ranks the gradients of the parameters that are whole on each, in one message.

    FSDP sums the others during the backward pass. A parameter that no rank used keeps no gradient.
    """
    parameters = list(replicated_parameters(model))
    if not parameters or not dist.is_initialized():
        return
    used = torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float64)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([used.to(grads[0].device), *(g.detach().double().flatten() for g in grads)])
    dist.all_reduce(flat)
    sizes = [len(parameters), *(p.numel() for p in parameters)]
    used, *sums = flat.split(sizes)
    for parameter, count, grad in zip(parameters, used.tolist(), sums, strict=True):
        parameter.grad = grad.view_as(parameter).to(parameter) if count else None


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Float[Tensor, ""]:
    """Return the Euclidean norm (float64) of a gradient whose parts are on different ranks."""
    grads = [p.grad for p in parameters if p.grad is not None]
    device = grads[0].device if grads else torch.device("cpu")
    square = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        square += local.double().square().sum() / _copies(grad)
    return summed(square).sqrt()


def clip_gradients_(parameters: Iterable[nn.Parameter], max_norm: float) -> Float[Tensor, ""]:
    """Scale the whole gradient to norm `max_norm` if it is longer; returns its norm before.

    The factor is min(1, max_norm / (norm + 1e-6)), as in `torch.nn.utils.clip_grad_norm_`, which
    cannot be used here since it does not mix gradients of different meshes.
    """
    require(max_norm > 0, f"max_norm must be positive, got {max_norm}")
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).item()
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return norm


def _copies(grad: Tensor) -> int:
    """Return the number of ranks that hold the same part of a gradient."""
    if not dist.is_initialized():
        return 1
    if not isinstance(grad, DTensor):
        return dist.get_world_size()
    mesh, shards = grad.device_mesh, 1
    for dim, placement in enumerate(grad.placements):
        shards *= mesh.size(dim) if placement.is_shard() else 1
    return dist.get_world_size() // shards
