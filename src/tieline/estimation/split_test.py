"""Can an expert be split in two that the data do not tell from one?

Replace the first atom θ by two of half its mass at θ ± εδ. The odd orders cancel, so

    f_split - f* = ε² B(δ, δ) + O(ε⁴),   B(δ, δ) = δᵀ D²(…) δ / 2

and what a first-order change of all parameters cannot undo is Π⊥ B(δ, δ), Π⊥ the projection off the
span of the first derivatives of the split model. The test is

    min over ‖δ‖ = 1 of ‖Π⊥ B(δ, δ)‖_{L²(μ)}

Zero means that an over-specified fit can wander off by ε while f moves by o(ε²): no loss with
squares in its large cells (P2 L_2, P4 L_1) can then be bounded by ‖f - f*‖. The minimum is taken
over all δ, and over those orthogonal to the scale of the expert, along which ReLU, uᵖ and two-layer
experts may always be split.

ReLU has its second derivative on the kink: a δ that moves the kink changes f by the larger order
ε^{3/2}, so only changes of scale compete and δη is confined to the direction of η.

The sigmoid link is split at a zero row (the sparse regime of paper 4), into two atoms with
σ(c′) = σ(c)/2. A sigmoid atom with another row cannot be split at all: σ(s + c₁) + σ(s + c₂) is
no σ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import least_squares
from torch import Tensor

from tieline.errors import require
from tieline.estimation.jets import Atom, Jet, atom_jet, names, row_size
from tieline.estimation.model import MoEModel

__all__ = ["SPLIT_THRESHOLD", "SplitTest", "split_test"]

SPLIT_THRESHOLD = 5e-6
STARTS = 12
TOLERANCE = 1e-14


@dataclass(frozen=True)
class SplitTest:
    """The least visible split.

    Attributes:
        minimum: min of ‖Π⊥ B(δ, δ)‖ over all unit δ.
        up_to_scale: the same over δ orthogonal to the scale of the expert.
        direction: the minimising δ of `up_to_scale`, by parameter.
        threshold: below it a split counts as invisible.
    """

    minimum: float
    up_to_scale: float
    direction: dict[str, float]
    threshold: float = SPLIT_THRESHOLD

    @property
    def verdict(self) -> str:
        """In words: "identifiable", "up to scale" or "not identifiable"."""
        if self.minimum > self.threshold:
            return "identifiable"
        return "up to scale" if self.up_to_scale > self.threshold else "not identifiable"


def split_test(
    model: MoEModel, atoms: Sequence[Atom], x: Float[Tensor, "n d"], seed: int = 0
) -> SplitTest:
    """The split test of the first atom among the others.

    Args:
        model: the family.
        atoms: the truth.
        x: inputs drawn from μ.
        seed: of the starts of the minimisation.
    """
    sigmoid = model.link == "sigmoid"
    require(
        not (sigmoid and model.gate == "cosine"),
        "a sigmoid atom is split at a zero row, and the vanilla cosine has none",
    )
    if sigmoid:
        atoms = [_halved(atoms[0]), *atoms[1:]]
    jets = [atom_jet(model, atom, x) for atom in atoms]
    tangent, bends = _expansion(model, jets)
    free = _directions(model, atoms[0])
    residual = _projected(tangent, bends)
    scale = _scale_directions(model, atoms[0])
    across = _without(free, scale)
    partial, delta = _minimum(residual, across, seed)
    best = partial if scale.shape[1] == 0 else _minimum(residual, free, seed)[0]
    label = names(model)
    w = row_size(model)
    keep = [name for i, name in enumerate(label) if i != w]
    return SplitTest(best, partial, dict(zip(keep, delta.tolist(), strict=True)))


def _halved(atom: Atom) -> Atom:
    """The atom at a zero row with half its mass."""
    return Atom(torch.zeros_like(atom.row), torch.logit(atom.bias.sigmoid() / 2), atom.expert)


def _expansion(model: MoEModel, jets: Sequence[Jet]) -> tuple[Tensor, Tensor]:
    """First derivatives of the split model (n, m), D² of the split atom (n, D, D) in (row, η)."""
    w = row_size(model)
    first = jets[0]
    if model.link == "sigmoid":
        return torch.cat([jet.first for jet in jets], dim=1), _drop(first.second, w)
    total = torch.stack([jet.gate for jet in jets]).sum(dim=0)
    f = torch.stack([jet.value for jet in jets]).sum(dim=0) / total
    tangent = torch.cat(
        [(jet.first - f[:, None] * jet.gate_first) / total[:, None] for jet in jets], dim=1
    )
    second = (first.second - f[:, None, None] * first.gate_second) / (2 * total[:, None, None])
    return tangent, _drop(second, w)


def _drop(second: Tensor, index: int) -> Tensor:
    """Without the bias: a split of the mass is a choice, not a direction."""
    keep = [i for i in range(second.shape[-1]) if i != index]
    return second[:, keep][:, :, keep]


def _directions(model: MoEModel, atom: Atom) -> np.ndarray:
    """Orthonormal basis (D, m) of the δ that compete; for ReLU δη is a multiple of η."""
    w, q = row_size(model), model.expert_width
    relu = "relu" in (model.expert, model.activation if model.expert == "two_layer" else "")
    if not relu:
        return np.eye(w + q)
    inner = atom.expert[: model.d + 1].numpy()
    basis = np.zeros((w + q, w + 1 + q - len(inner)))
    basis[:w, :w] = np.eye(w)
    basis[w : w + len(inner), w] = inner / np.linalg.norm(inner)
    basis[w + len(inner) :, w + 1 :] = np.eye(q - len(inner))
    return basis


def _scale_directions(model: MoEModel, atom: Atom) -> np.ndarray:
    """Directions along which the expert only changes its strength."""
    w, q, columns = row_size(model), model.expert_width, []
    inner = atom.expert[: model.d + 1].numpy()
    if model.ridge.degree is not None:
        columns.append(np.concatenate((np.zeros(w), inner, np.zeros(q - len(inner)))))
    if model.expert == "two_layer":
        columns.append(np.eye(w + q)[-1])
    return np.array(columns).T.reshape(w + q, len(columns))


def _without(basis: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The part of a subspace that is orthogonal to another."""
    if scale.shape[1] == 0:
        return basis
    inside = basis.T @ np.linalg.qr(scale)[0]
    u, s, _ = np.linalg.svd(inside, full_matrices=True)
    return basis @ u[:, int((s > 1e-9).sum()) :]


def _projected(tangent: Tensor, bends: Tensor) -> np.ndarray:
    """R (m, D, D) with ‖Π⊥ B(δ, δ)‖ = ‖R[δ, δ]‖."""
    n, size = len(bends), bends.shape[-1]
    length = torch.linalg.vector_norm(tangent, dim=0)
    u, s, _ = torch.linalg.svd(tangent[:, length > 0] / length[length > 0], full_matrices=False)
    basis = u[:, s > 1e-7]
    flat = bends.reshape(n, -1)
    left = flat - basis @ (basis.T @ flat)
    left = left - basis @ (basis.T @ left)  # twice is enough for orthogonality to rounding
    return torch.linalg.qr(left / n**0.5)[1].numpy().reshape(-1, size, size)


def _minimum(tensor: np.ndarray, basis: np.ndarray, seed: int) -> tuple[float, np.ndarray]:
    """Least ‖R[δ, δ]‖ over unit δ of a subspace, from many starts, with its δ."""
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

    starts = (rng.standard_normal(basis.shape[1]) for _ in range(STARTS))
    fits = [
        least_squares(
            residual,
            y,
            jac=slope,  # type: ignore[arg-type]  # a function is allowed, the stub says a name
            method="lm",
            ftol=TOLERANCE,
            xtol=TOLERANCE,
            gtol=TOLERANCE,
        )
        for y in starts
    ]
    best = min(fits, key=lambda fit: fit.cost)
    delta = basis @ (best.x / np.linalg.norm(best.x))
    return float(np.sqrt(2 * best.cost)), delta
