"""The definitions of identifiability, literally: are these derivatives linearly independent?

    softmax    strong    ∂^α H, |α| <= 2, in (row, η) at k atoms                     P2 Def. 1
               weak      ∂^α H, |α| <= 1                                            P2 Def. 2
    sigmoid    strong    ∂^α F, 1 <= |α| <= 2, in (row, η) at zero rows             P4 Def. 1, 3
               weak      first derivatives of F in (row, c, η)                      P4 Def. 2, 4

P4 Def. 1 and 3 ask for the weak set besides. Functions are columns of values at n inputs,
normalised; dependent are the eigenvalues of their Gram matrix below 1e-10. Functions that are zero
are named apart: the second derivatives of a linear expert, and of ReLU away from its kink.

Even at generic parameters the strong sets are dependent for every ridge expert once d >= 2, as the
router's features are themselves made of x: ∂²/∂β_u∂a_v = ∂²/∂β_v∂a_u where z is parallel to x, and
∂²/∂A_uu∂A_vv = ∂²/∂A_uv² for matrices. `split_test` asks what such equations do to an estimate.

The papers ask for *any* distinct parameters. `witness` gives parameters that no ridge expert
survives: two experts with a = 0 are two multiples of one function, and so are two two-layer experts
that differ in λ only. So the literal definitions hold for no expert; at generic parameters the test
tells experts apart, and that is what `generic` reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import require
from tieline.estimation.jets import Atom, Jet, atom_jet, names, row_size
from tieline.estimation.model import MoEModel

__all__ = ["RankTest", "generic_atoms", "rank_of", "rank_test", "witness_atoms"]

Strength = Literal["strong", "weak"]
THRESHOLD = 1e-10


@dataclass(frozen=True)
class RankTest:
    """Linear independence of a set of functions.

    Attributes:
        definition: which definition asks for it.
        functions: how many, zero ones apart.
        rank: of their normalised Gram matrix.
        smallest: its smallest eigenvalue.
        zero: names of the functions that vanish, of the first atom.
    """

    definition: str
    functions: int
    rank: int
    smallest: float
    zero: tuple[str, ...] = ()

    @property
    def independent(self) -> bool:
        """Whether all the functions that do not vanish are independent, and none vanishes."""
        return self.rank == self.functions and not self.zero


def rank_test(
    model: MoEModel, atoms: Sequence[Atom], strength: Strength, x: Float[Tensor, "n d"]
) -> RankTest:
    """The rank test of a definition at given atoms.

    For the sigmoid link "strong" sets the rows of the atoms to zero, as P4 Def. 1 and 3 do.
    """
    require(strength in ("strong", "weak"), f"strength is 'strong' or 'weak', got {strength!r}")
    sigmoid = model.link == "sigmoid"
    if sigmoid and strength == "strong":
        atoms = [Atom(torch.zeros_like(a.row), a.bias, a.expert) for a in atoms]
    jets = [atom_jet(model, atom, x) for atom in atoms]
    parts = [_functions(model, jet, strength) for jet in jets]
    labels = parts[0][1]
    return rank_of(
        torch.cat([part[0] for part in parts], dim=1), labels, definition(model, strength)
    )


def definition(model: MoEModel, strength: Strength) -> str:
    """The definition that a test belongs to."""
    if model.link == "softmax":
        number = "1" if strength == "strong" else "2"
        return f"P2 Def. {number}" + ("" if model.gate == "perturbed" else f", {model.gate} router")
    number = {"strong": (1, 3), "weak": (2, 4)}[strength][model.gate == "partial"]
    named = model.gate in ("quadratic", "partial")
    return f"P4 Def. {number}" + ("" if named else f", {model.gate} score")


def rank_of(columns: Float[Tensor, "n m"], labels: Sequence[str], words: str) -> RankTest:
    """Rank of functions given by their values, one column each."""
    length = torch.linalg.vector_norm(columns, dim=0)
    alive = length > 1e-12 * length.max()
    zero = tuple(label for label, ok in zip(labels, alive.tolist(), strict=False) if not ok)
    normal = columns[:, alive] / length[alive]
    values = torch.linalg.svdvals(normal).square()
    require(len(columns) >= normal.shape[1], "need at least as many inputs as functions")
    rank = int((values > THRESHOLD).sum())
    return RankTest(words, normal.shape[1], rank, float(values.min()), zero)


def generic_atoms(model: MoEModel, k: int, seed: int = 0) -> list[Atom]:
    """Draw k normal atoms whose a·x + b = 0 cuts the cube in its middle."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    length = 2 * model.tau[0] if model.gate == "perturbed" else 1.5

    def expert() -> Tensor:
        while True:
            eta = 1.5 * normal(model.expert_width)
            if eta[model.d].abs() <= 0.5 * eta[: model.d].abs().sum():
                return eta

    return [Atom(length * normal(row_size(model)), normal(), expert()) for _ in range(k)]


def witness_atoms(model: MoEModel, seed: int = 0) -> list[Atom]:
    """Two atoms of one router row whose experts are distinct and proportional."""
    first = generic_atoms(model, 1, seed)[0]
    one, two = first.expert.clone(), first.expert.clone()
    if model.expert == "two_layer":
        two[-1] = 2 * one[-1]
    else:
        one[: model.d], two[: model.d] = 0, 0
        one[model.d], two[model.d] = 0.5, 1.0
    return [Atom(first.row, first.bias, eta) for eta in (one, two)]


def _functions(model: MoEModel, jet: Jet, strength: Strength) -> tuple[Tensor, list[str]]:
    """Columns and labels of the functions of one atom."""
    w, label = row_size(model), names(model)
    sigmoid = model.link == "sigmoid"
    if sigmoid and strength == "weak":
        return jet.first, [f"∂{name}" for name in label]
    keep = [i for i in range(len(label)) if i != w]  # all but the bias
    columns = [jet.first[:, keep]] if sigmoid else [jet.value[:, None], jet.first[:, keep]]
    found = ([] if sigmoid else ["H"]) + [f"∂{label[i]}" for i in keep]
    if strength == "strong":
        pairs = [(i, j) for i in keep for j in keep if i <= j]
        columns.append(torch.stack([jet.second[:, i, j] for i, j in pairs], dim=1))
        found += [f"∂{label[i]}∂{label[j]}" for i, j in pairs]
    return torch.cat(columns, dim=1), found
