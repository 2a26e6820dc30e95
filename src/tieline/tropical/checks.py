"""What the exact counts accept, and how they refuse what they cannot count.

    double_array      NumPy or torch input as a finite float64 array
    as_router         weights and biases of a router, in coordinates fit for counting
    as_layer          a router with its experts' neurons, likewise
    DegenerateError   input outside general position (Def. 4.8)

Only differences of scores matter, so routers are centred; a fixed rotation turns axes that weights
share (integers, zeros) into no special direction; lengths are scaled so that walls lie near 1.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from tieline.core.errors import ParameterError, ShapeError, TielineError, require

__all__ = [
    "Array",
    "Count",
    "DegenerateError",
    "Layer",
    "Router",
    "as_layer",
    "as_router",
    "double_array",
    "why_degenerate",
]

Array = np.ndarray | Tensor
RELATIVE = 1e-11


class DegenerateError(TielineError):
    """Walls are not in general position: the count would depend on rounding."""


class Count(int):
    """An exact count, an `int` that also says what it counts.

    Attributes:
        counted: what was counted, in words.
        method: how.
        safety: smallest relative gap that decided anything, in units of the tolerance; below 1 the
            input is refused. Infinite where nothing had to be decided.
    """

    counted: str
    method: str
    safety: float

    def __new__(
        cls, value: int, counted: str, method: str, safety: float = float("inf")
    ) -> "Count":
        """The integer `value` with its provenance."""
        count = super().__new__(cls, value)
        count.counted, count.method, count.safety = counted, method, safety
        return count


@dataclass(frozen=True)
class Router:
    """A router in counting coordinates: scores W y + b, where x = length · rotation @ y.

    Attributes:
        W: (N, d) weights, centred over experts, largest entry 1.
        b: (N,) biases, centred, in the same units.
        linear: whether all biases are equal, so that cells are cones.
        rotation: (d, r) orthonormal columns.
        length: unit of length.
    """

    W: Float[np.ndarray, "experts dim"]
    b: Float[np.ndarray, " experts"]
    linear: bool
    rotation: Float[np.ndarray, "width dim"]
    length: float


@dataclass(frozen=True)
class Layer:
    """A router and the unit neurons of its experts, in counting coordinates.

    Attributes:
        router: the router.
        V: (N·H, d) unit rows.
        c: (N·H,) signed distances of the neurons' hyperplanes from 0.
        owner: (N·H,) expert of each neuron.
        linear: whether no neuron has a bias.
    """

    router: Router
    V: Float[np.ndarray, "neurons dim"]
    c: Float[np.ndarray, " neurons"]
    owner: Int[np.ndarray, " neurons"]
    linear: bool

    @property
    def nobody(self) -> Bool[np.ndarray, " experts"]:
        """The empty set of experts."""
        return np.zeros(len(self.router.b), dtype=np.bool_)


def double_array(name: str, value: Array, axes: int) -> Float[np.ndarray, "..."]:
    """`value` as a finite float64 array with `axes` axes, none of them empty."""
    array = value.detach().cpu().double().numpy() if isinstance(value, Tensor) else value
    array = np.array(array, dtype=np.float64, order="C")
    require(
        array.ndim == axes and array.size > 0,
        f"{name} needs {axes} non-empty axes, got shape {array.shape}",
        ShapeError,
    )
    require(bool(np.isfinite(array).all()), f"{name} has entries that are not finite")
    return array


def as_router(
    W: Real[Array, "experts dim"], b: Real[Array, " experts"], k: int, least: int = 0
) -> Router:
    """The router z = W x + b in counting coordinates; k must lie in least ... N."""
    weights, biases = double_array("W", W, 2), double_array("b", b, 1)
    experts, dim = weights.shape
    require(len(biases) == experts, f"W has {experts} experts, b has {len(biases)}", ShapeError)
    require(least <= k <= experts, f"need {least} <= k <= N = {experts}, got {k=}", ParameterError)
    linear = bool((biases == biases[0]).all())
    rotation = fixed_rotation(dim)
    turned, centred = (weights - weights.mean(axis=0)) @ rotation, biases - biases.mean()
    size = float(np.abs(turned).max()) or 1.0
    length = float(np.median(np.abs(centred))) / size or 1.0
    scaled = np.zeros_like(centred) if linear else centred / (size * length)
    return Router(turned / size, scaled, linear, rotation, length)


def as_layer(
    W: Real[Array, "experts dim"],
    b: Real[Array, " experts"],
    V: Real[Array, "experts width dim"],
    c: Real[Array, "experts width"],
    k: int,
) -> Layer:
    """Router and neurons V[e, h] · x + c[e, h] in counting coordinates; k must lie in 1 ... N."""
    router = as_router(W, b, k, least=1)
    V, c = double_array("V", V, 3), double_array("c", c, 2)
    experts, dim = router.W.shape
    require(
        V.shape == (experts, c.shape[1], dim) and c.shape[0] == experts,
        f"need V (N, H, d) and c (N, H) for N={experts}, d={dim}, got {V.shape} and {c.shape}",
        ShapeError,
    )
    norms = np.linalg.norm(V, axis=2)
    require(
        bool((norms > 0).all()),
        f"neuron (e, h) = {tuple(int(i) for i in np.argwhere(norms == 0)[:1].ravel())} has zero "
        "weights and so no wall: drop it",
        DegenerateError,
    )
    offsets = (c / norms).ravel()
    length = float(np.median(np.abs(offsets))) or router.length
    moved = Router(
        router.W, router.b * (router.length / length), router.linear, router.rotation, length
    )
    rows = (V / norms[..., None]).reshape(-1, dim) @ router.rotation
    owner = np.repeat(np.arange(experts), c.shape[1])
    return Layer(moved, rows, offsets / length, owner, not offsets.any())


def fixed_rotation(dim: int) -> Float[np.ndarray, "dim dim"]:
    """An orthogonal matrix without special directions, the same in every run."""
    return np.linalg.qr(np.random.default_rng(dim).standard_normal((dim, dim)))[0]


def why_degenerate(W: Float[np.ndarray, "experts dim"], walls: Float[np.ndarray, "n dim"]) -> str:
    """The first condition of general position that fails, in words.

    Args:
        W: (N, d) router weights.
        walls: (n, d) unit normals of neurons, none for a router alone.
    """
    size = float(np.abs(W).max(initial=0.0))
    for i, j in combinations(range(len(W)), 2):
        if np.abs(W[i] - W[j]).max(initial=0.0) <= RELATIVE * size:
            return f"experts {i} and {j} have the same router weights, so no wall parts them"
    cosines = np.abs(walls @ walls.T) - np.eye(len(walls))
    if walls.size and walls.shape[1] > 1 and cosines.max() >= 1 - RELATIVE:
        i, j = (int(n) for n in np.unravel_index(cosines.argmax(), cosines.shape))
        return f"neurons {i} and {j} (flattened e·H + h) have parallel or equal walls"
    rank = int(np.linalg.matrix_rank(W - W[0], tol=RELATIVE * max(1.0, size)))
    if rank < min(len(W) - 1, W.shape[1]):
        return f"differences of router weights have rank {rank} < min(N - 1, d)"
    return "more walls meet in a point, or run parallel to a flat, than general position allows"
