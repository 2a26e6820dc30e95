"""Voronoi losses up to the directions that the data cannot see.

Fit and truth are first put in canonical form (`symmetry.canonical`): rows v that score, symmetric
matrices, softmax masses of sum 1 and rows of mean 0 over the masses, hidden scales moved out. Then
the loss of the paper is taken. Zero means the same regression function, up to what follows.

Experts of degree p (ReLU, uᵖ, linear, two-layer by its λ) can trade mass and scale in two places:

    a cell of several atoms, softmax    f sees Σ m_i and Σ m_i s_i, s_i the strength of the expert
    a zero row of the truth, sigmoid    f sees Σ σ(c_i) s_i

with s = ‖(a, b)‖ᵖ (λ for two-layer experts). In such a cell the errors of mass and of η are
replaced by those of these sums and of the direction η/s^{1/p}. `cone=False` leaves the paper's
terms there.

Two-layer and even experts of the fit take the sign that is nearest to the truth.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tieline.estimation.cells import Assignment, assign, norms, pair_differences
from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters
from tieline.estimation.symmetry import canonical, has_signs
from tieline.estimation.voronoi import (
    VoronoiLoss,
    VoronoiLosses,
    cell_charges,
    one_loss,
)

__all__ = ["quotient_loss", "quotient_losses"]

SQUARED = {(2, "L2"), (4, "L1"), (4, "L4")}  # exponent 2 in cells of several atoms
WITH_R = {(2, "L1"), (4, "L2")}

Charges = Float[Tensor, "*batch true"]


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
    return one_loss(batch, truth.n_experts, kind, paper, r)


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
    """Losses of a batch of fits up to the symmetries of the model.

    Args:
        model: family of both, any number of experts.
        fit: any batch.
        truth: one truth or one for each fit.
        kind: as for `voronoi_loss`.
        paper: 2 or 4.
        r: exponent, where the loss has one.
        cone: whether mass and scale may trade where the model lets them.
    """
    reference = canonical(model.with_experts(truth.n_experts), truth)
    mine = canonical(model.with_experts(fit.n_experts), fit)
    if has_signs(model):
        mine = _nearest_signs(mine, reference)
    cells = assign(mine, reference)
    charges = cell_charges(mine, reference, cells, kind, paper, r)
    if cone and (model.ridge.degree is not None or model.expert == "two_layer"):
        power = _powers(cells, kind, paper, r)
        free = _cone_charges(model, mine, reference, cells, power)
        charges = torch.where(_tradable(model, reference, cells), free, charges)
    return VoronoiLosses(charges.sum(dim=-1), cells.cell, cells.empty_count)


def _nearest_signs(fit: MoEParameters, truth: MoEParameters) -> MoEParameters:
    """Expert rows of the fit with the sign that brings them nearest to the truth."""
    references = torch.cat((truth.router, truth.experts), dim=-1)

    def nearest(experts: Tensor) -> Tensor:
        rows = torch.cat((fit.router, experts), dim=-1)
        return norms(pair_differences(rows, references)).amin(dim=-1, keepdim=True)

    flip = nearest(-fit.experts) < nearest(fit.experts)
    return MoEParameters(fit.router, fit.bias, torch.where(flip, -fit.experts, fit.experts))


def _powers(cells: Assignment, kind: str, paper: int, r: float | int) -> Charges:
    """Exponent of the parameter errors of each cell."""
    one = torch.ones(cells.size.shape, dtype=torch.float64)
    if (paper, kind) in WITH_R:
        return r * one
    return torch.where(cells.size > 1, 2.0, one) if (paper, kind) in SQUARED else one


def _tradable(
    model: MoEModel, truth: MoEParameters, cells: Assignment
) -> Bool[Tensor, "*batch true"]:
    """Cells in which mass and scale can trade."""
    if model.link == "softmax":
        return cells.size > 1
    return (truth.router == 0).all(dim=-1) & (cells.size > 0)


def _cone_charges(
    model: MoEModel, fit: MoEParameters, truth: MoEParameters, cells: Assignment, power: Charges
) -> Charges:
    """Errors of Σ m, Σ m s and of row and direction, in every cell."""
    shape = cells.member.shape
    (unit, strength), (unit_true, strength_true) = _polar(model, fit), _polar(model, truth)
    softmax = model.link == "softmax"
    mass, mass_true = (p.bias.exp() if softmax else p.bias.sigmoid() for p in (fit, truth))
    moment = cells.total((mass * strength).unsqueeze(-1).expand(shape)) - mass_true * strength_true
    exponent = power.unsqueeze(-2)
    rows = norms(pair_differences(fit.router, truth.router)) ** exponent
    turns = norms(pair_differences(unit, unit_true)) ** exponent
    if not softmax:
        return moment.abs() + cells.total(rows + turns)
    weights = mass.unsqueeze(-1).expand(shape)
    balance = (cells.total(weights) - mass_true).abs()
    return balance + moment.abs() + cells.total(weights * (rows + turns))


def _polar(model: MoEModel, params: MoEParameters) -> tuple[Tensor, Tensor]:
    """Direction and strength of every expert: η/‖η‖, ‖η‖ᵖ; or (a, b) and λ of a two-layer one."""
    if model.expert == "two_layer":
        return params.experts[..., :-1], params.experts[..., -1]
    length = torch.linalg.vector_norm(params.experts, dim=-1, keepdim=True)
    unit = params.experts / torch.where(length > 0, length, 1.0)
    return unit, length.squeeze(-1) ** (model.ridge.degree or 1)
