"""Distances of a fit from a truth: as functions, and expert by expert.

regression_distance    ‖f - f*‖_{L²(μ)} = √E(f(X) - f*(X))², X ~ μ, with its standard error
expert_distance        √mean_j min_i ‖h(·, η_i) - h(·, η*_j)‖², the nearest expert for each true one
matched_errors         ‖β_π(j) - β*_j‖, |bias|, ‖η_π(j) - η*_j‖ for the best matching π
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.lab.estimation.losses import norms, pair_differences
from tieline.lab.estimation.model import LawName, MoEModel, draw_inputs
from tieline.lab.estimation.parameters import MoEParameters


@dataclass(frozen=True, eq=False)
class FunctionDistance:
    """‖f - f*‖_{L²(μ)} of every fit."""

    value: Float[Tensor, "*batch"]  # the distance
    standard_error: Float[Tensor, "*batch"]  # from the sample of inputs; 0 at distance 0


@dataclass(frozen=True, eq=False)
class MatchedErrors:
    """Errors of the atom that plays each atom of the truth."""

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
    """√(mean of (f - f*)²) over n fresh inputs, the same for all fits, with its standard error.

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
    n: int = 2000,
    seed: int = 0,
    law: LawName = "uniform",
) -> Float[Tensor, "*batch"]:
    """Root mean square over true experts of the L²(μ) distance to the nearest fitted expert.

    Functions are compared, not parameters: ±η of a square are one expert. The fit may have more
    experts than the truth.
    """
    x = draw_inputs(law, n, model.d, seed)
    fitted = model.with_experts(fit.n_experts).expert_outputs(fit, x)
    true = model.with_experts(truth.n_experts).expert_outputs(truth, x)
    gap = fitted.unsqueeze(-1) - true.unsqueeze(-2)
    return gap.square().mean(dim=-3).amin(dim=-2).mean(dim=-1).sqrt()


def matched_errors(fit: MoEParameters, truth: MoEParameters) -> MatchedErrors:
    """Errors after the Hungarian matching by (router row, expert row); atoms may be spare."""
    require(
        fit.n_experts >= truth.n_experts,
        f"each of the {truth.n_experts} true atoms needs a partner, the fit has {fit.n_experts}",
        ShapeError,
    )
    rows, references = (torch.cat((p.router, p.experts), dim=-1) for p in (fit, truth))
    cost = norms(pair_differences(rows, references)).detach()
    flat = cost.reshape(-1, *cost.shape[-2:]).mT
    partners = [linear_sum_assignment(costs.numpy())[1].tolist() for costs in flat]
    partner = torch.tensor(partners).reshape(*cost.shape[:-2], cost.shape[-1])
    pairs = (
        norms(pair_differences(fit.router, truth.router)),
        (fit.bias.unsqueeze(-1) - truth.bias.unsqueeze(-2)).abs(),
        norms(pair_differences(fit.experts, truth.experts)),
    )
    picked = [values.gather(-2, partner.unsqueeze(-2)).squeeze(-2) for values in pairs]
    return MatchedErrors(partner, *picked)
