"""Voronoi cells of a fit among the atoms of the truth, and the losses of papers 2 and 4.

    A_j = {i : ‖θ_i - θ*_j‖ <= ‖θ_i - θ*_l‖ for all l}        P2 eq. 5, P4 eq. 9 and 51

θ is the router row with the expert row, without the bias. An atom at equal distance from two atoms
of the truth is put into the first cell only, so that no mass counts twice.

    voronoi_loss      one fit: its loss, the cells, the empty ones
    voronoi_losses    a batch of fits at once, as tensors

The formulas are in `losses_paper2` and `losses_paper4`. These raw losses see the directions that
the data cannot (`symmetry`); `quotient` measures without them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.estimation import losses_paper2, losses_paper4
from tieline.estimation.cells import Assignment, assign
from tieline.estimation.parameters import MoEParameters

__all__ = ["VoronoiLoss", "VoronoiLosses", "voronoi_loss", "voronoi_losses"]

Loss = Callable[[MoEParameters, MoEParameters, Assignment, float], Tensor]
LOSSES: dict[tuple[int, str], Loss] = {
    **{(2, kind): loss for kind, loss in losses_paper2.LOSSES.items()},
    **{(4, kind): loss for kind, loss in losses_paper4.LOSSES.items()},
}


@dataclass(frozen=True)
class VoronoiLoss:
    """The loss of one fit.

    Attributes:
        value: the loss.
        kind: "L1" … "L5".
        paper: 2 or 4.
        r: exponent, where the loss has one.
        cells: for each atom of the truth the atoms of the fit in its cell.
        empty: atoms of the truth with an empty cell.
    """

    value: float
    kind: str
    paper: int
    r: float
    cells: tuple[tuple[int, ...], ...]
    empty: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class VoronoiLosses:
    """The losses of a batch of fits.

    Attributes:
        values: loss of each fit.
        cell: the cell of each atom of each fit.
        empty: number of empty cells of each fit.
    """

    values: Float[Tensor, "*batch"]
    cell: Int[Tensor, "*batch experts"]
    empty: Int[Tensor, "*batch"]


def voronoi_loss(
    fit: MoEParameters, truth: MoEParameters, kind: str = "L1", paper: int = 2, r: float | int = 1
) -> VoronoiLoss:
    """The loss of `kind` between a fit and a truth, exactly as the paper defines it.

    Paper 2 (mass exp β_0): L1 is L_{1,r}, L2 eq. 11, L3 eq. 13. Paper 4 (mass σ(c)): L1, L2 =
    L_{2,r} and L3 for the fully quadratic score, rows [vec A, b]; L4 (eq. 52) and L5 (eq. 53) for
    the partially quadratic score, rows vec A. In L3 and L5 the second index is that of the cell.

    Args:
        fit: one fit, without leading axes.
        truth: the truth, of the same widths.
        kind: "L1" to "L3" of paper 2, "L1" to "L5" of paper 4.
        paper: 2 or 4.
        r: exponent of L1 (paper 2) and L2 (paper 4); the others have none.
    """
    require(
        fit.bias.ndim == 1 and truth.bias.ndim == 1,
        f"voronoi_loss takes one fit and one truth, got leading axes {tuple(fit.batch_shape)} and "
        f"{tuple(truth.batch_shape)}: use voronoi_losses",
        ShapeError,
    )
    return one_loss(voronoi_losses(fit, truth, kind, paper, r), truth.n_experts, kind, paper, r)


def one_loss(
    batch: VoronoiLosses, n_true: int, kind: str, paper: int, r: float | int
) -> VoronoiLoss:
    """The record of a batch of one fit without leading axes."""
    cell = batch.cell.tolist()
    cells = tuple(tuple(i for i, j in enumerate(cell) if j == k) for k in range(n_true))
    empty = tuple(j for j, members in enumerate(cells) if not members)
    return VoronoiLoss(batch.values.item(), kind, paper, float(r), cells, empty)


def voronoi_losses(
    fit: MoEParameters, truth: MoEParameters, kind: str = "L1", paper: int = 2, r: float | int = 1
) -> VoronoiLosses:
    """`voronoi_loss` of every fit of a batch, against one truth or a truth for each."""
    cells = assign(fit, truth)
    charges = cell_charges(fit, truth, cells, kind, paper, r)
    return VoronoiLosses(charges.sum(dim=-1), cells.cell, cells.empty_count)


def cell_charges(
    fit: MoEParameters,
    truth: MoEParameters,
    cells: Assignment,
    kind: str,
    paper: int,
    r: float | int,
) -> Float[Tensor, "*batch true"]:
    """What each cell adds to the loss."""
    require(r >= 1, f"the exponent r is at least 1, got {r}")
    return _loss(kind, paper)(fit, truth, cells, float(r))


def _loss(kind: str, paper: int) -> Loss:
    require(paper in (2, 4), f"the papers with Voronoi losses are 2 and 4, got {paper}")
    kinds = [name for number, name in LOSSES if number == paper]
    require(kind in kinds, f"paper {paper} has the losses {', '.join(kinds)}, got {kind!r}")
    return LOSSES[paper, kind]
