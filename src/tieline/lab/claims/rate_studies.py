"""Evidence for claims about rates, from small studies: papers 2 and 4 test their rates alike.

Studies are small enough for the ledger: one to three experts, well-conditioned truths. The
published designs (d = 32 and d = 8, hundreds of parameters) run by `tieline rates`; the laws are
the same at this size. Losses are the papers' own (`raw`), the same up to what the data cannot see
(`quotient`), ‖f - f*‖ (`function`), and the distance of each true expert from the nearest fitted
one (`experts`).

Where the model contains the truth, sample sizes are emulated by the noise level (`RatePlan`): five
sizes over three decades when as many experts are fitted as the truth has, and 1e6 to 1e12 with
more, whose laws appear only at large n. A slope counts by its 95 % interval: it decides if it lies
inside or outside a range, and leaves the claim open if it reaches across.

Theorems 3 and 5 of paper 4 compare a fit of N > N* experts with the nearest of all measures whose
function is the best one, which is f* itself: inf L(Ĝ, Ḡ) = O_P(√(log n / n)). With tanh experts and
one atom too many, the true atom beside an atom whose expert is zero is such a measure, whatever the
gate of the latter and the antisymmetric parts of A. So for one true atom

    inf L(Ĝ, Ḡ) <= min_i ‖θ̂_i - θ*‖ + ‖η̂_other‖,   ‖θ‖ = ‖sym A‖ + ‖b‖ + |c| + ‖η‖.

A bound in probability is one of every quantile: `nearest_best` judges the median over repetitions.
Means are not judged: a few fits end near a measure that is not best, but whose function is so by
e^-30 (`p5-reflection`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.numerics import one_thread
from tieline.lab.claims.claim import ClaimRun
from tieline.lab.claims.evidence import (
    Check,
    Evidence,
    FigureData,
    Fits,
    at_least,
    chart,
    corrected,
    dots,
    estimated,
    qualified,
    unmeasured,
    within,
)
from tieline.lab.estimation.fit import lift_truth, population_minimiser
from tieline.lab.estimation.identifiability import cramer_rao
from tieline.lab.estimation.model import MoEModel, MoEParameters
from tieline.lab.estimation.rate_plan import RatePlan, case_from, paper_loss, plan_blocks
from tieline.lab.estimation.rates import LOSSES, RateStudy, fit_repetitions, rate_study
from tieline.lab.estimation.solvers import Status
from tieline.lab.power_law import PowerLaw, fit_rate

DRAWS = 60
"""Number of drawn truths from which the best conditioned is chosen."""
EXACT = (500, 2_812, 15_811, 88_914, 500_000)
OVER = (10**6, 3 * 10**7, 10**9, 3 * 10**10, 10**12)
DRAWN = (500, 1000, 2000, 4000)
"""Sample sizes with as many experts as the truth, with more, and with a misspecified model."""
EXACT_SAMPLES, OVER_SAMPLES = 500, 256
"""Numbers of samples that emulate the first two."""
WINDOW = {"raw": 0.14, "quotient": 0.14, "function": 0.1, "experts": 0.14}
"""Half the width of the range of slopes that count as n^-1/2."""
SLOW = -0.15
"""A slope above this one counts as "slower than any polynomial".

1/log^τ n has the slope -τ/log n, from -τ/14 at n = 1e6 to -τ/28 at n = 1e12.
"""


def small_plan(
    run: ClaimRun,
    model: MoEModel,
    *,
    extra: int = 0,
    sparse: bool = False,
    fixed: bool = False,
    source: MoEModel | None = None,
    **grid: Any,
) -> RatePlan:
    """Plan a study of the ledger.

    Args:
        run: mode and seed.
        model: the family, with the truth's number of experts.
        extra: number of additional experts that are fitted.
        sparse: whether the last expert of the truth has a zero row and bias.
        fixed: whether every seed has the same truth, and draws inputs and noise only.
        source: the family of the data, if another; losses are then against Ḡ.
        grid: fields of `RatePlan` to set.
    """
    options = {**_study_grid(run, extra, outside=source is not None), **grid}
    first = 0 if fixed else run.seed
    drawn = replace(
        case_from(source or model, draws=DRAWS, seed=first, **options).plan, seed=run.seed
    )
    truth = _without_gate(drawn.truth) if sparse else drawn.truth
    fitted = model.with_experts(model.n_experts + extra)
    loss = paper_loss(model, fitted.n_experts)["loss"]
    plan = replace(drawn, model=fitted, truth=truth, reference=truth, loss=loss)
    return plan if source is None else replace(plan, reference=_population_measure(run, plan))


def _study_grid(run: ClaimRun, extra: int, *, outside: bool) -> dict[str, Any]:
    """Default sizes, repetitions and fit settings of a study."""
    if outside:
        return {"sizes": DRAWN, "repetitions": run.size(20, 64), "iterations": 200}
    if not extra:
        fits = {"repetitions": run.size(20, 64), "iterations": 200, "starts": 2}
        return {"sizes": EXACT, "samples": EXACT_SAMPLES, **fits}
    fits = {"repetitions": run.size(12, 32), "iterations": 2500, "starts": run.size(2, 4)}
    return {"sizes": OVER, "samples": OVER_SAMPLES, **fits}


def small_study(run: ClaimRun, model: MoEModel, **options: Any) -> RateStudy:
    """Run the study of `small_plan` in this process, once for all claims that ask for it."""
    return _cached_study(run, model, tuple(sorted(options.items())))


@lru_cache(maxsize=64)
def _cached_study(
    run: ClaimRun, model: MoEModel, options: tuple[tuple[str, Any], ...]
) -> RateStudy:
    """Run a study once, cached for the claims that share it."""
    return rate_study(small_plan(run, model, **dict(options)), executor="serial", quiet=True)


def power_law_of(study: RateStudy, loss: str, radius: float | None = None) -> PowerLaw:
    """Power law of the mean of a loss, or of the median for ‖f - f*‖.

    The papers bound ‖f - f*‖ in probability, that is in every quantile. Its mean is dominated by a
    few fits: an extra expert can lie between the samples, where it costs nothing, and moves f up
    to a hundred times as far as in the other fits.
    """
    return study.rate(loss, radius, "median" if loss == "function" else "mean")


def slope_check(name: str, law: PowerLaw, **limits: float) -> Check:
    """Check that the slope of a power law is in a range, by its interval; see `estimated`."""
    return estimated(name, law.slope, (law.low, law.high), **limits)


def falls_like(name: str, law: PowerLaw, power: float, width: float = WINDOW["quotient"]) -> Check:
    """Check that a loss falls like n^power, within `width` on both sides."""
    return slope_check(name, law, least=power - width, most=power + width)


def parametric_rate_check(
    name: str, study: RateStudy, loss: str, radius: float | None = None
) -> Check:
    """Check that a loss falls like n^-1/2, on both sides."""
    return falls_like(name, power_law_of(study, loss, radius), -0.5, WINDOW[loss])


def slopes_text(study: RateStudy, radius: float | None = None) -> str:
    """Return the slopes of all losses with their intervals."""
    return ", ".join(f"{loss} {power_law_of(study, loss, radius)}" for loss in LOSSES)


def rate_chart(studies: "Studies", losses: tuple[str, ...]) -> FigureData:
    """Draw mean losses against n, a series for each study and loss."""
    series = [
        dots(f"{name}, {curve.loss}, {curve.start}", curve.sizes, curve.mean, curve.stderr)
        for name, study in studies.items()
        for curve in study.series
        if curve.loss in losses
    ]
    return chart("n", "mean loss", *series, log="xy")


def _without_gate(truth: MoEParameters) -> MoEParameters:
    """Return the truth with a zero row and bias for its last expert."""
    router, bias = truth.router.clone(), truth.bias.clone()
    router[-1], bias[-1] = 0, 0
    return MoEParameters(router, bias, truth.experts)


def _population_measure(run: ClaimRun, plan: RatePlan) -> MoEParameters:
    """Return Ḡ of the fitted family for the plan's truth."""
    return population_minimiser(
        plan.model,
        lambda x: plan.source.regression(plan.truth, x),
        near=lift_truth(plan.model, plan.truth),
        n=4000,
        starts=3,
        refine=run.size(60_000, 1_000_000),
        seed=run.seed,
    ).params


Studies = Mapping[str, RateStudy]


def parametric_rate_checks(quantity: str, studies: Studies, loss: str) -> list[Check]:
    """Check for each study that its loss falls like n^-1/2."""
    return [
        parametric_rate_check(f"{quantity}, {name}", study, loss) for name, study in studies.items()
    ]


def falling_slope_checks(quantity: str, studies: Studies, loss: str) -> list[Check]:
    """Check for each study, as our own statement, that the slope of its loss is below `SLOW`."""
    laws = {name: study.rate(loss) for name, study in studies.items()}
    return corrected(*(slope_check(f"{quantity}, {n}", law, most=SLOW) for n, law in laws.items()))


def slow_rate_check(name: str, study: RateStudy) -> Check:
    """Check that the experts' distance falls more slowly than any resolvable power."""
    return slope_check(name, study.rate("experts"), least=SLOW)


def efficiency_checks(run: ClaimRun, name: str, study: RateStudy, model: MoEModel) -> list[Check]:
    """Compare n · mean squared error of f and of the experts with the Cramér-Rao limits.

    The study is that of `small_plan` for as many experts as the truth has.

    A rate that were slower than n^-1/2 would let the ratios, taken over all sizes, grow with n.
    """
    limits = cramer_rao(model, small_plan(run, model).truth)
    checks = []
    for loss, limit in (("function", limits.function), ("experts", limits.experts)):
        ratios = torch.cat(
            [
                n * errors.square() / (study.noise**2 * limit)
                for n, errors in zip(study.sizes, study.losses(loss), strict=True)
            ]
        )
        error = ratios.std().item() / len(ratios) ** 0.5
        title = f"{name}: n·MSE of {loss} over Cramér-Rao"
        checks.append(within(title, ratios.mean().item(), error, 1, resolution=0.15, bias=0.1))
    return corrected(*checks)


def rate_evidence(
    checks: Sequence[Check],
    studies: Studies,
    losses: tuple[str, ...] = ("raw", "quotient"),
    **fields: Any,
) -> Evidence:
    """Evidence from checks, with the slopes of all studies, the fits and a figure."""
    measured = "; ".join(f"{name}: {slopes_text(study)}" for name, study in studies.items())
    defaults = {"measured": measured, "figure": rate_chart(studies, losses)}
    return Evidence.of(checks, **defaults | fields, fits=counted_fits(studies))


def counted_fits(studies: Studies) -> Fits:
    """Total number of fits of all studies, and the number that converged."""
    total = sum(study.problems for study in studies.values())
    return Fits(total - sum(study.failed for study in studies.values()), total)


def regression_rate_evidence(studies: Studies, others: Sequence[Check] = ()) -> Evidence:
    """Evidence that ‖f - f*‖ falls like n^-1/2 in every study."""
    laws = (f"{name}: {power_law_of(study, 'function')}" for name, study in studies.items())
    checks = [*parametric_rate_checks("slope of ‖f - f*‖", studies, "function"), *others]
    return rate_evidence(checks, studies, ("function",), paper=-0.5, measured="; ".join(laws))


def up_to_symmetry_evidence(studies: Studies, note: str = "") -> Evidence:
    """Evidence that the raw loss falls like n^-1/2 once directions without effect are left out."""
    checks = [
        *parametric_rate_checks("raw slope", studies, "raw"),
        *qualified(*parametric_rate_checks("quotient slope", studies, "quotient")),
    ]
    return rate_evidence(checks, studies, paper=-0.5, note=note)


NO_START = "the paper's runs state no start radius, and the loss that they plot depends on it"


def printed_slopes_evidence(
    printed: Mapping[str, float],
    studies: Studies,
    radii: tuple[float, float],
    others: Sequence[Check],
    reason: str = NO_START,
    **fields: Any,
) -> Evidence:
    """Open evidence on a figure of the paper's own runs, with the effect of the start radius.

    `printed` has the paper's slope of each study; each of `studies` was run from the two `radii`,
    small and large. `others` are further checks of ours, `reason` says why nothing is decided.
    """
    checks = [unmeasured(f"raw slope, {name}", slope, reason) for name, slope in printed.items()]
    rises, slopes = [], []
    for name in printed:
        small, large = (studies[name].rate("raw", radius) for radius in radii)
        rises.append(large.slope - small.slope)
        slopes.append(f"{name}: raw {small} from r = {radii[0]:g}, {large} from r = {radii[1]:g}")
    rise = at_least("largest rise of a raw slope with the start radius", max(rises), 0.1)
    paper = ", ".join(f"{name} {slope}" for name, slope in printed.items())
    defaults: dict[str, Any] = {"paper": paper, "measured": "; ".join(slopes)}
    checks += corrected(rise, *others)
    return rate_evidence(checks, studies, **(defaults | fields))


@dataclass(frozen=True)
class NearestBest:
    """Median distances to the nearest best measure, by sample size.

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

    The model is a sigmoid mixture of one tanh expert in the plane, with quadratic scores. The truth
    is the same for every seed, since the n from which its law shows depends on the expert.
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
    """Distance of two-atom fits to the true atom beside an atom with a zero expert."""
    rows, true_row = (
        symmetrised_quadratic_rows(fits.router),
        symmetrised_quadratic_rows(truth.router)[0],
    )
    blocks = [slice(0, 4), slice(4, 6)][: 2 if true_row.shape[-1] > 4 else 1]
    losses = []
    for atom in (0, 1):
        gate = sum((rows[:, atom, block] - true_row[block]).norm(dim=1) for block in blocks)
        bias = (fits.bias[:, atom] - truth.bias[0]).abs()
        expert = (fits.experts[:, atom] - truth.experts[0]).norm(dim=1)
        losses.append(gate + bias + expert + fits.experts[:, 1 - atom].norm(dim=1))
    return torch.stack(losses).amin(dim=0)


def symmetrised_quadratic_rows(router: Float[Tensor, "*batch row"]) -> Float[Tensor, "*batch row"]:
    """Symmetrise A, the first four numbers of each row."""
    rows = router.clone()
    rows[..., 1:3] = rows[..., 1:3].mean(dim=-1, keepdim=True)
    return rows
