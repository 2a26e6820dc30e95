"""Experts spread over ranks: tokens travel to the ranks that own their experts, and outputs back.

    y_t = Σ_r y_t^(r),    y_t^(r) = Σ_{e on rank r, w_te ≠ 0} w_te f_e(x_t)

A token is sent to a rank once, with its weights for the experts there, if any of these is not zero.
So the weights may be any matrix: a token may go to any number of ranks, a rank may send or receive
nothing, and no token is dropped or depends on another. Suffix `_s` is the order of sending (by
rank, then token), `_r` that of receiving (by sender, then its token).

`all_to_all_single` of gloo takes uneven and empty parts (torch 2.13), so CPU and accelerators share
one path. Its gradient is the same exchange in the other direction.

`parallelize_` spreads a model over a grid of data × expert ranks (`rank_mesh`): the experts of a
layer over the ranks of a row, so that tokens travel along rows and the ranks of a column hold the
same experts; everything else over all ranks.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from tieline.core.errors import TielineError, require
from tieline.core.processes import TIMEOUT
from tieline.routing.dispatch import dispatch
from tieline.routing.experts import Experts
from tieline.routing.layer import MoE

DATA, EXPERT = "data", "expert"
STACKS = ("w_in", "w_out", "b_in", "b_out")

Rows = Float[Tensor, "rows dim"]


def rank_mesh(
    expert_ranks: int | None = None, *, timeout: float = TIMEOUT, device: str = "cpu"
) -> DeviceMesh:
    """Return all ranks as a grid (data, expert); every rank must call this.

    `init_device_mesh` would give the groups a timeout of half an hour instead of that of the run.

    Args:
        expert_ranks: ranks that share the experts of a layer; all by default. It divides the
            number of ranks.
        timeout: seconds after which a message within a row or column is an error.
        device: type of the devices.
    """
    world = dist.get_world_size()
    columns = world if expert_ranks is None else expert_ranks
    check_columns(columns, world)
    grid = torch.arange(world).view(-1, columns)
    groups = [_group_of_rank(lines.tolist(), timeout) for lines in (grid.T, grid)]
    return DeviceMesh.from_group(groups, device, mesh=grid, mesh_dim_names=(DATA, EXPERT))


def check_columns(expert_ranks: int, ranks: int) -> None:
    """Raise if the ranks are not divisible into rows of `expert_ranks`."""
    require(
        1 <= expert_ranks <= ranks and ranks % expert_ranks == 0,
        f"expert_ranks must divide the number of ranks, {ranks}, got {expert_ranks}",
    )


def _group_of_rank(lines: list[list[int]], timeout: float) -> dist.ProcessGroup:
    """Return the group of the line that holds this rank; all ranks make all groups in order."""
    limit = timedelta(seconds=timeout)
    groups = [dist.new_group(line, timeout=limit) for line in lines]
    group = next(g for g, line in zip(groups, lines, strict=True) if dist.get_rank() in line)
    assert isinstance(group, dist.ProcessGroup)
    return group


def spread_dispatch(
    x: Float[Tensor, "tokens dim"],
    weights: Float[Tensor, "tokens experts"],
    local_experts: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
) -> Float[Tensor, "tokens dim"]:
    """Return the mixture output (T, D) of this rank's tokens, with experts on all ranks of a group.

    Rank r owns experts r·c to r·c + c - 1, c = ⌈E / ranks⌉, or what is left of them. Every rank of
    the group must call this, with any number of tokens.

    Args:
        x: tokens (T, D) of this rank.
        weights: their weights (T, E) for all experts.
        local_experts: (rows (N, D), weights (N, c)) → outputs (N, D) of the experts of this rank;
            columns of absent experts are zero.
        group: the ranks that share the experts.
    """
    ranks = group.size()
    share = -(-weights.shape[1] // ranks)
    padded = F.pad(weights, (0, ranks * share - weights.shape[1])).unflatten(1, (ranks, share))
    needed = (padded != 0).any(dim=2)
    rank_s, token_s = needed.T.nonzero().unbind(1)
    sent = needed.sum(dim=0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    there, back = (sent.tolist(), received.tolist()), (received.tolist(), sent.tolist())
    x_r = all_to_all(x[token_s], *there, group)
    weights_r = all_to_all(padded[token_s, rank_s], *there, group)
    y_s = all_to_all(local_experts(x_r, weights_r), *back, group)
    return y_s.new_zeros(x.shape).index_add(0, token_s, y_s)


def all_to_all(
    rows: Rows, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Float[Tensor, "received dim"]:
    """Exchange rows: those for each rank become those from each rank; differentiable.

    Args:
        rows: `sum(sent)` rows.
        sent: number of rows for each rank.
        received: number of rows from each rank.
        group: the ranks; all must call this.
    """
    return _AllToAll.apply(rows, sent, received, group)  # type: ignore[return-value]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received, group):  # type: ignore[override]
        ctx.back = (received, sent, group)
        return _exchange(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        return _exchange(grad, *ctx.back), None, None, None


def _exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class SpreadExperts(Experts):
    """`Experts` of which each rank holds ⌈E / ranks⌉ or what is left.

    The parameters keep their names and are `DTensor`s, cut along the experts, which know their
    ranks and their whole shape.

    Args:
        experts: the experts to spread; equal on all ranks.
        mesh: the ranks, in one dimension.
    """

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.n_experts, self.d_model = experts.n_experts, experts.d_model
        self.d_hidden, self.activation = experts.d_hidden, experts.activation
        for name in STACKS:
            setattr(self, name, _shard_experts(getattr(experts, name), mesh))

    def forward(
        self, x: Float[Tensor, "tokens dim"], weights: Float[Tensor, "tokens experts"]
    ) -> Float[Tensor, "tokens dim"]:
        """Return Σ_e w_te f_e(x_t) of this rank's tokens; every rank of the row must call it."""
        y = spread_dispatch(
            x, weights, self._local_outputs, _dtensor(self.w_in).device_mesh.get_group()
        )
        if self.b_out is None:
            return y
        # whole on every rank: it acts on zero weights too, whose tokens are not sent
        bias = _dtensor(self.b_out).full_tensor(grad_placements=[Partial()])
        return y + weights.to(y) @ bias.to(y)

    def _local_outputs(self, x: Tensor, weights: Tensor) -> Tensor:
        w_in, w_out, b_in = (
            None if w is None else _dtensor(w).to_local()
            for w in (self.w_in, self.w_out, self.b_in)
        )
        assert w_in is not None
        assert w_out is not None
        if len(w_in) == 0:  # no expert, hence no token; sums of nothing keep every gradient alive,
            # for the other ranks wait for this one in the backward pass too
            return x + sum(w.sum() for w in (weights, w_in, w_out, b_in) if w is not None)
        return dispatch(x, weights[:, : len(w_in)], w_in, w_out, b_in, activation=self.activation)


def _shard_experts(stack: nn.Parameter | None, mesh: DeviceMesh) -> nn.Parameter | None:
    if stack is None:
        return None
    # every rank has the whole stack already, so nothing needs to be sent
    shard = distribute_tensor(stack.detach(), mesh, [Shard(0)], src_data_rank=None)
    return nn.Parameter(shard, requires_grad=stack.requires_grad)


def _dtensor(value: Tensor) -> DTensor:
    assert isinstance(value, DTensor)
    return value


def parallelize_(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Spread a model in place over a grid of ranks; all start with the weights of rank 0.

    The experts of every `MoE` are spread over the expert ranks (`SpreadExperts`) and, along their
    width, over the data ranks. Everything else is cut over all ranks by FSDP2 (`fully_shard`),
    which gathers and frees the items of every `nn.ModuleList` as units. Parameters without a
    dimension, such as a learnable ε, cannot be cut and are replicated on every rank
    (`replicated_parameters`).

    Gradients are *summed* over ranks, not averaged: each rank's loss is its part of the loss of the
    whole batch (`batch_counts`), so that ranks may have different numbers of tokens, or none.
    After `backward`, call `finish_gradients_`. Names in the state dict do not change.

    Args:
        model: equal in structure on all ranks, with its parameters on the device of the mesh.
        mesh: from `rank_mesh`.

    Returns:
        The model, whose forward pass all ranks must now call together.
    """
    _check_model(model, mesh)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    _copy_from_first_rank(model)
    for layer in layers:
        layer.experts = SpreadExperts(layer.experts, mesh[EXPERT])
        if mesh[DATA].size() > 1:
            _cut_width(layer.experts, mesh[DATA])
    apart = {p for p in model.parameters() if p.ndim == 0 or isinstance(p, DTensor)}
    assert dist.group.WORLD is not None
    world = DeviceMesh.from_group(dist.group.WORLD, mesh.device_type, mesh_dim_names=("world",))
    units = _list_items(model) - {id(layer.experts) for layer in layers}
    for module in reversed(list(model.modules())):  # inner before outer
        if module is model or id(module) in units:
            fully_shard(module, mesh=world, ignored_params=apart)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def replicated_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the trainable parameters that every rank holds whole."""
    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            yield parameter


def check_grid(model: nn.Module, rows: int, columns: int) -> None:
    """Raise if some layer of the model cannot be spread over a grid of data × expert ranks."""
    for layer in (module for module in model.modules() if isinstance(module, MoE)):
        experts = layer.experts
        share = -(-experts.n_experts // columns)
        require(
            rows == 1 or (columns - 1) * share < experts.n_experts,
            f"{experts.n_experts} experts in parts of {share} leave some of {columns} expert ranks "
            f"without any, which {rows} data ranks cannot share",
        )
        require(
            experts.d_model % rows == 0 and experts.d_hidden % rows == 0,
            f"the widths of an expert, {experts.d_model} and {experts.d_hidden}, are not multiples "
            f"of the {rows} data ranks",
        )


def _check_model(model: nn.Module, mesh: DeviceMesh) -> None:
    require(
        mesh.mesh_dim_names == (DATA, EXPERT),
        f"need a mesh with dimensions {(DATA, EXPERT)}, got {mesh.mesh_dim_names}",
    )
    spread = any(isinstance(p, DTensor) for p in model.parameters())
    require(not spread, "the model is spread over ranks already", TielineError)
    check_grid(model, mesh[DATA].size(), mesh[EXPERT].size())


@torch.no_grad()
def _copy_from_first_rank(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)


def _cut_width(experts: SpreadExperts, mesh: DeviceMesh) -> None:
    """Cut along dimension 1: the experts of a rank may be fewer than the data ranks."""
    fully_shard(experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1))


def _list_items(model: nn.Module) -> set[int]:
    """Return the identities of the items of every `nn.ModuleList` that have parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    items = [item for modules in lists for item in modules]
    return {id(item) for item in items if any(True for _ in item.parameters())}
