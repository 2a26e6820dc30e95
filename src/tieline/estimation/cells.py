"""Which atom of the truth each atom of a fit belongs to."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.estimation.parameters import MoEParameters

__all__ = ["Assignment", "Pairs", "assign", "norms", "pair_differences"]

Pairs = Float[Tensor, "*batch fitted true"]
"""A number for every pair of an atom of the fit and an atom of the truth."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """Voronoi cells of a batch of fits.

    Attributes:
        cell: index of the nearest atom of the truth, the first of several.
        member: whether atom i of the fit is in cell j.
    """

    cell: Int[Tensor, "*batch fitted"]
    member: Bool[Tensor, "*batch fitted true"]

    @property
    def size(self) -> Int[Tensor, "*batch true"]:
        """Atoms in each cell."""
        return self.member.sum(dim=-2)

    @property
    def empty_count(self) -> Int[Tensor, "*batch"]:
        """Empty cells of each fit."""
        return (self.size == 0).sum(dim=-1)

    def total(self, pairs: Pairs) -> Float[Tensor, "*batch true"]:
        """Σ_{i ∈ A_j} of a number per pair."""
        return torch.where(self.member, pairs, 0.0).sum(dim=-2)


def assign(fit: MoEParameters, truth: MoEParameters) -> Assignment:
    """Cells by the distance of (router row, expert row)."""
    for name, mine, other in (
        ("router", fit.router, truth.router),
        ("expert", fit.experts, truth.experts),
    ):
        require(
            mine.shape[-1] == other.shape[-1],
            f"{name} rows of fit and truth differ in width: {mine.shape[-1]}, {other.shape[-1]}",
            ShapeError,
        )
        require(bool(mine.isfinite().all()), f"{name} rows of the fit must be finite", ShapeError)
    rows, references = (torch.cat((p.router, p.experts), dim=-1) for p in (fit, truth))
    distance = norms(pair_differences(rows, references))
    cell = distance.argmin(dim=-1)
    return Assignment(cell, torch.nn.functional.one_hot(cell, distance.shape[-1]).bool())


def pair_differences(
    rows: Float[Tensor, "*fits fitted w"], references: Float[Tensor, "*truths true w"]
) -> Float[Tensor, "*batch fitted true w"]:
    """Δ_ij = row_i - reference_j, by subtraction: no digits are lost to squares."""
    return rows.unsqueeze(-2) - references.unsqueeze(-3)


def norms(differences: Float[Tensor, "*batch fitted true w"]) -> Pairs:
    """‖Δ_ij‖."""
    return torch.linalg.vector_norm(differences, dim=-1)
