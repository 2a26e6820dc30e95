"""Voronoi losses of paper 2.

With m_i = exp(β_0i), Δβ_ij = β_1i - β*_1j and Δη_ij = η_i - η*_j:

    L_{1,r} = Σ_j |Σ_{i∈A_j} m_i - m*_j| + Σ_j Σ_{i∈A_j} m_i (‖Δβ_ij‖^r + ‖Δη_ij‖^r)     section 2
    L_2     = the same with exponent 1 in cells of one atom and 2 in larger cells         eq. 11
    L_3     = L_{1,1}                                                                     eq. 13

An empty cell counts with its whole mass m*_j. Each function gives the summand of every j.
"""

import torch
from torch import Tensor

from tieline.estimation.cells import Assignment, norms, pair_differences
from tieline.estimation.parameters import MoEParameters

__all__ = ["LOSSES"]


def _loss(
    fit: MoEParameters, truth: MoEParameters, cells: Assignment, power: float | Tensor
) -> Tensor:
    """Charge of each cell: its mass error plus its weighted parameter errors.

    `power` is one number or one for each cell.
    """
    mass = fit.bias.exp().unsqueeze(-1).expand(cells.member.shape)
    mass_error = (cells.total(mass) - truth.bias.exp()).abs()
    exponent = torch.as_tensor(power, dtype=torch.float64)
    exponent = exponent.unsqueeze(-2) if exponent.ndim else exponent
    router = norms(pair_differences(fit.router, truth.router)) ** exponent
    experts = norms(pair_differences(fit.experts, truth.experts)) ** exponent
    return mass_error + cells.total(mass * (router + experts))


def _l1(fit: MoEParameters, truth: MoEParameters, cells: Assignment, r: float) -> Tensor:
    return _loss(fit, truth, cells, r)


def _l2(fit: MoEParameters, truth: MoEParameters, cells: Assignment, r: float) -> Tensor:
    del r
    return _loss(fit, truth, cells, torch.where(cells.size > 1, 2.0, 1.0).double())


def _l3(fit: MoEParameters, truth: MoEParameters, cells: Assignment, r: float) -> Tensor:
    del r
    return _loss(fit, truth, cells, 1.0)


LOSSES = {"L1": _l1, "L2": _l2, "L3": _l3}
