"""Symmetries of a model, which the data cannot determine, and its parameters up to them.

    order             experts may be renumbered                    all
    bias shift        β_0 + t                                      softmax
    row shift         v(β_i) + s, the same s for all i             softmax
    row scale         t_i β_i, t_i > 0                             vanilla cosine
    matrix part       A_i + K_i, K_i antisymmetric                 quadratic scores
    hidden scale      (t a, t b, λ/tᵖ)                             two-layer, φ of degree p
    sign              (a, b) → -(a, b), with λ → -λ for odd φ      even uᵖ; two-layer, odd φ
    mass and scale    m φ(u) = (m/tᵖ) φ(tu)                        degree p; zero row, sigmoid

v is the row that scores (`model`): β/(‖β‖ + τ1) for the perturbed cosine, so that router has the
row shift of a linear one; for the vanilla cosine the shifted rows must stay on the sphere, which
leaves max(0, d - N) dimensions. With the biases pinned, the continuous directions of a softmax
model with generic experts count d (linear), d (perturbed) and N + max(0, d - N) = max(d, N)
(vanilla cosine).

A softmax model depends on the differences v_i - v_j and β_0i - β_0j only. `canonical` writes rows v
and fixes the two constants: by the mean over the masses, which splitting an atom does not move, or
by a zero in the last row as paper 2 (A.3) does for the bias.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tieline.lab.estimation.model import (
    MoEModel,
    MoEParameters,
    quadratic_blocks,
    router_directions,
)

Pin = Literal["mean", "last"]
QUADRATIC = ("quadratic", "partial")
ODD = ("linear", "tanh")


@dataclass(frozen=True)
class Symmetry:
    """A group that leaves the regression function alone."""

    name: str  # one of the table above
    kind: Literal["permute", "shift", "scale", "drop", "flip"]  # what it does
    dimension: int  # of the group at generic parameters; 0 for a discrete one
    condition: str = ""  # what else must hold; empty if nothing


def symmetries(model: MoEModel) -> tuple[Symmetry, ...]:
    """The symmetry group of a combination of gate, link and experts, as data."""
    d, n, degree = model.d, model.n_experts, model.ridge.degree
    half = d * (d + 1) // 2
    groups = [Symmetry("order", "permute", 0)]
    if model.link == "softmax":
        free = {"quadratic": half + d, "partial": half, "cosine": max(0, d - n)}.get(model.gate, d)
        groups.append(Symmetry("bias shift", "shift", 1))
        groups.append(Symmetry("row shift", "shift", free))
    if model.gate == "cosine":
        groups.append(Symmetry("row scale", "scale", n))
    if model.gate in QUADRATIC:
        groups.append(Symmetry("matrix part", "drop", n * d * (d - 1) // 2))
    if model.expert == "two_layer" and degree is not None:
        groups.append(Symmetry("hidden scale", "scale", n))
    if has_signs(model):
        groups.append(Symmetry("sign", "flip", 0))
    if degree is not None or model.expert == "two_layer":
        condition = "sigmoid link, zero router row"
        if model.link == "softmax":
            condition = "several atoms with one router row and one direction of the expert"
        groups.append(Symmetry("mass and scale", "scale", n, condition))
    return tuple(groups)


def null_dimension(model: MoEModel, *, bias_pinned: bool = False) -> int:
    """Dimension of the unconditional symmetries: flat directions of generic parameters."""
    groups = [group for group in symmetries(model) if not group.condition]
    return sum(group.dimension for group in groups) - (bias_pinned and model.link == "softmax")


def canonical(model: MoEModel, params: MoEParameters, pin: Pin = "mean") -> MoEParameters:
    """Parameters up to the unconditional symmetries, order of atoms apart.

    Router rows become v(β) with symmetric A; for the softmax link their constant and that of the
    biases are fixed by `pin`: "mean" gives masses of sum 1 and rows of mean 0 over the masses,
    "last" gives the last atom bias and row 0. Hidden scales are moved into λ and signs made
    positive.
    """
    model.check(params)
    tau = model.tau[0] if model.gate == "perturbed" else 0.0
    rows, bias = router_directions(model.gate, params.router, tau), params.bias
    if model.gate in QUADRATIC:
        A, b = quadratic_blocks(rows, full=model.gate == "quadratic")
        rows = torch.cat((((A + A.mT) / 2).flatten(-2), b), dim=-1)
    if model.link == "softmax" and pin == "last":
        rows, bias = rows - rows[..., -1:, :], bias - bias[..., -1:]
    elif model.link == "softmax":
        bias = bias.log_softmax(dim=-1)
        rows = rows - (bias.exp().unsqueeze(-1) * rows).sum(dim=-2, keepdim=True)
    return MoEParameters(rows, bias, _normal_experts(model, params.experts))


def has_signs(model: MoEModel) -> bool:
    """Whether η and -η give the same expert."""
    if model.expert == "polynomial":
        return model.power % 2 == 0
    return model.expert == "two_layer" and model.activation in ODD


def _normal_experts(model: MoEModel, experts: Tensor) -> Tensor:
    """Hidden rows of length 1 with their scale in λ, first nonzero entry positive, where free."""
    d, degree = model.d, model.ridge.degree
    inner, outer = experts[..., : d + 1], experts[..., d + 1 :]
    if model.expert == "two_layer" and degree is not None:
        length = torch.linalg.vector_norm(inner, dim=-1, keepdim=True)
        safe = torch.where(length > 0, length, 1.0)
        inner, outer = inner / safe, outer * safe**degree
    if has_signs(model):
        first = (inner != 0).to(torch.int8).argmax(dim=-1, keepdim=True)
        sign = inner.gather(-1, first).sign()
        sign = torch.where(sign == 0, 1.0, sign)
        inner, outer = inner * sign, outer * sign
    return torch.cat((inner, outer), dim=-1)
