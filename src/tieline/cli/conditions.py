"""Conditions on the named numbers of a result, for scripts and continuous integration.

    condition  =  metric comparison number
    metric     =  name [ "@" level ] [ ":" which ]      flip@bf16, flip@0.01:any, gap@0.5, dead
    comparison =  ">" | ">=" | "<" | "<="
    number     =  a decimal number, 0.02 or 2e-2 or 2%

A condition that holds makes the run fail. Nothing is evaluated as code.
"""

import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from tieline.core.errors import require

__all__ = ["Condition", "check_names", "held", "parse_condition"]

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_METRIC = r"[a-z][a-z_]*(?:@[A-Za-z0-9_.+-]+)?(?::[a-z]+)?"
_CONDITION = re.compile(rf"\s*({_METRIC})\s*(>=|<=|>|<)\s*({_NUMBER})\s*(%?)\s*", re.ASCII)


@dataclass(frozen=True)
class Condition:
    """A metric compared with a number; `text` is how the user wrote it."""

    text: str
    metric: str
    comparison: str
    number: float

    def holds(self, value: float) -> bool:
        """Whether the condition is true of this value of its metric."""
        return COMPARISONS[self.comparison](value, self.number)


def parse_condition(text: str) -> Condition:
    """Read a condition such as `flip@bf16 > 0.02`."""
    match = _CONDITION.fullmatch(text)
    require(
        match is not None,
        f"cannot read the condition {text!r}: write METRIC > NUMBER (or >=, <, <=), such as "
        "flip@bf16>0.02",
    )
    assert match is not None
    metric, comparison, number, sign = match.groups()
    return Condition(text.strip(), metric, comparison, float(number) / (100 if sign else 1))


def check_names(conditions: Collection[Condition], known: Collection[str]) -> None:
    """Refuse conditions on metrics that are not among the known ones, listing these."""
    for condition in conditions:
        require(
            condition.metric in known,
            f"{condition.text!r}: no metric {condition.metric!r} here; known: "
            f"{', '.join(sorted(known))}",
        )


def held(
    conditions: Collection[Condition], metrics: Mapping[str, float]
) -> list[tuple[Condition, float]]:
    """The conditions that are true of these metrics, each with the metric's value."""
    check_names(conditions, metrics)
    values = [(condition, metrics[condition.metric]) for condition in conditions]
    return [(condition, value) for condition, value in values if condition.holds(value)]
