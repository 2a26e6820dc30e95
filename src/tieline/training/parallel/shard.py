"""Spreading a model over the ranks of a grid: experts over rows, everything else over all ranks."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tieline.errors import TielineError, require
from tieline.routing.layer import MoE
from tieline.training.parallel.experts import SpreadExperts
from tieline.training.parallel.processes import DATA, EXPERT, world_mesh

__all__ = ["check_grid", "parallelize_", "replicated_parameters"]


def parallelize_(
    model: nn.Module, mesh: DeviceMesh, *, blocks: Callable[[nn.Module], bool] | None = None
) -> nn.Module:
    """Spread a model in place over the ranks of a grid; all start with the weights of rank 0.

    The experts of every `MoE` are spread over the expert ranks (`SpreadExperts`) and, along their
    width, over the data ranks; everything else is cut over all ranks by FSDP2 (`fully_shard`).
    Parameters without a dimension, such as a learnable ε, cannot be cut and stay whole on every
    rank (`replicated_parameters`).

    Gradients are *summed* over ranks, not averaged: each rank's loss is its part of the loss of the
    whole batch (`batch_counts`), so that ranks may have different numbers of tokens, or none.
    After `backward`, call `finish_gradients_`. Names in the state dict stay what they are.

    Args:
        model: equal in structure on all ranks, with its parameters on the device of the mesh.
        mesh: from `rank_mesh`.
        blocks: says of a module whether it is gathered and freed as a unit; by default the items
            of every `nn.ModuleList`.

    Returns:
        The model, whose forward pass all ranks must now call together.
    """
    _check(model, mesh)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    _copy_from_first_rank(model)
    for layer in layers:
        layer.experts = SpreadExperts(layer.experts, mesh[EXPERT])
        if mesh[DATA].size() > 1:
            _cut_width(layer.experts, mesh[DATA])
    apart = {p for p in model.parameters() if p.ndim == 0 or isinstance(p, DTensor)}
    world, chosen = world_mesh(mesh.device_type), blocks or _list_items(model)
    for module in reversed(list(model.modules())):  # inner before outer
        if module is model or (chosen(module) and not isinstance(module, SpreadExperts)):
            fully_shard(module, mesh=world, ignored_params=apart)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def replicated_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The trainable parameters that every rank holds whole."""
    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            yield parameter


def check_grid(model: nn.Module, rows: int, columns: int) -> None:
    """Refuse a grid of data × expert ranks over which some layer of the model cannot be spread."""
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


def _check(model: nn.Module, mesh: DeviceMesh) -> None:
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


def _list_items(model: nn.Module) -> Callable[[nn.Module], bool]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    items = {id(item) for entries in lists for item in entries}
    return lambda module: id(module) in items and _has_parameters(module)


def _has_parameters(module: nn.Module) -> bool:
    parameters: Iterator[Tensor] = module.parameters()
    return next(parameters, None) is not None
