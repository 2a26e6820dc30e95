"""A sequence of layers that makes each one when it is touched."""

from collections.abc import Callable, Sequence
from typing import overload

from tieline.trace.record import LayerTrace

__all__ = ["LazyLayers", "map_layers"]


class LazyLayers(Sequence[LayerTrace]):
    """Layers that are read, checked or cut out on demand; the last one touched is kept."""

    def __init__(self, count: int, make: Callable[[int], LayerTrace]) -> None:
        self._count = count
        self._make = make
        self._last: tuple[int, LayerTrace] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LayerTrace: ...

    @overload
    def __getitem__(self, index: slice) -> "LazyLayers": ...

    def __getitem__(self, index: int | slice) -> "LayerTrace | LazyLayers":
        if isinstance(index, slice):
            chosen = range(self._count)[index]
            return LazyLayers(len(chosen), lambda i: self[chosen[i]])
        place = range(self._count)[index]
        if self._last is None or self._last[0] != place:
            self._last = (place, self._make(place))
        return self._last[1]


def map_layers(
    layers: Sequence[LayerTrace], change: Callable[[LayerTrace], LayerTrace]
) -> Sequence[LayerTrace]:
    """Each layer changed: at once if the layers are in memory, else when it is touched."""
    if isinstance(layers, LazyLayers):
        return LazyLayers(len(layers), lambda index: change(layers[index]))
    return tuple(change(layer) for layer in layers)
