"""Voronoi losses of paper 4.

The mass is σ(c); "over" are cells of several atoms, "exact" the others:

    L_1     = Σ_over |Σ_{i∈A_j} σ(c_i) - σ(c*_j)| + Σ_over Σ_i (‖ΔA‖² + ‖Δb‖² + ‖Δη‖²)
              + Σ_exact Σ_i (‖ΔA‖ + ‖Δb‖ + |Δc| + ‖Δη‖)                                section 4.1.1
    L_{2,r} = the same with exponent r throughout and ‖Δη‖ read as ‖Δα‖^r + |Δβ|^r     eq. 11
    L_3     = Σ_j Σ_{i∈A_j} (‖ΔA‖ + ‖Δb‖ + |Δc| + ‖Δη‖)                                section 4.2
    L_4, L_5 = L_1, L_3 without b, for the partially quadratic score                   eq. 52, 53

The paper prints A_i - Ā_i in L_3 and L_5; the second index must be that of the cell, A_i - Ā_j, as
two atoms of a cell cannot both be compared with themselves. An empty cell is an exact one without
atoms and contributes nothing, so a fit that misses an expert is not charged for it: read the number
of empty cells with the loss. Each function gives the summand of every j.
"""

import torch
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.estimation.cells import Assignment, norms, pair_differences
from tieline.estimation.parameters import MoEParameters, quadratic_width

__all__ = ["LOSSES"]


def _row_errors(fit: MoEParameters, truth: MoEParameters, *, full: bool) -> list[Tensor]:
    """‖ΔA_ij‖ and, for the fully quadratic score, ‖Δb_ij‖."""
    d = quadratic_width(fit.router.shape[-1], full=full)
    difference = pair_differences(fit.router, truth.router)
    matrix = norms(difference[..., : d * d])
    return [matrix, norms(difference[..., d * d :])] if full else [matrix]


def _bias_error(fit: MoEParameters, truth: MoEParameters) -> Tensor:
    """|Δc_ij|."""
    return (fit.bias.unsqueeze(-1) - truth.bias.unsqueeze(-2)).abs()


def _mixed(
    fit: MoEParameters,
    truth: MoEParameters,
    cells: Assignment,
    errors: list[Tensor],
    powers: tuple[float, float],
) -> Tensor:
    """Masses and errors^powers[0] in large cells, errors^powers[1] with |Δc| in exact ones."""
    over = cells.size > 1
    mass = fit.bias.sigmoid().unsqueeze(-1).expand(cells.member.shape)
    mass_error = (cells.total(mass) - truth.bias.sigmoid()).abs()
    loose = torch.stack([error ** powers[0] for error in errors]).sum(dim=0)
    bias = _bias_error(fit, truth)
    tight = torch.stack([error ** powers[1] for error in (*errors, bias)]).sum(dim=0)
    return torch.where(over, mass_error + cells.total(loose), cells.total(tight))


def _strong(full: bool):
    def loss(fit: MoEParameters, truth: MoEParameters, cells: Assignment, r: float) -> Tensor:
        del r
        experts = norms(pair_differences(fit.experts, truth.experts))
        errors = [*_row_errors(fit, truth, full=full), experts]
        return _mixed(fit, truth, cells, errors, (2.0, 1.0))

    return loss


def _weak(full: bool):
    def loss(fit: MoEParameters, truth: MoEParameters, cells: Assignment, r: float) -> Tensor:
        del r
        experts = norms(pair_differences(fit.experts, truth.experts))
        rows = _row_errors(fit, truth, full=full)
        return cells.total(sum(rows, _bias_error(fit, truth) + experts))

    return loss


def _polynomial(fit: MoEParameters, truth: MoEParameters, cells: Assignment, r: float) -> Tensor:
    rows = _row_errors(fit, truth, full=True)
    d = quadratic_width(fit.router.shape[-1], full=True)
    require(
        fit.experts.shape[-1] == d + 1,
        f"L2 of paper 4 is for polynomial experts (α, β) of d + 1 = {d + 1} numbers, "
        f"got {fit.experts.shape[-1]}",
        ShapeError,
    )
    difference = pair_differences(fit.experts, truth.experts)
    errors = [*rows, norms(difference[..., :d]), difference[..., d].abs()]
    return _mixed(fit, truth, cells, errors, (r, r))


LOSSES = {
    "L1": _strong(full=True),
    "L2": _polynomial,
    "L3": _weak(full=True),
    "L4": _strong(full=False),
    "L5": _weak(full=False),
}
