"""How far fits with one tanh expert too many are from the nearest measure of the best function.

Theorems 3 and 5 compare a fit of N > N* experts with the nearest of all measures whose function is
the best one, which is f* itself: inf L(Ĝ, Ḡ) = O_P(√(log n / n)). With tanh experts and one atom
too many, the true atom beside an atom whose expert is zero is such a measure, whatever the gate of
the latter and the antisymmetric parts of A. So for one true atom

    inf L(Ĝ, Ḡ) <= min_i ‖θ̂_i - θ*‖ + ‖η̂_other‖,   ‖θ‖ = ‖sym A‖ + ‖b‖ + |c| + ‖η‖.

A bound in probability is one of every quantile: the median over repetitions is judged. Means are
not: a few fits end near a measure that is not best, but whose function is so by e^-30
(`p5-reflection`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.numerics import one_thread
from tieline.lab.claims.claim import ClaimRun, Fits
from tieline.lab.claims.rate_evidence import small_plan
from tieline.lab.estimation.model import MoEModel, MoEParameters
from tieline.lab.estimation.rate_plan import plan_blocks
from tieline.lab.estimation.rates import fit_repetitions
from tieline.lab.estimation.solvers import Status
from tieline.lab.power_law import PowerLaw, fit_rate

__all__ = ["NearestBest", "nearest_best", "nearest_best_losses"]


@dataclass(frozen=True)
class NearestBest:
    """Medians of the distance to the nearest best measure.

    Attributes:
        sizes: n.
        medians: over the repetitions of each n.
        law: their power law.
        fits: the fits, and how many of them converged.
    """

    sizes: tuple[int, ...]
    medians: tuple[float, ...]
    law: PowerLaw
    fits: Fits


def nearest_best(run: ClaimRun, model: MoEModel) -> NearestBest:
    """Fit one expert too many and measure the distance to the nearest best measure.

    The truth is the same for every seed: what a drawn expert is near decides from which n on its
    law shows.

    Args:
        run: mode and seed.
        model: a sigmoid mixture of one tanh expert in the plane, with quadratic scores.
    """
    plan = small_plan(run, model, extra=1, fixed=True, repetitions=run.size(24, 64))
    losses_by_size: dict[int, list[Tensor]] = {n: [] for n in plan.sizes}
    answered = total = 0
    for block in plan_blocks(plan, []):
        with one_thread():
            fitted = fit_repetitions(plan, block)
        losses_by_size[block.n].append(nearest_best_losses(fitted.params, plan.truth))
        ends = [Status(int(status)).answered for status in fitted.status]
        answered, total = answered + sum(ends), total + len(ends)
    losses = [torch.cat(losses_by_size[n]) for n in plan.sizes]
    medians = tuple(float(np.median(repeated)) for repeated in losses)
    law = fit_rate(plan.sizes, losses, run.seed, "median")
    return NearestBest(plan.sizes, medians, law, Fits(answered, total))


def nearest_best_losses(fits: MoEParameters, truth: MoEParameters) -> Float[Tensor, " repetitions"]:
    """Loss of fits of two atoms to the true atom beside one with a zero expert."""
    rows, true_row = symmetric(fits.router), symmetric(truth.router)[0]
    wide = true_row.shape[-1] > 4
    blocks = [(slice(0, 4), True), (slice(4, 6), wide)]
    losses = []
    for atom in (0, 1):
        gate = sum((rows[:, atom, at] - true_row[at]).norm(dim=1) for at, there in blocks if there)
        bias = (fits.bias[:, atom] - truth.bias[0]).abs()
        expert = (fits.experts[:, atom] - truth.experts[0]).norm(dim=1)
        losses.append(gate + bias + expert + fits.experts[:, 1 - atom].norm(dim=1))
    return torch.stack(losses).amin(dim=0)


def symmetric(router: Float[Tensor, "*batch row"]) -> Float[Tensor, "*batch row"]:
    """Rows with A, their first four numbers, made symmetric."""
    rows = router.clone()
    rows[..., 1:3] = rows[..., 1:3].mean(dim=-1, keepdim=True)
    return rows
