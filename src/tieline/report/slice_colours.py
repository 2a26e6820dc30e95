"""Colours for the cells of a slice: one per cell, far from those next to it."""

import colorsys
from collections.abc import Mapping
from typing import Any

__all__ = ["cell_colours"]

HUES = 17
GOLDEN = 0.61803398875


def cell_colours(data: Mapping[str, Any]) -> list[str]:
    """A hex colour per cell; cells that share a wall never have the same one.

    Cells are neighbours when their coalitions differ by one expert; each takes the first hue, in an
    order that jumps around the circle, that no neighbour before it has.
    """
    cells = [frozenset(cell["coalition"]) for cell in data["cells"]]
    taken: list[int] = []
    for place, cell in enumerate(cells):
        near = {taken[i] for i in range(place) if len(cells[i] - cell) == 1}
        free = [hue for hue in range(HUES) if hue not in near]
        start = place % HUES
        taken.append(min(free, key=lambda hue: (hue - start) % HUES) if free else start)
    return [_hex(hue) for hue in taken]


def _hex(hue: int) -> str:
    light = 0.72 + 0.1 * (hue % 3 - 1)
    red, green, blue = colorsys.hls_to_rgb((hue * GOLDEN) % 1.0, light, 0.62)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))
