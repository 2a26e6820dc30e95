"""Identifiability of gates and experts, and the symmetries of their parameters.

    rank       the definitions of the papers, literally (`rank_test`)
    nullity    flat directions of the information matrix against the symmetries (`information`)
    split      whether one expert can be mistaken for two (`split_test`)

The flat directions of I are the symmetries of the model. The ratio of its largest eigenvalue to the
smallest of the others, with every parameter in units of its own information (diagonal 1), is the
condition number that decides how large n must be before the asymptotic rates show.

The rank tests fail for every ridge expert at some parameters, the strong ones at all parameters;
the split test is the one that predicts bad estimates. Results for d = k = 2: linear experts never
pass; tanh and GELU pass under linear, perturbed and partially quadratic gates; uᵖ, ReLU and
two-layer experts pass up to the scale of the expert; nothing passes under the vanilla cosine, where
the length of a row is free, or under the fully quadratic score, where b may be split against A.

Symmetries of a model:

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import require
from tieline.core.records import to_plain
from tieline.lab.estimation.derivative_tests import (
    RankTest,
    SplitTest,
    generic_atoms,
    rank_test,
    split_test,
    witness_atoms,
)
from tieline.lab.estimation.model import (
    GATES,
    LINKS,
    MoEModel,
    MoEParameters,
    draw_inputs,
    quadratic_blocks,
    router_directions,
)

TABLE_EXPERTS: tuple[dict[str, Any], ...] = (
    {"expert": "linear"},
    {"expert": "polynomial", "power": 2},
    {"expert": "relu"},
    {"expert": "gelu"},
    {"expert": "tanh"},
    {"expert": "two_layer", "activation": "tanh"},
)
FLAT = 1e-12  # share of the largest eigenvalue below which a direction is flat
FLAT_MOVES = 1e-12
"""Share of an expert's mean square slope that counts as rounding along flat directions."""
NO_ZERO_ROW = "not applicable: the vanilla cosine has no zero row to split"


@dataclass(frozen=True, eq=False)
class Information:
    """Spectrum of the information matrix with unit diagonal."""

    eigenvalues: Float[Tensor, " p"]  # in ascending order
    nullity: int  # eigenvalues below the threshold times the largest, flat parameters included
    condition: float  # largest over the smallest eigenvalue that is not flat
    gap: float  # smallest eigenvalue that is not flat over the largest that is; inf if none is flat


def information(
    model: MoEModel,
    params: MoEParameters,
    *,
    pinned: tuple[int, ...] = (),
    n: int = 4000,
    seed: int = 0,
) -> Information:
    """Spectrum of the information I = E[∇f(X) ∇f(X)ᵀ] at one truth, on n uniform inputs.

    Known parameters are `pinned`, by their place in the flat vector; eigenvalues below `FLAT` times
    the largest count as flat.
    """
    require(n >= model.n_parameters, f"need n >= p = {model.n_parameters} inputs, got {n}")
    x = draw_inputs("uniform", n, model.d, seed)
    jacobian = model.jacobian(params, x)
    keep = [i for i in range(model.n_parameters) if i not in pinned]
    columns = jacobian[:, keep]
    scale = torch.linalg.vector_norm(columns, dim=0)
    columns = columns / torch.where(scale > 0, scale, 1.0)
    values = torch.linalg.svdvals(columns).square().flip(0)
    flat = int((values < FLAT * values[-1]).sum())
    condition = float(values[-1] / values[flat]) if flat < len(values) else float("inf")
    below = values[flat - 1].item() if flat else 0.0
    gap = float(values[flat] / below) if below > 0 and flat < len(values) else float("inf")
    return Information(values, flat, condition, gap)


class CramerRao(NamedTuple):
    """Lower limits of n E‖f̂ - f*‖² / noise² and of n E[expert_distance²] / noise²."""

    function: float  # rank of I
    experts: float  # mean_j trace of (I⁺)_jj E[∂h_j ∂h_jᵀ]; infinite if an expert is not determined


def cramer_rao(model: MoEModel, params: MoEParameters) -> CramerRao:
    """Cramér-Rao limits at a truth with as many experts as the model.

    With I = E[∇f ∇fᵀ] the estimate of θ has the covariance noise²/n · I⁺, flat directions apart.
    The error of f is then the rank of I. That of an expert is finite if no flat direction moves it.
    """
    n = 4000
    require(n >= model.n_parameters, f"need n >= p = {model.n_parameters} inputs, got {n}")
    x = draw_inputs("uniform", n, model.d, 0)
    jacobian = model.jacobian(params, x) / n**0.5
    scale = torch.linalg.vector_norm(jacobian, dim=0)
    scale = torch.where(scale > 0, scale, 1.0)
    values, vectors = torch.linalg.eigh((jacobian / scale).T @ (jacobian / scale))
    informative = values > FLAT * values[-1]
    directions, flat = (
        vectors[:, informative] / scale[:, None],
        vectors[:, ~informative] / scale[:, None],
    )
    first, q, total = model.n_experts * (model.router_dim + 1), model.expert_dim, 0.0
    for j, slopes in enumerate(_expert_slopes(model, params, x)):
        rows = slice(first + j * q, first + (j + 1) * q)
        movement = (slopes @ flat[rows]).square().mean(dim=0).sum() if flat.numel() else 0.0
        if movement > FLAT_MOVES * slopes.square().mean():
            return CramerRao(float(informative.sum()), float("inf"))
        total += (
            ((slopes @ directions[rows]).square().mean(dim=0) / values[informative]).sum().item()
        )
    return CramerRao(float(informative.sum()), total / model.n_experts)


def _expert_slopes(
    model: MoEModel, params: MoEParameters, x: Float[Tensor, "n d"]
) -> Iterator[Float[Tensor, "n q"]]:
    """Yield ∂h(x, η_j)/∂η_j of each expert, (n, q)."""
    for row in params.experts:
        inner = x @ row[: model.d] + row[model.d]
        slope = model.ridge.slope(inner)[:, None]
        columns = torch.cat((slope * x, slope), dim=1)
        if model.expert == "two_layer":
            columns = torch.cat((row[-1] * columns, model.ridge.value(inner)[:, None]), dim=1)
        yield columns


@dataclass(frozen=True)
class Identifiability:
    """Results of the tests for one combination of gate, link and expert."""

    gate: str  # of the model
    link: str  # of the model
    expert: str  # of the model
    d: int  # dimension of an input
    n_experts: int  # number of experts
    # the rank test of the strong definition at generic parameters; None where it has no
    # derivatives
    strong: RankTest | None
    weak: RankTest  # the rank test of the weak definition at generic parameters
    witness: RankTest  # the weak test at two distinct experts that are multiples of one function
    nullity: int  # flat directions of the information matrix with the biases pinned
    symmetry: int  # flat directions that the symmetries explain
    # the most favourable split test of the draws; None where no atom can be split
    split: SplitTest | None
    verdict: str  # of the split test, in words

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return to_plain(self)


def identifiability(
    model: MoEModel, *, seed: int = 0, draws: int = 3, n: int = 1200
) -> Identifiability:
    """Run the rank, nullity and split tests at generic parameters; best split of several draws."""
    require(draws >= 1, f"need at least one draw, got {draws}")
    x = draw_inputs("uniform", n, model.d, seed)
    k = model.n_experts
    splittable = not (model.link == "sigmoid" and model.gate == "cosine")
    atoms = [generic_atoms(model, k, seed * 1009 + draw) for draw in range(draws)]
    tests = [split_test(model, drawn, x) for drawn in atoms] if splittable else []
    split = max(tests, key=lambda test: (test.minimum, test.up_to_scale)) if tests else None
    if split is not None and split.verdict != "identifiable":
        split = max(tests, key=lambda test: test.up_to_scale)
    return Identifiability(
        gate=model.gate,
        link=model.link,
        expert=model.expert_label,
        d=model.d,
        n_experts=k,
        strong=rank_test(model, atoms[0], "strong", x) if splittable else None,
        weak=rank_test(model, atoms[0], "weak", x),
        witness=rank_test(model, witness_atoms(model, seed), "weak", x),
        nullity=_generic_nullity(model, seed),
        symmetry=null_dimension(model, bias_pinned=True),
        split=split,
        verdict=split.verdict if split else NO_ZERO_ROW,
    )


def identifiability_table(
    d: int = 2,
    n_experts: int = 2,
    *,
    gates: Sequence[str] = GATES,
    links: Sequence[str] = LINKS,
    experts: Sequence[dict[str, Any]] = TABLE_EXPERTS,
    seed: int = 0,
    draws: int = 3,
) -> list[Identifiability]:
    """Test all combinations by `identifiability`, gate by gate; each takes about a second."""
    models = [
        MoEModel(gate, link, d=d, n_experts=n_experts, **form)  # type: ignore[arg-type]
        for gate in gates
        for link in links
        for form in experts
    ]
    return [identifiability(model, seed=seed, draws=draws) for model in models]


def _generic_nullity(model: MoEModel, seed: int) -> int:
    """Count flat directions at generic experts and normal rows, with the biases pinned."""
    generator = torch.Generator().manual_seed(seed + 77)
    atoms = generic_atoms(model, model.n_experts, seed)
    shape = (model.n_experts, model.router_dim)
    length = 2 * model.tau[0] if model.gate == "perturbed" else 1.5
    rows = length * torch.randn(shape, dtype=torch.float64, generator=generator)
    bias, experts = (
        torch.stack([getattr(a, field) for a in atoms]) for field in ("bias", "expert")
    )
    start = rows.numel()
    pinned = tuple(range(start, start + model.n_experts)) if model.link == "softmax" else ()
    size = max(600, 3 * model.n_parameters)
    return information(model, MoEParameters(rows, bias, experts), pinned=pinned, n=size).nullity


Pin = Literal["mean", "last"]
QUADRATIC = ("quadratic", "partial")
ODD = ("linear", "tanh")


@dataclass(frozen=True)
class Symmetry:
    """A group of parameter changes that leave the regression function unchanged."""

    name: str  # one of the table above
    kind: Literal["permute", "shift", "scale", "drop", "flip"]  # what it does
    dimension: int  # of the group at generic parameters; 0 for a discrete one
    condition: str = ""  # further condition, if any


def symmetries(model: MoEModel) -> tuple[Symmetry, ...]:
    """List the symmetries of a combination of gate, link and experts."""
    d, n, degree = model.d, model.n_experts, model.ridge.degree
    half = d * (d + 1) // 2
    groups = [Symmetry("order", "permute", 0)]
    if model.link == "softmax":
        row_freedom = {"quadratic": half + d, "partial": half, "cosine": max(0, d - n)}.get(
            model.gate, d
        )
        groups.append(Symmetry("bias shift", "shift", 1))
        groups.append(Symmetry("row shift", "shift", row_freedom))
    if model.gate == "cosine":
        groups.append(Symmetry("row scale", "scale", n))
    if model.gate in QUADRATIC:
        groups.append(Symmetry("matrix part", "drop", n * d * (d - 1) // 2))
    if model.expert == "two_layer" and degree is not None:
        groups.append(Symmetry("hidden scale", "scale", n))
    if has_sign_symmetry(model):
        groups.append(Symmetry("sign", "flip", 0))
    if degree is not None or model.expert == "two_layer":
        condition = "sigmoid link, zero router row"
        if model.link == "softmax":
            condition = "several atoms with one router row and one direction of the expert"
        groups.append(Symmetry("mass and scale", "scale", n, condition))
    return tuple(groups)


def null_dimension(model: MoEModel, *, bias_pinned: bool = False) -> int:
    """Dimension of the unconditional symmetries, the flat directions at generic parameters."""
    groups = [group for group in symmetries(model) if not group.condition]
    return sum(group.dimension for group in groups) - (bias_pinned and model.link == "softmax")


def canonical(model: MoEModel, params: MoEParameters, pin: Pin = "mean") -> MoEParameters:
    """Canonical parameters under the unconditional symmetries, except the order of atoms.

    Router rows become v(β) with symmetric A; for the softmax link their constant and that of the
    biases are fixed by `pin`: "mean" gives masses of sum 1 and rows of mean 0 over the masses,
    "last" gives the last atom bias and row 0. Hidden scales are moved into λ and signs made
    positive.
    """
    model.check(params)
    rows, bias = router_directions(model.gate, params.router, model.effective_tau[0]), params.bias
    if model.gate in QUADRATIC:
        A, b = quadratic_blocks(rows, full=model.gate == "quadratic")
        rows = torch.cat((((A + A.mT) / 2).flatten(-2), b), dim=-1)
    if model.link == "softmax" and pin == "last":
        rows, bias = rows - rows[..., -1:, :], bias - bias[..., -1:]
    elif model.link == "softmax":
        bias = bias.log_softmax(dim=-1)
        rows = rows - (bias.exp().unsqueeze(-1) * rows).sum(dim=-2, keepdim=True)
    return MoEParameters(rows, bias, _canonical_experts(model, params.experts))


def has_sign_symmetry(model: MoEModel) -> bool:
    """Whether η and -η give the same expert."""
    if model.expert == "polynomial":
        return model.power % 2 == 0
    return model.expert == "two_layer" and model.activation in ODD


def _canonical_experts(model: MoEModel, experts: Tensor) -> Tensor:
    """Normalise hidden rows to length 1 with their scale in λ, and signs, where these are free."""
    d, degree = model.d, model.ridge.degree
    inner, outer = experts[..., : d + 1], experts[..., d + 1 :]
    if model.expert == "two_layer" and degree is not None:
        length = torch.linalg.vector_norm(inner, dim=-1, keepdim=True)
        positive_length = torch.where(length > 0, length, 1.0)
        inner, outer = inner / positive_length, outer * positive_length**degree
    if has_sign_symmetry(model):
        first = (inner != 0).to(torch.int8).argmax(dim=-1, keepdim=True)
        sign = inner.gather(-1, first).sign()
        sign = torch.where(sign == 0, 1.0, sign)
        inner, outer = inner * sign, outer * sign
    return torch.cat((inner, outer), dim=-1)
