"""The population minimiser Ḡ of a model for a truth that it need not contain.

    Ḡ = argmin_G ‖f_G - q‖_{L²(μ)}          P2 section 4, P4 Cor. 1

Least squares of a misspecified model converge to Ḡ and not to the truth: against the truth a loss
of parameters has a floor. Ḡ is found by fitting a large sample without noise from several starts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tieline.errors import require
from tieline.estimation.design import LawName, draw_inputs
from tieline.estimation.fit import FitResult, fit
from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters
from tieline.estimation.starts import near_truth, random_start

__all__ = ["Population", "population_minimiser"]


@dataclass(frozen=True, eq=False)
class Population:
    """Ḡ and how sure it is.

    Attributes:
        params: Ḡ.
        misfit: ‖f_Ḡ - q‖ on the sample; zero where the model contains the truth.
        starts: the end of every start, that of least loss being Ḡ.
        agree: starts whose misfit is within 1 % of the least.
    """

    params: MoEParameters
    misfit: float
    starts: FitResult
    agree: int


def population_minimiser(
    model: MoEModel,
    target: Callable[[Tensor], Tensor],
    *,
    near: MoEParameters | None = None,
    radius: float = 0.1,
    n: int = 50_000,
    starts: int = 8,
    refine: int = 0,
    law: LawName = "uniform",
    seed: int = 0,
) -> Population:
    """Ḡ of the model for the regression function `target`.

    Args:
        model: the family that is fitted.
        target: q, from inputs (n, d) to (n,).
        near: parameters near which to start, such as the truth's; random starts without.
        radius: of the starts near them.
        n: samples without noise.
        starts: how many; the first is `near` itself.
        refine: samples of a second fit, from the best of the first; 0 for none. Ḡ has the sampling
            error of a fit to so many samples, so they must be more than any study compares.
        law: of the inputs.
        seed: of sample and starts.
    """
    require(starts >= 1 and n >= model.n_parameters, f"need {starts=} >= 1 and {n=} >= parameters")
    x = draw_inputs(law, n, model.d, seed)
    if near is None:
        begun = random_start(model, [seed], starts)[0]
    else:
        flat = near_truth(near, radius, [seed], starts).flatten()[0]
        flat[0] = near.flatten()
        begun = near.like(flat)
    found = fit(model, x, target(x), begun, quiet=True)
    best = found.best()
    least = best.loss.clamp_min(0).sqrt()
    agree = int((found.loss.clamp_min(0).sqrt() <= 1.01 * least + 1e-12).sum())
    if refine:
        x = draw_inputs(law, refine, model.d, seed + 1)
        best = fit(model, x, target(x), best.params.expand(1), quiet=True).best()
    return Population(best.params, math.sqrt(max(best.loss.item(), 0.0)), found, agree)
