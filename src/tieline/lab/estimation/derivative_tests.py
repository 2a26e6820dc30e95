"""Identifiability tests by derivatives of one gated expert in its parameters θ = (row, bias, η).

    softmax    H(x; θ) = exp(score) h(x, η)       the numerator of one expert, P2 Def. 1 and 2
    sigmoid    F(x; θ) = σ(score) h(x, η)         P4 section 4.1

With ζ the derivative of the score and g its gate function, D²(g h) = (g″ζζᵀ + g′D²score) h +
g′(ζ Dhᵀ + Dh ζᵀ) + g D²h. Quadratic rows are taken in the coordinates that score: the products
x_u x_v with u <= v, so that A_uv and A_vu are one coordinate; a literal reading of the papers, with
both, would fail for that reason alone. At a zero row the perturbed cosine has first derivatives
z/τ1 and even second ones 0; the vanilla cosine has none.

The definitions ask for linear independence of

    softmax    strong    ∂^α H, |α| <= 2, in (row, η) at k atoms                     P2 Def. 1
               weak      ∂^α H, |α| <= 1                                            P2 Def. 2
    sigmoid    strong    ∂^α F, 1 <= |α| <= 2, in (row, η) at zero rows             P4 Def. 1, 3
               weak      first derivatives of F in (row, c, η)                      P4 Def. 2, 4

P4 Def. 1 and 3 ask for the weak set as well. Functions are normalised columns of values at n
inputs; eigenvalues of their Gram matrix below 1e-10 count as dependent. Functions that vanish are
listed apart: the second derivatives of a linear expert, and of ReLU away from its kink.

Even at generic parameters the strong sets are dependent for every ridge expert once d >= 2, as the
router's features are themselves made of x: ∂²/∂β_u∂a_v = ∂²/∂β_v∂a_u where z is parallel to x, and
∂²/∂A_uu∂A_vv = ∂²/∂A_uv² for matrices. The papers ask for *any* distinct parameters, and
`witness_atoms` gives some that no ridge expert survives: two experts with a = 0 are two multiples
of one function, and so are two two-layer experts that differ in λ only. So the literal definitions
hold for no expert; at generic parameters the test distinguishes experts.

The split test replaces the first atom θ by two of half its mass at θ ± εδ. Odd orders cancel, so

    f_split - f* = ε² B(δ, δ) + O(ε⁴),   B(δ, δ) = δᵀ D²(…) δ / 2

and what a first-order change of all parameters cannot undo is Π⊥ B(δ, δ), Π⊥ the projection off the
span of the first derivatives of the split model. The test is

    min over ‖δ‖ = 1 of ‖Π⊥ B(δ, δ)‖_{L²(μ)}

Zero means that an over-specified fit can move by ε while f changes by o(ε²): no loss with
squares in its large cells (P2 L_2, P4 L_1) can then be bounded by ‖f - f*‖. The minimum is taken
over all δ, and over those orthogonal to the scale of the expert, along which ReLU, uᵖ and two-layer
experts may always be split.

ReLU has its second derivative on the kink: a δ that moves the kink changes f by the larger order
ε^{3/2}, so only changes of scale compete and δη is confined to the direction of η.

The sigmoid link is split at a zero row (the sparse regime of paper 4), into two atoms with
σ(c′) = σ(c)/2. A sigmoid atom with another row cannot be split into two of its own expert, for
σ(s + c₁) + σ(s + c₂) is no σ; but an expert with an outer scale λφ can: λ₁φ under s + δ and λ₂φ
under s - (λ₁/λ₂)δ change f by δ² (`p4-thm3`). That split is not part of this test.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import least_squares
from torch import Tensor

from tieline.core.errors import require
from tieline.lab.estimation.model import MoEModel, input_features

THRESHOLD = 1e-10  # eigenvalue of a normalised Gram matrix below which functions are dependent
SPLIT_THRESHOLD = 5e-6  # norm below which a split counts as leaving f unchanged
SPLIT_STARTS, TOLERANCE = 36, 1e-14  # of the minimisation over splits
LEAST_SPLIT_NORM = 1e-12  # norm at which the search for a smaller one stops

Strength = Literal["strong", "weak"]


@dataclass(frozen=True, eq=False)
class Atom:
    """Parameters of one expert: a row in the coordinates that score, a bias, an expert row."""

    row: Float[Tensor, " w"]
    bias: Float[Tensor, ""]
    expert: Float[Tensor, " q"]


@dataclass(frozen=True, eq=False)
class Jet:
    """Value and derivatives of the gated expert and of its gate at n inputs."""

    value: Float[Tensor, " n"]
    first: Float[Tensor, "n D"]  # D = w + 1 + q parameters (row, bias, η)
    second: Float[Tensor, "n D D"]
    gate: Float[Tensor, " n"]  # value of the gate g(score)
    gate_first: Float[Tensor, "n D"]  # its derivatives; zero in η
    gate_second: Float[Tensor, "n D D"]  # its second derivatives


def row_size(model: MoEModel) -> int:
    """Number of coordinates of a router row: those of A with u <= v, and b."""
    half = model.d * (model.d + 1) // 2
    return {"quadratic": half + model.d, "partial": half}.get(model.gate, model.d)


def parameter_names(model: MoEModel) -> list[str]:
    """Names of the parameters of an atom."""
    d = range(1, model.d + 1)
    matrix = [f"A{u}{v}" for u in d for v in d if u <= v]
    linear = [f"b{u}" for u in d]
    rows = {"quadratic": matrix + linear, "partial": matrix}.get(model.gate, [f"β{u}" for u in d])
    expert = [*(f"a{u}" for u in d), "a0"]
    return [*rows, "c", *expert, *(["λ"] if model.expert == "two_layer" else [])]


def atom_jet(model: MoEModel, atom: Atom, x: Float[Tensor, "n d"]) -> Jet:
    """Derivatives of H (softmax) or F (sigmoid) at every input, in closed form."""
    score, zeta, bend = _score_derivatives(model, atom, x)
    g, g1, g2 = _gate_derivatives(model, score)
    q = atom.expert.numel()
    zeta = torch.nn.functional.pad(zeta, (0, q))
    bend = torch.nn.functional.pad(bend, (0, q, 0, q))
    h, h1, h2 = _expert_value_and_derivatives(model, atom, x)
    pad = zeta.shape[1] - q
    h1 = torch.nn.functional.pad(h1, (pad, 0))
    h2 = torch.nn.functional.pad(h2, (pad, 0, pad, 0))
    gate_first = g1[:, None] * zeta
    gate_second = g2[:, None, None] * _outer_products(zeta, zeta) + g1[:, None, None] * bend
    mixed = _outer_products(gate_first, h1)
    second = gate_second * h[:, None, None] + mixed + mixed.mT + g[:, None, None] * h2
    first = gate_first * h[:, None] + g[:, None] * h1
    return Jet(g * h, first, second, g, gate_first, gate_second)


def _outer_products(a: Tensor, b: Tensor) -> Tensor:
    """Outer products a bᵀ over the last axes."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def _score_derivatives(model: MoEModel, atom: Atom, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the score, its gradient and its second derivatives in (row, bias)."""
    d = model.d
    z = input_features(model.gate, x, model.effective_tau[1]).T
    if model.gate in ("quadratic", "partial"):
        first, second = torch.triu_indices(d, d)
        z = torch.cat((z[:, first * d + second], z[:, d * d :]), dim=1)
    v, slope, curve = _row_derivatives(model, atom.row)
    n, w = z.shape
    zeta = torch.cat((z @ slope, torch.ones(n, 1, dtype=z.dtype)), dim=1)
    bend = torch.zeros(n, w + 1, w + 1, dtype=z.dtype)
    bend[:, :w, :w] = torch.einsum("nc,cab->nab", z, curve)
    return z @ v + atom.bias, zeta, bend


def _row_derivatives(model: MoEModel, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Direction v(β) of a row with first derivatives (c, a) and second ones (c, a, b).

    For v = β/r, r = ‖β‖ + τ, with u = β/‖β‖: Dv = I/r - βuᵀ/r²,
    D²v_cab = -(δ_ca u_b + δ_cb u_a)/r² - β_c (δ_ab - u_a u_b)/(‖β‖r²) + 2 β_c u_a u_b/r³.
    """
    w = row.numel()
    eye, flat = torch.eye(w, dtype=row.dtype), torch.zeros(w, w, w, dtype=row.dtype)
    if model.gate not in ("cosine", "perturbed"):
        return row, eye, flat
    tau = model.effective_tau[0]
    if not row.any():
        require(tau > 0, "the vanilla cosine has no derivative at a zero row")
        return row, eye / tau, flat
    length = torch.linalg.vector_norm(row)
    unit, r = row / length, length + tau
    slope = eye / r - torch.outer(row, unit) / r**2
    across = torch.einsum("ca,b->cab", eye, unit)
    sphere = (eye - torch.outer(unit, unit)) / (length * r**2) - 2 * torch.outer(unit, unit) / r**3
    curve = -(across + across.mT) / r**2 - torch.einsum("c,ab->cab", row, sphere)
    return row / r, slope, curve


def _gate_derivatives(model: MoEModel, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gate function with its first two derivatives."""
    if model.link == "softmax":
        g = score.exp()
        return g, g, g
    g = score.sigmoid()
    slope = g * (1 - g)
    return g, slope, slope * (1 - 2 * g)


def _expert_value_and_derivatives(
    model: MoEModel, atom: Atom, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the expert's output with its first two derivatives in η."""
    d, eta = model.d, atom.expert
    inputs = torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), dim=1)
    u = inputs @ eta[: d + 1]
    value, slope, curvature = (
        f(u)[:, None] for f in (model.ridge.value, model.ridge.slope, model.ridge.curvature)
    )
    first, second = slope * inputs, curvature.unsqueeze(-1) * _outer_products(inputs, inputs)
    if model.expert != "two_layer":
        return value.squeeze(1), first, second
    scale = eta[d + 1]
    second_derivatives = torch.zeros(len(x), d + 2, d + 2, dtype=x.dtype)
    second_derivatives[:, :-1, :-1] = scale * second
    second_derivatives[:, -1, :-1] = second_derivatives[:, :-1, -1] = first
    return scale * value.squeeze(1), torch.cat((scale * first, value), dim=1), second_derivatives


@dataclass(frozen=True)
class RankTest:
    """Linear independence of a set of functions."""

    definition: str  # the definition that requires independence
    functions: int  # number of functions that do not vanish
    rank: int  # of their normalised Gram matrix
    smallest: float  # its smallest eigenvalue
    zero: tuple[str, ...] = ()  # names of the functions that vanish, of the first atom

    @property
    def independent(self) -> bool:
        """Whether no function vanishes and all are linearly independent."""
        return self.rank == self.functions and not self.zero


def rank_test(
    model: MoEModel, atoms: Sequence[Atom], strength: Strength, x: Float[Tensor, "n d"]
) -> RankTest:
    """Test the independence that a definition requires; P4 Def. 1 and 3 are at zero rows."""
    require(strength in ("strong", "weak"), f"strength is 'strong' or 'weak', got {strength!r}")
    sigmoid = model.link == "sigmoid"
    if sigmoid and strength == "strong":
        atoms = [Atom(torch.zeros_like(a.row), a.bias, a.expert) for a in atoms]
    columns_and_labels = [
        _tested_functions(model, atom_jet(model, atom, x), strength) for atom in atoms
    ]
    columns = torch.cat([pair[0] for pair in columns_and_labels], dim=1)
    return rank_of_functions(columns, columns_and_labels[0][1], definition_label(model, strength))


def definition_label(model: MoEModel, strength: Strength) -> str:
    """Name of the definition that a test belongs to."""
    if model.link == "softmax":
        number = "1" if strength == "strong" else "2"
        return f"P2 Def. {number}" + ("" if model.gate == "perturbed" else f", {model.gate} router")
    number = {"strong": (1, 3), "weak": (2, 4)}[strength][model.gate == "partial"]
    quadratic = model.gate in ("quadratic", "partial")
    return f"P4 Def. {number}" + ("" if quadratic else f", {model.gate} score")


def rank_of_functions(
    columns: Float[Tensor, "n m"], labels: Sequence[str], definition_name: str
) -> RankTest:
    """Rank test of functions given by their values, one column each."""
    length = torch.linalg.vector_norm(columns, dim=0)
    alive = length > 1e-12 * length.max()
    zero = tuple(label for label, ok in zip(labels, alive.tolist(), strict=False) if not ok)
    normal = columns[:, alive] / length[alive]
    values = torch.linalg.svdvals(normal).square()
    require(len(columns) >= normal.shape[1], "need at least as many inputs as functions")
    rank = int((values > THRESHOLD).sum())
    return RankTest(definition_name, normal.shape[1], rank, float(values.min()), zero)


def generic_atoms(model: MoEModel, k: int, seed: int = 0) -> list[Atom]:
    """Draw k normal atoms with |b| <= ‖a‖_1 / 2, so that a·x + b = 0 cuts the cube."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    length = 2 * model.tau[0] if model.gate == "perturbed" else 1.5

    def expert() -> Tensor:
        while True:
            eta = 1.5 * normal(model.expert_dim)
            if eta[model.d].abs() <= 0.5 * eta[: model.d].abs().sum():
                return eta

    return [Atom(length * normal(row_size(model)), normal(), expert()) for _ in range(k)]


def witness_atoms(model: MoEModel, seed: int = 0) -> list[Atom]:
    """Two atoms of one router row whose distinct experts are multiples of one function."""
    first = generic_atoms(model, 1, seed)[0]
    single, double = first.expert.clone(), first.expert.clone()
    if model.expert == "two_layer":
        double[-1] = 2 * single[-1]
    else:
        single[: model.d], double[: model.d] = 0, 0
        single[model.d], double[model.d] = 0.5, 1.0
    return [Atom(first.row, first.bias, eta) for eta in (single, double)]


def _tested_functions(model: MoEModel, jet: Jet, strength: Strength) -> tuple[Tensor, list[str]]:
    """Return columns and labels of the functions that the definition tests for one atom."""
    w, label = row_size(model), parameter_names(model)
    sigmoid = model.link == "sigmoid"
    if sigmoid and strength == "weak":
        return jet.first, [f"∂{name}" for name in label]
    keep = [i for i in range(len(label)) if i != w]  # all but the bias
    columns = [jet.first[:, keep]] if sigmoid else [jet.value[:, None], jet.first[:, keep]]
    labels = ([] if sigmoid else ["H"]) + [f"∂{label[i]}" for i in keep]
    if strength == "strong":
        pairs = [(i, j) for i in keep for j in keep if i <= j]
        columns.append(torch.stack([jet.second[:, i, j] for i, j in pairs], dim=1))
        labels += [f"∂{label[i]}∂{label[j]}" for i, j in pairs]
    return torch.cat(columns, dim=1), labels


@dataclass(frozen=True)
class SplitTest:
    """Result of the split test: the split that changes f least."""

    minimum: float  # min of ‖Π⊥ B(δ, δ)‖ over all unit δ
    up_to_scale: float  # the same over δ orthogonal to the scale of the expert
    direction: dict[str, float]  # the minimising δ of `up_to_scale`, by parameter
    threshold: float = SPLIT_THRESHOLD  # splits below it leave f unchanged

    @property
    def verdict(self) -> str:
        """Verdict "identifiable", "up to scale" or "not identifiable"."""
        if self.minimum > self.threshold:
            return "identifiable"
        return "up to scale" if self.up_to_scale > self.threshold else "not identifiable"


def split_test(
    model: MoEModel, atoms: Sequence[Atom], x: Float[Tensor, "n d"], seed: int = 0
) -> SplitTest:
    """Test splits of the first atom in the presence of the others, on inputs x drawn from μ."""
    sigmoid = model.link == "sigmoid"
    require(
        not (sigmoid and model.gate == "cosine"),
        "a sigmoid atom is split at a zero row, and the vanilla cosine has none",
    )
    if sigmoid:  # a zero row with half the mass
        row, bias, eta = atoms[0].row, atoms[0].bias, atoms[0].expert
        halved = Atom(torch.zeros_like(row), torch.logit(bias.sigmoid() / 2), eta)
        atoms = [halved, *atoms[1:]]
    jets = [atom_jet(model, atom, x) for atom in atoms]
    tangent, bends = _split_expansion(model, jets)
    directions = _split_directions(model, atoms[0])
    residual = _projected_second_derivatives(tangent, bends)
    scale = _scale_directions(model, atoms[0])
    unscaled_directions = _orthogonal_part(directions, scale)
    partial, delta = _least_split(residual, unscaled_directions, seed)
    best = partial if scale.shape[1] == 0 else _least_split(residual, directions, seed)[0]
    keep = [name for i, name in enumerate(parameter_names(model)) if i != row_size(model)]
    return SplitTest(best, partial, dict(zip(keep, delta.tolist(), strict=True)))


def _split_expansion(model: MoEModel, jets: Sequence[Jet]) -> tuple[Tensor, Tensor]:
    """First derivatives (n, m) of the split model, and second ones (n, D, D) of the split atom."""
    w = row_size(model)
    first = jets[0]
    if model.link == "sigmoid":
        return torch.cat([jet.first for jet in jets], dim=1), _drop_bias_axis(first.second, w)
    total = torch.stack([jet.gate for jet in jets]).sum(dim=0)
    f = torch.stack([jet.value for jet in jets]).sum(dim=0) / total
    tangent = torch.cat(
        [(jet.first - f[:, None] * jet.gate_first) / total[:, None] for jet in jets], dim=1
    )
    second = (first.second - f[:, None, None] * first.gate_second) / (2 * total[:, None, None])
    return tangent, _drop_bias_axis(second, w)


def _drop_bias_axis(second: Tensor, index: int) -> Tensor:
    """Drop the bias from second derivatives: how mass is split is a choice, not a direction."""
    keep = [i for i in range(second.shape[-1]) if i != index]
    return second[:, keep][:, :, keep]


def _split_directions(model: MoEModel, atom: Atom) -> np.ndarray:
    """Orthonormal basis (D, m) of the admissible δ; for ReLU, δη is a multiple of η."""
    w, q = row_size(model), model.expert_dim
    if not model.has_kink:
        return np.eye(w + q)
    inner = atom.expert[: model.d + 1].numpy()
    basis = np.zeros((w + q, w + 1 + q - len(inner)))
    basis[:w, :w] = np.eye(w)
    basis[w : w + len(inner), w] = inner / np.linalg.norm(inner)
    basis[w + len(inner) :, w + 1 :] = np.eye(q - len(inner))
    return basis


def _scale_directions(model: MoEModel, atom: Atom) -> np.ndarray:
    """Directions that change only the strength of the expert."""
    w, q, columns = row_size(model), model.expert_dim, []
    inner = atom.expert[: model.d + 1].numpy()
    if model.ridge.degree is not None:
        columns.append(np.concatenate((np.zeros(w), inner, np.zeros(q - len(inner)))))
    if model.expert == "two_layer":
        columns.append(np.eye(w + q)[-1])
    return np.array(columns).T.reshape(w + q, len(columns))


def _orthogonal_part(basis: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Basis of the part of a subspace that is orthogonal to another."""
    if scale.shape[1] == 0:
        return basis
    inside = basis.T @ np.linalg.qr(scale)[0]
    u, s, _ = np.linalg.svd(inside, full_matrices=True)
    return basis @ u[:, int((s > 1e-9).sum()) :]


def _projected_second_derivatives(tangent: Tensor, bends: Tensor) -> np.ndarray:
    """R (m, D, D) with ‖Π⊥ B(δ, δ)‖ = ‖R[δ, δ]‖."""
    n, size = len(bends), bends.shape[-1]
    length = torch.linalg.vector_norm(tangent, dim=0)
    u, s, _ = torch.linalg.svd(tangent[:, length > 0] / length[length > 0], full_matrices=False)
    basis = u[:, s > 1e-7]
    flat = bends.reshape(n, -1)
    residual = flat - basis @ (basis.T @ flat)
    residual = residual - basis @ (
        basis.T @ residual
    )  # twice is enough for orthogonality to rounding
    return torch.linalg.qr(residual / n**0.5)[1].numpy().reshape(-1, size, size)


def _least_split(tensor: np.ndarray, basis: np.ndarray, seed: int) -> tuple[float, np.ndarray]:
    """Minimise ‖R[δ, δ]‖ over unit δ of a subspace, from many starts; the minimum and its δ."""
    reduced = np.einsum("mab,ai,bj->mij", tensor, basis, basis)
    reduced = (reduced + reduced.transpose(0, 2, 1)) / 2
    rng = np.random.default_rng(seed)

    def residual(y: np.ndarray) -> np.ndarray:
        unit = y / np.linalg.norm(y)
        return np.einsum("mij,i,j->m", reduced, unit, unit)

    def slope(y: np.ndarray) -> np.ndarray:
        length = np.linalg.norm(y)
        unit = y / length
        rows = 2 * np.einsum("mij,j->mi", reduced, unit)
        return (rows - np.outer(rows @ unit, unit)) / length

    fits = []
    for _ in range(SPLIT_STARTS):
        fits.append(
            least_squares(
                residual,
                rng.standard_normal(basis.shape[1]),
                jac=slope,  # type: ignore[arg-type]  # a function is allowed, the stub says a name
                method="lm",
                ftol=TOLERANCE,
                xtol=TOLERANCE,
                gtol=TOLERANCE,
            )
        )
        if 2 * fits[-1].cost < LEAST_SPLIT_NORM**2:
            break
    best = min(fits, key=lambda fit: fit.cost)
    delta = basis @ (best.x / np.linalg.norm(best.x))
    return float(np.sqrt(2 * best.cost)), delta
