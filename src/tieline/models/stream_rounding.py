"""Rounding the weights of a streamed model that are in memory at the moment."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from tieline.models.emulate import (
    Region,
    RoundingBuffers,
    format_named,
    rounded_in_pieces,
    rounded_weights,
    weight_axis,
)
from tieline.models.streaming import ModelStream


class StreamRounding:
    """Rounds what is in memory, into memory that is used again for the next layer."""

    def __init__(self, stream: ModelStream) -> None:
        """Round weights of this model."""
        self._stream = stream
        self._rooms, self._expert_rooms = RoundingBuffers(), RoundingBuffers()

    @contextmanager
    def rounded(
        self, number_format: str, parts: Region, keep: Collection[str] = ()
    ) -> Iterator[None]:
        """Inside the block, the weights in memory are rounded, experts in groups too.

        Args:
            number_format: name of the format.
            parts: "router", "all" or "others".
            keep: names of routers that stay in full precision.
        """
        model, grid = self._stream.model, format_named(number_format).weights
        with rounded_weights(model, number_format, parts, keep, self._rooms):
            if parts == "router":
                yield
                return
            with self._expert_rooms.borrow() as room:

                def change(module: nn.Module, experts: Tensor) -> Tensor:
                    return rounded_in_pieces(experts, grid, weight_axis(module, experts), room)

                with self._stream.changed_experts(change):
                    yield


def in_memory(module: nn.Module) -> bool:
    """Whether no weight of a module is on the meta device."""
    return not any(parameter.is_meta for parameter in module.parameters())
