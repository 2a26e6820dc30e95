"""Routers and layers as checked float64 arrays, from NumPy or torch.

Only differences of scores matter to a count, so counting coordinates are centred over experts. A
fixed rotation makes generic what weights have in common along axes (integers, zeros), and lengths
are scaled so that walls lie near 1.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from tieline.core.errors import ParameterError, ShapeError, TielineError, TraceError, require
from tieline.core.ranking import topk_mask
from tieline.core.text import layer_label
from tieline.trace.record import LayerTrace

Array = np.ndarray | Tensor
RouterWeight = Real[Array, "experts dim"]
RouterBias = Real[Array, " experts"]
NeuronWeight = Real[Array, "experts hidden dim"]
NeuronBias = Real[Array, "experts hidden"]
RELATIVE_TOLERANCE = 1e-11  # relative size below which a number counts as zero


class DegenerateError(TielineError):
    """Raised where walls are not in general position, so that a count would depend on rounding."""


class Count(int):
    """An exact count: an `int` with its subject, method and numerical safety."""

    counted: str  # subject of the count, in words
    method: str  # how
    # smallest relative gap that decided anything, in units of the tolerance; below 1 the
    # input is refused. Infinite if there was no gap to decide
    safety: float

    def __new__(
        cls, value: int, counted: str, method: str, safety: float = float("inf")
    ) -> "Count":
        """Create the integer `value` with its provenance."""
        count = super().__new__(cls, value)
        count.counted, count.method, count.safety = counted, method, safety
        return count


class AffineRouter(NamedTuple):
    """Scores z(x) = weight x + bias of N experts, of which the largest k are chosen."""

    weight: Float[np.ndarray, "experts dim"]
    bias: Float[np.ndarray, " experts"]
    k: int

    def scores(self, points: Float[np.ndarray, "points dim"]) -> np.ndarray:
        """Scores (points, experts)."""
        return points @ self.weight.T + self.bias


class Neurons(NamedTuple):
    """Pre-activations weight[e, h]·x + bias[e, h] of the experts' hidden neurons."""

    weight: Float[np.ndarray, "experts hidden dim"]
    bias: Float[np.ndarray, "experts hidden"]


def double_array(name: str, value: Any, axes: int) -> Float[np.ndarray, "..."]:
    """Copy `value` to a finite float64 array with `axes` axes, none of them empty."""
    array = value.detach().cpu().double().numpy() if isinstance(value, Tensor) else value
    array = np.array(array, dtype=np.float64, order="C")
    require(
        array.ndim == axes and array.size > 0,
        f"{name} needs {axes} non-empty axes, got shape {array.shape}",
        ShapeError,
    )
    require(bool(np.isfinite(array).all()), f"{name} has entries that are not finite")
    return array


def as_router(weight: Any, bias: Any, k: int) -> AffineRouter:
    """Build a router from arrays (N, d) and (N,); a bias of None is zero."""
    w = double_array("router weight", weight, 2)
    b = np.zeros(len(w)) if bias is None else double_array("router bias", bias, 1)
    require(len(b) == len(w), f"{len(w)} rows of weight, {len(b)} biases", ShapeError)
    require(1 <= k <= len(w), f"need 1 <= k <= N, got {k=}, N={len(w)}")
    return AffineRouter(w, b, k)


def as_neurons(weight: Any, bias: Any, router: AffineRouter) -> Neurons | None:
    """Build neurons from arrays (N, H, d) and (N, H); None without a weight."""
    if weight is None:
        require(bias is None, "neurons have a bias but no weight", ShapeError)
        return None
    v = double_array("neuron weight", weight, 3)
    c = np.zeros(v.shape[:2]) if bias is None else double_array("neuron bias", bias, 2)
    _check_neurons(v, c, *router.weight.shape)
    return Neurons(v, c)


def fraction_rows(weights: np.ndarray, biases: np.ndarray) -> list[list[Fraction]]:
    """Rows (weights, bias) of affine functions in exact fractions."""
    return [[Fraction(x) for x in (*w, c)] for w, c in zip(weights, biases, strict=True)]


def as_points(points: Any, dim: int, least: int) -> Float[np.ndarray, "points dim"]:
    """Validate an (n, dim) array with n >= least."""
    array = double_array("points", points, 2)
    require(
        array.shape[0] >= least and array.shape[1] == dim,
        f"need at least {least} points of R^{dim}, got an array of shape {array.shape}",
        ShapeError,
    )
    return array


def captured_inputs(layer: LayerTrace) -> Tensor:
    """Return the router inputs of a layer with affine scores, captured with keep="inputs"."""
    if layer.inputs is None:
        raise TraceError(f"{layer_label(layer.name)} keeps no inputs")
    require(layer.facts.affine, f"{layer_label(layer.name)} has no affine scores", TraceError)
    return layer.inputs


def chosen_experts(scores: np.ndarray, k: int) -> Bool[np.ndarray, "points experts"]:
    """Mask of the experts that the router chooses; ties go to the lower index."""
    return topk_mask(torch.from_numpy(np.ascontiguousarray(scores)), k).numpy()


@dataclass(frozen=True)
class CountingRouter:
    """A router in counting coordinates: scores W y + b, where x = length · rotation @ y."""

    W: Float[np.ndarray, "experts rank"]  # (N, d) weights, centred over experts, largest entry 1
    b: Float[np.ndarray, " experts"]  # (N,) biases, centred, in the same units
    linear: bool  # whether all biases are equal, so that cells are cones
    rotation: Float[np.ndarray, "dim rank"]  # (d, r) orthonormal columns
    length: float  # unit of length


@dataclass(frozen=True)
class CountingLayer:
    """A router and the unit neurons of its experts, in counting coordinates."""

    router: CountingRouter
    V: Float[np.ndarray, "neurons dim"]  # (N·H, d) unit rows
    c: Float[np.ndarray, " neurons"]  # (N·H,) signed distances of the neurons' hyperplanes from 0
    owner: Int[np.ndarray, " neurons"]  # (N·H,) expert of each neuron
    linear: bool  # whether no neuron has a bias

    @property
    def no_experts(self) -> Bool[np.ndarray, " experts"]:
        """The empty set of experts."""
        return np.zeros(len(self.router.b), dtype=np.bool_)


def counting_router(W: RouterWeight, b: RouterBias, k: int, least: int = 0) -> CountingRouter:
    """Bring z = W x + b to counting coordinates; k must lie in least ... N."""
    weights, biases = double_array("W", W, 2), double_array("b", b, 1)
    experts, dim = weights.shape
    require(len(biases) == experts, f"W has {experts} experts, b has {len(biases)}", ShapeError)
    require(least <= k <= experts, f"need {least} <= k <= N = {experts}, got {k=}", ParameterError)
    linear = bool((biases == biases[0]).all())
    # an orthogonal matrix without special directions, the same in every run
    rotation = np.linalg.qr(np.random.default_rng(dim).standard_normal((dim, dim)))[0]
    turned, centred = (weights - weights.mean(axis=0)) @ rotation, biases - biases.mean()
    size = float(np.abs(turned).max()) or 1.0
    length = float(np.median(np.abs(centred))) / size or 1.0
    scaled = np.zeros_like(centred) if linear else centred / (size * length)
    return CountingRouter(turned / size, scaled, linear, rotation, length)


def counting_layer(
    W: RouterWeight, b: RouterBias, V: NeuronWeight, c: NeuronBias, k: int
) -> CountingLayer:
    """Bring router and neurons V[e, h] · x + c[e, h] to counting coordinates, 1 <= k <= N."""
    router = counting_router(W, b, k, least=1)
    V, c = double_array("V", V, 3), double_array("c", c, 2)
    experts, dim = router.W.shape
    _check_neurons(V, c, experts, dim)
    norms = np.linalg.norm(V, axis=2)
    require(
        bool((norms > 0).all()),
        f"neuron (e, h) = {tuple(int(i) for i in np.argwhere(norms == 0)[:1].ravel())} has zero "
        "weights and so no wall: drop it",
        DegenerateError,
    )
    offsets = (c / norms).ravel()
    length = float(np.median(np.abs(offsets))) or router.length
    moved = replace(router, b=router.b * (router.length / length), length=length)
    rows = (V / norms[..., None]).reshape(-1, dim) @ router.rotation
    owner = np.repeat(np.arange(experts), c.shape[1])
    return CountingLayer(moved, rows, offsets / length, owner, not offsets.any())


def _check_neurons(V: np.ndarray, c: np.ndarray, experts: int, dim: int) -> None:
    """Raise unless V is (N, H, d) and c (N, H)."""
    require(
        V.shape == (experts, c.shape[1], dim) and c.shape[0] == experts,
        f"need V (N, H, d) and c (N, H) for N={experts}, d={dim}, got {V.shape} and {c.shape}",
        ShapeError,
    )


def why_degenerate(W: Float[np.ndarray, "experts dim"], walls: Float[np.ndarray, "n dim"]) -> str:
    """Describe the first condition of general position that fails; walls are unit normals."""
    size = float(np.abs(W).max(initial=0.0))
    for i, j in combinations(range(len(W)), 2):
        if np.abs(W[i] - W[j]).max(initial=0.0) <= RELATIVE_TOLERANCE * size:
            return f"experts {i} and {j} have the same router weights, so no wall parts them"
    cosines = np.abs(walls @ walls.T) - np.eye(len(walls))
    if walls.size and walls.shape[1] > 1 and cosines.max() >= 1 - RELATIVE_TOLERANCE:
        i, j = (int(n) for n in np.unravel_index(cosines.argmax(), cosines.shape))
        return f"neurons {i} and {j} (flattened e·H + h) have parallel or equal walls"
    rank = int(np.linalg.matrix_rank(W - W[0], tol=RELATIVE_TOLERANCE * max(1.0, size)))
    if rank < min(len(W) - 1, W.shape[1]):
        return f"differences of router weights have rank {rank} < min(N - 1, d)"
    return "more walls meet in a point, or run parallel to a flat, than general position allows"
