"""Routers and layers as checked float64 arrays, from NumPy or torch."""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.ranking import topk_mask

__all__ = ["Neurons", "Router", "as_neurons", "as_points", "as_router", "chosen"]


class Router(NamedTuple):
    """Scores z(x) = weight x + bias of N experts, of which the largest k are chosen."""

    weight: Float[np.ndarray, "experts width"]
    bias: Float[np.ndarray, " experts"]
    k: int

    def scores(self, points: Float[np.ndarray, "points width"]) -> np.ndarray:
        """Scores (points, experts)."""
        return points @ self.weight.T + self.bias


class Neurons(NamedTuple):
    """Pre-activations weight[e, h]·x + bias[e, h] of the experts' hidden neurons."""

    weight: Float[np.ndarray, "experts hidden width"]
    bias: Float[np.ndarray, "experts hidden"]


def as_router(weight: Any, bias: Any, k: int) -> Router:
    """A router from arrays (N, d) and (N,); None for no bias."""
    w = _array(weight, "router weight", 2)
    b = np.zeros(len(w)) if bias is None else _array(bias, "router bias", 1)
    require(len(b) == len(w), f"{len(w)} rows of weight, {len(b)} biases", ShapeError)
    require(1 <= k <= len(w), f"need 1 <= k <= N, got {k=}, N={len(w)}")
    return Router(w, b, k)


def as_neurons(weight: Any, bias: Any, router: Router) -> Neurons | None:
    """Neurons from arrays (N, H, d) and (N, H); None where no weight is given."""
    if weight is None:
        require(bias is None, "neurons have a bias but no weight", ShapeError)
        return None
    v = _array(weight, "neuron weight", 3)
    c = np.zeros(v.shape[:2]) if bias is None else _array(bias, "neuron bias", 2)
    experts, width = router.weight.shape
    require(
        v.shape[0] == experts and v.shape[2] == width and c.shape == v.shape[:2],
        f"need V (N, H, d) and c (N, H) with N={experts}, d={width}, got {v.shape}, {c.shape}",
        ShapeError,
    )
    return Neurons(v, c)


def as_points(points: Any, width: int, least: int) -> Float[np.ndarray, "points width"]:
    """At least so many points of R^width."""
    found = _array(points, "points", 2)
    require(
        found.shape[0] >= least and found.shape[1] == width,
        f"need at least {least} points of R^{width}, got an array of shape {found.shape}",
        ShapeError,
    )
    return found


def chosen(scores: np.ndarray, k: int) -> Bool[np.ndarray, "points experts"]:
    """Which experts the router chooses, ties to the lower index as everywhere."""
    return topk_mask(torch.from_numpy(np.ascontiguousarray(scores)), k).numpy()


def _array(value: Any, name: str, ndim: int) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().double().cpu().numpy()
    found = np.asarray(value, dtype=np.float64)
    require(
        found.ndim == ndim and found.size > 0,
        f"the {name} needs {ndim} axes, got shape {found.shape}",
        ShapeError,
    )
    require(bool(np.isfinite(found).all()), f"the {name} must be finite: it has NaN or infinities")
    return found
