"""First and second derivatives of one gated expert in its parameters θ = (row, bias, η).

    softmax    H(x; θ) = exp(score) h(x, η)       the numerator of one expert, P2 Def. 1 and 2
    sigmoid    F(x; θ) = σ(score) h(x, η)         P4 section 4.1

With ζ the derivative of the score and g its gate function, D²(g h) = (g″ζζᵀ + g′D²score) h +
g′(ζ Dhᵀ + Dh ζᵀ) + g D²h. Quadratic rows are taken in the coordinates that score: the products
x_u x_v with u <= v, so that A_uv and A_vu are one coordinate; a literal reading of the papers, with
both, would fail for that reason alone. At a zero row the perturbed cosine has first derivatives
z/τ1 and even second ones 0; the vanilla cosine has none.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require
from tieline.estimation.gates import input_features
from tieline.estimation.model import MoEModel

__all__ = ["Atom", "Jet", "atom_jet", "atom_of", "names", "row_size"]


@dataclass(frozen=True, eq=False)
class Atom:
    """Parameters of one expert: a row in the coordinates of `jets`, a bias, an expert row."""

    row: Float[Tensor, " w"]
    bias: Float[Tensor, ""]
    expert: Float[Tensor, " q"]


@dataclass(frozen=True, eq=False)
class Jet:
    """Value and derivatives of the gated expert and of its gate at n inputs.

    Attributes:
        value: (n).
        first: (n, D), D = w + 1 + q parameters (row, bias, η).
        second: (n, D, D).
        gate: value of the gate g(score).
        gate_first: its derivatives; zero in η.
        gate_second: its second derivatives.
    """

    value: Float[Tensor, " n"]
    first: Float[Tensor, "n D"]
    second: Float[Tensor, "n D D"]
    gate: Float[Tensor, " n"]
    gate_first: Float[Tensor, "n D"]
    gate_second: Float[Tensor, "n D D"]


def row_size(model: MoEModel) -> int:
    """Coordinates of a row: those of A with u <= v, and b."""
    half = model.d * (model.d + 1) // 2
    return {"quadratic": half + model.d, "partial": half}.get(model.gate, model.d)


def names(model: MoEModel) -> list[str]:
    """Names of the parameters of an atom."""
    d = range(1, model.d + 1)
    matrix = [f"A{u}{v}" for u in d for v in d if u <= v]
    linear = [f"b{u}" for u in d]
    rows = {"quadratic": matrix + linear, "partial": matrix}.get(model.gate, [f"β{u}" for u in d])
    expert = [*(f"a{u}" for u in d), "a0"]
    return [*rows, "c", *expert, *(["λ"] if model.expert == "two_layer" else [])]


def atom_of(model: MoEModel, row: Tensor, bias: Tensor, expert: Tensor) -> Atom:
    """An atom from a row of `MoEParameters`; off-diagonal coefficients A_uv + A_vu are added."""
    if model.gate not in ("quadratic", "partial"):
        return Atom(row, bias, expert)
    d = model.d
    matrix = row[: d * d].reshape(d, d)
    upper = torch.triu(matrix) + torch.tril(matrix, -1).T
    u, v = torch.triu_indices(d, d)
    return Atom(torch.cat((upper[u, v], row[d * d :])), bias, expert)


def atom_jet(model: MoEModel, atom: Atom, x: Float[Tensor, "n d"]) -> Jet:
    """Derivatives of H (softmax) or F (sigmoid) at every input, in closed form."""
    score, zeta, bend = _score(model, atom, x)
    g, g1, g2 = _gate(model, score)
    q = atom.expert.numel()
    zeta = torch.nn.functional.pad(zeta, (0, q))
    bend = torch.nn.functional.pad(bend, (0, q, 0, q))
    h, h1, h2 = _expert(model, atom, x)
    pad = zeta.shape[1] - q
    h1 = torch.nn.functional.pad(h1, (pad, 0))
    h2 = torch.nn.functional.pad(h2, (pad, 0, pad, 0))
    gate_first = g1[:, None] * zeta
    gate_second = g2[:, None, None] * _outer(zeta, zeta) + g1[:, None, None] * bend
    mixed = _outer(gate_first, h1)
    second = gate_second * h[:, None, None] + mixed + mixed.mT + g[:, None, None] * h2
    first = gate_first * h[:, None] + g[:, None] * h1
    return Jet(g * h, first, second, g, gate_first, gate_second)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def _features(model: MoEModel, x: Tensor) -> Tensor:
    """z(x) in the coordinates of a row, (n, w)."""
    tau2 = model.tau[1] if model.gate == "perturbed" else 0.0
    z = input_features(model.gate, x, tau2).T
    if model.gate not in ("quadratic", "partial"):
        return z
    d = model.d
    u, v = torch.triu_indices(d, d)
    return torch.cat((z[:, u * d + v], z[:, d * d :]), dim=1)


def _score(model: MoEModel, atom: Atom, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The score, its gradient and its second derivatives in (row, bias)."""
    z = _features(model, x)
    v, slope, curve = _direction(model, atom.row)
    n, w = z.shape
    zeta = torch.cat((z @ slope, torch.ones(n, 1, dtype=z.dtype)), dim=1)
    bend = torch.zeros(n, w + 1, w + 1, dtype=z.dtype)
    bend[:, :w, :w] = torch.einsum("nc,cab->nab", z, curve)
    return z @ v + atom.bias, zeta, bend


def _direction(model: MoEModel, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """v(β) with its first derivatives (c, a) and second (c, a, b)."""
    w = row.numel()
    flat = torch.zeros(w, w, w, dtype=row.dtype)
    if model.gate not in ("cosine", "perturbed"):
        return row, torch.eye(w, dtype=row.dtype), flat
    tau = model.tau[0] if model.gate == "perturbed" else 0.0
    if not row.any():
        require(tau > 0, "the vanilla cosine has no derivative at a zero row")
        return row, torch.eye(w, dtype=row.dtype) / tau, flat
    length = torch.linalg.vector_norm(row)
    return _ball(row, row / length, length, length + tau)


def _ball(row: Tensor, unit: Tensor, length: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of v = β/r, r = ‖β‖ + τ, with u = β/‖β‖.

    Dv = I/r - βuᵀ/r²,   D²v_cab = -(δ_ca u_b + δ_cb u_a)/r² - β_c (δ_ab - u_a u_b)/(‖β‖r²) +
    2 β_c u_a u_b/r³.
    """
    eye = torch.eye(row.numel(), dtype=row.dtype)
    slope = eye / r - torch.outer(row, unit) / r**2
    across = torch.einsum("ca,b->cab", eye, unit)
    sphere = (eye - torch.outer(unit, unit)) / (length * r**2) - 2 * torch.outer(unit, unit) / r**3
    curve = -(across + across.mT) / r**2 - torch.einsum("c,ab->cab", row, sphere)
    return row / r, slope, curve


def _gate(model: MoEModel, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gate function with two derivatives."""
    if model.link == "softmax":
        g = score.exp()
        return g, g, g
    g = score.sigmoid()
    slope = g * (1 - g)
    return g, slope, slope * (1 - 2 * g)


def _expert(model: MoEModel, atom: Atom, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Expert with two derivatives in η."""
    d, eta = model.d, atom.expert
    inputs = torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), dim=1)
    u = inputs @ eta[: d + 1]
    phi, phi1, phi2 = (
        f(u)[:, None] for f in (model.ridge.value, model.ridge.slope, model.ridge.curvature)
    )
    first, second = phi1 * inputs, phi2.unsqueeze(-1) * _outer(inputs, inputs)
    if model.expert != "two_layer":
        return phi.squeeze(1), first, second
    scale = eta[d + 1]
    whole = torch.zeros(len(x), d + 2, d + 2, dtype=x.dtype)
    whole[:, :-1, :-1] = scale * second
    whole[:, -1, :-1] = whole[:, :-1, -1] = first
    return scale * phi.squeeze(1), torch.cat((scale * first, phi), dim=1), whole
