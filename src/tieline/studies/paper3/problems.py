"""Small layers on which paper 3 is tested.

layer       router and neurons of a fully specified instance, drawn by NumPy from one seed
dense       neurons of one dense layer, with a router that has nothing to choose
drawn       a generator of its own for each stream of a run
router      weights and biases of a router alone
crofton     expected pieces along a curve, which several claims compare with
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from tieline.studies.claim import Run
from tieline.tropical import count_regions, expected_kinks, expected_switches

__all__ = ["Layer", "crofton", "dense", "dense_regions", "drawn", "layer", "router"]


class Layer(NamedTuple):
    """Router W x + b and neurons V[e, h] · x + c[e, h]."""

    W: Float[np.ndarray, "experts dim"]
    b: Float[np.ndarray, " experts"]
    V: Float[np.ndarray, "experts width dim"]
    c: Float[np.ndarray, "experts width"]


def drawn(run: Run, stream: int) -> np.random.Generator:
    """A generator of its own for each stream."""
    return np.random.default_rng([run.seed, stream])


def layer(seed: int | np.random.Generator, experts: int, width: int, dim: int) -> Layer:
    """W, b, V, c in this order from `numpy.random.default_rng(seed)`."""
    r = np.random.default_rng(seed)
    return Layer(
        r.standard_normal((experts, dim)),
        r.standard_normal(experts),
        r.standard_normal((experts, width, dim)),
        r.standard_normal((experts, width)),
    )


def dense(V: np.ndarray, c: np.ndarray) -> Layer:
    """One expert with neurons V (H, d), c (H,), always chosen."""
    return Layer(np.zeros((1, V.shape[1])), np.zeros(1), V[None], c[None])


def dense_regions(V: np.ndarray, c: np.ndarray) -> int:
    """Regions of the arrangement of hyperplanes V x + c = 0."""
    return int(count_regions(*dense(V, c), 1))


def crofton(n_experts: int, k: int, width: int, length: float) -> float:
    """1 + (L/π)(kH + ρ): expected pieces of a Gaussian layer along a curve of length L."""
    switches = 0.0 if k == n_experts else expected_switches(n_experts, k, length)
    return 1 + switches + expected_kinks(k, width, length)


def router(run: Run, stream: int, experts: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and biases, drawn."""
    r = drawn(run, stream)
    return r.standard_normal((experts, dim)), r.standard_normal(experts)
