"""Parts of tensors on many ranks, and the whole that files hold.

    whole_state         name → whole tensor, kept on rank 0
    WholeOptimizer      an optimiser over parts, seen as one over whole parameters

A checkpoint holds whole tensors under the names and numbers that one process would give them, so it
is read by one process, or by any other number of ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tieline.training.parallel.agree import is_first

__all__ = ["WholeOptimizer", "cut_like", "whole_state"]


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with the parts of all ranks, on rank 0; empty on others, which must call too.

    One tensor is gathered after the other, so that the others never hold more than one of them.
    """
    return _gathered(model.state_dict())


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as another tensor of its shape is."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole.to(like.device)
    moved = whole.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


class WholeOptimizer:
    """The state of an optimiser with its moments whole, in the form of `Optimizer.state_dict`.

    Args:
        optimizer: any optimiser whose state per parameter is of tensors, of its shape or scalar.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Whole on rank 0; without moments on others, which must call too."""
        state = self.optimizer.state_dict()
        moments = {number: _gathered(entries) for number, entries in state["state"].items()}
        return {"state": moments, "param_groups": state["param_groups"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut whole moments as the parameters are and go on from them."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        moments = {
            number: {name: cut_like(whole, parameters[number]) for name, whole in entries.items()}
            for number, entries in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": moments})


def _gathered(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kept = {}
    for name, part in parts.items():
        whole = part.full_tensor() if isinstance(part, DTensor) else part
        if is_first():
            kept[name] = whole.detach().cpu()
    return kept
