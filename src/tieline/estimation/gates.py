"""Gates as linear routers on features: score_i(x) = v(β_i)·z(x) + bias_i.

    gate         z(x)                 v(β)                      paper
    linear       x                    β
    cosine       x/‖x‖                β/‖β‖                     2, eq. 2
    perturbed    x/(‖x‖ + τ2)         β/(‖β‖ + τ1)              2, eq. 8
    quadratic    [vec xxᵀ, x]         [vec A, b]                4, eq. 5 (i)
    partial      vec xxᵀ              vec A                     4, eq. 5 (ii)

So the perturbed cosine router *is* a linear router, on x/(‖x‖ + τ2) with rows in the unit ball, and
has the symmetries of one. A zero row or input scores 0 under the vanilla cosine, which has no
derivative there; its slope is taken to be 0.

Arrays are held with the samples last, (..., N, n): at a width of three a sweep over the samples is
contiguous and one over the width is not.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require

__all__ = [
    "GATES",
    "LINKS",
    "GateName",
    "LinkName",
    "gate_weights",
    "input_features",
    "router_directions",
    "router_width",
    "score_gradient",
]

GateName = Literal["linear", "cosine", "perturbed", "quadratic", "partial"]
LinkName = Literal["softmax", "sigmoid"]
GATES = ("linear", "cosine", "perturbed", "quadratic", "partial")
LINKS = ("softmax", "sigmoid")
NORMALISED = ("cosine", "perturbed")

Rows = Float[Tensor, "*batch experts width"]
PerExpert = Float[Tensor, "*batch experts n"]
Features = Float[Tensor, "*inputs width n"]


def router_width(gate: str, d: int) -> int:
    """Numbers in a router row: d, d² + d or d²."""
    require(gate in GATES, f"gate must be one of {GATES}, got {gate!r}")
    return {"quadratic": d * d + d, "partial": d * d}.get(gate, d)


def input_features(gate: str, x: Float[Tensor, "*inputs n d"], tau2: float) -> Features:
    """z(x), samples last."""
    columns = x.mT.contiguous()
    if gate in NORMALISED:
        return _normalised(columns, dim=-2, tau=tau2)
    if gate == "linear":
        return columns
    products = (columns.unsqueeze(-2) * columns.unsqueeze(-3)).flatten(-3, -2)
    return products if gate == "partial" else torch.cat((products, columns), dim=-2)


def router_directions(gate: str, router: Rows, tau1: float) -> Rows:
    """v(β) of every row."""
    return _normalised(router, dim=-1, tau=tau1) if gate in NORMALISED else router


def score_gradient(
    gate: str, router: Rows, tau1: float, features: Features, scores: PerExpert
) -> Float[Tensor, "*either _ width n"]:
    """∂score_i/∂β_i = (z - û_i v_i·z)/(‖β_i‖ + τ1) for normalised rows, z for the others.

    Args:
        gate: name of the gate.
        router: rows β.
        tau1: τ1.
        features: z(x).
        scores: v_i·z without bias.

    Returns:
        With an axis of experts, of length 1 where the gradient is the same for all.
    """
    if gate not in NORMALISED:
        return features.unsqueeze(-3)
    norm = torch.linalg.vector_norm(router, dim=-1, keepdim=True)
    unit = router * _inverse(norm)
    radial = unit.unsqueeze(-1) * scores.unsqueeze(-2)
    return (features.unsqueeze(-3) - radial) * _inverse(norm + tau1).unsqueeze(-1)


def gate_weights(link: str, scores: PerExpert) -> PerExpert:
    """Softmax over experts, or the sigmoid of each score."""
    return scores.softmax(dim=-2) if link == "softmax" else scores.sigmoid()


def _normalised(vectors: Tensor, dim: int, tau: float) -> Tensor:
    """v/(‖v‖ + τ), 0 for v = 0."""
    if dim == -2:  # over a short axis that is not the last, `vector_norm` is several times slower
        norm = vectors.square().sum(dim=dim, keepdim=True).sqrt()
    else:
        norm = torch.linalg.vector_norm(vectors, dim=dim, keepdim=True)
    return vectors * _inverse(norm + tau)


def _inverse(length: Tensor) -> Tensor:
    """1/length, 0 where the length is 0."""
    return torch.where(length > 0, 1 / length.clamp_min(torch.finfo(length.dtype).tiny), 0.0)
