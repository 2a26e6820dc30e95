"""Experts that are read in groups, where a layer is larger than the memory it may take.

The eager experts of transformers go through the experts that tokens chose, one by one in ascending
order, and take the weights of each by its index. Here these weights are read when they are indexed:
a pass that comes to an expert outside the group in memory waits until its group is there. So all
batches go through the first group, then through the second, and every batch makes its own matrix
products and sums, in their own order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tieline.core.errors import ParameterError, require
from tieline.models.stream_weights import Stack, Weights

USED = 0.75
"""Part of a memory budget for weights: the rest is for what is computed with them."""

INTERFACE = "_is_expert_parallel"
"""Attribute of experts whose eager implementation takes them one by one."""


Change = Callable[[nn.Module, Tensor], Tensor]
"""Makes other weights (experts, rows, columns) of those of a module."""


class LazyExperts:
    """Stands for a parameter (experts, rows, columns) that is indexed by one expert."""

    def __init__(self, groups: "ExpertGroups", meta: Tensor, number: int) -> None:
        """Stand for the parameter `meta`, stack `number` of `groups`."""
        self._groups, self._meta, self._number = groups, meta, number

    def __getitem__(self, expert: Tensor | int) -> Tensor:
        """The weights of one expert, once they are there."""
        return self._groups.weights_of(int(expert), self._number)

    def __getattr__(self, name: str) -> object:
        """Shape, type and so on are those of the parameter."""
        return getattr(self._meta, name)

    def __len__(self) -> int:
        """Number of experts."""
        return len(self._meta)


class ExpertGroups:
    """The experts of one unit, some of which are in memory.

    Attributes:
        unit: name of the unit.
        count: experts that are in memory at once.
        stacks: parameters that are read in groups.
        obtain: brings a group into memory for whoever indexes an expert of it; by default reads it.
            `run.lockstep` lets passes wait for the group instead.
    """

    def __init__(self, weights: Weights, unit: str, count: int) -> None:
        """Read `count` experts of `unit` at a time."""
        self._weights, self.unit, self.count = weights, unit, count
        self.stacks = [s for s in weights.plans[unit].stacks if can_group_experts(weights, s)]
        self._rooms: list[Tensor] = []
        self._changed: list[Tensor] = []
        self._group: int | None = None
        self.obtain: Callable[[int], None] = self.read

    @property
    def targets(self) -> frozenset[str]:
        """Names of the parameters that are read in groups."""
        return frozenset(stack.target for stack in self.stacks)

    @property
    def left_out(self) -> int:
        """Bytes of experts that are not in memory at the same time."""
        experts = len(self._weights.meta[self.stacks[0].target])
        total = sum(_stack_bytes(self._weights, stack) for stack in self.stacks)
        return total - total * min(self.count, experts) // experts

    def install(self) -> None:
        """Replace the parameters by stand-ins."""
        for number, stack in enumerate(self.stacks):
            module, leaf = self._module(stack)
            module.__dict__[leaf] = LazyExperts(self, self._weights.meta[stack.target], number)

    def remove(self) -> None:
        """Remove the stand-ins and free their memory."""
        for stack in self.stacks:
            module, leaf = self._module(stack)
            module.__dict__.pop(leaf, None)
        self._rooms, self._group = [], None

    def _module(self, stack: Stack) -> tuple[nn.Module, str]:
        path, _, leaf = stack.target.rpartition(".")
        return self._weights.model.get_submodule(path), leaf

    def weights_of(self, expert: int, stack: int) -> Tensor:
        """Return an expert's weights in one stack, once its group is in memory."""
        group = expert // self.count
        while group != self._group:
            self.obtain(group)
        return (self._changed or self._rooms)[stack][expert - group * self.count]

    @contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        """Inside the block, the experts in memory are what `change` makes of them."""
        self._changed = [
            change(self._module(stack)[0], room)
            for stack, room in zip(self.stacks, self._rooms, strict=False)
        ]
        try:
            yield
        finally:
            self._changed = []

    def read(self, group: int) -> None:
        """Read a group into the memory of the one before."""
        first, total = group * self.count, len(self._weights.meta[self.stacks[0].target])
        if not self._rooms:
            self._rooms = [self._room(stack) for stack in self.stacks]
        for stack, room in zip(self.stacks, self._rooms, strict=True):
            self._weights.fill(stack, room[: min(self.count, total - first)], first)
        self._group = group
        following = range(first + self.count, min(first + 2 * self.count, total))
        keys = [
            key
            for stack in self.stacks
            for part in stack.parts
            for expert in following
            for key in (part.keys[expert], *part.scales[expert : expert + 1])
        ]
        self._weights.shards.prefetch(keys)

    def _room(self, stack: Stack) -> Tensor:
        meta = self._weights.meta[stack.target]
        shape = (min(self.count, len(meta)), *meta.shape[1:])
        return torch.empty(shape, dtype=self._weights.dtype(stack.target))


def can_group_experts(weights: Weights, stack: Stack) -> bool:
    """Whether the experts of a stack are taken one by one."""
    module = weights.model.get_submodule(stack.target.rpartition(".")[0])
    return hasattr(module, INTERFACE)


def plan_groups(
    model: PreTrainedModel, weights: Weights, memory: int, taken: int, copies: int = 1
) -> dict[str, ExpertGroups]:
    """The units whose experts are read in groups, so that all fit into the memory.

    Args:
        model: the model, whose experts become the eager ones if any are grouped.
        weights: where its weights are.
        memory: bytes that the process may take.
        taken: bytes that it takes already.
        copies: how often the weights in memory are there at once.
    """
    room, grouped, least = (USED * memory - taken) / copies, {}, [("", 0)]
    for unit in weights.units:
        stacks = [s for s in weights.plans[unit].stacks if can_group_experts(weights, s)]
        total, in_stacks = weights.size(unit), sum(_stack_bytes(weights, s) for s in stacks)
        experts = len(weights.meta[stacks[0].target]) if stacks else 1
        rest, each = total - in_stacks, in_stacks // experts
        least.append((unit, rest + each))
        if total > room and stacks:
            count = int((room - rest) // max(1, each))
            grouped[unit] = ExpertGroups(weights, unit, max(1, min(count, experts)))
    unit, size = max(least, key=lambda pair: pair[1])
    needed = (copies * size + taken) / USED
    require(
        needed <= memory,
        f"memory of {memory / 1e9:.1f} GB is too small: {unit!r} is read as one and takes "
        f"{copies * size / 1e9:.2f} GB, beside {taken / 1e9:.2f} GB of the process and what is "
        f"computed; give at least {needed / 1e9 + 0.05:.1f}G",
        ParameterError,
    )
    if grouped:
        model.set_experts_implementation("eager")
    return grouped


def _stack_bytes(weights: Weights, stack: Stack) -> int:
    """Bytes of a stack of experts in memory."""
    return weights.meta[stack.target].numel() * weights.dtype(stack.target).itemsize
