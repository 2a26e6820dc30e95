"""The Newton zonotope of a dense ReLU layer (paper 3, Prop. 4.10, Rem. 4.11).

    zonotope_counts    vertices of Σ_h [0, (v_h, c_h)] in R^{d+1}, and those on its upper side

Σ_h max(0, v_h · x + c_h) is a tropical polynomial whose terms are the vertices of the zonotope; the
upper ones are the linear regions of the layer. Vertices are the regions of the central arrangement
{(v_h, c_h) · y = 0}, of which the affine arrangement is the slice y_last = 1, so

    vertices = 2 regions - regions of the same neurons without biases:

the paper's "not strictly bijective", in numbers.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Real

from tieline.tropical.checks import Array, double_array
from tieline.tropical.regions import count_regions

__all__ = ["ZonotopeCounts", "zonotope_counts"]


class ZonotopeCounts(NamedTuple):
    """Vertices of the Newton zonotope.

    Attributes:
        vertices: all of them; 2 Σ_{j<=d} C(H-1, j) in general position.
        upper: those seen from above, the linear regions of the layer; Φ(H, d).
        both: those seen from above and from below; 2 Σ_{j<d} C(H-1, j).
    """

    vertices: int
    upper: int
    both: int


def zonotope_counts(V: Real[Array, "width dim"], c: Real[Array, " width"]) -> ZonotopeCounts:
    """Vertices of Σ_h [0, (v_h, c_h)] for neurons v_h · x + c_h in general position.

    Args:
        V: (H, d) neurons' weights, d <= 5.
        c: (H,) neurons' biases.
    """
    weights, biases = double_array("V", V, 2)[None], double_array("c", c, 1)[None]
    router = np.zeros((1, weights.shape[2])), np.zeros(1)
    upper = int(count_regions(*router, weights, biases, 1))
    both = int(count_regions(*router, weights, np.zeros_like(biases), 1))
    return ZonotopeCounts(2 * upper - both, upper, both)
