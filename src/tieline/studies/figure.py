"""The data of a figure as plain dictionaries; `report` draws them and computes nothing.

chart    axes and series
line     a series drawn as a line
dots     a series drawn as points, with error bars if given
"""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from tieline.studies.claim import Real, plain

__all__ = ["chart", "dots", "line"]

Numbers = Sequence[Real] | Tensor
Scale = Literal["linear", "log"]


def chart(
    x: str,
    y: str,
    series: Sequence[dict[str, Any]],
    *,
    x_scale: Scale = "linear",
    y_scale: Scale = "linear",
) -> dict[str, Any]:
    """Axes by their titles and scales, with series."""
    axes = {"x": {"title": x, "scale": x_scale}, "y": {"title": y, "scale": y_scale}}
    return {**axes, "series": list(series)}


def line(name: str, x: Numbers, y: Numbers, *, dashed: bool = False) -> dict[str, Any]:
    """A line; the paper's own values are dashed by custom."""
    return {"name": name, "x": _list(x), "y": _list(y), "kind": "dashed" if dashed else "line"}


def dots(name: str, x: Numbers, y: Numbers, errors: Numbers | None = None) -> dict[str, Any]:
    """Points, with their standard errors."""
    bars = None if errors is None else _list(errors)
    return {"name": name, "x": _list(x), "y": _list(y), "kind": "dots", "errors": bars}


def _list(values: Numbers) -> list[Any]:
    return plain(values if isinstance(values, Tensor) else [float(value) for value in values])
