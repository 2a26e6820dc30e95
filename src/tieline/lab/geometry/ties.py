"""Ties of an affine router z = W x + b: where they are, and the nearest one of a given order.

J lists its experts in ascending order and compares the others with the first, i. The order is the
maximal one: n + 1 is the number of all scores that tie.

Order 1 is min over i ∈ S, j ∉ S of (z_i - z_j) / ‖w_i - w_j‖ (Def. 5.2). Order n is the smallest
distance to a flat {z_J equal}, |J| = n + 1, whose projection of x is a tie *across the threshold*:
p scores above it with p <= k - 1 and p + n + 1 >= k + 1 (Paper 1, Def. A.5). No quadratic programme
is needed. Were the nearest point of Γ^(n) on a tie of more experts J', every direction that lets
one expert of J' go up (or each that lets one go down) would stay in Γ^(n); these directions span
the space of their scores positively, so x could not be strictly nearer along any: x would be there.

    dist² = δᵀ (A Aᵀ)⁻¹ δ,  δ = A x - d = (z_j - z_i)_j,   z(y) = z - W Aᵀ (A Aᵀ)⁻¹ δ

are functions of the scores alone, so D enters only through x W.

Across a tie, `difference_by_step` compares the outputs of a layer h apart (Paper 1, Figure 1).
As h → 0 the difference tends to the height of the jump for a layer that jumps and to zero for a
continuous one, linearly in h if it is Lipschitz. `step_exponent` distinguishes them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.core.numerics import log_grid
from tieline.core.ranking import kth_largest
from tieline.lab.power_law import exponent
from tieline.measure.boundary import Real, tie_order
from tieline.measure.distance import expert_distances, nearest_tie

__all__ = [
    "LineWalk",
    "StepDifferences",
    "TieComponent",
    "TieFlat",
    "TieFlats",
    "TiePoint",
    "affine_scores",
    "check_router",
    "difference_by_step",
    "distance_to_tie",
    "nearest_tie_point",
    "step_exponent",
    "tie_component",
    "tie_flat",
    "tie_flats",
    "tie_sets",
    "walk_across",
]

Weight = Float[Tensor, "experts dim"]
Bias = Float[Tensor, " experts"] | None
Scores = Float[Tensor, "tokens experts"]
TieSets = Int[Tensor, "sets tied"]

MOST_SETS = 1 << 20
"""Largest number of tie sets that one call enumerates."""

LEAST_EIGENVALUE_RATIO = 1e-12
"""Smallest ratio of least to largest eigenvalue at which a Gram matrix is inverted."""

ROWS_AT_ONCE = 512
"""Inputs converted to float64 at once, so that the copy stays in cache."""

MOST_ENTRIES = 1 << 21
"""Largest number of (token, set, score) entries held at once in a search over tie sets."""

FLATS_TRIED_FIRST = 8
"""Number of nearest flats of a token that are tried first."""


@dataclass(frozen=True, eq=False)
class TieFlat:
    """S_J, the flat of codimension n on which the experts of J score alike."""

    experts: tuple[int, ...]  # J, ascending
    normals: Float[Tensor, "n dim"]  # A_J, (n, D)
    offsets: Float[Tensor, " n"]  # d_J, (n,)
    basis: Float[Tensor, "dim n"]  # orthonormal basis of the space of normals, (D, n)
    # the point of S_J nearest to the origin, A_Jᵀ (A_J A_Jᵀ)⁻¹ d_J (Paper 1, Thm 4.2)
    nearest: Float[Tensor, " dim"]
    distance: float  # its distance ‖δ_J‖ from the origin
    kappa: float  # κ_J = det(A_J A_Jᵀ)^(-½) (Paper 1, Thm 4.7)


@dataclass(frozen=True, eq=False)
class TieFlats:
    """Many flats S_J of one order, with the quantities that volumes and distances need."""

    experts: TieSets  # the sets J, (m, n + 1)
    inverse_grams: Float[Tensor, "sets n n"]  # (A_J A_Jᵀ)⁻¹, (m, n, n)
    distances: Float[Tensor, " sets"]  # ‖δ_J‖, distance of each flat from the origin, (m,)
    kappas: Float[Tensor, " sets"]  # det(A_J A_Jᵀ)^(-½), (m,)


@dataclass(frozen=True, eq=False)
class TieComponent:
    """The tie component Γ_J within ε of each token."""

    order: Int[Tensor, " tokens"]  # n, 0 where there is no tie across the threshold
    tied: Bool[Tensor, "tokens experts"]  # the n + 1 experts of J; none where the order is 0
    above: Bool[Tensor, "tokens experts"]  # the experts that are chosen on both sides of the tie


@dataclass(frozen=True, eq=False)
class TiePoint:
    """The nearest order-n tie of each token."""

    # ‖x - point‖ in float64; infinite where the router has no such tie
    distance: Float[Tensor, " tokens"]
    point: Float[Tensor, "tokens dim"]  # the projection of x
    # unit vector from the point towards x; where x is on the tie, a normal of it
    normal: Float[Tensor, "tokens dim"]
    experts: Int[Tensor, "tokens tied"]  # the experts that tie there, (T, n + 1)


def tie_sets(n_experts: int, order: int) -> Int[Tensor, "sets tied"]:
    """All sets J of `order` + 1 experts, in lexicographic order (Paper 1, Def. 3.2)."""
    require(1 <= order < n_experts, f"need 1 <= order < E, got {order=}, E={n_experts}")
    count = math.comb(n_experts, order + 1)
    require(
        count <= MOST_SETS,
        f"order {order} among {n_experts} experts has {count} tie sets, {MOST_SETS} at most",
    )
    return torch.combinations(torch.arange(n_experts), order + 1)


def tie_flat(weight: Weight, bias: Bias, experts: tuple[int, ...]) -> TieFlat:
    """Flat S_J = {x : A_J x = d_J} of equal scores of `experts`; rows w_j - w_i (sec. 3.2)."""
    rows, shift = check_router(weight, bias, 1)
    tied = torch.tensor(sorted(experts))
    require(
        len(set(experts)) == len(experts) >= 2 and set(experts) <= set(range(len(rows))),
        f"need two different experts of {len(rows)} or more, got {experts}",
    )
    normals = rows[tied[1:]] - rows[tied[0]]
    offsets = shift[tied[0]] - shift[tied[1:]]
    left_vectors, values, right = torch.linalg.svd(normals, full_matrices=False)
    missing = len(normals) - len(values)
    _check_rank(torch.cat([values.square(), values.new_zeros(missing)]), tied[None])
    coordinates = (left_vectors.T @ offsets) / values
    return TieFlat(
        tuple(tied.tolist()),
        normals,
        offsets,
        right.T,
        right.T @ coordinates,
        coordinates.norm().item(),
        1 / values.prod().item(),
    )


def tie_flats(weight: Weight, bias: Bias, experts: TieSets) -> TieFlats:
    """Inverse Gram matrix, distance ‖δ_J‖ and κ_J of many tie sets, from distances of experts.

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


def tie_component(scores: Scores, k: int, epsilon: float) -> TieComponent:
    """Experts J = {i : |z_i - z_[k]| < ε} tied across the threshold, and those above (Def. A.5).

    A component exists where z_[k] - z_[k+1] < ε. For exact ties, take ε a little above rounding.
    """
    order = tie_order(scores, k, epsilon)
    rise = scores.double() - kth_largest(scores, k).double()
    crosses = (order > 0)[:, None]
    tied = (rise.abs() < epsilon) & crosses
    above = torch.where(crosses, rise >= epsilon, rise >= 0)
    return TieComponent(order, tied, above)


def distance_to_tie(
    x: Float[Tensor, "*batch dim"], W: Weight, b: Bias, k: int, order: int = 1
) -> Float[Tensor, "*batch"]:
    """Euclidean distance dist(x, Γ^(n)) from x to the ties of order n or more, in float64.

    Args:
        x: inputs of the router.
        W: its weight, one row per expert.
        b: its bias, or None.
        k: number of experts chosen, 1 <= k < E.
        order: n >= 1; n + 1 experts tie. Beyond 1 any n + 1 rows of W must be affinely independent.
    """
    weight, bias = check_router(W, b, k)
    scores = affine_scores(x.reshape(-1, x.shape[-1]), weight, bias)
    return _nearest_tie_flat(scores, weight, bias, k, order)[0].reshape(x.shape[:-1])


def nearest_tie_point(
    x: Float[Tensor, "tokens dim"], W: Weight, b: Bias, k: int, order: int = 1
) -> TiePoint:
    """`distance_to_tie` with the point where it is attained, the normal and the tied experts."""
    weight, bias = check_router(W, b, k)
    inputs, scores = x.detach().double(), affine_scores(x, weight, bias)
    distance, experts = _nearest_tie_flat(scores, weight, bias, k, order)
    normals = weight[experts[:, 1:]] - weight[experts[:, :1]]
    tied_scores = scores.gather(1, experts)
    rise = tied_scores[:, 1:] - tied_scores[:, :1]
    # least squares instead of the Gram matrix: the point is on the tie to the last digits
    step = torch.linalg.lstsq(normals, rise[:, :, None]).solution.squeeze(2)
    point = inputs - step
    direction = torch.where(distance[:, None] > 0, step, normals[:, 0])
    return TiePoint(distance, point, direction / direction.norm(dim=1, keepdim=True), experts)


def affine_scores(
    x: Float[Tensor, "tokens dim"], weight: Weight, bias: Float[Tensor, " experts"]
) -> Float[Tensor, "tokens experts"]:
    """Scores z = W x + b in float64."""
    require(x.shape[1] == weight.shape[1], f"{x.shape[1]=}, {weight.shape[1]=}", ShapeError)
    scores = bias.repeat(len(x), 1)
    columns = weight.T.contiguous()
    for rows, inputs in zip(
        scores.split(ROWS_AT_ONCE), x.detach().split(ROWS_AT_ONCE), strict=True
    ):
        rows.addmm_(inputs.double(), columns)
    return scores


def check_router(
    weight: Weight, bias: Bias, k: int
) -> tuple[Float[Tensor, "experts dim"], Float[Tensor, " experts"]]:
    """Return weight and bias in float64; raise unless they form a router with 1 <= k < E."""
    experts = len(weight)
    require(1 <= k < experts, f"a tie needs 1 <= k < E, got {k=}, E={experts}")
    shift = weight.new_zeros(experts) if bias is None else bias
    require(len(shift) == experts, f"{experts} experts, but {len(shift)} biases", ShapeError)
    finite = bool(weight.isfinite().all()) and bool(shift.isfinite().all())
    require(finite, "a router's weight and bias must be finite")
    return weight.detach().double(), shift.detach().double()


def _check_rank(eigenvalues: Float[Tensor, "*sets n"], experts: TieSets) -> None:
    """Raise if the rows w_j - w_i of a tie set are linearly dependent."""
    flat = eigenvalues.reshape(len(experts), -1)
    low = (flat.amin(dim=1) <= LEAST_EIGENVALUE_RATIO * flat.amax(dim=1)).nonzero().flatten()
    dependent = experts[low[0]].tolist() if len(low) else []
    need = f"{flat.shape[1]} independent differences are needed"
    require(len(low) == 0, f"the weights of experts {dependent} are rank-deficient: {need}")


def _nearest_tie_flat(
    scores: Tensor, weight: Tensor, bias: Tensor, k: int, order: int
) -> tuple[Float[Tensor, " tokens"], Int[Tensor, "tokens tied"]]:
    """Distance to the nearest tie of this order, and the experts that tie there."""
    if order == 1:
        tie = nearest_tie(scores, k, expert_distances(weight))
        return tie.distance, torch.stack([tie.entering, tie.leaving], dim=1)
    flats = tie_flats(weight, bias, tie_sets(len(weight), order))
    gram = weight @ weight.T
    rows = max(1, MOST_ENTRIES // flats.inverse_grams[:, 0].numel())
    nearest = [_nearest_crossing_flat(block, flats, gram, k) for block in scores.split(rows)]
    distance, which = (torch.cat(column) for column in zip(*nearest, strict=True))
    return distance, flats.experts[which]


def _nearest_crossing_flat(
    scores: Tensor, flats: TieFlats, gram: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Distance and index of the nearest flat on which the projection crosses the threshold."""
    tied_scores = scores[:, flats.experts]
    rise = tied_scores[:, :, 1:] - tied_scores[:, :, :1]
    multipliers = torch.einsum("tmi,mij->tmj", rise, flats.inverse_grams)
    square = (rise * multipliers).sum(dim=2).clamp(min=0)
    distance = scores.new_full((len(scores),), torch.inf)
    flat = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    unsolved, tried = (
        torch.arange(len(scores), device=scores.device),
        min(FLATS_TRIED_FIRST, square.shape[1]),
    )
    while len(unsolved):
        nearest = square[unsolved].topk(tried, dim=1, largest=False, sorted=True)
        nearest_multipliers = multipliers[unsolved].gather(
            1, nearest.indices[:, :, None].expand(-1, -1, rise.shape[2])
        )
        valid = _crosses_threshold(
            scores[unsolved], flats.experts[nearest.indices], nearest_multipliers, gram, k
        )
        crosses, first = valid.max(dim=1)
        index = first[:, None]
        distance[unsolved[crosses]] = nearest.values.gather(1, index)[crosses, 0].sqrt()
        flat[unsolved[crosses]] = nearest.indices.gather(1, index)[crosses, 0]
        unsolved = unsolved[~crosses] if tried < square.shape[1] else unsolved[:0]
        tried = min(4 * tried, square.shape[1])
    return distance, flat


def _crosses_threshold(
    scores: Tensor, experts: Tensor, multipliers: Tensor, gram: Tensor, k: int
) -> Tensor:
    """Whether the projection of each token on each of its flats (tokens, c) crosses the threshold.

    Scores that equal the level up to rounding count on either side, since the set is closed.
    """
    pull = gram[experts[:, :, 1:]] - gram[experts[:, :, :1]]
    projected = scores[:, None, :] - (multipliers[..., None] * pull).sum(dim=2)
    rise = projected - projected.gather(2, experts).mean(dim=2, keepdim=True)
    rise.scatter_(2, experts, -torch.inf)
    slack = 1e-12 * scores.abs().amax().clamp(min=1e-300)
    most_above, least_above = (rise >= -slack).sum(dim=2), (rise > slack).sum(dim=2)
    return (least_above <= k - 1) & (most_above + experts.shape[2] >= k + 1)


Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LineWalk:
    """Output of a layer along a line."""

    # signed distance from the tie, positive on the side the normal points to
    offsets: Float[Tensor, " steps"]
    outputs: Float[Tensor, "steps out"]  # f at each of them
    jump: float  # largest ‖difference‖ of neighbouring outputs
    jump_at: float  # middle of the two offsets where it is


@dataclass(frozen=True, eq=False)
class StepDifferences:
    """Distances of the outputs on the two sides of ties, by step length."""

    steps: Float[Tensor, " steps"]  # h, length of the step across the tie, ascending
    largest: Float[Tensor, " steps"]  # largest difference over the ties, for each step
    median: Float[Tensor, " steps"]  # median difference over the ties, for each step


def walk_across(
    layer: Layer,
    point: Float[Tensor, " dim"],
    normal: Float[Tensor, " dim"],
    reach: Real = 1.0,
    steps: int = 400,
) -> LineWalk:
    """Output f(p + s n) of a layer at `steps` offsets s in [-reach, reach] (Figures 1a and 1b).

    Args:
        layer: f, from (rows, dim) to (rows, out).
        point: p, from `nearest_tie_point`.
        normal: n, a unit vector.
        reach: largest distance from the tie.
        steps: number of points; an even number has none on the tie itself.
    """
    require(reach > 0 and steps >= 2, f"need reach > 0 and steps >= 2, got {reach=}, {steps=}")
    offsets = torch.linspace(-reach, reach, steps, dtype=torch.float64)
    with torch.no_grad():
        outputs = layer((point + offsets[:, None] * normal).to(point.dtype)).double()
    rise = outputs.diff(dim=0).norm(dim=1)
    index = int(rise.argmax())
    middle = (offsets[index] + offsets[index + 1]).item() / 2
    return LineWalk(offsets, outputs, rise[index].item(), middle)


def difference_by_step(
    layer: Layer,
    points: Float[Tensor, "ties dim"],
    normals: Float[Tensor, "ties dim"],
    steps: Float[Tensor, " steps"] | None = None,
) -> StepDifferences:
    """Largest and median ‖f(p + h n/2) - f(p - h n/2)‖ over ties, for each h (Figure 1c).

    Args:
        layer: f, as for `walk_across`.
        points: ties, in float64, since float32 cannot resolve steps below 1e-7.
        normals: unit normals.
        steps: h; 1e-9 to 1 by default.
    """
    grid = log_grid(1e-9, 1.0, 4) if steps is None else steps.double()
    require(bool((grid > 0).all()), f"a step is > 0, got {grid.min().item()}")
    rows = []
    with torch.no_grad():
        for h in grid.tolist():
            upper, lower = layer(points + h / 2 * normals), layer(points - h / 2 * normals)
            rows.append((upper.double() - lower.double()).norm(dim=1))
    differences = torch.stack(rows)
    return StepDifferences(grid, differences.amax(dim=1), differences.median(dim=1).values)


def step_exponent(differences: StepDifferences) -> float:
    """Slope of log(largest) against log(h) over the lower half of the steps.

    0 for a jump, 1 for a Lipschitz map, NaN where the output does not change at all.
    """
    half = max(2, len(differences.steps) // 2)
    largest = differences.largest[:half].tolist()
    return exponent(differences.steps[:half].tolist(), largest) if min(largest) > 0 else math.nan
