"""Grids of ranks for training: data × expert ranks.

    mesh = rank_mesh(expert_ranks=2)

Every rank has its own tokens. The experts of a layer are spread over the ranks of a row of the
grid, so tokens travel along rows; the ranks of a column hold the same experts.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tieline.core.errors import require
from tieline.core.processes import TIMEOUT

DATA, EXPERT = "data", "expert"


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
    groups = [_own_group(lines.tolist(), timeout) for lines in (grid.T, grid)]
    return DeviceMesh.from_group(groups, device, mesh=grid, mesh_dim_names=(DATA, EXPERT))


def check_columns(expert_ranks: int, ranks: int) -> None:
    """Raise if the ranks are not divisible into rows of `expert_ranks`."""
    require(
        1 <= expert_ranks <= ranks and ranks % expert_ranks == 0,
        f"expert_ranks must divide the number of ranks, {ranks}, got {expert_ranks}",
    )


def _own_group(lines: list[list[int]], timeout: float) -> dist.ProcessGroup:
    """Return the group of this rank's line; all ranks make all groups, in the same order."""
    limit = timedelta(seconds=timeout)
    groups = [dist.new_group(line, timeout=limit) for line in lines]
    own = next(g for g, line in zip(groups, lines, strict=True) if dist.get_rank() in line)
    assert isinstance(own, dist.ProcessGroup)
    return own


def world_mesh(device: str = "cpu") -> DeviceMesh:
    """Return all ranks in one line, in the group of `join_processes`."""
    world = dist.group.WORLD
    assert world is not None
    return DeviceMesh.from_group(world, device, mesh_dim_names=("world",))
