"""Evidence for claims about rates, from small studies: papers 2 and 4 test their rates alike.

Studies are small enough for the ledger: two or three experts, well-conditioned truths. The
published designs (d = 32 and d = 8, hundreds of parameters) run by `tieline rates`; the laws are
the same at this size. Losses are the papers' own (`raw`), the same up to what the data cannot see
(`quotient`), and ‖f - f*‖ (`function`).

small_study        a study of a small model
each_parametric    every study's loss falls like n^-1/2
each_falling       every study's loss falls like a power
rate_evidence      checks with the slopes in words and the figure
regression_rate    the claim that ‖f - f*‖ falls like n^-1/2
up_to_symmetry     the claim that a loss does, unseen directions being left out
not_slow           the claim that a loss is slow, and checks that it is not
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tieline.estimation.fit import lift, population_minimiser
from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters
from tieline.estimation.rate_plan import RatePlan, as_case
from tieline.estimation.rates import LOSSES, RateStudy, rate_study
from tieline.papers.claim import (
    Chart,
    Check,
    Evidence,
    Part,
    Run,
    Value,
    at_least,
    at_most,
    chart,
    dots,
    near,
)

__all__ = [
    "SLOW",
    "each_falling",
    "each_parametric",
    "not_slow",
    "parametric",
    "rate_chart",
    "rate_evidence",
    "regression_rate",
    "small_plan",
    "small_study",
    "up_to_symmetry",
    "words",
]

DRAWS = 60
"""Number of truths of which the best conditioned is taken."""
WINDOW = {"raw": 0.14, "quotient": 0.14, "function": 0.1}
"""Largest deviation of a slope from -1/2: about three standard errors."""


def small_plan(
    run: Run,
    model: MoEModel,
    *,
    extra: int = 0,
    sparse: bool = False,
    source: MoEModel | None = None,
    **grid: Any,
) -> RatePlan:
    """Plan a study of the ledger.

    Args:
        run: mode and seed.
        model: the family, with the truth's number of experts.
        extra: number of additional experts that are fitted.
        sparse: whether the last expert of the truth has a zero row and bias.
        source: the family of the data, if another; losses are then against Ḡ.
        grid: fields of `RatePlan` to set.
    """
    sizes = (500, 4000) if run.fast else (1000, 3162, 10_000, 31_623)
    fits = {"repetitions": run.size(12 if extra else 20, 32), "iterations": run.size(40, 200)}
    given = {"sizes": sizes, "seed": run.seed, **fits, **grid}
    drawn = as_case(source or model, draws=DRAWS, **given).plan
    truth = _without_gate(drawn.truth) if sparse else drawn.truth
    fitted = model.with_experts(model.n_experts + extra)
    plan = replace(drawn, model=fitted, truth=truth, reference=truth, loss=_loss(model, extra))
    return plan if source is None else replace(plan, reference=_population(run, plan))


def small_study(run: Run, model: MoEModel, **options: Any) -> RateStudy:
    """Run the study of `small_plan` in this process."""
    return rate_study(small_plan(run, model, **options), executor="serial", quiet=True)


def parametric(
    name: str, study: RateStudy, loss: str, part: Part = "paper", radius: float | None = None
) -> Check:
    """Check that a loss falls like n^-1/2."""
    return near(name, study.rate(loss, radius).slope, -0.5, WINDOW[loss], part=part)


def words(study: RateStudy, radius: float | None = None) -> str:
    """Return the three slopes with their intervals."""
    return ", ".join(f"{loss} {study.rate(loss, radius)}" for loss in LOSSES)


def rate_chart(studies: dict[str, RateStudy], losses: tuple[str, ...]) -> Chart:
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


SLOW = -0.2
"""A slope above this one counts as "slower than any polynomial"."""

Studies = Mapping[str, RateStudy]


def each_parametric(what: str, studies: Studies, loss: str, part: Part = "paper") -> list[Check]:
    """A check for each study that its loss falls like n^-1/2."""
    return [parametric(f"{what}, {name}", one, loss, part) for name, one in studies.items()]


def each_falling(
    what: str,
    studies: Studies,
    loss: str = "quotient",
    limit: float = -0.3,
    part: Part = "corrected",
) -> list[Check]:
    """A check for each study that the slope of its loss is at most `limit`."""
    return [
        at_most(f"{what}, {name}", one.rate(loss).slope, limit, part=part)
        for name, one in studies.items()
    ]


def rate_evidence(
    checks: Sequence[Check],
    studies: Studies,
    losses: tuple[str, ...] = ("raw", "quotient"),
    **told: Any,
) -> Evidence:
    """Checks with every slope in words and a figure of the losses; `told` are further fields."""
    measured = "; ".join(f"{name}: {words(one)}" for name, one in studies.items())
    fields = {"measured": measured, "figure": rate_chart(dict(studies), losses)}
    return Evidence(checks, **(fields | told))


def regression_rate(studies: Studies, note: str = "") -> Evidence:
    """‖f - f*‖ falls like n^-1/2 in every study."""
    return rate_evidence(
        each_parametric("slope of ‖f - f*‖", studies, "function"),
        studies,
        ("function",),
        paper=-0.5,
        measured="; ".join(f"{name}: {one.rate('function')}" for name, one in studies.items()),
        note=note,
    )


def up_to_symmetry(studies: Studies, paper: Value = -0.5, **told: Any) -> Evidence:
    """The raw loss falls like n^-1/2, under the condition that unseen directions are left out."""
    checks = [
        *each_parametric("raw slope", studies, "raw"),
        *each_parametric("quotient slope", studies, "quotient", "condition"),
    ]
    return rate_evidence(checks, studies, paper=paper, **told)


def not_slow(slow: str, studies: Studies, others: Sequence[Check], **told: Any) -> Evidence:
    """The paper's claim that the quotient loss of the study `slow` is slow, with other checks."""
    slope = studies[slow].rate("quotient").slope
    claimed = at_least(f"quotient slope, {slow}, is slow", slope, SLOW)
    return rate_evidence([claimed, *others], studies, **told)
