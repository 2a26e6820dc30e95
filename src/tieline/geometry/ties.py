"""Where an affine router z = W x + b ties: flats of equal scores and the components on them.

    tie_sets        the sets J of n + 1 experts that can tie at order n        Paper 1, Def. 3.2
    tie_flat        S_J = {x : A_J x = d_J}, rows w_j - w_i, entries b_i - b_j     Paper 1, sec. 3.2
    tie_flats       the same for many J at once, without the rows
    tie_component   which experts tie at a token, and which lie above          Paper 1, Def. A.5

J is named by its experts in ascending order; the first of them, i, is the one the others are
compared with. The order is the maximal one: n + 1 is the number of all scores that tie.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.geometry.distance import expert_distances
from tieline.geometry.order import tie_order
from tieline.ranking import kth_largest

__all__ = [
    "TieComponent",
    "TieFlat",
    "TieFlats",
    "check_router",
    "tie_component",
    "tie_flat",
    "tie_flats",
    "tie_sets",
]

MOST_SETS = 1 << 20
"""Tie sets that one call enumerates at most: 8 MB per token and number kept."""

SINGULAR = 1e-12
"""A Gram matrix with a smaller ratio of extreme eigenvalues has no trustworthy inverse."""


@dataclass(frozen=True, eq=False)
class TieFlat:
    """S_J, the flat of codimension n on which the experts of J score alike.

    Attributes:
        experts: J, ascending.
        normals: A_J, (n, D).
        offsets: d_J, (n,).
        basis: orthonormal basis of the space of normals, (D, n).
        nearest: the point of S_J nearest to the origin, A_Jᵀ (A_J A_Jᵀ)⁻¹ d_J (Paper 1, Thm 4.2).
        distance: its distance ‖δ_J‖ from the origin.
        kappa: κ_J = det(A_J A_Jᵀ)^(-½) (Paper 1, Thm 4.7).
    """

    experts: tuple[int, ...]
    normals: Float[Tensor, "n width"]
    offsets: Float[Tensor, " n"]
    basis: Float[Tensor, "width n"]
    nearest: Float[Tensor, " width"]
    distance: float
    kappa: float


@dataclass(frozen=True, eq=False)
class TieFlats:
    """Many S_J of one order: what volumes and distances need of them.

    Attributes:
        experts: the sets J, (m, n + 1).
        inverse_grams: (A_J A_Jᵀ)⁻¹, (m, n, n).
        distances: ‖δ_J‖, distance of each flat from the origin, (m,).
        kappas: det(A_J A_Jᵀ)^(-½), (m,).
    """

    experts: Int[Tensor, "sets tied"]
    inverse_grams: Float[Tensor, "sets n n"]
    distances: Float[Tensor, " sets"]
    kappas: Float[Tensor, " sets"]


@dataclass(frozen=True, eq=False)
class TieComponent:
    """The component Γ_J of the tie that each token is within ε of.

    Attributes:
        order: n, 0 where there is no tie across the threshold.
        tied: the n + 1 experts of J; none where the order is 0.
        above: the experts that are chosen on both sides of the tie.
    """

    order: Int[Tensor, " tokens"]
    tied: Bool[Tensor, "tokens experts"]
    above: Bool[Tensor, "tokens experts"]


def tie_sets(n_experts: int, order: int) -> Int[Tensor, "sets tied"]:
    """All sets of order + 1 experts, in lexicographic order."""
    require(1 <= order < n_experts, f"need 1 <= order < E, got {order=}, E={n_experts}")
    count = math.comb(n_experts, order + 1)
    require(
        count <= MOST_SETS,
        f"order {order} among {n_experts} experts has {count} tie sets, {MOST_SETS} at most",
    )
    return torch.combinations(torch.arange(n_experts), order + 1)


def tie_flat(
    weight: Float[Tensor, "experts width"],
    bias: Float[Tensor, " experts"] | None,
    experts: tuple[int, ...],
) -> TieFlat:
    """The flat {x : z_i(x) equal for all i in `experts`} of codimension n = |experts| - 1."""
    rows, shift = check_router(weight, bias, 1)
    tied = torch.tensor(sorted(experts))
    require(
        len(set(experts)) == len(experts) >= 2 and set(experts) <= set(range(len(rows))),
        f"need two different experts of {len(rows)} or more, got {experts}",
    )
    normals = rows[tied[1:]] - rows[tied[0]]
    offsets = shift[tied[0]] - shift[tied[1:]]
    left, values, right = torch.linalg.svd(normals, full_matrices=False)
    missing = len(normals) - len(values)
    _check_rank(torch.cat([values.square(), values.new_zeros(missing)]), tied[None])
    coordinates = (left.T @ offsets) / values
    return TieFlat(
        tuple(tied.tolist()),
        normals,
        offsets,
        right.T,
        right.T @ coordinates,
        coordinates.norm().item(),
        1 / values.prod().item(),
    )


def tie_flats(
    weight: Float[Tensor, "experts width"],
    bias: Float[Tensor, " experts"] | None,
    experts: Int[Tensor, "sets tied"],
) -> TieFlats:
    """(A_J A_Jᵀ)⁻¹, ‖δ_J‖ and κ_J of many J, from the distances between experts.

    (w_s - w_i)·(w_t - w_i) = (D_si² + D_ti² - D_st²) / 2 needs no (sets, n, D) array.
    """
    rows, shift = check_router(weight, bias, 1)
    square = expert_distances(rows).square()
    first, rest = experts[:, 0], experts[:, 1:]
    to_first = square[rest, first[:, None]]
    among = square[rest[:, :, None], rest[:, None, :]]
    gram = (to_first[:, :, None] + to_first[:, None, :] - among) / 2
    values, vectors = torch.linalg.eigh(gram)
    _check_rank(values, experts)
    inverse = (vectors / values[:, None, :]) @ vectors.mT
    offsets = shift[first][:, None] - shift[rest]
    reach = (offsets[:, None, :] @ inverse @ offsets[:, :, None]).flatten().clamp(min=0).sqrt()
    return TieFlats(experts, inverse, reach, values.prod(dim=1).rsqrt())


def tie_component(scores: Float[Tensor, "tokens experts"], k: int, eps: float) -> TieComponent:
    """J = {i : |z_i - z_[k]| < ε} where z_[k] - z_[k+1] < ε, and the experts above J.

    Args:
        scores: (T, E).
        k: number of experts chosen, 1 <= k < E.
        eps: tolerance; for ties that are exact up to rounding, a little more than the rounding.
    """
    order = tie_order(scores, k, eps)
    rise = scores.double() - kth_largest(scores, k).double()
    crosses = (order > 0)[:, None]
    tied = (rise.abs() < eps) & crosses
    above = torch.where(crosses, rise >= eps, rise >= 0)
    return TieComponent(order, tied, above)


def check_router(
    weight: Float[Tensor, "experts width"], bias: Float[Tensor, " experts"] | None, k: int
) -> tuple[Float[Tensor, "experts width"], Float[Tensor, " experts"]]:
    """Weight and bias in float64, refused where they are no affine router or k is no choice."""
    experts = len(weight)
    require(1 <= k < experts, f"a tie needs 1 <= k < E, got {k=}, E={experts}")
    shift = weight.new_zeros(experts) if bias is None else bias
    require(len(shift) == experts, f"{experts} experts, but {len(shift)} biases", ShapeError)
    finite = bool(weight.isfinite().all()) and bool(shift.isfinite().all())
    require(finite, "a router's weight and bias must be finite")
    return weight.detach().double(), shift.detach().double()


def _check_rank(eigenvalues: Float[Tensor, "*sets n"], experts: Int[Tensor, "sets tied"]) -> None:
    """Refuse tie sets whose rows w_j - w_i are dependent: they span no flat of codimension n."""
    flat = eigenvalues.reshape(len(experts), -1)
    low = (flat.amin(dim=1) <= SINGULAR * flat.amax(dim=1)).nonzero().flatten()
    who = experts[low[0]].tolist() if len(low) else []
    need = f"{flat.shape[1]} independent differences are needed"
    require(len(low) == 0, f"the weights of experts {who} are rank-deficient: {need}")
