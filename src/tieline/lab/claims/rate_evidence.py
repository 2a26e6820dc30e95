"""Evidence for claims about rates, from small studies: papers 2 and 4 test their rates alike.

Studies are small enough for the ledger: one to three experts, well-conditioned truths. The
published designs (d = 32 and d = 8, hundreds of parameters) run by `tieline rates`; the laws are
the same at this size. Losses are the papers' own (`raw`), the same up to what the data cannot see
(`quotient`), ‖f - f*‖ (`function`), and the distance of each true expert from the nearest fitted
one (`experts`).

Where the model contains the truth, sample sizes are emulated by the noise level (`RatePlan`): five
sizes over three decades when as many experts are fitted as the truth has, 1e6 to 1e12 with more,
whose laws show late. A slope counts by its 95 % interval: it decides if it lies inside or outside a
range, and leaves the claim open if it reaches across.

small_study        a study of a small model
law_of             the power law of a loss in a study
each_parametric    every study's loss falls like n^-1/2
each_falling       every study's loss falls like a power
slow               a study's loss falls more slowly than any power that could be told
efficient          n · mean squared error against the Cramér-Rao limit
rate_evidence      checks with the slopes in words, the fits and the figure
regression_rate    the claim that ‖f - f*‖ falls like n^-1/2
up_to_symmetry     the claim that a loss does, unseen directions being left out
printed_slopes     a figure of the paper's own runs, which states no start
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from tieline.core.statistics import PowerLaw
from tieline.lab.claims.claim import (
    Chart,
    Check,
    Evidence,
    Fits,
    Part,
    Run,
    Value,
    at_least,
    chart,
    dots,
    estimated,
    unmeasured,
    within,
)
from tieline.lab.estimation.fit import lift, population_minimiser
from tieline.lab.estimation.identifiability import cramer_rao
from tieline.lab.estimation.model import MoEModel
from tieline.lab.estimation.parameters import MoEParameters
from tieline.lab.estimation.rate_plan import RatePlan, as_case
from tieline.lab.estimation.rates import LOSSES, RateStudy, rate_study

__all__ = [
    "SLOW",
    "WINDOW",
    "Studies",
    "counted",
    "each_falling",
    "each_parametric",
    "efficient",
    "law_of",
    "parametric",
    "printed_slopes",
    "rate_chart",
    "rate_evidence",
    "regression_rate",
    "slow",
    "small_plan",
    "small_study",
    "up_to_symmetry",
    "words",
]

DRAWS = 60
"""Number of truths of which the best conditioned is taken."""
EXACT = (500, 2_812, 15_811, 88_914, 500_000)
OVER = (10**6, 3 * 10**7, 10**9, 3 * 10**10, 10**12)
DRAWN = (500, 1000, 2000, 4000)
"""Sample sizes: as many experts as the truth, more, and where the truth is outside the model."""
EXACT_SAMPLES, OVER_SAMPLES = 500, 256
"""Samples by which the first two are emulated."""
WINDOW = {"raw": 0.14, "quotient": 0.14, "function": 0.1, "experts": 0.14}
"""Half the width of the range of slopes that count as n^-1/2."""
SLOW = -0.15
"""A slope above this one counts as "slower than any polynomial".

1/log^τ n has the slope -τ/log n, from -τ/14 at n = 1e6 to -τ/28 at n = 1e12.
"""


def small_plan(
    run: Run,
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
    given = {**_grid(run, extra, outside=source is not None), **grid}
    first = 0 if fixed else run.seed
    drawn = replace(as_case(source or model, draws=DRAWS, seed=first, **given).plan, seed=run.seed)
    truth = _without_gate(drawn.truth) if sparse else drawn.truth
    fitted = model.with_experts(model.n_experts + extra)
    plan = replace(drawn, model=fitted, truth=truth, reference=truth, loss=_loss(model, extra))
    return plan if source is None else replace(plan, reference=_population(run, plan))


def _grid(run: Run, extra: int, *, outside: bool) -> dict[str, Any]:
    """Sizes, repetitions and fits of a study."""
    if outside:
        return {"sizes": DRAWN, "repetitions": run.size(20, 64), "iterations": 200}
    if not extra:
        fits = {"repetitions": run.size(20, 64), "iterations": 200, "starts": 2}
        return {"sizes": EXACT, "samples": EXACT_SAMPLES, **fits}
    fits = {"repetitions": run.size(12, 32), "iterations": 2500, "starts": run.size(2, 4)}
    return {"sizes": OVER, "samples": OVER_SAMPLES, **fits}


def small_study(run: Run, model: MoEModel, **options: Any) -> RateStudy:
    """Run the study of `small_plan` in this process, once for all claims that ask for it."""
    return _study(run, model, tuple(sorted(options.items())))


@lru_cache(maxsize=64)
def _study(run: Run, model: MoEModel, options: tuple[tuple[str, Any], ...]) -> RateStudy:
    return rate_study(small_plan(run, model, **dict(options)), executor="serial", quiet=True)


def law_of(study: RateStudy, loss: str, radius: float | None = None) -> PowerLaw:
    """The power law of a loss: of its mean, and of the median of ‖f - f*‖.

    The papers bound ‖f - f*‖ in probability, and a bound in probability is one of every quantile.
    Its mean is that of a few fits: one expert too many can stand between the samples, where it
    costs nothing, and moves f up to a hundred times as far as all the others do.
    """
    return study.rate(loss, radius, "median" if loss == "function" else "mean")


def parametric(
    name: str, study: RateStudy, loss: str, part: Part = "paper", radius: float | None = None
) -> Check:
    """Check that a loss falls like n^-1/2, on both sides."""
    found, width = law_of(study, loss, radius), WINDOW[loss]
    limits = {"least": -0.5 - width, "most": -0.5 + width}
    return estimated(name, found.slope, (found.low, found.high), **limits, part=part)


def words(study: RateStudy, radius: float | None = None) -> str:
    """Return the slopes with their intervals."""
    return ", ".join(f"{loss} {law_of(study, loss, radius)}" for loss in LOSSES)


def rate_chart(studies: "Studies", losses: tuple[str, ...]) -> Chart:
    """Draw mean losses against n, a series for each study and loss."""
    series = []
    for name, study in studies.items():
        for one in study.series:
            if one.loss in losses:
                title = f"{name}, {one.loss}, {one.start}"
                series.append(dots(title, one.sizes, one.mean, one.stderr))
    return chart("n", "mean loss", *series, log="xy")


def _without_gate(truth: MoEParameters) -> MoEParameters:
    """Return the truth with a zero row and bias for its last expert."""
    router, bias = truth.router.clone(), truth.bias.clone()
    router[-1], bias[-1] = 0, 0
    return MoEParameters(router, bias, truth.experts)


def _population(run: Run, plan: RatePlan) -> MoEParameters:
    """Return Ḡ of the fitted family for the plan's truth."""
    found = population_minimiser(
        plan.model,
        lambda x: plan.source.regression(plan.truth, x),
        near=lift(plan.model, plan.truth),
        n=4000,
        starts=3,
        refine=run.size(60_000, 1_000_000),
        seed=run.seed,
    )
    return found.params


def _loss(model: MoEModel, extra: int) -> str:
    """Return the paper's loss of a family, for exactly as many experts or more."""
    if model.link == "softmax":
        return "L2" if extra else "L3"
    kinds = ("L1", "L3") if model.gate == "quadratic" else ("L4", "L5")
    return kinds[0] if extra else kinds[1]


Studies = Mapping[str, RateStudy]


def each_parametric(what: str, studies: Studies, loss: str, part: Part = "paper") -> list[Check]:
    """A check for each study that its loss falls like n^-1/2."""
    return [parametric(f"{what}, {name}", one, loss, part) for name, one in studies.items()]


def each_falling(
    what: str,
    studies: Studies,
    loss: str = "quotient",
    limit: float = SLOW,
    part: Part = "corrected",
) -> list[Check]:
    """A check for each study that the slope of its loss is below `limit`, by its interval."""
    checks = []
    for name, one in studies.items():
        found = one.rate(loss)
        ends = (found.low, found.high)
        checks.append(estimated(f"{what}, {name}", found.slope, ends, most=limit, part=part))
    return checks


def slow(name: str, study: RateStudy, loss: str = "experts", part: Part = "paper") -> Check:
    """Check that a loss falls more slowly than any power that could be told."""
    found = study.rate(loss)
    return estimated(name, found.slope, (found.low, found.high), least=SLOW, part=part)


def efficient(
    name: str, study: RateStudy, model: MoEModel, truth: MoEParameters, part: Part = "corrected"
) -> list[Check]:
    """Compare n · mean squared error of f and of the experts with the Cramér-Rao limits.

    A rate that were slower than n^-1/2 would let the ratios, taken over all sizes, grow with n.
    """
    limits = cramer_rao(model, truth)
    checks = []
    for loss, limit in (("function", limits.function), ("experts", limits.experts)):
        ratios = [
            n * found.square() / (study.noise**2 * limit)
            for n, found in zip(study.sizes, study.losses(loss), strict=True)
        ]
        every = torch.cat(ratios)
        told, mean = f"{name}: n·MSE of {loss} over Cramér-Rao", every.mean().item()
        error = every.std().item() / len(every) ** 0.5
        checks.append(within(told, mean, error, 1, resolution=0.15, bias=0.1, part=part))
    return checks


def rate_evidence(
    checks: Sequence[Check],
    studies: Studies,
    losses: tuple[str, ...] = ("raw", "quotient"),
    **told: Any,
) -> Evidence:
    """Checks with every slope in words, the fits and a figure; `told` are further fields."""
    measured = "; ".join(f"{name}: {words(one)}" for name, one in studies.items())
    fields = {"measured": measured, "figure": rate_chart(studies, losses)}
    return Evidence(checks, **(fields | told), fits=counted(studies))


def counted(studies: Studies) -> Fits:
    """Fits of all studies, and how many converged."""
    total = sum(one.problems for one in studies.values())
    return Fits(total - sum(one.failed for one in studies.values()), total)


def regression_rate(
    studies: Studies, others: Sequence[Check] = (), note: str = "", **told: Any
) -> Evidence:
    """‖f - f*‖ falls like n^-1/2 in every study."""
    fields = {
        "paper": -0.5,
        "measured": "; ".join(
            f"{name}: {law_of(one, 'function')}" for name, one in studies.items()
        ),
        "note": note,
    }
    checks = [*each_parametric("slope of ‖f - f*‖", studies, "function"), *others]
    return rate_evidence(checks, studies, ("function",), **(fields | told))


def up_to_symmetry(studies: Studies, paper: Value = -0.5, **told: Any) -> Evidence:
    """The raw loss falls like n^-1/2, under the condition that unseen directions are left out."""
    checks = [
        *each_parametric("raw slope", studies, "raw"),
        *each_parametric("quotient slope", studies, "quotient", "condition"),
    ]
    return rate_evidence(checks, studies, paper=paper, **told)


NO_START = "the paper's runs state no start radius, and the loss that they plot depends on it"


def printed_slopes(
    printed: Mapping[str, float],
    studies: Studies,
    radii: tuple[float, float],
    others: Sequence[Check],
    **told: Any,
) -> Evidence:
    """A figure of the paper's own runs: open, with what the start does to the loss that it plots.

    Args:
        printed: the slope of each study in the paper.
        studies: by the same names, each from the two start radii.
        radii: a small one and a large one.
        others: further checks.
        told: fields of the evidence.
    """
    checks = [unmeasured(f"raw slope, {name}", slope, NO_START) for name, slope in printed.items()]
    rises, parts = [], []
    for name in printed:
        near_, far = (studies[name].rate("raw", radius) for radius in radii)
        rises.append(far.slope - near_.slope)
        parts.append(f"{name}: raw {near_} from r = {radii[0]:g}, {far} from r = {radii[1]:g}")
    told_as = "largest rise of a raw slope with the start radius"
    checks.append(at_least(told_as, max(rises), 0.1, part="corrected"))
    paper = ", ".join(f"{name} {slope}" for name, slope in printed.items())
    fields: dict[str, Any] = {"paper": paper, "measured": "; ".join(parts)} | told
    return rate_evidence([*checks, *others], studies, **fields)
