"""Distances of a fit from a truth: Voronoi losses of papers 2 and 4, and of functions.

Each atom θ_i (router row and expert row, without the bias) of a fit belongs to the cell of the
nearest atom of the truth, the first one at equal distance, so that no mass counts twice:

    A_j = {i : ‖θ_i - θ*_j‖ <= ‖θ_i - θ*_l‖ for all l}        P2 eq. 5, P4 eq. 9 and 51

Paper 2, with masses m_i = exp(β_0i); an empty cell is charged its whole mass m*_j:

    L_{1,r} = Σ_j |Σ_{i∈A_j} m_i - m*_j| + Σ_j Σ_{i∈A_j} m_i (‖Δβ_ij‖^r + ‖Δη_ij‖^r)     section 2
    L_2     = the same with exponent 1 in cells of one atom and 2 in larger cells         eq. 11
    L_3     = L_{1,1}                                                                     eq. 13

Paper 4, with masses σ(c_i); "over" are cells of several atoms, "exact" the others:

    L_1     = Σ_over |Σ_{i∈A_j} σ(c_i) - σ(c*_j)| + Σ_over Σ_i (‖ΔA‖² + ‖Δb‖² + ‖Δη‖²)
              + Σ_exact Σ_i (‖ΔA‖ + ‖Δb‖ + |Δc| + ‖Δη‖)                                section 4.1.1
    L_{2,r} = the same with exponent r throughout and ‖Δη‖ read as ‖Δα‖^r + |Δβ|^r     eq. 11
    L_3     = Σ_j Σ_{i∈A_j} (‖ΔA‖ + ‖Δb‖ + |Δc| + ‖Δη‖)                                section 4.2
    L_4, L_5 = L_1, L_3 without b, for the partially quadratic score                   eq. 52, 53

The paper prints A_i - Ā_i in L_3 and L_5; the second index must be that of the cell, A_i - Ā_j, as
two atoms of a cell cannot both be compared with themselves. An empty cell is an exact one without
atoms and adds nothing, so a fit that misses an expert has no loss from it: read the number of empty
cells with the loss.

A quotient loss puts fit and truth into canonical form first (`canonical`): rows v that
score, symmetric matrices, softmax masses of sum 1 and rows of mean 0 over the masses, hidden scales
moved out; two-layer and even experts of the fit take the sign nearest to the truth. Zero means the
same regression function, except that experts of degree p (ReLU, uᵖ, linear, two-layer by its λ) can
trade mass and scale in two places:

    a cell of several atoms, softmax    f depends on Σ m_i and Σ m_i s_i, s_i the expert's strength
    a zero row of the truth, sigmoid    f depends on Σ σ(c_i) s_i

with s = ‖(a, b)‖ᵖ (λ for two-layer experts). In such a cell the errors of mass and of η are
replaced by those of these sums and of the direction η/s^{1/p}; `cone=False` keeps them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.lab.estimation.identifiability import canonical, has_sign_symmetry
from tieline.lab.estimation.model import (
    LawName,
    MoEModel,
    MoEParameters,
    draw_inputs,
    quadratic_dim,
)

SQUARED = {(2, "L2"), (4, "L1"), (4, "L4")}  # losses with exponent 2 in cells of several atoms
WITH_R = {(2, "L1"), (4, "L2")}  # losses with an exponent r

Pairs = Float[Tensor, "*batch fitted true"]
"""A number for every pair of an atom of the fit and an atom of the truth."""
CellLosses = Float[Tensor, "*batch true"]  # contribution of each cell to the loss


@dataclass(frozen=True, eq=False)
class Assignment:
    """Voronoi cells of a batch of fits."""

    cell: Int[Tensor, "*batch fitted"]  # nearest atom of the truth, the first of several
    member: Bool[Tensor, "*batch fitted true"]  # whether atom i of the fit is in cell j

    @property
    def size(self) -> Int[Tensor, "*batch true"]:
        """Atoms in each cell."""
        return self.member.sum(dim=-2)

    @property
    def empty_count(self) -> Int[Tensor, "*batch"]:
        """Empty cells of each fit."""
        return (self.size == 0).sum(dim=-1)

    def total(self, pairs: Pairs) -> Float[Tensor, "*batch true"]:
        """Sum over the atoms i ∈ A_j of each cell, of a number per pair."""
        return torch.where(self.member, pairs, 0.0).sum(dim=-2)


def assign_cells(fit: MoEParameters, truth: MoEParameters) -> Assignment:
    """Assign atoms of the fit to cells by the distance of (router row, expert row)."""
    for name, fit_rows, truth_rows in (
        ("router", fit.router, truth.router),
        ("expert", fit.experts, truth.experts),
    ):
        lengths = fit_rows.shape[-1], truth_rows.shape[-1]
        differing = f"{name} rows of fit and truth differ in length: {lengths[0]}, {lengths[1]}"
        require(lengths[0] == lengths[1], differing, ShapeError)
        require(
            bool(fit_rows.isfinite().all()), f"{name} rows of the fit must be finite", ShapeError
        )
    rows, references = (torch.cat((p.router, p.experts), dim=-1) for p in (fit, truth))
    distance = pair_norms(pair_differences(rows, references))
    cell = distance.argmin(dim=-1)
    return Assignment(cell, torch.nn.functional.one_hot(cell, distance.shape[-1]).bool())


def pair_differences(
    rows: Float[Tensor, "*fits fitted w"], references: Float[Tensor, "*truths true w"]
) -> Float[Tensor, "*batch fitted true w"]:
    """Differences Δ_ij = row_i - reference_j of all pairs, without cancellation of squares."""
    return rows.unsqueeze(-2) - references.unsqueeze(-3)


def pair_norms(differences: Float[Tensor, "*batch fitted true w"]) -> Pairs:
    """Norms ‖Δ_ij‖ of the differences of all pairs."""
    return torch.linalg.vector_norm(differences, dim=-1)


def _paper2_cell_losses(
    fit: MoEParameters, truth: MoEParameters, cells: Assignment, kind: str, r: float
) -> CellLosses:
    """Loss of each cell in paper 2: error of its mass plus weighted parameter errors."""
    exponent = torch.tensor(r if kind == "L1" else 1.0, dtype=torch.float64)
    if kind == "L2":
        exponent = torch.where(cells.size > 1, 2.0, 1.0).double().unsqueeze(-2)
    mass = fit.bias.exp().unsqueeze(-1).expand(cells.member.shape)
    mass_error = (cells.total(mass) - truth.bias.exp()).abs()
    router = pair_norms(pair_differences(fit.router, truth.router)) ** exponent
    experts = pair_norms(pair_differences(fit.experts, truth.experts)) ** exponent
    return mass_error + cells.total(mass * (router + experts))


def _paper4_cell_losses(
    fit: MoEParameters, truth: MoEParameters, cells: Assignment, kind: str, r: float
) -> CellLosses:
    """Loss of each cell in paper 4: errors of masses, rows, biases and experts."""
    full = kind in ("L1", "L2", "L3")
    d = quadratic_dim(fit.router.shape[-1], full=full)
    difference = pair_differences(fit.router, truth.router)
    rows = [pair_norms(difference[..., : d * d])]
    if full:
        rows.append(pair_norms(difference[..., d * d :]))
    bias = (fit.bias.unsqueeze(-1) - truth.bias.unsqueeze(-2)).abs()
    experts = pair_differences(fit.experts, truth.experts)
    if kind in ("L3", "L5"):
        return cells.total(sum(rows, bias + pair_norms(experts)))
    if kind != "L2":
        return _losses_by_cell_size(
            fit, truth, cells, [*rows, pair_norms(experts)], bias, (2.0, 1.0)
        )
    require(
        fit.experts.shape[-1] == d + 1,
        f"L2 of paper 4 is for polynomial experts (α, β) of d + 1 = {d + 1} numbers, "
        f"got {fit.experts.shape[-1]}",
        ShapeError,
    )
    errors = [*rows, pair_norms(experts[..., :d]), experts[..., d].abs()]
    return _losses_by_cell_size(fit, truth, cells, errors, bias, (r, r))


def _losses_by_cell_size(
    fit: MoEParameters,
    truth: MoEParameters,
    cells: Assignment,
    errors: list[Tensor],
    bias: Tensor,
    powers: tuple[float, float],
) -> CellLosses:
    """Masses and errors^powers[0] in cells of several atoms, else errors^powers[1] and |Δc|."""
    mass = fit.bias.sigmoid().unsqueeze(-1).expand(cells.member.shape)
    mass_error = (cells.total(mass) - truth.bias.sigmoid()).abs()
    loose = torch.stack([error ** powers[0] for error in errors]).sum(dim=0)
    tight = torch.stack([error ** powers[1] for error in (*errors, bias)]).sum(dim=0)
    return torch.where(cells.size > 1, mass_error + cells.total(loose), cells.total(tight))


def _cell_losses(
    fit: MoEParameters,
    truth: MoEParameters,
    cells: Assignment,
    kind: str,
    paper: int,
    r: float | int,
) -> CellLosses:
    """Contribution of each cell to the loss of this kind and paper."""
    require(r >= 1, f"the exponent r is at least 1, got {r}")
    require(paper in (2, 4), f"the papers with Voronoi losses are 2 and 4, got {paper}")
    kinds = ("L1", "L2", "L3") if paper == 2 else ("L1", "L2", "L3", "L4", "L5")
    require(kind in kinds, f"paper {paper} has the losses {', '.join(kinds)}, got {kind!r}")
    return (_paper2_cell_losses if paper == 2 else _paper4_cell_losses)(
        fit, truth, cells, kind, float(r)
    )


@dataclass(frozen=True)
class VoronoiLoss:
    """The loss of one fit."""

    value: float  # the loss
    kind: str  # "L1" … "L5"
    paper: int  # 2 or 4
    r: float  # exponent, where the loss has one
    cells: tuple[tuple[int, ...], ...]  # atoms of the fit in the cell of each true atom
    empty: tuple[int, ...]  # atoms of the truth with an empty cell


@dataclass(frozen=True, eq=False)
class VoronoiLosses:
    """The losses of a batch of fits."""

    values: Float[Tensor, "*batch"]  # loss of each fit
    cell: Int[Tensor, "*batch experts"]  # the cell of each atom of each fit
    empty: Int[Tensor, "*batch"]  # number of empty cells of each fit


def voronoi_loss(
    fit: MoEParameters, truth: MoEParameters, kind: str = "L1", paper: int = 2, r: float | int = 1
) -> VoronoiLoss:
    """Voronoi loss of `kind` between a fit and a truth, exactly as the paper defines it.

    Paper 2 (mass exp β_0): L1 is L_{1,r}, L2 eq. 11, L3 eq. 13. Paper 4 (mass σ(c)): L1, L2 =
    L_{2,r} and L3 for the fully quadratic score, rows [vec A, b]; L4 (eq. 52) and L5 (eq. 53) for
    the partially quadratic score, rows vec A. In L3 and L5 the second index is that of the cell.
    Only L1 of paper 2 and L2 of paper 4 have an exponent r.
    """
    require(
        fit.bias.ndim == 1 and truth.bias.ndim == 1,
        f"voronoi_loss takes one fit and one truth, got leading axes {tuple(fit.batch_shape)} and "
        f"{tuple(truth.batch_shape)}: use voronoi_losses",
        ShapeError,
    )
    return _without_batch_axis(
        voronoi_losses(fit, truth, kind, paper, r), truth.n_experts, kind, paper, r
    )


def voronoi_losses(
    fit: MoEParameters, truth: MoEParameters, kind: str = "L1", paper: int = 2, r: float | int = 1
) -> VoronoiLosses:
    """`voronoi_loss` of every fit in a batch, against one truth or a truth for each."""
    cells = assign_cells(fit, truth)
    charges = _cell_losses(fit, truth, cells, kind, paper, r)
    return VoronoiLosses(charges.sum(dim=-1), cells.cell, cells.empty_count)


def _without_batch_axis(
    batch: VoronoiLosses, n_true: int, kind: str, paper: int, r: float | int
) -> VoronoiLoss:
    """Remove the batch axis of a single fit."""
    cell = batch.cell.tolist()
    cells = tuple(tuple(i for i, j in enumerate(cell) if j == k) for k in range(n_true))
    empty = tuple(j for j, members in enumerate(cells) if not members)
    return VoronoiLoss(batch.values.item(), kind, paper, float(r), cells, empty)


def quotient_loss(
    model: MoEModel,
    fit: MoEParameters,
    truth: MoEParameters,
    kind: str,
    paper: int,
    r: float | int = 1,
    *,
    cone: bool = True,
) -> VoronoiLoss:
    """`voronoi_loss` of one fit up to the symmetries of the model."""
    batch = quotient_losses(model, fit, truth, kind, paper, r, cone=cone)
    return _without_batch_axis(batch, truth.n_experts, kind, paper, r)


def quotient_losses(
    model: MoEModel,
    fit: MoEParameters,
    truth: MoEParameters,
    kind: str,
    paper: int,
    r: float | int = 1,
    *,
    cone: bool = True,
) -> VoronoiLosses:
    """Voronoi losses of a batch of fits up to the symmetries of the model.

    One truth or one for each fit, of any number of experts; with `cone`, mass and scale of an
    expert may compensate each other where the model allows it.
    """
    reference = canonical(model.with_experts(truth.n_experts), truth)
    fitted = canonical(model.with_experts(fit.n_experts), fit)
    if has_sign_symmetry(model):
        fitted = _nearest_signs(fitted, reference)
    cells = assign_cells(fitted, reference)
    charges = _cell_losses(fitted, reference, cells, kind, paper, r)
    if cone and (model.ridge.degree is not None or model.expert == "two_layer"):
        power = torch.ones(cells.size.shape, dtype=torch.float64)  # of the parameter errors
        if (paper, kind) in WITH_R:
            power = r * power
        elif (paper, kind) in SQUARED:
            power = torch.where(cells.size > 1, 2.0, power)
        cone_charges = _cone_cell_losses(model, fitted, reference, cells, power)
        tradable = cells.size > 1
        if model.link == "sigmoid":
            tradable = (reference.router == 0).all(dim=-1) & (cells.size > 0)
        charges = torch.where(tradable, cone_charges, charges)
    return VoronoiLosses(charges.sum(dim=-1), cells.cell, cells.empty_count)


def _nearest_signs(fit: MoEParameters, truth: MoEParameters) -> MoEParameters:
    """Flip expert rows of the fit to the sign that is nearest to the truth."""
    references = torch.cat((truth.router, truth.experts), dim=-1)

    def nearest(experts: Tensor) -> Tensor:
        rows = torch.cat((fit.router, experts), dim=-1)
        return pair_norms(pair_differences(rows, references)).amin(dim=-1, keepdim=True)

    flip = nearest(-fit.experts) < nearest(fit.experts)
    return MoEParameters(fit.router, fit.bias, torch.where(flip, -fit.experts, fit.experts))


def _cone_cell_losses(
    model: MoEModel, fit: MoEParameters, truth: MoEParameters, cells: Assignment, power: CellLosses
) -> CellLosses:
    """Loss of every cell from the errors of Σ m, Σ m s, rows and directions."""
    shape = cells.member.shape
    (unit, strength), (unit_true, strength_true) = (
        _direction_and_strength(model, fit),
        _direction_and_strength(model, truth),
    )
    softmax = model.link == "softmax"
    mass, mass_true = (p.bias.exp() if softmax else p.bias.sigmoid() for p in (fit, truth))
    moment = cells.total((mass * strength).unsqueeze(-1).expand(shape)) - mass_true * strength_true
    exponent = power.unsqueeze(-2)
    rows = pair_norms(pair_differences(fit.router, truth.router)) ** exponent
    turns = pair_norms(pair_differences(unit, unit_true)) ** exponent
    if not softmax:
        return moment.abs() + cells.total(rows + turns)
    weights = mass.unsqueeze(-1).expand(shape)
    balance = (cells.total(weights) - mass_true).abs()
    return balance + moment.abs() + cells.total(weights * (rows + turns))


def _direction_and_strength(model: MoEModel, params: MoEParameters) -> tuple[Tensor, Tensor]:
    """Direction and strength of every expert: η/‖η‖, ‖η‖ᵖ; or (a, b) and λ of a two-layer one."""
    if model.expert == "two_layer":
        return params.experts[..., :-1], params.experts[..., -1]
    length = torch.linalg.vector_norm(params.experts, dim=-1, keepdim=True)
    unit = params.experts / torch.where(length > 0, length, 1.0)
    return unit, length.squeeze(-1) ** (model.ridge.degree or 1)


@dataclass(frozen=True, eq=False)
class FunctionDistance:
    """‖f - f*‖_{L²(μ)} of every fit."""

    value: Float[Tensor, "*batch"]  # the distance
    standard_error: Float[Tensor, "*batch"]  # from the sample of inputs; 0 at distance 0


@dataclass(frozen=True, eq=False)
class MatchedErrors:
    """Errors of the fitted atom matched with each atom of the truth."""

    partner: Int[Tensor, "*batch true"]  # the atom of the fit matched with each atom of the truth
    router: Float[Tensor, "*batch true"]  # ‖β_π(j) - β*_j‖
    bias: Float[Tensor, "*batch true"]  # |bias_π(j) - bias*_j|
    experts: Float[Tensor, "*batch true"]  # ‖η_π(j) - η*_j‖


def regression_distance(
    fitted: MoEModel,
    fit: MoEParameters,
    truth_model: MoEModel,
    truth: MoEParameters,
    *,
    n: int = 20_000,
    seed: int = 0,
    law: LawName = "uniform",
) -> FunctionDistance:
    """L² distance ‖f - f*‖ on n fresh inputs, the same for all fits, with its standard error.

    One truth or one for each fit; the law is "uniform" on [-1, 1]ᵈ or "normal". The standard error
    is that of the mean square over twice the root.
    """
    require(n >= 2, f"a standard error needs n >= 2 inputs, got {n}")
    dims = f"{fitted.d}, {truth_model.d}"
    require(fitted.d == truth_model.d, f"input dimensions differ: {dims}", ShapeError)
    x = draw_inputs(law, n, fitted.d, seed)
    total, squares = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    batch = max(1, fit.bias.numel() // fit.n_experts)
    for rows in fitted.chunks(n, batch):
        gap = fitted.regression(fit, x[rows]) - truth_model.regression(truth, x[rows])
        square = gap.square()
        total, squares = total + square.sum(dim=-1), squares + square.square().sum(dim=-1)
    mean = total / n
    error = ((squares / n - mean.square()).clamp_min(0) / (n - 1)).sqrt()
    root = mean.sqrt()
    return FunctionDistance(root, torch.where(root > 0, error / (2 * root), 0.0))


def expert_distance(
    model: MoEModel,
    fit: MoEParameters,
    truth: MoEParameters,
    *,
    seed: int = 0,
    law: LawName = "uniform",
) -> Float[Tensor, "*batch"]:
    """Root mean square over true experts of the L²(μ) distance to the nearest fitted expert.

    Functions are compared, not parameters: ±η of a square are one expert. The fit may have more
    experts than the truth.
    """
    x = draw_inputs(law, 2000, model.d, seed)
    fitted = model.with_experts(fit.n_experts).expert_outputs(fit, x)
    true = model.with_experts(truth.n_experts).expert_outputs(truth, x)
    gap = fitted.unsqueeze(-1) - true.unsqueeze(-2)
    return gap.square().mean(dim=-3).amin(dim=-2).mean(dim=-1).sqrt()


def matched_errors(fit: MoEParameters, truth: MoEParameters) -> MatchedErrors:
    """Errors after Hungarian matching by (router row, expert row); the fit may have more atoms."""
    require(
        fit.n_experts >= truth.n_experts,
        f"each of the {truth.n_experts} true atoms needs a partner, the fit has {fit.n_experts}",
        ShapeError,
    )
    rows, references = (torch.cat((p.router, p.experts), dim=-1) for p in (fit, truth))
    cost = pair_norms(pair_differences(rows, references)).detach()
    flat = cost.reshape(-1, *cost.shape[-2:]).mT
    partners = [linear_sum_assignment(costs.numpy())[1].tolist() for costs in flat]
    partner = torch.tensor(partners).reshape(*cost.shape[:-2], cost.shape[-1])
    pairs = (
        pair_norms(pair_differences(fit.router, truth.router)),
        (fit.bias.unsqueeze(-1) - truth.bias.unsqueeze(-2)).abs(),
        pair_norms(pair_differences(fit.experts, truth.experts)),
    )
    matched = [values.gather(-2, partner.unsqueeze(-2)).squeeze(-2) for values in pairs]
    return MatchedErrors(partner, *matched)
