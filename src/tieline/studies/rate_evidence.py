"""Evidence of rate claims, from studies by name: papers 2 and 4 test their rates alike.

each_parametric    every study's loss falls like n^-1/2
each_falling       every study's loss falls like a power
rate_evidence      checks with the slopes in words and the figure
regression_rate    the claim that ‖f - f*‖ falls like n^-1/2
up_to_symmetry     the claim that a loss does, on condition that unseen directions are left out
not_slow           the claim that a loss is slow, and checks that it is not
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tieline.estimation.rates import RateStudy
from tieline.studies.checks import at_least, at_most
from tieline.studies.claim import Check, Evidence, Part, Value
from tieline.studies.small_rates import parametric, rate_chart, words

__all__ = [
    "SLOW",
    "each_falling",
    "each_parametric",
    "not_slow",
    "rate_evidence",
    "regression_rate",
    "up_to_symmetry",
]

SLOW = -0.2
"""A slope above this one is slow: "slower than any polynomial" is tested so."""

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
    """The raw loss falls like n^-1/2; on condition that unseen directions are left out."""
    checks = [
        *each_parametric("raw slope", studies, "raw"),
        *each_parametric("quotient slope", studies, "quotient", "condition"),
    ]
    return rate_evidence(checks, studies, paper=paper, **told)


def not_slow(slow: str, studies: Studies, others: Sequence[Check], **told: Any) -> Evidence:
    """The paper's claim that the quotient loss of the study `slow` is, with other checks."""
    slope = studies[slow].rate("quotient").slope
    claimed = at_least(f"quotient slope, {slow}, is slow", slope, SLOW)
    return rate_evidence([claimed, *others], studies, **told)
